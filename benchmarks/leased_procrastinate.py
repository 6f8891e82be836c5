"""Procrastinate on PostgreSQL."""

import logging
import time
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime
from typing import Any, ClassVar

from benchmarks import installing
from benchmarks.leased_postgres import PostgresNode, connect
from benchmarks.leased_tasks import TaskQueue
from headrace.bench.payload import Payload
from headrace.bench.queues import Dated, Timeline

_TASK = "benchmark"
_POLL_S = 0.05


class ProcrastinateNode(PostgresNode):
    """The PostgreSQL server that it uses, with its tables."""

    def find(self) -> None:
        """Make sure of the server and the client."""
        super().find()
        installing.wheel("procrastinate", "procrastinate")

    def _start(self, place: str, *, synced: bool) -> None:
        super()._start(place, synced=synced)
        with _app(self.address) as app:
            app.schema_manager.apply_schema()


class Procrastinate(TaskQueue):
    """As documented; a task that was begun when a worker died is found by its missing heartbeat."""

    name = "procrastinate"
    module = __name__
    words: ClassVar[str] = "synced: PostgreSQL, fsync=on, synchronous_commit=on; done tasks are deleted"
    api: ClassVar[Mapping[str, str]] = {
        "enqueue": "Task.batch_defer of a batch",
        "singles": "run_worker(concurrency=...) with an async task, from the first that runs to the last",
        "timeline": f"configure(schedule_at=...).defer; run_worker with fetch_job_polling_interval={_POLL_S:g}",
    }
    node: ProcrastinateNode

    @property
    def address(self) -> str:
        """Of the PostgreSQL server."""
        return self.node.address

    def create(self, queue: str) -> None:
        """Nothing: the first task makes it."""

    def delete(self, queue: str) -> None:
        """Drop its tasks."""
        with connect(self.node.port) as connection:
            connection.execute("DELETE FROM procrastinate_jobs WHERE queue_name = %s", (queue,))

    def enqueue(self, queue: str, batches: Iterable[list[bytes]]) -> float:
        """A call a batch."""
        with _app(self.address) as app:
            task = app.configure_task(_TASK, queue=queue)
            begin = time.perf_counter()
            for values in batches:
                task.batch_defer(*({"value": b64encode(value).decode()} for value in values))
            return time.perf_counter() - begin

    def drained(self, queue: str, count: int, payload: Payload) -> None:
        """Looked up: its workers would take longer than there is time."""
        asked = "DELETE FROM procrastinate_jobs WHERE queue_name = %s RETURNING id, args->>'value'"
        with connect(self.node.port) as connection:
            rows = sorted(connection.execute(asked, (queue,)).fetchall())
        payload.check([[b64decode(value) for _, value in rows]], count)

    def timeline(self, whole: Timeline) -> Timeline:
        """As many as can be loaded."""
        return whole.at_most(5000, 200, "a call for each message that has a time of its own")

    def schedule(self, queue: str, batches: Iterable[Dated]) -> None:
        """A call a message."""
        with _app(self.address) as app:
            for values, dues in batches:
                for value, due in zip(values, dues, strict=True):
                    task = app.configure_task(_TASK, queue=queue, schedule_at=datetime.fromtimestamp(due / 1e6, UTC))
                    task.defer(value=b64encode(value).decode())

    def left(self, queue: str) -> int:
        """Those that are not done."""
        with connect(self.node.port) as connection:
            asked = connection.execute("SELECT count(*) FROM procrastinate_jobs WHERE queue_name = %s", (queue,))
            count: int = asked.fetchone()[0]
            return count


def _app(address: str) -> Any:
    """To be opened and closed by `with`."""
    import procrastinate

    return procrastinate.App(connector=procrastinate.SyncPsycopgConnector(conninfo=address)).open()


def work(address: str, queue: str, consumers: int, record: Callable[[bytes], None]) -> None:
    """Run a worker, until it is killed."""
    import procrastinate

    logging.disable(logging.WARNING)
    app = procrastinate.App(connector=procrastinate.PsycopgConnector(conninfo=address))

    @app.task(name=_TASK)
    async def handle(value: str) -> None:
        record(b64decode(value))

    app.run_worker(queues=[queue], concurrency=consumers, fetch_job_polling_interval=_POLL_S, delete_jobs="successful")
