"""Colours for terminals: what is in which colour, and whether there are any."""

import os
import re
import sys
from collections.abc import Mapping
from typing import Any

_CODES = {"heading": "1", "good": "32", "warning": "33", "bad": "31", "aside": "2"}
_STATES = {
    "running": "good",
    "sound": "good",
    "finished": "good",
    "starting": "warning",
    "waiting": "warning",
    "paused": "warning",
    "stopping": "warning",
    "failed": "bad",
    "dead": "bad",
    "DAMAGED": "bad",
}
_ESCAPE = re.compile("\x1b\\[[0-9;]*m")

_coloured = {"stdout": False, "stderr": False}


def choose(environ: Mapping[str, str], *, off: bool = False) -> None:
    """Decide for both streams whether what is printed there has colours."""
    for name in _coloured:
        _coloured[name] = not off and wanted(environ, getattr(sys, name))


def wanted(environ: Mapping[str, str], stream: Any) -> bool:
    """Whether colours are wanted on a stream, in the order that Python itself looks."""
    if environ.get("NO_COLOR"):
        return False
    if environ.get("FORCE_COLOR"):
        return True
    if environ.get("TERM") == "dumb" or stream is None:
        return False
    try:
        return os.isatty(stream.fileno())
    except (OSError, ValueError):  # a stream without a file
        return False


def paint(text: str, meaning: str, *, stream: str = "stdout") -> str:
    """The text in the colour of its meaning, if the stream has colours."""
    return f"\x1b[{_CODES[meaning]}m{text}\x1b[0m" if text and _coloured[stream] else text


def paint_state(text: str) -> str:
    """The text, in the colour of the state that its first word names if it does."""
    meaning = _STATES.get(re.split(r"[\s,;:]", text, maxsplit=1)[0])
    return paint(text, meaning) if meaning else text


def width(text: str) -> int:
    """How many characters of a text are seen.

    >>> width("\\x1b[1mtopic\\x1b[0m")
    5
    """
    return len(_ESCAPE.sub("", text)) if "\x1b" in text else len(text)
