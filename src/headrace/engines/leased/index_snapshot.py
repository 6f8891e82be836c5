"""A subscription's state in a partition as plain values, for snapshots of the journal: chunks, then the rest."""

from array import array
from collections.abc import Iterator, Sequence
from itertools import islice

import msgspec

from headrace.engines.leased.leases import LeaseRecord
from headrace.engines.leased.packing import packed
from headrace.engines.leased.release_notes import ReleaseNote
from headrace.engines.leased.statuses import FrozenStatuses, Statuses

_CHUNKS_TOGETHER = 2
_RESTING_TOGETHER = 1000
_LEASES_TOGETHER = 10
"""Each of many messages, perhaps."""
_NOTES_TOGETHER = 100


class SavedChunk(msgspec.Struct, array_like=True):
    """Which of some messages are settled, and how often each was handed out in vain."""

    number: int
    settled: bytes
    failed: bytes


class SavedLease(msgspec.Struct, array_like=True):
    """Messages that somebody holds."""

    number: int
    holder: str
    until_us: int
    offsets: bytes
    over: bool = False
    """Held by nobody any more, and not taken by anybody since."""


class SavedRest(msgspec.Struct, array_like=True):
    """All but the chunks."""

    resting_us: bytes
    resting: bytes
    leases: list[SavedLease]
    notes: dict[int, list[ReleaseNote]]
    states: dict[int, bytes]


class FrozenIndex:
    """The state of one moment; later changes do not reach it."""

    def __init__(
        self,
        statuses: FrozenStatuses,
        resting: Iterator[tuple[int, int]],
        leases: Iterator[tuple[LeaseRecord, Sequence[int]]],
        notes: dict[int, list[ReleaseNote]],
        states: dict[int, bytes],
    ) -> None:
        self._statuses = statuses
        self._resting = resting
        self._leases = leases
        self._notes = notes
        self._states = states

    @property
    def end(self) -> int:
        """The offset behind the last message that is known."""
        return self._statuses.end

    def chunks(self) -> Iterator[list[SavedChunk]]:
        """The chunks, some at a time."""
        numbers = iter(sorted(self._statuses.chunks))
        while some := list(islice(numbers, _CHUNKS_TOGETHER)):
            yield [SavedChunk(number, *self._statuses.saved(number)) for number in some]

    def rest(self) -> Iterator[SavedRest]:
        """What has to be remembered besides, some of it at a time; can be asked for once."""
        while some := list(islice(self._resting, _RESTING_TOGETHER)):
            times, offsets = array("q", [time_us for time_us, _ in some]), array("q", [offset for _, offset in some])
            yield SavedRest(times.tobytes(), offsets.tobytes(), [], {}, {})
        while leases := list(islice(self._leases, _LEASES_TOGETHER)):
            saved = [
                SavedLease(held.number, held.holder, held.until_us, packed(sorted(leased)), held.over)
                for held, leased in leases
            ]
            yield SavedRest(b"", b"", saved, {}, {})
        notes = iter(self._notes.items())
        while noted := dict(islice(notes, _NOTES_TOGETHER)):
            yield SavedRest(b"", b"", [], noted, {})
        states = iter(self._states.items())
        while stated := dict(islice(states, _NOTES_TOGETHER)):
            yield SavedRest(b"", b"", [], {}, stated)


class SettledChunks:
    """Saves the chunks of an index while it is in use: what is changed meanwhile is saved again in the end."""

    def __init__(self, statuses: Statuses) -> None:
        self._statuses = statuses
        self._frozen = statuses.frozen()
        self._saved: dict[int, SavedChunk] = {}

    def steps(self) -> Iterator[None]:
        """Save some of them, and yield."""
        for place, number in enumerate(sorted(self._frozen.chunks)):
            self._saved[number] = SavedChunk(number, *self._frozen.saved(number))
            if place % _CHUNKS_TOGETHER == _CHUNKS_TOGETHER - 1:
                yield

    def finish(self) -> tuple[int, list[list[SavedChunk]]]:
        """The end, and the chunks, as they are now, some together."""
        statuses, now = self._statuses, self._statuses.frozen()
        chunks = [
            self._saved[number]
            if number in self._saved and statuses.is_unchanged(number, self._frozen)
            else SavedChunk(number, *now.saved(number))
            for number in sorted(now.chunks)
        ]
        groups = [chunks[at : at + _CHUNKS_TOGETHER] for at in range(0, len(chunks), _CHUNKS_TOGETHER)]
        return now.end, groups
