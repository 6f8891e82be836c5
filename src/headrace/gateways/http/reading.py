"""Reading a partition by offset or time, with long polls, and messages by their place."""

import asyncio
from collections.abc import Iterator
from typing import Annotated, Literal

import msgspec

from headrace.broker.pending_answer import AnswerWithBody
from headrace.broker.streams import WaitingFetch
from headrace.gateways.http.call import Call, ClientGone, Reply, json_reply
from headrace.gateways.http.problems import HttpError
from headrace.gateways.http.publishing import MESSAGES
from headrace.gateways.http.route import Route
from headrace.model.batch import Batch, Bytes, parse
from headrace.model.envelope import EnvelopeContent, TimeText, batch_contents, parse_time_text
from headrace.model.limits import BATCH_BYTES_MAX
from headrace.model.reading import Fetch, Fetched
from headrace.model.requests import Offsets

_SLICE_MESSAGES = 256


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
    gateway = call.gateway
    ends_s = gateway.loop.time() + min(query.wait, gateway.settings.http_wait_seconds_max)
    while True:
        left_ms = max(round((ends_s - gateway.loop.time()) * 1000), 0)
        outcome = await call.ask_whole(Fetch(topic, partition, offset, query.bytes_max, left_ms))
        if isinstance(outcome, WaitingFetch):
            outcome = await _waited(call, outcome)
        answer: Fetched = outcome.answer
        found, next_offset = await _contents(outcome.body, partition, offset, query.limit)
        if next_offset is not None:
            break
        next_offset = max(answer.next_offset, offset)
        if found or not left_ms or gateway.draining or call.connection.is_lost:
            break
        offset = next_offset  # there were only messages that a view leaves out
        await asyncio.sleep(0)
    return json_reply(MessagePage(found, next_offset, answer.end_offset))


async def _contents(body: Bytes, partition: int, offset: int, limit: int) -> tuple[list[EnvelopeContent], int | None]:
    """Messages from an offset on, up to a limit; and the offset of the next one, if it was read but left out."""
    found: list[EnvelopeContent] = []
    for batch in batches_in(body):
        for message in batch_contents(batch, partition, offset):
            if len(found) == limit:
                return found, message.offset
            found.append(message)
            if not len(found) % _SLICE_MESSAGES:
                await asyncio.sleep(0)
    return found, None


async def _waited(call: Call, waiting: WaitingFetch) -> AnswerWithBody[Fetched]:
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


def batches_in(body: Bytes) -> Iterator[Batch]:
    """The batches that were read, each checked whole."""
    view, position = memoryview(bytes(body)), 0  # a copy: what is in memory or mapped may change meanwhile
    while position < len(view):
        batch = parse(view, position)
        batch.verify()
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
        errors=("topic_not_found", "partition_not_found", "offset_out_of_range"),
        integers=("partition",),
    ),
]
"""The routes that read partitions."""
