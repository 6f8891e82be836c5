"""Sockets that listen for long: who accepts on them changes, and no connection is lost or refused meanwhile."""

import asyncio
import socket
import ssl
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.certificates import make_ca
from tests.unit.test_standby import on_a_loop

from headrace.gateways.addresses import ListenAddress, parse_listen_address, unix_address
from headrace.gateways.listening_sockets import ListeningSockets, accept_tcp, accept_unix
from headrace.gateways.tls_handshake import HandshakeCounts
from headrace.gateways.tls_listener import TlsListener, stop_accepting
from headrace.model.errors import ListenFailed, LogInUse
from headrace.runtime.event_loop import new_event_loop


class Greeter(asyncio.Protocol):
    """Says its name to who connects, and closes."""

    def __init__(self, name: bytes) -> None:
        self._name = name

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport.write(self._name)  # type: ignore[attr-defined]
        transport.close()


def client_of(address: ListenAddress) -> socket.socket:
    end = socket.socket(socket.AF_UNIX if address.is_unix else socket.AF_INET)
    end.settimeout(20)
    try:
        end.connect(address.path if address.is_unix else (address.host, address.port))
    except BaseException:
        end.close()
        raise
    return end


async def accept(sockets: ListeningSockets, address: ListenAddress, name: bytes) -> asyncio.Server:
    given = sockets.duplicate(address)
    assert given is not None
    if address.is_unix:
        return await accept_unix(lambda: Greeter(name), address.path, given)
    server = await accept_tcp(lambda: Greeter(name), address, given, None)
    assert not isinstance(server, TlsListener)
    return server


async def greeting(end: socket.socket) -> bytes:
    return await asyncio.to_thread(end.recv, 100)


async def swap(sockets: ListeningSockets, address: ListenAddress) -> None:
    """Who connects is greeted by whoever accepts then, or next."""
    first = await accept(sockets, address, b"first")
    with client_of(address) as end:
        assert await greeting(end) == b"first"
    first.close()
    await asyncio.sleep(0.05)
    with client_of(address) as one, client_of(address) as other:  # nobody accepts: they wait
        idle = await accept(sockets, address, b"idle")
        idle.close()  # at once, or it has greeted them
        second = await accept(sockets, address, b"second")
        assert {await greeting(one), await greeting(other)} <= {b"idle", b"second"}
    with client_of(address) as end:
        assert await greeting(end) == b"second"
    second.close()


@pytest.mark.parametrize("make_loop", [asyncio.new_event_loop, new_event_loop])
def test_a_connection_between_two_who_accept_waits(
    make_loop: Callable[[], asyncio.AbstractEventLoop], tmp_path: Path
) -> None:
    async def story() -> None:
        sockets = ListeningSockets()
        (tcp,) = await sockets.listen(parse_listen_address("headrace://127.0.0.1:0"))
        (unix,) = await sockets.listen(unix_address(str(tmp_path / "s.sock")))
        for address in (tcp, unix):
            await swap(sockets, address)
        assert sockets.duplicate(parse_listen_address("headrace://127.0.0.1:1")) is None
        sockets.close()
        await asyncio.sleep(0.05)
        with pytest.raises(ConnectionRefusedError):
            client_of(tcp)
        with pytest.raises(FileNotFoundError):
            client_of(unix)

    with asyncio.Runner(loop_factory=make_loop) as runner:
        runner.run(story())


@on_a_loop
async def test_an_address_that_is_in_use_is_refused(tmp_path: Path) -> None:
    sockets = ListeningSockets()
    (tcp,) = await sockets.listen(parse_listen_address("http://127.0.0.1:0"))
    path = str(tmp_path / "s.sock")
    await sockets.listen(unix_address(path))
    with pytest.raises(ListenFailed, match="in use"):
        await ListeningSockets().listen(tcp)
    with pytest.raises(LogInUse):
        await ListeningSockets().listen(unix_address(path))
    sockets.close()


@on_a_loop
async def test_a_handshake_that_has_begun_outlasts_who_accepts(tmp_path: Path) -> None:
    files = make_ca(tmp_path).make_server()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(files.certificate, files.key)
    sockets = ListeningSockets()
    (address,) = await sockets.listen(parse_listen_address("headraces://127.0.0.1:0"))
    loop, given = asyncio.get_running_loop(), sockets.duplicate(address)
    listener = TlsListener(loop, lambda: context, 20, HandshakeCounts(), lambda: Greeter(b"late"), lambda _: b"no TLS")
    assert await accept_tcp(lambda: Greeter(b"plain"), address, given, listener) is listener
    with client_of(address) as end:
        while not listener._handshakes:
            await asyncio.sleep(0)
        listener.stop_accepting()
        assert listener.sockets == []
        trusting = ssl.create_default_context(cafile=files.ca)

        def shake_hands() -> bytes:
            with trusting.wrap_socket(end, server_hostname="127.0.0.1") as secure:
                return secure.recv(100)

        assert await asyncio.to_thread(shake_hands) == b"late"
    listener.close()
    sockets.close()


@on_a_loop
async def test_a_connection_that_is_accepted_in_the_same_loop_turn_is_served() -> None:
    sockets = ListeningSockets()
    (address,) = await sockets.listen(parse_listen_address("headrace://127.0.0.1:0"))
    servers: list[asyncio.Server | TlsListener] = []

    def greeter() -> Greeter:
        stop_accepting(servers[0])
        return Greeter(b"last")

    servers.append(await accept_tcp(greeter, address, sockets.duplicate(address), None))
    with client_of(address) as end:
        assert await greeting(end) == b"last"
    with client_of(address) as end:  # nobody accepts any more
        servers.append(await accept(sockets, address, b"next"))
        assert await greeting(end) == b"next"
    for server in servers:
        server.close()
    sockets.close()
