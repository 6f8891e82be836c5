"""Pipelines: files that describe streaming queries, and what becomes of them on Spark."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import pyspark
import pytest
from pyspark.sql import SparkSession
from tests.cluster_processes import ClusterProcesses
from tests.known import ENVIRONMENT
from tests.pages import ROOT, USUAL_ADDRESS, blocks
from tests.spark.conftest import SparkBroker

import headrace
from headrace.cli.main import main
from headrace.cli.spark.pipeline_display import Display
from headrace.cli.terminal.output import Output
from headrace.model.errors import InvalidArgument
from headrace.spark import pipeline
from headrace.spark.errors import PipelineInUse, QueryFailed, SparkMissing
from headrace.spark.pipelines.application import Application
from headrace.spark.pipelines.driver import make_topics
from headrace.spark.pipelines.loader import load, settings_of
from headrace.spark.pipelines.paths import Folder, home_of
from headrace.spark.pipelines.progress import QueryProgress, progress_of
from headrace.spark.pipelines.registry import Registry
from headrace.spark.pipelines.sessions import need_spark, session_settings

pytestmark = pytest.mark.filterwarnings("ignore:PySpark does not yet fully support pandas:FutureWarning")

SOON_S = 120.0
JVM = ["spark.ui.enabled=false", "spark.driver.extraJavaOptions=-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"]


def eventually(look: Callable[[], Any], why: Callable[[], object] = lambda: "") -> Any:
    """What a look gives at last."""
    end = time.monotonic() + SOON_S
    while not (found := look()):
        assert time.monotonic() < end, why()
        time.sleep(0.05)
    return found


def written(path: Path, text: str) -> str:
    """A file with this text."""
    path.write_text(textwrap.dedent(text).lstrip("\n"), encoding="utf-8")
    return str(path)


# What a file says.


def test_the_decorator_leaves_a_function_as_it_is() -> None:
    @pipeline(source="logs", sink="alerts")
    def twice(logs: int) -> int:
        return logs * 2

    assert twice(21) == 42


def test_a_python_file_may_hold_several_pipelines(tmp_path: Path) -> None:
    file = written(
        tmp_path / "several.py",
        """
        from headrace.spark import pipeline

        @pipeline(source="logs", sink="alerts", trigger="1 second", options={"maxOffsetsPerTrigger": 1000})
        def errors(logs):
            return logs

        for country in ("de", "fr"):
            @pipeline(
                source={
                    "orders": {"subscribePattern": f"orders.{country}.*", "failOnDataLoss": False},
                    "rates": "rates",
                },
                sink={"format": "parquet", "path": f"/out/{country}", "partitionBy": ["day"]},
                trigger="available now",
                output_mode="append",
                conf={"spark.sql.shuffle.partitions": 4},
                name=f"orders-{country}",
            )
            def per_country(rates, orders, spark):
                return orders

        @pipeline(source=["a", {"format": "rate", "rowsPerSecond": 5}], sink=print)
        def joined(left, right):
            return left
        """,
    )
    errors, german, french, joined = load(file)
    assert [each.name for each in (errors, german, french, joined)] == ["errors", "orders-de", "orders-fr", "joined"]
    assert errors.sources[0].options == {"maxOffsetsPerTrigger": "1000", "subscribe": "logs"}
    assert (errors.sink.format, errors.sink.options, str(errors.trigger)) == (
        "headrace",
        {"topic": "alerts"},
        "1 second",
    )
    assert (errors.line, german.by_name, german.wants_session) == (3, True, True)
    assert german.sources[0].options == {"subscribePattern": "orders.de.*", "failOnDataLoss": "false"}
    assert french.sink.options == {"path": "/out/fr"}
    assert french.sink.partition_by == ("day",)
    assert french.trigger.words == {"availableNow": True}
    assert (joined.sink.function, joined.sources[1].format) == (print, "rate")
    assert settings_of([errors, german, french]) == {"spark.sql.shuffle.partitions": "4"}


HEAD = "from headrace.spark import pipeline\n"
PYTHON_MISTAKES = {
    "def broken(:\n": ":2: ",
    "import no_such_module\n": ":2: No module named 'no_such_module'",
    "x = 1\n": "has no pipeline",
    "1 / 0\n": ":2: ZeroDivisionError",
    "@pipeline(source='a', sink='b', trigger='often')\ndef f(a): return a\n": ":2: 'often' is no trigger: write a time",
    "@pipeline(source='a', sink='b', output_mode='all')\ndef f(a): return a\n": "it is append, update, complete",
    "@pipeline(source='a*b', sink='b')\ndef f(a): return a\n": "cannot name a topic",
    "@pipeline(source=7, sink='b')\ndef f(a): return a\n": "source is a topic, a list of topics, or argument names",
    "@pipeline(source='a', sink=None)\ndef f(a): return a\n": "sink is a topic, console, noop, a dictionary",
    "@pipeline(source={'x': 'a'}, sink='b')\ndef f(a): return a\n": "f() has no argument 'x': source names arguments",
    "@pipeline(source=['a', 'b'], sink='b')\ndef f(a): return a\n": "f() takes 1 DataFrames, and there are 2 sources",
    "@pipeline(source='a', sink='b')\ndef f(a, b): return a\n": "f() has an argument 'b' that no source is for",
    "@pipeline(source={'a': {'subscripe': 'a'}}, sink='b')\ndef f(a): return a\n": "did you mean that by 'subscripe'?",
    "@pipeline(source={'a': {'Format': 'rate'}}, sink='b')\ndef f(a): return a\n": "write format, not Format",
    "@pipeline(source='a', sink='b', conf={'shuffle': 2})\ndef f(a): return a\n": "begin with 'spark.'",
    "@pipeline(source='a', sink='b', options={'x': object()})\ndef f(a): return a\n": "the option 'x' is text",
    "@pipeline(source={'a': {'subscribe': 'a', 'watermark': 'ts'}}, sink='b')\ndef f(a): return a\n": "a watermark is",
    "@pipeline(source='a', sink='b')\nclass F: pass\n": "stands before a function",
    "for _ in 'ab':\n    @pipeline(source='a', sink='b')\n    def f(a): return a\n": "a pipeline 'f' at line 3",
}


@pytest.mark.parametrize(("text", "told"), PYTHON_MISTAKES.items())
def test_a_mistake_in_a_python_file_is_told_with_its_line(text: str, told: str, tmp_path: Path) -> None:
    file = written(tmp_path / "wrong.py", HEAD + text)
    with pytest.raises(InvalidArgument) as raised:
        load(file)
    assert told in str(raised.value)
    assert file in str(raised.value)


def test_pipelines_of_a_file_must_agree_on_settings(tmp_path: Path) -> None:
    file = written(
        tmp_path / "torn.py",
        """
        from headrace.spark import pipeline

        @pipeline(source="a", sink="b", conf={"spark.sql.shuffle.partitions": 2})
        def one(a):
            return a

        @pipeline(source="a", sink="b", conf={"spark.sql.shuffle.partitions": 3})
        def two(a):
            return a
        """,
    )
    with pytest.raises(InvalidArgument, match=r"two wants spark.sql.shuffle.partitions=3, and one wants 2"):
        settings_of(load(file))


def test_a_file_that_uses_spark_outside_of_its_functions_waits_for_the_session(tmp_path: Path) -> None:
    file = written(
        tmp_path / "early.py",
        """
        from pyspark.sql.functions import col
        from headrace.spark import pipeline

        LARGE = col("value") > 100

        @pipeline(source={"rate": {"format": "rate"}}, sink="noop")
        def large(rate):
            return rate.where(LARGE)
        """,
    )
    code = f"""
from headrace.spark.pipelines.driver import RunRequest, definitions_of
print(definitions_of(RunRequest("n", {file!r}, "", "local[2]")))
"""
    done = subprocess.run([sys.executable, "-c", code], env=ENVIRONMENT, capture_output=True, text=True, check=False)
    assert done.stdout == "None\n", done.stderr


def test_an_sql_file_is_a_pipeline(tmp_path: Path) -> None:
    file = written(
        tmp_path / "large-orders.sql",
        """
        -- Note: what is worth a look.
        -- source: orders {"value.format": "json", "startingOffsets": "earliest",
        --                 "value.schema": "amount double"}
        -- source: customers.eu as customers {"format": "parquet", "path": "/data/c", "batch": true, "schema": "a int"}
        -- options: {"maxOffsetsPerTrigger": 10}
        -- sink: alerts {"address": "headrace://elsewhere"}
        -- trigger: 10 seconds
        -- output mode: update
        -- conf: spark.sql.shuffle.partitions = 2

        with large as (select * from orders where value.amount > 100) -- no directive: it is not at the top
        select key, to_json(value) as value from large;
        """,
    )
    (found,) = load(file)
    orders, customers = found.sources
    assert (found.name, found.line, found.output_mode) == ("large-orders", 11, "update")
    assert orders.argument == "orders"
    assert orders.options["value.schema"] == "amount double"
    assert (orders.options["subscribe"], orders.options["maxOffsetsPerTrigger"]) == ("orders", "10")
    assert (customers.argument, customers.format, customers.batch) == ("customers", "parquet", True)
    assert customers.options == {"path": "/data/c"}
    assert found.sink.options == {"topic": "alerts", "address": "headrace://elsewhere"}
    assert found.sql.startswith("with large")
    assert found.sql.endswith("from large")
    assert found.conf == {"spark.sql.shuffle.partitions": "2"}


SQL_MISTAKES = {
    "select 1\n": ":1: the file does not say its source",
    "-- source: a\nselect 1\n": ":1: the file does not say its sink",
    "-- sorce: a\n-- sink: b\nselect 1\n": ":1: 'sorce' is none of source, sink",
    "-- source: a\n-- sink: b\n": "this is nothing",
    "-- source: a\n-- sink: b\ndrop table a\n": ":3: a pipeline is one SELECT, and this is 'drop'",
    "-- source: a\n-- sink: b\n-- sink: c\nselect 1\n": ":3: sink is said twice",
    "-- source: a {'x': 1}\n-- sink: b\nselect 1\n": ":1: \"{'x': 1}\" is no JSON",
    '-- source: a {"x": 1\n-- sink: b\nselect 1\n': ":1: a brace is opened and not closed",
    "-- source: a.b\n-- sink: b\nselect 1\n": ":1: 'a.b' cannot be used as a table's name: write a.b as NAME",
    "-- source: a\n-- source: b as A\n-- sink: b\nselect 1\n": ":2: there are two sources 'A'",
    "-- source: a\n-- sink:\nselect 1\n": ":2: nothing stands behind sink:",
    "-- source: a\n-- sink: b\n-- trigger: now and then\nselect 1\n": ":3: 'now and then' is no trigger",
    "-- source: a\n-- sink: b\n-- conf: shuffle\nselect 1\n": ":3: conf is NAME=VALUE",
}


@pytest.mark.parametrize(("text", "told"), SQL_MISTAKES.items())
def test_a_mistake_in_an_sql_file_is_told_with_its_line(text: str, told: str, tmp_path: Path) -> None:
    file = written(tmp_path / "wrong.sql", text)
    with pytest.raises(InvalidArgument) as raised:
        load(file)
    assert told in str(raised.value)
    assert file in str(raised.value)


# What is said about them.


def test_progress_is_what_spark_says_in_our_words() -> None:
    said = {
        "name": "errors",
        "batchId": 3,
        "batchDuration": 250,
        "numInputRows": 100,
        "inputRowsPerSecond": 50.0,
        "processedRowsPerSecond": "NaN",
        "durationMs": {"addBatch": 200},
        "eventTime": {"watermark": "2026-01-01T00:00:00.000Z"},
        "stateOperators": [{"numRowsTotal": 5, "memoryUsedBytes": 1000}, {"numRowsTotal": 2, "memoryUsedBytes": 24}],
        "sources": [
            {"endOffset": '{"a": {"0": 5, "1": 7}}', "latestOffset": '{"a": {"0": 5, "1": 17, "2": 3}}'},
            {"endOffset": None, "latestOffset": None},
        ],
        "sink": {"numOutputRows": -1},
        "observedMetrics": {"headrace_rows_out": {"rows": 10}},
    }
    found = progress_of("p", said)
    assert (found.pipeline, found.query, found.batch, found.batch_ms) == ("p", "errors", 3, 250)
    assert (found.rows_in, found.rows_out, found.rows_in_per_s, found.rows_out_per_s) == (100, 10, 50.0, 5.0)
    assert (found.lag, found.state_rows, found.state_bytes, found.rows_done_per_s) == (13, 7, 1024, 0.0)
    bare = progress_of("p", {"name": "errors", "inputRowsPerSecond": "Infinity", "sources": [{"endOffset": 3}]})
    assert (bare.rows_out, bare.lag, bare.rows_in_per_s, bare.idle) == (None, None, 0.0, True)


def shown(*news: QueryProgress, redrawn: bool = False, as_json: bool = False) -> str:
    """What a display prints."""
    with TemporaryFile("w+", encoding="utf-8") as file:
        with redirect_stdout(file), redirect_stderr(file):
            display = Display(Output(as_json=as_json), every_s=3600.0, redrawn=redrawn)
            for each in news:
                display.show(each)
            display.close()
            file.flush()
        return os.pread(file.fileno(), 1 << 20, 0).decode()


def test_progress_is_shown_as_lines_as_json_or_redrawn() -> None:
    one = QueryProgress("p", "errors", 1_700_000_000_000_000, 7, 10, 1, 1000.0, 20.0, 0.0, 5, 120, {}, 3, 2048)
    idle = QueryProgress("p", "errors", 1_700_000_000_000_000, 8, idle=True)
    line = "2023-11-14T22:13:20Z errors batch 7: 1,000 rows/s in, 20 rows/s out, lag 5, took 120ms, state 3 rows, 2 KiB"
    assert shown(one, one) == f"{line}\n"
    assert shown(idle) == "2023-11-14T22:13:20Z errors batch 8: nothing to do\n"
    assert [json.loads(text)["batch"] for text in shown(one, idle, as_json=True).splitlines()] == [7, 8]
    drawn = shown(one, idle, redrawn=True)
    assert drawn.count("rows/s in") == 2
    assert "\x1b[2A" in drawn  # the second time in the place of the first
    assert "idle" in drawn.splitlines()[-1]


# What is needed to run them.


def test_what_is_missing_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    with pytest.raises(SparkMissing, match=r"there is no bin/java in JAVA_HOME .*openjdk-17-jre-headless"):
        need_spark("local[*]")
    monkeypatch.delenv("JAVA_HOME")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SparkMissing, match="there is no java on the PATH"):
        need_spark("local[*]")
    file = written(tmp_path / "one.sql", "-- source: a\n-- sink: b\nselect * from a\n")
    assert main(["pipeline", "run", file]) == 2
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(SparkMissing, match=r"pip install '/path/to/headrace\[spark\]'"):
        need_spark("sc://somewhere")


def test_what_the_user_sets_counts() -> None:
    settings = session_settings("n", "local[3]", {"spark.log.level": "INFO"}, quick=False, quiet=True)
    assert settings["spark.sql.shuffle.partitions"] == "3"
    assert (settings["spark.ui.enabled"], settings["spark.driver.bindAddress"]) == ("false", "127.0.0.1")
    assert "spark.driver.bindAddress" not in session_settings("n", "yarn", {}, quick=True, quiet=True)
    shown = session_settings("n", "local", {"spark.ui.enabled": "true"}, quick=False, quiet=True)
    assert shown["spark.ui.enabled"] == "true"
    assert settings["spark.log.level"] == "INFO"
    assert "spark.hadoop.fs.file.impl" not in settings
    assert "spark.hadoop.fs.file.impl" in session_settings("n", "yarn", {}, quick=True, quiet=True)
    rocks = {"spark.sql.streaming.stateStore.providerClass": "a.b.RocksDBStateStoreProvider"}
    assert "spark.hadoop.fs.file.impl" not in session_settings("n", "yarn", rocks, quick=True, quiet=True)
    assert session_settings("n", "sc://x", {}, quick=False, quiet=True) == {"spark.app.name": "n"}


def test_files_are_beside_the_data_if_they_can_be(broker: SparkBroker, tmp_path: Path) -> None:
    info = broker.bus.info()
    assert home_of(info, broker.address, {}) == broker.data / "pipelines"
    elsewhere = home_of(info, "headrace://192.0.2.1", {"XDG_STATE_HOME": str(tmp_path)})
    assert elsewhere == tmp_path / "headrace" / "pipelines" / info.broker_id


def test_files_are_never_in_the_replica_of_a_node(tmp_path: Path) -> None:
    """Not even if the only node is on this machine: what a node has of the shard is compared with the store."""
    nodes = ClusterProcesses(tmp_path, f"directory://{tmp_path}/store", 1)
    with nodes, headrace.connect(nodes.url) as bus:
        info = bus.info()
        assert Path(info.data).is_relative_to(tmp_path / "node-1" / "data" / "shards")
        home = home_of(info, nodes.url, {"XDG_STATE_HOME": str(tmp_path / "state")})
        assert home == tmp_path / "state" / "headrace" / "pipelines" / info.broker_id


def test_a_pipeline_has_one_driver(tmp_path: Path) -> None:
    folder = Folder(tmp_path / "one")
    lock = folder.lock()
    with pytest.raises(PipelineInUse):
        folder.lock()
    child = subprocess.Popen(["sleep", "60"], pass_fds=[lock.fd])
    lock.release()
    assert folder.locked()  # by what works for the driver
    child.kill()
    child.wait()
    folder.lock().release()
    assert not folder.locked()


# On Spark.


@pytest.fixture
def application(spark: SparkSession) -> Iterator[tuple[Application, list[QueryProgress]]]:
    """An application in the session that all tests share."""
    heard: list[QueryProgress] = []
    made = Application(spark, "app", heard.append)
    yield made, heard
    made.close()


def values(bus: headrace.Bus, topic: str) -> list[bytes]:
    """The values of a topic's messages, sorted."""
    ends = bus.offsets(topic, at="latest")
    found: list[bytes] = []
    with bus.subscribe(topic) as messages:
        for message in messages if sum(ends.values()) else ():
            found.append(message.value or b"")
            if len(found) == sum(ends.values()):
                break
    return sorted(found)


def test_queries_of_a_file_run_side_by_side(
    application: tuple[Application, list[QueryProgress]], broker: SparkBroker, topic: str, tmp_path: Path
) -> None:
    app, heard = application
    broker.bus.create_topic(topic, partitions=2)
    broker.bus.publish_many(topic, [b"%d" % number for number in range(100)])
    file = written(
        tmp_path / "two.py",
        f"""
        from pyspark.sql.functions import udf
        from headrace.spark import pipeline

        READ = {{"subscribe": "{topic}", "startingOffsets": "earliest", "value.format": "string"}}

        @udf("string")
        def doubled(value):  # workers get the code of it: they cannot import this file
            return str(int(value) * 2)

        @pipeline(source={{"numbers": READ}}, sink="{topic}-out")
        def to_topic(numbers):
            return numbers.where("value % 10 = 0").select(doubled("value").alias("value"))

        def keep(batch, number):
            batch.select("value").write.mode("append").text("{tmp_path}/kept")

        @pipeline(source={{"numbers": READ}}, sink=keep, name="to-function")
        def to_function(numbers):
            return numbers.where("value < 5")
        """,
    )
    app.start(load(file), address=broker.address, checkpoints=str(tmp_path / "c"), once=True)
    eventually(lambda: not app.running())
    assert values(broker.bus, f"{topic}-out") == sorted(b"%d" % number for number in range(0, 200, 20))
    kept = [path.read_text() for path in (tmp_path / "kept").glob("part*")]
    assert sorted("".join(kept).split()) == ["0", "1", "2", "3", "4"]
    eventually(lambda: {each.query for each in heard if each.rows_in == 100} == {"to_topic", "to-function"})
    news = next(each for each in heard if each.query == "to_topic" and each.rows_in)
    assert (news.pipeline, news.rows_out, news.lag) == ("app", 10, 0)
    assert sorted(os.listdir(tmp_path / "c")) == ["to-function", "to_topic"]


def test_sql_over_a_topic_and_a_table(
    application: tuple[Application, list[QueryProgress]], broker: SparkBroker, topic: str, tmp_path: Path
) -> None:
    app, _ = application
    broker.bus.publish_many(topic, [b'{"who": "ann", "amount": %d}' % amount for amount in (5, 500, 50)])
    (tmp_path / "names.csv").write_text("ann,Ann\n")
    file = written(
        tmp_path / "large.sql",
        f"""
        -- source: {topic} as orders {{"value.format": "json", "value.schema": "who string, amount int",
        --                             "startingOffsets": "earliest"}}
        -- source: names {{"format": "csv", "path": "{tmp_path}/names.csv", "schema": "who string, name string",
        --                 "batch": true}}
        -- sink: {{"format": "json", "path": "{tmp_path}/large"}}
        select name, value.amount from orders join names on names.who = orders.value.who where value.amount > 10
        """,
    )
    app.start(load(file), address=broker.address, checkpoints=str(tmp_path / "c"), once=True)
    eventually(lambda: not app.running())
    lines = "".join(path.read_text() for path in (tmp_path / "large").glob("part*")).splitlines()
    assert sorted(json.loads(line)["amount"] for line in lines) == [50, 500]
    assert json.loads(lines[0])["name"] == "Ann"


def test_queries_stop_between_two_batches(application: tuple[Application, list[QueryProgress]], tmp_path: Path) -> None:
    app, heard = application
    file = written(
        tmp_path / "on.py",
        """
        from headrace.spark import pipeline

        @pipeline(source={"rate": {"format": "rate", "rowsPerSecond": 1000}}, sink="noop", trigger="100 milliseconds")
        def on_and_on(rate):
            return rate
        """,
    )
    app.start(load(file), address="headrace://127.0.0.1:1", checkpoints=str(tmp_path), once=False)
    eventually(lambda: any(each.rows_in for each in heard))
    assert app.running()
    app.stop()
    assert not app.running()


def test_a_query_that_fails_says_why(application: tuple[Application, list[QueryProgress]], tmp_path: Path) -> None:
    app, _ = application
    file = written(
        tmp_path / "bad.py",
        """
        from pyspark.sql.functions import udf
        from headrace.spark import pipeline

        RATE = {"format": "rate-micro-batch", "rowsPerBatch": 10}

        @udf("int")
        def failing(value):
            raise ValueError("nobody can do that")

        @pipeline(source={"rate": RATE}, sink="noop")
        def bad(rate):
            return rate.select(failing("value"))

        @pipeline(source={"rate": RATE}, sink="noop")
        def nothing(rate):
            rate.where("value > 1")

        @pipeline(source={"rate": {**RATE, "batch": True}}, sink="noop")
        def no_column(rate):
            return rate.where("colour = 1")
        """,
    )
    bad, nothing, no_column = load(file)
    with pytest.raises(QueryFailed, match=r"bad has failed: (?s:.*)ValueError: nobody can do that") as raised:
        app.start([bad], address="", checkpoints=str(tmp_path), once=False)  # never counts as started
    assert "Streaming Query" not in str(raised.value)
    with pytest.raises(InvalidArgument, match=r"bad\.py:\d+: nothing: a pipeline returns a DataFrame"):
        app.start([nothing], address="", checkpoints=str(tmp_path), once=False)
    with pytest.raises(InvalidArgument, match=r"bad\.py:\d+: no_column: "):
        app.start([no_column], address="", checkpoints=str(tmp_path), once=False)


# Through the command line.


def test_a_broken_file_is_refused_before_anything_is_started(broker: SparkBroker, tmp_path: Path) -> None:
    file = written(tmp_path / "wrong.py", "from headrace.spark import pipeline\nprint(undefined)\n")
    for what in ("run", "start"):
        with TemporaryFile("w+", encoding="utf-8") as errors:
            with redirect_stderr(errors):
                assert main(["pipeline", what, file, "--connect", broker.address, "--json"]) == 1
            told = json.loads(os.pread(errors.fileno(), 1 << 20, 0))
        assert told["error"]["code"] == "invalid_argument"
        assert told["error"]["message"] == f"{file}:2: NameError: name 'undefined' is not defined"


def test_a_run_in_the_foreground_goes_on_where_the_last_one_was(
    spark: SparkSession, broker: SparkBroker, topic: str, tmp_path: Path
) -> None:
    assert spark.version  # the session of this process is used
    file = written(
        tmp_path / "drain.sql",
        f"""
        -- source: {topic} as numbers {{"startingOffsets": "earliest"}}
        -- sink: {topic}-out
        select value from numbers
        """,
    )
    here = ("--connect", broker.address)

    def run(*options: str) -> list[dict[str, Any]]:
        with TemporaryFile("w+", encoding="utf-8") as out:
            with redirect_stdout(out):
                assert main(["pipeline", "run", file, "--name", topic, "--once", *here, *options]) == 0
            lines = os.pread(out.fileno(), 1 << 20, 0).decode().splitlines()
        return [json.loads(line) if "--json" in options else {"line": line} for line in lines]

    broker.bus.publish_many(topic, [b"a", b"b"])
    news = run("--json")
    assert [
        (each["pipeline"], each["query"], each["rows_in"], each["rows_out"]) for each in news if each["rows_in"]
    ] == [(topic, "drain", 2, 2)]
    broker.bus.publish_many(topic, [b"c"])
    assert any("drain batch 1:" in each["line"] for each in run())
    assert values(broker.bus, f"{topic}-out") == [b"a", b"b", b"c"]
    driver = Folder(broker.data / "pipelines" / topic).driver()
    assert driver is not None
    assert (driver.phase, driver.pid, driver.supervised) == ("finished", os.getpid(), False)
    latest = Registry(broker.bus).progress(topic)[topic]["drain"]
    assert (latest.batch, latest.rows_in) == (1, 1)


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_driver_and_a_broker_are_killed_and_nothing_is_lost_or_doubled(
    tidy: SparkBroker, topic: str, tmp_path: Path
) -> None:
    broker = tidy
    bus, out = broker.bus, f"{topic}-out"
    bus.create_topic(topic, partitions=2)
    bus.create_topic(out)
    file = written(
        tmp_path / "copies.py",
        f"""
        from headrace.spark import pipeline

        @pipeline(source={{"rows": {{"subscribe": "{topic}", "startingOffsets": "earliest"}}}}, sink="{out}",
                  trigger="100 milliseconds", options={{"maxOffsetsPerTrigger": 500}})
        def copies(rows):
            return rows.select("key", "value")
        """,
    )
    here = ("--connect", broker.address)
    sent = [b"%d" % number for number in range(4000)]
    folder = Folder(broker.data / "pipelines" / "copies")

    def arrived() -> int:
        return sum(bus.offsets(out, at="latest").values())

    def why() -> str:
        return folder.log.read_text()[-8000:]

    bus.publish_many(topic, sent[:3000])
    options = ["--master", "local[2]", *(word for each in JVM for word in ("--conf", each)), "--wait", "4m"]
    assert main(["pipeline", "start", file, *options, *here]) == 0, why()
    first = folder.driver()
    assert first is not None
    eventually(lambda: arrived() >= 500, why)
    os.kill(first.pid, signal.SIGKILL)
    bus.publish_many(topic, sent[3000:])
    eventually(lambda: (driver := folder.driver()) and driver.pid != first.pid and driver.phase == "running", why)
    broker.restart()  # the queries wait for it, and so does the supervisor
    eventually(lambda: arrived() >= len(sent), why)
    assert main(["pipeline", "stop", "copies", *here]) == 0
    assert values(bus, out) == sorted(sent)
    assert main(["pipeline", "remove", "copies", "--yes", "--files", *here]) == 0


@pytest.mark.long
@pytest.mark.timeout(600)
def test_declarative_pipelines_of_sparks_read_and_write_topics(
    broker: SparkBroker, quickly: dict[str, str], tmp_path: Path
) -> None:
    for module in ("grpc", "grpc_status", "google.rpc", "zstandard", "yaml"):
        pytest.importorskip(
            module, reason=f"Spark Connect is not installed ({module}): pip install 'headrace[connect]'"
        )
    page = (ROOT / "docs" / "how-to" / "pipelines.md").read_text(encoding="utf-8")
    for block in blocks(page):
        if block.title in ("spark-pipeline.yml", "refunds_flow.py"):
            text = block.text.replace(USUAL_ADDRESS, f"127.0.0.1:{broker.port}").replace(
                "/tmp/refunds", f"{tmp_path}/s"
            )
            (tmp_path / block.title).write_text(text)
    with (tmp_path / "spark-pipeline.yml").open("a") as file:
        file.write('configuration:\n  spark.sql.shuffle.partitions: "2"\n')
    broker.bus.publish_many("refunds", [b"50", b"500", b"5000"])
    done = subprocess.run(
        [str(Path(pyspark.__file__).parent / "bin" / "spark-pipelines"), "run"],
        env={**ENVIRONMENT, **quickly},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout[-4000:]}{done.stderr[-4000:]}"
    assert "Run is COMPLETED" in done.stderr + done.stdout
    assert values(broker.bus, "large-refunds") == [b"500", b"5000"]


@pytest.mark.parametrize("allowed", [True, False])
def test_the_topics_that_queries_name_are_created_if_the_broker_may_do_that(allowed: bool, tmp_path: Path) -> None:
    file = written(
        tmp_path / "named.py",
        """
        from headrace.spark import pipeline

        @pipeline(source={"a": {"subscribe": "in-1, in-2"}, "b": {"assign": {"in-3": [0]}}}, sink="out")
        def named(a, b):
            return a

        @pipeline(source={"a": {"subscribe": "far", "address": "headrace://elsewhere"}}, sink={"format": "noop"})
        def other(a):
            return a
        """,
    )
    with headrace.open(tmp_path / "data", auto_create_topics=allowed) as bus:
        bus.create_topic("in-1", partitions=2)
        make_topics(bus, load(file))
        found = {info.topic: len(bus.describe_topic(info.topic).partitions) for info in bus.topics()}
        assert found == ({"in-1": 2, "in-2": 1, "out": 1} if allowed else {"in-1": 2})
