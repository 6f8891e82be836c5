"""How a producer's batches get to the broker: in order, exactly once, and no more at once than there is room for."""

import logging
import secrets
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from headrace.client._async.catalogue import AsyncCatalogue
from headrace.client._async.concurrency import Monitor, Timer, Timers, now
from headrace.client._async.line import AsyncLine
from headrace.client._async.link import Link
from headrace.client.backoff import Backoff
from headrace.client.exchange import Bytes
from headrace.client.failing import Undelivered
from headrace.client.lanes import Lane
from headrace.client.outgoing import AfterAck, Parcel
from headrace.client.results import Receipt, receipt_at
from headrace.model.durability import Durability
from headrace.model.errors import Busy, Closed, HeadraceError, PartitionNotFound, Timeout, TopicNotFound
from headrace.model.requests import Publish, Published
from headrace.wire.native import Kind

logger = logging.getLogger("headrace.client")

_DURABILITIES = tuple(Durability)
_PUBLISH = Kind.PUBLISH  # every look at a member of an enumeration is a call
_SWEEP_S = 0.5
_FAILED_MAX = 1000
_SPARE_BUFFERS_MAX = 64
_SPARE_BYTES_MAX = 256 << 10
"""Memory that was used before is quicker than fresh memory, whose pages the kernel has to clear first."""


class AsyncShipping:
    """All lanes of a producer."""

    def __init__(
        self,
        line: AsyncLine,
        catalogue: AsyncCatalogue,
        timers: Timers,
        *,
        timeout: float,
        buffer_bytes: int,
        block: bool,
        after_ack: Sequence[AfterAck],
        on_room: Callable[[Lane], None],
    ) -> None:
        self.closed = False
        self._line = line
        self._catalogue = catalogue
        self._timers = timers
        self._timeout = timeout
        self._buffer_bytes = buffer_bytes
        self._block = block
        self._after_ack = tuple(after_ack)
        self._on_room = on_room
        self._begin()
        line.listen(self)

    def _begin(self) -> None:
        """Begin with an identity that no other process has, and nothing under way."""
        self.monitor = Monitor()
        self.lane_at: dict[tuple[str, int], Lane] = {}
        """The lanes there are, by topic and partition."""
        self._producer_id = secrets.randbits(63) + 16
        self._buffered = 0
        self._spare: list[bytearray] = []
        self._failed: list[Parcel] = []
        self._backoff = Backoff()
        self._sweeping = False
        self._sweeper: Timer | None = None

    def disown(self) -> None:
        """In a forked child: what is under way is the parent's to deliver, under the parent's identity."""
        self._begin()
        if not self.closed:
            self._line.listen(self)

    def lane(self, topic: str, partition: int) -> Lane:
        """The lane of a partition."""
        lane = self.lane_at.get((topic, partition))
        if lane is None:
            lane = self.lane_at[topic, partition] = Lane(topic, partition, self._producer_id)
        return lane

    def lanes(self) -> list[Lane]:
        """Those there are."""
        return list(self.lane_at.values())

    @property
    def buffered_bytes(self) -> int:
        """How much waits for the broker's acknowledgement."""
        return self._buffered

    @property
    def open(self) -> bool:
        """Whether there is room for more, without waiting."""
        return self._buffered < self._buffer_bytes and not self.closed

    async def room(self, deadline: float) -> None:
        """Wait until there is room for more, or raise Busy; with the guard held."""
        if self.closed:
            raise Closed("the producer is closed")
        while self._buffered >= self._buffer_bytes:
            if not self._block:
                raise Busy(f"the producer holds {self._buffered} bytes that the broker has not acknowledged")
            if not await self.monitor.wait(deadline - now()):
                raise Busy(f"the producer's buffer of {self._buffer_bytes} bytes was full for {self._timeout:.3g} s")
            if self.closed:
                raise Closed("the producer is closed")

    def ship(self, lane: Lane, parcel: Parcel) -> None:
        """Encode the messages and queue them as soon as it is their turn; with the guard held, so `flush` after it.

        If they cannot be encoded, their outcome tells.
        """
        try:
            buffer = self._spare.pop() if self._spare else None
            parcel.encode(time.time_ns() // 1000, lane.codec, lane.expected_stamp(), buffer)
        except BufferError:  # somebody still looks at the old bytes
            parcel.encode(time.time_ns() // 1000, lane.codec, lane.expected_stamp(), None)
        except HeadraceError as error:
            self._give_up(parcel, error)
            return
        assert parcel.batch is not None
        parcel.bytes = parcel.batch.length
        self._buffered += parcel.bytes
        link = self._line.link
        if link is not None and not link.draining and lane.depart(parcel):
            self._post(link, lane, parcel)
        else:
            lane.waiting.append(parcel)
            self._launch(lane)
        if not self._sweeping:
            self._sweeping = True
            self._sweeper = self._timers.later(_SWEEP_S, self._sweep)

    def soon(self, call: Callable[[], None]) -> None:
        """Call this after what is going on now, so that what others publish at the same time goes with it."""
        link = self._line.link
        if link is None:
            self._timers.soon(call)
        else:
            link.before_flush(call)

    def flush(self) -> None:
        """Let go what was queued to be sent; without the guard, for that may take a moment."""
        link = self._line.link
        if link is not None:
            link.flush()

    async def drained(self, timeout: float) -> None:
        """Wait until nothing is under way; raises Undelivered if messages were given up that nobody asked about."""
        deadline = now() + timeout
        with self.monitor.guard:
            while not all(lane.idle for lane in self.lane_at.values()):
                if not await self.monitor.wait(deadline - now()):
                    break
            left = sum(parcel.count for lane in self.lane_at.values() for parcel in [*lane.flying, *lane.waiting])
            failed, self._failed = [parcel for parcel in self._failed if parcel.unobserved], []
        if left:
            raise Timeout(f"{left} messages were not acknowledged within {timeout:.3g} s; they may still be", left=left)
        if failed:
            raise Undelivered(sum(parcel.unobserved for parcel in failed), failed[0].last_error)

    def close(self) -> int:
        """Give up what is left; returns how many messages that were."""
        with self.monitor.guard:
            self.closed = True
            self._on_room = _no_room
            if self._sweeper is not None:
                self._sweeper.cancel()
            parcels = [parcel for lane in self.lane_at.values() for parcel in [*lane.flying, *lane.waiting]]
            self.lane_at.clear()
            self.monitor.notify()
        self._line.forget(self)
        for parcel in parcels:
            self._give_up(parcel, Closed("the producer was closed before the broker acknowledged the message"))
        return sum(parcel.count for parcel in parcels)

    def link_up(self, link: Link) -> None:
        """There is a new connection: send again what the broker has not acknowledged."""
        with self.monitor.guard:
            for lane in self.lanes():
                self._regroup(lane)
                self._launch(lane)
        link.flush()

    def link_drains(self) -> None:
        """The broker is going: hold back what is new."""

    def _launch(self, lane: Lane) -> None:
        link = self._line.link
        if link is not None and not link.draining:
            for parcel in lane.launch():
                self._post(link, lane, parcel)

    def _regroup(self, lane: Lane) -> None:
        link = self._line.link
        if lane.quiet and link is not None and not link.draining and not link.closed:
            for parcel in lane.regroup():
                self._post(link, lane, parcel)

    def _post(self, link: Link, lane: Lane, parcel: Parcel) -> None:
        head = Publish(lane.topic, lane.partition, parcel.durability, parcel.expected_offset)
        assert parcel.batch is not None
        link.queue_request(_PUBLISH, head, parcel.batch.data, partial(self._answered, lane, parcel))

    def _answered(self, lane: Lane, parcel: Parcel, answer: Any, _body: Bytes) -> None:
        if type(answer) is not Published:
            self._refused(lane, parcel, answer)
            return
        receipt = Receipt(
            lane.topic,
            lane.partition,
            answer.base_offset,
            parcel.count,
            _DURABILITIES[answer.durability],
            answer.duplicate,
            answer.append_time,
            answer.topic_id,
        )
        with self.monitor.guard:
            lane.acknowledged(parcel)
            self._backoff.reset()
            self._release(parcel)
            more = bool(lane.stalled or lane.hurried or lane.waiting)  # as it is now: what waits is about to go
            if more:
                self._go_on(lane)
            self.monitor.notify()
        if more:
            self.flush()
        if not parcel.outcome.done:  # else it was given up in the meantime
            parcel.outcome.settle(receipt)
            if parcel.callbacks or self._after_ack:
                self._call_back(parcel, receipt)

    def _refused(self, lane: Lane, parcel: Parcel, error: HeadraceError) -> None:
        with self.monitor.guard:
            given_up = lane.failed(parcel, error)
            if given_up:
                self._release(parcel)
            if isinstance(error, TopicNotFound | PartitionNotFound):
                self._catalogue.forget(lane.topic)
            self._go_on(lane)
            self.monitor.notify()
        self.flush()
        if given_up:
            self._give_up(parcel, error)

    def _go_on(self, lane: Lane) -> None:
        """An answer came: do what had to wait for it."""
        if lane.quiet:
            self._regroup_later(lane)
        elif lane.waiting:
            self._launch(lane)
        if lane.hurried and not lane.waiting:
            self._on_room(lane)

    def _regroup_later(self, lane: Lane) -> None:
        def regroup() -> None:
            with self.monitor.guard:
                self._regroup(lane)
                self._launch(lane)
            self.flush()

        if lane.hurt:
            self._timers.later(self._backoff.next_s(), regroup)
        else:
            self._timers.soon(regroup)

    def _release(self, parcel: Parcel) -> None:
        """Its bytes are free for others."""
        self._buffered -= parcel.bytes
        batch = parcel.batch
        data = None if batch is None else batch.data
        if type(data) is bytearray and len(data) <= _SPARE_BYTES_MAX and len(self._spare) < _SPARE_BUFFERS_MAX:
            self._spare.append(data)
        parcel.batch = None

    def _call_back(self, parcel: Parcel, receipt: Receipt) -> None:
        for place, callback in parcel.callbacks or ():
            _told(callback, receipt_at(receipt, place), None)
        for hook in self._after_ack:
            _told(hook, receipt)

    def _give_up(self, parcel: Parcel, error: HeadraceError) -> None:
        if parcel.outcome.done:
            return
        parcel.last_error = error
        if len(self._failed) > _FAILED_MAX:
            self._failed = [failed for failed in self._failed if failed.unobserved]
        self._failed.append(parcel)
        parcel.outcome.fail(error)
        for _, callback in parcel.callbacks or ():
            _told(callback, None, error)

    def _sweep(self) -> None:
        """Tell those who have waited too long."""
        late: list[Parcel] = []
        with self.monitor.guard:
            for lane in self.lane_at.values():
                expired = lane.expired(now())
                for parcel in expired:
                    if not parcel.abandoned:
                        self._release(parcel)
                late += expired
            self._sweeping = not self.closed and not all(lane.idle for lane in self.lane_at.values())
            self._sweeper = self._timers.later(_SWEEP_S, self._sweep) if self._sweeping else None
            if late:
                self.monitor.notify()
        for parcel in late:
            took_too_long = Timeout("the broker did not acknowledge the message in time; it may still do so")
            error = parcel.last_error
            self._give_up(parcel, took_too_long if error is None or parcel.abandoned else error)


def _no_room(_lane: Lane) -> None:
    """A producer that is closed has nothing to send."""


def _told(callback: Any, *what: Any) -> None:
    try:
        callback(*what)
    except Exception:
        # The broker has the message, whatever a callback makes of it.
        logger.exception("a callback of a producer failed")
