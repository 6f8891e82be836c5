"""Values that are JSON, as columns: by a schema, in one go, and without ever failing because of a value."""

from collections.abc import Sequence
from typing import Any

import msgspec
import pyarrow as pa
from pyspark.sql.types import StructType

from headrace.spark.source.json_forms import REFUSALS, Fields
from headrace.spark.source.json_inference import inferred_type

__all__ = ["JsonValues", "inferred_type"]

_PART = 256
"""So many rows are looked at one by one when one of them does not fit."""
_CONVERSIONS = (pa.ArrowException, ValueError, ArithmeticError)
"""What making a column raises when some row does not fit."""


class JsonValues:
    """Makes the columns `value` and `_corrupt` of JSON.

    A value that is no JSON, no object, or does not fit the schema, is null in `value`, and its text is in `_corrupt`.
    """

    def __init__(self, kind: StructType) -> None:
        self._form = Fields(kind)
        self._decode = msgspec.json.Decoder(self._form.decoded).decode

    def __call__(self, values: Sequence[bytes | None]) -> dict[str, pa.Array]:
        """The columns of some values."""
        rows = self._rows(values)
        try:
            column = self._form.column(rows)
        except _CONVERSIONS:
            column = self._by_parts(values, rows)
        return {"value": column, "_corrupt": _corrupt(values, rows)}

    def _by_parts(self, values: Sequence[bytes | None], rows: list[Any]) -> pa.Array:
        """The column of rows of which some do not fit; these become None."""
        parts = []
        for begin in range(0, len(rows), _PART):
            part = slice(begin, begin + _PART)
            try:
                parts.append(self._form.column(rows[part]))
            except _CONVERSIONS:
                rows[part] = [self._row(value) for value in values[part]]
                parts.append(self._form.column(rows[part]))
        return pa.concat_arrays(parts)

    def _rows(self, values: Sequence[bytes | None]) -> list[Any]:
        decode = self._decode
        if None not in values:
            try:
                return [decode(value) for value in values]  # type: ignore[arg-type]
            except REFUSALS:
                pass
        rows = []
        for value in values:
            try:
                rows.append(None if value is None else decode(value))
            except REFUSALS:
                rows.append(self._row(value))
        return rows

    def _row(self, value: bytes | None) -> Any:
        """A row that certainly fits, or None."""
        if value is None:
            return None
        try:
            return self._form.read(msgspec.Raw(value))
        except REFUSALS:
            return None


def _corrupt(values: Sequence[bytes | None], rows: Sequence[Any]) -> pa.Array:
    if rows.count(None) == values.count(None):
        return pa.nulls(len(values), pa.string())
    texts = [
        value.decode("utf-8", "replace") if row is None and value is not None else None
        for value, row in zip(values, rows, strict=True)
    ]
    return pa.array(texts, pa.string())
