"""Rates of tenants: what is beyond them waits, and only what would wait for too long is refused.

A bucket is filled with tokens at the rate, and may go below zero: who takes more than there is waits until it is filled
again. What is published is taken whole: a request that alone is worth more than the longest wait is accepted while
little is owed. What is delivered is divided as far as batches allow, and one batch never owes more than the longest
wait. Time is an argument everywhere.
"""

from collections.abc import Callable
from functools import partial
from heapq import heappop, heappush
from math import inf
from typing import Any

from headrace.broker.pending_answer import AnswerWithBody, PendingAnswer
from headrace.broker.ports import Session
from headrace.model.batch import count_messages
from headrace.model.errors import HeadraceError, QuotaExceeded, Throttled
from headrace.model.idempotency import PublishOnce
from headrace.model.leasing import Found, Lease, Leased
from headrace.model.limits import RATE_BURST_SECONDS, THROTTLE_SECONDS_MAX
from headrace.model.reading import Fetch, Fetched
from headrace.model.request import Request
from headrace.model.requests import Publish, TransactionStage
from headrace.model.standing_lease import LeaseDelivery
from headrace.model.subject_requests import ReplySend, RequestSend, SubjectDelivery, SubjectPublish
from headrace.model.tenant import TenantQuotas

Ask = Callable[[Session, Request[Any], memoryview, int], Any]

_WAIT_US_MAX = THROTTLE_SECONDS_MAX * 1_000_000
_LITTLE_US = RATE_BURST_SECONDS * 1_000_000
"""Who owes no more than this may publish a batch of any size."""
_SET_BACK_US = 1_000_000
"""A clock that is so far behind was set back; one that is less was read earlier."""
_DELIVERY_PARTS = 20
"""A delivery may have at least this part of what the rate allows in a second: many small ones would cost more."""
_YIELD_US = 5_000
"""How long every other request that waits to read lets streams and standing leases go first."""
_PAUSE_US_MIN = 10_000
"""The shortest pause of deliveries: after each, all streams and leases of the tenant are woken."""
_UNLIMITED = 1 << 62
_BATCHES = frozenset({Publish, TransactionStage, SubjectPublish, PublishOnce})
"""Requests whose bodies are batches of messages."""
_SINGLE = frozenset({RequestSend, ReplySend})
"""Requests that carry one message."""


class TokenBucket:
    """So many tokens per second, and those of a short time at once.

    >>> bucket = TokenBucket(100, now_us=0)
    >>> bucket.take(150, now_us=0)
    >>> bucket.wait_us(now_us=0)
    500000
    """

    __slots__ = ("_filled_us", "_owed_max", "_rate", "_tokens")

    def __init__(self, rate: int, now_us: int, owed_seconds_max: float = inf) -> None:
        """`owed_seconds_max` bounds how long it takes until everything that was taken is there."""
        self._rate = rate
        self._owed_max = rate * owed_seconds_max
        self._tokens = float(rate * RATE_BURST_SECONDS)
        self._filled_us = now_us

    def take(self, amount: int, now_us: int) -> None:
        """Take tokens, also more than there are."""
        self._fill(now_us)
        self._tokens = max(self._tokens - amount, -self._owed_max)

    def wait_us(self, now_us: int, more: int = 0) -> int:
        """How long it takes until what was taken is there, and `more`; 0 if it is."""
        self._fill(now_us)
        left = self._tokens - more
        return 0 if left >= 0 else int(-left * 1_000_000 / self._rate) or 1

    def room(self, now_us: int) -> int:
        """How much a delivery should take at most: what there is, or a small part of a second's worth."""
        self._fill(now_us)
        return max(int(self._tokens), self._rate // _DELIVERY_PARTS, 1)

    def _fill(self, now_us: int) -> None:
        passed_us = now_us - self._filled_us
        if passed_us > 0:
            more = passed_us * self._rate / 1_000_000
            self._tokens = min(self._tokens + more, float(self._rate * RATE_BURST_SECONDS))
        if passed_us > 0 or passed_us < -_SET_BACK_US:
            self._filled_us = now_us


class Flow:
    """The messages and bytes of one direction."""

    __slots__ = ("_buckets",)

    def __init__(
        self, messages: int | None, size_bytes: int | None, now_us: int, owed_seconds_max: float = inf
    ) -> None:
        rates = ((0, messages), (1, size_bytes))
        self._buckets = [
            (which, TokenBucket(rate, now_us, owed_seconds_max)) for which, rate in rates if rate is not None
        ]

    def take(self, messages: int, size_bytes: int, now_us: int) -> None:
        """Count what came or went."""
        for which, bucket in self._buckets:
            bucket.take(size_bytes if which else messages, now_us)

    def wait_us(self, now_us: int, messages: int = 0, size_bytes: int = 0) -> int:
        """How long the next has to wait after these messages and bytes; 0 if it need not."""
        waits = (bucket.wait_us(now_us, size_bytes if which else messages) for which, bucket in self._buckets)
        return max(waits, default=0)

    def room(self, now_us: int) -> tuple[int, int]:
        """How many messages and bytes a delivery should have at most."""
        room = [_UNLIMITED, _UNLIMITED]
        for which, bucket in self._buckets:
            room[which] = bucket.room(now_us)
        return room[0], room[1]


class TenantMeter:
    """Meters the requests of a tenant's sessions, and what is delivered to them."""

    def __init__(
        self, tenant: str, limits: TenantQuotas, wake_at: Callable[[int], None], clock: Callable[[], int]
    ) -> None:
        now_us = clock()
        self.tenant = tenant
        self.limits = limits
        self._wake_at = wake_at
        self._clock = clock
        self._in = Flow(limits.messages_in, limits.bytes_in, now_us)
        self._out = Flow(limits.messages_out, limits.bytes_out, now_us, THROTTLE_SECONDS_MAX)
        self._delayed: list[tuple[int, int, Callable[[int], None]]] = []
        """A heap: a time, a number, and what is to be done then."""
        self._number = 0
        self.is_over = False
        """Whether more was delivered than the rate allows: nothing more is delivered until that is made up."""
        self._over_until_us = 0
        self.stored_bytes = 0
        self.pending_messages = 0
        """What was measured last, and what was published since."""
        self.throttled_us = 0
        """How long answers were delayed, added up."""

    # Requests.

    def ask(self, ask: Ask, session: Session, request: Request[Any], body: memoryview, now_us: int) -> Any:
        """Have a request answered, later if the rate says so; raises if that would take too long."""
        kind = type(request)
        if kind in _BATCHES:
            return self._ask_batches(ask, session, request, body, now_us)
        if kind in _SINGLE:
            return self._ask_single(ask, session, request, body, now_us)
        if self.is_over and (kind is Lease or (isinstance(request, Fetch) and not request.wait_ms)):
            return self._ask_later(ask, session, request, body, now_us)
        return self._counted_out(ask(session, request, body, now_us), now_us)

    def _ask_batches(self, ask: Ask, session: Session, request: Request[Any], body: memoryview, now_us: int) -> Any:
        messages = count_messages(body)
        self._check_in(messages, len(body), now_us)
        self._check_stored(len(body))
        # Before it is carried out: what is refused there has taken time, too.
        self._in.take(messages, len(body), now_us)
        outcome = ask(session, request, body, now_us)
        self.stored_bytes += len(body)
        return self._delay(outcome, now_us)

    def _ask_single(self, ask: Ask, session: Session, request: Request[Any], body: memoryview, now_us: int) -> Any:
        self._check_in(1, len(body), now_us)
        outcome = ask(session, request, body, now_us)
        self._in.take(1, len(body), now_us)  # only now: a request that no responder gets counts for nothing
        return self._delay(outcome, now_us)

    def _check_in(self, messages: int, size_bytes: int, now_us: int) -> None:
        """Refuse what would be answered too late; what is too much for any wait is accepted when little is owed."""
        wait_us = self._in.wait_us(now_us)
        if wait_us > _LITTLE_US and self._in.wait_us(now_us, messages, size_bytes) > _WAIT_US_MAX:
            raise self._throttled(wait_us)

    def _ask_later(self, ask: Ask, session: Session, request: Request[Any], body: memoryview, now_us: int) -> Any:
        """Carry out a lease or fetch when the rate allows: leased messages are not to lie here."""
        pending: PendingAnswer[Any] = PendingAnswer()

        def carry_out(time_us: int) -> None:
            if pending.resolved:
                return  # withdrawn meanwhile
            if self.is_over:  # others were first
                wait_us = self._over_until_us - time_us
                if time_us + wait_us > now_us + _WAIT_US_MAX:
                    pending.resolve(self._throttled(wait_us))
                else:
                    self._read_later(carry_out, wait_us, time_us)
                return
            try:
                outcome = self._counted_out(ask(session, request, body, time_us), time_us)
            except HeadraceError as error:
                outcome = error
            if isinstance(outcome, PendingAnswer):
                outcome.then(pending.resolve)
                pending.then(partial(_cancel, outcome))
            else:
                pending.resolve(outcome)

        self._read_later(carry_out, self._over_until_us - now_us, now_us)
        return pending

    def _read_later(self, carry_out: Callable[[int], None], wait_us: int, now_us: int) -> None:
        self.throttled_us += max(wait_us, 0)
        self._later(now_us + max(wait_us, 1) + (_YIELD_US if self._number % 2 else 0), carry_out)

    def _throttled(self, wait_us: int) -> Throttled:
        return Throttled(
            f"the tenant {self.tenant} is {wait_us / 1e6:.1f} seconds beyond its rate; nothing was done: try again "
            "then, with fewer or smaller messages, or let an administrator raise the quota",
            retry_after_ms=max(wait_us // 1000, 1),
        )

    def _check_stored(self, more_bytes: int) -> None:
        limit = self.limits.stored_bytes
        if limit is not None and self.stored_bytes + more_bytes > limit:
            raise QuotaExceeded.of(self.tenant, "stored_bytes", limit, self.stored_bytes, more_bytes)
        limit = self.limits.pending_messages
        if limit is not None and self.pending_messages >= limit:
            raise QuotaExceeded.of(self.tenant, "pending_messages", limit, self.pending_messages, 1)

    def _delay(self, outcome: Any, now_us: int) -> Any:
        """The outcome, when the rate allows the next request: clients wait for answers before they send much more."""
        wait_us = min(self._in.wait_us(now_us), _WAIT_US_MAX)
        if not wait_us:
            return outcome
        pending: PendingAnswer[Any] = PendingAnswer()

        def pass_on(_: int) -> None:
            if isinstance(outcome, PendingAnswer):
                outcome.then(pending.resolve)
            else:
                pending.resolve(outcome)

        if isinstance(outcome, PendingAnswer):
            pending.then(partial(_cancel, outcome))
        self._later(now_us + wait_us, pass_on)
        self.throttled_us += wait_us
        return pending

    def _later(self, time_us: int, call: Callable[[int], None]) -> None:
        if not self._delayed or time_us < self._delayed[0][0]:
            self._wake_at(time_us)
        self._number += 1
        heappush(self._delayed, (time_us, self._number, call))

    # Deliveries.

    def push(self, push: Callable[[Any], None], pushed: Any, now_us: Callable[[], int]) -> None:
        """Push something to a session, and count it; what is leased was counted before."""
        push(pushed)
        if isinstance(pushed, AnswerWithBody):
            self._count(pushed, now_us())

    def room(self, now_us: int) -> tuple[int, int]:
        """How many messages and bytes the next delivery should have at most."""
        return self._out.room(now_us)

    def delivered(self, messages: int, size_bytes: int, now_us: int) -> None:
        """Count what a session got."""
        self._out.take(messages, size_bytes, now_us)
        wait_us = self._out.wait_us(now_us)
        if wait_us:
            self._over_until_us = now_us + max(wait_us, _PAUSE_US_MIN)
            if not self.is_over:
                self.is_over = True
                self._wake_at(self._over_until_us)

    def _counted_out(self, outcome: Any, now_us: int) -> Any:
        if isinstance(outcome, AnswerWithBody):
            self._count(outcome, now_us)
        elif isinstance(outcome, PendingAnswer):
            outcome.then(self._resolved)
        return outcome

    def _resolved(self, outcome: Any) -> None:
        if isinstance(outcome, AnswerWithBody):
            self._count(outcome, self._clock())

    def _count(self, outcome: AnswerWithBody[Any], now_us: int) -> None:
        """Count an answer or a delivery, but for what counts when it is read or leased."""
        answer, body = outcome
        if isinstance(answer, SubjectDelivery | Found):
            self.delivered(count_messages(memoryview(body)), len(body), now_us)
        elif not isinstance(answer, Fetched | Leased | LeaseDelivery) and len(body):
            self.delivered(1, len(body), now_us)

    # Time.

    def next_tick_us(self) -> int | None:
        """When the next answer is to be passed on, or deliveries go on."""
        times = [self._delayed[0][0]] if self._delayed else []
        return min([*times, self._over_until_us] if self.is_over else times, default=None)

    def tick(self, now_us: int) -> bool:
        """Pass on what has waited long enough; whether deliveries go on."""
        goes_on = False
        left_us = self._over_until_us - now_us
        if self.is_over and not 0 < left_us <= _WAIT_US_MAX:  # over, or the clock was set back
            wait_us = self._out.wait_us(now_us)
            self.is_over = bool(wait_us)
            self._over_until_us = now_us + wait_us
            goes_on = not self.is_over
        while self._delayed and self._delayed[0][0] <= now_us:
            heappop(self._delayed)[2](now_us)
        return goes_on

    def is_idle(self, now_us: int) -> bool:
        """Whether it has nothing to remember: all that was taken beyond the rates is made up."""
        return not (self._delayed or self._in.wait_us(now_us) or self._out.wait_us(now_us))

    def release(self, now_us: int) -> None:
        """Pass everything on at once: the rates have changed."""
        self.is_over = False
        self._out = Flow(None, None, now_us)
        while self._delayed:
            heappop(self._delayed)[2](now_us)


class EndedMeter(TenantMeter):
    """The meter of a session that was ended: it refuses everything."""

    def __init__(self, tenant: str, error: HeadraceError) -> None:
        super().__init__(tenant, TenantQuotas(), lambda _: None, lambda: 0)
        self._error = error
        self.is_over = True

    def ask(self, ask: Ask, session: Session, request: Request[Any], body: memoryview, now_us: int) -> Any:  # noqa: ARG002
        """Refuse a request."""
        raise self._error


def is_metered(limits: TenantQuotas) -> bool:
    """Whether requests of a tenant with these quotas have to be metered."""
    rates = (limits.messages_in, limits.bytes_in, limits.messages_out, limits.bytes_out)
    return any(one is not None for one in (*rates, limits.stored_bytes, limits.pending_messages))


def _cancel(outcome: PendingAnswer[Any], _: object) -> None:
    """Withdraw a request whose delayed answer was cancelled; without effect on one that was answered."""
    outcome.cancel()
