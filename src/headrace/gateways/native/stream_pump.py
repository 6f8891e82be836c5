"""Batches on their way to a client: streams that go on, and fetches that may wait for something to come."""

from asyncio import TimerHandle
from collections.abc import Callable
from typing import TYPE_CHECKING, ClassVar

from headrace.gateways.native.frame_writer import FrameWriter
from headrace.model.limits import BATCH_BYTES_MAX
from headrace.wire.native import Delivery, Fetch, Fetched, Kind

if TYPE_CHECKING:
    from headrace.broker.streams import Stream

DELIVERY_BYTES = 512 << 10
"""What a delivery's body aims at: large enough to be quick, small enough that many streams share a connection."""
_DELIVERY = int(Kind.DELIVERY)  # every look at a member of an enumeration is a call

CallLater = Callable[[float, Callable[[], None]], TimerHandle]


class FrameSource:
    """One who sends batches when it is its turn."""

    __slots__ = ("_out", "correlation", "queued", "stream")

    last_word: ClassVar[Kind]
    """The kind of frame that tells the client of its failure."""

    def __init__(self, out: FrameWriter, correlation: int) -> None:
        self._out = out
        self.correlation = correlation
        self.queued = False
        """Whether the connection has it among those that want a turn."""
        self.stream: Stream | None = None

    def turn(self, now_us: int) -> int:
        """Send something; returns how many bytes that were."""
        raise NotImplementedError

    def close(self) -> None:
        """Let go of the stream."""
        stream, self.stream = self.stream, None
        if stream is not None:
            stream.close()

    def _want_turn(self) -> None:
        if self.stream is not None and not self.queued:
            self.queued = True
            self._out.queue(self)


class StreamPump(FrameSource):
    """Moves a stream's batches to a connection, as far as the client's credit reaches."""

    __slots__ = ("_credit_bytes", "_starved")

    last_word = Kind.STREAM_END

    def __init__(self, out: FrameWriter, correlation: int, credit_bytes: int) -> None:
        super().__init__(out, correlation)
        self._credit_bytes = credit_bytes
        self._starved = False
        """There was nothing to read; the stream will say when there is."""

    def start(self, stream: "Stream") -> None:
        """Begin, with the next turn."""
        self.stream = stream
        self._go_on()

    def on_ready(self) -> None:
        """The stream has something again. Not read here: the broker may be in the middle of a request."""
        self._starved = False
        self._go_on()

    def grant(self, credit_bytes: int) -> None:
        """The client takes so much more."""
        self._credit_bytes += credit_bytes
        self._go_on()

    def turn(self, now_us: int) -> int:
        """Send one delivery, if there is something to send and credit for it."""
        self.queued = False
        if self.stream is None or self._credit_bytes <= 0:
            return 0
        # Set before: the stream may call on_ready as soon as it has said that there is nothing.
        self._starved = True
        found = self.stream.read(DELIVERY_BYTES, now_us)
        if found is None:
            return 0
        view, next_offset, end_offset = found
        self._credit_bytes -= len(view)
        self._out.send_batches(_DELIVERY, self.correlation, Delivery(next_offset, end_offset), view)
        if next_offset < end_offset:
            self._starved = False
            self._go_on()
        else:
            self.stream.listen()
        return len(view)

    def _go_on(self) -> None:
        if self._credit_bytes > 0 and not self._starved:
            self._want_turn()


class FetchAnswer(FrameSource):
    """A fetch: answered at once if there is something, or else when there is or its time is over."""

    __slots__ = ("_bytes_max", "_done", "_later", "_offset", "_timer", "_wait_s")

    last_word = Kind.FAILURE

    def __init__(
        self,
        out: FrameWriter,
        correlation: int,
        request: Fetch,
        later: CallLater,
        done: Callable[["FetchAnswer"], None],
    ) -> None:
        super().__init__(out, correlation)
        self._later = later
        self._done = done
        self._offset = request.offset
        self._bytes_max = max(1, min(request.bytes_max, BATCH_BYTES_MAX))
        self._wait_s = request.wait_ms / 1000
        self._timer: TimerHandle | None = None

    def start(self, stream: "Stream", now_us: int) -> None:
        """Look for the first time."""
        self.stream = stream
        self.turn(now_us)

    def on_ready(self) -> None:
        """There is something now."""
        self._want_turn()

    def _time_out(self) -> None:
        self._wait_s = 0.0
        self._want_turn()

    def turn(self, now_us: int) -> int:
        """Answer, or go on waiting."""
        self.queued = False
        if self.stream is None:
            return 0
        end_offset = self.stream.end_offset
        found = self.stream.read(self._bytes_max, now_us)
        if found is None and self._wait_s > 0:
            if self._timer is None:
                self._timer = self._later(self._wait_s, self._time_out)
            return 0
        view, next_offset, end_offset = found or (memoryview(b""), self._offset, end_offset)
        self._done(self)
        self._out.send_batches(Kind.ANSWER, self.correlation, Fetched(next_offset, end_offset), view)
        return len(view)

    def close(self) -> None:
        """Wait no longer, and let go of the stream."""
        if self._timer is not None:
            self._timer.cancel()
        super().close()
