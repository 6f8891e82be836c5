"""How a producer's batches get to the broker: in order, exactly once, and no more at once than there is room for."""

import logging
import secrets
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from headrace.client._sync.concurrency import Monitor, Timer, Timers, now
from headrace.client._sync.connection.connection import Connection
from headrace.client._sync.connection.reconnecting import ReconnectingConnection
from headrace.client._sync.producer.metadata_cache import MetadataCache
from headrace.client.connection.backoff import Backoff
from headrace.client.connection.request_router import Bytes
from headrace.client.producer.partition_sender import PartitionSender
from headrace.client.producer.pending_batch import AfterAck, PendingBatch
from headrace.client.producer.producer_errors import Undelivered
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


class Sender:
    """All lanes of a producer."""

    def __init__(
        self,
        broker: ReconnectingConnection,
        metadata_cache: MetadataCache,
        timers: Timers,
        *,
        timeout: float,
        buffer_bytes: int,
        block: bool,
        after_ack: Sequence[AfterAck],
        on_room: Callable[[PartitionSender], None],
    ) -> None:
        self.closed = False
        self._broker = broker
        self._metadata_cache = metadata_cache
        self._timers = timers
        self._timeout = timeout
        self._buffer_bytes = buffer_bytes
        self._block = block
        self._after_ack = tuple(after_ack)
        self._on_room = on_room
        self._begin()
        broker.listen(self)

    def _begin(self) -> None:
        """Begin with an identity that no other process has, and nothing under way."""
        self.monitor = Monitor()
        self.partition_sender_at: dict[tuple[str, int], PartitionSender] = {}
        """The lanes there are, by topic and partition."""
        self._producer_id = secrets.randbits(63) + 16
        self._buffered = 0
        self._spare: list[bytearray] = []
        self._failed: list[PendingBatch] = []
        self._backoff = Backoff()
        self._sweeping = False
        self._sweeper: Timer | None = None

    def disown(self) -> None:
        """In a forked child: what is under way is the parent's to deliver, under the parent's identity."""
        self._begin()
        if not self.closed:
            self._broker.listen(self)

    def partition_sender(self, topic: str, partition: int) -> PartitionSender:
        """The lane of a partition."""
        partition_sender = self.partition_sender_at.get((topic, partition))
        if partition_sender is None:
            partition_sender = self.partition_sender_at[topic, partition] = PartitionSender(
                topic, partition, self._producer_id
            )
        return partition_sender

    def partition_senders(self) -> list[PartitionSender]:
        """Those there are."""
        return list(self.partition_sender_at.values())

    @property
    def buffered_bytes(self) -> int:
        """How much waits for the broker's acknowledgement."""
        return self._buffered

    @property
    def open(self) -> bool:
        """Whether there is room for more, without waiting."""
        return self._buffered < self._buffer_bytes and not self.closed

    def room(self, deadline: float) -> None:
        """Wait until there is room for more, or raise Busy; with the guard held."""
        if self.closed:
            raise Closed("the producer is closed")
        while self._buffered >= self._buffer_bytes:
            if not self._block:
                raise Busy(f"the producer holds {self._buffered} bytes that the broker has not acknowledged")
            if not self.monitor.wait(deadline - now()):
                raise Busy(f"the producer's buffer of {self._buffer_bytes} bytes was full for {self._timeout:.3g} s")
            if self.closed:
                raise Closed("the producer is closed")

    def ship(self, partition_sender: PartitionSender, pending_batch: PendingBatch) -> None:
        """Encode the messages and queue them as soon as it is their turn; with the guard held, so `flush` after it.

        If they cannot be encoded, their outcome tells.
        """
        try:
            buffer = self._spare.pop() if self._spare else None
            pending_batch.encode(
                time.time_ns() // 1000, partition_sender.codec, partition_sender.expected_stamp(), buffer
            )
        except BufferError:  # somebody still looks at the old bytes
            pending_batch.encode(
                time.time_ns() // 1000, partition_sender.codec, partition_sender.expected_stamp(), None
            )
        except HeadraceError as error:
            self._give_up(pending_batch, error)
            return
        assert pending_batch.batch is not None
        pending_batch.bytes = pending_batch.batch.length
        self._buffered += pending_batch.bytes
        connection = self._broker.connection
        if connection is not None and not connection.draining and partition_sender.depart(pending_batch):
            self._post(connection, partition_sender, pending_batch)
        else:
            partition_sender.waiting.append(pending_batch)
            self._launch(partition_sender)
        if not self._sweeping:
            self._sweeping = True
            self._sweeper = self._timers.later(_SWEEP_S, self._sweep)

    def soon(self, call: Callable[[], None]) -> None:
        """Call this after what is going on now, so that what others publish at the same time goes with it."""
        connection = self._broker.connection
        if connection is None:
            self._timers.soon(call)
        else:
            connection.before_flush(call)

    def flush(self) -> None:
        """Let go what was queued to be sent; without the guard, for that may take a moment."""
        connection = self._broker.connection
        if connection is not None:
            connection.flush()

    def drained(self, timeout: float) -> None:
        """Wait until nothing is under way; raises Undelivered if messages were given up that nobody asked about."""
        deadline = now() + timeout
        with self.monitor.guard:
            while not all(partition_sender.idle for partition_sender in self.partition_sender_at.values()):
                if not self.monitor.wait(deadline - now()):
                    break
            left = sum(
                pending_batch.count
                for partition_sender in self.partition_sender_at.values()
                for pending_batch in [*partition_sender.flying, *partition_sender.waiting]
            )
            failed, self._failed = [pending_batch for pending_batch in self._failed if pending_batch.unobserved], []
        if left:
            raise Timeout(f"{left} messages were not acknowledged within {timeout:.3g} s; they may still be", left=left)
        if failed:
            raise Undelivered(sum(pending_batch.unobserved for pending_batch in failed), failed[0].last_error)

    def close(self) -> int:
        """Give up what is left; returns how many messages that were."""
        with self.monitor.guard:
            self.closed = True
            self._on_room = _no_room
            if self._sweeper is not None:
                self._sweeper.cancel()
            pending_batches = [
                pending_batch
                for partition_sender in self.partition_sender_at.values()
                for pending_batch in [*partition_sender.flying, *partition_sender.waiting]
            ]
            self.partition_sender_at.clear()
            self.monitor.notify()
        self._broker.forget(self)
        for pending_batch in pending_batches:
            self._give_up(pending_batch, Closed("the producer was closed before the broker acknowledged the message"))
        return sum(pending_batch.count for pending_batch in pending_batches)

    def connection_up(self, connection: Connection) -> None:
        """There is a new connection: send again what the broker has not acknowledged."""
        with self.monitor.guard:
            for partition_sender in self.partition_senders():
                self._regroup(partition_sender)
                self._launch(partition_sender)
        connection.flush()

    def connection_drains(self) -> None:
        """The broker is going: hold back what is new."""

    def _launch(self, partition_sender: PartitionSender) -> None:
        connection = self._broker.connection
        if connection is not None and not connection.draining:
            for pending_batch in partition_sender.launch():
                self._post(connection, partition_sender, pending_batch)

    def _regroup(self, partition_sender: PartitionSender) -> None:
        connection = self._broker.connection
        if partition_sender.quiet and connection is not None and not connection.draining and not connection.closed:
            for pending_batch in partition_sender.regroup():
                self._post(connection, partition_sender, pending_batch)

    def _post(self, connection: Connection, partition_sender: PartitionSender, pending_batch: PendingBatch) -> None:
        head = Publish(
            partition_sender.topic, partition_sender.partition, pending_batch.durability, pending_batch.expected_offset
        )
        assert pending_batch.batch is not None
        connection.queue_request(
            _PUBLISH, head, pending_batch.batch.data, partial(self._answered, partition_sender, pending_batch)
        )

    def _answered(
        self, partition_sender: PartitionSender, pending_batch: PendingBatch, answer: Any, _body: Bytes
    ) -> None:
        if type(answer) is not Published:
            self._refused(partition_sender, pending_batch, answer)
            return
        receipt = Receipt(
            partition_sender.topic,
            partition_sender.partition,
            answer.base_offset,
            pending_batch.count,
            _DURABILITIES[answer.durability],
            answer.duplicate,
            answer.append_time,
            answer.topic_id,
        )
        with self.monitor.guard:
            partition_sender.acknowledged(pending_batch)
            self._backoff.reset()
            self._release(pending_batch)
            more = bool(
                partition_sender.stalled or partition_sender.hurried or partition_sender.waiting
            )  # as it is now: what waits is about to go
            if more:
                self._go_on(partition_sender)
            self.monitor.notify()
        if more:
            self.flush()
        if not pending_batch.outcome.done:  # else it was given up in the meantime
            pending_batch.outcome.settle(receipt)
            if pending_batch.callbacks or self._after_ack:
                self._call_back(pending_batch, receipt)

    def _refused(self, partition_sender: PartitionSender, pending_batch: PendingBatch, error: HeadraceError) -> None:
        with self.monitor.guard:
            given_up = partition_sender.failed(pending_batch, error)
            if given_up:
                self._release(pending_batch)
            if isinstance(error, TopicNotFound | PartitionNotFound):
                self._metadata_cache.forget(partition_sender.topic)
            self._go_on(partition_sender)
            self.monitor.notify()
        self.flush()
        if given_up:
            self._give_up(pending_batch, error)

    def _go_on(self, partition_sender: PartitionSender) -> None:
        """An answer came: do what had to wait for it."""
        if partition_sender.quiet:
            self._regroup_later(partition_sender)
        elif partition_sender.waiting:
            self._launch(partition_sender)
        if partition_sender.hurried and not partition_sender.waiting:
            self._on_room(partition_sender)

    def _regroup_later(self, partition_sender: PartitionSender) -> None:
        def regroup() -> None:
            with self.monitor.guard:
                self._regroup(partition_sender)
                self._launch(partition_sender)
            self.flush()

        if partition_sender.hurt:
            self._timers.later(self._backoff.next_s(), regroup)
        else:
            self._timers.soon(regroup)

    def _release(self, pending_batch: PendingBatch) -> None:
        """Its bytes are free for others."""
        self._buffered -= pending_batch.bytes
        batch = pending_batch.batch
        data = None if batch is None else batch.data
        if type(data) is bytearray and len(data) <= _SPARE_BYTES_MAX and len(self._spare) < _SPARE_BUFFERS_MAX:
            self._spare.append(data)
        pending_batch.batch = None

    def _call_back(self, pending_batch: PendingBatch, receipt: Receipt) -> None:
        for place, callback in pending_batch.callbacks or ():
            _told(callback, receipt_at(receipt, place), None)
        for hook in self._after_ack:
            _told(hook, receipt)

    def _give_up(self, pending_batch: PendingBatch, error: HeadraceError) -> None:
        if pending_batch.outcome.done:
            return
        pending_batch.last_error = error
        if len(self._failed) > _FAILED_MAX:
            self._failed = [failed for failed in self._failed if failed.unobserved]
        self._failed.append(pending_batch)
        pending_batch.outcome.fail(error)
        for _, callback in pending_batch.callbacks or ():
            _told(callback, None, error)

    def _sweep(self) -> None:
        """Tell those who have waited too long."""
        late: list[PendingBatch] = []
        with self.monitor.guard:
            for partition_sender in self.partition_sender_at.values():
                expired = partition_sender.expired(now())
                for pending_batch in expired:
                    if not pending_batch.abandoned:
                        self._release(pending_batch)
                late += expired
            self._sweeping = not self.closed and not all(
                partition_sender.idle for partition_sender in self.partition_sender_at.values()
            )
            self._sweeper = self._timers.later(_SWEEP_S, self._sweep) if self._sweeping else None
            if late:
                self.monitor.notify()
        for pending_batch in late:
            took_too_long = Timeout("the broker did not acknowledge the message in time; it may still do so")
            error = pending_batch.last_error
            self._give_up(pending_batch, took_too_long if error is None or pending_batch.abandoned else error)


def _no_room(_partition_sender: PartitionSender) -> None:
    """A producer that is closed has nothing to send."""


def _told(callback: Any, *what: Any) -> None:
    try:
        callback(*what)
    except Exception:
        # The broker has the message, whatever a callback makes of it.
        logger.exception("a callback of a producer failed")
