"""Searches the unsettled messages of a leased subscription, a bounded number at a time."""

from bisect import bisect_right
from collections.abc import Iterator
from heapq import merge
from itertools import chain, islice
from typing import NamedTuple

from headrace.broker.dead_letters import PREFIX
from headrace.broker.subscription import Subscription
from headrace.engines.api import LeasedPartition
from headrace.model.batch import Columns, message_bytes
from headrace.model.errors import InvalidArgument
from headrace.model.headers import Headers, header_pairs, header_text
from headrace.model.leasing import OWNER_HEADER, Selection
from headrace.model.limits import TIMESTAMP_US_MAX

_EXAMINED_MAX = 20_000
"""Maximum messages examined per request; a request that reaches it returns a position to continue from."""
_CANDIDATES_MAX = 4000
_OFFSET_MAX = 1 << 62
_BYTES_MAX = 8 << 20
"""Maximum bytes read at a time."""


class SearchPosition(NamedTuple):
    """A message's position in the order of a search: time (0 in searches by offset), partition, offset."""

    time_us: int
    partition: int
    offset: int

    def text(self) -> str:
        """The position as clients see it."""
        return f"{self.time_us}.{self.partition}.{self.offset}"


Match = tuple[SearchPosition, Columns, int]
"""A message's position, and the columns and index of its contents."""


class Search:
    """One search: examines candidate messages in portions, and keeps the position to continue from."""

    def __init__(self, subscription: Subscription, selection: Selection, after: str, *, by_time: bool) -> None:
        self._subscription = subscription
        self._selection = selection
        self._by_time = by_time
        self._examined = 0
        self._candidates: list[SearchPosition] | None = None
        self._mark = _parse_position(after)
        """The position up to which messages are done."""
        self._last: SearchPosition | None = None
        """The position examined last; None when no messages are left."""
        self.goes_on = True
        self.after = ""
        """The position from which another request can continue; empty when all messages were examined."""
        if selection.messages:
            self._candidates = sorted(SearchPosition(0, one.partition, one.offset) for one in selection.messages)
        elif not by_time and selection.status == "waiting":
            self._candidates = self._few_due()

    def examine(self, count: int) -> list[Match]:
        """Examine at most this many further messages; returns those that match."""
        some = list(islice(self._positions(), count))
        matching, examined = self._matching(some)
        self._examined += examined
        self._last = some[examined - 1] if some and (examined < len(some) or len(some) == count) else None
        return matching

    def take(self, position: SearchPosition) -> None:
        """Continue behind this position."""
        self._mark = position

    def advance(self) -> None:
        """Continue behind the examined messages, or end if there are no others."""
        if self._last is None:
            self.goes_on = False
            return
        self._mark = self._last
        if self._examined >= _EXAMINED_MAX:
            self.stop()

    def stop(self) -> None:
        """End this request, and leave the remaining messages to another."""
        self.goes_on = False
        self.after = self._mark.text() if self._mark is not None else ""

    def _positions(self) -> Iterator[SearchPosition]:
        """The positions of candidates behind the mark, in the order of the search."""
        selection, indexes, mark = self._selection, self._subscription.indexes, self._mark
        if self._candidates is not None:
            begin = 0 if mark is None else bisect_right(self._candidates, mark)
            return (position for position in islice(self._candidates, begin, None) if position.partition in indexes)
        if self._by_time:
            least_us = max(selection.due_from_us or 0, mark.time_us if mark is not None else 0)
            parts = [
                _in_time(partition, index.ready_later(least_us, selection.due_to_us, _after(mark, partition)))
                for partition, index in indexes.items()
            ]
            return (position for position in merge(*parts) if mark is None or position > mark)
        return chain.from_iterable(
            _in_order(partition, index, selection.status, mark)
            for partition, index in sorted(indexes.items())
            if mark is None or partition >= mark.partition
        )

    def _few_due(self) -> list[SearchPosition] | None:
        """The messages due between the bounds if they are few, so that not all need be examined; None otherwise."""
        least_us, beyond_us = self._selection.due_from_us or 0, self._selection.due_to_us
        found: list[SearchPosition] = []
        for partition, index in self._subscription.indexes.items():
            if index.ready_later_max(least_us, beyond_us) > _CANDIDATES_MAX:
                return None
            found += [SearchPosition(0, partition, offset) for _, offset in index.ready_later(least_us, beyond_us)]
            if len(found) > _CANDIDATES_MAX:
                return None
        return sorted(found)

    def _matching(self, positions: list[SearchPosition]) -> tuple[list[Match], int]:
        """The matches, and how many messages were examined before the byte limit."""
        by_partition: dict[int, list[SearchPosition]] = {}
        for position in positions:
            by_partition.setdefault(position.partition, []).append(position)
        found: dict[SearchPosition, Columns] = {}
        unread: set[tuple[int, int]] = set()
        bytes_left = _BYTES_MAX
        for partition, some in by_partition.items():
            index = self._subscription.indexes[partition]
            offsets = [position.offset for position in some]
            if bytes_left < 0:
                unread.update((partition, offset) for offset in offsets)
                continue
            columns, there, left_out = index.read_some(offsets, bytes_left)
            unread.update((partition, offset) for offset in left_out)
            bytes_left -= sum(message_bytes(columns, place) for place in range(len(there)))
            places = {offset: place for place, offset in enumerate(there)}
            for position in some:
                place = places.get(position.offset)
                if place is not None and _matches(index, self._selection, position, columns, place):
                    found[position] = columns.picked([place], range(place + 1))  # releases the memory of the others
        examined = next((at for at, position in enumerate(positions) if position[1:] in unread), len(positions))
        return [(position, found[position], 0) for position in positions[:examined] if position in found], examined


def _after(mark: SearchPosition | None, partition: int) -> int:
    """The offset in a partition up to which messages of the mark's time are done."""
    if mark is None or partition > mark.partition:
        return -1
    return mark.offset if partition == mark.partition else _OFFSET_MAX


def _in_order(
    partition: int, index: LeasedPartition, status: str, after: SearchPosition | None
) -> Iterator[SearchPosition]:
    start = after.offset + 1 if after is not None and partition == after.partition else 0
    return (SearchPosition(0, partition, offset) for offset in index.offsets(status, start))


def _in_time(partition: int, entries: Iterator[tuple[int, int]]) -> Iterator[SearchPosition]:
    return (SearchPosition(time_us, partition, offset) for time_us, offset in entries)


def _parse_position(after: str) -> SearchPosition | None:
    if not after:
        return None
    try:
        time_us, partition, offset = map(int, after.split("."))
    except ValueError:
        raise InvalidArgument(f"after must be the position that a previous page returned, not {after!r}") from None
    return SearchPosition(time_us, partition, offset)


def _matches(
    index: LeasedPartition, selection: Selection, position: SearchPosition, columns: Columns, place: int
) -> bool:
    status = index.status(position.offset)
    if not status or (selection.status and status != selection.status):
        return False
    if selection.key is not None and (columns.keys is None or columns.keys[place] != selection.key):
        return False
    headers = headers_of(columns, place)
    if selection.owner and headers.get(OWNER_HEADER) != selection.owner.encode():
        return False
    if selection.headers:
        pairs = header_pairs(headers)
        if any(pair not in pairs for pair in header_pairs(selection.headers)):
            return False
    if selection.due_from_us is None and selection.due_to_us is None:
        return True
    due = columns.dues[place] if columns.dues is not None else None
    own_us = due if due is not None else (columns.timestamps or [0])[place]
    time_us = index.rests_until(position.offset) or died_us(headers) or own_us
    after_from = selection.due_from_us is None or time_us >= selection.due_from_us
    return after_from and (selection.due_to_us is None or time_us < selection.due_to_us)


def headers_of(columns: Columns, place: int) -> Headers:
    """The headers of a message."""
    return (columns.headers[place] if columns.headers is not None else None) or {}


def died_us(headers: Headers) -> int:
    """When a message was dead-lettered; 0 if it was not."""
    return number_in(headers, "time")


def number_in(headers: Headers, name: str) -> int:
    """A number from a message's dead-letter headers; 0 if it has none."""
    text = header_text(headers, f"{PREFIX}{name}")
    # Clients can publish to a dead-letter topic with any headers.
    return min(int(text), TIMESTAMP_US_MAX) if text.isdigit() and len(text) < 20 else 0
