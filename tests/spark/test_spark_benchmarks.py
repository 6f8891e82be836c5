"""The benchmarks with Spark run to their end with next to nothing to do, and come through their own checks."""

import json
from pathlib import Path
from typing import Any

import pytest
from benchmarks import harness, spark, spark_connector, spark_latency

pytestmark = pytest.mark.usefixtures("spark", "small")


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """The group with next to nothing to do."""
    whole = spark.benchmarks
    monkeypatch.setattr(harness, "GROUPS", tuple(dict.fromkeys((*harness.GROUPS, "spark"))))
    monkeypatch.setattr(spark, "benchmarks", lambda: whole(rows=2000, messages=3))
    monkeypatch.setattr(spark_latency, "_WARM_UP", 2)


def lines_of(place: Path, capsys: pytest.CaptureFixture[str], *, only: str, subjects: str) -> list[dict[str, Any]]:
    asked = [word for name in only.split() for word in ("--only", name)]
    asked += [word for subject in subjects.split() for word in ("--subject", subject)]
    assert harness.main(["spark", *asked, "--samples", "1", "--directory", str(place)]) == 0
    assert list(place.iterdir()) == []
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_batch_reads(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    lines = lines_of(tmp_path, capsys, only="batch_groupby", subjects="headrace parquet tuple_source")
    assert [line["subject"] for line in lines] == ["headrace", "parquet", "tuple_source"]
    for line in lines:
        assert line["median"] > 0, line.get("why")
        assert len(line["samples"]) == 1
        assert line["params"]["rows"] == 2000


def test_streams_and_writes(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    lines = lines_of(tmp_path, capsys, only="stream_drain sink_write", subjects="headrace")
    assert [line["name"] for line in lines] == ["spark.stream_drain", "spark.sink_write"]
    assert all(line["median"] > 0 for line in lines)


def test_the_latency_of_a_query(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    names = ["microbatch_latency_p50_ms", "microbatch_latency_p99_ms", "trigger_overhead_ms"]
    lines = lines_of(tmp_path, capsys, only=" ".join(names), subjects="headrace")
    assert [line["name"] for line in lines] == [f"spark.{name}" for name in names]
    assert all(line["median"] > 0 for line in lines)


def test_a_session_without_the_connector_tells(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    jars, place = tmp_path / "jars", tmp_path / "place"
    jars.mkdir()
    place.mkdir()
    (jars / f"{spark_connector.ARTIFACT}-1.jar").touch()
    monkeypatch.setenv(spark_connector.GIVEN, str(jars))
    [line] = lines_of(place, capsys, only="batch_count", subjects="kafka")
    assert line["median"] is None
    assert "started without" in line["why"]
