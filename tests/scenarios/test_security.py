"""Security on real servers: credentials over every transport, revocation while streaming, restarts, no lock-out."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from tests.http_client import HttpClient, also_http, native_url_of, needs_http, url_of

import headrace
from headrace.errors import (
    Forbidden,
    InvalidArgument,
    NotAuthenticated,
    SecurityRequired,
    TokenExpired,
    TokenRevoked,
    VersionConflict,
)
from headrace.server import EmbeddedServer


class Secured:
    """A broker with security enabled, on TCP, on a Unix socket and over HTTP."""

    def __init__(self, place: Path) -> None:
        self.socket = f"headrace+unix://{place}/s"
        listening = {"host": "127.0.0.1", "port": 0, "unix_socket": f"{place}/s", **also_http()}
        self.server = EmbeddedServer(place / "data", **listening)
        self.tcp = native_url_of(self.server)
        self.http = url_of(self.server) if also_http() else ""
        self.admin = headrace.connect(self.socket)
        self.admin.publish("orders", b"first")
        self.admin.publish("secrets", b"hidden")
        self.admin.auth.set_role("reader", [headrace.Grant(["consume"], "topic", ["orders"])])
        self.admin.auth.bind("reader", "ada")
        self.admin.auth.enable()
        self.created = self.admin.auth.create_token("ada")
        self.token = self.created.token

    def close(self) -> None:
        """Stop."""
        self.admin.close()
        self.server.close()


@pytest.fixture
def broker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Secured]:
    for name in ("HEADRACE_TOKEN", "HEADRACE_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)
    secured = Secured(tmp_path)
    yield secured
    secured.close()


def addresses(broker: Secured) -> list[str]:
    return [url for url in (broker.tcp, broker.socket, broker.http) if url]


def test_a_token_opens_what_its_roles_allow_over_every_transport(broker: Secured) -> None:
    for address in addresses(broker):
        with headrace.connect(address, token=broker.token) as bus:
            assert bus.auth.who_am_i().identity == "ada"
            with bus.subscribe("orders", start="earliest") as messages:
                assert next(iter(messages)).value == b"first"
            assert [info.topic for info in bus.topics()] == ["orders"]
            with pytest.raises(Forbidden):
                bus.publish("orders", b"x")
            with pytest.raises(Forbidden):
                bus.describe_topic("secrets")
            with pytest.raises(Forbidden):
                bus.auth.describe()
            assert broker.token not in repr(bus)


def test_loopback_needs_credentials_and_the_users_own_socket_none(broker: Secured) -> None:
    for address in addresses(broker):
        if address == broker.socket:
            with headrace.connect(address) as bus:
                assert (bus.auth.who_am_i().identity, bus.auth.who_am_i().roles) == ("local", ["administrator"])
            continue
        with pytest.raises(NotAuthenticated):
            headrace.connect(address, wait=5)
        with pytest.raises(NotAuthenticated) as refused:
            headrace.connect(address, token="hr_000000000000_" + "x" * 43)
        assert "x" * 43 not in str(refused.value)


def test_tokens_come_from_the_environment_and_from_files(
    broker: Secured, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "token"
    path.write_text(broker.token + "\n")
    with headrace.connect(broker.tcp, token_file=path) as bus:
        assert bus.auth.who_am_i().identity == "ada"
    with headrace.connect(f"{broker.tcp}?token_file={path}") as bus:
        assert bus.auth.who_am_i().identity == "ada"
        assert str(path) not in repr(bus)
    monkeypatch.setenv("HEADRACE_TOKEN_FILE", str(path))
    with headrace.connect(broker.tcp) as bus:
        assert bus.auth.who_am_i().identity == "ada"
    monkeypatch.setenv("HEADRACE_TOKEN", broker.token)
    with headrace.connect(broker.tcp) as bus:
        assert bus.auth.who_am_i().identity == "ada"
    with pytest.raises(InvalidArgument, match="never in an address"):
        headrace.connect(f"{broker.tcp}?token={broker.token}")
    with pytest.raises(InvalidArgument, match="not both"):
        headrace.connect(broker.tcp, token=broker.token, token_file=path)
    with pytest.raises(InvalidArgument, match="cannot be read"):
        headrace.connect(broker.tcp, token_file=tmp_path / "missing")


def test_a_revoked_token_ends_streams_that_are_open(broker: Secured) -> None:
    with headrace.connect(broker.tcp, token=broker.token) as bus, bus.subscribe("orders") as messages:
        failed: list[BaseException] = []

        def read() -> None:
            try:
                for _ in messages:
                    pass
            except BaseException as error:  # noqa: BLE001 whatever it is, the test looks at it
                failed.append(error)

        reading = threading.Thread(target=read)
        reading.start()
        time.sleep(0.2)
        broker.admin.auth.revoke(broker.created.info.id)
        reading.join(10)
        assert [type(error) for error in failed] == [TokenRevoked]
        with pytest.raises(TokenRevoked):
            bus.topics()


def _ask_until(deadline: float, bus: "headrace.Bus") -> None:
    while time.monotonic() < deadline:
        bus.topics()
        time.sleep(0.1)


def test_an_expired_token_is_not_accepted_and_ends_connections(broker: Secured) -> None:
    from datetime import timedelta

    created = broker.admin.auth.create_token("ada", expires=timedelta(seconds=1.5))
    with headrace.connect(broker.tcp, token=created.token) as bus:
        assert bus.auth.who_am_i().expires_us == created.info.expires_us
        deadline = time.monotonic() + 10
        with pytest.raises(TokenExpired):
            _ask_until(deadline, bus)
    with pytest.raises(TokenExpired):
        headrace.connect(broker.tcp, token=created.token)


def test_changes_of_roles_apply_to_open_connections(broker: Secured) -> None:
    with headrace.connect(broker.tcp, token=broker.token) as bus:
        with pytest.raises(Forbidden):
            bus.publish("orders", b"x")
        broker.admin.auth.bind("publisher", "ada")
        assert bus.publish("orders", b"x").offset == 1
        broker.admin.auth.unbind("publisher", "ada")
        with pytest.raises(Forbidden):
            bus.publish("orders", b"x")


def test_of_concurrent_changes_by_compare_and_set_one_wins(broker: Secured) -> None:
    version = broker.admin.auth.describe().version
    outcomes: list[object] = []

    def change(number: int) -> None:
        with headrace.connect(broker.socket) as bus:
            try:
                bus.auth.set_role(
                    f"role-{number}", [headrace.Grant(["consume"], "topic", ["*"])], expected_version=version
                )
                outcomes.append("done")
            except VersionConflict as error:
                outcomes.append(error.code)

    threads = [threading.Thread(target=change, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(map(str, outcomes)) == ["done", *["version_conflict"] * 5]
    assert broker.admin.auth.describe().version == version + 1


@needs_http
def test_http_refuses_by_status_and_ends_streams(broker: Secured) -> None:
    bearer = {"Authorization": f"Bearer {broker.token}"}
    with closing(HttpClient(broker.http)) as client:
        refused = client.get("/v1/topics/orders")
        assert (refused.status, refused.code) == (401, "not_authenticated")
        assert refused.headers["www-authenticate"] == "Bearer"
        there = client.ask("GET", "/v1/topics/secrets", None, bearer)
        missing = client.ask("GET", "/v1/topics/mystery", None, bearer)
        assert (there.status, there.code) == (missing.status, missing.code) == (403, "forbidden")
        assert there.json["detail"].replace("secrets", "mystery") == missing.json["detail"]
        assert client.ask("GET", "/v1/topics/orders", None, bearer).status == 200
    with closing(socket.create_connection(("127.0.0.1", int(broker.http.rpartition(":")[2])))) as plain:
        plain.settimeout(10)
        head = f"GET /v1/topics/orders/messages HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {broker.token}\r\n"
        plain.sendall(f"{head}Accept: text/event-stream\r\n\r\n".encode())
        received = b""
        while b"event-stream" not in received:
            received += plain.recv(65536)
        broker.admin.auth.revoke(broker.created.info.id)
        while b"token_revoked" not in received:
            more = plain.recv(65536)
            assert more, received
            received += more
    with closing(HttpClient(broker.http)) as client:
        assert client.ask("GET", "/v1/topics", None, bearer).code == "token_revoked"


@needs_http
def test_security_is_administered_over_http(broker: Secured) -> None:
    admin = {"Authorization": f"Bearer {broker.admin.auth.create_token('root').token}"}
    broker.admin.auth.bind("administrator", "root")
    with closing(HttpClient(broker.http)) as client:
        assert client.ask("GET", "/v1/auth/identity", None, admin).json["identity"] == "root"
        version = client.ask("GET", "/v1/auth", None, admin).json["version"]
        grants = {"grants": [{"verbs": ["publish"], "resource": "topic", "patterns": ["orders"]}]}
        stale = {**grants, "expected_version": version - 1}
        assert client.ask("PUT", "/v1/auth/roles/writer", stale, admin).status == 412
        assert client.ask("PUT", "/v1/auth/roles/writer", grants, admin).json["version"] == version + 1
        binding = {"binding": {"role": "writer", "identity": "bob"}}
        assert client.ask("POST", "/v1/auth/bindings", binding, admin).status == 200
        created = client.ask("POST", "/v1/auth/tokens", {"identity": "bob"}, admin)
        bob = {"Authorization": f"Bearer {created.json['token']}"}
        assert created.status == 201
        assert client.ask("POST", "/v1/topics/orders/messages", {"value": 1}, bob).status == 201
        question = {"identity": "bob", "verb": "publish", "resource": "topic", "name": "orders"}
        assert client.ask("POST", "/v1/auth/explanations", question, admin).json["allowed"]
        assert client.ask("GET", "/v1/auth/tokens?identity=bob", None, admin).json["tokens"][0]["identity"] == "bob"
        token_id = created.json["info"]["id"]
        assert client.ask("DELETE", f"/v1/auth/tokens/{token_id}", None, admin).status == 200
        assert client.ask("POST", "/v1/topics/orders/messages", {"value": 1}, bob).code == "token_revoked"
        assert client.ask("POST", "/v1/auth/binding-removals", binding, admin).status == 200
        assert client.ask("DELETE", "/v1/auth/roles/writer", None, admin).status == 200
        assert client.ask("GET", "/v1/auth", None, bob).status == 401


def serve(place: Path, *options: str) -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-m", "headrace", "serve", "--data", str(place / "data"), "--port", "0", *options]
    return subprocess.Popen(command, stderr=subprocess.PIPE, env={**os.environ, "HOME": str(place)})


def until(reached: Callable[[], Any], seconds: float = 20) -> Any:
    deadline = time.monotonic() + seconds
    while True:
        try:
            return reached()
        except headrace.errors.HeadraceError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


def test_definitions_survive_a_kill_and_nobody_is_locked_out(tmp_path: Path) -> None:
    address = f"headrace+unix://{tmp_path}/data/headrace.sock"
    process = serve(tmp_path)
    try:
        with until(lambda: headrace.connect(address)) as bus:
            bus.auth.bind("publisher", "ada")
            created = bus.auth.create_token("ada")
            bus.auth.enable()
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate()
    process = serve(tmp_path, "--host", "0.0.0.0")  # security is enabled: the network may be served
    try:
        with until(lambda: headrace.connect(address)) as bus:
            assert bus.auth.describe().enabled
            assert bus.auth.can("ada", "publish", "topic", "orders").allowed
            assert [token.id for token in bus.auth.tokens()] == [created.info.id]
            bus.create_topic("orders")
        with headrace.connect(address, token=created.token) as bus:
            assert bus.publish("orders", b"x").offset == 0
    finally:
        process.send_signal(signal.SIGKILL)
        _, log = process.communicate()
    assert created.token.encode() not in log


def test_a_network_is_not_served_without_security_unless_that_is_said(tmp_path: Path) -> None:
    for settings in (
        {"host": "0.0.0.0", "port": 0},
        {"listen": ["headrace://0.0.0.0:0"]},
        *([{"http_address": "0.0.0.0:0"}] if also_http() else []),
    ):
        with pytest.raises(SecurityRequired, match="headrace auth init"):
            EmbeddedServer(tmp_path / "data", **settings)
    EmbeddedServer(tmp_path / "data", host="0.0.0.0", port=0, insecure=True).close()
    process = serve(tmp_path, "--host", "0.0.0.0")
    _, log = process.communicate(timeout=30)
    assert (process.returncode, b"security_required" in log) == (1, True)


def test_an_asynchronous_client_has_the_same(broker: Secured) -> None:
    async def story() -> None:
        async with await headrace.connect_async(broker.tcp, token=broker.token) as bus:
            assert (await bus.auth.who_am_i()).identity == "ada"
            with pytest.raises(Forbidden):
                await bus.publish("orders", b"x")
            broker.admin.auth.revoke(broker.created.info.id)
            with pytest.raises(TokenRevoked):
                await ask_on(bus)

    async def ask_on(bus: "headrace.AsyncBus") -> None:
        while True:
            await bus.topics()
            await asyncio.sleep(0.05)

    asyncio.run(asyncio.wait_for(story(), 30))


def _ending(broker: Secured, use: Callable[["headrace.Bus"], object], end: Callable[[], object]) -> BaseException:
    """What ends the use of a bus after a change that takes its access away."""
    failed: list[BaseException] = []
    begun = threading.Event()

    def run() -> None:
        try:
            with headrace.connect(broker.tcp, token=broker.token) as bus:
                begun.set()
                use(bus)
        except BaseException as error:  # noqa: BLE001 whatever it is, the test looks at it
            failed.append(error)

    using = threading.Thread(target=run, daemon=True)
    using.start()
    assert begun.wait(10)
    time.sleep(0.3)
    end()
    using.join(15)
    assert not using.is_alive(), "it goes on without access"
    return failed[0]


def _consume(bus: "headrace.Bus") -> None:
    for _ in bus.subscribe("orders", group="g"):
        pass


def _work(bus: "headrace.Bus") -> None:
    queue = bus.queue("orders")
    for job in queue.jobs():
        queue.ack(job)


def _listen(bus: "headrace.Bus") -> None:
    for _ in bus.subjects.subscribe("news.*"):
        pass


def _produce(bus: "headrace.Bus") -> None:
    while True:
        bus.publish("orders", b"x")
        time.sleep(0.05)


def _serve(bus: "headrace.Bus") -> None:
    app = headrace.App(bus)
    app.serves("prices.get")(lambda request: request.value)
    app.run(stop_on_signals=False)


def _handle(bus: "headrace.Bus") -> None:
    app = headrace.App(bus)
    app.on("orders")(lambda job: job.value)
    app.run(stop_on_signals=False)


@pytest.mark.parametrize("use", [_consume, _work, _listen, _produce, _serve, _handle])
@pytest.mark.parametrize("change", ["revoke", "unbind"])
def test_whoever_loses_access_ends_with_that_error(
    broker: Secured, use: Callable[["headrace.Bus"], object], change: str
) -> None:
    broker.admin.auth.unbind("reader", "ada")
    broker.admin.auth.bind("developer", "ada")
    if change == "revoke":
        error = _ending(broker, use, lambda: broker.admin.auth.revoke(broker.created.info.id))
        assert isinstance(error, TokenRevoked)
    else:
        error = _ending(broker, use, lambda: broker.admin.auth.unbind("developer", "ada"))
        assert isinstance(error, Forbidden)


def test_a_refused_client_connects_again_when_it_is_used_with_another_token(broker: Secured, tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text(broker.token)
    broker.admin.auth.bind("publisher", "ada")
    with headrace.connect(broker.tcp, token_file=path) as bus:
        assert bus.publish("orders", b"x").offset == 1
        broker.admin.auth.revoke(broker.created.info.id)
        with pytest.raises(TokenRevoked):
            _publish_until(time.monotonic() + 10, bus)
        with pytest.raises(TokenRevoked):
            bus.publish("orders", b"y")
        path.write_text(broker.admin.auth.create_token("ada").token)
        assert bus.publish("orders", b"z").topic == "orders"
        assert bus.auth.who_am_i().identity == "ada"


def _publish_until(deadline: float, bus: "headrace.Bus") -> None:
    while time.monotonic() < deadline:
        bus.publish("orders", b"x")
        time.sleep(0.05)


def test_a_worker_runs_handlers_of_a_subscription_that_exists(broker: Secured) -> None:
    broker.admin.create_subscription("orders")
    broker.admin.auth.unbind("reader", "ada")
    broker.admin.auth.bind("worker", "ada")
    handled: list[bytes] = []
    with headrace.connect(broker.tcp, token=broker.token) as bus:
        app = headrace.App(bus)

        @app.on("orders")
        def handle(job: "headrace.Job") -> None:
            handled.append(job.value)
            app.stop()

        app.run(stop_on_signals=False)
    assert handled == [b"first"]


def test_security_stays_on_while_a_network_reaches_the_broker(tmp_path: Path) -> None:
    socket_url = f"headrace+unix://{tmp_path}/s"

    def served(host: str, **settings: bool) -> "closing[EmbeddedServer]":
        listening = {"host": host, "port": 0, "unix_socket": f"{tmp_path}/s", **also_http()}
        return closing(EmbeddedServer(tmp_path / "data", **listening, **settings))

    with served("127.0.0.1"), headrace.connect(socket_url) as bus:
        bus.auth.enable()
        bus.auth.enable(False)  # only this machine reaches it
        bus.auth.enable()
    with served("0.0.0.0") as server, headrace.connect(socket_url) as bus:
        with pytest.raises(SecurityRequired, match="--insecure"):
            bus.auth.enable(False)
        assert bus.auth.describe().enabled
        if also_http():
            bus.auth.bind("administrator", "root")
            root = {"Authorization": f"Bearer {bus.auth.create_token('root').token}"}
            with closing(HttpClient(url_of(server))) as client:
                refused = client.ask("PATCH", "/v1/auth", {"enabled": False}, root)
            assert (refused.status, refused.code) == (409, "security_required")
    with served("0.0.0.0", insecure=True), headrace.connect(socket_url) as bus:
        bus.auth.enable(False)
        assert not bus.auth.describe().enabled


def test_a_publisher_publishes_without_a_topic_before_anybody_else_did(broker: Secured) -> None:
    broker.admin.auth.bind("publisher", "pat")
    with headrace.connect(broker.tcp, token=broker.admin.auth.create_token("pat").token) as bus:
        assert bus.publish(None, b"x").offset == 0
        with pytest.raises(Forbidden, match="create the topic new"):
            bus.publish("new", b"x")


def test_a_worker_leases_from_subscriptions_that_exist(broker: Secured) -> None:
    broker.admin.auth.bind("worker", "wim")
    with headrace.connect(broker.tcp, token=broker.admin.auth.create_token("wim").token) as bus:
        with (
            pytest.raises(Forbidden, match="create the subscription orders/mail"),
            bus.lease("orders", subscription="mail"),
        ):
            pass
        broker.admin.create_subscription("orders", "mail")
        with bus.lease("orders", subscription="mail") as messages:
            assert [message.value for message in messages] == [b"first"]
