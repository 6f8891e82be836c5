"""A log read from its files alone, without help of its writer."""

import threading
from collections.abc import Callable, Sequence

from headrace.model.batch import MAGIC, Batch
from headrace.model.errors import InvalidBatch, LogNotFound
from headrace.storage import index as indexes
from headrace.storage.index import Index
from headrace.storage.meta import NAME, read_meta
from headrace.storage.reader import LogReader
from headrace.storage.recovery import Findings, segment_bases, verify
from headrace.storage.runtime import StorageRuntime
from headrace.storage.scan import batch_at, scan_copied
from headrace.storage.segment import FileSegment, Segment, note, segment_path

_TIME_UNKNOWN = (1 << 63) - 1


class OfflineLogReader(LogReader):
    """A log as its files were when it was opened; messages appended later are not seen."""

    _segments: tuple[FileSegment, ...]

    def __init__(self, host: StorageRuntime, directory: str) -> None:
        self._begin(host, directory)
        self._segments = self._opened({})
        self._end = self._find_end()

    def _begin(self, host: StorageRuntime, directory: str) -> None:
        super().__init__(host.lookups)
        self.host = host
        self.directory = directory
        meta = read_meta(host, directory)
        self.log_id, self._first_offset = meta.log_id, meta.first_offset
        self._has_record = not meta.is_reconstructed
        self._lock = threading.Lock()
        self._segments = ()
        self._tail: tuple[FileSegment, int, int] | None = None
        """The end that was found last: its segment, position and offset."""

    @property
    def first_offset(self) -> int:
        """The oldest offset that can be read."""
        return self._first_offset

    @property
    def next_offset(self) -> int:
        """The offset after the last message."""
        return self._end

    @property
    def segments(self) -> Sequence[FileSegment]:
        """The segments, oldest first."""
        return self._layout()

    @property
    def size_bytes(self) -> int:
        """The size of all batches in bytes."""
        layout = self._layout()
        if not layout:
            return 0
        last, end = layout[-1], layout[-1].begin
        for position, item in self._scan(last, last.base_offset, self.next_offset, verify=False):
            end = position + item.length
        return sum(segment.size() for segment in layout[:-1]) + end

    @property
    def writer_at_work(self) -> bool | None:
        """Unknown: files alone do not show it."""
        return None

    def verify(self, progress: Callable[[int], None] | None = None) -> Findings:
        """Check every byte of the log and change nothing; `progress` is called with the number of bytes checked."""
        return self.verify_files(progress, ended=self.writer_at_work is False)

    def verify_files(self, progress: Callable[[int], None] | None, *, ended: bool) -> Findings:
        """Check every byte of the log, and its record; bytes after its end are torn if no writer is at work."""
        findings = verify(self.segments, self.next_offset, progress, ended=ended)
        if findings.messages and not self._has_record:
            findings.record = f"{self.directory}/{NAME}"
        return findings

    def close(self) -> None:
        """Release the files."""
        for segment in self._segments:
            self.host.forget(segment)

    def __del__(self) -> None:
        if hasattr(self, "_tail"):  # or it was never opened
            self.close()

    def after_fork(self) -> None:
        """In a forked child: another thread of the parent may have had the lock."""
        self._lock = threading.Lock()

    def _layout(self) -> Sequence[FileSegment]:
        return self._segments

    def _opened(self, known: dict[int, FileSegment]) -> tuple[FileSegment, ...]:
        """The segments there are now, those known already as they are."""
        segments = []
        for base in segment_bases(self.host, self.directory):
            segment = known.get(base)
            if segment is None or segment is self._segments[-1]:
                try:
                    segment = segment or FileSegment.open(
                        self.host, segment_path(self.directory, base), self.log_id, writable=False
                    )
                except LogNotFound:
                    continue  # it has just been removed
                summary = indexes.load_summary(self.host.disk, segment.index_path)
                covered = summary is not None and segment.covered_by(summary)
                segment.time_max = summary.time_max if summary is not None and covered else _TIME_UNKNOWN
            segments.append(segment)
        return tuple(segments)

    def _stale(self, segment: Segment, layout: Sequence[Segment]) -> bool:
        with self._lock:
            if self._segments is layout:
                # Compaction replaced it while we held the older file, or it was removed.
                self.host.forget(segment)  # type: ignore[arg-type]
                self._segments = tuple(kept for kept in self._segments if kept is not segment)
                self._reload()
        return True

    def _reload(self) -> None:
        meta = read_meta(self.host, self.directory)
        self._first_offset = max(self._first_offset, meta.first_offset)
        self._replace(self._opened({segment.base_offset: segment for segment in self._segments}))

    def _replace(self, segments: tuple[FileSegment, ...]) -> None:
        """Replace the segments, and close the files of those that are gone."""
        before, self._segments = self._segments, segments
        for segment in set(before).difference(segments):
            self.host.forget(segment)

    def _index(self, segment: Segment, offset: int) -> Index:
        index = segment.index()
        if segment is self._segments[-1]:
            with self._lock:
                _extend(index, segment, offset)
        return index

    def _find_end(self) -> int:
        """The end of the log in its files: after the last good batch, or after what the index certifies."""
        layout = self._layout()
        if not layout:
            return self._first_offset
        last = layout[-1]
        position, end = last.begin, last.base_offset
        summary = indexes.load_summary(self.host.disk, last.index_path)
        if summary is not None and last.covered_by(summary):
            position, end = summary.end, summary.next_offset
        if self._tail is not None and self._tail[0] is last:
            _, position, end = self._tail
        for at, item in scan_copied(last, position, end, last.size()):
            end = item.next_offset
            if isinstance(item, Batch):
                position = at + item.length
                self._tail = last, position, end
        return max(end, self._first_offset)


class OfflinePartitionReader(OfflineLogReader):
    """A broker's log, read from its files while the broker may be writing; `refresh` looks for new messages."""

    @property
    def segments(self) -> Sequence[FileSegment]:
        """The segments as of the last refresh, oldest first."""
        return self._segments

    def refresh(self) -> None:
        """Look for new messages and for removed segments."""
        with self._lock:
            if self._is_unchanged():
                return
            self._reload()
            self._end = max(self._find_end(), self._end)

    def _is_unchanged(self) -> bool:
        if self._tail is None or [segment.base_offset for segment in self._segments] != segment_bases(
            self.host, self.directory
        ):
            return False
        last, position, _ = self._tail
        return last is self._segments[-1] and last.read(position, len(MAGIC)) != MAGIC


def _extend(index: Index, segment: Segment, offset: int) -> None:
    """Extend the index of a growing segment to what the writer has appended since, up to an offset."""
    position, base, time_max = segment.begin, segment.base_offset, -_TIME_UNKNOWN
    if index.positions:
        position, base, time_max = index.positions[-1], index.offsets[-1], index.times[-1]
    view = memoryview(b"")
    while base <= offset:
        try:
            view = view if len(view) > position else segment.view(position + 1)
            batch: Batch = batch_at(segment, view, position, base)
        except InvalidBatch:
            return  # the end, or damage, which reading it will report
        note(index, base, position, time_max)
        time_max = max(time_max, batch.time_max)
        position += batch.length
        base += batch.span
