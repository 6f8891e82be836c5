"""Power is lost at every step of finishing, rejecting and losing jobs: a job has one result, or is still there."""

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from headrace.broker.settings import BrokerSettings
from headrace.client.job_results import StoredResult, result_batch, stored_results
from headrace.errors import HeadraceError, InvalidArgument, LogFailed
from headrace.model.batch import Columns, encode
from headrace.model.job_requests import (
    REPLY_HEADER,
    RESULT_HEADER,
    RESULTS_TOPIC,
    JobFinish,
    JobId,
    ResultsOpen,
    job_id,
)
from headrace.model.leasing import Ack, Holding, Lease, Reject, SubscriptionCreate
from headrace.model.requests import Publish, TopicCreate, TopicDescribe
from headrace.testing import FaultyDisk, PowerLoss, Unsynced, Workbench

LEASE_S = 30
DONE = StoredResult("text", b"done")


@pytest.fixture
def data() -> Iterator[str]:
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").exists() else None) as directory:
        yield f"{directory}/data"


def publish_job(bench: Workbench, number: int = 0) -> JobId:
    """A job whose result is to be in partition 3."""
    end = bench.ask(ResultsOpen()).ends[3]
    id = job_id(3, end, f"{number:016}")
    headers: Any = [{REPLY_HEADER: id.text.encode()}]
    bench.ask(Publish("jobs", 0), encode(Columns([b"work"], headers=headers), bench.now_us).data)
    return id


def lease(bench: Workbench) -> Holding | None:
    answer = bench.ask(Lease("jobs", lease_ms=LEASE_S * 1000))
    portions = getattr(answer, "answer", answer).portions
    return Holding(0, portions[0].lease, portions[0].offsets) if portions else None


def results(bench: Workbench) -> dict[str, list[StoredResult]]:
    found: dict[str, list[StoredResult]] = {}
    if RESULTS_TOPIC in bench.broker._topics._by_text:
        for batch in bench.batches(RESULTS_TOPIC, 3):
            for id, result in stored_results(batch).items():
                found.setdefault(id, []).append(result)
    return found


def finish(bench: Workbench, id: JobId, holding: Holding) -> Any:
    return bench.ask(JobFinish("jobs", holding), result_batch(id.text, DONE, bench.now_us).data)


def reject(bench: Workbench, id: JobId, holding: Holding) -> Any:  # noqa: ARG001
    return bench.ask(Reject("jobs", [holding], "never"))


def vanish(bench: Workbench, id: JobId, holding: Holding) -> Any:  # noqa: ARG001
    """The holder is killed: its lease ends, and it was the last."""
    bench.tick(LEASE_S + 1)


@pytest.mark.parametrize(
    ("end", "unsynced"),
    [(finish, Unsynced.LOST), (finish, Unsynced.KEPT), (reject, Unsynced.LOST), (vanish, Unsynced.LOST)],
)
def test_a_job_has_one_result_whenever_the_power_is_lost(
    data: str, end: Callable[..., Any], unsynced: Unsynced
) -> None:
    step = 0
    outcomes = set()
    while True:
        step += 1
        path, disk = f"{data}-{step}", FaultyDisk()
        bench = Workbench(path, disk=disk)
        bench.ask(TopicCreate("jobs"))
        bench.ask(SubscriptionCreate("jobs", settings={"deliveries_max": 1}))
        id = publish_job(bench)
        holding = lease(bench)
        assert holding is not None
        disk.crash_after(step)
        try:
            end(bench, id, holding)
            answered = True
            crashed = disk.crashed
        except (PowerLoss, LogFailed, HeadraceError):
            answered, crashed = False, True
        disk.power_loss(unsynced)

        bench = Workbench(path, disk=disk, now_us=bench.now_us)
        bench.tick()
        found = results(bench).get(id.text, [])
        bench.tick(LEASE_S + 1)  # what was leased before the crash can be had again, or is dead
        after = results(bench).get(id.text, [])
        assert len(found) <= 1
        assert found == after[: len(found)]
        assert len(after) <= 1, f"after step {step}"
        left = lease(bench)
        if answered and end is not vanish:
            assert found, f"the result that was answered is lost at step {step}"
        assert bool(after) != (left is not None), "the job is either there or answered"
        outcomes.add(bool(found))
        if left is not None:  # whoever gets it then ends it
            finish(bench, id, left)
            assert len(results(bench)[id.text]) == 1
        bench.close()
        if not crashed:
            break
    assert outcomes == {True, False}, "the power was lost before and after"
    assert step > 3


def test_only_the_holder_stores_a_result(data: str) -> None:
    bench = Workbench(data)
    bench.ask(TopicCreate("jobs"))
    bench.ask(SubscriptionCreate("jobs"))
    id = publish_job(bench)
    first = lease(bench)
    bench.tick(LEASE_S + 1)
    second = lease(bench)
    assert first is not None
    assert second is not None
    (refusal,) = finish(bench, id, first).refused
    assert refusal.code == "not_lease_holder"
    assert not results(bench)
    assert not finish(bench, id, second).refused
    (refusal,) = finish(bench, id, second).refused
    assert refusal.code == "message_gone", "a repeated request changes nothing"
    assert results(bench) == {id.text: [DONE]}
    (refusal,) = bench.ask(Ack("jobs", [second])).refused
    assert refusal.code == "message_gone"


def test_a_late_result_counts_if_nobody_else_has_the_job(data: str) -> None:
    bench = Workbench(data)
    bench.ask(TopicCreate("jobs"))
    bench.ask(SubscriptionCreate("jobs"))
    id = publish_job(bench)
    holding = lease(bench)
    bench.tick(LEASE_S + 1)
    assert holding is not None
    assert not finish(bench, id, holding).refused
    assert lease(bench) is None


def test_a_failed_commit_gives_the_job_back(data: str) -> None:
    disk = FaultyDisk()
    bench = Workbench(data, disk=disk)
    bench.ask(TopicCreate("jobs"))
    bench.ask(SubscriptionCreate("jobs"))
    id = publish_job(bench)
    holding = lease(bench)
    assert holding is not None
    disk.fail_writes(1)
    with pytest.raises(HeadraceError):
        finish(bench, id, holding)
    bench.tick(LEASE_S + 1)
    again = lease(bench)
    assert again is not None
    assert not finish(bench, id, again).refused
    assert results(bench) == {id.text: [DONE]}


def test_wrong_results_are_refused(data: str) -> None:
    bench = Workbench(data)
    bench.ask(TopicCreate("jobs"))
    bench.ask(SubscriptionCreate("jobs"))
    id = publish_job(bench)
    holding = lease(bench)
    assert holding is not None
    headers: Any = [{RESULT_HEADER: b"text"}]
    wrong = [
        Columns([b"x"], headers=headers),
        Columns([b"x"], keys=[b"no id"], headers=headers),
        Columns([b"x"], keys=[b"999-\xff"], headers=headers),
        Columns([b"x", b"y"], keys=[id.text.encode()] * 2, headers=headers * 2),
        Columns([b"x" * (3 << 20)], keys=[id.text.encode()], headers=headers),
    ]
    for columns in wrong:
        with pytest.raises(InvalidArgument):
            bench.ask(JobFinish("jobs", holding), encode(columns, bench.now_us, message_bytes_max=8 << 20).data)
    two = msgspec.structs.replace(holding, offsets=[0, 1])
    with pytest.raises(InvalidArgument, match="one job"):
        bench.ask(JobFinish("jobs", two), result_batch(id.text, DONE, bench.now_us).data)
    assert not finish(bench, id, holding).refused, "it is held all the same"


def test_results_are_kept_for_result_seconds_and_the_last_of_each_job(data: str) -> None:
    bench = Workbench(data, settings=BrokerSettings(result_seconds=3600))
    bench.ask(ResultsOpen())
    settings = bench.ask(TopicDescribe(RESULTS_TOPIC)).settings
    assert (settings["retain_seconds"], settings["compact_by_key"], settings["partitions"]) == (3600.0, True, 8)
    acme = bench.connect(tenant="acme")
    assert bench.ask(ResultsOpen(), session=acme).ends == [0] * 8
    assert bench.ask(TopicDescribe(RESULTS_TOPIC), session=acme).topic == RESULTS_TOPIC
