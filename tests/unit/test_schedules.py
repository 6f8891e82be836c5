"""Schedules: every run is published once, whatever happens to the broker, to its disk and to its clock."""

import tempfile
from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any
from unittest.mock import patch

import pytest

from headrace.broker import schedules as crons_module
from headrace.broker.pending_answer import PendingAnswer
from headrace.broker.schedules import ScheduleRunner
from headrace.broker.settings import BrokerSettings
from headrace.broker.topics import Topic
from headrace.model.batch import HEADER_BYTES
from headrace.model.errors import (
    HeadraceError,
    InvalidArgument,
    LimitExceeded,
    MessageTooLarge,
    PartitionNotFound,
    ScheduleExists,
    ScheduleNotFound,
    TopicNotFound,
)
from headrace.model.message import Message
from headrace.model.partitioning import by_key
from headrace.model.requests import TopicCreate, TopicDelete
from headrace.model.schedule import parse_schedule
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
    ScheduleSet,
)
from headrace.testing import FaultyDisk, Unsynced
from headrace.testing.workbench import Workbench

SECOND, MINUTE, HOUR, DAY = 1_000_000, 60_000_000, 3_600_000_000, 86_400_000_000
START = 1_793_404_800_000_000
"""Midnight of 31 October 2026, a Saturday, in UTC."""


class Stage:
    """A broker with schedules, and a clock that is only moved by hand."""

    def __init__(
        self,
        data: str | None = None,
        now_us: int = START,
        disk: FaultyDisk | None = None,
        settings: BrokerSettings | None = None,
    ) -> None:
        self.data, self.disk, self.settings = data, disk, settings
        self.waited_for: set[tuple[str, int, int]] = set()
        self.bench = Workbench(data, disk=disk, now_us=now_us, settings=settings)
        broker = self.bench.broker
        self.crons = ScheduleRunner(
            broker._topics,
            broker._transactions,
            broker._ledger,
            self.bench,
            self.unsettled,
            broker._pipeline.process,
            now_us,
        )

    def unsettled(self, topic: Topic, partition: int, offset: int, now_us: int) -> bool:  # noqa: ARG002
        return (str(topic), partition, offset) in self.waited_for

    @property
    def now_us(self) -> int:
        return self.bench.now_us

    def answer(self, answer: Any) -> Any:
        self.bench.run()
        if isinstance(answer, PendingAnswer):
            answer = answer.outcome
        if isinstance(answer, HeadraceError):
            raise answer
        return answer

    def set(
        self, name: str = "sweep", topic: str = "jobs", when: str = "@hourly", replace: bool = True, **more: Any
    ) -> ScheduleInfo:
        rule = ScheduleDefinition(name, topic, when, **more)
        info: ScheduleInfo = self.answer(self.crons.set(ScheduleSet(rule, replace), self.now_us))
        return info

    def pause(self, name: str = "sweep", paused: bool = True) -> ScheduleInfo:
        info: ScheduleInfo = self.answer(self.crons.pause(SchedulePause(name, paused), self.now_us))
        return info

    def remove(self, name: str = "sweep") -> None:
        self.answer(self.crons.remove(ScheduleRemove(name), self.now_us))

    def run(self, name: str = "sweep") -> ScheduleInfo:
        info: ScheduleInfo = self.answer(self.crons.run(ScheduleRun(name), self.now_us))
        return info

    def info(self, name: str = "sweep") -> ScheduleInfo:
        infos: list[ScheduleInfo] = self.answer(self.crons.listed(ScheduleList(), "default")).schedules
        return next(info for info in infos if info.definition.name == name)

    def next(self, **asked: Any) -> list[int]:
        times: list[int] = self.crons.next_runs(ScheduleNext(**asked), self.now_us).times_us  # type: ignore[attr-defined]
        return times

    def tick(self) -> None:
        self.crons.tick(self.now_us)
        self.bench.broker._transactions.tick(self.now_us)
        self.bench.run()

    def until(self, time_us: int) -> None:
        """Let time pass, and wake the broker whenever it wants to."""
        while (due_us := self.crons.next_tick_us()) is not None and due_us <= time_us:
            self.bench.now_us = max(self.now_us, due_us)
            self.tick()
        self.jump(time_us)

    def jump(self, time_us: int) -> None:
        """Set the clock."""
        self.bench.now_us = time_us
        self.tick()

    def restarted(self, now_us: int | None = None) -> "Stage":
        """Another broker, after this one was killed."""
        stage = Stage(self.data, now_us or self.now_us, self.disk, self.settings)
        stage.tick()
        return stage

    def messages(self, topic: str = "jobs", partition: int = 0) -> list[Message]:
        return [message for batch in self.bench.batches(topic, partition) for message in batch.messages()]

    def runs(self, topic: str = "jobs", partition: int = 0) -> list[int]:
        """For which times there are messages."""
        return [int((message.headers or {})[RUN_HEADER]) for message in self.messages(topic, partition)]

    def hours(self, topic: str = "jobs") -> list[float]:
        """The same, in hours since the start."""
        return [(run - START) / HOUR for run in self.runs(topic)]


@pytest.fixture
def data() -> Iterator[str]:
    """A directory in memory, where syncing takes no time."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").exists() else None) as directory:
        yield f"{directory}/data"


# What is published.


def test_a_message_for_every_run(data: str) -> None:
    stage = Stage(data)
    info = stage.set(value=b"sweep!", headers={"a": b"b"})
    assert (info.created_us, info.next_us, info.last_us, info.runs, info.skipped) == (START, START + HOUR, 0, 0, 0)
    stage.until(START + 3 * HOUR + MINUTE)
    assert stage.runs() == [START + HOUR, START + 2 * HOUR, START + 3 * HOUR]
    message = stage.messages()[0]
    assert message.value == b"sweep!"
    assert message.timestamp == START + HOUR
    assert message.key is None
    assert message.headers == {"a": b"b", CRON_HEADER: b"sweep", RUN_HEADER: b"%d" % (START + HOUR)}
    info = stage.info()
    assert (info.next_us, info.last_us, info.runs) == (START + 4 * HOUR, START + 3 * HOUR, 3)
    assert stage.restarted().info() == info


def test_where_messages_go() -> None:
    stage = Stage()
    stage.bench.ask(TopicCreate("jobs", {"partitions": 8}))
    stage.set("keyed", key=b"customer-17")
    stage.set("placed", partition=5, key=b"customer-17")
    stage.set("plain")
    stage.set("elsewhere", topic="acme/jobs")
    stage.until(START + HOUR)
    names = {at: [(message.headers or {})[CRON_HEADER] for message in stage.messages("jobs", at)] for at in range(8)}
    assert names == {at: [] for at in range(8)} | {by_key(b"customer-17", 8): [b"keyed"], 5: [b"placed"], 0: [b"plain"]}
    assert stage.messages("jobs", by_key(b"customer-17", 8))[0].key == b"customer-17"
    assert len(stage.messages("acme/jobs")) == 1


def test_in_the_time_zone_it_names() -> None:
    stage = Stage()
    stage.set(when="30 2 * * *", zone="America/New_York")
    stage.until(START + 3 * DAY)
    shown = [f"{datetime.fromtimestamp(run // SECOND, UTC):%d %H:%M}" for run in stage.runs()]
    assert shown == ["31 06:30", "01 07:30", "02 07:30"]


def test_intervals_begin_when_they_are_made_or_with_their_start() -> None:
    stage = Stage()
    stage.set("a", topic="a", when="every 90m")
    stage.set("b", topic="b", when="every 90m", start_us=START + HOUR)
    stage.until(START + 5 * HOUR)
    assert stage.hours("a") == [1.5, 3, 4.5]
    assert stage.hours("b") == [1, 2.5, 4]


def test_fast_ones_are_woken_for_in_time() -> None:
    stage = Stage()
    stage.set(when="every 100ms")
    assert stage.bench.wakes_us[-1] == START + 100_000
    stage.until(START + SECOND)
    assert [message.timestamp - START for message in stage.messages()] == list(range(100_000, SECOND + 1, 100_000))
    stage.set("later", when="@yearly")
    assert stage.bench.wakes_us[-1] < START + 2 * SECOND


# Limits.


def test_between_start_and_end() -> None:
    stage = Stage()
    stage.set(start_us=START + 2 * HOUR, end_us=START + 4 * HOUR)
    assert stage.next(name="sweep") == [START + 2 * HOUR, START + 3 * HOUR]
    stage.until(START + DAY)
    assert stage.hours() == [2, 3]
    assert stage.info().next_us == 0
    assert stage.crons.next_tick_us() is None


def test_no_more_runs_than_allowed(data: str) -> None:
    stage = Stage(data)
    stage.set(runs_max=3)
    stage.until(START + 2 * HOUR)
    assert stage.next(name="sweep") == [START + 3 * HOUR]
    stage = stage.restarted()
    stage.until(START + DAY)
    assert stage.hours() == [1, 2, 3]
    assert (stage.info().next_us, stage.info().runs) == (0, 3)
    assert stage.set(runs_max=3).runs == 3  # again, as a service does when it starts
    stage.set(runs_max=4)
    stage.until(START + 2 * DAY)
    assert stage.hours()[3:] == [25]  # it had ended: nothing was missed


@pytest.mark.parametrize("missed", ["once", "all"])
def test_missed_runs_count_too(missed: str, data: str) -> None:
    stage = Stage(data)
    stage.set(runs_max=3, missed=missed)
    stage.until(START + HOUR)
    stage = stage.restarted(START + 10 * HOUR + MINUTE)
    stage.until(START + DAY)
    assert stage.hours() == ([1, 10, 11] if missed == "once" else [1, 2, 3])


# Pauses, runs between, and changes.


def test_runs_in_a_pause_are_left_out(data: str) -> None:
    stage = Stage(data)
    stage.set(missed="all")
    stage.until(START + HOUR)
    assert stage.pause().next_us == 0
    assert stage.pause().definition.paused
    stage.until(START + 3 * HOUR + MINUTE)
    stage = stage.restarted(START + 4 * HOUR + MINUTE)
    assert stage.next(name="sweep", runs=1) == [START + 5 * HOUR]
    stage.set(missed="all")  # by a service that starts: it stays paused
    stage.until(START + 5 * HOUR + MINUTE)
    assert stage.pause(paused=False).next_us == START + 6 * HOUR
    stage.until(START + 7 * HOUR)
    assert stage.hours() == [1, 6, 7]
    assert stage.info().skipped == 0


def test_one_that_is_made_paused() -> None:
    stage = Stage()
    assert stage.set(paused=True).next_us == 0
    stage.until(START + DAY)
    assert stage.crons.next_tick_us() is None
    stage.pause(paused=False)
    stage.until(START + DAY + HOUR)
    assert stage.hours() == [25]


def test_run_now_besides_the_regular_runs(data: str) -> None:
    stage = Stage(data)
    stage.set(runs_max=2)
    stage.until(START + HOUR)
    stage.jump(START + HOUR + MINUTE)
    info = stage.run()
    assert (info.runs, info.last_us, info.next_us) == (1, START + HOUR + MINUTE, START + 2 * HOUR)
    stage = stage.restarted()
    stage.pause()
    stage.run()
    stage.pause(paused=False)
    stage.until(START + DAY)
    assert stage.runs() == [START + HOUR, START + HOUR + MINUTE, START + HOUR + MINUTE, START + 2 * HOUR]
    stage.run()  # also when it has ended
    assert len(stage.runs()) == 5


def test_what_is_set_again_goes_on_from_where_it_was(data: str) -> None:
    stage = Stage(data)
    stage.set(when="every 90m", value=b"1", missed="all")
    stage.until(START + 2 * HOUR)
    stage = stage.restarted(START + 5 * HOUR)
    info = stage.set(when="every 90m", value=b"2", missed="all")
    assert (info.created_us, info.runs) == (START, 3)
    stage.until(START + 6 * HOUR)
    assert stage.hours() == [1.5, 3, 4.5, 6]
    assert [message.value for message in stage.messages()] == [b"1", b"1", b"1", b"2"]


def test_at_other_times_it_begins_anew(data: str) -> None:
    stage = Stage(data)
    stage.set(when="every 90m")
    stage.until(START + 2 * HOUR)
    info = stage.set(when="every 20m")
    assert (info.created_us, info.runs, info.next_us) == (START + 2 * HOUR, 0, START + 2 * HOUR + 20 * MINUTE)
    stage = stage.restarted()
    stage.until(START + 3 * HOUR)
    assert [run - START for run in stage.runs()] == [minutes * MINUTE for minutes in (90, 140, 160, 180)]


def test_removed_ones_are_gone(data: str) -> None:
    stage = Stage(data)
    stage.set("a")
    stage.set("b")
    stage.remove("a")
    for call in (stage.remove, stage.pause, stage.run, lambda name: stage.next(name=name)):
        with pytest.raises(ScheduleNotFound):
            call("a")
    stage = stage.restarted()
    stage.until(START + HOUR)
    assert [(message.headers or {})[CRON_HEADER] for message in stage.messages()] == [b"b"]
    stage.remove("b")
    assert stage.crons.next_tick_us() is None
    assert len(stage.crons) == 0


def test_changes_that_cross_with_a_run(data: str) -> None:
    stage = Stage(data)
    for name in ("removed", "anew", "valued", "paused", "again"):
        stage.set(name, topic=name)
    stage.bench.syncing_later = True
    stage.bench.now_us = START + HOUR
    stage.crons.tick(stage.now_us)  # all are on their way to the disk
    stage.crons.remove(ScheduleRemove("removed"), stage.now_us)
    stage.crons.remove(ScheduleRemove("again"), stage.now_us)
    for name, when, value in (("anew", "every 30m", b""), ("valued", "@hourly", b"new"), ("again", "@hourly", b"")):
        stage.crons.set(ScheduleSet(ScheduleDefinition(name, name, when, value)), stage.now_us)
    stage.crons.pause(SchedulePause("paused"), stage.now_us)
    stage.bench.run()
    assert {name: stage.info(name).runs for name in ("anew", "valued", "paused", "again")} == {
        "anew": 0,
        "valued": 1,
        "paused": 1,
        "again": 0,
    }
    stage.until(START + 2 * HOUR)
    expected = {"removed": [1], "anew": [1, 1.5, 2], "valued": [1, 2], "paused": [1], "again": [1, 2]}
    assert {name: stage.hours(name) for name in expected} == expected
    stage = stage.restarted()
    assert {name: stage.hours(name) for name in expected} == expected


# Which there are, and when they run.


def test_lists_by_topic_and_tenant() -> None:
    stage = Stage()
    stage.set("b")
    stage.set("a", topic="default/jobs")
    stage.set("c", topic="acme/jobs")

    stage.set("acme/d", topic="acme/jobs")

    def names(topic: str = "", tenant: str = "default") -> list[str]:
        listed = stage.answer(stage.crons.listed(ScheduleList(topic), tenant))
        return [info.definition.name for info in listed.schedules]

    assert names() == ["a", "b", "c"]
    assert names("jobs") == ["a", "b"]
    assert names("acme/jobs") == ["acme/d", "c"]
    assert names("acme/jobs", "acme") == names(tenant="acme") == ["acme/d"]
    with pytest.raises(InvalidArgument, match="own tenant"):
        stage.set("acme/e", topic="jobs")


def test_runs_of_one_that_is_only_tried_out() -> None:
    stage = Stage()
    rule = ScheduleDefinition("", "", "0 12 * * *", zone="Europe/Berlin", runs_max=2)
    assert stage.next(definition=rule) == [START + 11 * HOUR, START + 35 * HOUR]
    assert stage.next(definition=ScheduleDefinition("", "", "every 1h"), runs=1, from_us=0) == [HOUR]
    assert len(stage.crons) == 0
    with pytest.raises(InvalidArgument):
        stage.next(definition=ScheduleDefinition("", "", "0 12 * *"))
    for runs in (0, 1001):
        with pytest.raises(InvalidArgument):
            stage.next(definition=rule, runs=runs)
    stage.set()
    assert stage.next(name="sweep", from_us=START - HOUR, runs=2) == [START, START + HOUR]


@pytest.mark.parametrize(
    ("error", "wrong"),
    [
        (InvalidArgument, {"name": ""}),
        (InvalidArgument, {"name": "a/b"}),
        (InvalidArgument, {"name": "a" * 250}),
        (InvalidArgument, {"topic": "no, such name"}),
        (InvalidArgument, {"when": "often"}),
        (InvalidArgument, {"zone": "Mars/Olympus"}),
        (InvalidArgument, {"missed": "maybe"}),
        (InvalidArgument, {"overlap": "maybe"}),
        (InvalidArgument, {"runs_max": 0}),
        (InvalidArgument, {"start_us": -1}),
        (InvalidArgument, {"end_us": 1 << 63}),
        (InvalidArgument, {"start_us": 5, "end_us": 5}),
        (InvalidArgument, {"end_us": START + MINUTE}),
        (InvalidArgument, {"headers": {RUN_HEADER: b""}}),
        (PartitionNotFound, {"partition": 1}),
        (PartitionNotFound, {"partition": -1}),
        (MessageTooLarge, {"value": b"x" * (1 << 20)}),
    ],
)
def test_what_cannot_be(error: type[HeadraceError], wrong: dict[str, Any]) -> None:
    stage = Stage()
    with pytest.raises(error):
        stage.set(**wrong)
    assert len(stage.crons) == 0


def test_what_is_there_already() -> None:
    stage = Stage()
    stage.set()
    with pytest.raises(ScheduleExists):
        stage.set(replace=False)
    with patch.object(crons_module, "SCHEDULES_MAX", 1):
        with pytest.raises(LimitExceeded):
            stage.set("another")
        stage.set(value=b"the same one")


# While the broker was down.


@pytest.mark.parametrize(
    ("missed", "expected", "skipped"),
    [("skip", [1, 2, 6], 3), ("once", [1, 2, 5, 6], 2), ("all", [1, 2, 3, 4, 5, 6], 0)],
)
def test_missed_runs(missed: str, expected: list[float], skipped: int, data: str) -> None:
    stage = Stage(data)
    stage.set(missed=missed)
    stage.until(START + 2 * HOUR)
    stage = stage.restarted(START + 5 * HOUR + MINUTE)
    stage.until(START + 6 * HOUR)
    assert stage.hours() == expected
    assert stage.info().skipped == skipped
    stage = stage.restarted()
    assert stage.hours() == expected


def test_a_year_of_minutes_is_made_up_for_at_once(data: str) -> None:
    stage = Stage(data)
    stage.set("once", topic="once", when="* * * * *", zone="Europe/Berlin")
    stage.set("skip", topic="skip", when="* * * * * *", missed="skip")
    stage = stage.restarted(START + 365 * DAY + SECOND // 2)
    assert stage.runs("once") == [START + 365 * DAY]
    assert stage.runs("skip") == []
    assert stage.info("skip").skipped == 100  # so many, or more
    stage.until(stage.now_us + 2 * SECOND)
    assert stage.runs("skip") == [START + 365 * DAY + SECOND, START + 365 * DAY + 2 * SECOND]


def test_all_of_many_missed_runs_in_portions(data: str) -> None:
    stage = Stage(data)
    stage.set(when="* * * * *", missed="all", value=b"x" * 5000)
    stage = stage.restarted(START + 10 * HOUR)
    assert 0 < len(stage.runs()) < 600
    stage.until(START + 10 * HOUR)
    assert stage.runs() == list(range(START + MINUTE, START + 10 * HOUR + 1, MINUTE))


def test_only_so_many_at_a_time() -> None:
    stage = Stage()
    with patch.object(crons_module, "_FIRED_MAX", 3):
        for number in range(10):
            stage.set(f"sweep-{number}")
        stage.jump(START + HOUR)
        assert len(stage.messages()) == 3
        stage.until(START + HOUR)
        assert len(stage.messages()) == 10


# While the last one is not finished.


def test_no_run_while_the_last_one_is_unsettled(data: str) -> None:
    stage = Stage(data)
    stage.set(overlap="skip")
    stage.bench.publish("jobs", [b"another"] * 3)
    stage.waited_for.add(("jobs", 0, 0))  # not ours
    stage.until(START + HOUR)
    stage.waited_for.add(("jobs", 0, 3))
    stage.until(START + 3 * HOUR)
    assert stage.info().skipped == 2
    for _ in range(2):
        stage = stage.restarted()
        stage.waited_for.add(("jobs", 0, 3))
        stage.until(stage.now_us + HOUR)
    stage.waited_for.clear()
    stage.until(START + 6 * HOUR)
    offsets = [message.offset for message in stage.messages() if message.headers]
    assert offsets == [3, 4]
    stage.waited_for.add(("jobs", 0, 4))
    stage.until(START + 7 * HOUR)
    assert len(stage.messages()) == 5
    assert stage.info().runs == 2


def test_a_run_besides_counts_as_the_last_one() -> None:
    stage = Stage()
    stage.set(overlap="skip")
    stage.run()
    stage.waited_for.add(("jobs", 0, 0))
    stage.until(START + HOUR)
    assert len(stage.messages()) == 1


@pytest.mark.parametrize("works", [True, False])
def test_a_run_besides_that_is_on_its_way_counts_as_the_last_one(data: str, works: bool) -> None:
    disk = FaultyDisk()
    stage = Stage(data, disk=disk)
    stage.set(overlap="skip")
    stage.waited_for |= {("jobs", 0, 0), ("jobs", 0, 1)}
    stage.bench.syncing_later = True
    stage.crons.run(ScheduleRun("sweep"), stage.now_us)
    stage.bench.now_us = START + HOUR
    stage.crons.tick(stage.now_us)  # before the other is where it can be found
    if not works:
        disk.fail_writes(2)  # one of them may only make room
    stage.bench.run()
    stage.until(START + HOUR + SECOND)
    assert len(stage.messages()) == 1
    assert (stage.info().skipped, stage.info().runs) == ((1, 0) if works else (0, 1))


def test_the_last_one_may_be_gone() -> None:
    stage = Stage()
    stage.set(overlap="skip")
    stage.until(START + HOUR)
    stage.waited_for.add(("jobs", 0, 0))
    stage.bench.ask(TopicDelete("jobs"))
    stage.until(START + 2 * HOUR)
    assert stage.hours() == [2]


def test_missed_runs_do_not_overlap_either(data: str) -> None:
    stage = Stage(data)
    stage.set(overlap="skip", missed="all")
    stage = stage.restarted(START + 5 * HOUR)
    stage.until(START + 5 * HOUR)
    assert stage.hours() == [5]
    assert stage.info().skipped == 4


def test_a_batch_that_nobody_can_read_is_in_the_way(data: str) -> None:
    stage = Stage(data)
    stage.set(overlap="skip")
    stage.bench.now_us = START + HOUR
    bad = stage.bench.batch([b"x" * 100])
    bad.data[HEADER_BYTES:] = b"\xff" * (bad.length - HEADER_BYTES)
    bad.stamp(bad.producer)
    topics = stage.bench.broker._topics
    topics.active(topics.get("jobs"), 0).partition.append(bad, stage.bench.now_us)  # as an earlier version did
    stage.tick()
    stage = stage.restarted()
    stage.waited_for.add(("jobs", 0, 1))
    stage.until(START + 2 * HOUR)
    assert stage.info().runs == 1


# Clocks that jump.


@pytest.mark.parametrize("restarted", [False, True])
def test_a_clock_that_is_put_back_stops_nothing_and_repeats_no_time_of_the_day(data: str, restarted: bool) -> None:
    stage = Stage(data)
    stage.set("hourly", topic="hourly", when="0 * * * *")
    stage.set("often", topic="often", when="every 20m", missed="skip")
    stage.set("certain", topic="certain", when="0 1,2,3 * * *")  # one, two and three hours after the start
    stage.until(START + 5 * HOUR // 2)
    if restarted:
        stage = stage.restarted(START + 3 * HOUR // 2)
    else:
        stage.jump(START + 3 * HOUR // 2)
    stage.until(START + 3 * HOUR)
    assert stage.hours("hourly") == [1, 2, 2, 3]
    assert stage.hours("often") == [third / 3 for third in [*range(1, 8), *range(5, 10)]]
    assert stage.hours("certain") == [1, 2, 3]


def test_a_clock_that_was_quite_wrong_begins_the_day_anew() -> None:
    stage = Stage()
    stage.set(when="0 1,2,3 * * *")
    stage.until(START + 5 * HOUR)
    stage.jump(START + 3 * HOUR // 2)
    stage.until(START + 3 * HOUR)
    assert stage.hours() == [1, 2, 3, 2, 3]


SKEWED = ["every 5s", "*/5 * * * * *", "* * * * *", "0 * * * *", "@daily"]


@pytest.mark.parametrize("restarted", [False, True])
@pytest.mark.parametrize("behind_us", [2 * SECOND, 9 * SECOND, 599 * SECOND])
def test_no_run_is_published_again_by_a_clock_that_is_a_little_behind(
    data: str, restarted: bool, behind_us: int
) -> None:
    """As when another node takes over: its clock is not quite the same."""
    stage = Stage(data, START - HOUR - 7 * SECOND)
    for when in SKEWED:
        stage.set(topic_of(when), topic=topic_of(when), when=when)
    stage.until(START + 1 * SECOND)
    if restarted:
        stage = stage.restarted(START + 1 * SECOND - behind_us)
    else:
        stage.jump(START + 1 * SECOND - behind_us)
    stage.until(START + HOUR + 5 * SECOND)
    for when in SKEWED:
        runs = stage.runs(topic_of(when))
        assert runs == sorted(set(runs)), f"{when} was published twice for one time"
    assert stage.hours(topic_of("0 * * * *")) == [-1, 0, 1]
    every = stage.runs(topic_of("every 5s"))
    assert {after - before for before, after in pairwise(every)} == {5 * SECOND}, "it goes on where it was"


def test_a_clock_that_is_set_back_further_is_followed_at_once(data: str) -> None:
    stage = Stage(data)
    stage.set(when="every 5s")
    stage.until(START + HOUR)
    stage.jump(START + HOUR - 11 * MINUTE)
    assert stage.info().next_us == START + HOUR - 11 * MINUTE + 5 * SECOND
    stage.until(START + HOUR)
    stage = stage.restarted(START + HOUR - 11 * MINUTE)
    assert stage.info().next_us == START + HOUR - 11 * MINUTE + 5 * SECOND


def test_an_interval_that_was_made_by_a_clock_ahead_begins_with_that_time(data: str) -> None:
    stage = Stage(data)
    stage.set(when="every 5s")
    stage = stage.restarted(START - 20 * SECOND)
    stage.until(START + 5 * SECOND)
    assert stage.runs() == [START + 5 * SECOND]


def test_a_broker_whose_clock_is_behind_the_one_before_repeats_no_run(data: str) -> None:
    before = Workbench(data, now_us=START)
    before.ask(ScheduleSet(ScheduleDefinition("beat", "beats", "every 5s")))
    for _ in range(12):
        before.tick(5)
    before.close()
    after = Workbench(data, now_us=START + 52 * SECOND)
    for _ in range(30):
        after.tick(1)
    runs = [
        int((message.headers or {})[RUN_HEADER]) for batch in after.batches("beats", 0) for message in batch.messages()
    ]
    assert runs == [START + count * 5 * SECOND for count in range(1, 17)]


def topic_of(when: str) -> str:
    """A name that a topic may have."""
    return f"t{SKEWED.index(when)}"


def test_a_clock_that_is_put_ahead_has_missed_runs() -> None:
    stage = Stage()
    for missed in ("skip", "once", "all"):
        stage.set(missed, topic=missed, missed=missed)
    stage.until(START + HOUR)
    stage.jump(START + 4 * HOUR + MINUTE)
    stage.until(START + 5 * HOUR)
    found = {missed: stage.hours(missed) for missed in ("skip", "once", "all")}
    assert found == {"skip": [1, 5], "once": [1, 4, 5], "all": [1, 2, 3, 4, 5]}


def test_a_little_late_is_not_missed() -> None:
    stage = Stage()
    stage.set(when="* * * * * *", missed="skip")
    stage.jump(START + 9 * SECOND)
    assert len(stage.runs()) == 9


# Topics that are gone.


def test_a_topic_that_was_deleted_is_made_again() -> None:
    stage = Stage()
    stage.set()
    stage.until(START + HOUR)
    stage.bench.ask(TopicDelete("jobs"))
    stage.until(START + 2 * HOUR)
    assert stage.hours() == [2]


def test_without_its_topic_it_is_left_out(data: str, caplog: pytest.LogCaptureFixture) -> None:
    stage = Stage(data, settings=BrokerSettings(auto_create_topics=False))
    with pytest.raises(TopicNotFound):
        stage.set()
    stage.bench.ask(TopicCreate("jobs", {"partitions": 2}))
    stage.set(partition=1)
    stage.until(START + HOUR)
    stage.bench.ask(TopicDelete("jobs"))
    with pytest.raises(TopicNotFound):
        stage.run()
    stage.until(START + 2 * HOUR)
    assert "schedule run failed; skipped  schedule=sweep reason=there is no topic jobs" in caplog.text
    stage.bench.ask(TopicCreate("jobs"))
    stage.until(START + 3 * HOUR)
    stage.bench.ask(TopicDelete("jobs"))
    stage.bench.ask(TopicCreate("jobs", {"partitions": 2}))
    stage.until(START + 4 * HOUR)
    assert stage.runs(partition=1) == [START + 4 * HOUR]
    assert (stage.info().runs, stage.info().skipped) == (2, 2)


def test_a_zone_that_there_is_not_any_more(data: str, caplog: pytest.LogCaptureFixture) -> None:
    stage = Stage(data)
    stage.set("a", topic="a", zone="Europe/Berlin")
    stage.set("b", topic="b")
    with patch("headrace.model.schedule.ZoneInfo", side_effect=ValueError):
        stage = stage.restarted()
    assert "schedule failed; set it again  schedule=a" in caplog.text
    stage.until(START + HOUR)
    assert (stage.hours("a"), stage.hours("b")) == ([], [1])
    assert stage.info("a").next_us == 0
    stage.set("a", topic="a", zone="Europe/Berlin")
    stage.until(START + 2 * HOUR)
    assert stage.hours("a") == [1, 2]  # the first was not too late yet


# Disks that fail, and brokers that are killed.


def test_while_a_message_is_on_its_way_there_is_no_other(data: str) -> None:
    stage = Stage(data)
    stage.set(when="every 1s")
    stage.bench.syncing_later = True
    for second in range(1, 6):
        stage.bench.now_us = START + second * SECOND
        stage.crons.tick(stage.now_us)
    assert stage.info().runs == 0
    stage.bench.run()
    assert stage.info().runs == 1
    stage.until(START + 6 * SECOND)
    assert stage.runs() == [START + second * SECOND for second in range(1, 7)]


def test_a_full_disk_is_waited_for(data: str, caplog: pytest.LogCaptureFixture) -> None:
    disk = FaultyDisk()
    stage = Stage(data, disk=disk)
    stage.set(value=b"x" * 100_000, missed="skip")
    disk.capacity_bytes = disk.used_bytes
    stage.until(START + HOUR + 5 * SECOND)
    assert caplog.text.count("schedule run not published; retrying") == 1
    disk.capacity_bytes = None
    stage.until(START + HOUR + 8 * SECOND)
    stage.until(START + 2 * HOUR)
    assert stage.hours() == [1, 2]


@pytest.mark.parametrize("unsynced", [Unsynced.RANDOM, Unsynced.LOST])
@pytest.mark.parametrize("operations", range(1, 20))
def test_a_power_loss_at_any_moment_of_a_run(data: str, operations: int, unsynced: Unsynced) -> None:
    disk = FaultyDisk(operations)
    stage = Stage(data, disk=disk)
    stage.set("a", topic="a")
    stage.set("b", topic="b", missed="all")
    stage.until(START + HOUR)
    disk.crash_after(operations)
    try:
        stage.until(START + 2 * HOUR)
        stage.bench.tick(10)
    except Exception:  # noqa: BLE001 the power is off
        assert disk.crashed
    disk.power_loss(unsynced)
    stage = Stage(data, START + 2 * HOUR + MINUTE, disk)
    stage.until(START + 3 * HOUR)
    assert stage.hours("a") == stage.hours("b") == [1, 2, 3]
    assert stage.info("a").runs == stage.info("b").runs == 3


ENTRIES = {
    "tens": ("*/10 * * * *", "Europe/Berlin"),
    "hours": ("@hourly", "Australia/Lord_Howe"),
    "nightly": ("30 2 * * *", "America/New_York"),
    "noon": ("0 12 * * mon-fri", "Europe/Berlin"),
    "quarters": ("*/15 8-18 * * *", "America/New_York"),
    "weekly": ("@weekly", "UTC"),
    "monthly": ("0 0 L * *", "Australia/Lord_Howe"),
    "interval": ("every 7h13m", "UTC"),
}


def expected_runs(name: str, begin: int, end: int) -> list[int]:
    when, zone = ENTRIES[name.split("-")[0]]
    schedule, found = parse_schedule(when, zone, begin), []
    while (run := schedule.next_after(found[-1] if found else begin)) is not None and run <= end:
        found.append(run)
    return found


def test_a_month_of_many_entries() -> None:
    stage = Stage()
    names = [f"{name}-{copy}" for name in ENTRIES for copy in range(1 if name in ("tens", "quarters", "hours") else 9)]
    for name in names:
        when, zone = ENTRIES[name.split("-")[0]]
        stage.set(name, topic=name, when=when, zone=zone)
    end = START + 31 * DAY
    stage.until(end)
    for name in names:
        assert stage.runs(name) == expected_runs(name, START, end)
        assert all(
            message.timestamp == run for message, run in zip(stage.messages(name), stage.runs(name), strict=True)
        )
    assert all(info.skipped == 0 for info in stage.answer(stage.crons.listed(ScheduleList(), "default")).schedules)


@pytest.mark.parametrize("seed", range(6))
def test_days_in_which_the_broker_is_killed_again_and_again(data: str, seed: int) -> None:
    random, disk = Random(seed), FaultyDisk(seed)
    settings = BrokerSettings(journal_bytes=3000)  # with snapshots in between
    stage = Stage(data, disk=disk, settings=settings)
    for name, (when, zone) in ENTRIES.items():
        stage.set(name, topic=name, when=when, zone=zone, missed="all")
    end, time = START + 3 * DAY, START
    while time < end:
        disk.crash_after(random.randrange(1, 400))
        while time < end and not disk.crashed:
            due = stage.crons.next_tick_us()
            time = min(end if due is None else max(time, due), end)
            with suppress(Exception):  # when the power goes off
                stage.jump(time)
        disk.power_loss(Unsynced.RANDOM)
        time += random.choice([0, SECOND, HOUR // 2])
        stage = Stage(data, time, disk, settings)
    stage.until(time)
    for name in ENTRIES:
        assert stage.runs(name) == expected_runs(name, START, time)
