"""A thread that does jobs which release the interpreter's lock: syncing and preparing files."""

import logging
import threading
from collections.abc import Callable

logger = logging.getLogger("headrace.storage")


class Worker:
    """One thread, started at the first job. A job submitted while it is waiting is done once."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._jobs: dict[Callable[[], None], None] = {}
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._stopping = False

    def submit(self, job: Callable[[], None]) -> None:
        """Have the job done soon; a job deals with its own errors."""
        with self._changed:
            self._jobs[job] = None
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()
            self._changed.notify()

    def stop(self) -> None:
        """Do the jobs that are waiting, and end the thread; a later job starts it again."""
        with self._changed:
            thread, self._stopping = self._thread, True
            self._changed.notify()
        if thread is not None:
            thread.join()
        self._thread, self._stopping = None, False

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._jobs:
                    if self._stopping:
                        return
                    self._changed.wait()
                jobs, self._jobs = self._jobs, {}
            for job in jobs:
                try:
                    job()
                except Exception:
                    logger.exception("a job of %s failed", self._name)
