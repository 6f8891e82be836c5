"""Checks of arguments that the client and the embedded log share."""

import os
import re
from collections.abc import Iterable
from typing import Any, TypeVar

from headrace.model.errors import InvalidArgument

T = TypeVar("T")

TIMEOUT_SECONDS_MAX = 1e8
"""Three years: a longer time-out is taken for this one, which every lock and event loop can wait for."""
_USER = re.compile(r"(?<=//).*@", re.DOTALL)
_SHOWN_MAX = 200
"""How many characters of a value an error shows."""


def shown(value: object) -> str:
    """A value as an error shows it: cut if it is long, whatever it is.

    >>> shown("orders")
    "'orders'"
    """
    try:
        text = repr(value[:_SHOWN_MAX] if isinstance(value, str | bytes | bytearray) else value)
        long = len(text) > _SHOWN_MAX or (isinstance(value, str | bytes | bytearray) and len(value) > _SHOWN_MAX)
    except Exception:  # noqa: BLE001  # it is the caller's value, and so is what its repr does
        return f"a {type(value).__name__} that cannot be shown"
    return f"{text[:_SHOWN_MAX]}..." if long else text


def shown_url(url: str) -> str:
    """A URL as an error shows it: without its user, beside which a password may be.

    >>> shown_url("http://ann:secret@localhost")
    "'http://...@localhost'"
    """
    return shown(_USER.sub("...@", url))


def shortened(text: object) -> str:
    """The text of another error, cut if it repeats a long argument."""
    told = str(text)
    return told if len(told) <= 2 * _SHOWN_MAX else f"{told[:_SHOWN_MAX]} ... {told[-_SHOWN_MAX:]}"


def checked_timeout(timeout: Any, what: str = "timeout", least: float = 0.0) -> float:
    """A time-out in seconds that can be waited for; infinity and very large numbers mean practically for ever.

    >>> checked_timeout(1.5), checked_timeout(float("inf"))
    (1.5, 100000000.0)
    """
    # NaN compares as false with everything.
    if isinstance(timeout, int | float) and not isinstance(timeout, bool) and timeout >= least:
        return float(min(timeout, TIMEOUT_SECONDS_MAX))
    raise InvalidArgument(f"{what} is a number of seconds, {least:g} at least, not {shown(timeout)}")


def check_flag(flag: object, what: str) -> None:
    """Refuse what is neither True nor False."""
    if not isinstance(flag, bool):
        raise InvalidArgument(f"{what} is True or False, not {shown(flag)}")


def check_callable(given: object, what: str) -> None:
    """Refuse what cannot be called."""
    if not callable(given):
        raise InvalidArgument(f"{what} is a function or another callable, not {shown(given)}")


def checked_hooks(hooks: Iterable[T], what: str) -> tuple[T, ...]:
    """Several callables."""
    try:
        checked = tuple(hooks)
    except TypeError as error:
        raise InvalidArgument(f"{what} are several callables, such as a list of them, not {shown(hooks)}") from error
    for hook in checked:
        check_callable(hook, f"each of {what}")
    return checked


def check_path(path: object, what: str) -> None:
    """Refuse what names no file at all; whether it can be opened is seen when it is."""
    if not isinstance(path, str | bytes | os.PathLike):
        raise InvalidArgument(f"{what} is the name of a directory, or ':memory:', not {shown(path)}")
