"""What a partition's log tells a subscription about its messages: when they are due, how urgent, until when."""

import logging
from array import array
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress

from headrace.engines.leased.disciplines import ordered
from headrace.engines.leased.pending import PendingMessages
from headrace.engines.leased.runs import Runs
from headrace.engines.leased.statuses import LEASED, READY, SETTLED, UNKNOWN, WAITING
from headrace.engines.partition import Partition
from headrace.model.batch import Batch, Columns, Outline
from headrace.model.errors import InvalidBatch
from headrace.model.leasing import SUBSCRIPTION_HEADER
from headrace.model.subscription import Discipline

logger = logging.getLogger("headrace.broker")

_READ_TOGETHER = 1000
"""Messages that are read at a time, or a batch if that has more."""

Described = Outline | Columns
"""What a batch says of its messages beside their values."""


class LogScanner:
    """Reads batches of a partition, without their contents, and puts their messages among the pending ones."""

    def __init__(self, pending: PendingMessages, partition: Partition, subscription: str, ttl_us: int | None) -> None:
        self._pending = pending
        self._partition = partition
        self._subscription = subscription.encode()
        self._ttl_us = ttl_us
        self._read_to = 0
        self.early: dict[int, int] = {}
        """When those are due that were leased before they were."""

    def read(self, begin: int, end: int, now_us: int) -> Iterator[list[range]]:
        """Learn of messages between offsets, as far as nothing is known of them from elsewhere; some at a time.

        Yields the offsets among them that no message has: compacted, damaged, or skipped after a loss.
        """
        self._read_to = max(begin, self._read_to, self._partition.first_offset)
        while self._read_to < end:
            gone: list[range] = []
            count = 0
            for batch in self._partition.batches(self._read_to, end):
                if batch.base_offset > self._read_to:
                    gone.append(range(self._read_to, batch.base_offset))
                self._read_to = batch.next_offset
                self._take_in(batch, now_us)
                count += batch.span if self._partition.is_derived else batch.count
                if count >= _READ_TOGETHER:
                    break
            else:
                if self._read_to < end:
                    gone.append(range(self._read_to, end))
                    self._read_to = end
            yield gone

    def catch_up(self, end_offset: int, now_us: int) -> None:
        """Read what was published since."""
        statuses = self._pending.statuses
        start = max(statuses.end, self._partition.first_offset)
        if start > statuses.end:
            statuses.begin(statuses.end, start, SETTLED)  # removed before anybody saw them
        if start < end_offset:
            deque(self.read(start, end_offset, now_us), maxlen=0)
        if statuses.end < end_offset:
            statuses.begin(statuses.end, end_offset, SETTLED)  # damaged, or removed by compaction

    def expire_after(self, ttl_us: int | None) -> Iterator[None]:
        """The topic's time to live is another: find anew when what is not settled expires; yields after some of it."""
        if ttl_us == self._ttl_us:
            return
        self._ttl_us = ttl_us
        self._pending.forget_expiry()
        read_to = self._partition.first_offset
        for begin, end in self._pending.statuses.unsettled():
            for batch in self._partition.batches(max(begin, read_to), end) if read_to < end else ():
                read_to = batch.next_offset
                with suppress(InvalidBatch):  # it was passed over when it came
                    outline = batch.outline()
                    self._expect_expiry(batch, outline, _offsets(batch, outline))
                if self._partition.is_derived:
                    yield
            self._pending.on_change()
            yield
            if self._ttl_us != ttl_us:
                return  # it was changed again

    def _take_in(self, batch: Batch, now_us: int) -> None:
        pending = self._pending
        first, last = batch.base_offset, batch.next_offset
        if first > pending.statuses.end:
            pending.statuses.begin(pending.statuses.end, first, SETTLED)
        outline = self._outline(batch)
        if outline is None:
            pending.statuses.change(range(first, last), SETTLED)
            return
        offsets = _offsets(batch, outline)
        if len(offsets) < last - first:
            missing = set(range(first, last)).difference(offsets)
            pending.statuses.change(sorted(missing), SETTLED)
        plain = len(offsets) == last - first and pending.statuses.is_unknown(first, last) and not pending.edits
        plain = plain and outline.expires is None and self._ttl_us is None and not _is_meant(outline)
        if plain and outline.dues is None:
            self._take_in_ready(batch, outline)
        elif plain and (dues := _all_later(outline.dues, now_us)) is not None:
            self._take_in_later(offsets, dues)
        else:
            self._take_in_each(batch, outline, offsets, now_us)

    def _outline(self, batch: Batch) -> Described | None:
        """The times, priorities and headers of a batch; None if it cannot be decoded."""
        try:
            return batch.outline()
        except InvalidBatch as error:
            offsets = f"{batch.base_offset} to {batch.next_offset - 1}"
            who = self._subscription.decode()
            logger.warning(
                "batch skipped by a leased subscription  path=%s subscription=%s offsets=%s reason=%s",
                self._partition.location,
                who,
                offsets,
                error,
            )
            return None

    def _take_in_ready(self, batch: Batch, outline: Described) -> None:
        """Add messages that are all ready and of which the journal says nothing."""
        pending, offsets = self._pending, range(batch.base_offset, batch.next_offset)
        pending.statuses.begin(offsets.start, offsets.stop, READY)
        times = self._times(batch, outline) if pending.discipline is Discipline.DEADLINE else ()
        pending.ready.add(*ordered(pending.discipline, offsets, outline.priorities, times))

    def _take_in_later(self, offsets: Sequence[int], dues: Sequence[int]) -> None:
        """Add messages that all wait and of which the journal says nothing."""
        self._pending.statuses.begin(offsets[0], offsets[-1] + 1, WAITING)
        order = sorted(range(len(dues)), key=dues.__getitem__)
        keys, sorted_offsets = map(dues.__getitem__, order), map(offsets.__getitem__, order)
        self._pending.waiting.add(array("q", keys), array("q", sorted_offsets))

    def _take_in_each(self, batch: Batch, outline: Described, offsets: Sequence[int], now_us: int) -> None:
        pending = self._pending
        pending.statuses.change(self._not_ours(outline, offsets), SETTLED)
        nothing = [None] * len(offsets)
        dues, priorities = outline.dues or nothing, outline.priorities or nothing
        times = self._times(batch, outline)
        ready: list[tuple[int, int | None, int]] = []
        waits: list[tuple[int, int]] = []
        for offset, given, priority, published in zip(offsets, dues, priorities, times, strict=True):
            status, due = pending.statuses[offset], pending.due(offset, given)
            if status == LEASED and due is not None and due > now_us:
                self.early[offset] = due
            elif status == UNKNOWN:
                if due is not None and due > now_us:
                    waits.append((due, offset))
                else:
                    ready.append((offset, pending.priority(offset, priority), published if due is None else due))
        self._expect_expiry(batch, outline, offsets)
        pending.statuses.change([offset for _, offset in waits], WAITING)
        _add_sorted(pending.waiting, waits)
        if ready:
            chosen, ranks, since = ([one[part] for one in ready] for part in range(3))
            pending.statuses.change(chosen, READY)  # type: ignore[arg-type]
            pending.ready.add(*ordered(pending.discipline, chosen, ranks, since))  # type: ignore[arg-type]

    def _not_ours(self, outline: Described, offsets: Sequence[int]) -> list[int]:
        """Those that were deleted, or are meant for another subscription."""
        edits = self._pending.edits
        found = [offset for offset in offsets if edits and offset in edits and edits[offset].deleted]
        if _is_meant(outline):
            for offset, each in zip(offsets, outline.headers or (), strict=True):
                meant = (each or {}).get(SUBSCRIPTION_HEADER)
                if meant is not None and meant != self._subscription:
                    found.append(offset)
        return found

    def _times(self, batch: Batch, outline: Described) -> Sequence[int]:
        """When each was published."""
        return outline.timestamps or [batch.time_max] * batch.count

    def _expect_expiry(self, batch: Batch, outline: Described, offsets: Sequence[int]) -> None:
        limit = None if self._ttl_us is None else batch.append_time + self._ttl_us
        if outline.expires is None and limit is None:
            return
        ends: list[tuple[int, int]] = []
        for offset, own in zip(offsets, outline.expires or [None] * len(offsets), strict=True):
            times = [time for time in (own, limit) if time is not None]
            if times and self._pending.statuses[offset] != SETTLED:
                ends.append((min(times), offset))
        _add_sorted(self._pending.expiring, ends)


def _offsets(batch: Batch, outline: Described) -> Sequence[int]:
    """Those of its messages: compaction may have removed some."""
    if outline.places is not None or not batch.count:
        return [batch.base_offset + place for place in outline.places or ()]
    return range(batch.base_offset, batch.next_offset)


def _is_meant(outline: Described) -> bool:
    """Whether a message is meant for one subscription alone."""
    return outline.headers is not None and any(SUBSCRIPTION_HEADER in each for each in outline.headers if each)


def _all_later(dues: Sequence[int | None] | None, now_us: int) -> Sequence[int] | None:
    """The times, if all messages have one and all are to come."""
    given = [due for due in dues or () if due is not None]
    return given if dues and len(given) == len(dues) and min(given) > now_us else None


def _add_sorted(runs: Runs, entries: list[tuple[int, int]]) -> None:
    entries.sort()
    runs.add(array("q", [key for key, _ in entries]), array("q", [offset for _, offset in entries]))
