"""Copying messages of a topic to Parquet files with Spark's tasks, and checking them against the log."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec
from py4j.protocol import Py4JError
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from headrace.model.errors import CorruptFile, HeadraceError
from headrace.spark.archive.bounds import Piece
from headrace.spark.archive.manifest import ArchivedFile
from headrace.spark.archive.parquet import TIME_NONE
from headrace.spark.archive.paths import files_below, place_of
from headrace.spark.archive.tasks import COPY_SQL, SUM_SCHEMA, Job, LogReading, check_job, copy_job
from headrace.spark.error_texts import problem_text

_TASKS_MAX = 200
"""Tasks of a job at most: where there are more pieces than that, several share one."""


class Copier:
    """Copies pieces of a topic into an archive."""

    def __init__(self, spark: SparkSession, log: LogReading, url: str, folder: str, run: str) -> None:
        """`folder` is the topic's, below the archive's URL; `run` the name of the attempt."""
        self._spark = spark
        self._log = log
        self._url = url
        self._folder = folder
        self._run = run

    def write(self, pieces: Sequence[Piece]) -> list[ArchivedFile | None]:
        """Write a file for each piece; None for one that has no messages."""
        job = copy_job(self._log, self._url, self.directory, pieces)
        with failures_told():
            told = {row["at"]: row for row in numbered(self._spark, len(pieces), job, COPY_SQL).collect()}
        files: list[ArchivedFile | None] = []
        for at, piece in enumerate(pieces):
            row, wanted = told.get(at), piece.wanted
            if row is None:
                raise CorruptFile(f"nobody tells what became of the copy of {wanted}; nothing of it counts")
            sizes = row["rows"], row["bytes"], row["raw_bytes"]
            place = row["path"], wanted.partition, wanted.start, wanted.end
            files.append(ArchivedFile(*place, *sizes, TIME_NONE, -TIME_NONE, "") if row["rows"] else None)
        self._remove_others({file.path for file in files if file is not None}, {piece.day for piece in pieces})
        return files

    def checked(self, pieces: Sequence[Piece], files: Sequence[ArchivedFile | None]) -> list[ArchivedFile]:
        """The files that were written, each compared with the log."""
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

    def _remove_others(self, known: set[str], days: set[str]) -> None:
        """Remove what attempts of tasks have left that Spark gave up or did twice."""
        base = place_of(self._url)
        for day in sorted(days):
            for name, _ in files_below(base.below(self.directory, f"date={day}")):
                path = f"{self.directory}/date={day}/{name}"
                if path not in known:
                    base.filesystem.delete_file(base.below(path).path)


def numbered(spark: SparkSession, count: int, job: Job, schema: str) -> Any:
    """The rows that a job makes of the numbers up to a count, few enough of them in each task."""
    return spark.range(0, count, 1, min(count, _TASKS_MAX)).mapInArrow(job, schema)


@contextmanager
def failures_told() -> Iterator[None]:
    """Tell what Spark says when a job fails as an error of ours, in the words of whoever failed."""
    try:
        yield
    except (PySparkException, Py4JError) as error:
        raise HeadraceError(f"the Spark job failed: {problem_text(error)}") from error
