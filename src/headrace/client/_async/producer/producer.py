"""The producer: the public methods with which a program publishes messages."""

from collections.abc import Iterable, Iterator, Sequence
from types import TracebackType
from typing import Any, Unpack

from headrace.client._async.producer.accumulator import AsyncAccumulator
from headrace.client._async.producer.sent import AsyncSent, AsyncSentMany
from headrace.client.producer.batch_split import GivenMessages
from headrace.client.producer.message_fields import MessageColumns, MessageFields, show_fields
from headrace.client.producer.pending_batch import OutgoingMessage, WhenSent, checked_key
from headrace.client.producer.topic_metadata import durability_of
from headrace.client.results import Receipt, receipt_at
from headrace.client.times import listed
from headrace.model.arguments import check_callable
from headrace.model.durability import Durability
from headrace.model.errors import InvalidArgument
from headrace.model.representation import described, short, state_of


class AsyncProducer:
    """Publishes messages. Made by `bus.producer(...)`, which explains the settings; close it, or use it in `with`.

    `publish` waits for the broker's receipt. `send` only puts a message into the batch that is being gathered, and is
    the quick way for single messages; `send_many` and `publish_many` are the quickest way of all.
    """

    def __init__(self, accumulator: AsyncAccumulator) -> None:
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
    async def send(
        self,
        value: Any,
        key: bytes | str | None = None,
        *,
        topic: str | None = None,
        callback: WhenSent | None = None,
        **fields: Unpack[MessageFields],
    ) -> AsyncSent:
        """Put a message into the batch that is being gathered; it goes out when that is full, or has lingered.

        Waits only if the buffer is full (with `on_full="block"`), or when a topic is used for the first time.

        Parameters:
            value: what the serializer takes; bytes unless the producer has another. None marks the key as deleted.
            key: messages with the same key go to the same partition, in order.
            topic: where to; by default the producer's topic.
            callback: is called with the receipt and None, or None and the error, as soon as it is known. It must not
                block.
            fields: as for `bus.publish`: headers, timestamp, due, priority, expires, partition.

        Returns:
            What can be waited for to get the receipt.
        """
        if type(value) is bytes and key is None and topic is None and callback is None and not fields:
            sent = self._accumulator.send_bare(value)
            if sent is not None:
                return sent
        if callback is not None:
            check_callable(callback, "callback")
        message = OutgoingMessage(self._topic_of(topic), value, checked_key(key), **fields)
        accumulator = self._accumulator
        return AsyncSent(*await accumulator.add(message, callback, accumulator.durability))

    @show_fields
    async def publish(
        self,
        value: Any,
        key: bytes | str | None = None,
        *,
        topic: str | None = None,
        durability: Durability | str | None = None,
        expected_offset: int | None = None,
        **fields: Unpack[MessageFields],
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
        accumulator = self._accumulator
        asked = accumulator.durability if durability is None else durability_of(durability)
        name = self._topic_of(topic)
        if accumulator.takes_bytes and type(value) is bytes and key is None and expected_offset is None and not fields:
            added = accumulator.add_bare(name, value, asked, observed=1)
            if added is not None:
                batch, place = added
                receipt: Receipt = await batch.outcome.wait()
                return receipt if receipt.count == 1 else receipt_at(receipt, place)
        message = OutgoingMessage(name, value, checked_key(key), **fields)
        batch, place = await accumulator.add(message, None, asked, expected_offset, urgent=True)
        return receipt_at(await batch.outcome.wait(), place)

    @show_fields
    async def send_many(
        self,
        values: Iterable[Any],
        keys: Sequence[bytes | str | None] | None = None,
        *,
        topic: str | None = None,
        partition: int | None = None,
        durability: Durability | str | None = None,
        **columns: Unpack[MessageColumns],
    ) -> AsyncSentMany:
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
        accumulator = self._accumulator
        given = GivenMessages(values if isinstance(values, list | tuple) else listed(values, "values"), keys, **columns)
        asked = accumulator.durability if durability is None else durability_of(durability)
        return AsyncSentMany(await accumulator.add_many(self._topic_of(topic), given, partition, asked))

    @show_fields
    async def publish_many(
        self,
        values: Iterable[Any],
        keys: Sequence[bytes | str | None] | None = None,
        *,
        topic: str | None = None,
        partition: int | None = None,
        durability: Durability | str | None = None,
        **columns: Unpack[MessageColumns],
    ) -> list[Receipt]:
        """Publish messages as `send_many` does, and wait for the receipts.

        Returns:
            A receipt for each partition that got messages; several for one where other producers' came between.
        """
        sent = await self.send_many(values, keys, topic=topic, partition=partition, durability=durability, **columns)
        return await sent.result()

    async def flush(self, timeout: float | None = None) -> None:
        """Send what is gathered, and wait until the broker has acknowledged everything.

        Raises Undelivered when messages were given up that nobody has asked about, saying how many.

        Parameters:
            timeout: how many seconds to wait; by default the bus's.
        """
        await self._accumulator.flush(timeout)

    async def close(self, timeout: float | None = None) -> None:
        """Flush, and end. Whatever could not be delivered by then is given up, and an error says how much."""
        await self._accumulator.close(timeout)

    def _topic_of(self, topic: str | None) -> str:
        name = self._accumulator.topic if topic is None else topic
        if name is None:
            raise InvalidArgument("this producer has no topic of its own: say which one the message is for")
        return name

    async def __aenter__(self) -> "AsyncProducer":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()
