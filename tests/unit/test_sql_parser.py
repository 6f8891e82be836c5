"""What the command line understands of SQL, and how it prints rows; without Spark."""

import os
from contextlib import suppress
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.cli.main import main
from headrace.cli.spark.sql_parser import in_need_of_quotes, named_columns, named_topics, statements
from headrace.cli.spark.sql_rows import CsvRows, JsonRows, TableRows, fitted, padded_to
from headrace.cli.terminal.output import Output

TOPICS = ["orders", "eu.orders", "Logs", "logs", "a-b", "t/x", "select"]


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("select * from orders", ["orders"]),
        ("select * from ORDERS o join `a-b` b", ["orders", "a-b"]),
        ("select 'orders' from `eu.orders` -- logs", ["eu.orders"]),
        ('/* orders */ select "orders" from `t/x`', ["t/x"]),
        ("select * from Logs", ["Logs"]),
        ("select * from LOGS", ["Logs", "logs"]),
        ("with logs as (select 1) select * from logs", ["logs"]),
        ("select orders_2 from nothing", []),
        ("SHOW  TABLES", TOPICS),
        ("select `select`", ["select"]),
    ],
)
def test_topics_that_are_named(text: str, wanted: list[str]) -> None:
    found = named_topics(text, TOPICS)
    assert [name for name in found if name != "select" or name in wanted] == wanted


COLUMNS = ["partition", "offset", "key", "value", "_corrupt"]


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("select count(*) from orders", []),
        ("select count( /* all */ * ) n from orders", []),
        ("SELECT Value.city, max(o.OFFSET) from orders o group by all", ["offset", "value"]),
        (
            "with a as (select `key` k from orders) select k || '!' from a; select _corrupt from orders",
            ["key", "_corrupt"],
        ),
        ("select 'value' from orders", ["value"]),  # one too many does no harm
        ("select * from orders", None),
        ("select o.* from orders o", None),
        ("select partition * 2 from orders", None),
        ("select count(*) from (from orders)", None),
        ("select count(*) from orders; describe orders", None),
        ("from orders", None),
        ("table orders", None),
        ("select count(*) from (table orders)", None),
        ("select count(*) from a natural join b", None),
        ("select partition from orders pivot (count(offset) for partition in (0, 1))", None),
        ("with a as (select 1 |> from orders) select 2", None),
    ],
)
def test_columns_that_are_named(text: str, wanted: list[str] | None) -> None:
    assert named_columns(text, COLUMNS) == wanted


def test_names_that_need_quotes() -> None:
    assert in_need_of_quotes("select * from eu.orders join a-b", TOPICS) == ["eu.orders", "a-b"]
    assert in_need_of_quotes("select * from `eu.orders` where x = 'a-b'", TOPICS) == []


def test_statements() -> None:
    assert statements(" ;; select 1 ; /* ; */ ; select '\\';' ;") == ["select 1", "select '\\';'"]
    assert statements("select `a;b`; -- the end") == ["select `a;b`"]


@given(st.text(alphabet="ab;'\"`-/*\\ \n"))
def test_any_text_is_taken_apart(text: str) -> None:
    parts = statements(text)
    assert "".join(";".join(parts).split()) in "".join(text.split()) or len(parts) > 1
    named_topics(text, TOPICS)
    named_columns(f"select {text}", COLUMNS)
    in_need_of_quotes(text, TOPICS)


class Printed(Output):
    """Keeps what would be printed."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def flush(self) -> None:
        self.lines += bytes(self._waiting).decode().splitlines()
        self._waiting.clear()


ROW: list[Any] = [
    1,
    None,
    "grün\n",
    b"\xff",
    datetime(2026, 1, 31, 12, tzinfo=UTC),
    date(2026, 1, 31),
    Decimal("1.50"),
    [1, {"a": None}],
    True,
]
NAMES = ["n", "null", "text", "raw", "at", "day", "sum", "list", "ok"]


def test_a_table() -> None:
    out = Printed()
    table = TableRows(out, width=0)
    table.print(["name", "n", "größe"], iter([["a", 1, None], ["日本", 1234567, 1.5]]))
    table.print(["name", "n", "größe"], [["later", 2, 3.0]])
    table.close()
    assert out.lines == [
        "name        n  größe",
        "----  -------  -----",
        "a           1   NULL",
        "日本  1234567    1.5",
        "lat…        2    3.0",
        "(3 rows)",
    ]


def test_a_table_told_again() -> None:
    out = Printed()
    table = TableRows(out, width=0)
    table.print(["n"], [[1]], True)
    table.print(["n"], [[22], [333]], True)
    assert out.lines == ["n", "-", "1", "", "  n", "---", " 22", "333"]
    assert table.count == 2


def test_a_table_without_rows_and_columns() -> None:
    out = Printed()
    table = TableRows(out, width=0)
    table.print(["n", "long name"], [])
    table.close()
    assert out.lines == ["n  long name", "-  ---------", "(0 rows)"]


def test_every_kind_of_value() -> None:
    out = Printed()
    TableRows(out, width=0).print(NAMES, [ROW])
    line = r"1  NULL  grün\n  \xff  2026-01-31 12:00:00Z  2026-01-31  1.50  [1,{\"a\":null}]  true".replace(r"\"", '"')
    assert out.lines[2] == line
    out = Printed()
    JsonRows(out).print([*NAMES, "n"], [[*ROW, 2]])
    assert out.lines == [
        '{"n":1,"null":null,"text":"grün\\n","raw":"/w==","at":"2026-01-31T12:00:00Z","day":"2026-01-31","sum":1.50,'
        '"list":[1,{"a":null}],"ok":true,"n_2":2}'
    ]
    out = Printed()
    CsvRows(out).print(NAMES, [ROW])
    CsvRows(out).print(["a"], [])
    CsvRows(out).print(["a", "b"], [["", None]])
    assert out.lines == [
        "n,null,text,raw,at,day,sum,list,ok",
        '1,,"grün',
        '",/w==,2026-01-31 12:00:00Z,2026-01-31,1.50,"[1,{""a"":null}]",true',
        "a",
        "a,b",
        '"",',
    ]


def test_no_quotes_of_json_in_tables_and_csv() -> None:
    row = [timedelta(days=1), time(12, 34, 56), b"a", [timedelta(days=1)], Path("/a")]
    out = Printed()
    CsvRows(out).print(list("abcde"), [row])
    assert out.lines[1] == 'P1D,12:34:56,YQ==,"[""P1D""]",/a'
    out = Printed()
    TableRows(out, width=0).print(list("abcde"), [row])
    assert out.lines[2].split() == ["P1D", "12:34:56", "a", '["P1D"]', "/a"]


@pytest.mark.parametrize(
    ("arguments", "wanted", "unwanted"),
    [
        (["sql", "select 1", "--trigger", "1s"], "--trigger needs --follow", "Java"),
        (["sql", "select 1", "--from", "noon"], "give earliest, latest, a time", "an offset"),
        (["archive", "restore", "a", "--from", "latest"], "give an offset, a time", "earliest"),
        (["archive", "restore", "a", "--until", "noon"], "give an offset, a time", "earliest"),
    ],
)
def test_errors_offer_what_help_does(
    capfd: pytest.CaptureFixture[str], arguments: list[str], wanted: str, unwanted: str
) -> None:
    with suppress(SystemExit):
        assert main(arguments) == 2
    said = capfd.readouterr().err.rpartition("error: ")[2]
    assert wanted in said
    assert unwanted not in said


@given(st.lists(st.integers(1, 200), min_size=1, max_size=10), st.integers(10, 200))
def test_columns_fit_if_they_can(widths: list[int], room: int) -> None:
    found = fitted(widths, room)
    assert all(0 < now <= before for now, before in zip(found, widths, strict=True))
    total = sum(found) + 2 * (len(found) - 1)
    assert total <= room or max(found) <= 6
    assert found == widths or total >= room or max(found) <= 6


@given(st.text(alphabet="aé日\u0301", max_size=20), st.integers(1, 10), st.booleans())
def test_padding(text: str, width: int, right: bool) -> None:
    padded = padded_to(text, width, right=right)
    taken = sum({"日": 2, "\u0301": 0}.get(sign, 1) for sign in padded)
    assert taken == width


def test_lines_go_to_stdout_as_bytes(capfd: pytest.CaptureFixture[str]) -> None:
    JsonRows(Output()).print(["a"], [[1]])
    assert capfd.readouterr().out == f'{{"a":1}}{os.linesep}'
