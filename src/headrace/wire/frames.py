"""Frames of the native protocol: found in a stream of bytes, and made. The layout is in PROTOCOL.md."""

import struct
from collections import deque
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import msgspec

from headrace.model.errors import ProtocolError
from headrace.model.limits import FRAME_BYTES_MAX

# length of what follows the header | kind | version | spare | correlation | length of the head
_HEADER = struct.Struct("<IBBHII")
HEADER_BYTES = _HEADER.size
_HTTP = int.from_bytes(b"HTTP", "little")
"""How long a frame would be whose first bytes are those of an answer of HTTP."""
assert HEADER_BYTES == 16
FRAME_VERSION = 1
RECEIVED_BYTES = 256 << 10
_PIECE_BYTES = 64 << 10
_PIECES_MAX = 32
_SPARE_TRIES = 4

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


class Memory:
    """Memory for connections of one thread: one piece in which they receive, and pieces for frames that are not whole.

    Pieces are used again when nobody looks at them any more, since the pages of fresh memory cost more than a copy.
    """

    def __init__(self, at_once_bytes: int = RECEIVED_BYTES) -> None:
        """An unfinished frame gets so much at once, and more as its bytes come: to announce one costs nobody any."""
        self.shared = memoryview(bytearray(RECEIVED_BYTES))
        self.at_once_bytes = at_once_bytes
        self._pieces: deque[bytearray] = deque()

    def take(self, length: int) -> memoryview:
        """A piece of that length; it is free again when no view of it is left."""
        pieces = self._pieces
        for _ in range(min(len(pieces), _SPARE_TRIES)):
            piece = pieces.popleft()
            if len(piece) >= length:  # one that is too small is given up: frames have grown
                pieces.append(piece)
                if _is_free(piece):
                    return memoryview(piece)[:length]
        piece = bytearray(-(-length // _PIECE_BYTES) * _PIECE_BYTES)
        if len(pieces) < _PIECES_MAX and length <= self.at_once_bytes:
            pieces.append(piece)
        return memoryview(piece)[:length]


class Frames:
    """Finds frames in received bytes, with as little copying as there can be.

    `buffer` is where to receive, `received` tells how much came and yields the frames that are whole now. Connections
    of one thread may share their memory; a frame that is not whole yet gets a piece of its own.
    """

    def __init__(self, memory: Memory | None = None, bytes_max: int = FRAME_BYTES_MAX) -> None:
        self._memory = memory or Memory()
        self._shared = self._memory.shared
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

    def received(self, count: int) -> Iterable[Frame]:
        """So many bytes were put into the buffer: the frames that are whole now. To be iterated to its end."""
        if self._partial is None and not self._start and count >= HEADER_BYTES:
            shared = self._shared
            length, kind, version, _, correlation, head_length = _HEADER.unpack_from(shared)
            fits = HEADER_BYTES + length == count and version == FRAME_VERSION and length <= self._bytes_max
            if fits and head_length <= length:  # nearly always when little is sent: one frame, and nothing else
                body = HEADER_BYTES + head_length
                return (Frame(kind, correlation, shared[HEADER_BYTES:body], shared[body:count], False),)
        return self._found(count)

    def feed(self, data: bytes) -> Iterator[Frame]:
        """Take bytes that were received elsewhere: the frames that are whole now. To be iterated to its end."""
        left = memoryview(data)
        while left:
            buffer = self.buffer()
            count = min(len(left), len(buffer))
            buffer[:count] = left[:count]
            left = left[count:]
            yield from self.received(count)

    def _found(self, count: int) -> Iterator[Frame]:
        if self._partial is not None:
            self._filled += count
            if self._filled == self._length:
                whole, self._partial, self._filled = self._partial, None, 0
                yield _whole_frame(whole)
            elif self._filled == len(self._partial):
                self._hold(self._partial)
            return
        data = self._shared[:count]
        if self._start:
            data = memoryview(self._start + bytes(data))
            self._start = bytearray()
        position, end = 0, len(data)
        while end - position >= HEADER_BYTES:
            length, kind, version, _, correlation, head_length = _HEADER.unpack_from(data, position)
            if version != FRAME_VERSION or length > self._bytes_max or head_length > length:
                raise _impossible(length, version, head_length, self._bytes_max)
            head = position + HEADER_BYTES
            if head + length > end:
                self._filled, self._length = end - position, HEADER_BYTES + length
                self._hold(data[position:end])
                return
            body, position = head + head_length, head + length
            yield Frame(kind, correlation, data[head:body], data[body:position], False)
        if position < end:
            self._start = bytearray(data[position:end])

    def _hold(self, begun: memoryview) -> None:
        """Give an unfinished frame memory, as much as is sensible by now."""
        partial = self._memory.take(min(self._length, max(2 * len(begun), self._memory.at_once_bytes)))
        partial[: len(begun)] = begun
        self._partial = partial


def frame_correlation(header: bytes) -> int:
    """The correlation in the first bytes of a frame; 0 if they are too few, or those of no frame."""
    if len(header) < HEADER_BYTES:
        return 0
    _, _, version, _, correlation, _ = _HEADER.unpack_from(header)
    return int(correlation) if version == FRAME_VERSION else 0


def _impossible(length: int, version: int, head_length: int, bytes_max: int) -> ProtocolError:
    """What is wrong with a header."""
    if length == _HTTP:
        return ProtocolError("the other side answers HTTP: write http:// instead of headrace://")
    if version != FRAME_VERSION:
        return ProtocolError(f"a frame of version {version}; this side speaks version {FRAME_VERSION}")
    if length > bytes_max:
        return ProtocolError(f"a frame of {length} bytes; at most {bytes_max} are allowed")
    return ProtocolError(f"a frame's head of {head_length} bytes is longer than the frame of {length}")


def _is_free(piece: bytearray) -> bool:
    """Whether nobody has a view of it: with one its size could not change."""
    try:
        piece.append(0)
    except BufferError:
        return False
    piece.pop()
    return True


def _whole_frame(data: memoryview) -> Frame:
    _, kind, _, _, correlation, head_length = _HEADER.unpack_from(data)
    body = HEADER_BYTES + head_length
    return Frame(kind, correlation, data[HEADER_BYTES:body], data[body:], True)


def frame(kind: int, correlation: int, head: object = None, body_bytes: int = 0) -> bytearray:
    """A frame up to its body, of which so many bytes are to follow."""
    data = bytearray(HEADER_BYTES)
    if head is not None:
        _encoder.encode_into(head, data, HEADER_BYTES)
    head_bytes = len(data) - HEADER_BYTES
    _HEADER.pack_into(data, 0, head_bytes + body_bytes, kind, FRAME_VERSION, 0, correlation, head_bytes)
    return data
