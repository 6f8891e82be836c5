"""Scans stored bytes batch by batch, and resynchronises after damage."""

from collections.abc import Iterator
from contextlib import suppress
from typing import NamedTuple, Protocol

from headrace.model.batch import HEADER_BYTES, MAGIC, Batch, parse
from headrace.model.errors import InvalidBatch

_CHUNK_BYTES = 1 << 20
_WINDOW_BYTES = 8 << 20


class Damage(NamedTuple):
    """Bytes that are no batch, and the offsets of the messages that were there."""

    position: int
    length: int
    base_offset: int
    next_offset: int
    """Equal to base_offset if the number of messages is unknown."""
    reason: str

    @property
    def end(self) -> int:
        """Where the next good batch begins."""
        return self.position + self.length


class ByteSource(Protocol):
    """Stored bytes of one log, such as a segment."""

    log_id: int

    def view(self, end: int) -> memoryview:
        """The bytes up to `end` at least, without a copy."""

    def read(self, position: int, length: int) -> bytes:
        """A copy of some bytes; fewer at the end."""


def batch_at(source: ByteSource, view: memoryview, position: int, offset: int) -> Batch:
    """The batch at a position, which must have this offset and the log's id; its body is not verified."""
    if position + HEADER_BYTES > len(view):
        view = source.view(position + HEADER_BYTES)
    batch = parse(view, position, whole=False)
    if position + batch.length > len(view):
        batch = parse(source.view(position + batch.length), position)
    if batch.log_id != source.log_id:
        raise InvalidBatch("the batch belongs to another log")
    if batch.base_offset != offset:
        raise InvalidBatch(f"a batch has offset {batch.base_offset} where {offset} is expected")
    return batch


def scan(
    source: ByteSource,
    position: int,
    offset: int,
    size: int,
    *,
    start: int = 0,
    stop: int | None = None,
    limit: int | None = None,
    verify: bool = True,
) -> Iterator[tuple[int, Batch | Damage]]:
    """Every batch from a position on, and every damaged range, each with its position.

    Batches wholly before `start` are skipped; the bodies of the others are verified, if `verify`. The scan ends at byte
    `size`; without `stop` also at zeros, which are space prepared and not used; with `stop` at that offset, which must
    be reached. After damage, batches with offsets beyond `stop` or `limit` are rejected.
    """
    limit = stop if limit is None else limit
    view = memoryview(b"")
    if position < size:
        with suppress(InvalidBatch):  # the file was cut: the first batch is damaged
            view = source.view(position + 1)
    while position < size and (stop is None or offset < stop):
        try:
            batch = batch_at(source, view, position, offset)
            if verify and offset + batch.span > start:
                batch.verify()
        except InvalidBatch as error:
            found = find_batch(source, position + 1, size, offset + 1, limit)
            if found is not None:
                next_position, batch = found
                yield position, Damage(position, next_position - position, offset, batch.base_offset, str(error))
                position, offset = next_position, batch.base_offset
                continue
            if stop is not None or not is_zero(source, position, size):
                yield position, Damage(position, size - position, offset, stop or offset, str(error))
            return
        if offset + batch.span > start:
            yield position, batch
        position += batch.length
        offset += batch.span
    if stop is not None and offset < stop:
        yield position, Damage(position, size - position, offset, stop, "the segment ends too early")


class _Copy:
    """A copy of some bytes of a source, with positions that begin at 0."""

    def __init__(self, source: ByteSource, position: int, length: int) -> None:
        self.log_id = source.log_id
        self.content = source.read(position, length)

    def view(self, end: int) -> memoryview:
        """All bytes."""
        if end > len(self.content):
            raise InvalidBatch("the file ends inside the batch")
        return memoryview(self.content)

    def read(self, position: int, length: int) -> bytes:
        """Some bytes."""
        return self.content[position : position + length]

    def cuts(self, damage: Damage) -> bool:
        """Whether a batch that looks damaged may only be cut off by the end of this copy."""
        if damage.position:
            return True
        try:
            return parse(memoryview(self.content), whole=False).length > len(self.content)
        except InvalidBatch:
            return damage.end == len(self.content)


def scan_copied(
    source: ByteSource, position: int, offset: int, size: int, *, limit: int | None = None
) -> Iterator[tuple[int, Batch | Damage]]:
    """The same as `scan` without a stop, on copies: for the end of a file, whose state is unknown.

    Reading a hole through a mapping allocates space, and on a full disk the system kills the process (SIGBUS); a writer
    may also truncate the file, with the same effect.
    """
    length = _WINDOW_BYTES
    while position < size:
        start, window = position, _Copy(source, position, min(length, size - position))
        is_last = start + len(window.content) >= size or not window.content
        for at, item in scan(window, 0, offset, len(window.content), limit=limit):
            if isinstance(item, Damage):
                if not is_last and window.cuts(item):
                    break
                item = item._replace(position=start + at)
            yield start + at, item
            position, offset = start + at + item.length, item.next_offset
        if is_last:
            return
        # No whole batch in it: a large batch, or damage that ends after it.
        length = 2 * length if position == start else _WINDOW_BYTES


def find_batch(
    source: ByteSource, position: int, size: int, offset_min: int, limit: int | None = None
) -> tuple[int, Batch] | None:
    """The first whole batch at or after a position, with its position.

    Bytes inside a message can look like a batch: only those of this log, with an offset that is possible here, count.
    """
    for at, batch in _batches_in(source, position, size):
        fits = batch.base_offset >= offset_min and (limit is None or batch.next_offset <= limit)
        if batch.log_id == source.log_id and fits:
            return at, batch
    return None


def find_log_id(source: ByteSource, position: int, size: int) -> int | None:
    """The log id in the first batch that is found in these bytes; None if there is no batch."""
    return next((batch.log_id for _, batch in _batches_in(source, position, size)), None)


def is_zero(source: ByteSource, position: int, end: int) -> bool:
    """Whether there is nothing but zeros in a range."""
    while position < end:
        chunk = source.read(position, min(_CHUNK_BYTES, end - position))
        if not chunk:
            return True
        if chunk.count(0) != len(chunk):
            return False
        position += len(chunk)
    return True


def _batches_in(source: ByteSource, position: int, size: int) -> Iterator[tuple[int, Batch]]:
    """Everything in these bytes that looks like a whole batch, wherever it begins."""
    while position < size:
        chunk = source.read(position, min(_CHUNK_BYTES, size - position))
        if not chunk:
            return  # the file was cut
        at = chunk.find(MAGIC)
        while at >= 0:
            batch = _whole_batch(source, position + at, size)
            if batch is not None:
                yield position + at, batch
            at = chunk.find(MAGIC, at + 1)
        # A magic may lie across the boundary of two chunks.
        position += max(len(chunk) - len(MAGIC) + 1, 1)


def _whole_batch(source: ByteSource, position: int, size: int) -> Batch | None:
    try:
        # The header alone first: its checksum rejects a magic that occurs by chance, before much is read.
        header = source.read(position, HEADER_BYTES)
        length = parse(memoryview(header), whole=False).length
        if position + length > size:
            return None
        batch = parse(memoryview(source.read(position, length)))
        batch.verify()
    except InvalidBatch:
        return None
    return batch
