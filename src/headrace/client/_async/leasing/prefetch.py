"""Leasing ahead: messages that are there when they are wanted, and at the moment they are due."""

import logging
import weakref
from collections.abc import Callable
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
from headrace.client.leasing.prefetch_window import PrefetchWindow
from headrace.model.errors import ConnectionFailed, HeadraceError, Timeout
from headrace.model.leasing import Lease, Leased, LeaseStop, Release

if TYPE_CHECKING:
    from headrace.client._async.bus import AsyncBus

logger = logging.getLogger("headrace.client")

WAIT_S = 20.0
"""How long a request waits at the broker for messages; then it is asked again."""
AHEAD_S = 0.5
"""How long before they are due messages are fetched."""
_PAUSE_S = 0.05
"""Who was given messages that are not due yet wants only such as are for so long: then there are more to be fetched."""
_BYTES_MAX = 4 << 20
_TOKENS_MAX = 1000
_WITHDRAW_S = 2.0
_STRETCH_MAX = 64
"""After so many messages that were there at once, others have their turn: some of them answer and ask for us."""


class AsyncPrefetcher:
    """A stock of leased messages, which is filled up before it is empty. Any number may take from it.

    If an answer gets lost with its connection, the messages in it stay leased until their leases end.
    """

    def __init__(
        self,
        bus: "AsyncBus",
        acknowledger: AsyncAcknowledger,
        *,
        window: PrefetchWindow,
        lease_ms: int,
        wait_s: float = WAIT_S,
        create: bool = True,
        create_topic: bool = False,
        recover: Callable[[HeadraceError], Any] | None = None,
    ) -> None:
        self.monitor = Monitor()
        self.stopped = False
        self._bus = weakref.ref(bus)  # a connection of the bus has this one
        self._timers = bus._timers
        self._acknowledger = acknowledger
        self._clock = acknowledger.clock
        self._window = window
        self._lease_ms = lease_ms
        self._wait_s = min(wait_s, WAIT_S)
        self._create = create
        self._create_topic = create_topic
        self._recover = recover
        """Does something about a refusal, beside; then it is asked again. Without it takers get the refusal."""
        self._recovering: Task | None = None
        self._buffer = PrefetchBuffer()
        self._tokens: set[tuple[int, int]] = set()
        """Partitions and leases of what was leased."""
        self._broker: AsyncReconnectingConnection | None = None
        self._connection: Connection | None = None
        self._asking = False
        self._looks_ahead = True
        """The next request is also for messages that are not due yet."""
        self._leading = False
        """One of the takers watches the time."""
        self._waiting = 0
        self._at_a_stretch = 0
        """Messages that were taken without waiting."""
        self._error: HeadraceError | None = None
        self._backoff = Backoff()
        self._pausing = False
        self._too_late = False
        """What comes from now on is given back."""
        self.disowned = False
        """The messages are those of the process that this one was forked off."""

    async def begin(self) -> None:
        """Lease the first messages."""
        self._clock.in_use = True
        fork_guard.register(self)
        bus = self._bus()
        assert bus is not None, "whoever asks has the bus"
        self._broker = await bus._consuming_line()
        self._broker.measure_clock()
        self._broker.listen(self)

    async def take(self, deadline: float | None = None) -> Job | None:
        """The next message, not before it is due; None when it is too late, or all is stopped."""
        with self.monitor.guard:
            self._waiting += 1
            try:
                job = await self._taken(deadline)
            finally:
                self._waiting -= 1
                if self._waiting and (self._buffer.ready or (self._buffer.kept_back and not self._leading)):
                    self.monitor.notify(1)  # there is something for another one, or nobody watches the time
        self._flush()
        return job

    def stop(self) -> None:
        """Let nobody take any more."""
        with self.monitor.guard:
            self.stopped = True
            self.monitor.notify()

    async def give_back(self, deadline: float | None = None) -> None:
        """Give back what was not taken, after `stop`; waits for the broker until then at most."""
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
                logger.warning("messages of %s were not given back: %s", self._acknowledger.topic, error)

    async def close(self, deadline: float | None = None) -> None:
        """Give back what was not taken, and extend no more what was."""
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
        """Do the same without waiting for the broker."""
        self.stop()
        connection, acknowledger = self._connection, self._acknowledger
        if self._broker is not None:
            self._broker.forget(self)
        if self._asking and connection is not None:
            head = LeaseStop(acknowledger.topic, acknowledger.subscription)
            connection.request_nowait(head, b"", _unheard, _WITHDRAW_S)
        self._give_back_all()
        with acknowledger.monitor.guard:
            acknowledger.held_leases.forget(self._tokens)

    def _disown(self) -> None:
        """In a forked child: all of it is the parent's."""
        self.monitor = Monitor()
        self.stopped = self.disowned = True
        self._buffer = PrefetchBuffer()
        self._tokens = set()
        self._broker = self._connection = self._error = None
        self._asking = False

    # What the line tells.

    def connection_up(self, connection: Connection) -> None:
        """There is a new connection: ask over it."""
        with self.monitor.guard:
            self._connection = connection
            self._asking = False
            self._ask()
        connection.flush()

    def connection_drains(self) -> None:
        """The broker is going; what it has given out stays with us."""

    # Taking.

    async def _taken(self, deadline: float | None) -> Job | None:
        while True:
            if self._error is not None:
                error, self._error = self._error, None
                raise error
            if self.stopped:
                return None
            if self._at_a_stretch >= _STRETCH_MAX:  # before one is taken: who is cancelled here has none
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
        """The next one that is due and still ours."""
        while True:
            job = self._buffer.next(self._clock.surely_us())
            if job is None:
                return None
            now_us = self._clock.now_us()
            with self._acknowledger.monitor.guard:
                ours = self._acknowledger.held_leases.until_us(job) > now_us
                if ours:
                    self._acknowledger.handed_over(job, now_us)
            if ours:
                return job
            # Its lease could not be extended in time. If that comes to be after all, nobody is to wait for its end.
            self._give_back([job])

    # Filling up.

    def _ask(self) -> None:
        connection = self._connection
        if self._asking or self._pausing or self.stopped or connection is None or connection.closed:
            return
        ready = self._buffer.ready
        asked = self._window.missing(ready, now())
        if not asked:
            return
        if self._buffer.kept_back >= self._window.size:
            self._looks_ahead = False
        looks_ahead = self._looks_ahead
        wait_s = self._wait_s if looks_ahead else min(self._wait_s, _PAUSE_S)
        self._asking = True
        head = Lease(
            self._acknowledger.topic,
            self._acknowledger.subscription,
            asked,
            _BYTES_MAX,
            self._lease_ms,
            round(wait_s * 1000),
            round(AHEAD_S * 1000) if looks_ahead else 0,
            create=self._create,
            create_topic=self._create_topic,
        )

        def told(answer: Any, body: Bytes) -> None:
            self._leased(connection, asked, answer, body)

        connection.queue_request(head, b"", told, wait_s + self._acknowledger.timeout, late=self._came_late)

    def _leased(self, connection: Connection, asked: int, answer: Leased | HeadraceError, body: Bytes) -> None:
        try:
            jobs = self._unpacked(answer, body)
        except HeadraceError as error:
            self._failed(connection, error)
            return
        with self.monitor.guard:
            if connection is self._connection:
                self._asking = False
            self._backoff.reset()
            self._window.served(len(jobs) >= asked, now())
            late = self._too_late
            kept_back = 0
            if jobs and not late:
                kept_back = self._buffer.add(jobs, self._clock.surely_us())
                # Whoever watches the time must see it if there is something that is due before.
                self.monitor.notify(None if kept_back else len(jobs))
            if self.stopped:
                self.monitor.notify()
            self._looks_ahead = not kept_back
            self._ask()
        self._flush()
        if late:
            self._give_back(jobs)

    def _came_late(self, answer: Any, body: Bytes) -> None:
        """This was given up, and others have been asked for in its place."""
        acknowledger = self._acknowledger
        if isinstance(answer, Leased) and answer.portions:
            jobs = leased_jobs(acknowledger.topic, acknowledger.subscription, answer, body)
            for part in in_requests(holdings_of(jobs)):
                head = Release(acknowledger.topic, part, 0, undelivered=True, subscription=acknowledger.subscription)
                acknowledger.send(head, watched=False)

    def _unpacked(self, answer: Leased | HeadraceError, body: Bytes) -> list[Job]:
        if isinstance(answer, HeadraceError):
            raise answer
        if not answer.portions:
            return []
        acknowledger = self._acknowledger
        jobs = leased_jobs(acknowledger.topic, acknowledger.subscription, answer, body)
        with acknowledger.monitor.guard:
            acknowledger.hold(answer.portions, self._lease_ms)
            if len(self._tokens) > _TOKENS_MAX:
                self._tokens = {token for token in self._tokens if acknowledger.held_leases.knows(token)}
            self._tokens.update((portion.partition, portion.lease) for portion in answer.portions)
        return jobs

    def _failed(self, connection: Connection, error: HeadraceError) -> None:
        with self.monitor.guard:
            if connection is self._connection:
                self._asking = False
            if self.stopped:
                self.monitor.notify()
            if isinstance(error, ConnectionFailed) or self.stopped:
                return  # the next connection asks again
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
        """Let a request be answered that still waits for messages: those that come from now on are for others."""
        connection, acknowledger = self._connection, self._acknowledger
        if not self._asking or connection is None:
            return
        answered: ResultCell[Any] = ResultCell()
        head = LeaseStop(acknowledger.topic, acknowledger.subscription)
        connection.request_nowait(head, b"", lambda answer, _: answered.settle(answer), _WITHDRAW_S)
        try:
            answer = await answered.wait(max(min(deadline - now(), _WITHDRAW_S), 0.001))
        except Timeout:
            return
        if not isinstance(answer, HeadraceError):
            deadline = min(deadline, now() + _WITHDRAW_S)
            with self.monitor.guard:
                while self._asking:
                    if not await self.monitor.wait(deadline - now()):
                        break

    def _give_back_all(self) -> "list[ResultCell[Any]]":
        """Give back what was not taken, and from now on what comes."""
        with self.monitor.guard:
            self._too_late = True
            jobs = self._buffer.empty()
        return self._give_back(jobs)

    def _give_back(self, jobs: list[Job]) -> "list[ResultCell[Any]]":
        """Say that these were never looked at."""
        acknowledger = self._acknowledger
        with acknowledger.monitor.guard:
            held = acknowledger.held_leases.held(jobs)
            for job in acknowledger.held_leases.unsettled(jobs) if len(held) < len(jobs) else ():
                if not acknowledger.held_leases.holds(job):  # its lease ended: the broker hands it out again
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
    """The answer to something that nobody waits for."""
