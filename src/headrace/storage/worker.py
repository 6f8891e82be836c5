"""A thread that does jobs which release the interpreter's lock: syncing and preparing files."""

import logging
import threading
import time
from collections.abc import Callable
from queue import Empty, SimpleQueue

logger = logging.getLogger("headrace.storage")

_REST_S = 0.00005
_REST_WORK = 1 << 15
"""About half a millisecond: a message counts as 32 bytes besides its own."""


class Worker:
    """One thread, started at the first job. A job submitted several times while it waits is done once.

    Jobs come through a SimpleQueue, which an interrupt of the submitting thread cannot leave locked.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self.abandon()

    def abandon(self) -> None:
        """Have no thread and no jobs: at the beginning, and in a forked child, where those are its parent's."""
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        # Reentrant, as the collector may free a log, which is flushed then, while this thread is in here.
        self._starting = threading.RLock()
        self._thread: threading.Thread | None = None

    def submit(self, job: Callable[[], None]) -> None:
        """Have the job done soon; a job deals with its own errors."""
        self._jobs.put(job)
        if not self._is_running():
            with self._starting:
                if not self._is_running():
                    self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                    _start(self._thread)

    def stop(self) -> None:
        """Do the jobs that are waiting, and end the thread; a later job starts it again."""
        with self._starting:
            if self._thread is not None and self._thread.is_alive():
                self._jobs.put(None)
                self._thread.join()
            self._thread = None

    def _is_running(self) -> bool:
        # An interrupt may have come before the thread was started.
        return self._thread is not None and self._thread.is_alive()

    def _run(self) -> None:
        while self._do(self._waiting_jobs()):
            pass

    def _do(self, jobs: dict[Callable[[], None] | None, None]) -> bool:
        """Do the jobs, and let go of them, and with them of their logs; whether to go on."""
        for job in jobs:
            try:
                if job is not None:
                    job()
            except Exception:
                logger.exception("a job of %s failed", self._name)
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


class Pace:
    """Lets other threads have the interpreter's lock while this one works for long.

    They get it after 5 ms at the latest, but each time that they need it: one that sends, receives and writes in a
    turn of its event loop waits for it three times.
    """

    def __init__(self) -> None:
        self._work = 0

    def step(self, messages: int, length: int) -> None:
        """So much was done; rest a little if that is enough."""
        self._work += 32 * messages + length
        if self._work >= _REST_WORK:
            self._work = 0
            time.sleep(_REST_S)
