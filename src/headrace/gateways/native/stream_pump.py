"""Batches on their way to a client: streams that go on, and fetches that may wait for something to come."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from headrace.gateways.native.frame_writer import FrameSource, FrameWriter
from headrace.model.reading import Delivery
from headrace.wire.native import Kind

if TYPE_CHECKING:
    from headrace.broker.streams import Stream, WaitingFetch

DELIVERY_BYTES = 512 << 10
"""What a delivery's body aims at: large enough to be quick, small enough that many streams share a connection."""
_DELIVERY = int(Kind.DELIVERY)  # every look at a member of an enumeration is a call


class StreamPump(FrameSource):
    """Moves a stream's batches to a connection."""

    __slots__ = ("_stream",)

    last_word = Kind.STREAM_END

    def __init__(self, out: FrameWriter, correlation: int, stream: "Stream") -> None:
        super().__init__(out, correlation)
        self._stream = stream
        stream.start(self.want_turn)
        self.want_turn()

    def turn(self, now_us: int) -> int:
        """Send one delivery, if there is something to send and credit for it."""
        self.queued = False
        found = self._stream.read(DELIVERY_BYTES, now_us)
        if found is None:
            return 0
        view, next_offset, end_offset = found
        self._out.send_batches(_DELIVERY, self.correlation, Delivery(next_offset, end_offset), view)
        if self._stream.has_more():
            self.want_turn()
        return len(view)

    def close(self) -> None:
        """Close the stream."""
        self._stream.close()


class FetchAnswer(FrameSource):
    """A fetch that waits: answered when there is something or its time is over."""

    __slots__ = ("_answered", "_fetch")

    last_word = Kind.FAILURE

    def __init__(
        self,
        out: FrameWriter,
        correlation: int,
        fetch: "WaitingFetch",
        answered: Callable[["FetchAnswer"], None],
    ) -> None:
        super().__init__(out, correlation)
        self._fetch = fetch
        self._answered = answered
        fetch.start(self.want_turn)

    def turn(self, now_us: int) -> int:
        """Answer, or go on waiting."""
        self.queued = False
        found = self._fetch.read(now_us)
        if found is None:
            return 0
        body = memoryview(found.body)
        self._answered(self)
        self._out.send_batches(Kind.ANSWER, self.correlation, found.answer, body)
        return len(body)

    def close(self) -> None:
        """Wait no longer."""
        self._fetch.close()
