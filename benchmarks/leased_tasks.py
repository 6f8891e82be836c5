"""Task queues: workers in processes of their own run a function that writes down what it was given, and when."""

import abc
import contextlib
import importlib
import os
import struct
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from headrace.bench.measure import WrongResult, uses
from headrace.bench.payload import Payload
from headrace.bench.queues import CONSUMERS, Receiving, Worked, WorkQueue, check_all
from headrace.bench.receiver import Arrived
from headrace.bench.servers import BenchServer

_ROOT = Path(__file__).parents[1]
_HEAD = struct.Struct("<qi")
"""The time in nanoseconds, and the length of the value that follows."""
_PATIENCE_S = 40.0
_POLL_S = 0.01


class Records:
    """A file that workers append to, each record by one call, however many workers there are."""

    def __init__(self, path: str) -> None:
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        self._at = 0

    def write(self, value: bytes) -> None:
        """What a task does."""
        os.write(self._file, _HEAD.pack(time.time_ns(), len(value)) + value)

    def read(self, count: int) -> Arrived:
        """The next ones, once so many are there."""
        deadline = time.monotonic() + _PATIENCE_S
        times: list[int] = []
        values: list[bytes] = []
        while len(values) < count:
            for at, value in self._new():
                times.append(at)
                values.append(value)
            if time.monotonic() > deadline:
                raise WrongResult(f"{len(values)} messages were handed over of {count} in {_PATIENCE_S:g} s")
            time.sleep(_POLL_S)
        return Arrived(times, values)

    def _new(self) -> Iterator[tuple[int, bytes]]:
        found = os.pread(self._file, os.fstat(self._file).st_size - self._at, self._at)
        place = 0
        while len(found) - place >= _HEAD.size:
            at, length = _HEAD.unpack_from(found, place)
            start, end = place + _HEAD.size, place + _HEAD.size + length
            if end > len(found):
                break  # A record that crosses a page shows in two parts.
            yield at, found[start:end]
            place = end
        self._at += place

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)


class TaskQueue(WorkQueue, abc.ABC):
    """Its module has a function `work(address, queue, consumers, records)`, which runs a worker."""

    module: str

    @property
    @abc.abstractmethod
    def address(self) -> str:
        """Where a worker connects to."""

    def lease_singles(self, queue: str, count: int, consumers: int) -> Worked:
        """From the first task that runs to the last: a worker's start does not count."""
        with tempfile.TemporaryDirectory() as place:
            workers = Workers(self, place, queue, consumers)
            try:
                with workers.receiving(queue, count) as arrived:
                    times, values = arrived()
                self._wait_until_empty(queue)
            finally:
                workers.close()
        return Worked(max(max(times) - min(times), 1) / 1e9, values)

    def _wait_until_empty(self, queue: str) -> None:
        """A task is acknowledged after it ran, for which it has to be left some time."""
        deadline = time.monotonic() + _PATIENCE_S
        while self.left(queue) and time.monotonic() < deadline:
            time.sleep(_POLL_S)

    def drained(self, queue: str, count: int, payload: Payload) -> None:
        """By workers, and so in no order that could be checked."""
        check_all(self.lease_singles(queue, count, CONSUMERS).values, payload.expected(0, count))

    def receiver(self, place: str, queue: str) -> Receiving:
        """A worker that is always there; it has begun when it has run a first task."""
        workers = Workers(self, place, queue, CONSUMERS)
        try:
            with workers.receiving(queue, 1) as arrived:
                self.enqueue(queue, [[b"first"]])
                arrived()
        except BaseException:
            workers.close()
            raise
        return workers


class Workers:
    """A worker process, and what it writes down."""

    def __init__(self, tasks: TaskQueue, place: str, queue: str, consumers: int) -> None:
        path = os.path.join(place, f"{queue}.records")
        self._records = Records(path)
        command = [sys.executable, "-m", "benchmarks.leased_tasks", tasks.module, tasks.address, queue]
        paths = [str(_ROOT), str(_ROOT / "src"), os.environ.get("PYTHONPATH", "")]
        environment = {"PYTHONPATH": os.pathsep.join(paths), "PYTHONWARNINGS": "ignore"}
        self._server = BenchServer([*command, str(consumers), path], place, environment=environment)
        uses(self._server)

    @contextlib.contextmanager
    def receiving(self, topic: str, count: int) -> Iterator[Callable[[], Arrived]]:
        """What is given waits for so many records."""
        del topic
        yield lambda: self._records.read(count)

    def close(self) -> None:
        """End the worker."""
        self._server.stop()
        self._records.close()


def main() -> None:
    """Run a worker: the module, the address, the queue, how many consumers, and the file."""
    module, address, queue, consumers, path = sys.argv[1:]
    records = Records(path)
    importlib.import_module(module).work(address, queue, int(consumers), records.write)


if __name__ == "__main__":
    main()
