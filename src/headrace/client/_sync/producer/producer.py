"""Publishing: messages are gathered into batches, which go out in order and exactly once."""

from collections.abc import Iterable, Iterator, Sequence
from types import TracebackType
from typing import Any

from headrace.client._sync.concurrency import breathe, now
from headrace.client._sync.producer.accumulator import Accumulator
from headrace.client._sync.producer.sent import Sent, SentMany
from headrace.client.producer.batch_split import BatchPortion, CheckedColumns, GivenMessages, portions
from headrace.client.producer.partitioning import divided
from headrace.client.producer.pending_batch import GivenHeaders, OutgoingMessage, PendingBatch, WhenSent, checked_key
from headrace.client.producer.topic_metadata import TopicMetadata, check_partition, durability_of
from headrace.client.results import Receipt, receipt_at
from headrace.client.times import Moment, listed
from headrace.model.arguments import check_callable, checked_timeout
from headrace.model.durability import Durability
from headrace.model.errors import MessageTooLarge, PartitionNotFound
from headrace.model.representation import described, short, state_of


class Producer(Accumulator):
    """Publishes messages. Made by `bus.producer(...)`, which explains the settings; close it, or use it in `with`.

    `publish` waits for the broker's receipt. `send` only puts a message into the batch that is being gathered, and is
    the quick way for single messages; `send_many` and `publish_many` are the quickest way of all.
    """

    def __repr__(self) -> str:
        return described(self, self._facts)

    def _facts(self) -> Iterator[str]:
        yield "" if self.topic is None else short(self.topic)
        yield f"unacknowledged_bytes={self._sender.buffered_bytes}"
        yield state_of(closed=self._sender.closed)

    def send(
        self,
        value: Any,
        key: bytes | str | None = None,
        *,
        topic: str | None = None,
        headers: GivenHeaders | None = None,
        timestamp: Moment | None = None,
        due: Moment | None = None,
        priority: int | None = None,
        expires: Moment | None = None,
        partition: int | None = None,
        callback: WhenSent | None = None,
    ) -> Sent:
        """Put a message into the batch that is being gathered; it goes out when that is full, or has lingered.

        Waits only if the buffer is full (with `on_full="block"`), or when a topic is used for the first time.

        Parameters:
            value: what the serializer takes; bytes unless the producer has another. None marks the key as deleted.
            key: messages with the same key go to the same partition, in order.
            topic: where to; by default the producer's topic.
            headers: names to text or bytes.
            timestamp: the message's time, by default now; a datetime or microseconds since 1970.
            due: not to be delivered before this time (by subscriptions that heed it).
            priority: a whole number, for subscriptions that deliver by priority.
            expires: not to be delivered after this time.
            partition: where to, instead of by key.
            callback: is called with the receipt and None, or None and the error, as soon as it is known. It must not
                block.

        Returns:
            What can be waited for to get the receipt.
        """
        pending_batch = self._open
        if (
            (pending_batch is not None or self._at_once)
            and type(value) is bytes
            and key is None
            and topic is None
            and headers is None
            and timestamp is None
            and due is None
            and priority is None
            and expires is None
            and partition is None
            and callback is None
        ):
            if pending_batch is None:
                put = self._put_value(self._topic(None), value, self._durability, observed=0)
                if put is not None:
                    return Sent(*put)
            else:
                size = len(value)
                place = -1
                with self._guard:
                    if pending_batch is self._open and size <= self._open_message_bytes_max:
                        values = pending_batch.values
                        place = len(values)
                        values.append(value)
                        pending_batch.bytes += size
                        if pending_batch.bytes < self._batch_bytes and place + 1 < self._batch_count:
                            return Sent(pending_batch, place)
                        self._seal(self._open_partition_sender)
                if place >= 0:
                    self._sender.flush()
                    return Sent(pending_batch, place)
        if callback is not None:
            check_callable(callback, "callback")
        message = OutgoingMessage(
            self._topic(topic), value, checked_key(key), headers, timestamp, due, priority, expires, partition
        )
        return Sent(*self._put(message, callback, self._durability, None))

    def publish(
        self,
        value: Any,
        key: bytes | str | None = None,
        *,
        topic: str | None = None,
        headers: GivenHeaders | None = None,
        timestamp: Moment | None = None,
        due: Moment | None = None,
        priority: int | None = None,
        expires: Moment | None = None,
        partition: int | None = None,
        durability: Durability | str | None = None,
        expected_offset: int | None = None,
    ) -> Receipt:
        """Publish a message now, and wait for the receipt. Those published at the same time share a batch.

        Parameters:
            value: as for `send`, like all that are not explained here.
            durability: what must be reached before the receipt: `memory`, `written` or `synced`; the topic's own if
                that is more.
            expected_offset: append only if the message gets this offset; else UnexpectedOffset is raised. Needs a
                partition, or a topic that has only one.

        Returns:
            Where the message is, and how safe.
        """
        asked = self._durability if durability is None else durability_of(durability)
        if (
            self._plain
            and type(value) is bytes
            and key is None
            and headers is None
            and timestamp is None
            and due is None
            and priority is None
            and expires is None
            and partition is None
            and expected_offset is None
        ):
            put = self._put_value(self._topic(topic), value, asked, observed=1)
            if put is not None:
                pending_batch, place = put
                receipt: Receipt = pending_batch.outcome.wait()
                return receipt if receipt.count == 1 else receipt_at(receipt, place)
        message = OutgoingMessage(
            self._topic(topic), value, checked_key(key), headers, timestamp, due, priority, expires, partition
        )
        pending_batch, place = self._put(message, None, asked, expected_offset, urgent=True)
        return receipt_at(pending_batch.outcome.wait(), place)

    def send_many(
        self,
        values: Iterable[Any],
        keys: Sequence[bytes | str | None] | None = None,
        *,
        topic: str | None = None,
        headers: Sequence[GivenHeaders | None] | None = None,
        timestamps: Sequence[Moment | None] | None = None,
        dues: Sequence[Moment | None] | None = None,
        priorities: Sequence[int | None] | None = None,
        expires: Sequence[Moment | None] | None = None,
        partition: int | None = None,
        durability: Durability | str | None = None,
    ) -> SentMany:
        """Send messages at once, in as few batches as can be; the quickest way.

        Without keys all go to one partition, in order; the next call's go to the next partition. Waits only if the
        buffer is full, or when a topic is used for the first time.

        Parameters:
            values: as many as you like, each as for `send`.
            keys: one for each value, or None where there is none; so are headers, timestamps, dues, priorities and
                expires.
            topic: where to; by default the producer's topic.
            partition: where all of them go, instead of by key.
            durability: as for `publish`.

        Returns:
            What can be waited for to get the receipts.
        """
        given = GivenMessages(
            values if isinstance(values, list | tuple) else listed(values, "values"),
            keys,
            headers,
            timestamps,
            dues,
            priorities,
            expires,
        )
        asked = self._durability if durability is None else durability_of(durability)
        name = self._topic(topic)
        if self._before_publish:
            put = [self._put(each, None, asked, None) for each in given.messages(name, partition)]
            with self._guard:
                for partition_sender in self._sender.partition_senders():
                    self._seal(partition_sender)
            self._sender.flush()
            return SentMany(list(dict.fromkeys(pending_batch for pending_batch, _ in put)))
        checked = given.checked(self._serializer)
        metadata = self._metadata_cache.known(name) or self._metadata_cache.get(name, now() + self._timeout)
        try:
            planned = self._planned(name, checked, partition, metadata)
        except (MessageTooLarge, PartitionNotFound) as refusal:
            metadata = self._metadata_cache.refreshed(name, refusal, now() + self._timeout)
            planned = self._planned(name, checked, partition, metadata)
        pending_batches: list[PendingBatch] = []
        for number, portion in planned:
            with self._guard:
                self._sender.room(now() + self._timeout)  # each: there may be any number
                partition_sender = self._partition_sender(name, number, metadata)
                self._seal(partition_sender)  # what was sent before goes before
                pending_batch = self._begun(asked)
                pending_batch.fill(portion.columns, portion.size)
                self._sender.ship(partition_sender, pending_batch)
            self._sender.flush()
            pending_batches.append(pending_batch)
            if partition_sender.waiting:
                breathe()
        if planned and keys is None and partition is None:
            self._sticky[name] = planned[0][0] + 1
        return SentMany(pending_batches)

    def _planned(
        self, name: str, checked: CheckedColumns, partition: int | None, metadata: TopicMetadata
    ) -> list[tuple[int, BatchPortion]]:
        """The messages as batches, each with its partition."""
        if partition is not None:
            check_partition(name, partition, metadata)
        keyless = self._turn(name, metadata) if partition is None else partition
        plan: dict[int, list[int] | None] = {keyless: None}
        if checked.columns.keys is not None and partition is None:
            plan = dict(divided(checked.columns.keys, metadata.partitions, self._partitioner, keyless))
        for number in plan:
            check_partition(name, number, metadata)
        terms = (self._batch_bytes, self._batch_count, metadata.message_bytes_max, name)
        return [(number, portion) for number, places in plan.items() for portion in portions(checked, places, *terms)]

    def publish_many(
        self,
        values: Iterable[Any],
        keys: Sequence[bytes | str | None] | None = None,
        *,
        topic: str | None = None,
        headers: Sequence[GivenHeaders | None] | None = None,
        timestamps: Sequence[Moment | None] | None = None,
        dues: Sequence[Moment | None] | None = None,
        priorities: Sequence[int | None] | None = None,
        expires: Sequence[Moment | None] | None = None,
        partition: int | None = None,
        durability: Durability | str | None = None,
    ) -> list[Receipt]:
        """Publish messages as `send_many` does, and wait for the receipts.

        Returns:
            A receipt for each partition that got messages; several for one where other producers' came between.
        """
        sent = self.send_many(
            values,
            keys,
            topic=topic,
            headers=headers,
            timestamps=timestamps,
            dues=dues,
            priorities=priorities,
            expires=expires,
            partition=partition,
            durability=durability,
        )
        return sent.result()

    def flush(self, timeout: float | None = None) -> None:
        """Send what is gathered, and wait until the broker has acknowledged everything.

        Raises Undelivered when messages were given up that nobody has asked about, saying how many.

        Parameters:
            timeout: how many seconds to wait; by default the bus's.
        """
        wait_s = self._timeout if timeout is None else checked_timeout(timeout)
        self._send_gathered()
        self._sender.drained(wait_s)

    def _send_gathered(self) -> None:
        """Send what is gathered, and do not wait for the answers."""
        with self._guard:
            for partition_sender in self._sender.partition_senders():
                self._seal(partition_sender)
        self._sender.flush()

    def _close_since(self, began: float) -> None:
        """Close, with the producer's time-out counted from then on."""
        self.close(max(began + self._timeout - now(), 0.001))

    def _abandon(self) -> None:
        """End without waiting for the broker: what it has not acknowledged may have arrived or not."""
        if not self._sender.closed:
            self._send_gathered()
            self._sender.close()

    def close(self, timeout: float | None = None) -> None:
        """Flush, and end. Whatever could not be delivered by then is given up, and an error says how much."""
        if timeout is not None:
            checked_timeout(timeout)  # before anything is closed
        if self._sender.closed:
            return
        try:
            self.flush(timeout)
        finally:
            self._sender.close()
            if self._on_close is not None:
                self._on_close(self)

    def __enter__(self) -> "Producer":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
