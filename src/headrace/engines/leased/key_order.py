"""Ordering by key: leases and settlements of messages decide which other messages of their keys are available."""

from collections.abc import Iterator, Mapping, Sequence

from headrace.engines.leased.keys import Keys
from headrace.engines.leased.pending import PendingMessages
from headrace.engines.leased.statuses import BLOCKED, LEASED, LEAVING, READY, SETTLED
from headrace.model.batch import Columns
from headrace.model.subscription import SubscriptionSettings


class KeyOrder:
    """Keeps messages of a key apart, if the subscription is ordered by key; else it does nothing."""

    def __init__(self, pending: PendingMessages) -> None:
        self.keys = Keys()
        self._pending = pending
        self._is_on = False

    def alter(self, settings: SubscriptionSettings, now_us: int) -> None:
        """Go on with other settings, or begin with those there are."""
        before, self._is_on = self._is_on, settings.ordered_by_key
        if before and not self._is_on:
            self._pending.make_ready(self._blocked(self.keys.clear()))
        if self._is_on and not before:
            self._occupy(now_us)

    def update(self, offsets: Sequence[int], now_us: int, ahead: Mapping[int, int]) -> None:
        """These are settled, or not in hand any more: their keys go on with others, or are kept for those tried before.

        `ahead` tells when those are due that were leased before they were.
        """
        if not self._is_on:
            return
        statuses = self._pending.statuses
        for offset in self.keys.among(offsets):
            is_settled = statuses[offset] == SETTLED
            if is_settled:
                self.keys.forget(offset)
            key = self.keys.release(offset)
            if key is not None and not is_settled and statuses.failures([offset]):
                self.keys.keep(offset, key, self._pending.due(offset, ahead.get(offset)) or 0, now_us)
            self._let_through(key)

    def give_up(self, offsets: Sequence[int]) -> None:
        """Release the keys of expired messages before their settlement is written."""
        for offset in offsets if self._is_on else ():
            self._let_through(self.keys.release(offset))

    def advance(self, now_us: int) -> None:
        """What is due by now has its key kept for it; what turned out to be gone has not."""
        lost, self._pending.lost = self._pending.lost, []
        if self._is_on:
            self.update(lost, now_us, {})
            self.keys.advance(now_us)

    def put_back(self, offsets: Sequence[int], columns: Columns, place: int) -> None:
        """Put back the keys of messages that were free but are not leased; their columns begin at `place`."""
        if self._is_on and columns.keys is not None:
            self.keys.put_back(offsets, columns.keys[place:])

    def unblock(self, offset: int) -> None:
        """Unblock an edited message: whether it is blocked is found anew, at its new position."""
        if self._pending.statuses[offset] == BLOCKED:
            self.keys.unblock(offset)

    def unblock_all(self) -> None:
        """The discipline changes: who is blocked is found anew. The caller puts what is ready in order."""
        self._pending.statuses.change(self._blocked(self.keys.unblock_all()), READY)

    def _blocked(self, offsets: Sequence[int]) -> list[int]:
        """Those that are blocked, each once."""
        return self._pending.statuses.only(dict.fromkeys(offsets), BLOCKED)

    def _let_through(self, key: bytes | None) -> None:
        """Make the next one of a key ready, if nobody holds it."""
        statuses = self._pending.statuses
        while key is not None:
            offset = self.keys.following(key, lambda offset: statuses[offset] == BLOCKED)
            if offset is None:
                return
            self._pending.make_ready([offset])
            if statuses[offset] == READY:
                return
            self.keys.release(offset)  # it was removed by compaction

    def _occupy(self, now_us: int) -> None:
        """Find the keys of leased messages, and of messages that were tried before."""
        statuses = self._pending.statuses
        in_hand = [*statuses.with_status(LEASED), *statuses.with_status(LEAVING)]
        for columns, there in self._read(in_hand):
            self.keys.occupy(there, columns.keys)
        held = set(in_hand)
        for columns, there in self._read([offset for offset in statuses.failed() if offset not in held]):
            for place, offset in enumerate(there):
                key = columns.keys[place] if columns.keys is not None else None
                due_us = columns.dues[place] if columns.dues is not None else None
                if key is not None:
                    self.keys.keep(offset, key, due_us or 0, now_us)

    def _read(self, offsets: list[int]) -> Iterator[tuple[Columns, list[int]]]:
        """The contents of many messages, not all of them in memory at once."""
        for columns, there, _ in self._pending.contents.parts(offsets, self._pending.edits):
            yield columns, there
