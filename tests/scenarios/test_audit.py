"""The audit trail on real servers: gateways, the command line, copies without a broker, and a killed broker."""

import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from tests.http_client import HttpClient, also_http, native_url_of, needs_http, url_of

import headrace
from headrace.errors import Forbidden, NotAuthenticated, TokenRevoked
from headrace.model.audit import parse_head
from headrace.server import EmbeddedServer

AUDIT = "headrace.audit"


class Audited:
    """A broker with security enabled, on TCP, on a Unix socket and over HTTP."""

    def __init__(self, place: Path) -> None:
        self.is_closed = False
        self.socket = f"headrace+unix://{place}/s"
        listening = {"host": "127.0.0.1", "port": 0, "unix_socket": f"{place}/s", **also_http()}
        self.server = EmbeddedServer(place / "data", **listening)
        self.tcp = native_url_of(self.server)
        self.http = url_of(self.server) if also_http() else ""
        self.admin = headrace.connect(self.socket)
        self.admin.create_topic("orders")
        self.admin.auth.bind("consumer", "ada")
        self.admin.auth.enable()
        self.token = self.admin.auth.create_token("ada").token

    def close(self) -> None:
        """Stop, if it runs."""
        if not self.is_closed:
            self.is_closed = True
            self.admin.close()
            self.server.close()


@pytest.fixture
def broker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Audited]:
    for name in ("HEADRACE_TOKEN", "HEADRACE_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)
    audited = Audited(tmp_path)
    yield audited
    audited.close()


def headrace_command(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "headrace", *words], capture_output=True, text=True, check=False)


def partition_directory(data: Path) -> Path:
    """The directory of the trail of the default tenant."""
    (segment,) = [path for path in data.rglob("*.seg") if b'"previous"' in path.read_bytes()]
    return segment.parent


def test_who_came_in_and_what_they_tried_is_read_like_any_topic(broker: Audited) -> None:
    with headrace.connect(broker.tcp, token=broker.token) as bus:
        with pytest.raises(Forbidden):
            bus.delete_topic("orders")
        with pytest.raises(Forbidden):
            bus.audit.describe()
    with pytest.raises(NotAuthenticated), headrace.connect(broker.tcp, token="hr_0123456789ab_" + "x" * 43) as bus:
        bus.info()
    broker.admin.create_topic("later")  # answered when all records before it are stored
    with broker.admin.subscribe(AUDIT, start="earliest", timeout=1) as messages:
        records = [json.loads(message.value) for message in messages]
    told = [(one["identity"], one["gateway"], one["action"], one["outcome"]) for one in records]
    assert ("ada", "native", "Login", "done") in told
    assert ("ada", "native", "TopicDelete", "forbidden") in told
    assert ("", "native", "Login", "not_authenticated") in told
    assert all(one["address"].startswith("127.0.0.1:") for one in records if one["identity"] == "ada")
    report = broker.admin.audit.verify(from_start=True)
    assert report.intact
    assert report.records == len(records)


@needs_http
def test_actions_over_http_are_recorded_with_their_gateway(broker: Audited) -> None:
    admin = broker.admin.auth.create_token("admin").token
    broker.admin.auth.bind("administrator", "admin")
    bearer = {"authorization": f"Bearer {admin}"}
    with closing(HttpClient(broker.http)) as client:
        assert client.ask("POST", "/v1/topics", {"topic": "news"}, bearer).status == 201
        assert client.ask("GET", "/v1/audit", headers=bearer).json["enabled"] is True
    last = [one for one in broker.admin.audit.history() if one.action == "TopicCreate"][-1]
    assert (last.identity, last.gateway, last.resources) == ("admin", "http", ["create topic news"])


def test_an_auditor_reads_the_trail_and_nothing_else(broker: Audited) -> None:
    token = broker.admin.auth.create_token("eve").token
    broker.admin.auth.bind("auditor", "eve")
    with headrace.connect(broker.tcp, token=token) as bus:
        assert bus.audit.verify().intact
        with pytest.raises(Forbidden), bus.subscribe("orders", start="earliest", timeout=1) as messages:
            list(messages)


def test_the_command_verifies_shows_and_finds_what_was_changed(broker: Audited, tmp_path: Path) -> None:
    for number in range(3):
        broker.admin.create_topic(f"topic-{number}")
    done = headrace_command("audit", "verify", "--connect", broker.socket)
    assert done.returncode == 0, done.stderr
    head = done.stdout.split("head ")[1].strip()
    assert parse_head(head).number >= 5
    assert headrace_command("audit", "verify", "--connect", broker.socket, "--head", head).returncode == 0
    shown = headrace_command("audit", "show", "--connect", broker.socket, "--action", "TopicCreate", "--json")
    assert [json.loads(line)["resources"] for line in shown.stdout.splitlines()][-1] == ["create topic topic-2"]

    broker.close()
    copy = tmp_path / "copy"
    shutil.copytree(partition_directory(tmp_path / "data"), copy)
    assert headrace_command("audit", "verify", "--log", str(copy)).returncode == 0
    assert headrace_command("audit", "verify", "--log", str(copy), "--head", head).returncode == 0
    forged = head.replace(":", ":0" if head[-1] != "0" else ":1")[:-1]
    found = headrace_command("audit", "verify", "--log", str(copy), "--head", forged, "--json")
    assert found.returncode == 3
    assert json.loads(found.stdout)["findings"][0]["kind"] == "altered"
    (segment,) = copy.glob("*.seg")
    content = bytearray(segment.read_bytes())
    at = content.index(b"topic-1")
    content[at : at + 7] = b"topic-9"
    segment.write_bytes(content)
    found = headrace_command("audit", "verify", "--log", str(copy))
    assert found.returncode == 3
    assert "NOT intact" in found.stdout


@contextmanager
def served(place: Path, ending: signal.Signals) -> Iterator[headrace.Bus]:
    """A broker in a process of its own, which ends by a signal."""
    command = [sys.executable, "-m", "headrace", "serve", "--data", f"{place}/data", "--listen", f"unix://{place}/s"]
    process = subprocess.Popen([*command, "--audit", "yes"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert process.stdout is not None
    try:
        process.stdout.readline()
        with headrace.connect(f"headrace+unix://{place}/s", timeout=30) as bus:
            yield bus
            process.send_signal(ending)
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def test_a_killed_broker_goes_on_with_the_chain(tmp_path: Path) -> None:
    created: list[str] = []
    for round_number in range(3):
        with served(tmp_path, signal.SIGKILL) as bus:
            for number in range(10):
                created.append(bus.create_topic(f"topic-{round_number}-{number}").topic)
    with served(tmp_path, signal.SIGTERM) as bus:
        report = bus.audit.verify(from_start=True)
        records = bus.audit.history()
    assert report.intact, report.findings
    told = [one.resources for one in records if one.action == "TopicCreate"]
    assert told == [[f"create topic {name}"] for name in created], "every answered action is in the trail"


def test_a_revoked_token_is_a_refused_login(broker: Audited) -> None:
    (info,) = broker.admin.auth.tokens("ada")
    broker.admin.auth.revoke(info.id)
    with pytest.raises(TokenRevoked), headrace.connect(broker.tcp, token=broker.token) as bus:
        bus.info()
    broker.admin.create_topic("later")  # answered when all records before it are stored
    last = [one for one in broker.admin.audit.history() if one.action == "Login"][-1]
    assert last.outcome == "token_revoked"
