"""Offsets of messages that are spoken of together: most follow each other, and a range is all there is to say."""

from collections.abc import Collection, Iterator, Sequence


def follow(offsets: Sequence[int]) -> bool:
    """Whether the offsets, one at least, follow each other without a gap."""
    if type(offsets) is range:
        return offsets.step == 1
    if len(offsets) == 1:
        return True
    first, last = offsets[0], offsets[-1]
    if last - first != len(offsets) - 1:
        return False
    return (offsets if type(offsets) is list else list(offsets)) == list(range(first, last + 1))


def gathered(offsets: Sequence[int]) -> tuple[list[int], int]:
    """The first of the offsets, and how many follow it, if all others do; else all of them, and 0.

    >>> gathered(range(3, 8)), gathered([3, 4]), gathered([5, 2])
    (([3], 4), ([3], 1), ([5, 2], 0))
    """
    if len(offsets) > 1 and follow(offsets):
        return [offsets[0]], len(offsets) - 1
    return list(offsets), 0


def spread(offsets: list[int], following: int) -> Sequence[int]:
    """The offsets, and so many more that follow the last one; a range if only one is given.

    >>> spread([3], 4), spread([1, 3], 1), spread([5, 2], 0)
    (range(3, 8), [1, 3, 4], [5, 2])
    """
    if not following:
        return offsets
    run = range(offsets[-1], offsets[-1] + 1 + following)
    return run if len(offsets) == 1 else [*offsets[:-1], *run]


def ranges(offsets: Sequence[int]) -> Iterator[range]:
    """The offsets, which rise, as ranges.

    >>> list(ranges([3, 4, 5, 8])), list(ranges(range(2, 4))), list(ranges([]))
    ([range(3, 6), range(8, 9)], [range(2, 4)], [])
    """
    if type(offsets) is range:
        yield from [offsets] if offsets else []
        return
    begin = 0
    for at in range(1, len(offsets) + 1):
        if at == len(offsets) or offsets[at] != offsets[at - 1] + 1:
            yield range(offsets[begin], offsets[at - 1] + 1)
            begin = at


def common(known: Collection[int], offsets: Sequence[int]) -> list[int]:
    """Those of the known offsets that are among others, of which there may be very many or very few.

    >>> common({3: b"", 9: b""}, range(10**9)), common([1, 2], [2, 2, 7])
    ([3, 9], [2])
    """
    if len(known) < len(offsets):
        others = offsets if type(offsets) is range else set(offsets)
        return [offset for offset in known if offset in others]
    return [offset for offset in dict.fromkeys(offsets) if offset in known]
