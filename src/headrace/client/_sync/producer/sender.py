"""Sends the batches of a producer to the broker, within the limit of its buffer, and resolves their outcomes."""

import logging
import secrets
import time
from collections.abc import Callable, Sequence
from copy import copy
from functools import partial

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

logger = logging.getLogger("headrace.client")

_DURABILITIES = tuple(Durability)
_SWEEP_S = 0.5
_FAILED_MAX = 1000
_SPARE_BUFFERS_MAX = 64
_SPARE_BYTES_MAX = 256 << 10
"""Buffers up to this size are used again: the kernel has to clear the pages of fresh memory first."""


class Sender:
    """Does the I/O for the partition senders of a producer: encodes and sends their batches, and hears the answers."""

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
        refill: Callable[[PartitionSender], PendingBatch | None],
    ) -> None:
        self.closed = False
        self._broker = broker
        self._metadata_cache = metadata_cache
        self._timers = timers
        self._timeout = timeout
        self._buffer_bytes = buffer_bytes
        self._block = block
        self._after_ack = tuple(after_ack)
        self._refill = refill
        self._begin()
        broker.listen(self)

    def _begin(self) -> None:
        """Begin with an identity that no other process has, and no batch."""
        self.monitor = Monitor()
        self._partition_senders: dict[tuple[str, int], PartitionSender] = {}
        """By topic and partition."""
        self._producer_id = secrets.randbits(63) + 16
        self._buffered = 0
        self._spare: list[bytearray] = []
        self._failed: list[PendingBatch] = []
        self._backoff = Backoff()
        self._sweeping = False
        self._sweeper: Timer | None = None
        self._is_refused = False
        """The broker does not accept this client: what may be stored stays unknown until it does again."""

    def disown(self) -> None:
        """In a forked child: leave all batches to the parent, which delivers them under its own identity."""
        self._begin()
        if not self.closed:
            self._broker.listen(self)

    def partition_sender(self, topic: str, partition: int) -> PartitionSender:
        """Return the sender of a partition, made now if there is none."""
        partition_sender = self._partition_senders.get((topic, partition))
        if partition_sender is None:
            partition_sender = self._partition_senders[topic, partition] = PartitionSender(
                topic, partition, self._producer_id
            )
        return partition_sender

    @property
    def buffered_bytes(self) -> int:
        """How many bytes of batches the broker has not acknowledged."""
        return self._buffered

    @property
    def open(self) -> bool:
        """Whether there is room for another batch, without waiting."""
        return self._buffered < self._buffer_bytes and not self.closed

    def wait_for_room(self, deadline: float) -> None:
        """Wait until there is room for another batch, or raise Busy; with the guard held."""
        if self.closed:
            raise Closed("the producer is closed")
        while self._buffered >= self._buffer_bytes:
            if not self._block:
                raise Busy(f"the producer holds {self._buffered} bytes that the broker has not acknowledged")
            if not self.monitor.wait(deadline - now()):
                raise Busy(f"the producer's buffer of {self._buffer_bytes} bytes was full for {self._timeout:.3g} s")
            if self.closed:
                raise Closed("the producer is closed")

    def send(self, partition_sender: PartitionSender, pending_batch: PendingBatch) -> None:
        """Encode a sealed batch, and queue it on the connection as soon as its partition sender admits it.

        The caller holds the guard, and calls `flush` afterwards. If the batch cannot be encoded, its outcome says why.
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
        if connection is not None and not connection.draining and partition_sender.admit(pending_batch):
            self._request(connection, partition_sender, pending_batch)
        else:
            partition_sender.waiting.append(pending_batch)
            self._send_waiting(partition_sender)
        if connection is None:
            self._is_refused = False
            self._broker.wake()
        if not self._sweeping:
            self._sweeping = True
            self._sweeper = self._timers.later(_SWEEP_S, self._sweep)

    def call_before_flush(self, call: Callable[[], None]) -> None:
        """Run a callback after this loop turn, so that messages that are published at the same time share a batch."""
        connection = self._broker.connection
        if connection is None:
            self._timers.soon(call)
        else:
            connection.before_flush(call)

    def flush(self) -> None:
        """Send the queued frames; without the guard, because that may take a moment."""
        connection = self._broker.connection
        if connection is not None:
            connection.flush()

    def drain(self, timeout: float) -> None:
        """Wait until no batch is left; raises Undelivered if messages were given up whose outcome nobody asked for."""
        deadline = now() + timeout
        with self.monitor.guard:
            while not (self._is_refused or self._idle):
                if not self.monitor.wait(deadline - now()):
                    break
            left = sum(
                pending_batch.count
                for partition_sender in self._partition_senders.values()
                for pending_batch in [*partition_sender.in_flight, *partition_sender.waiting]
                if not (self._is_refused and pending_batch.abandoned)  # those have failed
            )
            failed, self._failed = [pending_batch for pending_batch in self._failed if pending_batch.unobserved], []
        if left:
            raise Timeout(f"{left} messages were not acknowledged within {timeout:.3g} s; they may still be", left=left)
        if failed:
            raise Undelivered(sum(pending_batch.unobserved for pending_batch in failed), failed[0].last_error)

    def close(self) -> None:
        """Give up all batches that are left."""
        with self.monitor.guard:
            self.closed = True
            self._refill = _no_batch
            if self._sweeper is not None:
                self._sweeper.cancel()
            pending_batches = [
                pending_batch
                for partition_sender in self._partition_senders.values()
                for pending_batch in [*partition_sender.in_flight, *partition_sender.waiting]
            ]
            self._partition_senders.clear()
            self.monitor.notify()
        self._broker.forget(self)
        for pending_batch in pending_batches:
            self._give_up(pending_batch, Closed("the producer was closed before the broker acknowledged the message"))

    def connection_up(self, connection: Connection) -> None:
        """On a new connection: send again what the broker has not acknowledged."""
        with self.monitor.guard:
            self._is_refused = False
            for partition_sender in list(self._partition_senders.values()):
                self._resend(partition_sender)
                self._send_waiting(partition_sender)
        connection.flush()

    def connection_drains(self) -> None:
        """While the broker drains, nothing new is sent: `send` looks at the connection."""

    def connection_refused(self, error: HeadraceError) -> None:
        """The broker does not accept this client any more: give up all batches."""
        with self.monitor.guard:
            self._is_refused = True
            given_up = self._expired(float("inf"))
            self.monitor.notify()
        for pending_batch in given_up:
            self._give_up(pending_batch, copy(error))

    @property
    def _idle(self) -> bool:
        return all(partition_sender.idle for partition_sender in self._partition_senders.values())

    def _send_waiting(self, partition_sender: PartitionSender) -> None:
        connection = self._broker.connection
        if connection is not None and not connection.draining:
            for pending_batch in partition_sender.admit_waiting():
                self._request(connection, partition_sender, pending_batch)

    def _resend(self, partition_sender: PartitionSender) -> None:
        connection = self._broker.connection
        if (
            partition_sender.resend_ready
            and connection is not None
            and not connection.draining
            and not connection.closed
        ):
            for pending_batch in partition_sender.resend():
                self._request(connection, partition_sender, pending_batch)

    def _request(self, connection: Connection, partition_sender: PartitionSender, pending_batch: PendingBatch) -> None:
        expected = pending_batch.expected or ()
        head = Publish(partition_sender.topic, partition_sender.partition, pending_batch.durability, *expected)
        assert pending_batch.batch is not None
        connection.queue_request(
            head, pending_batch.batch.data, partial(self._answered, partition_sender, pending_batch)
        )

    def _answered(
        self,
        partition_sender: PartitionSender,
        pending_batch: PendingBatch,
        answer: Published | HeadraceError,
        _body: Bytes,
    ) -> None:
        if isinstance(answer, HeadraceError):
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
            answer.stored,
        )
        with self.monitor.guard:
            partition_sender.acknowledged(pending_batch)
            self._backoff.reset()
            self._release(pending_batch)
            more = bool(
                partition_sender.stalled or partition_sender.refill_wanted or partition_sender.waiting
            )  # before `_send_next` changes it
            if more:
                self._send_next(partition_sender)
            self.monitor.notify()
        if more:
            self.flush()
        if not pending_batch.outcome.done:  # else it was given up in the meantime
            pending_batch.outcome.resolve(receipt)
            if pending_batch.callbacks or self._after_ack:
                self._call_back(pending_batch, receipt)

    def _refused(self, partition_sender: PartitionSender, pending_batch: PendingBatch, error: HeadraceError) -> None:
        with self.monitor.guard:
            given_up = partition_sender.failed(pending_batch, error)
            if given_up:
                self._release(pending_batch)
            if isinstance(error, TopicNotFound | PartitionNotFound):
                self._metadata_cache.forget(partition_sender.topic)
            self._send_next(partition_sender)
            self.monitor.notify()
        self.flush()
        if given_up:
            self._give_up(pending_batch, error)

    def _send_next(self, partition_sender: PartitionSender) -> None:
        """After an answer: send what had to wait for it."""
        if partition_sender.resend_ready:
            self._resend_later(partition_sender)
        elif partition_sender.waiting:
            self._send_waiting(partition_sender)
        if partition_sender.refill_wanted and not partition_sender.waiting:
            pending_batch = self._refill(partition_sender)
            if pending_batch is not None:
                self.send(partition_sender, pending_batch)

    def _resend_later(self, partition_sender: PartitionSender) -> None:
        def resend() -> None:
            with self.monitor.guard:
                self._resend(partition_sender)
                self._send_waiting(partition_sender)
            self.flush()

        if partition_sender.backs_off:
            self._timers.later(self._backoff.next_s(), resend)
        else:
            self._timers.soon(resend)

    def _release(self, pending_batch: PendingBatch) -> None:
        """Free the bytes of a batch for others."""
        self._buffered -= pending_batch.bytes
        batch = pending_batch.batch
        data = None if batch is None else batch.data
        if type(data) is bytearray and len(data) <= _SPARE_BYTES_MAX and len(self._spare) < _SPARE_BUFFERS_MAX:
            self._spare.append(data)
        pending_batch.batch = None

    def _call_back(self, pending_batch: PendingBatch, receipt: Receipt) -> None:
        for place, callback in pending_batch.callbacks or ():
            _run_callback(callback, receipt_at(receipt, place), None)
        for hook in self._after_ack:
            _run_callback(hook, receipt)

    def _give_up(self, pending_batch: PendingBatch, error: HeadraceError) -> None:
        if pending_batch.outcome.done:
            return
        pending_batch.last_error = error
        if len(self._failed) > _FAILED_MAX:
            self._failed = [failed for failed in self._failed if failed.unobserved]
        self._failed.append(pending_batch)
        pending_batch.outcome.fail(error)
        for _, callback in pending_batch.callbacks or ():
            _run_callback(callback, None, error)

    def _sweep(self) -> None:
        """Give up the batches whose deadline has passed."""
        with self.monitor.guard:
            late = self._expired(now())
            self._sweeping = not self.closed and not self._idle
            self._sweeper = self._timers.later(_SWEEP_S, self._sweep) if self._sweeping else None
            if late:
                self.monitor.notify()
        for pending_batch in late:
            error = pending_batch.last_error
            if error is None or pending_batch.abandoned:
                error = _timed_out(error or pending_batch.previous_error)
            self._give_up(pending_batch, error)

    def _expired(self, at: float) -> list[PendingBatch]:
        """Return the batches to give up, whose deadline has passed by then; with the guard held."""
        late: list[PendingBatch] = []
        for partition_sender in self._partition_senders.values():
            expired = partition_sender.expire(at)
            for pending_batch in expired:
                if not pending_batch.abandoned:
                    self._release(pending_batch)
            late += expired
        return late


def _timed_out(refusal: HeadraceError | None) -> Timeout:
    text = "the broker did not acknowledge the message in time; it may still do so"
    return Timeout(text if refusal is None else f"{text}. Its last answer was {refusal.code}: {refusal}")


def _no_batch(_partition_sender: PartitionSender) -> PendingBatch | None:
    """A closed producer has nothing to send."""
    return None


def _run_callback(callback: Callable[..., object], *what: object) -> None:
    try:
        callback(*what)
    except Exception:
        # The broker has the message, whatever a callback makes of it.
        logger.exception("a callback of a producer failed")
