"""What is decided about a message holds from the decision on, though the journal is written later in the turn."""

import errno
import os
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from headrace.broker.pending_answer import AnswerWithBody, PendingAnswer
from headrace.model.errors import HeadraceError
from headrace.model.leasing import (
    Ack,
    Edit,
    Extend,
    Find,
    Holding,
    Lease,
    MessageChange,
    MessageId,
    Redrive,
    Reject,
    Release,
    Selection,
    SubscriptionAlter,
    SubscriptionCreate,
    SubscriptionDelete,
)
from headrace.model.request import Answer
from headrace.model.requests import Publish, TopicCreate, TopicDelete
from headrace.storage.disk import LocalDisk, OpenFile
from headrace.storage.runtime import VIEWS_MAX
from headrace.testing import FaultyDisk
from headrace.testing.workbench import START_US, Workbench

LEASE_MS = 10_000
LEASE_US = LEASE_MS * 1000


@pytest.fixture
def bench() -> Iterator[Workbench]:
    bench = Workbench()
    bench.ask(SubscriptionCreate("jobs", settings={"retry_jitter": 0, "retry_seconds": 1, "deliveries_max": 0}))
    bench.publish("jobs", [b"a"])
    yield bench
    bench.close()


def lease(bench: Workbench, wait_ms: int = 0, name: str = "ann", count: int = 1) -> Any:
    """Ask for messages without doing what is waiting."""
    request = Lease("jobs", messages_max=count, lease_ms=LEASE_MS, wait_ms=wait_ms)
    return bench.begin(request, session=bench.connect(name))


def token_of(answer: Any) -> int:
    """The token of a lease, 0 if nothing was handed out."""
    portions = words_of(answer).portions
    return portions[0].lease if portions else 0


def words_of(answer: Any) -> Any:
    outcome = answer.outcome if isinstance(answer, PendingAnswer) else answer
    assert outcome is not None, "there was never an answer"
    return outcome.answer if isinstance(outcome, AnswerWithBody) else outcome


def said(answer: Any) -> str:
    """Done, or why not."""
    words = words_of(answer)
    if isinstance(words, HeadraceError):
        return words.code
    return words.refused[0].code if words.refused else "done"


def held(bench: Workbench, name: str = "ann") -> list[Holding]:
    """Lease the message, and say so."""
    answer = lease(bench, name=name)
    bench.run()
    return [Holding(0, token_of(answer), [0])]


VERBS = {
    "ack": lambda holdings: Ack("jobs", holdings),
    "extend": lambda holdings: Extend("jobs", holdings, LEASE_MS),
    "release": lambda holdings: Release("jobs", holdings, delay_ms=0),
    "reject": lambda holdings: Reject("jobs", holdings),
}


# The end of a lease.


def test_an_extension_holds_before_it_is_written(bench: Workbench) -> None:
    mine = held(bench)
    waiting = lease(bench, wait_ms=60_000, name="bob")
    bench.run()
    bench.now_us = START_US + LEASE_US - 1
    extended = bench.begin(VERBS["extend"](mine))
    bench.now_us += 1
    bench.broker.tick(bench.now_us)  # the lease as it was would end now
    bench.run()
    assert said(extended) == "done"
    assert waiting.outcome is None


@pytest.mark.parametrize("verb", ["extend", "release", "reject"])
def test_a_lease_is_over_when_its_time_is_though_nobody_has_looked(bench: Workbench, verb: str) -> None:
    mine = held(bench)
    bench.now_us = START_US + LEASE_US
    answer = bench.begin(VERBS[verb](mine))
    bench.run()
    assert said(answer) == "lease_expired"
    assert token_of(settled(bench, lease(bench, name="bob")))


def test_an_ack_that_is_late_counts_before_the_tick_and_after_it(bench: Workbench) -> None:
    bench.publish("jobs", [b"b"])
    first = settled(bench, lease(bench, count=2))
    bench.now_us = START_US + LEASE_US
    assert said(settled(bench, bench.begin(Ack("jobs", [Holding(0, token_of(first), [0])])))) == "done"
    bench.tick()
    assert said(settled(bench, bench.begin(Ack("jobs", [Holding(0, token_of(first), [1])])))) == "done"


@pytest.mark.parametrize("verb", VERBS)
def test_what_is_said_late_is_refused_when_another_was_handed_the_message_in_this_turn(
    bench: Workbench, verb: str
) -> None:
    mine = held(bench)
    bench.tick(11)
    theirs = lease(bench, name="bob")
    mine_late = bench.begin(VERBS[verb](mine))
    bench.run()
    assert said(mine_late) in ("not_lease_holder", "lease_expired")
    assert said(settled(bench, bench.begin(Ack("jobs", [Holding(0, token_of(theirs), [0])])))) == "done"


def test_a_lease_that_ends_before_it_is_written_ends_all_the_same(bench: Workbench) -> None:
    lease(bench)
    bench.now_us += LEASE_US
    bench.broker.tick(bench.now_us)
    bench.run()
    bench.wakes_us.clear()
    waiting = lease(bench, wait_ms=60_000, name="bob")
    bench.run()
    while waiting.outcome is None:
        assert bench.now_us < START_US + 3 * LEASE_US, "the message never came back"
        bench.now_us = max(bench.broker.tick(bench.now_us), bench.now_us + 1)
        bench.run()


def settled(bench: Workbench, answer: Any) -> Any:
    bench.run()
    return answer


# Two things said in one turn.


@pytest.mark.parametrize(("first", "second"), list(product(VERBS, VERBS)))
def test_of_two_things_said_in_one_turn_the_second_knows_of_the_first(
    bench: Workbench, first: str, second: str
) -> None:
    mine = held(bench)
    answers = [bench.begin(VERBS[verb](mine)) for verb in (first, second)]
    bench.run()
    assert said(answers[0]) == "done"
    assert (said(answers[1]) == "done") == (first == "extend")
    if "reject" in (first, second) and (first == "reject" or said(answers[1]) == "done"):
        assert len(bench.values("jobs.dead")) == 1
    again = settled(bench, lease(bench, name="bob"))
    last = first if first != "extend" else second
    assert bool(token_of(again)) == (last == "release")


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("twice", ["offsets", "holdings"])
def test_what_is_named_twice_is_done_once(bench: Workbench, verb: str, twice: str) -> None:
    [mine] = held(bench)
    holdings = [Holding(0, mine.lease, [0, 0])] if twice == "offsets" else [mine, mine]
    answer = settled(bench, bench.begin(VERBS[verb](holdings)))
    assert isinstance(words_of(answer), HeadraceError) or said(answer) in ("done", "not_lease_holder", "message_gone")
    if verb == "reject" and not isinstance(words_of(answer), HeadraceError):
        assert len(bench.values("jobs.dead")) == 1
    if verb == "release" and not isinstance(words_of(answer), HeadraceError):
        again = words_of(settled(bench, lease(bench, count=2, name="bob"))).portions
        assert [(list(one.all_offsets), one.deliveries) for one in again] == [([0], [2])]


@pytest.mark.parametrize(
    "change", [MessageChange(delete=True), MessageChange(due_us=START_US + 60_000_000), MessageChange(priority=1)]
)
@pytest.mark.parametrize("edit_first", [True, False])
def test_an_edit_and_a_lease_in_one_turn(bench: Workbench, change: MessageChange, edit_first: bool) -> None:
    edit = Edit("jobs", [MessageId(0, 0)], change)
    edited = bench.begin(edit) if edit_first else None
    leased = lease(bench)
    if edited is None:
        edited = bench.begin(edit)
    bench.run()
    outcome = words_of(edited).outcomes[0].outcome
    assert outcome == ("applied" if edit_first else "message_leased")
    assert bool(token_of(leased)) == (not edit_first or change.priority is not None)


@pytest.mark.parametrize("gone", [SubscriptionDelete("jobs"), TopicDelete("jobs")], ids=["subscription", "topic"])
@pytest.mark.parametrize("verb", [*VERBS, "lease"])
def test_things_decided_before_a_deletion_are_answered(bench: Workbench, gone: Answer, verb: str) -> None:
    bench.syncing_later = True
    bench.publish("jobs", [b"b"])
    mine = held(bench)
    answer = lease(bench) if verb == "lease" else bench.begin(VERBS[verb](mine))
    deleted = bench.begin(gone)
    bench.run()
    assert not isinstance(words_of(deleted), HeadraceError)
    words = words_of(answer)
    assert verb == "reject" or not isinstance(words, HeadraceError), words
    bench.tick(20)
    assert bench.failures == []


def test_a_dead_message_is_redriven_once(full: tuple[Workbench, FaultyDisk]) -> None:
    bench, _ = full
    mine = held(bench)
    settled(bench, bench.begin(VERBS["reject"](mine)))
    assert len(bench.values("jobs.dead")) == 1
    bench.syncing_later = True
    answers = [bench.begin(Redrive("jobs")) for _ in range(2)]
    bench.run()
    assert sorted(words_of(answer).messages for answer in answers) == [0, 1]
    assert bench.values("jobs") == [b"a", b"a"]


# A partition cannot be read.


class Unmappable(LocalDisk):
    """A disk whose files cannot be mapped while `failing` is part of their paths."""

    failing = ""

    def map(self, file: OpenFile, length: int, *, write: bool = False) -> memoryview:
        if self.failing and self.failing in file.path and not write:
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM), file.path)
        return super().map(file, length, write=write)


def test_a_partition_that_cannot_be_read_for_a_while_holds_up_only_its_own_messages(tmp_path: Path) -> None:
    disk = Unmappable()
    bench = Workbench(str(tmp_path), disk=disk)
    bench.ask(TopicCreate("jobs", {"partitions": 2}))
    bench.ask(SubscriptionCreate("jobs"))
    waiting = [lease(bench, wait_ms=60_000, count=10) for _ in range(2)]
    disk.failing = "topics/1/1/"
    bench.publish("jobs", [b"a"], 1)
    bench.publish("jobs", [b"b"], 0)
    assert words_of(waiting[0]).portions[0].partition == 0
    bench.publish("jobs", [b"c"], 0)
    assert words_of(waiting[1]).portions[0].partition == 0
    last = settled(bench, lease(bench, wait_ms=60_000))
    bench.tick(2)
    assert last.outcome is None
    disk.failing = ""
    bench.tick(2)
    assert words_of(last).portions[0].partition == 1
    bench.close()


def test_messages_that_cannot_be_read_when_they_are_taken_out_can_be_taken_out_later(tmp_path: Path) -> None:
    disk = Unmappable()
    bench = Workbench(str(tmp_path), disk=disk)
    bench.ask(TopicCreate("jobs", {"partitions": 2}))
    bench.ask(SubscriptionCreate("jobs", settings={"paused": True}))
    for partition in (0, 1):
        bench.publish("jobs", [b"a", b"b"], partition)
    waiting = settled(bench, lease(bench, wait_ms=60_000, count=10))
    for number in range(VIEWS_MAX + 1):  # so that no file of the jobs is mapped any more
        bench.publish(f"other-{number}", [b"c"])
        bench.values(f"other-{number}")
    disk.failing = "topics/1/1/"
    settled(bench, bench.begin(SubscriptionAlter("jobs", {"paused": False})))
    assert isinstance(words_of(waiting), HeadraceError)
    disk.failing = ""
    portions = words_of(settled(bench, lease(bench, count=10))).portions
    assert sorted((one.partition, list(one.all_offsets), one.deliveries) for one in portions) == [
        (0, [0, 1], []),
        (1, [0, 1], []),
    ]
    bench.close()


# The journal cannot be written.


@pytest.fixture
def full(tmp_path: Path) -> Iterator[tuple[Workbench, FaultyDisk]]:
    disk = FaultyDisk()
    bench = Workbench(str(tmp_path), disk=disk)
    bench.ask(SubscriptionCreate("jobs", settings={"retry_jitter": 0, "retry_seconds": 1}))
    bench.publish("jobs", [b"a"])
    yield bench, disk
    bench.close()


def failed(bench: Workbench, disk: FaultyDisk, *requests: Answer) -> list[Any]:
    """Ask in one turn, at the end of which nothing can be written."""
    answers = [bench.begin(request, session=bench.connect("ann")) for request in requests]
    disk.fail_writes(1)
    bench.run()
    assert all(isinstance(answer.outcome, HeadraceError) for answer in answers if isinstance(answer, PendingAnswer))
    return answers


WRITTEN = [verb for verb in VERBS if verb != "reject"]


@pytest.mark.parametrize(("first", "second"), list(product(WRITTEN, (*WRITTEN, ""))))
def test_what_could_not_be_written_was_never_decided(
    full: tuple[Workbench, FaultyDisk], first: str, second: str
) -> None:
    bench, disk = full
    mine = held(bench)
    bench.now_us += LEASE_US // 2
    failed(bench, disk, *(VERBS[verb](mine) for verb in (first, second) if verb))
    kept = words_of(bench.ask(Find("jobs"))).messages
    assert [(one.status, one.until_us) for one in kept] == [("leased", START_US + LEASE_US)]
    waiting = lease(bench, wait_ms=60_000, name="bob")
    bench.run()
    while waiting.outcome is None:
        assert bench.now_us < START_US + LEASE_US, "the message does not come back"
        bench.now_us = min(max(bench.broker.tick(bench.now_us), bench.now_us + 1), START_US + LEASE_US)
        bench.tick()
    assert bench.now_us == START_US + LEASE_US
    assert token_of(waiting)
    assert said(settled(bench, bench.begin(VERBS["ack"](mine)))) == "not_lease_holder"


@pytest.mark.parametrize("after", range(8))
def test_a_message_is_dead_or_alive_whichever_write_fails(full: tuple[Workbench, FaultyDisk], after: int) -> None:
    bench, disk = full
    mine = held(bench)
    waiting = lease(bench, wait_ms=60_000, name="bob")
    disk.fail_writes(1, after=after)
    rejected = settled(bench, bench.begin(VERBS["reject"](mine)))
    disk.fail_writes(0)
    bench.tick(1)  # what was committed and could not be appended is tried again
    dead = bench.values("jobs.dead") if not isinstance(words_of(rejected), HeadraceError) else []
    assert len(dead) == (waiting.outcome is None), "it is in two places, or in none, or nobody was told"
    assert waiting.outcome is None or token_of(waiting)


def test_an_extension_that_could_not_be_written_ends_when_the_lease_would_have(
    full: tuple[Workbench, FaultyDisk],
) -> None:
    bench, disk = full
    mine = held(bench)
    bench.now_us += LEASE_US - 1
    extended = bench.begin(VERBS["extend"](mine))
    bench.now_us += 1
    bench.broker.tick(bench.now_us)
    disk.fail_writes(1)
    bench.run()
    assert isinstance(extended.outcome, HeadraceError)
    assert bench.wakes_us[-1] <= bench.now_us
    bench.tick()
    assert token_of(settled(bench, lease(bench, name="bob")))


def test_a_late_ack_counts_when_the_other_lease_could_not_be_written(full: tuple[Workbench, FaultyDisk]) -> None:
    bench, disk = full
    mine = held(bench)
    bench.tick(11)
    failed(bench, disk, Lease("jobs", lease_ms=LEASE_MS))
    assert said(settled(bench, bench.begin(VERBS["ack"](mine)))) == "done"


def test_a_late_ack_that_could_not_be_written_leaves_a_moved_message_where_it_was_moved_to(
    full: tuple[Workbench, FaultyDisk],
) -> None:
    bench, disk = full
    mine = held(bench)
    bench.tick(11)
    bench.ask(Edit("jobs", [MessageId(0, 0)], MessageChange(due_us=START_US + 60_000_000)))
    failed(bench, disk, VERBS["ack"](mine))
    assert not token_of(settled(bench, lease(bench, name="bob")))
    bench.tick(60)
    assert token_of(settled(bench, lease(bench, name="bob")))


def test_a_message_that_expires_while_its_lease_cannot_be_written_is_not_handed_out(
    full: tuple[Workbench, FaultyDisk],
) -> None:
    bench, disk = full
    bench.ask(Ack("jobs", held(bench)))
    bench.ask(Publish("jobs", 0), bench.batch([b"b"], expires=[bench.now_us + 1_000_000]).data)
    leased = lease(bench)
    bench.now_us += 2_000_000
    bench.broker.tick(bench.now_us)
    disk.fail_writes(1)
    bench.run()
    assert isinstance(leased.outcome, HeadraceError)
    assert not token_of(settled(bench, lease(bench, name="bob")))
    assert words_of(bench.ask(Find("jobs", Selection()))).messages == []
