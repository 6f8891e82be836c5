"""Leases messages on request: merges concurrent requests into one."""

import weakref
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from headrace.client._async.concurrency import ResultCell, now, spawn
from headrace.client._async.connection.reconnecting import AsyncReconnectingConnection
from headrace.client._async.leasing.acknowledger import AsyncAcknowledger
from headrace.client.connection.request_router import Bytes
from headrace.client.connection.retrying import REPEATED
from headrace.client.leasing.jobs import Job, holdings_of, leased_jobs
from headrace.model.arguments import shown
from headrace.model.errors import HeadraceError, InvalidArgument
from headrace.model.leasing import Lease, Leased, Release
from headrace.model.limits import LEASE_MESSAGES_MAX

if TYPE_CHECKING:
    from headrace.client._async.bus_parts import AsyncBusParts

_UNDER_WAY_MAX = 2
"""With this many non-waiting requests in flight, further ones are merged until an answer arrives."""
_WAIT_MS_MAX = 600_000
"""The broker's maximum wait of a request; a longer wait repeats the request."""
_WAIT_ERROR_S = 0.005
"""An answer that arrives this much before the deadline counts as being at the deadline."""

_Terms = tuple[int, int, int, bool, bool]
"""The parameters that merged requests share: lease_ms, wait_ms, bytes_max, whether leases are extended, and whether the
topic may be created."""


class AsyncLeaseWaiter:
    """A caller that waits for messages."""

    __slots__ = ("again_until", "deadline", "gone", "outcome", "wanted")

    def __init__(self, wanted: int, again_until: float, deadline: float) -> None:
        self.wanted = wanted
        self.again_until = again_until
        """The deadline until which the request is repeated if there is no message."""
        self.deadline = deadline
        """The deadline after which the caller gets a timeout."""
        self.outcome: ResultCell[list[Job]] = ResultCell()
        self.gone = False
        """Whether the caller has gone."""


class AsyncLeaseRequester:
    """Leases messages of one subscription for all callers of `lease` on a bus."""

    def __init__(self, bus: "AsyncBusParts", acknowledger: AsyncAcknowledger) -> None:
        self._bus = weakref.ref(bus)  # the bus holds a reference to this object
        self._timers = bus._timers
        self._acknowledger = acknowledger
        self._begin()

    def _begin(self) -> None:
        self._guard = self._acknowledger.monitor.guard
        self._broker: AsyncReconnectingConnection | None = None
        self._asks: dict[_Terms, list[AsyncLeaseWaiter]] = {}
        self._under_way: dict[_Terms, int] = {}

    def disown(self) -> None:
        """In a forked child, after the acknowledger: drop pending requests, which belong to the parent."""
        self._begin()

    async def take(
        self,
        wanted: int,
        lease_ms: int,
        wait_ms: int,
        bytes_max: int,
        extend: bool = False,
        create_topic: bool = False,
    ) -> list[Job]:
        """Lease messages up to a limit; returns none if none is ready in time.

        If the answer is lost, its messages stay leased until the lease expires, and are then delivered again.
        """
        if type(wanted) is not int or not 0 < wanted <= LEASE_MESSAGES_MAX:
            raise InvalidArgument(f"1 to {LEASE_MESSAGES_MAX} messages can be leased at once, not {shown(wanted)}")
        if type(bytes_max) is not int or not 0 <= bytes_max < 1 << 63:
            raise InvalidArgument(f"bytes_max is a whole number of bytes, not {shown(bytes_max)}")
        began, broker = now(), self._broker
        if broker is None:
            bus = self._bus()
            assert bus is not None, "whoever asks has the bus"
            broker = self._broker = await bus._consuming_line()
        again_until = began + wait_ms / 1000
        ask = AsyncLeaseWaiter(wanted, again_until, again_until + broker.timeout)
        self._put((lease_ms, wait_ms, bytes_max, extend, create_topic), ask)
        try:
            jobs = await ask.outcome.wait()
        except BaseException:
            with self._guard:
                ask.gone = True
                left = ask.outcome.value if ask.outcome.done else None
            if left:
                self._give_back(left)
            raise
        return jobs

    def _put(self, terms: _Terms, ask: AsyncLeaseWaiter) -> None:
        assert self._broker is not None
        with self._guard:
            asks = self._asks.get(terms)
            if asks is None:
                self._asks[terms] = [ask]
                connection = self._broker.connection
                if connection is None or connection.closed:
                    self._timers.soon(partial(self._send, terms))
                else:
                    connection.before_flush(partial(self._send, terms))
            else:
                asks.append(ask)
        self._flush()

    def _send(self, terms: _Terms) -> None:
        with self._guard:
            asks = self._asks.get(terms)
            under_way = self._under_way.get(terms, 0)
            if asks is None or (not terms[1] and under_way >= _UNDER_WAY_MAX):
                return  # the waiting requests have been sent, or are sent when an answer arrives
            del self._asks[terms]
            self._under_way[terms] = under_way + 1
            self._post(terms, asks)

    def _post(self, terms: _Terms, asks: list[AsyncLeaseWaiter]) -> None:
        assert self._broker is not None
        lease_ms, wait_ms, bytes_max, _, create_topic = terms
        if wait_ms:
            wait_ms = _wait_ms_left(asks)
        head = Lease(
            self._acknowledger.topic,
            self._acknowledger.subscription,
            min(sum(ask.wanted for ask in asks), LEASE_MESSAGES_MAX),
            bytes_max,
            lease_ms,
            wait_ms,
            create_topic=create_topic,
        )
        connection = self._broker.connection
        if connection is None or connection.closed:
            spawn("lease", self._repeat, terms, asks, head)
        else:
            timeout = max(ask.deadline for ask in asks) - now()
            tell = partial(self._told, terms, asks, head)
            # Messages copy their bytes, so the answer's buffer can be released.
            try:
                connection.queue_request(head, b"", tell, timeout, lasting=False, late=self._came_late)
            except InvalidArgument as error:  # nothing was sent, so no answer will arrive
                self._over(terms, asks, error, b"")

    def _told(self, terms: _Terms, asks: list[AsyncLeaseWaiter], head: Lease, answer: Any, body: Bytes) -> None:
        if isinstance(answer, REPEATED) and now() < max(ask.deadline for ask in asks):
            spawn("lease", self._repeat, terms, asks, head)
        else:
            self._over(terms, asks, answer, body)

    async def _repeat(self, terms: _Terms, asks: list[AsyncLeaseWaiter], head: Lease) -> None:
        """Repeat the request over another connection; messages of a lost answer arrive again after their lease."""
        assert self._broker is not None
        timeout = max(ask.deadline for ask in asks) - now()
        if head.wait_ms:
            head.wait_ms = _wait_ms_left(asks)
        try:
            answer, body = await self._broker.request_with_body(head, timeout=timeout, late=self._came_late)
        except HeadraceError as error:
            self._over(terms, asks, error, b"")
        else:
            self._over(terms, asks, answer, body)

    def _over(self, terms: _Terms, asks: list[AsyncLeaseWaiter], answer: Leased | HeadraceError, body: Bytes) -> None:
        with self._guard:
            under_way = self._under_way[terms] = self._under_way[terms] - 1
            if not under_way:
                del self._under_way[terms]
            if isinstance(answer, Leased):
                try:
                    self._divide(terms, asks, answer, body)
                except HeadraceError as error:
                    answer = error
            if isinstance(answer, HeadraceError):
                for ask in asks:
                    ask.outcome.fail(answer)
            self._send(terms)
        self._flush()

    def _divide(self, terms: _Terms, asks: list[AsyncLeaseWaiter], answer: Leased, body: Bytes) -> None:
        """Distribute the messages to the callers; requests again for callers that got none before their deadline."""
        acknowledger = self._acknowledger
        jobs = leased_jobs(acknowledger.topic, acknowledger.subscription, answer, body) if answer.portions else []
        if jobs and terms[3]:
            acknowledger.hold(answer.portions, terms[0])
        at = 0
        for ask in asks:
            if ask.gone:
                continue
            share = jobs[at : at + ask.wanted] if len(asks) > 1 else jobs
            at += len(share)
            over = now() >= ask.again_until - _WAIT_ERROR_S if terms[1] else not jobs
            if share or over:
                ask.outcome.resolve(share)
            else:
                self._put(terms, ask)
        if at < len(jobs):
            self._give_back(jobs[at:])

    def _came_late(self, answer: Any, body: Bytes) -> None:
        """Release messages whose caller has gone."""
        acknowledger = self._acknowledger
        if isinstance(answer, Leased) and answer.portions:
            self._give_back(leased_jobs(acknowledger.topic, acknowledger.subscription, answer, body))

    def give_back(self, jobs: Sequence[Job]) -> None:
        """Release messages as undelivered, without waiting for the answer."""
        if jobs:
            self._give_back(jobs)

    def _give_back(self, jobs: Sequence[Job]) -> None:
        acknowledger = self._acknowledger
        head = Release(
            acknowledger.topic, holdings_of(jobs), 0, undelivered=True, subscription=acknowledger.subscription
        )
        acknowledger.send(head, watched=False)

    def _flush(self) -> None:
        if self._broker is not None and self._broker.connection is not None:
            self._broker.connection.flush()


def _wait_ms_left(asks: list[AsyncLeaseWaiter]) -> int:
    """Return how long the broker shall wait for messages if none is ready."""
    return min(max(round((max(ask.again_until for ask in asks) - now()) * 1000), 0), _WAIT_MS_MAX)
