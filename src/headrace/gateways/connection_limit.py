"""The number of connections that all gateways of a server share, in all and from one address."""

import asyncio
from collections.abc import Callable

from headrace.model.errors import LimitExceeded

Evict = Callable[[], None]
"""Releases a connection that has no session yet, and closes it at once."""


class ConnectionLimit:
    """Counts the connections of all gateways, and refuses those above the limits.

    Connections whose client is not let in yet take no room from others: the oldest of them gives way to a new one.
    """

    def __init__(self, connections_max: int, per_address_max: int | None = None) -> None:
        self.connections_max = connections_max
        self._per_address_max = per_address_max or connections_max
        self.connections = 0
        self._by_host: dict[str, int] = {}
        self._without_session: dict[Evict, None] = {}
        """The oldest first."""

    def admit(self, host: str = "", evict: Evict | None = None) -> LimitExceeded | None:
        """Count a new connection; the error to refuse it with if there are too many. Each admitted one is released.

        `host` is empty on a Unix socket and in this process: such connections count in all only. `evict` is called if
        there is no room for a newer connection, before `has_session` is.
        """
        count = self._by_host.get(host, 0)
        if host and count >= self._per_address_max:
            return LimitExceeded(
                f"{host} has {count} connections already, as many as connections_per_address_max allows; close "
                "some, or raise it",
                connections_per_address_max=self._per_address_max,
            )
        if self.connections >= self.connections_max and self._without_session:
            next(iter(self._without_session))()
        if self.connections >= self.connections_max:
            return LimitExceeded(
                f"the broker has {self.connections} connections already, as many as connections_max and its limit on "
                "open files allow; close some, or raise both",
                connections_max=self.connections_max,
            )
        if host:
            self._by_host[host] = self._by_host.get(host, 0) + 1
        if evict is not None:
            self._without_session[evict] = None
        self.connections += 1
        return None

    def has_session(self, evict: Evict) -> None:
        """Evict a connection no more: its client was let in."""
        self._without_session.pop(evict, None)

    def release(self, host: str = "", evict: Evict | None = None) -> None:
        """Count an admitted connection no longer."""
        if evict is not None:
            self._without_session.pop(evict, None)
        self.connections -= 1
        if host:
            count = self._by_host.pop(host) - 1
            if count:
                self._by_host[host] = count


def peer_host(transport: asyncio.BaseTransport) -> str:
    """The host of the other end of a connection; empty on a Unix socket."""
    peer = transport.get_extra_info("peername")
    return str(peer[0]) if isinstance(peer, tuple) else ""
