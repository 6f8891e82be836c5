"""Queries of a leased subscription's messages by status, time, key, owner and headers, a page at a time."""

from collections.abc import Generator

import msgspec

from headrace.broker.dead_letters import (
    LOST_HEADER,
    PREFIX,
    REDRIVE,
    DeadLetters,
    dead_topic,
    has_foreign_dead_letters,
)
from headrace.broker.ledger import Ledger
from headrace.broker.message_editor import EDITS_TOGETHER, MessageEdit, MessageEditor, checked_edit
from headrace.broker.pending_answer import AnswerWithBody, PendingAnswer, encode_detached_batch
from headrace.broker.ports import Session
from headrace.broker.search import Search, SearchPosition, died_us, headers_of, number_in
from headrace.broker.slices import TimedSteps
from headrace.broker.subscription import Subscription
from headrace.broker.subscriptions import SubscriptionRegistry
from headrace.broker.topic_views import TopicView, TopicViews
from headrace.broker.topics import TopicRegistry
from headrace.broker.turns import Turns
from headrace.broker.views import check_stores
from headrace.engines.api import LeasedPartition
from headrace.model.batch import Columns, message_bytes
from headrace.model.errors import HeadraceError, InvalidArgument, SubscriptionNotFound
from headrace.model.headers import header_text, replaced_headers
from headrace.model.leasing import (
    Edited,
    EditMatching,
    EditOutcome,
    Find,
    Forecast,
    Forecasted,
    Found,
    FoundMessage,
    MessageId,
    Redrive,
    Redriven,
    Selection,
)
from headrace.model.limits import LEASE_MESSAGES_MAX
from headrace.model.request import Resource, Verb
from headrace.model.subscription import checked_subscription

_TOGETHER = 64
"""Messages examined per slice."""
_BODY_BYTES_MAX = 8 << 20
_BUCKETS_MAX = 10_000
_STATUSES = ("", "waiting", "ready", "leased", "dead")


class MessageQueries:
    """Finds, counts, edits and redrives messages that match a selection, in slices."""

    def __init__(
        self,
        topics: TopicRegistry,
        registry: SubscriptionRegistry,
        dead_letters: DeadLetters,
        editing: MessageEditor,
        ledger: Ledger,
        turns: Turns,
    ) -> None:
        self._topics = topics
        self._registry = registry
        self._dead_letters = dead_letters
        self._editor = editing
        self._turns = turns
        self._leased = ledger.state.leased
        self._views = TopicViews(topics, self._leased)

    def find(self, request: Find, now_us: int) -> PendingAnswer[Found | AnswerWithBody[Found]]:
        """Find a page of messages."""
        _check(request.selection, request.messages_max)
        return self._turns.in_slices(self._find(request, now_us))

    def _find(self, request: Find, now_us: int) -> TimedSteps:
        wanted = yield from self._subject(request.topic, request.subscription, now_us)
        subscription, selection = self._place(wanted, request.selection)
        if subscription is None or request.topic_id not in (0, wanted.topic.id):
            return Found([], topic_id=wanted.topic.id)
        found: list[FoundMessage] = []
        contents: list[Columns] = []
        size = 0
        search = Search(subscription, selection, request.after, by_time=selection.status == "waiting")
        while search.goes_on:
            now_us = yield from self._refresh(subscription, now_us)
            for spot, columns, at in search.examine(_TOGETHER):
                if len(found) == request.messages_max or size > _BODY_BYTES_MAX:
                    search.stop()
                    break
                index = subscription.indexes[spot.partition]
                found.append(_described(index, spot, columns, at, request.selection.status))
                contents.append(columns.picked([at], [0] * (at + 1)))
                size += message_bytes(columns, at)
                search.take(spot)
            else:
                search.advance()
            if search.goes_on:
                now_us = yield
        answer = Found(found, search.after, subscription.topic.id)
        return AnswerWithBody(answer, encode_detached_batch(_joined(contents), now_us)) if found else answer

    def forecast(self, request: Forecast, now_us: int) -> PendingAnswer[Forecasted]:
        """Count messages by due time."""
        if not 0 < request.buckets <= _BUCKETS_MAX or request.bucket_us <= 0:
            raise InvalidArgument(f"buckets must be 1 to {_BUCKETS_MAX}, and bucket_us greater than 0")
        return self._turns.in_slices(self._forecast(request, now_us))

    def _forecast(self, request: Forecast, now_us: int) -> TimedSteps:
        subscription = yield from self._subject(request.topic, request.subscription, now_us)
        yield from self._refresh(subscription, now_us)
        bounds = [request.from_us + at * request.bucket_us for at in range(request.buckets + 1)]
        tallies = [index.forecast(bounds) for index in subscription.indexes.values()]
        totals = [sum(tally.ready for tally in tallies), *[0] * (request.buckets + 1)]
        for tally in tallies:
            while tally.count_some():
                yield
            totals = [total + count for total, count in zip(totals, tally.counts, strict=True)]
        return Forecasted(totals[1:-1], totals[0], totals[-1])

    def edit_matching(
        self, request: EditMatching, body: memoryview, now_us: int, *, owned_only: bool = False
    ) -> PendingAnswer[Edited]:
        """Edit all messages that match, up to a number."""
        _check(request.selection, request.messages_max)
        if request.selection.status == "dead":
            raise InvalidArgument("dead messages cannot be edited; redrive them first")
        topic = self._topics.get(request.topic)
        check_stores(str(topic), topic.settings, "edit messages of")
        edition = checked_edit(topic, request.change, request.owner, body, owned_only=owned_only)
        return self._turns.in_slices(self._edit_matching(request, edition, now_us))

    def _edit_matching(self, request: EditMatching, edition: MessageEdit, now_us: int) -> TimedSteps:
        subscription = yield from self._subject(request.topic, request.subscription, now_us)
        selection = request.selection
        if request.owner and not selection.owner:
            selection = msgspec.structs.replace(selection, owner=request.owner)
        named = {(one.partition, one.offset): one for one in selection.messages}
        outcomes: list[EditOutcome] = []
        # In offset order, so that a moved message is not found again.
        search = Search(subscription, selection, request.after, by_time=False)
        while search.goes_on:
            now_us = yield from self._refresh(subscription, now_us)
            spots = [spot for spot, _, _ in search.examine(EDITS_TOGETHER)]
            left = request.messages_max - len(outcomes)
            messages = [named.get(spot[1:]) or MessageId(*spot[1:]) for spot in spots[:left]]
            try:
                outcomes += self._editor.apply(subscription.topic, messages, edition, now_us)
            except HeadraceError as error:
                if not outcomes:
                    raise
                outcomes += [EditOutcome(one.partition, one.offset, error.code) for one in messages]
                search.stop()
                break
            if len(spots) > left:
                if left:
                    search.take(spots[left - 1])
                search.stop()
            else:
                search.advance()
            if search.goes_on:
                now_us = yield
        return self._editor.answer(outcomes, search.after)

    def redrive(self, session: Session, request: Redrive, now_us: int) -> PendingAnswer[Redriven]:
        """Redrive dead letters: from another topic than the one that belongs to the subscription's own, if the session
        may lease them there.
        """
        _check(request.selection, request.messages_max)
        request.selection.status = "dead"
        wanted = self._registry.get(request.topic, request.subscription)
        if session.access is not None and has_foreign_dead_letters(wanted):
            session.access.require(Verb.LEASE.value, Resource.SUBSCRIPTION.value, dead_topic(wanted), REDRIVE)
        return self._turns.in_slices(self._redrive(request, now_us))

    def _redrive(self, request: Redrive, now_us: int) -> TimedSteps:
        wanted = self._registry.get(request.topic, request.subscription)
        dead, selection = self._place(wanted, request.selection)
        if dead is None:
            return Redriven(0)
        found: list[SearchPosition] = []
        search = Search(dead, selection, request.after, by_time=False)
        while search.goes_on:
            now_us = yield from self._refresh(dead, now_us)
            for spot, columns, at in search.examine(_TOGETHER):
                if len(found) == request.messages_max:
                    search.stop()
                    break
                if LOST_HEADER not in headers_of(columns, at):  # a lost message cannot be redriven
                    found.append(spot)
                search.take(spot)
            else:
                search.advance()
            if search.goes_on:
                now_us = yield
        self._check_alive(wanted)
        chosen: dict[int, list[int]] = {}
        for spot in found:  # another request may have redriven it
            if dead.indexes[spot.partition].status(spot.offset) in ("ready", "waiting"):
                chosen.setdefault(spot.partition, []).append(spot.offset)
        if not chosen:
            return Redriven(0, search.after)
        pending_answer: PendingAnswer[Redriven] = PendingAnswer()

        def tell(outcome: object) -> None:
            if isinstance(outcome, Redriven):
                outcome.after = search.after
            pending_answer.resolve(outcome)  # type: ignore[arg-type]

        redriven = yield from self._dead_letters.redrive(wanted, dead, chosen, now_us)
        redriven.then(tell)
        return pending_answer

    def tick(self, now_us: int) -> None:
        """Drop the cached views that are no longer used."""
        self._views.forget(now_us)

    def _place(self, subscription: Subscription, selection: Selection) -> tuple[Subscription | None, Selection]:
        """The subscription and selection to search; dead letters are in another topic, possibly shared."""
        if selection.status != "dead":
            return subscription, selection
        whose = {
            f"{PREFIX}topic": str(subscription.topic).encode(),
            f"{PREFIX}subscription": subscription.name.encode(),
        }
        headers = replaced_headers(selection.headers, whose)
        there = Selection("", None, None, selection.key, selection.owner, headers, selection.messages)
        there.due_from_us, there.due_to_us = selection.due_from_us, selection.due_to_us
        return self._dead_letters.subscription(subscription), there

    def _subject(self, topic: str, name: str, now_us: int) -> Generator[None, int, Subscription]:
        """The subscription to search; for a topic without any, a view of its messages."""
        found = self._topics.get(topic)
        if self._leased.has_subscriptions(found.id):
            return self._registry.get(topic, name)
        self._views.forget(now_us)
        view = self._views.of(found, checked_subscription(name), now_us)
        yield from view.steps(self._topics, self._leased, now_us)
        return view

    def _refresh(self, subscription: Subscription, now_us: int) -> Generator[None, int, int]:
        """Bring a subscription up to date, in slices; returns the current time."""
        self._check_alive(subscription)
        if isinstance(subscription, TopicView):
            subscription.refresh(self._topics, now_us)
        else:
            self._registry.refresh(subscription, now_us)
        for index in list(subscription.indexes.values()):
            while index.is_behind(now_us):
                index.make_due_ready(now_us)
                if index.is_behind(now_us):
                    now_us = yield
        self._check_alive(subscription)
        return now_us

    def _check_alive(self, subscription: Subscription) -> None:
        """Raise if the topic or subscription was deleted between slices."""
        if isinstance(subscription, TopicView):
            alive = self._topics.by_id.get(subscription.topic.id) is subscription.topic
        else:
            alive = self._registry.find(subscription.topic, subscription.name) is subscription
        if not alive:
            raise SubscriptionNotFound(f"the subscription {subscription} was deleted during the request")


def _described(index: LeasedPartition, spot: SearchPosition, columns: Columns, place: int, wanted: str) -> FoundMessage:
    state = index.message_state(spot.offset)
    due = columns.dues[place] if columns.dues is not None else None
    published = columns.timestamps[place] if columns.timestamps else 0
    status, deliveries, reason = state.status, state.deliveries, state.reason
    ready_us = state.rests_until_us or (due if due is not None else published)
    if wanted == "dead":
        headers = headers_of(columns, place)
        status, ready_us = "dead", died_us(headers) or ready_us
        reason = header_text(headers, f"{PREFIX}reason").decode("utf-8", "replace")
        deliveries = number_in(headers, "deliveries")
    return FoundMessage(
        spot.partition,
        spot.offset,
        status,
        ready_us,
        deliveries,
        state.version,
        state.holder,
        state.until_us,
        reason,
    )


def _check(selection: Selection, count: int) -> None:
    if selection.status not in _STATUSES:
        raise InvalidArgument(f"status must be waiting, ready, leased or dead, not {selection.status}")
    if not 0 < count <= LEASE_MESSAGES_MAX:
        raise InvalidArgument(f"messages_max must be 1 to {LEASE_MESSAGES_MAX}, not {count}")


def _joined(columns: list[Columns]) -> Columns:
    """Join single messages into columns; each has the columns of its batch."""
    joined = Columns([one.values[0] for one in columns], timestamps=[(one.timestamps or [0])[0] for one in columns])
    for name in ("keys", "headers", "dues", "priorities", "expires"):
        parts = [getattr(one, name) for one in columns]
        if any(part is not None for part in parts):
            setattr(joined, name, [None if part is None else part[0] for part in parts])
    return joined
