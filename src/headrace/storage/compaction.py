"""Compaction: rewrites a segment without the messages that a rule does not keep; offsets stay as they are."""

from collections.abc import Callable, Iterator, Sequence

from headrace.model.batch import FLAG_COMPACTED, FLAG_LOST, Batch, encode, gap
from headrace.model.codec import Codec
from headrace.model.errors import CorruptBatch
from headrace.storage.scan import Damage, scan
from headrace.storage.segment import FileSegment, Segment, SegmentHeader
from headrace.storage.worker import CpuThrottle

Keep = Callable[[Batch], Sequence[int] | None]
"""A rule: the indices, rising, of a batch's messages to keep; None to keep all."""


def compacted(segment: Segment, keep: Keep) -> Iterator[Batch]:
    """The segment's batches with only the messages that the rule keeps; removed runs become gaps."""
    gap_from = segment.base_offset
    for batch in _batches(segment):
        if batch.flags & FLAG_COMPACTED:
            continue
        if batch.flags & FLAG_LOST:
            result: Batch | None = _placed_like(batch, gap(batch.span, FLAG_LOST, batch.time_max), batch.base_offset)
        else:
            result = _kept(batch, keep(batch))
        if result is None:
            continue
        yield from _gap(segment, gap_from, result.base_offset, result)
        yield result
        gap_from = result.next_offset
    yield from _gap(segment, gap_from, segment.next_offset, None)


def before(segment: Segment, offset: int) -> Iterator[Batch]:
    """The segment's batches before an offset; a batch that reaches beyond it is cut."""
    for batch in _batches(segment):
        if batch.base_offset >= offset:
            return
        if batch.next_offset <= offset:
            yield batch
            continue
        span = offset - batch.base_offset
        columns = batch.columns()
        places = batch.places(columns)
        indices = [index for index, place in enumerate(places) if place < span]
        yield _picked(batch, indices, span)


def write_copy(old: FileSegment, batches: Iterator[Batch]) -> FileSegment:
    """Write these batches to a new file beside the old one and sync it; the caller must `swap` or `discard` it."""
    header = SegmentHeader.new(old.log_id, old.base_offset, old.created_us)
    disk = old.host.disk
    path = old.path + ".tmp"
    disk.remove(path)
    new = FileSegment.create(old.host, path, header)
    try:
        throttle = CpuThrottle()
        for batch in batches:
            new.append(batch)
            throttle.step(batch.count, batch.length)
        disk.sync(new.file())
    except BaseException:
        discard(new)
        raise
    return new


def swap(old: FileSegment, new: FileSegment) -> None:
    """Rename the copy to the old file's name; readers that have the old file open keep it."""
    old.host.disk.rename(new.path, old.path)
    new.path = old.path


def discard(new: FileSegment) -> None:
    """Remove a copy that is not used."""
    new.host.forget(new)
    new.host.disk.remove(new.path)


def _batches(segment: Segment) -> Iterator[Batch]:
    for position, item in scan(segment, segment.begin, segment.base_offset, segment.end, stop=segment.next_offset):
        if isinstance(item, Damage):
            segment.report_damage(position, item.reason)
            raise CorruptBatch(item.base_offset, item.next_offset, segment.path, position, item.reason)
        yield item


def _kept(batch: Batch, indices: Sequence[int] | None) -> Batch | None:
    if indices is None or len(indices) == batch.count:
        return batch
    return _picked(batch, indices, batch.span) if indices else None


def _picked(batch: Batch, indices: Sequence[int], span: int) -> Batch:
    if not indices:
        return _placed_like(batch, gap(span, FLAG_COMPACTED, batch.time_max), batch.base_offset)
    columns = batch.columns()
    picked = columns.picked(indices, batch.places(columns))
    made = encode(
        picked, batch.time_max, codec=Codec(batch.codec), producer=batch.producer, span=span, flags=batch.flags
    )
    return _placed_like(batch, made, batch.base_offset)


def _gap(segment: Segment, start: int, end: int, following: Batch | None) -> Iterator[Batch]:
    if start < end:
        like = following.time_min if following is not None else max(segment.time_max, 0)
        made = gap(end - start, FLAG_COMPACTED, like)
        made.place(start, segment.append_time if following is None else following.append_time, segment.log_id)
        yield made


def _placed_like(old: Batch, new: Batch, base_offset: int) -> Batch:
    new.place(base_offset, old.append_time, old.log_id, old.synced_offset)
    return new
