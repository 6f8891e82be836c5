"""CloudEvents in requests: bodies in binary, structured and batch mode as envelopes of messages."""

import asyncio
from typing import Annotated, Any

import msgspec

from headrace.gateways.http.call import unsupported_type
from headrace.gateways.http.problems import HttpError
from headrace.model.cloudevents_http import (
    BATCH_TYPE,
    EVENT_TYPES,
    STRUCTURED_TYPE,
    EventMessage,
    event_mode,
    parse_binary,
    parse_event,
    split_batch,
)
from headrace.model.envelope import MessageEnvelope
from headrace.model.errors import BatchTooLarge, InvalidEvent
from headrace.model.limits import BATCH_COUNT_MAX

_EVENT_TYPES = EVENT_TYPES.encode()
_PREFIX = b"ce-"
_SPECVERSION = b"ce-specversion"
_SLICE_EVENTS = 256
_NULL = msgspec.Raw(b"null")
_NotEmpty = Annotated[str, msgspec.Meta(min_length=1)]


class EventFields(msgspec.Struct, omit_defaults=True):
    """A CloudEvent as JSON. Other members are extension attributes: text, 32-bit integers, true or false."""

    specversion: Annotated[str, msgspec.Meta(pattern=r"^1\.0$")]
    id: _NotEmpty
    """Unique among the events of its source."""
    source: _NotEmpty
    """A URI reference of what the event comes from."""
    type: _NotEmpty
    datacontenttype: str | None = None
    """What the data is; JSON by default. Stored as the header `content-type`."""
    dataschema: _NotEmpty | None = None
    subject: _NotEmpty | None = None
    time: str | None = None
    """RFC 3339; also the timestamp of the message."""
    partitionkey: _NotEmpty | None = None
    """Also the key of the message."""
    data: Any = None
    """JSON, or a text if `datacontenttype` is not JSON: the value of the message."""
    data_base64: bytes | None = None
    """Instead of `data`: any bytes."""


def has_events(headers: dict[bytes, bytes], media_type: bytes) -> bool:
    """Whether a request has CloudEvents, by its headers.

    Each of these headers makes a browser ask before it sends the request, so no page can publish with a simple one.
    """
    return _SPECVERSION in headers or media_type.startswith(_EVENT_TYPES)


async def event_envelopes(
    headers: dict[bytes, bytes], body: bytes, batch_bytes_max: int
) -> tuple[list[MessageEnvelope], bool]:
    """The events of a request as messages, and whether they are a batch, which is decoded in slices."""
    told = {
        name.decode("latin-1"): value.decode("latin-1")
        for name, value in headers.items()
        if name.startswith(_PREFIX) or name == b"content-type"
    }
    try:
        mode = event_mode(told)
    except InvalidEvent as error:
        raise unsupported_type(STRUCTURED_TYPE.encode(), BATCH_TYPE.encode()) from error
    if mode != "batch":
        return [_envelope(parse_binary(told, body) if mode == "binary" else parse_event(body))], False
    if len(body) > batch_bytes_max:
        raise HttpError("body_too_large", f"a batch of events has at most {batch_bytes_max} bytes; send several")
    events = split_batch(body)
    if len(events) > BATCH_COUNT_MAX:
        raise BatchTooLarge(f"a request has at most {BATCH_COUNT_MAX} messages; send the others with another one")
    envelopes = []
    for index, event in enumerate(events):
        try:
            envelopes.append(_envelope(parse_event(event)))
        except InvalidEvent as error:
            raise InvalidEvent(f"event {index} of the batch: {error}", index=index, **error.details) from error
        if not (index + 1) % _SLICE_EVENTS:
            await asyncio.sleep(0)
    return envelopes, True


def event_header_lines(headers: dict[bytes, bytes]) -> list[bytes]:
    """The headers that belong to an event in binary mode, in a fixed order; none of other requests."""
    if _SPECVERSION not in headers:
        return []
    return sorted(
        b"%s:%s" % (name, value)
        for name, value in headers.items()
        if name.startswith(_PREFIX) or name == b"content-type"
    )


def _envelope(event: EventMessage) -> MessageEnvelope:
    value = event.value
    return MessageEnvelope(
        value=_NULL if value is None else msgspec.UNSET,
        value_base64=value,
        key=None if event.key is None else event.key.decode(),
        headers=[(name, (content or b"").decode()) for name, content in event.headers.items()],
        timestamp=event.timestamp,
    )
