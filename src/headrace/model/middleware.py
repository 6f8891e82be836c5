"""The interface of middleware, which sees the batches of a topic when they are published and delivered."""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, ClassVar, NoReturn, Protocol, overload

import msgspec

from headrace.model.batch import Columns
from headrace.model.codec import Codec
from headrace.model.errors import InvalidArgument

API = 1
"""The version of this interface."""
COLUMNS = ("values", "keys", "timestamps", "headers", "dues", "priorities", "expires")
"""The columns that a middleware can need."""
ERROR_HEADER = "headrace-middleware-error"
"""The header of a message that is delivered without its value, because a middleware failed; it names the middleware."""


class MiddlewareContext(msgspec.Struct, frozen=True):
    """Where a batch belongs and where it comes from."""

    topic: str
    """The topic's name without its tenant."""
    tenant: str
    partition: int
    time_us: int
    """The broker's time at publish, in microseconds since 1970; 0 at delivery."""
    identity: str = ""
    """Who the producer is, as authentication says; empty at delivery."""
    client: str = ""
    """What the producer's client calls itself; empty at delivery, and for messages of schedules and routes."""
    address: str = ""
    """Where the producer's client is; empty if it is in the broker's process."""
    gateway: str = ""
    """The gateway through which the batch came."""


class RefusedMessages(msgspec.Struct, frozen=True):
    """Messages that a middleware does not let pass."""

    reasons: Mapping[int, str]
    """Why, by the index of the message in the columns."""
    dead_letter: bool = False
    """Store these messages as dead letters and the others as usual, instead of refusing the whole batch."""
    columns: Columns | None = None
    """All messages as they go on, with those that are refused still among them; None: unchanged."""
    sources: Mapping[int, int] | None = None
    """If the number of messages changed: of which message, as they were given, each that is refused was made."""


class Middleware:
    """A middleware of one topic. Deriving from it is optional: it has the defaults.

    An entry point of the group `headrace.middleware` is a callable with `api = 1`: called with the options of the
    topic's setting, it returns the middleware, or raises InvalidArgument. A middleware has `on_publish`, `on_deliver`
    or both; it may keep state, and is called on one thread at a time for each partition.
    """

    api: ClassVar[int] = API
    needs: Collection[str] = ("values",)
    """The columns that it reads or changes. Others are not decoded, and what it returns in them is ignored."""
    inline: bool = False
    """Whether it never waits and takes a bounded time, so that small batches are processed on the event loop."""
    changes_count: bool = False
    """Whether `on_publish` may return another number of messages; it then needs all columns."""
    codec: Codec | None = None
    """How published batches are compressed; None: as they came."""


class PublishMiddleware(Protocol):
    """A middleware that sees batches before they are stored."""

    def on_publish(self, columns: Columns, context: MiddlewareContext) -> Columns | RefusedMessages:
        """The messages as they are stored: the same columns, changed in place or not, or others."""


class DeliverMiddleware(Protocol):
    """A middleware that sees batches before consumers receive them."""

    def on_deliver(self, columns: Columns, context: MiddlewareContext) -> Columns:
        """The messages as they are delivered, as many as there are; never changes the columns that it is given.

        Only values and headers can change. The middleware must be inline, as consumers do not wait for a thread.
        """


MiddlewareFactory = Callable[[Mapping[str, Any]], Any]
"""Makes the middleware of a topic of its options: the entry without `name`."""
LoadMiddleware = Callable[[str], MiddlewareFactory]
"""Finds the factory of a name; raises a HeadraceError that says why there is none."""


class UnreadColumn(Sequence[Any]):
    """Stands for a column of values that a middleware did not say it needs: only its length is known."""

    def __init__(self, count: int) -> None:
        self._count = count

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> Any: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Any]: ...
    def __getitem__(self, index: int | slice) -> NoReturn:
        raise LookupError("the column was not read: name it in `needs`")


def check_options(options: Mapping[str, Any], known: Mapping[str, type | tuple[type, ...]]) -> None:
    """Refuse options of a middleware that are unknown or have another type.

    >>> check_options({"fields": ["$.card"]}, {"fields": list})
    """
    for name, option in options.items():
        if name not in known:
            raise InvalidArgument(f"there is no option {name!r}; there are {', '.join(sorted(known)) or 'none'}")
        wanted = known[name]
        kinds: tuple[type, ...] = wanted if isinstance(wanted, tuple) else (wanted,)
        if not isinstance(option, kinds) or (isinstance(option, bool) and bool not in kinds):
            told = " or ".join(_KINDS.get(kind, kind.__name__) for kind in kinds)
            raise InvalidArgument(f"the option {name!r} must be {told}, not {type(option).__name__}")


def check_choice(name: str, choice: Any, choices: Sequence[str]) -> str:
    """Refuse an option that is not one of these texts."""
    if choice not in choices:
        raise InvalidArgument(f"the option {name!r} is {', '.join(choices)}, not {choice!r}")
    return str(choice)


def may_deliver(entries: Sequence[Mapping[str, Any]]) -> bool:
    """Whether middleware may change deliveries, as far as settings tell: that of other packages always may.

    >>> may_deliver([{"name": "compress"}]), may_deliver([{"name": "redact", "when": "deliver"}])
    (False, True)
    """
    return any(entry.get("when") == "deliver" or entry.get("name") not in _OURS for entry in entries)


_OURS = frozenset({"combine", "compress", "enrich", "redact", "schema", "split", "transform"})
_KINDS: dict[Any, str] = {str: "text", int: "a number", float: "a number", bool: "true or false"}
_KINDS |= {list: "a list", dict: "an object"}
