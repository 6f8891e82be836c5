"""The one list of those who wait for a log's sync; they are called on the broker's thread."""

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Protocol

from headrace.broker.ports import Ports
from headrace.model.errors import HeadraceError

Told = Callable[[HeadraceError | None], None]

_TOLD_AT_ONCE = 16
"""Callbacks in a slice. One may publish, or write to the journal; a loop turn can have eight slices."""


class Syncable(Protocol):
    """What can be synced: a partition, or a journal."""

    @property
    def synced_offset(self) -> int: ...
    @property
    def is_small_backlog(self) -> bool: ...
    @property
    def overlaps_syncs(self) -> bool: ...
    def request_sync(self) -> None: ...
    def when_synced(self, offset: int, tell: Told) -> None: ...


class SyncWaiters:
    """Those who wait for offsets of one log, with one question to the log for all of them at a time."""

    def __init__(self, source: Syncable, ports: Ports, *, held: bool = False) -> None:
        self._source = source
        self.held = held
        """Whether nobody is told anything before `release`."""
        self._ports = ports
        self._waiting: deque[tuple[int, Told]] = deque()
        """By offset."""
        self._coming = False
        """Whether a request to the log is scheduled."""
        self._asked = 0
        self._failure: HeadraceError | None = None
        self._told: deque[tuple[Told, HeadraceError | None]] = deque()
        """Callbacks whose wait is over, and which run in slices."""
        self._telling = False

    @property
    def idle(self) -> bool:
        """Whether nobody waits."""
        return not self._waiting and not self._told

    def wait(self, offset: int, tell: Told) -> None:
        """Call back when everything before an offset is synced, or with the error; offsets mostly ascend."""
        if self._failure is not None:
            self._ports.call_soon(partial(tell, self._failure))
            return
        if self._waiting and offset < self._waiting[-1][0]:
            self._waiting = deque(sorted([*self._waiting, (offset, tell)], key=_offset))
        else:
            self._waiting.append((offset, tell))
        if self.held:
            return
        if not self._asked:
            self._ask_soon()
        elif self._source.overlaps_syncs and not self._coming:
            self._coming = True
            self._ports.call_at_turn_end(self._sync_more)

    def release(self) -> None:
        """End the hold."""
        self.held = False
        if self._waiting and not self._asked:
            self._ask_soon()

    def fail(self, error: HeadraceError) -> None:
        """Fail all present and future waits with an error."""
        self._failure = error
        self._tell(error)

    def _ask_soon(self) -> None:
        """Ask at once; or, if it is little, for which the log may keep us waiting, when others have their answers."""
        if not self._source.is_small_backlog:
            self._ask()
        elif not self._coming:
            self._coming = True
            self._ports.call_at_turn_end(self._ask)

    def _ask(self) -> None:
        self._coming = False
        if not self._waiting or self._asked:
            return
        self._asked = self._waiting[0 if self._source.overlaps_syncs else -1][0]
        self._source.when_synced(self._asked, self._on_some_thread)

    def _sync_more(self) -> None:
        """Have what came since the log was asked synced as well, before it has answered."""
        self._coming = False
        if self._asked:
            self._source.request_sync()
        else:
            self._ask()

    def _on_some_thread(self, error: HeadraceError | None) -> None:
        self._ports.call_threadsafe(partial(self._tell, error))

    def _tell(self, error: HeadraceError | None) -> None:
        # Everything written before the fsync began is synced now, which may be more than was requested.
        synced, self._asked = max(self._asked, self._source.synced_offset), 0
        waiting = self._waiting
        while waiting and (error is not None or waiting[0][0] <= synced):
            self._told.append((waiting.popleft()[1], error))
        if waiting:
            self._ask_soon()
        if not self._telling:
            self._tell_some()

    def _tell_some(self) -> None:
        """Run the first callbacks now and the others soon, so that the broker serves other requests in between."""
        self._telling = True
        try:
            for _ in range(min(len(self._told), _TOLD_AT_ONCE)):
                tell, error = self._told.popleft()
                tell(error)
        finally:
            self._telling = bool(self._told)
            if self._told:
                self._ports.call_soon(self._tell_some)


def _offset(waiting: tuple[int, Told]) -> int:
    return waiting[0]
