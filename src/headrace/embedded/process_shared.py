"""Resources shared by all embedded logs of a process: created at first use, closed when the process ends."""

import atexit
import logging
import os
import threading
import weakref
from typing import Protocol

from headrace.embedded.ticker import Ticker
from headrace.model.errors import HeadraceError
from headrace.storage.runtime import StorageRuntime

logger = logging.getLogger("headrace.embedded")


class Closable(Protocol):
    """A log that can be closed."""

    def close(self) -> None:
        """Flush and close."""

    def _disown(self) -> None:
        """In a forked child: give up the log, which belongs to the parent."""


_lock = threading.Lock()
_host: StorageRuntime | None = None
_ticker: Ticker | None = None
_open: weakref.WeakSet[Closable] = weakref.WeakSet()


def host() -> StorageRuntime:
    """Return the storage runtime of the process."""
    global _host
    with _lock:
        if _host is None:
            _host = StorageRuntime()
        return _host


def ticker() -> Ticker:
    """The process's ticker."""
    global _ticker
    with _lock:
        if _ticker is None:
            _ticker = Ticker()
        return _ticker


def close_at_exit(log: Closable) -> None:
    """Register a log: it is closed when the process ends, and notified in a forked child."""
    _open.add(log)


def closed(log: Closable) -> None:
    """Unregister a closed log."""
    _open.discard(log)


@atexit.register
def _close_all() -> None:
    for log in list(_open):
        try:
            log.close()
        except HeadraceError as error:
            logger.error("at exit: %s", error)


def _forget() -> None:
    """In a forked child: replace objects that depend on the parent's threads, and give up the parent's logs."""
    global _host, _ticker, _open, _lock
    parents = list(_open)
    _lock = threading.Lock()
    _host = _ticker = None
    _open = weakref.WeakSet()
    for log in parents:
        log._disown()


os.register_at_fork(after_in_child=_forget)
