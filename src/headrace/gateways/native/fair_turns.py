"""Shares the event loop among tenants: while several are connected, each has a bounded time in every loop turn."""

import asyncio
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

SLICE_S = 0.0005
"""How long requests of one tenant are handled before the others have their turn, and all sockets are polled again."""
ALONE_SLICE_S = 0.004
"""The same while no other tenant has asked for anything lately: longer slices cost less."""
_LATELY_S = 1.0


class WaitingConnection(Protocol):
    """A connection with received frames that are not handled yet."""

    def take_turn(self, until_s: float) -> None:
        """Handle frames until this time, by the clock of the turns; it waits again if there are more."""


class FairTurns:
    """Serves connections in turns: tenants one after the other, and the connections of each one after the other."""

    def __init__(self, loop: asyncio.AbstractEventLoop, clock: Callable[[], float] = time.perf_counter) -> None:
        self._loop = loop
        self.clock = clock
        self._spent_s: dict[str, float] = {}
        """What each tenant has used of its slice in this loop turn."""
        self._waiting: dict[str, deque[WaitingConnection]] = {}
        """By tenant; the tenant whose turn was last is the last one."""
        self._comes = False
        self._last = ""
        """The tenant whose requests were handled last."""
        self._changed_s = 0.0
        """When that was last another one than before."""

    def _slice_s(self) -> float:
        return SLICE_S if self.clock() - self._changed_s < _LATELY_S else ALONE_SLICE_S

    def left_s(self, tenant: str) -> float:
        """How much of its slice a tenant has left in this loop turn; none while it has connections that wait."""
        return 0.0 if tenant in self._waiting else self._slice_s() - self._spent_s.get(tenant, 0.0)

    def spend(self, tenant: str, seconds: float) -> None:
        """Count the time that requests of a tenant took."""
        if tenant != self._last:
            self._last, self._changed_s = tenant, self.clock()
        self._spent_s[tenant] = self._spent_s.get(tenant, 0.0) + seconds
        self._serve_soon()

    def add(self, tenant: str, connection: WaitingConnection) -> None:
        """Let a connection wait for its turn; the caller does so once until it has had one."""
        self._waiting.setdefault(tenant, deque()).append(connection)
        self._serve_soon()

    def _serve_soon(self) -> None:
        if not self._comes:
            self._comes = True
            self._loop.call_soon(self._serve)

    def _serve(self) -> None:
        """Give each tenant its slice; the loop polls all sockets before the next call."""
        self._comes = False
        self._spent_s.clear()
        for tenant in list(self._waiting):
            queue = self._waiting.pop(tenant)
            slice_s = self._slice_s()
            until_s = self.clock() + slice_s
            while queue:
                self._serve_one(queue.popleft(), until_s)
                if self.clock() >= until_s:
                    break
            again = self._waiting.pop(tenant, None)  # those that have more
            if again is not None:
                queue.extend(again)
            if queue:
                self._waiting[tenant] = queue
            self._spent_s[tenant] = slice_s
        if self._waiting or self._spent_s:
            self._serve_soon()

    def _serve_one(self, connection: WaitingConnection, until_s: float) -> None:
        try:
            connection.take_turn(until_s)
        except Exception as error:  # noqa: BLE001 the others are served all the same, and the loop reports it
            self._loop.call_exception_handler({"message": "turn of a connection failed", "exception": error})
