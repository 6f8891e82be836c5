"""The timer that wakes the broker: when something is due, and every now and then."""

import asyncio
import logging
from collections.abc import Callable

from headrace.runtime.loop_runtime import LoopRuntime

logger = logging.getLogger("headrace.server")

_DELAY_S_MIN, _DELAY_S_MAX = 0.001, 0.1


class BrokerTicker:
    """Calls the broker's `tick` at the time that the last call returned, or sooner if the broker asks for it."""

    def __init__(self, runtime: LoopRuntime) -> None:
        self._runtime = runtime
        self._tick: Callable[[int], int] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._next_us = 0
        self._lag_us = 0
        """How late a tick was, at most, since somebody asked."""

    def start(self, tick: Callable[[int], int]) -> None:
        """Tick now, and from now on. `tick` takes the time and returns the time of the next tick."""
        self._tick = tick
        self._run()

    def stop(self) -> None:
        """Tick no more."""
        self._tick = None
        if self._timer is not None:
            self._timer.cancel()

    def take_lag_us(self) -> int:
        """How late the event loop ran the timer, at most, since the last call."""
        lag_us, self._lag_us = self._lag_us, 0
        return lag_us

    def wake_at(self, time_us: int) -> None:
        """Tick at this time, if no tick comes before. A tick that is going on looks at everything anyway."""
        if self._timer is not None and self._tick is not None and time_us < self._next_us:
            self._timer.cancel()
            now_us = self._runtime.now_us()
            self._plan(now_us, max(time_us - now_us, 0) / 1e6)

    def _run(self) -> None:
        self._timer = None
        if self._tick is None:
            return
        now_us = self._runtime.now_us()
        if self._next_us:  # not the first
            self._lag_us = max(self._lag_us, now_us - self._next_us)
        delay_s = _DELAY_S_MAX
        try:
            delay_s = (self._tick(now_us) - now_us) / 1e6
        except Exception:
            logger.exception("broker tick failed; trying again")
        self._plan(now_us, min(max(delay_s, _DELAY_S_MIN), _DELAY_S_MAX))

    def _plan(self, now_us: int, delay_s: float) -> None:
        self._next_us = now_us + round(delay_s * 1e6)
        self._timer = self._runtime.call_later(delay_s, self._run)
