"""Converts message values to columns: bytes, text, or a struct from JSON."""

import pyarrow as pa
from pyspark.sql.types import BinaryType, StringType, StructType

from headrace.spark.source.arrow import Values


def value_columns(schema: StructType) -> Values:
    """Return the converter of message values to the column `value` and, for JSON, `_corrupt`."""
    kind = schema["value"].dataType if "value" in schema.fieldNames() else BinaryType()
    if isinstance(kind, StructType):
        from headrace.spark.source.json_values import JsonValues

        parsed = JsonValues(kind)
        return lambda values: parsed(values.to_pylist())
    return _texts if isinstance(kind, StringType) else _bytes


def _bytes(values: pa.Array) -> dict[str, pa.Array]:
    return {"value": values}


def _texts(values: pa.Array) -> dict[str, pa.Array]:
    try:
        return {"value": values.cast(pa.string())}
    except pa.ArrowInvalid:  # some are not UTF-8
        texts = [None if value is None else value.decode("utf-8", "replace") for value in values.to_pylist()]
        return {"value": pa.array(texts, pa.string())}
