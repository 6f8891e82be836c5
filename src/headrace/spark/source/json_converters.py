"""Converters from JSON to Arrow columns, one for each Spark type: decoding, coercion and the column."""

import base64
from collections.abc import Callable, Sequence
from datetime import UTC, date, datetime, timedelta
from decimal import ROUND_HALF_UP, Context, Decimal, InvalidOperation
from itertools import accumulate, chain
from operator import attrgetter
from typing import Annotated, Any

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.pandas.types import to_arrow_type
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    BooleanType,
    ByteType,
    DataType,
    DateType,
    DecimalType,
    DoubleType,
    FloatType,
    IntegerType,
    LongType,
    MapType,
    ShortType,
    StringType,
    StructType,
    TimestampNTZType,
    TimestampType,
)

from headrace.model.errors import InvalidArgument

CONVERSION_ERRORS = (msgspec.DecodeError, ValueError, ArithmeticError, RecursionError)
"""Errors of decoding JSON that is invalid or does not fit the type."""

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)
_FIRST_US = (datetime.min.replace(tzinfo=UTC) - _EPOCH) // _MICROSECOND
_LAST_US = (datetime.max.replace(tzinfo=UTC) - _EPOCH) // _MICROSECOND
_FIRST_DAY = date.min.toordinal() - date(1970, 1, 1).toordinal()
_NOT_NUMBERS = {"NaN": "nan", "INF": "inf", "+INF": "inf", "-INF": "-inf"} | {
    f"{sign}Infinity": f"{sign}inf" for sign in ("", "+", "-")
}

_raw_object = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_raw_items = msgspec.json.Decoder(list[msgspec.Raw]).decode
_text = msgspec.json.Decoder(str).decode
_float = msgspec.json.Decoder(float).decode
_decimal = msgspec.json.Decoder(Decimal).decode


class JsonConverter:
    """Converts JSON to a Spark type; this base class is for types that need only a decoder."""

    def __init__(self, kind: DataType, decoded: Any) -> None:
        self.arrow = to_arrow_type(kind, timezone="UTC")
        self.decoded = decoded
        """The Python type for msgspec's decoder, with all checks that msgspec supports."""
        self._decode = msgspec.json.Decoder(decoded).decode

    def read(self, raw: msgspec.Raw) -> Any:
        """Decode one JSON value that is not null, with all coercions; raises CONVERSION_ERRORS."""
        return self._decode(raw)

    def column(self, values: Sequence[Any]) -> pa.Array:
        """Build the Arrow column; raises if a value does not fit, which never happens for results of `read`."""
        return pa.array(values, self.arrow)


class IntegerConverter(JsonConverter):
    """Integers of a number of bits."""

    def __init__(self, kind: DataType, bits: int) -> None:
        limit = 1 << (bits - 1)
        super().__init__(kind, Annotated[int, msgspec.Meta(ge=-limit, le=limit - 1)])

    def read(self, raw: msgspec.Raw) -> int:
        """Decode an integer; 5.0 counts as one."""
        try:
            number: int = self._decode(raw)
        except msgspec.ValidationError:
            value = _float(raw)
            if not value.is_integer() or abs(value) > 1 << 53:
                raise
            number = self._decode(b"%d" % int(value))
        return number


class FloatConverter(JsonConverter):
    """Floating-point numbers; integers are accepted."""

    def __init__(self, kind: DataType) -> None:
        super().__init__(kind, float)

    def read(self, raw: msgspec.Raw) -> float:
        """Decode a number; NaN and infinities are strings, as Spark writes them."""
        if bytes(raw)[:1] == b'"':
            text = _text(raw)
            if text not in _NOT_NUMBERS:
                raise ValueError(f"{text!r} is no number")
            return float(_NOT_NUMBERS[text])
        return _float(raw)


class StringConverter(JsonConverter):
    """Text; other values become their JSON text."""

    def __init__(self, kind: DataType) -> None:
        super().__init__(kind, str)

    def read(self, raw: msgspec.Raw) -> str:
        """Decode text."""
        plain = bytes(raw)
        if plain[:1] == b'"':
            return _text(plain)
        msgspec.json.decode(plain)  # a Raw value may still be invalid JSON
        return plain.decode()


class BinaryConverter(JsonConverter):
    """Bytes in base 64."""

    def __init__(self, kind: DataType) -> None:
        super().__init__(kind, bytes)

    def read(self, raw: msgspec.Raw) -> bytes:
        """Decode bytes; padding is optional."""
        text = _text(raw)
        return base64.b64decode(text + "=" * (-len(text) % 4), validate=True)


class DecimalConverter(JsonConverter):
    """Decimal numbers, rounded to the type's scale."""

    def __init__(self, kind: DecimalType) -> None:
        super().__init__(kind, Decimal)
        self._unit = Decimal(1).scaleb(-kind.scale)
        self._context = Context(prec=kind.precision, rounding=ROUND_HALF_UP, traps=[InvalidOperation])

    def read(self, raw: msgspec.Raw) -> Decimal:
        """The number."""
        return self._rounded(_decimal(raw))

    def column(self, values: Sequence[Any]) -> pa.Array:
        """The numbers."""
        try:
            found = pa.array(values, self.arrow)
        except (pa.ArrowInvalid, OverflowError):  # more digits than the scale
            found = None
        if found is None or found.null_count != values.count(None):  # Arrow takes "NaN" for null
            found = pa.array([None if value is None else self._rounded(value) for value in values], self.arrow)
        return found

    def _rounded(self, number: Decimal) -> Decimal:
        if not number.is_finite():
            raise ValueError(f"{number} is no number")
        return number.quantize(self._unit, context=self._context)


class TimestampConverter(JsonConverter):
    """Times in ISO 8601; UTC unless they name a zone."""

    def __init__(self, kind: DataType) -> None:
        super().__init__(kind, str)

    def read(self, raw: msgspec.Raw) -> str:
        """Decode a time, as text in the one format that Arrow always accepts."""
        moment = _EPOCH + timedelta(microseconds=_microseconds(_text(raw)))
        if self.arrow.tz is None:
            moment = moment.replace(tzinfo=None)
        return moment.isoformat()

    def column(self, values: Sequence[Any]) -> pa.Array:
        """The times."""
        try:
            found = pa.array(values, pa.string()).cast(self.arrow)
        except pa.ArrowInvalid:  # in mixed formats, or in one that Arrow does not support
            numbers = [None if value is None else _microseconds(value) for value in values]
            return pa.array(numbers, pa.int64()).view(self.arrow)
        return _within(found, pa.int64(), _FIRST_US)


class DateConverter(JsonConverter):
    """Dates in ISO 8601; of a time, the day."""

    def __init__(self, kind: DataType) -> None:
        super().__init__(kind, str)

    def read(self, raw: msgspec.Raw) -> str:
        """Decode a date, as text in the one format that Arrow always accepts."""
        return datetime.fromisoformat(_text(raw)).date().isoformat()

    def column(self, values: Sequence[Any]) -> pa.Array:
        """The dates."""
        try:
            found = pa.array(values, pa.string()).cast(self.arrow)
        except pa.ArrowInvalid:
            days = [None if value is None else datetime.fromisoformat(value).date() for value in values]
            return pa.array(days, self.arrow)
        return _within(found, pa.int32(), _FIRST_DAY)


class ArrayConverter(JsonConverter):
    """Arrays."""

    def __init__(self, kind: ArrayType) -> None:
        self._item = converter_for(kind.elementType)
        self._nullable = kind.containsNull
        super().__init__(kind, list[_optional(self._item, self._nullable)])  # type: ignore[misc]

    def read(self, raw: msgspec.Raw) -> list[Any]:
        """The items."""
        return [read_or_null(self._item, self._nullable, item) for item in _raw_items(raw)]

    def column(self, values: Sequence[Any]) -> pa.Array:
        """The arrays."""
        items = self._item.column(list(chain.from_iterable(filter(None, values))))
        return pa.ListArray.from_arrays(_edges(values), items, type=self.arrow, mask=_absent(values))


class MapConverter(JsonConverter):
    """Objects with arbitrary fields."""

    def __init__(self, kind: MapType) -> None:
        if not isinstance(kind.keyType, StringType):
            raise InvalidArgument(f"names in JSON are text: there can be no {kind.simpleString()}")
        self._name, self._item = converter_for(kind.keyType), converter_for(kind.valueType)
        self._nullable = kind.valueContainsNull
        super().__init__(kind, dict[str, _optional(self._item, self._nullable)])  # type: ignore[misc]

    def read(self, raw: msgspec.Raw) -> dict[str, Any]:
        """Names and items."""
        return {name: read_or_null(self._item, self._nullable, item) for name, item in _raw_object(raw).items()}

    def column(self, values: Sequence[Any]) -> pa.Array:
        """The maps."""
        there = [value for value in values if value]
        names = self._name.column(list(chain.from_iterable(there)))
        items = self._item.column(list(chain.from_iterable(value.values() for value in there)))
        return pa.MapArray.from_arrays(_edges(values), names, items, type=self.arrow, mask=_absent(values))


class StructConverter(JsonConverter):
    """Objects with fixed fields; other fields are ignored."""

    def __init__(self, kind: StructType) -> None:
        names = kind.fieldNames()
        if len(set(names)) < len(names):
            raise InvalidArgument(f"a field is there twice in {kind.simpleString()}")
        self._fields = [(field.name, converter_for(field.dataType), field.nullable) for field in kind.fields]
        # Names in JSON need not be valid Python identifiers.
        own = [f"f{at}" for at in range(len(names))]
        members: list[Any] = []
        for at, (_, converter, nullable) in zip(own, self._fields, strict=True):
            wanted = _optional(converter, nullable)
            members.append((at, wanted, None) if nullable else (at, wanted))
        self._type = msgspec.defstruct(
            "StructConverter", members, rename=dict(zip(own, names, strict=True)), gc=False, kw_only=True
        )
        self._getters = [attrgetter(at) for at in own]
        self._own = own
        self._absent = self._type(**dict.fromkeys(own))
        super().__init__(kind, self._type)

    def read(self, raw: msgspec.Raw) -> Any:
        """The object."""
        found = _raw_object(raw)
        values = [
            read_or_null(converter, nullable, found.get(name, _NULL)) for name, converter, nullable in self._fields
        ]
        return self._type(**dict(zip(self._own, values, strict=True)))

    def column(self, values: Sequence[Any]) -> pa.Array:
        """The objects, column by column."""
        if not self._fields:
            return pa.array([None if value is None else {} for value in values], self.arrow)
        mask = _absent(values)
        if mask is not None:
            values = [self._absent if value is None else value for value in values]
        columns = [
            converter.column(list(map(getter, values)))
            for (_, converter, _), getter in zip(self._fields, self._getters, strict=True)
        ]
        return pa.StructArray.from_arrays(columns, fields=list(self.arrow), mask=mask)


_NULL = msgspec.Raw(b"null")

_CONVERTERS: dict[type[DataType], Callable[[Any], JsonConverter]] = {
    StructType: StructConverter,
    ArrayType: ArrayConverter,
    MapType: MapConverter,
    StringType: StringConverter,
    LongType: lambda kind: IntegerConverter(kind, 64),
    IntegerType: lambda kind: IntegerConverter(kind, 32),
    ShortType: lambda kind: IntegerConverter(kind, 16),
    ByteType: lambda kind: IntegerConverter(kind, 8),
    DoubleType: FloatConverter,
    FloatType: FloatConverter,
    BooleanType: lambda kind: JsonConverter(kind, bool),
    DecimalType: DecimalConverter,
    BinaryType: BinaryConverter,
    TimestampType: TimestampConverter,
    TimestampNTZType: TimestampConverter,
    DateType: DateConverter,
}


def converter_for(kind: DataType) -> JsonConverter:
    """Return the converter for a Spark type; raises InvalidArgument if JSON cannot be converted to it."""
    for known, make in _CONVERTERS.items():
        if isinstance(kind, known):
            return make(kind)
    raise InvalidArgument(
        f"JSON cannot be read as {kind.simpleString()}; give it in value.schema as string, and convert it in the query"
    )


def read_or_null(converter: JsonConverter, nullable: bool, raw: msgspec.Raw) -> Any:
    """Decode a JSON value or null; raises CONVERSION_ERRORS if it does not fit."""
    if bytes(raw).strip() != b"null":
        return converter.read(raw)
    if nullable:
        return None
    raise ValueError("null, where something has to be")


def _optional(converter: JsonConverter, nullable: bool) -> Any:
    return converter.decoded | None if nullable else converter.decoded


def _edges(values: Sequence[Any]) -> pa.Array:
    return pa.array([0, *accumulate(len(value) if value else 0 for value in values)], pa.int32())


def _absent(values: Sequence[Any]) -> pa.Array | None:
    return pa.array([value is None for value in values]) if None in values else None


def _microseconds(text: str) -> int:
    moment = datetime.fromisoformat(text)
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    time_us = (moment - _EPOCH) // _MICROSECOND
    if not _FIRST_US <= time_us <= _LAST_US:
        raise ValueError(f"{text} is not of our time")
    return time_us


def _within(found: pa.Array, plain: pa.DataType, first: int) -> pa.Array:
    """Return the times; raises ValueError for one before the year 1, which Python cannot represent."""
    if len(found) and (least := pc.min(found.view(plain)).as_py()) is not None and least < first:
        raise ValueError("a time before the year 1")
    return found
