"""Names that may have been meant by a mistyped one."""

import difflib
import heapq
import itertools
from collections.abc import Iterable
from functools import partial

_NAMES_MAX = 10_000
"""Names that are looked at, about 1 us each."""
_COMPARED_MAX = 200
"""Names that are compared letter by letter, about 20 us each: the broker's loop waits meanwhile."""
_LENGTHS_APART_MAX = 2
_SHOWN_MAX = 3


def nearest(name: str, names: Iterable[str]) -> list[str]:
    """Those that are most like a name that does not exist, the nearest first."""
    wanted, shortest, longest = name.lower(), len(name) - _LENGTHS_APART_MAX, len(name) + _LENGTHS_APART_MAX
    alike = (other for other in itertools.islice(names, _NAMES_MAX) if shortest <= len(other) <= longest)
    candidates = {other.lower(): other for other in heapq.nlargest(_COMPARED_MAX, alike, partial(_likeness, wanted))}
    found = difflib.get_close_matches(wanted, candidates, _SHOWN_MAX, cutoff=0.75)
    return [candidates[other] for other in found]


def _likeness(wanted: str, other: str) -> int:
    """How many of the first three and of the last three letters are the same: a quick test before a thorough one."""
    other = other.lower()
    return sum(map(str.__eq__, wanted[:3], other[:3])) + sum(map(str.__eq__, wanted[:-4:-1], other[:-4:-1]))
