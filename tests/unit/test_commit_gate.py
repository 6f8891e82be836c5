"""On a replicated disk no answer and no delivery leaves the broker before what was recorded is committed."""

from random import Random
from typing import Any

import pytest
from tests.request_examples import EXAMPLES

from headrace.broker.pending_answer import AnswerWithBody, PendingAnswer
from headrace.client.connection.retrying import NOTHING_DONE
from headrace.model.durability import Durability
from headrace.model.errors import Cancelled, DurabilityUnavailable, Fenced, HeadraceError, StoreUnavailable, TopicExists
from headrace.model.job_requests import JobFinish
from headrace.model.leasing import (
    Ack,
    Extend,
    Holding,
    Lease,
    LeaseStop,
    Reject,
    Release,
    SubscriptionCreate,
    SubscriptionDescribe,
)
from headrace.model.reading import Fetch
from headrace.model.request import REQUESTS, Request
from headrace.model.requests import Assignment, Commit, GroupJoin, Info, Publish, TopicAlter, TopicCreate, TopicDescribe
from headrace.model.standing_lease import LeaseClose, LeaseCredit, LeaseDelivery, LeaseOpen
from headrace.model.subject_requests import RequestDelivery, SubjectDelivery, SubjectEnd
from headrace.storage.disk import OpenFile
from headrace.testing.faulty_disk import FaultyDisk
from headrace.testing.memory_disk import MemoryDisk
from headrace.testing.survival import Unsynced
from headrace.testing.workbench import Workbench

OWN_RULES = {
    "Publish": "answered at the durability that it asks for",
    "Fetch": "reads what the topic's durability allows",
    "StreamOpen": "reads what the topic's durability allows",
    "StreamClose": "about the connection's own stream",
    "StreamCredit": "is not answered",
    "LeaseCredit": "is not answered",
    "ReplySend": "is not answered",
    "PartitionCount": "chooses a partition to publish to, which the publish checks",
    "SubjectPublish": "live; a durable route publishes, and answers by its durability",
    "SubjectSubscribe": "live",
    "SubjectUnsubscribe": "live",
    "SwitchboardDescribe": "live",
    "RequestSend": "live",
    "ServeOpen": "live",
    "ServeClose": "live",
    "Info": "counts; is asked when the store is away",
    "MetricsCollect": "counts; is asked when the store is away",
    "WhoAmI": "about the connection",
}
"""Requests whose answers do not wait for the journal, and why not."""


class ReplicatedMemoryDisk(MemoryDisk):
    """A disk whose syncs count as commits, in memory."""

    is_replicated = True


class ReplicatedFaultyDisk(FaultyDisk):
    """A disk whose syncs count as commits; a power loss leaves what the next owner of the shard finds."""

    is_replicated = True


class FencedDisk(ReplicatedMemoryDisk):
    """A disk that another node can take over."""

    fenced: HeadraceError | None = None

    def write(self, file: OpenFile, position: int, data: bytes | bytearray | memoryview) -> None:
        """Write, unless it is fenced."""
        if self.fenced is not None:
            raise self.fenced
        super().write(file, position, data)

    def sync(self, file: OpenFile) -> None:
        """Sync, unless it is fenced."""
        if self.fenced is not None:
            raise self.fenced
        super().sync(file)


def prepared(disk: MemoryDisk | None = None) -> tuple[Workbench, int]:
    """A broker with one of each thing that the examples are about, all of it committed; and a lease of a message."""
    bench = Workbench("/data", disk=disk or ReplicatedMemoryDisk())
    bench.publish("orders", [b"a", b"b", b"c"])
    bench.ask(TopicCreate("archive"))
    bench.ask(SubscriptionCreate("orders", "workers"))
    lease = bench.ask(Lease("orders", "workers", messages_max=1)).answer.portions[0].lease
    bench.ask(GroupJoin("billing", "m1", ["orders"]))
    bench.run()
    return bench, lease


def with_lease(request: Request[Any], lease: int) -> Request[Any]:
    """The example, about the lease that there is."""
    held = Holding(0, lease, [0])
    changed: dict[type[Request[Any]], Request[Any]] = {
        Ack: Ack("orders", [held], "workers"),
        Extend: Extend("orders", [held], subscription="workers"),
        Release: Release("orders", [held], subscription="workers"),
        Reject: Reject("orders", [held], subscription="workers"),
        JobFinish: JobFinish("orders", held, "workers"),
        LeaseOpen: LeaseOpen("orders", "workers", credit_messages=1, credit_bytes=1 << 20),
    }
    return changed.get(type(request), request)


def body_of(bench: Workbench, request: Request[Any]) -> bytes:
    """A batch, where the request has one."""
    takes = {"Publish", "TransactionStage", "SubjectPublish", "JobFinish"}
    return bytes(bench.batch([b"x"]).data) if type(request).__name__ in takes else b""


def leaks(bench: Workbench, request: Request[Any], body: bytes) -> list[Any]:
    """What leaves the broker because of a request while the store does not answer, and facts are not committed."""
    bench.holding_syncs = True
    bench.pushed.clear()
    outcome = bench.begin(request, body)
    told_at_once = [] if isinstance(outcome, PendingAnswer) or bench.broker._ledger.synced else [outcome]
    bench.run()
    if bench.broker._ledger.synced:
        return []  # it recorded nothing
    left = [one for one in bench.pushed if (one.answer if isinstance(one, AnswerWithBody) else one).awaits_commit]
    if request.declared.answer is None or not request.declared.awaits_commit:
        return left
    if not isinstance(outcome, PendingAnswer):
        return left + told_at_once
    return [*left, outcome.outcome] if outcome.resolved else left


def test_what_need_not_wait_is_on_a_list_with_reasons() -> None:
    free = {one.__name__ for one in REQUESTS.values() if not one.declared.awaits_commit and not one.declared.by_gateway}
    ours = {name for name in free if not name.startswith(("Node", "Cluster"))}
    assert ours == OWN_RULES.keys()
    assert not any(one.awaits_commit for one in (SubjectDelivery, RequestDelivery, SubjectEnd))
    assert LeaseDelivery.awaits_commit
    assert Assignment.awaits_commit


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda one: type(one).__name__)
def test_no_answer_leaves_before_what_the_request_records_is_committed(example: Request[Any]) -> None:
    bench, lease = prepared()
    request = with_lease(example, lease)
    assert leaks(bench, request, body_of(bench, request)) == []


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda one: type(one).__name__)
def test_no_answer_tells_of_what_others_have_recorded_before_that_is_committed(example: Request[Any]) -> None:
    bench, lease = prepared()
    request = with_lease(example, lease)
    bench.holding_syncs = True
    created = bench.begin(TopicCreate("uncommitted"))
    if not request.declared.awaits_commit:
        return
    outcome = bench.begin(request, body_of(bench, request))
    bench.run()
    assert isinstance(outcome, PendingAnswer)
    assert not outcome.resolved
    bench.release_syncs()
    for _ in range(3):  # some end at a tick
        bench.tick(1)
    assert created.resolved
    assert outcome.resolved or type(request).__name__ == "Lease"


def test_without_the_gate_the_same_test_finds_the_leaks() -> None:
    leaking = set()
    for example in EXAMPLES:
        bench, lease = prepared()
        bench.broker._gate = None
        bench.session = bench.connect()
        request = with_lease(example, lease)
        if leaks(bench, request, body_of(bench, request)):
            leaking.add(type(request).__name__)
    assert {"Lease", "LeaseOpen", "Extend"} <= leaking


def test_an_answer_that_is_held_is_told_once_the_store_has_it() -> None:
    bench, _ = prepared()
    bench.holding_syncs = True
    leased = bench.begin(Lease("orders", "workers", messages_max=1))
    described = bench.begin(SubscriptionDescribe("orders", "workers"))
    bench.run()
    assert not leased.resolved
    assert not described.resolved
    bench.release_syncs()
    bench.run()
    assert leased.outcome.answer.portions[0].offsets == [1]
    assert described.outcome.subscription == "workers"


def test_nothing_waits_when_everything_is_committed() -> None:
    bench, _ = prepared()
    bench.holding_syncs = True
    info = bench.begin(TopicDescribe("orders"))
    assert info.topic == "orders"


def test_a_refusal_that_tells_of_a_fact_waits_for_it() -> None:
    bench, _ = prepared()
    bench.holding_syncs = True
    first = bench.begin(TopicCreate("invoices"))
    second = bench.begin(TopicCreate("invoices"))
    bench.run()
    assert not second.resolved
    bench.release_syncs()
    bench.run()
    assert first.outcome.topic == "invoices"
    assert isinstance(second.outcome, TopicExists)


def test_deliveries_of_standing_leases_wait_and_come_after_the_answer() -> None:
    bench, _ = prepared()
    bench.holding_syncs = True
    told: list[str] = []
    session = bench.broker.connect(lambda pushed: told.append(type(pushed.answer).__name__), "worker", bench.now_us)
    opened = bench.begin(LeaseOpen("orders", "late", credit_messages=5, credit_bytes=1 << 20), session=session)
    opened.then(lambda outcome: told.append(type(outcome).__name__))
    bench.run()
    assert told == []
    bench.release_syncs()
    bench.run()
    assert told == ["LeaseOpened", "LeaseDelivery"]


def test_a_closed_standing_request_gets_its_deliveries_before_the_answer() -> None:
    bench, _ = prepared()
    told: list[str] = []
    session = bench.broker.connect(lambda pushed: told.append(type(pushed.answer).__name__), "worker", bench.now_us)
    opened = bench.ask(LeaseOpen("orders", "workers", credit_messages=0, credit_bytes=1 << 20), session=session)
    bench.holding_syncs = True
    bench.begin(LeaseCredit(opened.standing, 1, 0), session=session)
    bench.run()
    closed = bench.begin(LeaseClose(opened.standing, keep_leases=True), session=session)
    closed.then(lambda outcome: told.append(type(outcome).__name__))
    bench.run()
    assert told == []
    bench.release_syncs()
    bench.run()
    assert told == ["LeaseDelivery", "Done"]


def test_assignments_of_groups_wait() -> None:
    bench, _ = prepared()
    other = bench.connect()
    bench.ask(TopicCreate("wide", {"partitions": 4}))
    bench.ask(GroupJoin("readers", "m1", ["wide"]))
    bench.pushed.clear()
    bench.holding_syncs = True
    bench.begin(TopicCreate("uncommitted"))
    joined = bench.begin(GroupJoin("readers", "m2", ["wide"]), session=other)
    bench.run()
    assert isinstance(joined, PendingAnswer)
    assert not joined.resolved
    assert not bench.pushed
    bench.release_syncs()
    bench.run()
    assert joined.resolved
    assert any(isinstance(one, Assignment) for one in bench.pushed)


def test_a_request_that_still_waits_can_be_cancelled_and_one_that_was_granted_is_told() -> None:
    bench, _ = prepared()
    waiting = bench.begin(Lease("orders", "workers", messages_max=10, wait_ms=60_000))
    bench.run()
    assert waiting.resolved  # the two that are left
    waiting = bench.begin(Lease("orders", "workers", wait_ms=60_000))
    bench.run()
    assert waiting.cancel()
    assert isinstance(waiting.outcome, Cancelled)
    bench.publish("orders", [b"d"])
    bench.holding_syncs = True
    granted = bench.begin(Lease("orders", "workers", wait_ms=60_000))
    bench.run()
    assert not granted.cancel(), "a lease that was given out is told, or nobody has it until it ends"
    bench.release_syncs()
    bench.run()
    assert granted.outcome.answer.portions[0].offsets == [3]


def test_stopping_a_wait_is_answered_after_the_lease_that_it_found() -> None:
    bench, _ = prepared()
    told: list[str] = []
    bench.holding_syncs = True
    leased = bench.begin(Lease("orders", "workers", wait_ms=60_000))
    leased.then(lambda _: told.append("leased"))
    stopped = bench.begin(LeaseStop("orders", "workers"))
    stopped.then(lambda _: told.append("stopped"))
    bench.run()
    assert told == []
    bench.release_syncs()
    bench.run()
    assert told == ["leased", "stopped"]


@pytest.mark.parametrize("seed", range(20))
def test_a_lease_that_was_told_is_known_to_the_next_owner(seed: int, tmp_path: Any) -> None:
    told, bench, disk = run_until_the_machine_is_lost(seed, str(tmp_path), gated=True)
    assert not doubled(told, bench, disk, str(tmp_path))


def test_without_the_gate_messages_are_leased_to_two_at_once(tmp_path: Any) -> None:
    found = 0
    for seed in range(20):
        path = str(tmp_path / str(seed))
        found += doubled(*run_until_the_machine_is_lost(seed, path, gated=False), path)
    assert found


def run_until_the_machine_is_lost(seed: int, path: str, *, gated: bool) -> tuple[dict[int, int], Workbench, FaultyDisk]:
    """Lease, acknowledge and publish, with a store that answers now and then; returns the leases that were told."""
    random, disk = Random(seed), ReplicatedFaultyDisk(seed)
    bench = Workbench(path, disk=disk)
    if not gated:
        bench.broker._gate = None
        bench.session = bench.connect()
    bench.publish("jobs", [b"%d" % number for number in range(40)])
    bench.ask(SubscriptionCreate("jobs", "workers", {"lease_seconds": 3600.0}))
    told: dict[int, int] = {}

    def lease_told(outcome: Any) -> None:
        if isinstance(outcome, AnswerWithBody):
            for portion in outcome.answer.portions:
                told.update(dict.fromkeys(portion.all_offsets, portion.lease))

    for _ in range(30):
        action = random.randrange(6)
        if action == 0:
            bench.holding_syncs = True
        elif action == 1:
            bench.release_syncs()
        elif action == 2 and told:
            offset = random.choice(sorted(told))
            bench.begin(Ack("jobs", [Holding(0, told.pop(offset), [offset])], "workers"))
        else:
            outcome = bench.begin(Lease("jobs", "workers", messages_max=random.randint(1, 3)))
            outcome.then(lease_told) if isinstance(outcome, PendingAnswer) else lease_told(outcome)
        for _ in range(random.randrange(20)):
            bench.step()
    return told, bench, disk


def doubled(told: dict[int, int], bench: Workbench, disk: FaultyDisk, path: str) -> int:
    """How many messages the next owner of the shard leases to others while the leases that were told last."""
    disk.crash_after(0)
    disk.power_loss(Unsynced.LOST)
    after = Workbench(path, disk=disk, now_us=bench.now_us)
    leased = after.ask(Lease("jobs", "workers", messages_max=100))
    portions = leased.answer.portions if isinstance(leased, AnswerWithBody) else []
    return sum(offset in told for portion in portions for offset in portion.all_offsets)


def test_messages_are_replicated_when_the_store_has_them() -> None:
    bench = Workbench("/data", disk=ReplicatedMemoryDisk())
    assert bench.ask(TopicDescribe("orders", create=True)).settings["durability"] == "replicated"
    assert bench.publish("orders", [b"a"]).durability == Durability.REPLICATED
    bench.ask(TopicCreate("synced", {"durability": "synced"}))
    assert bench.ask(TopicDescribe("synced")).settings["durability"] == "synced"
    assert bench.publish("synced", [b"a"]).durability == Durability.REPLICATED
    bench.holding_syncs = True
    waiting = bench.begin(Publish("orders", 0, Durability.REPLICATED), bench.batch([b"b"]).data)
    bench.run()
    assert not waiting.resolved
    assert bench.values("orders") == [b"a"]
    assert bench.begin(Fetch("orders", 0, 1)).answer.next_offset == 1
    bench.release_syncs()
    bench.run()
    assert waiting.outcome.durability == Durability.REPLICATED
    assert bench.values("orders") == [b"a", b"b"]


def test_a_fenced_broker_acknowledges_nothing_and_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    disk = FencedDisk()
    bench = Workbench("/data", disk=disk)
    for name in ("orders", "invoices", "payments"):
        bench.publish(name, [b"a"])
    bench.ask(SubscriptionCreate("orders", "workers"))
    disk.fenced = Fenced("the shard has another owner")
    caplog.clear()
    refused = []
    for request, body in (
        (Publish("orders", 0), bench.batch([b"b"]).data),
        (Publish("invoices", 0), bench.batch([b"b"]).data),
        (Lease("orders", "workers"), b""),
        (TopicCreate("more"), b""),
        (Commit("billing", []), b""),
    ):
        outcome = bench.begin(request, body)
        bench.run()
        refused.append(outcome.outcome if isinstance(outcome, PendingAnswer) else outcome)
    assert [type(one) for one in refused[:4]] == [Fenced] * 4
    assert all("may or may not have happened" in str(one) for one in refused[:4])
    for _ in range(30):
        bench.tick(1)
    assert len([one for one in caplog.records if one.levelname in ("WARNING", "ERROR")]) <= 1
    assert bench.begin(Info()).broker_id


def told_when_lost(example: Request[Any], lost: HeadraceError) -> tuple[bool, Any]:
    """What a request is told that was begun when the store did not answer, and the node then gave its shard up.

    Also whether the request had recorded something.
    """
    disk = FencedDisk()
    bench, lease = prepared(disk)
    request = with_lease(example, lease)
    bench.holding_syncs = True
    outcome = bench.begin(request, body_of(bench, request))
    bench.run()
    has_recorded = not bench.broker._ledger.synced
    disk.fenced = lost
    bench.release_syncs()
    for _ in range(3):
        bench.tick(1)
    return has_recorded, outcome.outcome if isinstance(outcome, PendingAnswer) else outcome


@pytest.mark.parametrize(
    "lost", [Fenced("the shard has another owner"), StoreUnavailable("no answer")], ids=lambda one: one.code
)
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda one: type(one).__name__)
def test_a_request_that_was_begun_when_the_shard_is_lost_is_in_doubt(
    example: Request[Any], lost: HeadraceError
) -> None:
    has_recorded, told = told_when_lost(example, lost)
    assert not isinstance(told, NOTHING_DONE), "clients would send it again, whatever it is"
    waits = example.declared.awaits_commit and example.declared.answer is not None
    if has_recorded and waits and not isinstance(example, LeaseOpen):  # that is answered before it leases
        assert isinstance(told, Fenced)
        assert not told.retryable
        assert "look before you repeat it" in str(told)


def test_the_walk_over_requests_in_doubt_meets_those_that_must_not_happen_twice() -> None:
    lost = Fenced("the shard has another owner")
    doubtful = {type(one).__name__ for one in EXAMPLES if isinstance(told_when_lost(one, lost)[1], Fenced)}
    assert {"TopicDelete", "EditMatching", "SubscriptionDelete", "TenantCreate", "Publish", "Lease"} <= doubtful
    assert len(doubtful) > 20


class TestClocks:
    """The next owner's clock may be minutes away from that of the one before."""

    @pytest.mark.parametrize("behind_s", [1, 300])
    def test_a_clock_that_is_behind_ends_no_lease_early(self, behind_s: int) -> None:
        disk = ReplicatedMemoryDisk()
        first = Workbench("/data", disk=disk)
        first.publish("jobs", [b"a"])
        first.ask(SubscriptionCreate("jobs", "workers", {"lease_seconds": 30.0}))
        held = first.ask(Lease("jobs", "workers")).answer.portions[0]
        after = Workbench("/data", disk=disk, now_us=first.now_us - behind_s * 1_000_000)
        assert after.broker.last_us == first.now_us
        assert after.broker.start_us == first.now_us, "time never runs back"
        after.now_us = after.broker.start_us  # as BrokerClock.go_on_from has it
        after.tick(29)
        assert after.ask(Lease("jobs", "workers")).portions == []
        after.tick(2)
        again = after.ask(Lease("jobs", "workers")).answer.portions[0]
        assert (again.offsets, again.deliveries) == ([0], [2])
        late = after.ask(Ack("jobs", [Holding(0, held.lease, [0])], "workers"))
        assert [one.offset for one in late.refused] == [0], "two leases of a message are never valid at once"

    def test_a_clock_that_is_ahead_hands_a_message_out_once_and_the_first_lease_is_over(self) -> None:
        disk = ReplicatedMemoryDisk()
        first = Workbench("/data", disk=disk)
        first.publish("jobs", [b"a"])
        first.ask(SubscriptionCreate("jobs", "workers", {"lease_seconds": 30.0}))
        held = first.ask(Lease("jobs", "workers")).answer.portions[0]
        after = Workbench("/data", disk=disk, now_us=first.now_us + 300_000_000)
        after.tick()
        assert after.ask(Lease("jobs", "workers")).answer.portions[0].offsets == [0]
        assert after.ask(Lease("jobs", "workers")).portions == []
        late = after.ask(Ack("jobs", [Holding(0, held.lease, [0])], "workers"))
        assert [one.offset for one in late.refused] == [0]

    def test_a_message_is_not_due_before_its_time_has_come_by_both_clocks(self) -> None:
        disk = ReplicatedMemoryDisk()
        first = Workbench("/data", disk=disk)
        first.ask(SubscriptionCreate("jobs", "workers"))
        due_us = first.now_us + 10_000_000
        first.ask(Publish("jobs", 0), first.batch([b"a"], dues=[due_us]).data)
        after = Workbench("/data", disk=disk, now_us=first.now_us - 120_000_000)
        after.now_us = after.broker.start_us
        after.tick(9)
        assert after.ask(Lease("jobs", "workers")).portions == []
        after.tick(1)
        assert after.ask(Lease("jobs", "workers")).answer.portions[0].offsets == [0]


class TestOutsideOfAcluster:
    """A plain broker, perhaps with topics that come from a cluster."""

    def test_replicated_is_refused(self) -> None:
        bench = Workbench("/data", disk=MemoryDisk())
        with pytest.raises(DurabilityUnavailable, match="--cluster"):
            bench.ask(TopicCreate("orders", {"durability": "replicated"}))
        bench.publish("orders", [b"a"])
        with pytest.raises(DurabilityUnavailable, match="--cluster"):
            bench.ask(TopicAlter("orders", {"durability": "replicated"}))
        with pytest.raises(DurabilityUnavailable, match="not part of a cluster"):
            bench.publish("orders", [b"b"], durability=Durability.REPLICATED)
        assert bench.values("orders") == [b"a"]
        assert bench.ask(TopicDescribe("orders")).settings["durability"] == "synced"

    def test_a_topic_of_a_cluster_is_synced(self) -> None:
        disk = ReplicatedMemoryDisk()
        cluster = Workbench("/data", disk=disk)
        cluster.publish("orders", [b"a"])
        cluster.close()
        disk.is_replicated = False
        plain = Workbench("/data", disk=disk)
        assert plain.ask(TopicDescribe("orders")).settings["durability"] == "synced"
        assert plain.publish("orders", [b"b"]).durability == Durability.SYNCED
        plain.holding_syncs = True
        waiting = plain.begin(Publish("orders", 0), plain.batch([b"c"]).data)
        plain.run()
        assert not waiting.resolved
        assert plain.values("orders") == [b"a", b"b"], "nobody reads what is not synced"
        plain.release_syncs()
        plain.run()
        with pytest.raises(DurabilityUnavailable):
            plain.publish("orders", [b"d"], durability=Durability.REPLICATED)
        altered = plain.ask(TopicAlter("orders", {"retain_bytes": 1 << 30}))
        assert altered.settings["durability"] == "synced"
        plain.close()
        disk.is_replicated = True
        again = Workbench("/data", disk=disk)
        assert again.ask(TopicDescribe("orders")).settings["durability"] == "replicated", "what was stored stays"
        assert again.publish("orders", [b"e"]).durability == Durability.REPLICATED
