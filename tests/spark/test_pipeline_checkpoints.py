"""Queries that were changed, and the checkpoints that they had before."""

import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from pyspark.errors import AnalysisException
from pyspark.sql import SparkSession
from tests.spark.conftest import SparkBroker

from headrace.model.errors import ConnectionFailed, InvalidArgument, TopicNotFound
from headrace.spark.errors import CheckpointIncompatible, QueryFailed, SourceLost
from headrace.spark.pipelines.application import Application
from headrace.spark.pipelines.checkpoints import set_aside
from headrace.spark.pipelines.failures import is_permanent, query_failure
from headrace.spark.pipelines.loader import load
from headrace.spark.pipelines.paths import Folder

SOON_S = 120.0
KEY = """[STATE_STORE_KEY_SCHEMA_NOT_COMPATIBLE] Provided key schema does not match existing state key schema.
Please check number and type of fields.
Existing key_schema=StructType(StructField(a,StringType,true)) and new key_schema=StructType().
If you want to force running the query without schema validation, please set ... to false."""
OPERATORS = """[STREAMING_STATEFUL_OPERATOR_NOT_MATCH_IN_STATE_METADATA] An operator does not match.
Stateful operators in the metadata: [(OperatorId: 0 -> OperatorName: stateStoreSave)]; \
Stateful operators in current batch: []. SQLSTATE: 42K03"""
SOURCES = (
    "assertion failed: There are [1] sources in the checkpoint offsets and now there are [2] sources requested by the "
    "query. Cannot continue."
)


@pytest.mark.parametrize(
    ("said", "what"),
    [
        (KEY, "the key of its state was StructType(StructField(a,StringType,true)), and is StructType() now"),
        (OPERATORS, "the checkpoint has the stateful operators [(OperatorId: 0 -> OperatorName: stateStoreSave)]"),
        (SOURCES, "the checkpoint has 1 sources, and the query has 2"),
        ("[STATE_STORE_X_NOT_COMPATIBLE] It is so.\nMore.", "[STATE_STORE_X_NOT_COMPATIBLE] It is so."),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_explained(said: str, what: str) -> None:
    error = query_failure("totals", said, "/c/totals")
    assert isinstance(error, CheckpointIncompatible)
    for text in (what, "/c/totals", "--name NAME", "--reset-checkpoint", "startingOffsets"):
        assert text in str(error)
    assert is_permanent(error)


def caused(cause: BaseException) -> InvalidArgument:
    """What a query that cannot be started raises."""
    try:
        raise InvalidArgument("f.py:1: q: it is wrong") from cause
    except InvalidArgument as error:
        return error


def analysis(text: str) -> AnalysisException:
    """What Spark raises for a plan that it cannot make."""
    return AnalysisException(message=text)


PERMANENT = [
    InvalidArgument("has no pipeline"),
    SourceLost("gone"),
    caused(SyntaxError("x")),
    caused(TypeError("x")),
    caused(TopicNotFound("x")),
    caused(caused(NameError("x"))),
    caused(analysis("[UNRESOLVED_COLUMN] A column `x` cannot be resolved")),
    caused(
        analysis("Traceback (most recent call last)\n  File ...\nheadrace.model.errors.InvalidArgument: no option x")
    ),
]
PASSING = [
    QueryFailed("it broke"),
    ConnectionFailed("no broker"),
    caused(ConnectionFailed("no broker")),
    caused(OSError("the disk is full")),
    caused(FileNotFoundError("not mounted yet")),
    caused(
        analysis("Traceback (most recent call last)\n  File ...\nheadrace.model.errors.ConnectionFailed: no broker")
    ),
    RuntimeError("anything"),
]


@pytest.mark.parametrize("error", PERMANENT, ids=repr)
def test_what_another_attempt_cannot_help(error: BaseException) -> None:
    assert is_permanent(error)


@pytest.mark.parametrize("error", PASSING, ids=repr)
def test_what_may_pass(error: BaseException) -> None:
    assert not is_permanent(error)


def test_only_directories_of_this_machine_are_set_aside(tmp_path: Path) -> None:
    folder = Folder(tmp_path / "p")
    (folder.checkpoints / "one").mkdir(parents=True)
    (folder.checkpoints / "other").mkdir()
    (renamed,) = set_aside(folder, "", ["one", "never-ran"])
    assert renamed.name.startswith("one.before-")
    assert {path.name for path in folder.checkpoints.iterdir()} == {"other", renamed.name}
    (elsewhere,) = set_aside(folder, f"file://{folder.checkpoints}", ["other"])
    assert elsewhere.parent == folder.checkpoints
    with pytest.raises(InvalidArgument, match="give another place with --checkpoints"):
        set_aside(folder, "s3a://bucket/checkpoints", ["one"])


# On Spark.


@pytest.fixture
def run(spark: SparkSession, broker: SparkBroker, topic: str, tmp_path: Path) -> Iterator[Callable[[str], None]]:
    """Runs a query over topics until it has read all there is; one checkpoint for all that it is given."""
    made: list[Application] = []
    for name in (topic, f"{topic}-b"):
        broker.bus.publish_many(name, [b"1", b"2"])
    head = f"""
        from headrace.spark import pipeline

        A = {{"subscribe": "{topic}", "startingOffsets": "earliest", "value.format": "string"}}
        B = {{"subscribe": "{topic}-b", "startingOffsets": "earliest", "value.format": "string"}}
        """

    def do(text: str) -> None:
        broker.bus.publish(topic, b"3")  # without news Spark does not look at the state
        file = tmp_path / f"q{len(made)}.py"
        file.write_text(textwrap.dedent(head) + textwrap.dedent(text))
        made.append(Application(spark, "app", lambda _: None))
        made[-1].start(load(str(file)), address=broker.address, checkpoints=str(tmp_path / "c"), once=True)
        end = time.monotonic() + SOON_S
        while made[-1].running():
            assert time.monotonic() < end
            time.sleep(0.05)

    yield do
    for application in made:
        application.close()


def test_a_changed_query_says_that_its_checkpoint_does_not_fit(run: Callable[[str], None], tmp_path: Path) -> None:
    counts = '@pipeline(source={"a": %s}, sink=lambda d, n: d.collect(), output_mode="update")\ndef q(a): return a%s\n'
    run(counts % ("A", '.groupBy("value").count()'))
    with pytest.raises(CheckpointIncompatible, match=r"the key of its state was .* --reset-checkpoint"):
        run(counts % ("A", '.groupBy("value", "key").count()'))
    with pytest.raises(CheckpointIncompatible, match="the checkpoint is of a query that reads test-a-changed-query"):
        run(counts % ("B", '.groupBy("value").count()'))
    with pytest.raises(CheckpointIncompatible, match=r"stateful operators .*stateStoreSave.*, and the query has \[\]"):
        run(counts % ("A", ""))
    set_aside(Folder(tmp_path), str(tmp_path / "c"), ["q"])
    run(counts % ("A", '.groupBy("value", "key").count()'))
