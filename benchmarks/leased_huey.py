"""Huey on Redis."""

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime
from typing import Any, ClassVar

from benchmarks import installing
from benchmarks.broker_redis import RedisNode
from benchmarks.leased_tasks import TaskQueue
from headrace.bench.queues import Dated, Timeline
from headrace.bench.servers import HOST


class HueyNode(RedisNode):
    """The Redis server that Huey uses."""

    def find(self) -> None:
        """Make sure of the server and the client."""
        super().find()
        installing.need("huey", "huey")


class Huey(TaskQueue):
    """As documented; it has no acknowledgements: a task that was begun when a worker died is lost."""

    name = "huey"
    module = __name__
    words: ClassVar[str] = (
        "synced: Redis with AOF, appendfsync always (before the answer), no snapshots; a task is removed before it "
        "runs, and lost if its worker dies; no results"
    )
    api: ClassVar[Mapping[str, str]] = {
        "enqueue": "a call of the task for each message: it has no call for many",
        "singles": "a Consumer with threads, from the first task that runs to the last",
        "timeline": "Task.schedule(eta=...); a Consumer with threads, scheduler_interval=1 s (the least there is)",
    }
    node: HueyNode

    @property
    def address(self) -> str:
        """Of the Redis server."""
        return f"redis://{HOST}:{self.node.port}/0"

    def create(self, queue: str) -> None:
        """Nothing: the first message makes it."""

    def delete(self, queue: str) -> None:
        """Drop a queue."""
        _huey(self.address, queue, _ignore)[0].flush()

    def enqueue(self, queue: str, batches: Iterable[list[bytes]]) -> float:
        """A call a message."""
        huey, task = _huey(self.address, queue, _ignore)
        huey.pending_count()
        begin = time.perf_counter()
        for values in batches:
            for value in values:
                task(value)
        return time.perf_counter() - begin

    def timeline(self, whole: Timeline) -> Timeline:
        """As many as can be loaded."""
        return whole.at_most(10_000, 1000, "a call a message")

    def schedule(self, queue: str, batches: Iterable[Dated]) -> None:
        """A call a message."""
        _, task = _huey(self.address, queue, _ignore)
        for values, dues in batches:
            for value, due in zip(values, dues, strict=True):
                task.schedule((value,), eta=datetime.fromtimestamp(due / 1e6, UTC))

    def left(self, queue: str) -> int:
        """Those in the queue and those that wait for their time."""
        huey, _ = _huey(self.address, queue, _ignore)
        return int(huey.pending_count() + huey.scheduled_count())


def _ignore(_: bytes) -> None:
    """What the task is where none runs."""


def _huey(address: str, queue: str, handle: Callable[[bytes], None]) -> tuple[Any, Any]:
    import huey

    found = huey.RedisHuey(queue, results=False, url=address)
    return found, found.task(name="benchmark")(handle)


def work(address: str, queue: str, consumers: int, record: Callable[[bytes], None]) -> None:
    """Run a consumer, until it is killed."""

    def handle(value: bytes) -> None:
        record(value)

    logging.disable(logging.INFO)
    huey, _ = _huey(address, queue, handle)
    huey.create_consumer(workers=consumers, worker_type="thread", periodic=False, check_worker_health=False).run()
