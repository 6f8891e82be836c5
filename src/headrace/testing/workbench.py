"""A broker without threads, sockets or a clock: everything happens when it is told to, always in the same order."""

from collections import deque
from collections.abc import Callable
from typing import Any

from headrace.broker.broker import Broker
from headrace.broker.pending_answer import PendingAnswer
from headrace.broker.ports import Session
from headrace.broker.settings import BrokerSettings
from headrace.broker.streams import Stream
from headrace.engines.api import Store
from headrace.model.batch import NO_PRODUCER, Batch, Columns, Producer, encode, parse
from headrace.model.errors import HeadraceError
from headrace.model.reading import StreamOpen
from headrace.model.request import Request
from headrace.model.requests import Publish
from headrace.storage.disk import Disk
from headrace.storage.runtime import StorageRuntime
from headrace.testing.inline import InlineWorker

START_US = 1_800_000_000_000_000


class Workbench:
    """A broker to try things with. `now_us` is the time: set it as you like.

    >>> bench = Workbench()
    >>> bench.publish("orders", [b"a", b"b"]).base_offset
    0
    >>> bench.values("orders")
    [b'a', b'b']
    """

    def __init__(
        self,
        directory: str | None = None,
        *,
        disk: Disk | None = None,
        settings: BrokerSettings | None = None,
        now_us: int = START_US,
    ) -> None:
        self.now_us = now_us
        self.pushed: list[Any] = []
        """What the broker told the workbench's own session unasked."""
        self.failures: list[HeadraceError] = []
        """What went wrong in the background."""
        self.wakes_us: list[int] = []
        """When the broker wanted to be woken."""
        self.syncing_later = False
        """Whether the disk is slow: nothing is synced before `run`."""
        self._calls: deque[Callable[[], None]] = deque()
        self._stream = 0
        host = StorageRuntime(disk, flusher=_Flusher(self), preparer=InlineWorker())
        self.broker = Broker(
            Store(host, directory),
            self,
            settings or BrokerSettings(),
            new_id="workbench",
            version="test",
            now_us=now_us,
        )
        self.session = self.connect()
        self.run()

    def soon(self, call: Callable[[], None]) -> None:
        """A port of the broker."""
        self._calls.append(call)

    from_thread = last = soon

    def wake_at(self, time_us: int) -> None:
        """A port of the broker: here time passes only when it is told to, with `tick`."""
        self.wakes_us.append(time_us)

    def background(self, job: Callable[[], None]) -> None:
        """A port of the broker."""

        def attempt() -> None:
            try:
                job()
            except HeadraceError as error:
                self.failures.append(error)

        self.soon(attempt)

    def run(self) -> None:
        """Do all that is waiting to be done."""
        while self.step():
            pass

    def step(self) -> bool:
        """Do the first thing that is waiting to be done; whether there was one."""
        if not self._calls:
            return False
        self._calls.popleft()()
        return True

    def connect(self, name: str = "workbench", tenant: str = "") -> Session:
        """Another connection; what is pushed to any of them is in `pushed`."""
        return self.broker.connect(self.pushed.append, name, self.now_us, tenant=tenant, is_local=True)

    def begin(
        self, request: Request[Any], body: bytes | bytearray | memoryview = b"", session: Session | None = None
    ) -> Any:
        """Ask without doing what is waiting: the answer, the error or a PendingAnswer."""
        try:
            return self.broker.ask(session or self.session, request, memoryview(bytearray(body)), self.now_us)
        except HeadraceError as error:
            return error

    def ask(
        self, request: Request[Any], body: bytes | bytearray | memoryview = b"", session: Session | None = None
    ) -> Any:
        """The answer to a request, after all that is waiting has been done; an error is raised."""
        answer = self.begin(request, body, session)
        self.run()
        if isinstance(answer, PendingAnswer):
            answer = answer.outcome
            assert answer is not None, "there was never an answer"
        if isinstance(answer, HeadraceError):
            raise answer
        return answer

    def publish(
        self, topic: str, values: list[bytes], partition: int = 0, producer: Producer = NO_PRODUCER, **more: Any
    ) -> Any:
        """Publish a batch, and return the answer."""
        return self.ask(Publish(topic, partition, **more), self.batch(values, producer).data)

    def batch(self, values: list[bytes], producer: Producer = NO_PRODUCER, **columns: Any) -> Batch:
        """A batch as a producer makes it."""
        return encode(Columns(values, **columns), self.now_us, producer=producer)

    def batches(self, topic: str, partition: int = 0, offset: int = 0) -> list[Batch]:
        """All batches that can be read."""
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
        """The values of all messages that can be read."""
        return [value for batch in self.batches(topic, partition, offset) for value in batch.columns().values]

    def tick(self, seconds: float = 0) -> None:
        """Let time pass."""
        self.now_us += round(seconds * 1e6)
        self.broker.tick(self.now_us)
        self.run()

    def close(self) -> None:
        """End the broker in an orderly way; without this it is as if it was killed."""
        self.run()
        self.broker.close(self.now_us)


class _Flusher(InlineWorker):
    """Syncs at once, or when the workbench runs."""

    def __init__(self, bench: Workbench) -> None:
        super().__init__()
        self._bench = bench

    def submit(self, job: Callable[[], None]) -> None:
        """Sync."""
        if self._bench.syncing_later:
            self._bench.soon(job)
        else:
            job()
