"""Streams of messages: Server-Sent Events, and lines of JSON. The id of each is the whole position of its reader."""

import asyncio
from collections import OrderedDict
from functools import partial

import msgspec

from headrace.broker.streams import Stream
from headrace.gateways.http.call import Call, Reply
from headrace.gateways.http.event_answers import POSITION_ATTRIBUTE, batch_reply, event_line, event_origin, wants_batch
from headrace.gateways.http.event_bodies import EventFields
from headrace.gateways.http.event_position import (
    POSITION_PATTERN,
    StreamQuery,
    parse_position,
    position_text,
    start_position,
)
from headrace.gateways.http.problems import HttpError, encode_problem, problem_of
from headrace.gateways.http.publishing import MESSAGES
from headrace.gateways.http.reading import read_batches, stored_batches
from headrace.gateways.http.route import EVENTS, NDJSON, HeaderField, Route
from headrace.gateways.http.websub_hub import hub_links
from headrace.model.batch import Batch, Bytes
from headrace.model.cloudevents_http import BATCH_TYPE, EventOrigin
from headrace.model.envelope import EnvelopeContent, batch_contents
from headrace.model.errors import CorruptBatch, HeadraceError
from headrace.model.reading import Fetch, StreamOpen
from headrace.model.requests import TopicDescribe

_PORTION_BYTES = 64 << 10
"""Read at a time; a batch that is larger is read whole."""
_SENT_BYTES = 64 << 10
"""Sent at a time: the next portion waits until the client has taken most of it."""
_CREDIT_BYTES = 1 << 60
HEARTBEAT_BEATS = 3
"""An idle stream carries a sign of life after so many heartbeats."""
_FEW_STREAMS = 8
_LINGER_S, _LINGER_S_MAX = 0.0002, 0.1
"""With many streams each waits a moment for more messages, for so long times the number of streams."""
_RETRY_MS = 1000
_ENCODED_BYTES_MAX = 4 << 20
_BATCH_MESSAGES, _BATCH_BYTES = 100, 1 << 20
"""In a batch of events, by default and about at most."""
_POSITION_NAMES = (b"id", POSITION_ATTRIBUTE.encode())
"""The member of each line that has the position: in an event, an attribute of its own."""

EncodedMessages = list[tuple[int, bytes]]
"""Offsets, and the messages as JSON."""


class StreamedMessage(EnvelopeContent, omit_defaults=True):
    """A message in a stream of lines."""

    id: str = ""
    """The position behind this message, to go on there: for each partition the offset of the next message."""


class EncodedBatches:
    """Batches that were encoded as JSON a moment ago: many streams send the same."""

    def __init__(self) -> None:
        self._known: OrderedDict[tuple[int, int, int, int, EventOrigin | None], EncodedMessages] = OrderedDict()
        self._bytes = 0

    def get(self, batch: Batch, topic_id: int, partition: int, origin: EventOrigin | None = None) -> EncodedMessages:
        """The messages of a batch as JSON; as CloudEvents if there is an origin."""
        key = topic_id, partition, batch.base_offset, batch.crc, origin
        found = self._known.get(key)
        if found is None:
            if origin is None:
                found = [(content.offset, _encode(content)) for content in batch_contents(batch, partition)]
            else:
                found = [(message.offset, event_line(message, origin)) for message in batch.messages()]
            size = sum(len(text) for _, text in found)
            if size <= _ENCODED_BYTES_MAX // 4:
                self._known[key] = found
                self._bytes += size
                while self._bytes > _ENCODED_BYTES_MAX:
                    self._bytes -= sum(len(text) for _, text in self._known.popitem(last=False)[1])
        return found


_encode = msgspec.json.Encoder().encode


class MessageStream:
    """Sends the messages of all partitions of a topic to one client."""

    def __init__(
        self, call: Call, topic: str, position: dict[int, int], *, is_events: bool, as_cloudevents: bool
    ) -> None:
        self._call = call
        self._topic = topic
        self._is_events = is_events
        self._as_cloudevents = as_cloudevents
        self._position = position
        self._streams: dict[int, Stream] = {}
        """By partition."""
        self._ready: set[int] = set()
        self._event = asyncio.Event()
        self._topic_id = 0
        self._failure: HeadraceError | None = None

    async def open(self) -> None:
        """Open the streams of all partitions; raises if one has no such offset."""
        for partition, offset in self._position.items():
            await self._open(partition, offset)

    async def run(self) -> None:
        """Send messages as they come, until the client goes, the broker stops, or something is wrong."""
        call, gateway, connection = self._call, self._call.gateway, self._call.connection
        connection.on_lost = self._event.set
        connection.on_ended = self._end
        gateway.on_drain.add(self._event.set)
        gateway.requests -= 1
        gateway.streams += 1
        ends_s = gateway.loop.time() + (gateway.settings.http_stream_seconds or 1e9)
        try:
            await self._begin()
            while not (connection.is_lost or gateway.draining):
                if self._failure is not None:
                    raise self._failure
                if not self._ready and not await self._wait(ends_s):
                    break
                for partition in sorted(self._ready):
                    await self._send_some(partition)
        except HeadraceError as error:
            await self._send(self._framed_error(error))
        finally:
            gateway.streams -= 1
            gateway.requests += 1
            gateway.on_drain.discard(self._event.set)
            connection.on_lost = connection.on_ended = None
            self.close()
        await call.send({"type": "http.response.body", "body": b""})

    def _end(self, error: HeadraceError) -> None:
        """Send an error as the last event."""
        self._failure = error
        self._event.set()

    def close(self) -> None:
        """Close the streams of all partitions."""
        for stream in self._streams.values():
            stream.close()
        self._streams.clear()

    async def _open(self, partition: int, offset: int) -> None:
        call = self._call
        call.connection.streams += 1
        number = call.connection.streams
        stream = await call.ask_whole(StreamOpen(self._topic, partition, offset, _CREDIT_BYTES, number))
        assert isinstance(stream, Stream)
        self._streams[partition] = stream
        self._topic_id = stream.answer.topic_id
        stream.start(partial(self._wake, partition))
        self._position[partition] = offset
        self._ready.add(partition)

    def _wake(self, partition: int) -> None:
        self._ready.add(partition)
        self._event.set()

    async def _begin(self) -> None:
        headers = [*stream_headers(self._call, is_events=self._is_events), *hub_links(self._call)]
        await self._call.send({"type": "http.response.start", "status": 200, "headers": headers})
        if self._is_events:
            # The first event has no data, so that a reader who sees no message has its position all the same.
            await self._send(b"retry: %d\nid: %s\n\n" % (_RETRY_MS, position_text(self._position).encode()))

    async def _wait(self, ends_s: float) -> bool:
        """Wait for messages; false when the stream is to end."""
        gateway = self._call.gateway
        beat_s = gateway.settings.heartbeat_ms * HEARTBEAT_BEATS / 1000
        left_s = ends_s - gateway.loop.time()
        if left_s <= 0:
            return False
        self._event.clear()
        try:
            await asyncio.wait_for(self._event.wait(), min(beat_s, left_s))
        except TimeoutError:
            if beat_s < left_s:
                await self._send(b":\n\n" if self._is_events else b"\n")
                await self._open_new_partitions()
            return True
        await linger(gateway.streams)
        return True

    async def _open_new_partitions(self) -> None:
        """Begin with partitions that the topic has got meanwhile."""
        described = await self._call.ask(TopicDescribe(self._topic))
        for one in described.partitions:
            if one.partition not in self._streams:
                await self._open(one.partition, one.first_offset)

    async def _send_some(self, partition: int) -> None:
        """Send the next portion of a partition; what is damaged is told, and passed over."""
        stream, parts = self._streams[partition], list[bytes]()
        try:
            found = stream.read(_PORTION_BYTES, self._call.gateway.now_us())
            if found is None or not stream.has_more():
                self._ready.discard(partition)
            if found is not None:
                await self._frame(partition, found.view, parts)
                self._position[partition] = max(self._position[partition], found.next_offset)
        except CorruptBatch as error:
            self._position[partition] = max(self._position[partition], error.next_offset)
            await self._send(b"".join([*parts, self._framed_error(error, position_text(self._position))]))
            stream.close()
            await self._open(partition, self._position[partition])
            return
        if parts:
            await self._send(b"".join(parts))

    async def _frame(self, partition: int, portion: Bytes, parts: list[bytes]) -> None:
        """Frame the messages of a portion, and send them but for the last ones, which are left in `parts`."""
        known, size = self._call.gateway.encoded_batches, 0
        origin = event_origin(self._call, self._topic, partition) if self._as_cloudevents else None
        for batch in stored_batches(self._call, self._topic, partition, portion):
            for offset, text in known.get(batch, self._topic_id, partition, origin):
                if offset < self._position[partition]:
                    continue
                self._position[partition] = offset + 1
                parts.append(self._framed(partition, offset, text))
                size += len(text)
                if size >= _SENT_BYTES:
                    await self._send(b"".join(parts))
                    parts.clear()
                    size = 0

    def _framed(self, partition: int, offset: int, text: bytes) -> bytes:
        if len(self._position) == 1:
            position = b"%d:%d" % (partition, offset + 1)
        else:
            position = position_text(self._position).encode()
        if self._is_events:
            return b"id: %s\ndata: %s\n\n" % (position, text)
        return b'{"%s":"%s",%s\n' % (_POSITION_NAMES[self._as_cloudevents], position, text[1:])

    def _framed_error(self, error: HeadraceError, position: str = "") -> bytes:
        """An error as the last event; with a position the stream goes on there."""
        text = encode_problem(problem_of(error))
        if self._is_events:
            return (f"id: {position}\n".encode() if position else b"") + b"event: error\ndata: %s\n\n" % text
        name = _POSITION_NAMES[self._as_cloudevents]
        return b'{%s"error":%s}\n' % (b'"%s":"%s",' % (name, position.encode()) if position else b"", text)

    async def _send(self, content: bytes) -> None:
        await self._call.send({"type": "http.response.body", "body": content, "more_body": True})


async def stream_messages(call: Call) -> Reply | None:
    """Send the messages of a topic as they come, or answer some of them as a batch of events."""
    (topic,) = call.parameters
    query = call.query(StreamQuery)
    is_batch = wants_batch(call)
    is_events = not is_batch and wants_events(call.headers.get(b"accept", b""))
    if query.limit is not None and not is_batch:
        raise HttpError("invalid_field", f"`limit` is for answers of the type {BATCH_TYPE}; a stream goes on")
    header = call.headers.get(b"last-event-id")
    given = query.position if header is None else header.decode("latin-1")
    given_position = parse_position(given) if given or header is not None else None
    position = await start_position(call, topic, query, given_position, "earliest" if is_batch else "latest")
    if is_batch:
        return await _read_batch(call, topic, position, query.limit or _BATCH_MESSAGES)
    as_cloudevents = query.format == "cloudevents"
    stream = MessageStream(call, topic, position, is_events=is_events, as_cloudevents=as_cloudevents)
    try:
        await stream.open()
    except BaseException:
        stream.close()
        raise
    await stream.run()
    return None


async def linger(streams: int) -> None:
    """Wait a moment for more messages where there are many streams: each message would cost a write for each."""
    if streams > _FEW_STREAMS:
        await asyncio.sleep(min(streams * _LINGER_S, _LINGER_S_MAX))


async def _read_batch(call: Call, topic: str, position: dict[int, int], limit: int) -> Reply:
    """Answer messages of all partitions as a batch of events; each partition gets a share of the limit."""
    found: list[bytes] = []
    size = 0
    partitions = sorted(position)
    for at, partition in enumerate(partitions):
        share = -(-(limit - len(found)) // (len(partitions) - at))
        if not share or size >= _BATCH_BYTES:
            break
        offset = position[partition]
        outcome = await call.ask_whole(Fetch(topic, partition, offset, _BATCH_BYTES - size))
        describe = partial(event_line, origin=event_origin(call, topic, partition))
        batches = stored_batches(call, topic, partition, outcome.body)
        encoded, left_out = await read_batches(batches, offset, share, describe)
        position[partition] = max(outcome.answer.next_offset, offset) if left_out is None else left_out
        found += encoded
        size += sum(map(len, encoded))
        await asyncio.sleep(0)
    return batch_reply(call, found, position=position_text(position))


def stream_headers(call: Call, *, is_events: bool) -> list[tuple[bytes, bytes]]:
    """The headers of an answer that goes on."""
    return [
        (b"content-type", (EVENTS if is_events else NDJSON).encode()),
        (b"cache-control", b"no-store"),
        (b"x-accel-buffering", b"no"),  # proxies are to pass on at once what comes
        *call.gateway.application.guard.answer_headers(call.headers),
    ]


def wants_events(accepted: bytes) -> bool:
    """Whether an answer is sent as Server-Sent Events, and not as lines of JSON, by what the client accepts."""
    kinds = [one.partition(b";")[0].strip().lower() for one in accepted.split(b",")]
    if EVENTS.encode() in kinds:
        return True
    if NDJSON.encode() in kinds or b"*/*" in kinds or b"application/*" in kinds or not accepted:
        return False
    raise HttpError("not_acceptable", f"messages are sent as {EVENTS} or {NDJSON}")


LAST_EVENT_ID = HeaderField(
    "Last-Event-ID", "The id of the last event that was received", POSITION_PATTERN, example="0:0"
)

STREAM_ROUTES = [
    Route(
        "GET",
        "/v1/topics/{topic}/messages",
        stream_messages,
        "Send messages as they come, as Server-Sent Events or as lines of JSON; or answer a batch of CloudEvents",
        MESSAGES,
        query=StreamQuery,
        answer=(StreamedMessage, EventFields),
        answer_types=(NDJSON, EVENTS),
        other_answers=((BATCH_TYPE, list[EventFields]),),
        errors=("topic_not_found", "partition_not_found", "offset_out_of_range", "group_in_use"),
        headers=(LAST_EVENT_ID,),
        answer_headers=("Link",),
        streams=True,
    ),
]
"""The routes that stream."""
