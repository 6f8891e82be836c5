"""Reading partitions: streams with credit, and fetches that wait for messages."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from headrace.broker.active_partition import ActivePartition
from headrace.broker.deadlines import Deadlines
from headrace.broker.pending_answer import AnswerWithBody
from headrace.broker.ports import Meter, Ports, Session
from headrace.broker.topics import TopicRegistry
from headrace.engines.api import Slice, as_headrace_error
from headrace.model.batch import leading_batches
from headrace.model.errors import HeadraceError, LimitExceeded, ProtocolError
from headrace.model.limits import BATCH_BYTES_MAX, STREAMS_MAX, THROTTLE_SECONDS_MAX
from headrace.model.reading import Fetch, Fetched, StreamClose, StreamCredit, StreamOpen, StreamOpened
from headrace.model.request import Request
from headrace.model.requests import Done

OpenedReading = tuple[Session, Request[Any], Callable[[HeadraceError], None]]
"""What a session has open: the request that opened it, and a callable that ends it with an error."""

_NO_CREDIT = -(1 << 62)
_RATE_WAIT_US_MAX = THROTTLE_SECONDS_MAX * 1_000_000
_TIMED_OUT_TOGETHER = 200
"""Maximum fetches answered without messages per tick."""


def _nobody() -> None:
    """The callback of a stream that nobody reads."""


class Stream:
    """One reader's way through a partition, as far as its credit reaches.

    The reader calls `read` when it has room for more; `on_ready` tells when there may be something again.
    """

    def __init__(
        self,
        active: ActivePartition,
        request: StreamOpen,
        readers: "Readers",
        session: Session,
        closed: Callable[[], object],
    ) -> None:
        active.check_offset(request.offset)
        self._readers = readers
        self._session = session
        self.answer = StreamOpened(active.partition.first_offset, active.end_offset, active.topic_id)
        self.request = request
        self._failure: HeadraceError | None = None
        self._active = active
        self._offset = request.offset
        self._credit_bytes = request.credit_bytes
        self._closed = closed
        self._on_ready = _nobody
        self._starved = False
        """Whether the last read found nothing, and the partition will call back."""
        self._is_open = True
        self.delivery = 0
        """The number of its last delivery, if its session is metered; 0: it had none."""

    def start(self, on_ready: Callable[[], None]) -> None:
        """Set the callback for new messages after `read` or `has_more` found none."""
        self._on_ready = on_ready

    def read(self, bytes_max: int, now_us: int) -> Slice | None:
        """Whole batches, at least one; None when there is none now, or no credit. An error ends the stream."""
        if self._credit_bytes <= 0 or not self._is_open:
            if self._failure is not None and self._is_open:
                raise self._failure
            return None
        self._starved = True  # set first: the partition may call back during the read
        meter = self._session.meter
        if meter is not None and meter.is_over:
            return None  # woken when more may be delivered
        found = _read(self._active, self._offset, bytes_max, now_us, self.wake, meter)
        if found is not None:
            if meter is not None:
                self.delivery = self._readers.next_delivery()
            if self._readers.trace is not None:
                place = self._active.topic, self._active.number, self._session.client
                self._readers.trace(*place, self._offset, found.next_offset, len(found.view))
            self._offset = found.next_offset
            self._credit_bytes -= len(found.view)
            self._starved = self._offset >= found.end_offset
            if self._starved:
                self._active.listen(self.wake)
        return found

    def has_more(self) -> bool:
        """Whether `read` can be called again at once."""
        return self._is_open and not self._starved and self._credit_bytes > 0

    def grant(self, credit_bytes: int) -> None:
        """Add credit in bytes."""
        self._credit_bytes += credit_bytes
        if self.has_more():
            self._on_ready()

    def fail(self, error: HeadraceError) -> None:
        """End the stream with an error, which the next read raises."""
        if self._is_open:
            self._failure, self._credit_bytes = error, _NO_CREDIT
            self._on_ready()

    def close(self) -> None:
        """End the stream."""
        if self._is_open:
            self._is_open = False
            self._on_ready = _nobody
            self._active.forget(self.wake)
            self._closed()

    def wake(self) -> None:
        """Tell the reader that there may be something again."""
        self._starved = False
        if self._credit_bytes > 0:
            self._on_ready()


class WaitingFetch:
    """A fetch that waits for messages; its batches are read when the connection has room for them."""

    def __init__(
        self,
        active: ActivePartition,
        session: Session,
        request: Fetch,
        deadline_us: int,
        closed: Callable[[], None],
    ) -> None:
        self.session = session
        self.request = request
        self._failure: HeadraceError | None = None
        self._active = active
        self._end_offset = active.end_offset
        self._deadline_us = deadline_us
        self._closed = closed
        self._on_ready = _nobody
        self.delivery = 0
        """It had none."""
        active.listen(self.wake)

    def start(self, on_ready: Callable[[], None]) -> None:
        """Set the callback for when `read` may have the answer."""
        self._on_ready = on_ready

    def read(self, now_us: int) -> AnswerWithBody[Fetched] | None:
        """The final answer; None while the fetch continues to wait."""
        if self._failure is not None:
            raise self._failure
        meter, answer = self.session.meter, None
        if meter is None or not meter.is_over:  # else it is woken when more may be delivered
            answer = _fetched(self._active, self.request, now_us, self.wake, meter)
        if answer is None and now_us < self._deadline_us:
            return None
        self.close()
        return answer or AnswerWithBody(Fetched(self.request.offset, self._end_offset), b"")

    def time_out(self) -> None:
        """End the wait; the next read answers without messages."""
        self._deadline_us = 0
        self._on_ready()

    def fail(self, error: HeadraceError) -> None:
        """End the wait; the next read raises an error."""
        self._failure = error
        self._on_ready()

    def close(self) -> None:
        """Cancel the fetch, as nobody waits for the answer."""
        self._on_ready = _nobody
        self._active.forget(self.wake)
        self._closed()

    def wake(self) -> None:
        """Tell the reader that the answer may be there."""
        self._on_ready()


class Readers:
    """The streams of all sessions, and the waiting fetches."""

    def __init__(self, topics: TopicRegistry, ports: Ports) -> None:
        self._topics = topics
        self._ports = ports
        self._streams: dict[Session, dict[int, Stream]] = {}
        self._fetches: dict[int, WaitingFetch] = {}
        """The waiting fetches by number."""
        self._deadlines: Deadlines[int] = Deadlines()
        self._number = self._deliveries = 0
        self.trace: Callable[[str, int, str, int, int, int], None] | None = None
        """Logs each delivery of a stream, if any is to be: topic, partition, client, first and next offset, bytes."""

    def fetch(self, session: Session, request: Fetch, now_us: int) -> AnswerWithBody[Fetched] | WaitingFetch:
        """Read batches, now or when there are some."""
        active = self._topics.active(self._topics.get(request.topic), request.partition)
        active.check_offset(request.offset)
        end_offset = active.end_offset
        if request.verify and request.offset < end_offset:
            active.partition.batch_at(request.offset)
        if session.is_over_rate and request.wait_ms > 0 and request.offset < end_offset:
            return self._wait(active, session, request, now_us + max(request.wait_ms * 1000, _RATE_WAIT_US_MAX))
        answer = _fetched(active, request, now_us, None, session.meter)
        if answer is not None:
            return answer
        if request.wait_ms <= 0:
            return AnswerWithBody(Fetched(request.offset, end_offset), b"")
        return self._wait(active, session, request, now_us + request.wait_ms * 1000)

    def _wait(self, active: ActivePartition, session: Session, request: Fetch, deadline_us: int) -> WaitingFetch:
        self._number += 1
        number, next_us = self._number, self._deadlines.next_us()
        fetch = WaitingFetch(active, session, request, deadline_us, partial(self._forget, number))
        self._fetches[number] = fetch
        self._deadlines.set(number, deadline_us)
        if next_us is None or deadline_us < next_us:
            self._ports.wake_at(deadline_us)
        return fetch

    def _forget(self, number: int) -> None:
        self._fetches.pop(number, None)
        self._deadlines.remove(number)

    def open(self, session: Session, request: StreamOpen) -> Stream:
        """Open a stream; the session has no other of that number."""
        streams = self._streams.setdefault(session, {})
        if request.stream in streams:
            raise ProtocolError(f"there is already a stream {request.stream}")
        if len(streams) >= STREAMS_MAX:
            raise LimitExceeded(
                f"the connection has {STREAMS_MAX} streams, which is the maximum; close some, or connect once more"
            )
        active = self._topics.active(self._topics.get(request.topic), request.partition)
        stream = Stream(active, request, self, session, lambda: streams.pop(request.stream, None))
        streams[request.stream] = stream
        return stream

    def credit(self, session: Session, request: StreamCredit) -> Done:
        """Add credit to a stream; ignores one that has ended."""
        if request.bytes < 0:
            raise ProtocolError("credit must not be negative")
        stream = self._streams.get(session, {}).get(request.stream)
        if stream is not None:
            stream.grant(request.bytes)
        return Done()

    def close(self, session: Session, request: StreamClose) -> Done:
        """End a stream."""
        stream = self._streams.get(session, {}).get(request.stream)
        if stream is not None:
            stream.close()
        return Done()

    def disconnect(self, session: Session) -> None:
        """End all streams of a session."""
        for stream in list(self._streams.pop(session, {}).values()):
            stream.close()

    def wake(self, sessions: set[Session]) -> None:
        """Let sessions read again, to which nothing was delivered because of their tenant's rate."""
        waiting: list[Stream | WaitingFetch] = [one for one in self._fetches.values() if one.session in sessions]
        for session in sessions:
            waiting += self._streams.get(session, {}).values()
        for one in sorted(waiting, key=lambda one: one.delivery):  # those that got something long ago first
            one.wake()

    def next_delivery(self) -> int:
        """Number a delivery, so that streams are woken in the order of their last ones."""
        self._deliveries += 1
        return self._deliveries

    def opened(self) -> Iterator[OpenedReading]:
        """All streams, and all fetches that wait."""
        for session, streams in self._streams.items():
            for stream in streams.values():
                yield session, stream.request, stream.fail
        for fetch in self._fetches.values():
            yield fetch.session, fetch.request, fetch.fail

    @property
    def next_tick_us(self) -> int | None:
        """When the next waiting fetch times out."""
        return self._deadlines.next_us()

    def tick(self, now_us: int) -> None:
        """Answer the fetches whose wait time is over."""
        for number in self._deadlines.pop_due(now_us, _TIMED_OUT_TOGETHER):
            self._fetches[number].time_out()


def _fetched(
    active: ActivePartition, request: Fetch, now_us: int, on_ready: Callable[[], None] | None, meter: Meter | None
) -> AnswerWithBody[Fetched] | None:
    """The available batches; if there are none, returns None and calls `on_ready` once when there may be some."""
    bytes_max = max(1, min(request.bytes_max, BATCH_BYTES_MAX))
    found = _read(active, request.offset, bytes_max, now_us, on_ready, meter)
    if found is None:
        return None
    return AnswerWithBody(Fetched(found.next_offset, found.end_offset), found.view)


def _read(
    active: ActivePartition,
    offset: int,
    bytes_max: int,
    now_us: int,
    on_ready: Callable[[], None] | None,
    meter: Meter | None,
) -> Slice | None:
    """Read whole batches, at least one, and as many as the rate allows, which counts them."""
    messages_max = 0
    if meter is not None:
        messages_max, bytes_left = meter.room(now_us)
        bytes_max = min(bytes_max, bytes_left)
    try:
        found = active.read(offset, bytes_max, now_us, on_ready)
    except OSError as error:
        raise as_headrace_error(error) from error
    if meter is None or found is None:
        return found
    size_bytes, messages, next_offset = leading_batches(found.view, messages_max)
    if size_bytes < len(found.view):
        found = found._replace(view=found.view[:size_bytes], next_offset=next_offset)
    meter.delivered(min(messages, found.next_offset - offset), len(found.view), now_us)
    return found
