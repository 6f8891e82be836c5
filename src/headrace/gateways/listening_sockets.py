"""Sockets that listen for the whole life of a server, while those who accept connections on them change."""

import asyncio
import socket
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from headrace.gateways.addresses import ListenAddress, parse_listen_address, tcp_url, unix_url
from headrace.gateways.listen_errors import listen_failed, listen_unix_failed
from headrace.gateways.unix_socket import bind, make_room, remove
from headrace.wire.native import DEFAULT_HTTP_PORT

if TYPE_CHECKING:
    from headrace.gateways.tls_listener import TlsListener

BACKLOG = 1024
_KEEP_FILE: dict[str, Any] = {"cleanup_socket": False} if sys.version_info >= (3, 13) else {}
"""Whoever stops accepting on a Unix socket leaves its file to the others."""

ProtocolFactory = Callable[[], asyncio.BaseProtocol]


class ListeningSockets:
    """Listens on addresses, and hands out duplicates of the sockets.

    A connection that nobody accepts yet waits in the system's backlog, which the duplicates share: closing one of them
    loses none.
    """

    def __init__(self) -> None:
        self._sockets: dict[tuple[str, int] | str, socket.socket] = {}
        """By host and port, or by path."""

    async def listen(self, address: ListenAddress) -> list[ListenAddress]:
        """Listen on an address; returns those that it stands for, with the ports that the system chose."""
        if address.is_unix:
            self._sockets[address.path] = _listen_unix(address.path)
            return [parse_listen_address(unix_url("unix", address.path))]
        found = []
        port = DEFAULT_HTTP_PORT if address.port is None else address.port
        try:
            listening = await listen_tcp(address.host, port)
        except OSError as error:
            raise listen_failed(error, address.host, port) from error
        for one in listening:
            bound = parse_listen_address(tcp_url(address.scheme, *one.getsockname()[:2]))
            self._sockets[_key(bound)] = one
            found.append(bound)
        return found

    def duplicate(self, address: ListenAddress) -> socket.socket | None:
        """Duplicate the socket that listens on an address, for whoever accepts there; None if there is none."""
        found = self._sockets.get(_key(address))
        return None if found is None else found.dup()

    def close(self) -> None:
        """Listen no more, once the duplicates are closed, too: the system refuses connections then."""
        for key, listening in self._sockets.items():
            if isinstance(key, str):
                remove(key)
            listening.close()
        self._sockets.clear()

    def descriptors(self) -> list[int]:
        """The file descriptors of all sockets."""
        return [listening.fileno() for listening in self._sockets.values()]


async def listen_tcp(host: str, port: int) -> list[socket.socket]:
    """Listen on all addresses of a host; raises OSError."""
    loop = asyncio.get_running_loop()
    infos = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    sockets: list[socket.socket] = []
    try:
        for family, kind, protocol, _, address in dict.fromkeys(infos):
            listening = socket.socket(family, kind, protocol)
            sockets.append(listening)
            listening.setblocking(False)
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                listening.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            listening.bind(address)
            listening.listen(BACKLOG)
    except BaseException:
        for listening in sockets:
            listening.close()
        raise
    return sockets


async def accept_tcp(
    factory: ProtocolFactory, address: ListenAddress, given: socket.socket | None, tls: "TlsListener | None"
) -> "asyncio.Server | TlsListener":
    """Accept connections on a socket that listens, or else on an address: with TLS if there is a listener of it."""
    loop = asyncio.get_running_loop()
    port = address.port or 0
    try:
        if tls is not None:
            tls.accept([given] if given is not None else await listen_tcp(address.host, port))
            return tls
        if given is not None:
            return await loop.create_server(factory, sock=given, backlog=BACKLOG)
        return await loop.create_server(factory, address.host, port, backlog=BACKLOG)
    except OSError as error:
        raise listen_failed(error, address.host, port) from error


async def accept_unix(factory: ProtocolFactory, path: str, given: socket.socket) -> asyncio.Server:
    """Accept connections on a Unix socket; closing the server leaves the file of the socket."""
    try:
        return await asyncio.get_running_loop().create_unix_server(factory, sock=given, backlog=BACKLOG, **_KEEP_FILE)
    except OSError as error:
        raise listen_unix_failed(error, path) from error


def bind_unix(path: str) -> socket.socket:
    """Bind a Unix socket for this user alone; one that a process left there when it died is replaced."""
    make_room(path)
    try:
        return bind(path)
    except OSError as error:
        raise listen_unix_failed(error, path) from error


def _listen_unix(path: str) -> socket.socket:
    listening = bind_unix(path)
    try:
        listening.setblocking(False)
        listening.listen(BACKLOG)
    except BaseException:
        listening.close()
        remove(path)
        raise
    return listening


def _key(address: ListenAddress) -> tuple[str, int] | str:
    return address.path if address.is_unix else (address.host, address.port or 0)
