"""The services that a bus has registered: registers them again over every new connection."""

import logging
from functools import partial

from headrace.client._async.concurrency import Timers
from headrace.client._async.connection.connection import Connection
from headrace.client._async.connection.reconnecting import AsyncReconnectingConnection
from headrace.client.connection.backoff import Backoff
from headrace.client.connection.request_router import Bytes
from headrace.model.errors import ConnectionFailed, HeadraceError
from headrace.model.requests import Done
from headrace.model.service_requests import ServiceDeregister, ServiceRegister, ServiceRegistered

logger = logging.getLogger("headrace.client")

_SIGNS_PER_TTL = 3
"""How many signs of life the client gives in the time to live of its services."""


class AsyncServiceRegistrations:
    """Keeps services registered over all connections of a bus, until they are deregistered or the bus is closed."""

    def __init__(self, broker: AsyncReconnectingConnection, timers: Timers) -> None:
        self.broker = broker
        self._lines = [broker]
        self._timers = timers
        self._registered: dict[tuple[str, str], ServiceRegister] = {}
        """By name and instance."""
        self._backoff = Backoff()
        broker.listen(self, first=True)

    async def add(self, request: ServiceRegister) -> None:
        """Register an instance over all connections, now and after each reconnect; if it is refused, not again."""
        key = request.definition.name, request.definition.instance
        before = self._registered.get(key)
        self._registered[key] = request  # first: the connection may be lost meanwhile
        try:
            for line in list(self._lines):
                await line.request(request)
        except BaseException:
            if before is None:
                self._registered.pop(key, None)
            else:
                self._registered[key] = before
            raise
        self.broker.ping_every(request.ttl_ms / 1000 / _SIGNS_PER_TTL)

    async def remove(self, name: str) -> None:
        """Deregister all instances of a service that this bus has registered; without a connection, they expire."""
        for key in [key for key in list(self._registered) if key[0] == name]:
            del self._registered[key]
            if self.broker.connected:
                await self.broker.request(ServiceDeregister(*key))

    def instance(self, name: str) -> str:
        """The instance of a service that this bus has registered; empty if it has none."""
        return next((key[1] for key in list(self._registered) if key[0] == name), "")

    def attach(self, line: AsyncReconnectingConnection) -> None:
        """Register over one more connection, too."""
        self._lines.append(line)
        line.listen(self, first=True)

    def end(self) -> None:
        """Deregister without waiting for the answers: the bus is closed."""
        registered, self._registered = self._registered, {}
        connection = self.broker.connection
        if connection is not None and not connection.closed:
            for key in registered:
                connection.request_nowait(ServiceDeregister(*key), b"", _ignore)

    def disown(self) -> None:
        """In a forked child: the parent is the registered instance."""
        self._registered.clear()
        del self._lines[1:]
        self.broker.listen(self, first=True)

    def connection_up(self, connection: Connection) -> None:
        """Register over a new connection, before anything else is sent."""
        for request in list(self._registered.values()):
            self._send(connection, request)

    def connection_drains(self) -> None:
        """Stay registered until the broker is gone."""

    def _send(self, connection: Connection, request: ServiceRegister) -> None:
        definition = request.definition
        if self._registered.get((definition.name, definition.instance)) is request and not connection.closed:
            connection.request_nowait(request, b"", partial(self._answered, connection, request))

    def _answered(
        self, connection: Connection, request: ServiceRegister, answer: ServiceRegistered | HeadraceError, _: Bytes
    ) -> None:
        key = request.definition.name, request.definition.instance
        if isinstance(answer, ServiceRegistered):
            self._backoff.reset()
            if key not in self._registered:  # it was deregistered while there was no connection
                connection.request_nowait(ServiceDeregister(*key), b"", _ignore)
        elif not isinstance(answer, ConnectionFailed):
            name = request.definition.name
            logger.warning("service not registered again; retrying  service=%s error=%s", name, answer)
            self._timers.later(self._backoff.next_s(), partial(self._send, connection, request))


def _ignore(answer: Done | HeadraceError, _: Bytes) -> None:
    """Do nothing: the connection ends anyway."""
    del answer
