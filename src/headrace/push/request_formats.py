"""The requests of webhooks: headers and body of some messages, in each format."""

from collections.abc import Callable, Sequence
from hashlib import sha256
from typing import NamedTuple
from urllib.parse import quote

import msgspec

from headrace.model.cloudevents_http import (
    EventOrigin,
    HttpEvent,
    encode_batch,
    encode_binary,
    encode_structured,
    message_event,
)
from headrace.model.envelope import CONTENT_TYPE_HEADER, EnvelopeContent, describe_message
from headrace.model.headers import header_pairs
from headrace.model.message import Message
from headrace.model.webhook_requests import WebhookDefinition
from headrace.push.leased_messages import LeasedMessage

_encode = msgspec.json.Encoder().encode
_JSON = {"content-type": "application/json"}
_ID_DIGEST_CHARS = 16


class DeliverySource(NamedTuple):
    """Where a webhook's messages come from."""

    broker_id: str
    topic: str
    """As its tenant names it."""
    subscription_id: int
    """Never assigned again: with it the ids of messages are unique, also after a topic was deleted."""


class OutgoingRequest(NamedTuple):
    """What is sent."""

    headers: dict[str, str]
    body: bytes


Format = Callable[[WebhookDefinition, Sequence[LeasedMessage], DeliverySource], OutgoingRequest]


def format_request(
    definition: WebhookDefinition, messages: Sequence[LeasedMessage], source: DeliverySource
) -> OutgoingRequest:
    """The request that delivers these messages, not signed yet."""
    request = FORMATTERS[definition.format](definition, messages, source)
    own = {
        "headrace-webhook": quote(definition.name.rpartition("/")[2]),
        "headrace-topic": quote(source.topic),
        "headrace-attempt": str(max(one.attempt for one in messages)),
    }
    return OutgoingRequest({**definition.headers, **own, **request.headers}, request.body)


def request_id(messages: Sequence[LeasedMessage], source: DeliverySource) -> str:
    """The header `webhook-id`: the same whenever the same messages are sent.

    The id of several messages has the first one's place and a digest of all places.
    """
    first = messages[0]
    place = f"{source.broker_id}_{source.subscription_id}_{first.partition}_{first.message.offset}"
    if len(messages) == 1:
        return f"msg_{place}"
    places = " ".join(f"{one.partition}/{one.message.offset}" for one in messages)
    return f"msg_{place}_{sha256(places.encode()).hexdigest()[:_ID_DIGEST_CHARS]}"


def _envelope(definition: WebhookDefinition, messages: Sequence[LeasedMessage], _: DeliverySource) -> OutgoingRequest:
    contents = []
    for one in messages:
        message = one.message
        content = EnvelopeContent(one.partition, message.offset, message.timestamp)
        describe_message(content, message.value, message.key, message.headers)
        content.due, content.priority, content.expires = message.due, message.priority, message.expires
        contents.append(content)
    return OutgoingRequest(_JSON, _encode(contents if definition.batch_max > 1 else contents[0]))


def _raw(_: WebhookDefinition, messages: Sequence[LeasedMessage], __: DeliverySource) -> OutgoingRequest:
    (one,) = messages
    message = one.message
    headers = {"headrace-partition": str(one.partition), "headrace-offset": str(message.offset)}
    if message.key is not None:
        headers["headrace-key"] = quote(message.key, safe="")
    if message.value is None:
        return OutgoingRequest({**headers, "headrace-deleted": "true"}, b"")
    headers["content-type"] = _content_type(message) or "application/octet-stream"
    return OutgoingRequest(headers, message.value)


def _content_type(message: Message) -> str | None:
    """The content type of a message, if it can stand in a header of HTTP."""
    for name, content in header_pairs(message.headers):
        if name.lower() == CONTENT_TYPE_HEADER and content is not None:
            text = content.decode("latin-1").strip()
            return text if text.isascii() and text.isprintable() else None
    return None


def _event_format(encode: Callable[[list[Message], Callable[[int], EventOrigin]], HttpEvent]) -> Format:
    def formatted(_: WebhookDefinition, messages: Sequence[LeasedMessage], source: DeliverySource) -> OutgoingRequest:
        def origin(at: int) -> EventOrigin:
            return EventOrigin(source.broker_id, source.topic, messages[at].partition)

        return OutgoingRequest(*encode([one.message for one in messages], origin))

    return formatted


FORMATTERS: dict[str, Format] = {
    "envelope": _envelope,
    "raw": _raw,
    "cloudevents-binary": _event_format(lambda given, at: encode_binary(message_event(given[0], at(0)))),
    "cloudevents-structured": _event_format(lambda given, at: encode_structured(message_event(given[0], at(0)))),
    "cloudevents-batch": _event_format(
        lambda given, at: encode_batch([message_event(one, at(number)) for number, one in enumerate(given)])
    ),
}
"""Makes headers and body, by the name of the format."""
