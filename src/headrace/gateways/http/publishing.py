"""Publishing: one message, many, or lines of them, with receipts; repeated requests are recognised by their key."""

import asyncio
import copy
import re
from hashlib import blake2b
from itertools import count
from typing import Any, Literal, NamedTuple

import msgspec

from headrace.broker.pending_answer import PendingAnswer
from headrace.gateways.http.call import Call, Reply, count_partitions, decode_json, json_reply, unsupported_type
from headrace.gateways.http.event_bodies import (
    EventFields,
    event_envelopes,
    event_header_lines,
    has_events,
)
from headrace.gateways.http.problems import HttpError
from headrace.gateways.http.route import JSON, NDJSON, HeaderField, Route
from headrace.model.batch import Batch, encode
from headrace.model.cloudevents_http import BATCH_TYPE, STRUCTURED_TYPE
from headrace.model.durability import Durability
from headrace.model.envelope import MessageEnvelope, PartitionNumber, StoredFields, envelope_key
from headrace.model.errors import BatchTooLarge, HeadraceError, TopicNotFound, UnexpectedOffset
from headrace.model.idempotency import HASH_BYTES, OFFSET_UNKNOWN, PartitionBatch, PublishedOnce, PublishOnce
from headrace.model.limits import BATCH_COUNT_MAX, IDEMPOTENCY_KEY_CHARS_MAX
from headrace.model.partitioning import by_key
from headrace.model.requests import Publish, Published, TopicDescribe

MESSAGES = "messages"
DurabilityName = Literal["memory", "written", "synced", "replicated"]
_DURABILITIES = {one.name.lower(): int(one) for one in Durability}
_NAMES: list[Any] = [one.name.lower() for one in Durability]
_NDJSON_TYPES = (NDJSON.encode(), b"application/ndjson", b"application/jsonl")
_ARRAY_BYTES_MAX = 1 << 20
"""An array is decoded in one go; what is larger comes as lines, which are decoded in slices."""
_SLICE_BYTES = 128 << 10
_SLICE_LINES = 1024
_BATCH_COUNT = 4096
_BATCH_BYTES = 1 << 20
_IF_MATCH = re.compile(rb'"([0-9]{1,18})"')
_IDEMPOTENCY_KEY = re.compile(rb"[\x21-\x7e]+")


class PublishQuery(msgspec.Struct, forbid_unknown_fields=True):
    """How to publish."""

    durability: DurabilityName = "memory"
    """What to wait for, at least the topic's own."""
    partition: PartitionNumber | None = None
    """For messages that name none; by default by key, or any."""


class MessageReceipt(msgspec.Struct, omit_defaults=True):
    """Where messages are: from this offset on, without a gap."""

    partition: int
    offset: int | None
    """null: the messages were published before, and are gone, or all of them became dead letters."""
    count: int
    durability: DurabilityName
    """What they have reached."""


class MessageReceipts(msgspec.Struct):
    """Where the messages of a request are. Those of one partition are in the order of the request."""

    count: int
    receipts: list[MessageReceipt]


class RequestBatch(NamedTuple):
    """Messages of a request that go to one partition together."""

    partition: int
    batch: Batch
    indexes: list[int]
    """Where the messages stand in the request, from 0 on."""


_NO_QUERY = PublishQuery()
_turns = count()
"""Messages without a key go to each partition in turn."""
_decode_one = msgspec.json.Decoder(MessageEnvelope)
_decode_many = msgspec.json.Decoder(list[MessageEnvelope])
_decode_slice = msgspec.json.Decoder(MessageEnvelope)


async def publish(call: Call) -> Reply:
    """Publish the messages of the body."""
    query = call.query(PublishQuery) if call.query_string else _NO_QUERY
    body = await call.read_body()
    kind = call.media_type()
    if has_events(call.headers, kind):
        return await _publish_events(call, query, body)
    if kind == b"application/json":
        if body.lstrip()[:1] != b"[":
            return await _publish_one(call, query, decode_json(body, _decode_one), body)
        if len(body) > _ARRAY_BYTES_MAX:
            raise HttpError(
                "body_too_large", f"an array has at most {_ARRAY_BYTES_MAX} bytes; send more as {NDJSON}, one by line"
            )
        envelopes = decode_json(body, _decode_many)
    elif kind in _NDJSON_TYPES:
        envelopes = await _decoded_lines(body)
    else:
        raise unsupported_type(b"application/json", NDJSON.encode(), STRUCTURED_TYPE.encode(), BATCH_TYPE.encode())
    if not envelopes:
        raise HttpError("invalid_field", "the body has no message; send at least one")
    if len(envelopes) > BATCH_COUNT_MAX:
        raise BatchTooLarge(f"a request has at most {BATCH_COUNT_MAX} messages; send the others with another one")
    return await _publish_many(call, query, envelopes, body)


async def _publish_events(call: Call, query: PublishQuery, body: bytes) -> Reply:
    """Publish one CloudEvent, or a batch of them."""
    envelopes, is_batch = await event_envelopes(call.headers, body, _ARRAY_BYTES_MAX)
    if not is_batch:
        return await _publish_one(call, query, envelopes[0], body)
    if not envelopes:  # as the binding allows
        count_partitions(call, call.parameters[0])
        return json_reply(MessageReceipts(0, []), 201)
    return await _publish_many(call, query, envelopes, body)


async def _publish_one(call: Call, query: PublishQuery, envelope: MessageEnvelope, body: bytes) -> Reply:
    headers = call.headers
    if b"idempotency-key" in headers:
        return await publish_once(call, query, [envelope], body, single=True)
    (topic,), gateway = call.parameters, call.gateway
    key = envelope_key(envelope)
    fields = StoredFields()
    fields.add(envelope, key)
    now_us = gateway.now_us()
    data = encode(fields.columns(now_us), now_us).data
    wanted = envelope.partition if envelope.partition is not None else query.partition
    request = Publish(topic, 0, _DURABILITIES[query.durability], _expected_offset(headers))
    if request.expected_offset is not None and wanted is None:
        await check_one_partition(call, request.expected_offset)
    if wanted is not None:
        request.partition = wanted
    elif (partitions := count_partitions(call, topic)) > 1:
        request.partition = by_key(key, partitions) if key else next(_turns) % partitions
    outcome: Any = gateway.broker.ask(call.session, request, memoryview(data), now_us)
    published = await call.connection.answered(outcome) if isinstance(outcome, PendingAnswer) else outcome
    return json_reply(_receipt(request.partition, published, 1), 201 if published.durability else 202)


async def _publish_many(call: Call, query: PublishQuery, envelopes: list[MessageEnvelope], body: bytes) -> Reply:
    if b"idempotency-key" in call.headers:
        return await publish_once(call, query, envelopes, body, single=False)
    expected = _expected_offset(call.headers)
    if expected is not None:
        is_named = query.partition is not None or all(one.partition is not None for one in envelopes)
        await check_one_partition(call, expected, is_named=is_named)
    sent = await send_batches(call, query, envelopes, expected)
    receipts, reached = await wait_for_receipts(call, sent, len(envelopes))
    return json_reply(MessageReceipts(len(envelopes), receipts), 201 if reached else 202)


async def send_batches(
    call: Call, query: PublishQuery, envelopes: list[MessageEnvelope], expected: int | None
) -> list[tuple[RequestBatch, Any]]:
    """Publish messages, and return each batch with its outcome, which may be pending or an error."""
    (topic,), gateway = call.parameters, call.gateway
    batches = await _encoded_batches(call, query, envelopes)
    if expected is not None and len(batches) > 1:
        raise HttpError(
            "invalid_field", "messages with If-Match must fit into one batch of one partition; name the partition"
        )
    sent: list[tuple[RequestBatch, Any]] = []
    for one in batches:
        partition, batch, _ = one
        request = Publish(topic, partition, _DURABILITIES[query.durability], expected)
        try:
            outcome: Any = gateway.broker.ask(call.session, request, memoryview(batch.data), gateway.now_us())
        except HeadraceError as error:
            outcome = error
        sent.append((one, outcome))
        if isinstance(outcome, HeadraceError):
            break  # the fewer are stored of a request that fails
        if len(batches) > 1:
            await asyncio.sleep(0)
    return sent


async def wait_for_receipts(
    call: Call, sent: list[tuple[RequestBatch, Any]], count: int
) -> tuple[list[MessageReceipt], Durability]:
    """Wait until all batches are published; returns their receipts, and the least durability that they have reached."""
    receipts, failure, reached = [], None, Durability.REPLICATED
    for (partition, batch, indexes), outcome in sent:
        try:
            if isinstance(outcome, HeadraceError):
                raise outcome
            published = await call.connection.answered(outcome) if isinstance(outcome, PendingAnswer) else outcome
            receipts.append(_receipt(partition, published, batch.count))
            reached = min(reached, published.durability)
        except HeadraceError as error:
            failure = failure or _with_request_indexes(error, indexes)
    if failure is not None:
        raise _partly(failure, receipts, count)
    return receipts, reached


async def publish_once(
    call: Call, query: PublishQuery, envelopes: list[MessageEnvelope], body: bytes, *, single: bool
) -> Reply:
    """Publish all messages, or answer what was answered to the first request with this key."""
    if b"if-match" in call.headers:
        raise HttpError("invalid_field", "give Idempotency-Key or If-Match, not both")
    key = call.headers[b"idempotency-key"]
    if len(key) > IDEMPOTENCY_KEY_CHARS_MAX or not _IDEMPOTENCY_KEY.fullmatch(key):
        raise HttpError(
            "invalid_field",
            f"an Idempotency-Key has 1 to {IDEMPOTENCY_KEY_CHARS_MAX} visible characters of ASCII, such as a UUID",
        )
    asked = blake2b(body, digest_size=HASH_BYTES)
    asked.update(b"\0".join([b"", call.query_string, call.media_type(), *event_header_lines(call.headers)]))
    batches = await _encoded_batches(call, query, envelopes)
    request = PublishOnce(
        call.parameters[0],
        blake2b(key, digest_size=HASH_BYTES).digest(),
        asked.digest(),
        [PartitionBatch(partition, batch.length) for partition, batch, _ in batches],
    )
    data = bytearray().join(batch.data for _, batch, _ in batches)
    try:
        published: PublishedOnce = await call.ask(request, memoryview(data))
    except HeadraceError as error:
        raise _with_request_indexes(error, batches[0].indexes) from error  # of several, none has middleware
    reached = _NAMES[published.durability]
    receipts = [
        MessageReceipt(one.partition, None if one.offset == OFFSET_UNKNOWN else one.offset, one.count, reached)
        for one in published.receipts
    ]
    headers = ((b"idempotency-replayed", b"true"),) if published.repeated else ()
    if not receipts:  # middleware has refused all messages as dead letters
        receipts = [MessageReceipt(batches[0].partition, None, 0, reached)]
    answer: Any = receipts[0] if single else MessageReceipts(len(envelopes), receipts)
    return json_reply(answer, 201 if published.durability else 202, headers)


async def _encoded_batches(call: Call, query: PublishQuery, envelopes: list[MessageEnvelope]) -> list[RequestBatch]:
    """The messages as batches, each for a partition, in slices."""
    gateway = call.gateway
    partitions = count_partitions(call, call.parameters[0])
    unkeyed = next(_turns) % partitions
    gathered: dict[int, StoredFields] = {}
    indexes: dict[int, list[int]] = {}
    batches: list[RequestBatch] = []

    def encode_gathered(partition: int) -> None:
        now_us = gateway.now_us()
        batch = encode(gathered.pop(partition).columns(now_us), now_us)
        batches.append(RequestBatch(partition, batch, indexes.pop(partition)))

    for number, envelope in enumerate(envelopes, 1):
        key = envelope_key(envelope)
        partition = envelope.partition if envelope.partition is not None else query.partition
        if partition is None:
            partition = by_key(key, partitions) if key else unkeyed
        fields = gathered.get(partition)
        if fields is None:
            fields = gathered[partition] = StoredFields()
            indexes[partition] = []
        fields.add(envelope, key)
        indexes[partition].append(number - 1)
        if len(fields.values) >= _BATCH_COUNT or fields.bytes >= _BATCH_BYTES:
            encode_gathered(partition)
        if not number % _BATCH_COUNT:
            await asyncio.sleep(0)
    for partition in list(gathered):
        encode_gathered(partition)
    return batches


async def _decoded_lines(body: bytes) -> list[MessageEnvelope]:
    """The messages of a body with one on each line, decoded in slices."""
    if not body.isascii():
        try:
            body.decode()
        except UnicodeDecodeError as error:
            raise HttpError("invalid_json", f"the body is no UTF-8: {error}") from error
    found: list[MessageEnvelope] = []
    start = 0
    while start < len(body):
        end = body.find(b"\n", min(start + _SLICE_BYTES, len(body))) + 1 or len(body)
        try:
            found += _decode_slice.decode_lines(body[start:end])
        except (msgspec.DecodeError, RecursionError) as error:
            raise await _line_error(body, start, end) from error
        if len(found) > BATCH_COUNT_MAX:
            break  # too many, which the caller says
        start = end
        await asyncio.sleep(0)
    return found


async def _line_error(body: bytes, start: int, end: int) -> HttpError:
    """The error about the first line that is wrong, of those that could not be decoded together."""
    first = body.count(b"\n", 0, start) + 1
    for number, line in enumerate(body[start:end].split(b"\n"), first):
        try:
            if line.strip():
                decode_json(line, _decode_one)
        except HttpError as error:
            return HttpError(error.code, f"line {number}: {error}")
        if not number % _SLICE_LINES:
            await asyncio.sleep(0)
    return HttpError("invalid_json", f"the lines from {first} on are not one message each")


def _expected_offset(headers: dict[bytes, bytes]) -> int | None:
    given = headers.get(b"if-match")
    if given is None:
        return None
    found = _IF_MATCH.fullmatch(given)
    if found is None:
        raise HttpError("invalid_field", 'If-Match is the offset that the message must get, such as "17"')
    return int(found[1])


def _receipt(partition: int, published: Published, count: int) -> MessageReceipt:
    stored = count if published.stored is None else published.stored
    return MessageReceipt(partition, published.base_offset, stored, _NAMES[published.durability])


async def check_one_partition(call: Call, expected: int, *, is_named: bool = False) -> None:
    """Refuse If-Match without a partition where there are several: each has offsets of its own."""
    (topic,) = call.parameters
    try:
        partitions = len((await call.ask(TopicDescribe(topic))).partitions)
    except TopicNotFound as error:
        if not expected:
            return  # it is about to be made
        text = f"there is no topic {topic} yet, whose first message has offset 0, not {expected}; nothing was published"
        raise UnexpectedOffset(text, next_offset=0) from error
    if partitions > 1 and not is_named:
        raise HttpError(
            "invalid_field", f"If-Match needs a `partition`: {topic} has {partitions}, each with offsets of its own"
        )


def _with_request_indexes(error: HeadraceError, indexes: list[int]) -> HeadraceError:
    """The error about messages of a batch, as one about those of the request."""
    refused = error.details.get("indexes")
    if not refused or not all(0 <= index < len(indexes) for index in refused):
        return error
    told = copy.copy(error)
    told.details = {**error.details, "indexes": [indexes[index] for index in refused]}
    there, here = f"message {refused[0]} of the batch", f"message {indexes[refused[0]]} of the request"
    told.args = (str(error).replace(there, here, 1), *error.args[1:])
    return told


def _partly(error: HeadraceError, receipts: list[MessageReceipt], count: int) -> HeadraceError:
    """The error, with the receipts of what was published all the same."""
    if not receipts:
        return error
    told = copy.copy(error)
    told.details = {**error.details, "receipts": msgspec.to_builtins(receipts)}
    stored = sum(one.count for one in receipts)
    cause = re.sub("; nothing was (stored|appended|done)", "", str(error))
    text = (
        f"{stored} of {count} messages were stored, as `receipts` of the details tell, and the others were not: {cause}"
    )
    told.args = (text, *error.args[1:])
    return told


IF_MATCH_OFFSET = HeaderField(
    "If-Match", "Publish only if the message gets this offset, in quotation marks", r'^"[0-9]{1,18}"$', example='"0"'
)
IDEMPOTENCY_KEY = HeaderField(
    "Idempotency-Key",
    "A key of this request, such as a UUID: repeated within 24 hours, it has no second effect",
    r"^[!-~]+$",
    IDEMPOTENCY_KEY_CHARS_MAX,
)

PUBLISH_ROUTES = [
    Route(
        "POST",
        "/v1/topics/{topic}/messages",
        publish,
        "Publish a message, an array of messages, one by line, or CloudEvents in any mode",
        MESSAGES,
        201,
        other_statuses=(202,),
        query=PublishQuery,
        body=(MessageEnvelope, list[MessageEnvelope]),
        body_types=(JSON, NDJSON),
        other_bodies=((STRUCTURED_TYPE, EventFields), (BATCH_TYPE, list[EventFields])),
        body_required=True,
        answer=(MessageReceipt, MessageReceipts),
        errors=(
            "partition_not_found",
            "message_too_large",
            "invalid_event",
            "unexpected_offset",
            "idempotency_key_reused",
            "idempotency_table_full",
            "subscription_full",
        ),
        headers=(IDEMPOTENCY_KEY, IF_MATCH_OFFSET),
        takes_events=True,
        example={"key": "ann", "value": {"id": 1}, "headers": [["lang", "en"]]},
    ),
]
"""The routes that publish."""
