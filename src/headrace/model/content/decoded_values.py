"""The values of a batch, decoded from JSON at most once for all queries on them."""

import json
import re
from collections.abc import Sequence
from typing import Any

import msgspec

from headrace.model.limits import CONTENT_BYTES_MAX, CONTENT_DEPTH_MAX


class _NotJson:
    """What stands for a value that is not JSON, or cannot be looked into: too large, too deep, or not representable."""

    __slots__ = ()


NOT_JSON = _NotJson()
_decode = msgspec.json.Decoder().decode
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


class DecodedValues:
    """The values of a batch's messages, and the documents that they are."""

    __slots__ = ("_documents", "failed", "values")

    def __init__(self, values: Sequence[bytes | None]) -> None:
        self.values = values
        self._documents: list[Any] = []
        self.failed: list[int] = []
        """Indexes of the values decoded so far that are too large or too deep, or JSON that cannot be represented."""

    def __len__(self) -> int:
        return len(self.values)

    def documents(self, end: int | None = None) -> list[Any]:
        """The documents of the values before `end`, and perhaps more; NOT_JSON for one that is none."""
        documents = self._documents
        for value in self.values[len(documents) : end]:
            if value is None:
                documents.append(NOT_JSON)
                continue
            try:
                if len(value) > CONTENT_BYTES_MAX:
                    raise RecursionError
                document = _decode(value)
                if len(value) > 2 * CONTENT_DEPTH_MAX and _is_too_deep(value, document):
                    raise RecursionError
            except (msgspec.MsgspecError, ValueError) as error:
                if _is_unrepresentable(value, error):
                    self.failed.append(len(documents))
                document = NOT_JSON
            except RecursionError:
                self.failed.append(len(documents))
                document = NOT_JSON
            documents.append(document)
        return documents


def _is_unrepresentable(value: bytes, error: Exception) -> bool:
    """Whether a value is JSON with a number that is too large, or with half of a surrogate pair in its text."""
    if isinstance(error, msgspec.ValidationError):
        return True  # a number is out of range: nothing else is validated
    if not isinstance(error, msgspec.DecodeError) or not _SURROGATE.search(value):
        return False
    try:  # the decoder takes half of a pair for malformed or truncated JSON
        json.loads(value, parse_constant=_refuse)
    except RecursionError:
        return True
    except ValueError:
        return False
    return True


def _refuse(constant: str) -> None:
    raise ValueError(constant)


def _is_too_deep(value: bytes, document: Any) -> bool:
    """Whether a document has more levels than may be looked into."""
    if value.count(b"[") + value.count(b"{") <= CONTENT_DEPTH_MAX:
        return False
    level = [document] if type(document) is dict or type(document) is list else []
    for _ in range(CONTENT_DEPTH_MAX):
        if not level:
            return False
        level = [
            child
            for parent in level
            for child in (parent.values() if type(parent) is dict else parent)
            if type(child) is dict or type(child) is list
        ]
    return bool(level)
