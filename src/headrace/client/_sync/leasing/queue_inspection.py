"""Looking at the messages of a leased subscription, and changing them, without leasing them."""

from collections.abc import Iterable, Iterator
from datetime import timedelta
from typing import Any

from headrace.client._sync.connection.reconnecting import ReconnectingConnection
from headrace.client.leasing.jobs import PendingMessage, found_messages
from headrace.client.leasing.message_selection import UNCHANGED, Placed, edition, selection, span_us
from headrace.client.producer.message_fields import GivenHeaders
from headrace.client.times import Moment, checked_count, microseconds
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
    """The part of a queue that looks at messages."""

    def __init__(self, broker: ReconnectingConnection, topic: str, subscription: str) -> None:
        self.topic = topic
        self.subscription = subscription
        self._broker = broker

    def peek(self, n: int = 1) -> list[PendingMessage]:
        """The first messages that are ready, without leasing them.

        Parameters:
            n: how many at most.
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
        """Messages that are not settled and to which all of this applies.

        They come in the order of partition and offset; with the status `waiting` in the order of their time.

        Parameters:
            status: `waiting`, `ready`, `leased` or `dead`; by default all but dead ones.
            due_from: ready at this time or later.
            due_to: ready before this time.
            key: with this key.
            owner: of this producer group.
            headers: with these headers, and perhaps others.
            messages: only these: anything that has a partition and an offset.
            limit: how many at most.
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
        """The same as `find`, but all there are, page by page.

        Parameters:
            status: as for `find`, like all that are not explained here.
            page: how many messages a page has at most.
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
        """How many messages come due when.

        Parameters:
            start: when the first bucket of time begins.
            bucket_seconds: how long each is.
            buckets: how many.
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
        """Change all messages to which something applies, each once; says of each whether it was done.

        Parameters:
            due: move them to this time,
            shift: or by so many seconds, from when they will be ready, or else were published.
            priority: give them this priority.
            value: replace value and headers by this value
            headers: and these headers.
            delete: remove them.
            owner: in whose name: only messages of this producer group are changed then.
            status: which messages, as for `find`, like all that follow.
            due_from: see there.
            due_to: see there.
            key: see there.
            matching_headers: `headers` there.
            messages: see there.
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
        """Put dead messages back where they died, to be handed out anew; returns how many.

        Parameters:
            due_from: which messages, as for `find`; by default all that are dead.
            due_to: see there.
            key: see there.
            owner: see there.
            headers: see there.
            messages: see there.
            limit: how many at most; by default all.
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
        """The subscription as it is now: its settings, how many messages are waiting, ready, leased and dead."""
        return self._broker.request(SubscriptionDescribe(self.topic, self.subscription))

    def pause(self) -> SubscriptionInfo:
        """Hand out nothing until `resume`; what is leased can be settled."""
        return self._alter(paused=True)

    def resume(self) -> SubscriptionInfo:
        """Hand out messages again."""
        return self._alter(paused=False)

    def _alter(self, **settings: Any) -> SubscriptionInfo:
        return self._broker.request(SubscriptionAlter(self.topic, settings, self.subscription))
