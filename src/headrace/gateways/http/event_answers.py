"""CloudEvents in answers: stored messages as events, one, a batch, or a line of a stream each."""

from typing import Any
from urllib.parse import urlencode

import msgspec

from headrace.gateways.http.accept import accepts
from headrace.gateways.http.call import Call, Reply
from headrace.model.cloudevents import CONTENT_TYPE, encode_event
from headrace.model.cloudevents_http import (
    BATCH,
    BATCH_TYPE,
    EventOrigin,
    encode_binary,
    encode_structured,
    join_batch,
    message_event,
)
from headrace.model.message import Message

POSITION_ATTRIBUTE = "headraceposition"
"""The extension attribute of events in lines: the position behind this event."""
_LINE_ENDS = (b"\n", b"\r")
_UNTRUSTED = (b"content-security-policy", b"default-src 'none'; sandbox")
"""Sent with data as it was published: a browser that shows it runs nothing, and treats it as of another site."""


def event_origin(call: Call, topic: str, partition: int) -> EventOrigin:
    """Where the messages of a partition come from, as events tell it."""
    return EventOrigin(call.gateway.settings.broker_id, topic, partition)


def event_line(message: Message, origin: EventOrigin) -> bytes:
    """A message as an event in JSON, without line ends."""
    text = encode_event(message_event(message, origin))
    if any(end in text for end in _LINE_ENDS):  # the data has some between its members
        text = msgspec.json.format(text, indent=-1)
    return text


def wants_batch(call: Call) -> bool:
    """Whether the client asks for a batch of events."""
    return b"accept" in call.headers and accepts(call.headers[b"accept"], BATCH_TYPE)


def batch_reply(call: Call, encoded: list[bytes], **following: Any) -> Reply:
    """Events as a batch; the header Link has the query that goes on behind them."""
    kept = {name: text for name, text in call.query_fields().items() if name in ("limit", "bytes_max", "wait", "group")}
    link = f'<?{urlencode({**following, **kept}, safe=":,")}>; rel="next"'.encode()
    return Reply(200, join_batch(encoded), BATCH.encode(), ((b"link", link),))


def event_reply(message: Message, origin: EventOrigin, *, binary: bool) -> Reply:
    """A message as an event, in binary or structured mode."""
    event = message_event(message, origin)
    headers, body = encode_binary(event) if binary else encode_structured(event)
    told = [(name.encode(), text.encode()) for name, text in headers.items() if name != CONTENT_TYPE]
    return Reply(200, body, headers.get(CONTENT_TYPE, "").encode(), (*told, _UNTRUSTED))
