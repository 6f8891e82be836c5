"""Other implementations of Standard Webhooks verify what the broker sends; nothing of HTTP is loaded before."""

import subprocess
import sys

import pytest
from tests.known import ENVIRONMENT
from tests.npm_packages import needs_npm, run_node
from tests.webhook_stage import needs_outgoing, sending_bus, threaded_receiver

import headrace
from headrace.errors import PluginUnavailable
from headrace.push import service

pytestmark = needs_outgoing

VERIFY = """
const { Webhook } = require("standardwebhooks");
answer(given.map(({secret, body, headers}) => {
  try { return new Webhook(secret).verify(body, headers); } catch (error) { return error.message; }
}));
"""


@needs_npm
def test_the_library_of_npm_verifies_both_secrets_and_refuses_changes() -> None:
    with sending_bus() as bus, threaded_receiver() as receiver:
        (first,) = bus.webhooks.set("a", "orders", receiver.url).secrets
        (second,) = bus.webhooks.alter("a", rotate=True).secrets
        bus.publish("orders", "größe €".encode(), key="k")
        (request,) = receiver.wait_for(1)
    body = request.body.decode()
    sent = {"body": body, "headers": request.headers}
    found = run_node(
        "standardwebhooks@1.1.0",
        VERIFY,
        [{"secret": first, **sent}, {"secret": second, **sent}, {"secret": first, **sent, "body": body + " "}],
    )
    assert [one["value"] for one in found[:2]] == ["größe €", "größe €"]
    assert "No matching signature" in found[2]


def test_nothing_of_http_is_loaded_before_the_first_webhook() -> None:
    program = """
import sys, headrace
bus = headrace.open(":memory:")
assert bus.webhooks.list() == []
loaded = [name for name in sys.modules if name.split(".")[0] in ("httpx2", "httpcore2")]
loaded += [name for name in ("headrace.push.http_client", "headrace.push.webhook_worker") if name in sys.modules]
bus.webhooks.set("a", "orders", "https://receiver.invalid/")
assert "headrace.push.webhook_worker" in sys.modules
bus.close()
print(loaded)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=ENVIRONMENT, check=True)
    assert done.stdout == "[]\n"


def test_without_the_extra_a_webhook_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "_PACKAGE", "no_such_package")
    with headrace.open(":memory:") as bus:
        with pytest.raises(PluginUnavailable, match=r"pip install 'headrace\[http\]'"):
            bus.webhooks.set("a", "orders", "https://receiver.invalid/")
        assert (bus.webhooks.list(), bus.topics(), bus.subscriptions()) == ([], [], [])


def test_without_the_extra_a_broker_starts_and_keeps_its_webhooks(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory, caplog: pytest.LogCaptureFixture
) -> None:
    data = str(tmp_path_factory.mktemp("data"))
    with headrace.open(data) as bus:
        bus.webhooks.set("a", "orders", "https://receiver.invalid/")
    monkeypatch.setattr(service, "_PACKAGE", "no_such_package")
    with headrace.open(data) as bus:
        bus.publish("orders", b"1")
        info = bus.webhooks.describe("a")
        assert info.ready == 1
        assert "headrace[http]" in info.error
        assert "install headrace[http]" in caplog.text
