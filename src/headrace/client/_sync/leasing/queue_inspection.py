"""Inspects and edits the messages of a leased subscription without leasing them."""

from collections.abc import Iterable, Iterator
from datetime import timedelta
from typing import Any

from headrace.client._sync.connection.reconnecting import ReconnectingConnection
from headrace.client.leasing.jobs import PendingMessage, found_messages
from headrace.client.leasing.message_selection import UNCHANGED, Placed, edition, selection, span_us
from headrace.client.times import Moment, checked_count, microseconds
from headrace.model.headers import GivenHeaders
from headrace.model.leasing import (
    EditMatching,
    EditOutcome,
    Find,
    Forecast,
    Forecasted,
    Redrive,
    Selection,
    SubscriptionAlter,
    SubscriptionDescribe,
    SubscriptionInfo,
)
from headrace.model.limits import LEASE_MESSAGES_MAX

_PAGE = 1000


class QueueInspection:
    """The methods of a queue that inspect and edit messages."""

    def __init__(self, broker: ReconnectingConnection, topic: str, subscription: str) -> None:
        self.topic = topic
        self.subscription = subscription
        self._broker = broker

    def peek(self, n: int = 1) -> list[PendingMessage]:
        """Return the first messages that are ready, without leasing them.

        Parameters:
            n: how many at most.

        Returns:
            The messages, with their status.

        Raises:
            TopicNotFound: if the topic does not exist.
            SubscriptionNotFound: if the subscription is named and does not exist.

        Example:
            >>> receipt = bus.publish("jobs", b"resize cat.jpg")
            >>> [found.value for found in bus.queue("jobs").peek()]
            [b'resize cat.jpg']
        """
        return self.find(status="ready", limit=n)

    def find(
        self,
        *,
        status: str = "",
        due_from: Moment | None = None,
        due_to: Moment | None = None,
        key: bytes | str | None = None,
        owner: str = "",
        headers: GivenHeaders | None = None,
        messages: Iterable[Placed] = (),
        limit: int = 100,
    ) -> list[PendingMessage]:
        """Find unsettled messages that match all criteria.

        They are in the order of partition and offset; with the status `waiting` in the order of their time.

        Parameters:
            status: `waiting`, `ready`, `leased` or `dead`; by default all but dead ones.
            due_from: ready at this time or later.
            due_to: ready before this time.
            key: with this key.
            owner: of this producer group.
            headers: with these headers, and perhaps others.
            messages: only these: any objects with a partition and an offset.
            limit: how many at most.

        Returns:
            The messages, with their status.

        Raises:
            TopicNotFound: if the topic does not exist.
            SubscriptionNotFound: if the subscription is named and does not exist.
            InvalidArgument: if a criterion is wrong.

        Example:
            >>> reminder = bus.schedule("reminders", b"call ann", in_=3600, key="ann")
            >>> [(found.value, found.status) for found in bus.queue("reminders").find(key="ann")]
            [(b'call ann', 'waiting')]
        """
        checked_count(limit, "limit")
        found: list[PendingMessage] = []
        pages = self.find_pages(
            status=status,
            due_from=due_from,
            due_to=due_to,
            key=key,
            owner=owner,
            headers=headers,
            messages=messages,
            page=max(1, min(limit, _PAGE)),
        )
        for page in pages:
            found += page
            if len(found) >= limit:
                break
        return found[:limit]

    def find_pages(
        self,
        *,
        status: str = "",
        due_from: Moment | None = None,
        due_to: Moment | None = None,
        key: bytes | str | None = None,
        owner: str = "",
        headers: GivenHeaders | None = None,
        messages: Iterable[Placed] = (),
        page: int = 100,
    ) -> Iterator[list[PendingMessage]]:
        """Find all messages that match, page by page.

        Parameters:
            status: as for `find`.
            due_from: as for `find`.
            due_to: as for `find`.
            key: as for `find`.
            owner: as for `find`.
            headers: as for `find`.
            messages: as for `find`.
            page: how many messages a page has at most.

        Yields:
            Pages: lists of messages.

        Raises:
            TopicNotFound: if the topic does not exist.
            InvalidArgument: if a criterion is wrong.

        Example:
            >>> reminder = bus.schedule("reminders", b"call ann", in_=3600)
            >>> [len(page) for page in bus.queue("reminders").find_pages(page=50)]
            [1]
        """
        checked_count(page, "page", LEASE_MESSAGES_MAX)
        wanted = selection(status, due_from, due_to, key, owner, headers, messages)
        after = ""
        while True:
            head = Find(self.topic, wanted, self.subscription, page, after)
            answer, body = self._broker.request_with_body(head)
            found = found_messages(self.topic, answer, body)
            if found:
                yield found
            after = answer.after
            if not after:
                return

    def forecast(self, start: Moment, bucket_seconds: float | timedelta, buckets: int = 24) -> Forecasted:
        """Count the messages that become due in each of several buckets of time.

        Parameters:
            start: when the first bucket begins.
            bucket_seconds: the length of a bucket.
            buckets: how many.

        Returns:
            The counts of the buckets, and of what is due before and after them.

        Raises:
            TopicNotFound: if the topic does not exist.
            InvalidArgument: if an argument is wrong.

        Example:
            >>> from datetime import UTC, datetime
            >>> day = datetime(2040, 6, 1, tzinfo=UTC)
            >>> reminder = bus.schedule("reminders", b"call ann", at=day)
            >>> (bus.queue("reminders").forecast(day, 3600, buckets=3)).counts
            [1, 0, 0]
        """
        bucket_us = span_us(bucket_seconds)
        head = Forecast(self.topic, microseconds(start), bucket_us, buckets, self.subscription)
        return self._broker.request(head)

    def edit_matching(
        self,
        *,
        due: Moment | None = None,
        shift: float | timedelta = 0,
        priority: int | None = None,
        value: bytes | None = UNCHANGED,
        headers: GivenHeaders | None = UNCHANGED,
        delete: bool = False,
        owner: str = "",
        status: str = "",
        due_from: Moment | None = None,
        due_to: Moment | None = None,
        key: bytes | str | None = None,
        matching_headers: GivenHeaders | None = None,
        messages: Iterable[Placed] = (),
    ) -> list[EditOutcome]:
        """Change all messages that match, each once.

        Parameters:
            due: move them to this time,
            shift: or by so many seconds, from when they will be ready, or else were published.
            priority: set their priority.
            value: replace value and headers by this value; without `headers` the messages have none then.
            headers: the headers that go with `value`, which must be given as well.
            delete: delete them.
            owner: in whose name: then only messages of this producer group are changed.
            status: which messages, as for `find`.
            due_from: as for `find`.
            due_to: as for `find`.
            key: as for `find`.
            matching_headers: as `headers` for `find`.
            messages: as for `find`.

        Returns:
            The outcome for each message.

        Raises:
            TopicNotFound: if the topic does not exist.
            InvalidArgument: if an argument is wrong, or nothing is to be changed.

        Example:
            >>> reminder = bus.schedule("reminders", b"call ann", in_=3600, key="ann")
            >>> outcomes = bus.queue("reminders").edit_matching(shift=86400, key="ann")
            >>> [outcome.outcome for outcome in outcomes]
            ['applied']
        """
        change, body = edition(
            due=due, shift=shift, priority=priority, value=value, headers=headers, delete=delete, owner=owner
        )
        wanted = selection(status, due_from, due_to, key, "", matching_headers, messages)
        outcomes: list[EditOutcome] = []
        after = ""
        while True:
            head = EditMatching(self.topic, wanted, change, self.subscription, owner, _PAGE, after)
            answer = self._broker.request(head, body, repeat=not change.shift_us)
            outcomes += answer.outcomes
            after = answer.after
            if not after:
                return outcomes

    def redrive(
        self,
        *,
        due_from: Moment | None = None,
        due_to: Moment | None = None,
        key: bytes | str | None = None,
        owner: str = "",
        headers: GivenHeaders | None = None,
        messages: Iterable[Placed] = (),
        limit: int | None = None,
    ) -> int:
        """Publish dead messages again to their topic.

        Parameters:
            due_from: which messages, as for `find`; by default all dead ones.
            due_to: as for `find`.
            key: as for `find`.
            owner: as for `find`.
            headers: as for `find`.
            messages: as for `find`.
            limit: how many at most; by default all.

        Returns:
            How many were redriven.

        Raises:
            TopicNotFound: if the topic does not exist.
            SubscriptionNotFound: if the subscription does not exist.

        Example:
            >>> receipt = bus.publish("jobs", b"resize cat.jpg")
            >>> queue = bus.queue("jobs")
            >>> refusals = queue.reject(queue.lease())
            >>> queue.redrive()
            1
        """
        wanted: Selection = selection("dead", due_from, due_to, key, owner, headers, messages)
        if limit is not None:
            checked_count(limit, "limit")
        redriven, after = 0, ""
        while limit is None or redriven < limit:
            count = _PAGE if limit is None else min(_PAGE, limit - redriven)
            head = Redrive(self.topic, self.subscription, wanted, count, after)
            answer = self._broker.request(head, repeat=False)
            redriven += answer.messages
            after = answer.after
            if not after:
                break
        return redriven

    def stats(self) -> SubscriptionInfo:
        """Describe the subscription: its settings, and how many messages are waiting, ready, leased and dead.

        Returns:
            The subscription as it is now.

        Raises:
            TopicNotFound: if the topic does not exist.
            SubscriptionNotFound: if the subscription does not exist.

        Example:
            >>> receipt = bus.publish("jobs", b"resize cat.jpg")
            >>> queue = bus.queue("jobs")
            >>> jobs = queue.lease()
            >>> (queue.stats()).leased
            1
        """
        return self._broker.request(SubscriptionDescribe(self.topic, self.subscription))

    def pause(self) -> SubscriptionInfo:
        """Stop deliveries until `resume`; leased messages can be settled.

        Returns:
            The subscription as it is now.

        Raises:
            TopicNotFound: if the topic does not exist.
            SubscriptionNotFound: if the subscription does not exist.

        Example:
            >>> info = bus.create_subscription("jobs")
            >>> (bus.queue("jobs").pause()).settings["paused"]
            True
        """
        return self._alter(paused=True)

    def resume(self) -> SubscriptionInfo:
        """Resume deliveries after `pause`.

        Returns:
            The subscription as it is now.

        Raises:
            TopicNotFound: if the topic does not exist.
            SubscriptionNotFound: if the subscription does not exist.

        Example:
            >>> info = bus.create_subscription("jobs")
            >>> (bus.queue("jobs").resume()).settings["paused"]
            False
        """
        return self._alter(paused=False)

    def _alter(self, **settings: Any) -> SubscriptionInfo:
        return self._broker.request(SubscriptionAlter(self.topic, settings, self.subscription))
