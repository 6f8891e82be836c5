"""Answers with more than words, and answers that are not there yet."""

import asyncio
from collections.abc import Callable, Generator
from typing import Any, Generic, NamedTuple, TypeVar

from headrace.model.batch import Bytes, Columns, encode
from headrace.model.errors import Cancelled, HeadraceError
from headrace.model.limits import BATCH_BYTES_MAX
from headrace.model.request import Answer

Outcome = TypeVar("Outcome")


class AnswerWithBody(NamedTuple):
    """An answer, and the batches that go with it."""

    words: Answer
    body: Bytes


def encode_detached_batch(columns: Columns, now_us: int) -> Bytes:
    """Messages as a batch that a reader can check, though it stands in no log."""
    batch = encode(columns, now_us, message_bytes_max=BATCH_BYTES_MAX)
    batch.place(0, now_us, 0)
    return batch.data


class PendingAnswer(Generic[Outcome]):
    """An answer to come, or an error. All on the broker's thread; any number may ask to be told, in their order."""

    __slots__ = ("_listeners", "outcome", "settled")

    def __init__(self) -> None:
        self.outcome: Outcome | HeadraceError | None = None
        self.settled = False
        self._listeners: list[Callable[[Outcome | HeadraceError], None]] = []

    def then(self, tell: Callable[[Outcome | HeadraceError], None]) -> None:
        """Call this with the answer or the error, now if it is there."""
        if self.settled:
            tell(self.outcome)  # type: ignore[arg-type]
        else:
            self._listeners.append(tell)

    def settle(self, outcome: Outcome | HeadraceError) -> None:
        """Tell the outcome to all listeners; does nothing after `cancel`."""
        if self.settled:
            return
        self.outcome = outcome
        self.settled = True
        listeners, self._listeners = self._listeners, []
        for tell in listeners:
            tell(outcome)

    def cancel(self) -> bool:
        """Tell all listeners that nobody wants the answer any more; whether it was still to come.

        A request that waits, such as a lease, is withdrawn. One that the broker carries out already is carried out.
        """
        if self.settled:
            return False
        self.settle(Cancelled())
        return True

    def __await__(self) -> Generator[Any, None, Outcome]:
        """Wait for the answer on the event loop that runs; an error is raised."""
        waiting: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def wake(_: object) -> None:
            if not waiting.done():  # else whoever waited was cancelled
                waiting.set_result(None)

        self.then(wake)
        yield from waiting
        if isinstance(self.outcome, HeadraceError):
            raise self.outcome
        return self.outcome  # type: ignore[return-value]
