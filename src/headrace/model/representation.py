"""What objects say of themselves in one line, for logs, errors and interactive use."""

import reprlib
from collections.abc import Callable, Iterable
from typing import Any

import msgspec

_CHARS_MAX = 60
_BYTES_SHOWN = 32


class _Short(reprlib.Repr):
    """Looks only at the beginning of what is long."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel = 3
        self.maxstring = self.maxother = _CHARS_MAX

    def repr_bytes(self, value: bytes, _level: int) -> str:
        """Bytes, or their beginning and how many there are."""
        if len(value) <= _CHARS_MAX:
            return repr(value)
        return f"{bytes(value[:_BYTES_SHOWN])!r}... ({len(value)} bytes)"

    repr_bytearray = repr_memoryview = repr_bytes


_short = _Short()


def short(value: object) -> str:
    """A value in one line, cut if it is long; whatever it is."""
    try:
        return " ".join(_short.repr(value).split("\n"))
    except Exception:  # noqa: BLE001  # the value is a user's, and so is what its repr does
        return f"<{type(value).__name__} that cannot be shown>"


def described(thing: object, facts: Callable[[], Iterable[str]]) -> str:
    """An object's class and what there is to know of it; facts that are empty are left out.

    >>> described(object(), lambda: ["orders", ""])
    '<object orders>'
    """
    try:
        told = [fact for fact in facts() if fact]
    except Exception:  # noqa: BLE001  # it is half made, or half gone: a repr tells what it can, and never raises
        told = ["unfinished"]
    return f"<{' '.join([type(thing).__name__, *told])}>"


def described_fields(struct: msgspec.Struct) -> str:
    """A struct as it would be written, without the fields that have their defaults, and with long values cut."""
    fields = [(field.default, field.name, getattr(struct, field.name)) for field in msgspec.structs.fields(struct)]
    told = [f"{name}={short(value)}" for default, name, value in fields if not _is_default(value, default)]
    return f"{type(struct).__name__}({', '.join(told)})"


def _is_default(value: object, default: object) -> bool:
    """Whether it is the default, where that is something plain; others may not be compared with anything."""
    return value is default or (
        type(value) is type(default) and isinstance(value, str | int | bytes) and value == default
    )


def state_of(**states: Any) -> str:
    """The name of the first state that holds, or nothing.

    >>> state_of(closed=False, connected=True)
    'connected'
    """
    return next((name.replace("_", " ") for name, holds in states.items() if holds), "")
