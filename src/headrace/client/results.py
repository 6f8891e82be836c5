"""What publishing and receiving give back."""

import time
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import repeat
from typing import Any

import msgspec

from headrace.model.batch import Batch, Columns
from headrace.model.durability import Durability
from headrace.model.message import Message


class Receipt(msgspec.Struct, frozen=True, gc=False):
    """Messages were taken over by the broker."""

    topic: str
    partition: int
    offset: int
    """Of the first message; the others follow it."""
    count: int = 1
    """How many messages; 0 when a hook dropped the only one."""
    durability: Durability = Durability.SYNCED
    """What they have reached."""
    duplicate: bool = False
    """They had been taken over before: this is where."""
    append_time: int = 0
    """When the broker appended them, in microseconds since 1970."""
    topic_id: int = 0
    """Of the topic: one that is made again under the same name has another."""
    stored: int | None = None
    """How many messages were stored in the topic, without dead letters, if its middleware makes more or fewer of the
    batch; of a repeated batch those that are left, or 0 if that is not known. The offset is then where they begin.
    """


def merged(receipts: list[Receipt]) -> list[Receipt]:
    """The receipts, with those that follow each other without a gap made into one."""
    whole: list[Receipt] = []
    for receipt in sorted(receipts, key=lambda each: (each.topic, each.partition, each.offset)):
        last = whole[-1] if whole else None
        follows = last and (last.topic, last.partition) == (receipt.topic, receipt.partition)
        is_counted = receipt.stored is not None or (last is not None and last.stored is not None)
        if last and follows and last.offset + last.count == receipt.offset and not is_counted:
            whole[-1] = msgspec.structs.replace(
                last,
                count=last.count + receipt.count,
                durability=min(last.durability, receipt.durability),
                duplicate=last.duplicate or receipt.duplicate,
                append_time=receipt.append_time,
            )
        else:
            whole.append(receipt)
    return whole


def receipt_at(receipt: Receipt, place: int) -> Receipt:
    """The receipt of one message out of a batch's."""
    if receipt.count == 1 or not receipt.count:
        return receipt
    if receipt.stored is not None:  # nobody knows which of those that were made are this one
        return msgspec.structs.replace(receipt, count=1)
    return msgspec.structs.replace(receipt, offset=receipt.offset + place, count=1)


class Received(Message, frozen=True, gc=False):
    """A message, and where it is from."""

    value: Any
    """Bytes, or what the deserializer made of them."""
    topic: str = ""
    partition: int = 0


class DamagedRange(msgspec.Struct, frozen=True, gc=False):
    """Messages that cannot be read any more, because what is stored of them is damaged."""

    topic: str
    partition: int
    first_offset: int
    next_offset: int
    """Behind the last of them."""
    reason: str


class ReceivedBatch:
    """Messages of one partition, as they were published together; decoded when they are accessed.

    Values are bytes: deserializers apply to single messages. Messages that have expired are left out.

    Example:
        >>> receipts = bus.publish_many("orders", [b"3 apples", b"5 pears"])
        >>> with bus.subscribe("orders", timeout=10) as orders:
        ...     for batch in orders.batches():
        ...         print(batch.values, batch.columns().values == batch.values)
        ...         print([message.offset for message in batch.messages()])
        ...         break
        [b'3 apples', b'5 pears'] True
        [0, 1]
    """

    __slots__ = ("_columns", "batch", "first_offset", "partition", "topic")

    def __init__(self, topic: str, partition: int, batch: Batch, first_offset: int) -> None:
        self.topic = topic
        self.partition = partition
        self.batch = batch
        """The batch as it is stored."""
        self.first_offset = first_offset
        """Messages of the batch before this offset were not asked for, and are left out."""
        self._columns: Columns | None = None

    @property
    def next_offset(self) -> int:
        """The offset after the last one that the batch covers."""
        batch = self.batch
        return batch.base_offset + batch.span

    @property
    def values(self) -> Sequence[bytes | None]:
        """The messages' values."""
        return self.columns().values

    @property
    def offsets(self) -> Sequence[int]:
        """The messages' offsets."""
        base, columns = self.batch.base_offset, self.columns()
        if columns.places is None:
            return range(base, base + len(columns.values))
        return [base + place for place in columns.places]

    def __len__(self) -> int:
        return len(self.columns().values)

    def __repr__(self) -> str:
        return f"<ReceivedBatch {self.topic}[{self.partition}] {self.first_offset} to {self.next_offset - 1}>"

    def columns(self) -> Columns:
        """Decode the messages as columns.

        Returns:
            The columns.

        Raises:
            CorruptBatch: if the messages are damaged.
        """
        columns = self._columns
        if columns is None:
            columns = self.batch.columns()
            if self.first_offset > self.batch.base_offset or columns.expires is not None:
                columns = self._wanted(columns)
            self._columns = columns
        return columns

    def messages(self) -> Iterator[Received]:
        """Decode the messages one by one.

        Returns:
            The messages.

        Raises:
            CorruptBatch: if the messages are damaged.
        """
        columns = self.columns()
        return map(
            Received,
            self.offsets,
            columns.values,
            columns.timestamps or repeat(self.batch.time_max),
            columns.keys or repeat(None),
            columns.headers or repeat(None),
            columns.dues or repeat(None),
            columns.priorities or repeat(None),
            columns.expires or repeat(None),
            repeat(self.topic),
            repeat(self.partition),
        )

    def _wanted(self, columns: Columns) -> Columns:
        """Without those before the first offset, and those that have expired."""
        places = self.batch.places(columns)
        first = bisect_left(places, self.first_offset - self.batch.base_offset)
        indices: Sequence[int] = range(first, len(places))
        if columns.expires is not None:
            now_us, expires = time.time_ns() // 1000, columns.expires
            indices = [index for index in indices if (ends := expires[index]) is None or ends > now_us]
        if len(indices) == len(places):
            return columns
        return columns.picked(indices, places)
