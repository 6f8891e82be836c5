"""Copies messages of a topic to Parquet files with Spark tasks, and compares the files with the log."""

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
from headrace.spark.archive.paths import files_below, resolve_url
from headrace.spark.archive.tasks import COPY_SQL, SUM_SCHEMA, Job, LogReadSettings, check_job, copy_job
from headrace.spark.error_texts import problem_text

_TASKS_MAX = 200
"""Maximum number of tasks of a job; more pieces than that share tasks."""


class Copier:
    """Copies pieces of a topic into an archive."""

    def __init__(self, spark: SparkSession, log: LogReadSettings, url: str, folder: str, run: str) -> None:
        """`folder` is the topic's folder below the archive's URL, `run` the name of the attempt."""
        self._spark = spark
        self._log = log
        self._url = url
        self._folder = folder
        self._run = run

    def write(self, pieces: Sequence[Piece]) -> list[ArchivedFile | None]:
        """Write a file for each piece; returns None for a piece without messages."""
        job = copy_job(self._log, self._url, self.directory, pieces)
        with translate_spark_errors():
            reports = {row["at"]: row for row in map_numbers(self._spark, len(pieces), job, COPY_SQL).collect()}
        files: list[ArchivedFile | None] = []
        for at, piece in enumerate(pieces):
            row, wanted = reports.get(at), piece.wanted
            if row is None:
                raise CorruptFile(f"no task reported the copy of {wanted}; it was not committed: run the archive again")
            sizes = row["rows"], row["bytes"], row["raw_bytes"]
            location = row["path"], wanted.partition, wanted.start, wanted.end
            files.append(ArchivedFile(*location, *sizes, TIME_NONE, -TIME_NONE, "") if row["rows"] else None)
        self._remove_others({file.path for file in files if file is not None}, {piece.day for piece in pieces})
        return files

    def checked(self, pieces: Sequence[Piece], files: Sequence[ArchivedFile | None]) -> list[ArchivedFile]:
        """Compare each written file with the log; returns the files with their checksums and times."""
        ranges = [piece.wanted for piece in pieces]
        job = check_job(self._log, self._url, files, ranges)
        with translate_spark_errors():
            sums = {row["at"]: row for row in map_numbers(self._spark, len(ranges), job, SUM_SCHEMA).collect()}
        checked = []
        for at, file in enumerate(files):
            total = sums.get(at)
            if total is None or total["rows"] != (file.rows if file else 0):
                raise CorruptFile(
                    f"the copy of {ranges[at]} could not be checked; it was not committed: run the archive again"
                )
            if file is not None:
                times = {"time_min_us": total["time_min"], "time_max_us": total["time_max"]}
                checked.append(msgspec.structs.replace(file, checksum=total["checksum"], **times))
        return checked

    @property
    def directory(self) -> str:
        """The directory of the files, below the archive's URL."""
        return f"{self._folder}/run={self._run}"

    def _remove_others(self, known: set[str], days: set[str]) -> None:
        """Remove files of task attempts that Spark gave up or ran twice."""
        base = resolve_url(self._url)
        for day in sorted(days):
            for name, _ in files_below(base.below(self.directory, f"date={day}")):
                path = f"{self.directory}/date={day}/{name}"
                if path not in known:
                    base.filesystem.delete_file(base.below(path).path)


def map_numbers(spark: SparkSession, count: int, job: Job, schema: str) -> Any:
    """Run a job over the numbers from 0 to `count`, spread over tasks; returns its rows as a DataFrame."""
    return spark.range(0, count, 1, min(count, _TASKS_MAX)).mapInArrow(job, schema)


@contextmanager
def translate_spark_errors() -> Iterator[None]:
    """Turn the error of a failed Spark job into a HeadraceError with the text of its cause."""
    try:
        yield
    except (PySparkException, Py4JError) as error:
        raise HeadraceError(f"the Spark job failed: {problem_text(error)}") from error
