"""Runs SQL statements once or as a stream, returns rows as plain Python values, and shortens Spark's errors."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import GeneratorType
from typing import TYPE_CHECKING, Any, NamedTuple

from py4j.protocol import Py4JError
from pyspark.errors import AnalysisException, ParseException, PySparkException
from pyspark.logger import PySparkLogger
from pyspark.sql import DataFrame, SparkSession

from headrace.model.errors import HeadraceError
from headrace.spark.error_texts import is_of_python, problem_text
from headrace.spark.errors import InvalidStatement, PathInUse, QueryFailed
from headrace.spark.sql.plain_rows import plain_converter, with_times_as_text

if TYPE_CHECKING:
    from pyspark.sql.streaming.query import StreamingQuery

_MODES = ("append", "update", "complete")
_LOGGERS = [PySparkLogger.getLogger(name) for name in ("SQLQueryContextLogger", "DataFrameQueryContextLogger")]
"""PySpark's loggers that print every error with a Java stack trace. Looked up once: each `getLogger` of PySpark changes
the class of all loggers for a moment, and two threads in it at once leave it changed."""
Session = SparkSession
Frame = DataFrame
"""Aliases for callers that do not import PySpark."""


class Rows(NamedTuple):
    """The result of a statement."""

    names: list[str]
    rows: Iterator[Sequence[Any]]


def ask(spark: SparkSession, statement: str) -> DataFrame:
    """Analyze a statement and return its lazy result; raises InvalidStatement."""
    with translate_errors():
        return spark.sql(statement)


def rows_of(frame: DataFrame, limit: int | None) -> Rows:
    """Return the rows of a result as they are computed, up to a limit."""
    return Rows(list(frame.columns), _rows(frame, limit))


def write_parquet(frame: DataFrame, path: str, limit: int | None, *, overwrite: bool) -> int:
    """Write a result as Parquet files; returns the number of rows. Raises PathInUse."""
    with translate_errors():
        limited = frame if limit is None else frame.limit(limit)
        limited.write.mode("overwrite" if overwrite else "error").parquet(path)
        return frame.sparkSession.read.schema(limited.schema).parquet(path).count()


def follow(
    frame: DataFrame, trigger_s: float, checkpoint: str, on_rows: Callable[[Rows, bool], None]
) -> "StreamingStatement":
    """Start a streaming query that calls `on_rows` with rows, and with whether they replace all earlier ones.

    It runs in the first output mode that Spark accepts for it: append, which returns rows that no longer change;
    update, which returns changed rows; complete, which returns all rows with each batch.
    """
    if not frame.isStreaming:
        raise InvalidStatement("there is no topic in the query that could be followed")
    refusal: Exception | None = None
    for mode in _MODES:

        def handle(batch: DataFrame, _number: int, whole: bool = mode == "complete") -> None:
            if not batch.isEmpty():
                on_rows(rows_of(batch, None), whole)

        writer = frame.writeStream.outputMode(mode).option("checkpointLocation", checkpoint)
        try:
            with translate_errors():
                timed = writer.trigger(processingTime=f"{round(trigger_s * 1000)} milliseconds")
                return StreamingStatement(timed.foreachBatch(handle).start())
        except InvalidStatement as error:
            refusal = refusal or error
    assert refusal is not None
    raise refusal


class StreamingStatement:
    """A running streaming query."""

    def __init__(self, query: "StreamingQuery") -> None:
        self._query = query

    def wait(self, seconds: float) -> bool:
        """Wait up to some seconds for the query to end; returns whether it has. Raises QueryFailed if it failed."""
        with translate_errors():
            return bool(self._query.awaitTermination(seconds))  # type: ignore[arg-type]

    def stop(self) -> None:
        """Stop the query."""
        with translate_errors():
            self._query.stop()


@contextmanager
def translate_errors() -> Iterator[None]:
    """Turn Spark's errors into Headrace errors with a one-sentence text."""
    for logger in _LOGGERS:
        logger.disabled = True
    try:
        yield
    except HeadraceError:
        raise
    except (AnalysisException, ParseException) as error:
        if error.getCondition() == "PATH_ALREADY_EXISTS":
            raise PathInUse from error
        if is_of_python(error):
            raise QueryFailed(problem_text(error)) from error
        raise InvalidStatement(problem_text(error)) from error
    except (PySparkException, Py4JError) as error:
        raise QueryFailed(problem_text(error)) from error
    finally:
        for logger in _LOGGERS:
            logger.disabled = False


def _rows(frame: DataFrame, limit: int | None) -> Iterator[Sequence[Any]]:
    converters = [
        (at, convert) for at, field in enumerate(frame.schema.fields) if (convert := plain_converter(field.dataType))
    ]
    with translate_errors():
        texts = with_times_as_text(frame)
        found = iter(texts.toLocalIterator() if limit is None else texts.limit(limit).collect())
    # Taken now, as a failed generator drops its frame.
    source = _socket_reader(found)
    try:
        while True:
            with translate_errors():
                row = next(found, None)
            if row is None:
                return
            if converters:
                values = list(row)
                for at, convert in converters:
                    values[at] = None if values[at] is None else convert(values[at])
                yield values
            else:
                yield row
    finally:
        if source is not None:
            # Otherwise PySpark requests the remaining rows from Java on cleanup, and logs an error if Java has ended.
            source._read_status = 0


def _socket_reader(found: Iterator[Any]) -> Any:
    """Return PySpark's object that streams rows from Java's socket; None if the rows are already in memory."""
    frame = found.gi_frame if isinstance(found, GeneratorType) else None
    reader = None if frame is None else frame.f_locals.get("self")
    return reader if hasattr(reader, "_read_status") else None
