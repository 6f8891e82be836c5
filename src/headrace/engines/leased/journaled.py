"""A leased subscription's index of a partition: what the journal and the log change in it."""

from collections.abc import Iterator, Mapping, Sequence

from headrace.engines.leased.contents import Contents
from headrace.engines.leased.edits import EditRecord
from headrace.engines.leased.index_snapshot import FrozenIndex, SettledChunks
from headrace.engines.leased.inspection import InspectedIndex
from headrace.engines.leased.key_order import KeyOrder
from headrace.engines.leased.log_scanner import LogScanner
from headrace.engines.leased.pending import PendingMessages
from headrace.engines.leased.release_notes import ReleaseNote, noted
from headrace.engines.leased.replayed import ReplayedIndex
from headrace.engines.leased.statuses import BLOCKED, LEAVING, READY, RESTING, SETTLED, WAITING
from headrace.engines.partition import Partition
from headrace.model.batch import Columns
from headrace.model.offsets import common, ranges
from headrace.model.subscription import SubscriptionSettings

_SCANNED_TOGETHER = 1000
"""Messages that a new index reads at a time; a batch that has more is read at once."""


class JournaledIndex(InspectedIndex):
    """Takes over what the journal said, learns the rest from the log, and follows both from then on."""

    def __init__(
        self,
        replayed: ReplayedIndex,
        partition: Partition,
        name: str,
        settings: SubscriptionSettings,
        ttl_us: int | None,
        edits: Mapping[int, EditRecord],
        delivered: Partition | None = None,
    ) -> None:
        """The contents are read from the partition as it is `delivered`, if that differs."""
        assert replayed.end <= partition.next_offset  # no offset is ever another message's
        pending = PendingMessages(
            replayed.statuses, replayed.rests, Contents(delivered or partition), edits, settings.discipline
        )
        super().__init__(pending, replayed.leases, replayed.notes, replayed.states)
        self._order = KeyOrder(pending)
        self._settings = settings
        self._partition = partition
        self._scanner = LogScanner(pending, partition, name, ttl_us)
        self._ahead: dict[int, int] = {}
        """When those are due that were leased before they were."""
        self._first_offset = 0
        """The log has no message before this offset, as far as the index knows."""
        self._lost: list[range] = []
        """Damaged messages whose dead letters are still to be written."""
        self._lost_us = 0
        """When to write them."""

    # The log.

    def load(self, end_offset: int, now_us: int) -> Iterator[None]:
        """Learn from the log which messages can be leased, some at a time; yields in between."""
        self.forget_before(self._partition.first_offset)
        for begin, end in self.statuses.unsettled():
            for gone in self._scanner.read(begin, end, now_us):
                for part in gone:
                    self._part_with(part)
                yield
        while self.statuses.end + _SCANNED_TOGETHER < end_offset:
            self.catch_up(self.statuses.end + _SCANNED_TOGETHER, now_us)
            yield
        self.catch_up(end_offset, now_us)
        self._ahead = self._scanner.early
        self._order.alter(self._settings, now_us)

    def catch_up(self, end_offset: int, now_us: int) -> None:
        """Read what was published since."""
        begin = self.statuses.end
        self._scanner.catch_up(end_offset, now_us)
        for damaged in self._partition.damaged_within(range(begin, end_offset)):
            self._lose(damaged)
        self.pending.on_change()

    def expire_after(self, ttl_us: int | None) -> Iterator[None]:
        """Find the messages' expiry anew for another time to live of the topic; yields after some of them."""
        return self._scanner.expire_after(ttl_us)

    def forget_before(self, offset: int) -> None:
        """Settle the messages before an offset: retention removed them."""
        if offset <= self._first_offset:
            return
        self._first_offset = offset
        floor = self.statuses.floor
        if floor < offset:
            self.apply_settled(range(floor, min(offset, self.statuses.end)))

    def forget_missing(self, offsets: Sequence[int]) -> None:
        """Settle messages that compaction removed, except those that somebody holds."""
        free = (WAITING, READY, RESTING, BLOCKED)
        self.apply_settled([offset for offset in offsets if self.statuses[offset] in free])

    # What is not there any more.

    def _part_with(self, gone: range) -> None:
        """Settle messages that were removed; those that are damaged are settled when their dead letter is written."""
        begin = gone.start
        for damaged in self._partition.damaged_within(gone):
            self.apply_settled(range(begin, damaged.start))
            self._lose(damaged)
            begin = damaged.stop
        self.apply_settled(range(begin, gone.stop))

    def _advance(self, now_us: int) -> None:
        """What is due by now has its key kept for it; what could not be read when it was to be ready is parted with."""
        gone = self.pending.lost
        self._order.advance(now_us)
        for damaged in self.damaged_among(gone):
            self._lose(damaged)

    def _lose(self, damaged: range) -> None:
        self.leave(damaged)
        self._lost.append(damaged)
        self.pending.on_change()

    def damaged_among(self, offsets: Sequence[int]) -> Iterator[range]:
        """Those of these messages, which are not there, that are damaged."""
        for part in ranges(sorted(offsets)):
            yield from self._partition.damaged_within(part)

    def take_lost(self, now_us: int) -> list[range]:
        """The damaged messages whose dead letters are to be written now."""
        self._advance(now_us)
        if self._lost_us > now_us:
            return []
        lost, self._lost = self._lost, []
        self.pending.on_change()
        return lost

    def lose_later(self, damaged: range, time_us: int) -> None:
        """The dead letter of damaged messages could not be written: try again then."""
        self._lost.append(damaged)
        self._lost_us = time_us
        self.pending.on_change()

    def leave(self, offsets: Sequence[int]) -> None:
        """Mark messages as leaving for the dead letter topic: nobody holds them, but their keys stay blocked."""
        self.statuses.change(offsets, LEAVING)
        self.leases.leave(offsets)

    def read(self, offsets: Sequence[int]) -> tuple[Columns, list[int]]:
        """The contents of messages as they are now, and the offsets of those there are."""
        columns, there, _ = self.pending.contents.read(offsets, self.edits)
        return columns, there

    def parts(self, offsets: Sequence[int]) -> Iterator[tuple[Columns, list[int]]]:
        """As `read`, some of the messages at a time."""
        return ((columns, there) for columns, there, _ in self.pending.contents.parts(offsets, self.edits))

    def read_some(self, offsets: Sequence[int], bytes_max: int) -> tuple[Columns, list[int], Sequence[int]]:
        """As `read`, up to about so many bytes; also returns the offsets that were left out."""
        columns, there, _, unread = self.pending.contents.read_some(offsets, bytes_max, self.edits)
        return columns, there, unread

    def read_stored(self, offsets: Sequence[int]) -> tuple[Columns, list[int]]:
        """The contents of messages as they were published, without edits, and the offsets of those there are."""
        return self.pending.contents.read_stored(offsets)

    # What the journal says.

    def apply_leased(self, number: int, holder: str, until_us: int, offsets: Sequence[int]) -> None:
        """Apply a recorded lease."""
        self.leases.hold(number, holder, until_us, offsets)
        self.pending.on_change()

    def apply_extended(self, number: int, until_us: int, offsets: Sequence[int]) -> None:
        """A holder extended a lease: `extend` has done it already."""

    def apply_settled(self, offsets: Sequence[int]) -> None:
        """Apply a recorded settlement."""
        self.pending.settle(offsets)
        self.leases.forget(offsets)
        for table in (self.notes, self.states, self._ahead):
            if table:
                for offset in common(table, offsets):
                    table.pop(offset)
        self._order.update(offsets, 0, self._ahead)
        self.pending.on_change()
        if not any(self.statuses.counts):
            self.pending.contents.clear()

    def apply_returned(
        self,
        offsets: Sequence[int],
        ready_us: Sequence[int],
        counted: bool,
        note: ReleaseNote | None,
        states: Mapping[int, bytes],
        now_us: int,
    ) -> None:
        """These were given back, to be handed out again not before these times."""
        self.leases.forget(offsets)
        if counted:
            self.statuses.fail(offsets)
        if note is not None:
            noted(self.notes, offsets, note)
        self.states.update(states)
        later = [(time_us, offset) for time_us, offset in zip(ready_us, offsets, strict=True) if time_us > now_us]
        self.pending.rest([time_us for time_us, _ in later], [offset for _, offset in later])
        resting = {offset for _, offset in later}
        self.pending.make_ready([offset for offset in offsets if offset not in resting])
        self._order.update(offsets, now_us, self._ahead)
        for offset in offsets if self._ahead else ():
            self._ahead.pop(offset, None)
        self.pending.expire_again(offsets, now_us)
        self.pending.on_change()

    def apply_edit(self, offset: int, edit: EditRecord, moved: bool, now_us: int) -> None:
        """A message that nobody holds was changed; `edits` has it already."""
        status = self.statuses[offset]
        if offset >= self.statuses.end or status == SETTLED:
            return  # not published yet, as far as this subscription knows: it will see the edit then
        if edit.deleted:
            self.apply_settled([offset])
        elif moved and status in (WAITING, READY, RESTING, BLOCKED):
            self._order.unblock(offset)
            self.pending.move(offset, edit.due or 0, now_us)
            self._order.update([offset], now_us, self._ahead)
        elif status in (READY, BLOCKED):
            self._order.unblock(offset)
            self.pending.make_ready([offset])
            self._order.update([offset], now_us, self._ahead)  # others of its key may come before it by now
        self.pending.on_change()

    # Snapshots.

    def frozen(self) -> FrozenIndex:
        """The state of this moment, for a snapshot."""
        statuses = self.statuses.frozen()
        resting = self.pending.frozen_rests(statuses)
        return FrozenIndex(statuses, resting, self.leases.frozen(), dict(self.notes), dict(self.states))

    def settled_chunks(self) -> SettledChunks:
        """What saves which messages are settled, in slices."""
        return SettledChunks(self.statuses)
