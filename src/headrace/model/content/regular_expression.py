"""Regular expressions of users, by RE2: its time is proportional to the length of the text times the pattern's size."""

from collections.abc import Callable
from functools import lru_cache
from typing import Any

from headrace.model.arguments import shown
from headrace.model.content.budget import Evaluation, OverBudget
from headrace.model.content.query import query_error
from headrace.model.errors import ContentSupportMissing, InvalidContentQuery
from headrace.model.limits import CONTENT_PROGRAM_MAX, CONTENT_STEPS_MAX

_MEMORY_BYTES = 1 << 20
"""What one compiled pattern may use, its cache of states included."""
_WORK_PER_STEP = 32
"""Bytes times instructions that RE2 does in the time of a step, at worst."""
_COMPILE_STEPS, _COMPILE_STEPS_MAX = 2_000, CONTENT_STEPS_MAX // 3
"""What it costs to compile a pattern that a message brings along: a plain one, or one with repetitions or classes."""
_MESSAGE_PATTERN_CHARS_MAX = 100
"""A longer pattern in a message counts as failed: a thousand characters can take RE2 50 ms to compile."""


class RegularExpression:
    """A compiled pattern, with the most bytes that it can search within a budget."""

    __slots__ = ("_compiled", "bytes_max", "size")

    def __init__(self, pattern: str) -> None:
        try:
            import re2
        except ImportError as error:
            raise ContentSupportMissing from error
        options = re2.Options()
        options.max_mem = _MEMORY_BYTES
        options.log_errors = False
        options.never_capture = True
        try:
            self._compiled: Any = re2.compile(pattern, options)
        except re2.error as error:
            reason = error.args[0] if error.args else error
            told = reason.decode(errors="replace") if isinstance(reason, bytes) else str(reason)
            text = f"{shown(pattern)} is no regular expression of RE2: {told}"
            raise query_error(text, _position(pattern, told)) from error
        self.size: int = self._compiled.programsize
        if self.size > CONTENT_PROGRAM_MAX:
            raise InvalidContentQuery(
                f"the regular expression {shown(pattern)} is too complex: it compiles to {self.size} instructions, "
                f"and {CONTENT_PROGRAM_MAX} are the most"
            )
        self.bytes_max = CONTENT_STEPS_MAX * _WORK_PER_STEP // max(self.size, 1)

    @property
    def search(self) -> Callable[[bytes], object]:
        """A function that finds the pattern in bytes no longer than `bytes_max`: None when it is not there."""
        search: Callable[[bytes], object] = self._compiled.search
        return search

    def test(self, text: str, whole: bool, evaluation: Evaluation) -> bool:
        """Whether the pattern matches the whole text, or is found in it; each costs steps."""
        data = text.encode()
        evaluation.spend(1 + len(data) * self.size // _WORK_PER_STEP)
        return (self._compiled.fullmatch(data) if whole else self._compiled.search(data)) is not None


def compile_iregexp(pattern: str) -> RegularExpression:
    """Compile an I-Regexp (RFC 9485), in which a dot matches neither line feed nor carriage return."""
    return RegularExpression(_translate(pattern))


@lru_cache(maxsize=64)
def _remembered(pattern: str) -> RegularExpression | None:
    try:
        return compile_iregexp(pattern)
    except InvalidContentQuery:
        return None


def compile_from_message(pattern: str, evaluation: Evaluation) -> RegularExpression | None:
    """Compile a pattern that the message itself contains; None if it is none."""
    is_plain = not any(mark in pattern for mark in ("{", "\\p", "\\P"))
    evaluation.spend(_COMPILE_STEPS if is_plain else _COMPILE_STEPS_MAX)
    if len(pattern) > _MESSAGE_PATTERN_CHARS_MAX:
        raise OverBudget
    return _remembered(pattern)


def _position(pattern: str, told: str) -> int | None:
    """Where in the pattern the part is that RE2 complains about; None if it names none."""
    _, colon, part = told.partition(": ")
    found = pattern.find(part) if colon else pattern.rfind("\\")
    return found if found >= 0 else None


def _translate(pattern: str) -> str:
    """The pattern in the syntax of RE2."""
    parts: list[str] = []
    escaped = in_class = False
    for character in pattern:
        if escaped:
            escaped = False
        elif character == "\\":
            escaped = True
        elif character == "[":
            in_class = True
        elif character == "]":
            in_class = False
        elif character == "." and not in_class:
            character = "[^\\n\\r]"
        parts.append(character)
    return "".join(parts)
