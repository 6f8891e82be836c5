"""Bounds the work of a pattern: how many places of it an engine without backtracking may have to follow at once.

An engine that cannot remember all its states follows, for each character, every place of the pattern that may come
next. Repetitions with a count have their content that many times, so a short pattern can have thousands of places;
most patterns can only be at one or two of them at a time.
"""

from collections.abc import Callable
from typing import NamedTuple

_PLACE_BYTES = 100
"""What a place of a pattern has as a program, about."""
_WIDE_BYTES, _CATEGORY_BYTES = 1_300, 34_000
"""The same for a class with other than ASCII characters, and for a category of Unicode."""
_CATEGORY_WIDTH = 8
_SIMPLE_ESCAPES = frozenset("nrtfvdDwWsS")
_ASSERTIONS = frozenset("bB")
_SPECIAL = frozenset("\\^$.|?*+()[]{}")
_DEPTH_MAX = 50


class PatternCost(NamedTuple):
    """What a pattern costs."""

    width: int
    """So many places are followed at once, at most."""
    program_bytes: int
    """The size of the compiled pattern, about."""


class _Part(NamedTuple):
    """A part of a pattern."""

    width: int
    """Places followed at once if the part is entered at one character of the text only."""
    places: int
    """The same if it may be entered at every character."""
    length: int | None
    """How many characters it matches; None: different numbers."""
    program_bytes: int
    anchored: bool = False
    """Whether it can only be entered at the begin of the text."""


_EMPTY = _Part(0, 0, 0, _PLACE_BYTES)


class _Unknown(Exception):
    """The pattern has something whose meaning is not looked at."""


def pattern_cost(pattern: str, measure: Callable[[str], int]) -> PatternCost:
    """What a pattern costs; `measure` tells how many bytes the program of a pattern has, if it cannot be told here.

    >>> pattern_cost("^[a-z]{1,60}$", len).width, pattern_cost("^([a-z]{1,60})*$", len).width
    (1, 60)
    """
    try:
        whole = _PatternReader(pattern).read()
    except _Unknown:
        size = measure(pattern)
        return PatternCost(1 + size // _PLACE_BYTES, size)
    return PatternCost(max(1, whole.width if whole.anchored else whole.places), whole.program_bytes)


class _PatternReader:
    """Reads the part of the syntax that all dialects have in common."""

    def __init__(self, pattern: str) -> None:
        self._pattern = pattern
        self._at = 0
        self._depth = 0

    def read(self) -> _Part:
        """The whole pattern."""
        part = self._alternatives()
        if self._at < len(self._pattern):
            raise _Unknown
        return part

    def _next(self) -> str:
        return self._pattern[self._at : self._at + 1]

    def _take(self) -> str:
        found = self._next()
        if not found:
            raise _Unknown
        self._at += 1
        return found

    def _alternatives(self) -> _Part:
        self._depth += 1
        if self._depth > _DEPTH_MAX:
            raise _Unknown
        found = [self._sequence()]
        while self._next() == "|":
            self._at += 1
            found.append(self._sequence())
        self._depth -= 1
        if len(found) == 1:
            return found[0]
        lengths = {part.length for part in found}
        return _Part(
            sum(part.width for part in found),
            sum(part.places for part in found),
            lengths.pop() if len(lengths) == 1 else None,
            sum(part.program_bytes for part in found),
            all(part.anchored for part in found),
        )

    def _sequence(self) -> _Part:
        whole = _EMPTY
        while self._next() not in ("", "|", ")"):
            whole = _followed(whole, self._repeated(self._atom()))
        return whole

    def _atom(self) -> _Part:
        character = self._take()
        if character == "(":
            return self._group()
        if character == "[":
            return self._class()
        if character == "\\":
            return self._escape()
        if character == "^":
            return _EMPTY._replace(anchored=True)
        if character == "$":
            return _EMPTY
        if character == ".":
            return _one(wide=True)
        if character in _SPECIAL:
            raise _Unknown
        return _one(wide=not character.isascii())

    def _group(self) -> _Part:
        if self._next() == "?":
            if not self._pattern.startswith("?:", self._at):
                raise _Unknown
            self._at += 2
        found = self._alternatives()
        if self._take() != ")":
            raise _Unknown
        return found

    def _class(self) -> _Part:
        wide = self._next() == "^"
        self._at += wide
        first = True
        while (character := self._take()) != "]" or first:
            after = self._next()
            if character in "[]" or (character in "&-~" and after == character):
                raise _Unknown
            if character == "\\":
                escaped = self._take()
                if escaped.isalnum() and escaped not in _SIMPLE_ESCAPES:
                    raise _Unknown
                wide = wide or escaped in "DWS"
            wide = wide or not character.isascii()
            first = False
        return _one(wide=wide)

    def _escape(self) -> _Part:
        character = self._take()
        if character in _ASSERTIONS:
            return _EMPTY
        if character in _SIMPLE_ESCAPES or not character.isalnum():
            return _one(wide=character in "DWS" or not character.isascii())
        if character in "pP" and self._take() == "{":
            while self._take() != "}":
                pass
            return _Part(_CATEGORY_WIDTH, _CATEGORY_WIDTH, 1, _CATEGORY_BYTES)
        raise _Unknown

    def _repeated(self, part: _Part) -> _Part:
        """A part with the repetition that follows it."""
        character = self._next()
        if character not in ("*", "+", "?", "{"):
            return part
        self._at += 1
        if character == "{":
            least, most = self._counts()
        else:
            least, most = {"*": (0, None), "+": (1, None), "?": (0, 1)}[character]
        if self._next() == "?":
            self._at += 1
        if self._next() in ("*", "+", "?", "{"):
            raise _Unknown
        copies = max(least, 1) if most is None else most
        size = _PLACE_BYTES + part.program_bytes * copies
        places = part.places * copies
        # Copies of one length that is not 0 begin at different characters: only one of them is followed at a time.
        width = part.width if copies <= 1 or part.length else places
        if most is None and not part.length:
            width = places
        length = part.length * least if part.length is not None and least == most else None
        return _Part(width, places, length, size, part.anchored and least > 0)

    def _counts(self) -> tuple[int, int | None]:
        end = self._pattern.find("}", self._at)
        least, comma, most = self._pattern[self._at : end].partition(",")
        numbers = [least, most] if most else [least]
        if end < 0 or any(len(number) > 6 or not (number.isascii() and number.isdigit()) for number in numbers):
            raise _Unknown
        self._at = end + 1
        if not comma:
            return int(least), int(least)
        return int(least), int(most) if most else None


def _one(*, wide: bool) -> _Part:
    """One character."""
    return _Part(1, 1, 1, _WIDE_BYTES if wide else _PLACE_BYTES)


def _followed(one: _Part, other: _Part) -> _Part:
    """A part and what follows it, which is entered once only if the first has one length."""
    known = one.length is not None
    return _Part(
        max(one.width, other.width) if known else one.width + other.places,
        one.places + other.places,
        one.length + other.length if one.length is not None and other.length is not None else None,
        one.program_bytes + other.program_bytes,
        one.anchored or (one.length == 0 and one.places == 0 and other.anchored),
    )
