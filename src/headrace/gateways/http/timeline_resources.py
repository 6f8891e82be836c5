"""The timeline as resources: finding and editing messages that are not settled, forecasts, and dead letters."""

import re
from itertools import repeat
from typing import Annotated, Any, Literal

import msgspec

from headrace.gateways.http.call import Call, Reply, json_reply
from headrace.gateways.http.problems import HttpError
from headrace.gateways.http.reading import batches_in
from headrace.gateways.http.route import HeaderField, Route
from headrace.gateways.http.subscription_resources import SUBSCRIPTIONS
from headrace.model.batch import encode
from headrace.model.envelope import (
    EnvelopeContent,
    EnvelopeHeader,
    MessageEnvelope,
    StoredFields,
    TimeOrText,
    TimeText,
    describe_message,
    envelope_headers,
    parse_time_text,
    time_us,
)
from headrace.model.errors import HeadraceError, InvalidArgument, MessageGone, SubscriptionNotFound, error_of
from headrace.model.headers import headers_from_pairs
from headrace.model.leasing import (
    OWNER_HEADER,
    Edit,
    Edited,
    EditMatching,
    EditOutcome,
    Find,
    Forecast,
    Forecasted,
    Found,
    MessageChange,
    MessageId,
    Redrive,
    Redriven,
    Selection,
)
from headrace.model.limits import LEASE_MESSAGES_MAX
from headrace.model.subscription import DEFAULT_SUBSCRIPTION

TIMELINE = "timeline"
_PATH = "/v1/topics/{topic}/subscriptions/{subscription}"
_MESSAGE_PATH = "/v1/topics/{topic}/messages/{id}"
_ID = re.compile(r"([0-9]{1,4}):([0-9]{1,18})")
_VERSION = re.compile(rb'"([0-9]{1,18})"')
_MISSING = ("topic_not_found", "subscription_not_found")

Status = Literal["", "waiting", "ready", "leased", "dead"]
MessageLimit = Annotated[int, msgspec.Meta(ge=1, le=LEASE_MESSAGES_MAX)]
Microseconds = Annotated[int, msgspec.Meta(ge=-(10**17), le=10**17)]


class FindQuery(msgspec.Struct, forbid_unknown_fields=True):
    """Which messages that are not settled."""

    status: Status = ""
    """`waiting`, `ready`, `leased` or `dead`; empty: all but dead."""
    due_from: TimeText | None = None
    """Ready at this time or later."""
    due_to: TimeText | None = None
    """Ready before this time."""
    key: str | None = None
    owner: str = ""
    limit: MessageLimit = 100
    after: str = ""
    """What `next` of the page before said."""


class SelectionFields(msgspec.Struct, forbid_unknown_fields=True):
    """Messages to which all of this applies."""

    status: Status = ""
    """`waiting`, `ready`, `leased` or `dead`; empty: all but dead."""
    due_from: TimeOrText | None = None
    due_to: TimeOrText | None = None
    key: str | None = None
    key_base64: bytes | None = None
    owner: str = ""
    headers: list[EnvelopeHeader] = []
    """Pairs that the message has, among others."""
    messages: list[str] = []
    """Only these, by id: partition and offset, such as `0:17`."""


class ChangeFields(msgspec.Struct, forbid_unknown_fields=True):
    """What becomes of messages."""

    due: TimeOrText | None = None
    """Deliver it then."""
    shift_us: Microseconds = 0
    """Instead: later by so many microseconds, or earlier."""
    priority: Annotated[int, msgspec.Meta(ge=-(1 << 31), le=(1 << 31) - 1)] | None = None
    value: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    """Replaces value and headers."""
    value_base64: bytes | None = None
    headers: list[EnvelopeHeader] = []
    """With a value."""
    owner: str = ""
    """In whose name: a message with an owner is changed in no other."""


class EditFields(msgspec.Struct, forbid_unknown_fields=True):
    """A change of all messages that are selected."""

    change: ChangeFields
    selection: SelectionFields = msgspec.field(default_factory=SelectionFields)
    delete: bool = False
    """Delete them; `change` is then `{}`."""
    messages_max: MessageLimit = 1000
    after: str = ""
    """Where the last such request ended."""


class RedriveFields(msgspec.Struct, forbid_unknown_fields=True):
    """Which dead messages to put back."""

    selection: SelectionFields = msgspec.field(default_factory=SelectionFields)
    messages_max: MessageLimit = 1000
    after: str = ""
    """Where the last such request ended."""


class ForecastQuery(msgspec.Struct, forbid_unknown_fields=True):
    """The buckets of time."""

    start: TimeText
    """When the first begins."""
    bucket_seconds: Annotated[float, msgspec.Meta(ge=0.001, le=1e9)] = 3600.0
    buckets: Annotated[int, msgspec.Meta(ge=1, le=1000)] = 24


class MessageQuery(msgspec.Struct, forbid_unknown_fields=True):
    """As which subscription sees the message."""

    subscription: str = DEFAULT_SUBSCRIPTION


class DeleteQuery(msgspec.Struct, forbid_unknown_fields=True):
    """In whose name."""

    owner: str = ""


class PendingContent(EnvelopeContent, omit_defaults=True):
    """A message as a subscription has it now."""

    status: str = ""
    ready_us: int = 0
    """When it will be ready, or since when it is."""
    deliveries: int = 0
    version: int = 0
    holder: str = ""
    """Who has it leased."""
    until_us: int = 0
    """And until when."""
    reason: str = ""
    """Why it is dead, or was given back."""


class PendingPage(msgspec.Struct):
    """Messages that are not settled."""

    messages: list[PendingContent]
    next: str = ""
    """The cursor of the next page; empty at the end."""


async def find(call: Call) -> Reply:
    """Answer a page of messages that are not settled."""
    query = call.query(FindQuery)
    selection = Selection(
        query.status,
        None if query.due_from is None else parse_time_text(query.due_from),
        None if query.due_to is None else parse_time_text(query.due_to),
        None if query.key is None else query.key.encode(),
        query.owner,
    )  # fmt: skip
    topic, subscription = call.parameters
    found, messages = await _found(call, Find(topic, selection, subscription, query.limit, query.after))
    return json_reply(PendingPage(messages, found.after))


async def describe_pending(call: Call) -> Reply:
    """Answer one message that is not settled; its version is the ETag."""
    topic, place = call.parameters[0], _message_id(call.parameters[1])
    query = call.query(MessageQuery)
    try:
        _, messages = await _found(call, Find(topic, Selection(messages=[place]), query.subscription, 1))
    except SubscriptionNotFound as error:
        text = f"{error}; name another with ?subscription=, as whose message it is described"
        raise SubscriptionNotFound(text, **error.details) from error
    if not messages:
        raise MessageGone(
            f"{query.subscription} of {topic} has no message {call.parameters[1]}: it is settled or gone; name another "
            "subscription with ?subscription="
        )
    return json_reply(messages[0], headers=(_etag(messages[0].version),))


async def _found(call: Call, request: Find) -> tuple[Found, list[PendingContent]]:
    found, body = await call.ask_with_body(request)
    messages: list[PendingContent] = []
    if not found.messages:
        return found, messages
    (batch,) = batches_in(body)
    columns, none = batch.columns(), repeat(None)
    contents = zip(
        found.messages,
        columns.values,
        columns.keys or none,
        columns.headers or none,
        columns.timestamps or repeat(batch.time_max),
        columns.dues or none,
        columns.priorities or none,
        columns.expires or none,
        strict=False,
    )
    for one, value, key, headers, timestamp, due, priority, expires in contents:
        content = PendingContent(one.partition, one.offset, timestamp, status=one.status, ready_us=one.ready_us)
        describe_message(content, value, key, headers)
        content.due, content.priority, content.expires = due, priority, expires
        content.deliveries, content.version = one.deliveries, one.version
        content.holder, content.until_us, content.reason = one.holder, one.until_us, one.reason
        messages.append(content)
    return found, messages


_change_decoder = msgspec.json.Decoder(ChangeFields)
_edit_decoder = msgspec.json.Decoder(EditFields)
_redrive_decoder = msgspec.json.Decoder(RedriveFields)


async def edit(call: Call) -> Reply:
    """Change one message, if it still has the version that If-Match says."""
    topic, place = call.parameters[0], _message_id(call.parameters[1], call.headers)
    given = await call.decoded(_change_decoder)
    change, body = _change(call, given, delete=False)
    edited = await call.ask(Edit(topic, [place], change, given.owner), body)
    outcome = _checked_outcome(edited.outcomes[0])
    return json_reply(outcome, headers=(_etag(outcome.version),))


async def delete(call: Call) -> Reply:
    """Delete one message, if it still has the version that If-Match says."""
    topic, place = call.parameters[0], _message_id(call.parameters[1], call.headers)
    owner = call.query(DeleteQuery).owner
    edited = await call.ask(Edit(topic, [place], MessageChange(delete=True), owner))
    _checked_outcome(edited.outcomes[0])
    return Reply(204)


async def edit_matching(call: Call) -> Reply:
    """Change or delete all messages that are selected, up to a number of them."""
    given = await call.decoded(_edit_decoder)
    topic, subscription = call.parameters
    change, body = _change(call, given.change, delete=given.delete)
    selection, owner = _selection(given.selection), given.change.owner
    request = EditMatching(topic, selection, change, subscription, owner, given.messages_max, given.after)
    return json_reply(await call.ask(request, body))


async def redrive(call: Call) -> Reply:
    """Put dead messages back where they died."""
    given = await call.decoded(_redrive_decoder)
    topic, subscription = call.parameters
    request = Redrive(topic, subscription, _selection(given.selection), given.messages_max, given.after)
    return json_reply(await call.ask(request))


async def forecast(call: Call) -> Reply:
    """Answer how many messages come due when."""
    query = call.query(ForecastQuery)
    topic, subscription = call.parameters
    bucket_us = round(query.bucket_seconds * 1e6)
    return json_reply(
        await call.ask(Forecast(topic, parse_time_text(query.start), bucket_us, query.buckets, subscription))
    )


def _selection(given: SelectionFields) -> Selection:
    key = given.key_base64 if given.key is None else given.key.encode()
    headers = headers_from_pairs(envelope_headers(given.headers)) or {}
    messages = [_message_id(one) for one in given.messages]
    return Selection(given.status, _us(given.due_from), _us(given.due_to), key, given.owner, headers, messages)


def _change(call: Call, given: ChangeFields, *, delete: bool) -> tuple[MessageChange, memoryview]:
    """The change, and the batch with the new value."""
    replace = given.value is not msgspec.UNSET or given.value_base64 is not None
    if given.headers and not replace:
        raise InvalidArgument('give "value" as well: an edit replaces value and headers together')
    change = MessageChange(_us(given.due), given.shift_us, given.priority, replace, delete)
    if not replace:
        return change, memoryview(bytearray())
    fields = StoredFields()
    headers: list[EnvelopeHeader] = list(given.headers)
    if given.owner and all(name != OWNER_HEADER for name, _ in headers):
        headers.append((OWNER_HEADER, given.owner))
    fields.add(MessageEnvelope(value=given.value, value_base64=given.value_base64, headers=headers), None)
    now_us = call.gateway.now_us()
    return change, memoryview(encode(fields.columns(now_us), now_us).data)


def _message_id(text: str, headers: dict[bytes, bytes] | None = None) -> MessageId:
    """A message by partition and offset, in the version that If-Match says."""
    found = _ID.fullmatch(text)
    if found is None:
        raise HttpError("invalid_field", "a message's id is its partition and its offset, such as 0:17")
    given = None if headers is None else headers.get(b"if-match")
    version = None
    if given is not None:
        matched = _VERSION.fullmatch(given)
        if matched is None:
            raise HttpError("invalid_field", 'If-Match is the version of the message, such as "1"')
        version = int(matched[1])
    return MessageId(int(found[1]), int(found[2]), version)


def _checked_outcome(outcome: EditOutcome) -> EditOutcome:
    """The outcome of an edit, if it was done."""
    if outcome.outcome == "applied":
        return outcome
    error: HeadraceError = error_of(outcome.outcome, "", False)
    text = " ".join((type(error).__doc__ or outcome.outcome).split())
    details: dict[str, Any] = {"version": outcome.version, "holder": outcome.holder}
    raise type(error)(text, **details)


def _etag(version: int) -> tuple[bytes, bytes]:
    return b"etag", b'"%d"' % version


def _us(given: TimeOrText | None) -> int | None:
    return None if given is None else time_us(given)


IF_MATCH_VERSION = HeaderField(
    "If-Match",
    "Change it only in this version, in quotation marks, as the ETag has it",
    r'^"[0-9]{1,18}"$',
    example='"1"',
)
_EDIT_ERRORS = ("topic_not_found", "stale_version", "message_leased", "message_gone", "not_owner")

TIMELINE_ROUTES = [
    Route(
        "GET", f"{_PATH}/messages", find, "Find messages that are not settled", TIMELINE,
        query=FindQuery, answer=PendingPage, errors=_MISSING,
    ),
    Route(
        "GET", _MESSAGE_PATH, describe_pending, "Describe a message that is not settled", TIMELINE,
        query=MessageQuery, answer=PendingContent, errors=("topic_not_found", "message_gone"),
        answer_headers=("ETag",),
    ),
    Route(
        "PATCH", _MESSAGE_PATH, edit, "Move or change a message that is not settled", TIMELINE,
        body=ChangeFields, body_required=True, answer=EditOutcome, errors=_EDIT_ERRORS, headers=(IF_MATCH_VERSION,),
        answer_headers=("ETag",), example={"due": "2030-01-01T09:00:00Z"},
    ),
    Route(
        "DELETE", _MESSAGE_PATH, delete, "Delete a message that is not settled", TIMELINE, 204,
        query=DeleteQuery, errors=_EDIT_ERRORS, headers=(IF_MATCH_VERSION,),
    ),
    Route(
        "POST", f"{_PATH}/edits", edit_matching, "Move, change or delete all messages that are selected", TIMELINE,
        body=EditFields, body_required=True, answer=Edited, errors=_MISSING,
        example={"selection": {"key": "ann"}, "change": {"shift_us": 3_600_000_000}},
    ),
    Route(
        "GET", f"{_PATH}/forecast", forecast, "Count the messages that come due in buckets of time", TIMELINE,
        query=ForecastQuery, answer=Forecasted, errors=_MISSING,
    ),
    Route(
        "POST", f"{_PATH}/redrives", redrive, "Put dead messages back where they died", SUBSCRIPTIONS,
        body=RedriveFields, answer=Redriven, errors=_MISSING, example={"messages_max": 100},
    ),
]  # fmt: skip
"""The routes of the timeline."""
