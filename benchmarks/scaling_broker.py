"""How the broker's own work grows with what there is: topics, subscriptions, open transactions, members of groups.

Each function builds a real broker in this process, does the work and checks it. What is measured is how long the
broker's thread is busy without a break, which is how long everybody else has to wait: in time of the processor, so
that it does not matter what else the machine does.
"""

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from time import thread_time

from headrace.bench.measure import WrongResult
from headrace.broker.settings import BrokerSettings
from headrace.model.batch import Columns, encode
from headrace.model.leasing import SubscriptionCreate, SubscriptionList
from headrace.model.requests import (
    Commit,
    GroupDescribe,
    GroupJoin,
    Info,
    PartitionOffset,
    TopicCreate,
    TopicDescribe,
    TransactionBegin,
    TransactionCommit,
    TransactionStage,
)
from headrace.testing.workbench import Workbench

_ROUNDS = 3
"""The best of so many rounds counts."""
_ROUND_S = 6.0
_STAGES = 200
_TICKS = 200
_MEMORY = {"storage": "memory"}


def topics_tick_ms(topics: int) -> float:
    """The longest hold of the broker's thread in a maintenance round over so many idle topics, each with a message."""
    with _broker(topics) as bench:
        for number in range(topics):
            bench.ask(TopicCreate(f"topic-{number}", {"durability": "written"}))
            bench.publish(f"topic-{number}", [b"idle"])
        return _maintenance_ms(bench)


def subscriptions_tick_ms(subscriptions: int) -> float:
    """The same, with a leased subscription on each of so many topics."""
    with _broker(subscriptions) as bench:
        for number in range(subscriptions):
            bench.ask(TopicCreate(f"topic-{number}", {"validity": "until_consumed"}))
            bench.ask(SubscriptionCreate(f"topic-{number}", "workers"))
        if len(bench.ask(SubscriptionList("topic-0")).subscriptions) != 1:
            raise WrongResult("a topic has not the one subscription that was made")
        return _maintenance_ms(bench)


def topic_create_us(topics: int) -> float:
    """The time to create one topic when there are so many, each with a subscription."""
    with _broker(topics + _STAGES) as bench:
        for number in range(topics):
            bench.ask(SubscriptionCreate(f"topic-{number}", "workers"))
        before = bench.ask(Info()).topics
        names = iter(range(_STAGES))
        elapsed_us = _median_us(lambda: bench.ask(TopicCreate(f"new-{next(names)}")), _STAGES)
        if bench.ask(Info()).topics != before + _STAGES:
            raise WrongResult(f"there are {bench.ask(Info()).topics} topics, not {before + _STAGES}")
        return elapsed_us


def transactions_stage_us(transactions: int) -> float:
    """The time to stage a batch while so many transactions are open."""
    bench = Workbench()
    bench.ask(TopicCreate("orders", _MEMORY))
    body = encode(Columns([b"order"]), bench.now_us).data
    epochs = []
    for number in range(transactions):
        epochs.append(bench.ask(TransactionBegin(f"transaction-{number}")).epoch)
        bench.ask(TransactionStage(f"transaction-{number}", epochs[-1], "orders", 0), body)
    request = TransactionStage("transaction-0", epochs[0], "orders", 0)
    elapsed_us = _median_us(lambda: bench.ask(request, body), _STAGES)
    bench.ask(TransactionCommit("transaction-0", epochs[0]))
    if len(bench.values("orders")) != _STAGES + 1:
        raise WrongResult(f"{len(bench.values('orders'))} messages were committed, not {_STAGES + 1}")
    if bench.ask(Info()).transactions_open != transactions - 1:
        raise WrongResult("a transaction has ended that nobody committed")
    return elapsed_us


def members_tick_ms(members: int) -> float:
    """The time of one tick of the broker while a group has so many members, all of them alive."""
    bench = Workbench()
    bench.ask(TopicCreate("orders", {**_MEMORY, "partitions": min(members, 1000)}))
    for number in range(members):
        bench.ask(GroupJoin("readers", f"member-{number}", ["orders"], session_ms=10_000))

    def tick() -> None:
        bench.now_us += 100_000
        bench.broker.touch(bench.session, bench.now_us)
        began = thread_time()
        bench.broker.tick(bench.now_us)
        found.append(thread_time() - began)
        bench.run()

    found: list[float] = []
    for _ in range(_TICKS):
        tick()
    left = len(bench.ask(GroupDescribe("readers")).members)
    if left != members:
        raise WrongResult(f"{left} members are left of {members}, all of which were alive")
    bench.tick(11)
    if bench.ask(GroupDescribe("readers")).members:
        raise WrongResult("members are there that were out of touch for too long")
    return sorted(found)[len(found) // 2] * 1000


@contextmanager
def _broker(topics: int) -> Iterator[Workbench]:
    """A broker on files, in memory where there is such a place: syncing is not what is measured."""
    fast = "/dev/shm" if Path("/dev/shm").exists() else None
    with tempfile.TemporaryDirectory(dir=fast) as directory:
        bench = Workbench(f"{directory}/data", settings=BrokerSettings(topics_max=topics + 1, maintenance_seconds=5.0))
        try:
            yield bench
        finally:
            bench.close()


def _maintenance_ms(bench: Workbench) -> float:
    """The longest hold in the best of a few maintenance rounds, each of which reaches the topic that was made last."""
    bench.ask(TopicCreate("last", {"validity": "until_consumed"}))
    holds = []
    for number in range(1, _ROUNDS + 1):
        bench.publish("last", [b"message"])
        bench.ask(Commit("readers", [PartitionOffset("last", 0, number)]))
        bench.run()
        bench.now_us += round(_ROUND_S * 1e6)
        holds.append(_longest_hold(bench))
        first_offset = bench.ask(TopicDescribe("last")).partitions[0].first_offset
        if first_offset != number:
            raise WrongResult(f"the round has left offset {first_offset} of what is consumed up to {number}")
    return min(holds) * 1000


def _longest_hold(bench: Workbench) -> float:
    """Tick, and do all that follows; the longest that the thread was busy without a break, in seconds."""
    began = thread_time()
    bench.broker.tick(bench.now_us)
    longest = thread_time() - began
    while True:
        began = thread_time()
        if not bench.step():
            return longest
        longest = max(longest, thread_time() - began)


def _median_us(call: Callable[[], object], times: int) -> float:
    """The median of so many calls."""
    found = []
    for _ in range(times):
        began = thread_time()
        call()
        found.append(thread_time() - began)
    return sorted(found)[times // 2] * 1e6
