"""The handle of a scheduled message, which can be changed until a worker leases it."""

from collections.abc import Iterator
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from headrace.client._async.concurrency import now
from headrace.client._async.connection.reconnecting import AsyncReconnectingConnection
from headrace.client.connection.clock import Clock
from headrace.client.leasing.jobs import found_messages
from headrace.client.leasing.message_selection import UNCHANGED, edition
from headrace.client.leasing.scheduled_times import MessageName, edit_error, moment_of
from headrace.client.times import Moment
from headrace.model.errors import MessageGone
from headrace.model.headers import GivenHeaders
from headrace.model.leasing import Edit, EditOutcome, Find, MessageId, Selection, SubscriptionList
from headrace.model.representation import described, state_of
from headrace.model.subscription import DEFAULT_SUBSCRIPTION

if TYPE_CHECKING:
    from headrace.client.leasing.jobs import PendingMessage


class AsyncScheduled:
    """The handle of a message. Made by `bus.schedule(...)`, or `bus.scheduled(id)` from the handle's `id`.

    A change applies only if the message still has the handle's `version`, which each change increments.

    Example:
        >>> reminder = await bus.schedule("reminders", b"call ann", in_=3600)
        >>> await reminder.move(in_=7200)
        >>> await reminder.update(value=b"call ann and bob")
        >>> reminder.version
        3
        >>> await reminder.cancel()
    """

    def __init__(
        self,
        broker: AsyncReconnectingConnection,
        clock: Clock,
        name: MessageName,
        version: int | None,
        owner: str,
        bus: object = None,
    ) -> None:
        self.topic, self.partition, self.offset, self.topic_id = self._name = name
        self.version = version
        """The last seen version of the message; None changes any version."""
        self.owner = owner
        self._bus = bus  # keeps the bus alive as long as the handle
        self._broker = broker
        self._clock = clock
        self._content: tuple[bytes | None, GivenHeaders | None] | None = None
        """Value and headers of that version, if they are known."""

    def __repr__(self) -> str:
        return described(self, self._facts)

    def _facts(self) -> Iterator[str]:
        yield self.id
        yield "" if self.version is None else f"version={self.version}"
        yield state_of(closed=self._broker.closed)

    def _knows(self, value: bytes | None, headers: GivenHeaders | None) -> "AsyncScheduled":
        """Set the known value and headers, which saves a request; returns the handle."""
        self._content = (value, headers)
        return self

    @property
    def id(self) -> str:
        """The id of the message, such as `reminders/0/17@3`: topic, partition, offset, topic's id."""
        return str(self._name)

    async def move(self, *, at: Moment | None = None, in_: float | timedelta | None = None) -> None:
        """Change the due time.

        Parameters:
            at: a datetime, or microseconds since 1970;
            in_: or so many seconds from now.

        Raises:
            StaleVersion: if somebody else changed the message since; nothing was changed.
            MessageLeased: if a worker has leased it; nothing was changed.
            MessageGone: if it is settled or deleted.
            NotOwner: if it belongs to another owner; nothing was changed.

        Example:
            >>> reminder = await bus.schedule("reminders", b"call ann", in_=3600)
            >>> await reminder.move(in_=60)
        """
        due = moment_of(at, in_, self._clock.now_us())
        await self._edit(self.version, now() + self._broker.timeout, due=due)

    async def update(
        self,
        *,
        value: bytes | None = UNCHANGED,
        headers: GivenHeaders | None = UNCHANGED,
        priority: int | None = None,
        at: Moment | None = None,
        in_: float | timedelta | None = None,
    ) -> None:
        """Change the content.

        Parameters:
            value: a new value.
            headers: new headers, which replace all existing ones.
            priority: a new priority.
            at: a new due time, as for `move`;
            in_: as for `move`.

        Raises:
            StaleVersion: if somebody else changed the message since; nothing was changed.
            MessageLeased: if a worker has leased it; nothing was changed.
            MessageGone: if it is settled or deleted.
            NotOwner: if it belongs to another owner; nothing was changed.

        Example:
            >>> reminder = await bus.schedule("reminders", b"call ann", in_=3600)
            >>> await reminder.update(value=b"call bob", priority=5)
        """
        due = None if at is None and in_ is None else moment_of(at, in_, self._clock.now_us())
        replaces = value is not UNCHANGED or headers is not UNCHANGED
        version, deadline = self.version, now() + self._broker.timeout
        if (value is UNCHANGED) != (headers is UNCHANGED):  # the two are replaced together
            version, known_value, known_headers = await self._known(deadline)
            value = known_value if value is UNCHANGED else value
            headers = known_headers if headers is UNCHANGED else headers
        await self._edit(version, deadline, value=value, headers=headers, priority=priority, due=due)
        if replaces:
            self._content = (value, headers)

    async def cancel(self) -> None:
        """Delete the message. A repeated cancel, for example after a lost answer, succeeds again.

        Raises:
            StaleVersion: if somebody else changed the message since; nothing was changed.
            MessageLeased: if a worker has leased it; nothing was changed.
            MessageGone: if it is settled.
            NotOwner: if it belongs to another owner; nothing was changed.

        Example:
            >>> reminder = await bus.schedule("reminders", b"call ann", in_=3600)
            >>> await reminder.cancel()
        """
        await self._edit(self.version, now() + self._broker.timeout, delete=True)

    async def look(self, subscription: str | None = None) -> "PendingMessage":
        """Return the message as it is now.

        Parameters:
            subscription: the leased subscription whose view is wanted; by default any of the topic, and if it has
                none, the view of a new one.

        Returns:
            The message and its status.

        Raises:
            MessageGone: if it is settled or deleted.
            TopicNotFound: if the topic does not exist any more.

        Example:
            >>> reminder = await bus.schedule("reminders", b"call ann", in_=3600)
            >>> (await reminder.look()).status
            'waiting'
        """
        return await self._look(subscription, now() + self._broker.timeout)

    async def _look(self, subscription: str | None, deadline: float) -> "PendingMessage":
        names = [subscription] if subscription is not None else await self._subscriptions(deadline)
        for name in names:
            wanted = Selection(messages=[MessageId(self.partition, self.offset)])
            find = Find(self.topic, wanted, name, 1, topic_id=self.topic_id)
            answer, body = await self._broker.request_with_body(find, timeout=deadline - now())
            found = found_messages(self.topic, answer, body)
            if found:
                return found[0]
        raise MessageGone(f"{self.id} is settled, deleted or unknown")

    async def _subscriptions(self, deadline: float) -> list[str]:
        """Return the leased subscriptions of the topic; if it has none, the default name."""
        head = SubscriptionList(self.topic)
        answer = await self._broker.request(head, timeout=deadline - now())
        return [info.subscription for info in answer.subscriptions] or [DEFAULT_SUBSCRIPTION]

    async def _known(self, deadline: float) -> tuple[int, bytes | None, GivenHeaders | None]:
        """Return a version with its value and headers: the handle's if known, otherwise the broker's."""
        if self._content is not None and self.version is not None:
            return self.version, *self._content
        found = await self._look(None, deadline)
        return self.version or found.version, found.value, found.headers

    async def _edit(self, version: int | None, deadline: float, **changes: Any) -> None:
        change, body = edition(owner=self.owner, **changes)
        message = MessageId(self.partition, self.offset, version)
        head = Edit(self.topic, [message], change, self.owner, self.topic_id)
        answer = await self._broker.request(
            head, body, timeout=deadline - now(), repeat=version is None or change.delete
        )
        outcome: EditOutcome = answer.outcomes[0]
        if outcome.outcome != "applied":
            raise edit_error(self.id, outcome)
        if self.version is not None:
            self.version = outcome.version
