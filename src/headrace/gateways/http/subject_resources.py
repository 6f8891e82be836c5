"""Subjects as resources: publishing live, and receiving live, at most once and without a topic."""

import msgspec

from headrace.gateways.http.call import Call, Reply, decode_json, json_reply, unsupported_type
from headrace.gateways.http.event_stream import wants_events
from headrace.gateways.http.problems import HttpError
from headrace.gateways.http.route import EVENTS, NDJSON, Route, request_route
from headrace.gateways.http.subject_stream import LiveMessage, SubjectStream
from headrace.model.batch import encode
from headrace.model.envelope import MessageEnvelope, StoredFields, envelope_key
from headrace.model.subject_requests import SubjectPublish, SubjectPublished, SwitchboardDescribe

SUBJECTS = "subjects"
_PATH = "/v1/subjects/{subject}/messages"
_BODY_BYTES_MAX = 1 << 20


class LiveQuery(msgspec.Struct, forbid_unknown_fields=True):
    """As whom to subscribe."""

    queue: str = ""
    """Of all subscriptions with the same queue name, one gets each batch; empty: this one gets all."""


_decode_one = msgspec.json.Decoder(MessageEnvelope)
_decode_many = msgspec.json.Decoder(list[MessageEnvelope])


async def publish_live(call: Call) -> Reply:
    """Send messages to those who are subscribed to a subject now."""
    body = await call.read_body()
    if call.media_type() != b"application/json":
        raise unsupported_type(b"application/json")
    if len(body) > _BODY_BYTES_MAX:
        raise HttpError(
            "body_too_large", f"the messages of a request to a subject have {_BODY_BYTES_MAX} bytes at most"
        )
    is_array = body.lstrip()[:1] == b"["
    envelopes = decode_json(body, _decode_many) if is_array else [decode_json(body, _decode_one)]
    if not envelopes:
        raise HttpError("invalid_field", "the body has no message; send at least one")
    fields = StoredFields()
    for envelope in envelopes:
        if envelope.partition is not None:
            raise HttpError("invalid_field", "a message to a subject has no `partition`; leave it out")
        fields.add(envelope, envelope_key(envelope))
    now_us = call.gateway.now_us()
    data = encode(fields.columns(now_us), now_us).data
    return json_reply(await call.ask(SubjectPublish(call.parameters[0]), memoryview(data)))


async def stream_live(call: Call) -> Reply | None:
    """Send what is published to subjects from now on."""
    is_events = wants_events(call.headers.get(b"accept", b""))
    query = call.query(LiveQuery)
    stream = SubjectStream(call, is_events=is_events)
    try:
        stream.subscribe(call.parameters[0], query.queue)
        await stream.run()
    finally:
        stream.close()
    return None


SUBJECT_ROUTES = [
    request_route(SwitchboardDescribe, "GET", "/v1/subjects", tag=SUBJECTS),
    Route(
        "POST", _PATH, publish_live,
        "Send a message, or an array of them, to those who are subscribed to a subject now, and to durable routes",
        SUBJECTS, body=(MessageEnvelope, list[MessageEnvelope]), body_required=True, answer=SubjectPublished,
        errors=("message_too_large", "batch_too_large", "busy"), example={"value": {"id": 1}},
    ),
    Route(
        "GET", _PATH, stream_live,
        "Receive what is published to subjects from now on, at most once; the subject may be a pattern", SUBJECTS,
        query=LiveQuery, answer=LiveMessage, answer_types=(NDJSON, EVENTS), streams=True,
        errors=("limit_exceeded",),
    ),
]  # fmt: skip
"""The routes about subjects."""
