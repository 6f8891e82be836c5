"""A projection: applies the messages of topics to tables of a database, each exactly once."""

import logging
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import islice
from typing import Any

from headrace.client._sync.bus import Bus
from headrace.client._sync.concurrency import run_blocking
from headrace.client._sync.consumer.subscription import Subscription
from headrace.client.consumer.deserializing import BatchDeserializer, OnError
from headrace.client.producer.serializing import Deserializer, deserializer_of
from headrace.client.projection.position_store import (
    PositionKey,
    PositionMoved,
    PositionStore,
    StoredPosition,
)
from headrace.client.results import Received, ReceivedBatch
from headrace.client.times import checked_count
from headrace.model.arguments import check_callable, shown
from headrace.model.errors import InvalidArgument, TopicChanged
from headrace.model.representation import described, short, state_of
from headrace.model.topic import checked_tenant_name

logger = logging.getLogger("headrace.client")

_LOOK_EVERY_S = 0.25
"""How often a projection that waits for messages looks whether it was stopped."""
_FETCH_BYTES = 1 << 20

ProjectionHandler = Callable[[Any, Received], object]
"""Gets the database connection, in a transaction, and a message; writes what the message changes."""


class Projection:
    """Applies the messages of topics to tables of a database, each exactly once and in the order of its partition.

    How far it is, it stores in the same database transaction as what its handler writes: whenever a process dies,
    nothing is applied twice and nothing is left out. Several processes may run the same projection; each message is
    applied by one of them.

    Example:
        >>> receipts = bus.publish_many("orders", [b"3", b"5"])
        >>> store = headrace.SqliteStore(":memory:")
        >>> cursor = store.connection.execute("CREATE TABLE totals (apples integer)")
        >>> def add(connection, message):
        ...     connection.execute("INSERT INTO totals VALUES (?)", (int(message.value),))
        >>> projection = headrace.Projection(bus, "orders", "totals", add, store)
        >>> projection.catch_up()
        2
        >>> store.connection.execute("SELECT sum(apples) FROM totals").fetchone()
        (8,)
    """

    def __init__(
        self,
        bus: Bus,
        topics: str | Sequence[str],
        name: str,
        handler: ProjectionHandler,
        store: PositionStore[Any],
        *,
        deserializer: str | Deserializer | None = None,
        on_error: OnError = "raise",
        messages_max: int = 500,
    ) -> None:
        """A projection of topics.

        `name` tells it from others in the same database. `handler` is a plain function that gets the database
        connection and a message; it must not end the transaction. `deserializer` and `on_error` are as for
        `bus.subscribe`. One transaction has `messages_max` messages at most.
        """
        self._bus = bus
        self._topics = [topics] if isinstance(topics, str) else list(topics)
        if not self._topics or not all(isinstance(topic, str) for topic in self._topics):
            raise InvalidArgument(f"a projection reads a topic, or several, not {shown(topics)}")
        self._name = checked_tenant_name(name, "projection")
        check_callable(handler, "handler")
        self._handler = handler
        self._store = store
        self._deserializer = BatchDeserializer(deserializer_of(deserializer), on_error)
        self._messages_max = checked_count(messages_max, "messages_max")
        self._positions: dict[tuple[str, int], StoredPosition | None] = {}
        self._ids: dict[str, int] = {}
        self._stopped = self._running = False
        self._applied = 0

    def __repr__(self) -> str:
        return described(self, self._facts)

    def _facts(self) -> Iterator[str]:
        yield short(self._name)
        yield f"applied={self._applied}"
        yield state_of(running=self._running, not_running=True)

    @property
    def name(self) -> str:
        """Its name, which tells it from others in the same database."""
        return self._name

    @property
    def applied(self) -> int:
        """How many messages this object has applied."""
        return self._applied

    def catch_up(self) -> int:
        """Apply all messages up to the end that the topics have now.

        Returns:
            How many messages this call has applied.

        Raises:
            TopicNotFound: if a topic does not exist.
            TopicChanged: if a topic was deleted and created again since; `rebuild` begins anew.
            OffsetOutOfRange: if messages were removed before they were applied.

        Example:
            >>> receipt = bus.publish("orders", b"3")
            >>> store = headrace.SqliteStore(":memory:")
            >>> projection = headrace.Projection(bus, "orders", "seen", lambda connection, message: None, store)
            >>> projection.catch_up()
            1
        """
        before = self._applied
        self._load()
        for topic in self._topics:
            for partition, end in sorted((self._bus.offsets(topic)).items()):
                self._catch_up(topic, partition, end)
        return self._applied - before

    def run(self) -> None:
        """Apply messages as they come, until `stop` is called.

        Raises:
            TopicNotFound: if a topic does not exist.
            TopicChanged: if a topic was deleted and created again since; `rebuild` begins anew.
            OffsetOutOfRange: if messages were removed before they were applied.

        Example:
            >>> receipt = bus.publish("orders", b"3")
            >>> store = headrace.SqliteStore(":memory:")
            >>> def handle(connection, message):
            ...     print(message.value)
            ...     projection.stop()
            >>> projection = headrace.Projection(bus, "orders", "seen", handle, store)
            >>> projection.run()
            b'3'
        """
        self._stopped, self._running = False, True
        try:
            while not self._stopped:
                self._load()
                try:
                    self._follow()
                except PositionMoved:
                    logger.info("another instance applied messages; reading its positions  projection=%s", self._name)
        finally:
            self._running = False

    def stop(self) -> None:
        """Let `run` return after the transaction in progress; a handler may call it, and any thread.

        Example:
            >>> store = headrace.SqliteStore(":memory:")
            >>> projection = headrace.Projection(bus, "orders", "seen", lambda connection, message: None, store)
            >>> projection.stop()
        """
        self._stopped = True

    def rebuild(self, reset: Callable[[Any], object]) -> int:
        """Empty the tables, and apply all messages from the first one on.

        Parameters:
            reset: gets the database connection, in a transaction, and empties the tables that the handler writes.

        Returns:
            How many messages were applied.

        Raises:
            TopicNotFound: if a topic does not exist.

        Example:
            >>> receipts = bus.publish_many("orders", [b"3", b"5"])
            >>> store = headrace.SqliteStore(":memory:")
            >>> projection = headrace.Projection(bus, "orders", "seen", lambda connection, message: None, store)
            >>> projection.catch_up()
            2
            >>> projection.rebuild(lambda connection: None)
            2
        """
        check_callable(reset, "reset")
        run_blocking(partial(self._store.reset, self._name, reset))
        return self.catch_up()

    def _load(self) -> None:
        """Read the positions, and make sure that the topics are those that they are about."""
        stored: list[dict[tuple[str, int], StoredPosition]] = []
        run_blocking(lambda: stored.append(self._store.positions(self._name)))
        self._positions = {**stored[0]}
        for topic in self._topics:
            self._ids[topic] = (self._bus.describe_topic(topic)).id
        for (topic, partition), position in stored[0].items():
            if self._ids.get(topic, 0) != position.topic_id and topic in self._ids and position.topic_id:
                raise TopicChanged(
                    f"the topic {topic} was deleted and created again since the projection {self._name} applied "
                    f"messages of its partition {partition}; rebuild the projection"
                )

    def _catch_up(self, topic: str, partition: int, end: int) -> None:
        """Apply the messages of a partition before an offset."""
        offset = self._start_of(topic, partition)
        while offset < end:
            batches = self._bus.fetch(topic, partition, offset, bytes_max=_FETCH_BYTES)
            if not batches:
                return
            for batch in batches:
                received = ReceivedBatch(topic, partition, batch, offset)
                try:
                    self._apply(received)
                except PositionMoved:
                    self._load()
                    offset = self._start_of(topic, partition)
                    break
                offset = max(offset, received.next_offset)
                if offset >= end:
                    break

    def _start_of(self, topic: str, partition: int) -> int:
        """The offset of the first message to apply."""
        position = self._positions.get((topic, partition))
        if position is not None:
            return position.next_offset
        return (self._bus.offsets(topic, "earliest", partitions=[partition]))[partition]

    def _follow(self) -> None:
        """Apply messages as they are delivered, from the positions on."""
        subscription = self._bus.subscribe(*self._topics, on_out_of_range="raise", timeout=_LOOK_EVERY_S)
        with subscription:
            for (topic, partition), position in self._positions.items():
                if position is not None and topic in self._topics:
                    subscription.seek(position.next_offset, topic=topic, partitions=[partition])
            while not self._stopped:
                self._apply_some(subscription)

    def _apply_some(self, subscription: Subscription) -> None:
        """Apply what is delivered until nothing comes for a moment."""
        for batch in subscription.batches():
            self._apply(batch)
            if self._stopped:
                return

    def _apply(self, batch: ReceivedBatch) -> None:
        """Apply the messages of a batch in transactions of some messages each."""
        messages = iter(self._deserializer.messages(batch))
        ended = False
        while not ended:
            some = list(islice(messages, self._messages_max))
            ended = len(some) < self._messages_max
            following = batch.next_offset if ended else some[-1].offset + 1
            self._apply_together(batch.topic, batch.partition, some, following)

    def _apply_together(self, topic: str, partition: int, messages: list[Received], following: int) -> None:
        key = PositionKey(self._name, topic, partition)
        expected = self._positions.get((topic, partition))
        position = StoredPosition(following, self._ids[topic])
        run_blocking(partial(self._store.apply, key, expected, position, partial(self._handle, messages)))
        self._positions[topic, partition] = position
        self._applied += len(messages)

    def _handle(self, messages: list[Received], connection: Any) -> None:
        for message in messages:
            self._handler(connection, message)
