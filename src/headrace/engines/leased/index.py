"""A leased subscription's index of a partition: messages are taken out, held, settled and come back."""

from collections.abc import Iterator, Sequence

from headrace.engines.leased.inspection import NextTimes
from headrace.engines.leased.journaled import JournaledIndex
from headrace.engines.leased.leases import SESSION_BOUND_US, LeaseRecord
from headrace.engines.leased.pending import Entries
from headrace.engines.leased.statuses import BLOCKED, LEASED, LEAVING, SETTLED, UNKNOWN
from headrace.engines.leased.taken import TakenMessages, fitting, without
from headrace.engines.partition import Partition
from headrace.model.batch import Batch, Columns
from headrace.model.errors import HeadraceError, LeaseExpired, MessageGone, NotLeaseHolder
from headrace.model.offsets import ranges
from headrace.model.subscription import SubscriptionSettings

_BLOCKED_AT_ONCE = 64
"""When messages are passed over because their keys are busy, so many are looked at together."""

Extended = tuple[LeaseRecord, LeaseRecord]
"""Messages that are leased for longer: how they were held, and how they are now."""


class LeasedIndex(JournaledIndex):
    """The live state of a subscription in a partition: what consumers do with its messages.

    A decision about messages counts here at once, before it is in the journal: `take`, `reserve`, `extend` and
    `leave`. If the journal cannot be written, `give_back`, `restore`, `shorten` and `stay` undo it. What has just been
    written there comes with `apply_…`.
    """

    def alter(self, settings: SubscriptionSettings, now_us: int) -> Iterator[None]:
        """Apply other settings; yields after some of the work, and no message may be taken out meanwhile."""
        before, self._settings = self._settings, settings
        self._order.alter(settings, now_us)
        if settings.discipline is not before.discipline:
            self._order.unblock_all()
            yield from self.pending.reorder(settings.discipline)
        self.pending.on_change()

    def read_contents_from(self, partition: Partition) -> None:
        """Read contents from the partition as consumers see it now."""
        self.pending.contents.use(partition)

    # Handing out.

    @property
    def first_keys(self) -> tuple[int | None, int | None]:
        """The keys of the next ready and the next waiting message; they may be outdated."""
        return self.pending.ready.first_key, self.pending.waiting.first_key

    def take(
        self,
        count: int,
        bytes_max: int,
        now_us: int,
        ahead_us: int = 0,
        until_key: int | None = None,
        least: int = 1,
    ) -> TakenMessages | None:
        """Take out the next messages and mark them leased; none with a key beyond `until_key`.

        At least `least` messages are taken, however large they are.
        """
        entries: Entries = []
        early: set[int] = set()
        self._advance(now_us)
        self.pending.on_change()
        wanted = count
        while True:
            fresh: Entries = []
            chosen = self.pending.take(wanted, now_us, ahead_us, until_key, fresh)
            try:
                stored, columns, there = self._contents(chosen, bytes_max, fresh)
            except (HeadraceError, OSError):
                self.pending.put_back({*chosen, *early}, entries + fresh)
                raise
            if self._settings.ordered_by_key:
                columns, there = self._unblocked(columns, there, fresh, early)
                wanted = max(count, min(2 * wanted, _BLOCKED_AT_ONCE))  # thousands of a busy key may come first
            entries += fresh
            if stored or there or not chosen:  # those that come first may be gone, or blocked
                break
        if len(there) > count:
            columns, there = self._cut(columns, there, count, entries)
        if early:
            self.pending.put_back(early, entries)
        stored_count, stored_bytes = sum(batch.count for batch in stored), sum(batch.raw_bytes for batch in stored)
        kept, size = fitting(columns, bytes_max - stored_bytes, 0 if stored else least)
        if kept < len(there):
            columns, there = self._cut(columns, there, kept, entries)
        if not there and not stored:
            return None
        complete = stored_count + len(there) == len(chosen)
        offsets = chosen if complete else [*chosen[:stored_count], *there]
        self.statuses.change(offsets, LEASED)
        if self._settings.ordered_by_key:
            self._order.keys.occupy(there, columns.keys)
        taken = TakenMessages(offsets, stored, columns, stored_bytes + size, entries, now_us)
        self._describe(taken)
        return taken

    def _cut(self, columns: Columns, offsets: list[int], kept: int, entries: Entries) -> tuple[Columns, list[int]]:
        """Only so many of these messages; the others go back to where they were."""
        self.pending.put_back(set(offsets[kept:]), entries)
        self._order.put_back(offsets[kept:], columns, kept)
        columns = columns.picked(range(kept), range(kept))
        columns.places = None
        return columns, offsets[:kept]

    def _contents(
        self, chosen: Sequence[int], bytes_max: int, entries: Entries
    ) -> tuple[list[Batch], Columns, list[int]]:
        """The first messages as they are stored, if that will do, and the others, with their offsets.

        Those that are not read, because there are enough bytes already, go back.
        """
        contents, edits = self.pending.contents, self.edits
        stored: list[Batch] = []
        if type(chosen) is range and not self._settings.ordered_by_key and not self._are_edited(chosen):
            stored = contents.stored(chosen, bytes_max)
        others = range(stored[-1].next_offset, chosen[-1] + 1) if stored else chosen
        bytes_left = bytes_max - sum(batch.raw_bytes for batch in stored)
        columns, there, gone, unread = contents.read_some(others, bytes_left, edits)
        for part in ranges(sorted(gone)):
            self._part_with(part)
        if unread:
            self.pending.put_back(set(unread), entries)
            entries[:] = [without(entry, set(unread)) for entry in entries]
        return stored, columns, there

    def _describe(self, taken: TakenMessages) -> None:
        """Say what there is to know of messages that were taken out, beside their contents."""
        offsets, edits = taken.offsets, self.edits
        if self._are_edited(offsets):
            taken.versions = [edits[offset].version if offset in edits else 1 for offset in offsets]
        taken.deliveries = [failed + 1 for failed in self.statuses.failures(offsets)]
        if self.states:
            taken.states = {offset: self.states[offset] for offset in offsets if offset in self.states}
        early = [entry for entry in taken.entries if entry[0] is not self.pending.ready and entry[1]]
        ahead = set(offsets) if early else set()
        for _, times, entered in early:
            dues = {at: time_us for at, time_us in zip(entered, times, strict=True) if at in ahead}
            self._ahead.update(dues)
            taken.begins_us = max(taken.begins_us, *dues.values(), 0)

    def _are_edited(self, offsets: Sequence[int]) -> bool:
        """Whether any of these was changed since it was published."""
        return bool(self.edits) and not self.edits.keys().isdisjoint(offsets)

    def give_back(self, taken: TakenMessages, now_us: int) -> None:
        """Put back taken messages: their lease could not be recorded."""
        self.pending.put_back(set(taken.offsets), taken.entries)
        self.pending.expire_again(taken.offsets, now_us)
        self._order.update(taken.offsets, now_us, self._ahead)
        self.pending.on_change()

    def ready_times(self, offsets: Sequence[int], wanted_us: Sequence[int]) -> list[int]:
        """When released messages are ready: not before they are due."""
        ahead = self._ahead
        return [max(time_us, ahead.get(offset, 0)) for offset, time_us in zip(offsets, wanted_us, strict=True)]

    # What holders say.

    def checked(
        self, number: int, offsets: Sequence[int], now_us: int, *, late: bool
    ) -> tuple[Sequence[int], list[tuple[int, str]]]:
        """Those of these messages that are in the hands of this lease, and why the others are not.

        With `late` also those that were in its hands last, if nobody has taken them since. Whoever asks goes on with
        `reserve`, `extend` or `leave` at once: what is checked next must know of it.
        """
        held = self.leases.common(offsets)
        if held is not None and held.number == number and not held.over and (late or held.until_us > now_us):
            return offsets, []
        accepted: list[int] = []
        refused: list[tuple[int, str]] = []
        for offset in offsets:
            code = self._refusal(number, offset, now_us, late)
            if code:
                refused.append((offset, code))
            else:
                accepted.append(offset)
        return accepted, refused

    def _refusal(self, number: int, offset: int, now_us: int, late: bool) -> str:
        status, held = self.statuses[offset], self.leases.get(offset)
        if status in (SETTLED, UNKNOWN):
            return MessageGone.code
        if held is None or held.number != number or (held.over and status == LEASED):
            return NotLeaseHolder.code  # the last: another lease of it is being written down
        if held.over and status == LEAVING:
            return LeaseExpired.code
        if not late and (held.over or held.until_us <= now_us):  # nobody may have looked since its end
            return LeaseExpired.code
        return ""

    def holder(self, offset: int) -> str | None:
        """The holder of a message: a consumer, the broker itself (empty), or None."""
        if self.statuses[offset] not in (LEASED, LEAVING):
            return None
        held = self.leases.get(offset)
        return held.holder if held is not None else ""

    def reserve(self, offsets: Sequence[int]) -> list[LeaseRecord]:
        """Reserve messages while their settlement is written: those whose lease is over are not leased to others."""
        reserved = self.leases.reserve(offsets)
        for held in reserved:
            if held.over:
                self.statuses.change(held.offsets, LEAVING)
        return reserved

    def restore(self, reserved: Sequence[LeaseRecord], now_us: int) -> None:
        """Undo `reserve`: the journal could not be written."""
        for held in reserved:
            if held.over:
                self.stay(held.offsets, now_us)
        self.leases.restore(reserved)
        self.pending.on_change()

    def extend(self, offsets: Sequence[int], until_us: int) -> list[Extended]:
        """Extend leases before that is written; returns what `shorten` needs to undo it."""
        held = [was for was in self.leases.parts(offsets) if was.until_us != SESSION_BOUND_US]
        self.pending.on_change()
        return [(was, self.leases.hold(was.number, was.holder, until_us, was.offsets)) for was in held]

    def shorten(self, extended: Sequence[Extended]) -> None:
        """Undo `extend`: leases that still exist end when they would have."""
        for was, extension in extended:
            named = ((offset, self.leases.get(offset)) for offset in was.offsets)
            kept = [offset for offset, held in named if held is not None and held.is_same(extension)]
            if kept:
                self.leases.hold(was.number, was.holder, was.until_us, kept)
        self.pending.on_change()

    # Time passes.

    def ended(self, now_us: int, most: int) -> list[int]:
        """End expired leases, so many at most; returns their messages, which count as failed deliveries."""
        back = [offset for offset in self.leases.end(now_us, most) if self.statuses[offset] == LEASED]
        if back:
            self.statuses.fail(back)
            self.statuses.change(back, LEAVING)
        self.pending.on_change()
        return back

    def expired(self, now_us: int, most: int | None = None) -> list[int]:
        """The expired messages that nobody holds, so many at most; they are leaving and block no keys."""
        gone = self.pending.expired(now_us, most)
        self._order.give_up(gone)
        self.pending.on_change()
        return gone

    def stay(self, offsets: Sequence[int], now_us: int) -> None:
        """Make messages available again, when they are due: they were leaving, or their leases have ended."""
        ahead = self._ahead
        early = {at: ahead[at] for at in offsets if at in ahead and ahead[at] > now_us} if ahead else {}
        self.leases.stay(offsets)
        self.pending.rest(list(early.values()), list(early))
        moved = self._moved_beyond(now_us, offsets) if self.edits else {}
        for offset, due_us in moved.items():
            self.pending.move(offset, due_us, now_us)
        self.pending.make_ready([offset for offset in offsets if offset not in early and offset not in moved])
        self._order.update(offsets, now_us, self._ahead)
        for offset in offsets if ahead else ():
            ahead.pop(offset, None)
        self.pending.expire_again(offsets, now_us)
        self.pending.on_change()

    def _moved_beyond(self, now_us: int, offsets: Sequence[int]) -> dict[int, int]:
        """When those of these are due that were moved to a time to come after their leases had ended."""
        dues = {offset: edit.due for offset in offsets if (edit := self.edits.get(offset)) is not None}
        return {offset: due_us for offset, due_us in dues.items() if due_us is not None and due_us > now_us}

    def is_behind(self, now_us: int) -> bool:
        """Whether more messages are due than `make_due_ready` has made ready."""
        return self.pending.is_behind(now_us)

    def make_due_ready(self, now_us: int) -> int:
        """Make messages that are due ready, some of them if they are very many; returns how many it looked at."""
        return self.pending.advance(now_us)

    def expire_later(self, offsets: Sequence[int], time_us: int) -> None:
        """Expired messages could not be dropped: try again then."""
        self.pending.expire_later(offsets, time_us)

    def next_times(self) -> NextTimes:
        """When something happens next."""
        pending = self.pending
        return NextTimes(
            pending.ready.first_key, pending.waiting.first_key, pending.resting.first_key, self.first_end_us
        )

    def has_expired(self, now_us: int) -> bool:
        """Whether there may be expired messages that nobody holds."""
        first_us = self.pending.expiring.first_key
        return first_us is not None and first_us <= now_us

    @property
    def next_end_us(self) -> int | None:
        """When the next lease or message expires, or a dead letter is to be written."""
        return self._earliest(self.leases.next_end_us)

    @property
    def first_end_us(self) -> int | None:
        """The same, or earlier: when a lease would have ended that was settled before; costs less."""
        return self._earliest(self.leases.first_end_us)

    def _earliest(self, end_us: int | None) -> int | None:
        expires_us = self.pending.expiring.first_key
        if expires_us is not None and (end_us is None or expires_us < end_us):
            end_us = expires_us
        if (self._lost or self.pending.lost) and (end_us is None or self._lost_us < end_us):
            end_us = self._lost_us
        return end_us

    # Messages of one key, one at a time.

    def _unblocked(
        self, columns: Columns, offsets: list[int], entries: Entries, early: set[int]
    ) -> tuple[Columns, list[int]]:
        """Without those whose key is busy, which are blocked until it is free; those not due yet are only noted."""
        if columns.keys is None:
            return columns, offsets
        free, blocked = self._order.keys.divide(columns.keys, offsets)
        if not blocked:
            return columns, offsets
        taken_out = {offset for runs, _, entered in entries if runs is not self.pending.ready for offset in entered}
        order = {offset: key for _, keys, entered in entries for key, offset in zip(keys, entered, strict=True)}
        for index in blocked:
            if offsets[index] in taken_out:  # not due yet: they are not blocked by anything but time
                early.add(offsets[index])
            else:
                self._order.keys.block(columns.keys[index] or b"", order[offsets[index]], offsets[index])
                self.statuses.change([offsets[index]], BLOCKED)
        picked = columns.picked(free, range(len(offsets)))
        picked.places = None
        return picked, [offsets[index] for index in free]
