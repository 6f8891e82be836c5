"""Subjects of a bus: publishing to them, and subscribing."""

import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from headrace.client._async.connection.reconnecting import AsyncReconnectingConnection
from headrace.client._async.subjects.live_subscription import AsyncLiveSubscription
from headrace.client.producer.pending_batch import checked_key
from headrace.client.producer.serializing import Serializer, serialized, serializer_of
from headrace.client.times import Moment, checked_count, listed, microseconds
from headrace.model.arguments import checked_timeout, shown
from headrace.model.batch import Columns, encode
from headrace.model.errors import InvalidArgument
from headrace.model.headers import GivenHeaders, checked_headers
from headrace.model.representation import described
from headrace.model.subject import checked_pattern, checked_subject
from headrace.model.subject_requests import SubjectPublish, SubjectPublished, SwitchboardDescribe, SwitchboardInfo

if TYPE_CHECKING:
    from headrace.client._async.bus import AsyncBus


class AsyncSubjects:
    """Publishes to subjects and subscribes to them: live, at most once, and nothing is stored. It is `bus.subjects`.

    A subject is a dotted name such as `orders.eu.paid`. It needs no topic, and nobody creates it. What is published is
    sent to those who are subscribed at that moment. For messages that must not be lost, use a topic, or a durable
    route from a subject to a topic.

    Example:
        >>> (await bus.subjects.publish("orders.eu", b"3 apples")).receivers
        0
    """

    def __init__(self, bus: "AsyncBus", broker: AsyncReconnectingConnection) -> None:
        self._bus = bus
        self._broker = broker

    def __repr__(self) -> str:
        return described(self, lambda: iter((repr(self._bus),)))

    async def publish(
        self,
        subject: str,
        value: Any,
        *,
        key: bytes | str | None = None,
        headers: GivenHeaders | None = None,
        timestamp: Moment | None = None,
        serializer: str | Serializer | None = None,
    ) -> SubjectPublished:
        """Publish a message to a subject.

        Parameters:
            subject: the subject, such as `orders.eu.paid`.
            value: bytes, or what the serializer takes.
            key: a key for the message.
            headers: names to text, bytes or None, as a mapping; or a list of such pairs, where a name repeats.
            timestamp: the message's time, by default now.
            serializer: encodes the value: `bytes` (the default: no encoding), `str`, `json`, or a callable.

        Returns:
            To how many live subscriptions it was sent, and whether a durable route has it.

        Raises:
            InvalidArgument: if the subject or another argument is wrong.
            MessageTooLarge: if the message is larger than 16 MiB.
            Timeout: if the broker does not answer in time.

        Example:
            >>> published = await bus.subjects.publish("orders.eu", {"item": "plum"}, serializer="json")
            >>> published.receivers
            0
        """
        return await self._publish(
            subject,
            [value],
            None if key is None else [key],
            None if headers is None else [headers],
            None if timestamp is None else [timestamp],
            serializer,
        )

    async def publish_many(
        self,
        subject: str,
        values: Iterable[Any],
        *,
        keys: Sequence[bytes | str | None] | None = None,
        headers: Sequence[GivenHeaders | None] | None = None,
        timestamps: Sequence[Moment | None] | None = None,
        serializer: str | Serializer | None = None,
    ) -> SubjectPublished:
        """Publish messages to a subject with one request; a subscriber gets all of them or none.

        Parameters:
            subject: the subject.
            values: the messages' values, 65,536 at most, each as for `publish`; if there are none, nothing is sent.
            keys: one for each value, or None where there is none.
            headers: one mapping or list of pairs for each value, or None.
            timestamps: one for each value, or None.
            serializer: as for `publish`.

        Returns:
            To how many live subscriptions they were sent, and whether a durable route has them.

        Raises:
            InvalidArgument: if the subject or another argument is wrong.
            BatchTooLarge: if there are too many messages, or more than 32 MiB of them.
            Timeout: if the broker does not answer in time.

        Example:
            >>> async with bus.subjects.subscribe("orders.*") as orders:
            ...     (await bus.subjects.publish_many("orders.eu", [b"3 apples", b"5 pears"])).receivers
            1
        """
        return await self._publish(subject, listed(values, "values"), keys, headers, timestamps, serializer)

    def subscribe(
        self,
        pattern: str,
        *,
        queue: str | None = None,
        timeout: float | None = None,
        buffer_messages: int = 65_536,
        buffer_bytes: int = 32 << 20,
    ) -> AsyncLiveSubscription:
        """Receive what is published to subjects, from the moment at which the subscription is entered or iterated.

        After a broken connection it subscribes again; what is published meanwhile is lost. Subjects that begin with
        `$`, such as `$events.topic.created`, are the broker's own, and match only patterns that begin with that word.

        Parameters:
            pattern: a subject, or a pattern: `*` stands for one token, `#` for any number of tokens, and `>` at the end
                for one or more.
            queue: of all subscriptions with the same queue name one gets each message, so that they share the load;
                by default this one gets all.
            timeout: end the iteration when nothing comes for so many seconds; by default it goes on for ever.
            buffer_messages: how many received messages may wait for the iteration; others are lost, and counted.
            buffer_bytes: how many bytes of them.

        Returns:
            The subscription, to be iterated; its `dropped` counts what was lost because it was too slow.

        Raises:
            InvalidArgument: if an argument is wrong.

        Example:
            >>> async with bus.subjects.subscribe("orders.#", timeout=10) as orders:
            ...     published = await bus.subjects.publish("orders.eu.paid", b"3 apples")
            ...     message = await anext(aiter(orders))
            >>> message.subject, message.value
            ('orders.eu.paid', b'3 apples')
        """
        self._bus._check_open()
        if not isinstance(pattern, str):
            raise InvalidArgument(f"a pattern is a string, such as 'orders.*', not {shown(pattern)}")
        if queue is not None and not isinstance(queue, str):
            raise InvalidArgument(f"a queue is a name, such as 'workers', not {shown(queue)}")
        checked_pattern(pattern.rpartition("/")[2])
        return AsyncLiveSubscription(
            self._bus,
            pattern,
            queue or "",
            timeout=None if timeout is None else checked_timeout(timeout),
            buffer_messages=checked_count(buffer_messages, "buffer_messages"),
            buffer_bytes=checked_count(buffer_bytes, "buffer_bytes"),
        )

    async def info(self) -> SwitchboardInfo:
        """Count the live subscriptions, the responders, and what was published, delivered, dropped and asked.

        Returns:
            The counts of the tenant, since the broker's start.

        Raises:
            Timeout: if the broker does not answer in time.

        Example:
            >>> (await bus.subjects.info()).subscriptions
            0
        """
        return await self._broker.request(SwitchboardDescribe())

    async def _publish(
        self,
        subject: str,
        values: Sequence[Any],
        keys: Sequence[bytes | str | None] | None,
        headers: Sequence[GivenHeaders | None] | None,
        timestamps: Sequence[Moment | None] | None,
        serializer: str | Serializer | None,
    ) -> SubjectPublished:
        if not isinstance(subject, str):
            raise InvalidArgument(f"a subject is a string, such as 'orders.eu', not {shown(subject)}")
        encoder, now_us = serializer_of(serializer), time.time_ns() // 1000
        columns = Columns([serialized(encoder, value) for value in values])
        for name, column in (("keys", keys), ("headers", headers), ("timestamps", timestamps)):
            if column is not None and len(column) != len(columns.values):
                raise InvalidArgument(f"there are {len(column)} {name} for {len(columns.values)} values")
        if keys is not None:
            columns.keys = [checked_key(key) for key in keys]
        if headers is not None:
            columns.headers = [checked_headers(each) for each in headers]
        if timestamps is not None:
            columns.timestamps = [now_us if moment is None else microseconds(moment) for moment in timestamps]
        if not columns.values:
            checked_subject(subject.rpartition("/")[2])
            return SubjectPublished()
        batch = encode(columns, now_us)
        return await self._broker.request(SubjectPublish(subject), batch.data, repeat=False)
