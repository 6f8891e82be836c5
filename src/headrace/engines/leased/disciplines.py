"""Disciplines: the key by which messages that are ready are handed out, the smallest first."""

from array import array
from collections.abc import Sequence

from headrace.model.limits import PRIORITY_MAX, PRIORITY_MIN
from headrace.model.subscription import Discipline

RANK_BITS = 47
"""A priority's key has its rank above so many bits, and the offset in them."""
_OFFSET_MASK = (1 << RANK_BITS) - 1

Ordered = tuple[Sequence[int], Sequence[int]]
"""Keys, rising, and offsets."""


def ranked(priority: int | None, offset: int) -> int:
    """The key of a message with a priority: the greater it is the smaller the key, and among equals the older one's."""
    bounded = min(max(priority or 0, PRIORITY_MIN), PRIORITY_MAX)
    return (PRIORITY_MAX - bounded) << RANK_BITS | offset


def rank_of(key: int) -> int:
    """The part of such a key that is from the priority."""
    return key >> RANK_BITS


def ordered(
    discipline: Discipline,
    offsets: Sequence[int],
    priorities: Sequence[int | None] | None,
    times: Sequence[int],
) -> Ordered:
    """Offsets in the order in which a discipline wants them, with their keys; all sequences have the same order.

    >>> ordered(Discipline.PRIORITY, [7, 8, 9], [0, 5, None], [])[1].tolist()
    [8, 7, 9]
    """
    if discipline is Discipline.DEADLINE:
        order = sorted(range(len(offsets)), key=times.__getitem__)
        return array("q", map(times.__getitem__, order)), array("q", map(offsets.__getitem__, order))
    if discipline is Discipline.PRIORITY:
        if priorities is None and type(offsets) is range:
            base = ranked(0, 0)
            return range(base + offsets.start, base + offsets.stop), offsets
        keys = sorted(map(ranked, priorities or [0] * len(offsets), offsets))
        return array("q", keys), array("q", [key & _OFFSET_MASK for key in keys])
    if type(offsets) is range:
        if discipline is Discipline.FIFO:
            return offsets, offsets
        return range(1 - offsets.stop, 1 - offsets.start), range(offsets.stop - 1, offsets.start - 1, -1)
    keys = sorted(offsets) if discipline is Discipline.FIFO else sorted(-offset for offset in offsets)
    return array("q", keys), array("q", [abs(key) for key in keys])
