"""Jobs whose results are awaited: published with an id, finished with a result, and looked up by the id."""

import asyncio
import random
import secrets
from typing import Annotated, Any, Literal

import msgspec

from headrace.broker.streams import WaitingFetch
from headrace.gateways.http.call import Call, Reply, count_partitions, json_reply
from headrace.gateways.http.problems import HttpError
from headrace.gateways.http.publishing import MESSAGES
from headrace.gateways.http.reading import batches_in, waited_fetch
from headrace.gateways.http.route import Route
from headrace.gateways.http.subscription_resources import LEASES, LeasedPlace
from headrace.model.batch import Columns, encode
from headrace.model.durability import Durability
from headrace.model.envelope import MessageEnvelope, StoredFields, envelope_key
from headrace.model.error_object import ErrorObject, check_error_object
from headrace.model.errors import MessageGone, MessageTooLarge, OffsetOutOfRange
from headrace.model.headers import header_text
from headrace.model.job_requests import (
    BYTES_RESULT,
    ERROR_RESULT,
    JSON_RESULT,
    REPLY_HEADER,
    RESULT_HEADER,
    RESULT_KINDS,
    RESULTS_TOPIC,
    TEXT_RESULT,
    JobFinish,
    JobId,
    ResultsOpen,
    job_id,
    parse_job_id,
)
from headrace.model.leasing import Holding, Settlement
from headrace.model.limits import RESULT_BYTES_MAX
from headrace.model.partitioning import by_key
from headrace.model.reading import Fetch
from headrace.model.requests import Offsets, Publish

_PORTION_BYTES = 256 << 10
DurabilityName = Literal["memory", "written", "synced", "replicated"]


class JobPublished(msgspec.Struct):
    """A job that was published."""

    job: str
    """Its id: GET /v1/results/{job} has the result when there is one."""
    partition: int
    offset: int
    durability: DurabilityName
    """What it has reached."""


class ResultQuery(msgspec.Struct, forbid_unknown_fields=True):
    """How long to wait."""

    wait: Annotated[float, msgspec.Meta(ge=0, le=60)] = 0.0
    """Seconds to wait for the result when there is none."""


class JobResult(msgspec.Struct, omit_defaults=True):
    """What became of a job."""

    job: str
    status: Literal["pending", "done", "failed"]
    value: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    """What the job returned: JSON, or a text."""
    value_base64: bytes | None = None
    """Instead of `value`: bytes."""
    error: ErrorObject | None = None
    """Why the job failed for good."""


class ResultFields(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The result of a job: exactly one of `value`, `value_base64` and `error`."""

    message: LeasedPlace
    """The job, as it was leased."""
    job: str
    """Its id, which is its header `headrace-reply`."""
    value: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    """Any JSON."""
    value_base64: bytes | None = None
    """Instead of `value`: any bytes."""
    error: ErrorObject | None = None
    """Instead of a value: why the job failed for good."""


_job_decoder = msgspec.json.Decoder(MessageEnvelope)
_result_decoder = msgspec.json.Decoder(ResultFields)
_error_decoder = msgspec.json.Decoder(ErrorObject)
_decode_text = msgspec.json.Decoder(str).decode


async def publish_job(call: Call) -> Reply:
    """Publish a job whose result can be asked for."""
    envelope = await call.decoded(_job_decoder)
    (topic,) = call.parameters
    key = envelope_key(envelope)
    ends = (await call.ask(ResultsOpen())).ends
    partition = random.randrange(len(ends))
    job = job_id(partition, ends[partition], secrets.token_urlsafe(16)).text
    envelope.headers = [*(one for one in envelope.headers if one[0] != REPLY_HEADER), (REPLY_HEADER, job)]
    fields = StoredFields()
    fields.add(envelope, key)
    now_us = call.gateway.now_us()
    data = encode(fields.columns(now_us), now_us).data
    wanted = envelope.partition
    if wanted is None:
        partitions = count_partitions(call, topic)
        wanted = by_key(key, partitions) if key else random.randrange(partitions)
    published = await call.ask(Publish(topic, wanted), memoryview(data))
    reached: Any = Durability(published.durability).name.lower()
    location = (b"location", b"/v1/results/%s" % job.encode())
    return json_reply(JobPublished(job, wanted, published.base_offset, reached), 201, (location,))


async def finish_job(call: Call) -> Reply:
    """Acknowledge a job, and store its result; both or neither."""
    given = await call.decoded(_result_decoder)
    topic, subscription = call.parameters
    kind, value = _stored_result(given)
    if len(value) > RESULT_BYTES_MAX:
        raise MessageTooLarge.of(len(value), RESULT_BYTES_MAX)
    job = parse_job_id(given.job).text.encode()
    columns = Columns([value], keys=[job], headers=[{RESULT_HEADER: kind.encode()}])
    data = encode(columns, call.gateway.now_us()).data
    place = given.message
    holding = Holding(place.partition, place.lease, [place.offset])
    return json_reply(await call.ask(JobFinish(topic, holding, subscription), memoryview(data)))


def _stored_result(given: ResultFields) -> tuple[str, bytes]:
    """What kind of result it is, and its bytes."""
    parts = [given.value is not msgspec.UNSET, given.value_base64 is not None, given.error is not None]
    if sum(parts) != 1:
        raise HttpError("invalid_field", "a result has exactly one of `value`, `value_base64` and `error`")
    if given.error is not None:
        check_error_object(given.error)
        return ERROR_RESULT, msgspec.json.encode(given.error)
    if given.value_base64 is not None:
        return BYTES_RESULT, given.value_base64
    assert given.value is not msgspec.UNSET
    text = bytes(given.value)
    return (TEXT_RESULT, _decode_text(text).encode()) if text.startswith(b'"') else (JSON_RESULT, text)


async def read_result(call: Call) -> Reply:
    """Answer the result of a job, or that there is none yet."""
    query = call.query(ResultQuery)
    job = parse_job_id(call.parameters[0])
    gateway = call.gateway
    ends_s = gateway.loop.time() + min(query.wait, gateway.settings.http_wait_seconds_max)
    offset, is_lost = job.offset, False
    while True:
        left_ms = max(round((ends_s - gateway.loop.time()) * 1000), 0)
        try:
            outcome = await call.ask_whole(Fetch(RESULTS_TOPIC, job.partition, offset, _PORTION_BYTES, left_ms))
        except OffsetOutOfRange:
            first = (await call.ask(Offsets(RESULTS_TOPIC, [job.partition], "earliest"))).offsets[job.partition]
            if first <= offset:
                raise MessageGone(f"{job.text} is the id of a job that was published to another broker") from None
            offset, is_lost = first, True
            continue
        if isinstance(outcome, WaitingFetch):
            outcome = await waited_fetch(call, outcome)
        found = _find_result(outcome.body, job)
        if found is not None:
            return json_reply(found)
        next_offset = max(outcome.answer.next_offset, offset)
        if next_offset >= outcome.answer.end_offset:
            if is_lost:
                raise MessageGone(f"results of the time of {job.text} were removed, and it is not among the others")
            if not left_ms or gateway.draining or call.connection.is_lost:
                return json_reply(JobResult(job.text, "pending"))
        offset = next_offset
        await asyncio.sleep(0)


def _find_result(body: Any, job: JobId) -> JobResult | None:
    """The first result of a job in what was read."""
    key = job.text.encode()
    for batch in batches_in(body):
        for message in batch.messages():
            if message.key != key or message.value is None:
                continue
            kind = header_text(message.headers or {}, RESULT_HEADER).decode("utf-8", "replace")
            if kind in RESULT_KINDS:  # anybody can publish there
                return _shown_result(job.text, kind, message.value)
    return None


def _shown_result(job: str, kind: str, value: bytes) -> JobResult:
    try:
        if kind == ERROR_RESULT:
            return JobResult(job, "failed", error=_error_decoder.decode(value))
        if kind == JSON_RESULT:
            msgspec.json.decode(value)
            return JobResult(job, "done", msgspec.Raw(value))
        if kind == TEXT_RESULT:
            return JobResult(job, "done", msgspec.Raw(msgspec.json.encode(value.decode())))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        pass  # it is not what it says it is: it is shown as the bytes that it is
    return JobResult(job, "done", value_base64=value)


_JOB = "3-1042-l6bdQ2pV0hXo_f5A"

JOB_ROUTES = [
    Route(
        "POST", "/v1/topics/{topic}/jobs", publish_job, "Publish a job whose result can be asked for", MESSAGES, 201,
        body=MessageEnvelope, body_required=True, answer=JobPublished, answer_headers=("Location",),
        errors=("partition_not_found", "message_too_large", "subscription_full"),
        example={"value": {"resize": "cat.jpg"}},
    ),
    Route(
        "GET", "/v1/results/{job}", read_result, "Read the result of a job; waits for it if asked to", MESSAGES,
        query=ResultQuery, answer=JobResult, errors=("topic_not_found", "partition_not_found", "message_gone"),
    ),
    Route(
        "POST", "/v1/topics/{topic}/subscriptions/{subscription}/results", finish_job,
        "Acknowledge a job and store its result; both or neither", LEASES,
        body=ResultFields, body_required=True, answer=Settlement,
        errors=("topic_not_found", "subscription_not_found", "message_too_large"),
        example={"message": {"partition": 0, "offset": 17, "lease": 1}, "job": _JOB, "value": {"width": 3}},
    ),
]  # fmt: skip
"""The routes about jobs and their results."""
