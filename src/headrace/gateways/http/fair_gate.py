"""Lets requests of tenants begin in turns: while several are connected, each begins a few in every loop turn."""

import asyncio
from collections import Counter, deque

REQUESTS_TOGETHER = 4
"""Requests of one tenant that begin in one loop turn: about a millisecond of work."""


class FairGate:
    """Counts the requests that begin in a loop turn, by tenant, and holds up those beyond the tenant's share."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._begun: Counter[str] = Counter()
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}
        self._comes = False

    async def enter(self, tenant: str) -> None:
        """Begin a request, in this loop turn or a later one; the requests of a tenant begin in order."""
        if not self._comes:
            self._comes = True
            self._loop.call_soon(self._turn)
        if self._begun[tenant] < REQUESTS_TOGETHER and tenant not in self._waiting:
            self._begun[tenant] += 1
            return
        waiting = self._loop.create_future()
        self._waiting.setdefault(tenant, deque()).append(waiting)
        await waiting

    def _turn(self) -> None:
        self._begun.clear()
        for tenant, queue in list(self._waiting.items()):
            while queue and self._begun[tenant] < REQUESTS_TOGETHER:
                waiting = queue.popleft()
                if not waiting.done():  # its client may be gone
                    waiting.set_result(None)
                    self._begun[tenant] += 1
            if not queue:
                del self._waiting[tenant]
        self._comes = bool(self._begun)
        if self._comes:
            self._loop.call_soon(self._turn)
