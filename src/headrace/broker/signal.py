"""Signals and inquiries: a component announces an event, or asks about one, without knowing who listens."""

from collections.abc import Callable, Iterable
from typing import Generic, NamedTuple, ParamSpec, TypeVar

Arguments = ParamSpec("Arguments")
Item = TypeVar("Item")


class TakenShare(NamedTuple):
    """What a tenant is about to take more of, which the broker has for all tenants."""

    tenant: str
    what: str
    used: int
    """How much the tenant has."""
    total: int
    """How much all tenants have."""
    maximum: int
    more: int = 1


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


class Inquiry(Generic[Arguments, Item]):
    """Asks its listeners in the order in which they were connected, and returns all that they say.

    >>> guests = Inquiry[[str], str]()
    >>> guests.connect(lambda host: [f"{host}'s friend", f"{host}'s aunt"])
    >>> guests("ann")
    ["ann's friend", "ann's aunt"]
    """

    __slots__ = ("_listeners",)

    def __init__(self) -> None:
        self._listeners: list[Callable[Arguments, Iterable[Item]]] = []

    def connect(self, listener: Callable[Arguments, Iterable[Item]]) -> None:
        """Ask this one, too, from now on."""
        self._listeners.append(listener)

    def __call__(self, *args: Arguments.args, **kwargs: Arguments.kwargs) -> list[Item]:
        return [item for listener in self._listeners for item in listener(*args, **kwargs)]
