"""The benchmarks of leased subscriptions and their peers measure what they say, and notice a wrong result."""

import json
import os
import shutil
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from benchmarks import broker_nats, broker_rabbitmq, harness, installing, leased, leased_postgres, leased_tasks

from headrace.bench import leased_pending, leased_workloads, queues, run
from headrace.bench.measure import Benchmark, Unavailable, WrongResult, measure
from headrace.bench.payload import Payload
from headrace.bench.queues import Dated, Receiving, Take, Timeline, Worked, WorkQueue, check_all
from headrace.bench.receiver import Arrived
from headrace.bench.servers import ServerNode

UNITS = {
    "enqueue_synced": ("msg/s", True),
    "lease_ack_batch1000": ("msg/s", True),
    "lease_ack_single": ("msg/s", True),
    "timeline_error_p50_ms": ("ms", False),
    "timeline_error_p99_ms": ("ms", False),
    "timeline_error_min_ms": ("ms", False),
    "restart_1m_s": ("s", False),
    "restart_5m_s": ("s", False),
    "bytes_per_pending": ("bytes", False),
}
PEERS = {
    "enqueue_synced": {"redis", "rabbitmq", "postgres", "nats", "celery", "huey", "procrastinate"},
    "lease_ack_batch1000": {"redis", "rabbitmq", "postgres", "nats"},
    "lease_ack_single": {"redis", "rabbitmq", "postgres", "nats", "celery", "huey", "procrastinate"},
    "timeline_error_p50_ms": {"redis", "postgres", "nats", "celery", "huey", "procrastinate"},
}
TINY = Timeline(pending=100, per_second=1000, seconds=0.05)


def missing(peer: str) -> str:
    """What a peer lacks, without anything being installed for a test."""
    redis, postgres = ["redis", "hiredis"], ["psycopg"]
    needed = {
        "redis": redis,
        "nats": ["nats"],
        "rabbitmq": ["pika"],
        "postgres": postgres,
        "celery": [*redis, "celery"],
        "huey": [*redis, "huey"],
        "procrastinate": [*postgres, "procrastinate"],
    }[peer]
    lacking = [module for module in needed if find_spec(module) is None]
    if "redis" in needed and not shutil.which("redis-server"):
        lacking.append("redis-server")
    if "psycopg" in needed and not leased_postgres._found("postgres"):
        lacking.append("postgres")
    if peer == "nats":
        try:
            broker_nats.server_path()
        except Unavailable:
            lacking.append("nats-server")
    if peer == "rabbitmq" and not Path(broker_rabbitmq._PROGRAM).exists():
        lacking.append("rabbitmq-server")
    return ", ".join(lacking)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """The group with next to nothing to do."""
    whole = leased.benchmarks
    monkeypatch.setattr(leased, "benchmarks", lambda: whole(batch=50, timeline=TINY, consumers=3, million=3000))
    monkeypatch.setattr(leased_pending, "_SETTLE_S", 0.01)
    monkeypatch.setattr(leased_pending, "_MEANWHILE", 1)


def lines_of(arguments: list[str], place: Path, capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    tiny = ["--samples", "1", "--seconds", "0.001", "--directory", str(place)]
    assert harness.main(["leased", *arguments, *tiny]) == 0
    assert list(place.iterdir()) == []
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


@pytest.mark.usefixtures("small")
def test_every_name_runs_and_prints_a_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    asked = [word for name in UNITS for word in ("--only", name)]
    lines = lines_of([*asked, "--subject", "headrace"], tmp_path, capsys)
    assert sorted(line["name"] for line in lines) == sorted(f"leased.{name}" for name in UNITS)
    for line in lines:
        assert set(line) == {"name", "subject", "unit", "median", "samples", "higher_is_better", "params"}
        assert (line["unit"], line["higher_is_better"]) == UNITS[line["name"].removeprefix("leased.")]
        # Memory for so few messages is less than what comes and goes.
        assert line["median"] > 0 or line["name"] == "leased.bytes_per_pending"
        assert len(line["samples"]) == 1
        assert line["params"]["durability"]


@pytest.mark.usefixtures("small")
def test_other_ways_to_use_the_broker_come_through_their_checks(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    others = [
        "headrace_overlapped",
        "headrace_one_bus",
        "headrace_jobs",
        "headrace_standing",
        "headrace_1m_ready",
        "headrace_1m_priority",
    ]
    lines = lines_of([word for other in others for word in ("--subject", other)], tmp_path, capsys)
    assert sorted(line["subject"] for line in lines) == sorted(others)
    assert [line for line in lines if line["median"] is None] == []


def test_the_peers_of_the_contract_are_there() -> None:
    found: dict[str, set[str]] = {}
    for benchmark in leased.benchmarks():
        for name in benchmark.figures:
            found[name] = {subject.name for subject in benchmark.subjects}
            assert all({**benchmark.params, **subject.params}["durability"] for subject in benchmark.subjects)
    assert found.keys() == UNITS.keys()
    for name in UNITS:
        assert found[name] >= {"headrace", *PEERS.get(name, ())}


@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::DeprecationWarning")  # others' clients have their ways
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(
    ("peer", "subjects", "names"),
    [
        ("redis", ["redis"], ["lease_ack_single", "timeline_error_p50_ms"]),
        ("redis", ["redis", "redis_overlapped"], ["lease_ack_batch1000"]),
        ("nats", ["nats"], ["lease_ack_batch1000", "lease_ack_single", "timeline_error_p50_ms"]),
        ("postgres", ["postgres"], ["timeline_error_p50_ms"]),
        ("postgres", ["postgres", "postgres_transaction"], ["lease_ack_single"]),
        ("rabbitmq", ["rabbitmq", "rabbitmq_prefetch"], ["lease_ack_single"]),
        ("celery", ["celery"], ["timeline_error_p50_ms"]),
        ("huey", ["huey"], ["lease_ack_single"]),
        ("procrastinate", ["procrastinate"], ["lease_ack_single"]),
    ],
)
def test_a_peer_comes_through_its_checks(
    peer: str, subjects: list[str], names: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    if lacking := missing(peer):
        pytest.skip(f"{peer} is not here: {lacking}")
    asked = [word for subject in subjects for word in ("--subject", subject)]
    asked += [word for name in names for word in ("--only", name)]
    lines = lines_of(asked, tmp_path, capsys)
    assert {line["subject"] for line in lines} == set(subjects)
    assert [line for line in lines if not line["median"]] == []


def test_a_missing_peer_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(installing.os, "geteuid", lambda: 1000)
    monkeypatch.setattr(installing.shutil, "which", lambda *_, **__: None)
    installing.debian_program.cache_clear()
    leased_postgres._program.cache_clear()
    try:
        lines = []
        for peer in ("redis", "postgres", "celery"):
            [(_, benchmark)] = harness.choose(["leased"], ["enqueue_synced"], [peer])
            lines += measure("leased", benchmark, str(tmp_path), seconds=0.001, samples=1)
    finally:
        installing.debian_program.cache_clear()
        leased_postgres._program.cache_clear()
    assert [line["median"] for line in lines] == [None] * 3
    assert all("is not installed" in line["why"] for line in lines)


# A wrong result fails loudly


class Nothing(ServerNode):
    """A server that is not needed."""

    def find(self) -> None:
        pass

    def _start(self, place: str, *, synced: bool) -> None:
        pass


class InMemory(WorkQueue):
    """A queue in a list, which does as it should until something is done to it."""

    name = "list"
    words = "none"
    api = dict.fromkeys(("enqueue", "batches", "singles", "timeline"), "none")

    def __init__(self) -> None:
        super().__init__(Nothing())
        self.ready: list[bytes] = []
        self.waiting: list[tuple[int, bytes]] = []
        self.late_us = 1000
        self.unacked = 0

    def create(self, queue: str) -> None:
        pass

    def delete(self, queue: str) -> None:
        pass

    def enqueue(self, queue: str, batches: Iterable[list[bytes]]) -> float:
        del queue
        for values in batches:
            self.ready += values
        return 0.01

    def lease_batches(self, queue: str, count: int, take: Take) -> float:
        del queue
        take(self.ready[:count])
        del self.ready[:count]
        return 0.01

    def lease_singles(self, queue: str, count: int, consumers: int) -> Worked:
        del queue, consumers
        values = self.ready[:count]
        del self.ready[:count]
        return Worked(0.01, values)

    def left(self, queue: str) -> int:
        del queue
        return len(self.ready) + len(self.waiting) + self.unacked

    def schedule(self, queue: str, batches: Iterable[Dated]) -> None:
        del queue
        for values, dues in batches:
            self.waiting += zip(dues, values, strict=True)

    def receiver(self, place: str, queue: str) -> Receiving:
        del place, queue
        return FromMemory(self)


class FromMemory:
    """Hands over what was scheduled last."""

    def __init__(self, queue: InMemory) -> None:
        self._queue = queue

    @contextmanager
    def receiving(self, topic: str, count: int) -> Iterator[Any]:
        del topic
        yield lambda: self._arrived(count)

    def _arrived(self, count: int) -> Arrived:
        due = self._queue.waiting[-count:]
        del self._queue.waiting[-count:]
        return Arrived([(at + self._queue.late_us) * 1000 for at, _ in due], [value for _, value in due])

    def close(self) -> None:
        pass


def sampled(benchmark: Benchmark, place: Path) -> list[dict[str, Any]]:
    return list(measure("made", benchmark, str(place), seconds=0.001, samples=1))


def benchmark_of(queue: InMemory, workload: str) -> Benchmark:
    payload = Payload(20, 10)
    made = {
        "enqueue": queues.enqueueing(queue, payload),
        "batches": queues.leasing_batches(queue, payload),
        "singles": queues.leasing_singles(queue, payload),
        "timeline": queues.keeping_time(queue, payload, TINY),
    }[workload]
    return Benchmark(queues.timing(), [made], {}, 10)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is waited for that is not there at once."""
    monkeypatch.setattr(queues, "_SETTLED_PATIENCE_S", 0.05)
    monkeypatch.setattr(queues, "_LEAD_S", 0.1)


@pytest.mark.parametrize("workload", ["enqueue", "batches", "singles"])
def test_a_queue_that_loses_messages_is_noticed(workload: str, tmp_path: Path) -> None:
    class Lossy(InMemory):
        def enqueue(self, queue: str, batches: Iterable[list[bytes]]) -> float:
            return super().enqueue(queue, [values[:-1] for values in batches])

    with pytest.raises(WrongResult, match=r"list: 9 messages .* of 10"):
        sampled(benchmark_of(Lossy(), workload), tmp_path)


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("workload", ["enqueue", "batches", "singles", "timeline"])
def test_acks_that_are_not_heeded_are_noticed(workload: str, tmp_path: Path) -> None:
    queue = InMemory()
    queue.unacked = 3
    with pytest.raises(WrongResult, match="messages are left in the queue"):
        sampled(benchmark_of(queue, workload), tmp_path)


def test_messages_that_are_handed_over_twice_are_noticed() -> None:
    check_all([b"b", b"a"], [b"a", b"b"])
    with pytest.raises(WrongResult, match="handed over twice"):
        check_all([b"a", b"a"], [b"a", b"b"])
    with pytest.raises(WrongResult, match="3 messages were handed over of 2"):
        check_all([b"a", b"b", b"b"], [b"a", b"b"])


@pytest.mark.usefixtures("impatient")
def test_lateness_is_told_and_so_is_earliness(tmp_path: Path) -> None:
    assert [line["median"] for line in sampled(benchmark_of(InMemory(), "timeline"), tmp_path)] == [1.0, 1.0, 1.0]
    queue = InMemory()
    queue.late_us = -2000
    assert [line["median"] for line in sampled(benchmark_of(queue, "timeline"), tmp_path)] == [-2.0, -2.0, -2.0]


def test_messages_that_are_scheduled_too_late_do_not_count(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(queues, "_LEAD_S", -10.0)
    [line, *_] = sampled(benchmark_of(InMemory(), "timeline"), tmp_path)
    assert "could not be scheduled" in line["why"]


def test_a_timeline_for_somebody_slow_says_why() -> None:
    whole = Timeline(1000, 100)
    assert whole.at_most(1000, 100, "slow") is whole
    assert whole.at_most(10, 1000, "slow").params == {
        "pending": 10,
        "due_per_second": 100,
        "seconds": 1.0,
        "why_fewer": "slow",
    }


def test_a_broker_that_loses_messages_when_it_is_killed_is_noticed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(leased_pending, "_MEANWHILE", 1)
    start = leased_pending._KilledNode.kill_and_start

    def forgetful(self: leased_pending._KilledNode) -> float:
        with leased_pending.connect(self.address) as bus:
            bus.queue("bench").ack(bus.queue("bench").lease(1))
        return start(self)

    monkeypatch.setattr(leased_pending._KilledNode, "kill_and_start", forgetful)
    [first, *_] = leased_pending.benchmarks(3000)
    with pytest.raises(WrongResult, match="wrong messages were handed over"):
        sampled(first, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_what_workers_write_down_is_read_however_it_is_cut(tmp_path: Path) -> None:
    records = leased_tasks.Records(str(tmp_path / "records"))
    threads = [threading.Thread(target=lambda: [records.write(b"a" * 99) for _ in range(500)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    times, values = records.read(2000)
    for thread in threads:
        thread.join()
    assert len(times) == 2000
    assert set(values) == {b"a" * 99}
    os.truncate(tmp_path / "records", (tmp_path / "records").stat().st_size - 5)
    reader = leased_tasks.Records(str(tmp_path / "records"))
    assert sum(1 for _ in reader._new()) == 1999
    records.close()
    reader.close()


# What users get


def test_users_get_the_same_lines(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(run, "SAMPLES_MIN", 1)
    monkeypatch.setattr(leased_workloads, "_PREFETCH", 10)
    lines: list[dict[str, Any]] = []
    run.run_leased(str(tmp_path / "new"), seconds=0.01, size=50, batch=100, emit=lines.append)
    assert [*dict.fromkeys(line["name"].removeprefix("leased.") for line in lines)] == [*UNITS][:6]
    assert all(line["median"] > 0 for line in lines)
    assert list((tmp_path / "new").iterdir()) == []
