"""Aggregates: the state of one key, folded from its events, and saved by appending more of them."""

from collections.abc import Callable, Sequence
from typing import Any

from headrace.client._async.bus import AsyncBus
from headrace.client.producer.serializing import (
    CannotDeserialize,
    Deserializer,
    Serializer,
    deserializer_of,
    serialized,
    serializer_of,
)
from headrace.client.projection.aggregate import Aggregate
from headrace.client.results import Received
from headrace.client.times import checked_count
from headrace.model.arguments import check_callable
from headrace.model.errors import EventsMissing, UnexpectedVersion

_ATTEMPTS = 10


class AsyncRepository:
    """Loads and saves aggregates, whose events are the messages of one key in a topic with `key_versions`.

    Example:
        >>> info = await bus.create_topic("accounts", key_versions=True)
        >>> def apply(balance, event):
        ...     return balance + event["paid"]
        >>> accounts = headrace.AsyncRepository(bus, "accounts", apply, 0)
        >>> ann = await accounts.load("ann")
        >>> ann = await accounts.save(ann, [{"paid": 5}, {"paid": -2}])
        >>> (await accounts.load("ann")).state, ann.version
        (3, 2)
    """

    def __init__(
        self,
        bus: AsyncBus,
        topic: str,
        apply: Callable[[Any, Any], Any],
        initial: Any = None,
        *,
        serializer: str | Serializer = "json",
        deserializer: str | Deserializer = "json",
    ) -> None:
        """A repository of the aggregates in a topic.

        `apply` gets a state and an event, and returns the next state. `initial` is the state before the first event, or
        a function that makes it.
        """
        check_callable(apply, "apply")
        self._bus = bus
        self._topic = topic
        self._fold = apply
        self._initial = initial
        self._serializer = serializer_of(serializer)
        self._deserializer = deserializer_of(deserializer)

    async def load(self, key: bytes | str) -> Aggregate:
        """Load an aggregate by applying all of its events.

        Parameters:
            key: the id of the aggregate.

        Returns:
            The aggregate; one without events has version 0 and the initial state.

        Raises:
            EventsMissing: if compaction or damage has removed events.
            CannotDeserialize: if an event is not what the deserializer expects, such as JSON.
            TopicNotFound: if the topic does not exist.

        Example:
            >>> info = await bus.create_topic("accounts", key_versions=True)
            >>> accounts = headrace.AsyncRepository(bus, "accounts", lambda state, event: [*state, event], [])
            >>> await accounts.load("ann")
            Aggregate(key='ann', state=[], version=0)
        """
        initial = self._initial
        return await self.refresh(Aggregate(key, initial() if callable(initial) else initial, 0))

    async def refresh(self, aggregate: Aggregate) -> Aggregate:
        """Load an aggregate again by applying only the events since.

        Parameters:
            aggregate: the aggregate as it was loaded.

        Returns:
            The aggregate as it is now.

        Raises:
            EventsMissing: if compaction or damage has removed events.
            CannotDeserialize: if an event is not what the deserializer expects, such as JSON.

        Example:
            >>> info = await bus.create_topic("accounts", key_versions=True)
            >>> accounts = headrace.AsyncRepository(bus, "accounts", lambda count, event: count + 1, 0)
            >>> ann = await accounts.load("ann")
            >>> saved = await accounts.save(ann, ["opened"])
            >>> (await accounts.refresh(ann)).state
            1
        """
        key, state, version = aggregate.key, aggregate.state, aggregate.version
        async for event in self._bus.history(self._topic, key, start_version=version):
            if event.version != version:
                raise EventsMissing(
                    f"{self._topic} has no version {version} of {key!r}: compaction or damage has removed it",
                    version=version,
                )
            state = self._fold(state, self._decoded(event))
            version += 1
        return Aggregate(key, state, version)

    def _decoded(self, event: Received) -> Any:
        if event.value is None or self._deserializer is None:
            return event.value
        try:
            return self._deserializer(event.value)
        except Exception as error:
            raise CannotDeserialize(self._topic, event.partition, event.offset, error, event, event.version) from error

    async def save(self, aggregate: Aggregate, events: Sequence[Any]) -> Aggregate:
        """Append events to an aggregate, unless somebody else has since it was loaded.

        Parameters:
            aggregate: the aggregate as it was loaded.
            events: the new events; all are appended, or none.

        Returns:
            The aggregate with the events applied.

        Raises:
            UnexpectedVersion: if the aggregate has more events by now; nothing was appended.
            Timeout: if no receipt arrives in time; the events may still be appended.

        Example:
            >>> info = await bus.create_topic("accounts", key_versions=True)
            >>> accounts = headrace.AsyncRepository(bus, "accounts", lambda count, event: count + 1, 0)
            >>> ann = await accounts.load("ann")
            >>> (await accounts.save(ann, ["opened", "closed"])).version
            2
        """
        if not events:
            return aggregate
        values = [serialized(self._serializer, event) for event in events]
        await self._bus.publish_many(
            self._topic,
            values,  # type: ignore[arg-type]  # None marks a key as deleted
            key=aggregate.key,
            expected_version=aggregate.version,
        )
        state = aggregate.state
        for event in events:
            state = self._fold(state, event)
        return Aggregate(aggregate.key, state, aggregate.version + len(events))

    async def update(
        self, key: bytes | str, decide: Callable[[Any], Sequence[Any]], *, attempts: int = _ATTEMPTS
    ) -> Aggregate:
        """Load an aggregate, decide on new events, and save them; again if somebody else was faster.

        Parameters:
            key: the id of the aggregate.
            decide: gets the state, and returns the new events; called once for each attempt.
            attempts: how often to try.

        Returns:
            The aggregate with the events applied.

        Raises:
            UnexpectedVersion: if somebody else was faster every time.
            EventsMissing: if compaction or damage has removed events.
            CannotDeserialize: if an event is not what the deserializer expects, such as JSON.

        Example:
            >>> info = await bus.create_topic("accounts", key_versions=True)
            >>> accounts = headrace.AsyncRepository(bus, "accounts", lambda balance, event: balance + event, 0)
            >>> (await accounts.update("ann", lambda balance: [5] if balance < 10 else [])).state
            5
        """
        check_callable(decide, "decide")
        left = checked_count(attempts, "attempts")
        aggregate = await self.load(key)
        while True:
            left -= 1
            try:
                return await self.save(aggregate, decide(aggregate.state))
            except UnexpectedVersion:
                if not left:
                    raise
            aggregate = await self.refresh(aggregate)
