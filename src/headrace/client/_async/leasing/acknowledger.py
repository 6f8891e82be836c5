"""Saying what became of leased messages: acknowledgements that come together go together, and leases are extended."""

import contextlib
import logging
from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import Any

from headrace.client._async.concurrency import Guard, Monitor, ResultCell, Timer, Timers, now, spawn
from headrace.client._async.connection.reconnecting import AsyncReconnectingConnection
from headrace.client.connection.clock import Clock
from headrace.client.connection.request_router import Bytes
from headrace.client.leasing.held_leases import NEVER_US, HeldLeases
from headrace.client.leasing.jobs import Job, holding_of, holdings_of, in_requests
from headrace.model.errors import Busy, ConnectionFailed, Draining, HeadraceError, InvalidArgument
from headrace.model.leasing import Ack, Extend, Holding, LeasedPortion, Refusal, Reject, Release, Settlement
from headrace.model.request import Request

logger = logging.getLogger("headrace.client")

_UNDER_WAY_MAX = 2
"""With so many acknowledgements under way the next ones wait for company: the broker syncs them together anyway."""
_GATHERED_MAX = 1000
_LATE_MAX = 10_000
_RENEW_S_MIN = 0.02
_DONE_BEFORE: dict[type, set[str]] = {
    Ack: {"message_gone"},
    Extend: set(),
    Release: {"message_gone", "not_lease_holder"},
    Reject: {"message_gone", "not_lease_holder"},
}
"""What is answered about messages when a request is repeated that had been carried out."""

Settled = ResultCell[list[Refusal]]
"""What became of a request: the messages for which it was not done."""


class AsyncAckBatch:
    """Acknowledgements that go together."""

    __slots__ = ("count", "offsets", "outcome", "watched")

    def __init__(self) -> None:
        self.offsets: dict[tuple[int, int], list[int]] = {}
        self.count = 0
        self.outcome: Settled = ResultCell()
        self.watched = True
        """Somebody waits for each of them; else what is refused is logged."""

    def holdings(self) -> list[Holding]:
        """By partition and token."""
        return [holding_of(partition, lease, offsets) for (partition, lease), offsets in self.offsets.items()]


class AsyncUnansweredAcks:
    """What somebody has said about messages without waiting for the answers."""

    def __init__(self) -> None:
        self._settled: deque[Settled] = deque()
        self._guard = Guard()

    def add(self, settled: Settled) -> None:
        """This too; those that go together have one answer."""
        waiting = self._settled
        with self._guard:
            while waiting and waiting[0].done:
                waiting.popleft()
            if not waiting or waiting[-1] is not settled:
                waiting.append(settled)

    async def answered(self, timeout: float) -> None:
        """Wait for the answers, as long as they come in time; what they are is logged where they come."""
        deadline = now() + timeout
        while self._settled:
            with contextlib.suppress(HeadraceError):
                await self._settled.popleft().wait(max(deadline - now(), 0.001))


class AsyncAcknowledger:
    """All that a bus says about the messages of one leased subscription."""

    def __init__(
        self, broker: AsyncReconnectingConnection, timers: Timers, clock: Clock, topic: str, subscription: str
    ) -> None:
        self.topic = topic
        self.subscription = subscription
        self.clock = clock
        self._broker = broker
        self._timers = timers
        self._begin()

    def _begin(self) -> None:
        self.monitor = Monitor()
        self.held_leases = HeldLeases()
        """What is extended by itself until it is settled. Only to be looked at with the guard held."""
        self._guard = self.monitor.guard
        self._gathered: AsyncAckBatch | None = None
        self._soon = False
        self._acks_under_way = 0
        self._open = 0
        """Requests that have no answer yet."""
        self._late_us: list[int] = []
        self._renewing: Timer | None = None
        self._renew_at = 0.0

    def disown(self) -> None:
        """In a forked child: what is held, and what was said and not answered yet, is the parent's."""
        self._begin()

    def close(self) -> None:
        """Extend nothing any more."""
        with self._guard:
            if self._renewing is not None:
                self._renewing.cancel()
            self._renewing = None
            self.held_leases.lose_all()  # who settles them now is told that the bus is closed

    # Acknowledging.

    def ack_one(self, job: Job, watched: bool = True) -> Settled:
        """Acknowledge a message, together with those that others acknowledge in the same moment."""
        with self._guard:
            gathered = self._gathered
            if gathered is not None and gathered.count >= _GATHERED_MAX:
                self._send_gathered()
                gathered = None
            if gathered is None:
                gathered = self._gathered = AsyncAckBatch()
            key = (job.partition, job.lease)
            offsets = gathered.offsets.get(key)
            if offsets is None:
                gathered.offsets[key] = [job.offset]
            else:
                offsets.append(job.offset)
            gathered.count += 1
            if not watched:
                gathered.watched = False
            self.held_leases.drop_one(job.partition, job.lease, job.offset)
            if not self._soon:
                self._soon = True
                connection = self._broker.connection
                if connection is None or connection.closed:
                    self._timers.soon(self._send_gathered)
                else:
                    connection.before_flush(self._send_gathered)
            outcome = gathered.outcome
        self.flush()
        return outcome

    def ack_many(self, jobs: Sequence[Job]) -> list[Settled]:
        """Acknowledge messages."""
        holdings = holdings_of(jobs)
        settled = []
        with self._guard:
            self.let_go(holdings)
            for part in in_requests(holdings):
                settled.append(self._post(Ack(self.topic, part, self.subscription, self._take_late())))
        self.flush()
        return settled

    def handed_over(self, job: Job, now_us: int) -> None:
        """A message is given to whoever processes it: note how late, if it has a time and this is its first try."""
        if job.due is not None and job.deliveries == 1 and len(self._late_us) < _LATE_MAX:
            self._late_us.append(now_us - job.due)

    def _send_gathered(self) -> None:
        with self._guard:
            self._soon = False
            gathered = self._gathered
            if gathered is None or (self._acks_under_way >= _UNDER_WAY_MAX and gathered.count < _GATHERED_MAX):
                return  # the next answer lets them go
            self._gathered = None
            self._acks_under_way += 1
            head = Ack(self.topic, gathered.holdings(), self.subscription, self._take_late())
            self._post(head, gathered.outcome, gathered.watched, self._acked)

    def _acked(self) -> None:
        """An answer came: let go what was gathered in the meantime."""
        self._acks_under_way -= 1
        if self._gathered is not None and not self._soon:
            self._send_gathered()

    def _take_late(self) -> list[int]:
        late_us, self._late_us = self._late_us, []
        return late_us

    # Everything else that can be said.

    def send(self, head: Extend | Release | Reject, watched: bool = True) -> Settled:
        """Extend, release or reject messages."""
        with self._guard:
            if not isinstance(head, Extend):
                self.let_go(head.holdings)
            settled = self._post(head, None, watched)
        self.flush()
        return settled

    def let_go(self, holdings: Sequence[Holding]) -> None:
        """These need not be extended any more; with the guard held."""
        for holding in holdings:
            self.held_leases.drop(holding.partition, holding.lease, holding.all_offsets)

    def flush(self) -> None:
        """Let go what was queued to be sent; without the guard, for that may take a moment."""
        connection = self._broker.connection
        if connection is not None:
            connection.flush()

    @property
    def closed(self) -> bool:
        """Whether the bus is closed."""
        return self._broker.closed

    @property
    def timeout(self) -> float:
        """How many seconds it may take until something that was said is answered."""
        return self._broker.timeout

    async def answered(self, timeout: float | None = None) -> bool:
        """Wait until everything that was said has been answered; returns whether that came in time."""
        deadline = now() + (self._broker.timeout if timeout is None else timeout)
        with self._guard:
            while self._open or self._gathered is not None:
                if not await self.monitor.wait(deadline - now()):
                    return False
        return True

    # How it gets there.

    def _post(
        self, head: Request[Settlement], outcome: Settled | None = None, watched: bool = True, after: Any = None
    ) -> Settled:
        """Send a request, with the guard held; `after` is called with the guard when its answer is there."""
        settled: Settled = ResultCell() if outcome is None else outcome
        self._open += 1
        connection, timeout = self._broker.connection, self._broker.timeout
        deadline = now() + timeout
        if connection is None or connection.closed:
            spawn("settle", self._repeat, head, settled, watched, after, deadline, False)
        else:
            tell = partial(self._told, head, settled, watched, after, deadline)
            try:
                connection.queue_request(head, b"", tell, timeout)
            except InvalidArgument as error:  # nothing was sent, and no answer will come
                self._over(head, settled, watched, after, error)
        return settled

    def _told(
        self,
        head: Request[Settlement],
        settled: Settled,
        watched: bool,
        after: Any,
        deadline: float,
        answer: Any,
        _body: Bytes,
    ) -> None:
        if isinstance(answer, ConnectionFailed | Busy | Draining) and now() < deadline:
            lost = isinstance(answer, ConnectionFailed)
            spawn("settle", self._repeat, head, settled, watched, after, deadline, lost)
        else:
            self._over(head, settled, watched, after, answer)

    async def _repeat(
        self, head: Request[Settlement], settled: Settled, watched: bool, after: Any, deadline: float, lost: bool
    ) -> None:
        """Say it again, over another connection; what was done the first time, if that got lost, is not refused."""
        answer: Settlement | HeadraceError
        try:
            settlement = await self._broker.request(head, timeout=deadline - now())
            if lost:
                done = _DONE_BEFORE[type(head)]
                settlement.refused = [refusal for refusal in settlement.refused if refusal.code not in done]
            answer = settlement
        except HeadraceError as error:
            answer = error
        self._over(head, settled, watched, after, answer)

    def _over(
        self, head: Request[Settlement], settled: Settled, watched: bool, after: Any, answer: Settlement | HeadraceError
    ) -> None:
        with self._guard:
            self._open -= 1
            if after is not None:
                after()
            self.monitor.notify()
        self.flush()
        if isinstance(answer, HeadraceError):
            if not watched:
                logger.warning("%s of messages of %s failed: %s", head.declared.name, self.topic, answer)
            settled.fail(answer)
            return
        if answer.refused and not watched:
            self._report(type(head), answer.refused)
        settled.resolve(answer.refused)

    def _report(self, request: type[Request[Settlement]], refused: Sequence[Refusal]) -> None:
        first = refused[0]
        place = f"message {first.offset} of {self.topic}[{first.partition}]"
        others = f" and {len(refused) - 1} more" if len(refused) > 1 else ""
        logger.warning("%s of %s%s was refused: %s", request.declared.name, place, others, first.code)

    # Extending.

    def hold(self, portions: Sequence[LeasedPortion], lease_ms: int) -> None:
        """Extend these from now on, until they are settled; with the guard held."""
        self.held_leases.take(portions, lease_ms, self.clock.now_us())
        self._renew_later()

    def _renew_later(self) -> None:
        if self.held_leases.renew_us == NEVER_US:
            return
        delay_s = max((self.held_leases.renew_us - self.clock.now_us()) / 1e6, _RENEW_S_MIN)
        if self._renewing is None or now() + delay_s < self._renew_at - _RENEW_S_MIN:
            if self._renewing is not None:
                self._renewing.cancel()
            self._renew_at = now() + delay_s
            self._renewing = self._timers.later(delay_s, self._renew)

    def _renew(self) -> None:
        with self._guard:
            self._renewing = None
            ended = self.held_leases.ended(self.clock.now_us())
            by_length: dict[int, list[Holding]] = {}
            for held_lease in self.held_leases.renewable(self.clock.now_us()):
                holding = holding_of(held_lease.partition, held_lease.lease, sorted(held_lease.offsets))
                by_length.setdefault(held_lease.lease_ms, []).append(holding)
            for lease_ms, holdings in by_length.items():
                for part in in_requests(holdings):
                    head = Extend(self.topic, part, lease_ms, self.subscription)
                    connection = self._broker.connection
                    if connection is not None and not connection.closed:  # else the next turn tries again
                        connection.queue_request(head, b"", partial(self._renewed, part), self._broker.timeout)
            self._renew_later()
        self.flush()
        if ended:
            logger.warning("leases of %s messages of %s ended before they could be extended", ended, self.topic)

    def _renewed(self, holdings: Sequence[Holding], answer: Any, _body: Bytes) -> None:
        with self._guard:
            if not isinstance(answer, Settlement):
                logger.warning("leases of %s were not extended: %s", self.topic, answer)
                return
            for holding in holdings:
                held_lease = self.held_leases.held_lease(holding.partition, holding.lease)
                if held_lease is not None:
                    held_lease.extended(answer.until_us, self.clock.now_us())
            # What was settled in the meantime is rightly refused; what is still held was lost.
            lost = [refusal for refusal in answer.refused if self._lose(holdings, refusal)]
            self._renew_later()
        if lost:
            self._report(Extend, lost)

    def _lose(self, holdings: Sequence[Holding], refusal: Refusal) -> bool:
        """The message is no longer ours; returns whether it was still held."""
        for holding in holdings:
            held_lease = self.held_leases.held_lease(holding.partition, holding.lease)
            if (
                held_lease is None
                or holding.partition != refusal.partition
                or refusal.offset not in holding.all_offsets
            ):
                continue
            if refusal.offset in held_lease.offsets:
                self.held_leases.lose_one(holding.partition, holding.lease, refusal.offset)
                return True
        return False
