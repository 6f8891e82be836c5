"""Turns SIGINT and SIGTERM into an exception, and defers it in blocks that must not be interrupted."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupted(BaseException):
    """SIGINT or SIGTERM arrived."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.exit_code = 128 + number
        """The exit code by which shells report that signal."""


class Interrupts:
    """Raises Interrupted when a signal arrives; while held, only records the signal."""

    def __init__(self) -> None:
        self._noted: int | None = None
        self._held = False
        self._impatient = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "Interrupts":
        for number in _SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:  # nohup, or a shell's background job
                self._before[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @contextmanager
    def held(self, *, once: bool = False) -> Iterator[None]:
        """Only record signals in the block. Call `check` afterwards, or the signal has no effect.

        With `once`, only the first signal is held back; the second interrupts the block.
        """
        before = self._held, self._impatient
        try:
            self._held, self._impatient = True, once
            yield
        finally:
            self._held, self._impatient = before

    @contextmanager
    def released(self) -> Iterator[None]:
        """Inside a held block: allow signals to interrupt a part that may wait forever."""
        before = self._held
        try:
            self._held = False
            self.check()
            yield
        finally:
            self._held = before

    def check(self) -> None:
        """Raise Interrupted if a signal has been recorded."""
        if self._noted is not None:
            raise Interrupted(self._noted)

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        again = self._noted is not None
        self._noted = number
        if not self._held or (again and self._impatient):
            raise Interrupted(number)
