"""Live subscriptions to subjects: each message is sent at most once, as Server-Sent Events or as lines of JSON."""

import asyncio
from collections import deque
from typing import Any

import msgspec

from headrace.broker.pending_answer import AnswerWithBody
from headrace.gateways.http.call import Call
from headrace.gateways.http.event_stream import HEARTBEAT_BEATS, stream_headers
from headrace.gateways.http.problems import encode_problem, problem_of
from headrace.model.batch import parse
from headrace.model.envelope import ValueContent, describe_message
from headrace.model.errors import HeadraceError, error_of
from headrace.model.subject_requests import SubjectDelivery, SubjectEnd, SubjectSubscribe

_UNSENT_BYTES_MAX = 1 << 20
"""Beyond it the client counts as too slow: what is published is dropped for it, and counted, until it catches up."""
_SLICE_MESSAGES = 256
_EMPTY = memoryview(bytearray())


class LiveMessage(ValueContent, omit_defaults=True, gc=False, kw_only=True):
    """A message that was published to a subject."""

    subject: str
    timestamp: int = 0
    dropped: int = 0
    """So many messages before this one were not sent, because the client did not receive fast enough."""


_encode = msgspec.json.Encoder().encode


class SubjectStream:
    """Sends what is published to subjects to one client. It has a session of its own, to which the broker pushes."""

    def __init__(self, call: Call, *, is_events: bool) -> None:
        self._call = call
        self._is_events = is_events
        gateway, mine = call.gateway, call.session
        self._broker = gateway.broker
        self._session = self._broker.connect(
            self._push,
            mine.client,
            gateway.now_us(),
            identity=mine.identity,
            tenant=mine.tenant,
            address=mine.address,
            gateway=mine.gateway,
            is_local=mine.is_local,
            end=self._end,
        )
        self._broker.share_services(mine, self._session)
        self._deliveries: deque[AnswerWithBody[SubjectDelivery]] = deque()
        self._unsent_bytes = 0
        self._failure: HeadraceError | None = None
        self._event = asyncio.Event()

    def subscribe(self, pattern: str, queue: str) -> None:
        """Subscribe; raises if the pattern is none."""
        gateway = self._call.gateway
        self._broker.ask(self._session, SubjectSubscribe(pattern, queue), _EMPTY, gateway.now_us())

    def close(self) -> None:
        """End the subscription."""
        self._broker.disconnect(self._session, self._call.gateway.now_us())

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
            head = {"type": "http.response.start", "status": 200}
            await call.send({**head, "headers": stream_headers(call, is_events=self._is_events)})
            await self._send(b":\n\n" if self._is_events else b"\n")  # the client knows now that it is subscribed
            while not (connection.is_lost or gateway.draining):
                if self._deliveries:
                    await self._send_next()
                elif self._failure is not None:
                    await self._send_error(self._failure)
                    break
                elif not await self._wait(ends_s):
                    break
        finally:
            gateway.streams -= 1
            gateway.requests += 1
            gateway.on_drain.discard(self._event.set)
            connection.on_lost = connection.on_ended = None
        await call.send({"type": "http.response.body", "body": b""})

    def _push(self, pushed: Any) -> None:
        """Take what the broker delivers."""
        if isinstance(pushed, AnswerWithBody):
            self._deliveries.append(pushed)
            self._unsent_bytes += len(pushed.body)
            if self._unsent_bytes > _UNSENT_BYTES_MAX:
                self._broker.pause(self._session)
        elif isinstance(pushed, SubjectEnd):
            self._failure = error_of(pushed.code, pushed.text, pushed.retryable)
        self._event.set()

    def _end(self, error: HeadraceError) -> None:
        """Send an error as the last event."""
        self._failure = error
        self._event.set()

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
        return True

    async def _send_next(self) -> None:
        """Send the oldest delivery, in slices."""
        delivery, body = self._deliveries.popleft()
        subject, dropped = delivery.subject, delivery.dropped
        parts: list[bytes] = []
        for number, message in enumerate(parse(memoryview(body), 0).messages(), 1):
            content = LiveMessage(subject=subject, timestamp=message.timestamp, dropped=dropped)
            describe_message(content, message.value, message.key, message.headers)
            dropped = 0
            text = _encode(content)
            parts.append(b"data: %s\n\n" % text if self._is_events else b"%s\n" % text)
            if not number % _SLICE_MESSAGES:
                await self._send(b"".join(parts))
                parts = []
                await asyncio.sleep(0)
        if parts:
            await self._send(b"".join(parts))
        self._unsent_bytes -= len(body)
        if self._session.blocked and self._unsent_bytes < _UNSENT_BYTES_MAX // 2:
            self._broker.resume(self._session)

    async def _send_error(self, error: HeadraceError) -> None:
        text = encode_problem(problem_of(error))
        await self._send(b"event: error\ndata: %s\n\n" % text if self._is_events else b'{"error":%s}\n' % text)

    async def _send(self, content: bytes) -> None:
        await self._call.send({"type": "http.response.body", "body": content, "more_body": True})
