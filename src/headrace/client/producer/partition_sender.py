"""Decides which batches of one partition are sent when, so that the broker stores each once and in order."""

from collections import deque

from headrace.client.connection.retrying import IN_DOUBT
from headrace.client.producer.pending_batch import PendingBatch
from headrace.model.batch import Producer
from headrace.model.codec import Codec
from headrace.model.errors import (
    HeadraceError,
    OutOfOrderSequence,
    Timeout,
    UnknownProducer,
)
from headrace.model.limits import IN_FLIGHT_MAX

_SEQUENCES = 1 << 32


class PartitionSender:
    """Owns the batches of one producer for one partition, from when they are sealed until they are resolved.

    It numbers the batches, so that the broker recognises a repeated one, and keeps up to IN_FLIGHT_MAX in flight. When
    the broker refuses one, nothing new is sent until every batch in flight is answered; then those that are left are
    sent again, in order, renumbered where that is needed. It does no I/O: the sender does, and reports the answers.
    """

    def __init__(self, topic: str, partition: int, producer_id: int) -> None:
        self.topic = topic
        self.partition = partition
        self.waiting: deque[PendingBatch] = deque()
        """Encoded, and not sent yet."""
        self.in_flight: deque[PendingBatch] = deque()
        """Sent, and not acknowledged yet: oldest first."""
        self.unanswered = 0
        """How many answers are outstanding."""
        self.stalled = False
        """The broker refused a batch: when no answer is outstanding, all batches in flight are sent again."""
        self.backs_off = False
        """The broker or the connection is at fault: wait before sending again."""
        self.refill_wanted = False
        """The accumulator has a batch that goes as soon as this sender has capacity."""
        self.codec = Codec.NONE
        self._producer_id = producer_id
        self._epoch = 0
        self._acknowledged = 0
        """The sequence after the last one that was acknowledged."""
        self._next = 0
        self._renew = False

    @property
    def idle(self) -> bool:
        """Whether no batch is waiting or in flight."""
        return not self.waiting and not self.in_flight

    @property
    def unacknowledged(self) -> int:
        """How many batches are waiting or in flight."""
        return len(self.waiting) + len(self.in_flight)

    @property
    def resend_ready(self) -> bool:
        """Whether all answers are there after a refusal, so that batches can be sent again."""
        return self.stalled and not self.unanswered

    def expected_stamp(self) -> Producer:
        """Predict the number of the next batch that is encoded."""
        sequence = (self._next + len(self.waiting)) % _SEQUENCES
        return Producer(self._producer_id, self._epoch, sequence)

    def admit(self, pending_batch: PendingBatch) -> bool:
        """Put a batch that was encoded with the expected stamp in flight, if it can be sent now: then it must be."""
        if self.waiting or self.stalled or len(self.in_flight) >= IN_FLIGHT_MAX or self._next == _SEQUENCES:
            return False
        self._next += 1
        self.unanswered += 1
        self.in_flight.append(pending_batch)
        return True

    def admit_waiting(self) -> list[PendingBatch]:
        """Put waiting batches in flight, as many as can be; the caller must send all of them, in this order."""
        admitted: list[PendingBatch] = []
        while self.waiting and len(self.in_flight) < IN_FLIGHT_MAX and not self.stalled:
            if self._next == _SEQUENCES:
                if self.in_flight:
                    break
                self._begin_epoch()
            pending_batch = self.waiting.popleft()
            pending_batch.stamp(self._producer_id, self._epoch, self._next)
            self._next += 1
            self.in_flight.append(pending_batch)
            admitted.append(pending_batch)
        self.unanswered += len(admitted)
        return admitted

    def acknowledged(self, pending_batch: PendingBatch) -> None:
        """Record that the broker has stored a batch."""
        self.unanswered -= 1
        batch, in_flight = pending_batch.batch, self.in_flight
        if batch is not None and batch.sequence >= self._acknowledged:
            self._acknowledged = batch.sequence + 1
        if in_flight and in_flight[0] is pending_batch:
            in_flight.popleft()
        else:
            self._remove(pending_batch)

    def failed(self, pending_batch: PendingBatch, error: HeadraceError) -> bool:
        """Record that the broker has not stored a batch, or that nobody knows; returns whether it is given up."""
        self.unanswered -= 1
        pending_batch.last_error = error
        pending_batch.uncertain = pending_batch.uncertain or isinstance(error, (*IN_DOUBT, Timeout))
        self.stalled = True
        if isinstance(error, UnknownProducer):
            self._renew = True
            return False
        if isinstance(error, OutOfOrderSequence):
            return False
        if error.retryable:
            self.backs_off = True
            return False
        self._remove(pending_batch)
        return True

    def resend(self) -> list[PendingBatch]:
        """Return the batches in flight, renumbered where that is why they failed; the caller must send all of them."""
        assert self.resend_ready
        first = self.in_flight[0] if self.in_flight else None
        if first is not None and isinstance(first.last_error, OutOfOrderSequence) and not self._removed_before(first):
            self._renew = True  # nothing of ours is missing before it: the broker has lost what it had acknowledged
        if self._renew:
            self._begin_epoch()
        self._next = self._acknowledged
        for pending_batch in self.in_flight:
            pending_batch.previous_error, pending_batch.last_error = pending_batch.last_error, None
            if self._is_stored(pending_batch):
                continue  # sent again as it was, to learn its offset
            pending_batch.stamp(self._producer_id, self._epoch, self._next)
            self._next += 1
        self.stalled = self.backs_off = self._renew = False
        self.unanswered = len(self.in_flight)
        return list(self.in_flight)

    def expire(self, now: float) -> list[PendingBatch]:
        """Return the batches whose deadline has passed: the caller resolves them.

        A batch that may be stored stays in flight, because a later one could not be numbered without knowing.
        """
        late: list[PendingBatch] = []
        for pending_batch in [*self.in_flight, *self.waiting]:
            if pending_batch.deadline > now:
                break
            if not pending_batch.abandoned:
                late.append(pending_batch)
        for pending_batch in late:
            if pending_batch in self.waiting:
                self.waiting.remove(pending_batch)
            elif self.resend_ready and not pending_batch.uncertain:
                self._remove(pending_batch)
            else:
                pending_batch.abandoned = True
        return late

    def _is_stored(self, pending_batch: PendingBatch) -> bool:
        """Whether the broker must have it, because it acknowledged a later one."""
        batch = pending_batch.batch
        assert batch is not None
        return batch.producer_epoch == self._epoch and batch.sequence < self._acknowledged

    def _removed_before(self, pending_batch: PendingBatch) -> bool:
        assert pending_batch.batch is not None
        return pending_batch.batch.sequence > self._acknowledged

    def _begin_epoch(self) -> None:
        self._epoch += 1
        self._acknowledged = self._next = 0

    def _remove(self, pending_batch: PendingBatch) -> None:
        if self.in_flight and self.in_flight[0] is pending_batch:
            self.in_flight.popleft()
        elif pending_batch in self.in_flight:
            self.in_flight.remove(pending_batch)
