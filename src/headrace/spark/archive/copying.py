"""Copying messages of a topic to Parquet files with Spark, and checking them against the log."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from typing import Any

import msgspec
from py4j.protocol import Py4JError
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from headrace.model.errors import CorruptFile, HeadraceError
from headrace.spark.archive.bounds import Piece
from headrace.spark.archive.manifest import ArchivedFile
from headrace.spark.archive.parquet import SQL_SCHEMA, TIME_NONE, open_file
from headrace.spark.archive.places import files_below, place_of
from headrace.spark.archive.tasks import SUM_SCHEMA, Job, LogReading, check_job, copy_job
from headrace.spark.problems import problem_text
from headrace.spark.sessions import for_a_while

_SETTINGS = {
    "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",
    "spark.sql.parquet.datetimeRebaseModeInWrite": "CORRECTED",
}
"""Times as they are, and in the type that everybody reads."""
_WRITING = {"compression": "zstd", "parquet.block.size": str(16 << 20), "parquet.page.write-checksum.enabled": "true"}
"""Row groups that are not too large: whoever wants some offsets reads only those."""
_SMALL_BYTES = 32 << 20
"""Pieces that are not larger are written together, and sorted for it; larger ones cost a job for each day instead."""


class Copier:
    """Copies pieces of a topic into an archive."""

    def __init__(self, spark: SparkSession, log: LogReading, url: str, folder: str, run: str) -> None:
        """`folder` is the topic's, below the archive's URL; `run` the name of the attempt."""
        self._spark = spark
        self._log = log
        self._url = url
        self._folder = folder
        self._run = run

    def write(self, pieces: Sequence[Piece]) -> None:
        """Write the files of the pieces: all small ones in one job, the others day by day."""
        base = f"{self._url}/{self.directory}"
        small = [piece for piece in pieces if piece.bytes <= _SMALL_BYTES]
        large = sorted(piece for piece in pieces if piece.bytes > _SMALL_BYTES)
        with failures_told(), for_a_while(self._spark, _SETTINGS):
            if small:
                job = copy_job(self._log, [piece.wanted for piece in small], [piece.day for piece in small])
                rows = numbered(self._spark, len(small), job, f"date string, {SQL_SCHEMA}")
                # Spark would sort by date alone; this is what it wants, and keeps the order of the offsets.
                rows = rows.sortWithinPartitions("date", "offset")
                rows.write.mode("append").partitionBy("date").options(**_WRITING).parquet(base)
            for day, some in groupby(large, key=lambda piece: piece.day):
                ranges = [piece.wanted for piece in some]
                rows = numbered(self._spark, len(ranges), copy_job(self._log, ranges), SQL_SCHEMA)
                rows.write.mode("append").options(**_WRITING).parquet(f"{base}/date={day}")

    def checked(self, pieces: Sequence[Piece]) -> list[ArchivedFile]:
        """The files that were written, each compared with the log."""
        found = self._found(pieces)
        files = [found.get(at) for at in range(len(pieces))]
        ranges = [piece.wanted for piece in pieces]
        job = check_job(self._log, self._url, files, ranges)
        with failures_told():
            sums = {row["at"]: row for row in numbered(self._spark, len(ranges), job, SUM_SCHEMA).collect()}
        checked = []
        for at, file in enumerate(files):
            told = sums.get(at)
            if told is None or told["rows"] != (file.rows if file else 0):
                raise CorruptFile(f"the copy of {ranges[at]} could not be checked; nothing of it counts")
            if file is not None:
                times = {"time_min_us": told["time_min"], "time_max_us": told["time_max"]}
                checked.append(msgspec.structs.replace(file, checksum=told["checksum"], **times))
        return checked

    @property
    def directory(self) -> str:
        """Where the files are, below the archive's URL."""
        return f"{self._folder}/run={self._run}"

    def _found(self, pieces: Sequence[Piece]) -> dict[int, ArchivedFile]:
        """The files there are, by the number of the piece that each is of."""
        base = place_of(self._url)
        found: dict[int, ArchivedFile] = {}
        for day in sorted({piece.day for piece in pieces}):
            for name, size in files_below(base.below(self.directory, f"date={day}")):
                path = f"{self.directory}/date={day}/{name}"
                opened = open_file(base.below(path))
                metadata = opened.metadata
                opened.close(force=True)
                if not metadata.num_rows:
                    continue
                partition, first = _begin(metadata)
                at = _piece_of(pieces, partition, first)
                if at is None or at in found:
                    raise CorruptFile(f"{path} is one file too many; nothing of this attempt counts")
                raw = sum(metadata.row_group(number).total_byte_size for number in range(metadata.num_row_groups))
                one = pieces[at].wanted
                found[at] = ArchivedFile(
                    path, partition, one.start, one.end, metadata.num_rows, size, raw, TIME_NONE, -TIME_NONE, ""
                )
        return found


def numbered(spark: SparkSession, count: int, job: Job, schema: str) -> Any:
    """The rows that a job makes of the numbers up to a count, each number in a task of its own."""
    return spark.range(0, count, 1, count).mapInArrow(job, schema)


@contextmanager
def failures_told() -> Iterator[None]:
    """Tell what Spark says when a job fails as an error of ours, in the words of whoever failed."""
    try:
        yield
    except (PySparkException, Py4JError) as error:
        raise HeadraceError(f"the Spark job failed: {problem_text(error)}") from error


def _begin(metadata: Any) -> tuple[int, int]:
    """The partition and the first offset of a file, by its statistics."""
    names = metadata.schema.names
    known = [metadata.row_group(0).column(names.index(name)).statistics for name in ("partition", "offset")]
    return known[0].min, known[1].min


def _piece_of(pieces: Sequence[Piece], partition: int, offset: int) -> int | None:
    for at, piece in enumerate(pieces):
        if piece.wanted.partition == partition and piece.wanted.start <= offset < piece.wanted.end:
            return at
    return None
