"""A message that expired while somebody had it in hand is over as soon as it is back."""

from pathlib import Path

import pytest
from tests.faults.leased_queue import Queue, parts
from tests.faults.leased_sight import contents

from headrace.broker.pending_answer import PendingAnswer
from headrace.model.leasing import Ack, Lease, Release


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return tmp_path


def waiting(queue: Queue, **more: int) -> PendingAnswer:
    answer = queue.bench.begin(Lease("jobs", wait_ms=60_000, **more))
    queue.bench.run()
    assert isinstance(answer, PendingAnswer)
    return answer


def values(answer: PendingAnswer) -> list[bytes | None]:
    assert answer.outcome is not None
    return [read.value for read in contents(parts(answer.outcome)[1])]


@pytest.mark.parametrize("delay_ms", [0, 5000])
def test_it_is_dead_at_once_when_it_is_given_back(place: Path, delay_ms: int) -> None:
    queue = Queue(place, expired="dead")
    queue.publish("a", expires=1)
    held = queue.lease(lease_ms=60_000)
    queue.bench.tick(2)
    assert queue.info().leased == 1
    queue.settle(Release, held["a"], delay_ms=delay_ms)
    batch = queue.bench.batches("jobs.dead")[0]  # without a tick, and without anybody asking for the subscription
    assert batch.columns().headers[0]["headrace-dead-reason"] == b"expired"  # type: ignore[index]
    assert queue.info().dead == 1


def test_whoever_waits_is_not_given_it(place: Path) -> None:
    queue = Queue(place)
    queue.publish("a", expires=1)
    held = queue.lease(lease_ms=60_000)
    answer = waiting(queue)
    queue.bench.now_us += 2_000_000
    queue.settle(Release, held["a"], delay_ms=0)
    queue.publish("b")
    assert values(answer) == [b"b"]


def test_it_expires_though_it_was_being_acknowledged_late(place: Path) -> None:
    """Its lease had ended, the acknowledgement could not be written, and its time came in between."""
    queue = Queue(place)
    queue.publish("a", expires=2)
    held = queue.lease(lease_ms=1000)
    queue.bench.tick(1.5)
    index = next(iter(queue.bench.broker._subscriptions)).indexes[0]
    reserved = index.reserve([0])
    assert index.pending.expired(queue.in_seconds(1)) == []
    queue.bench.now_us += 1_000_000
    index.restore(reserved, queue.bench.now_us)
    queue.bench.tick()
    assert queue.info().ready == 0
    assert queue.settle(Ack, held["a"]) == ["message_gone"]
