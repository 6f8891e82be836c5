"""Sends frames on a connection: small ones together, large ones without copying, with back-pressure."""

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from typing import ClassVar

from headrace.model.errors import HeadraceError, InternalError, LimitExceeded
from headrace.model.limits import FRAME_BYTES_MAX
from headrace.wire.frames import HEADER_BYTES, frame
from headrace.wire.native import Kind, failure

logger = logging.getLogger("headrace.native")

_WRITE_BYTES_HIGH = 512 << 10
_WRITE_BYTES_LOW = 128 << 10
_SMALL_BYTES = 8 << 10
"""A body up to this size is copied and sent together with others; a larger one is sent without copying."""
_TOGETHER_BYTES = 64 << 10
_TURN_BYTES = 1 << 20
"""How much one connection sends before the next one is served."""
_SENDER_BYTES_MIN = 16 << 10
"""What a source's turn counts for at least, so that many sources with little to send do not take long either."""


class FrameSource:
    """Sends batches when it has its turn."""

    __slots__ = ("_out", "correlation", "queued")

    last_word: ClassVar[Kind]
    """The kind of frame that tells the client of a failure."""

    def __init__(self, out: "FrameWriter", correlation: int) -> None:
        self._out = out
        self.correlation = correlation
        self.queued = False
        """Whether it waits for a turn."""

    def turn(self, now_us: int) -> int:
        """Send something; returns the number of bytes."""
        raise NotImplementedError

    def close(self) -> None:
        """Send nothing more."""
        raise NotImplementedError

    def want_turn(self) -> None:
        """Wait for a turn: what there is may not be read in the middle of a request to the broker."""
        if not self.queued:
            self.queued = True
            self._out.queue(self)


class FrameWriter:
    """The sending half of a connection."""

    def __init__(
        self,
        transport: asyncio.Transport,
        deliver_soon: Callable[["FrameWriter"], None],
        flush_soon: Callable[["FrameWriter"], None],
        failed: Callable[[FrameSource, HeadraceError], None],
    ) -> None:
        self._transport = transport
        self._deliver_soon = deliver_soon
        self._flush_soon = flush_soon
        self._failed = failed
        self._together = bytearray()
        """Small frames that go out with the next flush."""
        self._flush_comes = False
        self._waiting: deque[FrameSource] = deque()
        """Sources that have something to send."""
        self._turn_comes = False
        """Whether it is in the delivery queue, or is delivering."""
        self._unsent_bytes = 0
        self._closed = False
        self.tenant = ""
        """The tenant of the session; deliveries to tenants take turns."""
        self.paused = False
        """Whether the client receives too slowly."""
        self.corked = False
        """Whether the caller flushes anyway."""
        transport.set_write_buffer_limits(high=_WRITE_BYTES_HIGH, low=_WRITE_BYTES_LOW)

    def send(self, kind: int, correlation: int, head: object) -> None:
        """Send a frame without a body, together with others of this loop turn."""
        if self._closed:
            return
        self._together += _encoded(kind, correlation, head)
        self._expect_flush()

    def send_batches(self, kind: int, correlation: int, head: object, body: memoryview) -> None:
        """Send a frame with batches, which are copied only if they are small."""
        if self._closed:
            return
        self._together += frame(kind, correlation, head, len(body))
        if len(body) <= _SMALL_BYTES:
            self._together += body
            self._expect_flush()
        else:
            together, self._together = self._together, bytearray()
            self._transport.writelines([together, body])

    def flush(self) -> None:
        """Write the small frames that wait."""
        self._flush_comes = False
        if self._together:
            together, self._together = self._together, bytearray()
            self._transport.write(together)

    def progressed(self) -> bool:
        """Whether the client has received something since the last call."""
        before, self._unsent_bytes = self._unsent_bytes, self._transport.get_write_buffer_size()
        return self._unsent_bytes != before

    def queue(self, sender: FrameSource) -> None:
        """Give a source a turn, when the client receives."""
        self._waiting.append(sender)
        self._take_turns_soon()

    def resume(self) -> None:
        """Go on sending: the client has received enough."""
        self.paused = False
        self._take_turns_soon()

    def deliver(self, now_us: int) -> None:
        """Give sources their turns, up to a limit of bytes; the others have theirs later."""
        self.corked = True
        room = _TURN_BYTES
        while self._waiting and room > 0 and not self.paused:
            room -= max(self._turn(self._waiting.popleft(), now_us), _SENDER_BYTES_MIN)
        self.corked = self._turn_comes = False
        self.flush()
        self._take_turns_soon()

    def close(self) -> None:
        """Send nothing more."""
        self._closed = True
        self._waiting.clear()
        self._together = bytearray()

    def _expect_flush(self) -> None:
        if len(self._together) >= _TOGETHER_BYTES:
            self.flush()
        elif not self.corked and not self._flush_comes:
            self._flush_comes = True
            self._flush_soon(self)

    def _take_turns_soon(self) -> None:
        if self._waiting and not self._turn_comes and not self.paused:
            self._turn_comes = True
            self._deliver_soon(self)

    def _turn(self, sender: FrameSource, now_us: int) -> int:
        try:
            return sender.turn(now_us)
        except HeadraceError as error:
            self._failed(sender, error)
        except Exception:
            logger.exception("read for a client failed")
            self._failed(sender, InternalError())
        return 0


def _encoded(kind: int, correlation: int, head: object) -> bytearray:
    """Encode a frame, or a failure if it cannot be encoded."""
    try:
        data = frame(kind, correlation, head)
    except (TypeError, ValueError, OverflowError, RecursionError):
        logger.exception("answer cannot be encoded  kind=%s", kind)
        return frame(Kind.FAILURE, correlation, failure(InternalError()))
    if len(data) > HEADER_BYTES + FRAME_BYTES_MAX:
        too_large = LimitExceeded(f"the answer would have {len(data)} bytes; ask for less")
        return frame(Kind.FAILURE, correlation, failure(too_large))
    return data
