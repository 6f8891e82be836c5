"""What Spark's tasks do for the archive: copy messages to Arrow, and compare files with the log."""

import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc

from headrace.model.batch import Batch
from headrace.model.errors import CorruptFile, OffsetOutOfRange
from headrace.spark.archive.bounds import Piece
from headrace.spark.archive.manifest import ArchivedFile, StoredFile
from headrace.spark.archive.parquet import COLUMNS, SCHEMA, Sum, rows_of, write_file
from headrace.spark.archive.paths import file_url, place_of, size_of, sync_path
from headrace.spark.source.arrow import Decoder
from headrace.spark.source.message_source import BrokerSource, surviving
from headrace.spark.source.planning import Range, Window

COPY_SCHEMA = pa.schema(
    [("at", pa.int32()), ("path", pa.string()), ("rows", pa.int64()), ("bytes", pa.int64()), ("raw_bytes", pa.int64())]
)
COPY_SQL = "at int, path string, rows bigint, bytes bigint, raw_bytes bigint"
SUM_SCHEMA = "at int, rows bigint, time_min bigint, time_max bigint, checksum string"

Job = Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]
"""What `mapInArrow` takes: the rows are numbers, of what is to be done."""


@dataclass(frozen=True)
class LogReading:
    """How tasks read the log."""

    address: str
    timeout: float
    may_vanish: bool
    """Whether offsets may have no message, and lose theirs at any time."""
    skip_damaged: bool

    def record_batches(self, wanted: Range) -> Iterator[pa.RecordBatch]:
        """All messages of a range, with all columns; also those that have expired: readers leave them out."""
        decoder = Decoder(
            SCHEMA,
            lambda values: {"value": values},
            Window(),
            fail_on_data_loss=not self.skip_damaged,
            expired_too=True,
        )
        origin = BrokerSource(self.address, self.timeout)
        place = wanted.topic, wanted.partition, wanted.start, wanted.end
        try:
            batches = surviving(origin, *place, gone_too=False) if self.skip_damaged else origin.batches(*place)
            if not self.may_vanish and not self.skip_damaged:
                batches = _without_gaps(wanted, batches)
            for batch in decoder.record_batches(wanted, batches):
                yield batch.cast(SCHEMA) if batch.schema != SCHEMA else batch
        finally:
            origin.close()


def _without_gaps(wanted: Range, batches: Iterator[Batch]) -> Iterator[Batch]:
    """The batches, if they follow each other."""
    at = wanted.start
    for batch in batches:
        if batch.base_offset > at:
            break
        yield batch
        at = batch.next_offset
    if at < wanted.end:
        raise OffsetOutOfRange(
            f"{wanted.topic}[{wanted.partition}] was read up to offset {at}, and what comes next is not there"
        )


def copy_job(log: LogReading, root: str, directory: str, pieces: Sequence[Piece]) -> Job:
    """Writes a file of each piece that it is given the number of, and tells its path, rows and sizes."""

    def copy(numbers: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in numbers:
            rows = [(at, *_copied(log, root, directory, at, pieces[at])) for at in batch.column(0).to_pylist()]
            yield pa.RecordBatch.from_pylist(
                [dict(zip(COPY_SCHEMA.names, row, strict=True)) for row in rows], COPY_SCHEMA
            )

    return copy


def _copied(log: LogReading, root: str, directory: str, at: int, piece: Piece) -> tuple[str, int, int, int]:
    # No two attempts of a task write the same file: of two that run at the same time only one is told of.
    path = f"{directory}/date={piece.day}/part-{at:05d}-{secrets.token_hex(4)}.zstd.parquet"
    place = place_of(root).below(path)
    rows, raw_bytes = write_file(place, log.record_batches(piece.wanted))
    return path, rows, (size_of(place) or 0) if rows else 0, raw_bytes


def rows_job(parts: Sequence[tuple[StoredFile, int, int]]) -> Job:
    """Reads the archived files that it is given the numbers of, each between two offsets."""

    def read(numbers: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in numbers:
            for at in batch.column(0).to_pylist():
                stored, start, end = parts[at]
                whole = start <= stored.file.start and end >= stored.file.end
                total = Sum()
                for rows in rows_of(stored, start, end, COLUMNS):
                    total.add(rows)
                    yield rows
                if whole and total.checksum != stored.file.checksum:
                    raise CorruptFile(
                        f"{file_url(stored.url, stored.file.path)} is not what was archived: its checksum differs"
                    )

    return read


def check_job(log: LogReading, root: str, files: Sequence[ArchivedFile | None], ranges: Sequence[Range]) -> Job:
    """Compares each file that it is given the number of with the log, and sums it up; None has no messages."""

    def check(numbers: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in numbers:
            rows = [_checked(log, root, at, files[at], ranges[at]) for at in batch.column(0).to_pylist()]
            names = ("at", "rows", "time_min", "time_max", "checksum")
            kinds = (pa.int32(), pa.int64(), pa.int64(), pa.int64(), pa.string())
            columns = [pa.array(column, kind) for column, kind in zip(zip(*rows, strict=True), kinds, strict=True)]
            yield pa.RecordBatch.from_arrays(columns, names=list(names))

    return check


def _checked(
    log: LogReading, root: str, at: int, file: ArchivedFile | None, wanted: Range
) -> tuple[int, int, int, int, str]:
    total = Sum()

    def archived() -> Iterator[pa.RecordBatch]:
        if file is not None:
            for rows in rows_of(StoredFile(root, file), 0, 1 << 62, COLUMNS):
                total.add(rows)
                yield rows

    compare(wanted, log.record_batches(wanted), archived(), log.may_vanish)
    base = place_of(root)
    if file is not None and base.local:  # what pyarrow has written to a disk of this machine it has not synced
        sync_path(base.below(file.path).path, base.path)
    return at, total.rows, total.time_min_us, total.time_max_us, total.checksum


def compare(wanted: Range, log: Iterator[pa.RecordBatch], archived: Iterator[pa.RecordBatch], may_vanish: bool) -> None:
    """See that the archive has the log's messages, in all columns; if they may vanish there it may have more."""
    held = pa.Table.from_batches([], SCHEMA)
    for batch in log:
        last = batch.column("offset")[-1].as_py()
        while not held.num_rows or held.column("offset")[-1].as_py() < last:
            more = next(archived, None)
            if more is None:
                break
            held = pa.concat_tables([held, pa.Table.from_batches([more], SCHEMA)])
        count = pc.sum(pc.less_equal(held.column("offset"), last)).as_py() or 0
        part, held = held.slice(0, count), held.slice(count)
        if may_vanish:
            part = part.filter(pc.is_in(part.column("offset"), batch.column("offset")))
        if not part.equals(pa.Table.from_batches([batch], SCHEMA)):
            raise _differs(wanted, f"between offsets {batch.column('offset')[0]} and {last}")
    left = held.num_rows + sum(rows.num_rows for rows in archived)
    if left and not may_vanish:
        raise _differs(wanted, f"it has {left} messages more")


def _differs(wanted: Range, how: str) -> CorruptFile:
    return CorruptFile(
        f"the copy of {wanted.topic}[{wanted.partition}] from offset {wanted.start} on is not what the log has: {how}; "
        "nothing of it counts"
    )
