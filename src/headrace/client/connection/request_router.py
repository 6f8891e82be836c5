"""Matches the frames of one connection with the requests, streams and memberships that they belong to; does no I/O."""

import itertools
import logging
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, Protocol

from headrace.client.connection.addresses import Target
from headrace.client.connection.clock import Clock, monotonic_us
from headrace.model.arguments import shortened
from headrace.model.errors import (
    ConnectionFailed,
    Fenced,
    HeadraceError,
    InvalidArgument,
    NotServing,
    ProtocolError,
    Timeout,
    error_of,
)
from headrace.model.leasing import Ack, Extend, Lease
from headrace.model.reading import Delivery, StreamCredit, StreamOpen, StreamOpened
from headrace.model.request import AnswerType, Declaration, Request
from headrace.model.requests import Assignment, Publish, TransactionStage
from headrace.model.standing_lease import LeaseCredit, LeaseDelivery, LeaseEnd
from headrace.model.subject_requests import (
    ReplySend,
    RequestDelivery,
    RequestSend,
    SubjectDelivery,
    SubjectEnd,
    SubjectPublish,
)
from headrace.wire.frames import HEADER_BYTES, Frame, frame
from headrace.wire.native import Kind, Ping, Pong, Welcome, decode, decode_answer

logger = logging.getLogger("headrace.client")

Bytes = bytes | bytearray | memoryview
Callback = Callable[[AnswerType | HeadraceError, Bytes], None]
"""Is called with the answer and its body, or with the error and nothing."""
LateCallback = Callable[[AnswerType, Bytes], None]
"""Is called with an answer for which nobody waits any more."""

RECEIVE_AT_ONCE_BYTES = 1 << 20
"""A delivery up to this size gets its memory in one piece."""
_SILENT_HEARTBEATS = 3
_CLOCK_AGE_S = 2.0
"""Maximum age of the clock's synchronization while somebody uses the clock."""
_CORRELATIONS = 1 << 32
_HOT = frozenset(
    {
        Publish,
        Lease,
        Ack,
        Extend,
        TransactionStage,
        StreamCredit,
        LeaseCredit,
        Ping,
        SubjectPublish,
        RequestSend,
        ReplySend,
    }
)
"""Requests that are frequent or large: their types are checked where their values come from."""
# Every look at a member of an enumeration is a call, and these are compared with the kind of every frame.
_ANSWER, _FAILURE, _DELIVERY = int(Kind.ANSWER), int(Kind.FAILURE), int(Kind.DELIVERY)
_LEASE_DELIVERY, _SUBJECT_DELIVERY = int(Kind.LEASE_DELIVERY), int(Kind.SUBJECT_DELIVERY)
_REQUEST_DELIVERY = int(Kind.REQUEST_DELIVERY)


class StreamReader(Protocol):
    """Receives the deliveries of a stream."""

    def delivered(self, delivery: Delivery, body: Bytes) -> None:
        """Take batches; the body stays valid."""

    def ended(self, error: HeadraceError) -> None:
        """Learn why the stream has ended."""


class LeaseReader(Protocol):
    """Receives the deliveries of a standing lease request."""

    def lease_delivered(self, delivery: LeaseDelivery, body: Bytes) -> None:
        """Take leased messages; the body is valid until this returns."""

    def lease_ended(self, standing: int, error: HeadraceError) -> None:
        """Learn why the broker has ended the request."""


class LiveReader(Protocol):
    """Receives the deliveries of a live subscription."""

    def live_delivered(self, delivery: SubjectDelivery, body: Bytes) -> None:
        """Take messages; the body is valid until this returns."""

    def live_ended(self, error: HeadraceError) -> None:
        """Learn why the broker has ended the subscription."""


class RequestReader(Protocol):
    """Receives the requests that a responder is to answer."""

    def request_delivered(self, router: "RequestRouter", delivery: RequestDelivery, value: bytes) -> None:
        """Take a request, which is to be answered on the same connection."""

    def serving_ended(self, error: HeadraceError) -> None:
        """Learn why the broker sends no more requests."""


class _PendingRequest(NamedTuple):
    """A request that the broker has not answered."""

    declared: Declaration
    callback: Callback[Any]
    deadline: float | None
    lasting: bool
    """Whether the body of the answer must outlive the callback."""
    late: Callback[Any] | None
    """Who gets an answer that comes after the deadline."""


class AnswerSink(Protocol):
    """Holds an answer, or the error in its place."""

    done: bool
    value: Any
    error: HeadraceError | None

    def resolve(self, value: Any) -> None: ...

    def fail(self, error: HeadraceError) -> None: ...


class AwaitedAnswer:
    """An answer for which somebody waits; if nobody does any more when it comes, it goes to `late`, once."""

    def __init__(self, outcome: AnswerSink, late: LateCallback[Any] | None) -> None:
        self._outcome = outcome
        self._late = [] if late is None else [late]
        self._gone = False

    def told(self, answer: Any, body: Bytes) -> None:
        """Resolve the outcome with the answer."""
        if isinstance(answer, HeadraceError):
            self._outcome.fail(answer)
        else:
            self._outcome.resolve((answer, body))
        if self._gone:
            self._give_back()

    def give_up(self) -> None:
        """Stop waiting; the answer goes to `late`."""
        self._gone = True
        if self._outcome.done:
            self._give_back()

    def _give_back(self) -> None:
        try:
            late = self._late.pop()
        except IndexError:  # nobody wants it, or another thread was quicker
            return
        if self._outcome.error is None:
            late(*self._outcome.value)


class RequestRouter:
    """The pending requests, streams and memberships of a connection.

    Every method may be called from any thread; callbacks run on the thread that receives the frame.
    """

    def __init__(self) -> None:
        self.closed = False
        self.draining = False
        self.welcome: Welcome | None = None
        self.clock: Clock | None = None
        """Is synchronized with the broker's time by each pong."""
        self.on_drain: Callable[[], None] | None = None
        self.on_not_serving: Callable[[Any, NotServing], None] | None = None
        """Is told once that the node answers requests with `not_serving`."""
        self.target: Target | None = None
        """Whom the connection is to."""
        self.members: dict[tuple[str, str], Callable[[Assignment], None]] = {}
        """Callbacks for assignments, by group and member."""
        self.leases: dict[int, LeaseReader] = {}
        """Receivers of standing lease requests, by the request's number."""
        self.live: dict[int, LiveReader] = {}
        """Live subscriptions, by number."""
        self.responders: dict[int, RequestReader] = {}
        """Responders, by number."""
        self._asked: dict[int, _PendingRequest] = {}
        self._streams: dict[int, StreamReader] = {}
        self._numbers = itertools.count(1)
        self._lost_by: HeadraceError | None = None
        self._said = False
        self._heard = False
        self._silent_s = 0.0
        self._quiet_s = 0.0

    def request_nowait(
        self, request: Request[AnswerType], body: Bytes, callback: Callback[AnswerType], timeout: float | None = None
    ) -> int:
        """Send a request whose answer goes to the callback; returns the number of the request."""
        number = self.queue_request(request, body, callback, timeout)
        self.flush()
        return number

    def queue_request(
        self,
        request: Request[AnswerType],
        body: Bytes,
        callback: Callback[AnswerType],
        timeout: float | None = None,
        reader: StreamReader | None = None,
        lasting: bool = True,
        late: Callback[AnswerType] | None = None,
    ) -> int:
        """Queue a request for the next `flush`, for callers that hold a guard; otherwise as `request_nowait`.

        With `lasting=False` the body of the answer is valid only until the callback returns, and is not copied. An
        answer that comes after the time-out goes to `late`.
        """
        number = self._number()
        declared = request.declared
        try:
            framed = frame(declared.kind, number, request, len(body))
        except (TypeError, ValueError, OverflowError) as error:
            raise InvalidArgument(f"{declared.name} has a value that cannot be sent: {shortened(error)}") from error
        if type(request) not in _HOT:
            _check_types(declared, framed)
        if reader is not None:
            self._streams[number] = reader
        self._said = True
        deadline = None if timeout is None else time.monotonic() + timeout
        self._asked[number] = _PendingRequest(declared, callback, deadline, lasting, late)
        if not self.closed:
            self.write(framed, body)
        if self.closed and self._asked.pop(number, None) is not None:
            self._streams.pop(number, None)
            self._tell(callback, self._loss_of(number), b"")
        return number

    def open_stream(self, request: StreamOpen, reader: StreamReader, callback: Callback[StreamOpened]) -> int:
        """Open a stream whose deliveries go to the reader; returns the number of the stream."""
        number = self.queue_request(request, b"", callback, None, reader)
        self.flush()
        return number

    def forget_stream(self, number: int) -> None:
        """Ignore further deliveries of a stream."""
        self._streams.pop(number, None)

    def tell(self, request: Request[Any], body: Bytes = b"") -> None:
        """Send a request that has no answer."""
        self.queue_tell(request, body)
        self.flush()

    def queue_tell(self, request: Request[Any], body: Bytes = b"") -> None:
        """Queue a request that has no answer for the next `flush`, for callers that hold a guard."""
        self._said = True
        if not self.closed:
            self.write(frame(request.declared.kind, self._number(), request, len(body)), body)

    def arrived(self, come: Frame) -> None:
        """Dispatch a frame that was received."""
        self._heard = True
        kind = come.kind
        if kind in (_ANSWER, _FAILURE):
            self._answered(come)
        elif kind == _DELIVERY:
            reader = self._streams.get(come.correlation)
            if reader is not None:
                body = come.body if come.lasting else bytes(come.body)
                reader.delivered(decode(kind, come.head), body)
        elif kind == _LEASE_DELIVERY:
            delivery: LeaseDelivery = decode(kind, come.head)
            holder = self.leases.get(delivery.standing)
            if holder is not None:
                holder.lease_delivered(delivery, come.body)
        elif kind == _REQUEST_DELIVERY:
            asked: RequestDelivery = decode(kind, come.head)
            responder = self.responders.get(asked.responder)
            if responder is not None:
                responder.request_delivered(self, asked, bytes(come.body))
        elif kind == _SUBJECT_DELIVERY:
            published: SubjectDelivery = decode(kind, come.head)
            listener = self.live.get(published.subscription)
            if listener is not None:
                listener.live_delivered(published, come.body)
        else:
            self._pushed(come)

    def lose(self, error: HeadraceError) -> None:
        """Fail all pending requests, because the connection is gone."""
        self._lost_by = error
        self.closed = True
        self._streams.clear()
        self.leases.clear()
        self.live.clear()
        self.responders.clear()
        while self._asked:
            try:
                number, asked = self._asked.popitem()
            except KeyError:  # another thread was quicker
                break
            self._tell(asked.callback, self._loss_of(number), b"")

    def tick(self, elapsed_s: float, heartbeat_s: float, ping_s: float) -> bool:
        """Fail overdue requests, and send a ping if nothing else was sent for a while.

        Returns whether the broker is alive. Time in which this program was blocked does not count.
        """
        now = time.monotonic()
        for number, asked in list(self._asked.items()):
            declared, callback, deadline, lasting, late = asked
            if deadline is not None and deadline <= now and self._asked.pop(number, None) is not None:
                if late is not None:
                    self._asked[number] = _PendingRequest(declared, late, None, lasting, None)
                self._tell(callback, Timeout(f"no answer to {declared.name} in time; it may still happen"), b"")
        self._quiet_s = 0.0 if self._said else self._quiet_s + elapsed_s
        self._silent_s = 0.0 if self._heard else self._silent_s + elapsed_s
        self._said = self._heard = False
        clock = self.clock
        if self._quiet_s >= ping_s or (clock is not None and clock.in_use and clock.age_s > _CLOCK_AGE_S):
            self._quiet_s = 0.0
            self.ping()
        return self._silent_s < _SILENT_HEARTBEATS * heartbeat_s

    def ping(self, times: int = 1) -> None:
        """Send a ping, whose answer has the broker's time; several times one after the other."""
        self.request_nowait(Ping(), b"", partial(self._ponged, monotonic_us(), times))

    def write(self, head: bytearray, body: Bytes) -> None:
        """Queue a frame to be sent, in the order of the calls."""
        raise NotImplementedError

    def before_flush(self, call: Callable[[], None]) -> None:
        """Run a callback before the next flush, so that the frames it queues are sent with the others."""
        raise NotImplementedError

    def end(self, error: HeadraceError | None = None) -> None:
        """End the connection, after what has been written; does not wait for it."""
        raise NotImplementedError

    def flush(self) -> None:
        """Send the queued frames as far as that does not block; the rest follows as soon as it can."""
        raise NotImplementedError

    def _number(self) -> int:
        number = next(self._numbers) % _CORRELATIONS
        while number in self._streams or number in self._asked:
            number = next(self._numbers) % _CORRELATIONS
        return number

    def _loss_of(self, number: int) -> HeadraceError:
        """What the sender of a request is told when the connection is gone."""
        lost = self._lost_by or ConnectionFailed("the connection to the broker is closed")
        if not isinstance(lost, NotServing) or self.welcome is None:
            return lost
        handled = lost.details.get("last_handled")
        if isinstance(handled, int) and 0 < (number - handled) % _CORRELATIONS < _CORRELATIONS // 2:
            return lost  # the node did nothing of it
        return ConnectionFailed(str(lost))  # nobody knows whether it took effect

    def _answered(self, come: Frame) -> None:
        how, number, head, body, lasts = come
        asked = self._asked.pop(number, None)
        if asked is None:
            if number == 0 and how == _FAILURE:
                decode_answer(Kind.PING, how, head)  # about the connection as a whole: raises
            return  # too late: it was given up
        declared, callback, _, lasting, _ = asked
        answer: Any
        try:
            answer = decode_answer(declared.kind, how, head)
        except HeadraceError as error:
            answer = error
            self._streams.pop(number, None)  # if it was to open a stream
            if isinstance(error, Fenced | NotServing):
                answer = self._not_serving(error)
        self._tell(callback, answer, bytes(body) if body and lasting and not lasts else body)

    def _not_serving(self, error: Fenced | NotServing) -> HeadraceError:
        """The node has lost its shard: let the connection be replaced; returns what the request's sender is told."""
        if isinstance(error, Fenced):
            lost = ConnectionFailed(f"the node that served has been replaced: {error}")
            self.end(lost)
            return lost
        if self.on_not_serving is not None:
            self.on_not_serving(self, error)
        return error

    def _ponged(self, asked_us: int, times: int, answer: Pong | HeadraceError, _body: Bytes) -> None:
        if isinstance(answer, Pong):
            if self.clock is not None:
                self.clock.sample(asked_us, answer.time_us, monotonic_us())
            if times > 1:
                self.ping(times - 1)

    def _pushed(self, come: Frame) -> None:
        if come.kind == Kind.STREAM_END:
            reader = self._streams.pop(come.correlation, None)
            if reader is not None:
                reader.ended(self._pushed_error(_error_told(come)))
        elif come.kind == Kind.ASSIGNMENT:
            assignment: Assignment = decode(come.kind, come.head)
            listener = self.members.get((assignment.group, assignment.member))
            if listener is not None:
                listener(assignment)
        elif come.kind == Kind.LEASE_END:
            end: LeaseEnd = decode(come.kind, come.head)
            holder = self.leases.pop(end.standing, None)
            if holder is not None:
                told = self._pushed_error(error_of(end.code, end.text, end.retryable, end.details))
                holder.lease_ended(end.standing, told)
        elif come.kind == Kind.SUBJECT_END:
            self._subject_ended(decode(come.kind, come.head))
        elif come.kind == Kind.DRAIN:
            self.draining = True
            if self.on_drain is not None:
                self.on_drain()
        else:
            raise ProtocolError(f"the broker sent a frame of kind {come.kind}, which this client does not know")

    def _pushed_error(self, error: HeadraceError) -> HeadraceError:
        return self._not_serving(error) if isinstance(error, Fenced | NotServing) else error

    def _subject_ended(self, end: SubjectEnd) -> None:
        error = self._pushed_error(error_of(end.code, end.text, end.retryable, end.details))
        receiver = None if end.subscription is None else self.live.pop(end.subscription, None)
        if receiver is not None:
            receiver.live_ended(error)
        responder = None if end.responder is None else self.responders.pop(end.responder, None)
        if responder is not None:
            responder.serving_ended(error)

    def _tell(self, callback: Callback[Any], answer: Any, body: Bytes) -> None:
        try:
            callback(answer, body)
        except Exception:
            # An error in one callback must not keep the others from their answers.
            logger.exception("callback for an answer of the broker failed")


def _check_types(declared: Declaration, framed: bytearray) -> None:
    """Decode a request as the broker will: it closes the connection, which all threads share, if it cannot."""
    try:
        decode(declared.kind, memoryview(framed)[HEADER_BYTES:])
    except ProtocolError as error:
        told = shortened(error.__cause__ or error)
        raise InvalidArgument(f"{declared.name} has a value that cannot be sent: {told}") from error


def _error_told(come: Frame) -> HeadraceError:
    try:
        decode_answer(Kind.PING, Kind.FAILURE, come.head)
    except HeadraceError as error:
        return error
    raise AssertionError("a failure is always raised")
