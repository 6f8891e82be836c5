"""`headrace sql`: in this process with the session there is, and as a process of its own."""

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from pyspark.sql import SparkSession
from tests.known import ENVIRONMENT
from tests.spark.conftest import SparkBroker, java_problem

from headrace.cli.main import main
from headrace.spark import local_python

PATIENCE_S = 240

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def shop(shared_broker: SparkBroker) -> SparkBroker:
    """A topic of JSON and one of text."""
    bus = shared_broker.bus
    bus.create_topic("bills", partitions=2)
    for at in range(10):
        value = {"id": at, "city": "Bern" if at % 2 else "Köln", "total": at * 1.5}
        bus.publish("bills", json.dumps(value).encode(), key=f"k{at % 2}", partition=at % 2)
    bus.create_topic("plain.notes")
    bus.publish_many("plain.notes", [b"first", b"second"])
    return shared_broker


@pytest.fixture
def run(spark: SparkSession, shop: SparkBroker, capfd: pytest.CaptureFixture[str]) -> Run:
    """Runs the command in this process; its session is the one that there is."""
    assert spark is SparkSession.getActiveSession()

    def running(*arguments: str) -> tuple[int, str, str]:
        capfd.readouterr()
        code = main(["sql", *arguments, "--connect", shop.address])
        out, err = capfd.readouterr()
        return code, out, "".join(line for line in err.splitlines(keepends=True) if "[Stage" not in line)

    return running


def test_a_table(run: Run) -> None:
    code, out, err = run("select value.city, count(*) as n, sum(value.total) as total from bills group by 1 order by 1")
    assert (code, err) == (0, "")
    assert out == "city  n  total\n----  -  -----\nBern  5   37.5\nKöln  5   30.0\n(2 rows)\n"


def test_more_rows_than_asked_for(run: Run) -> None:
    code, out, err = run("select id from range(0, 5) order by id", "--limit", "2")
    assert (code, out, err) == (0, "id\n--\n 0\n 1\n(first 2 rows)\n", "")


def test_forms_for_programs(run: Run) -> None:
    query = "select key, value.id, value.total as sum from bills where value.id < 3 order by value.id"
    code, out, _ = run(query, "--json")
    assert code == 0
    assert [json.loads(line) for line in out.splitlines()] == [
        {"key": "k0", "id": 0, "sum": 0.0},
        {"key": "k1", "id": 1, "sum": 1.5},
        {"key": "k0", "id": 2, "sum": 3.0},
    ]
    assert run(query, "--csv")[:2] == (0, "key,id,sum\nk0,0,0.0\nk1,1,1.5\nk0,2,3.0\n")


def test_nothing_is_mixed_up(run: Run) -> None:
    query = "select cast(null as string) as a, '' as a, 'x,\"y\"' as b, timestamp'0001-01-03 00:00:00Z' as at"
    assert run(query, "--csv")[:2] == (0, 'a,a,b,at\n,"","x,""y""",0001-01-03 00:00:00Z\n')
    code, out, _ = run(query, "--json")
    assert code == 0
    assert json.loads(out) == {"a": None, "a_2": "", "b": 'x,"y"', "at": "0001-01-03T00:00:00Z"}
    code, out, _ = run("select timestamp'9999-12-31 23:59:59Z' as at, timestamp'0001-01-01 00:00:00Z' as first")
    assert "9999-12-31 23:59:59Z  0001-01-01 00:00:00Z" in out


def test_only_columns_that_are_named_are_read(run: Run, spark: SparkSession) -> None:
    for query, columns, rows in (
        ("select count(*) as n from bills", ["offset"], '{"n":10}\n'),
        (
            "select headers, priority from bills where offset = 0 and partition = 0",
            None,
            '{"headers":null,"priority":null}\n',
        ),
        ("select count(_corrupt) as n from bills", ["value", "_corrupt"], '{"n":0}\n'),
    ):
        assert run(query, "--json")[:2] == (0, rows)
        assert spark.table("bills").columns == (columns or ["partition", "offset", "headers", "priority"])


def test_values_as_they_are_wanted(run: Run) -> None:
    for arguments, kind in (
        ([], "struct<id:bigint,city:string,total:double>"),
        (["--format", "string"], "string"),
        (["--format", "bills=bytes"], "binary"),
        (["--format", "other=bytes"], "struct<id:bigint,city:string,total:double>"),
        (["--schema", "bills=id int, total decimal(5,2)"], "struct<id:int,total:decimal(5,2)>"),
    ):
        rows = [json.loads(line) for line in run("describe bills", "--json", *arguments)[1].splitlines()]
        assert {row["col_name"]: row["data_type"] for row in rows}["value"] == kind, arguments


def test_files_and_several_statements(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "report.sql"
    file.write_text(
        "create or replace temporary view late as select * from `plain.notes` where offset > 0;\n-- done;\n"
        "select value from late; select count(*) as n from late;"
    )
    code, out, _ = run("-f", str(file), "--json")
    assert (code, out) == (0, '{"value":"second"}\n{"n":1}\n')


def test_parquet(run: Run, spark: SparkSession, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert run("select key, value.* from bills", "--parquet", str(out))[:2] == (0, f"10 rows written to {out}\n")
    assert spark.read.parquet(str(out)).columns == ["key", "id", "city", "total"]
    code, _, err = run("select 1 as n", "--parquet", str(out))
    assert code == 2
    assert "is there already: give --overwrite" in err
    assert run("select 1 as n", "--parquet", str(out), "--overwrite")[:2] == (0, f"1 row written to {out}\n")


@pytest.mark.parametrize(
    ("statement", "wanted"),
    [
        ("selec 1", "Syntax error at or near 'selec'. (line 1, position 1) [invalid_sql]"),
        (
            "select * from bill",
            "The table or view `bill` cannot be found. (line 1, position 15); is the topic bills meant?",
        ),
        ("select * from plain.notes", "write the topic's name as `plain.notes`"),
        ("select * from nothing_at_all", "headrace topic list shows the topics"),
    ],
)
def test_mistakes(run: Run, statement: str, wanted: str) -> None:
    code, out, err = run(statement)
    assert (code, out) == (2, "")
    assert wanted in err
    assert err.startswith("headrace: ")
    assert err.count("\n") == 1


def test_wrong_usage(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for arguments, wanted in (
        ([], "give SQL, or -f FILE"),
        (["select 1", "-f", "x.sql"], "give SQL, or -f FILE"),
        (["select 1", "--overwrite"], "needs --parquet"),
        (["select 1", "--follow", "--parquet", "x"], "headrace pipeline"),
        (["select 1", "--format", "xml"], "no format"),
        (["select 1", "--from", "17"], "earliest, latest or a time"),
        (["select 1", "--conf", "x"], "NAME=VALUE"),
    ):
        assert main(["sql", *arguments]) == 2, arguments
        assert wanted in capfd.readouterr().err
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    assert main(["sql", "select 1"]) == 2
    assert "Spark needs Java 17 or later" in capfd.readouterr().err


def test_following_up_to_a_limit(run: Run, shop: SparkBroker, topic: str) -> None:
    shop.bus.create_topic(topic)
    shop.bus.publish_many(topic, [b'{"n": 1}', b'{"n": 2}'])
    code, out, _ = run(
        f"select value.n from `{topic}`",
        "--follow",
        "--from",
        "earliest",
        "--limit",
        "2",
        "--csv",
        "--trigger",
        "100ms",
    )
    assert (code, out) == (0, "n\n1\n2\n")


class Command:
    """`headrace sql` as a process."""

    def __init__(self, environment: dict[str, str], *arguments: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "headrace", "sql", *arguments, "--master", "local[2]"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**ENVIRONMENT, **environment},
            start_new_session=True,
        )
        self._watch = threading.Timer(PATIENCE_S, self.process.kill)
        self._watch.start()

    def lines(self, count: int) -> list[str]:
        """The next lines that it prints."""
        assert self.process.stdout is not None
        return [self.process.stdout.readline() for _ in range(count)]

    def end(self) -> tuple[int, str, str]:
        """What it ended with."""
        out, err = self.process.communicate()
        self._watch.cancel()
        return self.process.returncode, out, err


@pytest.fixture
def command(quickly: dict[str, str], tmp_path: Path) -> Iterator[Callable[..., Command]]:
    if problem := java_problem():
        pytest.skip(problem)
    started: list[Command] = []

    def start(*arguments: str, **environment: str) -> Command:
        started.append(Command({**quickly, "TMPDIR": str(tmp_path), **environment}, *arguments))
        return started[-1]

    yield start
    for one in started:
        if one.process.poll() is None:
            os.killpg(one.process.pid, signal.SIGKILL)
            one.end()


def test_a_process_of_its_own(command: Callable[..., Command], shop: SparkBroker, tmp_path: Path) -> None:
    columns = "key, max(timestamp) > now() - interval 1 day as fresh, timestamp'2026-01-31 12:00:00' as noon"
    query = f"select {columns} from bills group by key order by key"
    # Here Spark starts Python as it does for everybody, and not as it does for the other tests.
    python = {"PYSPARK_PYTHON": local_python.LAUNCHER, "HEADRACE_SPARK_PYTHON": sys.executable}
    python["PYSPARK_DRIVER_PYTHON"] = python["PYSPARK_PYTHON"]
    code, out, err = command(query, "--json", "--data", str(shop.data), **python).end()
    assert (code, err) == (0, "")
    assert out == "".join(f'{{"key":"k{at}","fresh":true,"noon":"2026-01-31T12:00:00Z"}}\n' for at in range(2))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.long
def test_a_process_whose_output_nobody_reads(command: Callable[..., Command], shop: SparkBroker) -> None:
    query = "select id, repeat('x', 100) as x from range(0, 40000, 1, 4)"
    reading = command(query, "--json", "--data", str(shop.data))
    assert reading.lines(1)[0].startswith('{"id":0,')
    assert reading.process.stdout is not None
    reading.process.stdout.close()
    assert reading.end()[2] == ""


@pytest.mark.long
def test_a_process_that_follows(command: Callable[..., Command], shop: SparkBroker, topic: str) -> None:
    shop.bus.create_topic(topic)
    shop.bus.publish_many(topic, [b"a", b"b", b"b"])
    query = f"select value, count(*) as n from `{topic}` group by value order by value"
    following = command(query, "--follow", "--from", "earliest", "--connect", shop.address)
    assert following.lines(4) == ["value  n\n", "-----  -\n", "a      1\n", "b      2\n"]
    shop.bus.publish(topic, b"a")
    assert following.lines(5) == ["\n", "value  n\n", "-----  -\n", "a      2\n", "b      2\n"]
    os.killpg(following.process.pid, signal.SIGINT)
    assert following.end() == (130, "", "")


@pytest.mark.long
def test_a_result_that_is_too_large_names_the_setting(shop: SparkBroker, quickly: dict[str, str]) -> None:
    query = "select id, sha2(string(id), 512) as sum from range(50000) order by sum"
    done = subprocess.run(
        [
            *(sys.executable, "-m", "headrace", "sql", query, "--limit", "50000", "--connect", shop.address),
            *("--master", "local[2]", "--conf", "spark.driver.maxResultSize=1m"),
        ],
        env={**ENVIRONMENT, **quickly},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 1
    assert "--conf spark.driver.maxResultSize=4g" in done.stderr
