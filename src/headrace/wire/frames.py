"""Frames of the native protocol: found in a stream of bytes, and made. The layout is in PROTOCOL.md."""

import struct
from collections.abc import Iterator
from typing import NamedTuple

import msgspec

from headrace.model.errors import ProtocolError
from headrace.model.limits import FRAME_BYTES_MAX

# length of what follows the header | kind | version | spare | correlation | length of the head
_HEADER = struct.Struct("<IBBHII")
HEADER_BYTES = _HEADER.size
assert HEADER_BYTES == 16
FRAME_VERSION = 1
SHARED_BYTES = 256 << 10

_encoder = msgspec.msgpack.Encoder()


class Frame(NamedTuple):
    """One frame. Its views are good until the next bytes are received: keep a copy of what must last."""

    kind: int
    correlation: int
    head: memoryview
    """MessagePack; what it means depends on the kind."""
    body: memoryview
    """Raw batches, or nothing. Writable, and its own: a broker writes the batch's place into it."""
    lasting: bool
    """Whether the views stay good: the frame has memory of its own."""


class Frames:
    """Finds frames in received bytes, with as little copying as there can be.

    `buffer` is where to receive, `received` tells how much came and yields the frames that are whole now. Connections
    of one thread may share the memory in which they receive; a frame that is not whole yet gets memory of its own.
    """

    def __init__(self, shared: memoryview | None = None, bytes_max: int = FRAME_BYTES_MAX) -> None:
        self._shared = shared if shared is not None else memoryview(bytearray(SHARED_BYTES))
        self._bytes_max = bytes_max
        self._start = bytearray()
        """The beginning of a frame whose length is not known yet: less than a header."""
        self._partial: memoryview | None = None
        """The memory of a frame that is not whole yet, how much of it there is, and how long it will be."""
        self._filled = 0
        self._length = 0

    @property
    def pending_bytes(self) -> int:
        """How much is held of a frame that is not whole yet."""
        return self._filled if self._partial is not None else len(self._start)

    def buffer(self) -> memoryview:
        """Where to put the next bytes."""
        if self._partial is not None:
            return self._partial[self._filled :]
        return self._shared

    def received(self, count: int) -> Iterator[Frame]:
        """So many bytes were put into the buffer: the frames that are whole now. To be iterated to its end."""
        if self._partial is not None:
            self._filled += count
            if self._filled == self._length:
                whole, self._partial, self._filled = self._partial, None, 0
                yield _frame(whole, 0, len(whole), lasting=True)
            elif self._filled == len(self._partial):
                self._hold(self._partial)
            return
        data = self._shared[:count]
        if self._start:
            data = memoryview(self._start + bytes(data))
            self._start = bytearray()
        yield from self._split(data)

    def _split(self, data: memoryview) -> Iterator[Frame]:
        position, end = 0, len(data)
        while end - position >= HEADER_BYTES:
            length = HEADER_BYTES + self._checked_length(data, position)
            if position + length > end:
                self._filled, self._length = end - position, length
                self._hold(data[position:end])
                return
            yield _frame(data, position, position + length, lasting=False)
            position += length
        self._start = bytearray(data[position:end])

    def _hold(self, begun: memoryview) -> None:
        """Give an unfinished frame memory that grows as its bytes come: announcing a large one costs nobody any."""
        partial = memoryview(bytearray(min(self._length, max(2 * len(begun), SHARED_BYTES))))
        partial[: len(begun)] = begun
        self._partial = partial

    def _checked_length(self, data: memoryview, position: int) -> int:
        length, _, version, _, _, head_length = _HEADER.unpack_from(data, position)
        if version != FRAME_VERSION:
            raise ProtocolError(f"a frame of version {version}; this side speaks version {FRAME_VERSION}")
        if length > self._bytes_max:
            raise ProtocolError(f"a frame of {length} bytes; at most {self._bytes_max} are allowed")
        if head_length > length:
            raise ProtocolError(f"a frame's head of {head_length} bytes is longer than the frame of {length}")
        return int(length)


def _frame(data: memoryview, position: int, end: int, *, lasting: bool) -> Frame:
    _, kind, _, _, correlation, head_length = _HEADER.unpack_from(data, position)
    head_end = position + HEADER_BYTES + head_length
    return Frame(kind, correlation, data[position + HEADER_BYTES : head_end], data[head_end:end], lasting)


def frame(kind: int, correlation: int, head: object = None, body_bytes: int = 0) -> bytearray:
    """A frame up to its body, of which so many bytes are to follow."""
    data = bytearray(HEADER_BYTES)
    if head is not None:
        _encoder.encode_into(head, data, HEADER_BYTES)
    head_bytes = len(data) - HEADER_BYTES
    _HEADER.pack_into(data, 0, head_bytes + body_bytes, kind, FRAME_VERSION, 0, correlation, head_bytes)
    return data
