"""The benchmarks measure what they say, tell it in the agreed form, and notice a wrong result."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from benchmarks import harness, storage

from headrace.bench import log_processes, processes, run
from headrace.bench.measure import Benchmark, Figure, Sample, Subject, Unavailable, WrongResult, check, measure, rate
from headrace.bench.payload import Payload
from headrace.embedded.log import Log
from headrace.model.errors import InvalidArgument

ROOT = Path(__file__).parents[2]
UNITS = {
    "append_written": ("msg/s", True),
    "append_synced": ("msg/s", True),
    "append_single": ("msg/s", True),
    "read_list": ("msg/s", True),
    "iterate": ("msg/s", True),
    "visibility_p50_us": ("µs", False),
    "visibility_p99_us": ("µs", False),
    "recover_1gib_s": ("s", False),
    "batch_encode_us": ("µs", False),
    "batch_decode_us": ("µs", False),
    "append_synced_latency_p50_ms": ("ms", False),
    "append_synced_latency_p99_ms": ("ms", False),
}
PEERS = {
    "append_written": {"headrace_embedded", "raw_write", "sqlite", "litequeue", "persist_queue"},
    "append_synced": {"headrace_embedded", "raw_write", "sqlite", "litequeue", "persist_queue"},
    "append_single": {"raw_write", "sqlite", "litequeue", "persist_queue"},
    "read_list": {"sqlite"},
}


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """The storage group with next to nothing to do."""
    sizes = {"visibility_s": 0.02, "log_bytes": 1 << 20, "segment_bytes": 300 << 10}
    whole = storage.benchmarks
    monkeypatch.setattr(storage, "benchmarks", lambda: whole(**sizes))


def check_shape(line: dict[str, Any], samples: int) -> None:
    assert set(line) == {"name", "subject", "unit", "median", "samples", "higher_is_better", "params"}
    group, _, name = line["name"].partition(".")
    assert group == "storage"
    assert (line["unit"], line["higher_is_better"]) == UNITS[name]
    assert len(line["samples"]) == samples
    assert min(line["samples"]) <= line["median"] <= max(line["samples"])
    assert line["median"] > 0
    assert line["params"]["size"] == 100
    assert line["params"]["durability"]


@pytest.mark.usefixtures("small")
def test_every_name_of_storage_runs_and_prints_a_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    place = ["--directory", str(tmp_path)]
    assert harness.main(["storage", "--subject", "headrace", "--samples", "2", "--seconds", "0.001", *place]) == 0
    printed = capsys.readouterr()
    lines = [json.loads(line) for line in printed.out.splitlines()]
    assert sorted(names(lines)) == sorted(UNITS)
    assert {line["subject"] for line in lines} == {"headrace"}
    for line in lines:
        check_shape(line, samples=2)
    assert "headrace: 2 of 2" in printed.err
    assert list(tmp_path.iterdir()) == []


def names(lines: list[dict[str, Any]]) -> Iterator[str]:
    return (line["name"].removeprefix("storage.") for line in lines)


def test_the_peers_of_the_contract_are_there() -> None:
    found: dict[str, set[str]] = {}
    for benchmark in storage.benchmarks():
        for name in benchmark.figures:
            found[name] = {subject.name for subject in benchmark.subjects}
            assert all(subject.params["durability"] for subject in benchmark.subjects)
    assert found.keys() == UNITS.keys()
    for name, peers in PEERS.items():
        assert found[name] == {"headrace", *peers}


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("subject", ["raw_write", "sqlite"])
def test_peers_that_are_always_there_come_through_their_checks(
    subject: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    asked = ["storage", "--subject", subject, "--samples", "1", "--seconds", "0.001", "--directory", str(tmp_path)]
    assert harness.main(asked) == 0
    assert capsys.readouterr().out.count(f'"subject": "{subject}"') >= 4


def test_only_the_figures_and_subjects_asked_for_are_measured() -> None:
    [(group, benchmark)] = harness.choose(["storage"], ["storage.visibility_p99_us"], ["headrace"])
    assert (group, list(benchmark.figures)) == ("storage", ["visibility_p99_us"])
    [(_, benchmark)] = harness.choose(["storage"], ["append_written"], ["sqlite", "raw_write"])
    assert [subject.name for subject in benchmark.subjects] == ["raw_write", "sqlite"]


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["stowage"], "there is no group stowage; there are: storage"),
        (["storage", "--only", "apend"], "there is no benchmark apend; there are: storage.append_written"),
        (["storage", "--subject", "oracle"], "there is no subject oracle; there are: headrace"),
        ([], "GROUP"),
    ],
)
def test_an_unknown_name_is_refused(arguments: list[str], why: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as raised:
        harness.main(arguments)
    assert raised.value.code == 2
    assert why in capsys.readouterr().err


def test_the_module_can_be_run() -> None:
    command = [sys.executable, "-m", "benchmarks", "--help"]
    assert b"--markdown" in subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE).stdout


# Measuring


def counting(calls: list[str], name: str, seconds: float = 0.1) -> Subject:
    def sample(_: str, count: int) -> Sample:
        calls.append(name)
        return Sample(seconds * count)

    return Subject(name, sample, {"durability": "none"})


def test_subjects_take_turns(tmp_path: Path) -> None:
    calls: list[str] = []
    benchmark = Benchmark({"work": rate()}, [counting(calls, "a"), counting(calls, "b", 0.2)], {"size": 1}, 1)
    lines = list(measure("made", benchmark, str(tmp_path), seconds=1, samples=3))
    assert calls == [*"ababab"]
    assert [(line["name"], line["subject"], line["median"]) for line in lines] == [
        ("made.work", "a", 10.0),
        ("made.work", "b", 5.0),
    ]


def test_a_sample_gets_as_much_to_do_as_fills_its_time(tmp_path: Path) -> None:
    subject = counting([], "a", 0.0001)._replace(step=100)
    [line] = measure("made", Benchmark({"work": rate()}, [subject], {}), str(tmp_path), seconds=1)
    assert line["params"]["operations_per_sample"] == 10_000
    [line] = measure("made", Benchmark({"work": rate()}, [subject], {}, None, 500), str(tmp_path), seconds=1)
    assert line["params"]["operations_per_sample"] == 500


def test_a_missing_peer_is_told_without_a_figure(tmp_path: Path) -> None:
    def sample(_: str, __: int) -> Sample:
        raise Unavailable("it is not installed")

    benchmark = Benchmark({"work": rate()}, [counting([], "headrace"), Subject("peer", sample, {})], {})
    line, theirs = measure("made", benchmark, str(tmp_path), seconds=1)
    assert (theirs["median"], theirs["samples"], theirs["why"]) == (None, [], "it is not installed")
    table = harness.markdown([line, theirs]).splitlines()
    assert table[2:] == [
        "| made.work | headrace | 10.0 | msg/s | 1 |",
        "| made.work | peer | – (it is not installed) | msg/s | – |",
    ]


def test_the_table_compares_with_headrace() -> None:
    line = {"name": "storage.x", "subject": "headrace", "median": 2_000_000, "unit": "msg/s"}
    table = harness.markdown([line, {**line, "subject": "sqlite", "median": 500_000}]).splitlines()
    assert table[0] == "| name | subject | median | unit | ratio to headrace |"
    assert table[3] == "| storage.x | sqlite | 500,000 | msg/s | 0.25 |"


# A wrong result fails loudly


def test_a_wrong_result_is_an_error_that_names_the_subject(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def sample(_: str, __: int) -> Sample:
        check(False, "one message is lost")
        return Sample(1)

    wrong = Benchmark({"work": Figure("s", False, lambda _, __: 1.0)}, [Subject("headrace", sample, {})], {}, 1)
    monkeypatch.setattr(storage, "benchmarks", lambda: [wrong])
    assert harness.main(["storage", "--directory", str(tmp_path)]) == 1
    printed = capsys.readouterr()
    assert "WRONG RESULT: headrace: one message is lost" in printed.err
    assert printed.out == ""


@pytest.mark.parametrize("wrong", ["lost", "changed", "swapped", "repeated", "more"])
def test_the_check_of_the_payload_notices(wrong: str) -> None:
    payload = Payload(20, 10)
    values = list(payload.values(100))
    if wrong == "lost":
        del values[-1]
    elif wrong == "changed":
        values[50] = bytes(20)
    elif wrong == "swapped":
        values[50], values[51] = values[51], values[50]
    elif wrong == "repeated":
        values[51] = values[50]
    else:
        values.append(values[0])
    with pytest.raises(WrongResult):
        payload.check([values[:30], values[30:]], 100)


def test_a_log_that_loses_messages_is_noticed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    append_many = Log.append_many

    def lossy(self: Log, values: list[bytes]) -> range:
        return append_many(self, values[:-1])

    monkeypatch.setattr(Log, "append_many", lossy)
    [(_, benchmark)] = harness.choose(["storage"], ["append_written"], ["headrace_embedded"])
    with pytest.raises(WrongResult, match="headrace_embedded: 999 messages came back of 1000"):
        list(measure("storage", benchmark, str(tmp_path), seconds=0.001))


def test_a_log_that_is_not_synced_is_noticed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("headrace.storage.stored_log.AppendReceipt.wait", lambda *_: None)
    monkeypatch.setattr("headrace.storage.log.FileLog.request_sync", lambda _: None)
    [(_, benchmark)] = harness.choose(["storage"], ["append_synced"], ["headrace"])
    with pytest.raises(WrongResult, match="only 0 are synced"):
        list(measure("storage", benchmark, str(tmp_path), seconds=0.001))


def test_a_process_that_dies_is_noticed() -> None:
    ours, theirs = processes.spawn.Pipe()
    theirs.close()
    with pytest.raises(WrongResult, match="the other process ended without an answer"):
        log_processes._received(ours)


def failing(*_: object) -> None:
    raise ValueError("no such thing")


def test_a_process_that_fails_tells_why(capfd: pytest.CaptureFixture[str]) -> None:
    ours, theirs = processes.spawn.Pipe()
    with log_processes._killed_at_end(failing, theirs), pytest.raises(WrongResult, match="no such thing"):
        log_processes._received(ours)
    assert capfd.readouterr() == ("", "")


# What users get


def test_users_get_the_same_lines(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(run, "SAMPLES_MIN", 1)
    lines: list[dict[str, Any]] = []
    run.run(str(tmp_path / "new"), seconds=0.005, size=50, batch=10, emit=lines.append)
    assert list(dict.fromkeys(names(lines))) == [
        "append_written",
        "append_synced",
        "append_single",
        "read_list",
        "iterate",
        "visibility_p50_us",
        "visibility_p99_us",
    ]
    assert all(line["median"] > 0 and line["params"]["size"] == 50 for line in lines)
    assert list((tmp_path / "new").iterdir()) == []


@pytest.mark.parametrize(("size", "batch"), [(0, 1), (100, 0), (100, 1 << 20), (16 << 20, 1000)])
def test_impossible_sizes_are_refused(size: int, batch: int, tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="cannot be measured"):
        run.run(str(tmp_path), seconds=1, size=size, batch=batch, emit=print)
