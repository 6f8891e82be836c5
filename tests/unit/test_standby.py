"""The standby listener: who asks is sent on, and nobody can hold or break it."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from functools import wraps
from pathlib import Path
from typing import ParamSpec

import pytest

from headrace.gateways.addresses import ListenAddress, parse_listen_address, unix_address
from headrace.gateways.listening_sockets import ListeningSockets
from headrace.server import standby as module
from headrace.server.standby import OwnerAddresses, StandbyListener
from headrace.wire.frames import Frames, frame
from headrace.wire.native import Failure, Hello, Kind, _failure_decoder

P = ParamSpec("P")


def on_a_loop(test: Callable[P, Coroutine[None, None, None]]) -> Callable[P, None]:
    """Run a test on an event loop of its own."""

    @wraps(test)
    def run(*given: P.args, **named: P.kwargs) -> None:
        asyncio.run(test(*given, **named))

    return run


OWNER = OwnerAddresses("a", 7, ("headrace://10.0.0.1:7390",), ("http://10.0.0.1:7391",))
ADDRESSES = [parse_listen_address("headrace://127.0.0.1:0"), parse_listen_address("http://127.0.0.1:0")]


@asynccontextmanager
async def standing_by(
    owner: OwnerAddresses = OWNER, addresses: list[ListenAddress] | None = None
) -> AsyncIterator[list[ListenAddress]]:
    sockets = ListeningSockets()
    bound = [found for address in addresses or ADDRESSES for found in await sockets.listen(address)]
    standby = StandbyListener(sockets, bound, None, lambda: owner)
    await standby.start()
    yield bound
    sockets.close()
    standby.close()
    await asyncio.sleep(0.05)


async def exchange(address: ListenAddress, *sent: bytes) -> bytes:
    if address.path:
        reader, writer = await asyncio.open_unix_connection(address.path)
    else:
        reader, writer = await asyncio.open_connection(address.host, address.port)
    for piece in sent:
        writer.write(piece)
        await asyncio.sleep(0.01)
    try:
        return await asyncio.wait_for(reader.read(), 10)
    finally:
        writer.close()


async def ended(reading: Coroutine[None, None, bytes]) -> bool:
    """Whether a connection ends without a word."""
    try:
        return await asyncio.wait_for(reading, 10) == b""
    except ConnectionResetError:
        return True


def failure_in(data: bytes) -> tuple[int, Failure]:
    (found,) = Frames().feed(data)
    assert found.kind == Kind.FAILURE
    return found.correlation, _failure_decoder.decode(found.head)


def hello() -> bytes:
    return bytes(frame(Kind.HELLO, 42, Hello(client="test")))


@on_a_loop
async def test_a_client_of_the_native_protocol_is_told_who_serves(tmp_path: Path) -> None:
    path = str(tmp_path / "s.sock")
    async with standing_by(addresses=[*ADDRESSES, unix_address(path)]) as (native, _, unix):
        for address in (native, unix):
            correlation, told = failure_in(await exchange(address, hello()[:7], hello()[7:]))
            assert (correlation, told.code, told.retryable) == (42, "not_serving", True)
            assert told.details == {"addresses": ["headrace://10.0.0.1:7390"], "epoch": 7}
    assert not Path(path).exists()


@on_a_loop
async def test_without_an_owner_clients_are_told_to_try_again() -> None:
    async with standing_by(OwnerAddresses()) as (native, http):
        assert failure_in(await exchange(native, hello()))[1].details == {"addresses": [], "epoch": 0}
        answer = await exchange(http, b"GET /v1/topics HTTP/1.1\r\nHost: x\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 503 ")
        assert b"\r\nRetry-After: 1\r\n" in answer
        assert b'"code": "not_serving"' in answer


@on_a_loop
async def test_requests_of_http_are_redirected_with_their_target() -> None:
    async with standing_by() as (_, http):
        answer = await exchange(http, b"POST /v1/topics/a/messages?x=%20 HTTP/1.1\r\nContent-Length: 3\r\n\r\nabc")
        assert answer.startswith(b"HTTP/1.1 307 ")
        assert b"\r\nLocation: http://10.0.0.1:7391/v1/topics/a/messages?x=%20\r\n" in answer
        assert (await exchange(http, b"GET /healthz HTTP/1.1\r\n\r\n")).startswith(b"HTTP/1.1 200 ")
        assert (await exchange(http, b"GET /readyz HTTP/1.1\r\n\r\n")).startswith(b"HTTP/1.1 503 ")
        head = await exchange(http, b"HEAD / HTTP/1.1\r\n\r\n")
        assert head.endswith(b"\r\n\r\n")


@pytest.mark.parametrize(
    ("asked", "owner", "location"),
    [
        (b"Upgrade: websocket", "http://10.0.0.1:7391", b"ws://10.0.0.1:7391/v1/socket?tenant=a"),
        (b"upgrade:h2c, WebSocket", "https://10.0.0.1:7391/", b"wss://10.0.0.1:7391/v1/socket?tenant=a"),
        (b"Upgrade: headrace", "http://10.0.0.1:7391", b"http://10.0.0.1:7391/v1/socket?tenant=a"),
        (b"X-Upgrade: websocket", "https://10.0.0.1:7391", b"https://10.0.0.1:7391/v1/socket?tenant=a"),
    ],
)
@on_a_loop
async def test_a_request_for_a_websocket_is_sent_to_an_address_of_websockets(
    asked: bytes, owner: str, location: bytes
) -> None:
    async with standing_by(OWNER._replace(http=(owner,))) as (_, http):
        head = b"GET /v1/socket?tenant=a HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\n%s\r\n\r\n" % asked
        answer = await exchange(http, head)
        assert answer.startswith(b"HTTP/1.1 307 ")
        assert b"\r\nLocation: %s\r\n" % location in answer


@on_a_loop
async def test_who_has_connected_is_answered_after_it_has_stopped_accepting() -> None:
    sockets = ListeningSockets()
    (native,) = await sockets.listen(ADDRESSES[0])
    standby = StandbyListener(sockets, [native], None, lambda: OWNER)
    for _ in range(2):  # also when it accepts again
        await standby.start()
        reader, writer = await asyncio.open_connection(native.host, native.port)
        while not standby._connections:
            await asyncio.sleep(0.01)
        standby.stop_accepting()
        waiting = asyncio.ensure_future(exchange(native, hello()))  # nobody accepts its connection yet
        writer.write(hello())
        assert failure_in(await asyncio.wait_for(reader.read(), 10))[1].code == "not_serving"
        writer.close()
        assert not waiting.done()
        await standby.start()
        assert failure_in(await waiting)[1].code == "not_serving"
    sockets.close()
    standby.close()


@pytest.mark.parametrize(
    "sent",
    [
        b"\r\n\r\n",
        b"GET\r\n\r\n",
        b"GET / HTTP/2\r\n\r\n",
        b"get / HTTP/1.1\r\n\r\n",
        b"x" * 20_000,
        b"\x16\x03\x01\r\n\r\n",
    ],
)
@on_a_loop
async def test_what_is_no_request_is_refused(sent: bytes) -> None:
    async with standing_by() as (_, http):
        assert (await exchange(http, sent)).startswith(b"HTTP/1.1 400 ")


@on_a_loop
async def test_a_target_that_could_break_a_head_is_not_repeated() -> None:
    async with standing_by() as (_, http):
        answer = await exchange(http, b"GET /a\tb HTTP/1.1\r\n\r\n")
        assert b"Location" not in answer
        assert answer.startswith(b"HTTP/1.1 503 ")


@pytest.mark.parametrize("sent", [b"\xff" * 64, bytes(frame(Kind.HELLO, 1, b"x" * 100_000))])
@on_a_loop
async def test_what_is_no_frame_is_refused(sent: bytes) -> None:
    async with standing_by() as (native, _):
        assert failure_in(await exchange(native, sent))[1].code == "protocol_error"


@on_a_loop
async def test_a_silent_client_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_HEAD_S", 0.05)
    async with standing_by() as (native, http):
        for address in (native, http):
            assert await ended(exchange(address, b"GET"))


@on_a_loop
async def test_the_oldest_makes_room_for_one_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_CONNECTIONS_MAX", 3)
    async with standing_by() as (native, _):
        silent = [await asyncio.open_connection(native.host, native.port) for _ in range(3)]
        await asyncio.sleep(0.05)
        assert failure_in(await exchange(native, hello()))[1].code == "not_serving"
        assert await ended(silent[0][0].read())
        for _, writer in silent:
            writer.close()
