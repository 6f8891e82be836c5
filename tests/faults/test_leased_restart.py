"""What ordinary use leaves behind must be there, and no more, when the broker comes back."""

from itertools import count as count_up
from pathlib import Path

import pytest
from tests.faults.leased_queue import Queue

from headrace.model.batch import Columns, encode
from headrace.model.leasing import Ack, EditMatching, MessageChange, Redrive, Reject, Selection
from headrace.model.requests import Publish

CHUNK = 4096
numbers = count_up()


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return tmp_path


def publish(queue: Queue, count: int, **columns: object) -> None:
    shared = {name: [value] * count for name, value in columns.items()}
    values = [b"%d" % next(numbers) for _ in range(count)]
    queue.bench.ask(Publish("jobs", 0), encode(Columns(values, **shared), queue.bench.now_us).data)  # type: ignore[arg-type]


def drain(queue: Queue) -> int:
    total = 0
    while held := queue.lease(1000):
        queue.settle(Ack, *held.values())
        total += len(held)
    return total


def test_a_cancelled_batch_across_two_chunks_does_not_keep_the_broker_from_starting(place: Path) -> None:
    queue = Queue(place, journal_bytes=1 << 24)  # no snapshot: the journal is heard from the beginning
    publish(queue, CHUNK - 100)
    publish(queue, 200, dues=queue.in_seconds(3600), keys=b"cancelled")
    publish(queue, CHUNK - 100)
    kept = queue.lease(1, lease_ms=3_600_000)
    selection = Selection(key=b"cancelled")
    answer = queue.bench.ask(EditMatching("jobs", selection, MessageChange(delete=True), messages_max=1000))
    assert len(answer.outcomes) == 200
    assert drain(queue) == 2 * CHUNK - 201
    queue.restart()
    assert queue.info().leased == len(kept) == 1
    publish(queue, 3)
    assert drain(queue) == 3


def test_a_redriven_batch_across_two_chunks_does_not_keep_the_broker_from_starting(place: Path) -> None:
    """Redriven messages are for one subscription: another one passes over them, and settles whole chunks by that."""
    queue = Queue(place, journal_bytes=1 << 24)
    publish(queue, 200)
    held = queue.lease(200)
    queue.settle(Reject, *held.values())
    publish(queue, CHUNK - 300)
    queue.lease(1, "other", lease_ms=3_600_000)
    queue.bench.ask(Redrive("jobs", "default", Selection(), 200))
    publish(queue, CHUNK - 100)
    while held := queue.lease(1000, "other"):
        queue.settle(Ack, *held.values(), subscription="other")
    queue.restart()
    assert queue.info("other").leased == 1
    publish(queue, 3)
    assert len(queue.lease(1000, "other")) == 3
    assert queue.info().ready == 2 * CHUNK - 197
