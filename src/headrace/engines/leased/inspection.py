"""What can be seen of a subscription's messages without changing anything."""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from heapq import merge
from itertools import groupby, islice, pairwise
from typing import NamedTuple

from headrace.engines.leased.leases import SESSION_BOUND_US, LeaseTable
from headrace.engines.leased.pending import PendingMessages
from headrace.engines.leased.release_notes import ReleaseNote
from headrace.engines.leased.statuses import BLOCKED, LEASED, LEAVING, READY, RESTING, WAITING

_EVER_US = 1 << 62
_COUNTED_TOGETHER = 1000
_STATUS_NAMES = {
    WAITING: "waiting",
    RESTING: "waiting",
    READY: "ready",
    BLOCKED: "ready",
    LEASED: "leased",
    LEAVING: "leased",
}


class MessageCounts(NamedTuple):
    """How many messages there are of which kind."""

    waiting: int
    ready: int
    leased: int
    ready_since_us: int
    """When the oldest of those that are ready was published; 0 if there is none."""
    next_ready_us: int
    """When the first of those that wait will be ready; 0 if there is none."""


def summary(pending: PendingMessages) -> MessageCounts:
    """How many there are, after `advance`."""
    counts = pending.statuses.counts
    since = 0
    codes = [code for code in (READY, BLOCKED) if counts[code]]
    oldest = min((next(pending.statuses.with_status(code), _EVER_US) for code in codes), default=_EVER_US)
    if oldest != _EVER_US:
        columns, _, _ = pending.contents.read([oldest])
        since = columns.timestamps[0] if columns.timestamps else 0
    following = next(later(pending, 0, None), None)
    return MessageCounts(
        counts[WAITING] + counts[RESTING],
        counts[READY] + counts[BLOCKED],
        counts[LEASED] + counts[LEAVING],
        since,
        following[0] if following is not None else 0,
    )


def status(pending: PendingMessages, offset: int) -> str:
    """What is said of a message; nothing of one that is settled."""
    return _STATUS_NAMES.get(pending.statuses[offset], "")


def offsets(pending: PendingMessages, wanted: str, start: int) -> Iterator[int]:
    """The messages with a status, or all of them, from an offset on, in order; nothing may be changed meanwhile."""
    codes = [code for code, name in _STATUS_NAMES.items() if wanted in ("", name)]
    return merge(*(pending.statuses.with_status(code, start) for code in codes))


def entries_between(pending: PendingMessages, least_us: int, beyond_us: int | None) -> int:
    """How many messages wait for a time between bounds, or more: entries that do not count are among them."""
    beyond_us = _EVER_US if beyond_us is None else beyond_us
    parts = (*pending.waiting.keys(), *pending.resting.keys())
    return sum(bisect_left(keys, beyond_us) - bisect_left(keys, least_us) for keys in parts)


def later(pending: PendingMessages, least_us: int, beyond_us: int | None, after: int = -1) -> Iterator[tuple[int, int]]:
    """When messages will be ready, and which, in order; no status may be changed meanwhile.

    Of those with the least time only the ones after an offset.
    """
    beyond_us = _EVER_US if beyond_us is None else beyond_us
    waiting = (one for one in pending.waiting.between(least_us, beyond_us, after) if _waits(pending, one))
    resting = (one for one in pending.resting.between(least_us, beyond_us, after) if _rests(pending, one))
    # One that was moved away and back has two entries.
    return (entry for entry, _ in groupby(merge(waiting, resting)))


def _waits(pending: PendingMessages, entry: tuple[int, int]) -> bool:
    """Whether an entry among the waiting ones counts."""
    time_us, offset = entry
    return pending.statuses[offset] == WAITING and pending.due(offset, time_us) == time_us


def _rests(pending: PendingMessages, entry: tuple[int, int]) -> bool:
    """Whether an entry among the resting ones counts."""
    return pending.rests_until(entry[1], entry[0])


class ForecastCounter:
    """Counts how many messages will be ready before the first bound, from each to the next, and from the last one on.

    It counts what there was when it was made, after `advance`; `count_some` takes about a millisecond.
    """

    def __init__(self, pending: PendingMessages, bounds: Sequence[int]) -> None:
        self.counts = [0] * (len(bounds) + 1)
        self.ready = pending.statuses.counts[READY] + pending.statuses.counts[BLOCKED]
        self._bounds = bounds
        self._parts: list[Sequence[int]] = []
        self._entries: list[tuple[Iterator[tuple[int, int]], Callable[[PendingMessages, tuple[int, int]], bool]]] = []
        self._last: tuple[int, int] | None = None
        waiting = pending.statuses.counts[WAITING] + pending.statuses.counts[RESTING]
        if waiting == len(pending.waiting) + len(pending.resting):  # all entries count
            self._parts = [part for part in (*pending.waiting.keys(), *pending.resting.keys()) if part]
        else:
            self._pending = pending.copied()
            self._entries = [
                (pending.waiting.between(0, _EVER_US), _waits),
                (pending.resting.between(0, _EVER_US), _rests),
            ]

    def count_some(self) -> bool:
        """Count some more; whether there are any left."""
        if self._parts:
            keys = self._parts.pop()
            ends = [0, *(bisect_left(keys, bound) for bound in self._bounds), len(keys)]
            self.counts = [count + end - begin for count, (begin, end) in zip(self.counts, pairwise(ends), strict=True)]
            return bool(self._parts)
        if self._entries:
            entries, counts = self._entries[-1]
            some = list(islice(entries, _COUNTED_TOGETHER))
            for entry in some:
                if entry != self._last and counts(self._pending, entry):
                    self.counts[bisect_right(self._bounds, entry[0])] += 1
                self._last = entry
            if len(some) < _COUNTED_TOGETHER:
                self._entries.pop()
        return bool(self._entries)


class MessageState(NamedTuple):
    """What the index knows of one message."""

    status: str
    """`waiting`, `ready` or `leased`; empty if the message is settled."""
    rests_until_us: int | None
    """Until when it rests after a release; None if it does not."""
    deliveries: int
    version: int
    holder: str
    until_us: int
    reason: str
    """Why it was released last."""


class NextTimes(NamedTuple):
    """When something happens next in a partition; None: there is nothing of the kind."""

    ready_key: int | None
    """The key of the first message that is ready, in the order of the discipline."""
    waiting_us: int | None
    resting_us: int | None
    end_us: int | None
    """When a lease or a message ends, or earlier."""


class InspectedIndex:
    """An index, as far as it can be looked at."""

    def __init__(
        self,
        pending: PendingMessages,
        leases: LeaseTable,
        notes: dict[int, list[ReleaseNote]],
        states: dict[int, bytes],
    ) -> None:
        self.pending = pending
        self.leases = leases
        self.notes = notes
        self.states = states
        self.statuses = pending.statuses
        self.edits = pending.edits

    @property
    def end(self) -> int:
        """The offset behind the last message that is known."""
        return self.statuses.end

    @property
    def floor(self) -> int:
        """The subscription has settled every message before this offset."""
        return self.statuses.floor

    @property
    def unsettled_count(self) -> int:
        """How many messages are not settled."""
        return sum(self.statuses.counts)

    @property
    def staying_count(self) -> int:
        """How many messages are neither settled nor on their way out."""
        return sum(self.statuses.counts) - self.statuses.counts[LEAVING]

    @property
    def leased_count(self) -> int:
        """How many messages are leased, and not on their way out."""
        return self.statuses.counts[LEASED]

    def oldest_ready(self, count: int) -> list[int]:
        """The first messages that are ready, so many at most."""
        return list(islice(self.statuses.with_status(READY), count))

    @property
    def is_edited(self) -> bool:
        """Whether any message of the partition was edited."""
        return bool(self.edits)

    def watch(self, on_change: Callable[[], object]) -> None:
        """Call this whenever the first ready message, or the time when something happens next, may have changed."""
        self.pending.on_change = on_change
        on_change()

    def status(self, offset: int) -> str:
        """`waiting`, `ready` or `leased`; empty if the message is settled."""
        return status(self.pending, offset)

    def message_state(self, offset: int) -> MessageState:
        """Everything about one message, except its contents."""
        word, edit, notes = self.status(offset), self.edits.get(offset), self.notes.get(offset)
        held = self.leases.get(offset) if word == "leased" else None
        return MessageState(
            word,
            self.pending.rest_of(offset),
            self.failures([offset])[0] + (word == "leased"),
            edit.version if edit is not None else 1,
            held.holder if held is not None else "",
            held.until_us if held is not None and held.until_us != SESSION_BOUND_US else 0,
            notes[-1].reason if notes else "",
        )

    def rests_until(self, offset: int) -> int | None:
        """Until when a message rests after a release; None if it does not."""
        return self.pending.rest_of(offset)

    def release_notes(self, offset: int) -> Sequence[ReleaseNote]:
        """Why a message was released, the last few times."""
        return self.notes.get(offset, ())

    def failures(self, offsets: Sequence[int]) -> list[int]:
        """How often each of these messages was leased in vain."""
        return self.statuses.failures(offsets) or [0] * len(offsets)

    def last_holders(self, offsets: Sequence[int]) -> list[str]:
        """Who holds each of these messages, or held it last; empty where nobody did."""
        return [held.holder if (held := self.leases.get(offset)) is not None else "" for offset in offsets]

    def counts(self) -> MessageCounts:
        """How many messages there are of which kind, after `make_due_ready`."""
        return summary(self.pending)

    def offsets(self, wanted: str, start: int) -> Iterator[int]:
        """The messages with a status, or all of them, from an offset on; nothing may be changed meanwhile."""
        return offsets(self.pending, wanted, start)

    def ready_later(self, least_us: int, beyond_us: int | None, after: int = -1) -> Iterator[tuple[int, int]]:
        """When messages will be ready, and which, in order; nothing may be changed meanwhile.

        Of those with the least time only the ones after an offset.
        """
        return later(self.pending, least_us, beyond_us, after)

    def ready_later_max(self, least_us: int, beyond_us: int | None) -> int:
        """How many messages `ready_later` yields at most."""
        return entries_between(self.pending, least_us, beyond_us)

    def forecast(self, bounds: Sequence[int]) -> ForecastCounter:
        """What counts the messages that will be ready between bounds, in slices; after `make_due_ready`."""
        return ForecastCounter(self.pending, bounds)

    def settled_rule(self) -> Callable[[int], bool]:
        """A function that tells which messages are settled now; it can be used on any thread."""
        return self.statuses.settled_now()

    def mark(self, marks: dict[int, bytearray], offset: int) -> None:
        """Mark a message, for `count_marked`."""
        self.statuses.mark(marks, offset)

    def count_marked(self, marks: Mapping[int, bytes | bytearray]) -> int:
        """How many of the marked messages are not settled."""
        return self.statuses.count_marked(marks)
