"""Runs middleware in the order of each partition: small batches on the event loop, others on threads in time."""

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from headrace.broker.middleware_chain import MiddlewareChain, ProcessedBatch
from headrace.broker.pending_answer import PendingAnswer
from headrace.broker.ports import Ports, WorkerThread
from headrace.broker.turns import Turns
from headrace.engines.api import as_headrace_error
from headrace.model.batch import Batch
from headrace.model.errors import Busy, HeadraceError, InternalError, MiddlewareFailed, MiddlewareTimeout
from headrace.model.limits import MIDDLEWARE_QUEUED_BYTES_MAX, MIDDLEWARE_STUCK_MAX, MIDDLEWARE_THREADS_MAX
from headrace.model.middleware import MiddlewareContext

logger = logging.getLogger("headrace.broker")

_LOGGED_AGAIN_US = 60_000_000
"""How often a middleware that fails is logged."""
_LOGGED_MAX = 1000

Finish = Callable[[ProcessedBatch, int], Any]
"""Takes what the middleware made of a batch, and the time; returns the answer, a PendingAnswer, or Held."""


@dataclass(frozen=True)
class Held:
    """An answer to come; the partition's next batch has to wait until `until` resolves."""

    answer: PendingAnswer[Any]
    until: PendingAnswer[Any]


@dataclass(eq=False)
class _Job:
    """A batch that waits for its middleware, or is in it."""

    chain: MiddlewareChain
    batch: Batch
    context: MiddlewareContext
    finish: Finish
    check: Callable[[], Any] | None
    """Returns the answer to a batch that needs no middleware, as it was stored before; else None."""
    sifts: bool
    """Whether messages that are refused are left out."""
    answer: PendingAnswer[Any] = field(default_factory=PendingAnswer)
    deadline_us: int = 0
    timed_out: bool = False

    def process(self) -> Any:
        """Pass the batch through the middleware; on any thread."""
        return (self.chain.sift if self.sifts else self.chain.process)(self.batch, self.context)


@dataclass(eq=False)
class _Lane:
    """The batches of a partition that wait for their middleware; one of them at a time is in it."""

    key: tuple[int, int]
    jobs: deque[_Job] = field(default_factory=deque)
    busy: bool = False


class MiddlewareRunner:
    """Passes batches through middleware. A thread that does not return makes its topic refuse batches meanwhile."""

    def __init__(self, ports: Ports, turns: Turns) -> None:
        self._ports = ports
        self._turns = turns
        self._lanes: dict[tuple[int, int], _Lane] = {}
        """Of the partitions that have something to do, by topic id and number."""
        self._queued_bytes: dict[int, int] = {}
        """By topic id."""
        self._ready: deque[_Lane] = deque()
        """Lanes whose next batch needs a thread."""
        self._idle: list[WorkerThread] = []
        self._running: dict[_Job, tuple[_Lane, WorkerThread]] = {}
        self._stuck = 0
        """Threads that middleware holds beyond its deadline."""
        self._logged_us: dict[tuple[str, str], int] = {}

    @property
    def idle(self) -> bool:
        """Whether no batch is waiting for an answer."""
        return not self._lanes

    def run(
        self,
        chain: MiddlewareChain,
        topic_id: int,
        batch: Batch,
        context: MiddlewareContext,
        finish: Finish,
        check: Callable[[], Any] | None = None,
        *,
        sifts: bool = False,
    ) -> Any:
        """Process a batch after those of the same partition, then call `finish`; returns what that returns.

        If it has to wait, it returns a PendingAnswer. `check` may return the answer to a batch that needs none of this.
        """
        key = topic_id, context.partition
        lane = self._lanes.get(key)
        job = _Job(chain, batch, context, finish, check, sifts)
        if lane is None and chain.runs_inline(batch):
            known = check() if check is not None else None
            return self._finish_inline(key, job) if known is None else known
        self._check_room(chain, topic_id, batch, context)
        batch.data = bytearray(batch.data)  # what was received is written over soon
        if lane is None:
            lane = self._lanes[key] = _Lane(key)
        lane.jobs.append(job)
        self._queued_bytes[topic_id] = self._queued_bytes.get(topic_id, 0) + batch.length
        self._go_on(lane)
        return job.answer

    def hold(self, topic_id: int, partition: int, until: PendingAnswer[Any]) -> None:
        """Let batches of a partition wait until something is done, unless there are some already."""
        key = topic_id, partition
        if key not in self._lanes and not until.resolved:
            lane = self._lanes[key] = _Lane(key, busy=True)
            until.then(partial(self._released, lane))

    def tick(self, now_us: int) -> None:
        """Refuse the batches whose middleware has not returned in time."""
        for job, (lane, _) in list(self._running.items()):
            if now_us >= job.deadline_us and not job.timed_out:
                job.timed_out = True
                job.chain.stuck += 1
                self._stuck += 1
                error = _timeout(job.context, f"has not returned within {job.chain.timeout_us / 1e6:g} s")
                self._log(job.context, error, now_us)
                self._resolve(lane, job, error)
                self._go_on(lane)
        self._dispatch()

    def close(self) -> None:
        """End the threads that have nothing to do."""
        for worker in self._idle:
            worker.dismiss()
        self._idle.clear()

    @property
    def next_tick_us(self) -> int | None:
        """When the next deadline is."""
        return min((job.deadline_us for job in self._running if not job.timed_out), default=None)

    def _check_room(self, chain: MiddlewareChain, topic_id: int, batch: Batch, context: MiddlewareContext) -> None:
        if chain.stuck:
            raise _timeout(context, "does not return")
        if self._stuck >= MIDDLEWARE_STUCK_MAX:
            raise _timeout(context, f"has to wait: {self._stuck} threads do not return from middleware")
        queued = self._queued_bytes.get(topic_id, 0)
        if queued and queued + batch.length > MIDDLEWARE_QUEUED_BYTES_MAX:
            raise Busy(f"{queued} bytes wait for the middleware of the topic {context.topic}; try again in a moment")

    def _finish_inline(self, key: tuple[int, int], job: _Job) -> Any:
        now_us = self._turns.now_us
        try:
            processed = job.process()
        except MiddlewareFailed as error:
            self._log(job.context, error, now_us)
            raise
        outcome = job.finish(processed, now_us)
        if not isinstance(outcome, Held):
            return outcome
        self.hold(*key, outcome.until)
        return outcome.answer

    def _go_on(self, lane: _Lane) -> None:
        """Take the next batch of a lane, as far as no other one is in work."""
        while not lane.busy and lane.jobs:
            job = lane.jobs[0]
            try:
                if job.chain.stuck:
                    raise _timeout(job.context, "does not return")
                known = job.check() if job.check is not None else None
                if known is not None:
                    self._end(lane, job, known)
                    continue
                if not job.chain.runs_inline(job.batch):
                    lane.busy = True
                    self._ready.append(lane)
                    break
                self._end(lane, job, job.finish(job.process(), self._turns.now_us))
            except Exception as error:  # noqa: BLE001 it is told
                self._fail(lane, job, error)
        if not lane.jobs and not lane.busy:
            self._lanes.pop(lane.key, None)
        self._dispatch()

    def _dispatch(self) -> None:
        """Give ready batches to threads, as many as there may be; refuse them when too many threads are stuck."""
        while self._ready and len(self._running) - self._stuck < MIDDLEWARE_THREADS_MAX:
            lane = self._ready.popleft()
            job = lane.jobs[0]
            if self._stuck >= MIDDLEWARE_STUCK_MAX:
                self._take(lane, job, _timeout(job.context, f"has to wait: {self._stuck} threads do not return"))
                continue
            worker = self._idle.pop() if self._idle else self._ports.new_worker("headrace-middleware")
            job.deadline_us = self._turns.now_us + job.chain.timeout_us
            self._running[job] = lane, worker
            worker.submit(partial(self._work, job))
            self._ports.wake_at(job.deadline_us)

    def _work(self, job: _Job) -> None:
        """On a thread: process a batch."""
        outcome: ProcessedBatch | Exception
        try:
            outcome = job.process()
        except Exception as error:  # noqa: BLE001 it is told on the broker's thread
            outcome = error
        self._ports.call_threadsafe(partial(self._worked, job, outcome))

    def _worked(self, job: _Job, outcome: ProcessedBatch | Exception) -> None:
        lane, worker = self._running.pop(job)
        if job.timed_out:
            job.chain.stuck -= 1
            self._stuck -= 1
        if len(self._idle) + len(self._running) - self._stuck < MIDDLEWARE_THREADS_MAX:
            self._idle.append(worker)
        else:
            worker.dismiss()
        if not job.timed_out:
            self._take(lane, job, outcome)
        self._dispatch()

    def _take(self, lane: _Lane, job: _Job, outcome: ProcessedBatch | Exception) -> None:
        lane.busy = False
        if isinstance(outcome, Exception):
            self._fail(lane, job, outcome)
        else:
            try:
                self._end(lane, job, job.finish(outcome, self._turns.now_us))
            except Exception as error:  # noqa: BLE001 it is told
                self._fail(lane, job, error)
        self._go_on(lane)

    def _end(self, lane: _Lane, job: _Job, outcome: Any) -> None:
        """Pass the answer on; if it says so, the lane waits."""
        if isinstance(outcome, Held):
            if not outcome.until.resolved:
                lane.busy = True
                outcome.until.then(partial(self._released, lane))
            outcome = outcome.answer
        self._forget(lane, job)
        if isinstance(outcome, PendingAnswer):
            outcome.then(job.answer.resolve)
        else:
            job.answer.resolve(outcome)

    def _fail(self, lane: _Lane, job: _Job, error: Exception) -> None:
        """Pass an error on."""
        if isinstance(error, MiddlewareFailed):
            self._log(job.context, error, self._turns.now_us)
        if isinstance(error, OSError) and not isinstance(error, HeadraceError):
            error = as_headrace_error(error)
        if not isinstance(error, HeadraceError):
            logger.error("processed batch not published  topic=%s", job.context.topic, exc_info=error)
            error = InternalError()
        self._forget(lane, job)
        job.answer.resolve(error)

    def _resolve(self, lane: _Lane, job: _Job, error: HeadraceError) -> None:
        """Refuse a batch whose thread goes on."""
        lane.busy = False
        self._forget(lane, job)
        job.answer.resolve(error)

    def _forget(self, lane: _Lane, job: _Job) -> None:
        first = lane.jobs.popleft()
        assert first is job
        topic_id = lane.key[0]
        left = self._queued_bytes[topic_id] - job.batch.length
        if left:
            self._queued_bytes[topic_id] = left
        else:
            del self._queued_bytes[topic_id]

    def _released(self, lane: _Lane, _: object) -> None:
        lane.busy = False
        self._go_on(lane)

    def _log(self, context: MiddlewareContext, error: HeadraceError, now_us: int) -> None:
        """Log a failure, once a minute; never the text of what was raised, which may have content of messages."""
        key = context.tenant, context.topic
        if not 0 <= now_us - self._logged_us.get(key, -_LOGGED_AGAIN_US) < _LOGGED_AGAIN_US:
            if len(self._logged_us) >= _LOGGED_MAX:
                self._logged_us.clear()
            self._logged_us[key] = now_us
            logger.error("middleware failed  tenant=%s topic=%s reason=%s%s", *key, error, _raised_at(error))


def _raised_at(error: HeadraceError) -> str:
    """Where the cause of an error was raised."""
    trace = error.__cause__.__traceback__ if error.__cause__ is not None else None
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return "" if trace is None else f" at={trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}"


def _timeout(context: MiddlewareContext, text: str) -> MiddlewareTimeout:
    return MiddlewareTimeout(
        f"the middleware of the topic {context.topic} {text}; nothing was stored: mend the middleware, or alter the "
        "topic",
        topic=context.topic,
    )
