"""The producer: the public methods with which a program publishes messages."""

from collections.abc import Iterable, Iterator, Sequence
from types import TracebackType
from typing import Any, Unpack

from headrace.client._sync.producer.accumulator import Accumulator
from headrace.client._sync.producer.sent import Sent, SentMany
from headrace.client.producer.batch_split import given_messages
from headrace.client.producer.message_fields import MessageColumns, MessageFields, show_fields
from headrace.client.producer.pending_batch import OutgoingMessage, WhenSent, checked_key
from headrace.client.producer.topic_metadata import durability_of, expected_batch, expected_place
from headrace.client.results import Receipt, receipt_at
from headrace.model.arguments import check_callable
from headrace.model.durability import Durability
from headrace.model.errors import InvalidArgument
from headrace.model.representation import described, short, state_of


class Producer:
    """Publishes messages. Made by `bus.producer(...)`, which explains the settings; close it, or use `with`.

    `publish` waits for the broker's receipt. `send` only adds a message to the current batch, and is the fast way for
    single messages; `send_many` and `publish_many` are the fastest way of all.

    Example:
        >>> with bus.producer("orders") as producer:
        ...     for number in range(100):
        ...         sent = producer.send(b"order %d" % number)
        >>> bus.offsets("orders")
        {0: 100}
    """

    def __init__(self, accumulator: Accumulator) -> None:
        self._accumulator = accumulator

    def __repr__(self) -> str:
        return described(self, self._facts)

    def _facts(self) -> Iterator[str]:
        accumulator = self._accumulator
        yield "" if accumulator.topic is None else short(accumulator.topic)
        yield f"unacknowledged_bytes={accumulator.unacknowledged_bytes}"
        yield state_of(closed=accumulator.closed)

    @property
    def topic(self) -> str | None:
        """The topic of messages for which no other is given."""
        return self._accumulator.topic

    @show_fields
    def send(
        self,
        value: Any,
        key: bytes | str | None = None,
        *,
        topic: str | None = None,
        callback: WhenSent | None = None,
        **fields: Unpack[MessageFields],
    ) -> Sent:
        """Add a message to the current batch; it is sent when the batch is full, or `linger` has passed.

        Waits only if the buffer is full (with `on_full="block"`), or when a topic is used for the first time.

        Parameters:
            value: what the serializer accepts; bytes by default. None marks the key as deleted.
            key: messages with the same key go to the same partition, in order.
            topic: the topic; by default the producer's.
            headers: names to text, bytes or None, as a mapping; or a list of such pairs, where a name repeats.
            timestamp: the message's time, by default now; a datetime or microseconds since 1970.
            due: leased subscriptions do not deliver the message before this time.
            priority: an integer, for subscriptions with the discipline `priority`; greater first.
            expires: the broker does not deliver the message after this time.
            partition: the partition, instead of by key.
            callback: called with the receipt and None, or None and the error, as soon as it is known. It must not
                block.

        Returns:
            A handle for the receipt.

        Raises:
            InvalidArgument: if an argument is wrong.
            MessageTooLarge: if the message is larger than the topic's `message_bytes_max`.
            CannotSerialize: if the serializer cannot encode the value.
            Busy: if the buffer is full, with `on_full="raise"`.
            Closed: if the producer is closed.

        Example:
            >>> with bus.producer("orders") as producer:
            ...     sent = producer.send(b"3 apples", key="ann")
            ...     receipt = sent.result()
            >>> receipt.offset
            0
        """
        if type(value) is bytes and key is None and topic is None and callback is None and not fields:
            sent = self._accumulator.send_bare(value)
            if sent is not None:
                return sent
        if callback is not None:
            check_callable(callback, "callback")
        message = OutgoingMessage(self._topic_of(topic), value, checked_key(key), **fields)
        accumulator = self._accumulator
        return Sent(*accumulator.add(message, callback, accumulator.durability))

    @show_fields
    def publish(
        self,
        value: Any,
        key: bytes | str | None = None,
        *,
        topic: str | None = None,
        durability: Durability | str | None = None,
        expected_offset: int | None = None,
        expected_version: int | None = None,
        **fields: Unpack[MessageFields],
    ) -> Receipt:
        """Publish a message now, and wait for the receipt. Messages that are published concurrently share a batch.

        Parameters:
            value: as for `send`.
            key: as for `send`.
            topic: as for `send`.
            headers: as for `send`.
            timestamp: as for `send`.
            due: as for `send`.
            priority: as for `send`.
            expires: as for `send`.
            partition: as for `send`.
            durability: what must be reached before the receipt: `memory`, `written`, `synced` or
                `replicated`; at least the topic's.
            expected_offset: append only if the message gets this offset. Needs a partition, or a topic with only one.
            expected_version: append only if the key has so many messages; 0: it must be new. Needs a key, and a topic
                with `key_versions`.

        Returns:
            Where the message is stored, and the durability reached.

        Raises:
            InvalidArgument: if an argument is wrong.
            MessageTooLarge: if the message is larger than the topic's `message_bytes_max`.
            UnexpectedOffset: if the message would not get `expected_offset`; nothing was appended.
            UnexpectedVersion: if the message would not get `expected_version`; nothing was appended.
            Timeout: if no receipt arrives in time; the message may still be published.
            Closed: if the producer is closed.

        Example:
            >>> with bus.producer("orders", serializer="json") as producer:
            ...     receipt = producer.publish({"item": "plum"}, durability="memory")
            >>> receipt.offset
            0
        """
        accumulator = self._accumulator
        asked = accumulator.durability if durability is None else durability_of(durability)
        name = self._topic_of(topic)
        loose = key is None and expected_offset is None and expected_version is None
        if loose and accumulator.takes_bytes and type(value) is bytes and not fields:
            added = accumulator.add_bare(name, value, asked, observed=1)
            if added is not None:
                batch, place = added
                receipt: Receipt = batch.outcome.wait()
                return receipt if receipt.count == 1 else receipt_at(receipt, place)
        message = OutgoingMessage(name, value, checked_key(key), **fields)
        expected = expected_place(expected_offset, expected_version, message.key)
        batch, place = accumulator.add(message, None, asked, expected, urgent=True)
        return receipt_at(batch.outcome.wait(), place)

    @show_fields
    def send_many(
        self,
        values: Iterable[Any],
        keys: Sequence[bytes | str | None] | None = None,
        *,
        key: bytes | str | None = None,
        topic: str | None = None,
        partition: int | None = None,
        durability: Durability | str | None = None,
        expected_version: int | None = None,
        **columns: Unpack[MessageColumns],
    ) -> SentMany:
        """Send messages in as few batches as possible; the fastest way.

        Without keys all go to one partition, in order; those of the next call go to the next partition. Waits only if
        the buffer is full, or when a topic is used for the first time.

        Parameters:
            values: any number of values, each as for `send`.
            keys: one for each value, or None where there is none.
            key: one for all values, instead of `keys`.
            topic: the topic; by default the producer's.
            headers: one mapping for each value, or None.
            timestamps: one for each value, or None.
            dues: one for each value, or None.
            priorities: one for each value, or None.
            expires: one for each value, or None.
            partition: the partition for all of them, instead of by key.
            durability: as for `publish`.
            expected_version: append all of them in one batch, or nothing if the key has not so many messages.

        Returns:
            A handle for the receipts.

        Raises:
            InvalidArgument: if an argument is wrong; nothing was sent.
            MessageTooLarge: if a message is larger than the topic's `message_bytes_max`.
            Closed: if the producer is closed.

        Example:
            >>> with bus.producer("orders") as producer:
            ...     sent = producer.send_many([b"3 apples", b"5 pears"])
            ...     receipts = sent.result()
            >>> receipts[0].count
            2
        """
        accumulator = self._accumulator
        given = given_messages(values, keys, key, **columns)
        expected = expected_batch(expected_version)
        asked = accumulator.durability if durability is None else durability_of(durability)
        return SentMany(accumulator.add_many(self._topic_of(topic), given, partition, asked, expected))

    @show_fields
    def publish_many(
        self,
        values: Iterable[Any],
        keys: Sequence[bytes | str | None] | None = None,
        *,
        key: bytes | str | None = None,
        topic: str | None = None,
        partition: int | None = None,
        durability: Durability | str | None = None,
        expected_version: int | None = None,
        **columns: Unpack[MessageColumns],
    ) -> list[Receipt]:
        """Publish messages as `send_many` does, and wait for the receipts.

        Parameters:
            values: as for `send_many`.
            keys: as for `send_many`.
            key: as for `send_many`.
            topic: as for `send_many`.
            headers: as for `send_many`.
            timestamps: as for `send_many`.
            dues: as for `send_many`.
            priorities: as for `send_many`.
            expires: as for `send_many`.
            partition: as for `send_many`.
            durability: as for `publish`.
            expected_version: as for `send_many`.

        Returns:
            A receipt for each partition that got messages; several for one if other producers' messages came between.

        Raises:
            InvalidArgument: if an argument is wrong; nothing was published.
            UnexpectedVersion: if the key has not `expected_version` messages; nothing was published.
            Timeout: if the receipts do not arrive in time; the messages may still be published.
            Closed: if the producer is closed.

        Example:
            >>> with bus.producer("orders") as producer:
            ...     receipts = producer.publish_many([b"3 apples", b"5 pears"], keys=["ann", "bob"])
            >>> sum(receipt.count for receipt in receipts)
            2
        """
        sent = self.send_many(
            values,
            keys,
            key=key,
            topic=topic,
            partition=partition,
            durability=durability,
            expected_version=expected_version,
            **columns,
        )
        return sent.result()

    def flush(self, timeout: float | None = None) -> None:
        """Send the current batches, and wait until the broker has acknowledged all messages.

        Parameters:
            timeout: how many seconds to wait; by default the time-out of the bus.

        Raises:
            Undelivered: if messages were given up and the program did not ask for their results; it says how many.
            Timeout: if the broker does not acknowledge in time.

        Example:
            >>> with bus.producer("orders") as producer:
            ...     sent = producer.send(b"3 apples")
            ...     producer.flush()
            ...     sent.done
            True
        """
        self._accumulator.flush(timeout)

    def close(self, timeout: float | None = None) -> None:
        """Flush, and close the producer. Messages that could not be delivered by then are given up.

        Parameters:
            timeout: how many seconds to wait; by default the time-out of the bus.

        Raises:
            Undelivered: if messages were given up; it says how many.

        Example:
            >>> producer = bus.producer("orders")
            >>> sent = producer.send(b"3 apples")
            >>> producer.close()
        """
        self._accumulator.close(timeout)

    def _topic_of(self, topic: str | None) -> str:
        name = self._accumulator.topic if topic is None else topic
        if name is None:
            raise InvalidArgument("this producer has no topic of its own: say which one the message is for")
        return name

    def __enter__(self) -> "Producer":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
