"""What `send` gives back: a way to ask what became of messages."""

from collections.abc import Sequence

from headrace.client._sync.concurrency import PendingResult, now
from headrace.client.producer.pending_batch import PendingBatch
from headrace.client.results import Receipt, merged, receipt_at
from headrace.model.arguments import checked_timeout
from headrace.model.representation import described, state_of


class Sent(PendingResult):
    """The handle of a message that a producer has sent.

    Example:
        >>> with bus.producer("orders") as producer:
        ...     sent = producer.send(b"3 apples")
        ...     receipt = sent.result()
        ...     sent.done, receipt.offset
        (True, 0)
    """

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
        """Wait for the receipt.

        Parameters:
            timeout: how many seconds to wait; by default as long as the producer retries.

        Returns:
            The receipt.

        Raises:
            Timeout: if there is no receipt in time; the message may still be published.
            HeadraceError: why the message was not published.

        Example:
            >>> with bus.producer("orders") as producer:
            ...     sent = producer.send(b"3 apples")
            ...     receipt = sent.result(timeout=10)
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
    """The handle of messages that a producer has sent together.

    Example:
        >>> with bus.producer("orders") as producer:
        ...     sent = producer.send_many([b"3 apples", b"5 pears"])
        ...     receipts = sent.result()
        >>> receipts[0].count
        2
    """

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
        """Wait for the receipts.

        Parameters:
            timeout: how many seconds to wait; by default as long as the producer retries.

        Returns:
            A receipt for each partition that got messages; several for one if other producers' messages came between.

        Raises:
            Timeout: if receipts are missing after that time; the messages may still be published.
            HeadraceError: why messages were not published.

        Example:
            >>> with bus.producer("orders") as producer:
            ...     sent = producer.send_many([b"3 apples", b"5 pears"])
            ...     receipts = sent.result(timeout=10)
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
