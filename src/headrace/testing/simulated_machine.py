"""What a simulated process touches: a disk and a store at which it dies on command, and a writer without real threads.

The store is reached over a simulated network: requests and answers take time, are lost, or arrive when nobody waits for
them any more, also after the death of the process that sent them.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from headrace.model.errors import StoreUnavailable, Timeout
from headrace.storage.disk import Disk, OpenFile
from headrace.storage.replicated.wal import IN_FLIGHT_MAX, PendingObject
from headrace.storage.replicated.writer import WalWriter
from headrace.storage.stores.store import KeyExists, SharedStore, StoredObject, VersionMismatch
from headrace.testing.simulation import SimulatedProcess, Simulation

T = TypeVar("T")


class CrashPlan:
    """Kills the first process that gets so far: at the n-th step of something that nodes do, such as `claim`."""

    def __init__(self, activity: str, steps: int) -> None:
        self.activity = activity
        self.steps = steps
        """How many are left; 0: somebody was killed."""

    def is_last(self, activity: str) -> bool:
        """Count a step of a node that does this; whether it is the last one."""
        if activity != self.activity or not self.steps:
            return False
        self.steps -= 1
        return not self.steps


class CrashPoint:
    """Counts what a process does to its disk and its store, and kills it at the n-th such step."""

    def __init__(self, simulation: Simulation, process: SimulatedProcess) -> None:
        self.simulation = simulation
        self.process = process
        self.steps = 0
        self.kill_at: int | None = None
        """The step at which the process dies; None: it lives."""
        self.plan: CrashPlan | None = None
        self.label: Callable[[], str] = lambda: ""
        """Says what the process is doing, for `killed_in`."""
        self.killed_in = ""
        """What the process was doing when it died."""

    def step(self, what: str, torn: Callable[[], None] = lambda: None) -> None:
        """Count a step; if it is the last one, does what is left of it, and kills the process."""
        self.process.check()
        self.steps += 1
        if self.steps == self.kill_at or (self.plan is not None and self.plan.is_last(self.label())):
            self.killed_in = f"{self.label()}: {what}"
            torn()
            self.process.die()


class CrashingDisk(Disk):
    """The disk of a machine as one process sees it. What the process has changed stays after its death."""

    def __init__(self, inner: Disk, point: CrashPoint) -> None:
        self._inner = inner
        self._point = point

    def open(self, path: str, *, write: bool = False, create: bool = False) -> OpenFile:
        """Open a file."""
        if create:
            self._point.step(f"create {path}")
        else:
            self._point.process.check()
        return self._inner.open(path, write=write, create=create)

    def close(self, fd: int) -> None:
        """Close a file; also that of a dead process."""
        self._inner.close(fd)

    def write(self, file: OpenFile, position: int, data: bytes | bytearray | memoryview) -> None:
        """Write, or write a part and die."""

        def tear() -> None:
            self._inner.write(file, position, bytes(data)[: self._point.simulation.random.randint(0, len(data))])

        self._point.step(f"write {file.path}", tear)
        self._inner.write(file, position, data)

    def truncate(self, file: OpenFile, length: int) -> None:
        """Set a file's length."""
        self._point.step(f"truncate {file.path}")
        self._inner.truncate(file, length)

    def read(self, file: OpenFile, position: int, length: int) -> bytes:
        """Read."""
        self._point.process.check()
        return self._inner.read(file, position, length)

    def size(self, file: OpenFile) -> int:
        """The length of a file."""
        self._point.process.check()
        return self._inner.size(file)

    def sync(self, file: OpenFile) -> None:
        """Sync."""
        self._point.step(f"sync {file.path}")
        self._inner.sync(file)

    def map(self, file: OpenFile, length: int, *, write: bool = False) -> memoryview:
        """Map a file."""
        self._point.process.check()
        return self._inner.map(file, length, write=write)

    def exists(self, path: str) -> bool:
        """Whether there is something at the path."""
        self._point.process.check()
        return self._inner.exists(path)

    def is_directory(self, path: str) -> bool:
        """Whether there is a directory at the path."""
        self._point.process.check()
        return self._inner.is_directory(path)

    def names(self, path: str) -> list[str]:
        """The names in a directory."""
        self._point.process.check()
        return self._inner.names(path)

    def make_directory(self, path: str, *, sync: bool = True, private: bool = False) -> None:
        """Make a directory."""
        self._point.step(f"make {path}")
        self._inner.make_directory(path, sync=sync, private=private)

    def sync_directory(self, path: str) -> None:
        """Sync a directory."""
        self._point.process.check()
        self._inner.sync_directory(path)

    def rename(self, source: str, target: str, *, sync: bool = True) -> None:
        """Rename."""
        self._point.step(f"rename {source} {target}")
        self._inner.rename(source, target, sync=sync)

    def remove(self, path: str, *, sync: bool = True) -> None:
        """Remove a file."""
        self._point.step(f"remove {path}")
        self._inner.remove(path, sync=sync)

    def remove_directory(self, path: str) -> None:
        """Remove a directory, or a part of what is in it, and die."""

        def tear() -> None:
            names = [name for name in self._inner.names(path) if not self._inner.is_directory(f"{path}/{name}")]
            for name in names[: self._point.simulation.random.randint(0, len(names))]:
                self._inner.remove(f"{path}/{name}")

        self._point.step(f"remove {path}", tear)
        self._inner.remove_directory(path)

    def lock(self, file: OpenFile, *, wait: bool = False, shared: bool = False) -> bool:
        """Take a lock; nobody waits for one in a simulation."""
        assert not wait
        return self._inner.lock(file, shared=shared)

    def unlock(self, file: OpenFile) -> None:
        """Release a lock."""
        self._inner.unlock(file)

    def boot_id(self) -> bytes:
        """That of the machine."""
        return self._inner.boot_id()

    def descriptors_max(self) -> int:
        """How many files may be open."""
        return self._inner.descriptors_max()


class StoreConditions:
    """How the network between nodes and the store is. The shares are between 0 and 1."""

    def __init__(self) -> None:
        self.latency_us = (500, 8_000)
        """The least and the longest time of a request, and of an answer."""
        self.lost_requests = 0.0
        self.lost_answers = 0.0
        self.late = 0.0
        """The share of requests that arrive much later."""
        self.late_us = (200_000, 15_000_000)
        self.timeout_s = 0.4
        """After so long without an answer, StoreUnavailable is raised."""
        self.cut: set[str] = set()
        """The nodes that do not reach the store."""

    def heal(self) -> None:
        """End all faults; what is on its way still arrives."""
        self.lost_requests = self.lost_answers = self.late = 0.0
        self.cut = set()


class NodeStore(SharedStore):
    """The shared store as one process sees it, over a simulated network."""

    gains_from_threads = False

    def __init__(self, inner: SharedStore, node: str, conditions: StoreConditions, point: CrashPoint) -> None:
        self._inner = inner
        self._node = node
        self._conditions = conditions
        self._point = point
        self._simulation = point.simulation

    @property
    def location(self) -> str:
        """Where the store is."""
        return self._inner.location

    def put_new(self, key: str, data: bytes) -> None:
        """Create an object."""
        self._ask(f"put {key}", lambda: self._inner.put_new(key, data))

    def replace(self, key: str, data: bytes, version: str) -> str:
        """Replace an object."""
        return self._ask(f"replace {key}", lambda: self._inner.replace(key, data, version))

    def get(self, key: str) -> StoredObject | None:
        """Read an object."""
        return self._ask(f"get {key}", lambda: self._inner.get(key))

    def names(self, prefix: str, after: str = "", count_max: int = 1000) -> list[str]:
        """List keys."""
        return self._ask(f"names {prefix}", lambda: self._inner.names(prefix, after, count_max))

    def delete(self, keys: Sequence[str]) -> None:
        """Delete objects."""
        gone = list(keys)
        self._ask(f"delete {gone[:1]}", lambda: self._inner.delete(gone))

    def remarks(self) -> list[str]:
        """None."""
        return []

    def close(self) -> None:
        """Do nothing."""

    def _ask(self, what: str, call: Callable[[], T]) -> T:
        conditions, dice = self._conditions, self._simulation.random
        self._point.step(what)
        answered = self._simulation.event()
        outcome: list[Any] = []
        chance = dice.random()
        is_lost, loses_answer = chance < conditions.lost_requests, dice.random() < conditions.lost_answers
        travel_us, back_us = dice.randint(*conditions.latency_us), dice.randint(*conditions.latency_us)
        if dice.random() < conditions.late:
            travel_us = dice.randint(*conditions.late_us)

        def arrive() -> None:
            if self._node in conditions.cut:
                return
            try:
                outcome.append(call())
            except (KeyExists, VersionMismatch) as error:
                outcome.append(error)
            if not loses_answer:
                self._simulation.after(back_us, answer)

        def answer() -> None:
            if self._node not in conditions.cut:
                answered.set()

        if not is_lost:
            self._simulation.after(travel_us, arrive)
        if not answered.wait(conditions.timeout_s):
            raise StoreUnavailable(f"{self.location} has not answered: {what}")
        self._point.step(f"answer to {what}")
        found = outcome[0]
        if isinstance(found, KeyExists | VersionMismatch):
            raise found
        result: T = found
        return result


class SimulatedWriter(WalWriter):
    """The writer of an epoch whose threads are simulated; everything else is the real one's."""

    def __init__(self, point: CrashPoint, *args: Any, **kwargs: Any) -> None:
        self._point = point
        self._simulation = point.simulation
        self._putting = 0
        super().__init__(*args, **kwargs)
        self._random = point.simulation.random

    def wait(self, sequence: int | None = None, timeout: float | None = None) -> None:
        """Return when all operations up to a sequence are committed."""
        committed = self._simulation.event()
        waiter = committed.set
        with self._lock:
            target = self._wal.recorded if sequence is None else sequence
            waits = self._wal.wait(target, waiter)
            self._put_soon()
        if waits and not committed.wait(timeout):
            with self._lock:
                self._wal.stop_waiting(waiter)
            raise Timeout(f"the shared store has not acknowledged everything in {timeout} s")
        if self._wal.committed < target or not waits:
            self.check()

    def close(self) -> None:
        """Abandon what is not committed."""
        with self._lock:
            self._threads.clear()
        super().close()

    def _put_soon(self) -> None:
        if self._has_work and self._putting < IN_FLIGHT_MAX and self._point.process.is_alive:
            self._putting += 1
            self._point.process.spawn(f"wal {self.epoch}", self._put_all)

    def _put_all(self) -> None:
        while True:
            with self._lock:
                taken = self._wal.next_put()
                if taken is None:
                    self._putting -= 1
                    return
                self._put_soon()
            self._put(taken)

    def _put(self, pending: PendingObject) -> None:
        delay_s = 0.05
        while not self._stopped.is_set() and not self._put_once(pending):
            self._simulation.sleep(delay_s * (0.5 + self._random.random()))
            delay_s = min(2 * delay_s, 2.0)
