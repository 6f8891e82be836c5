"""Suggests known names for a name that does not exist."""

import heapq
import itertools
from collections.abc import Iterable
from functools import partial

_NAMES_MAX = 10_000
"""Names that are looked at, about 1 us each."""
_COMPARED_MAX = 200
"""Names that are compared letter by letter, about 20 us each: a broker's loop waits meanwhile."""
_SUGGESTED_MAX = 3


def nearest(text: str, known: Iterable[str], likeness: float = 0.6, lengths_apart_max: int | None = None) -> list[str]:
    """Return the known names that are most like a text, the best first; `likeness` is from 0 to 1.

    >>> nearest("tpoic", ["publish", "tail", "topic"])
    ['topic']
    """
    import difflib  # loaded for a mistake only, because it would slow down the start of every command

    wanted, length = text.lower(), len(text)
    names: Iterable[str] = itertools.islice(known, _NAMES_MAX)
    if lengths_apart_max is not None:
        names = (name for name in names if abs(len(name) - length) <= lengths_apart_max)
    candidates = {name.lower(): name for name in heapq.nlargest(_COMPARED_MAX, names, partial(_equal_ends, wanted))}
    return [candidates[name] for name in difflib.get_close_matches(wanted, candidates, _SUGGESTED_MAX, likeness)]


def did_you_mean(text: str, known: Iterable[str]) -> str:
    """Return a question that suggests the nearest names; empty if there are none.

    >>> did_you_mean("order", ["orders", "older", "clicks"])
    'did you mean orders or older?'
    """
    return question(nearest(text, known))


def question(names: list[str]) -> str:
    """Return a question that suggests these names; empty without names."""
    if not names:
        return ""
    *others, last = names
    return f"did you mean {', '.join(others)}{' or ' if others else ''}{last}?"


def _equal_ends(wanted: str, name: str) -> int:
    """Count which of the first three and of the last three letters are the same: a quick test before a thorough one."""
    name = name.lower()
    return sum(map(str.__eq__, wanted[:3], name[:3])) + sum(map(str.__eq__, wanted[:-4:-1], name[:-4:-1]))
