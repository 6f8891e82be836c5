"""Streams of messages: Server-Sent Events, and lines of JSON. The id of each is the whole position of its reader."""

import asyncio
from collections import OrderedDict
from functools import partial
from typing import Literal

import msgspec

from headrace.broker.streams import Stream
from headrace.gateways.http.call import Call, Reply
from headrace.gateways.http.event_position import POSITION_PATTERN, parse_position, position_text
from headrace.gateways.http.problems import HttpError, encode_problem, problem_of
from headrace.gateways.http.publishing import MESSAGES
from headrace.gateways.http.reading import batches_in
from headrace.gateways.http.route import EVENTS, NDJSON, HeaderField, Route
from headrace.model.batch import Batch
from headrace.model.envelope import EnvelopeContent, batch_contents
from headrace.model.errors import GroupNotFound, HeadraceError
from headrace.model.reading import StreamOpen
from headrace.model.requests import Commit, GroupDescribe, Offsets, PartitionOffset, TopicDescribe

_PORTION_BYTES = 64 << 10
"""Read at a time; a batch that is larger is read whole."""
_SENT_BYTES = 64 << 10
"""Sent at a time: the next portion waits until the client has taken most of it."""
_CREDIT_BYTES = 1 << 60
_HEARTBEAT_BEATS = 3
_FEW_STREAMS = 8
_LINGER_S, _LINGER_S_MAX = 0.0002, 0.1
"""With many streams each waits a moment for more messages, for so long times the number of streams."""
_RETRY_MS = 1000
_ENCODED_BYTES_MAX = 4 << 20

EncodedMessages = list[tuple[int, bytes]]
"""Offsets, and the messages as JSON."""


class StreamQuery(msgspec.Struct, forbid_unknown_fields=True):
    """Where to begin."""

    start: Literal["earliest", "latest"] | None = None
    """Without a position: with a group, where it has none, `earliest` by default; else `latest`."""
    position: str = ""
    """As Last-Event-ID, for clients that cannot set a header."""
    group: str = ""
    """Begin where this group is. The position given is committed for it first."""


class StreamedMessage(EnvelopeContent, omit_defaults=True):
    """A message in a stream of lines."""

    id: str = ""
    """The position behind this message, to go on there: for each partition the offset of the next message."""


class EncodedBatches:
    """Batches that were encoded as JSON a moment ago: many streams send the same."""

    def __init__(self) -> None:
        self._known: OrderedDict[tuple[int, int, int, int], EncodedMessages] = OrderedDict()
        self._bytes = 0

    def get(self, batch: Batch, topic_id: int, partition: int) -> EncodedMessages:
        """The messages of a batch as JSON."""
        key = topic_id, partition, batch.base_offset, batch.crc
        found = self._known.get(key)
        if found is None:
            found = [(content.offset, _encode(content)) for content in batch_contents(batch, partition)]
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

    def __init__(self, call: Call, topic: str, position: dict[int, int], *, is_events: bool) -> None:
        self._call = call
        self._topic = topic
        self._is_events = is_events
        self._position = position
        self._streams: dict[int, Stream] = {}
        """By partition."""
        self._ready: set[int] = set()
        self._event = asyncio.Event()
        self._topic_id = 0

    async def open(self) -> None:
        """Open the streams of all partitions; raises if one has no such offset."""
        for partition, offset in self._position.items():
            await self._open(partition, offset)

    async def run(self) -> None:
        """Send messages as they come, until the client goes, the broker stops, or something is wrong."""
        call, gateway, connection = self._call, self._call.gateway, self._call.connection
        connection.on_lost = self._event.set
        gateway.on_drain.add(self._event.set)
        gateway.requests -= 1
        gateway.streams += 1
        ends_s = gateway.loop.time() + (gateway.settings.http_stream_seconds or 1e9)
        try:
            await self._begin()
            while not (connection.is_lost or gateway.draining):
                if not self._ready and not await self._wait(ends_s):
                    break
                for partition in sorted(self._ready):
                    await self._send_some(partition)
        except HeadraceError as error:
            await self._send_error(error)
        finally:
            gateway.streams -= 1
            gateway.requests += 1
            gateway.on_drain.discard(self._event.set)
            connection.on_lost = None
            self.close()
        await call.send({"type": "http.response.body", "body": b""})

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
        kind = EVENTS if self._is_events else NDJSON
        headers = [
            (b"content-type", kind.encode()),
            (b"cache-control", b"no-store"),
            (b"x-accel-buffering", b"no"),  # proxies are to pass on at once what comes
            *self._call.gateway.application.guard.answer_headers(self._call.headers),
        ]
        await self._call.send({"type": "http.response.start", "status": 200, "headers": headers})
        if self._is_events:
            # The first event has no data, so that a reader who sees no message has its position all the same.
            await self._send(b"retry: %d\nid: %s\n\n" % (_RETRY_MS, position_text(self._position).encode()))

    async def _wait(self, ends_s: float) -> bool:
        """Wait for messages; false when the stream is to end."""
        gateway = self._call.gateway
        beat_s = gateway.settings.heartbeat_ms * _HEARTBEAT_BEATS / 1000
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
        if gateway.streams > _FEW_STREAMS:
            await asyncio.sleep(min(gateway.streams * _LINGER_S, _LINGER_S_MAX))
        return True

    async def _open_new_partitions(self) -> None:
        """Begin with partitions that the topic has got meanwhile."""
        described = await self._call.ask(TopicDescribe(self._topic))
        for one in described.partitions:
            if one.partition not in self._streams:
                await self._open(one.partition, one.first_offset)

    async def _send_some(self, partition: int) -> None:
        """Send the next portion of a partition."""
        gateway, stream = self._call.gateway, self._streams[partition]
        found = stream.read(_PORTION_BYTES, gateway.now_us())
        if found is None:
            self._ready.discard(partition)
            return
        if not stream.has_more():
            self._ready.discard(partition)
        parts: list[bytes] = []
        size = 0
        for batch in batches_in(found.view):
            for offset, text in gateway.encoded_batches.get(batch, self._topic_id, partition):
                if offset < self._position[partition]:
                    continue
                self._position[partition] = offset + 1
                parts.append(self._framed(partition, offset, text))
                size += len(text)
                if size >= _SENT_BYTES:
                    await self._send(b"".join(parts))
                    parts, size = [], 0
        self._position[partition] = max(self._position[partition], found.next_offset)
        if parts:
            await self._send(b"".join(parts))

    def _framed(self, partition: int, offset: int, text: bytes) -> bytes:
        if len(self._position) == 1:
            position = b"%d:%d" % (partition, offset + 1)
        else:
            position = position_text(self._position).encode()
        if self._is_events:
            return b"id: %s\ndata: %s\n\n" % (position, text)
        return b'{"id":"%s",%s\n' % (position, text[1:])

    async def _send_error(self, error: HeadraceError) -> None:
        text = encode_problem(problem_of(error))
        await self._send(b"event: error\ndata: %s\n\n" % text if self._is_events else b'{"error":%s}\n' % text)

    async def _send(self, content: bytes) -> None:
        await self._call.send({"type": "http.response.body", "body": content, "more_body": True})


async def stream_messages(call: Call) -> Reply | None:
    """Send the messages of a topic as they come."""
    (topic,) = call.parameters
    is_events = _wants_events(call.headers.get(b"accept", b""))
    query = call.query(StreamQuery)
    header = call.headers.get(b"last-event-id")
    given = query.position if header is None else header.decode("latin-1")
    given_position = parse_position(given) if given or header is not None else None
    position = await _start_position(call, topic, query, given_position)
    stream = MessageStream(call, topic, position, is_events=is_events)
    try:
        await stream.open()
    except BaseException:
        stream.close()
        raise
    await stream.run()
    return None


def _wants_events(accepted: bytes) -> bool:
    kinds = [one.partition(b";")[0].strip().lower() for one in accepted.split(b",")]
    if EVENTS.encode() in kinds:
        return True
    if NDJSON.encode() in kinds or b"*/*" in kinds or b"application/*" in kinds or not accepted:
        return False
    raise HttpError("not_acceptable", f"messages are sent as {EVENTS} or {NDJSON}")


async def _start_position(call: Call, topic: str, query: StreamQuery, given: dict[int, int] | None) -> dict[int, int]:
    """Where to begin in each partition; a position that is given is committed for the group."""
    start = query.start or ("earliest" if query.group else "latest")
    if given is not None:
        if query.group:
            places = [PartitionOffset(topic, number, offset) for number, offset in given.items()]
            await call.ask(Commit(query.group, places))
        first = (await call.ask(Offsets(topic, [], "earliest"))).offsets
        return {**first, **given}
    position = dict((await call.ask(Offsets(topic, [], start))).offsets)
    if query.group:
        try:
            group = await call.ask(GroupDescribe(query.group))
        except GroupNotFound:
            return position
        position.update({one.partition: one.offset for one in group.places if one.topic == topic})
    return position


LAST_EVENT_ID = HeaderField("Last-Event-ID", "The id of the last event that was received", POSITION_PATTERN)

STREAM_ROUTES = [
    Route(
        "GET",
        "/v1/topics/{topic}/messages",
        stream_messages,
        "Send messages as they come, as Server-Sent Events or as lines of JSON",
        MESSAGES,
        query=StreamQuery,
        answer=StreamedMessage,
        answer_types=(NDJSON, EVENTS),
        errors=("topic_not_found", "partition_not_found", "offset_out_of_range", "group_in_use"),
        headers=(LAST_EVENT_ID,),
        streams=True,
    ),
]
"""The routes that stream."""
