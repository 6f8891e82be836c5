"""The archive's Spark tasks: copy messages to Parquet files, compare the files with the log, read them."""

import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc

from headrace.model.batch import Batch
from headrace.model.errors import CorruptFile, OffsetOutOfRange
from headrace.spark.archive.bounds import Piece
from headrace.spark.archive.manifest import ArchivedFile, StoredFile
from headrace.spark.archive.parquet import COLUMNS, SCHEMA, MessageChecksum, rows_of, write_file
from headrace.spark.archive.paths import file_url, resolve_url, size_of, sync_path
from headrace.spark.source.arrow import Decoder
from headrace.spark.source.message_source import BrokerSource, readable_batches
from headrace.spark.source.planning import Range, Window

COPY_SCHEMA = pa.schema(
    [("at", pa.int32()), ("path", pa.string()), ("rows", pa.int64()), ("bytes", pa.int64()), ("raw_bytes", pa.int64())]
)
COPY_SQL = "at int, path string, rows bigint, bytes bigint, raw_bytes bigint"
SUM_SCHEMA = "at int, rows bigint, time_min bigint, time_max bigint, checksum string"

Job = Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]
"""A function for `mapInArrow`, whose rows are the numbers of the pieces to work on."""


@dataclass(frozen=True)
class LogReadSettings:
    """How archiving tasks read the log."""

    address: str
    timeout: float
    may_have_gaps: bool
    """Whether offsets may have no message, or lose it at any time."""
    skip_damaged: bool

    def record_batches(self, wanted: Range) -> Iterator[pa.RecordBatch]:
        """Yield all messages of a range with all columns, including expired ones, which readers filter out."""
        decoder = Decoder(
            SCHEMA,
            lambda values: {"value": values},
            Window(),
            fail_on_data_loss=not self.skip_damaged,
            expired_too=True,
        )
        source = BrokerSource(self.address, self.timeout)
        offsets = wanted.topic, wanted.partition, wanted.start, wanted.end
        try:
            batches = (
                readable_batches(source, *offsets, skip_removed=False)
                if self.skip_damaged
                else source.batches(*offsets)
            )
            if not self.may_have_gaps and not self.skip_damaged:
                batches = _without_gaps(wanted, batches)
            for batch in decoder.record_batches(wanted, batches):
                yield batch.cast(SCHEMA) if batch.schema != SCHEMA else batch
        finally:
            source.close()


def _without_gaps(wanted: Range, batches: Iterator[Batch]) -> Iterator[Batch]:
    """Yield the batches; raises OffsetOutOfRange at a gap between them."""
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


def copy_job(log: LogReadSettings, root: str, directory: str, pieces: Sequence[Piece]) -> Job:
    """Return a job that writes a file for each numbered piece, and returns its path, rows and sizes."""

    def copy(numbers: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in numbers:
            rows = [(at, *_copy_piece(log, root, directory, at, pieces[at])) for at in batch.column(0).to_pylist()]
            yield pa.RecordBatch.from_pylist(
                [dict(zip(COPY_SCHEMA.names, row, strict=True)) for row in rows], COPY_SCHEMA
            )

    return copy


def _copy_piece(log: LogReadSettings, root: str, directory: str, at: int, piece: Piece) -> tuple[str, int, int, int]:
    # Each attempt of a task writes a file of its own: of two concurrent attempts Spark returns the rows of one.
    path = f"{directory}/date={piece.day}/part-{at:05d}-{secrets.token_hex(4)}.zstd.parquet"
    location = resolve_url(root).below(path)
    rows, raw_bytes = write_file(location, log.record_batches(piece.wanted))
    return path, rows, (size_of(location) or 0) if rows else 0, raw_bytes


def rows_job(parts: Sequence[tuple[StoredFile, int, int]]) -> Job:
    """Return a job that reads the numbered archived files, each between two offsets."""

    def read(numbers: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in numbers:
            for at in batch.column(0).to_pylist():
                stored, start, end = parts[at]
                whole = start <= stored.file.start and end >= stored.file.end
                total = MessageChecksum()
                for rows in rows_of(stored, start, end, COLUMNS):
                    total.add(rows)
                    yield rows
                if whole and total.checksum != stored.file.checksum:
                    raise CorruptFile(
                        f"{file_url(stored.url, stored.file.path)} is not what was archived: its checksum differs"
                    )

    return read


def check_job(log: LogReadSettings, root: str, files: Sequence[ArchivedFile | None], ranges: Sequence[Range]) -> Job:
    """Return a job that compares each numbered file with the log, and returns its checksum; None has no messages."""

    def check(numbers: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in numbers:
            rows = [_check_file(log, root, at, files[at], ranges[at]) for at in batch.column(0).to_pylist()]
            names = ("at", "rows", "time_min", "time_max", "checksum")
            kinds = (pa.int32(), pa.int64(), pa.int64(), pa.int64(), pa.string())
            columns = [pa.array(column, kind) for column, kind in zip(zip(*rows, strict=True), kinds, strict=True)]
            yield pa.RecordBatch.from_arrays(columns, names=list(names))

    return check


def _check_file(
    log: LogReadSettings, root: str, at: int, file: ArchivedFile | None, wanted: Range
) -> tuple[int, int, int, int, str]:
    total = MessageChecksum()

    def archived() -> Iterator[pa.RecordBatch]:
        if file is not None:
            for rows in rows_of(StoredFile(root, file), 0, 1 << 62, COLUMNS):
                total.add(rows)
                yield rows

    compare(wanted, log.record_batches(wanted), archived(), log.may_have_gaps)
    base = resolve_url(root)
    if file is not None and base.local:  # pyarrow does not fsync local files
        sync_path(base.below(file.path).path, base.path)
    return at, total.rows, total.time_min_us, total.time_max_us, total.checksum


def compare(
    wanted: Range, log: Iterator[pa.RecordBatch], archived: Iterator[pa.RecordBatch], may_have_gaps: bool
) -> None:
    """Raise CorruptFile unless the archive has the log's messages in all columns; with gaps it may have more."""
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
        if may_have_gaps:
            part = part.filter(pc.is_in(part.column("offset"), batch.column("offset")))
        if not part.equals(pa.Table.from_batches([batch], SCHEMA)):
            raise _differs(wanted, f"between offsets {batch.column('offset')[0]} and {last}")
    left = held.num_rows + sum(rows.num_rows for rows in archived)
    if left and not may_have_gaps:
        raise _differs(wanted, f"it has {left} messages more")


def _differs(wanted: Range, how: str) -> CorruptFile:
    return CorruptFile(
        f"the copy of {wanted.topic}[{wanted.partition}] from offset {wanted.start} on differs from the log: {how}; "
        "it was not committed: run the archive again"
    )
