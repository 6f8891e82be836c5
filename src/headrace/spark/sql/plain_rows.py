"""Converts Spark rows to plain Python values that JSON can represent, with times of any year."""

import re
from collections.abc import Callable, Sequence
from datetime import UTC, date, datetime
from typing import Any

import msgspec
from pyspark.sql import DataFrame
from pyspark.sql.functions import col
from pyspark.sql.types import (
    ArrayType,
    CalendarIntervalType,
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
    YearMonthIntervalType,
)

from headrace.spark.sessions import temporary_settings
from headrace.spark.sql.column_names import unique_names

Converter = Callable[[Any], Any]

_TEXTS = TimestampType | TimestampNTZType | DateType | YearMonthIntervalType | CalendarIntervalType
"""Types with values that PySpark cannot convert to Python."""
_YEARS_MONTHS = re.compile(r"INTERVAL '(-?)(\d+)(?:-(\d+))?' (YEAR|MONTH)")
_UNITS = {"years": "Y", "months": "M", "days": "D", "hours": "H", "minutes": "M", "seconds": "S"}
_keys = msgspec.json.Encoder(enc_hook=str, decimal_format="number")


def with_times_as_text(frame: DataFrame) -> DataFrame:
    """Cast times and intervals to text, as PySpark cannot convert years before 1 or after 9999, or months."""
    kinds = [(field.dataType, _as_text(field.dataType)) for field in frame.schema.fields]
    if all(text == kind for kind, text in kinds):
        return frame
    numbered = frame.toDF(*(f"c{at}" for at in range(len(kinds))))  # several columns may have one name
    columns = [
        col(f"c{at}") if text == kind else col(f"c{at}").cast(text).alias(f"c{at}")
        for at, (kind, text) in enumerate(kinds)
    ]
    with temporary_settings(frame.sparkSession, {"spark.sql.session.timeZone": "UTC"}):
        return numbered.select(*columns)


def _as_text(kind: DataType) -> DataType:
    """Return a type with text in place of times, intervals of months, and unhashable map keys."""
    if isinstance(kind, _TEXTS):
        return StringType()
    if isinstance(kind, StructType):
        return StructType([StructField(field.name, _as_text(field.dataType), field.nullable) for field in kind.fields])
    if isinstance(kind, ArrayType):
        return ArrayType(_as_text(kind.elementType), kind.containsNull)
    if isinstance(kind, MapType):
        key = StringType() if _has_array(kind.keyType) else _as_text(kind.keyType)
        return MapType(key, _as_text(kind.valueType), kind.valueContainsNull)
    return kind


def plain_converter(kind: DataType) -> Converter | None:
    """Return the function that converts a value of a Spark type to a plain value; None if no conversion is needed."""
    if isinstance(kind, TimestampType):
        return lambda text: _time(text, lambda found: datetime.fromisoformat(found).replace(tzinfo=UTC))
    if isinstance(kind, TimestampNTZType):
        return lambda text: _time(text, datetime.fromisoformat)
    if isinstance(kind, DateType):
        return lambda text: _time(text, date.fromisoformat)
    if isinstance(kind, YearMonthIntervalType):
        return months_text
    if isinstance(kind, CalendarIntervalType):
        return units_text
    if isinstance(kind, StructType):
        names = unique_names([field.name for field in kind.fields])
        parts = [(name, plain_converter(field.dataType)) for name, field in zip(names, kind.fields, strict=True)]
        return lambda row: _fields(row, parts)
    if isinstance(kind, ArrayType):
        item = plain_converter(kind.elementType)
        return None if item is None else lambda items: [None if each is None else item(each) for each in items]
    if isinstance(kind, MapType):
        outer = None if _has_array(kind.keyType) else plain_converter(kind.keyType)
        inner = plain_converter(kind.valueType)
        return lambda pairs: {
            key_text(key if outer is None else outer(key)): each if each is None or inner is None else inner(each)
            for key, each in pairs.items()
        }
    if isinstance(kind, VariantType):
        return lambda variant: variant.toPython()
    return None


def _has_array(kind: DataType) -> bool:
    """Return whether a key type contains arrays, which are unhashable lists in Python."""
    if isinstance(kind, StructType):
        return any(_has_array(field.dataType) for field in kind.fields)
    return isinstance(kind, ArrayType)


def key_text(key: Any) -> str:
    """Return the name in a JSON object for a map key: its JSON, without quotes.

    >>> key_text("a"), key_text(2), key_text(True), key_text({"a": 1}), key_text(date(2026, 1, 31))
    ('a', '2', 'true', '{"a":1}', '2026-01-31')
    """
    if isinstance(key, str):
        return key
    if isinstance(key, float):  # JSON has no NaN and no infinity
        return str(key)
    text = _keys.encode(key).decode()
    return str(msgspec.json.decode(text)) if text.startswith('"') else text


def months_text(text: str) -> str:
    """Return an interval of years and months in ISO 8601.

    >>> months_text("INTERVAL '3' MONTH"), months_text("INTERVAL '-1-2' YEAR TO MONTH")
    ('P3M', '-P1Y2M')
    """
    found = _YEARS_MONTHS.fullmatch(text.removesuffix(" TO MONTH"))
    if found is None:
        return text
    sign, first, months, unit = found.groups()
    return f"{sign}P{first}{unit[0]}" + (f"{months}M" if months is not None else "")


def units_text(text: str) -> str:
    """Return an interval of several units in ISO 8601; each may have its own sign.

    >>> units_text("1 years -2 months 3 days"), units_text("-4 hours 7.5 seconds"), units_text("0 seconds")
    ('P1Y-2M3D', 'PT-4H7.5S', 'PT0S')
    """
    words = text.split()
    parts = list(zip(words[::2], words[1::2], strict=True))
    days = [number + _UNITS[unit] for number, unit in parts if unit in ("years", "months", "days")]
    clock = [number + _UNITS[unit] for number, unit in parts if unit in ("hours", "minutes", "seconds")]
    return "".join(["P", *days, *(["T", *clock] if clock else [])])


def _time(text: str, parse: Callable[[str], Any]) -> Any:
    """Parse a time; returns Spark's text if Python does not support the year."""
    return text if text.startswith(("+", "-")) else parse(text)


def _fields(row: Row, parts: Sequence[tuple[str, Converter | None]]) -> dict[str, Any]:
    return {
        name: value if value is None or convert is None else convert(value)
        for (name, convert), value in zip(parts, row, strict=True)
    }
