"""Webhooks as resources."""

from typing import Annotated, Any, Literal

import msgspec

from headrace.gateways.http.call import Call, Reply, json_reply
from headrace.gateways.http.paging import PageQuery, page
from headrace.gateways.http.route import Route, given_fields, request_route
from headrace.gateways.http.setting_fields import SubscriptionSettingsFields
from headrace.model.envelope import TimeOrText, time_us
from headrace.model.limits import (
    WEBHOOK_BATCH_MAX,
    WEBHOOK_CONCURRENCY_MAX,
    WEBHOOK_LOG_MAX,
    WEBHOOK_TIMEOUT_SECONDS_MAX,
)
from headrace.model.webhook_requests import (
    WebhookAlter,
    WebhookDefinition,
    WebhookDelete,
    WebhookDeliveries,
    WebhookDescribe,
    WebhookInfo,
    WebhookList,
    WebhookPause,
    WebhookSet,
    WebhookTest,
)

WEBHOOKS = "webhooks"
_PATH = "/v1/webhooks/{name}"
_UNSET = msgspec.UNSET
_Format = Literal["envelope", "raw", "cloudevents-binary", "cloudevents-structured", "cloudevents-batch"]
_BatchMax = Annotated[int, msgspec.Meta(ge=1, le=WEBHOOK_BATCH_MAX)]
_Concurrency = Annotated[int, msgspec.Meta(ge=1, le=WEBHOOK_CONCURRENCY_MAX)]
_Seconds = Annotated[float, msgspec.Meta(ge=0.1, le=WEBHOOK_TIMEOUT_SECONDS_MAX)]
_Secrets = Annotated[list[str], msgspec.Meta(max_length=2)]


class WebhookQuery(PageQuery, forbid_unknown_fields=True):
    """Which webhooks."""

    topic: str = ""
    """Of this topic; empty: all."""


class WebhookPage(msgspec.Struct):
    """Webhooks by name."""

    webhooks: list[WebhookInfo]
    next: str = ""
    """The cursor of the next page; empty at the end."""


class WebhookChanges(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Parts of a webhook to change."""

    url: str | msgspec.UnsetType = _UNSET
    """Where to, by http or https, without credentials."""
    format: _Format | msgspec.UnsetType = _UNSET
    headers: dict[str, str | None] | msgspec.UnsetType = _UNSET
    """Added to each request, besides those that there are; null removes one."""
    batch_max: _BatchMax | msgspec.UnsetType = _UNSET
    """So many messages at most in one request; with more than 1 the body is always an array."""
    concurrency: _Concurrency | msgspec.UnsetType = _UNSET
    """So many requests at once."""
    ordered_by_key: bool | msgspec.UnsetType = _UNSET
    """At most one request at a time has messages of a key, in their order."""
    timeout_seconds: _Seconds | msgspec.UnsetType = _UNSET
    """How long the receiver has for its answer."""
    settings: SubscriptionSettingsFields | msgspec.UnsetType = _UNSET  # type: ignore[valid-type]
    """Of the leased subscription: the retries, the dead letter topic, limits."""
    validate: bool | msgspec.UnsetType = _UNSET
    """Ask the receiver for permission first, as CloudEvents' HTTP webhooks do."""
    origin: str | msgspec.UnsetType = _UNSET
    """Who asks for that permission: a DNS name."""
    secrets: _Secrets | msgspec.UnsetType = _UNSET
    """One or two, `whsec_` and base64: each request is signed with all of them."""
    rotate: bool = False
    """Make a new secret, which the answer tells; the newest one there is stays beside it."""


class WebhookFields(WebhookChanges, forbid_unknown_fields=True, kw_only=True):
    """A webhook: send the messages of a topic to a URL."""

    topic: str
    url: str
    headers: dict[str, str] | msgspec.UnsetType = _UNSET  # type: ignore[assignment]
    """Added to each request."""
    start: Literal["latest", "earliest", "time", "offset"] = "latest"
    """Which messages a new one sends: those to come, all there are, or from a time or an offset on."""
    start_time: TimeOrText | None = None
    start_offset: Annotated[int, msgspec.Meta(ge=0, le=1 << 62)] = 0


class DeliveriesQuery(msgspec.Struct, forbid_unknown_fields=True):
    """Which requests of a webhook."""

    limit: Annotated[int, msgspec.Meta(ge=1, le=WEBHOOK_LOG_MAX)] = WEBHOOK_LOG_MAX
    failed: bool = False
    """Only those that failed."""


_decode_fields = msgspec.json.Decoder(WebhookFields)
_decode_changes = msgspec.json.Decoder(WebhookChanges)


async def list_webhooks(call: Call) -> Reply:
    """Answer a page of webhooks."""
    query = call.query(WebhookQuery)
    found = await call.ask(WebhookList(query.topic))
    webhooks, following = page(found.webhooks, lambda one: one.definition.name, query)
    return json_reply(WebhookPage(webhooks, following))


async def set_webhook(call: Call) -> Reply:
    """Make or replace a webhook."""
    given = await call.decoded(_decode_fields)
    definition = msgspec.convert({**_plain(given), "name": call.parameters[0], "topic": given.topic}, WebhookDefinition)
    secrets = [] if given.secrets is _UNSET else given.secrets
    start_us = 0 if given.start_time is None else time_us(given.start_time)
    request = WebhookSet(definition, secrets, True, given.start, given.start_offset, start_us)
    answer = await call.ask(request)
    if given.rotate and not answer.secrets:
        answer = await call.ask(WebhookAlter(call.parameters[0], rotate=True))
    return json_reply(answer)


async def alter_webhook(call: Call) -> Reply:
    """Change parts of a webhook."""
    given = await call.decoded(_decode_changes)
    secrets = [] if given.secrets is _UNSET else given.secrets
    return json_reply(await call.ask(WebhookAlter(call.parameters[0], _plain(given), secrets, given.rotate)))


async def list_deliveries(call: Call) -> Reply:
    """Answer the last requests of a webhook."""
    query = call.query(DeliveriesQuery)
    return json_reply(await call.ask(WebhookDeliveries(call.parameters[0], query.limit, query.failed)))


async def resume_webhook(call: Call) -> Reply:
    """Let a webhook go on."""
    return json_reply(await call.ask(WebhookPause(call.parameters[0], paused=False)))


def _plain(given: WebhookChanges) -> dict[str, Any]:
    """The fields of a definition that were given, in plain values."""
    fields = given_fields(given)
    plain = {field: fields[field] for field in WebhookDefinition.__struct_fields__ if field in fields}
    if "settings" in plain:
        plain["settings"] = {name: one for name, one in plain["settings"].items() if one is not _UNSET}
    return plain


_NOT_FOUND = ("webhook_not_found",)
_REFUSED = ("address_refused", "plugin_unavailable", "topic_not_found", "webhook_exists", "subscription_exists")

WEBHOOK_ROUTES = [
    Route("GET", "/v1/webhooks", list_webhooks, "List webhooks", WEBHOOKS, query=WebhookQuery, answer=WebhookPage),
    request_route(WebhookDescribe, "GET", _PATH, tag=WEBHOOKS, errors=_NOT_FOUND),
    Route(
        "PUT", _PATH, set_webhook, "Make a webhook, or replace the definition of the one of that name", WEBHOOKS,
        body=WebhookFields, body_required=True, answer=WebhookInfo, errors=_REFUSED,
        example={"topic": "orders", "url": "https://example.org/hook", "settings": {"deliveries_max": 10}},
    ),
    Route(
        "PATCH", _PATH, alter_webhook, "Change parts of a webhook", WEBHOOKS,
        body=WebhookChanges, answer=WebhookInfo, errors=(*_NOT_FOUND, "address_refused"),
        example={"concurrency": 8, "rotate": True},
    ),
    request_route(WebhookDelete, "DELETE", _PATH, tag=WEBHOOKS, errors=_NOT_FOUND),
    Route(
        "GET", f"{_PATH}/deliveries", list_deliveries, "List the last requests of a webhook", WEBHOOKS,
        query=DeliveriesQuery, answer=WebhookDeliveries.declared.answer, errors=_NOT_FOUND,
    ),
    request_route(
        WebhookTest, "POST", f"{_PATH}/test", tag=WEBHOOKS, errors=(*_NOT_FOUND, "address_refused", "busy"),
    ),
    request_route(
        WebhookPause, "POST", f"{_PATH}/pause", tag=WEBHOOKS, without=("paused",), errors=_NOT_FOUND,
        summary="Send nothing more until the webhook is resumed", example={"reason": "maintenance"},
    ),
    Route(
        "POST", f"{_PATH}/resume", resume_webhook, "Let a webhook go on", WEBHOOKS,
        answer=WebhookInfo, errors=_NOT_FOUND,
    ),
]  # fmt: skip
"""The routes about webhooks."""
