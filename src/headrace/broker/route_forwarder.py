"""Forwards the messages of one partition along the routes of its topic: in order, and exactly once across crashes."""

import logging
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from itertools import chain

from headrace.broker.active_partition import ActivePartition
from headrace.broker.failure_log import FailureLog
from headrace.broker.middleware_chain import SiftedBatch
from headrace.broker.pending_answer import PendingAnswer
from headrace.broker.ports import Ports
from headrace.broker.route_facts import RouteTargetBound
from headrace.broker.route_slice import SliceReader
from headrace.broker.route_table import OVER_BUDGET, CompiledRoute, RoutingDecision
from headrace.broker.route_writer import SliceWriter, UndeliveredMessages, UnsyncedSlice, pick_messages
from headrace.broker.routed_source import RoutedSource
from headrace.broker.topics import Topic, TopicRegistry
from headrace.broker.turns import Turns
from headrace.broker.views import check_stores
from headrace.engines.api import forwarder_id
from headrace.model.batch import Batch
from headrace.model.errors import DiskFull, HeadraceError
from headrace.model.headers import Headers, replaced_headers
from headrace.model.limits import MESSAGE_BYTES_MAX
from headrace.model.requests import TopicCreate
from headrace.model.route_requests import ROUTE_PREFIX

logger = logging.getLogger("headrace.broker")

_SLICE_MESSAGES = 512
_SLICE_BYTES = 256 << 10
"""What is forwarded at a time: one batch for each partition that gets any of it."""
_TURN_COST = 2000
"""What all forwarders together may do in one loop turn, in microseconds, about."""
_MESSAGE_COST = 4
_APPEND_COST = 40
_READ_COST = 40
_OPEN_COST = 500
_RETRY_US = 1_000_000
_REST = 2
_REST_US_MAX = 200_000
"""After a slice, the disk is left to publishers for so many times as long as the syncs of its targets take, and at most
for so long; a full slice does not wait.
"""

Sift = Callable[[Topic, int, Batch, int], PendingAnswer[SiftedBatch]]
"""Passes a batch for a topic and partition through the topic's middleware."""


class ForwarderQueue:
    """The forwarders that have something to do; they take turns."""

    def __init__(self, turns: Turns, ports: Ports) -> None:
        self._turns = turns
        self.wake_at = ports.wake_at
        self.timed: dict[RouteForwarder, None] = {}
        """Those that wait for a time, or for a sync that may have failed."""
        self.moved: dict[RoutedSource, None] = {}
        """The sources of which more was forwarded and synced since positions were recorded."""
        self._waiting: deque[RouteForwarder] = deque()
        self._is_scheduled = False

    @property
    def now_us(self) -> int:
        """The time of the last request or tick."""
        return self._turns.now_us

    def add(self, forwarder: "RouteForwarder") -> None:
        """Let a forwarder do some of its work at the end of a loop turn."""
        if not forwarder.is_queued:
            forwarder.is_queued = True
            self._waiting.append(forwarder)
            self._schedule()

    def tick(self, now_us: int) -> None:
        """Let those go on for which the time has come."""
        timed, self.timed = self.timed, {}
        for forwarder in timed:
            if forwarder.tick(now_us):
                self.timed[forwarder] = None

    def _schedule(self) -> None:
        if not self._is_scheduled:
            self._is_scheduled = True
            self._turns.call_at_turn_end(self._run)

    def _run(self, now_us: int) -> None:
        self._is_scheduled = False
        left = _TURN_COST
        for _ in range(len(self._waiting)):
            forwarder = self._waiting.popleft()
            forwarder.is_queued = False
            left -= forwarder.run(now_us, left)
            if left <= 0:
                break
        if self._waiting:
            self._schedule()


class RouteForwarder:
    """Forwards the messages of one partition. Everything before `position` is in the targets."""

    def __init__(
        self,
        source: RoutedSource,
        number: int,
        position: int,
        topics: TopicRegistry,
        queue: ForwarderQueue,
        failures: FailureLog,
        check_room: Callable[[Topic], None],
        sift: Sift,
    ) -> None:
        """A forwarder at an offset; `check_room` raises when a topic takes no messages at the moment.

        `sift` passes batches through the middleware of their targets.
        """
        self._sift = sift
        self._awaited: PendingAnswer[SiftedBatch] | None = None
        """What the steps wait for."""
        self._source = source
        self.number = number
        self.position = position
        self.synced_position = position
        """Everything before it is in the targets and synced there."""
        self.lost = 0
        """Messages that were removed before they were forwarded."""
        self.error = ""
        """Why nothing can be forwarded at the moment."""
        self.is_queued = False
        self._topics = topics
        self._queue = queue
        self._failures = failures
        self._check_room = check_room
        self._id = forwarder_id(source.topic.id, number)
        self._active: ActivePartition | None = None
        self._reader: SliceReader | None = None
        self._steps: Iterator[int] | None = None
        self._version = 0
        self._unsynced: deque[UnsyncedSlice] = deque()
        self._retry_us = 0
        self._rest_us = 0
        """When the next slice may be forwarded, unless it is a full one."""
        self._is_stopped = False

    @property
    def name(self) -> str:
        """The partition, for logs."""
        return f"topic={self._source.topic} partition={self.number}"

    @property
    def behind(self) -> int:
        """How many messages can be read, and are not yet in all targets, synced; 0 before the partition is open."""
        return 0 if self._active is None else max(self._active.end_offset - self.synced_position, 0)

    @property
    def is_open(self) -> bool:
        """Whether the partition is open."""
        return self._active is not None

    def open(self) -> None:
        """Open the partition, if it is not open; raises what the store raises."""
        if self._active is None and not self._is_stopped:
            self._open()

    def start(self) -> None:
        """Begin to forward."""
        self._queue.add(self)

    def stop(self) -> None:
        """Do nothing any more."""
        self._is_stopped = True
        self._steps = None
        if self._active is not None:
            self._active.forget(self.plan)

    def plan(self) -> None:
        """Forward more, if there is more and the time for it has come; called when any of that may have changed."""
        active = self._active
        if self._is_stopped or self.is_queued or self._source.holds or self._retry_us:
            return
        if active is None:
            self._queue.add(self)
            return
        readable = active.end_offset - self.position
        if active.gone is not None:
            return
        if readable <= 0 and active.partition.first_offset <= self.position:
            active.listen(self.plan)
        elif readable >= _SLICE_MESSAGES:
            self._queue.add(self)
        elif not self._unsynced:  # else what comes while targets are synced is forwarded together
            if self._rest_us <= self._queue.now_us:
                self._queue.add(self)
            else:
                self._queue.timed[self] = None
                self._queue.wake_at(self._rest_us)

    def tick(self, now_us: int) -> bool:
        """Try again what has failed, and go on after a rest; whether this is to be called again."""
        if self._retry_us and now_us >= self._retry_us:
            self._retry_us = 0
            self._queue.add(self)
        elif 0 < self._rest_us <= now_us:
            self._rest_us = 0
            self.plan()
        self.sync_again()
        return bool(self._retry_us or self._rest_us or self._unsynced) and not self._is_stopped

    def sync_again(self) -> None:
        """Have targets synced that could not be, and do not wait for those that were deleted."""
        for unsynced in list(self._unsynced):
            unsynced.sync_again()
        if self._unsynced and self._unsynced[0].is_synced:
            self._on_synced()

    def run(self, now_us: int, cost_max: int) -> int:
        """Forward for about this cost; returns what it has taken."""
        if self._is_stopped or self._source.holds:
            return 0
        used = 0
        key = ("route", self._source.topic.id, self.number)
        try:
            if self._steps is None or self._version != self._source.version:
                self._version = self._source.version
                self._steps, self._awaited = self._forward(now_us), None
            for cost in self._steps:
                used += cost
                if self._awaited is not None:
                    return used  # the answer adds it to the queue
                if used >= cost_max or self._version != self._source.version:
                    self._queue.add(self)
                    return used
        except Exception as error:  # noqa: BLE001 logged; other sources go on, and this one tries again
            self._steps = self._awaited = None
            self._retry_us = now_us + _RETRY_US
            self._queue.timed[self] = None
            self.error = str(error)
            self._failures.note(key, error, "messages not forwarded; trying again  topic=%s partition=%s",
                                self._source.topic, self.number)  # fmt: skip
            return used + _READ_COST
        self._steps = None
        if self.error:
            self.error = ""
            self._failures.worked(key)
        self.plan()
        return used

    def _forward(self, now_us: int) -> Iterator[int]:
        """Forward one slice; yields the cost of each step."""
        if self._active is None:
            yield _OPEN_COST
            self._open()
        active, reader = self._active, self._reader
        assert active is not None
        assert reader is not None
        if reader.partition is not active.delivered:  # the topic got middleware that changes deliveries
            reader = self._reader = SliceReader(active.delivered, self.name)
        self._skip_removed(active)
        position, end = self.position, active.end_offset
        change = self._source.next_change(self.number, position)
        if change is not None:
            end = min(end, change)
        if active.gone is not None or position >= end:
            return
        found = reader.read(position, end, _SLICE_MESSAGES, _SLICE_BYTES)
        yield _READ_COST + _MESSAGE_COST * len(found.offsets)
        touched: dict[ActivePartition, None] = {}
        if found.offsets:
            decision = yield from self._source.table.decide(found.columns, self._source.inactive(self.number, position))
            if decision.count < len(found.offsets):
                found.cut(decision.count)
            yield from self._write_all(SliceWriter(self._id, found, now_us), decision, touched)
        self.position = found.end
        reader.release(found.end)
        if self._source.changing:
            self._source.forget_passed()
        syncs_us = sum(target.partition.sync_latency_us for target in touched)
        self._rest_us = self._queue.now_us + syncs_us + min(_REST * syncs_us, _REST_US_MAX)
        unsynced = UnsyncedSlice(found.end, touched, self._on_synced)
        self._unsynced.append(unsynced)
        unsynced.wait()

    def _write_all(
        self, writer: SliceWriter, decision: RoutingDecision, touched: dict[ActivePartition, None]
    ) -> Iterator[int]:
        """Append the messages to their targets; those that cannot be delivered come last, to the error topics."""
        undelivered = UndeliveredMessages()
        for index, route in decision.failed:
            undelivered.add(route, [index], "", OVER_BUDGET)
        targets: dict[str, list[tuple[CompiledRoute, Sequence[int]]]] = {}
        for taken, indexes in decision.groups:
            routes: dict[str, CompiledRoute] = {}
            for route in taken:
                for target in route.targets:
                    routes.setdefault(target, route)
            for target, route in routes.items():
                targets.setdefault(target, []).append((route, indexes))
        yield _MESSAGE_COST * len(targets)
        for target, parts in targets.items():
            bound = self._source.binding(target, self.number, self.position)
            if bound is None or not bound.topic_id:
                for route, indexes in parts:
                    undelivered.add(route, indexes, target, f"there is no topic {target}")
                continue
            topic = self._topics.by_id.get(bound.topic_id)
            if topic is None:
                continue  # it was deleted after these messages had been forwarded
            if writer.found.raw_bytes > bound.message_bytes_max:
                parts = list(writer.fitting(parts, target, bound.message_bytes_max, undelivered))
            indexes = parts[0][1] if len(parts) == 1 else sorted(chain.from_iterable(part for _, part in parts))
            for number, some in writer.by_partition(indexes, self.number, bound.partitions):
                if topic.middleware is None:
                    touched[self._write(topic, number, writer, some)] = None
                else:
                    refused = yield from self._write_sifted(topic, number, writer, some, touched)
                    for index, reason in refused.items():
                        route = next(route for route, part in parts if index in part)
                        undelivered.add(route, [index], target, reason)
                yield _APPEND_COST
        for name, letters in undelivered.by_topic.items():
            yield from self._write_undelivered(name, letters, writer, touched)

    def _write(self, topic: Topic, number: int, writer: SliceWriter, indexes: Sequence[int]) -> ActivePartition:
        """Append messages to a partition, but for those that are there already."""
        active = self._topics.active(topic, number)
        missing = self._missing(active, writer, indexes)
        if missing:
            self._check(topic, active)
            active.forwarded(writer.encoded(missing, topic), writer.now_us)
        return active

    def _write_sifted(
        self,
        topic: Topic,
        number: int,
        writer: SliceWriter,
        indexes: Sequence[int],
        touched: dict[ActivePartition, None],
    ) -> Generator[int, None, dict[int, str]]:
        """Append what a topic's middleware leaves of messages; returns why it refuses others.

        After a crash the partition may have the messages already; what is refused must be found again.
        """
        active = self._topics.active(topic, number)
        missing = self._missing(active, writer, indexes)
        sifted = yield from self._sifted(topic, number, writer, indexes)
        refused = {indexes[index]: reason for index, reason in sifted.refused.items()}
        if missing and len(missing) < len(indexes):
            sifted = yield from self._sifted(topic, number, writer, missing)
        if missing and sifted.batch is not None:
            self._check(topic, active)
            active.forwarded(sifted.batch, writer.now_us)
        touched[active] = None
        return refused

    def _sifted(
        self, topic: Topic, number: int, writer: SliceWriter, indexes: Sequence[int]
    ) -> Generator[int, None, SiftedBatch]:
        """Wait for the middleware of a topic."""
        yield _MESSAGE_COST * len(indexes)
        answer = self._sift(topic, number, writer.encoded(indexes, topic), writer.now_us)
        if not answer.resolved:
            answer.then(lambda _: self._queue.add(self))
            while not answer.resolved:
                self._awaited = answer
                yield 0
                self._awaited = None
        outcome = answer.outcome
        if isinstance(outcome, HeadraceError):
            raise outcome
        assert outcome is not None
        return outcome

    def _write_undelivered(
        self,
        name: str,
        letters: dict[int, list[tuple[str, str, str]]],
        writer: SliceWriter,
        touched: dict[ActivePartition, None],
    ) -> Iterator[int]:
        """Append messages to an error topic, with headers that tell why they are there."""
        bound = self._bound_error_topic(name, writer.now_us)
        topic = self._topics.by_id.get(bound.topic_id)
        if topic is None:
            return
        active = self._topics.active(topic, self.number % bound.partitions)
        missing = self._missing(active, writer, sorted(letters))
        if missing:
            self._check(topic, active)
            columns = pick_messages(writer.found.columns, missing)
            given = columns.headers or [None] * len(missing)
            columns.headers = [
                self._explained(headers, letters[index], writer.found.offsets[index])
                for index, headers in zip(missing, given, strict=True)
            ]
            active.forwarded(writer.encode(columns, writer.codec(topic)), writer.now_us)
        touched[active] = None
        yield _APPEND_COST + _MESSAGE_COST * len(letters)

    def _bound_error_topic(self, name: str, now_us: int) -> RouteTargetBound:
        bound = self._source.binding(name, self.number, self.position)
        if bound is None or not bound.topic_id:
            given = TopicCreate(name, {"message_bytes_max": MESSAGE_BYTES_MAX}, exist_ok=True)
            check_stores(name, self._topics.create(given, now_us).settings, "route to")
            bound = self._source.binding(name, self.number, self.position)
            assert bound is not None, "a topic that a route may write to is bound when it is created"
        return bound

    def _explained(self, headers: Headers | None, letters: list[tuple[str, str, str]], offset: int) -> Headers:
        """The headers of a message, and why it was not delivered."""
        routes, targets, reasons = (
            dict.fromkeys(one for one in column if one) for column in zip(*letters, strict=True)
        )
        told = {
            "name": ", ".join(routes),
            "target": ", ".join(targets),
            "reason": "; ".join(reasons),
            "topic": str(self._source.topic),
            "partition": str(self.number),
            "offset": str(offset),
        }
        return replaced_headers(
            headers, {f"{ROUTE_PREFIX}{name}": text.encode() for name, text in told.items() if text}
        )

    def _missing(self, active: ActivePartition, writer: SliceWriter, indexes: Sequence[int]) -> Sequence[int]:
        """The messages that a partition does not have yet: after a crash it may have some of them."""
        there = active.partition.forwarded_before(self._id)
        if not active.partition.durable and self._active is not None:
            # What was published before a restart is gone from a topic in memory, forwarded or not.
            there = max(there, self._active.partition.survived_offset)
        offsets = writer.found.offsets
        if not indexes or there <= offsets[indexes[0]]:
            return indexes
        return [index for index in indexes if offsets[index] >= there]

    def _check(self, topic: Topic, active: ActivePartition) -> None:
        """Refuse to append where a publisher could not, either."""
        if self._topics.ballast.dropped and active.partition.durable:
            raise DiskFull("the disk is full, and the remaining space is reserved for freeing more")
        self._check_room(topic)

    def _open(self) -> None:
        source = self._source
        active = self._active = self._topics.active(source.topic, self.number)
        self._reader = SliceReader(active.delivered, self.name)
        if not active.partition.durable and self.position < active.partition.first_offset:
            self.position = self.synced_position = active.partition.first_offset  # the rest is gone since a restart
            self._queue.moved[source] = None

    def _skip_removed(self, active: ActivePartition) -> None:
        """Go on with the first message there is, if retention or a trim has removed some before they were forwarded."""
        first_offset = active.partition.first_offset
        if self.position >= first_offset:
            return
        count = first_offset - self.position
        self.lost += count
        text = "messages removed before they were forwarded  %s first=%d last=%d"
        logger.warning(text, self.name, self.position, first_offset - 1)
        self.position = first_offset
        if not self._unsynced:
            self.synced_position = first_offset
            self._queue.moved[self._source] = None

    def _on_synced(self) -> None:
        """Count slices as forwarded whose targets are synced, and forward what came meanwhile."""
        before = self.synced_position
        while self._unsynced and self._unsynced[0].is_synced:
            self.synced_position = max(self.synced_position, self._unsynced.popleft().end)
        if self.synced_position > before:
            self._queue.moved[self._source] = None
        if self._unsynced:
            self._queue.timed[self] = None  # a sync may have failed
        else:
            self.plan()
