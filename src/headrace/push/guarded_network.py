"""The network of the outgoing HTTP client: connects to addresses that the guard has checked, and to no others."""

import asyncio
import ssl
from collections.abc import Iterable
from ipaddress import ip_address

import httpcore2

from headrace.model.errors import AddressRefused, DeliveryFailed
from headrace.push.address_guard import Address, AddressGuard
from headrace.push.resolver import Resolve


class GuardedNetwork(httpcore2.AsyncNetworkBackend):
    """Resolves a name once, checks every address of it, and connects to one of these addresses.

    The name is not resolved again between the check and the connection, so it cannot point elsewhere by then. TLS still
    checks the certificate against the name, because the caller starts it with the name of the URL.
    """

    def __init__(self, guard: AddressGuard, resolve: Resolve) -> None:
        self._guard = guard
        self._resolve = resolve
        self._inner = httpcore2.AnyIOBackend()

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[httpcore2.SOCKET_OPTION] | None = None,
    ) -> httpcore2.AsyncNetworkStream:
        """Connect to the first address of a host that answers, if the guard allows all of them."""
        loop = asyncio.get_running_loop()
        deadline_s = None if timeout is None else loop.time() + timeout
        addresses = await self._addresses(host, port, timeout)
        for address in addresses:
            self._guard.check(address, port, host)
        failure: Exception | None = None
        for number, address in enumerate(addresses):
            # Each address has its share of the time that is left: the first may be one that never answers.
            share_s = None if deadline_s is None else max(deadline_s - loop.time(), 0) / (len(addresses) - number)
            try:
                return await self._inner.connect_tcp(str(address), port, share_s, local_address, socket_options)
            except (httpcore2.ConnectError, httpcore2.ConnectTimeout) as error:
                failure = error
        assert failure is not None
        raise failure

    async def connect_unix_socket(
        self,
        path: str,
        timeout: float | None = None,  # noqa: ARG002 the interface has it
        socket_options: Iterable[httpcore2.SOCKET_OPTION] | None = None,  # noqa: ARG002
    ) -> httpcore2.AsyncNetworkStream:
        """Refuse: no URL leads to a Unix socket."""
        raise AddressRefused(f"{path} is a Unix socket, to which the broker sends nothing")

    async def sleep(self, seconds: float) -> None:
        """Wait."""
        await asyncio.sleep(seconds)

    async def _addresses(self, host: str, port: int, timeout: float | None) -> list[Address]:
        try:
            return [ip_address(host)]
        except ValueError:
            pass  # a name, or a spelling that the system's resolver reads as an address
        try:
            async with asyncio.timeout(timeout):
                found = await self._resolve(host, port)
        except TimeoutError as error:
            raise DeliveryFailed(f"the name {host} was not resolved within {timeout:g} s") from error
        except (OSError, UnicodeError) as error:
            reason = getattr(error, "strerror", None) or error
            raise DeliveryFailed(f"the name {host} cannot be resolved: {reason}") from error
        if not found:
            raise DeliveryFailed(f"the name {host} has no address")
        return found


def new_pool(
    guard: AddressGuard,
    resolve: Resolve,
    trust: ssl.SSLContext | None,
    connections_max: int,
) -> httpcore2.AsyncConnectionPool:
    """Connections of HTTP/1.1 on the guarded network, none of which is used twice.

    By default it trusts whom the system trusts.
    """
    return httpcore2.AsyncConnectionPool(
        ssl_context=trust or httpcore2.default_ssl_context(),
        max_connections=connections_max,
        max_keepalive_connections=0,
        network_backend=GuardedNetwork(guard, resolve),
    )
