"""A subscription's state in a partition in plain values, for snapshots of the journal.

First comes `begin`, then the chunks, then the rest.
"""

from array import array
from collections.abc import Iterator

import msgspec

from headrace.engines.leased.index import LeasedIndex, Note
from headrace.engines.leased.packing import packed, unpacked
from headrace.engines.leased.statuses import LEASED

_CHUNKS_TOGETHER = 64


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
    notes: dict[int, list[Note]]
    states: dict[int, bytes]


def save_chunks(index: LeasedIndex) -> Iterator[list[SavedChunk]]:
    """The chunks, some at a time."""
    together: list[SavedChunk] = []
    for number, settled, failed in index.statuses.saved():
        together.append(SavedChunk(number, settled, failed))
        if len(together) == _CHUNKS_TOGETHER:
            yield together
            together = []
    if together:
        yield together


def save_rest(index: LeasedIndex) -> SavedRest:
    """What has to be remembered, besides the chunks."""
    resting = index.pending.rests()
    leases = [
        SavedLease(held.number, held.holder, held.until_us, packed(sorted(offsets)), held.over)
        for held, offsets in index.leases.current()
    ]
    return SavedRest(
        array("q", [time_us for time_us, _ in resting]).tobytes(),
        array("q", [offset for _, offset in resting]).tobytes(),
        leases,
        index.notes,
        index.states,
    )


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
