"""Converts JSON values to columns by a schema; a value that does not fit never fails the read."""

from collections.abc import Sequence
from typing import Any

import msgspec
import pyarrow as pa
from pyspark.sql.types import StructType

from headrace.spark.source.json_converters import CONVERSION_ERRORS, StructConverter
from headrace.spark.source.json_inference import inferred_type

__all__ = ["JsonValues", "inferred_type"]

_PART = 256
"""Number of rows that are converted one by one when one of them does not fit."""
_CONVERSIONS = (pa.ArrowException, ValueError, ArithmeticError)
"""Errors of building a column when a row does not fit."""


class JsonValues:
    """Converts JSON values to the columns `value` and `_corrupt`.

    A value that is not a JSON object or does not fit the schema is null in `value`, and its text is in `_corrupt`.
    """

    def __init__(self, kind: StructType) -> None:
        self._converter = StructConverter(kind)
        self._decode = msgspec.json.Decoder(self._converter.decoded).decode

    def __call__(self, values: Sequence[bytes | None]) -> dict[str, pa.Array]:
        """Return the columns of these values."""
        rows = self._rows(values)
        try:
            column = self._converter.column(rows)
        except _CONVERSIONS:
            column = self._by_parts(values, rows)
        return {"value": column, "_corrupt": _corrupt(values, rows)}

    def _by_parts(self, values: Sequence[bytes | None], rows: list[Any]) -> pa.Array:
        """Build the column part by part; rows that do not fit become None."""
        parts = []
        for begin in range(0, len(rows), _PART):
            part = slice(begin, begin + _PART)
            try:
                parts.append(self._converter.column(rows[part]))
            except _CONVERSIONS:
                rows[part] = [self._row(value) for value in values[part]]
                parts.append(self._converter.column(rows[part]))
        return pa.concat_arrays(parts)

    def _rows(self, values: Sequence[bytes | None]) -> list[Any]:
        decode = self._decode
        if None not in values:
            try:
                return [decode(value) for value in values]  # type: ignore[arg-type]
            except CONVERSION_ERRORS:
                pass
        rows = []
        for value in values:
            try:
                rows.append(None if value is None else decode(value))
            except CONVERSION_ERRORS:
                rows.append(self._row(value))
        return rows

    def _row(self, value: bytes | None) -> Any:
        """Return a row that fits the schema, or None."""
        if value is None:
            return None
        try:
            return self._converter.read(msgspec.Raw(value))
        except CONVERSION_ERRORS:
            return None


def _corrupt(values: Sequence[bytes | None], rows: Sequence[Any]) -> pa.Array:
    if rows.count(None) == values.count(None):
        return pa.nulls(len(values), pa.string())
    texts = [
        value.decode("utf-8", "replace") if row is None and value is not None else None
        for value, row in zip(values, rows, strict=True)
    ]
    return pa.array(texts, pa.string())
