"""Background threads that run jobs, and a throttle for jobs that compute for long."""

import logging
import threading
import time
from collections.abc import Callable
from queue import Empty, SimpleQueue

from headrace.model.errors import Closed, Fenced, NotServing, StoreUnavailable

logger = logging.getLogger("headrace.storage")

_SLEEP_S = 0.00005
_WORK_MAX = 1 << 15
"""Work between two sleeps, about half a millisecond: a message counts as 32 bytes besides its own."""
SHARD_LOST = (Fenced, NotServing, StoreUnavailable, Closed)
"""Errors on the disk of a node that has given its shard up: the next owner does what was begun."""


class Worker:
    """One thread, started with the first job. A job that is submitted several times before it runs is run once.

    Jobs go through a SimpleQueue, which an interrupt of the submitting thread cannot leave locked.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self.abandon()

    def abandon(self) -> None:
        """Start without thread and jobs: at the beginning, and in a forked child, where those are the parent's."""
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        # Reentrant, as the collector may free a log, which is flushed then, while this thread is in here.
        self._starting = threading.RLock()
        self._thread: threading.Thread | None = None

    def submit(self, job: Callable[[], None]) -> None:
        """Run the job soon on the thread; a job handles its own errors."""
        self._jobs.put(job)
        if not self._is_running():
            with self._starting:
                if not self._is_running():
                    self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                    _start(self._thread)

    def stop(self) -> None:
        """Run the jobs that wait, and end the thread; a later job starts it again."""
        with self._starting:
            if self._thread is not None and self._thread.is_alive():
                self._jobs.put(None)
                self._thread.join()
            self._thread = None

    def dismiss(self) -> None:
        """End the thread after the jobs that wait, without waiting for that."""
        self._jobs.put(None)

    def _is_running(self) -> bool:
        # An interrupt may have come before the thread was started.
        return self._thread is not None and self._thread.is_alive()

    def _run(self) -> None:
        while self._do(self._waiting_jobs()):
            pass

    def _do(self, jobs: dict[Callable[[], None] | None, None]) -> bool:
        """Run the jobs and drop the references to them, and so to their logs; returns whether to continue."""
        for job in jobs:
            try:
                if job is not None:
                    job()
            except SHARD_LOST as error:
                logger.info("background job ended with the shard  thread=%s reason=%s", self._name, error)
            except Exception:
                logger.exception("background job failed  thread=%s", self._name)
        return None not in jobs

    def _waiting_jobs(self) -> dict[Callable[[], None] | None, None]:
        """All jobs that are waiting, each once; waits for one if there is none."""
        jobs = {self._jobs.get(): None}
        while True:
            try:
                jobs[self._jobs.get_nowait()] = None
            except Empty:
                return jobs


def _start(thread: threading.Thread) -> None:
    """Start a thread; an interrupt in the middle of its lock is raised as what it is."""
    try:
        thread.start()
    except RuntimeError as error:
        if isinstance(error.__context__, KeyboardInterrupt):
            raise error.__context__ from None
        raise


class CpuThrottle:
    """Releases the interpreter's lock between portions of long work, so that other threads run.

    Without it they get the lock after 5 ms, but each time that they need it: an event loop that receives, writes and
    sends in one turn waits for it three times.
    """

    def __init__(self) -> None:
        self._work = 0

    def step(self, messages: int, length: int) -> None:
        """Count work that was done, and sleep for a moment after each portion."""
        self._work += 32 * messages + length
        if self._work >= _WORK_MAX:
            self._work = 0
            time.sleep(_SLEEP_S)
