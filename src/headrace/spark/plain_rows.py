"""Rows of Spark's as values that every program understands, with times of any year."""

from collections.abc import Callable, Sequence
from datetime import UTC, date, datetime
from typing import Any

from pyspark.sql import DataFrame
from pyspark.sql.functions import col
from pyspark.sql.types import (
    ArrayType,
    DataType,
    DateType,
    MapType,
    Row,
    StringType,
    StructField,
    StructType,
    TimestampNTZType,
    TimestampType,
    VariantType,
)

from headrace.spark.names import unique_names
from headrace.spark.sessions import for_a_while

Plain = Callable[[Any], Any]


def with_times_as_text(frame: DataFrame) -> DataFrame:
    """The same rows with times as text: PySpark cannot make Python's of those of the year 1, or after 9999."""
    kinds = [(field.dataType, _as_text(field.dataType)) for field in frame.schema.fields]
    if all(text == kind for kind, text in kinds):
        return frame
    numbered = frame.toDF(*(f"c{at}" for at in range(len(kinds))))  # several columns may have one name
    columns = [
        col(f"c{at}") if text == kind else col(f"c{at}").cast(text).alias(f"c{at}")
        for at, (kind, text) in enumerate(kinds)
    ]
    with for_a_while(frame.sparkSession, {"spark.sql.session.timeZone": "UTC"}):
        return numbered.select(*columns)


def _as_text(kind: DataType) -> DataType:
    """A type with text where it has times."""
    if isinstance(kind, TimestampType | TimestampNTZType | DateType):
        return StringType()
    if isinstance(kind, StructType):
        return StructType([StructField(field.name, _as_text(field.dataType), field.nullable) for field in kind.fields])
    if isinstance(kind, ArrayType):
        return ArrayType(_as_text(kind.elementType), kind.containsNull)
    if isinstance(kind, MapType):
        return MapType(_as_text(kind.keyType), _as_text(kind.valueType), kind.valueContainsNull)
    return kind


def plain(kind: DataType) -> Plain | None:
    """What makes a value that every program understands of one of Spark's; None if it is one already."""
    if isinstance(kind, TimestampType):
        return lambda text: _time(text, lambda found: datetime.fromisoformat(found).replace(tzinfo=UTC))
    if isinstance(kind, TimestampNTZType):
        return lambda text: _time(text, datetime.fromisoformat)
    if isinstance(kind, DateType):
        return lambda text: _time(text, date.fromisoformat)
    if isinstance(kind, StructType):
        names = unique_names([field.name for field in kind.fields])
        parts = [(name, plain(field.dataType)) for name, field in zip(names, kind.fields, strict=True)]
        return lambda row: _fields(row, parts)
    if isinstance(kind, ArrayType):
        item = plain(kind.elementType)
        return None if item is None else lambda items: [None if each is None else item(each) for each in items]
    if isinstance(kind, MapType):
        inner = plain(kind.valueType)
        return lambda pairs: {
            name if isinstance(name, str) else str(name): each if each is None or inner is None else inner(each)
            for name, each in pairs.items()
        }
    if isinstance(kind, VariantType):
        return lambda variant: variant.toPython()
    return None


def _time(text: str, parse: Callable[[str], Any]) -> Any:
    """A time; as Spark has it if the year is none that Python knows."""
    return text if text.startswith(("+", "-")) else parse(text)


def _fields(row: Row, parts: Sequence[tuple[str, Plain | None]]) -> dict[str, Any]:
    return {
        name: value if value is None or convert is None else convert(value)
        for (name, convert), value in zip(parts, row, strict=True)
    }
