"""Looking at what a leased subscription has: by status, time, key, owner and headers, a page at a time."""

from collections.abc import Iterator
from heapq import merge
from itertools import chain, islice
from typing import NamedTuple

from headrace.broker.dead_letters import PREFIX, DeadLetters
from headrace.broker.editing import Editing
from headrace.broker.later import Later, WithBody, sealed
from headrace.broker.subscriptions import Subscription, SubscriptionRegistry
from headrace.engines.api import LeasedIndex, outlook
from headrace.model.batch import Columns, message_bytes
from headrace.model.errors import InvalidArgument
from headrace.model.leasing import (
    OWNER_HEADER,
    EditMatching,
    Find,
    Forecast,
    Forecasted,
    Found,
    FoundMessage,
    MessageId,
    Redrive,
    Redriven,
    Selection,
)
from headrace.model.limits import LEASE_MESSAGES_MAX, TIMESTAMP_US_MAX
from headrace.model.requests import Words

_EXAMINED_MAX = 20_000
"""Messages that are looked at for one page; those with fewer results than asked for may be followed by others."""
_TOGETHER = 500
_BODY_BYTES_MAX = 8 << 20
_BUCKETS_MAX = 10_000
Rests = dict[tuple[int, int], int]
"""Until when messages rest, by partition and offset."""
_STATUSES = ("", "waiting", "ready", "leased", "dead")


class Spot(NamedTuple):
    """Where a message is in the order of a search: by time, or 0, then by partition and offset."""

    time_us: int
    partition: int
    offset: int

    def text(self) -> str:
        """As it is given to a client."""
        return f"{self.time_us}.{self.partition}.{self.offset}"


class Finding:
    """Searches, and what is done with all that is found."""

    def __init__(self, registry: SubscriptionRegistry, dead_letters: DeadLetters, editing: Editing) -> None:
        self._registry = registry
        self._dead_letters = dead_letters
        self._editing = editing

    def find(self, request: Find, now_us: int) -> Words | WithBody:
        """A page of messages."""
        _check(request.selection, request.messages_max)
        wanted = self._registry.get(request.topic, request.subscription)
        subscription, selection = self._place(wanted, request.selection)
        if subscription is None:
            return Found([])
        page = self._page(subscription, selection, request.messages_max, request.after, now_us)
        found: list[FoundMessage] = []
        contents: list[Columns] = []
        size = 0
        after = page.after
        for spot, columns, place in page.messages:
            index = subscription.indexes[spot.partition]
            found.append(self._described(index, page, spot, columns, place, request.selection.status))
            contents.append(columns)
            size += message_bytes(columns, place)
            if size > _BODY_BYTES_MAX and len(found) < len(page.messages):
                after = spot.text()
                break
        if not found:
            return Found([], after)
        return WithBody(Found(found, after), sealed(_joined(contents), now_us))

    def forecast(self, request: Forecast, now_us: int) -> Words:
        """How many messages are due when."""
        if not 0 < request.buckets <= _BUCKETS_MAX or request.bucket_us <= 0:
            raise InvalidArgument(f"buckets is 1 to {_BUCKETS_MAX}, and bucket_us more than 0")
        subscription = self._registry.get(request.topic, request.subscription)
        self._registry.refresh(subscription, now_us)
        bounds = [request.from_us + at * request.bucket_us for at in range(request.buckets + 1)]
        totals = [0] * (request.buckets + 2)
        for index in subscription.indexes.values():
            index.pending.advance(now_us)
            counts = outlook.forecast(index.pending, bounds)
            totals = [total + count for total, count in zip(totals, counts, strict=True)]
            totals[0] += outlook.summary(index.pending).ready
        return Forecasted(totals[1:-1], totals[0], totals[-1])

    def edit_matching(self, request: EditMatching, body: memoryview, now_us: int) -> Later[Words]:
        """Change all that match, up to a number."""
        _check(request.selection, request.messages_max)
        if request.selection.status == "dead":
            raise InvalidArgument("dead messages cannot be edited; redrive them first")
        subscription = self._registry.get(request.topic, request.subscription)
        page = self._page(subscription, request.selection, request.messages_max, request.after, now_us)
        named = {(one.partition, one.offset): one for one in request.selection.messages}
        messages = [
            named.get((spot.partition, spot.offset), MessageId(spot.partition, spot.offset))
            for spot, _, _ in page.messages
        ]
        return self._editing.change(
            subscription.topic, messages, request.change, request.owner, body, now_us, page.after
        )

    def redrive(self, request: Redrive, now_us: int) -> Words | Later[Words]:
        """Put dead messages back."""
        _check(request.selection, request.messages_max)
        wanted = self._registry.get(request.topic, request.subscription)
        request.selection.status = "dead"
        dead, selection = self._place(wanted, request.selection)
        if dead is None:
            return Redriven(0)
        chosen: dict[int, list[int]] = {}
        page = self._page(dead, selection, request.messages_max, "", now_us)
        for spot, _, _ in page.messages:
            if dead.indexes[spot.partition].holder(spot.offset) is None:  # else it is being put back already
                chosen.setdefault(spot.partition, []).append(spot.offset)
        if not chosen:
            return Redriven(0, more=bool(page.after))
        later: Later[Words] = Later()

        def tell(outcome: object) -> None:
            if isinstance(outcome, Redriven):
                outcome.more = bool(page.after)
            later.settle(outcome)  # type: ignore[arg-type]

        self._dead_letters.redrive(wanted, dead, chosen, now_us).then(tell)
        return later

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

    def _page(self, subscription: Subscription, selection: Selection, count: int, after: str, now_us: int) -> "_Page":
        self._registry.refresh(subscription, now_us)
        for index in subscription.indexes.values():
            index.pending.advance(now_us)
        spots = self._spots(subscription, selection, _spot(after))
        # Only the index knows until when messages rest.
        rests = {
            (partition, offset): time_us
            for partition, index in subscription.indexes.items()
            for time_us, offset in index.pending.rests()
        }
        page = _Page([], "", rests)
        examined = size = 0
        while len(page.messages) <= count and examined < _EXAMINED_MAX and size <= _BODY_BYTES_MAX:
            some = list(islice(spots, min(_TOGETHER, max(count + 1 - len(page.messages), 1))))
            if not some:
                return page._replace(after="")
            matching, seen = self._matching(subscription, selection, some, rests)
            spots = chain(some[seen:], spots)
            examined += seen
            size += sum(message_bytes(columns, place) for _, columns, place in matching)
            page.messages.extend(matching)
            page = page._replace(after=some[seen - 1].text())
        if len(page.messages) > count:
            kept = page.messages[:count]
            return page._replace(messages=kept, after=kept[-1][0].text())
        return page

    def _spots(self, subscription: Subscription, selection: Selection, after: Spot | None) -> Iterator[Spot]:
        """Messages that may match, in the order of a search."""
        if selection.messages:
            spots = sorted(Spot(0, one.partition, one.offset) for one in selection.messages)
            known = (spot for spot in spots if spot.partition in subscription.indexes)
            return (spot for spot in known if after is None or spot > after)
        if selection.status == "waiting":
            least_us, beyond_us = _least(selection, after), selection.due_to_us
            parts = [
                _in_time(partition, outlook.later(index.pending, least_us, beyond_us))
                for partition, index in subscription.indexes.items()
            ]
            return (spot for spot in merge(*parts) if after is None or spot > after)
        return chain.from_iterable(
            _in_order(partition, index, selection.status, after)
            for partition, index in sorted(subscription.indexes.items())
            if after is None or partition >= after.partition
        )

    def _matching(
        self, subscription: Subscription, selection: Selection, spots: list[Spot], rests: Rests
    ) -> tuple[list[tuple[Spot, Columns, int]], int]:
        """Those that match, and how many were looked at: as many as have not too many bytes."""
        by_partition: dict[int, list[Spot]] = {}
        for spot in spots:
            by_partition.setdefault(spot.partition, []).append(spot)
        found: dict[Spot, Columns] = {}
        unread: set[tuple[int, int]] = set()
        bytes_left = _BODY_BYTES_MAX
        for partition, some in by_partition.items():
            index = subscription.indexes[partition]
            offsets = [spot.offset for spot in some]
            if bytes_left < 0:
                unread.update((partition, offset) for offset in offsets)
                continue
            columns, there, left_out = index.read_some(offsets, bytes_left)
            unread.update((partition, offset) for offset in left_out)
            bytes_left -= sum(message_bytes(columns, place) for place in range(len(there)))
            places = {offset: place for place, offset in enumerate(there)}
            for spot in some:
                place = places.get(spot.offset)
                if place is not None and _matches(
                    index, selection, spot, columns, place, rests.get((partition, spot.offset))
                ):
                    found[spot] = columns.picked([place], range(place + 1))  # the others need not be kept
        seen = next((at for at, spot in enumerate(spots) if spot[1:] in unread), len(spots))
        return [(spot, found[spot], 0) for spot in spots[:seen] if spot in found], seen

    def _described(
        self, index: LeasedIndex, page: "_Page", spot: Spot, columns: Columns, place: int, wanted: str
    ) -> FoundMessage:
        offset = spot.offset
        status = outlook.status(index.pending, offset)
        due = columns.dues[place] if columns.dues is not None else None
        published = columns.timestamps[place] if columns.timestamps else 0
        held = index.leases.get(offset) if status == "leased" else None
        notes = index.notes.get(offset)
        reason = notes[-1].reason if notes else ""
        ready_us = page.rests.get(spot[1:]) or (due if due is not None else published)
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


class _Page(NamedTuple):
    messages: list[tuple[Spot, Columns, int]]
    after: str
    rests: Rests


def _check(selection: Selection, count: int) -> None:
    if selection.status not in _STATUSES:
        raise InvalidArgument(f"a status is waiting, ready, leased or dead, not {selection.status}")
    if not 0 < count <= LEASE_MESSAGES_MAX:
        raise InvalidArgument(f"messages_max is 1 to {LEASE_MESSAGES_MAX}, not {count}")


def _least(selection: Selection, after: Spot | None) -> int:
    return max(selection.due_from_us or 0, after.time_us if after is not None else 0)


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


def _matches(
    index: LeasedIndex, selection: Selection, spot: Spot, columns: Columns, place: int, rest_us: int | None
) -> bool:
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
    time_us = rest_us or _died_us(headers) or own_us
    after_from = selection.due_from_us is None or time_us >= selection.due_from_us
    return after_from and (selection.due_to_us is None or time_us < selection.due_to_us)


def _headers(columns: Columns, place: int) -> dict[str, bytes]:
    return (columns.headers[place] if columns.headers is not None else None) or {}


def _died_us(headers: dict[str, bytes]) -> int:
    """When a dead message died; 0 of one that lives."""
    return _number(headers, "time")


def _number(headers: dict[str, bytes], name: str) -> int:
    text = headers.get(f"{PREFIX}{name}", b"")
    # Whoever publishes to a dead letter topic may write anything there.
    return min(int(text), TIMESTAMP_US_MAX) if text.isdigit() and len(text) < 20 else 0


def _joined(columns: list[Columns]) -> Columns:
    """Single messages together; each comes with the columns that its batch has."""
    joined = Columns([one.values[0] for one in columns], timestamps=[(one.timestamps or [0])[0] for one in columns])
    for name in ("keys", "headers", "dues", "priorities", "expires"):
        parts = [getattr(one, name) for one in columns]
        if any(part is not None for part in parts):
            setattr(joined, name, [None if part is None else part[0] for part in parts])
    return joined
