"""Signals: a component announces an event without knowing who listens."""

from collections.abc import Callable
from typing import Generic, ParamSpec

Arguments = ParamSpec("Arguments")


class Signal(Generic[Arguments]):
    """Calls its listeners in the order in which they were connected.

    >>> renamed = Signal[str, int]()
    >>> renamed.connect(print)
    >>> renamed("orders", 3)
    orders 3
    """

    __slots__ = ("_listeners",)

    def __init__(self) -> None:
        self._listeners: list[Callable[Arguments, object]] = []

    def connect(self, listener: Callable[Arguments, object]) -> None:
        """Call this with each event from now on."""
        self._listeners.append(listener)

    def __call__(self, *args: Arguments.args, **kwargs: Arguments.kwargs) -> None:
        for listener in self._listeners:
            listener(*args, **kwargs)
