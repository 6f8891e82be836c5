"""One connection of the native protocol: decodes frames, asks the broker, and sends answers and deliveries."""

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from functools import partial
from ipaddress import ip_address
from typing import TYPE_CHECKING, Any

from headrace.broker.pending_answer import AnswerWithBody, PendingAnswer
from headrace.broker.streams import Stream, WaitingFetch
from headrace.gateways.authentication import Peer, transport_credentials
from headrace.gateways.connection_limit import peer_host
from headrace.gateways.native.frame_writer import FrameSource, FrameWriter
from headrace.gateways.native.hangup import hung_up
from headrace.gateways.native.stream_pump import FetchAnswer, StreamPump
from headrace.model.errors import (
    Busy,
    Draining,
    HeadraceError,
    InternalError,
    NotAuthenticated,
    NotServing,
    ProtocolError,
    UnsupportedOperation,
    UnsupportedVersion,
)
from headrace.model.identity import Identity
from headrace.model.request import REQUESTS, Answer
from headrace.model.requests import Assignment, Done
from headrace.model.standing_lease import LeaseDelivery, LeaseEnd
from headrace.model.subject_requests import RequestDelivery, SubjectDelivery, SubjectEnd
from headrace.wire import native
from headrace.wire.frames import Frame, Frames
from headrace.wire.native import PROTOCOL_VERSION, Kind, decode, failure

if TYPE_CHECKING:
    from headrace.broker.ports import Session
    from headrace.gateways.native.gateway import NativeGateway

logger = logging.getLogger("headrace.native")

UNANSWERED_MAX = 1024
"""Unanswered requests at which the gateway stops reading a connection, until half of them are answered."""
FEATURES: frozenset[str] = frozenset()
"""Optional protocol features that this broker supports."""
# Looking up enum members on every frame would be slow.
_ANSWER, _STREAM_OPEN = int(Kind.ANSWER), int(Kind.STREAM_OPEN)
_UNANSWERED = frozenset(kind for kind, request in REQUESTS.items() if request.declared.answer is None)
_PUSHED: dict[type[Answer], int] = {
    Assignment: int(Kind.ASSIGNMENT),
    LeaseEnd: int(Kind.LEASE_END),
    LeaseDelivery: int(Kind.LEASE_DELIVERY),
    SubjectDelivery: int(Kind.SUBJECT_DELIVERY),
    RequestDelivery: int(Kind.REQUEST_DELIVERY),
    SubjectEnd: int(Kind.SUBJECT_END),
}
"""The frame kinds of pushed messages."""
_CREDENTIALS_NEEDED = (
    "this broker has security enabled, and the client gave no credentials: connect with a token (token=..., "
    "HEADRACE_TOKEN or HEADRACE_TOKEN_FILE)"
)
_TLS_HELLO = 5
"""Where a TLS record tells that it is a client's hello."""
_TOUCH_US = 250_000
_LINGER_S = 2.0
_HELD_BYTES_FREE = 1 << 20
"""An unfinished frame up to this size is never refused, however much memory all connections hold."""


class NativeConnection(asyncio.BufferedProtocol):
    """A client's connection. All methods run on the broker's thread."""

    _transport: asyncio.Transport
    _out: FrameWriter

    def __init__(self, gateway: "NativeGateway") -> None:
        self._gateway = gateway
        self._broker = gateway.broker
        self._frames = Frames(gateway.memory)
        self._session: Session | None = None
        self._authentication: PendingAnswer[Identity] | None = None
        self._name = ""
        self.host = ""
        """The host of the client, by which connections are counted; empty on a Unix socket."""
        self._since_us = self.heard_us = gateway.now_us()
        """When the client last sent something."""
        self._touched_us = 0
        self._unanswered = 0
        self._last_handled = 0
        """The correlation of the last request that was handled."""
        self._backlog: deque[Frame] = deque()
        """Received frames that wait until the client has fewer unanswered requests."""
        self._waits_for_turn = False
        """Whether other tenants have their turns before the backlog is handled."""
        self._fetches: set[FetchAnswer] = set()
        self._read_paused = False
        self._ending = False
        self._held_bytes = 0
        self._own: dict[int, Callable[[int, Any, int], None]] = {
            Kind.PING: self._ping,
            Kind.HELLO: self._hello_again,
        }

    def __str__(self) -> str:
        return f"{self._name or 'a client'} at {self._address or 'a local socket'}"

    @property
    def _address(self) -> str:
        """The client's address; empty on a Unix socket and for a client in this process."""
        peer = self._transport.get_extra_info("peername")
        return f"{peer[0]}:{peer[1]}" if isinstance(peer, tuple) else ""

    @property
    def busy(self) -> bool:
        """Whether requests wait for their answers, other than fetches that wait for new messages."""
        return self._unanswered > len(self._fetches) or bool(self._backlog)

    @property
    def descriptor(self) -> int:
        """The file descriptor of the socket; -1 once it is closed."""
        return int(self._transport.get_extra_info("socket").fileno())

    # Called by the transport.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Set up a new connection, or refuse it."""
        gateway = self._gateway
        self._transport = transport  # type: ignore[assignment]  # uvloop's is none of asyncio's classes
        self._out = FrameWriter(self._transport, gateway.deliver_soon, gateway.flush_soon, self._source_failed)
        self.host = peer_host(transport)
        refusal = gateway.admit(self)
        if refusal is not None:
            self.end(refusal)

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: ARG002
        """The memory for the next bytes."""
        return self._gateway.memory.shared if self._ending or self._gateway.ignores_requests else self._frames.buffer()

    def buffer_updated(self, count: int) -> None:
        """Handle the frames that these bytes complete."""
        if self._ending or self._gateway.ignores_requests:
            return
        now_us = self.heard_us = self._gateway.now_us()
        self._out.corked = True
        try:
            if self._session is None and not self._held_bytes:
                self._check_not_tls(count)
            if self._broker.is_shared and self._session is not None:
                self._take_share(count, self._session.turn_key, now_us)
            else:
                for received in self._frames.received(count):
                    if self._backlog or self._blocked:
                        self._backlog.append(_kept(received))
                    elif not self._ending:
                        self._take(received, now_us)
            self._account()
        except (ProtocolError, Busy) as error:
            self.end(error)
            return
        if now_us - self._touched_us > _TOUCH_US:
            self._touch(now_us)
        self._regulate()
        self._uncork()

    def receive(self, data: bytes) -> None:
        """Handle bytes that were received before the connection had this protocol."""
        left = memoryview(data)
        while left:
            buffer = self.get_buffer(len(left))
            count = min(len(left), len(buffer))
            buffer[:count] = left[:count]
            left = left[count:]
            self.buffer_updated(count)

    def eof_received(self) -> bool:
        """Close the connection of a client that sends no more."""
        return False

    def pause_writing(self) -> None:
        """Send and read no more while the client receives too slowly."""
        self._out.paused = True
        if self._session is not None:
            self._broker.pause(self._session)
        self._regulate()

    def resume_writing(self) -> None:
        """Resume sending and reading, as the client has caught up."""
        self._out.resume()
        if self._session is not None:
            self._broker.resume(self._session)
        self._gateway.call_soon(self._catch_up)

    def connection_lost(self, error: Exception | None) -> None:
        """Release everything that belongs to a closed connection."""
        self._broker.sending_failed(error)
        self._ending = True
        self._out.close()
        self._release()
        self._gateway.forget(self)

    # Called by the gateway.

    def end(self, error: HeadraceError, correlation: int = 0) -> None:
        """Send the client an error, and close the connection."""
        if self._ending:
            return
        logger.info("connection refused  client=%s code=%s reason=%s", self, error.code, error)
        self._ending = True
        told = failure(error)
        if isinstance(error, NotServing):  # the client sends again at once what it sent after that
            told.details = {**told.details, "last_handled": self._last_handled}
        self._out.send(Kind.FAILURE, correlation, told)
        self._out.flush()
        self._out.close()
        self._release()
        if self._transport.is_closing():
            return
        # Read and discard for a moment what the client still sends: the system resets a connection that is closed with
        # unread bytes, and then the error might never arrive.
        if self._read_paused:
            self._read_paused = False
            self._transport.resume_reading()
        if self._transport.can_write_eof():
            self._transport.write_eof()
        else:  # with TLS, closing sends an end and reads on until that of the client
            self._transport.close()
        self._gateway.later(_LINGER_S, self._transport.abort)

    def evict(self) -> None:
        """Close at once a connection without a session, to make room for another."""
        logger.info("connection closed; it has no session, and others need the room  client=%s", self)
        self._gateway.forget(self)
        self.abort()

    def close(self) -> None:
        """Close the connection after what waits to be sent."""
        self._out.flush()
        self._out.close()
        self._ending = True
        self._release()
        self._transport.close()

    def abort(self) -> None:
        """Close the connection at once."""
        self._transport.abort()

    def drain(self) -> None:
        """Tell the client that the broker is going to stop."""
        if self._session is not None and not self._ending:
            self._out.send(Kind.DRAIN, 0, Done())

    def supervise(self, now_us: int, silence_us: int) -> None:
        """Close a connection that is silent for too long. While it is not read, one that receives counts as alive."""
        if self._read_paused and hung_up(self._transport):
            self.abort()
            return
        if self._read_paused and not (self._out.paused and not self._out.progressed()):
            self.heard_us = now_us
            self._touch(now_us)
        since_us = self.heard_us if self._session is not None else self._since_us
        if now_us - since_us > silence_us:
            logger.info("connection closed; no heartbeat  client=%s", self)
            self.abort()

    # Incoming frames.

    @property
    def _blocked(self) -> bool:
        return self._out.paused or self._unanswered >= UNANSWERED_MAX or self._waits_for_turn

    def _regulate(self) -> None:
        """Pause reading while too many requests are unanswered or the client receives too slowly, and resume after."""
        wanted = self._blocked or bool(self._backlog)
        if wanted == self._read_paused or self._ending or self._transport.is_closing():
            return
        self._read_paused = wanted
        if wanted:
            self._transport.pause_reading()
        else:
            self._transport.resume_reading()

    def _take_share(self, count: int, tenant: str, now_us: int) -> None:
        """Handle frames for as long as the tenant has time in this loop turn; the others wait for the next."""
        turns = self._gateway.turns
        begun_s = turns.clock()
        until_s = begun_s + turns.left_s(tenant)
        for received in self._frames.received(count):
            if self._backlog or self._blocked or turns.clock() >= until_s:
                self._backlog.append(_kept(received))
            elif not self._ending:
                self._take(received, now_us)
        turns.spend(tenant, turns.clock() - begun_s)
        self._wait_for_turn(tenant)

    def _wait_for_turn(self, tenant: str) -> None:
        if self._backlog and not self._blocked and not self._ending:
            self._waits_for_turn = True
            self._gateway.turns.add(tenant, self)

    def take_turn(self, until_s: float) -> None:
        """Handle frames from the backlog until a time; the rest waits for another turn."""
        self._waits_for_turn = False
        if self._ending or self._session is None:
            return
        turns, tenant, now_us = self._gateway.turns, self._session.turn_key, self._gateway.now_us()
        self._out.corked = True
        while self._backlog and not self._blocked and not self._ending:
            self._take(self._backlog.popleft(), now_us)
            if turns.clock() >= until_s:
                break
        self._wait_for_turn(tenant)
        self._regulate()
        self._uncork()

    def _catch_up(self) -> None:
        """Handle frames from the backlog."""
        if self._ending:
            return
        if self._broker.is_shared and self._session is not None:
            self._wait_for_turn(self._session.turn_key)
            self._regulate()
            return
        now_us = self._gateway.now_us()
        self._out.corked = True
        while self._backlog and not self._blocked and not self._ending:
            self._take(self._backlog.popleft(), now_us)
        self._regulate()
        self._uncork()

    def _uncork(self) -> None:
        self._out.corked = False
        self._out.flush()

    def _check_not_tls(self, count: int) -> None:
        """Refuse a client that begins a TLS handshake at once: its first bytes look like those of a long frame."""
        first = self._gateway.memory.shared[:count]
        if count > _TLS_HELLO and first[0] == 0x16 and first[1] == 0x03 and first[_TLS_HELLO] == 0x01:
            raise ProtocolError("this address speaks no TLS: connect to headrace:// instead of headraces://")

    def _account(self) -> None:
        """Count the memory of an unfinished frame, which is bounded for all connections together."""
        held = self._frames.pending_bytes
        if held != self._held_bytes:
            too_much = self._gateway.hold(held - self._held_bytes)
            self._held_bytes = held
            if too_much and held > _HELD_BYTES_FREE:
                raise Busy("the broker is receiving too many large frames at once; connect again in a moment")

    def _touch(self, now_us: int) -> None:
        """Tell the broker that the client is alive."""
        if self._session is not None:
            self._touched_us = now_us
            self._broker.touch(self._session, now_us)

    def _take(self, received: Frame, now_us: int) -> None:
        kind, correlation, head, body, _ = received
        try:
            if self._session is None:
                self._hello(kind, correlation, head, now_us)
                return
            if kind not in REQUESTS:
                raise UnsupportedOperation(
                    f"the broker does not know frames of kind {kind}; use a client of the broker's version"
                )
            request = decode(kind, head)
            self._last_handled = correlation
            own = self._own.get(kind)
            if own is not None:
                own(correlation, request, now_us)
                return
            if kind == _STREAM_OPEN:
                request.stream = correlation
            outcome = self._broker.ask(self._session, request, body, now_us)
            if isinstance(outcome, PendingAnswer):
                self._unanswered += 1
                outcome.then(partial(self._resolved, correlation))
            elif isinstance(outcome, Stream):
                self._out.send(_ANSWER, correlation, outcome.answer)
                StreamPump(self._out, correlation, outcome)
            elif isinstance(outcome, WaitingFetch):
                self._unanswered += 1
                self._fetches.add(FetchAnswer(self._out, correlation, outcome, self._fetched))
            elif kind not in _UNANSWERED:
                self._answer(correlation, outcome)
        except (ProtocolError, UnsupportedVersion) as error:
            self.end(error, correlation)
        except HeadraceError as error:
            self._fail(correlation, error)
        except Exception:
            logger.exception("request failed  kind=%s client=%s", kind, self)
            self._fail(correlation, InternalError())

    def _fail(self, correlation: int, error: HeadraceError) -> None:
        """Answer a request with an error."""
        self._gateway.failures[error.code] += 1
        self._out.send(Kind.FAILURE, correlation, failure(error))

    def _resolved(self, correlation: int, outcome: Answer | AnswerWithBody[Answer] | HeadraceError) -> None:
        """Send a pending answer that is now resolved."""
        if not self._ending:
            if isinstance(outcome, HeadraceError):
                self._fail(correlation, outcome)
            else:
                self._answer(correlation, outcome)
        self._answered()

    def _answer(self, correlation: int, outcome: Answer | AnswerWithBody[Answer]) -> None:
        if isinstance(outcome, AnswerWithBody):
            self._out.send_batches(_ANSWER, correlation, outcome.answer, memoryview(outcome.body))
        else:
            self._out.send(_ANSWER, correlation, outcome)

    def _push(self, pushed: Answer | AnswerWithBody[Answer]) -> None:
        """Send a message that the broker pushes to the session."""
        if isinstance(pushed, AnswerWithBody):
            self._out.send_batches(_PUSHED[type(pushed.answer)], 0, pushed.answer, memoryview(pushed.body))
        else:
            self._out.send(_PUSHED[type(pushed)], 0, pushed)

    def _fetched(self, fetch: FetchAnswer) -> None:
        """Forget a waiting fetch that was answered or has failed."""
        self._fetches.discard(fetch)
        self._answered()

    def _answered(self) -> None:
        self._unanswered -= 1
        if self._read_paused and self._unanswered == UNANSWERED_MAX // 2:
            self._gateway.call_soon(self._catch_up)

    # Requests that the connection answers itself.

    def _hello(self, kind: int, correlation: int, head: memoryview, now_us: int) -> None:
        if kind != Kind.HELLO:
            raise ProtocolError("the first frame must be a Hello")
        hello: native.Hello = decode(kind, head)
        if not hello.protocol_min <= PROTOCOL_VERSION <= hello.protocol_max:
            raise UnsupportedVersion(
                f"the broker speaks version {PROTOCOL_VERSION} of the protocol, the client {hello.protocol_min} to "
                f"{hello.protocol_max}; upgrade the older of the two",
                protocol_min=PROTOCOL_VERSION,
                protocol_max=PROTOCOL_VERSION,
            )
        if self._gateway.draining:
            self.end(Draining(), correlation)
            return
        self._name = hello.name or hello.client
        peer = Peer("native", self._address, is_this_machine(self._transport.get_extra_info("peername")))
        mechanism, credentials, peer = transport_credentials(self._transport, peer)
        if hello.mechanism:
            mechanism, credentials = hello.mechanism, hello.credentials
        try:
            identity = self._gateway.authenticate(mechanism, credentials, peer)
        except HeadraceError as error:
            self.end(error, correlation)
            return
        if not isinstance(identity, PendingAnswer):
            self._open_session(correlation, hello, peer, identity, now_us)
            return
        self._authentication = identity
        self._unanswered += UNANSWERED_MAX  # handle no further frame until the client is authenticated
        identity.then(partial(self._authenticated, correlation, hello, peer))

    def _authenticated(
        self, correlation: int, hello: native.Hello, peer: Peer, outcome: Identity | HeadraceError
    ) -> None:
        """Open the session of a client after its authentication, or refuse it."""
        self._authentication = None
        self._unanswered -= UNANSWERED_MAX
        if self._ending:
            return
        if isinstance(outcome, HeadraceError):
            self.end(outcome, correlation)
            return
        if self._gateway.draining:
            self.end(Draining(), correlation)
            return
        self._open_session(correlation, hello, peer, outcome, self._gateway.now_us())
        self._gateway.call_soon(self._catch_up)

    def _open_session(self, correlation: int, hello: native.Hello, peer: Peer, identity: Identity, now_us: int) -> None:
        try:
            self._session = self._broker.connect(
                self._push,
                self._name,
                now_us,
                identity=identity,
                tenant=hello.tenant,
                address=peer.address,
                gateway=peer.gateway,
                is_local=peer.is_local,
                end=self.end,
            )
        except HeadraceError as error:
            self.end(error, correlation)
            return
        if self._session.access is not None and self._session.access.is_empty:
            self.end(NotAuthenticated(_CREDENTIALS_NEEDED), correlation)
            return
        self._gateway.has_session(self)
        self._out.tenant = self._session.turn_key
        self._touched_us = now_us
        features = [feature for feature in hello.features if feature in FEATURES]
        self._out.send(_ANSWER, correlation, self._gateway.welcome(now_us, features))

    def _hello_again(self, *_: object) -> None:
        raise ProtocolError("a connection must send Hello only once")

    def _ping(self, correlation: int, request: native.Ping, now_us: int) -> None:  # noqa: ARG002
        assert self._session is not None
        self._touched_us = now_us
        self._broker.touch(self._session, now_us)
        self._out.send(_ANSWER, correlation, native.Pong(now_us))

    def _source_failed(self, source: FrameSource, error: HeadraceError) -> None:
        """End a stream or fetch that failed, and send the error."""
        source.close()
        if isinstance(source, FetchAnswer):
            self._fetched(source)
        self._out.send(source.last_word, source.correlation, failure(error))

    def _release(self) -> None:
        """Release the broker's resources for this connection."""
        for fetch in self._fetches:
            fetch.close()
        self._fetches.clear()
        self._backlog.clear()
        self._gateway.hold(-self._held_bytes)
        self._held_bytes = 0
        self._frames = Frames(self._gateway.memory)
        if self._authentication is not None:
            self._authentication.cancel()
        session, self._session = self._session, None
        if session is not None:
            self._broker.disconnect(session, self._gateway.now_us())


def is_this_machine(peer: object) -> bool:
    """Whether a peer's address is on this machine: a Unix socket, one in this process, or a loopback address."""
    return not isinstance(peer, tuple) or ip_address(peer[0].partition("%")[0]).is_loopback


def _kept(received: Frame) -> Frame:
    """Copy a frame out of the shared receive buffer."""
    if received.lasting:
        return received
    head, body = memoryview(bytes(received.head)), memoryview(bytearray(received.body))
    return Frame(received.kind, received.correlation, head, body, lasting=True)
