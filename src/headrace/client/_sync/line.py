"""A way to a broker that lasts: connections are made again when they break."""

import logging
import weakref
from typing import Any, Protocol

from headrace.client._sync.concurrency import FORK_REFUSED, Monitor, Task, Timer, Timers, now, spawn
from headrace.client._sync.link import Link
from headrace.client.addresses import Address, Target, unreachable
from headrace.client.backoff import Backoff
from headrace.client.clock import Clock
from headrace.client.exchange import Bytes, Callback
from headrace.client.forking import ASYNCIO, EMBEDDED
from headrace.client.keeping import Kept
from headrace.model.errors import Busy, Closed, ConnectionFailed, Draining, Forked, HeadraceError
from headrace.model.request import Request
from headrace.wire.frames import Memory
from headrace.wire.native import Hello, Kind

logger = logging.getLogger("headrace.client")

_TICK_S = 1.0
_DIAL_TIMEOUT_S = 10.0
_CLOCK_PINGS = 4
_LAST_DIAL_S = 0.05
"""What the last attempt has, however little time is left."""


class Listener(Protocol):
    """One who wants to know about the connections of a line, for as long as it lives. Neither may block."""

    def link_up(self, link: Link) -> None:
        """There is a new connection: nothing that was said over the one before counts any more."""

    def link_drains(self) -> None:
        """The broker is about to go, and takes nothing new."""


class Line:
    """One connection at a time, and another when it breaks, until it is closed."""

    def __init__(
        self, target: Target, hello: Hello, timeout: float, timers: Timers, memory: Memory | None, clock: Clock
    ) -> None:
        self.link: Link | None = None
        self.timeout = timeout
        self._clock = clock
        self._target = target
        self._hello = hello
        self._timers = timers
        self._memory = memory
        self._monitor = Monitor()
        self._listeners: Kept[Listener] = Kept()
        self._closed = False
        self._ending: weakref.ref[Link] | None = None
        self._disowned = ""
        """Why it cannot be used in a forked child; empty where it can."""
        self._dormant = False
        """In a forked child: nobody has needed a connection yet."""
        self._last_error: HeadraceError | None = None
        self._reconnecting: Task | None = None
        self._ping_s: float | None = None
        self._ticking: Timer | None = None

    def connect(self, wait: float = 0.0) -> None:
        """Make the first connection; keeps trying for so many seconds if the broker is not there yet."""
        deadline, backoff = now() + wait, Backoff()
        timeout = min(self.timeout, _DIAL_TIMEOUT_S)
        while not self._closed:
            try:
                if self._adopt(self._dialled(timeout)):
                    return
            except HeadraceError:
                if now() >= deadline:
                    raise
            with self._monitor.guard:
                self._monitor.wait(min(backoff.next_s(), max(deadline - now(), 0.001)))
            timeout = min(timeout, max(deadline - now(), _LAST_DIAL_S))
        raise Closed("the bus is closed")

    def request(
        self,
        kind: Kind,
        head: Request[Any],
        body: Bytes = b"",
        *,
        timeout: float | None = None,
        repeat: bool = True,
        late: Callback | None = None,
    ) -> Any:
        """Ask, and wait for the answer and its body.

        It is asked again after a broken connection if that does no harm (`repeat`), and whenever the broker says that
        it did nothing and may be asked again; all within the time there is. An answer that comes when nobody waits for
        it any more goes to `late`.
        """
        timeout = self.timeout if timeout is None else timeout
        deadline, backoff = now() + timeout, Backoff()
        while True:
            link = self.get(deadline)
            try:
                return link.request(kind, head, body, max(deadline - now(), 0.001), late)
            except (Busy, Draining):
                wait_s = backoff.next_s()
                if now() + wait_s >= deadline:
                    raise
            except ConnectionFailed:
                if not repeat or self._closed:
                    raise
                continue  # the line itself waits before it connects again
            with self._monitor.guard:
                self._monitor.wait(wait_s)

    def get(self, deadline: float) -> Link:
        """The connection, as soon as there is one."""
        with self._monitor.guard:
            while self.link is None or self.link.closed:
                self.check_open()
                if self._dormant:
                    self._dormant = False
                    self._reconnecting = spawn("reconnect", self._reconnect, Backoff(0.0))
                if not self._monitor.wait(deadline - now()):
                    raise ConnectionFailed(str(self._last_error or unreachable(self._target, "no connection")))
            return self.link

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
        return self.link is not None and not self.link.closed

    def disown(self) -> None:
        """In a forked child: leave the connection to the parent; the first request makes another."""
        self.link = None
        self._monitor = Monitor()
        self._listeners = Kept()
        self._last_error = self._reconnecting = self._ending = self._ping_s = self._ticking = None
        self._dormant = True
        if not isinstance(self._target, Address):
            self._disowned = EMBEDDED
        elif FORK_REFUSED:
            self._disowned = ASYNCIO

    def listen(self, listener: Listener) -> None:
        """Tell this one about connections, beginning with the one there is."""
        with self._monitor.guard:
            self._listeners.add(listener)
            link = self.link
        if link is not None:
            listener.link_up(link)

    def forget(self, listener: Listener) -> None:
        """Tell this one nothing any more."""
        with self._monitor.guard:
            self._listeners.discard(listener)

    def ping_every(self, seconds: float) -> None:
        """Say something at least so often, also if the broker needs to hear less."""
        self._ping_s = min(seconds, self._ping_s or seconds)
        link = self.link
        if link is not None:
            self._tick_later(link)

    def measure_clock(self) -> None:
        """Compare the clocks a few times: the quickest answers tell the most."""
        link = self.link
        if link is not None and not link.closed:
            link.ping(_CLOCK_PINGS)

    def end(self) -> None:
        """End the connection, after what has been written, and make no other; does not wait for it."""
        with self._monitor.guard:
            self._closed = True
            self._monitor.notify()
            link, self.link = self.link, None
            self._ending = self._ending if link is None else weakref.ref(link)
            if self._ticking is not None:
                self._ticking.cancel()
        if link is not None:
            link.end()

    def close(self) -> None:
        """End the connection, make no other, and wait until it has ended."""
        self.end()
        ending = None if self._ending is None else self._ending()
        if ending is not None:
            ending.close()
        if self._reconnecting is not None:
            self._reconnecting.join(_DIAL_TIMEOUT_S)

    def _dialled(self, timeout: float) -> Link:
        return Link.open(self._target, self._hello, timeout, self._lost, self._memory, self._clock)

    def _adopt(self, link: Link) -> bool:
        """Use this connection from now on, unless it is gone already."""
        with self._monitor.guard:
            if self._closed:
                link.end()
            if link.closed or self._closed:
                return False
            self.link = link
            link.on_drain = self._drains
            self._monitor.notify()
            listeners = self._listeners.alive()
        self._tick_later(link)
        if self._clock.in_use:
            self.measure_clock()
        for listener in listeners:
            listener.link_up(link)
        return True

    def _lost(self, link: Link, error: HeadraceError) -> None:
        with self._monitor.guard:
            if self.link is not link:
                return
            self.link = None
            self._last_error = error
            if self._closed:
                return
            logger.warning("%s; connecting again", error)
            self._reconnecting = spawn("reconnect", self._reconnect, Backoff())

    def _reconnect(self, backoff: Backoff) -> None:
        while True:
            with self._monitor.guard:
                if not self._closed:
                    self._monitor.wait(backoff.next_s())
                if self._closed:
                    return
            try:
                if self._adopt(self._dialled(min(self.timeout, _DIAL_TIMEOUT_S))):
                    logger.info("connected again")
                    return
            except HeadraceError as error:
                self._last_error = error

    def _drains(self) -> None:
        for listener in self._listeners.alive():
            listener.link_drains()

    def _tick_later(self, link: Link) -> None:
        assert link.welcome is not None
        heartbeat_s = link.welcome.heartbeat_ms / 1000
        ping_s = min(heartbeat_s, self._ping_s or heartbeat_s)
        elapsed_s = min(_TICK_S, ping_s / 4)

        def tick() -> None:
            if self.link is not link:
                return
            if link.tick(elapsed_s, heartbeat_s, ping_s):
                self._tick_later(link)
            else:
                link.end(ConnectionFailed("the broker has been silent for too long"))

        if self._ticking is not None:
            self._ticking.cancel()
        self._ticking = self._timers.later(elapsed_s, tick)
