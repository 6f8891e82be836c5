"""Serves connections with deliveries in slices, so that a message with many readers delays nobody else."""

import asyncio
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headrace.gateways.native.frame_writer import FrameWriter

SLICE_S = 0.002
"""How long deliveries are sent before the event loop polls all sockets again."""


class DeliveryQueue:
    """Serves tenants one after the other, and of each its connections one after the other.

    A connection is served at most once before all others of its tenant that wait have been served.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        soon: Callable[[Callable[[], None]], None],
        now_us: Callable[[], int],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._loop = loop
        self._soon = soon
        self._now_us = now_us
        self._clock = clock
        self._waiting: dict[str, deque[FrameWriter]] = {}
        """By tenant; the tenant that was served last is the last one."""
        self._comes = False

    def add(self, out: "FrameWriter") -> None:
        """Put a connection into the queue; the caller does so once until it is served."""
        queue = self._waiting.get(out.tenant)
        if queue is None:
            queue = self._waiting[out.tenant] = deque()
        queue.append(out)
        if not self._comes:
            self._comes = True
            self._soon(self._serve)

    def _serve(self) -> None:
        now_us, until = self._now_us(), self._clock() + SLICE_S
        while self._waiting:  # also those that are added meanwhile, or again because they have more to send
            tenant, queue = next(iter(self._waiting.items()))
            out = queue.popleft()
            if not queue:
                del self._waiting[tenant]
            elif len(self._waiting) > 1:
                self._waiting[tenant] = self._waiting.pop(tenant)  # the others first
            self._serve_one(out, now_us)
            if self._clock() >= until:
                break
        self._comes = bool(self._waiting)
        if self._comes:
            self._loop.call_soon(self._serve)

    def _serve_one(self, out: "FrameWriter", now_us: int) -> None:
        try:
            out.deliver(now_us)
        except Exception as error:  # noqa: BLE001 the others are served all the same, and the loop reports it
            self._loop.call_exception_handler({"message": "delivery failed", "exception": error})
