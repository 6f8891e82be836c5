"""Work of any size is done in portions: the broker serves others in between. What counts here is work, not time."""

import asyncio
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count, pairwise
from pathlib import Path
from random import Random
from typing import Any
from unittest.mock import patch

import pytest

from headrace.broker import compaction_cleanup, schedules, sync_waiters
from headrace.broker.schedules import ScheduleRunner
from headrace.broker.sync_waiters import SyncWaiters
from headrace.engines.last_offsets import LastOffsets
from headrace.engines.leased.index import LeasedIndex
from headrace.model.batch import Columns, encode
from headrace.model.errors import HeadraceError, LogFailed
from headrace.model.leasing import SubscriptionCreate, SubscriptionDescribe
from headrace.model.requests import Publish, TopicCreate
from headrace.model.schedule_requests import CRON_HEADER, ScheduleDefinition, ScheduleList, ScheduleSet
from headrace.runtime.loop_scheduler import LoopScheduler
from headrace.storage import worker
from headrace.storage.worker import CpuThrottle
from headrace.testing.workbench import START_US, Workbench

SECOND, HOUR = 1_000_000, 3_600_000_000
MANY = 150
NAMES = [f"sweep-{number:03}" for number in range(MANY)]


@pytest.fixture
def data() -> Iterator[str]:
    """A directory in memory, where syncing takes no time."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").exists() else None) as directory:
        yield f"{directory}/data"


@contextmanager
def counted(owner: Any, name: str) -> Iterator[list[Any]]:
    """The arguments of every call of a method."""
    calls: list[Any] = []
    real: Callable[..., Any] = getattr(owner, name)

    def counting(self: Any, *arguments: Any, **more: Any) -> Any:
        calls.append(arguments)
        return real(self, *arguments, **more)

    with patch.object(owner, name, counting):
        yield calls


def most_in_a_step(bench: Workbench, calls: list[Any]) -> int:
    """Do all that is waiting; the largest number of calls in one step."""
    most, before = len(calls), len(calls)
    while bench.step():
        most, before = max(most, len(calls) - before), len(calls)
    return most


# Schedules.


def many(data: str, **more: Any) -> Workbench:
    """A broker with schedules that are all due an hour after the start."""
    bench = Workbench(data)
    for name in NAMES:
        bench.ask(ScheduleSet(ScheduleDefinition(name, "jobs", "every 1h", start_us=START_US + HOUR, **more)))
    bench.tick()
    while bench.broker._schedules._put_back:
        bench.tick()
    return bench


def run_due(bench: Workbench) -> list[int]:
    """Tick until nothing is due any more; how many messages each tick has published."""
    published = []
    while (due_us := bench.broker._schedules.next_tick_us()) is not None and due_us <= bench.now_us:
        before = len(ran(bench))
        bench.tick()
        published.append(len(ran(bench)) - before)
    return published


def ran(bench: Workbench) -> list[str]:
    """The names of the schedules whose messages are there, in order."""
    messages = [message for batch in bench.batches("jobs") for message in batch.messages()]
    return [(message.headers or {})[CRON_HEADER].decode() for message in messages]


def test_schedules_that_are_due_at_once_run_in_portions_and_in_order(data: str) -> None:
    bench = many(data)
    bench.now_us += HOUR
    published = run_due(bench)
    assert max(published) <= schedules._FIRED_MAX < MANY
    assert ran(bench) == NAMES


@pytest.mark.parametrize("steps", [0, 1, 5, 20, 60, 100, 200, 400])
def test_a_broker_that_is_killed_among_them_runs_each_of_them_once(data: str, steps: int) -> None:
    bench = many(data, runs_max=1)
    bench.now_us += HOUR
    for _ in range(steps):
        if not bench.step():
            bench.broker.tick(bench.now_us)
    bench = Workbench(data, now_us=bench.now_us)
    run_due(bench)
    assert sorted(ran(bench)) == NAMES


def test_all_of_them_run_though_the_disk_is_slow_and_none_counts_as_missed(data: str) -> None:
    bench = many(data, missed="skip")
    bench.now_us += HOUR
    bench.syncing_later = True
    while (due_us := bench.broker._schedules.next_tick_us()) is not None and due_us <= bench.now_us:
        bench.broker.tick(bench.now_us)  # without anything being synced
    bench.now_us += 60 * SECOND
    bench.run()
    assert ran(bench) == NAMES


def test_the_last_message_of_a_schedule_is_looked_for_only_after_a_restart(data: str) -> None:
    bench = many(data, overlap="skip")
    bench.ask(SubscriptionCreate("jobs"))
    with counted(ScheduleRunner, "_find") as searches:
        for _ in range(3):
            bench.now_us += HOUR
            run_due(bench)
        assert searches == []
        assert ran(bench) == NAMES
        bench = Workbench(data, now_us=bench.now_us + HOUR)
        most = 0
        while (due_us := bench.broker._schedules.next_tick_us()) is not None and due_us <= bench.now_us:
            before = len(searches)
            bench.tick()
            most = max(most, len(searches) - before)
    assert most == schedules._SEARCHED_MAX
    assert len(searches) == MANY
    assert ran(bench) == NAMES


def test_schedules_are_listed_in_portions(data: str) -> None:
    bench = many(data)
    with counted(ScheduleRunner, "_info") as calls:
        later = bench.begin(ScheduleList())
        assert most_in_a_step(bench, calls) <= schedules._LISTED_MAX < MANY
    assert [info.definition.name for info in later.outcome.schedules] == NAMES


def test_a_schedule_that_is_removed_while_all_are_listed_is_left_out(data: str) -> None:
    bench = many(data)
    later = bench.begin(ScheduleList())
    bench.broker._schedules.remove(schedules.ScheduleRemove(NAMES[-1]), bench.now_us)
    bench.run()
    assert [info.definition.name for info in later.outcome.schedules] == NAMES[:-1]


def test_a_clock_that_is_put_back_reaches_schedules_in_portions(data: str) -> None:
    bench = many(data)
    bench.now_us += HOUR
    run_due(bench)
    bench.now_us -= HOUR // 2
    most = 0
    with counted(ScheduleRunner, "_go_back") as calls:
        while len(calls) < MANY:
            before = len(calls)
            bench.tick()
            most = max(most, len(calls) - before)
            assert bench.broker._schedules.next_tick_us() is not None
    assert most <= schedules._FIRED_MAX
    bench.now_us += 2 * HOUR
    run_due(bench)
    assert sorted(ran(bench)) == sorted(NAMES + NAMES)


# Those who wait for the disk.


class Log:
    """Is synced when it is told so."""

    synced_offset = 0
    is_small_backlog = overlaps_syncs = False

    def request_sync(self) -> None:
        """It is synced when it is told so."""

    def when_synced(self, _: int, tell: Callable[[HeadraceError | None], None]) -> None:
        self._tell = tell

    def end_sync(self, error: HeadraceError | None = None) -> None:
        self.synced_offset = 1000
        self._tell(error)


@pytest.mark.parametrize("error", [None, LogFailed("the disk is gone")])
def test_those_who_wait_for_a_sync_are_told_in_portions_and_in_order(error: HeadraceError | None) -> None:
    bench, log = Workbench(), Log()
    waiting = SyncWaiters(log, bench)
    told: list[int] = []
    for number in range(100):
        waiting.wait(number + 1, lambda _, number=number: told.append(number))  # type: ignore[misc]
    bench.run()
    log.end_sync(error)
    most = 0
    while True:
        before = len(told)
        if not bench.step():
            break
        most = max(most, len(told) - before)
        if before == 16:
            waiting.wait(50, lambda _: told.append(100))
            assert not waiting.idle
    log.end_sync(error)
    bench.run()
    assert 0 < most <= sync_waiters._TOLD_AT_ONCE
    assert told == [*range(101)]
    assert waiting.idle


def test_one_who_fails_does_not_keep_the_others_from_being_told() -> None:
    bench, log = Workbench(), Log()
    waiting = SyncWaiters(log, bench)
    told: list[int] = []
    waiting.wait(1, lambda _: [][0])
    for number in range(40):
        waiting.wait(number + 1, lambda _, number=number: told.append(number))  # type: ignore[misc]
    log.end_sync()
    with pytest.raises(IndexError):
        bench.run()
    bench.run()
    assert told == [*range(40)]
    assert waiting.idle


# The event loop.


def test_others_have_their_turn_between_two_rounds_of_callbacks_that_take_long() -> None:
    done: list[str] = []
    clock = count(0.0, 0.005)

    async def main() -> None:
        loop = asyncio.get_running_loop()
        turns = LoopScheduler(loop, lambda: next(clock))

        def beat() -> None:
            done.append("beat")
            loop.call_soon(beat)

        def again() -> None:
            done.append("slice")
            turns.call_soon(again)

        turns.call_soon(again)
        loop.call_soon(beat)
        while len(done) < 20:
            await asyncio.sleep(0)

    asyncio.run(main())
    assert not any(one == other == "slice" for one, other in pairwise(done))


# Compaction.


def keyed(bench: Workbench, keys: list[bytes]) -> None:
    bench.ask(Publish("states", 0), bench.batch([b"x"] * len(keys), keys=keys).data)


def compact(bench: Workbench) -> None:
    topic = bench.broker._topics.get("states")
    active = bench.broker._topics.active(topic, 0)
    bench.broker._maintenance._compact(topic, active, active.partition.compact_by_key)


def test_no_dictionary_of_a_compaction_becomes_large() -> None:
    last = LastOffsets()
    for first in range(0, 50_000, 5000):
        batch = encode(Columns([b"x"] * 5000, keys=[b"%d" % key for key in range(first, first + 5000)]), 0)
        batch.place(first, 0, 0)
        last.note(batch)
    sizes = [len(shard) for shard in last._shards]
    assert sum(sizes) == 50_000
    assert max(sizes) < 50_000 / 50
    last.clear(CpuThrottle())
    assert not any(last._shards)


@pytest.mark.parametrize("seed", range(5))
def test_the_last_message_of_each_key_is_kept_and_those_without_a_key(seed: int) -> None:
    random = Random(seed)
    last, batches, offset = LastOffsets(), [], 0
    for _ in range(20):
        count = random.randint(1, 30)
        keys = [random.choice([None, b"%d" % random.randint(0, 40)]) for _ in range(count)]
        places = sorted(random.sample(range(50), count))
        made = Columns([b"x"] * count, keys=random.choice([None, keys, keys, keys]), places=places)
        batch = encode(made, 0, span=50)
        batch.place(offset, 0, 0)
        batches.append(batch)
        offset = batch.next_offset
    for batch in batches:
        last.note(batch)
    messages = [message for batch in batches for message in batch.messages()]
    wanted = {message.key: message.offset for message in messages}
    for batch in batches:
        kept = last.kept(batch)
        expected = [
            index for index, one in enumerate(batch.messages()) if one.key is None or wanted[one.key] == one.offset
        ]
        assert (list(range(batch.count)) if kept is None else kept) == expected


def test_a_compaction_lets_other_threads_run_after_each_portion(data: str) -> None:
    bench = Workbench(data)
    bench.ask(TopicCreate("states", {"segment_bytes": 64 << 10}))
    for number in range(20):
        keyed(bench, [b"%d" % key for key in range(number * 1000, number * 1000 + 2000)])
    with patch.object(worker.time, "sleep") as sleep:
        compact(bench)
    assert sleep.call_count >= 2 * 19  # the keys of each batch are noted, and all sealed segments are copied


def test_subscriptions_forget_what_was_compacted_in_portions(data: str) -> None:
    bench = Workbench(data)
    bench.ask(TopicCreate("states", {"segment_bytes": 64 << 10}))
    bench.ask(SubscriptionCreate("states"))
    for _ in range(10):
        keyed(bench, [b"%d" % key for key in range(4000)])
    keyed(bench, [b"another"])
    with counted(LeasedIndex, "forget_missing") as calls:
        compact(bench)
        while bench.step():
            assert sum(len(offsets) for (offsets,) in calls) <= compaction_cleanup._OFFSETS_AT_ONCE
            calls.clear()
    left = sum(batch.count for batch in bench.batches("states"))
    assert left < 3 * 4000
    assert bench.ask(SubscriptionDescribe("states")).ready == left


def test_what_every_subscription_has_settled_is_not_looked_at_after_a_compaction(data: str) -> None:
    bench = Workbench(data)
    bench.ask(TopicCreate("states", {"segment_bytes": 64 << 10}))
    for _ in range(10):
        keyed(bench, [b"%d" % key for key in range(4000)])
    bench.ask(SubscriptionCreate("states", start="latest"))
    keyed(bench, [b"another"])
    with counted(LeasedIndex, "forget_missing") as calls:
        compact(bench)
        bench.run()
    assert calls == []
    assert bench.ask(SubscriptionDescribe("states")).ready == 1
