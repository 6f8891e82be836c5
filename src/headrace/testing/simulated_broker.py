"""The broker of a simulated node while it owns the shard: a workbench whose loop and threads are simulated."""

from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from headrace.broker.pending_answer import PendingAnswer
from headrace.broker.ports import Session
from headrace.broker.settings import BrokerSettings
from headrace.cluster.shards import OwnedShard
from headrace.model.errors import ConnectionFailed, HeadraceError, NotServing
from headrace.model.request import Request
from headrace.runtime.broker_clock import BrokerClock
from headrace.storage.worker import Worker
from headrace.testing.simulated_machine import CrashPoint
from headrace.testing.workbench import Workbench

Reply = Callable[[Any, int], None]
"""Is told the answer or the error, and the broker's time."""

_TICK_S = 0.25
_FINISH_S = 2.0


class SimulatedFlusher(Worker):
    """The flusher, and all other threads of a broker in one: runs jobs one after the other on a simulated thread."""

    def __init__(self, point: CrashPoint, after_job: Callable[[], None]) -> None:
        super().__init__("simulated")
        self._point = point
        self._after_job = after_job
        self._queue: deque[Callable[[], None]] = deque()
        self.is_inline = True
        """Whether jobs run on the thread that submits them: while the broker starts and ends."""
        self._idle = point.simulation.event()
        self._idle.set()

    def submit(self, job: Callable[[], None]) -> None:
        """Run a job; one that waits already is not run twice."""
        if self.is_inline:
            job()
        elif job not in self._queue:
            self._queue.append(job)
            if self._idle.is_set:
                self._idle.clear()
                self._point.process.spawn("flusher", self._work)

    def stop(self) -> None:
        """Wait for the jobs; later ones run inline."""
        while not self._idle.is_set:
            self._idle.wait()
        self.is_inline = True

    def _work(self) -> None:
        while self._queue:
            self._queue.popleft()()
            self._after_job()
        self._idle.set()


class _NodeBench(Workbench):
    """A workbench whose other threads are the flusher's."""

    def __init__(self, flusher: SimulatedFlusher, **given: Any) -> None:
        self._flusher = flusher
        super().__init__(flusher=flusher, **given)

    def run_on_thread(self, job: Callable[[], None]) -> None:
        """Run a job of another thread."""
        self._flusher.submit(job)


class SimulatedBroker:
    """A broker on a shard that its node owns, and the connections of its clients."""

    def __init__(
        self, point: CrashPoint, owned: OwnedShard, root: str, clock: BrokerClock, settings: BrokerSettings
    ) -> None:
        self._point = point
        self._process = point.process
        self._owned = owned
        self._root = root
        self._clock = clock
        self._settings = settings
        self._inbox: deque[Callable[[], None]] = deque()
        self._wake = point.simulation.event()
        self._flusher = SimulatedFlusher(point, self._wake.set)
        self._sessions: dict[str, Session] = {}
        self._pending: dict[int, Reply] = {}
        self._requests = 0
        self._end: Callable[[], None] | None = None
        self.bench: Workbench | None = None
        self.started = point.simulation.event()
        """Set when it serves, or has failed to."""
        self.ended = point.simulation.event()
        self.failure: HeadraceError | None = None
        """Why it could not start, or end in order."""
        self._process.on_death.append(self._reset)
        self._process.spawn("loop", self._run)

    @property
    def is_serving(self) -> bool:
        """Whether requests are taken."""
        return self.bench is not None and not self.ended.is_set and self._end is None

    # Clients.

    def ask(self, client: str, request: Request[Any], body: bytes, reply: Reply) -> None:
        """Take a request of a client's connection; called when it arrives at the machine."""
        self._requests += 1
        number = self._requests
        self._pending[number] = reply
        self._inbox.append(lambda: self._begin(number, client, request, body))
        self._wake.set()

    def disconnect(self, client: str) -> None:
        """End a client's connection."""
        self._inbox.append(lambda: self._disconnect(client))
        self._wake.set()

    def _begin(self, number: int, client: str, request: Request[Any], body: bytes) -> None:
        bench = self.bench
        assert bench is not None
        session = self._sessions.get(client)
        if session is None:
            session = self._sessions[client] = bench.connect(client)
        outcome = bench.begin(request, body, session)
        if isinstance(outcome, PendingAnswer):
            outcome.then(lambda answer: self._reply(number, answer))
        else:
            self._reply(number, outcome)

    def _disconnect(self, client: str) -> None:
        session = self._sessions.pop(client, None)
        if session is not None and self.bench is not None:
            self.bench.broker.disconnect(session, self.bench.now_us)

    def _reply(self, number: int, outcome: Any) -> None:
        reply = self._pending.pop(number, None)
        if reply is not None and self.bench is not None:
            reply(outcome, self.bench.now_us)

    def _reset(self) -> None:
        """Reset all connections."""
        pending, self._pending = self._pending, {}
        for reply in pending.values():
            reply(ConnectionFailed("the connection was reset"), 0)

    # The loop.

    def abort(self) -> None:
        """Drop all connections and the broker; the writer must have failed by now. Waits."""
        self._stop(self._abort)

    def finish(self) -> None:
        """Refuse new work, finish what was begun, and close the broker; waits. `failure` says if that failed."""
        self._stop(self._finish)

    def _stop(self, end: Callable[[], None]) -> None:
        if self._end is None:
            self._end = end
        self._wake.set()
        while not self.ended.is_set:
            self.ended.wait()

    def _run(self) -> None:
        try:
            self.bench = _NodeBench(
                self._flusher,
                directory=self._root,
                disk=self._owned.disk,
                settings=self._settings,
                now_us=self._clock.now_us(),
            )
            self._clock.go_on_from(self.bench.broker.last_us)
        except HeadraceError as error:
            if self._owned.writer.failure is None:
                raise
            self.failure = error
        self._flusher.is_inline = False
        self.started.set()
        try:
            while self._end is None and self.failure is None:
                self._process.check()
                self._turn()
                self._wake.wait(_TICK_S)
            if self._end is not None:
                self._end()
        finally:
            self._reset()
            if self._reset in self._process.on_death:
                self._process.on_death.remove(self._reset)
        self.ended.set()

    def _turn(self) -> None:
        bench = self.bench
        assert bench is not None
        self._wake.clear()
        bench.now_us = self._clock.now_us()
        while self._inbox:
            self._inbox.popleft()()
        try:
            bench.run()
            bench.tick()
        except (HeadraceError, OSError):
            if self._owned.writer.failure is None:
                raise

    def _abort(self) -> None:
        self._reset()
        self._flusher.stop()
        if self.bench is not None:
            with suppress(HeadraceError, OSError):
                self.bench.broker.close(self.bench.now_us)

    def _finish(self) -> None:
        """End as the server does before a hand-over."""
        if self.bench is None:
            return
        broker, simulation = self.bench.broker, self._point.simulation
        broker.drain()
        until_us = simulation.now_us + round(_FINISH_S * 1e6)
        while not broker.idle and simulation.now_us < until_us:
            self._turn()
            self._wake.wait(0.01)
        broker.end_sessions(NotServing("the node hands over"), "no such client")
        self._turn()
        self._reset()
        self._flusher.stop()
        try:
            self._turn()
            broker.close(self.bench.now_us)
        except (HeadraceError, OSError) as error:
            self.failure = error if isinstance(error, HeadraceError) else ConnectionFailed(str(error))
