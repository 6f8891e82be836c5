"""JSON values as columns: what fits, what is coerced, what is corrupt, and that nothing ever fails."""

import base64
from collections.abc import Sequence
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
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
    StructField,
    StructType,
    TimestampNTZType,
    TimestampType,
    VariantType,
)

from headrace.model.errors import InvalidArgument
from headrace.spark.datasource import checked_schema
from headrace.spark.source.json_inference import all_objects, ddl
from headrace.spark.source.json_values import JsonValues, inferred_type

LEAVES: dict[DataType, st.SearchStrategy[Any]] = {
    LongType(): st.integers(-(2**63), 2**63 - 1),
    IntegerType(): st.integers(-(2**31), 2**31 - 1),
    ShortType(): st.integers(-(2**15), 2**15 - 1),
    ByteType(): st.integers(-128, 127),
    DoubleType(): st.floats(allow_nan=False, allow_infinity=False),
    FloatType(): st.floats(allow_nan=False, allow_infinity=False, width=32),
    StringType(): st.text(),
    BooleanType(): st.booleans(),
    DecimalType(12, 3): st.decimals(-1000, 1000, places=3).map(str),
    BinaryType(): st.binary().map(lambda plain: base64.b64encode(plain).decode()),
    DateType(): st.dates().map(str),
    TimestampType(): st.datetimes(timezones=st.just(UTC)).map(datetime.isoformat),
    TimestampNTZType(): st.datetimes().map(datetime.isoformat),
}
NAMES = st.sampled_from(["a", "b", "a b", "class", "f0", "", "`", "é", "type"])


def nested(inner: st.SearchStrategy[DataType]) -> st.SearchStrategy[DataType]:
    fields = st.lists(st.tuples(NAMES, inner, st.booleans()), max_size=4, unique_by=lambda field: field[0])
    return (
        st.builds(ArrayType, inner, st.booleans())
        | st.builds(lambda item, nullable: MapType(StringType(), item, nullable), inner, st.booleans())
        | fields.map(lambda found: StructType([StructField(*field) for field in found]))
    )


KINDS = st.recursive(st.sampled_from(list(LEAVES)), nested, max_leaves=6)
SCHEMAS = KINDS.map(lambda kind: kind if isinstance(kind, StructType) else StructType([StructField("a", kind)]))
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.one_of(*LEAVES.values()),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=4),
    max_leaves=8,
)
BYTES = (
    st.none()
    | st.binary(max_size=30)
    | JSON.map(msgspec.json.encode)
    | st.dictionaries(NAMES, JSON, max_size=5).map(msgspec.json.encode)
    | st.sampled_from([b"{" * 100_000, b'{"a":' * 100_000, b"[" * 100_000, b'{"a":"\xff"}', b'{"a":"\\ud800"}'])
    | st.sampled_from(
        [b'{"a":1e999}', b'{"a":1e99999999999}', b'{"a":"0000-01-01"}', b'{"a":"0001-01-01T00:00:00+05"}']
    )
)


def columns(kind: StructType, values: Sequence[bytes | None]) -> tuple[list[Any], list[Any]]:
    """The columns, after a look at their types; one by one they are the same."""
    found = JsonValues(kind)(values)
    assert found["value"].type == to_arrow_type(kind, timezone="UTC")
    found["value"].validate(full=True)
    assert len(found["value"]) == len(found["_corrupt"]) == len(values)
    return found["value"].to_pylist(), found["_corrupt"].to_pylist()


def fitting(kind: DataType) -> st.SearchStrategy[Any]:
    """Values that fit a kind."""
    if isinstance(kind, StructType):
        return st.fixed_dictionaries({field.name: fitting(field.dataType) for field in kind.fields})
    if isinstance(kind, ArrayType):
        return st.lists(fitting(kind.elementType), max_size=3)
    if isinstance(kind, MapType):
        return st.dictionaries(st.text(max_size=3), fitting(kind.valueType), max_size=3)
    return LEAVES[kind]


@given(SCHEMAS, st.lists(BYTES, max_size=6))
@example(StructType([StructField("a", TimestampType())]), [b'{"a":"0001-01-01T00:00:00+05"}', b'{"a":"nix"}'])
@example(StructType([StructField("a", DecimalType(38, 38))]), [b'{"a":1e400}', b'{"a":"NaN"}', b'{"a":0.5}'])
def test_nothing_ever_fails(kind: StructType, values: list[bytes | None]) -> None:
    rows, corrupt = columns(kind, values)
    for value, row, text in zip(values, rows, corrupt, strict=True):
        assert (row is None) == (value is None or text is not None)
        if text is not None:
            assert value is not None
            assert text == value.decode("utf-8", "replace")
    for at, value in enumerate(values):  # what a value becomes does not depend on those beside it
        alone, alone_corrupt = columns(kind, [value])
        assert (repr(alone[0]), alone_corrupt[0]) == (repr(rows[at]), corrupt[at])


@given(st.data(), SCHEMAS)
def test_what_fits_is_never_corrupt(data: st.DataObject, kind: StructType) -> None:
    values = data.draw(st.lists(fitting(kind).map(msgspec.json.encode), min_size=1, max_size=4))
    rows, corrupt = columns(kind, values)
    assert corrupt == [None] * len(values)
    assert None not in rows


@pytest.mark.parametrize(
    ("kind", "text", "wanted"),
    [
        (LongType(), "9223372036854775807", 2**63 - 1),
        (LongType(), "9223372036854775808", ...),
        (LongType(), "5.0", 5),
        (LongType(), "5.5", ...),
        (LongType(), '"5"', ...),
        (LongType(), "true", ...),
        (ByteType(), "128", ...),
        (ShortType(), "-32768", -32768),
        (DoubleType(), "3", 3.0),
        (DoubleType(), '"-Infinity"', float("-inf")),
        (DoubleType(), '"3"', ...),
        (StringType(), "1.50", "1.50"),
        (StringType(), '{"b": [1, 2]}', '{"b": [1, 2]}'),
        (StringType(), "true", "true"),
        (StringType(), "tru", ...),
        (StringType(), '"\\u00e9"', "é"),
        (BooleanType(), "false", False),
        (BooleanType(), "0", ...),
        (DecimalType(5, 2), "1.255", Decimal("1.26")),
        (DecimalType(5, 2), '"12.5"', Decimal("12.50")),
        (DecimalType(5, 2), "12345", ...),
        (DecimalType(5, 2), '"NaN"', ...),
        (BinaryType(), '"aGk="', b"hi"),
        (BinaryType(), '"a*"', ...),
        (DateType(), '"2026-01-31"', date(2026, 1, 31)),
        (DateType(), '"2026-01-31T10:00:00Z"', date(2026, 1, 31)),
        (DateType(), "20260131", ...),
        (TimestampType(), '"2026-01-31T10:00:00+02:00"', datetime(2026, 1, 31, 8, tzinfo=UTC)),
        (TimestampType(), '"2026-01-31 10:00:00.123456789"', datetime(2026, 1, 31, 10, 0, 0, 123456, tzinfo=UTC)),
        (TimestampType(), '"2026-01-31"', datetime(2026, 1, 31, tzinfo=UTC)),
        (TimestampType(), "1769853600", ...),
        (TimestampType(), '"soon"', ...),
        (TimestampNTZType(), '"2026-01-31T10:00:00"', datetime(2026, 1, 31, 10)),
        (ArrayType(LongType()), "[1, null]", [1, None]),
        (ArrayType(LongType(), containsNull=False), "[1, null]", ...),
        (MapType(StringType(), LongType()), '{"x": 1, "y": null}', [("x", 1), ("y", None)]),
        (MapType(StringType(), LongType()), "[]", ...),
        (StructType([StructField("x y", LongType())]), '{"x y": 1, "more": 2}', {"x y": 1}),
        (StructType([StructField("x", LongType())]), "{}", {"x": None}),
        (StructType([StructField("x", LongType(), nullable=False)]), "{}", ...),
        (StructType([]), '{"x": 1}', {}),
    ],
    ids=str,
)
def test_coercion(kind: DataType, text: str, wanted: Any) -> None:
    value = f'{{"a": {text}, "other": [1]}}'.encode()
    rows, corrupt = columns(StructType([StructField("a", kind)]), [value, None, b"{}", b"[]"])
    assert rows[1:] == [None, {"a": None}, None]
    assert corrupt[1:] == [None, None, "[]"]
    assert (rows[0], corrupt[0]) == ((None, value.decode()) if wanted is ... else ({"a": wanted}, None))


def test_one_that_does_not_fit_leaves_the_others_alone() -> None:
    kind = StructType([StructField("at", TimestampType()), StructField("n", LongType())])
    good = [b'{"at":"2026-01-01T00:00:00Z","n":%d}' % at for at in range(1000)]
    values = [*good[:500], b'{"at":"never","n":1}', *good[500:]]
    rows, corrupt = columns(kind, values)
    assert [row["n"] for row in rows if row] == list(range(1000))
    assert corrupt.index('{"at":"never","n":1}') == rows.index(None) == 500


@pytest.mark.parametrize("kind", [VariantType(), MapType(LongType(), StringType())], ids=str)
def test_kinds_that_json_cannot_be(kind: DataType) -> None:
    with pytest.raises(InvalidArgument):
        JsonValues(StructType([StructField("a", kind)]))


def test_inferred_type() -> None:
    samples = [
        b'{"id": 1, "total": 2, "when": "2026-01-01", "who": {"name": "ann"}, "tags": [], "mixed": 1}',
        b'{"id": 2, "total": 2.5, "ok": true, "who": {"age": 7}, "tags": [{"x": null}], "mixed": "a", "none": null}',
        b'{"id": 3, "total": null, "large": 9223372036854775808, "empty": {}, "a b": [[1], [2.5]]}',
        b"no JSON",
        None,
        b"[1]",
    ]
    assert ddl(inferred_type(samples)) == (
        "`id` bigint, `total` double, `when` string, `who` struct<`name`: string, `age`: bigint>, "
        "`tags` array<struct<`x`: string>>, `mixed` string, `ok` boolean, `none` string, `large` string, "
        "`empty` string, `a b` array<array<double>>"
    )
    rows, corrupt = columns(inferred_type(samples), samples)
    assert [row is None for row in rows] == [False, False, False, True, True, True]
    assert corrupt == [None, None, None, "no JSON", None, "[1]"]
    assert not all_objects(samples)
    assert all_objects([b"{}", None])
    assert not all_objects([None])


@given(st.lists(st.dictionaries(NAMES, JSON, max_size=5).map(msgspec.json.encode), min_size=1, max_size=4))
def test_samples_fit_what_was_inferred(samples: list[bytes]) -> None:
    _, corrupt = columns(inferred_type(samples), samples)
    assert corrupt == [None] * len(samples)


@pytest.mark.parametrize("samples", [[], [None, b"", b"1", b"\xff", b'{"a":' * 100_000]])
def test_nothing_to_infer_from(samples: list[bytes | None]) -> None:
    with pytest.raises(InvalidArgument, match=r"value\.schema"):
        inferred_type(samples)


def test_names_that_are_data() -> None:
    many = [msgspec.json.encode({f"k{at * 1000 + one}": one for one in range(1000)}) for at in range(3)]
    with pytest.raises(InvalidArgument, match="map<string"):
        inferred_type(many)


def test_what_json_cannot_be_is_refused_before_anything_is_read() -> None:
    schema = StructType([StructField("value", StructType([StructField("a", VariantType())]))])
    with pytest.raises(InvalidArgument, match="cannot be read as variant"):
        checked_schema(schema)
