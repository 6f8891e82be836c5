"""A producer's way into one partition: which batches are under way, in order and exactly once."""

from collections import deque

from headrace.client.producer.pending_batch import PendingBatch
from headrace.client.producer.topic_metadata import TopicMetadata
from headrace.model.batch import Producer
from headrace.model.codec import Codec
from headrace.model.errors import (
    ConnectionFailed,
    HeadraceError,
    OutOfOrderSequence,
    Timeout,
    UnknownProducer,
)
from headrace.model.limits import IN_FLIGHT_MAX

_SEQUENCES = 1 << 32


class PartitionSender:
    """Batches of one producer for one partition, numbered so that the broker knows a repeated one.

    Up to 32 are under way at once. When one is not taken over, nothing new is sent until the fate of all that are
    under way is known; then those that are left go again, in order, renumbered if need be. It decides, and does
    nothing itself: whoever sends tells it what came of that.
    """

    def __init__(self, topic: str, partition: int, producer_id: int) -> None:
        self.topic = topic
        self.partition = partition
        self.gathering: PendingBatch | None = None
        """Messages that wait for others of their batch."""
        self.waiting: deque[PendingBatch] = deque()
        """Encoded, and not sent yet."""
        self.flying: deque[PendingBatch] = deque()
        """Sent, and not acknowledged yet: oldest first."""
        self.unanswered = 0
        """How many answers are to come."""
        self.stalled = False
        """Something was not taken over: when no more answers are to come, regroup."""
        self.hurt = False
        """The broker or the way to it is at fault: wait a little before trying again."""
        self.hurried = False
        """What is gathered is to go as soon as there is room."""
        self.metadata: TopicMetadata | None = None
        """What was known of the topic when the lane was last used."""
        self.codec = Codec.NONE
        self._producer_id = producer_id
        self._epoch = 0
        self._acknowledged = 0
        """The sequence behind the last one that was acknowledged."""
        self._next = 0
        self._renew = False

    @property
    def idle(self) -> bool:
        """Whether nothing is gathered, waiting or under way."""
        gathered = self.gathering is not None and self.gathering.values
        return not gathered and not self.waiting and not self.flying

    @property
    def under_way(self) -> int:
        """How many batches are waiting or sent."""
        return len(self.waiting) + len(self.flying)

    @property
    def quiet(self) -> bool:
        """Whether it is time to regroup."""
        return self.stalled and not self.unanswered

    def expected_stamp(self) -> Producer:
        """What the next batch that is encoded will probably be numbered."""
        sequence = (self._next + len(self.waiting)) % _SEQUENCES
        return Producer(self._producer_id, self._epoch, sequence)

    def depart(self, pending_batch: PendingBatch) -> bool:
        """Take a parcel that was encoded with the expected stamp, if it can be sent at once: then it must be."""
        if self.waiting or self.stalled or len(self.flying) >= IN_FLIGHT_MAX or self._next == _SEQUENCES:
            return False
        self._next += 1
        self.unanswered += 1
        self.flying.append(pending_batch)
        return True

    def launch(self) -> list[PendingBatch]:
        """Take what can be sent now; every one must be sent, in this order."""
        launched: list[PendingBatch] = []
        while self.waiting and len(self.flying) < IN_FLIGHT_MAX and not self.stalled:
            if self._next == _SEQUENCES:
                if self.flying:
                    break
                self._begin_epoch()
            pending_batch = self.waiting.popleft()
            pending_batch.stamp(self._producer_id, self._epoch, self._next)
            self._next += 1
            self.flying.append(pending_batch)
            launched.append(pending_batch)
        self.unanswered += len(launched)
        return launched

    def acknowledged(self, pending_batch: PendingBatch) -> None:
        """The broker has it."""
        self.unanswered -= 1
        batch, flying = pending_batch.batch, self.flying
        if batch is not None and batch.sequence >= self._acknowledged:
            self._acknowledged = batch.sequence + 1
        if flying and flying[0] is pending_batch:
            flying.popleft()
        else:
            self._remove(pending_batch)

    def failed(self, pending_batch: PendingBatch, error: HeadraceError) -> bool:
        """The broker does not have it, or nobody knows; returns whether it is given up for good."""
        self.unanswered -= 1
        pending_batch.last_error = error
        pending_batch.uncertain = pending_batch.uncertain or isinstance(error, ConnectionFailed | Timeout)
        self.stalled = True
        if isinstance(error, UnknownProducer):
            self._renew = True
            return False
        if isinstance(error, OutOfOrderSequence):
            return False
        if error.retryable:
            self.hurt = True
            return False
        self._remove(pending_batch)
        return True

    def regroup(self) -> list[PendingBatch]:
        """All answers are there: what must be sent again, renumbered if that is why it failed."""
        assert self.quiet
        first = self.flying[0] if self.flying else None
        if first is not None and isinstance(first.last_error, OutOfOrderSequence) and not self._removed_before(first):
            self._renew = True  # nothing of ours is missing before it: the broker has lost what it had acknowledged
        if self._renew:
            self._begin_epoch()
        self._next = self._acknowledged
        for pending_batch in self.flying:
            pending_batch.last_error = None
            if self._arrived(pending_batch):
                continue  # sent again as it was, to be told where it is
            pending_batch.stamp(self._producer_id, self._epoch, self._next)
            self._next += 1
        self.stalled = self.hurt = self._renew = False
        self.unanswered = len(self.flying)
        return list(self.flying)

    def expired(self, now: float) -> list[PendingBatch]:
        """Those that took too long: whoever waits for them is to be told.

        What may have arrived stays under way, because a later batch could not be numbered without knowing.
        """
        late: list[PendingBatch] = []
        for pending_batch in [*self.flying, *self.waiting]:
            if pending_batch.deadline > now:
                break
            if not pending_batch.abandoned:
                late.append(pending_batch)
        for pending_batch in late:
            if pending_batch in self.waiting:
                self.waiting.remove(pending_batch)
            elif self.quiet and not pending_batch.uncertain:
                self._remove(pending_batch)
            else:
                pending_batch.abandoned = True
        return late

    def _arrived(self, pending_batch: PendingBatch) -> bool:
        """Whether it must have arrived, because one behind it was acknowledged."""
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
        if self.flying and self.flying[0] is pending_batch:
            self.flying.popleft()
        elif pending_batch in self.flying:
            self.flying.remove(pending_batch)
