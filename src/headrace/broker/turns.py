"""Callbacks that run later, each with the broker's time as its argument."""

from collections.abc import Callable
from typing import Any

from headrace.broker.pending_answer import PendingAnswer
from headrace.broker.ports import Ports
from headrace.broker.slices import Steps, TimedSteps, run_slices


class Turns:
    """Schedules the broker's own callbacks. `begin` is called with the time of every request and tick."""

    def __init__(self, ports: Ports, now_us: int) -> None:
        self._ports = ports
        self._now_us = now_us

    @property
    def now_us(self) -> int:
        """The time of the last request or tick."""
        return self._now_us

    def begin(self, now_us: int) -> None:
        """Callbacks that run from now on get this time."""
        self._now_us = now_us

    def call_soon(self, callback: Callable[[int], None]) -> None:
        """Run a callback after all requests that have just arrived."""
        self._ports.call_soon(lambda: callback(self._now_us))

    def call_at_turn_end(self, callback: Callable[[int], None]) -> None:
        """Run a callback after everything that was to run soon."""
        self._ports.call_at_turn_end(lambda: callback(self._now_us))

    def in_slices(self, steps: Steps | TimedSteps) -> PendingAnswer[Any]:
        """Run the first slice now and one more at the end of each turn, with `yield` returning its time."""
        begun = False

        def resume() -> None:
            nonlocal begun
            if begun:
                steps.send(self._now_us)  # type: ignore[arg-type]
            else:
                begun = True
                next(steps)

        return run_slices(self._ports, resume)
