"""Terminal colours: the palette, and the decision whether a stream is coloured."""

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
    "serving": "good",
    "following": "good",
    "restoring": "warning",
    "claiming": "warning",
    "releasing": "warning",
    "silent": "bad",
    "blocked": "bad",
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
    """Decide for stdout and stderr whether output is coloured."""
    for name in _coloured:
        _coloured[name] = not off and wanted(environ, getattr(sys, name))


def wanted(environ: Mapping[str, str], stream: Any) -> bool:
    """Return whether a stream is coloured; checks the same variables in the same order as Python."""
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
    """Return the text in the colour of its meaning, if the stream is coloured."""
    return f"\x1b[{_CODES[meaning]}m{text}\x1b[0m" if text and _coloured[stream] else text


def paint_state(text: str) -> str:
    """Return the text, coloured by the state that its first word names, if any."""
    meaning = _STATES.get(re.split(r"[\s,;:]", text, maxsplit=1)[0])
    return paint(text, meaning) if meaning else text


def width(text: str) -> int:
    """Count the visible characters of a text.

    >>> width("\\x1b[1mtopic\\x1b[0m")
    5
    """
    return len(_ESCAPE.sub("", text)) if "\x1b" in text else len(text)
