"""A broker with the server's scheduler and a virtual clock, without threads and sockets: every run is the same."""

import os
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from headrace.broker.broker import Broker
from headrace.broker.definitions_mirror import SharedDefinitionsStore
from headrace.broker.pending_answer import PendingAnswer
from headrace.broker.ports import Session
from headrace.broker.settings import BrokerSettings
from headrace.broker.streams import Stream
from headrace.engines.api import Store
from headrace.model.batch import NO_PRODUCER, Batch, Columns, Producer, encode, parse
from headrace.model.errors import HeadraceError
from headrace.model.identity import ANONYMOUS, Identity
from headrace.model.middleware import MiddlewareFactory
from headrace.model.reading import StreamOpen
from headrace.model.request import Request
from headrace.model.requests import Publish
from headrace.plugins import MIDDLEWARE, load_plugin
from headrace.storage.disk import Disk
from headrace.storage.runtime import StorageRuntime
from headrace.storage.worker import Worker
from headrace.testing.inline import InlineWorker
from headrace.testing.virtual_loop import SteppedScheduler, VirtualLoop

START_US = 1_800_000_000_000_000
"""The time at which a workbench starts."""


class Workbench:
    """A broker for tests. It runs what it scheduled in the server's order, and only in `run`, `step`, `ask` and `tick`.

    `now_us` is the broker's time, in microseconds since 1970: set it as you like, or let time pass with `tick`.

    >>> bench = Workbench()
    >>> bench.publish("orders", [b"a", b"b"]).base_offset
    0
    >>> bench.values("orders")
    [b'a', b'b']
    """

    def __init__(
        self,
        directory: str | os.PathLike[str] | None = None,
        *,
        disk: Disk | None = None,
        settings: BrokerSettings | None = None,
        now_us: int = START_US,
        middleware: Mapping[str, MiddlewareFactory] | None = None,
        definitions: Callable[["Workbench"], SharedDefinitionsStore] | None = None,
        flusher: Worker | None = None,
    ) -> None:
        """A broker on this disk; `middleware` by name is found besides that of installed packages.

        `definitions` returns where the security definitions are, given the broker's ports; by default in the journal.
        `flusher` runs the syncs, instead of what the attributes about syncs say.
        """
        self._middleware = dict(middleware or {})
        self.now_us = now_us
        self.pushed: list[Any] = []
        """What the broker pushed to sessions."""
        self.ended: list[tuple[Session, HeadraceError]] = []
        """Sessions that the broker has ended, and why."""
        self.failures: list[HeadraceError] = []
        """Errors of background jobs."""
        self.wakes_us: list[int] = []
        """The times at which the broker asked to be woken."""
        self.syncing_later = False
        """Whether the disk is slow: syncs run in steps of their own, else at once."""
        self.holding_syncs = False
        """Whether the disk does not answer: syncs do not return before `release_syncs`."""
        self.held_syncs: list[Callable[[], None]] = []
        self.holding_workers = False
        """Whether the jobs of worker threads do not run before `release_workers`, as if they did not return."""
        self.held_jobs: list[Callable[[], None]] = []
        self.threads = 0
        """Worker threads that the broker has started and not dismissed."""
        self._loop = VirtualLoop()
        scheduler = SteppedScheduler(self._loop, lambda: self.now_us / 1e6)
        self.call_soon = scheduler.call_soon
        self.call_at_turn_end = scheduler.call_at_turn_end
        self.call_threadsafe = scheduler.call_threadsafe
        self._stream = 0
        host = StorageRuntime(disk, flusher=flusher or _Flusher(self), preparer=InlineWorker())
        self.broker = Broker(
            Store(host, None if directory is None else os.fspath(directory)),
            self,
            settings or BrokerSettings(),
            new_id="workbench",
            version="test",
            now_us=now_us,
            load_middleware=self._load_middleware,
            definitions=None if definitions is None else definitions(self),
        )
        self.session = self.connect()
        self.run()

    def _load_middleware(self, name: str) -> MiddlewareFactory:
        found = self._middleware.get(name)
        return load_plugin(MIDDLEWARE, name) if found is None else found

    def wake_at(self, time_us: int) -> None:
        """Note when the broker wants to be woken: here time passes only in `tick`."""
        self.wakes_us.append(time_us)

    def background(self, job: Callable[[], None]) -> None:
        """Run a job of the background thread in a step of its own; its error is added to `failures`."""
        self.run_on_thread(partial(self._attempt, job))

    def new_worker(self, name: str) -> "_StepWorker":  # noqa: ARG002
        """A thread that runs each job in a step of its own, unless `holding_workers`."""
        return _StepWorker(self)

    def release_workers(self) -> None:
        """Let the jobs run that `holding_workers` held, and those that come."""
        self.holding_workers = False
        held, self.held_jobs = self.held_jobs, []
        for job in held:
            self.run_on_thread(job)

    def release_syncs(self) -> None:
        """Let the syncs run that `holding_syncs` held, and those that come."""
        self.holding_syncs = False
        held, self.held_syncs = self.held_syncs, []
        for job in held:
            self.run_on_thread(job)

    def run_on_thread(self, job: Callable[[], None]) -> None:
        """Run a job that the server would run on another thread in a step of its own, outside the scheduler's turns."""
        self._loop.call_soon(job)

    def _attempt(self, job: Callable[[], None]) -> None:
        try:
            job()
        except HeadraceError as error:
            self.failures.append(error)

    def run(self) -> None:
        """Run all callbacks that are scheduled, and those that they schedule."""
        while self.step():
            pass

    def step(self) -> bool:
        """Run the next callback that is scheduled; whether there was one."""
        return self._loop.step()

    def connect(self, name: str = "workbench", tenant: str = "", identity: Identity = ANONYMOUS) -> Session:
        """Open a session; what the broker pushes to it is added to `pushed`, and `ended` tells why it ended."""
        session = self.broker.connect(
            self.pushed.append,
            name,
            self.now_us,
            identity=identity,
            tenant=tenant,
            is_local=True,
            end=lambda error: self._end(session, error),
        )
        return session

    def _end(self, session: Session, error: HeadraceError) -> None:
        self.ended.append((session, error))
        self.broker.disconnect(session, self.now_us)

    def begin(
        self, request: Request[Any], body: bytes | bytearray | memoryview = b"", session: Session | None = None
    ) -> Any:
        """Send a request and run no callbacks: returns the answer, the error or a PendingAnswer."""
        try:
            return self.broker.ask(session or self.session, request, memoryview(bytearray(body)), self.now_us)
        except HeadraceError as error:
            return error

    def ask(
        self, request: Request[Any], body: bytes | bytearray | memoryview = b"", session: Session | None = None
    ) -> Any:
        """Send a request, run all callbacks and return the answer; an error is raised."""
        answer = self.begin(request, body, session)
        self.run()
        if isinstance(answer, PendingAnswer):
            answer = answer.outcome
            assert answer is not None, "the request is still waiting: begin it instead, and let time pass"
        if isinstance(answer, HeadraceError):
            raise answer
        return answer

    def publish(
        self, topic: str, values: list[bytes], partition: int = 0, producer: Producer = NO_PRODUCER, **more: Any
    ) -> Any:
        """Publish a batch and return the answer."""
        return self.ask(Publish(topic, partition, **more), self.batch(values, producer).data)

    def batch(self, values: list[bytes], producer: Producer = NO_PRODUCER, **columns: Any) -> Batch:
        """Encode a batch as a producer does."""
        return encode(Columns(values, **columns), self.now_us, producer=producer)

    def batches(self, topic: str, partition: int = 0, offset: int = 0) -> list[Batch]:
        """Read all batches of a partition from an offset on."""
        stream = self.open_stream(topic, partition, offset)
        found: list[Batch] = []
        while (slice_ := stream.read(1 << 20, self.now_us)) is not None:
            position = 0
            while position < len(slice_.view):
                batch = parse(slice_.view, position)
                batch.verify()
                found.append(batch)
                position += batch.length
        stream.close()
        return found

    def open_stream(
        self, topic: str, partition: int = 0, offset: int = 0, on_ready: Callable[[], None] = lambda: None
    ) -> Stream:
        """A stream without a bound on its credit; an error is raised."""
        self._stream += 1
        stream = self.begin(StreamOpen(topic, partition, offset, 1 << 60, self._stream))
        if isinstance(stream, HeadraceError):
            raise stream
        assert isinstance(stream, Stream)
        stream.start(on_ready)
        return stream

    def values(self, topic: str, partition: int = 0, offset: int = 0) -> list[bytes | None]:
        """Read the values of all messages of a partition from an offset on."""
        return [value for batch in self.batches(topic, partition, offset) for value in batch.columns().values]

    def tick(self, seconds: float = 0) -> None:
        """Let time pass, wake the broker and run all callbacks."""
        self.now_us += round(seconds * 1e6)
        self.broker.tick(self.now_us)
        self.run()

    def close(self) -> None:
        """Stop the broker in order; a workbench that is not closed is as good as killed."""
        self.run()
        self.broker.close(self.now_us)


class _Flusher(InlineWorker):
    """Syncs at once, in a step of its own when the disk is slow, or when a test says so."""

    def __init__(self, bench: Workbench) -> None:
        super().__init__()
        self._bench = bench

    def submit(self, job: Callable[[], None]) -> None:
        """Sync."""
        if self._bench.holding_syncs:
            self._bench.held_syncs.append(job)
        elif self._bench.syncing_later:
            self._bench.run_on_thread(job)
        else:
            job()


class _StepWorker:
    """A worker thread whose jobs run in steps of their own."""

    def __init__(self, bench: Workbench) -> None:
        self._bench = bench
        bench.threads += 1

    def submit(self, job: Callable[[], None]) -> None:
        """Run a job in a step, or hold it."""
        if self._bench.holding_workers:
            self._bench.held_jobs.append(job)
        else:
            self._bench.run_on_thread(job)

    def dismiss(self) -> None:
        """Count a thread less."""
        self._bench.threads -= 1
