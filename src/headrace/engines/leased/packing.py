"""Lists of offsets in a few bytes, for the journal."""

from array import array
from collections.abc import Sequence
from struct import Struct

from headrace.model.offsets import follow

_RANGE = Struct("<Bqq")
_LIST = b"\x01"


def packed(offsets: Sequence[int]) -> bytes:
    """Offsets as bytes.

    >>> unpacked(packed([3, 4, 5])), unpacked(packed([5, 1]))
    (range(3, 6), array('q', [5, 1]))
    """
    if follow(offsets):
        return _RANGE.pack(0, offsets[0], offsets[-1] + 1)
    return _LIST + array("q", offsets).tobytes()


def unpacked(data: bytes) -> Sequence[int]:
    """The offsets again, a range where they follow each other."""
    if data[0] == 0:
        _, start, stop = _RANGE.unpack(data)
        return range(start, stop)
    offsets = array("q")
    offsets.frombytes(data[1:])
    return offsets
