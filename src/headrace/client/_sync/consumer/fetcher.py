"""What comes in: streams of partitions, received ahead as far as there is room."""

import logging
from collections import deque
from copy import copy
from functools import partial

from msgspec.structs import asdict

from headrace.client._sync.concurrency import Monitor, Timers, now
from headrace.client._sync.connection.connection import Connection
from headrace.client.connection.backoff import Backoff
from headrace.client.connection.request_router import Bytes
from headrace.client.consumer.partition_reader import Delivered, OnCorrupt, PartitionReader
from headrace.client.results import DamagedRange, ReceivedBatch
from headrace.model.errors import ConnectionFailed, CorruptBatch, HeadraceError, OffsetOutOfRange, TopicNotFound
from headrace.model.reading import Delivery, Fetch, Fetched, StreamClose, StreamCredit, StreamOpen, StreamOpened
from headrace.model.requests import Offsets, OffsetsFound

logger = logging.getLogger("headrace.client")

_CREDIT_BYTES_MIN = 64 << 10


class Fetcher:
    """Holds the partitions that a subscription reads, and the batches that were received and not taken yet."""

    def __init__(self, timers: Timers, prefetch_bytes: int, on_out_of_range: str, on_corrupt: OnCorrupt) -> None:
        self.monitor = Monitor()
        self.readers: dict[tuple[str, int], PartitionReader] = {}
        self.stopped = False
        self._timers = timers
        self._prefetch_bytes = prefetch_bytes
        self._on_out_of_range = on_out_of_range
        self._on_corrupt = on_corrupt
        self.skipped = 0
        """How many damaged messages were passed over."""
        self.refusal: HeadraceError | None = None
        """Why the broker does not accept this client; until it does again."""
        self._connection: Connection | None = None
        self._ready: deque[tuple[PartitionReader | None, Bytes | HeadraceError]] = deque()
        self._current: Delivered | None = None
        self._taken_away: dict[tuple[str, int], PartitionReader] = {}
        self._backoff = Backoff()

    def add(self, topic: str, partition: int, offset: int, epoch: int = 0, optional: bool = False) -> PartitionReader:
        """Read a partition from here on, instead of from where it was read before.

        That an optional one is not there any more is nobody's concern.
        """
        with self.monitor.guard:
            before = self.readers.get((topic, partition))
            if before is not None:
                self.drop(before)
            reader = self.readers[topic, partition] = PartitionReader(self, topic, partition, offset, epoch)
            reader.optional = optional
            self._open(reader)
        return reader

    def drop(self, reader: PartitionReader) -> None:
        """Stop reading a partition, and drop its batches that were not handed out."""
        with self.monitor.guard:
            reader.gone = True
            if reader.handed > reader.committed:
                self._taken_away[reader.place] = reader
            if self.readers.get(reader.place) is reader:
                del self.readers[reader.place]
            self._close(reader)

    def taken_away(self) -> list[PartitionReader]:
        """Those that were dropped, since this was last asked, before all that they handed out was committed."""
        with self.monitor.guard:
            gone, self._taken_away = self._taken_away, {}
        return [reader for reader in gone.values() if reader.handed > reader.committed]

    def connection_up(self, connection: Connection) -> None:
        """On a new connection: open the streams after what was received before."""
        with self.monitor.guard:
            self._connection = connection
            self.refusal = None
            for reader in self.readers.values():
                reader.stream = None
            for reader in list(self.readers.values()):
                self._open(reader)

    def connection_drains(self) -> None:
        """While the broker drains, deliveries are still taken."""

    def connection_refused(self, error: HeadraceError) -> None:
        """The broker does not accept this client any more: whoever takes a batch is told, after what has come."""
        with self.monitor.guard:
            self.refusal = error
            self.monitor.notify()

    def take(self, deadline: float | None) -> tuple[PartitionReader, ReceivedBatch] | None:
        """The next batch of any partition; None when it is too late, or all is stopped. One taker at a time."""
        while True:
            delivered = self._current
            if delivered is not None and not self.stopped:
                try:
                    batch = delivered.next()
                except CorruptBatch as error:
                    if not self._read_again(delivered.reader, error):
                        self._pass_over(delivered.reader, error)
                    continue
                if batch is not None:
                    return delivered.reader, batch
            self._current = None
            with self.monitor.guard:
                while not self._ready and not self.stopped:
                    if self.refusal is not None:
                        raise copy(self.refusal)
                    if not self.monitor.wait(None if deadline is None else deadline - now()):
                        return None
                if self.stopped:
                    return None
                reader, come = self._ready.popleft()
                if reader is None:
                    assert isinstance(come, HeadraceError)
                    raise come
                if not reader.gone and not isinstance(come, HeadraceError):
                    self._return_credit(reader, len(come))
                    self._current = Delivered(reader, come)
            if isinstance(come, CorruptBatch) and not reader.gone:
                self._pass_over(reader, come)

    def stop(self) -> None:
        """End all waiting for batches."""
        with self.monitor.guard:
            self.stopped = True
            self.monitor.notify()

    def fail(self, error: HeadraceError) -> None:
        """Raise an error for the next who takes a batch."""
        self._put(None, error)

    def close(self) -> None:
        """Stop reading all partitions."""
        self.stop()
        self.clear()

    def clear(self) -> None:
        """Forget all partitions, and what was received of them."""
        for reader in list(self.readers.values()):
            self.drop(reader)
        self._ready.clear()
        self._current = self._connection = None

    def _pass_over(self, reader: PartitionReader, error: CorruptBatch) -> None:
        """Go on behind damaged messages; raises if the program wants to hear of them in that way.

        Then they count as processed only when a later message does: a member that starts again is told again.
        """
        reader.wanted = max(reader.wanted, error.next_offset)
        if self._on_corrupt == "raise":
            raise error
        damaged = DamagedRange(reader.topic, reader.partition, error.first_offset, error.next_offset, error.reason)
        if callable(self._on_corrupt):
            self._on_corrupt(damaged)
        logger.warning("skipped damaged messages  %s", " ".join(f"{k}={v}" for k, v in asdict(damaged).items()))
        self.skipped += error.next_offset - error.first_offset
        reader.passed(error.next_offset)

    def _read_again(self, reader: PartitionReader, error: CorruptBatch) -> bool:
        """Read a batch that arrived damaged once more, after the broker has looked at it; False if that was done.

        If it is damaged on the broker's disk, the broker records that and says so. A node of a cluster has its copy
        repaired: it, or another, then delivers what was stored.
        """
        with self.monitor.guard:
            if reader.gone:
                return True
            if reader.checked == error.first_offset:
                return False
            self._close(reader)
            self._ready = deque(item for item in self._ready if item[0] is not reader)
            self._current = None
            reader.queued_bytes = 0
            reader.wanted = reader.position = error.first_offset
            connection = self._connection
            if connection is not None and not connection.closed:  # else it is read again with the next one
                head = Fetch(reader.topic, reader.partition, error.first_offset, 1, 0, verify=True)
                connection.request_nowait(head, b"", partial(self._checked, reader, error.first_offset))
        return True

    def _checked(self, reader: PartitionReader, offset: int, answer: Fetched | HeadraceError, _body: Bytes) -> None:
        """The broker has looked at a batch that arrived damaged: go on as if a stream had met what it found."""
        if isinstance(answer, HeadraceError):
            self.ended(reader, answer)
            return
        with self.monitor.guard:
            reader.checked = offset
            self._open(reader)

    # What streams tell.

    def delivered(self, reader: PartitionReader, delivery: Delivery, body: Bytes) -> None:
        """Batches came."""
        with self.monitor.guard:
            reader.position = delivery.next_offset
            reader.end_offset = delivery.end_offset
            reader.queued_bytes += len(body)
            self._ready.append((reader, body))
            self.monitor.notify()

    def ended(self, reader: PartitionReader, error: HeadraceError) -> None:
        """A stream has ended, or could not be opened."""
        with self.monitor.guard:
            if reader.gone or self.stopped:
                return
            reader.stream = None
            if isinstance(error, ConnectionFailed):
                return  # opened again with the next connection
            if isinstance(error, OffsetOutOfRange) and self._on_out_of_range != "raise":
                self._find_place(reader, error)
            elif isinstance(error, CorruptBatch):
                reader.position = max(reader.position, error.next_offset)
                where = f"{reader.topic}[{reader.partition}]"
                self._put(reader, CorruptBatch(error.first_offset, error.next_offset, where, 0, error.reason))
                self._open(reader)
            elif error.retryable:
                self._timers.later(self._backoff.next_s(), partial(self._open_again, reader))
            else:
                self.drop(reader)
                if isinstance(error, TopicNotFound) and reader.optional:
                    logger.info("%s[%s] is not read any more: %s", reader.topic, reader.partition, error)
                else:
                    self.fail(error)

    def _put(self, reader: PartitionReader | None, come: Bytes | HeadraceError) -> None:
        with self.monitor.guard:
            self._ready.append((reader, come))
            self.monitor.notify()

    def _open(self, reader: PartitionReader) -> None:
        connection = self._connection
        if connection is None or connection.closed or reader.gone or reader.stream is not None:
            return
        credit = max(self._share() - reader.queued_bytes, 1)
        head = StreamOpen(reader.topic, reader.partition, reader.position, credit)
        reader.credit_due = 0
        reader.stream = connection.open_stream(head, reader, partial(self._opened, reader))

    def _open_again(self, reader: PartitionReader) -> None:
        with self.monitor.guard:
            if not reader.gone:
                self._open(reader)

    def _opened(self, reader: PartitionReader, answer: StreamOpened | HeadraceError, _body: Bytes) -> None:
        if not isinstance(answer, StreamOpened):
            self.ended(reader, answer)
            return
        self._backoff.reset()
        reader.end_offset = max(reader.end_offset, answer.end_offset)
        if reader.topic_id and reader.topic_id != answer.topic_id:
            with self.monitor.guard:
                self._close(reader)
            self.ended(reader, OffsetOutOfRange(f"the topic {reader.topic} was deleted and made anew"))
        reader.topic_id = answer.topic_id

    def _close(self, reader: PartitionReader) -> None:
        connection, number, reader.stream = self._connection, reader.stream, None
        if number is not None and connection is not None and not connection.closed:
            connection.forget_stream(number)
            connection.request_nowait(StreamClose(number), b"", _ignore_answer)

    def _share(self) -> int:
        return max(self._prefetch_bytes // max(len(self.readers), 1), _CREDIT_BYTES_MIN)

    def _return_credit(self, reader: PartitionReader, size: int) -> None:
        """Return the credit of a batch that is handed out to the broker."""
        reader.queued_bytes -= size
        reader.credit_due += size
        if reader.credit_due * 4 >= self._share() and reader.stream is not None and self._connection is not None:
            self._connection.tell(StreamCredit(reader.stream, reader.credit_due))
            reader.credit_due = 0

    def _find_place(self, reader: PartitionReader, error: HeadraceError) -> None:
        """Ask for another offset to read from, because the wanted one is out of range."""
        connection, where = self._connection, self._on_out_of_range
        if connection is not None:
            logger.warning("%s; going on with the %s", error, where)
            head = Offsets(reader.topic, [reader.partition], where)
            connection.request_nowait(head, b"", partial(self._found_place, reader))

    def _found_place(self, reader: PartitionReader, answer: OffsetsFound | HeadraceError, _body: Bytes) -> None:
        if isinstance(answer, OffsetsFound):
            with self.monitor.guard:
                if not reader.gone:
                    reader.start(answer.offsets[reader.partition])
                    self._open(reader)
        else:
            self.ended(reader, answer)


def _ignore_answer(_answer: object, _body: Bytes) -> None:
    """Nobody waits for the answer."""
