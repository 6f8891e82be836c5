"""Settles the leased messages of a subscription: batches acknowledgements, and extends leases until then."""

import contextlib
import logging
from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import Any

from headrace.client._sync.concurrency import Guard, Monitor, ResultCell, Timer, Timers, now, spawn
from headrace.client._sync.connection.reconnecting import ReconnectingConnection
from headrace.client.connection.clock import Clock
from headrace.client.connection.request_router import Bytes
from headrace.client.connection.retrying import IN_DOUBT, REPEATED
from headrace.client.leasing.held_leases import NEVER_US, HeldLeases
from headrace.client.leasing.jobs import Job, holding_of, holdings_of, in_requests
from headrace.model.batch import Batch
from headrace.model.errors import HeadraceError, InvalidArgument
from headrace.model.job_requests import JobFinish
from headrace.model.leasing import Ack, Extend, Holding, LeasedPortion, Refusal, Reject, Release, Settlement
from headrace.model.request import Request

logger = logging.getLogger("headrace.client")

_UNDER_WAY_MAX = 2
"""With this many acknowledgements in flight, further ones are batched: the broker syncs them together anyway."""
_GATHERED_MAX = 1000
_LATE_MAX = 10_000
_RENEW_S_MIN = 0.02
_DONE_BEFORE: dict[type, set[str]] = {
    Ack: {"message_gone"},
    Extend: set(),
    Release: {"message_gone", "not_lease_holder"},
    Reject: {"message_gone", "not_lease_holder"},
    JobFinish: {"message_gone", "not_lease_holder"},
}
"""The errors with which the broker answers a repeated request that it had already carried out."""

Settled = ResultCell[list[Refusal]]
"""The result of a settlement request: the refused messages."""


class AckBatch:
    """A batch of acknowledgements."""

    __slots__ = ("count", "offsets", "outcome", "watched")

    def __init__(self) -> None:
        self.offsets: dict[tuple[int, int], list[int]] = {}
        self.count = 0
        self.outcome: Settled = ResultCell()
        self.watched = True
        """Whether a caller waits for the results; otherwise refusals are logged."""

    def holdings(self) -> list[Holding]:
        """The messages, by partition and token."""
        return [holding_of(partition, lease, offsets) for (partition, lease), offsets in self.offsets.items()]


class UnansweredAcks:
    """Settlements that were sent without waiting for the answers."""

    def __init__(self) -> None:
        self._settled: deque[Settled] = deque()
        self._guard = Guard()

    def add(self, settled: Settled) -> None:
        """Add a settlement; settlements of one batch share an answer."""
        waiting = self._settled
        with self._guard:
            while waiting and waiting[0].done:
                waiting.popleft()
            if not waiting or waiting[-1] is not settled:
                waiting.append(settled)

    def answered(self, timeout: float) -> None:
        """Wait for the answers until the deadline; the receiver of an answer logs its refusals."""
        deadline = now() + timeout
        while self._settled:
            with contextlib.suppress(HeadraceError):
                self._settled.popleft().wait(max(deadline - now(), 0.001))


class Acknowledger:
    """Sends all settlements of a bus for one leased subscription."""

    def __init__(
        self, broker: ReconnectingConnection, timers: Timers, clock: Clock, topic: str, subscription: str
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
        """The leases that are extended automatically until they are settled. Use it only with the guard held."""
        self._guard = self.monitor.guard
        self._gathered: AckBatch | None = None
        self._soon = False
        self._acks_under_way = 0
        self._open = 0
        """Requests without an answer yet."""
        self._late_us: list[int] = []
        self._renewing: Timer | None = None
        self._renew_at = 0.0

    def disown(self) -> None:
        """In a forked child: drop held leases and unanswered requests, which belong to the parent."""
        self._begin()

    def close(self) -> None:
        """Stop extending leases."""
        with self._guard:
            if self._renewing is not None:
                self._renewing.cancel()
            self._renewing = None
            self.held_leases.lose_all()  # callers that settle them now get the error that the bus is closed

    # Acknowledging.

    def ack_one(self, job: Job, watched: bool = True) -> Settled:
        """Acknowledge a message, batched with concurrent acknowledgements."""
        with self._guard:
            gathered = self._gathered
            if gathered is not None and gathered.count >= _GATHERED_MAX:
                self._send_gathered()
                gathered = None
            if gathered is None:
                gathered = self._gathered = AckBatch()
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
        """Record the delay of a message at its first delivery to the program, if it has a due time."""
        if job.due is not None and job.deliveries == 1 and len(self._late_us) < _LATE_MAX:
            self._late_us.append(now_us - job.due)

    def _send_gathered(self) -> None:
        with self._guard:
            self._soon = False
            gathered = self._gathered
            if gathered is None or (self._acks_under_way >= _UNDER_WAY_MAX and gathered.count < _GATHERED_MAX):
                return  # they are sent when the next answer arrives
            self._gathered = None
            self._acks_under_way += 1
            head = Ack(self.topic, gathered.holdings(), self.subscription, self._take_late())
            self._post(head, gathered.outcome, gathered.watched, self._acked)

    def _acked(self) -> None:
        """After an answer: send the acknowledgements that were batched in the meantime."""
        self._acks_under_way -= 1
        if self._gathered is not None and not self._soon:
            self._send_gathered()

    def _take_late(self) -> list[int]:
        late_us, self._late_us = self._late_us, []
        return late_us

    # Other settlements.

    def send(self, head: Extend | Release | Reject, watched: bool = True) -> Settled:
        """Extend, release or reject messages."""
        with self._guard:
            if not isinstance(head, Extend):
                self.let_go(head.holdings)
            settled = self._post(head, None, watched)
        self.flush()
        return settled

    def finish(self, job: Job, result: Batch) -> Settled:
        """Acknowledge a job together with its result."""
        head = JobFinish(self.topic, holding_of(job.partition, job.lease, [job.offset]), self.subscription)
        with self._guard:
            self.let_go([head.holding])
            settled = self._post(head, watched=False, body=result.data)
        self.flush()
        return settled

    def let_go(self, holdings: Sequence[Holding]) -> None:
        """Stop extending these leases; with the guard held."""
        for holding in holdings:
            self.held_leases.drop(holding.partition, holding.lease, holding.all_offsets)

    def flush(self) -> None:
        """Send the queued frames; without the guard, as sending may block briefly."""
        connection = self._broker.connection
        if connection is not None:
            connection.flush()

    @property
    def closed(self) -> bool:
        """Whether the bus is closed."""
        return self._broker.closed

    @property
    def timeout(self) -> float:
        """The maximum time until a request is answered, in seconds."""
        return self._broker.timeout

    def answered(self, timeout: float | None = None) -> bool:
        """Wait until all requests are answered; returns whether that happened in time."""
        deadline = now() + (self._broker.timeout if timeout is None else timeout)
        with self._guard:
            while self._open or self._gathered is not None:
                if not self.monitor.wait(deadline - now()):
                    return False
        return True

    # Requests and answers.

    def _post(
        self,
        head: Request[Settlement],
        outcome: Settled | None = None,
        watched: bool = True,
        after: Any = None,
        body: Bytes = b"",
    ) -> Settled:
        """Send a request, with the guard held; `after` is called with the guard held when its answer arrives."""
        settled: Settled = ResultCell() if outcome is None else outcome
        self._open += 1
        connection, timeout = self._broker.connection, self._broker.timeout
        deadline = now() + timeout
        if connection is None or connection.closed:
            spawn("settle", self._repeat, head, body, settled, watched, after, deadline, False)
        else:
            tell = partial(self._told, head, body, settled, watched, after, deadline)
            try:
                connection.queue_request(head, body, tell, timeout)
            except InvalidArgument as error:  # nothing was sent, so no answer will arrive
                self._over(head, settled, watched, after, error)
        return settled

    def _told(
        self,
        head: Request[Settlement],
        body: Bytes,
        settled: Settled,
        watched: bool,
        after: Any,
        deadline: float,
        answer: Any,
        _body: Bytes,
    ) -> None:
        if isinstance(answer, REPEATED) and now() < deadline:
            lost = isinstance(answer, IN_DOUBT)
            spawn("settle", self._repeat, head, body, settled, watched, after, deadline, lost)
        else:
            self._over(head, settled, watched, after, answer)

    def _repeat(
        self,
        head: Request[Settlement],
        body: Bytes,
        settled: Settled,
        watched: bool,
        after: Any,
        deadline: float,
        lost: bool,
    ) -> None:
        """Repeat a request over other connections; ignores refusals of messages that an earlier attempt settled."""
        answer: Settlement | HeadraceError

        def in_doubt() -> None:
            nonlocal lost
            lost = True

        try:
            settlement = self._broker.request(head, body, timeout=deadline - now(), on_doubt=in_doubt)
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
                logger.warning("settlement failed  action=%s topic=%s error=%s", head.declared.name, self.topic, answer)
            settled.fail(answer)
            return
        if answer.refused and not watched:
            self._report(type(head), answer.refused)
        settled.resolve(answer.refused)

    def _report(self, request: type[Request[Settlement]], refused: Sequence[Refusal]) -> None:
        first = refused[0]
        logger.warning(
            "settlement refused  action=%s topic=%s partition=%s offset=%s messages=%s code=%s",
            request.declared.name,
            self.topic,
            first.partition,
            first.offset,
            len(refused),
            first.code,
        )

    # Extending leases.

    def hold(self, portions: Sequence[LeasedPortion], lease_ms: int) -> None:
        """Extend these leases until they are settled; with the guard held."""
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
                    if connection is not None and not connection.closed:  # otherwise the next extension tries again
                        connection.queue_request(head, b"", partial(self._renewed, part), self._broker.timeout)
            self._renew_later()
        self.flush()
        if ended:
            logger.warning("leases expired before they were extended  messages=%s topic=%s", ended, self.topic)

    def _renewed(self, holdings: Sequence[Holding], answer: Any, _body: Bytes) -> None:
        with self._guard:
            if not isinstance(answer, Settlement):
                logger.warning("lease extension failed  topic=%s error=%s", self.topic, answer)
                return
            for holding in holdings:
                held_lease = self.held_leases.held_lease(holding.partition, holding.lease)
                if held_lease is not None:
                    held_lease.extended(answer.until_us, self.clock.now_us())
            # The broker rightly refuses messages that were settled in the meantime; those still held are lost.
            lost = [refusal for refusal in answer.refused if self._lose(holdings, refusal)]
            self._renew_later()
        if lost:
            self._report(Extend, lost)

    def _lose(self, holdings: Sequence[Holding], refusal: Refusal) -> bool:
        """Drop a lost lease; returns whether it was still held."""
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
