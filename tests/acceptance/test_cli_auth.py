"""`headrace auth`, used as an administrator uses it."""

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.acceptance.test_cli_broker import error_of, run, text_of, told

import headrace
from headrace.server import EmbeddedServer


@pytest.fixture
def tcp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A broker of this test alone, whose address commands use."""
    for name in ("HEADRACE_TOKEN", "HEADRACE_TOKEN_FILE", "HEADRACE_CONTEXT"):
        monkeypatch.delenv(name, raising=False)
    server = EmbeddedServer(tmp_path / "data", host="127.0.0.1", port=0, unix_socket=f"{tmp_path}/s")
    address = next(url for url in server._server.listening if url.startswith("headrace://"))
    monkeypatch.setenv("HEADRACE_URL", address)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    yield address
    server.close()


def test_an_administrator_sets_up_security_and_gives_access(
    tcp: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (made,) = told("auth", "init", "--no-certificates")
    assert made["enabled"]
    assert error_of(run("topic", "list", code=1))[1] == "not_authenticated"
    monkeypatch.setenv("HEADRACE_TOKEN", made["token"])
    assert "administrator" in text_of("auth", "whoami")
    run("auth", "role", "set", "desk", "publish:topic:orders,orders.*")
    run("auth", "bind", "desk", "ada")
    saved = tmp_path / "ada.token"
    created = run("auth", "token", "create", "ada", "--save", str(saved), "--expires", "1d", "--json")
    secret = saved.read_text().strip()
    assert saved.stat().st_mode & 0o777 == 0o600
    assert secret.encode() not in created.stdout + created.stderr
    listed = run("auth", "token", "list", "--json").stdout
    assert {json.loads(line)["identity"] for line in listed.splitlines()} == {"admin", "ada"}
    assert secret.rpartition("_")[2].encode() not in listed
    assert told("auth", "can", "ada", "publish", "topic", "orders.eu")[0]["allowed"]
    assert run("auth", "can", "ada", "delete", "topic", "orders", code=1).stdout.startswith(b"no: ada may not delete")
    assert "ada" in text_of("auth", "role", "list")
    run("topic", "create", "orders")
    run("context", "add", "desk", tcp, "--token-file", str(saved))
    monkeypatch.delenv("HEADRACE_TOKEN")
    run("publish", "orders", "x", "--context", "desk")
    assert error_of(run("topic", "delete", "orders", "--yes", "--context", "desk", code=1))[1] == "forbidden"
    monkeypatch.setenv("HEADRACE_TOKEN", made["token"])
    token_id = secret.split("_")[1]
    assert f"revoked {token_id} of ada" in text_of("auth", "token", "revoke", token_id)
    monkeypatch.delenv("HEADRACE_TOKEN")
    assert error_of(run("publish", "orders", "x", "--context", "desk", code=1))[1] == "token_revoked"
    with headrace.connect(f"headrace+unix://{tmp_path}/s") as local:  # nobody is locked out
        assert local.auth.describe().enabled


@pytest.mark.usefixtures("tcp")
def test_tenants_of_tokens_and_roles_are_named_with_in_tenant(tmp_path: Path) -> None:
    shown = text_of("auth", "init", "--no-certificates", "--save", str(tmp_path / "admin.token"))
    assert "--in-tenant default" in shown
    for command in (
        ("token", "create", "ada"),
        ("can", "ada", "publish", "topic", "orders"),
        ("bind", "publisher", "ada"),
        ("unbind", "publisher", "ada"),
    ):
        refused = run("auth", *command, "--tenant", "acme", code=2)
        assert b"write --in-tenant acme" in refused.stderr


@pytest.mark.usefixtures("tcp")
def test_a_grant_names_patterns() -> None:
    for wrong in ("publish:topic:", "publish:topic", "publish:topic:orders,", "publish::orders", "publish"):
        assert b"with * for all names" in run("auth", "role", "set", "desk", wrong, code=2).stderr
        assert b"with * for all names" in run("auth", "token", "create", "ada", "--scope", wrong, code=2).stderr
    run("auth", "role", "set", "desk", "publish:topic:*")


def test_a_saved_token_is_not_replaced_without_being_told(tcp: str, tmp_path: Path) -> None:
    path = tmp_path / "admin.token"
    run("auth", "init", "--no-certificates", "--save", str(path))
    before = path.read_text()
    for command in (("init", "--no-certificates"), ("token", "create", "ada")):
        refused = run("auth", *command, "--save", str(path), "--token-file", str(path), code=1)
        assert b"--force" in refused.stderr
        assert b"stays valid" in refused.stderr
    assert path.read_text() == before
    with headrace.connect(tcp, token_file=path) as bus:
        assert len(bus.auth.tokens()) == 1
    run("auth", "token", "create", "admin", "--save", str(path), "--token-file", str(path), "--force")
    assert path.read_text() != before


def test_changes_that_end_ones_own_session_are_reported_as_done(tcp: str, tmp_path: Path) -> None:
    assert "security is enabled" in text_of("auth", "enable")
    with headrace.connect(f"headrace+unix://{tmp_path}/s") as local:
        local.auth.bind("administrator", "admin")
        token = local.auth.create_token("admin")
    path = tmp_path / "admin.token"
    path.write_text(token.token)
    given = ("--connect", tcp, "--token-file", str(path))
    assert "no more" in text_of("auth", "unbind", "administrator", "admin", *given)
    with headrace.connect(f"headrace+unix://{tmp_path}/s") as local:
        local.auth.bind("administrator", "admin")
    assert "revoked" in text_of("auth", "token", "revoke", token.info.id, *given)


def test_a_consumer_on_the_command_line_ends_when_its_token_is_revoked(tcp: str, tmp_path: Path) -> None:
    with headrace.connect(f"headrace+unix://{tmp_path}/s") as local:
        local.publish("orders", b"1")
        local.auth.bind("consumer", "ada")
        created = local.auth.create_token("ada")
        local.auth.enable()
        path = tmp_path / "ada.token"
        path.write_text(created.token)

        def revoke() -> None:
            while not local.groups():  # it has not joined yet
                time.sleep(0.05)
            local.auth.revoke(created.info.id)

        revoking = threading.Thread(target=revoke)
        revoking.start()
        ended = run("tail", "orders", "--group", "g", "--connect", tcp, "--token-file", str(path), "--json", code=1)
        revoking.join()
        assert b"token_revoked" in ended.stderr


def test_what_others_made_before_does_not_count_unasked(tcp: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with headrace.connect(tcp) as anybody:
        made = anybody.auth.create_token("mallory")
        over = anybody.auth.create_token("former")
        anybody.auth.revoke(over.info.id)
        anybody.auth.bind("administrator", "mallory")
    for command in ("init", "enable"):
        refused = run("auth", command, "--json", code=1)
        content = json.loads(refused.stdout)
        assert not content["enabled"]
        assert [one["id"] for one in content["tokens"]] == [made.info.id]
        assert [(one["role"], one["identity"]) for one in content["bindings"]] == [("administrator", "mallory")]
        shown = run("auth", command, code=1).stdout.decode()
        assert made.info.id in shown
        assert "--keep" in shown
    assert "there are no tokens" not in text_of("auth", "token", "list")
    (kept,) = told("auth", "init", "--no-certificates", "--keep")
    assert kept["enabled"]
    assert kept["tokens"][0]["identity"] == "mallory"
    monkeypatch.setenv("HEADRACE_TOKEN", kept["token"])
    (again,) = told("auth", "init", "--no-certificates", "--identity", "second")  # they count already
    assert again["enabled"]
