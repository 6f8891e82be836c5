"""What a server has one of: its event loop with timers, the broker's clock, and the scheduler."""

import asyncio
from collections.abc import Callable

from headrace.runtime.broker_clock import BrokerClock
from headrace.runtime.loop_scheduler import LoopScheduler


class LoopRuntime:
    """The clock, the timers and the scheduler of a server. The server owns it; gateways use it."""

    def __init__(self, loop: asyncio.AbstractEventLoop, clock: BrokerClock | None = None) -> None:
        self.loop = loop
        self.clock = clock or BrokerClock()
        self.scheduler = LoopScheduler(loop)
        self.now_us: Callable[[], int] = self.clock.now_us
        """The broker's time, in microseconds since 1970."""

    def call_later(self, delay_s: float, call: Callable[[], None]) -> asyncio.TimerHandle:
        """Run a callback after a delay."""
        return self.loop.call_later(delay_s, call)
