"""Leased subscriptions as resources: leases and their settlement, and the subscriptions themselves."""

from collections.abc import Iterable
from itertools import repeat
from typing import Annotated, Any, Literal

import msgspec

from headrace.gateways.http.call import Call, Reply, json_reply
from headrace.gateways.http.paging import PageQuery, page
from headrace.gateways.http.reading import batches_in
from headrace.gateways.http.route import Route, fields_struct, given_fields, request_route
from headrace.gateways.http.setting_fields import SubscriptionSettingsFields
from headrace.model.batch import Bytes
from headrace.model.envelope import EnvelopeContent, TimeOrText, describe_message, time_us
from headrace.model.leasing import (
    Ack,
    Extend,
    Holding,
    Lease,
    LeasedPortion,
    Reject,
    Release,
    Settlement,
    SubscriptionAlter,
    SubscriptionCreate,
    SubscriptionDelete,
    SubscriptionDescribe,
    SubscriptionInfo,
    SubscriptionList,
    SubscriptionReset,
)
from headrace.model.limits import AHEAD_SECONDS_MAX, LEASE_MESSAGES_MAX, LEASE_SECONDS_MAX

SUBSCRIPTIONS, LEASES = "subscriptions", "leases"
_PATH = "/v1/topics/{topic}/subscriptions/{subscription}"
_Int64 = Annotated[int, msgspec.Meta(ge=0, le=(1 << 62))]
LeaseMilliseconds = Annotated[int, msgspec.Meta(ge=0, le=LEASE_SECONDS_MAX * 1000)]


class SubscriptionPage(msgspec.Struct):
    """Leased subscriptions by topic and name."""

    subscriptions: list[SubscriptionInfo]
    next: str = ""
    """The cursor of the next page; empty at the end."""


class SubscriptionLag(msgspec.Struct):
    """How far a leased subscription is behind."""

    lag: int
    """Messages that are ready or leased: published, due and not settled."""
    ready: int
    leased: int
    waiting: int
    dead: int
    ready_since_us: int
    """The publishing time of the oldest message that is ready, 0 if there is none."""


class LeasedContent(EnvelopeContent, omit_defaults=True):
    """A message under a lease."""

    lease: int = 0
    """The token: to be given with whatever is said about the message."""
    until_us: int = 0
    """When the lease ends, by the broker's clock."""
    deliveries: int = 0
    """How often it has been handed out by now."""
    version: int = 0
    """Rises when the message is edited."""
    state_base64: bytes | None = None
    """What the last holder left for the next."""


class LeasedMessages(msgspec.Struct):
    """Messages in the order in which the subscription hands them out; none when there is nothing."""

    messages: list[LeasedContent]


class LeasedPlace(msgspec.Struct, forbid_unknown_fields=True):
    """A message that was leased under a token."""

    partition: _Int64
    offset: _Int64
    lease: _Int64


LeasedPlaces = Annotated[list[LeasedPlace], msgspec.Meta(min_length=1, max_length=LEASE_MESSAGES_MAX)]


class AckFields(msgspec.Struct, forbid_unknown_fields=True):
    """What is done."""

    messages: LeasedPlaces


class ExtendFields(msgspec.Struct, forbid_unknown_fields=True):
    """What to keep for longer."""

    messages: LeasedPlaces
    lease_ms: LeaseMilliseconds = 0
    """From now on for so long; 0: as the subscription's settings say."""


class ReleaseFields(msgspec.Struct, forbid_unknown_fields=True):
    """What to give back."""

    messages: LeasedPlaces
    delay_ms: LeaseMilliseconds | None = None
    """They rest for so long; without it and `until`, as the subscription's retry policy says."""
    until: TimeOrText | None = None
    """They rest until this time."""
    reason: str = ""
    """Kept for the dead letter, should it come to that."""
    undelivered: bool = False
    """They were never looked at: the delivery does not count."""


class RejectFields(msgspec.Struct, forbid_unknown_fields=True):
    """What cannot be processed."""

    messages: LeasedPlaces
    reason: str = ""


async def list_subscriptions(call: Call) -> Reply:
    """Answer a page of a topic's subscriptions, or of those of all topics."""
    query = call.query(PageQuery)
    found = await call.ask(SubscriptionList(*call.parameters))
    chosen, following = page(found.subscriptions, lambda one: f"{one.topic}/{one.subscription}", query)
    return json_reply(SubscriptionPage(chosen, following))


async def tell_lag(call: Call) -> Reply:
    """Answer how far a subscription is behind."""
    info = await call.ask(SubscriptionDescribe(*call.parameters))
    counts = (info.ready, info.leased, info.waiting, info.dead)
    return json_reply(SubscriptionLag(info.ready + info.leased, *counts, info.ready_since_us))


LeaseFields = fields_struct(
    Lease,
    without=("topic", "subscription"),
    replaced={
        "messages_max": Annotated[int, msgspec.Meta(ge=1, le=LEASE_MESSAGES_MAX)],
        "bytes_max": Annotated[int, msgspec.Meta(ge=1, le=32 << 20)],
        "lease_ms": LeaseMilliseconds,
        "wait_ms": Annotated[int, msgspec.Meta(ge=0, le=60_000)],
        "ahead_ms": Annotated[int, msgspec.Meta(ge=0, le=AHEAD_SECONDS_MAX * 1000)],
    },
)
_lease_decoder = msgspec.json.Decoder(LeaseFields)
_ack_decoder = msgspec.json.Decoder(AckFields)
_extend_decoder = msgspec.json.Decoder(ExtendFields)
_release_decoder = msgspec.json.Decoder(ReleaseFields)
_reject_decoder = msgspec.json.Decoder(RejectFields)


async def lease(call: Call) -> Reply:
    """Lease messages."""
    topic, subscription = call.parameters
    given: msgspec.Struct = await call.decoded(_lease_decoder)
    request = Lease(topic, subscription, **given_fields(given))
    gateway = call.gateway
    request.wait_ms = min(request.wait_ms, round(gateway.settings.http_wait_seconds_max * 1000))
    gateway.requests -= 1  # it may wait for messages
    try:
        leased, body = await call.ask_with_body(request)
    finally:
        gateway.requests += 1
    return json_reply(LeasedMessages(leased_contents(leased.portions, body)))


def leased_contents(portions: list[LeasedPortion], body: Bytes) -> list[LeasedContent]:
    """The messages of an answer or a delivery, each with its lease."""
    batches = batches_in(body)
    return [content for portion in portions for content in _portion_messages(portion, batches)]


def _portion_messages(portion: LeasedPortion, batches: Any) -> Iterable[LeasedContent]:
    offsets, seen = portion.all_offsets, 0
    while seen < len(offsets):
        batch = next(batches)
        columns = batch.columns()
        none = repeat(None)
        fields = zip(
            columns.values,
            columns.keys or none,
            columns.headers or none,
            columns.timestamps or repeat(batch.time_max),
            columns.dues or none,
            columns.priorities or none,
            columns.expires or none,
            strict=False,
        )
        for value, key, headers, timestamp, due, priority, expires in fields:
            offset = offsets[seen]
            content = LeasedContent(portion.partition, offset, timestamp, lease=portion.lease)
            describe_message(content, value, key, headers)
            content.due, content.priority, content.expires = due, priority, expires
            content.until_us = portion.until_us
            content.deliveries = portion.deliveries[seen] if portion.deliveries else 1
            content.version = portion.versions[seen] if portion.versions else 1
            content.state_base64 = portion.states.get(offset)
            seen += 1
            yield content


def holdings(places: list[LeasedPlace]) -> list[Holding]:
    """The messages by partition and token."""
    grouped: dict[tuple[int, int], list[int]] = {}
    for place in places:
        grouped.setdefault((place.partition, place.lease), []).append(place.offset)
    return [Holding(partition, token, offsets) for (partition, token), offsets in grouped.items()]


async def ack(call: Call) -> Reply:
    """Settle messages as done."""
    given = await call.decoded(_ack_decoder)
    topic, subscription = call.parameters
    return json_reply(await call.ask(Ack(topic, holdings(given.messages), subscription)))


async def extend(call: Call) -> Reply:
    """Keep messages for longer."""
    given = await call.decoded(_extend_decoder)
    topic, subscription = call.parameters
    return json_reply(await call.ask(Extend(topic, holdings(given.messages), given.lease_ms, subscription)))


async def release(call: Call) -> Reply:
    """Give messages back."""
    given = await call.decoded(_release_decoder)
    topic, subscription = call.parameters
    request = Release(
        topic,
        holdings(given.messages),
        given.delay_ms,
        None if given.until is None else time_us(given.until),
        given.reason,
        undelivered=given.undelivered,
        subscription=subscription,
    )
    return json_reply(await call.ask(request))


async def reject(call: Call) -> Reply:
    """Send messages to the dead letter topic."""
    given = await call.decoded(_reject_decoder)
    topic, subscription = call.parameters
    return json_reply(await call.ask(Reject(topic, holdings(given.messages), given.reason, subscription)))


_Start = Literal["earliest", "latest", "time", "offset"]
_SETTINGS = {"settings": SubscriptionSettingsFields, "start": _Start}
_MISSING = ("topic_not_found", "subscription_not_found")
_PLACES = {"messages": [{"partition": 0, "offset": 17, "lease": 1}]}


def _settle_route(name: str, handler: Any, summary: str, body: Any, example: Any) -> Route:
    return Route(
        "POST", f"{_PATH}/{name}", handler, summary, LEASES,
        body=body, body_required=True, answer=Settlement, errors=_MISSING, example=example,
    )  # fmt: skip


SUBSCRIPTION_ROUTES = [
    Route(
        "GET", "/v1/subscriptions", list_subscriptions, "List the leased subscriptions of all topics", SUBSCRIPTIONS,
        query=PageQuery, answer=SubscriptionPage,
    ),
    Route(
        "GET", "/v1/topics/{topic}/subscriptions", list_subscriptions, "List the leased subscriptions of a topic",
        SUBSCRIPTIONS, query=PageQuery, answer=SubscriptionPage, errors=("topic_not_found",),
    ),
    request_route(
        SubscriptionCreate, "POST", "/v1/topics/{topic}/subscriptions", tag=SUBSCRIPTIONS, status=201,
        replaced=_SETTINGS, errors=("topic_not_found", "subscription_exists"),
        example={"subscription": "billing", "settings": {"lease_seconds": 60}},
    ),
    request_route(SubscriptionDescribe, "GET", _PATH, tag=SUBSCRIPTIONS, errors=_MISSING),
    request_route(
        SubscriptionAlter, "PATCH", _PATH, tag=SUBSCRIPTIONS, replaced=_SETTINGS, errors=_MISSING,
        example={"settings": {"paused": True}},
    ),
    request_route(SubscriptionDelete, "DELETE", _PATH, tag=SUBSCRIPTIONS, errors=_MISSING),
    request_route(
        SubscriptionReset, "POST", f"{_PATH}/resets", tag=SUBSCRIPTIONS, errors=_MISSING, example={"start": "earliest"},
        replaced={"start": Literal["", "earliest", "latest", "time", "offset"]},
    ),
    Route(
        "GET", f"{_PATH}/lag", tell_lag, "Tell how far a subscription is behind", SUBSCRIPTIONS,
        answer=SubscriptionLag, errors=_MISSING,
    ),
    Route(
        "POST", f"{_PATH}/leases", lease,
        "Lease messages, to be settled before the lease ends; else they are handed out again", LEASES,
        body=LeaseFields, answer=LeasedMessages, errors=_MISSING, example={"messages_max": 10, "wait_ms": 20_000},
    ),
    _settle_route("acks", ack, "Settle messages as done", AckFields, _PLACES),
    _settle_route("extensions", extend, "Keep messages for longer", ExtendFields, {**_PLACES, "lease_ms": 60_000}),
    _settle_route("releases", release, "Give messages back", ReleaseFields, {**_PLACES, "delay_ms": 5_000}),
    _settle_route(
        "rejections", reject, "Send messages to the dead letter topic", RejectFields, {**_PLACES, "reason": "no JSON"}
    ),
]  # fmt: skip
"""The routes about leased subscriptions."""
