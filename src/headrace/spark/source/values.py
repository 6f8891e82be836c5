"""What becomes of a message's value: bytes as they are, text, or a structure read from JSON."""

import pyarrow as pa
from pyspark.sql.types import BinaryType, StringType, StructType

from headrace.spark.source.arrow import Values


def value_columns(schema: StructType) -> Values:
    """What makes the column `value`, and `_corrupt` if there is one, of the messages' bytes."""
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
