"""Carries out the requests of a WebSocket: those of the broker as it declares them, but with messages as envelopes."""

import asyncio
import re
from collections.abc import Awaitable, Callable, Sequence
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from headrace.broker.pending_answer import AnswerWithBody, PendingAnswer
from headrace.broker.streams import WaitingFetch
from headrace.gateways.http.call import Call
from headrace.gateways.http.event_position import StreamQuery, parse_position, position_text, start_position
from headrace.gateways.http.problems import HttpError
from headrace.gateways.http.publishing import (
    DurabilityName,
    MessageReceipts,
    PublishQuery,
    check_one_partition,
    publish_once,
    send_batches,
    wait_for_receipts,
)
from headrace.gateways.http.reading import stored_batches
from headrace.gateways.http.route import fields_struct, given_fields
from headrace.gateways.http.subscription_resources import (
    AckFields,
    ExtendFields,
    RejectFields,
    ReleaseFields,
    holdings,
    leased_contents,
)
from headrace.gateways.http.websocket.frames import Item, RequestFrame
from headrace.gateways.http.websocket.pushes import value_item, value_items
from headrace.gateways.http.websocket.streams import SocketStream
from headrace.model.arguments import shown
from headrace.model.batch import encode
from headrace.model.envelope import (
    JSON_CONTENT_TYPE,
    MessageEnvelope,
    PartitionNumber,
    StoredFields,
    batch_contents,
    envelope_key,
    stored_value,
    time_us,
)
from headrace.model.errors import LimitExceeded, UnsupportedOperation
from headrace.model.leasing import Ack, Extend, Lease, Reject, Release
from headrace.model.limits import IDEMPOTENCY_KEY_CHARS_MAX, SOCKET_STREAMS_MAX
from headrace.model.reading import Fetch
from headrace.model.request import REQUESTS, Request
from headrace.model.subject_requests import ReplySend, RequestSend
from headrace.model.subscription import DEFAULT_SUBSCRIPTION

if TYPE_CHECKING:
    from headrace.gateways.http.websocket.connection import SocketConnection

Answered = tuple[Any, Sequence[Item] | None]
"""The answer, None for a request that has none; and its messages."""
Handler = Callable[[RequestFrame], Awaitable[Answered]]

_READ_BYTES_MAX = 1 << 20
"""What is read or leased for one answer: it is encoded in one go."""
_SLICE_MESSAGES = 256
_NOT_OFFERED = frozenset({"PublishOnce", "PartitionCount"})
"""Requests for gateways themselves."""
_KEY = re.compile(r"[\x21-\x7e]+")
_EMPTY = memoryview(bytearray())
_Credit = Annotated[int, msgspec.Meta(ge=0, le=1_000_000)]


class PublishFields(msgspec.Struct, forbid_unknown_fields=True):
    """How to publish the messages of the frame."""

    topic: str
    partition: PartitionNumber | None = None
    durability: DurabilityName = "memory"
    expected_offset: Annotated[int, msgspec.Meta(ge=0, le=1 << 62)] | None = None
    idempotency_key: Annotated[str, msgspec.Meta(max_length=IDEMPOTENCY_KEY_CHARS_MAX)] = ""


class StreamFields(StreamQuery, kw_only=True):
    """What to stream, and how many messages at first."""

    topic: str
    credit_messages: _Credit = 1000


class CreditFields(msgspec.Struct, forbid_unknown_fields=True):
    """More messages for a stream."""

    stream: int
    messages: _Credit


class StreamNumber(msgspec.Struct, forbid_unknown_fields=True):
    """A stream."""

    stream: int


class StreamAnswer(msgspec.Struct):
    """The answer to StreamOpen."""

    stream: int
    position: str


class SocketAck(AckFields, kw_only=True):
    """What is done."""

    topic: str
    subscription: str = DEFAULT_SUBSCRIPTION


class SocketExtend(ExtendFields, kw_only=True):
    """What to keep for longer."""

    topic: str
    subscription: str = DEFAULT_SUBSCRIPTION


class SocketRelease(ReleaseFields, kw_only=True):
    """What to give back."""

    topic: str
    subscription: str = DEFAULT_SUBSCRIPTION


class SocketReject(RejectFields, kw_only=True):
    """What cannot be processed."""

    topic: str
    subscription: str = DEFAULT_SUBSCRIPTION


class SocketRequests:
    """The requests of one connection."""

    def __init__(self, connection: "SocketConnection") -> None:
        self._connection = connection
        self._codec = connection.codec
        self._publishing = asyncio.Lock()
        """Keeps messages in the order of their frames."""
        self._reading = asyncio.Lock()
        """Lets one answer be read and encoded at a time, while the client receives."""
        self._streams: dict[int, SocketStream] = {}
        self._number = 0
        self._handlers: dict[str, Handler] = {
            "Publish": self._publish,
            "Fetch": self._fetch,
            "StreamOpen": self._open_stream,
            "StreamCredit": self._credit_stream,
            "StreamClose": self._close_stream,
            "Lease": self._lease,
            "Ack": self._ack,
            "Extend": self._extend,
            "Release": self._release,
            "Reject": self._reject,
            "RequestSend": self._send_request,
            "ReplySend": self._send_reply,
        }

    async def carry_out(self, frame: RequestFrame) -> Answered:
        """Carry out a request; returns its answer and messages."""
        handler = self._handlers.get(frame.request)
        if handler is not None:
            return await handler(frame)
        kind = _declared().get(frame.request)
        if kind is None:
            raise UnsupportedOperation(
                f"there is no request {shown(frame.request)} on a WebSocket; use a name such as TopicDescribe"
            )
        request = kind(**given_fields(self._codec.decode_fields(frame.fields, _fields_of(kind))))
        messages = self._codec.decode_messages(frame.messages)
        answer, body = await self._ask(request, self._batch(messages) if messages else _EMPTY)
        if kind.declared.answer is None:
            return None, None
        return answer, value_items(self._codec, body) if body else None

    def wake_streams(self) -> None:
        """Let all streams go on: the client has received what was sent."""
        for stream in self._streams.values():
            stream.wake()

    # Publishing.

    async def _publish(self, frame: RequestFrame) -> Answered:
        fields: PublishFields = self._codec.decode_fields(frame.fields, PublishFields)
        messages = self._codec.decode_messages(frame.messages)
        if not messages:
            raise HttpError("invalid_field", "the frame has no message; send at least one")
        call = self._call(fields.topic)
        query = PublishQuery(fields.durability, fields.partition)
        expected = fields.expected_offset
        if fields.idempotency_key:
            return await self._publish_once(fields, frame, messages)
        async with self._publishing:
            if expected is not None:
                named = fields.partition is not None or all(one.partition is not None for one in messages)
                await check_one_partition(call, expected, is_named=named)
            sent = await send_batches(call, query, messages, expected)
        receipts, _ = await wait_for_receipts(call, sent, len(messages))
        return MessageReceipts(len(messages), receipts), None

    async def _publish_once(
        self, fields: PublishFields, frame: RequestFrame, messages: list[MessageEnvelope]
    ) -> Answered:
        if fields.expected_offset is not None or not _KEY.fullmatch(fields.idempotency_key):
            raise HttpError(
                "invalid_field", "an idempotency_key is visible characters of ASCII, and excludes expected_offset"
            )
        call = self._call(fields.topic, {b"idempotency-key": fields.idempotency_key.encode("ascii")})
        query = PublishQuery(fields.durability, fields.partition)
        reply = await publish_once(call, query, messages, bytes(frame.messages), single=False)  # type: ignore[arg-type]
        return msgspec.json.decode(reply.body), None

    # Reading.

    async def _fetch(self, frame: RequestFrame) -> Answered:
        request: Fetch = Fetch(**given_fields(self._codec.decode_fields(frame.fields, _fields_of(Fetch))))
        request.bytes_max = min(request.bytes_max, _READ_BYTES_MAX)
        if request.wait_ms > 0:
            wait_ms, request.wait_ms = self._bounded_wait(request.wait_ms), 0
            first = Fetch(request.topic, request.partition, request.offset, 1, wait_ms)
            waiting = self._connection.ask(first, _EMPTY)
            if isinstance(waiting, WaitingFetch):
                await self._wait_for_message(waiting)
        items: list[Item] = []
        async with self._reading:
            await self._connection.wait_until_writable()
            outcome = self._connection.ask(request, _EMPTY)
            for batch in stored_batches(self._connection, request.topic, request.partition, outcome.body):
                for content in batch_contents(batch, request.partition, request.offset):
                    items.append(self._codec.item(content))
                    if not len(items) % _SLICE_MESSAGES:
                        await asyncio.sleep(0)
        return outcome.answer, items

    async def _wait_for_message(self, waiting: WaitingFetch) -> None:
        """Wait until there is a message, the time of the fetch is over, or the broker stops."""
        connection, gateway, ready = self._connection, self._connection.gateway, asyncio.Event()
        waiting.start(ready.set)
        connection.on_lost.add(waiting.time_out)
        gateway.on_drain.add(waiting.time_out)
        gateway.requests -= 1
        try:
            await ready.wait()
            while waiting.read(gateway.now_us()) is None:
                ready.clear()
                await ready.wait()
        except BaseException:
            waiting.close()
            raise
        finally:
            gateway.requests += 1
            gateway.on_drain.discard(waiting.time_out)
            connection.on_lost.discard(waiting.time_out)

    async def _open_stream(self, frame: RequestFrame) -> Answered:
        fields: StreamFields = self._codec.decode_fields(frame.fields, StreamFields)
        if len(self._streams) >= SOCKET_STREAMS_MAX:
            raise LimitExceeded(f"the connection has {SOCKET_STREAMS_MAX} streams, which is the maximum; close some")
        given = parse_position(fields.position) if fields.position else None
        position = await start_position(self._call(fields.topic), fields.topic, fields, given, "latest")
        self._number += 1
        number = self._number
        stream = SocketStream(self._connection, number, fields.topic, position, fields.credit_messages)
        try:
            await stream.open()
        except BaseException:
            stream.close()
            raise
        self._streams[number] = stream
        answer = StreamAnswer(number, position_text(position))
        self._connection.run(stream.run(lambda: self._streams.pop(number, None)))
        return answer, None

    async def _credit_stream(self, frame: RequestFrame) -> Answered:
        fields: CreditFields = self._codec.decode_fields(frame.fields, CreditFields)
        stream = self._streams.get(fields.stream)
        if stream is not None:
            stream.grant(fields.messages)
        return None, None

    async def _close_stream(self, frame: RequestFrame) -> Answered:
        stream = self._streams.pop(self._codec.decode_fields(frame.fields, StreamNumber).stream, None)
        if stream is not None:
            stream.close()
        return {}, None

    # Leases.

    async def _lease(self, frame: RequestFrame) -> Answered:
        request: Lease = Lease(**given_fields(self._codec.decode_fields(frame.fields, _fields_of(Lease))))
        request.bytes_max = min(request.bytes_max, _READ_BYTES_MAX)
        request.wait_ms = self._bounded_wait(request.wait_ms)
        await self._connection.wait_until_writable()
        answer, body = await self._wait_for(request, _EMPTY)
        return {}, [self._codec.item(content) for content in leased_contents(answer.portions, body)]

    async def _ack(self, frame: RequestFrame) -> Answered:
        given: SocketAck = self._codec.decode_fields(frame.fields, SocketAck)
        return await self._settle(Ack(given.topic, holdings(given.messages), given.subscription))

    async def _extend(self, frame: RequestFrame) -> Answered:
        given: SocketExtend = self._codec.decode_fields(frame.fields, SocketExtend)
        return await self._settle(Extend(given.topic, holdings(given.messages), given.lease_ms, given.subscription))

    async def _release(self, frame: RequestFrame) -> Answered:
        given: SocketRelease = self._codec.decode_fields(frame.fields, SocketRelease)
        request = Release(
            given.topic,
            holdings(given.messages),
            given.delay_ms,
            None if given.until is None else time_us(given.until),
            given.reason,
            undelivered=given.undelivered,
            subscription=given.subscription,
        )
        return await self._settle(request)

    async def _reject(self, frame: RequestFrame) -> Answered:
        given: SocketReject = self._codec.decode_fields(frame.fields, SocketReject)
        return await self._settle(Reject(given.topic, holdings(given.messages), given.reason, given.subscription))

    async def _settle(self, request: Request[Any]) -> Answered:
        return (await self._ask(request, _EMPTY))[0], None

    # Request and reply.

    async def _send_request(self, frame: RequestFrame) -> Answered:
        fields = self._codec.decode_fields(frame.fields, _fields_of(RequestSend, without=("headers",)))
        request = RequestSend(**given_fields(fields))
        answer, body = await self._wait_for(request, self._value(request, frame))
        return {}, [value_item(self._codec, bytes(body), answer.headers)]

    async def _send_reply(self, frame: RequestFrame) -> Answered:
        fields = self._codec.decode_fields(frame.fields, _fields_of(ReplySend, without=("headers",)))
        request = ReplySend(**given_fields(fields))
        self._connection.ask(request, self._value(request, frame))
        return None, None

    def _value(self, request: RequestSend | ReplySend, frame: RequestFrame) -> memoryview:
        """The value of the only message, if there is one; its headers become those of the request."""
        messages = self._codec.decode_messages(frame.messages)
        if len(messages) > 1:
            raise HttpError("invalid_field", "a request and a reply have one message")
        if not messages:
            return _EMPTY
        if messages[0].key is not None or messages[0].key_base64 is not None:
            raise HttpError("invalid_field", "a request and a reply have no key")
        value, headers = stored_value(messages[0])
        if value is None:
            value, headers = b"null", headers or {"content-type": JSON_CONTENT_TYPE}
        request.headers = headers or {}
        return memoryview(value)

    # The broker.

    def _call(self, topic: str, headers: dict[bytes, bytes] | None = None) -> Call:
        """The request as handlers of HTTP see it."""
        connection: Any = self._connection
        nothing: Any = None
        session = self._connection.session
        return Call(connection.gateway, connection, session, nothing, [topic], headers or {}, b"", nothing, nothing)

    async def _ask(self, request: Request[Any], body: memoryview) -> tuple[Any, Any]:
        """Ask the broker; returns the answer and its body."""
        outcome = self._connection.ask(request, body)
        if isinstance(outcome, PendingAnswer):
            outcome = await self._connection.answered(outcome)
        return tuple(outcome) if isinstance(outcome, AnswerWithBody) else (outcome, b"")

    async def _wait_for(self, request: Request[Any], body: memoryview) -> tuple[Any, Any]:
        """Ask the broker something that may wait for others: a broker that stops does not wait for it."""
        gateway = self._connection.gateway
        gateway.requests -= 1
        try:
            return await self._ask(request, body)
        finally:
            gateway.requests += 1

    def _bounded_wait(self, wait_ms: int) -> int:
        return min(wait_ms, round(self._connection.gateway.settings.http_wait_seconds_max * 1000))

    def _batch(self, messages: list[MessageEnvelope]) -> memoryview:
        """Messages as one batch."""
        now_us, fields = self._connection.gateway.now_us(), StoredFields()
        for envelope in messages:
            fields.add(envelope, envelope_key(envelope))
        return memoryview(encode(fields.columns(now_us), now_us).data)


@cache
def _declared() -> dict[str, type[Request[Any]]]:
    """The requests that can be asked, by name."""
    return {
        request.__name__: request
        for request in REQUESTS.values()
        if not request.declared.by_gateway and request.__name__ not in _NOT_OFFERED
    }


@cache
def _fields_of(kind: type[Request[Any]], without: tuple[str, ...] = ()) -> type[msgspec.Struct]:
    """The fields of a request, of which unknown ones are refused."""
    return fields_struct(kind, without=without)
