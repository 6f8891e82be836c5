"""Reading a partition by offset or time, with long polls, and messages by their place."""

import asyncio
from collections.abc import Callable, Iterator
from functools import partial
from typing import Annotated, Any, Literal, Protocol, TypeVar

import msgspec

from headrace.broker.pending_answer import AnswerWithBody
from headrace.broker.ports import Session
from headrace.broker.streams import WaitingFetch
from headrace.gateways.http.accept import accepts
from headrace.gateways.http.call import Call, ClientGone, Reply, json_reply
from headrace.gateways.http.event_answers import batch_reply, event_line, event_origin, event_reply, wants_batch
from headrace.gateways.http.event_bodies import EventFields
from headrace.gateways.http.problems import HttpError
from headrace.gateways.http.publishing import MESSAGES
from headrace.gateways.http.route import ANY_TYPE, Route
from headrace.model.batch import Batch, Bytes, parse
from headrace.model.cloudevents_http import BATCH_TYPE, STRUCTURED_TYPE
from headrace.model.envelope import EnvelopeContent, TimeText, message_content, parse_time_text
from headrace.model.errors import CorruptBatch, InvalidBatch, MessageGone, OffsetOutOfRange
from headrace.model.limits import BATCH_BYTES_MAX
from headrace.model.message import Message
from headrace.model.reading import Fetch, Fetched
from headrace.model.requests import Offsets

_SLICE_MESSAGES = 256
T = TypeVar("T")


class FetchQuery(msgspec.Struct, forbid_unknown_fields=True):
    """What to read."""

    offset: Annotated[int, msgspec.Meta(ge=0, le=(1 << 62))] | None = None
    """From this offset on."""
    time: TimeText | None = None
    """Instead: from the first message with this timestamp or a later one."""
    at: Literal["earliest", "latest"] = "earliest"
    """Where to begin if neither is given."""
    limit: Annotated[int, msgspec.Meta(ge=1, le=10_000)] = 100
    """How many messages at most."""
    bytes_max: Annotated[int, msgspec.Meta(ge=1, le=BATCH_BYTES_MAX)] = 1 << 20
    """About how many bytes at most."""
    wait: Annotated[float, msgspec.Meta(ge=0, le=60)] = 0.0
    """How many seconds to wait for a message when there is none."""


class MessageFormatQuery(msgspec.Struct, forbid_unknown_fields=True):
    """How to answer a message."""

    format: Literal["json", "cloudevents", "cloudevents-binary"] | None = None
    """A CloudEvent in JSON, or in binary mode: its data as the body, and its attributes as headers `ce-*`."""


class MessagePage(msgspec.Struct):
    """Messages of a partition."""

    messages: list[EnvelopeContent]
    next_offset: int
    """Where to go on."""
    end_offset: int
    """Behind the last message that could be read."""


def partition_number(text: str) -> int:
    """A partition in a path."""
    if not text.isascii() or not text.isdigit() or len(text) > 9:
        raise HttpError("path_not_found", "a partition is a number")
    return int(text)


async def fetch(call: Call) -> Reply:
    """Answer messages of a partition."""
    topic, partition = call.parameters[0], partition_number(call.parameters[1])
    query = call.query(FetchQuery)
    if query.offset is not None and query.time is not None:
        raise HttpError("invalid_field", "give an offset or a time, not both")
    offset = query.offset
    if offset is None:
        at = ("time", parse_time_text(query.time)) if query.time is not None else (query.at, 0)
        offset = (await call.ask(Offsets(topic, [partition], *at))).offsets[partition]
    gateway, is_batch = call.gateway, wants_batch(call)
    describe: Callable[[Message], Any] = partial(message_content, partition=partition)
    if is_batch:
        describe = partial(event_line, origin=event_origin(call, topic, partition))
    ends_s = gateway.loop.time() + min(query.wait, gateway.settings.http_wait_seconds_max)
    while True:
        left_ms = max(round((ends_s - gateway.loop.time()) * 1000), 0)
        outcome = await call.ask_whole(Fetch(topic, partition, offset, query.bytes_max, left_ms))
        if isinstance(outcome, WaitingFetch):
            outcome = await waited_fetch(call, outcome)
        answer: Fetched = outcome.answer
        found, next_offset = await read_batches(
            stored_batches(call, topic, partition, outcome.body), offset, query.limit, describe
        )
        if next_offset is not None:
            break
        next_offset = max(answer.next_offset, offset)
        if found or not left_ms or gateway.draining or call.connection.is_lost:
            break
        offset = next_offset  # there were only messages that a view leaves out
        await asyncio.sleep(0)
    if is_batch:
        return batch_reply(call, found, offset=next_offset)
    return json_reply(MessagePage(found, next_offset, answer.end_offset))


async def read_message(call: Call) -> Reply:
    """Answer the message with an offset, as JSON or as a CloudEvent."""
    topic, partition = call.parameters[0], partition_number(call.parameters[1])
    offset_text = call.parameters[2]
    if not offset_text.isascii() or not offset_text.isdigit() or len(offset_text) > 18:
        raise HttpError("path_not_found", "an offset is a number")
    offset, query = int(offset_text), call.query(MessageFormatQuery)
    outcome = await call.ask_whole(Fetch(topic, partition, offset, 1))
    batches = stored_batches(call, topic, partition, outcome.body)
    (found, _) = await read_batches(batches, offset, 1, lambda message: message)
    if not found or found[0].offset != offset:
        if offset >= outcome.answer.end_offset:
            end = outcome.answer.end_offset
            raise OffsetOutOfRange(f"partition {partition} of {topic} has no message {offset}; its next one is {end}")
        raise MessageGone(f"{topic} has no message {offset} in partition {partition} any more")
    wanted = query.format
    if wanted is None:
        wants_event = accepts(call.headers.get(b"accept", b""), STRUCTURED_TYPE)
        wanted = "cloudevents" if wants_event else "json"
    if wanted == "json":
        return json_reply(message_content(found[0], partition))
    return event_reply(found[0], event_origin(call, topic, partition), binary=wanted == "cloudevents-binary")


async def read_batches(
    batches: Iterator[Batch], offset: int, limit: int, describe: Callable[[Message], T]
) -> tuple[list[T], int | None]:
    """Messages from an offset on, up to a limit; and the offset of the next one, if it was read but left out.

    Messages before damaged ones are answered first.
    """
    found: list[T] = []
    try:
        for batch in batches:
            for message in batch.messages():
                if message.offset < offset:
                    continue
                if len(found) == limit:
                    return found, message.offset
                found.append(describe(message))
                if not len(found) % _SLICE_MESSAGES:
                    await asyncio.sleep(0)
    except CorruptBatch as error:
        if not found:
            raise
        return found, error.first_offset
    return found, None


async def waited_fetch(call: Call, waiting: WaitingFetch) -> AnswerWithBody[Fetched]:
    """The answer of a fetch that waits for messages, until some come, its time is over or the broker stops."""
    gateway, connection, ready = call.gateway, call.connection, asyncio.Event()
    waiting.start(ready.set)
    connection.on_lost = ready.set
    gateway.on_drain.add(waiting.time_out)
    gateway.requests -= 1
    try:
        while True:
            await ready.wait()
            ready.clear()
            if connection.is_lost:
                waiting.close()
                raise ClientGone
            found = waiting.read(gateway.now_us())
            if found is not None:
                return found
    except BaseException:
        waiting.close()
        raise
    finally:
        gateway.requests += 1
        gateway.on_drain.discard(waiting.time_out)
        connection.on_lost = None


class BrokerCaller(Protocol):
    """A request, or a connection, that asks the broker for a session."""

    @property
    def gateway(self) -> Any:
        """The gateway, which knows the broker and the time."""

    @property
    def session(self) -> Session:
        """Whose request it is."""


def stored_batches(caller: BrokerCaller, topic: str, partition: int, body: Bytes) -> Iterator[Batch]:
    """The batches of a partition that were read, each checked whole.

    The broker looks at one that is damaged before the reader is told: it records the damage. A node of a cluster
    answers that it does not serve, and has its copy repaired.
    """
    try:
        yield from batches_in(body)
    except CorruptBatch as error:
        looking = Fetch(topic, partition, error.first_offset, 1, verify=True)
        caller.gateway.broker.ask(caller.session, looking, memoryview(b""), caller.gateway.now_us())
        raise


def batches_in(body: Bytes) -> Iterator[Batch]:
    """The batches in the body of an answer, each checked whole."""
    view, position = memoryview(bytes(body)), 0  # a copy: what is in memory or mapped may change meanwhile
    while position < len(view):
        batch = parse(view, position)
        try:
            batch.verify()
        except InvalidBatch as error:
            raise CorruptBatch(batch.base_offset, batch.next_offset, "as read", position, str(error)) from error
        position += batch.length
        yield batch


READ_ROUTES: list[Route] = [
    Route(
        "GET",
        "/v1/topics/{topic}/partitions/{partition}/messages",
        fetch,
        "Read messages of a partition from an offset or a time on; waits for some if asked to",
        MESSAGES,
        query=FetchQuery,
        answer=MessagePage,
        other_answers=((BATCH_TYPE, list[EventFields]),),
        errors=("topic_not_found", "partition_not_found", "offset_out_of_range"),
        integers=("partition",),
    ),
    Route(
        "GET",
        "/v1/topics/{topic}/partitions/{partition}/messages/{offset}",
        read_message,
        "Read one message, as JSON or as a CloudEvent",
        MESSAGES,
        query=MessageFormatQuery,
        answer=(EnvelopeContent, Any),  # data in binary mode may be any JSON
        other_answers=((STRUCTURED_TYPE, EventFields), (ANY_TYPE, Any)),
        errors=("topic_not_found", "partition_not_found", "offset_out_of_range", "message_gone"),
        integers=("partition", "offset"),
    ),
]
"""The routes that read partitions."""
