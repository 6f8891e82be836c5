"""Events about the bus itself: one schema, on the subjects `$events.KIND.ACTION` and in the topic `headrace.events`."""

from typing import Any

import msgspec

from headrace.model.errors import InvalidArgument
from headrace.model.kinds import Kind
from headrace.model.request import Permission, Request, Resource, Verb, declare
from headrace.model.requests import Done

EVENTS_SUBJECT = "$events"
"""The first token of the subjects of events: `$events.topic.created`."""


EVENT_KINDS = (
    "dead_letter",
    "event",
    "group",
    "log_level",
    "member",
    "policy",
    "route",
    "schedule",
    "service",
    "subscription",
    "topic",
    "webhook",
)
"""What events are about."""


class BusEvent(msgspec.Struct, frozen=True, kw_only=True):
    """A change of the bus's own structures, as JSON in the topic and on the subject."""

    id: str
    """Unique among all events of the broker."""
    time_us: int
    """When it happened, in microseconds since 1970."""
    kind: str
    """What changed: one of EVENT_KINDS, such as `topic` or `service`."""
    action: str
    """What became of it: `created`, `altered`, `deleted`, `joined`, `left`, `expired`, ..."""
    name: str
    """The name of what changed, as sessions of its tenant say it."""
    details: dict[str, Any] = {}
    """More about the change, by kind: a topic's settings, a member's client, a dead letter's reason."""
    by: str = ""
    """The client that asked for it; empty if the broker did it by itself."""

    @property
    def subject(self) -> str:
        """The subject on which the event is published."""
        return f"{EVENTS_SUBJECT}.{self.kind}.{self.action}"


_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(BusEvent)


def encode_event(event: BusEvent) -> bytes:
    """Encode an event as JSON."""
    return _encoder.encode(event)


def decode_event(content: bytes) -> BusEvent:
    """Decode the value of a message of the topic `headrace.events`.

    >>> event = BusEvent(id="1-1", time_us=0, kind="topic", action="created", name="orders")
    >>> decode_event(encode_event(event)).subject
    '$events.topic.created'
    """
    try:
        return _decoder.decode(content)
    except msgspec.MsgspecError as error:
        raise InvalidArgument(f"the message is no event of the bus: {error}") from error


@declare(Kind.EVENTS_RECORD, Permission(Verb.DESCRIBE, Resource.BROKER))
class EventsRecord(Request[Done]):
    """Record the tenant's events in its topic `headrace.events` from now on, beginning with those still in memory.

    The answer comes when these can be read. Without effect where events are recorded already.
    """
