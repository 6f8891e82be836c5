"""An open partition: gathers small batches, answers publishers when batches are durable, wakes readers."""

import logging
from collections.abc import Callable
from functools import partial

from headrace.broker.pending_answer import PendingAnswer
from headrace.broker.ports import Ports
from headrace.broker.reservation import Reservation
from headrace.broker.sync_waiters import SyncWaiters
from headrace.broker.version_gate import VersionGate
from headrace.engines.api import Appended, Partition, Slice, log_settings
from headrace.model.batch import Batch, check_messages
from headrace.model.codec import Codec
from headrace.model.durability import Durability
from headrace.model.errors import Busy, HeadraceError, InternalError, InvalidArgument, OffsetOutOfRange, TopicNotFound
from headrace.model.requests import PartitionInfo, Publish, Published
from headrace.model.topic import TopicSettings, Validity

logger = logging.getLogger("headrace.broker")

_SMALL_BYTES = 4 << 10
_SMALL_COUNT = 16
_GATHERED_BYTES = 100 << 10
_SYNCED, _REPLICATED = Durability.SYNCED, Durability.REPLICATED  # every look at a member of an enumeration is a call
_NEVER = 1 << 64
Answer = PendingAnswer[Published]


class ActivePartition:
    """One open partition of a topic, with its publishers and readers."""

    def __init__(
        self,
        topic: str,
        topic_id: int,
        number: int,
        partition: Partition,
        settings: TopicSettings,
        ports: Ports,
        reservation: Reservation | None = None,
        *,
        held: bool = False,
    ) -> None:
        """A partition; if it is `held`, nothing in it counts as synced before `release`.

        With a `reservation` messages that are not synced are shown when their offsets are reserved.
        """
        self.topic = topic
        self.topic_id = topic_id
        self.number = number
        self.partition = partition
        self.delivered: Partition = partition
        """The partition as consumers see it: after the middleware that changes deliveries, if there is any."""
        self.settings = settings
        self._durability = min(settings.durability, partition.durability_max)
        """What every acknowledgement means at least: a topic of a cluster that was exported is synced from then on."""
        self._ports = ports
        self.gate: VersionGate | None = None
        """In a topic with key_versions: holds publishes back until their versions can be checked."""
        self._syncing = SyncWaiters(partition, ports, held=held)
        self._reservation = reservation
        self._reserve_at = self._next_reserve()
        self._hidden_from: int | None = None
        """The end of a batch: what follows may not be seen before its offsets are reserved, or it is synced."""
        self._unreserved: list[tuple[int, Callable[[HeadraceError | None], None]]] = []
        """Callbacks that wait for offsets to be reserved."""
        self._gathered: list[tuple[Batch, int, Answer]] = []
        self._gathered_bytes = 0
        self._now_us = 0
        self._sleepers: dict[Callable[[], None], None] = {}
        self.codec: Codec | None = None
        """How gathered batches are compressed, if the topic's middleware says so."""
        self.compacted_bytes = 0
        """The size after the last compaction."""
        self.gone: HeadraceError | None = None
        """Why the partition cannot be used any more."""
        if settings.key_versions:
            self.gate = VersionGate(partition, ports, self.publish)

    @property
    def idle(self) -> bool:
        """Whether nobody waits for an answer."""
        waits = bool(self._gathered or self._unreserved) or (self.gate is not None and not self.gate.idle)
        return self._syncing.idle and not waits

    @property
    def end_offset(self) -> int:
        """Behind the last message that may be read: of a synced topic only what a power loss cannot take back."""
        if self.settings.durability < _SYNCED:
            if self._hidden_from is None:
                return self.partition.next_offset
            return self._hidden_from if self._syncing.held else max(self._hidden_from, self.partition.synced_offset)
        return self.partition.first_offset if self._syncing.held else self.partition.synced_offset

    def info(self) -> PartitionInfo:
        """The partition as it is now."""
        partition = self.partition
        size_bytes, damaged = partition.size_bytes, partition.damaged_ranges()
        return PartitionInfo(self.number, partition.first_offset, self.end_offset, size_bytes, damaged)

    def alter(self, settings: TopicSettings, now_us: int) -> None:
        """Apply other settings."""
        self._alter_versions(settings)
        shown, self.settings = self.end_offset, settings
        self._durability = min(settings.durability, self.partition.durability_max)
        self._reserve_at = self._next_reserve()
        self._reserve(shown)
        self.partition.alter(log_settings(settings), now_us)
        self.when_synced(lambda _: None)  # readers may have to wait for that from now on
        self.wake()

    def _alter_versions(self, settings: TopicSettings) -> None:
        self.flush()
        if settings.key_versions and self.gate is None:
            self.gate = VersionGate(self.partition, self._ports, self.publish)
        elif not settings.key_versions and self.gate is not None:
            self.gate.fail_waiting(InvalidArgument(f"key_versions was turned off for {self.topic}; publish again"))
            self.partition.forget_key_index()
            self.gate = None

    def release(self, outcome: object) -> None:
        """End the hold: the topic's creation is durable, or failed, and then so does everything in it."""
        if isinstance(outcome, HeadraceError):
            self.gone = self.gone or outcome
            self._syncing.fail(outcome)
        else:
            self._syncing.release()
        self.wake()

    def check_publish(self, request: Publish) -> int:
        """Raise if a request cannot be carried out; returns the durability that it needs."""
        if self.gone is not None:
            raise type(self.gone)(str(self.gone))
        if not 0 <= request.durability <= _REPLICATED:
            raise InvalidArgument(f"durability is 0 to {_REPLICATED:d}, not {request.durability}")
        needed = max(request.durability, self._durability)
        self.partition.check_durability(needed)
        return needed

    def publish(self, request: Publish, batch: Batch, now_us: int, *, alone: bool = False) -> Published | Answer:
        """Append a batch, and answer when it has reached the requested durability; `alone` it is never gathered."""
        if self.gone is not None:
            raise type(self.gone)(str(self.gone))
        settings = self.settings
        if not 0 <= request.durability <= _REPLICATED:
            raise InvalidArgument(f"durability is 0 to {_REPLICATED:d}, not {request.durability}")
        needed = max(request.durability, self._durability)
        self.partition.check_durability(needed)
        if batch.raw_bytes > settings.message_bytes_max:
            check_messages(batch.columns(), settings.message_bytes_max, request.topic)
        if self.gate is not None or request.expected_version is not None:
            waiting = self._pass_gate(request, batch, now_us)
            if waiting is not None:
                return waiting
        small = batch.length <= _SMALL_BYTES and batch.count <= _SMALL_COUNT and not batch.codec
        plain = request.expected_offset is None and request.expected_version is None and not alone
        if small and plain:
            return self._gather(batch, needed, now_us)
        if self._gathered:
            self.flush()
        appended = self.partition.append(batch, now_us, request.expected_offset, request.expected_version)
        if appended.next_offset > self._reserve_at and not appended.duplicate:
            self._reserve(appended.base_offset)
        return self.answer(appended, needed)

    def _pass_gate(self, request: Publish, batch: Batch, now_us: int) -> Answer | None:
        """Check a batch of a topic with key_versions; returns an answer to come if the batch has to wait."""
        gate = self.gate
        if gate is None:
            raise InvalidArgument(
                f"{self.topic} does not count versions: expected_version needs the setting key_versions"
            )
        gate.note_time(now_us)
        expected = request.expected_version
        gate.check_batch(batch, self.topic, self.number, self.settings.partitions, expected)
        return None if gate.is_open else gate.enqueue(request, batch, now_us)

    def flush(self) -> None:
        """Append the gathered batches."""
        gathered, self._gathered, self._gathered_bytes = self._gathered, [], 0
        if not gathered:
            return
        try:
            outcomes = self._append([batch for batch, _, _ in gathered])
        except HeadraceError as error:
            outcomes = [error] * len(gathered)
        except Exception:  # whatever it was, everybody gets an answer
            logger.exception("gathered batches not appended  topic=%s partition=%s", self.topic, self.number)
            outcomes = [InternalError()] * len(gathered)
        if self.partition.next_offset > self._reserve_at:
            new = [one.base_offset for one in outcomes if isinstance(one, Appended) and not one.duplicate]
            self._reserve(new[0] if new else self.partition.next_offset)
        fresh: list[tuple[Answer, Appended]] = []
        for outcome, (_, needed, pending_answer) in zip(outcomes, gathered, strict=True):
            if isinstance(outcome, HeadraceError):
                pending_answer.resolve(outcome)
            elif outcome.duplicate or needed < _SYNCED:
                self.answer(outcome, needed, pending_answer)
            else:
                fresh.append((pending_answer, outcome))
        if fresh:
            if self.settings.durability < _SYNCED:
                self.wake()
            self._syncing.wait(fresh[-1][1].next_offset, partial(self._answer_synced, fresh))

    def answer(self, appended: Appended, needed: int, pending_answer: Answer | None = None) -> Published | Answer:
        """The answer to a publisher, now or when the batch has reached the durability it needs."""
        base_offset, next_offset, append_time, duplicate = appended
        reached = self.partition.reached(next_offset)
        if self._syncing.held:
            reached = min(reached, Durability.WRITTEN)
        if reached >= self._durability:
            self.wake()
        if reached >= needed and (self._hidden_from is None or self._is_reserved(next_offset, reached)):
            published = Published(base_offset, reached, append_time, duplicate, self.topic_id)
            if pending_answer is None:
                return published
            pending_answer.resolve(published)
            return pending_answer
        waiting = pending_answer if pending_answer is not None else PendingAnswer()
        if reached >= needed:
            published = Published(base_offset, reached, append_time, duplicate)
            self._unreserved.append((next_offset, lambda error: waiting.resolve(error or published)))
            self.reserve_again()
            return waiting
        self._syncing.wait(next_offset, partial(self._answer_synced, [(waiting, appended)]))
        return waiting

    def _answer_synced(self, fresh: list[tuple[Answer, Appended]], error: HeadraceError | None) -> None:
        self.wake()  # first: readers get messages before publishers their receipts
        reached = self.partition.durability_max
        for pending_answer, (base_offset, _, append_time, duplicate) in fresh:
            pending_answer.resolve(error or Published(base_offset, reached, append_time, duplicate, self.topic_id))

    def committed(self, batch: Batch, mark: int, now_us: int) -> Appended:
        """Append a batch of a committed transaction."""
        self.flush()
        if self.gate is not None:
            self.gate.note_time(now_us)
        appended = self.partition.append_committed(batch, mark, now_us)
        if appended.next_offset > self._reserve_at:
            self._reserve(appended.base_offset)
        if self.settings.durability < _SYNCED:
            self.wake()
        return appended

    def forwarded(self, batch: Batch, now_us: int) -> None:
        """Append a batch that a route has forwarded; nobody else may use its bytes."""
        if self.gone is not None:
            raise type(self.gone)(str(self.gone))
        if self.gate is not None and not self.gate.is_open:
            raise Busy(f"the versions of the keys of {self.topic} partition {self.number} are not known yet")
        if self._gathered:
            self.flush()
        appended = self.partition.append_forwarded(batch, now_us)
        if appended.next_offset > self._reserve_at:
            self._reserve(appended.base_offset)
        if self.settings.durability < _SYNCED:
            self.wake()

    def when_synced(self, tell: Callable[[HeadraceError | None], None]) -> None:
        """Call back when everything appended so far is synced; at once for a partition in memory."""
        next_offset = self.partition.next_offset
        if self.partition.awaits_sync(next_offset):

            def synced(error: HeadraceError | None) -> None:
                tell(error)
                self.wake()

            self._syncing.wait(next_offset, synced)
        elif not self._is_reserved(next_offset, self.partition.reached(next_offset)):
            self._unreserved.append((next_offset, tell))
            self.reserve_again()
        else:
            tell(None)
            self.wake()

    def read(self, offset: int, bytes_max: int, now_us: int, on_ready: Callable[[], None] | None) -> Slice | None:
        """Whole batches from an offset on; None when there are none, and then `on_ready` is called once."""
        if self.gone is not None:
            raise type(self.gone)(str(self.gone))
        end_offset = self.end_offset
        expired_us = None
        if self.settings.validity is Validity.TTL and self.settings.ttl_seconds is not None:
            expired_us = now_us - round(self.settings.ttl_seconds * 1e6)
        found = None
        if offset < end_offset:
            try:
                found = self.delivered.read(offset, bytes_max, end_offset, expired_us)
            except OffsetOutOfRange:
                self.check_offset(offset)
                raise
        if found is None and on_ready is not None:
            self.listen(on_ready)
        return found

    def listen(self, on_ready: Callable[[], None]) -> None:
        """Call this once when there may be more to read."""
        self._sleepers[on_ready] = None

    def check_offset(self, offset: int) -> None:
        """Refuse an offset that is not in the partition, and tell which are."""
        first, end = self.partition.first_offset, self.end_offset
        if not first <= offset <= max(end, first):
            raise OffsetOutOfRange(
                f"{self.topic} partition {self.number} has no offset {offset}; it has {first} to {end}",
                first_offset=first,
                next_offset=end,
            )

    def forget(self, on_ready: Callable[[], None]) -> None:
        """Do not call this reader any more."""
        self._sleepers.pop(on_ready, None)

    def wake(self) -> None:
        """Wake all waiting readers: there may be something to read, or the partition is gone."""
        if self._sleepers:
            sleepers, self._sleepers = self._sleepers, {}
            for on_ready in sleepers:
                on_ready()

    def end(self) -> None:
        """Refuse all reading and publishing: the topic was deleted."""
        self.flush()
        self.gone = TopicNotFound(f"the topic {self.topic} was deleted")
        if self.gate is not None:
            self.gate.fail_waiting(self.gone)
        self.wake()

    def _next_reserve(self) -> int:
        """Beyond which offset more must be reserved: never, if messages are safe before they are seen."""
        if self._reservation is None or self.settings.durability >= _SYNCED:
            return _NEVER
        return self._reservation.ask_at

    def _is_reserved(self, next_offset: int, reached: Durability) -> bool:
        """Whether what ends at an offset can be shown, or its offsets told."""
        if self._hidden_from is None or self._reservation is None:
            return True
        return next_offset <= self._reservation.end or reached >= _SYNCED

    def _reserve(self, shown: int) -> None:
        """Ask for more offsets, if they run short; what is beyond the reserved ones is hidden from `shown` on."""
        reservation, end = self._reservation, self.partition.next_offset
        if reservation is None or (end <= self._reserve_at and not self._unreserved):
            return
        if end > reservation.end and self._hidden_from is None:
            self._hidden_from = shown
        if not reservation.asked:
            reservation.ask(end, partial(self._reserved, end))

    def reserve_again(self) -> None:
        """Ask once more for what could not be reserved, if anything is hidden because of that."""
        if self._hidden_from is not None:
            self._reserve(self._hidden_from)

    def _reserved(self, asked: int, error: HeadraceError | None) -> None:
        """More offsets are reserved, those up to the end of a batch for certain; or they cannot be."""
        assert self._reservation is not None
        reserved, waiting = self._reservation.end, self._unreserved
        self._reserve_at = self._next_reserve()
        self._unreserved = [one for one in waiting if error is None and one[0] > reserved]
        if error is None and self._hidden_from is not None:
            self._hidden_from = None if self.partition.next_offset <= reserved else asked
            self._reserve(asked)
        self.wake()  # first: readers get messages before publishers their receipts
        for next_offset, tell in waiting:
            if error is not None or next_offset <= reserved:
                tell(error)

    def _gather(self, batch: Batch, needed: int, now_us: int) -> Answer:
        pending_answer: Answer = PendingAnswer()
        if not self._gathered:
            self._ports.call_soon(self.flush)
        batch.data = bytearray(batch.data)  # what was received is written over soon
        self._gathered.append((batch, needed, pending_answer))
        self._gathered_bytes += batch.length
        self._now_us = now_us
        if self._gathered_bytes > _GATHERED_BYTES:
            self.flush()
        return pending_answer

    def _append(self, batches: list[Batch]) -> list[Appended | HeadraceError]:
        """One batch as it is; several as one."""
        if len(batches) > 1:
            return self.partition.append_gathered(batches, self.codec or self.settings.compression.codec, self._now_us)
        return [self.partition.append(batches[0], self._now_us)]
