"""SIGTERM and SIGINT for workers: the first signal drains them, the second ends the process."""

import _thread
import logging
import os
import signal
from collections.abc import Callable
from types import FrameType

logger = logging.getLogger("headrace.client")

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class StopSignalHandler:
    """Calls `stop` at the first signal and ends the process at the second, whatever a handler is stuck in.

    The exit code is the one that shells report for a process killed by the signal. The leases of messages in progress
    expire, and the broker delivers them again.
    """

    def __init__(self, stop: Callable[[], None]) -> None:
        self._stop = stop
        self._draining = False

    def __call__(self, number: int, _frame: FrameType | None = None) -> None:
        if self._draining:
            os._exit(128 + number)  # not sys.exit, which would wait for stuck threads
        self._draining = True
        # Logs on a bare thread: the signal may have interrupted a log handler or a thread start that holds a lock.
        _thread.start_new_thread(_report, (number,))
        self._stop()


def _report(number: int) -> None:
    logger.warning("draining; signal again to stop at once  signal=%s pid=%s", signal.Signals(number).name, os.getpid())
