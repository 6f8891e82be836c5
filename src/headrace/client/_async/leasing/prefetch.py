"""Prefetches leased messages, so that they are available when requested and at the moment they are due."""

import logging
import weakref
from collections.abc import Callable
from copy import copy
from functools import partial
from typing import TYPE_CHECKING, Any

from headrace.client._async.concurrency import Monitor, ResultCell, Task, breathe, now, spawn
from headrace.client._async.connection.connection import Connection
from headrace.client._async.connection.reconnecting import AsyncReconnectingConnection
from headrace.client._async.leasing.acknowledger import AsyncAcknowledger
from headrace.client.connection import fork_guard
from headrace.client.connection.backoff import Backoff
from headrace.client.connection.request_router import Bytes
from headrace.client.leasing.jobs import Job, holdings_of, in_requests, leased_jobs
from headrace.client.leasing.prefetch_buffer import PrefetchBuffer
from headrace.client.leasing.prefetch_credit import PrefetchCredit
from headrace.client.leasing.prefetch_window import PrefetchWindow
from headrace.model.errors import ConnectionFailed, HeadraceError, Timeout
from headrace.model.leasing import Release
from headrace.model.standing_lease import LeaseClose, LeaseCredit, LeaseDelivery, LeaseOpen, LeaseOpened

if TYPE_CHECKING:
    from headrace.client._async.bus import AsyncBus

logger = logging.getLogger("headrace.client")

AHEAD_S = 0.5
"""How long before their due time messages are leased."""
_PAUSE_S = 0.05
"""After receiving messages that are not yet due, requests only due ones for this long, so that more arrive at once."""
_IDLE_S = 20.0
"""A grown window shrinks again after this long without messages."""
_BYTES_MAX = 4 << 20
_TOKENS_MAX = 1000
_WITHDRAW_S = 2.0
_STRETCH_MAX = 64
"""After this many messages taken without waiting, yields to other tasks, some of which send our requests."""
_AHEAD_MS = round(AHEAD_S * 1000)


class AsyncPrefetcher:
    """A buffer of leased messages, refilled by a standing lease request before it is empty; for any number of takers.

    The credit of the request is the free space of the prefetch window. If a delivery is lost with its connection, the
    messages in it stay leased until their leases expire.
    """

    def __init__(
        self,
        bus: "AsyncBus",
        acknowledger: AsyncAcknowledger,
        *,
        window: PrefetchWindow,
        lease_ms: int,
        create: bool = True,
        create_topic: bool = False,
        recover: Callable[[HeadraceError], Any] | None = None,
    ) -> None:
        self.monitor = Monitor()
        self.stopped = False
        self._bus = weakref.ref(bus)  # a connection of the bus holds a reference to this object
        self._timers = bus._timers
        self._acknowledger = acknowledger
        self._clock = acknowledger.clock
        self._window = window
        self._lease_ms = lease_ms
        self._create = create
        self._create_topic = create_topic
        self._recover = recover
        """Called in the background after a refusal; then the request is repeated. Without it takers get the refusal."""
        self._recovering: Task | None = None
        self._buffer = PrefetchBuffer()
        self._tokens: set[tuple[int, int]] = set()
        """The partitions and leases of the messages in the buffer."""
        self._broker: AsyncReconnectingConnection | None = None
        self._connection: Connection | None = None
        self._standing: int | None = None
        """The number of the standing request, if it is open."""
        self._opening = False
        self._credit = PrefetchCredit(_BYTES_MAX)
        self._came_s = now()
        """When messages last arrived, or the request was opened."""
        self._looks_ahead = True
        """Whether messages that are not due yet are requested too."""
        self._told_ahead = True
        """Whether the broker was told so."""
        self._leading = False
        """Whether one of the takers waits for the next due time."""
        self._waiting = 0
        self._at_a_stretch = 0
        """Messages that were taken without waiting."""
        self._error: HeadraceError | None = None
        self._refusal: HeadraceError | None = None
        """Why the broker does not accept this client; until it does again."""
        self._backoff = Backoff()
        self._pausing = False
        self._too_late = False
        """Whether messages that arrive from now on are released."""
        self.disowned = False
        """Whether the messages belong to the parent, as this process is a forked child."""

    async def begin(self) -> None:
        """Start leasing messages."""
        self._clock.in_use = True
        fork_guard.register(self)
        bus = self._bus()
        assert bus is not None, "whoever asks has the bus"
        self._broker = await bus._consuming_line()
        self._broker.measure_clock()
        self._broker.listen(self)

    async def take(self, deadline: float | None = None) -> Job | None:
        """Return the next message, not before it is due; None after the deadline or `stop`."""
        with self.monitor.guard:
            self._waiting += 1
            try:
                job = await self._taken(deadline)
            finally:
                self._waiting -= 1
                if self._waiting and (self._buffer.ready or (self._buffer.kept_back and not self._leading)):
                    self.monitor.notify(1)  # another taker can take a message, or must wait for the next due time
        self._flush()
        return job

    def stop(self) -> None:
        """End all current and future calls of `take`."""
        with self.monitor.guard:
            self.stopped = True
            self.monitor.notify()

    async def give_back(self, deadline: float | None = None) -> None:
        """Release the messages that were not taken, after `stop`; waits for the broker until the deadline."""
        if deadline is None:
            deadline = now() + self._acknowledger.timeout
        try:
            await self._withdraw(deadline)
        finally:
            given_back = self._give_back_all()
        for settled in given_back:
            try:
                await settled.wait(max(deadline - now(), 0.001))
            except HeadraceError as error:
                logger.warning("messages not released  topic=%s error=%s", self._acknowledger.topic, error)

    async def close(self, deadline: float | None = None) -> None:
        """Release the messages that were not taken, and stop extending the others."""
        self.stop()
        if self._broker is not None:
            self._broker.forget(self)
        try:
            if self._recovering is not None:
                await self._recovering.join(self._acknowledger.timeout)
            await self.give_back(deadline)
        finally:
            with self._acknowledger.monitor.guard:
                self._acknowledger.held_leases.forget(self._tokens)

    def abandon(self) -> None:
        """Close without waiting for the broker."""
        self.stop()
        connection, acknowledger = self._connection, self._acknowledger
        if self._broker is not None:
            self._broker.forget(self)
        if self._standing is not None and connection is not None:
            connection.request_nowait(LeaseClose(self._standing), b"", _unheard, _WITHDRAW_S)
        self._give_back_all()
        with acknowledger.monitor.guard:
            acknowledger.held_leases.forget(self._tokens)

    def _disown(self) -> None:
        """In a forked child: give up all messages, which belong to the parent."""
        self.monitor = Monitor()
        self.stopped = self.disowned = True
        self._buffer = PrefetchBuffer()
        self._tokens = set()
        self._broker = self._connection = self._error = self._refusal = self._standing = None
        self._opening = False

    # Notifications of the connection.

    def connection_up(self, connection: Connection) -> None:
        """After a reconnect: open the request on the new connection."""
        with self.monitor.guard:
            self._connection = connection
            self._refusal = None
            self._standing, self._opening = None, False
            self._ask()
        connection.flush()

    def connection_drains(self) -> None:
        """The broker drains; messages that it has delivered stay leased."""

    def connection_refused(self, error: HeadraceError) -> None:
        """The broker does not accept this client any more: whoever takes a message is told."""
        with self.monitor.guard:
            self._refusal = error
            self.monitor.notify()

    # Taking.

    async def _taken(self, deadline: float | None) -> Job | None:
        while True:
            if self._error is not None:
                error, self._error = self._error, None
                raise error
            if self.stopped:
                return None
            if self._refusal is not None:
                raise copy(self._refusal)
            if self._at_a_stretch >= _STRETCH_MAX:  # before it takes a message: a cancelled taker holds none
                self._at_a_stretch = 0
                await breathe()
                continue
            job = self._next()
            self._ask()
            if job is not None:
                self._at_a_stretch += 1
                return job
            self._at_a_stretch = 0
            left_s = None if deadline is None else deadline - now()
            if left_s is not None and left_s <= 0:
                return None
            self._flush()
            due_s = None if self._leading else self._buffer.wait_s(self._clock.surely_us())
            if due_s is None:
                await self.monitor.wait(left_s)
                continue
            self._leading = True
            try:
                await self.monitor.wait_finely(due_s if left_s is None else min(due_s, left_s))
            finally:
                self._leading = False

    def _next(self) -> Job | None:
        """Return the next message that is due and whose lease is still held."""
        while True:
            job = self._buffer.next(self._clock.surely_us())
            if job is None:
                return None
            self._credit.leave()
            now_us = self._clock.now_us()
            with self._acknowledger.monitor.guard:
                ours = self._acknowledger.held_leases.until_us(job) > now_us
                if ours:
                    self._acknowledger.handed_over(job, now_us)
            if ours:
                return job
            # Its lease was not extended in time. Releases it in case the extension succeeds late.
            self._give_back([job])

    # Filling the buffer.

    def _ask(self) -> None:
        """Grant the broker credit for the free space of the window; opens the standing request if it is not open."""
        connection = self._connection
        if self._opening or self._pausing or self.stopped or connection is None or connection.closed:
            return
        standing, credit = self._standing, self._credit
        if standing is None:
            asked = self._window.missing(self._buffer.ready, now())
            if asked:
                self._open(connection, asked)
            return
        asked = self._window.missing(self._buffer.ready + max(credit.messages, 0), now())
        if asked or credit.owes_bytes or self._looks_ahead != self._told_ahead:
            ahead_ms = None if self._looks_ahead == self._told_ahead else self._ahead_ms()
            connection.queue_tell(LeaseCredit(standing, asked, credit.give(asked), ahead_ms))

    def _ahead_ms(self) -> int:
        """Return how long before their due time messages are requested now."""
        self._told_ahead = self._looks_ahead
        return _AHEAD_MS if self._looks_ahead else 0

    def _open(self, connection: Connection, asked: int) -> None:
        self._opening = True
        self._credit.open(asked)
        head = LeaseOpen(
            self._acknowledger.topic,
            self._acknowledger.subscription,
            asked,
            _BYTES_MAX,
            self._lease_ms,
            self._ahead_ms(),
            create=self._create,
            create_topic=self._create_topic,
        )

        def told(answer: Any, _body: Bytes) -> None:
            self._opened(connection, answer)

        def late(answer: Any, _body: Bytes) -> None:
            if isinstance(answer, LeaseOpened):  # the request was closed, and another one is open
                self._close(connection, answer.standing)

        connection.queue_request(head, b"", told, self._acknowledger.timeout, late=late)

    def _opened(self, connection: Connection, answer: LeaseOpened | HeadraceError) -> None:
        if isinstance(answer, HeadraceError):
            self._failed(connection, answer)
            return
        with self.monitor.guard:
            if connection is not self._connection:
                return  # the connection is gone, and the request with it
            connection.leases[answer.standing] = self
            self._opening, self._standing, self._came_s = False, answer.standing, now()
            if self._too_late:
                self._close(connection, answer.standing)
            if self.stopped:
                self.monitor.notify()
            if self._window.can_grow:
                self._timers.later(_IDLE_S, partial(self._shrink, answer.standing))
            self._ask()
        self._flush()

    def lease_delivered(self, delivery: LeaseDelivery, body: Bytes) -> None:
        """Put leased messages into the buffer."""
        try:
            jobs = self._unpacked(delivery, body)
        except HeadraceError as error:
            self._end(delivery.standing, error)
            return
        with self.monitor.guard:
            late = self._too_late or delivery.standing != self._standing
            if not late:
                self._take_in(jobs, delivery.size_bytes)
            if self.stopped:
                self.monitor.notify()
            self._ask()
        self._flush()
        if late:
            self._give_back(jobs)

    def _take_in(self, jobs: list[Job], size_bytes: int) -> None:
        self._backoff.reset()
        self._credit.delivered(len(jobs), size_bytes)
        self._came_s = now()
        self._window.served(self._credit.messages <= 0, self._came_s)
        kept_back = self._buffer.add(jobs, self._clock.surely_us())
        # The taker that waits for the next due time must notice an earlier one.
        self.monitor.notify(None if kept_back else len(jobs))
        if kept_back and self._looks_ahead:
            self._looks_ahead = False
            self._timers.later(_PAUSE_S, self._look_ahead)

    def _look_ahead(self) -> None:
        """Request messages that are not due yet again, unless the buffer holds enough of them."""
        with self.monitor.guard:
            if self.stopped:
                return
            if self._buffer.kept_back >= self._window.size:
                self._timers.later(_PAUSE_S, self._look_ahead)
                return
            self._looks_ahead = True
            self._ask()
        self._flush()

    def _shrink(self, standing: int) -> None:
        """Reopen the request after a long time without messages, to give up the credit of a grown window."""
        with self.monitor.guard:
            connection = self._connection
            if standing != self._standing or self.stopped or connection is None or connection.closed:
                return
            idle_s = now() - self._came_s
            if idle_s < _IDLE_S or not self._window.is_grown:
                self._timers.later(max(_IDLE_S - idle_s, _IDLE_S / 2), partial(self._shrink, standing))
                return
            self._close(connection, standing, partial(self._shrunk, connection, standing))
        self._flush()

    def _shrunk(self, connection: Connection, standing: int, _answer: Any, _body: Bytes) -> None:
        with self.monitor.guard:
            if connection is self._connection and standing == self._standing:
                self._standing = None
                self._ask()
        self._flush()

    def _close(self, connection: Connection, standing: int, told: Callable[[Any, Bytes], None] | None = None) -> None:
        """Close the request; messages that arrive before the answer are released if no taker needs them."""
        connection.leases.setdefault(standing, self)

        def closed(answer: Any, body: Bytes) -> None:
            connection.leases.pop(standing, None)
            if told is not None:
                told(answer, body)

        connection.queue_request(LeaseClose(standing), b"", closed, self._acknowledger.timeout)

    def _unpacked(self, delivery: LeaseDelivery, body: Bytes) -> list[Job]:
        acknowledger = self._acknowledger
        jobs = leased_jobs(acknowledger.topic, acknowledger.subscription, delivery, body)
        with acknowledger.monitor.guard:
            acknowledger.hold(delivery.portions, self._lease_ms)
            if len(self._tokens) > _TOKENS_MAX:
                self._tokens = {token for token in self._tokens if acknowledger.held_leases.knows(token)}
            self._tokens.update((portion.partition, portion.lease) for portion in delivery.portions)
        return jobs

    def lease_ended(self, standing: int, error: HeadraceError) -> None:
        """Open another request after a pause, or pass the error to the takers."""
        connection = self._connection
        if connection is not None and standing == self._standing:
            self._failed(connection, error)

    def _end(self, standing: int, error: HeadraceError) -> None:
        """Close the request because of a delivery that cannot be decoded."""
        connection = self._connection
        if connection is not None and standing == self._standing:
            self._close(connection, standing)
            self._failed(connection, error)
            self._flush()

    def _failed(self, connection: Connection, error: HeadraceError) -> None:
        with self.monitor.guard:
            if connection is self._connection:
                self._opening, self._standing = False, None
            if self.stopped:
                self.monitor.notify()
            if isinstance(error, ConnectionFailed) or self.stopped:
                return  # opened again on the next connection
            if error.retryable:
                self._pausing = True
                self._timers.later(self._backoff.next_s(), self._go_on)
            elif self._recover is not None:
                self._pausing = True
                self._timers.later(self._backoff.next_s(), partial(self._recover_beside, error))
            else:
                self._error = error
                self.monitor.notify()

    def _recover_beside(self, error: HeadraceError) -> None:
        with self.monitor.guard:
            if not self.stopped:
                self._recovering = spawn("recover", self._recover_from, error)

    async def _recover_from(self, error: HeadraceError) -> None:
        assert self._recover is not None
        try:
            await self._recover(error)
        finally:
            self._go_on()

    def _go_on(self) -> None:
        with self.monitor.guard:
            self._pausing = False
            self._ask()
        self._flush()

    async def _withdraw(self, deadline: float) -> None:
        """Close the standing request, so that the broker delivers to other workers."""
        deadline = min(deadline, now() + _WITHDRAW_S)
        with self.monitor.guard:
            while self._opening:
                if not await self.monitor.wait(deadline - now()):
                    break
        connection, standing = self._connection, self._standing
        if standing is None or connection is None:
            return
        closed: ResultCell[Any] = ResultCell()
        self._close(connection, standing, lambda answer, _: closed.resolve(answer))
        connection.flush()
        try:
            await closed.wait(max(deadline - now(), 0.001))
        except Timeout:
            return
        if self._standing == standing:
            self._standing = None

    def _give_back_all(self) -> "list[ResultCell[Any]]":
        """Release the messages that were not taken, and those that arrive from now on."""
        with self.monitor.guard:
            self._too_late = True
            jobs = self._buffer.empty()
        return self._give_back(jobs)

    def _give_back(self, jobs: list[Job]) -> "list[ResultCell[Any]]":
        """Release messages as undelivered."""
        acknowledger = self._acknowledger
        with acknowledger.monitor.guard:
            held = acknowledger.held_leases.held(jobs)
            for job in acknowledger.held_leases.unsettled(jobs) if len(held) < len(jobs) else ():
                if not acknowledger.held_leases.holds(job):  # its lease expired: the broker delivers it again
                    acknowledger.held_leases.drop_one(job.partition, job.lease, job.offset)
        return [
            acknowledger.send(
                Release(acknowledger.topic, part, 0, undelivered=True, subscription=acknowledger.subscription),
                watched=False,
            )
            for part in in_requests(holdings_of(held))
        ]

    def _flush(self) -> None:
        connection = self._connection
        if connection is not None:
            connection.flush()


def _unheard(_answer: Any, _body: Bytes) -> None:
    """Ignore the answer to a request that no caller waits for."""
