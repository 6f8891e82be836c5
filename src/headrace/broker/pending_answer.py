"""Answers with a body of batches, and answers that are not there yet."""

import asyncio
from collections.abc import Callable, Generator
from typing import Any, Generic, NamedTuple, TypeVar

from headrace.model.batch import Bytes, Columns, encode
from headrace.model.errors import Cancelled, HeadraceError
from headrace.model.limits import BATCH_BYTES_MAX
from headrace.model.request import AnswerType

Outcome = TypeVar("Outcome")


class AnswerWithBody(NamedTuple, Generic[AnswerType]):
    """An answer, and the batches that are sent with it."""

    answer: AnswerType
    body: Bytes


def encode_detached_batch(columns: Columns, now_us: int) -> Bytes:
    """Encode messages as a batch that a reader can check, although it is in no log."""
    batch = encode(columns, now_us, message_bytes_max=BATCH_BYTES_MAX)
    batch.place(0, now_us, 0)
    return batch.data


def _drop_tracebacks(error: BaseException) -> None:
    """Release what the frames of an error hold, such as open files: whoever stores it may be among them, in a cycle."""
    cause: BaseException | None = error
    while cause is not None and cause.__traceback__ is not None:
        cause.__traceback__ = None
        cause = cause.__cause__ or cause.__context__


class PendingAnswer(Generic[Outcome]):
    """An answer to come, or an error. It has any number of listeners, which it calls in the order of their coming.

    It belongs to the broker's thread. Whoever asked can cancel it; it can be awaited on an event loop.
    """

    __slots__ = ("_listeners", "is_committed", "outcome", "resolved")

    def __init__(self, *, is_committed: bool = False) -> None:
        self.outcome: Outcome | HeadraceError | None = None
        self.resolved = False
        self.is_committed = is_committed
        """Whether it is resolved only when the journal has synced all that it tells, so that nothing else waits."""
        self._listeners: list[Callable[[Outcome | HeadraceError], None]] = []

    def then(self, listener: Callable[[Outcome | HeadraceError], None]) -> None:
        """Call the listener with the answer or the error: now if it is there, else when it comes."""
        if self.resolved:
            listener(self.outcome)  # type: ignore[arg-type]
        else:
            self._listeners.append(listener)

    def resolve(self, outcome: Outcome | HeadraceError) -> None:
        """Pass the answer or the error on to every listener; an answer that was cancelled before is dropped."""
        if self.resolved:
            return
        if isinstance(outcome, HeadraceError):
            _drop_tracebacks(outcome)
        self.outcome = outcome
        self.resolved = True
        listeners, self._listeners = self._listeners, []
        for listener in listeners:
            listener(outcome)

    def cancel(self) -> bool:
        """Tell all listeners that nobody wants the answer any more; whether it was still to come.

        A request that waits, such as a lease, is withdrawn. One that the broker carries out already is carried out, so
        what it reserves meanwhile is released by the outcome of the work, never by a listener of the client's answer.
        """
        if self.resolved:
            return False
        self.resolve(Cancelled())
        return True

    def __await__(self) -> Generator[Any, None, Outcome]:
        """Wait for the answer on the running event loop; an error is raised."""
        waiting: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def wake(_: object) -> None:
            if not waiting.done():  # the awaiting task may have been cancelled
                waiting.set_result(None)

        self.then(wake)
        yield from waiting
        if isinstance(self.outcome, HeadraceError):
            raise self.outcome
        return self.outcome  # type: ignore[return-value]
