"""Celery on Redis."""

import time
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime
from typing import Any, ClassVar

from benchmarks import installing
from benchmarks.broker_redis import RedisNode
from benchmarks.leased_tasks import TaskQueue
from headrace.bench.queues import Dated, Timeline
from headrace.bench.servers import HOST

_TASK = "benchmark"


class CeleryNode(RedisNode):
    """The Redis server that Celery uses."""

    def find(self) -> None:
        """Make sure of the server and the client."""
        super().find()
        installing.need("celery", "celery")


class Celery(TaskQueue):
    """As documented, acknowledged late: a task that was begun when a worker died is run again, as with a lease."""

    name = "celery"
    module = __name__
    words: ClassVar[str] = (
        "synced: Redis with AOF, appendfsync always (before the answer), no snapshots; task_acks_late; no results"
    )
    api: ClassVar[Mapping[str, str]] = {
        "enqueue": "Task.apply_async for each message: it has no call for many",
        "singles": "celery worker --pool threads, from the first task that runs to the last",
        "timeline": "Task.apply_async(eta=...); celery worker --pool threads",
    }
    node: CeleryNode

    @property
    def address(self) -> str:
        """Of the Redis server."""
        return f"redis://{HOST}:{self.node.port}/0"

    def create(self, queue: str) -> None:
        """Nothing: the first message makes it."""

    def delete(self, queue: str) -> None:
        """Drop a queue."""
        with _redis(self.node.port) as client:
            client.delete(queue)

    def enqueue(self, queue: str, batches: Iterable[list[bytes]]) -> float:
        """A call a message."""
        app, task = _app(self.address, _ignore)
        with app.connection_for_write() as connection, app.amqp.Producer(connection) as producer:
            connection.ensure_connection()
            begin = time.perf_counter()
            for values in batches:
                for value in values:
                    task.apply_async((value,), queue=queue, producer=producer)
            return time.perf_counter() - begin

    def timeline(self, whole: Timeline) -> Timeline:
        """As many as can be loaded."""
        return whole.at_most(5000, 200, "a call a message, and the worker keeps all that wait in its own memory")

    def schedule(self, queue: str, batches: Iterable[Dated]) -> None:
        """A call a message."""
        app, task = _app(self.address, _ignore)
        with app.connection_for_write() as connection, app.amqp.Producer(connection) as producer:
            for values, dues in batches:
                for value, due in zip(values, dues, strict=True):
                    eta = datetime.fromtimestamp(due / 1e6, UTC)
                    task.apply_async((value,), queue=queue, eta=eta, producer=producer)

    def left(self, queue: str) -> int:
        """Those in the queue and those that workers have."""
        with _redis(self.node.port) as client:
            return int(client.llen(queue) + client.hlen("unacked"))


def _redis(port: int) -> Any:
    import redis

    return redis.Redis(HOST, port, protocol=2)


def _ignore(value: bytes) -> None:
    """What the task is where none runs."""


def _app(address: str, handle: Callable[[bytes], None]) -> tuple[Any, Any]:
    import celery

    app = celery.Celery("benchmark", broker=address, set_as_current=False)
    app.conf.update(task_acks_late=True, task_ignore_result=True, broker_connection_retry_on_startup=True)
    return app, app.task(name=_TASK)(handle)


def work(address: str, queue: str, consumers: int, record: Callable[[bytes], None]) -> None:
    """Run a worker, until it is killed."""

    def handle(value: bytes) -> None:
        record(value)

    app, _ = _app(address, handle)
    options = ["--pool", "threads", "--concurrency", str(consumers), "--queues", queue, "--loglevel", "warning"]
    app.worker_main(["worker", *options, "--without-gossip", "--without-mingle", "--without-heartbeat"])
