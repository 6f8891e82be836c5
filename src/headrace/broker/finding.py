"""Looking at what a leased subscription has: by status, time, key, owner and headers, a page at a time."""

from bisect import bisect_right
from collections.abc import Generator, Iterator
from heapq import merge
from itertools import chain, islice
from typing import Any, NamedTuple

import msgspec

from headrace.broker.dead_letters import PREFIX, DeadLetters
from headrace.broker.editing import EDITS_TOGETHER, Editing, Edition, checked_edition
from headrace.broker.later import Later, WithBody, sealed
from headrace.broker.ledger import Ledger
from headrace.broker.ports import Ports
from headrace.broker.slices import Steps, in_slices
from headrace.broker.subscriptions import Subscription, SubscriptionRegistry
from headrace.broker.topics import Topics
from headrace.broker.unsubscribed import TopicView, TopicViews
from headrace.engines.api import LeasedIndex, outlook
from headrace.model.batch import Columns
from headrace.model.errors import HeadraceError, InvalidArgument, SubscriptionNotFound
from headrace.model.leasing import (
    OWNER_HEADER,
    EditMatching,
    Find,
    Forecast,
    Forecasted,
    Found,
    FoundMessage,
    MessageId,
    Outcome,
    Redrive,
    Redriven,
    Selection,
)
from headrace.model.limits import LEASE_MESSAGES_MAX
from headrace.model.requests import Words
from headrace.model.subscription import checked_subscription

_EXAMINED_MAX = 20_000
"""Messages that are looked at for one request; those with fewer results than asked for may be followed by others."""
_TOGETHER = 200
"""Messages that are looked at in one slice."""
_CANDIDATES_MAX = 4000
_BODY_BYTES_MAX = 8 << 20
_BUCKETS_MAX = 10_000
_STATUSES = ("", "waiting", "ready", "leased", "dead")


class Spot(NamedTuple):
    """Where a message is in the order of a search: by time, or 0, then by partition and offset."""

    time_us: int
    partition: int
    offset: int

    def text(self) -> str:
        """As it is given to a client."""
        return f"{self.time_us}.{self.partition}.{self.offset}"


Match = tuple[Spot, Columns, int]
"""A message, and where its contents are."""


class Finding:
    """Searches, and what is done with all that is found; all of it in slices."""

    def __init__(
        self,
        topics: Topics,
        registry: SubscriptionRegistry,
        dead_letters: DeadLetters,
        editing: Editing,
        ledger: Ledger,
        ports: Ports,
    ) -> None:
        self._topics = topics
        self._registry = registry
        self._dead_letters = dead_letters
        self._editing = editing
        self._ports = ports
        self._leased = ledger.state.leased
        self._views = TopicViews(topics, self._leased)

    def find(self, request: Find, now_us: int) -> Later[Any]:
        """A page of messages."""
        _check(request.selection, request.messages_max)
        return in_slices(self._ports, self._find(request, now_us))

    def _find(self, request: Find, now_us: int) -> Steps:
        wanted = yield from self._subject(request.topic, request.subscription, now_us)
        subscription, selection = self._place(wanted, request.selection)
        if subscription is None or request.topic_id not in (0, wanted.topic.id):
            return Found([], topic_id=wanted.topic.id)
        found: list[FoundMessage] = []
        contents: list[Columns] = []
        size = 0
        search = _Search(subscription, selection, request.after, by_time=selection.status == "waiting")
        while search.goes_on:
            now_us = self._refresh(subscription, now_us)
            for spot, columns, at in search.examine(_TOGETHER):
                if len(found) == request.messages_max or size > _BODY_BYTES_MAX:
                    search.stop()
                    break
                index = subscription.indexes[spot.partition]
                found.append(_described(index, spot, columns, at, request.selection.status))
                contents.append(columns.picked([at], [0] * (at + 1)))
                size += len(columns.values[at] or b"")
                search.take(spot)
            else:
                search.advance()
            if search.goes_on:
                yield
        answer = Found(found, search.after, subscription.topic.id)
        return WithBody(answer, sealed(_joined(contents), now_us)) if found else answer

    def forecast(self, request: Forecast, now_us: int) -> Later[Any]:
        """How many messages are due when."""
        if not 0 < request.buckets <= _BUCKETS_MAX or request.bucket_us <= 0:
            raise InvalidArgument(f"buckets is 1 to {_BUCKETS_MAX}, and bucket_us more than 0")
        return in_slices(self._ports, self._forecast(request, now_us))

    def _forecast(self, request: Forecast, now_us: int) -> Steps:
        subscription = yield from self._subject(request.topic, request.subscription, now_us)
        self._refresh(subscription, now_us)
        bounds = [request.from_us + at * request.bucket_us for at in range(request.buckets + 1)]
        tallies = [outlook.Tally(index.pending, bounds) for index in subscription.indexes.values()]
        totals = [sum(tally.ready for tally in tallies), *[0] * (request.buckets + 1)]
        for tally in tallies:
            while tally.count_some():
                yield
            totals = [total + count for total, count in zip(totals, tally.counts, strict=True)]
        return Forecasted(totals[1:-1], totals[0], totals[-1])

    def edit_matching(self, request: EditMatching, body: memoryview, now_us: int) -> Later[Any]:
        """Change all that match, up to a number."""
        _check(request.selection, request.messages_max)
        if request.selection.status == "dead":
            raise InvalidArgument("dead messages cannot be edited; redrive them first")
        edition = checked_edition(self._topics.get(request.topic), request.change, request.owner, body)
        return in_slices(self._ports, self._edit_matching(request, edition, now_us))

    def _edit_matching(self, request: EditMatching, edition: Edition, now_us: int) -> Steps:
        subscription = yield from self._subject(request.topic, request.subscription, now_us)
        selection = request.selection
        if request.owner and not selection.owner:
            selection = msgspec.structs.replace(selection, owner=request.owner)
        named = {(one.partition, one.offset): one for one in selection.messages}
        outcomes: list[Outcome] = []
        # By offset: a message that was moved is not met again.
        search = _Search(subscription, selection, request.after, by_time=False)
        while search.goes_on:
            now_us = self._refresh(subscription, now_us)
            spots = [spot for spot, _, _ in search.examine(EDITS_TOGETHER)]
            left = request.messages_max - len(outcomes)
            messages = [named.get(spot[1:]) or MessageId(*spot[1:]) for spot in spots[:left]]
            try:
                outcomes += self._editing.apply(subscription.topic, messages, edition, now_us)
            except HeadraceError as error:
                if not outcomes:
                    raise
                outcomes += [Outcome(one.partition, one.offset, error.code) for one in messages]
                search.stop()
                break
            if len(spots) > left:
                if left:
                    search.take(spots[left - 1])
                search.stop()
            else:
                search.advance()
            if search.goes_on:
                yield
        return self._editing.answer(outcomes, search.after)

    def redrive(self, request: Redrive, now_us: int) -> Later[Any]:
        """Put dead messages back."""
        _check(request.selection, request.messages_max)
        request.selection.status = "dead"
        return in_slices(self._ports, self._redrive(request, now_us))

    def _redrive(self, request: Redrive, now_us: int) -> Steps:
        wanted = self._registry.get(request.topic, request.subscription)
        dead, selection = self._place(wanted, request.selection)
        if dead is None:
            return Redriven(0)
        found: list[Spot] = []
        search = _Search(dead, selection, request.after, by_time=False)
        while search.goes_on:
            now_us = self._refresh(dead, now_us)
            for spot, _, _ in search.examine(_TOGETHER):
                if len(found) == request.messages_max:
                    search.stop()
                    break
                found.append(spot)
                search.take(spot)
            else:
                search.advance()
            if search.goes_on:
                yield
        self._check_alive(wanted)
        chosen: dict[int, list[int]] = {}
        for spot in found:  # others may have been quicker
            if outlook.status(dead.indexes[spot.partition].pending, spot.offset) in ("ready", "waiting"):
                chosen.setdefault(spot.partition, []).append(spot.offset)
        if not chosen:
            return Redriven(0, search.after)
        later: Later[Words] = Later()

        def tell(outcome: object) -> None:
            if isinstance(outcome, Redriven):
                outcome.after = search.after
            later.settle(outcome)  # type: ignore[arg-type]

        self._dead_letters.redrive(wanted, dead, chosen, now_us).then(tell)
        return later

    def tick(self, now_us: int) -> None:
        """Let go of what was kept for queries that nobody makes any more."""
        self._views.forget(now_us)

    def _place(self, subscription: Subscription, selection: Selection) -> tuple[Subscription | None, Selection]:
        """Where to look, and for what: dead messages are in another topic, which subscriptions may share."""
        if selection.status != "dead":
            return subscription, selection
        headers = {
            **selection.headers,
            f"{PREFIX}topic": str(subscription.topic).encode(),
            f"{PREFIX}subscription": subscription.name.encode(),
        }
        there = Selection("", None, None, selection.key, selection.owner, headers, selection.messages)
        there.due_from_us, there.due_to_us = selection.due_from_us, selection.due_to_us
        return self._dead_letters.subscription(subscription), there

    def _subject(self, topic: str, name: str, now_us: int) -> Generator[None, None, Subscription]:
        """The subscription to look at; of a topic that has none, what a new one would have."""
        found = self._topics.get(topic)
        if self._leased.has_subscriptions(found.id):
            return self._registry.get(topic, name)
        self._views.forget(now_us)
        view = self._views.of(found, checked_subscription(name), now_us)
        yield from view.steps(self._topics, self._leased, now_us)
        return view

    def _refresh(self, subscription: Subscription, now_us: int) -> int:
        """Bring a subscription up to the moment, which is returned."""
        now_us = max(now_us, self._registry.now_us)
        self._check_alive(subscription)
        if isinstance(subscription, TopicView):
            subscription.refresh(self._topics, now_us)
        else:
            self._registry.refresh(subscription, now_us)
        for index in subscription.indexes.values():
            index.pending.advance(now_us)
        return now_us

    def _check_alive(self, subscription: Subscription) -> None:
        """A topic or a subscription may go between two slices."""
        if isinstance(subscription, TopicView):
            alive = self._topics.by_id.get(subscription.topic.id) is subscription.topic
        else:
            alive = self._registry.find(subscription.topic, subscription.name) is subscription
        if not alive:
            raise SubscriptionNotFound(f"{subscription} was deleted; nothing more can be told of it")


class _Search:
    """A search at work: examines messages that may match, some at a time, and knows where to go on."""

    def __init__(self, subscription: Subscription, selection: Selection, after: str, *, by_time: bool) -> None:
        self._subscription = subscription
        self._selection = selection
        self._by_time = by_time
        self._examined = 0
        self._candidates: list[Spot] | None = None
        self._mark = _spot(after)
        """What comes up to here is done with."""
        self._last: Spot | None = None
        """What was examined last; nothing if there was nothing left."""
        self.goes_on = True
        self.after = ""
        """Where another request can go on; empty when all was examined."""
        if selection.messages:
            self._candidates = sorted(Spot(0, one.partition, one.offset) for one in selection.messages)
        elif not by_time and selection.status == "waiting":
            self._candidates = self._few_in_time()

    def examine(self, count: int) -> list[Match]:
        """Those that match of the next messages, so many at most."""
        some = list(islice(self._spots(), count))
        self._examined += len(some)
        self._last = some[-1] if len(some) == count else None
        return self._matching(some)

    def take(self, spot: Spot) -> None:
        """Go on behind this one."""
        self._mark = spot

    def advance(self) -> None:
        """Go on behind what was examined, if that was not all."""
        if self._last is None:
            self.goes_on = False
            return
        self._mark = self._last
        if self._examined >= _EXAMINED_MAX:
            self.stop()

    def stop(self) -> None:
        """Leave what is left to another request."""
        self.goes_on = False
        self.after = self._mark.text() if self._mark is not None else ""

    def _spots(self) -> Iterator[Spot]:
        """Messages that may match, in the order of the search, behind the mark."""
        selection, indexes, mark = self._selection, self._subscription.indexes, self._mark
        if self._candidates is not None:
            begin = 0 if mark is None else bisect_right(self._candidates, mark)
            return (spot for spot in islice(self._candidates, begin, None) if spot.partition in indexes)
        if self._by_time:
            least_us = max(selection.due_from_us or 0, mark.time_us if mark is not None else 0)
            parts = [
                _in_time(partition, outlook.later(index.pending, least_us, selection.due_to_us))
                for partition, index in indexes.items()
            ]
            return (spot for spot in merge(*parts) if mark is None or spot > mark)
        return chain.from_iterable(
            _in_order(partition, index, selection.status, mark)
            for partition, index in sorted(indexes.items())
            if mark is None or partition >= mark.partition
        )

    def _few_in_time(self) -> list[Spot] | None:
        """The messages that wait for a time between bounds, if those are few: all need not be examined then."""
        least_us, beyond_us = self._selection.due_from_us or 0, self._selection.due_to_us
        found: list[Spot] = []
        for partition, index in self._subscription.indexes.items():
            if outlook.entries_between(index.pending, least_us, beyond_us) > _CANDIDATES_MAX:
                return None
            found += [Spot(0, partition, offset) for _, offset in outlook.later(index.pending, least_us, beyond_us)]
            if len(found) > _CANDIDATES_MAX:
                return None
        return sorted(found)

    def _matching(self, spots: list[Spot]) -> list[Match]:
        by_partition: dict[int, list[Spot]] = {}
        for spot in spots:
            by_partition.setdefault(spot.partition, []).append(spot)
        found: dict[Spot, tuple[Columns, int]] = {}
        for partition, some in by_partition.items():
            index = self._subscription.indexes[partition]
            columns, there = index.read([spot.offset for spot in some])
            places = {offset: place for place, offset in enumerate(there)}
            for spot in some:
                place = places.get(spot.offset)
                if place is not None and _matches(index, self._selection, spot, columns, place):
                    found[spot] = columns, place
        return [(spot, *found[spot]) for spot in spots if spot in found]


def _described(index: LeasedIndex, spot: Spot, columns: Columns, place: int, wanted: str) -> FoundMessage:
    offset = spot.offset
    status = outlook.status(index.pending, offset)
    due = columns.dues[place] if columns.dues is not None else None
    published = columns.timestamps[place] if columns.timestamps else 0
    held = index.leases.get(offset) if status == "leased" else None
    notes = index.notes.get(offset)
    reason = notes[-1].reason if notes else ""
    ready_us = index.pending.rest_of(offset) or (due if due is not None else published)
    deliveries = (index.statuses.failures([offset]) or [0])[0] + (status == "leased")
    if wanted == "dead":
        headers = _headers(columns, place)
        status, ready_us = "dead", _died_us(headers) or ready_us
        reason = headers.get(f"{PREFIX}reason", b"").decode("utf-8", "replace")
        deliveries = _number(headers, "deliveries")
    return FoundMessage(
        spot.partition,
        offset,
        status,
        ready_us,
        deliveries,
        index.edits[offset].version if offset in index.edits else 1,
        held.holder if held is not None else "",
        held.until_us if held is not None else 0,
        reason,
    )


def _check(selection: Selection, count: int) -> None:
    if selection.status not in _STATUSES:
        raise InvalidArgument(f"a status is waiting, ready, leased or dead, not {selection.status}")
    if not 0 < count <= LEASE_MESSAGES_MAX:
        raise InvalidArgument(f"messages_max is 1 to {LEASE_MESSAGES_MAX}, not {count}")


def _in_order(partition: int, index: LeasedIndex, status: str, after: Spot | None) -> Iterator[Spot]:
    start = after.offset + 1 if after is not None and partition == after.partition else 0
    return (Spot(0, partition, offset) for offset in outlook.offsets(index.pending, status, start))


def _in_time(partition: int, entries: Iterator[tuple[int, int]]) -> Iterator[Spot]:
    return (Spot(time_us, partition, offset) for time_us, offset in entries)


def _spot(after: str) -> Spot | None:
    if not after:
        return None
    try:
        time_us, partition, offset = map(int, after.split("."))
    except ValueError:
        raise InvalidArgument(f"{after!r} is not where a page ended") from None
    return Spot(time_us, partition, offset)


def _matches(index: LeasedIndex, selection: Selection, spot: Spot, columns: Columns, place: int) -> bool:
    status = outlook.status(index.pending, spot.offset)
    if not status or (selection.status and status != selection.status):
        return False
    if selection.key is not None and (columns.keys is None or columns.keys[place] != selection.key):
        return False
    headers = _headers(columns, place)
    if selection.owner and headers.get(OWNER_HEADER) != selection.owner.encode():
        return False
    if any(headers.get(name) != text for name, text in selection.headers.items()):
        return False
    if selection.due_from_us is None and selection.due_to_us is None:
        return True
    due = columns.dues[place] if columns.dues is not None else None
    own_us = due if due is not None else (columns.timestamps or [0])[place]
    time_us = index.pending.rest_of(spot.offset) or _died_us(headers) or own_us
    after_from = selection.due_from_us is None or time_us >= selection.due_from_us
    return after_from and (selection.due_to_us is None or time_us < selection.due_to_us)


def _headers(columns: Columns, place: int) -> dict[str, bytes]:
    return (columns.headers[place] if columns.headers is not None else None) or {}


def _died_us(headers: dict[str, bytes]) -> int:
    """When a dead message died; 0 of one that lives."""
    return _number(headers, "time")


def _number(headers: dict[str, bytes], name: str) -> int:
    text = headers.get(f"{PREFIX}{name}", b"")
    return int(text) if text.isdigit() else 0


def _joined(columns: list[Columns]) -> Columns:
    """Single messages together; each comes with the columns that its batch has."""
    joined = Columns([one.values[0] for one in columns], timestamps=[(one.timestamps or [0])[0] for one in columns])
    for name in ("keys", "headers", "dues", "priorities", "expires"):
        parts = [getattr(one, name) for one in columns]
        if any(part is not None for part in parts):
            setattr(joined, name, [None if part is None else part[0] for part in parts])
    return joined
