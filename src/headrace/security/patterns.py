"""Patterns of names in grants and bindings: `*` stands for any characters, `?` for one, everything else for itself."""

import re
from functools import lru_cache

_WILD = "\0"
"""In a name that is itself a pattern: stands for whatever its wildcard may match; only `*` of a grant covers it."""
_RESERVED = ("headrace.", "$")
"""What names of Headrace's own topics and subjects begin with."""
_SUBJECT_WILDCARDS = re.compile(r"^#\.|\.#(?=\.|$)|[*>#]")


@lru_cache(maxsize=4096)
def _compiled(pattern: str) -> re.Pattern[str]:
    """A regular expression without backtracking over several `*`: matching takes time in proportion to the name."""
    first, *others = pattern.split("*")
    if not others:
        return re.compile(_part(first))
    middle = "".join(f"(?>.*?{_part(one)})" for one in others[:-1] if one)
    return re.compile(f"{_part(first)}{middle}.*{_part(others[-1])}", re.DOTALL)


def _part(text: str) -> str:
    return "".join(f"[^{_WILD}]" if one == "?" else re.escape(one) for one in text)


def matches(pattern: str, name: str) -> bool:
    """Whether a pattern covers a name; one that begins with a wildcard covers none of Headrace's own names.

    >>> matches("orders.*", "orders.eu"), matches("*", "orders"), matches("*", "headrace.events")
    (True, True, False)
    """
    if pattern[:1] in ("*", "?") and name.startswith(_RESERVED):
        return False
    return _compiled(pattern).fullmatch(name) is not None


def covering_name(name: str) -> str:
    """A topic's or group's name for `matches`; if it is a pattern, a grant has to cover all that it may match.

    >>> matches("orders.*", covering_name("orders.eu-*")), matches("orders.?", covering_name("orders.*"))
    (True, False)
    """
    return name.replace("*", _WILD).replace("?", _WILD) if "*" in name or "?" in name else name


def covering_subject(subject: str) -> str:
    """A subject, or a pattern of subjects, for `matches`. `#` also stands for no token, and so for no dot before it.

    >>> matches("orders.*", covering_subject("orders.>")), matches("orders.*", covering_subject("orders.#"))
    (True, False)
    """
    return _SUBJECT_WILDCARDS.sub(_WILD, subject)
