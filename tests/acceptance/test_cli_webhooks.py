"""`headrace webhook` from definition to deletion, in texts and as JSON."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.acceptance.test_cli_routes import run
from tests.http_client import native_url_of
from tests.webhook_stage import ThreadedReceiver, needs_outgoing, threaded_receiver, until

import headrace
from headrace.server import EmbeddedServer

pytestmark = needs_outgoing


@pytest.fixture
def at() -> Iterator[tuple[str, str]]:
    server = EmbeddedServer(":memory:", listen=["headrace://127.0.0.1:0"], webhook_networks=["loopback"])
    yield "--connect", native_url_of(server)
    server.close()


@pytest.fixture
def receiver() -> Iterator[ThreadedReceiver]:
    with threaded_receiver() as served:
        yield served


def test_a_webhook_on_the_command_line(at: tuple[str, str], receiver: ThreadedReceiver, tmp_path: Path) -> None:
    made = run("webhook", "set", "billing", "orders", receiver.url, "--deliveries-max", "3", *at)
    assert made.stdout.splitlines()[0] == f"billing: from orders to {receiver.url}"
    assert made.stdout.splitlines()[1].startswith("secret  whsec_")
    assert "not shown again" in made.stderr
    with headrace.connect(at[1]) as bus:
        bus.publish("orders", b"a")
        until(lambda: bus.webhooks.describe("billing").delivered == 1)
    listed = run("webhook", "list", *at).stdout.splitlines()
    assert listed[1].split() == ["billing", "webhook", "orders", receiver.url, "active", "closed", "1"]
    assert run("webhook", "list", "--names", *at).stdout == "billing\n"
    described = run("webhook", "describe", "billing", *at).stdout
    assert "deliveries_max  3" in described
    assert "whsec_" not in described
    (logged,) = (
        json.loads(line) for line in run("webhook", "deliveries", "billing", "--json", *at).stdout.splitlines()
    )
    assert (logged["status"], logged["outcome"]) == (200, "delivered")
    assert "0:0" in run("webhook", "deliveries", "billing", *at).stdout
    assert run("webhook", "pause", "billing", "--reason", "tea", *at).stdout == "billing is paused\n"
    assert "paused: tea" in run("webhook", "describe", "billing", *at).stdout
    assert "answered 200" in run("webhook", "test", "billing", *at).stdout
    assert run("webhook", "resume", "billing", *at).stdout == "billing is active\n"
    secrets = tmp_path / "secrets"
    secrets.write_text("whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw\n")
    altered = run("webhook", "alter", "billing", "--secret-file", str(secrets), "--header", "x-a=1", "--json", *at)
    content = json.loads(altered.stdout)
    assert (content["secrets"], content["secret_count"], content["headers"]) == ([], 1, {"x-a": "(hidden)"})
    rotated = run("webhook", "alter", "billing", "--rotate", "--json", *at)
    assert len(json.loads(rotated.stdout)["secrets"]) == 1
    receiver.statuses = ["200 OK\r\nRetry-After: 3600"]
    with headrace.connect(at[1]) as bus:
        bus.publish("orders", b"b")
        until(lambda: bus.webhooks.describe("billing").delivered == 2)
    described = run("webhook", "describe", "billing", *at).stdout
    assert "closed, held until 20" in described
    assert "(hidden)" in described
    receiver.statuses = [500]
    assert "answered 500" in run("webhook", "test", "billing", *at, code=1).stdout
    assert run("webhook", "delete", "billing", *at).stdout == "deleted billing\n"
    assert "no webhook billing" in run("webhook", "describe", "billing", *at, code=1).stderr
