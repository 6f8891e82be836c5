"""An event loop without sockets, threads and time, which runs one callback of the broker at each step."""

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from headrace.runtime.loop_scheduler import LoopScheduler


class VirtualLoop:
    """Runs callbacks in the order in which they were scheduled, one at each call of `step`."""

    def __init__(self) -> None:
        self._ready: deque[tuple[Callable[..., object], tuple[Any, ...]]] = deque()
        self._turn: Iterator[None] = iter(())
        """What is left of the scheduler's turn."""
        self._failure: BaseException | None = None

    def call_soon(self, callback: Callable[..., object], *args: Any) -> None:
        """Run a callback in a later step."""
        self._ready.append((callback, args))

    call_soon_threadsafe = call_soon

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """Keep the error of a callback for the step that ran it."""
        self._failure = context["exception"]

    def is_closed(self) -> bool:
        """Never closed."""
        return False

    def begin_turn(self, turn: Iterator[None]) -> None:
        """Let the next steps run the callbacks of a scheduler's turn."""
        self._turn = turn

    def step(self) -> bool:
        """Run the next callback and raise the error that it raises; whether there was a callback."""
        while True:
            for _ in self._turn:
                failure, self._failure = self._failure, None
                if failure is not None:
                    raise failure
                return True
            if not self._ready:
                return False
            callback, args = self._ready.popleft()
            callback(*args)
            if not isinstance(getattr(callback, "__self__", None), SteppedScheduler):
                return True  # else the turn that it has begun has callbacks to run


class SteppedScheduler(LoopScheduler):
    """The server's scheduler on a virtual loop: the same callbacks in the same order, one at each step of the loop."""

    def __init__(self, loop: VirtualLoop, now_s: Callable[[], float]) -> None:
        super().__init__(loop, now_s)
        self._virtual_loop = loop

    def _run(self) -> None:
        self._virtual_loop.begin_turn(self.turn())
