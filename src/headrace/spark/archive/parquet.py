"""The Parquet files of the archive: their schema, reading, writing and checksums."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from crc32c import crc32c

from headrace.model.errors import CorruptFile
from headrace.spark.archive.manifest import StoredFile
from headrace.spark.archive.paths import ArchivePath, file_url, make_directory, resolve_url

COLUMNS = ("partition", "offset", "timestamp", "key", "value", "headers", "due", "priority", "expires")
"""All fields of a message but the topic, which is in the path."""
SQL_SCHEMA = (
    "partition int, offset bigint, timestamp timestamp, key binary, value binary, "
    "headers array<struct<key:string,value:binary>>, due timestamp, priority int, expires timestamp"
)
_TIME = pa.timestamp("us", "UTC")
_HEADERS = pa.list_(pa.field("element", pa.struct([pa.field("key", pa.string()), pa.field("value", pa.binary())])))
SCHEMA = pa.schema(
    [
        ("partition", pa.int32()),
        ("offset", pa.int64()),
        ("timestamp", _TIME),
        ("key", pa.binary()),
        ("value", pa.binary()),
        ("headers", _HEADERS),
        ("due", _TIME),
        ("priority", pa.int32()),
        ("expires", _TIME),
    ]
)
TIME_NONE = (1 << 63) - 1
_GROUP_BYTES = 16 << 20
"""Size of a row group, small enough that reading a few offsets reads little else."""
_WRITING: dict[str, Any] = {"compression": "zstd", "write_page_checksum": True}
_ROWS = 50_000
"""Number of rows of a record batch."""


def open_file(location: ArchivePath) -> pq.ParquetFile:
    """Open a file for reading with verified pages; raises CorruptFile if it is missing or not Parquet."""
    try:
        return pq.ParquetFile(
            location.filesystem.open_input_file(location.path),
            page_checksum_verification=True,
            pre_buffer=not location.local,
        )
    except FileNotFoundError as error:
        raise CorruptFile(
            f"an archived file cannot be read: {location.path} is not there. If the archive was expired or deleted "
            "after the read was planned, read again; otherwise check that the files are where they were archived to"
        ) from error
    except (OSError, pa.ArrowInvalid) as error:
        raise CorruptFile(f"an archived file cannot be read: {error}") from error


def write_file(location: ArchivePath, batches: Iterable[pa.RecordBatch]) -> tuple[int, int]:
    """Write messages to a file, or no file without messages; returns the number of rows and estimated bytes."""
    writer: pq.ParquetWriter | None = None
    waiting: list[pa.RecordBatch] = []
    rows = raw_bytes = waiting_bytes = 0

    def write_group() -> None:
        nonlocal writer, waiting_bytes
        if writer is None:
            make_directory(location.parent)
            writer = pq.ParquetWriter(location.path, SCHEMA, filesystem=location.filesystem, **_WRITING)
        group = pa.Table.from_batches(waiting, SCHEMA)
        writer.write_table(group, row_group_size=group.num_rows)
        waiting.clear()
        waiting_bytes = 0

    try:
        for batch in batches:
            waiting.append(as_schema(batch))
            rows += batch.num_rows
            raw_bytes += batch.nbytes
            waiting_bytes += batch.nbytes
            if waiting_bytes >= _GROUP_BYTES:
                write_group()
        if waiting:
            write_group()
    finally:
        if writer is not None:
            writer.close()
    return rows, raw_bytes


def rows_of(stored: StoredFile, start: int, end: int, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
    """Yield the messages of a file between two offsets, with these columns, which must include `offset`."""
    opened = open_file(resolve_url(stored.url).below(stored.file.path))
    try:
        if opened.metadata.num_rows != stored.file.rows:
            raise CorruptFile(f"{stored.file.path} has {opened.metadata.num_rows} messages, not {stored.file.rows}")
        groups = _groups(opened.metadata, start, end)
        if not groups:
            return
        for batch in opened.iter_batches(_ROWS, row_groups=groups, columns=list(columns)):
            within = _within(batch, start, end)
            if within.num_rows:
                yield as_schema(within)
    except (OSError, pa.ArrowInvalid) as error:
        raise CorruptFile(f"{file_url(stored.url, stored.file.path)} cannot be read: {error}") from error
    finally:
        opened.close(force=True)


def _groups(metadata: Any, start: int, end: int) -> list[int]:
    """Return the row groups with some of these offsets, according to the file's statistics."""
    at = metadata.schema.names.index("offset")
    chosen = []
    for number in range(metadata.num_row_groups):
        known = metadata.row_group(number).column(at).statistics
        if known is None or not known.has_min_max or (known.max >= start and known.min < end):
            chosen.append(number)
    return chosen


def _within(batch: pa.RecordBatch, start: int, end: int) -> pa.RecordBatch:
    offsets = batch.column("offset").to_numpy()
    first, last = np.searchsorted(offsets, [start, end])
    return batch.slice(first, last - first)


def as_schema(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Cast rows to the archive's column types."""
    schema = pa.schema([SCHEMA.field(name) for name in batch.schema.names])
    return batch if batch.schema.equals(schema) else batch.cast(schema)


def find_time(stored: StoredFile, time_us: int) -> int | None:
    """Return the offset of the file's first message at or after a time, or None."""
    for batch in rows_of(stored, stored.file.start, stored.file.end, ["offset", "timestamp"]):
        late = pc.greater_equal(batch.column("timestamp").cast(pa.int64()), time_us)
        at = pc.index(late, True).as_py()
        if at >= 0:
            return int(batch.column("offset")[at].as_py())
    return None


class MessageChecksum:
    """A running checksum over offsets, keys and values of messages, with their count and times."""

    def __init__(self) -> None:
        self.rows = 0
        self.time_min_us, self.time_max_us = TIME_NONE, -TIME_NONE
        self._last = -1
        self._parts = [0] * 5

    def add(self, batch: pa.RecordBatch) -> None:
        """Add messages; raises CorruptFile if offsets do not ascend."""
        if not batch.num_rows:
            return
        offsets = batch.column("offset").to_numpy()
        if offsets[0] <= self._last or not (np.diff(offsets) > 0).all():
            raise CorruptFile(f"messages are not in the order of their offsets, near offset {offsets[0]}")
        self._last = int(offsets[-1])
        self.rows += batch.num_rows
        times = pc.min_max(batch.column("timestamp").cast(pa.int64()))
        self.time_min_us = min(times["min"].as_py(), self.time_min_us)
        self.time_max_us = max(times["max"].as_py(), self.time_max_us)
        contents: list[Any] = [np.ascontiguousarray(offsets).view(np.uint8)]
        for name in ("key", "value"):
            contents += _contents(batch.column(name))
        self._parts = [crc32c(new, old) for new, old in zip(contents, self._parts, strict=True)]

    @property
    def checksum(self) -> str:
        """The checksum in hexadecimal."""
        return "".join(f"{part:08x}" for part in self._parts)


def _contents(column: pa.Array) -> list[Any]:
    """Return the lengths of a column's values, -1 for null, and their bytes."""
    lengths = pc.fill_null(pc.binary_length(column), -1).cast(pa.int32()).to_numpy()
    _, offsets, data = column.buffers()
    if data is None or not len(column):
        return [lengths.view(np.uint8), b""]
    edges = np.frombuffer(offsets, np.int32)[column.offset : column.offset + len(column) + 1]
    return [lengths.view(np.uint8), memoryview(data)[edges[0] : edges[-1]]]
