"""What `send` gives back: a way to ask what became of messages."""

from collections.abc import Sequence

from headrace.client._sync.concurrency import PendingResult, now
from headrace.client.producer.pending_batch import PendingBatch
from headrace.client.results import Receipt, merged, receipt_at
from headrace.model.arguments import checked_timeout
from headrace.model.representation import described, state_of


class Sent(PendingResult):
    """A message on its way."""

    __slots__ = ("_asked", "_pending_batch", "_place")

    def __init__(self, pending_batch: PendingBatch, place: int) -> None:
        self._pending_batch = pending_batch
        self._place = place
        self._asked = False

    def __repr__(self) -> str:
        return described(self, lambda: [_decided([self._pending_batch])])

    @property
    def done(self) -> bool:
        """Whether it is decided."""
        return self._pending_batch.outcome.done

    def result(self, timeout: float | None = None) -> Receipt:
        """The receipt, as soon as there is one; raises what went wrong.

        Parameters:
            timeout: how many seconds to wait; by default as long as the producer tries.
        """
        if timeout is not None:
            timeout = checked_timeout(timeout)
        if not self._asked:
            self._asked = True
            self._pending_batch.observed += 1
        self._pending_batch.check_process()
        receipt: Receipt = self._pending_batch.outcome.wait(timeout)
        return receipt_at(receipt, self._place)


class SentMany(PendingResult):
    """Messages on their way, in as many batches as they needed."""

    __slots__ = ("_pending_batches",)

    def __init__(self, pending_batches: Sequence[PendingBatch]) -> None:
        self._pending_batches = pending_batches

    def __repr__(self) -> str:
        return described(self, lambda: [f"batches={len(self._pending_batches)}", _decided(self._pending_batches)])

    @property
    def done(self) -> bool:
        """Whether all of it is decided."""
        return all(pending_batch.outcome.done for pending_batch in self._pending_batches)

    def result(self, timeout: float | None = None) -> list[Receipt]:
        """A receipt for each partition that got messages, or several where other messages came between.

        Parameters:
            timeout: how many seconds to wait; by default as long as the producer tries.
        """
        if timeout is not None:
            timeout = checked_timeout(timeout)
        deadline = None if timeout is None else now() + timeout
        for pending_batch in self._pending_batches:
            pending_batch.observed = pending_batch.count
            pending_batch.check_process()
        if len(self._pending_batches) == 1:
            return [self._pending_batches[0].outcome.wait(timeout)]
        return merged(
            [
                pending_batch.outcome.wait(None if deadline is None else deadline - now())
                for pending_batch in self._pending_batches
            ]
        )


def _decided(pending_batches: Sequence[PendingBatch]) -> str:
    outcomes = [pending_batch.outcome for pending_batch in pending_batches]
    failed = any(outcome.error is not None for outcome in outcomes)
    return state_of(failed=failed, acknowledged=all(outcome.done for outcome in outcomes), on_its_way=True)
