"""The benchmarks of the broker and its peers measure what they say, notice a wrong result, and stop their servers."""

import json
import shutil
import sys
import time
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from benchmarks import broker, broker_kafka, broker_nats, broker_rabbitmq, harness, installing

from headrace.bench import broker_workloads
from headrace.bench import measure as measuring
from headrace.bench.brokers import Comparison, PublishPace, check_shares
from headrace.bench.measure import Benchmark, Sample, Subject, Unavailable, WrongResult, duration, measure
from headrace.bench.payload import Payload
from headrace.bench.receiver import Receiver
from headrace.bench.servers import BenchServer, ServerNode, answers

UNITS = {
    "publish_synced": ("msg/s", True),
    "publish_written": ("msg/s", True),
    "consume": ("msg/s", True),
    "latency_p50_ms": ("ms", False),
    "latency_p99_ms": ("ms", False),
    "latency_synced_p50_ms": ("ms", False),
    "latency_synced_p99_ms": ("ms", False),
    "publish_single_100_clients": ("msg/s", True),
    "idle_rss_mb": ("MB", False),
    "ready_s": ("s", False),
    "install_mb": ("MB", False),
}
FOUR = {"redis", "nats", "rabbitmq", "kafka"}
PEERS = {name: {"redis", "nats"} if name == "publish_single_100_clients" else FOUR for name in UNITS}


def missing(peer: str) -> str:
    """What a peer lacks, without anything being installed for a test."""
    needed = {
        "redis": ["redis", "hiredis"],
        "nats": ["nats"],
        "rabbitmq": ["pika", "rstream"],
        "kafka": ["confluent_kafka"],
    }
    lacking = [module for module in needed[peer] if find_spec(module) is None]
    if peer == "redis" and not shutil.which("redis-server"):
        lacking.append("redis-server")
    if peer == "nats":
        try:
            broker_nats.server_path()
        except Unavailable:
            lacking.append("nats-server")
    if peer == "rabbitmq" and not Path(broker_rabbitmq._PROGRAM).exists():
        lacking.append("rabbitmq-server")
    if peer == "kafka" and not (shutil.which("java") and broker_kafka.jars_directory().is_dir()):
        lacking.append("Kafka's jars")
    return ", ".join(lacking)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """The group with next to nothing to do."""
    whole = broker.benchmarks
    monkeypatch.setattr(broker, "benchmarks", lambda: whole(latency_s=0.02, clients=3))
    monkeypatch.setattr(broker_kafka, "_WARM_UPS", 1)
    monkeypatch.setattr(broker_kafka, "_WARM_UP_COUNT", 1000)
    monkeypatch.setattr(broker_kafka, "_WARM_UP_SINGLES", 1)


def lines_of(arguments: list[str], place: Path, capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    tiny = ["--samples", "1", "--seconds", "0.001", "--directory", str(place)]
    assert harness.main(["broker", *arguments, *tiny]) == 0
    assert list(place.iterdir()) == []
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


@pytest.mark.usefixtures("small")
def test_every_name_runs_and_prints_a_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    names = [name for name in UNITS if name != "install_mb"]  # which needs a package registry
    asked = [word for name in names for word in ("--only", name)]
    lines = lines_of([*asked, "--subject", "headrace"], tmp_path, capsys)
    assert sorted(line["name"] for line in lines) == sorted(f"broker.{name}" for name in names)
    for line in lines:
        assert set(line) == {"name", "subject", "unit", "median", "samples", "higher_is_better", "params"}
        assert (line["unit"], line["higher_is_better"]) == UNITS[line["name"].removeprefix("broker.")]
        assert line["median"] > 0
        assert len(line["samples"]) == 1
        assert line["params"]["durability"]


def test_the_peers_of_the_contract_are_there() -> None:
    found: dict[str, set[str]] = {}
    for benchmark in broker.benchmarks():
        for name in benchmark.figures:
            found[name] = {subject.name for subject in benchmark.subjects}
            assert all(subject.params["durability"] for subject in benchmark.subjects)
    assert found.keys() == UNITS.keys()
    for name, peers in PEERS.items():
        assert found[name] >= {"headrace", *peers}


@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::DeprecationWarning")  # others' clients have their ways
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(
    ("peer", "subjects"),
    [
        ("redis", ["redis", "redis_tuned"]),
        ("nats", ["nats", "nats_tuned"]),
        ("rabbitmq", ["rabbitmq", "rabbitmq_stream"]),
        ("kafka", ["kafka"]),
    ],
)
def test_a_peer_comes_through_its_checks(
    peer: str, subjects: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    if lacking := missing(peer):
        pytest.skip(f"{peer} is not here: {lacking}")
    asked = [word for subject in subjects for word in ("--subject", subject)]
    slow = peer in ("rabbitmq", "kafka")  # to start
    names = ["publish_written"] if slow else [*UNITS][:9]
    asked += [word for name in names for word in ("--only", name)]
    lines = lines_of(asked, tmp_path, capsys)
    assert {line["subject"] for line in lines} == set(subjects)
    assert [line for line in lines if not line["median"]] == []


def test_a_missing_peer_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(installing.os, "geteuid", lambda: 1000)
    monkeypatch.setattr(installing.shutil, "which", lambda *_, **__: None)
    installing.debian_program.cache_clear()
    try:
        [(_, benchmark)] = harness.choose(["broker"], ["consume"], ["redis"])
        [line] = measure("broker", benchmark, str(tmp_path), seconds=0.001, samples=1)
    finally:
        installing.debian_program.cache_clear()
    assert line["median"] is None
    assert "redis-server is not installed" in line["why"]


# A wrong result fails loudly


def test_a_broker_that_loses_messages_is_noticed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    publish = broker_workloads.Headrace.publish

    def lossy(self: broker_workloads.Headrace, topic: str, batches: Iterable[list[bytes]]) -> float:
        return publish(self, topic, [values[:-1] for values in batches])

    monkeypatch.setattr(broker_workloads.Headrace, "publish", lossy)
    monkeypatch.setattr(broker_workloads, "_PATIENCE_S", 0.2)
    [(_, benchmark)] = harness.choose(["broker"], ["publish_written"], ["headrace"])
    with pytest.raises(WrongResult, match="headrace: 999 messages came back of 1000"):
        list(measure("broker", benchmark, str(tmp_path), seconds=0.001))
    assert list(tmp_path.iterdir()) == []


def test_values_that_were_not_published_are_noticed() -> None:
    payload = Payload(20, 10)
    values = list(payload.values(20))
    comparison = Comparison(payload)
    comparison.take(values[:10])
    with pytest.raises(WrongResult, match="wrong values between offset 10 and 20"):
        comparison.take(values[11:] + values[10:11])
    with pytest.raises(WrongResult, match="10 messages came back of 20"):
        comparison.finish(20)


@pytest.mark.parametrize("seen", ["ba", "ab", "abdcx", "abdd", "abc", "acbd"])
def test_shares_of_clients_must_be_whole_and_in_order(seen: str) -> None:
    shares = [[b"a", b"b"], [b"c", b"d"]]
    check_shares([b"c", b"a", b"b", b"d"], shares)
    if seen == "acbd":
        check_shares([letter.encode() for letter in seen], shares)
        return
    with pytest.raises(WrongResult):
        check_shares([letter.encode() for letter in seen], shares)


def failing(_: str, __: int, ___: Any) -> Any:
    raise ValueError("no such thing")


def test_a_receiver_that_fails_is_noticed() -> None:
    receiver = Receiver(failing)
    try:
        with pytest.raises(WrongResult, match="no such thing"), receiver.receiving("topic", 1):
            pytest.fail("it cannot have been ready")
    finally:
        receiver.close()


def test_a_message_counts_from_when_it_was_due_if_the_call_before_held_it_up() -> None:
    pace = PublishPace(1000)
    before = pace.wait()
    time.sleep(0.02)
    assert pace.wait() - before < 5_000_000
    assert pace.wait() - before >= 20_000_000


# Servers are stopped


class Sleeping(ServerNode):
    """A server that does nothing, in two processes."""

    def find(self) -> None:
        pass

    def _start(self, place: str, *, synced: bool) -> None:  # noqa: ARG002
        program = "import subprocess, time; subprocess.Popen(['sleep', '60']); open('up', 'w').close(); time.sleep(60)"
        self._launch([sys.executable, "-c", program], place, (Path(place) / "up").exists)


def test_a_server_is_stopped_when_a_sample_is_interrupted(tmp_path: Path) -> None:
    node = Sleeping()
    processes: list[int] = []

    def sample(_: str, __: int) -> Sample:
        processes.extend(node._servers[0]._processes())
        raise KeyboardInterrupt

    subject = Subject("slow", sample, {}, 1, lambda place: node.start(place, synced=False), node.stop)
    with pytest.raises(KeyboardInterrupt):
        list(measure("made", Benchmark({"s": duration()}, [subject], {}, 1), str(tmp_path), seconds=1))
    assert len(processes) == 2
    assert not any(Path(f"/proc/{process}/cmdline").exists() and alive(process) for process in processes)
    assert list(tmp_path.iterdir()) == []


def test_servers_sleep_while_another_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "_AWAKE_S", 0.1)  # until signals have arrived
    shared, other = Sleeping(), Sleeping()
    seen: list[tuple[str, str, str]] = []

    def states(node: ServerNode) -> str:
        processes = node._servers[0]._processes()
        return "".join(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] for process in processes)

    def subject(name: str, node: ServerNode) -> Subject:
        def sample(_: str, __: int) -> Sample:
            seen.append((name, states(shared), states(other)))
            return Sample(1.0)

        return Subject(name, sample, {}, 1, lambda place: node.start(place, synced=False), node.stop)

    subjects = [subject("a", shared), subject("b", other), subject("c", shared)]
    list(measure("made", Benchmark({"s": duration()}, subjects, {}, 1), str(tmp_path), seconds=1, samples=2))
    assert seen == [("a", "SS", "TT"), ("b", "TT", "SS"), ("c", "SS", "TT")] * 2


def alive(process: int) -> bool:
    return bool(Path(f"/proc/{process}/cmdline").read_bytes())  # nothing is left of one that only was not waited for


def test_a_shared_server_stops_with_its_last_user(tmp_path: Path) -> None:
    node = Sleeping()
    node.start(str(tmp_path), synced=False)
    node.start(str(tmp_path), synced=False)
    node.stop()
    assert node.memory_bytes > 0
    assert node.ready_s > 0
    node.stop()
    assert node.memory_bytes == 0


def test_a_server_that_ends_says_why(tmp_path: Path) -> None:
    server = BenchServer([sys.executable, "-c", "print('no room'); raise SystemExit(3)"], str(tmp_path))
    with pytest.raises(Unavailable, match="it ended with status 3: no room"):
        server.wait_until(lambda: False)
    with pytest.raises(Unavailable, match="does not start"):
        BenchServer(["/nowhere/server"], str(tmp_path))


def test_nobody_answers_at_a_port_that_is_free() -> None:
    assert not answers(1, b"PING", b"PONG")
