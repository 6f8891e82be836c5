"""Infers the schema of JSON values from a sample."""

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
from pyspark.sql.types import (
    ArrayType,
    BooleanType,
    DataType,
    DoubleType,
    LongType,
    StringType,
    StructField,
    StructType,
)

from headrace.model.errors import InvalidArgument

_FIELDS_MAX = 2000
_DEPTH_MAX = 30
"""Maximum nesting; deeper values are text."""
_LONG = 1 << 63

_decode = msgspec.json.Decoder(dict[str, Any]).decode


def inferred_type(samples: Sequence[bytes | None]) -> StructType:
    """Return a schema that fits all samples that are JSON objects; raises InvalidArgument if none is.

    Fields are in the order of their first appearance. A field with values of several types is text.
    """
    objects = [found for found in map(_object, samples) if found is not None]
    if not objects:
        what = f"none of {len(samples)} messages is a JSON object" if samples else "the topic is empty"
        raise InvalidArgument(
            f'the structure of the values cannot be seen: {what}. Give it: option("value.schema", "id bigint, ...")'
        )
    merged = _struct(objects, _DEPTH_MAX)
    count = _count(merged)
    if count > _FIELDS_MAX:
        raise InvalidArgument(
            f"the values have {count} different fields, more than {_FIELDS_MAX}: give those that are wanted, with "
            'option("value.schema", ...); objects whose names are data are map<string, ...>'
        )
    return merged


def all_objects(samples: Sequence[bytes | None]) -> bool:
    """Return whether there are samples that are not null, and all of these are JSON objects."""
    there = [sample for sample in samples if sample is not None]
    return bool(there) and all(_object(sample) is not None for sample in there)


def ddl(kind: DataType) -> str:
    """Return the DDL of a type; the fields of a top-level struct are listed as the option `value.schema` expects."""
    if isinstance(kind, StructType):
        return ", ".join(f"{quoted(field.name)} {_words(field.dataType)}" for field in kind.fields)
    return _words(kind)


def quoted(name: str) -> str:
    """Quote a name for SQL."""
    return f"`{name.replace('`', '``')}`"


def _words(kind: DataType) -> str:
    if isinstance(kind, StructType):
        return f"struct<{', '.join(f'{quoted(field.name)}: {_words(field.dataType)}' for field in kind.fields)}>"
    if isinstance(kind, ArrayType):
        return f"array<{_words(kind.elementType)}>"
    return kind.simpleString()


def _object(sample: bytes | None) -> dict[str, Any] | None:
    try:
        return None if sample is None else _decode(sample)
    except (msgspec.DecodeError, ValueError, RecursionError):
        return None


def _struct(objects: Iterable[dict[str, Any]], depth: int) -> StructType:
    by_name: dict[str, list[Any]] = {}
    for found in objects:
        for name, value in found.items():
            by_name.setdefault(name, []).append(value)
    return StructType([StructField(name, _merged(values, depth - 1)) for name, values in by_name.items()])


def _merged(values: Iterable[Any], depth: int) -> DataType:
    there = [value for value in values if value is not None]
    kinds = {type(value) for value in there}
    if kinds == {dict} and depth > 0 and any(there):
        return _struct(there, depth)
    if kinds == {list} and depth > 0:
        return ArrayType(_merged([item for each in there for item in each], depth - 1))
    if kinds == {bool}:
        return BooleanType()
    if kinds == {int} and all(-_LONG <= value < _LONG for value in there):
        return LongType()
    if kinds in ({float}, {int, float}) and all(abs(value) < _LONG for value in there if isinstance(value, int)):
        return DoubleType()
    return StringType()


def _count(kind: DataType) -> int:
    if isinstance(kind, ArrayType):
        return _count(kind.elementType)
    return sum(1 + _count(field.dataType) for field in kind.fields) if isinstance(kind, StructType) else 0
