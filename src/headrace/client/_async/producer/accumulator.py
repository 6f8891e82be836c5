"""Collects the messages of a producer into batches, and decides when a batch goes to the sender."""

import secrets
from collections.abc import Callable

from headrace.client._async.concurrency import ResultCell, Timers, breathe, now
from headrace.client._async.connection.reconnecting import AsyncReconnectingConnection
from headrace.client._async.producer.metadata_cache import AsyncMetadataCache
from headrace.client._async.producer.sender import AsyncSender
from headrace.client._async.producer.sent import AsyncSent
from headrace.client.producer.batch_split import BatchPlan, GivenMessages, plan_batches, plan_one_batch
from headrace.client.producer.partition_buffer import PartitionBuffer
from headrace.client.producer.partition_sender import PartitionSender
from headrace.client.producer.pending_batch import OutgoingMessage, PendingBatch, WhenSent
from headrace.client.producer.producer_settings import ProducerSettings
from headrace.client.producer.serializing import serialized, to_bytes
from headrace.client.producer.topic_metadata import ExpectedPlace, TopicMetadata, check_partition, may_create
from headrace.client.results import Receipt
from headrace.model.arguments import checked_timeout, shown
from headrace.model.errors import InvalidArgument, MessageTooLarge, PartitionNotFound

_URGENT_BATCHES_MAX = 8
"""With so many batches of a partition unacknowledged, urgent messages are collected until the next answer."""


class AsyncAccumulator:
    """Adds each message to the open batch of its partition, and hands batches to the sender.

    A batch goes when it is full, when it has lingered, when a message in it is urgent, or with a flush. Its owner is
    the accumulator until then, and the sender from then on.
    """

    def __init__(
        self,
        broker: AsyncReconnectingConnection,
        metadata_cache: AsyncMetadataCache,
        timers: Timers,
        settings: ProducerSettings,
        on_close: Callable[["AsyncAccumulator"], None],
        bus: object,
    ) -> None:
        self.topic = settings.topic
        self.bus = bus
        """Kept alive until all messages are acknowledged."""
        self._metadata_cache = metadata_cache
        self._timers = timers
        self._on_close = on_close
        # The settings that every message needs: a field of a named tuple costs more than an attribute.
        self.durability = settings.durability
        self._before_publish = settings.before_publish
        self._serializer = settings.serializer
        self._partitioner = settings.partitioner
        self._codec = settings.codec
        self._batch_bytes = settings.batch_bytes
        self._batch_count = settings.batch_count
        self._linger = settings.linger
        self._timeout = settings.timeout
        self._sender = AsyncSender(
            broker,
            metadata_cache,
            timers,
            timeout=settings.timeout,
            buffer_bytes=settings.buffer_bytes,
            block=settings.block,
            after_ack=settings.after_ack,
            refill=self._take_batch,
        )
        self._next_partition: dict[str, int] = {}
        self._first_partition = secrets.randbits(32)
        """Producers begin with different partitions, so that those that send little do not all send to the first."""
        self.takes_bytes = not settings.before_publish and settings.serializer is to_bytes
        """Values are sent as they are: there is neither a hook nor a serializer."""
        self._begin()

    def disown(self) -> None:
        """In a forked child: leave the open batches to the parent, which sends them."""
        self._sender.disown()
        self._begin()

    def _begin(self) -> None:
        self._guard = self._sender.monitor.guard
        self._buffers: dict[tuple[str, int], PartitionBuffer] = {}
        self._lingering = False
        self._urgent: list[PartitionBuffer] = []
        # The buffer whose open batch takes values without other fields, and the largest value that it takes.
        self._bare_batch: PendingBatch | None = None
        self._bare_buffer: PartitionBuffer | None = None
        self._bare_bytes_max = 0

    # Adding messages.

    def send_bare(self, value: bytes) -> AsyncSent | None:
        """Add a message that has only a value, for the producer's own topic; None if that needs the long way."""
        batch = self._bare_batch
        if batch is None:
            if self._linger or not self.takes_bytes or self.topic is None:
                return None
            added = self.add_bare(self.topic, value, self.durability, observed=0)
            return None if added is None else AsyncSent(*added)
        with self._guard:
            if batch is not self._bare_batch or len(value) > self._bare_bytes_max:
                return None
            values = batch.values
            place = len(values)
            values.append(value)
            batch.bytes += len(value)
            if batch.bytes < self._batch_bytes and place + 1 < self._batch_count:
                return AsyncSent(batch, place)
            assert self._bare_buffer is not None
            self._seal(self._bare_buffer)
        self._sender.flush()
        return AsyncSent(batch, place)

    def add_bare(self, topic: str, value: bytes, durability: int, observed: int) -> tuple[PendingBatch, int] | None:
        """Add an urgent message that has only a value; None if that needs the long way, `add`.

        `observed` is 1 if somebody waits for the outcome of the message, else 0.
        """
        metadata = self._metadata_cache.known(topic)
        if metadata is None or len(value) > metadata.message_bytes_max:
            return None
        with self._guard:
            if not self._sender.open:
                return None
            number = self._next_partition.get(topic, self._first_partition) % metadata.partitions
            buffer = self._buffers.get((topic, number))
            if buffer is None or buffer.metadata is not metadata:
                buffer = self._buffer(topic, number, metadata)
            batch = buffer.open_batch
            if batch is None:
                batch = buffer.open_batch = self._new_batch(durability)
            elif not batch.plain or batch.durability != durability:
                return None
            values = batch.values
            place = len(values)
            values.append(value)
            batch.bytes += len(value)
            batch.observed += observed
            full = batch.bytes >= self._batch_bytes or place + 1 >= self._batch_count
            if full:
                self._seal(buffer)
            elif not buffer.partition_sender.refill_wanted:
                self._seal_soon(buffer)
        if full:
            self._sender.flush()
        return batch, place

    async def add(
        self,
        message: OutgoingMessage,
        callback: WhenSent | None,
        durability: int,
        expected: ExpectedPlace | None = None,
        urgent: bool = False,
    ) -> tuple[PendingBatch, int]:
        """Add a message to a batch; returns the batch, and the place of the message in it."""
        if self._before_publish:
            hooked = self._run_hooks(message)
            if hooked is None:
                return self._dropped(message, callback)
            message = hooked
        value, topic = message.value, message.topic
        if type(value) is not bytes or self._serializer is not to_bytes:
            value = serialized(self._serializer, value)
        metadata, deadline = self._metadata_cache.known(topic), None
        if metadata is None:
            deadline = now() + self._timeout
            metadata = await self._metadata_cache.get(topic, deadline, create=may_create(expected))
        try:
            return await self._place(message, value, metadata, callback, durability, expected, urgent, deadline)
        except (MessageTooLarge, PartitionNotFound) as refusal:
            deadline = deadline or now() + self._timeout
            metadata = await self._metadata_cache.refreshed(topic, refusal, deadline)
            return await self._place(message, value, metadata, callback, durability, expected, urgent, deadline)

    async def _place(
        self,
        message: OutgoingMessage,
        value: bytes | None,
        metadata: TopicMetadata,
        callback: WhenSent | None,
        durability: int,
        expected: ExpectedPlace | None,
        urgent: bool,
        deadline: float | None,
    ) -> tuple[PendingBatch, int]:
        """Add a serialized message to the open batch of its partition; returns the batch and the place in it."""
        topic, number = message.topic, message.partition
        if number is None:
            if expected is not None and expected.offset is not None and metadata.partitions > 1:
                raise InvalidArgument("expected_offset needs a partition: the topic has several")
            key = message.key
            number = (
                self._keyless_partition(topic, metadata) if key is None else self._partitioner(key, metadata.partitions)
            )
        with self._guard:
            if not self._sender.open:
                deadline = deadline or now() + self._timeout
                await self._sender.wait_for_room(deadline)
            buffer = self._buffer(topic, number, metadata)
            batch = self._open_batch(buffer, durability, deadline, alone=expected is not None)
            place = batch.add(message, value, metadata.message_bytes_max)
            if callback is not None:
                batch.callbacks = [*(batch.callbacks or ()), (place, callback)]
            if urgent or callback is not None:
                batch.observed += 1
            batch.expected = expected
            self._after_adding(buffer, batch, urgent)
        self._sender.flush()
        return batch, place

    def _after_adding(self, buffer: PartitionBuffer, batch: PendingBatch, urgent: bool) -> None:
        """Decide when the batch goes to which a message was added."""
        full = batch.bytes >= self._batch_bytes or len(batch.values) >= self._batch_count
        if full or batch.expected is not None:
            self._seal(buffer)
        elif urgent or not self._linger:
            self._seal_soon(buffer)
        else:
            self._start_lingering()
            bare = self.takes_bytes and batch.plain and buffer.partition_sender.topic == self.topic
            if bare and batch.durability == self.durability:
                self._bare_batch, self._bare_buffer = batch, buffer
                self._bare_bytes_max = buffer.metadata.message_bytes_max
        if batch is self._bare_batch and not batch.plain:
            self._bare_batch = None

    async def add_many(
        self,
        topic: str,
        given: GivenMessages,
        partition: int | None,
        durability: int,
        expected: ExpectedPlace | None = None,
    ) -> list[PendingBatch]:
        """Send messages in batches of their own, in one if a version is expected, behind what was added before."""
        if self._before_publish and expected is not None:
            raise InvalidArgument("expected_version needs one batch, which before_publish hooks could divide")
        if self._before_publish:
            added = [await self.add(each, None, durability) for each in given.messages(topic, partition)]
            self.send_open_batches()
            return list(dict.fromkeys(batch for batch, _ in added))
        checked = given.checked(self._serializer)
        metadata = self._metadata_cache.known(topic)
        if metadata is None:
            deadline = now() + self._timeout
            metadata = await self._metadata_cache.get(topic, deadline, create=may_create(expected))

        def planned(metadata: TopicMetadata) -> BatchPlan:
            keyless = self._keyless_partition(topic, metadata)
            limits = (self._batch_bytes, self._batch_count)
            if expected is not None:
                return plan_one_batch(topic, checked, partition, keyless, metadata, self._partitioner)
            return plan_batches(topic, checked, partition, keyless, metadata, self._partitioner, *limits)

        try:
            plan = planned(metadata)
        except (MessageTooLarge, PartitionNotFound) as refusal:
            metadata = await self._metadata_cache.refreshed(topic, refusal, now() + self._timeout)
            plan = planned(metadata)
        batches: list[PendingBatch] = []
        for number, portion in plan:
            with self._guard:
                await self._sender.wait_for_room(now() + self._timeout)  # each: there may be any number
                buffer = self._buffer(topic, number, metadata)
                self._seal(buffer)  # messages that were added before go before
                batch = self._new_batch(durability)
                batch.fill(portion.columns, portion.size)
                batch.expected = expected
                self._sender.send(buffer.partition_sender, batch)
            self._sender.flush()
            batches.append(batch)
            if buffer.partition_sender.waiting:
                await breathe()
        if plan and given.keys is None and partition is None:
            self._next_partition[topic] = plan[0][0] + 1
        return batches

    # Handing batches to the sender.

    def _open_batch(
        self, buffer: PartitionBuffer, durability: int, deadline: float | None, alone: bool
    ) -> PendingBatch:
        batch = buffer.open_batch
        if batch is not None and (alone or batch.durability != durability):
            self._seal(buffer)
            batch = None
        if batch is None:
            batch = buffer.open_batch = self._new_batch(durability, deadline)
        return batch

    def _new_batch(self, durability: int, deadline: float | None = None) -> PendingBatch:
        outcome: ResultCell[Receipt] = ResultCell()
        return PendingBatch(outcome, now() + self._timeout if deadline is None else deadline, durability)

    def _seal(self, buffer: PartitionBuffer) -> None:
        """Hand the open batch of a partition to the sender; with the guard held."""
        batch = self._taken(buffer)
        if batch is not None:
            self._sender.send(buffer.partition_sender, batch)

    def _taken(self, buffer: PartitionBuffer) -> PendingBatch | None:
        batch = buffer.take_batch()
        if batch is not None:
            if batch is self._bare_batch:
                self._bare_batch = None
            partition_sender = buffer.partition_sender
            self._next_partition[partition_sender.topic] = partition_sender.partition + 1
        return batch

    def _take_batch(self, partition_sender: PartitionSender) -> PendingBatch | None:
        """Give the sender the open batch of a partition, for which it has capacity now."""
        buffer = self._buffers.get((partition_sender.topic, partition_sender.partition))
        return None if buffer is None else self._taken(buffer)

    def _seal_soon(self, buffer: PartitionBuffer) -> None:
        """Send the open batch as soon as everything that is published at the same time has been added to it."""
        if not buffer.partition_sender.refill_wanted:
            buffer.partition_sender.refill_wanted = True
            self._urgent.append(buffer)
            if len(self._urgent) == 1:
                self._sender.call_before_flush(self._seal_urgent)

    def _seal_urgent(self) -> None:
        with self._guard:
            urgent, self._urgent = self._urgent, []
            for buffer in urgent:
                # With many batches unacknowledged a larger batch, after the next answer, is quicker.
                if buffer.partition_sender.unacknowledged < _URGENT_BATCHES_MAX:
                    self._seal(buffer)
        self._sender.flush()

    def _start_lingering(self) -> None:
        """Start the timer for open batches, unless it runs: one for all partitions."""
        if not self._lingering:
            self._lingering = True
            self._timers.later(self._linger, self._seal_lingered)

    def _seal_lingered(self) -> None:
        with self._guard:
            self._lingering = False
            opened_before = now() + self._timeout - self._linger / 2
            for buffer in list(self._buffers.values()):
                if buffer.open_batch is None:
                    continue
                if buffer.open_batch.deadline > opened_before:
                    self._start_lingering()
                elif buffer.partition_sender.unacknowledged < _URGENT_BATCHES_MAX:
                    self._seal(buffer)
                else:
                    buffer.partition_sender.refill_wanted = True
        self._sender.flush()

    # Flushing and closing.

    @property
    def closed(self) -> bool:
        """Whether the producer takes no more messages."""
        return self._sender.closed

    @property
    def unacknowledged_bytes(self) -> int:
        """How many bytes of encoded batches the broker has not acknowledged."""
        return self._sender.buffered_bytes

    def send_open_batches(self) -> None:
        """Hand all open batches to the sender, without waiting for the broker."""
        with self._guard:
            self._seal_all()
        self._sender.flush()

    def _seal_all(self) -> None:
        for buffer in list(self._buffers.values()):
            self._seal(buffer)

    async def flush(self, timeout: float | None) -> None:
        """Send all open batches, and wait until the broker has acknowledged everything."""
        wait_s = self._timeout if timeout is None else checked_timeout(timeout)
        self.send_open_batches()
        await self._sender.drain(wait_s)

    async def close(self, timeout: float | None) -> None:
        """Flush, and give up what is not acknowledged by then."""
        if timeout is not None:
            checked_timeout(timeout)  # before anything is closed
        if self._sender.closed:
            return
        try:
            await self.flush(timeout)
        finally:
            self.abandon()
            self._on_close(self)

    async def close_since(self, began: float) -> None:
        """Close, with the time-out counted from a moment before."""
        await self.close(max(began + self._timeout - now(), 0.001))

    def abandon(self) -> None:
        """Close without waiting for the broker; messages that it has not acknowledged may be stored or not."""
        with self._guard:
            if self._sender.closed:
                return
            self._seal_all()
            self._sender.closed = True  # with the guard still held: a message that came in between would be lost
        self._sender.flush()
        self._sender.close()

    # Partitions and hooks.

    def _keyless_partition(self, topic: str, metadata: TopicMetadata) -> int:
        """Choose the partition of messages without a key: one for a batch, then the next."""
        return self._next_partition.get(topic, self._first_partition) % metadata.partitions

    def _buffer(self, topic: str, partition: int, metadata: TopicMetadata) -> PartitionBuffer:
        check_partition(topic, partition, metadata)
        buffer = self._buffers.get((topic, partition))
        if buffer is None:
            sender = self._sender.partition_sender(topic, partition)
            buffer = self._buffers[topic, partition] = PartitionBuffer(sender, metadata)
        buffer.metadata = metadata
        buffer.partition_sender.codec = metadata.codec if self._codec is None else self._codec
        return buffer

    def _run_hooks(self, message: OutgoingMessage) -> OutgoingMessage | None:
        for hook in self._before_publish:
            changed = hook(message)
            if changed is None:
                return None
            if not isinstance(changed, OutgoingMessage):
                raise InvalidArgument(f"a before_publish hook returns a message or None, not {shown(changed)}")
            message = changed
        return message

    def _dropped(self, message: OutgoingMessage, callback: WhenSent | None) -> tuple[PendingBatch, int]:
        """Resolve a message that a hook dropped, with an empty receipt."""
        receipt = Receipt(message.topic, -1, -1, 0)
        batch = self._new_batch(0)
        batch.outcome.resolve(receipt)
        if callback is not None:
            callback(receipt, None)
        return batch, 0
