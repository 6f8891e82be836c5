"""SIGTERM and SIGINT for workers: the first lets them finish what they have begun, the second ends the process."""

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

    The second ends it with the exit code that shells give to a process that died of the signal. Leases of messages
    that were being handled expire, and others get them then.
    """

    def __init__(self, stop: Callable[[], None]) -> None:
        self._stop = stop
        self._draining = False

    def __call__(self, number: int, _frame: FrameType | None = None) -> None:
        if self._draining:
            os._exit(128 + number)  # not sys.exit: that would wait for the threads that are stuck
        self._draining = True
        # On a bare thread: this may have interrupted a log handler, or the start of a thread, that holds a lock.
        _thread.start_new_thread(_report, (number,))
        self._stop()


def _report(number: int) -> None:
    logger.warning("draining; signal again to stop at once  signal=%s pid=%s", signal.Signals(number).name, os.getpid())
