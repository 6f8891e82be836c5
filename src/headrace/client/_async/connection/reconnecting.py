"""A connection to a broker that is made again whenever it breaks."""

import logging
import weakref
from collections.abc import Callable
from copy import copy
from functools import partial
from typing import Protocol

from headrace.client._async.concurrency import FORK_REFUSED, Monitor, Task, Timer, Timers, now, spawn
from headrace.client._async.connection.connection import Connection
from headrace.client.connection.addresses import Address, unreachable
from headrace.client.connection.backoff import Backoff
from headrace.client.connection.clock import Clock
from headrace.client.connection.endpoints import DIAL_TIMEOUT_S, Endpoints, not_served
from headrace.client.connection.fork_guard import ASYNCIO, EMBEDDED
from headrace.client.connection.request_router import Bytes, LateCallback
from headrace.client.connection.retrying import NOTHING_DONE
from headrace.client.connection.token_source import NO_TOKEN, TokenSource, is_refusal
from headrace.client.connection.weak_registry import WeakRegistry
from headrace.model.errors import (
    Closed,
    ConnectionFailed,
    Draining,
    Forbidden,
    Forked,
    HeadraceError,
    InvalidArgument,
    NotAuthenticated,
    NotServing,
    StoreUnavailable,
    TlsFailed,
)
from headrace.model.request import AnswerType, Request
from headrace.wire.frames import Memory
from headrace.wire.native import Hello

logger = logging.getLogger("headrace.client")

_TICK_S = 1.0
_CLUSTER_HEARTBEAT_S = 1.0
"""How often the serving node of a cluster is heard at least: after three times as long in silence another is looked
for, as one takes over within seconds."""
_NOT_SERVING_S = 0.2
"""How long a node that does not serve any more has to close the connection itself, after its last answers."""
_OTHERS_S = 2.0
"""In so many seconds all clients of a broker that was restarted, or replaced, have connected again."""
_CLOCK_PINGS = 4
_LAST_DIAL_S = 0.05
"""What the last attempt has, however little time is left."""


class AsyncConnectionListener(Protocol):
    """Is told about new connections, for as long as it lives. No method may block.

    One that has a method `connection_refused(error)` is told when the broker does not accept this client any more.
    """

    def connection_up(self, connection: Connection) -> None:
        """Use a new connection; requests and streams of the one before are gone."""

    def connection_drains(self) -> None:
        """Send nothing new, because the broker drains."""


class AsyncReconnectingConnection:
    """Keeps one connection, and replaces it when it breaks, until it is closed or the broker refuses the client.

    After a refusal (`is_refusal`), the next request makes a connection, as the token's file may have another by then.
    """

    def __init__(
        self,
        endpoints: Endpoints,
        hello: Hello,
        timeout: float,
        timers: Timers,
        memory: Memory | None,
        clock: Clock,
        token: TokenSource = NO_TOKEN,
    ) -> None:
        self.connection: Connection | None = None
        self.timeout = timeout
        self._clock = clock
        self._endpoints = endpoints
        self._hello = hello
        self._token = token
        self._timers = timers
        self._memory = memory
        self._monitor = Monitor()
        self._listeners: WeakRegistry[AsyncConnectionListener] = WeakRegistry()
        self._greeters: WeakRegistry[AsyncConnectionListener] = WeakRegistry()
        """Listeners that send over a new connection before anybody else can."""
        self._closed = False
        self._ending: weakref.ref[Connection] | None = None
        self._disowned = ""
        """Why it cannot be used in a forked child; empty where it can."""
        self._was_connected = False
        self._replaced_s: float | None = None
        """When the present connection replaced another; None: it is the first."""
        self._dormant = False
        """There is no connection, and none is made until somebody needs one: in a forked child, after a refusal."""
        self._last_error: HeadraceError | None = None
        self._reconnecting: Task | None = None
        self._ping_s: float | None = None
        self._ticking: Timer | None = None

    async def connect(self, wait: float = 0.0) -> None:
        """Make the first connection; keeps trying for so many seconds if the broker is not there yet."""
        began, backoff = now(), Backoff()
        deadline, endpoints = began + wait, self._endpoints
        timeout = min(self.timeout, DIAL_TIMEOUT_S)
        while not self._closed:
            try:
                if self._adopt(await self._dialled(timeout)):
                    return
            except (InvalidArgument, TlsFailed, NotAuthenticated, Forbidden):
                raise  # waiting does not help
            except HeadraceError as error:
                if not wait:
                    deadline = max(deadline, began + endpoints.patience_s(error, self.timeout))
                if now() >= deadline:
                    told = not_served(endpoints.target, error)
                    raise told from (None if told is error else error)
            with self._monitor.guard:
                await self._monitor.wait(min(endpoints.pause_s(backoff.next_s()), max(deadline - now(), 0.001)))
            timeout = min(timeout, max(deadline - now(), _LAST_DIAL_S))
        raise Closed("the bus is closed")

    async def request(
        self,
        request: Request[AnswerType],
        body: Bytes = b"",
        *,
        timeout: float | None = None,
        repeat: bool = True,
        late: LateCallback[AnswerType] | None = None,
        on_doubt: Callable[[], None] | None = None,
    ) -> AnswerType:
        """Send a request, and wait for its answer; all as in `request_with_body`."""
        answer, _ = await self.request_with_body(
            request, body, timeout=timeout, repeat=repeat, late=late, on_doubt=on_doubt
        )
        return answer

    async def request_with_body(
        self,
        request: Request[AnswerType],
        body: Bytes = b"",
        *,
        timeout: float | None = None,
        repeat: bool = True,
        late: LateCallback[AnswerType] | None = None,
        on_doubt: Callable[[], None] | None = None,
    ) -> tuple[AnswerType, Bytes]:
        """Send a request, and wait for the answer and its body.

        The request is sent again after a broken connection if that does no harm (`repeat`), and whenever the broker
        says that it did nothing and the client may try again; all within the time-out. An answer that comes when nobody
        waits for it any more goes to `late`. `on_doubt` is called before it is sent again though it may have taken
        effect.
        """
        timeout = self.timeout if timeout is None else timeout
        deadline, backoff = now() + timeout, Backoff()
        while True:
            connection = await self.get(deadline)
            try:
                if connection.draining and not request.declared.while_draining:
                    raise Draining  # the broker would say the same, and waits until its clients are silent
                return await connection.request(request, body, max(deadline - now(), 0.001), late)
            except NOTHING_DONE:
                wait_s = self._endpoints.pause_s(backoff.next_s())
                if now() + wait_s >= deadline:
                    raise
            except StoreUnavailable:  # nobody knows whether it took effect
                wait_s = self._endpoints.pause_s(backoff.next_s())
                if not repeat or now() + wait_s >= deadline:
                    raise
                if on_doubt is not None:
                    on_doubt()
            except ConnectionFailed:
                if not repeat or self._closed:
                    raise
                if on_doubt is not None:
                    on_doubt()
                continue  # `get` waits until there is another connection
            with self._monitor.guard:
                await self._monitor.wait(wait_s)

    async def get(self, deadline: float) -> Connection:
        """Wait for a connection, and return it."""
        waited = False
        with self._monitor.guard:
            while self.connection is None or self.connection.closed:
                self.check_open()
                if waited and self._dormant and is_refusal(self._last_error):
                    raise copy(self._last_error)  # each gets its own, with its own traceback
                self._wake()
                if not await self._monitor.wait(deadline - now()):
                    raise ConnectionFailed(
                        str(self._last_error or unreachable(self._endpoints.target, "no connection"))
                    )
                waited = True
            return self.connection

    def wake(self) -> None:
        """Make a connection if there is none and none is being made; does not wait for it."""
        with self._monitor.guard:
            if not self._closed and not self._disowned:
                self._wake()

    def _wake(self) -> None:
        if self._dormant:
            self._dormant = False
            self._reconnecting = spawn("reconnect", self._reconnect, Backoff(0.0))

    def check_open(self) -> None:
        """Raise Closed, or Forked in a child that cannot go on."""
        if self._disowned:
            raise Forked(self._disowned)
        if self._closed:
            raise Closed("the bus is closed")

    @property
    def closed(self) -> bool:
        """Whether it was closed for good, as it is with its bus."""
        return self._closed

    @property
    def connected(self) -> bool:
        """Whether there is a connection now, as far as is known."""
        return self.connection is not None and not self.connection.closed

    @property
    def was_just_replaced(self) -> bool:
        """Whether the connection replaced another a moment ago: other clients may still be connecting again."""
        return self._replaced_s is not None and now() - self._replaced_s < _OTHERS_S

    @property
    def is_cluster(self) -> bool:
        """Whether there are several nodes, as far as is known."""
        return self._endpoints.is_cluster

    def disown(self) -> None:
        """In a forked child: leave the connection to the parent; the first request makes another."""
        self.connection = None
        self._monitor = Monitor()
        self._listeners = WeakRegistry()
        self._greeters = WeakRegistry()
        self._last_error = self._reconnecting = self._ending = self._ping_s = self._ticking = None
        self._dormant = True
        if not isinstance(self._endpoints.target, Address):
            self._disowned = EMBEDDED
        elif FORK_REFUSED:
            self._disowned = ASYNCIO

    def listen(self, listener: AsyncConnectionListener, *, first: bool = False) -> None:
        """Tell a listener about connections, beginning with the present one.

        With `first`, it is told of a new one before any request, also one that is repeated, is sent over it.
        """
        with self._monitor.guard:
            (self._greeters if first else self._listeners).add(listener)
            connection = self.connection
        if connection is not None:
            listener.connection_up(connection)

    def forget(self, listener: AsyncConnectionListener) -> None:
        """Stop telling a listener."""
        with self._monitor.guard:
            self._listeners.discard(listener)
            self._greeters.discard(listener)

    def ping_every(self, seconds: float) -> None:
        """Send a ping at least this often, even if the broker's heartbeat is longer."""
        self._ping_s = min(seconds, self._ping_s or seconds)
        connection = self.connection
        if connection is not None:
            self._tick_later(connection)

    def measure_clock(self) -> None:
        """Compare the clocks a few times: the quickest answers tell the most."""
        connection = self.connection
        if connection is not None and not connection.closed:
            connection.ping(_CLOCK_PINGS)

    def end(self) -> None:
        """End the connection, after what has been written, and make no other; does not wait for it."""
        with self._monitor.guard:
            self._closed = True
            self._monitor.notify()
            connection, self.connection = self.connection, None
            self._ending = self._ending if connection is None else weakref.ref(connection)
            if self._ticking is not None:
                self._ticking.cancel()
        if connection is not None:
            connection.end()

    async def close(self) -> None:
        """End the connection, make no other, and wait until it has ended."""
        self.end()
        ending = None if self._ending is None else self._ending()
        if ending is not None:
            await ending.close()
        if self._reconnecting is not None:
            await self._reconnecting.join(DIAL_TIMEOUT_S)

    async def _dialled(self, timeout: float) -> Connection:
        """Dial the addresses of the broker one after the other until one serves; raises what the last attempt met."""
        hello = self._token.greeting(self._hello)
        deadline, attempt = now() + timeout, self._endpoints.attempt(timeout)
        while not self._closed and (found := attempt.next()) is not None:
            target, dial_s = found
            dial_s = min(dial_s, max(deadline - now(), _LAST_DIAL_S))
            try:
                connection = await Connection.open(target, hello, dial_s, self._lost, self._memory, self._clock)
            except (InvalidArgument, NotAuthenticated, Forbidden):
                raise
            except HeadraceError as error:
                attempt.failed(target, error)
                if now() >= deadline:
                    break
            else:
                assert connection.welcome is not None
                attempt.served(target, connection.welcome.nodes)
                connection.target = target
                return connection
        raise attempt.error()

    def _adopt(self, connection: Connection) -> bool:
        """Use this connection from now on, unless it is gone already."""
        for greeter in self._greeters.alive():
            greeter.connection_up(connection)
        with self._monitor.guard:
            if self._closed:
                connection.end()
            if connection.closed or self._closed:
                return False
            self.connection = connection
            self._replaced_s = now() if self._was_connected else None
            self._was_connected = True
            self._last_error = None
            connection.on_drain = self._drains
            connection.on_not_serving = self._serves_no_more
            self._monitor.notify()
            listeners = self._listeners.alive()
        self._tick_later(connection)
        if self._clock.in_use:
            self.measure_clock()
        for listener in listeners:
            listener.connection_up(connection)
        return True

    def _lost(self, connection: Connection, error: HeadraceError) -> None:
        with self._monitor.guard:
            if self.connection is not connection:
                return
            self.connection = None
            self._last_error = error
            if isinstance(error, NotServing) and connection.target is not None:
                self._endpoints.redirected(connection.target, error)
            if self._closed:
                return
            # Of a broker inside this program only its end is heard, also when the program ends.
            level = logging.WARNING if isinstance(self._endpoints.target, Address) else logging.DEBUG
            logger.log(level, "%s; connecting again", error)
            self._reconnecting = spawn("reconnect", self._reconnect, Backoff())

    async def _reconnect(self, backoff: Backoff) -> None:
        while True:
            with self._monitor.guard:
                if not self._closed:
                    await self._monitor.wait(self._endpoints.pause_s(backoff.next_s()))
                if self._closed:
                    return
            try:
                if self._adopt(await self._dialled(min(self.timeout, DIAL_TIMEOUT_S))):
                    logger.info("connected again")
                    return
            except HeadraceError as error:
                self._last_error = not_served(self._endpoints.target, error)
                if is_refusal(error):
                    self._refused(error)
                    return

    def _refused(self, error: HeadraceError) -> None:
        """Tell everybody who waits that the broker does not accept this client."""
        logger.warning("not connected again, as the broker refuses this client: %s", error)
        with self._monitor.guard:
            self._dormant = True
            self._monitor.notify()
            listeners = [*self._greeters.alive(), *self._listeners.alive()]
        for listener in listeners:
            told = getattr(listener, "connection_refused", None)
            if told is not None:
                told(error)

    def _drains(self) -> None:
        for listener in (*self._greeters.alive(), *self._listeners.alive()):
            listener.connection_drains()

    def _serves_no_more(self, connection: Connection, error: NotServing) -> None:
        """Replace the connection, as another node serves; what it has been sent before may still be answered."""
        if connection.target is not None:
            self._endpoints.redirected(connection.target, error)
        connection.on_not_serving = None
        self._timers.later(_NOT_SERVING_S, partial(connection.end, ConnectionFailed(str(error))))

    def _tick_later(self, connection: Connection) -> None:
        assert connection.welcome is not None
        heartbeat_s = connection.welcome.heartbeat_ms / 1000
        if self._endpoints.is_cluster:
            heartbeat_s = min(heartbeat_s, _CLUSTER_HEARTBEAT_S)
        ping_s = min(heartbeat_s, self._ping_s or heartbeat_s)
        elapsed_s = min(_TICK_S, ping_s / 4)

        def tick() -> None:
            if self.connection is not connection:
                return
            if connection.tick(elapsed_s, heartbeat_s, ping_s):
                self._tick_later(connection)
            else:
                if connection.target is not None:
                    self._endpoints.forget(connection.target)
                connection.end(ConnectionFailed("the broker has been silent for too long"))

        if self._ticking is not None:
            self._ticking.cancel()
        self._ticking = self._timers.later(elapsed_s, tick)
