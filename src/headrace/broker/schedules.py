"""Runs schedules: the broker publishes a message at each scheduled time, exactly once even across crashes."""

import logging
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from heapq import heapify, heappop, heappush
from itertools import count
from typing import Any

import msgspec

from headrace.broker.facts import ScheduleAdvanced, ScheduleDeleted, ScheduleRunLocation, ScheduleStored
from headrace.broker.ledger import Ledger
from headrace.broker.pending_answer import PendingAnswer
from headrace.broker.ports import Ports
from headrace.broker.publish_pipeline import LocatedBatch, StoreProcessed
from headrace.broker.schedule_entry import (
    DueRuns,
    ScheduleEntry,
    next_run_us,
    runs_left,
    same_times,
)
from headrace.broker.signal import Signal
from headrace.broker.slices import Steps, in_slices
from headrace.broker.topics import Topic, TopicRegistry
from headrace.broker.transactions import Transactions
from headrace.broker.views import check_stores
from headrace.model.batch import Batch, Columns, check_messages, encode
from headrace.model.errors import (
    HeadraceError,
    InvalidArgument,
    InvalidBatch,
    LimitExceeded,
    MessageRefused,
    MessageTooLarge,
    MiddlewareFailed,
    PartitionNotFound,
    ScheduleExists,
    ScheduleNotFound,
    TopicIsView,
    TopicNotFound,
)
from headrace.model.headers import header_bytes, replaced_headers
from headrace.model.limits import SCHEDULES_MAX
from headrace.model.partitioning import by_key
from headrace.model.request import Answer
from headrace.model.requests import Done, PartitionOffset
from headrace.model.schedule import checked_schedule, schedule_of
from headrace.model.schedule_requests import (
    CRON_HEADER,
    RUN_HEADER,
    ScheduleDefinition,
    ScheduleInfo,
    ScheduleList,
    ScheduleNext,
    SchedulePause,
    ScheduleRemove,
    ScheduleRun,
    ScheduleRuns,
    ScheduleSet,
)
from headrace.model.schedule_requests import Schedules as SchedulesFound
from headrace.model.system_topics import check_clients_topic
from headrace.model.topic import DEFAULT_TENANT, parse_topic, tenant_of

logger = logging.getLogger("headrace.broker")

_LATE_US = 10_000_000
"""A run later than this counts as missed: the clock jumped, or the broker stalled."""
_RETRY_US, _RETRY_DOUBLINGS = 1_000_000, 3
"""A failed publish is retried after 1, 2, 4, and then every 8 seconds."""
_PUT_BACK_US = 1_000_000
_CORRECTION_US = 3 * 3600 * 1_000_000
"""If the clock is set back by more, it was wrong before: fixed times of day run again, as with Debian's cron."""
_SKEW_US = 10 * 60 * 1_000_000
"""If the clock is behind by no more, it may be the one of another node: no run is published again, of any schedule."""
_FIRED_MAX = 32
"""Maximum schedules checked per tick; the rest follow in the next."""
_SEARCHED_MAX = 4
"""Maximum searches per tick for the message of a last run, which are needed after a restart."""
_LISTED_MAX = 64
"""Schedules listed per slice: computing the next run of each takes time."""
_RUNS_AT_ONCE_MAX = 1000
_RUNS_BYTES = 1 << 20
"""Maximum runs, and about the maximum bytes, that one schedule publishes together."""
_OUTDATED_MAX = 1000
_SEARCHED_BYTES = 16 << 20
_NEXT_MAX = 1000

_NEVER = (TopicNotFound, TopicIsView, PartitionNotFound, MessageTooLarge, LimitExceeded, InvalidArgument)
"""Errors that a retry does not fix."""


class ScheduleRunner:
    """Runs all schedules."""

    def __init__(
        self,
        topics: TopicRegistry,
        transactions: Transactions,
        ledger: Ledger,
        ports: Ports,
        unsettled: Callable[[Topic, int, int, int], bool],
        process: Callable[[Topic, int, Batch, int, StoreProcessed], PendingAnswer[Any]],
        now_us: int,
    ) -> None:
        """Continue the schedules in the ledger; `unsettled` says whether a leased subscription has yet to settle a
        message, given its topic, partition, offset and the time; `process` passes a batch through middleware.
        """
        self._process = process
        self._topics = topics
        self._transactions = transactions
        self._ledger = ledger
        self._ports = ports
        self._unsettled = unsettled
        self._started_us = now_us
        self._now_us: int | None = None
        """The time of the last tick."""
        self._put_back: deque[tuple[ScheduleEntry, int]] = deque()
        """Schedules to arm again because the clock was set back, and by how much it was."""
        self._ticking = False
        self._searched = 0
        """Searches for the message of a last run in this tick."""
        self._entries: dict[str, ScheduleEntry] = {}
        self._agenda: list[tuple[int, int, ScheduleEntry]] = []
        self._turns = count()
        self._id = max((kept.id for kept in ledger.state.schedules.values()), default=0)
        self.making: Signal[str] = Signal()
        """Emitted before a schedule is made; a listener refuses by raising."""
        self.changed: Signal[str, str, int] = Signal()
        """A schedule was `created`, `altered`, `paused`, `resumed` or `deleted`, or `failed`, with the time of day."""
        self._failures: dict[str, str] = {}
        """Why schedules are stopped until they are set again, by name."""
        for name, kept in ledger.state.schedules.items():
            try:
                self._entries[name] = ScheduleEntry(name, kept.id, schedule_of(kept.definition, kept.created_us))
                self._arm(self._entries[name])
            except Exception as error:  # noqa: BLE001 logged; all other schedules run
                self._fail(name, error)

    def __len__(self) -> int:
        return len(self._ledger.state.schedules)

    def names(self) -> list[str]:
        """The names of all schedules."""
        return list(self._ledger.state.schedules)

    # Requests.

    def set(self, request: ScheduleSet, now_us: int) -> PendingAnswer[Answer]:
        """Create or replace a schedule; one with unchanged times continues where it is.

        A paused schedule stays paused: services set their schedules at every start, which must not undo a pause.
        """
        rule = checked_schedule(request.definition)
        check_clients_topic(rule.topic)
        before = self._ledger.state.schedules.get(rule.name)
        if before is not None and not request.replace:
            raise ScheduleExists(f"there is already a schedule {rule.name}; replace it, or choose another name")
        if before is None and len(self) >= SCHEDULES_MAX:
            raise LimitExceeded(f"there are {SCHEDULES_MAX} schedules, which is the maximum; remove some")
        if before is None:
            self.making(rule.name)
        if before is not None and before.definition.paused:
            rule = msgspec.structs.replace(rule, paused=True)
        kept, entry = self._replaced(rule, before, now_us)
        topic = self._topics.get_or_create(rule.topic, now_us)
        check_stores(str(topic), topic.settings, "publish to")
        columns = _columns(rule, [now_us])
        check_messages(columns, topic.settings.message_bytes_max, rule.topic)
        _partition(rule, topic)
        if kept != before:
            self._ledger.record(now_us, kept)
            self.changed(rule.name, "created" if before is None else "altered", now_us)
        self._id = max(self._id, kept.id)
        self._disarm(rule.name)
        self._failures.pop(rule.name, None)
        self._entries[rule.name] = entry
        self._arm(entry)
        return self._ledger.durably(self._info(rule.name))

    def _replaced(
        self, rule: ScheduleDefinition, before: ScheduleStored | None, now_us: int
    ) -> tuple[ScheduleStored, ScheduleEntry]:
        """The fact to record for a new or changed schedule, and its entry."""
        if before is not None and same_times(before.definition, rule):
            entry = self._entries.get(rule.name) or ScheduleEntry(
                rule.name, before.id, schedule_of(rule, before.created_us)
            )
            schedule_of(rule, before.created_us)  # raises if the rest of the definition is invalid
            # A schedule that had ended and is extended missed no runs in between.
            done_us = before.done_us if entry.next_us(before) is not None else max(before.done_us, now_us)
            return msgspec.structs.replace(before, definition=rule, done_us=done_us), entry
        schedule = schedule_of(rule, now_us)
        # If the clock was set back, runs that are done are not repeated.
        done_us = now_us if before is None else max(now_us, before.done_us)
        if next_run_us(schedule, rule, done_us) is None:
            raise InvalidArgument(f"the schedule {rule.name} would never run: all of its times are in the past")
        place, last_us = (None, 0) if before is None else (before.place, before.last_us)
        kept = ScheduleStored(rule, self._id + 1, now_us, done_us, 0, last_us, place)
        return kept, ScheduleEntry(rule.name, kept.id, schedule)

    def remove(self, request: ScheduleRemove, now_us: int) -> PendingAnswer[Answer]:
        """Remove a schedule; its published messages stay."""
        name = self._kept(request.name).definition.name
        self._ledger.record(now_us, ScheduleDeleted(name))
        self._disarm(name)
        self._failures.pop(name, None)
        self._entries.pop(name, None)
        self.changed(name, "deleted", now_us)
        return self._ledger.durably(Done())

    def pause(self, request: SchedulePause, now_us: int) -> PendingAnswer[Answer]:
        """Pause a schedule, or resume it with the runs from now on."""
        kept = self._kept(request.name)
        name = kept.definition.name
        if kept.definition.paused != request.paused:
            rule = msgspec.structs.replace(kept.definition, paused=request.paused)
            done_us = kept.done_us if request.paused else max(kept.done_us, now_us)
            self._ledger.record(now_us, msgspec.structs.replace(kept, definition=rule, done_us=done_us))
            self.changed(name, "paused" if request.paused else "resumed", now_us)
            if name in self._entries:
                self._arm(self._entries[name])
        return self._ledger.durably(self._info(name))

    def run(self, request: ScheduleRun, now_us: int) -> PendingAnswer[Answer]:
        """Publish a schedule's message now, in addition to the regular runs and not counted among them."""
        kept = self._kept(request.name)
        name = kept.definition.name
        topic = self._topics.get_or_create(kept.definition.topic, now_us)
        pending_answer: PendingAnswer[Answer] = PendingAnswer()

        entry = self._entries.get(name)

        def settled(outcome: list[PartitionOffset] | HeadraceError) -> None:
            if entry is not None:
                entry.busy -= 1
                if self._entries.get(name) is entry and entry.armed_us is None:
                    self._arm(entry)
            if isinstance(outcome, HeadraceError):
                pending_answer.resolve(outcome)
            else:
                pending_answer.resolve(self._info(name) if name in self._ledger.state.schedules else _info(kept))

        published = self._publish(kept, topic, [now_us], 0, now_us)
        if entry is not None:
            entry.busy += 1  # a regular run must check whether this message is still unsettled
        published.then(settled)
        return pending_answer

    def listed(self, request: ScheduleList, tenant: str) -> PendingAnswer[Answer]:
        """List a tenant's schedules by name; for a single topic, the default tenant sees those of all tenants."""
        topic = str(parse_topic(request.topic)) if request.topic else ""

        def wanted(rule: ScheduleDefinition) -> bool:
            visible = tenant_of(rule.name) == tenant or (bool(topic) and tenant == DEFAULT_TENANT)
            return visible and topic in ("", rule.topic)

        def steps() -> Steps:
            schedules, found = self._ledger.state.schedules, list[ScheduleInfo]()
            for number, name in enumerate(sorted(schedules), 1):
                if name in schedules and wanted(schedules[name].definition):  # may be removed between slices
                    found.append(self._info(name))
                if not number % _LISTED_MAX:
                    yield
            return SchedulesFound(found)

        return in_slices(self._ports, steps())

    def next_runs(self, request: ScheduleNext, now_us: int) -> Answer:
        """The next runs of a stored schedule or of a given definition, whether paused or not."""
        if not 0 < request.runs <= _NEXT_MAX:
            raise InvalidArgument(f"runs must be 1 to {_NEXT_MAX}, not {request.runs}")
        after_us = now_us if request.from_us is None else request.from_us
        left: int | None
        if request.definition is not None:
            rule = request.definition
            schedule, left = schedule_of(rule, after_us), rule.runs_max
        else:
            kept = self._kept(request.name)
            rule, left = kept.definition, runs_left(kept)
            schedule = schedule_of(rule, kept.created_us)
            after_us = max(after_us, kept.done_us) if request.from_us is None else after_us
        times_us: list[int] = []
        for _ in range(request.runs if left is None else min(request.runs, left)):
            run_us = next_run_us(schedule, rule, after_us)
            if run_us is None:
                break
            times_us.append(run_us)
            after_us = run_us
        return ScheduleRuns(times_us)

    # Timed work.

    def tick(self, now_us: int) -> None:
        """Publish the runs that are due."""
        back_us = 0 if self._now_us is None else self._now_us - now_us
        if self._now_us is None or back_us > _PUT_BACK_US:
            self._started_us = min(self._started_us, now_us)
            self._put_back.extend((entry, back_us) for entry in self._entries.values())
        self._now_us = now_us
        self._ticking = True
        for _ in range(min(len(self._put_back), _FIRED_MAX)):
            entry, back_us = self._put_back.popleft()
            if self._entries.get(entry.name) is entry:
                self._go_back(entry, back_us, now_us)
        self._searched = 0
        for _ in range(_FIRED_MAX):
            due_us = self._next_due_us()
            if due_us is None or due_us > now_us or self._searched == _SEARCHED_MAX:
                break
            _, _, entry = heappop(self._agenda)
            entry.armed_us = None
            try:
                if not entry.busy:  # a busy one is checked again when its publish completes
                    self._fire(entry, now_us)
            except Exception as error:  # noqa: BLE001 logged; all other schedules run
                self._fail(entry.name, error)
        self._ticking = False

    def _fail(self, name: str, error: Exception) -> None:
        """Stop a schedule until it is set again, and log why."""
        is_expected = isinstance(error, HeadraceError)
        text = str(error) if is_expected else f"{type(error).__name__}: {error}"
        logger.error(
            "schedule failed; set it again  schedule=%s reason=%s", name, text, exc_info=None if is_expected else error
        )
        self._disarm(name)
        self._entries.pop(name, None)
        self._failures[name] = text
        self.changed(name, "failed", self._now_us or self._started_us)

    def _go_back(self, entry: ScheduleEntry, back_us: int, now_us: int) -> None:
        """Adapt a schedule to a clock that was set back: intervals repeat, fixed times only after a large one.

        Nothing repeats while the last recorded run is only as far ahead as the clock of the node that served before.
        """
        kept = self._ledger.state.schedules[entry.name]
        ahead_us = max(kept.done_us, kept.created_us) - now_us
        behind_us = max(ahead_us, back_us)
        repeats = behind_us > (_CORRECTION_US if entry.schedule.certain else _SKEW_US)
        if ahead_us > 0 and not entry.busy and repeats:
            try:
                # Intervals count from the creation time, which must not be in the future.
                done_us, created_us = min(kept.done_us, now_us), min(kept.created_us, now_us)
                self._ledger.record(now_us, msgspec.structs.replace(kept, done_us=done_us, created_us=created_us))
                entry.schedule = schedule_of(kept.definition, created_us)
            except HeadraceError as error:
                logger.warning(
                    "schedule not set back after the clock was  schedule=%s reason=%s",
                    entry.name,
                    error,
                )
        self._arm(entry)

    def next_tick_us(self) -> int | None:
        """When the next tick is due; None for never."""
        return self._now_us if self._put_back else self._next_due_us()

    def _next_due_us(self) -> int | None:
        while self._agenda and self._agenda[0][0] != self._agenda[0][2].armed_us:
            heappop(self._agenda)  # outdated: the schedule was changed or removed
        return self._agenda[0][0] if self._agenda else None

    def _fire(self, entry: ScheduleEntry, now_us: int) -> None:
        kept = self._ledger.state.schedules[entry.name]
        rule = kept.definition
        missed_us = max(self._started_us, now_us - _LATE_US)
        size = len(rule.value) + header_bytes(rule.headers) + 100
        due = entry.due(kept, missed_us, now_us, max(min(_RUNS_AT_ONCE_MAX, _RUNS_BYTES // size), 1))
        try:
            pending_answer = self._begin(entry, kept, due, now_us)
        except (HeadraceError, OSError) as error:
            self._retry_later(entry, error, now_us)
            return
        if pending_answer is None:
            self._arm(entry)
            return
        entry.busy += 1
        self._arm(entry, done_us=due.done_us)

        def settled(outcome: list[PartitionOffset] | HeadraceError) -> None:
            entry.busy -= 1
            if self._entries.get(entry.name) is not entry:
                return  # it was removed or replaced meanwhile
            if isinstance(outcome, HeadraceError):
                self._retry_later(entry, outcome, now_us)
                return
            entry.failures = 0
            if self._now_us is not None:  # the clock may have been set back meanwhile
                self._go_back(entry, 0, self._now_us)
            elif entry.armed_us is None:
                self._arm(entry)

        pending_answer.then(settled)

    def _begin(
        self, entry: ScheduleEntry, kept: ScheduleStored, due: DueRuns, now_us: int
    ) -> PendingAnswer[list[PartitionOffset]] | None:
        """Publish the runs that are due; returns None after recording that all of them are skipped."""
        times_us = due.times_us
        if times_us and kept.definition.overlap == "skip":
            times_us = [] if self._overlaps(entry, kept, now_us) else times_us[-1:]
        pending_answer = None
        if times_us:
            try:
                topic = self._topics.get_or_create(kept.definition.topic, now_us)
                pending_answer = self._publish(kept, topic, times_us, due.done_us, now_us)
            except _NEVER as error:
                logger.warning("schedule run failed; skipped  schedule=%s reason=%s", entry.name, error)
        if pending_answer is None and due.done_us > kept.done_us:
            self._ledger.record(now_us, ScheduleAdvanced(entry.name, entry.id, due.done_us, 0))
        left_out = due.left_out + len(due.times_us) - (len(times_us) if pending_answer is not None else 0)
        if left_out:
            logger.info("schedule runs skipped  schedule=%s runs=%s", entry.name, left_out)
            entry.skipped += left_out
        return pending_answer

    def _publish(
        self, kept: ScheduleStored, topic: Topic, times_us: list[int], done_us: int, now_us: int
    ) -> PendingAnswer[list[PartitionOffset]]:
        """Publish runs and record them, atomically; without `done_us` it is an additional run."""
        rule = kept.definition
        check_stores(str(topic), topic.settings, "publish to")
        number = _partition(rule, topic)
        batch = encode(_columns(rule, times_us), now_us, codec=topic.settings.compression.codec)
        place = ScheduleRunLocation(topic.id, number, now_us)
        fact = ScheduleAdvanced(rule.name, kept.id, done_us, len(times_us) if done_us else 0, times_us[-1], place)
        entry = self._entries.get(rule.name)
        if entry is not None:
            entry.offset = None
        pending_answer: PendingAnswer[list[PartitionOffset]] = PendingAnswer()

        def settled(outcome: list[PartitionOffset] | HeadraceError) -> None:
            last = self._ledger.state.schedules.get(rule.name)
            is_last = last is not None and (last.place, last.last_us) == (place, times_us[-1])
            if entry is not None and is_last and not isinstance(outcome, HeadraceError) and outcome:
                entry.offset = outcome[0].offset + len(times_us) - 1
            pending_answer.resolve(outcome)

        def commit(batches: list[LocatedBatch], _: int) -> PendingAnswer[list[PartitionOffset]]:
            return self._transactions.commit_internal(batches, [fact], now_us)

        if topic.middleware is None:
            commit([(topic, number, batch)], now_us).then(settled)
        else:
            refused = partial(self._skip_refused, kept, done_us, len(times_us), now_us)
            self._process(topic, number, batch, now_us, commit).then(lambda outcome: settled(refused(outcome)))
        return pending_answer

    def _skip_refused(
        self, kept: ScheduleStored, done_us: int, runs: int, now_us: int, outcome: list[PartitionOffset] | HeadraceError
    ) -> list[PartitionOffset] | HeadraceError:
        """Skip regular runs that the topic's middleware refuses: it would do so again."""
        if not isinstance(outcome, MessageRefused | MiddlewareFailed) or not done_us:
            return outcome
        name = kept.definition.name
        try:
            self._ledger.record(now_us, ScheduleAdvanced(name, kept.id, done_us, 0))
        except HeadraceError as error:
            return error
        logger.warning("schedule run failed; skipped  schedule=%s reason=%s", name, outcome)
        if name in self._entries:
            self._entries[name].skipped += runs
        return []

    def _retry_later(self, entry: ScheduleEntry, error: Exception, now_us: int) -> None:
        if not entry.failures:
            logger.warning("schedule run not published; retrying  schedule=%s reason=%s", entry.name, error)
        self._arm(entry, not_before_us=now_us + (_RETRY_US << min(entry.failures, _RETRY_DOUBLINGS)))
        entry.failures += 1

    def _disarm(self, name: str) -> None:
        if name in self._entries:
            self._entries[name].armed_us = None

    def _arm(self, entry: ScheduleEntry, done_us: int = 0, not_before_us: int = 0) -> None:
        """Schedule the next check of an entry for its next run."""
        run_us = entry.next_us(self._ledger.state.schedules[entry.name], done_us)
        armed_us = None if run_us is None else max(run_us, not_before_us)
        if armed_us is not None and armed_us != entry.armed_us:
            heappush(self._agenda, (armed_us, next(self._turns), entry))
        entry.armed_us = armed_us
        if armed_us is not None and self._agenda[0][0] == armed_us and not self._ticking:
            self._ports.wake_at(armed_us)
        if len(self._agenda) > 2 * len(self._entries) + _OUTDATED_MAX:
            self._agenda = [item for item in self._agenda if item[0] == item[2].armed_us]
            heapify(self._agenda)

    # The message of the last run.

    def _overlaps(self, entry: ScheduleEntry, kept: ScheduleStored, now_us: int) -> bool:
        """Whether a subscription has yet to settle the message of the last run."""
        topic = self._topics.by_id.get(kept.place.topic_id) if kept.place is not None else None
        if topic is None or kept.place is None:
            return False
        if entry.offset is None:
            self._searched += 1
            entry.offset = self._find(kept, topic, kept.place)
        return entry.offset is not None and self._unsettled(topic, kept.place.partition, entry.offset, now_us)

    def _find(self, kept: ScheduleStored, topic: Topic, place: ScheduleRunLocation) -> int | None:
        """The offset of the last run's message; None when it is gone."""
        partition = self._topics.active(topic, place.partition).partition
        wanted = (_header_name(kept.definition), b"%d" % kept.last_us)
        begin, searched = partition.find_time(place.published_us), 0
        for batch in partition.batches(begin, partition.next_offset):
            searched += batch.length
            if searched > _SEARCHED_BYTES and batch.append_time > place.published_us + _LATE_US:
                break  # appended too long after the run to contain it
            if not batch.time_min <= place.published_us <= batch.time_max:
                continue
            with suppress(InvalidBatch):  # an earlier version may have stored it
                for message in batch.messages():
                    headers = message.headers or {}
                    if (headers.get(CRON_HEADER), headers.get(RUN_HEADER)) == wanted:
                        return message.offset
        return None

    def _kept(self, name: str) -> ScheduleStored:
        kept = self._ledger.state.schedules.get(name.removeprefix(f"{DEFAULT_TENANT}/"))
        if kept is None:
            raise ScheduleNotFound(f"there is no schedule {name}; `headrace cron list` lists them")
        return kept

    def _info(self, name: str) -> ScheduleInfo:
        kept, entry = self._kept(name), self._entries.get(name)
        if entry is None:
            return msgspec.structs.replace(_info(kept), error=self._failures.get(name, ""))
        return _info(kept, entry.next_us(kept) or 0, entry.skipped)


def _info(kept: ScheduleStored, next_us: int = 0, skipped: int = 0) -> ScheduleInfo:
    return ScheduleInfo(kept.definition, kept.created_us, next_us, kept.last_us, kept.runs, skipped)


def _columns(rule: ScheduleDefinition, times_us: list[int]) -> Columns:
    runs = len(times_us)
    name = _header_name(rule)
    headers = [replaced_headers(rule.headers, {CRON_HEADER: name, RUN_HEADER: b"%d" % at}) for at in times_us]
    return Columns([rule.value] * runs, None if rule.key is None else [rule.key] * runs, headers=headers)


def _header_name(rule: ScheduleDefinition) -> bytes:
    """The schedule's name in its messages, with the tenant if it differs from the topic's."""
    tenant, name = tenant_of(rule.name), rule.name.rpartition("/")[2]
    return (name if tenant == tenant_of(rule.topic) else f"{tenant}/{name}").encode()


def _partition(rule: ScheduleDefinition, topic: Topic) -> int:
    """The partition of a schedule's messages: the given one, the key's, or the first."""
    partitions = topic.settings.partitions
    if rule.partition is None:
        return by_key(rule.key, partitions) if rule.key is not None else 0
    if not 0 <= rule.partition < partitions:
        raise PartitionNotFound(
            f"{topic} has no partition {rule.partition}; it has 0 to {partitions - 1}", partitions=partitions
        )
    return rule.partition
