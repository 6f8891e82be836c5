"""Settings that limit what a subscription has, who consumes it, and how long it lasts without consumers."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace.broker import subscription_policies
from headrace.broker.pending_answer import AnswerWithBody
from headrace.model.errors import (
    DiskFull,
    HeadraceError,
    InvalidArgument,
    SubscriptionFull,
    SubscriptionNotFound,
    TopicNotFound,
)
from headrace.model.leasing import (
    Ack,
    Holding,
    Lease,
    Redrive,
    Reject,
    SubscriptionAlter,
    SubscriptionCreate,
    SubscriptionDescribe,
)
from headrace.model.requests import Publish, TopicCreate, TopicDescribe, TransactionBegin, TransactionStage
from headrace.model.standing_lease import LeaseClose, LeaseCredit, LeaseOpen
from headrace.model.subscription import Overflow, Rejected, SubscriptionSettings, subscription_settings
from headrace.storage.disk import LocalDisk, OpenFile
from headrace.testing.workbench import Workbench


@pytest.fixture
def bench() -> Iterator[Workbench]:
    bench = Workbench()
    yield bench
    bench.close()


def subscribe(bench: Workbench, **settings: Any) -> None:
    bench.ask(SubscriptionCreate("jobs", settings={"retry_jitter": 0, **settings}))


def lease(bench: Workbench, count: int = 100) -> list[Holding]:
    answer = bench.ask(Lease("jobs", messages_max=count))
    portions = answer.answer.portions if isinstance(answer, AnswerWithBody) else []
    return [Holding(one.partition, one.lease, list(one.all_offsets)) for one in portions]


def offsets(holdings: list[Holding]) -> list[int]:
    return [offset for holding in holdings for offset in holding.offsets]


def info(bench: Workbench) -> Any:
    return bench.ask(SubscriptionDescribe("jobs"))


# Settings.


@pytest.mark.parametrize(
    "wrong",
    [
        {"rejected": "burn"},
        {"messages_max": 0},
        {"messages_max": -1},
        {"bytes_max": 0},
        {"overflow": "explode"},
        {"single_active_consumer": "perhaps"},
        {"delete_unused_seconds": 0},
        {"delete_unused_seconds": -1.0},
        {"delete_unused_seconds": float("nan")},
    ],
)
def test_wrong_settings_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument):
        subscription_settings(wrong)


def test_settings_outlive_a_restart(tmp_path: Path) -> None:
    given = {
        "rejected": "drop",
        "messages_max": 10,
        "bytes_max": 1000,
        "overflow": "drop_oldest",
        "single_active_consumer": True,
        "delete_unused_seconds": 60.0,
        "dead_letter_topic": "morgue",
    }
    bench = Workbench(str(tmp_path))
    subscribe(bench, **given)
    bench.close()
    bench = Workbench(str(tmp_path))
    assert {name: info(bench).settings[name] for name in given} == given
    plain = SubscriptionSettings()
    assert (plain.rejected, plain.overflow, plain.messages_max) == (Rejected.DEAD, Overflow.REFUSE, None)
    bench.close()


# Rejected messages.


def test_rejected_messages_can_be_dropped(bench: Workbench) -> None:
    subscribe(bench, rejected="drop")
    bench.publish("jobs", [b"a", b"b"])
    [held] = lease(bench)
    assert bench.ask(Reject("jobs", [held])).refused == []
    assert [one.code for one in bench.ask(Reject("jobs", [held])).refused] == ["message_gone"] * 2
    with pytest.raises(TopicNotFound):
        bench.ask(TopicDescribe("jobs.dead"))
    assert (info(bench).leased, info(bench).acked, info(bench).dead) == (0, 0, 0)


def test_a_rejection_that_comes_too_late_drops_nothing(bench: Workbench) -> None:
    subscribe(bench, rejected="drop", lease_seconds=1.0)
    bench.publish("jobs", [b"a"])
    held = lease(bench)
    bench.tick(2)
    assert [one.code for one in bench.ask(Reject("jobs", held)).refused] == ["lease_expired"]
    assert offsets(lease(bench)) == [0]


def test_rejected_messages_go_to_the_dead_letter_topic_of_choice(bench: Workbench) -> None:
    subscribe(bench, dead_letter_topic="morgue")
    bench.publish("jobs", [b"a"])
    bench.ask(Reject("jobs", lease(bench)))
    assert bench.values("morgue") == [b"a"]


# Limits.


def test_publishing_to_a_full_subscription_is_refused_until_some_are_settled(bench: Workbench) -> None:
    subscribe(bench, messages_max=3)
    bench.publish("jobs", [b"a", b"b"])
    bench.publish("jobs", [b"c", b"d"])  # the batch that reaches it is taken whole
    for _ in range(2):
        with pytest.raises(SubscriptionFull) as refused:
            bench.publish("jobs", [b"e"])
        assert refused.value.retryable
    held = lease(bench, 2)
    with pytest.raises(SubscriptionFull):
        bench.publish("jobs", [b"e"])
    bench.ask(Ack("jobs", held))
    bench.publish("jobs", [b"e"])
    assert bench.values("jobs") == [b"a", b"b", b"c", b"d", b"e"]


def test_small_batches_of_the_same_moment_count(bench: Workbench) -> None:
    subscribe(bench, messages_max=3)
    answers = [bench.begin(Publish("jobs", 0), bench.batch([b"x"]).data) for _ in range(6)]
    bench.run()
    assert len(bench.values("jobs")) == 3
    assert [isinstance(one, SubscriptionFull) for one in answers] == [False] * 3 + [True] * 3


def test_a_limit_counts_over_all_partitions_and_only_for_its_topic(bench: Workbench) -> None:
    bench.ask(TopicCreate("jobs", {"partitions": 2}))
    subscribe(bench, messages_max=2)
    bench.ask(SubscriptionCreate("jobs", "other"))
    bench.publish("jobs", [b"a"], 0)
    bench.publish("jobs", [b"b"], 1)
    for partition in (0, 1):
        with pytest.raises(SubscriptionFull, match="messages_max"):
            bench.publish("jobs", [b"c"], partition)
    bench.publish("elsewhere", [b"d"])
    bench.ask(SubscriptionAlter("jobs", {"messages_max": None}))
    bench.publish("jobs", [b"c"])


def test_bytes_are_limited_too(bench: Workbench) -> None:
    subscribe(bench, bytes_max=10_000)
    for _ in range(3):
        bench.publish("jobs", [b"x" * 4000])
    with pytest.raises(SubscriptionFull, match="bytes_max"):
        bench.publish("jobs", [b"y"])


def test_a_transaction_is_refused_when_it_stages_and_never_when_it_commits(bench: Workbench) -> None:
    subscribe(bench, messages_max=1)
    bench.ask(TransactionBegin("t", 60_000))
    bench.publish("jobs", [b"a"])
    began = bench.ask(TransactionBegin("t2", 60_000))
    with pytest.raises(SubscriptionFull):
        bench.ask(TransactionStage("t2", began.epoch, "jobs", 0), bench.batch([b"b"]).data)


def test_what_comes_back_from_the_dead_is_not_refused(bench: Workbench) -> None:
    subscribe(bench, messages_max=1)
    bench.publish("jobs", [b"a"])
    bench.ask(Reject("jobs", lease(bench)))
    bench.publish("jobs", [b"b"])
    assert bench.ask(Redrive("jobs")).messages == 1
    assert info(bench).ready == 2


def test_the_oldest_that_are_ready_can_be_dropped_instead(bench: Workbench) -> None:
    subscribe(bench, messages_max=3, overflow="drop_oldest")
    bench.publish("jobs", [b"a", b"b", b"c"])
    held = lease(bench, 1)
    bench.publish("jobs", [b"d", b"e"])
    assert (info(bench).ready, info(bench).leased, info(bench).dropped) == (2, 1, 2)
    assert bench.ask(Ack("jobs", held)).refused == []
    assert offsets(lease(bench)) == [3, 4]


def test_very_many_are_dropped_some_at_a_time_and_a_new_limit_counts(
    bench: Workbench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subscription_policies, "_DROPPED_TOGETHER", 10)
    bench.ask(TopicCreate("jobs", {"partitions": 2}))
    subscribe(bench)
    bench.publish("jobs", [b"x"] * 100, 0)
    bench.publish("jobs", [b"x"] * 50, 1)
    bench.ask(SubscriptionAlter("jobs", {"messages_max": 20, "overflow": "drop_oldest"}))
    assert (info(bench).ready, info(bench).dropped) == (20, 130)
    bench.ask(SubscriptionAlter("jobs", {"messages_max": None, "bytes_max": 1}))
    assert info(bench).ready <= 1


def test_dropped_messages_stay_dropped_after_a_restart(tmp_path: Path) -> None:
    bench = Workbench(str(tmp_path))
    subscribe(bench, messages_max=2, overflow="drop_oldest")
    bench.publish("jobs", [b"a", b"b", b"c"])
    bench.close()
    bench = Workbench(str(tmp_path), now_us=bench.now_us)
    assert offsets(lease(bench, 1)) == [1]
    bench.close()


class FullJournal(LocalDisk):
    """A disk that refuses to write the journal while `full`."""

    full = False
    refusals = 0

    def write(self, file: OpenFile, position: int, data: bytes | bytearray | memoryview) -> None:
        if self.full and "/journal/" in file.path:
            self.refusals += 1
            assert self.refusals < 100, "the broker writes without a pause though the disk is full"
            raise DiskFull(f"no space left for {file.path}")
        super().write(file, position, data)


def test_messages_come_back_when_the_journal_cannot_record_that_they_were_dropped(tmp_path: Path) -> None:
    disk = FullJournal()
    bench = Workbench(str(tmp_path), disk=disk)
    subscribe(bench, messages_max=2, overflow="drop_oldest")
    bench.publish("jobs", [b"a", b"b"])
    disk.full = True
    bench.publish("jobs", [b"c"])
    assert disk.refusals, "the journal was never written"
    assert (info(bench).ready, info(bench).dropped) == (3, 0)
    disk.full = False
    held = lease(bench, 1)
    assert offsets(held) == [0], "the oldest message is lost, though nothing says that it was dropped"
    bench.tick(1)  # tries again
    assert (info(bench).ready, info(bench).leased, info(bench).dropped) == (1, 1, 1)
    bench.close()
    bench = Workbench(str(tmp_path), now_us=bench.now_us)
    assert offsets(lease(bench)) == [2]
    assert bench.ask(Ack("jobs", held)).refused == []
    bench.close()


# Single active consumer.


class Consumer:
    def __init__(self, bench: Workbench, name: str, credit: int = 100) -> None:
        self.bench, self.pushed = bench, []  # type: ignore[var-annotated]
        self.session = bench.broker.connect(self.pushed.append, name, bench.now_us)
        self.number = bench.ask(LeaseOpen("jobs", credit_messages=credit), session=self.session).standing

    @property
    def offsets(self) -> list[int]:
        words = [one.answer for one in self.pushed if isinstance(one, AnswerWithBody)]
        return [offset for one in words for portion in one.portions for offset in portion.all_offsets]


def test_one_consumer_is_active_at_a_time_and_the_next_one_follows(bench: Workbench) -> None:
    subscribe(bench, single_active_consumer=True)
    ann, bob, eve = (Consumer(bench, name) for name in ("ann", "bob", "eve"))
    waiting = bench.begin(Lease("jobs", wait_ms=60_000))
    assert lease(bench) == []
    for _ in range(3):
        bench.publish("jobs", [b"a"])
    assert (ann.offsets, bob.offsets, eve.offsets) == ([0, 1, 2], [], [])
    bench.broker.disconnect(ann.session, bench.now_us)
    bench.publish("jobs", [b"b"])
    assert (bob.offsets, eve.offsets) == ([3], [])
    bench.ask(LeaseClose(bob.number), session=bob.session)
    bench.publish("jobs", [b"c"])
    assert eve.offsets == [4]
    bench.broker.disconnect(eve.session, bench.now_us)
    bench.publish("jobs", [b"d"])
    assert waiting.outcome.answer.portions[0].all_offsets == [5]


def test_an_active_consumer_without_credit_is_not_passed_over(bench: Workbench) -> None:
    subscribe(bench, single_active_consumer=True)
    ann, bob = Consumer(bench, "ann", credit=1), Consumer(bench, "bob")
    bench.publish("jobs", [b"a", b"b"])
    assert (ann.offsets, bob.offsets) == ([0], [])
    bench.ask(LeaseCredit(ann.number, 1), session=ann.session)
    assert (ann.offsets, bob.offsets) == ([0, 1], [])


def test_it_can_be_changed_while_consumers_are_there(bench: Workbench) -> None:
    subscribe(bench)
    ann, bob = Consumer(bench, "ann", credit=1), Consumer(bench, "bob")
    bench.ask(SubscriptionAlter("jobs", {"single_active_consumer": True}))
    bench.publish("jobs", [b"a", b"b"])
    assert (ann.offsets, bob.offsets) == ([0], [])
    bench.ask(SubscriptionAlter("jobs", {"single_active_consumer": False}))
    assert (ann.offsets, bob.offsets) == ([0], [1])


# Removal when unused.


def test_an_unused_subscription_is_deleted(bench: Workbench) -> None:
    subscribe(bench, delete_unused_seconds=60)
    bench.publish("jobs", [b"a", b"b"])
    bench.tick(50)
    held = lease(bench, 1)
    bench.tick(50)
    bench.ask(Ack("jobs", held))
    consumer = Consumer(bench, "ann")
    bench.tick(600)
    assert info(bench).leased + info(bench).ready == 1
    bench.broker.disconnect(consumer.session, bench.now_us)
    bench.tick(59)
    info(bench)
    bench.tick(2)
    with pytest.raises(SubscriptionNotFound):
        info(bench)
    assert bench.values("jobs") == [b"a", b"b"]


def test_a_held_message_counts_as_use(bench: Workbench) -> None:
    subscribe(bench, delete_unused_seconds=60, lease_seconds=600)
    bench.publish("jobs", [b"a"])
    held = lease(bench)
    for _ in range(5):
        bench.tick(100)
    assert info(bench).leased == 1
    assert bench.ask(Ack("jobs", held)).refused == []
    bench.tick(61)
    with pytest.raises(SubscriptionNotFound):
        info(bench)


def test_a_lease_that_is_over_is_no_use(bench: Workbench) -> None:
    subscribe(bench, delete_unused_seconds=60, lease_seconds=90)
    bench.publish("jobs", [b"a"])
    lease(bench)
    bench.tick(80)
    assert info(bench).leased == 1
    bench.tick(20)
    assert info(bench).leased == 0
    bench.tick(61)
    with pytest.raises(SubscriptionNotFound):
        info(bench)


def test_a_restart_begins_the_time_anew_and_it_can_be_taken_back(tmp_path: Path) -> None:
    bench = Workbench(str(tmp_path))
    subscribe(bench, delete_unused_seconds=60)
    bench.tick(50)
    bench.close()
    bench = Workbench(str(tmp_path), now_us=bench.now_us + 3_600_000_000)
    bench.tick(50)
    bench.ask(SubscriptionAlter("jobs", {"delete_unused_seconds": None}))
    bench.tick(600)
    assert not isinstance(info(bench), HeadraceError)
    bench.close()
