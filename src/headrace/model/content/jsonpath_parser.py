"""The parser of JSONPath: RFC 9535 and nothing beyond it, by the package python-jsonpath."""

from functools import cache
from typing import Any

from headrace.model.arguments import shortened, shown
from headrace.model.content.query import query_error
from headrace.model.errors import ContentSupportMissing, InvalidContentQuery


def parse_jsonpath(path: str) -> tuple[Any, ...]:
    """The segments of a path, as python-jsonpath names them."""
    environment, path_error = _environment()
    try:
        parsed = environment.compile(path)
    except (path_error, RecursionError, ValueError, OverflowError) as error:
        # The package leaves numbers such as 1e400 or 1e2 as an index to Python's own errors.
        reason = "it is nested too deep" if isinstance(error, RecursionError) else _first_line(error)
        text = f"{shown(path)} is no JSONPath (RFC 9535): {reason}"
        raise query_error(text, _position(path, error)) from error
    segments = getattr(parsed, "segments", None)
    if segments is None or parsed.pseudo_root:
        raise InvalidContentQuery(f"{shown(path)} is no JSONPath (RFC 9535): it combines several paths")
    return tuple(segments)


@cache
def _environment() -> tuple[Any, type[Exception]]:
    try:
        from jsonpath import JSONPathEnvironment
        from jsonpath.exceptions import JSONPathError
    except ImportError as error:
        raise ContentSupportMissing from error
    return JSONPathEnvironment(strict=True), JSONPathError


def _position(path: str, error: Exception) -> int | None:
    """Where in the path the error is; None if the package does not tell."""
    index = getattr(getattr(error, "token", None), "index", None)
    if not isinstance(index, int):
        return None
    return index if index >= 0 else len(path)  # the end of the path is -1


def _first_line(error: Exception) -> str:
    return shortened(str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__)
