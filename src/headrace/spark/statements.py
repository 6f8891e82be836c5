"""Statements of SQL: run once or as a stream, with rows as plain Python values, and errors in one clear sentence."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC
from typing import TYPE_CHECKING, Any, NamedTuple

from py4j.protocol import Py4JError
from pyspark.errors import AnalysisException, ParseException, PySparkException
from pyspark.logger import PySparkLogger
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import ArrayType, DataType, MapType, Row, StructType, TimestampType, VariantType

from headrace.model.errors import HeadraceError, InvalidArgument
from headrace.spark.errors import QueryFailed
from headrace.spark.problems import is_of_python, problem_text

if TYPE_CHECKING:
    from pyspark.sql.streaming.query import StreamingQuery

_MODES = ("append", "update", "complete")
_LOGGERS = ("SQLQueryContextLogger", "DataFrameQueryContextLogger")
"""They print every error that PySpark raises, with a trace of Java."""
_TIMES = TimestampType()

Plain = Callable[[Any], Any]
Session = SparkSession
Frame = DataFrame
"""What Spark has, for those who know nothing else of it."""


class InvalidStatement(InvalidArgument):
    """The SQL cannot be understood, or names what is not there."""

    code = "invalid_sql"


class Rows(NamedTuple):
    """What a statement gives."""

    names: list[str]
    rows: Iterator[Sequence[Any]]


def ask(spark: SparkSession, statement: str) -> DataFrame:
    """The result of a statement, of which little has been computed yet; raises InvalidStatement."""
    with explained():
        return spark.sql(statement)


def rows_of(frame: DataFrame, limit: int | None) -> Rows:
    """The rows of a result, as they are computed; not more than so many."""
    return Rows(list(frame.columns), _rows(frame, limit))


def write_parquet(frame: DataFrame, path: str, limit: int | None, *, overwrite: bool) -> int:
    """Write a result as Parquet files; returns how many rows there are."""
    with explained():
        limited = frame if limit is None else frame.limit(limit)
        limited.write.mode("overwrite" if overwrite else "error").parquet(path)
        return frame.sparkSession.read.schema(limited.schema).parquet(path).count()


def follow(frame: DataFrame, trigger_s: float, checkpoint: str, on_rows: Callable[[Rows, bool], None]) -> "Following":
    """Begin a query that hands over rows as they come, and whether these are all rows and not only further ones.

    The first of Spark's modes counts that the query can be run in: append, which tells rows that will not change any
    more; update, which tells those that changed; complete, which tells all of them again.
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
            with explained():
                timed = writer.trigger(processingTime=f"{round(trigger_s * 1000)} milliseconds")
                return Following(timed.foreachBatch(handle).start())
        except InvalidStatement as error:
            refusal = refusal or error
    assert refusal is not None
    raise refusal


class Following:
    """A query that goes on."""

    def __init__(self, query: "StreamingQuery") -> None:
        self._query = query

    def wait(self, seconds: float) -> bool:
        """Wait for it to end, but not longer; whether it has. Raises QueryFailed if it failed."""
        with explained():
            return bool(self._query.awaitTermination(seconds))  # type: ignore[arg-type]

    def stop(self) -> None:
        """End it."""
        with explained():
            self._query.stop()


@contextmanager
def explained() -> Iterator[None]:
    """Turn what Spark raises into our errors, each with one clear sentence."""
    loggers = [PySparkLogger.getLogger(name) for name in _LOGGERS]
    for logger in loggers:
        logger.disabled = True
    try:
        yield
    except HeadraceError:
        raise
    except (AnalysisException, ParseException) as error:
        if is_of_python(error):
            raise QueryFailed(problem_text(error)) from error
        raise InvalidStatement(problem_text(error)) from error
    except (PySparkException, Py4JError) as error:
        raise QueryFailed(problem_text(error)) from error
    finally:
        for logger in loggers:
            logger.disabled = False


def _rows(frame: DataFrame, limit: int | None) -> Iterator[Sequence[Any]]:
    converters = [(at, plain) for at, field in enumerate(frame.schema.fields) if (plain := _plain(field.dataType))]
    with explained():
        found = iter(frame.toLocalIterator() if limit is None else frame.limit(limit).collect())
    while True:
        with explained():
            row = next(found, None)
        if row is None:
            return
        if converters:
            values = list(row)
            for at, plain in converters:
                values[at] = None if values[at] is None else plain(values[at])
            yield values
        else:
            yield row


def _plain(kind: DataType) -> Plain | None:
    """What makes a value that every program understands of one of Spark's; None if it is one already."""
    if kind == _TIMES:
        return lambda moment: moment.replace(tzinfo=UTC)
    if isinstance(kind, StructType):
        parts = [(field.name, _plain(field.dataType)) for field in kind.fields]
        return lambda row: _fields(row, parts)
    if isinstance(kind, ArrayType):
        item = _plain(kind.elementType)
        return None if item is None else lambda items: [None if each is None else item(each) for each in items]
    if isinstance(kind, MapType):
        inner = _plain(kind.valueType)
        return lambda pairs: {
            name if isinstance(name, str) else str(name): each if each is None or inner is None else inner(each)
            for name, each in pairs.items()
        }
    if isinstance(kind, VariantType):
        return lambda variant: variant.toPython()
    return None


def _fields(row: Row, parts: Sequence[tuple[str, Plain | None]]) -> dict[str, Any]:
    return {
        name: value if value is None or plain is None else plain(value)
        for (name, plain), value in zip(parts, row, strict=True)
    }
