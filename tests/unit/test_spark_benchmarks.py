"""Benchmarks with Spark: what they compare, the rows they read, and that wrong results and missing peers are told."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from benchmarks import installing, spark, spark_connector, spark_reads, spark_rows, spark_session
from benchmarks.spark_rows import Group, Truth

from headrace.bench.measure import Benchmark, Sample, Subject, Unavailable, WrongResult, measure

UNITS = {
    "batch_count": ("rows/s", True),
    "batch_groupby": ("rows/s", True),
    "stream_drain": ("rows/s", True),
    "sink_write": ("rows/s", True),
    "microbatch_latency_p50_ms": ("ms", False),
    "microbatch_latency_p99_ms": ("ms", False),
    "trigger_overhead_ms": ("ms", False),
}
THREE = {"parquet", "tuple_source", "kafka"}
PEERS = {
    "batch_count": {*THREE, "headrace_path", "headrace_all_columns"},
    "batch_groupby": {*THREE, "headrace_path", "headrace_all_columns"},
    "stream_drain": {*THREE, "headrace_path"},
    "sink_write": {*THREE, "noop"},
    "microbatch_latency_p50_ms": {"kafka"},
}

needs_spark = pytest.mark.skipif(find_spec("pyspark") is None, reason="pyspark is not installed")


def test_the_names_and_peers_of_the_contract_are_there() -> None:
    found: dict[str, set[str]] = {}
    for benchmark in spark.benchmarks(rows=1):
        for name, figure in benchmark.figures.items():
            found[name] = {subject.name for subject in benchmark.subjects}
            assert (figure.unit, figure.higher_is_better) == UNITS[name]
            assert all(subject.params["durability"] for subject in benchmark.subjects)
    assert found.keys() == UNITS.keys()
    for name in UNITS:
        assert found[name] >= {"headrace", *PEERS.get(name, ())}


# Rows


def test_how_many_rows_is_up_to_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HEADRACE_BENCH_ROWS", raising=False)
    assert spark_rows.rows_asked() == 10_000_000
    monkeypatch.setenv("HEADRACE_BENCH_ROWS", "2001")
    assert spark_rows.rows_asked() == 4000
    assert {line.params["rows"] for line in spark.benchmarks()[:4]} == {4000}


def test_slow_subjects_read_fewer_rows_and_say_so() -> None:
    many = spark.benchmarks(rows=10_000_000)[:4]
    told = {(name, subject.name): subject.params["rows"] for name, subject in _subjects(many)}
    fewer = {rows for (_, subject), rows in told.items() if subject == "tuple_source"}
    assert fewer == {spark_rows.SLOW_ROWS}
    assert {rows for (_, subject), rows in told.items() if subject != "tuple_source"} == {10_000_000}
    [figure] = many[0].figures.values()
    assert figure.of(1, Sample(2.0, amount=500)) == 250


def _subjects(benchmarks: list[Benchmark]) -> list[tuple[str, Subject]]:
    return [(name, subject) for one in benchmarks for name in one.figures for subject in one.subjects]


def test_the_same_rows_every_time() -> None:
    chunks = list(spark_rows.chunks(4000))
    assert [*map(repr, chunks)] == [*map(repr, spark_rows.chunks(4000))]
    assert [chunk.partition for chunk in chunks] == [0, 1, 0, 1]
    values = [value for chunk in chunks for value in chunk.values]
    assert len(set(values)) == 4000
    assert {*map(len, values)} == {100}
    times = [at_ms for chunk in chunks for at_ms in chunk.times_ms]
    assert times == sorted(set(times))
    known = spark_rows.truth(4000)
    assert sum(group.rows for group in known.groups.values()) == 4000
    assert sum(group.bytes for group in known.groups.values()) == 400_000
    assert max(group.last_ms for group in known.groups.values()) == times[-1]


# A wrong result fails loudly

KNOWN = Truth(3, 60, {b"a": Group(2, 200, 7), b"b": Group(1, 100, 8)})


@pytest.mark.parametrize(("rows", "checksum", "why"), [(2, 60, "2 rows"), (3, 61, "other values"), (0, None, "0 rows")])
def test_lost_and_changed_rows_are_noticed(rows: int, checksum: int | None, why: str) -> None:
    spark_rows.check_all(3, 60, KNOWN)
    with pytest.raises(WrongResult, match=why):
        spark_rows.check_all(rows, checksum, KNOWN)


@pytest.mark.parametrize(
    "found",
    [
        [(b"a", 2, 200, 7)],
        [(b"a", 2, 200, 7), (b"c", 1, 100, 8)],
        [(b"a", 2, 200, 7), (b"b", 2, 100, 8)],
        [(b"a", 2, 200, 7), (b"b", 1, 101, 8)],
        [(b"a", 2, 200, 7), (b"b", 1, 100, 9)],
    ],
)
def test_wrong_groups_are_noticed(found: list[Any]) -> None:
    spark_rows.check_groups([(bytearray(b"b"), 1, 100, 8), (b"a", 2, 200, 7)], KNOWN)
    with pytest.raises(WrongResult):
        spark_rows.check_groups(found, KNOWN)


# What is missing is told


def _lines(subject: str, place: Path) -> list[dict[str, Any]]:
    benchmark = spark.benchmarks(rows=1)[0]
    only = benchmark._replace(subjects=[one for one in benchmark.subjects if one.name == subject])
    return list(measure("spark", only, str(place), seconds=1, samples=1))


def test_spark_that_is_missing_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def missing(module: str, distribution: str) -> None:
        raise Unavailable(f"{distribution} is not installed: no {module}")

    monkeypatch.setattr(installing, "need", missing)
    [line] = _lines("headrace", tmp_path)
    assert line["median"] is None
    assert line["why"] == "pyspark is not installed: no pyspark"


@needs_spark
def test_java_that_is_missing_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(spark_session.shutil, "which", lambda *_, **__: None)
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setattr("pyspark.sql.SparkSession.getActiveSession", lambda: None)
    spark_session._started.cache_clear()
    [line] = _lines("headrace", tmp_path)
    assert "there is no java" in line["why"]


@needs_spark
def test_the_connector_is_taken_from_where_it_is_given(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(spark_connector.GIVEN, str(tmp_path))
    with pytest.raises(Unavailable, match="there is no spark-sql-kafka"):
        spark_connector.jars()
    files = [tmp_path / "kafka-clients-1.jar", tmp_path / f"{spark_connector.ARTIFACT}-1.jar"]
    for file in files:
        file.touch()
    assert spark_connector.jars() == files


@needs_spark
def test_a_connector_that_nobody_can_get_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(spark_connector.GIVEN, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(spark_connector.shutil, "which", lambda *_, **__: None)
    spark_connector._kept.cache_clear()
    try:
        with pytest.raises(Unavailable, match=spark_connector.GIVEN):
            spark_connector.jars()
    finally:
        spark_connector._kept.cache_clear()


def _breaking(_: str) -> None:
    raise ValueError("its own way to fail")


def test_others_may_fail_without_ending_the_run(tmp_path: Path) -> None:
    broken = Subject("kafka", lambda *_: Sample(1), {}, prepare=_breaking)
    [line] = measure("made", _benchmark(spark._forgiven(broken)), str(tmp_path), seconds=1, samples=1)
    assert line["median"] is None
    assert "its own way to fail" in line["why"]


def test_this_project_may_not(tmp_path: Path) -> None:
    broken = Subject("headrace", lambda *_: Sample(1), {}, prepare=_breaking)
    with pytest.raises(ValueError, match="its own way"):
        list(measure("made", _benchmark(spark._forgiven(broken)), str(tmp_path), seconds=1, samples=1))


def _benchmark(subject: Subject) -> Benchmark:
    return Benchmark({"made": spark_reads.rows_rate()}, [subject], {}, 1)
