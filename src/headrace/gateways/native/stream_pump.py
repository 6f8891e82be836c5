"""Sends batches to a client: deliveries of streams, and answers of fetches that wait for messages."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from headrace.gateways.native.frame_writer import FrameSource, FrameWriter
from headrace.model.reading import Delivery
from headrace.wire.native import Kind

if TYPE_CHECKING:
    from headrace.broker.streams import Stream, WaitingFetch

DELIVERY_BYTES = 512 << 10
"""The target size of a delivery: large enough for throughput, small enough to share a connection among streams."""
_DELIVERY = int(Kind.DELIVERY)  # looking up an enum member on every frame would be slow


class StreamPump(FrameSource):
    """Sends a stream's batches to a connection."""

    __slots__ = ("_stream",)

    last_word = Kind.STREAM_END

    def __init__(self, out: FrameWriter, correlation: int, stream: "Stream") -> None:
        super().__init__(out, correlation)
        self._stream = stream
        stream.start(self.want_turn)
        self.want_turn()

    def turn(self, now_us: int) -> int:
        """Send one delivery, if the stream has messages and credit."""
        self.queued = False
        found = self._stream.read(DELIVERY_BYTES, now_us)
        if found is None:
            return 0
        view, next_offset, end_offset, cost_bytes = found
        self._out.send_batches(_DELIVERY, self.correlation, Delivery(next_offset, end_offset), view)
        if self._stream.has_more():
            self.want_turn()
        return max(len(view), cost_bytes)

    def close(self) -> None:
        """Close the stream."""
        self._stream.close()


class FetchAnswer(FrameSource):
    """Answers a waiting fetch when messages arrive or its wait time ends."""

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
        """Answer the fetch, or continue to wait."""
        self.queued = False
        found = self._fetch.read(now_us)
        if found is None:
            return 0
        body = memoryview(found.body)
        self._answered(self)
        self._out.send_batches(Kind.ANSWER, self.correlation, found.answer, body)
        return len(body)

    def close(self) -> None:
        """Cancel the fetch."""
        self._fetch.close()
