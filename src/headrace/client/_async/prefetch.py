"""Leasing ahead: messages that are there when they are wanted, and at the moment they are due."""

import logging
import weakref
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from headrace.client import forking
from headrace.client._async.concurrency import Monitor, Outcome, Task, breathe, now, spawn
from headrace.client._async.line import AsyncLine
from headrace.client._async.link import Link
from headrace.client._async.settling import AsyncSettling
from headrace.client.appetite import Appetite
from headrace.client.backoff import Backoff
from headrace.client.exchange import Bytes
from headrace.client.jobs import Job, holdings_of, in_requests, leased_jobs
from headrace.client.stock import Stock
from headrace.model.errors import ConnectionFailed, HeadraceError, Timeout
from headrace.model.leasing import Lease, Leased, LeaseStop, Release
from headrace.wire.native import Kind

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


class AsyncPrefetch:
    """A stock of leased messages, which is filled up before it is empty. Any number may take from it.

    If an answer gets lost with its connection, the messages in it stay leased until their leases end.
    """

    def __init__(
        self,
        bus: "AsyncBus",
        settling: AsyncSettling,
        *,
        appetite: Appetite,
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
        self._settling = settling
        self._clock = settling.clock
        self._appetite = appetite
        self._lease_ms = lease_ms
        self._wait_s = min(wait_s, WAIT_S)
        self._create = create
        self._create_topic = create_topic
        self._recover = recover
        """Does something about a refusal, beside; then it is asked again. Without it takers get the refusal."""
        self._recovering: Task | None = None
        self._stock = Stock()
        self._tokens: set[tuple[int, int]] = set()
        """Partitions and leases of what was leased."""
        self._line: AsyncLine | None = None
        self._link: Link | None = None
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
        forking.register(self)
        bus = self._bus()
        assert bus is not None, "whoever asks has the bus"
        self._line = await bus._consuming_line()
        self._line.measure_clock()
        self._line.listen(self)

    async def take(self, deadline: float | None = None) -> Job | None:
        """The next message, not before it is due; None when it is too late, or all is stopped."""
        with self.monitor.guard:
            self._waiting += 1
            try:
                job = await self._taken(deadline)
            finally:
                self._waiting -= 1
                if self._waiting and (self._stock.ready or (self._stock.kept_back and not self._leading)):
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
            deadline = now() + self._settling.timeout
        try:
            await self._withdraw(deadline)
        finally:
            given_back = self._give_back_all()
        for settled in given_back:
            try:
                await settled.wait(max(deadline - now(), 0.001))
            except HeadraceError as error:
                logger.warning("messages of %s were not given back: %s", self._settling.topic, error)

    async def close(self, deadline: float | None = None) -> None:
        """Give back what was not taken, and extend no more what was."""
        self.stop()
        if self._line is not None:
            self._line.forget(self)
        try:
            if self._recovering is not None:
                await self._recovering.join(self._settling.timeout)
            await self.give_back(deadline)
        finally:
            with self._settling.monitor.guard:
                self._settling.hand.forget(self._tokens)

    def abandon(self) -> None:
        """Do the same without waiting for the broker."""
        self.stop()
        link, settling = self._link, self._settling
        if self._line is not None:
            self._line.forget(self)
        if self._asking and link is not None:
            head = LeaseStop(settling.topic, settling.subscription)
            link.request_nowait(Kind.LEASE_STOP, head, b"", _unheard, _WITHDRAW_S)
        self._give_back_all()
        with settling.monitor.guard:
            settling.hand.forget(self._tokens)

    def _disown(self) -> None:
        """In a forked child: all of it is the parent's."""
        self.monitor = Monitor()
        self.stopped = self.disowned = True
        self._stock = Stock()
        self._tokens = set()
        self._line = self._link = self._error = None
        self._asking = False

    # What the line tells.

    def link_up(self, link: Link) -> None:
        """There is a new connection: ask over it."""
        with self.monitor.guard:
            self._link = link
            self._asking = False
            self._ask()
        link.flush()

    def link_drains(self) -> None:
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
            due_s = None if self._leading else self._stock.wait_s(self._clock.surely_us())
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
            job = self._stock.next(self._clock.surely_us())
            if job is None:
                return None
            now_us = self._clock.now_us()
            with self._settling.monitor.guard:
                ours = self._settling.hand.until_us(job) > now_us
                if ours:
                    self._settling.handed_over(job, now_us)
            if ours:
                return job
            # Its lease could not be extended in time. If that comes to be after all, nobody is to wait for its end.
            self._give_back([job])

    # Filling up.

    def _ask(self) -> None:
        link = self._link
        if self._asking or self._pausing or self.stopped or link is None or link.closed:
            return
        ready = self._stock.ready
        asked = self._appetite.missing(ready, now())
        if not asked:
            return
        if self._stock.kept_back >= self._appetite.size:
            self._looks_ahead = False
        looks_ahead = self._looks_ahead
        wait_s = self._wait_s if looks_ahead else min(self._wait_s, _PAUSE_S)
        self._asking = True
        head = Lease(
            self._settling.topic,
            self._settling.subscription,
            asked,
            _BYTES_MAX,
            self._lease_ms,
            round(wait_s * 1000),
            round(AHEAD_S * 1000) if looks_ahead else 0,
            create=self._create,
            create_topic=self._create_topic,
        )

        def told(answer: Any, body: Bytes) -> None:
            self._leased(link, asked, answer, body)

        link.queue_request(Kind.LEASE, head, b"", told, wait_s + self._settling.timeout, late=self._came_late)

    def _leased(self, link: Link, asked: int, answer: Leased | HeadraceError, body: Bytes) -> None:
        try:
            jobs = self._unpacked(answer, body)
        except HeadraceError as error:
            self._failed(link, error)
            return
        with self.monitor.guard:
            if link is self._link:
                self._asking = False
            self._backoff.reset()
            self._appetite.served(len(jobs) >= asked, now())
            late = self._too_late
            kept_back = 0
            if jobs and not late:
                kept_back = self._stock.add(jobs, self._clock.surely_us())
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
        settling = self._settling
        if isinstance(answer, Leased) and answer.portions:
            jobs = leased_jobs(settling.topic, settling.subscription, answer, body)
            for part in in_requests(holdings_of(jobs)):
                head = Release(settling.topic, part, 0, undelivered=True, subscription=settling.subscription)
                settling.send(Kind.RELEASE, head, watched=False)

    def _unpacked(self, answer: Leased | HeadraceError, body: Bytes) -> list[Job]:
        if isinstance(answer, HeadraceError):
            raise answer
        if not answer.portions:
            return []
        settling = self._settling
        jobs = leased_jobs(settling.topic, settling.subscription, answer, body)
        with settling.monitor.guard:
            settling.hold(answer.portions, self._lease_ms)
            if len(self._tokens) > _TOKENS_MAX:
                self._tokens = {token for token in self._tokens if settling.hand.knows(token)}
            self._tokens.update((portion.partition, portion.lease) for portion in answer.portions)
        return jobs

    def _failed(self, link: Link, error: HeadraceError) -> None:
        with self.monitor.guard:
            if link is self._link:
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
        link, settling = self._link, self._settling
        if not self._asking or link is None:
            return
        answered: Outcome[Any] = Outcome()
        head = LeaseStop(settling.topic, settling.subscription)
        link.request_nowait(Kind.LEASE_STOP, head, b"", lambda answer, _: answered.settle(answer), _WITHDRAW_S)
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

    def _give_back_all(self) -> "list[Outcome[Any]]":
        """Give back what was not taken, and from now on what comes."""
        with self.monitor.guard:
            self._too_late = True
            jobs = self._stock.empty()
        return self._give_back(jobs)

    def _give_back(self, jobs: list[Job]) -> "list[Outcome[Any]]":
        """Say that these were never looked at."""
        settling = self._settling
        with settling.monitor.guard:
            held = settling.hand.held(jobs)
            for job in settling.hand.unsettled(jobs) if len(held) < len(jobs) else ():
                if not settling.hand.holds(job):  # its lease ended: the broker hands it out again
                    settling.hand.drop_one(job.partition, job.lease, job.offset)
        return [
            settling.send(
                Kind.RELEASE,
                Release(settling.topic, part, 0, undelivered=True, subscription=settling.subscription),
                watched=False,
            )
            for part in in_requests(holdings_of(held))
        ]

    def _flush(self) -> None:
        link = self._link
        if link is not None:
            link.flush()


def _unheard(_answer: Any, _body: Bytes) -> None:
    """The answer to something that nobody waits for."""
