"""Answers with more than words, and answers that are not there yet."""

from collections.abc import Callable
from typing import Generic, NamedTuple, TypeVar

from headrace.model.batch import Bytes, Columns, encode
from headrace.model.errors import HeadraceError
from headrace.model.limits import BATCH_BYTES_MAX
from headrace.model.requests import Words

Answer = TypeVar("Answer")


class WithBody(NamedTuple):
    """An answer, and the batches that go with it."""

    words: Words
    body: Bytes


def sealed(columns: Columns, now_us: int) -> Bytes:
    """Messages as a batch that a reader can check, though it stands in no log."""
    batch = encode(columns, now_us, message_bytes_max=BATCH_BYTES_MAX)
    batch.place(0, now_us, 0)
    return batch.data


class Later(Generic[Answer]):
    """An answer to come, or an error. All on the broker's thread; at most one may ask to be told."""

    __slots__ = ("_told", "outcome")

    def __init__(self) -> None:
        self.outcome: Answer | HeadraceError | None = None
        self._told: Callable[[Answer | HeadraceError], None] | None = None

    def then(self, tell: Callable[[Answer | HeadraceError], None]) -> None:
        """Call this with the answer or the error, now if it is there."""
        if self.outcome is not None:
            tell(self.outcome)
        else:
            self._told = tell

    def settle(self, outcome: Answer | HeadraceError) -> None:
        """Here it is."""
        self.outcome = outcome
        if self._told is not None:
            self._told(outcome)
