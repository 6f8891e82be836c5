"""Several gateways of one server: all start or none, all are told of the end, and one that fails stops no other."""

import asyncio
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.native_client import NativeClient

import headrace
from headrace.broker.pending_answer import PendingAnswer
from headrace.gateways import plugins
from headrace.gateways.addresses import ListenAddress
from headrace.gateways.authentication import Peer, authenticate_anonymous
from headrace.gateways.gateway import GatewayContext, GatewayStatistics
from headrace.model.errors import (
    Busy,
    GatewayUnavailable,
    HeadraceError,
    InvalidArgument,
    LimitExceeded,
    ListenFailed,
    UnsupportedOperation,
)
from headrace.model.identity import Identity
from headrace.model.requests import Info, TopicCreate
from headrace.server import Server, server_settings
from headrace.testing import FaultyDisk
from headrace.wire.native import Hello, Kind

PATIENCE_S = 60


class Recorder:
    """A gateway that listens nowhere, and notes what it is told."""

    failing: tuple[str, ...] = ()
    error: Exception = RuntimeError("broken")

    def __init__(self, context: GatewayContext, addresses: Sequence[ListenAddress]) -> None:
        self.told: list[str] = []
        self.context, self.addresses = context, addresses
        self.is_busy = False
        MADE.append(self)

    def _tell(self, name: str) -> None:
        self.told.append(name)
        if name in self.failing:
            raise self.error

    @property
    def busy(self) -> bool:
        return self.is_busy

    async def start(self) -> list[str]:
        self._tell("start")
        return [str(address) for address in self.addresses]

    def stop_accepting(self) -> None:
        self._tell("stop_accepting")

    def drain(self) -> None:
        self._tell("drain")

    def ignore_requests(self) -> None:
        self._tell("ignore_requests")

    def close(self) -> None:
        self._tell("close")

    def abort(self) -> None:
        self._tell("abort")

    def statistics(self) -> GatewayStatistics:
        return GatewayStatistics(0, 0)

    def descriptors(self) -> list[int]:
        return []


class Failing(Recorder):
    failing = ("stop_accepting", "drain", "close", "abort")


class CannotListen(Recorder):
    failing = ("start",)
    error = OSError(98, "Address already in use")


class CannotStart(Recorder):
    failing = ("start",)


class NoUrls(Recorder):
    async def start(self) -> Any:
        return None


class WrongUrls(Recorder):
    async def start(self) -> Any:
        return [7390]


class Exits(Recorder):
    async def start(self) -> list[str]:
        raise SystemExit(3)


class CannotTell(Recorder):
    @property
    def busy(self) -> bool:
        raise RuntimeError("no idea")


class CannotTellLater(Recorder):
    @property
    def busy(self) -> bool:
        if "drain" in self.told:
            raise RuntimeError("no idea")
        return False

    def statistics(self) -> GatewayStatistics:
        raise RuntimeError("no idea")


FAULTY = (NoUrls, WrongUrls, Exits, CannotTell, CannotTellLater)


MADE: list[Recorder] = []


@pytest.fixture(autouse=True)
def plug_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Schemes that stand for classes here, as if packages had them."""
    MADE.clear()
    kinds: dict[str, Any] = {kind.__name__.lower(): kind for kind in (Recorder, Failing, CannotListen, CannotStart)}
    kinds |= {kind.__name__.lower(): kind for kind in FAULTY}
    kinds["lacking"] = lambda *_: object()
    kinds["raising"] = lambda *_: [][0]
    monkeypatch.setattr(plugins, "_load", lambda address: kinds[address.scheme])


def server(*listen: str, **settings: Any) -> Server:
    given = {"data": ":memory:", "listen": list(listen), "insecure": True, "drain_seconds": 5, **settings}
    return Server(server_settings(given))


def run(story: Callable[[], Any]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(PATIENCE_S):
            await story()

    asyncio.run(bounded())


def test_every_gateway_gets_its_addresses_and_is_told_of_the_end(tmp_path: Path) -> None:
    async def story() -> None:
        urls = ["recorder://a:1", f"unix://{tmp_path}/s", "recorder://b", "headrace://127.0.0.1:0"]
        serving = server(*urls)
        await serving.start()
        (made,) = MADE
        assert [str(address) for address in made.addresses] == ["recorder://a:1", "recorder://b"]
        port = serving.addresses[0][1]
        native = [f"headrace+unix://{tmp_path}/s", f"headrace://127.0.0.1:{port}"]
        assert serving.listening == [*native, "recorder://a:1", "recorder://b"]
        assert serving.gateways == [serving.native, made]
        assert await serving.stop()
        assert made.told == ["start", "stop_accepting", "drain", "close", "close", "abort"]

    run(story)


def test_stopping_waits_for_every_gateway() -> None:
    async def story() -> None:
        serving = server("recorder://a", drain_seconds=30)
        await serving.start()
        (made,) = MADE
        made.is_busy = True
        stopping = asyncio.ensure_future(serving.stop())
        while "ignore_requests" not in made.told:  # it has had the time to finish, and has not
            await asyncio.sleep(0)
        assert "close" not in made.told
        made.is_busy = False
        assert await stopping

    run(story)


def test_one_that_fails_while_stopping_keeps_nothing_from_being_closed(caplog: pytest.LogCaptureFixture) -> None:
    async def story() -> None:
        serving = server("failing://a", "recorder://b", "headrace://127.0.0.1:0")
        await serving.start()
        address = serving.addresses[0]
        assert await serving.stop()
        assert MADE[1].told[-1] == "abort"
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection(*address)

    run(story)
    assert "gateway failed while stopping  gateway=Failing" in caplog.text


@pytest.mark.parametrize(
    ("scheme", "kind"),
    [
        ("cannotlisten", ListenFailed),
        ("cannotstart", GatewayUnavailable),
        ("lacking", GatewayUnavailable),
        ("raising", GatewayUnavailable),
        ("nourls", GatewayUnavailable),
        ("wrongurls", GatewayUnavailable),
        ("exits", GatewayUnavailable),
        ("cannottell", GatewayUnavailable),
    ],
)
def test_one_that_cannot_start_closes_the_others_and_the_error_names_its_address(
    scheme: str, kind: type[HeadraceError], tmp_path: Path
) -> None:
    async def story() -> None:
        path = tmp_path / "socket"
        serving = server(f"unix://{path}", "recorder://a", f"{scheme}://b:1", data=str(tmp_path / "data"))
        with pytest.raises(kind, match=f"{scheme}://b:1"):
            await serving.start()
        assert not path.exists()
        assert MADE[0].told == ["start", "close", "abort"]
        again = server(f"unix://{path}", data=str(tmp_path / "data"))  # neither socket nor directory is in use
        await again.start()
        assert await again.stop()

    run(story)


@pytest.mark.parametrize(
    ("scheme", "wrong"),
    [
        ("nourls", "`start` must return a list of URLs, not None"),
        ("exits", "cannot start: SystemExit: 3"),
        ("cannottell", "cannot tell busy: RuntimeError: no idea"),
    ],
)
def test_a_faulty_plug_in_is_named_with_what_is_wrong(scheme: str, wrong: str) -> None:
    async def story() -> None:
        with pytest.raises(GatewayUnavailable) as raised:
            await server(f"{scheme}://b:1").start()
        assert wrong in str(raised.value)
        assert f"reinstall {__name__}" in str(raised.value), "where there is no package, the module"

    run(story)


def test_one_that_cannot_tell_its_state_does_not_keep_the_server_from_stopping() -> None:
    async def story() -> None:
        serving = server("cannottelllater://a", "recorder://b")
        await serving.start()
        assert await serving.stop()
        assert MADE[0].told[-1] == MADE[1].told[-1] == "abort"

    run(story)


def test_a_disk_that_is_none_is_refused() -> None:
    with pytest.raises(InvalidArgument, match=r"disk is a headrace\.storage\.disk\.Disk, not 3"):
        headrace.open(":memory:", disk=3)  # type: ignore[arg-type]


def test_all_gateways_together_have_so_many_connections(tmp_path: Path) -> None:
    async def story() -> None:
        path = f"{tmp_path}/socket"
        serving = server(f"unix://{path}", "recorder://a", connections_max=2)
        await serving.start()
        limit = MADE[0].context.limit
        assert limit.admit() is None
        assert limit.admit() is None
        assert isinstance(limit.admit(), LimitExceeded)
        with socket.socket(socket.AF_UNIX) as native:
            native.connect(path)
            native.setblocking(False)
            assert b"limit_exceeded" in await asyncio.get_running_loop().sock_recv(native, 1000)
        limit.release()
        limit.release()
        while limit.connections:
            await asyncio.sleep(0)
        assert await serving.stop()

    run(story)


# Who a client is.


class Gate:
    """Decides later who clients are."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, bytes, Any]] = []
        self.pending: list[PendingAnswer[Identity]] = []

    def __call__(self, mechanism: str, credentials: bytes, peer: Any) -> PendingAnswer[Identity]:
        self.asked.append((mechanism, credentials, peer))
        self.pending.append(PendingAnswer())
        return self.pending[-1]


def knock(story: Callable[[NativeClient, Gate, Server], Any], *frames: Any) -> None:
    """Let a client say Hello and more to a server that takes time to know it; the story goes on from there."""

    async def main() -> None:
        gate = Gate()
        serving = Server(server_settings({"data": ":memory:", "listen": ["headrace://127.0.0.1:0"]}), authenticate=gate)
        await serving.start()
        with NativeClient(socket.create_connection(serving.addresses[0])) as client:
            await asyncio.to_thread(lambda: [client.send(frame) for frame in (Hello(), *frames)])
            while not gate.pending:
                await asyncio.sleep(0)
            await story(client, gate, serving)
        assert await serving.stop()

    run(main)


def test_nothing_is_answered_before_the_client_is_known() -> None:
    async def story(client: NativeClient, gate: Gate, serving: Server) -> None:
        ((mechanism, credentials, peer),) = gate.asked
        assert (mechanism, credentials, peer.gateway, peer.is_local) == ("anonymous", b"", "native", True)
        assert serving.native.busy
        gate.pending[0].resolve(Identity("ann"))
        answers = await asyncio.to_thread(lambda: [client.receive() for _ in range(3)])
        assert [answer.kind for answer in answers] == [Kind.ANSWER] * 3
        (session,) = serving._broker._sessions  # type: ignore[union-attr]
        assert (session.identity, session.gateway, session.address) == (Identity("ann"), "native", peer.address)

    knock(story, TopicCreate("orders"), Info())


def test_a_client_that_is_refused_is_told_why_and_the_connection_ends() -> None:
    async def story(client: NativeClient, gate: Gate, serving: Server) -> None:
        gate.pending[0].resolve(Busy("the directory of users does not answer"))
        answer = await asyncio.to_thread(client.receive)
        assert answer.kind == Kind.FAILURE
        assert b"directory of users" in bytes(answer.head)
        while serving.native.statistics().connections:
            await asyncio.sleep(0.01)

    knock(story)


def test_a_client_that_goes_before_it_is_known_cancels_the_question() -> None:
    async def story(client: NativeClient, gate: Gate, serving: Server) -> None:
        client.close()
        while not gate.pending[0].resolved:
            await asyncio.sleep(0)
        assert not serving._broker._sessions  # type: ignore[union-attr]

    knock(story)


def test_a_broker_without_users_takes_no_credentials() -> None:
    assert authenticate_anonymous("anonymous", b"", Peer("native")).name == "anonymous"
    with pytest.raises(UnsupportedOperation, match="without credentials"):
        authenticate_anonymous("password", b"secret", Peer("native"))


def test_a_plug_ins_own_error_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    class Picky(Recorder):
        failing = ("start",)
        error = InvalidArgument("give a port")

    async def story() -> None:
        monkeypatch.setattr(plugins, "_load", lambda _: Picky)
        with pytest.raises(InvalidArgument, match="give a port"):
            await server("picky://a").start()

    run(story)


def test_a_server_keeps_its_data_on_the_disk_it_is_given(tmp_path: Path) -> None:
    async def story() -> None:
        disk = FaultyDisk()
        serving = Server(
            server_settings({"data": str(tmp_path / "data"), "listen": ["recorder://a"], "insecure": True}), disk
        )
        await serving.start()
        assert disk.writes
        assert await serving.stop()

    run(story)
