"""Statements in a session: what they give, and what is said when they are wrong."""

import threading
from collections.abc import Callable
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession
from tests.spark.conftest import SparkBroker

from headrace.spark.errors import QueryFailed
from headrace.spark.sql.statements import InvalidStatement, PathInUse, Rows, ask, follow, rows_of, write_parquet
from headrace.spark.sql.tables import register

PATIENCE_S = 120


def test_rows_are_plain_values(spark: SparkSession) -> None:
    names, rows = rows_of(
        ask(
            spark,
            "select 1 as n, cast(null as string) as nothing, timestamp'2026-01-31 12:00:00Z' as at, "
            "date'2026-01-31' as day, 1.50 as price, x'ff' as raw, map(2, timestamp'2026-01-31 12:00:00Z') as pairs, "
            "array(named_struct('at', timestamp'2026-01-31 12:00:00Z', 'x', 1)) as deep, parse_json('{\"a\":1}') as v, "
            "timestamp_ntz'2026-01-31 12:00:00' as local",
        ),
        10,
    )
    noon = datetime(2026, 1, 31, 12, tzinfo=UTC)
    assert names == ["n", "nothing", "at", "day", "price", "raw", "pairs", "deep", "v", "local"]
    [row] = list(rows)
    found = list(row)
    # PySpark tells times in the zone of the process: the command line makes that UTC, these tests have it anyway.
    assert found[2].utcoffset().total_seconds() == 0
    noon = found[2]
    assert found == [
        *(1, None, noon, date(2026, 1, 31), Decimal("1.50"), b"\xff", {"2": noon}),
        *([{"at": noon, "x": 1}], {"a": 1}, datetime(2026, 1, 31, 12)),
    ]


def test_times_of_every_year(spark: SparkSession) -> None:
    texts = ("0001-01-01 00:00:00", "0001-01-03 00:00:00.5", "1582-10-14 23:59:59", "9999-12-31 23:59:59.999999")
    columns = ", ".join(
        f"timestamp'{text}Z' as a{at}, timestamp_ntz'{text}' as b{at}, date'{text[:10]}' as c{at}, "
        f"array(named_struct('at', timestamp'{text}Z')) as d{at}"
        for at, text in enumerate(texts)
    )
    for limit in (None, 5):
        [row] = list(rows_of(ask(spark, f"select {columns}"), limit).rows)
        for at, text in enumerate(texts):
            moment = datetime.fromisoformat(text)
            aware = moment.replace(tzinfo=UTC)
            assert list(row[at * 4 : at * 4 + 4]) == [aware, moment, moment.date(), [{"at": aware}]]
    [row] = list(rows_of(ask(spark, "select timestamp'+10000-01-01 00:00:00Z' as a, date'+12345-01-01' as b"), 5).rows)
    assert list(row) == ["+10000-01-01 00:00:00", "+12345-01-01"]


def test_intervals_and_keys_of_every_kind(spark: SparkSession) -> None:
    for column, wanted in {
        "interval '3' month": "P3M",
        "interval '-1-2' year to month": "-P1Y2M",
        "cast(null as interval month)": None,
        "array(interval '2' year, null)": ["P2Y", None],
        "make_interval(1, 2, 0, 3, -4, 0, -7.5)": "P1Y2M3DT-4H-7.5S",
        "make_interval()": "PT0S",
        "interval '1 02:00:00' day to second": timedelta(days=1, hours=2),
        "map(interval '3' month, interval '1' year)": {"P3M": "P1Y"},
        "map(named_struct('a', 1, 'day', date'2026-01-31'), 'x')": {'{"a":1,"day":"2026-01-31"}': "x"},
        "map(array(1, 2), named_struct('a', 1))": {"[1, 2]": {"a": 1}},
        "map(named_struct('a', array(1)), 'x')": {"{[1]}": "x"},
        "map(x'ff', 1)": {"/w==": 1},
        "map(true, 1)": {"true": 1},
        "map(timestamp'2026-01-31 12:00:00Z', 1)": {"2026-01-31T12:00:00Z": 1},
        "map(interval '1' day, 1)": {"P1D": 1},
    }.items():
        [row] = list(rows_of(ask(spark, f"select {column}"), 5).rows)
        assert list(row) == [wanted], column
    assert [list(row) for row in rows_of(ask(spark, "select interval '3' month"), None).rows] == [["P3M"]]


def test_columns_of_the_same_name(spark: SparkSession) -> None:
    names, rows = rows_of(
        ask(spark, "select 1 as a, timestamp'2026-01-01 00:00:00Z' as a, named_struct('b', 1, 'b', 2) as a"), 5
    )
    assert names == ["a", "a", "a"]
    assert list(next(rows)) == [1, datetime(2026, 1, 1, tzinfo=UTC), {"b": 1, "b_2": 2}]


def test_limits(spark: SparkSession) -> None:
    frame = ask(spark, "select id from range(10)")
    assert sorted(row[0] for row in rows_of(frame, None).rows) == list(range(10))
    assert len(list(rows_of(frame, 3).rows)) == 3


@pytest.mark.parametrize(
    ("statement", "wanted"),
    [
        ("select * from nowhere", "The table or view `nowhere` cannot be found."),
        ("selec 1", "Syntax error at or near 'selec'."),
        ("select missing from range(1)", "with name `missing` cannot be resolved."),
        ("select * from a-b", "must be back quoted as: `a-b`"),
    ],
)
def test_wrong_statements(spark: SparkSession, statement: str, wanted: str) -> None:
    with pytest.raises(InvalidStatement) as caught:
        ask(spark, statement)
    text = str(caught.value)
    assert wanted in text
    assert "line 1, position " in text
    for noise in ("SQLSTATE", "\n", "Project", "org.apache", "== SQL"):
        assert noise not in text


def test_failing_queries(spark: SparkSession, broker: SparkBroker, topic: str) -> None:
    with pytest.raises(QueryFailed, match=r"^Division by zero\..* \(line 1, position 8\)") as caught:
        list(rows_of(ask(spark, "select 1 / (id - id) from range(3)"), 5).rows)
    assert "org.apache" not in str(caught.value)
    broker.bus.create_topic(topic)
    register(spark, broker.address, tables=[topic])
    broker.bus.delete_topic(topic)
    with pytest.raises(QueryFailed, match=rf"^[^\n]*{topic}[^\n]*$"):
        list(rows_of(ask(spark, f"select * from `{topic}`"), None).rows)


def test_parquet(spark: SparkSession, tmp_path: Path) -> None:
    frame = ask(spark, "select id, id * 2 as twice from range(10)")
    out = str(tmp_path / "out")
    assert write_parquet(frame, out, None, overwrite=False) == 10
    with pytest.raises(PathInUse):
        write_parquet(frame, out, None, overwrite=False)
    assert write_parquet(frame, out, 4, overwrite=True) == 4
    assert spark.read.parquet(out).columns == ["id", "twice"]


class Told:
    """What a query hands over."""

    def __init__(self) -> None:
        self.rows: list[list[Any]] = []
        self.whole: list[bool] = []
        self._changed = threading.Condition()

    def __call__(self, found: Rows, whole: bool) -> None:
        rows = [list(row) for row in found.rows]
        with self._changed:
            self.rows = rows if whole else self.rows + rows
            self.whole.append(whole)
            self._changed.notify_all()

    def wait(self, wanted: Callable[[list[list[Any]]], bool]) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: wanted(self.rows), PATIENCE_S), self.rows


@pytest.mark.parametrize(
    ("statement", "first", "then", "whole"),
    [
        ("select value.n from `{}`", [[1], [2]], [[1], [2], [2]], False),
        ("select value.n, count(*) from `{}` group by 1", [[1, 1], [2, 1]], [[1, 1], [2, 1], [2, 2]], False),
        ("select value.n, count(*) from `{}` group by 1 order by 1", [[1, 1], [2, 1]], [[1, 1], [2, 2]], True),
    ],
    ids=["append", "update", "complete"],
)
def test_following(
    spark: SparkSession,
    broker: SparkBroker,
    topic: str,
    tmp_path: Path,
    statement: str,
    first: list[list[Any]],
    then: list[list[Any]],
    whole: bool,
) -> None:
    broker.bus.create_topic(topic)
    broker.bus.publish_many(topic, [b'{"n": 1}', b'{"n": 2}'])
    options = {"startingOffsets": "earliest"}
    register(spark, broker.address, tables=[topic], value_format="auto", stream=True, options=options)
    told = Told()
    following = follow(ask(spark, statement.format(topic)), 0.1, str(tmp_path / "checkpoint"), told)
    try:
        told.wait(lambda rows: sorted(rows) == first)
        broker.bus.publish(topic, b'{"n": 2}')
        told.wait(lambda rows: sorted(rows) == then)
        assert not following.wait(0.1)
    finally:
        following.stop()
    assert set(told.whole) == {whole}


def test_what_cannot_be_followed(spark: SparkSession, tmp_path: Path) -> None:
    with pytest.raises(InvalidStatement, match="no topic"):
        follow(ask(spark, "select 1"), 1.0, str(tmp_path), lambda *_: None)
