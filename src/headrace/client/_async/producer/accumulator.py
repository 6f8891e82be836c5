"""How a producer's messages come into batches: which partition, and when a batch goes."""

import secrets
from collections.abc import Callable, Sequence
from typing import Any, Literal

from headrace.client._async.concurrency import ResultCell, Timers, now
from headrace.client._async.connection.reconnecting import AsyncReconnectingConnection
from headrace.client._async.producer.metadata_cache import AsyncMetadataCache
from headrace.client._async.producer.sender import AsyncSender
from headrace.client.producer.partition_sender import PartitionSender
from headrace.client.producer.partitioning import Partitioner
from headrace.client.producer.pending_batch import AfterAck, BeforePublish, OutgoingMessage, PendingBatch, WhenSent
from headrace.client.producer.serializing import Serializer, serialized, serializer_of, to_bytes
from headrace.client.producer.topic_metadata import TopicMetadata, check_partition, codec_of, durability_of
from headrace.client.results import Receipt
from headrace.client.times import checked_count, checked_seconds
from headrace.model.arguments import check_callable, checked_hooks, checked_timeout, shown
from headrace.model.durability import Durability
from headrace.model.errors import InvalidArgument, MessageTooLarge, PartitionNotFound
from headrace.model.limits import BATCH_COUNT_MAX
from headrace.model.partitioning import by_key

_HURRIED_MAX = 8
"""With so many batches under way to a partition, messages that are in a hurry are gathered until an answer comes."""


class AsyncAccumulator:
    """The inside of a producer."""

    def __init__(
        self,
        broker: AsyncReconnectingConnection,
        metadata_cache: AsyncMetadataCache,
        timers: Timers,
        *,
        topic: str | None = None,
        linger: float = 0.005,
        batch_bytes: int = 100_000,
        batch_count: int = 1000,
        compression: Literal["none", "lz4", "zstd"] | None = None,
        partitioner: Partitioner | None = None,
        serializer: str | Serializer | None = None,
        durability: Durability | str | None = None,
        buffer_bytes: int = 32 << 20,
        on_full: Literal["block", "raise"] = "block",
        before_publish: Sequence[BeforePublish] = (),
        after_ack: Sequence[AfterAck] = (),
        timeout: float = 30.0,
        on_close: Callable[[Any], None] | None = None,
        bus: object = None,
    ) -> None:
        for name, count in (("batch_bytes", batch_bytes), ("batch_count", batch_count), ("buffer_bytes", buffer_bytes)):
            checked_count(count, name)
        checked_seconds(linger, "linger")
        timeout = checked_timeout(timeout, least=0.001)
        if partitioner is not None:
            check_callable(partitioner, "partitioner")
        before_publish = checked_hooks(before_publish, "before_publish")
        after_ack = checked_hooks(after_ack, "after_ack")
        if on_full not in ("block", "raise"):
            raise InvalidArgument(f"on_full is 'block' or 'raise', not {shown(on_full)}")
        self.topic = topic
        self._bus = bus
        """What must live as long as the producer does."""
        self._metadata_cache = metadata_cache
        self._timers = timers
        self._linger = linger
        self._batch_bytes = batch_bytes
        self._batch_count = min(batch_count, BATCH_COUNT_MAX)
        self._codec = codec_of(compression)
        self._partitioner = partitioner or by_key
        self._serializer = serializer_of(serializer)
        self._durability = durability_of(durability)
        self._before_publish = before_publish
        self._timeout = timeout
        self._on_close = on_close
        self._sender = AsyncSender(
            broker,
            metadata_cache,
            timers,
            timeout=timeout,
            buffer_bytes=buffer_bytes,
            block=on_full == "block",
            after_ack=after_ack,
            on_room=self._seal,
        )
        self._sticky: dict[str, int] = {}
        self._first_turn = secrets.randbits(32)
        """Producers begin with different partitions, so that those that send little do not all send to the first."""
        self._plain = not self._before_publish and self._serializer is to_bytes
        """Bytes go as they are."""
        self._at_once = self._plain and not linger
        """And do not wait for others."""
        self._begin()

    def _disown(self) -> None:
        """In a forked child: what is gathered is the parent's to deliver."""
        self._sender.disown()
        self._begin()

    def _begin(self) -> None:
        self._guard = self._sender.monitor.guard
        self._lingering = False
        self._urgent: list[PartitionSender] = []
        # A batch that takes messages with nothing but a value, as they are, and its lane.
        self._open: PendingBatch | None = None
        self._open_partition_sender = PartitionSender("", 0, 0)
        self._open_message_bytes_max = 0

    async def _put(
        self,
        message: OutgoingMessage,
        callback: WhenSent | None,
        durability: int,
        expected_offset: int | None,
        urgent: bool = False,
    ) -> tuple[PendingBatch, int]:
        """Put a message into a batch; returns which, and its place in it."""
        if self._before_publish:
            hooked = self._hooked(message)
            if hooked is None:
                return self._dropped(message, callback)
            message = hooked
        value, topic = message.value, message.topic
        if type(value) is not bytes or self._serializer is not to_bytes:
            value = serialized(self._serializer, value)
        metadata, deadline = self._metadata_cache.known(topic), None
        if metadata is None:
            deadline = now() + self._timeout
            metadata = await self._metadata_cache.get(topic, deadline)
        if expected_offset is not None and (type(expected_offset) is not int or not 0 <= expected_offset < 1 << 63):
            raise InvalidArgument(f"expected_offset is an offset, not {shown(expected_offset)}")
        try:
            return await self._place(message, value, metadata, callback, durability, expected_offset, urgent, deadline)
        except (MessageTooLarge, PartitionNotFound) as refusal:
            deadline = deadline or now() + self._timeout
            metadata = await self._metadata_cache.refreshed(topic, refusal, deadline)
            return await self._place(message, value, metadata, callback, durability, expected_offset, urgent, deadline)

    async def _place(
        self,
        message: OutgoingMessage,
        value: bytes | None,
        metadata: TopicMetadata,
        callback: WhenSent | None,
        durability: int,
        expected_offset: int | None,
        urgent: bool,
        deadline: float | None,
    ) -> tuple[PendingBatch, int]:
        """Put a message that is ready into the batch of its partition; returns the batch and its place in it."""
        topic, number = message.topic, message.partition
        if number is None:
            if expected_offset is not None and metadata.partitions > 1:
                raise InvalidArgument("expected_offset needs a partition: the topic has several")
            key = message.key
            number = self._turn(topic, metadata) if key is None else self._partitioner(key, metadata.partitions)
        with self._guard:
            if not self._sender.open:
                deadline = deadline or now() + self._timeout
                await self._sender.room(deadline)
            partition_sender = self._partition_sender(topic, number, metadata)
            pending_batch = self._gathering(partition_sender, durability, deadline, alone=expected_offset is not None)
            place = pending_batch.add(message, value, metadata.message_bytes_max)
            if callback is not None:
                pending_batch.callbacks = [*(pending_batch.callbacks or ()), (place, callback)]
            if urgent or callback is not None:
                pending_batch.observed += 1
            pending_batch.expected_offset = expected_offset
            self._placed(partition_sender, pending_batch, metadata, urgent)
        self._sender.flush()
        return pending_batch, place

    def _put_value(self, topic: str, value: bytes, durability: int, observed: int) -> tuple[PendingBatch, int] | None:
        """Put a message that has nothing but a value, and is in a hurry, into a batch: the short way of `_put`.

        None if that cannot be done at once. `observed` is 1 if somebody waits for what becomes of it, or else 0.
        """
        metadata = self._metadata_cache.known(topic)
        if metadata is None or len(value) > metadata.message_bytes_max:
            return None
        with self._guard:
            if not self._sender.open:
                return None
            number = self._sticky.get(topic, self._first_turn) % metadata.partitions
            partition_sender = self._sender.partition_sender_at.get((topic, number))
            if partition_sender is None or partition_sender.metadata is not metadata:
                partition_sender = self._partition_sender(topic, number, metadata)
            pending_batch = partition_sender.gathering
            if pending_batch is None:
                pending_batch = partition_sender.gathering = self._begun(durability)
            elif not pending_batch.plain or pending_batch.durability != durability:
                return None
            values = pending_batch.values
            place = len(values)
            values.append(value)
            pending_batch.bytes += len(value)
            pending_batch.observed += observed
            full = pending_batch.bytes >= self._batch_bytes or place + 1 >= self._batch_count
            if full:
                self._seal(partition_sender)
            elif not partition_sender.hurried:
                self._hurry(partition_sender)
        if full:
            self._sender.flush()
        return pending_batch, place

    def _placed(
        self, partition_sender: PartitionSender, pending_batch: PendingBatch, metadata: TopicMetadata, urgent: bool
    ) -> None:
        """A message was put into a parcel: see what is to be done with it."""
        full = pending_batch.bytes >= self._batch_bytes or len(pending_batch.values) >= self._batch_count
        if full or pending_batch.expected_offset is not None:
            self._seal(partition_sender)
        elif urgent or not self._linger:
            self._hurry(partition_sender)
        else:
            self._linger_on()
            simple = self._plain and pending_batch.plain and partition_sender.topic == self.topic
            if simple and pending_batch.durability == self._durability:
                self._open, self._open_partition_sender = pending_batch, partition_sender
                self._open_message_bytes_max = metadata.message_bytes_max
        if pending_batch is self._open and not pending_batch.plain:
            self._open = None

    def _gathering(
        self, partition_sender: PartitionSender, durability: int, deadline: float | None, alone: bool
    ) -> PendingBatch:
        pending_batch = partition_sender.gathering
        if pending_batch is not None and (alone or pending_batch.durability != durability):
            self._seal(partition_sender)
            pending_batch = None
        if pending_batch is None:
            pending_batch = partition_sender.gathering = self._begun(durability, deadline)
        return pending_batch

    def _begun(self, durability: int, deadline: float | None = None) -> PendingBatch:
        outcome: ResultCell[Receipt] = ResultCell()
        return PendingBatch(outcome, now() + self._timeout if deadline is None else deadline, durability)

    def _seal(self, partition_sender: PartitionSender) -> None:
        """Let a lane's messages go, without waiting for more."""
        pending_batch = partition_sender.gathering
        if pending_batch is None or not pending_batch.values:
            return
        partition_sender.gathering = None
        partition_sender.hurried = False
        if pending_batch is self._open:
            self._open = None
        self._sticky[partition_sender.topic] = partition_sender.partition + 1
        self._sender.ship(partition_sender, pending_batch)

    def _hurry(self, partition_sender: PartitionSender) -> None:
        """Let a lane's messages go as soon as all that are published at the same time are there."""
        if not partition_sender.hurried:
            partition_sender.hurried = True
            self._urgent.append(partition_sender)
            if len(self._urgent) == 1:
                self._sender.soon(self._hurried)

    def _hurried(self) -> None:
        with self._guard:
            urgent, self._urgent = self._urgent, []
            for partition_sender in urgent:
                # With enough under way it is quicker to wait for the next answer, and for company.
                if partition_sender.under_way < _HURRIED_MAX:
                    self._seal(partition_sender)
        self._sender.flush()

    def _linger_on(self) -> None:
        """See to it that what has been gathered goes out in time: one timer for all."""
        if not self._lingering:
            self._lingering = True
            self._timers.later(self._linger, self._lingered)

    def _lingered(self) -> None:
        with self._guard:
            self._lingering = False
            begun_before = now() + self._timeout - self._linger / 2
            for partition_sender in self._sender.partition_senders():
                if partition_sender.gathering is None:
                    continue
                if partition_sender.gathering.deadline > begun_before:
                    self._linger_on()
                elif partition_sender.under_way < _HURRIED_MAX:
                    self._seal(partition_sender)
                else:
                    partition_sender.hurried = True
        self._sender.flush()

    # Where to.

    def _topic(self, topic: str | None) -> str:
        name = self.topic if topic is None else topic
        if name is None:
            raise InvalidArgument("this producer has no topic of its own: say which one the message is for")
        return name

    def _turn(self, topic: str, metadata: TopicMetadata) -> int:
        """The partition whose turn it is to get messages without a key."""
        return self._sticky.get(topic, self._first_turn) % metadata.partitions

    def _partition_sender(self, topic: str, partition: int, metadata: TopicMetadata) -> PartitionSender:
        check_partition(topic, partition, metadata)
        partition_sender = self._sender.partition_sender(topic, partition)
        partition_sender.metadata = metadata
        partition_sender.codec = metadata.codec if self._codec is None else self._codec
        return partition_sender

    def _hooked(self, message: OutgoingMessage) -> OutgoingMessage | None:
        for hook in self._before_publish:
            changed = hook(message)
            if changed is None:
                return None
            if not isinstance(changed, OutgoingMessage):
                raise InvalidArgument(f"a before_publish hook returns a message or None, not {shown(changed)}")
            message = changed
        return message

    def _dropped(self, message: OutgoingMessage, callback: WhenSent | None) -> tuple[PendingBatch, int]:
        receipt = Receipt(message.topic, -1, -1, 0)
        pending_batch = self._begun(0)
        pending_batch.outcome.settle(receipt)
        if callback is not None:
            callback(receipt, None)
        return pending_batch, 0
