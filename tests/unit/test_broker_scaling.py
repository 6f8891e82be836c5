"""What the broker does for one thing does not grow with how many others there are: work is counted, not timed."""

import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from types import FrameType
from typing import Any

import pytest
from benchmarks import scaling_broker

from headrace.broker.deadlines import Deadlines
from headrace.broker.maintenance import Maintenance
from headrace.broker.pending_answer import AnswerWithBody
from headrace.model.leasing import Lease, SubscriptionCreate
from headrace.model.requests import (
    Commit,
    GroupJoin,
    GroupLeave,
    Info,
    PartitionOffset,
    TopicAlter,
    TopicCreate,
    TopicDelete,
    TopicDescribe,
    TopicList,
    TransactionAbort,
    TransactionBegin,
    TransactionCommit,
    TransactionStage,
)
from headrace.testing.workbench import Workbench

FEW, MANY = 20, 120
SLACK = 1.5


@pytest.fixture
def data() -> Iterator[str]:
    """A directory in memory, where syncing takes no time."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").exists() else None) as directory:
        yield f"{directory}/data"


def work(call: Callable[[], object]) -> int:
    """How many lines of Python are run, each as often as it is."""
    count = 0

    def trace(_frame: FrameType, event: str, _argument: object) -> Any:
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return count


def peopled(topics: int, **settings: Any) -> Workbench:
    """A broker in memory with topics that each have a leased subscription, a group with a member and a position."""
    bench = Workbench()
    for number in range(topics):
        bench.ask(TopicCreate(f"topic-{number}", settings))
        bench.ask(SubscriptionCreate(f"topic-{number}", "workers"))
        bench.publish(f"topic-{number}", [b"message"])
        bench.ask(GroupJoin(f"group-{number}", "alice", [f"topic-{number}"], session_ms=3_600_000))
        bench.ask(Commit(f"position-{number}", [PartitionOffset(f"topic-{number}", 0, 0)]))
    bench.tick(10)
    return bench


def work_among(topics: int, call: Callable[[Workbench], object]) -> int:
    bench = peopled(topics)
    return work(lambda: call(bench))


def leased(bench: Workbench, topic: str) -> bool:
    """Whether there is a message to be had."""
    answer = bench.ask(Lease(topic, "workers"))
    return bool(answer.answer.portions if isinstance(answer, AnswerWithBody) else answer.portions)


REQUESTS: dict[str, Callable[[Workbench], object]] = {
    "create": lambda bench: bench.ask(TopicCreate("new")),
    "alter": lambda bench: bench.ask(TopicAlter("topic-0", {"partitions": 2})),
    "delete": lambda bench: bench.ask(TopicDelete("topic-0")),
    "describe": lambda bench: bench.ask(TopicDescribe("topic-0")),
    "subscribe": lambda bench: bench.ask(SubscriptionCreate("topic-0", "others")),
    "join": lambda bench: bench.ask(GroupJoin("group-0", "bob", ["topic-0"])),
    "leave": lambda bench: bench.ask(GroupLeave("group-0", "alice")),
    "commit": lambda bench: bench.ask(Commit("position-0", [PartitionOffset("topic-0", 0, 1)])),
}


@pytest.mark.parametrize("request_", REQUESTS)
def test_a_request_about_one_topic_is_as_much_work_among_many(request_: str) -> None:
    few, many = (work_among(topics, REQUESTS[request_]) for topics in (FEW, MANY))
    assert many <= SLACK * few


def test_a_list_is_linear_in_the_topics_it_names() -> None:
    """Not in the topics times the groups."""
    few, many = (work_among(topics, lambda bench: bench.ask(TopicList("topic-*"))) for topics in (FEW, MANY))
    assert many <= SLACK * MANY / FEW * few


def test_a_list_of_many_topics_is_made_in_slices() -> None:
    bench = with_topics(450)
    answer = bench.begin(TopicList())
    slices = 0
    while answer.outcome is None:
        slices += 1
        if slices == 2:
            bench.begin(TopicDelete("topic-449"))
        assert bench.step()
    assert slices >= 4
    assert [one.topic for one in answer.outcome.topics] == [f"topic-{number:03}" for number in range(449)]


def test_a_topic_is_listed_by_its_name_without_a_look_at_the_others() -> None:
    few, many = (work_among(topics, lambda bench: bench.ask(TopicList("topic-0"))) for topics in (FEW, MANY))
    assert many <= SLACK * few


# Maintenance.


def steps_of(bench: Workbench, seconds: float = 10) -> list[int]:
    """The work of each step of a tick, after which others have their turn."""
    bench.now_us += round(seconds * 1e6)
    found = [work(lambda: bench.broker.tick(bench.now_us))]
    more = True

    def step() -> None:
        nonlocal more
        more = bench.step()

    while more:
        found.append(work(step))
    return found


@pytest.mark.parametrize("validity", ["keep", "until_consumed"])
def test_a_maintenance_round_is_linear_and_no_step_of_it_grows(validity: str) -> None:
    few, many = (steps_of(peopled(topics, validity=validity)) for topics in (100, 400))
    assert sum(many) <= SLACK * 4 * sum(few)
    assert max(many) <= SLACK * max(few)


def test_a_tick_between_rounds_costs_the_same_among_many() -> None:
    few, many = (work_among(topics, lambda bench: bench.tick(0.1)) for topics in (FEW, MANY))
    assert many <= SLACK * few


class Visits:
    """Which partitions maintenance has looked at."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.topics: list[str] = []
        maintain = Maintenance._maintain

        def visited(maintenance: Maintenance, topic: Any, *arguments: Any) -> int:
            self.topics.append(str(topic))
            return maintain(maintenance, topic, *arguments)

        monkeypatch.setattr(Maintenance, "_maintain", visited)


def with_topics(count: int, data: str | None = None) -> Workbench:
    bench = Workbench(data)
    for number in range(count):
        bench.ask(TopicCreate(f"topic-{number:03}"))
        bench.publish(f"topic-{number:03}", [b"message"])
    return bench


def test_few_partitions_are_synced_in_one_step(monkeypatch: pytest.MonkeyPatch, data: str) -> None:
    """A little is synced at once, while everybody waits."""
    bench = Workbench(data)
    for number in range(40):
        bench.ask(TopicCreate(f"topic-{number}", {"durability": "written"}))
        for _ in range(2):
            bench.publish(f"topic-{number}", [b"message"])
    partitions = [active.partition for active in bench.broker._topics.active_partitions()]
    assert all(partition.synced_offset < partition.next_offset for partition in partitions)
    visits = Visits(monkeypatch)
    bench.now_us += 10_000_000
    bench.broker.tick(bench.now_us)
    assert 0 < len(visits.topics) <= 8
    while len(visits.topics) < 40:
        before = len(visits.topics)
        assert bench.step()
        assert len(visits.topics) <= before + 8


def test_a_round_that_is_under_way_is_not_begun_again(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = with_topics(200)
    visits = Visits(monkeypatch)
    for _ in range(3):  # nothing of what is waiting is done meanwhile
        bench.now_us += 10_000_000
        bench.broker.tick(bench.now_us)
    assert 0 < len(visits.topics) < 200
    bench.run()
    assert visits.topics == [f"topic-{number:03}" for number in range(200)]
    bench.tick(10)
    assert len(visits.topics) == 400


def test_topics_come_and_go_in_the_middle_of_a_round(
    monkeypatch: pytest.MonkeyPatch, data: str, caplog: pytest.LogCaptureFixture
) -> None:
    bench = with_topics(200, data)
    visits = Visits(monkeypatch)
    bench.now_us += 10_000_000
    bench.broker.tick(bench.now_us)
    seen = len(visits.topics)
    for number in (0, 150, 199):
        bench.begin(TopicDelete(f"topic-{number:03}"))
    bench.begin(TopicCreate("topic-150"))
    bench.run()
    assert seen < 150
    assert len(visits.topics) == 198
    assert "topic-199" not in visits.topics
    assert not caplog.records
    bench.publish("topic-150", [b"message"])
    bench.tick(10)
    assert visits.topics.count("topic-150") == 1
    assert not bench.failures
    bench.close()


def test_a_broker_that_is_closed_in_the_middle_of_a_round(
    monkeypatch: pytest.MonkeyPatch, data: str, caplog: pytest.LogCaptureFixture
) -> None:
    bench = with_topics(200, data)
    visits = Visits(monkeypatch)
    bench.now_us += 10_000_000
    bench.broker.tick(bench.now_us)
    bench.broker.close(bench.now_us)
    seen = len(visits.topics)
    bench.run()
    assert len(visits.topics) == seen < 200
    assert not caplog.records


def test_partitions_from_before_the_start_are_opened_a_few_at_a_time(data: str) -> None:
    bench = Workbench(data)
    for number in range(50):
        bench.ask(TopicCreate(f"topic-{number}", {"retain_seconds": 1, "segment_bytes": 4096}))
        bench.publish(f"topic-{number}", [b"x" * 3000])
    bench.close()
    bench = Workbench(data)
    opened = [bench.ask(Info()).partitions_open]
    for _ in range(4):
        bench.tick(10)
        opened.append(bench.ask(Info()).partitions_open)
    assert opened == [0, 20, 40, 50, 50]


def test_one_partition_that_fails_keeps_no_other_from_maintenance(
    monkeypatch: pytest.MonkeyPatch, data: str, caplog: pytest.LogCaptureFixture
) -> None:
    bench = Workbench(data)
    for name in ("first", "second"):
        bench.ask(TopicCreate(name, {"validity": "until_consumed"}))
        bench.publish(name, [b"message"] * 20)
        bench.ask(Commit("group", [PartitionOffset(name, 0, 20)]))
    consumed = bench.broker._groups.consumed_offset

    def failing(topic: Any, partition: int) -> int | None:
        if str(topic) == "first":
            raise RuntimeError("a mistake of ours")
        return consumed(topic, partition)

    monkeypatch.setattr(bench.broker._groups, "consumed_offset", failing)
    for _ in range(5):
        bench.tick(10)
    assert bench.ask(TopicDescribe("second")).partitions[0].first_offset == 20
    assert [record.getMessage() for record in caplog.records] == [
        "maintenance failed; trying again  topic=first partition=0  reason=a mistake of ours"
    ]
    monkeypatch.undo()
    bench.tick(10)
    assert bench.ask(TopicDescribe("first")).partitions[0].first_offset == 20


def test_one_component_that_fails_keeps_no_other_from_its_tick(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    bench = Workbench()
    bench.ask(SubscriptionCreate("orders", "workers", {"lease_seconds": 1}))
    bench.publish("orders", [b"message"])
    assert leased(bench, "orders")

    def failing(_now_us: int) -> None:
        raise RuntimeError("a mistake of ours")

    monkeypatch.setattr(bench.broker._groups, "tick", failing)
    for _ in range(5):
        bench.tick(1)
    assert leased(bench, "orders"), "the lease has not ended"
    assert [record.getMessage() for record in caplog.records] == [
        "broker tick failed; trying again  component=groups  reason=a mistake of ours"
    ]
    assert caplog.records[0].exc_info


# Transactions.


def staging(transactions: int) -> tuple[Workbench, TransactionStage]:
    bench = Workbench()
    bench.ask(TopicCreate("orders"))
    requests = []
    for number in range(transactions):
        epoch = bench.ask(TransactionBegin(f"transaction-{number}", timeout_ms=60_000)).epoch
        requests.append(TransactionStage(f"transaction-{number}", epoch, "orders", 0))
        bench.ask(requests[-1], bench.batch([b"message"]).data)
    return bench, requests[0]


def test_staging_is_as_much_work_among_many_open_transactions() -> None:
    found = []
    for count in (FEW, MANY):
        bench, request = staging(count)
        body = bench.batch([b"message"]).data
        found.append(work(lambda bench=bench, request=request, body=body: bench.ask(request, body)))
    assert found[1] <= SLACK * found[0]


def test_a_tick_is_as_much_work_among_many_open_transactions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.broker.transactions._TRIM_BYTES", 0)
    found = []
    for count in (FEW, MANY):
        bench, _ = staging(count)
        bench.tick(0.1)
        found.append(work(lambda bench=bench: bench.tick(0.1)))
    assert found[1] <= SLACK * found[0]


def test_transactions_that_are_over_are_aborted_a_few_in_each_tick() -> None:
    bench, _ = staging(450)
    left = []
    for _ in range(4):
        bench.tick(61 if not left else 0.1)
        left.append(bench.ask(Info()).transactions_open)
    assert left == [250, 50, 0, 0]


def test_the_staging_log_keeps_what_is_needed_and_nothing_before_it() -> None:
    """Whatever becomes of transactions: what is needed is what a look at all of them finds."""
    dice, bench = Random(5), Workbench()
    bench.ask(TopicCreate("orders"))
    transactions = bench.broker._transactions
    epochs: dict[str, int] = {}
    for _ in range(600):
        name = f"transaction-{dice.randrange(6)}"
        match dice.randrange(6) if name in epochs else 0:
            case 0:
                epochs[name] = bench.ask(TransactionBegin(name, join=dice.random() < 0.3)).epoch
            case 1:
                bench.ask(TransactionAbort(name, epochs.pop(name)))
            case 2:
                bench.begin(TransactionCommit(name, epochs.pop(name)))
            case _:
                bench.ask(TransactionStage(name, epochs[name], "orders", 0), bench.batch([b"x"]).data)
        opened = [stage for one in transactions._open.values() for stage in one.stages.values()]
        unsettled = [at for fact in bench.broker._ledger.state.unsettled.values() for at, _, _ in fact.stages]
        log = transactions._staging
        needed = min([*(stage.first_offset for stage in opened), *unsettled], default=log.next_offset)
        assert needed - 1 <= log.needed_offset <= needed  # a note may stay as long as its batch
        assert transactions._staged_bytes == sum(stage.bytes for stage in opened)
        if dice.random() < 0.5:
            bench.run()


# Groups.


def heartbeats(members: int) -> Workbench:
    bench = Workbench()
    bench.ask(TopicCreate("orders", {"partitions": 4}))
    for number in range(members):
        bench.ask(GroupJoin("readers", f"member-{number}", ["orders"], session_ms=10_000))
    return bench


def test_a_tick_is_as_much_work_among_many_members() -> None:
    found = []
    for members in (FEW, MANY):
        bench = heartbeats(members)
        ticks = 0
        for _ in range(100):  # ten seconds, in which everybody is heard of
            bench.broker.touch(bench.session, bench.now_us)
            bench.now_us += 100_000
            ticks += work(lambda bench=bench: bench.broker.tick(bench.now_us))
            bench.run()
        found.append(ticks)
    assert found[1] <= 3 * found[0], "it is looked at each member once in ten seconds, and not ten times a second"


def test_members_expire_at_their_time_whatever_was_heard_of_others() -> None:
    bench = heartbeats(3)
    other = bench.connect("other")
    bench.ask(GroupJoin("readers", "other", ["orders"], session_ms=10_000), session=other)
    for second in range(1, 25):
        bench.now_us += 1_000_000
        bench.broker.touch(other, bench.now_us)
        due_us = bench.broker.tick(bench.now_us)
        assert due_us > bench.now_us or second == 10
        bench.run()
        left = len(bench.broker._groups._groups["readers"].members)
        assert left == (4 if second < 10 else 1)


def test_deadlines_are_the_same_as_those_of_a_plain_list() -> None:
    dice, deadlines, plain = Random(7), Deadlines[str](), dict[str, int]()
    now_us = 0
    for _ in range(5000):
        key = f"key-{dice.randrange(40)}"
        match dice.randrange(4):
            case 0 | 1:
                plain[key] = now_us + dice.randrange(100)
                deadlines.set(key, plain[key])
            case 2:
                plain.pop(key, None)
                deadlines.remove(key)
            case 3:
                now_us += dice.randrange(10)
                due = sorted(key for key, due_us in plain.items() if due_us <= now_us)
                assert sorted(deadlines.pop_due(now_us)) == due
                plain = {key: due_us for key, due_us in plain.items() if due_us > now_us}
        assert deadlines.next_us() == min(plain.values(), default=None)
        assert len(deadlines) == len(plain)
        assert deadlines.queued <= 2 * len(plain) + 64


def test_a_new_topic_is_told_to_groups_whose_patterns_match_it_and_to_no_others() -> None:
    bench = Workbench()
    bench.ask(TopicCreate("orders-1"))
    bench.ask(GroupJoin("patterns", "alice", [], ["orders-*"]))
    bench.ask(GroupJoin("names", "bob", ["orders-1"]))
    bench.pushed.clear()
    bench.ask(TopicCreate("orders-2"))
    bench.ask(TopicCreate("others"))
    assert [(push.group, [place.topic for place in push.assigned]) for push in bench.pushed] == [
        ("patterns", ["orders-2"])
    ]
    bench.pushed.clear()
    bench.ask(TopicDelete("orders-1"))
    assert sorted(push.group for push in bench.pushed) == ["names", "patterns"]
    bench.ask(GroupJoin("patterns", "alice", ["others"]))  # it wants something else now
    bench.pushed.clear()
    bench.ask(TopicCreate("orders-3"))
    bench.ask(TopicCreate("orders-1"))
    assert [push.group for push in bench.pushed] == ["names"]


def test_a_deleted_topic_takes_positions_and_subscriptions_with_it() -> None:
    bench = peopled(3, partitions=3)
    bench.ask(Commit("position-1", [PartitionOffset("topic-2", 2, 0)]))
    bench.ask(TopicDelete("topic-1"))
    state = bench.broker._ledger.state
    assert state.groups["position-1"] == {(3, 2): 0}
    assert sorted(state.leased.subscriptions) == [1, 3]
    assert not state.leased.has_subscriptions(2)
    assert bench.ask(TopicDescribe("topic-2")).groups == ["group-2", "position-1", "position-2"]
    assert leased(bench, "topic-2")


# The measurements.


@pytest.mark.parametrize(
    "measure",
    [
        scaling_broker.topics_tick_ms,
        scaling_broker.subscriptions_tick_ms,
        scaling_broker.topic_create_us,
        scaling_broker.transactions_stage_us,
        scaling_broker.members_tick_ms,
    ],
)
def test_measurements_check_their_own_work(measure: Callable[[int], float]) -> None:
    assert measure(5) > 0
