"""A connection of a WebSocket: receives requests, sends answers and what the broker pushes, with back-pressure."""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
from websockets.frames import CloseCode, Frame, Opcode
from websockets.protocol import Protocol, Side, State

from headrace.broker.pending_answer import AnswerWithBody, PendingAnswer
from headrace.gateways.connection_limit import peer_host
from headrace.gateways.http.problems import HttpError, problem_of
from headrace.gateways.http.websocket.frame_reader import FrameReader
from headrace.gateways.http.websocket.frames import Codec, Item, RequestFrame, undecodable
from headrace.gateways.http.websocket.pushes import push_items
from headrace.gateways.http.websocket.requests import SocketRequests
from headrace.gateways.socket_options import limit_unsent, reset
from headrace.model.errors import Cancelled, Draining, Fenced, HeadraceError, InternalError, NotServing
from headrace.model.limits import SOCKET_FRAME_BYTES_MAX, SOCKET_REQUESTS_MAX
from headrace.model.request import Answer, Request

if TYPE_CHECKING:
    from headrace.broker.ports import Session
    from headrace.gateways.http.gateway import HttpGateway

logger = logging.getLogger("headrace.http")
_frame_logger = logging.getLogger("headrace.http.frames")
_frame_logger.setLevel(logging.INFO)  # the library logs whole frames as DEBUG, which may have anything in them

_WRITE_BYTES_HIGH, _WRITE_BYTES_LOW = 128 << 10, 32 << 10
_TOGETHER_BYTES = 64 << 10
"""Frames of one loop turn are sent together, up to this size."""
_TURN_FRAMES = 32
"""Requests that are started before others have their turn."""
_HELD_BYTES_FREE = 64 << 10
_TOUCH_S = 0.25
_LINGER_S = 1.0
_REASON_BYTES_MAX = 120
_NODE_LEAVES = (Draining, Fenced, NotServing)
"""What ends a session whose client connects again with the same credentials."""


class SocketConnection(asyncio.Protocol):
    """A client's WebSocket. All methods run on the broker's thread."""

    session: "Session"
    transport: asyncio.Transport

    def __init__(self, gateway: "HttpGateway", codec: Codec) -> None:
        self.gateway = gateway
        self.codec = codec
        self.paused = False
        """Whether the client receives too slowly."""
        self.is_lost = False
        """Whether the connection is closed, or being closed."""
        self.on_lost: set[Callable[[], object]] = set()
        """Ends what waits for something, when the client is gone."""
        self.stream_number = 0
        """The number of the last stream of a partition in the session."""
        self._protocol = Protocol(Side.SERVER, state=State.OPEN, max_size=SOCKET_FRAME_BYTES_MAX, logger=_frame_logger)
        self._reader = FrameReader(self._protocol)
        self._requests = SocketRequests(self)
        self._message = bytearray()
        """The fragments of a message that has not ended."""
        self._backlog: deque[bytes] = deque()
        """Received messages that wait until the client has fewer unanswered requests."""
        self._pushed: deque[bytes] = deque()
        """Encoded pushes that are sent in the next loop turn."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._unanswered = 0
        self._writable = asyncio.Event()
        self._writable.set()
        self._unflushed_bytes = 0
        self._work_comes = self._flush_comes = self._read_comes = False
        self._read_paused = False
        self._held_bytes = 0
        self._heard_s = self._touched_s = self._pinged_s = gateway.loop.time()
        self._written_bytes = self._taken_bytes = 0
        """Given to the transport, and taken from it by the client as last seen."""
        self._taken_s = self._heard_s

    # Called by the transport.

    def adopt(self, transport: asyncio.Transport, received: bytes) -> None:
        """Take a connection over from HTTP; of it these bytes have been received."""
        self.transport = transport
        transport.set_write_buffer_limits(high=_WRITE_BYTES_HIGH, low=_WRITE_BYTES_LOW)
        limit_unsent(transport, _WRITE_BYTES_HIGH)
        self._host = peer_host(transport)
        self.gateway.limit.admit(self._host)  # in the moment in which HTTP has released it
        self.gateway.state.connections.add(self)  # type: ignore[arg-type]  # it can all that the gateway needs
        transport.set_protocol(self)
        if received:
            self.data_received(received)

    def data_received(self, data: bytes) -> None:
        """Handle the frames that these bytes complete."""
        gateway = self.gateway
        gateway.heard_us, self._heard_s = gateway.now_us(), gateway.loop.time()
        if self.is_lost or gateway.ignores_requests:
            return
        self._reader.add(data)
        if self._heard_s - self._touched_s > _TOUCH_S:
            self._touch()
        if self._blocked:
            self._regulate()
        elif not self._read_comes:
            self._read()

    def pause_writing(self) -> None:
        """Send and read no more while the client receives too slowly."""
        self.paused = True
        self._writable.clear()
        if not self.is_lost:
            self.gateway.broker.pause(self.session)
            self._regulate()

    def resume_writing(self) -> None:
        """Resume sending and reading, as the client has caught up."""
        self.paused = False
        self._writable.set()
        if not self.is_lost:
            self.gateway.broker.resume(self.session)
            self._requests.wake_streams()
            self._work_soon()

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 the reason changes nothing
        """Release everything that belongs to the connection."""
        self._release()
        self.gateway.state.connections.discard(self)
        self.gateway.limit.release(self._host)

    # Called by the gateway.

    def shutdown(self) -> None:
        """Tell the client that the broker is going to stop."""
        self._push({"push": "Drain", "fields": {}}, None)

    def close(self) -> None:
        """Close the connection, because the broker stops."""
        self.end(CloseCode.GOING_AWAY, "the broker stops")

    def end(self, code: int, reason: str) -> None:
        """Tell the client why, and close the connection."""
        if self.is_lost:
            return
        logger.info("websocket closed  client=%s code=%d reason=%s", self.session.client, code, reason)
        while self._pushed:
            self._send_pushed()
        self._release()
        self._protocol.fail(code, reason.encode()[:_REASON_BYTES_MAX].decode(errors="ignore"))
        self._flush()

    def end_session(self, error: HeadraceError) -> None:
        """Close the connection, as the broker ends the session: the token was revoked, or another node serves."""
        code = CloseCode.GOING_AWAY if isinstance(error, _NODE_LEAVES) else CloseCode.POLICY_VIOLATION
        self.end(code, f"{error.code}: {error}")

    def supervise(self, now_s: float, request_s: float, silence_s: float) -> None:  # noqa: ARG002
        """Send a ping to a quiet client, and close the connection of one that is silent or takes nothing."""
        if self.transport.is_closing():
            return
        unsent = self.transport.get_write_buffer_size()
        taken = self._written_bytes - unsent
        if taken != self._taken_bytes or not unsent:
            if self._read_paused or unsent:  # it cannot be heard, or answers only after all of this; but it receives
                self._heard_s = now_s
                self._touch()
            self._taken_bytes, self._taken_s = taken, now_s
        beat_s = silence_s / 3
        pinged = self._pinged_s > self._heard_s
        if unsent and now_s - self._taken_s > silence_s:
            logger.info("websocket closed; the client does not read  client=%s", self.session.client)
            reset(self.transport)
        elif pinged and not unsent and now_s - self._pinged_s > silence_s - beat_s:
            logger.info("websocket closed; the client is silent  client=%s", self.session.client)
            self.transport.abort()
        elif now_s - self._heard_s > beat_s and not pinged and not unsent and not self.is_lost:
            self._pinged_s = now_s
            self._protocol.send_ping(b"")
            self._flush()

    # Called by requests and the broker.

    def push(self, pushed: Answer | AnswerWithBody[Any]) -> None:
        """Send what the broker tells the client unasked."""
        if self.is_lost:
            return
        try:
            answer, body = pushed if isinstance(pushed, AnswerWithBody) else (pushed, None)
            fields, items = push_items(self.codec, answer, body)
            self._push({"push": type(answer).__name__, "fields": fields}, items)
        except Exception:
            logger.exception("push failed  client=%s push=%s", self.session.client, type(pushed).__name__)
            self.end(CloseCode.INTERNAL_ERROR, "the broker could not encode a delivery")

    def _push(self, head: dict[str, Any], items: Sequence[Item] | None) -> None:
        """Send a push behind the answers that the broker has decided before it: their tasks run in the next loop turn.

        It is encoded now, as the broker may change the messages later.
        """
        if not self.is_lost:
            self._pushed.append(self.codec.encode(head, items))
            self.gateway.loop.call_soon(self._send_pushed)

    def _send_pushed(self) -> None:
        """Send the oldest push that waits, if `end` has not sent it."""
        if self._pushed:
            self._send(self._pushed.popleft())

    def send(self, head: dict[str, Any], items: Sequence[Item] | None = None) -> None:
        """Send a frame, together with others of this loop turn."""
        if not self.is_lost:
            self._send(self.codec.encode(head, items))

    def _send(self, data: bytes) -> None:
        if self.is_lost:
            return
        if self.codec.is_text:
            self._protocol.send_text(data)
        else:
            self._protocol.send_binary(data)
        self._unflushed_bytes += len(data)
        if self._unflushed_bytes > _TOGETHER_BYTES:
            self._flush()
        elif not self._flush_comes:
            self._flush_comes = True
            self.gateway.loop.call_soon(self._flush)

    def ask(self, request: Request[Any], body: memoryview) -> Any:
        """Ask the broker; the outcome may be pending."""
        if self.is_lost:
            raise Cancelled
        return self.gateway.broker.ask(self.session, request, body, self.gateway.now_us())

    async def wait_until_writable(self) -> None:
        """Wait until the client has received most of what was sent."""
        await self._writable.wait()
        if self.is_lost:
            raise Cancelled

    async def answered(self, pending: PendingAnswer[Any]) -> Any:
        """Wait for an answer; it is withdrawn when the client goes."""
        if not pending.resolved:
            self.on_lost.add(pending.cancel)
            try:
                return await pending
            finally:
                self.on_lost.discard(pending.cancel)
        return await pending

    def run(self, work: Any) -> None:
        """Run a coroutine until it ends; it ends by itself when the client is gone."""
        task = self.gateway.loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # Incoming messages.

    def _read(self) -> None:
        """Handle some of the frames that have arrived; the others have to wait until the next loop turn."""
        self._read_comes = False
        if self.is_lost or self.gateway.ignores_requests:
            return
        for frame in self._reader.parse(self.gateway.loop.time()):
            if self._protocol.state is State.OPEN:
                self._receive(frame)
        if self._protocol.state is not State.OPEN:
            self._release()  # it closes, or broke the protocol, and is told so
        else:
            self._account()
        self._flush()
        self._work()

    def _receive(self, frame: Frame) -> None:
        if frame.opcode is Opcode.CONT:
            self._message += frame.data
        elif frame.opcode in (Opcode.TEXT, Opcode.BINARY):
            if (frame.opcode is Opcode.TEXT) is not self.codec.is_text:
                kind = "text" if self.codec.is_text else "binary"
                self.end(CloseCode.UNSUPPORTED_DATA, f"{self.codec.subprotocol} has {kind} frames")
                return
            self._message = bytearray(frame.data)
        else:
            return  # the protocol answers the others
        if frame.fin:
            message, self._message = bytes(self._message), bytearray()
            self._backlog.append(message)

    @property
    def _blocked(self) -> bool:
        return self.paused or self._unanswered >= SOCKET_REQUESTS_MAX

    def _work_soon(self) -> None:
        if not self._work_comes:
            self._work_comes = True
            self.gateway.loop.call_soon(self._work)

    def _work(self) -> None:
        """Start some of the requests that wait."""
        self._work_comes = False
        for _ in range(_TURN_FRAMES):
            if not self._backlog or self._blocked or self.is_lost:
                break
            self._start(self._backlog.popleft())
        else:
            self._work_soon()
        self._regulate()

    def _regulate(self) -> None:
        """Pause reading while too many requests are unanswered or the client receives too slowly, and resume after."""
        wanted = self._blocked or len(self._backlog) > _TURN_FRAMES
        if self._reader.has_more:
            if not wanted and not self._read_comes:
                self._read_comes = True
                self.gateway.loop.call_soon(self._read)
            wanted = True
        if wanted == self._read_paused or self.is_lost or self.transport.is_closing():
            return
        self._read_paused = wanted
        if wanted:
            self.transport.pause_reading()
        else:
            self.transport.resume_reading()

    def _start(self, message: bytes) -> None:
        """Start the request of a message."""
        try:
            if self.codec.is_text and not message.isascii():
                message.decode()
            frame = self.codec.decode_frame(message)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            problem = undecodable(self.codec, message, error)
            if problem is None:
                self.end(CloseCode.INVALID_DATA, f"the frame cannot be decoded as {self.codec.subprotocol}")
            else:
                self.send({"id": self.codec.given_id(message), "problem": problem_of(problem)})
        else:
            self._unanswered += 1
            self.run(self._carry_out(frame))

    async def _carry_out(self, frame: RequestFrame) -> None:
        """Carry a request out, and send the answer or the problem."""
        head: dict[str, Any] = {"id": frame.id}
        items: Sequence[Item] | None = None
        self.gateway.requests += 1
        try:
            head["answer"], items = await self._requests.carry_out(frame)
        except (HttpError, HeadraceError) as error:
            head["problem"] = problem_of(error)
        except Exception:
            logger.exception("request failed  client=%s request=%s", self.session.client, frame.request)
            head["problem"] = problem_of(InternalError())
        finally:
            self.gateway.requests -= 1
            self._unanswered -= 1
        if head.get("answer", True) is not None:
            self.send(head, items)
        if self._backlog or self._read_paused:
            self._work_soon()

    def _account(self) -> None:
        """Count the memory of an unfinished message, which is bounded for all connections together."""
        held = len(self._message) + self._reader.held_bytes
        self.gateway.received_bytes += held - self._held_bytes
        self._held_bytes = held
        if held > _HELD_BYTES_FREE and self.gateway.received_bytes > self.gateway.settings.receive_bytes_max:
            self.end(CloseCode.TRY_AGAIN_LATER, "the broker is receiving too many large frames at once")

    def _touch(self) -> None:
        """Tell the broker that the client is alive."""
        self._touched_s = self.gateway.loop.time()
        if not self.is_lost:
            self.gateway.broker.touch(self.session, self.gateway.now_us())

    # Ending.

    def _flush(self) -> None:
        """Write what the protocol has to send; its last word closes the connection."""
        self._flush_comes = False
        self._unflushed_bytes = 0
        pieces = self._protocol.data_to_send()
        if not pieces or self.transport.is_closing():
            return
        self._written_bytes += sum(map(len, pieces))
        self.transport.writelines([piece for piece in pieces if piece])
        if b"" in pieces:
            # What the client still sends is read for a moment: a reset might keep it from seeing why.
            if self._read_paused:
                self._read_paused = False
                self.transport.resume_reading()
            if self.transport.can_write_eof():
                self.transport.write_eof()
            else:  # with TLS, closing sends an end and reads on until that of the client
                self.transport.close()
            self.gateway.loop.call_later(_LINGER_S, self.transport.abort)

    def _release(self) -> None:
        """Release the broker's resources for this connection."""
        if self.is_lost:
            return
        self.is_lost = True
        self._writable.set()
        for end in list(self.on_lost):
            end()
        self._backlog.clear()
        self._pushed.clear()
        self._reader.clear()
        self._message = bytearray()
        self.gateway.received_bytes -= self._held_bytes
        self._held_bytes = 0
        self.gateway.broker.disconnect(self.session, self.gateway.now_us())
