"""Tenants that use the same names never see, block or affect each other: each is as if it was alone with a broker."""

from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest

import headrace
from headrace.broker.pending_answer import AnswerWithBody
from headrace.model.batch import Producer, parse
from headrace.model.errors import HeadraceError
from headrace.model.leasing import (
    Ack,
    Find,
    Holding,
    Lease,
    Redrive,
    Reject,
    Release,
    Selection,
    SubscriptionAlter,
    SubscriptionCreate,
    SubscriptionDelete,
    SubscriptionDescribe,
    SubscriptionList,
)
from headrace.model.reading import Fetch
from headrace.model.request import Request
from headrace.model.requests import (
    Assignment,
    Commit,
    GroupDelete,
    GroupDescribe,
    GroupJoin,
    GroupLeave,
    GroupList,
    GroupSeek,
    Info,
    Offsets,
    PartitionOffset,
    Publish,
    TopicAlter,
    TopicCreate,
    TopicDelete,
    TopicDescribe,
    TopicList,
    TopicTrim,
    TransactionAbort,
    TransactionBegin,
    TransactionCommit,
    TransactionStage,
)
from headrace.model.schedule_requests import (
    ScheduleDefinition,
    ScheduleList,
    ScheduleNext,
    SchedulePause,
    ScheduleRemove,
    ScheduleRun,
    ScheduleSet,
)
from headrace.testing.workbench import Workbench

TENANTS = ("default", "acme", "zeta")
TOPICS = ("orders", "orders-eu", "jobs")
STEPS = 150
_NUMBERED = {"id", "topic_id", "epoch", "lease", "generation", "stage"}
"""What a broker numbers for all tenants together."""
_OF_THE_BROKER = {"data", "broker_id", "connections"}


class Tenant:
    """One tenant on one broker, which does what it is told and says what came of it."""

    def __init__(self, bench: Workbench, name: str) -> None:
        self.name = name
        self.held: list[Holding] = []
        self.transaction = 0
        self.reconnect(bench)

    def reconnect(self, bench: Workbench) -> None:
        self.bench = bench
        self.pushed: list[Assignment] = []
        self.session = bench.broker.connect(self.pushed.append, "tester", bench.now_us, tenant=self.name)

    def ask(self, request: Request[Any], body: bytes | bytearray | memoryview = b"") -> Any:
        return self.bench.ask(request, body, self.session)

    def tell(self, request: Request[Any], body: bytes | bytearray | memoryview = b"") -> Any:
        """What is answered, in plain values that do not depend on what others do."""
        try:
            return self.plain(self.ask(request, body))
        except HeadraceError as error:
            return error.code, self.without_tenant(str(error)), error.details

    def plain(self, answer: Any) -> Any:
        if isinstance(answer, AnswerWithBody):
            body, position, values = memoryview(answer.body), 0, []
            while position < len(body):
                batch = parse(body, position)
                values += [(message.value, self.headers(message.headers)) for message in batch.messages()]
                position += batch.length
            return self.plain(answer.answer), values
        return _unnumbered(msgspec.to_builtins(answer))

    def headers(self, headers: dict[str, bytes] | None) -> dict[str, bytes]:
        # Dead letters tell their topic's full name.
        return {name: value.removeprefix(f"{self.name}/".encode()) for name, value in (headers or {}).items()}

    def without_tenant(self, text: str) -> str:
        assert self.name == "default" or f"{self.name}/" not in text, text
        return text

    def lease(self, topic: str, subscription: str) -> Any:
        try:
            answer = self.ask(Lease(topic, subscription, messages_max=2, lease_ms=90_000))
        except HeadraceError as error:
            return error.code
        words = answer.answer if isinstance(answer, AnswerWithBody) else answer
        self.held += [Holding(one.partition, one.lease, list(one.all_offsets)) for one in words.portions]
        return self.plain(answer)

    def begin(self, *, join: bool) -> Any:
        answer = self.ask(TransactionBegin("t", join=join, timeout_ms=600_000))
        self.transaction = answer.epoch
        return answer.sequence, answer.committed

    def read(self, topic: str) -> Any:
        return self.tell(Fetch(topic, 0, 0))


def _unnumbered(plain: Any) -> Any:
    if isinstance(plain, dict):
        return {name: _unnumbered(value) for name, value in plain.items() if name not in _NUMBERED}
    return [_unnumbered(one) for one in plain] if isinstance(plain, list) else plain


Step = Callable[[Tenant], Any]


def _topic_steps(random: Random) -> list[Step]:
    topic, other = random.choice(TOPICS), random.choice(TOPICS)
    settings = {"partitions": random.randint(1, 2)}
    values = [b"%d" % random.randrange(100) for _ in range(random.randint(1, 3))]
    producer = Producer(100, 1, random.randrange(3))
    pattern = random.choice(["*", "orders*", "jobs", "j?bs"])
    return [
        lambda one: one.tell(TopicCreate(topic, settings)),
        lambda one: one.tell(TopicAlter(topic, settings)),
        lambda one: one.tell(TopicDelete(topic)),
        lambda one: one.tell(TopicDescribe(topic)),
        lambda one: one.tell(TopicDescribe(topic[:-1])),  # did you mean?
        lambda one: one.tell(TopicList(pattern)),
        lambda one: one.tell(TopicTrim(topic, {0: 1}, unread=True)),
        lambda one: one.tell(Publish(topic, 0), one.bench.batch(values).data),
        lambda one: one.tell(Publish(other, 0), one.bench.batch(values).data),
        lambda one: one.tell(Publish(topic, 0), one.bench.batch(values, producer).data),
        lambda one: one.tell(Offsets(topic)),
        lambda one: one.read(topic),
    ]


def _group_steps(random: Random) -> list[Step]:
    topic, member = random.choice(TOPICS), random.choice(["ann", "bob"])
    missing, offset = random.choice(["wait", "create", "refuse"]), random.randrange(3)
    return [
        lambda one: one.tell(GroupJoin("g", member, [topic], missing=missing)),
        lambda one: one.tell(GroupJoin("g", member, patterns=["orders*"])),
        lambda one: one.tell(GroupLeave("g", member)),
        lambda one: one.tell(Commit("h", [PartitionOffset(topic, 0, offset)])),
        lambda one: one.tell(GroupSeek("h", topic, to="earliest")),
        lambda one: one.tell(GroupDescribe("g")),
        lambda one: one.tell(GroupDelete("h")),
        lambda one: one.tell(GroupList()),
    ]


def _leased_steps(random: Random) -> list[Step]:
    topic, name = random.choice(TOPICS), random.choice(["default", "audit"])
    settings = {"dead_letter_topic": random.choice(["", "graves"]), "retry_jitter": 0.0}

    def settle(kind: Any, **more: Any) -> Step:
        def step(one: Tenant) -> Any:
            return one.tell(kind(topic, one.held, subscription=name, **more))

        return step

    return [
        lambda one: one.tell(SubscriptionCreate(topic, name, settings, create_topic=False)),
        lambda one: one.tell(SubscriptionAlter(topic, settings, name)),
        lambda one: one.tell(SubscriptionDelete(topic, name)),
        lambda one: one.tell(SubscriptionDescribe(topic, name)),
        lambda one: one.tell(SubscriptionList()),
        lambda one: one.lease(topic, name),
        lambda one: one.lease(topic, name),
        settle(Ack),
        settle(Reject, reason="bad"),
        settle(Release, delay_ms=1000, reason="later"),
        lambda one: one.tell(Find(topic, subscription=name)),
        lambda one: one.tell(Find(topic, Selection(status="dead"), subscription=name)),
        lambda one: one.tell(Redrive(topic, name)),
    ]


def _other_steps(random: Random) -> list[Step]:
    topic, join = random.choice(TOPICS), random.random() < 0.5
    definition = ScheduleDefinition("nightly", topic, "every 30s", b"run", overlap=random.choice(["allow", "skip"]))
    return [
        lambda one: one.tell(ScheduleSet(definition)),
        lambda one: one.tell(ScheduleSet(definition)),
        lambda one: one.tell(ScheduleRemove("nightly")),
        lambda one: one.tell(SchedulePause("nightly", paused=join)),
        lambda one: one.tell(ScheduleRun("nightly")),
        lambda one: one.tell(ScheduleNext("nightly")),
        lambda one: one.tell(ScheduleList()),
        lambda one: one.begin(join=join),
        lambda one: one.tell(TransactionStage("t", one.transaction, topic, 0), one.bench.batch([b"staged"]).data),
        lambda one: one.tell(TransactionStage("t", one.transaction, topic, 0), one.bench.batch([b"more"]).data),
        lambda one: one.tell(TransactionCommit("t", one.transaction)),
        lambda one: one.tell(TransactionAbort("t", one.transaction)),
    ]


def steps_of(random: Random) -> Step:
    """One thing to do."""
    kind = random.choice([_topic_steps, _topic_steps, _group_steps, _leased_steps, _leased_steps, _other_steps])
    return random.choice(kind(random))


@pytest.mark.parametrize("seed", range(6))
def test_each_tenant_is_as_if_it_was_alone(tmp_path: Path, seed: int) -> None:
    random = Random(seed)
    shared = Workbench(str(tmp_path / "shared"))
    alone = {name: Workbench(str(tmp_path / name)) for name in TENANTS}
    here = {name: Tenant(shared, name) for name in TENANTS}
    there = {name: Tenant(alone[name], "default") for name in TENANTS}
    for step in range(STEPS):
        if random.random() < 0.03:  # killed, and started again
            shared = Workbench(str(tmp_path / "shared"), now_us=shared.now_us)
            for name in TENANTS:
                here[name].reconnect(shared)
                there[name].reconnect(Workbench(str(tmp_path / name), now_us=shared.now_us))
        elif random.random() < 0.1:
            for bench in (shared, *(one.bench for one in there.values())):
                bench.tick(20)
        name = random.choice(TENANTS)
        act = steps_of(random)
        assert act(here[name]) == act(there[name]), f"step {step} of {name}"
        for name in TENANTS:
            assert list(map(here[name].plain, here[name].pushed)) == list(map(there[name].plain, there[name].pushed))
    for name in TENANTS[1:]:
        counted = here[name].tell(Info()), there[name].tell(Info())
        assert _counts(counted[0]) == _counts(counted[1])


def _counts(info: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in info.items() if name not in _OF_THE_BROKER}


def test_tenants_through_a_connection(tmp_path: Path) -> None:
    with headrace.open(tmp_path / "data", host="127.0.0.1", port=0, unix_socket="") as bus:
        address = bus.info().listening[0]
        with headrace.connect(address, tenant="acme") as acme, headrace.connect(f"{address}?tenant=zeta") as zeta:
            assert (bus.tenant, acme.tenant, zeta.tenant) == ("default", "acme", "zeta")
            for number, one in enumerate((bus, acme, zeta)):
                one.publish("orders", b"%d" % number)
                one.cron_add("nightly", "orders", "0 3 * * *", b"run")
                with one.subscribe("orders", group="billing", timeout=0.2) as orders:
                    assert [(message.topic, message.value) for message in orders] == [("orders", b"%d" % number)]
                with one.lease("orders") as jobs:
                    assert [job.value for job in jobs] == [b"%d" % number]
                assert [info.topic for info in one.topics()] == ["orders"]
                assert [info.group for info in one.groups()] == ["billing"]
                assert [info.definition.name for info in one.crons()] == ["nightly"]
                assert [info.topic for info in one.subscriptions()] == ["orders"]
            assert bus.describe_topic("acme/orders").topic == "acme/orders"
            with pytest.raises(headrace.errors.InvalidArgument, match="tenant"):
                acme.describe_topic("zeta/orders")
            with pytest.raises(headrace.errors.TopicNotFound, match="there is no topic order; did you mean orders"):
                acme.describe_topic("order")
            zeta.delete_topic("orders")
            assert [info.topic for info in acme.topics()] == ["orders"]
    with headrace.open(tmp_path / "data", tenant="acme") as acme:
        with acme.subscribe("orders", timeout=0.2) as orders:
            assert [message.value for message in orders] == [b"1"]
        assert [info.definition.name for info in acme.crons()] == ["nightly"]


@pytest.mark.parametrize("tenant", ["a/b", "-", "x" * 300, 7])
def test_a_tenant_that_cannot_be_is_refused(tenant: Any) -> None:
    with pytest.raises(headrace.errors.InvalidArgument, match="tenant"):
        headrace.open(":memory:", tenant=tenant)
