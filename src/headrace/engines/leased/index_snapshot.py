"""A subscription's state in a partition in plain values, for snapshots of the journal.

First comes `begin`, then the chunks, then the rest, in as many parts as it takes.
"""

from array import array
from collections.abc import Iterator
from itertools import islice

import msgspec

from headrace.engines.leased.index import LeasedIndex, ReleaseNote
from headrace.engines.leased.packing import packed, unpacked
from headrace.engines.leased.statuses import LEASED

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
    """The state of a moment: what becomes of the messages while it is saved does not count."""

    def __init__(self, index: LeasedIndex) -> None:
        self.statuses = index.statuses.frozen()
        self._resting = index.pending.frozen_rests(self.statuses)
        self._leases = index.leases.frozen()
        self._notes, self._states = dict(index.notes), dict(index.states)

    def chunks(self) -> Iterator[list[SavedChunk]]:
        """The chunks, some at a time."""
        numbers = iter(sorted(self.statuses.chunks))
        while some := list(islice(numbers, _CHUNKS_TOGETHER)):
            yield [SavedChunk(number, *self.statuses.saved(number)) for number in some]

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

    def __init__(self, index: LeasedIndex) -> None:
        self._index = index
        self._frozen = index.statuses.frozen()
        self._saved: dict[int, SavedChunk] = {}

    def steps(self) -> Iterator[None]:
        """Save some of them, and yield."""
        for place, number in enumerate(sorted(self._frozen.chunks)):
            self._saved[number] = SavedChunk(number, *self._frozen.saved(number))
            if place % _CHUNKS_TOGETHER == _CHUNKS_TOGETHER - 1:
                yield

    def finish(self) -> tuple[int, list[list[SavedChunk]]]:
        """The end, and the chunks, as they are now, some together."""
        statuses, now = self._index.statuses, self._index.statuses.frozen()
        chunks = [
            self._saved[number]
            if number in self._saved and statuses.is_unchanged(number, self._frozen)
            else SavedChunk(number, *now.saved(number))
            for number in sorted(now.chunks)
        ]
        groups = [chunks[at : at + _CHUNKS_TOGETHER] for at in range(0, len(chunks), _CHUNKS_TOGETHER)]
        return now.end, groups


def begin(index: LeasedIndex, end: int) -> None:
    """Forget everything: the chunks and the rest of what was saved at this end follow."""
    index.__init__(0)  # type: ignore[misc]
    index.statuses.load(end)


def load_chunks(index: LeasedIndex, chunks: list[SavedChunk]) -> None:
    """Take back chunks."""
    for chunk in chunks:
        index.statuses.load_chunk(chunk.number, chunk.settled, chunk.failed)


def load_rest(index: LeasedIndex, saved: SavedRest) -> None:
    """Take back the rest."""
    index.pending.rest(array("q", saved.resting_us), array("q", saved.resting))
    for lease in saved.leases:
        leased = unpacked(lease.offsets)
        if lease.over:
            index.leases.remember(lease.number, lease.holder, lease.until_us, leased)
        else:
            index.statuses.change(leased, LEASED)
            index.leases.hold(lease.number, lease.holder, lease.until_us, leased)
    index.notes.update(saved.notes)
    index.states.update(saved.states)
