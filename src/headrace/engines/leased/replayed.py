"""The state of a leased subscription in a partition as the journal tells it, before the partition's log is read."""

from array import array
from collections.abc import Mapping, Sequence

from headrace.engines.leased.edits import EditRecord
from headrace.engines.leased.index_snapshot import FrozenIndex, SavedChunk, SavedRest, SettledChunks
from headrace.engines.leased.leases import SESSION_BOUND_US, LeaseTable
from headrace.engines.leased.packing import unpacked
from headrace.engines.leased.release_notes import ReleaseNote, noted
from headrace.engines.leased.statuses import LEASED, RESTING, SETTLED, UNKNOWN, Statuses
from headrace.model.offsets import common


class ReplayedIndex:
    """Adds up the facts of one subscription in one partition; a LeasedIndex takes the result over.

    A message of which the journal says nothing, or that was released, has the status UNKNOWN: the log tells the rest.
    """

    def __init__(self, start: int) -> None:
        self.statuses = Statuses(start)
        self.leases = LeaseTable()
        self.notes: dict[int, list[ReleaseNote]] = {}
        self.states: dict[int, bytes] = {}
        self.rests: dict[int, int] = {}
        """Until when messages rest; includes messages that do not rest any more."""

    @property
    def end(self) -> int:
        """The offset behind the last message that is known."""
        return self.statuses.end

    @property
    def floor(self) -> int:
        """The subscription has settled every message before this offset."""
        return self.statuses.floor

    # Facts.

    def apply_leased(self, number: int, holder: str, until_us: int, offsets: Sequence[int]) -> None:
        """A consumer leased messages."""
        # A message that was leased before had come back, because nobody had settled it.
        self.statuses.fail([offset for offset in offsets if self.statuses[offset] == LEASED])
        self.statuses.change(offsets, LEASED)
        self._hold(number, holder, until_us, offsets)

    def apply_extended(self, number: int, until_us: int, offsets: Sequence[int]) -> None:
        """A holder extended a lease."""
        self.leases.extend(number, until_us, offsets)

    def apply_settled(self, offsets: Sequence[int]) -> None:
        """Messages were acknowledged, or moved to another topic, or are gone."""
        self.statuses.change(offsets, SETTLED)
        self.leases.forget(offsets)
        for table in (self.notes, self.states):
            for offset in common(table, offsets) if table else ():
                table.pop(offset)

    def apply_returned(
        self,
        offsets: Sequence[int],
        ready_us: Sequence[int],
        counted: bool,
        note: ReleaseNote | None,
        states: Mapping[int, bytes],
        now_us: int,
    ) -> None:
        """A holder released messages, which can be leased again from these times on."""
        self.leases.forget(offsets)
        if counted:
            self.statuses.fail(offsets)
        if note is not None:
            noted(self.notes, offsets, note)
        self.states.update(states)
        resting = {offset: time_us for offset, time_us in zip(offsets, ready_us, strict=True) if time_us > now_us}
        self._rest(resting)
        self.statuses.change([offset for offset in offsets if offset not in resting], UNKNOWN)

    def apply_edit(self, offset: int, edit: EditRecord, moved: bool, now_us: int) -> None:  # noqa: ARG002
        """A message that nobody holds was edited."""
        status = self.statuses[offset]
        if offset >= self.statuses.end or status == SETTLED:
            return  # the subscription does not know the message yet: it reads the edit together with it
        if status == LEASED:  # its lease had ended, or it could not have been edited
            self.statuses.fail([offset])
            self.statuses.change([offset], UNKNOWN)
            self.leases.end_early(offset)
        if edit.deleted:
            self.apply_settled([offset])
        elif moved and status == RESTING:
            self.statuses.change([offset], UNKNOWN)

    # Snapshots.

    def begin_snapshot(self, end: int) -> None:
        """Forget everything: the chunks and the rest of a snapshot that was made at this end follow."""
        self.__init__(0)  # type: ignore[misc]
        self.statuses.load(end)

    def load_chunks(self, chunks: Sequence[SavedChunk]) -> None:
        """Restore the statuses of some messages."""
        for chunk in chunks:
            self.statuses.load_chunk(chunk.number, chunk.settled, chunk.failed)

    def load_rest(self, saved: SavedRest) -> None:
        """Restore rests, leases, notes and states."""
        self._rest(dict(zip(array("q", saved.resting), array("q", saved.resting_us), strict=True)))
        for lease in saved.leases:
            leased = unpacked(lease.offsets)
            if lease.over:
                self.leases.remember(lease.number, lease.holder, lease.until_us, leased)
            else:
                self.statuses.change(leased, LEASED)
                self._hold(lease.number, lease.holder, lease.until_us, leased)
        self.notes.update(saved.notes)
        self.states.update(saved.states)

    def frozen(self) -> FrozenIndex:
        """The state of this moment, for a snapshot."""
        statuses, rests = self.statuses.frozen(), dict(self.rests)
        resting = ((rests[offset], offset) for offset in statuses.with_status(RESTING))
        return FrozenIndex(statuses, resting, self.leases.frozen(), dict(self.notes), dict(self.states))

    def settled_chunks(self) -> SettledChunks:
        """What saves which messages are settled, in slices."""
        return SettledChunks(self.statuses)

    def _hold(self, number: int, holder: str, until_us: int, offsets: Sequence[int]) -> None:
        """Hold messages until a time; what was bound to a session is over, as the session ended with its broker."""
        self.leases.hold(number, holder, 0 if until_us == SESSION_BOUND_US else until_us, offsets)

    def _rest(self, resting: Mapping[int, int]) -> None:
        self.statuses.change(list(resting), RESTING)
        self.rests.update(resting)
