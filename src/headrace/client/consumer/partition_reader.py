"""One partition that is being read: how far it was received, handed out, processed and committed."""

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple, Protocol

from headrace.client.connection.request_router import Bytes
from headrace.client.results import DamagedRange, ReceivedBatch
from headrace.model.batch import parse
from headrace.model.errors import CorruptBatch, HeadraceError, InvalidBatch
from headrace.model.reading import Delivery
from headrace.model.requests import PartitionOffset

OnCorrupt = Literal["raise", "skip"] | Callable[[DamagedRange], object]
"""What to do about messages that are damaged where they are stored."""


class Inbox(Protocol):
    """Takes the deliveries of partitions."""

    def delivered(self, reader: "PartitionReader", delivery: Delivery, body: Bytes) -> None:
        """Batches came."""

    def ended(self, reader: "PartitionReader", error: HeadraceError) -> None:
        """No more will come."""


class PartitionReader:
    """A partition that is being read, under one assignment, from one place on. A seek makes another reader."""

    __slots__ = (
        "_inbox",
        "checked",
        "committed",
        "committing",
        "credit_due",
        "done",
        "end_offset",
        "epoch",
        "gone",
        "handed",
        "optional",
        "partition",
        "position",
        "queued_bytes",
        "stream",
        "topic",
        "topic_id",
        "using",
        "wanted",
    )

    def __init__(self, inbox: Inbox, topic: str, partition: int, offset: int, epoch: int = 0) -> None:
        self._inbox = inbox
        self.topic = topic
        self.partition = partition
        self.epoch = epoch
        self.topic_id = 0
        self.stream: int | None = None
        """The number of the stream on the present connection."""
        self.end_offset = offset
        self.gone = False
        """It is no longer read: revoked, lost, or replaced."""
        self.optional = False
        """Its partition may disappear without an error."""
        self.using = 0
        """How many batches of it are being processed."""
        self.queued_bytes = 0
        self.credit_due = 0
        self.checked = -1
        """An offset at which a damaged batch arrived that the broker says is good."""
        self.start(offset)

    @property
    def place(self) -> tuple[str, int]:
        """Topic and partition."""
        return self.topic, self.partition

    @property
    def lag(self) -> int:
        """How many messages there are behind the last one that was processed, as far as is known."""
        return max(self.end_offset - self.done, 0)

    def start(self, offset: int) -> None:
        """Begin here."""
        self.position = offset
        """The offset after the last received message, at which a stream is opened."""
        self.wanted = offset
        """The next offset to be handed out."""
        self.handed = offset
        """The offset after the last message that was handed out."""
        self.done = offset
        """The offset after the last message that was processed."""
        self.committed = offset
        """The offset that the broker has committed."""
        self.committing = offset

    def delivered(self, delivery: Delivery, body: Bytes) -> None:
        """Batches came for it."""
        self._inbox.delivered(self, delivery, body)

    def ended(self, error: HeadraceError) -> None:
        """No more will come."""
        self._inbox.ended(self, error)

    def passed(self, offset: int) -> None:
        """Skip offsets without messages."""
        self.wanted = max(self.wanted, offset)
        if self.done == self.handed:
            self.done = self.handed = self.wanted


class HandedPositions(NamedTuple):
    """How far a member of a group was handed messages: what a transaction commits."""

    group: str = ""
    member: str = ""
    offsets: Sequence[tuple[PartitionReader, int]] = ()

    @property
    def places(self) -> list[PartitionOffset]:
        """The positions under the present assignments; a partition that was taken away keeps its last one."""
        return [PartitionOffset(one.topic, one.partition, offset, one.epoch) for one, offset in self.offsets]


class Delivered:
    """Batches that were delivered together, taken one by one."""

    __slots__ = ("_at", "_view", "reader")

    def __init__(self, reader: PartitionReader, body: Bytes) -> None:
        self.reader = reader
        self._view = memoryview(body)
        self._at = 0

    def next(self) -> ReceivedBatch | None:
        """The next batch with messages that are wanted; None when there is none left."""
        reader, view = self.reader, self._view
        while self._at < len(view) and not reader.gone:
            try:
                batch = parse(view, self._at)
            except InvalidBatch as error:
                at, self._at = self._at, len(view)  # without its length nobody knows where the next one begins
                raise _damaged(reader, reader.wanted, reader.position, at, error) from error
            self._at += batch.length
            next_offset = batch.base_offset + batch.span
            if next_offset <= reader.wanted or not batch.count:
                if batch.count and reader.checked != reader.wanted:  # others should be here: the broker looks at them
                    at, self._at = self._at - batch.length, len(view)
                    wrong = InvalidBatch(f"a batch has offset {batch.base_offset} where {reader.wanted} is expected")
                    raise _damaged(reader, reader.wanted, reader.wanted, at, wrong)
                reader.passed(next_offset)
                continue
            first_offset = max(reader.wanted, batch.base_offset)
            reader.wanted = next_offset
            received = ReceivedBatch(reader.topic, reader.partition, batch, first_offset)
            try:
                batch.verify()
                received.columns()  # they are wanted next, and what cannot be decoded counts as damaged
            except InvalidBatch as error:
                raise _damaged(reader, first_offset, next_offset, self._at - batch.length, error) from error
            return received
        return None


def _damaged(reader: PartitionReader, first: int, next_offset: int, at: int, error: InvalidBatch) -> CorruptBatch:
    reader.wanted = max(reader.wanted, next_offset)
    return CorruptBatch(first, next_offset, f"{reader.topic}[{reader.partition}] as it was received", at, str(error))
