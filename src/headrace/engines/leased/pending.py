"""The messages that a subscription has not settled in a partition: which are ready, in which order, and which wait."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import copy

from headrace.engines.leased.contents import Contents
from headrace.engines.leased.disciplines import ordered, rank_of, ranked
from headrace.engines.leased.edits import EditRecord
from headrace.engines.leased.runs import Runs
from headrace.engines.leased.statuses import (
    BLOCKED,
    LEASED,
    LEAVING,
    READY,
    RESTING,
    SETTLED,
    WAITING,
    FrozenStatuses,
    Statuses,
)
from headrace.model.offsets import common, follow
from headrace.model.subscription import Discipline

_OUTDATED_MAX = 1000
_AT_ONCE = 4096
"""Messages that are put in order at a time."""
_REORDERED_TOGETHER = 300
_DUE_TOGETHER = 1000
"""Messages that are due and made ready at a time: more may be due at the same moment."""
_READ_TOGETHER = 300
"""The same where their contents have to be read for that."""

Entry = tuple[Runs, Sequence[int], Sequence[int]]
Entries = list[Entry]
"""Where messages were taken from, with keys and offsets."""


class PendingMessages:
    """The status of each message tells what counts; entries that a message left behind elsewhere are passed over."""

    def __init__(
        self,
        statuses: Statuses,
        rests: Mapping[int, int],
        contents: Contents,
        edits: Mapping[int, EditRecord],
        discipline: Discipline,
    ) -> None:
        self.statuses = statuses
        self.waiting = Runs()
        """By `due`."""
        self.resting = Runs()
        """Given back, by the time until when."""
        self.ready = Runs()
        """By the discipline's key."""
        self.expiring = Runs()
        """By `expires`."""
        self.edits = edits
        self.discipline = discipline
        self.contents = contents
        self._rests = {offset: rests[offset] for offset in statuses.with_status(RESTING)}
        """Until when messages rest: other entries do not count. Has some that do not rest any more."""
        self._overdue: set[int] = set()
        """Messages that expired while they were leased or their settlement was being written."""

        self.on_change: Callable[[], object] = _nothing
        """Called when what is ready, or when something happens next, may have changed."""
        self.lost: list[int] = []
        """Were to be made ready, but compaction had removed them: what they stood for has to go on without them."""
        for offset, time_us in self._rests.items():
            self.resting.push(time_us, offset)

    # Time passes.

    def advance(self, now_us: int) -> int:
        """Some of what is due by now is ready, all if it is not very many; returns how many were looked at."""
        count = 0
        most = _READ_TOGETHER if self.discipline is Discipline.PRIORITY else _DUE_TOGETHER
        for runs, status in ((self.waiting, WAITING), (self.resting, RESTING)):
            if count < most and (first := runs.first_key) is not None and first <= now_us:
                taken = runs.take(most - count, now_us)
                count += len(taken[1])
                times, offsets = self._valid(status, *taken)
                self.statuses.change(offsets, READY)
                if status == RESTING:
                    for offset in offsets:
                        self._rests.pop(offset, None)
                if self.discipline is Discipline.DEADLINE and status == WAITING:
                    self.ready.add(times, offsets)
                else:
                    self.add_ready(offsets)
        if count:
            self.on_change()
        return count

    def is_behind(self, now_us: int) -> bool:
        """Whether there may be more that is due by now."""
        firsts = (self.waiting.first_key, self.resting.first_key)
        return any(first is not None and first <= now_us for first in firsts)

    def expired(self, now_us: int, most: int | None = None) -> list[int]:
        """The messages whose time is over and that nobody holds, of so many at most: they are on their way out."""
        _, offsets = self.expiring.take(len(self.expiring) if most is None else most, now_us)
        gone = []
        for offset in offsets:
            status = self.statuses[offset]
            if status in (LEASED, LEAVING):
                self._overdue.add(offset)
            elif status in (WAITING, READY, RESTING, BLOCKED):
                gone.append(offset)
        self.statuses.change(gone, LEAVING)
        return gone

    def forget_expiry(self) -> None:
        """It is told anew when messages expire."""
        self.expiring = Runs()
        self._overdue.clear()

    def expire_later(self, offsets: Sequence[int], time_us: int) -> None:
        """Make expired messages ready again that could not be dropped; they expire anew at this time."""
        self.make_ready(list(offsets))
        for offset in offsets:
            self.expiring.push(time_us, offset)
        self.on_change()

    def expire_again(self, offsets: Iterable[int], now_us: int) -> None:
        """Let messages expire that are not leased any more and whose time was over meanwhile."""
        for offset in self._overdue.intersection(offsets) if self._overdue else ():
            self._overdue.discard(offset)
            self.expiring.push(now_us, offset)

    # Messages become ready, or have to wait.

    def make_ready(self, offsets: list[int]) -> None:
        """Make messages ready."""
        if offsets:
            self.statuses.change(offsets, READY)
            self.add_ready(self.statuses.only(offsets, READY))

    def rest(self, times_us: Sequence[int], offsets: Sequence[int]) -> None:
        """Let messages rest until these times."""
        self.statuses.change(offsets, RESTING)
        self._rests.update(zip(offsets, times_us, strict=True))
        for time_us, offset in zip(times_us, offsets, strict=True):
            self.resting.push(time_us, offset)
        if len(self._rests) > 2 * self.statuses.counts[RESTING] + _OUTDATED_MAX:  # most were settled meanwhile
            self._rests = {offset: self._rests[offset] for offset in self.statuses.with_status(RESTING)}

    def rests_until(self, offset: int, time_us: int) -> bool:
        """Whether an entry among the resting ones counts."""
        return self._rests.get(offset) == time_us and self.statuses[offset] == RESTING

    def rest_of(self, offset: int) -> int | None:
        """Until when a message rests, if it does."""
        return self._rests.get(offset) if self.statuses[offset] == RESTING else None

    def frozen_rests(self, statuses: FrozenStatuses) -> Iterator[tuple[int, int]]:
        """Until when messages rest, and which, with the statuses of this moment and whatever becomes of them later."""
        rests = dict(self._rests)
        return ((rests[offset], offset) for offset in statuses.with_status(RESTING))

    def copied(self) -> "PendingMessages":
        """All as it is now, to be looked at a slice at a time while messages come and go."""
        same = copy(self)
        same.statuses, same.edits, same._rests = self.statuses.copied(), dict(self.edits), dict(self._rests)
        return same

    def move(self, offset: int, due_us: int, now_us: int) -> None:
        """A message that nobody holds is due at another time."""
        self._rests.pop(offset, None)
        if due_us > now_us:
            self.statuses.change([offset], WAITING)
            self.waiting.push(due_us, offset)
        else:
            self.make_ready([offset])

    def settle(self, offsets: Sequence[int]) -> None:
        """Settle messages."""
        self.statuses.change(offsets, SETTLED)
        if self._overdue:
            self._overdue.difference_update(common(self._overdue, offsets))

    def reorder(self, discipline: Discipline) -> Iterator[None]:
        """Hand out in another order from now on; yields after some of the messages were put in it."""
        self.discipline = discipline
        self.ready = Runs()
        for begin, end in self.statuses.unsettled():
            offsets = self.statuses.only(range(begin, end), READY)
            for place in range(0, len(offsets), _REORDERED_TOGETHER):
                self.add_ready(self.statuses.only(offsets[place : place + _REORDERED_TOGETHER], READY))
                yield

    def add_ready(self, offsets: Sequence[int]) -> None:
        """Put messages whose status says that they are ready into the order; what has to be known of them is read."""
        for place in range(0, len(offsets), _AT_ONCE):
            self._add_some(offsets[place : place + _AT_ONCE])

    def _add_some(self, offsets: Sequence[int]) -> None:
        if self.discipline not in (Discipline.DEADLINE, Discipline.PRIORITY):
            self.ready.add(*ordered(self.discipline, offsets, None, ()))
            return
        for columns, there, gone in self.contents.parts(offsets, self.edits):
            self.statuses.change(gone, SETTLED)
            self.lost += gone
            times: Sequence[int] = columns.timestamps or ()
            if columns.dues is not None:
                times = [time if due is None else due for due, time in zip(columns.dues, times, strict=True)]
            self.ready.add(*ordered(self.discipline, there, columns.priorities, times))

    # Messages are taken out.

    def take(self, count: int, now_us: int, ahead_us: int, until_key: int | None, entries: Entries) -> Sequence[int]:
        """Take out what is ready, then what is due soon; tells where it was. Their statuses stay for now.

        What rests is not taken before its time: only we know when that is.
        """
        self.advance(now_us)
        chosen: Sequence[int] = ()
        while len(chosen) < count:
            first = self.ready.first_key
            if first is None and self.advance(now_us):
                continue  # very many were due
            if first is None or (until_key is not None and first > until_key):
                break
            keys, offsets = self._valid_ready(*self.ready.take(count - len(chosen), until_key))
            entries.append((self.ready, keys, offsets))
            chosen = _together(chosen, offsets)
        until_us = now_us + ahead_us
        while ahead_us and len(chosen) < count and (first := self.waiting.first_key) is not None and first <= until_us:
            times, offsets = self._valid(WAITING, *self.waiting.take(count - len(chosen), until_us))
            entries.append((self.waiting, times, offsets))
            chosen = _together(chosen, offsets)
        if type(chosen) is not range and chosen and follow(chosen):
            return range(chosen[0], chosen[-1] + 1)
        return chosen

    def put_back(self, offsets: set[int], entries: Entries) -> None:
        """Put back messages that were taken out."""
        for runs, keys, entered in entries:
            status = WAITING if runs is self.waiting else READY
            for key, offset in zip(keys, entered, strict=True):
                if offset in offsets:
                    runs.push(key, offset)
                    self.statuses.change([offset], status)

    def due(self, offset: int, given: int | None) -> int | None:
        """When a message is due, edits considered."""
        edit = self.edits.get(offset)
        return given if edit is None or edit.due is None else edit.due

    def priority(self, offset: int, given: int | None) -> int | None:
        """A message's priority, edits considered."""
        edit = self.edits.get(offset)
        return given if edit is None or edit.priority is None else edit.priority

    def _valid(self, status: int, times: Sequence[int], offsets: Sequence[int]) -> tuple[Sequence[int], Sequence[int]]:
        """Those entries of waiting or resting messages that count."""
        if status == WAITING and not self.edits and self.statuses.all_have(offsets, status):
            return times, offsets
        kept_times: list[int] = []
        kept: list[int] = []
        for time_us, offset in zip(times, offsets, strict=True):
            waits = self.statuses[offset] == WAITING and self.due(offset, time_us) == time_us
            if waits if status == WAITING else self.rests_until(offset, time_us):
                kept_times.append(time_us)
                kept.append(offset)
        return kept_times, kept

    def _valid_ready(self, keys: Sequence[int], offsets: Sequence[int]) -> tuple[Sequence[int], Sequence[int]]:
        """Those entries of ready messages that count."""
        by_content = self.discipline in (Discipline.PRIORITY, Discipline.DEADLINE)
        if not (by_content and self.edits) and self.statuses.all_have(offsets, READY):
            return keys, offsets
        kept_keys: list[int] = []
        kept: list[int] = []
        for key, offset in zip(keys, offsets, strict=True):
            if self.statuses[offset] == READY and not self._has_moved(key, offset):
                kept_keys.append(key)
                kept.append(offset)
        return kept_keys, kept

    def _has_moved(self, key: int, offset: int) -> bool:
        """Whether a ready message has another key by now, because it was edited."""
        edit = self.edits.get(offset)
        if edit is None:
            return False
        if self.discipline is Discipline.PRIORITY:
            return edit.priority is not None and rank_of(ranked(edit.priority, 0)) != rank_of(key)
        return self.discipline is Discipline.DEADLINE and edit.due is not None and edit.due != key


def _nothing() -> None:
    """Nobody has to be told."""


def _together(chosen: Sequence[int], more: Sequence[int]) -> Sequence[int]:
    """Each once: a message that was moved may have left an entry behind where it was."""
    if not chosen and type(more) is range and more.step == 1:
        return more
    both = [*chosen, *more]
    return both if len(set(both)) == len(both) else list(dict.fromkeys(both))
