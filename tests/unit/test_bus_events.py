"""Observers hear of every change of the bus's structures, in one schema, and never of another tenant's."""

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
from tests.silent_sender import SilentSender

import headrace
from headrace.broker import audit_facts, bus_events, definition_facts, facts, route_facts, topics, webhook_facts
from headrace.broker.bus_events import bare_name
from headrace.broker.facts import AnyFact
from headrace.broker.leased_facts import LeasedFact
from headrace.broker.pending_answer import AnswerWithBody
from headrace.broker.ports import Session
from headrace.broker.settings import BrokerSettings
from headrace.model.batch import parse
from headrace.model.bus_event import EVENT_KINDS, BusEvent, EventsRecord, decode_event
from headrace.model.errors import HeadraceError, InvalidArgument, PartitionNotFound, TopicNotFound
from headrace.model.idempotency import PartitionBatch, PublishOnce
from headrace.model.leasing import (
    Holding,
    Lease,
    Redrive,
    Reject,
    SubscriptionAlter,
    SubscriptionCreate,
    SubscriptionDelete,
    SubscriptionReset,
)
from headrace.model.log_level_requests import LogLevelReset, LogLevelRule, LogLevelSet
from headrace.model.partition_count import PartitionCount
from headrace.model.request import REQUESTS, Request, Verb
from headrace.model.requests import (
    Commit,
    GroupDelete,
    GroupJoin,
    GroupLeave,
    GroupSeek,
    PartitionOffset,
    Publish,
    TopicAlter,
    TopicCreate,
    TopicDelete,
    TopicDescribe,
    TopicList,
    TransactionBegin,
    TransactionStage,
)
from headrace.model.route_requests import RouteDefinition, RouteRemove, RouteSet
from headrace.model.schedule_requests import ScheduleDefinition, SchedulePause, ScheduleRemove, ScheduleSet
from headrace.model.service_requests import (
    ServiceDefinition,
    ServiceDeregister,
    ServicePolicyAlter,
    ServiceRegister,
)
from headrace.model.subject_requests import SubjectSubscribe
from headrace.model.webhook_requests import WebhookAlter, WebhookDefinition, WebhookDelete, WebhookPause, WebhookSet
from headrace.testing.workbench import Workbench


@pytest.fixture
def bench() -> Iterator[Workbench]:
    bench = Workbench()
    yield bench
    bench.close()


def events(bench: Workbench, session: Session | None = None) -> list[BusEvent]:
    """All events of a tenant, which are recorded from now on."""
    session = session or bench.session
    bench.ask(EventsRecord(), session=session)
    topic = "headrace.events" if session.tenant == "default" else f"{session.tenant}/headrace.events"
    return [decode_event(value) for value in bench.values(topic)]


def subjects(bench: Workbench, session: Session | None = None) -> list[str]:
    return [event.subject for event in events(bench, session)]


def leased(bench: Workbench, topic: str = "jobs") -> list[Holding]:
    answer = bench.ask(Lease(topic, messages_max=10))
    assert isinstance(answer, AnswerWithBody)
    return [Holding(one.partition, one.lease, list(one.all_offsets)) for one in answer.answer.portions]


def bury(bench: Workbench) -> None:
    bench.ask(TopicCreate("jobs", exist_ok=True))
    bench.ask(SubscriptionCreate("jobs", exist_ok=True))
    bench.publish("jobs", [b"bad"])
    bench.ask(Reject("jobs", leased(bench), "cannot be read"))


def member(bench: Workbench) -> None:
    bench.ask(TopicCreate("orders", exist_ok=True))
    bench.ask(GroupJoin("readers", "m1", topics=["orders"]))


def schedule(bench: Workbench) -> None:
    bench.ask(ScheduleSet(ScheduleDefinition("beat", "ticks", "every 1h")))


def service(bench: Workbench) -> None:
    bench.ask(ServiceRegister(ServiceDefinition("billing", "i1"), ttl_ms=1000))


def asks(*requests: Request[Any]) -> Callable[[Workbench], None]:
    def ask(bench: Workbench) -> None:
        for request in requests:
            bench.ask(request)

    return ask


def then(*steps: Callable[[Workbench], object]) -> Callable[[Workbench], None]:
    def run(bench: Workbench) -> None:
        for step in steps:
            step(bench)

    return run


ORDERS, LATER = asks(TopicCreate("orders")), 100_000_000
QUEUE = then(asks(TopicCreate("jobs")), asks(SubscriptionCreate("jobs")))

ROUTE = RouteSet(RouteDefinition("r", ["bills"], source="orders", key="a"))


def webhook(bench: Workbench) -> None:
    bench.broker.webhooks.attach(SilentSender())
    bench.ask(WebhookSet(WebhookDefinition("w", "orders", "https://receiver.invalid/")))


CHANGES: dict[str, Callable[[Workbench], None]] = {
    "topic.created": ORDERS,
    "topic.altered": then(ORDERS, asks(TopicAlter("orders", {"partitions": 2}))),
    "topic.deleted": then(ORDERS, asks(TopicDelete("orders"))),
    "subscription.created": QUEUE,
    "subscription.altered": then(QUEUE, asks(SubscriptionAlter("jobs", settings={"lease_seconds": 3}))),
    "subscription.reset": then(QUEUE, asks(SubscriptionReset("jobs"))),
    "subscription.deleted": then(QUEUE, asks(SubscriptionDelete("jobs"))),
    "group.created": member,
    "group.altered": then(member, asks(GroupSeek("readers", "orders"))),
    "group.deleted": then(ORDERS, asks(Commit("lonely", [PartitionOffset("orders", 0, 0)]), GroupDelete("lonely"))),
    "member.joined": member,
    "member.left": then(member, asks(GroupLeave("readers", "m1"))),
    "member.expired": then(member, lambda bench: bench.tick(LATER)),
    "schedule.created": schedule,
    "schedule.altered": then(schedule, asks(ScheduleSet(ScheduleDefinition("beat", "ticks", "every 2h")))),
    "schedule.paused": then(schedule, asks(SchedulePause("beat"))),
    "schedule.resumed": then(schedule, asks(SchedulePause("beat"), SchedulePause("beat", False))),
    "schedule.deleted": then(schedule, asks(ScheduleRemove("beat"))),
    "route.created": asks(ROUTE),
    "route.altered": asks(ROUTE, RouteSet(RouteDefinition("r", ["bills"], source="orders", key="b"), replace=True)),
    "route.deleted": asks(ROUTE, RouteRemove("r")),
    "service.registered": service,
    "service.altered": then(service, asks(ServiceRegister(ServiceDefinition("billing", "i1", "2")))),
    "service.deregistered": then(service, asks(ServiceDeregister("billing", "i1"))),
    "service.expired": then(service, lambda bench: bench.tick(LATER)),
    "policy.altered": asks(ServicePolicyAlter(True)),
    "dead_letter.added": bury,
    "dead_letter.redriven": then(bury, asks(Redrive("jobs"))),
    "webhook.created": webhook,
    "webhook.altered": then(webhook, asks(WebhookAlter("w", {"concurrency": 2}))),
    "webhook.paused": then(webhook, asks(WebhookPause("w"))),
    "webhook.resumed": then(webhook, asks(WebhookPause("w"), WebhookPause("w", False))),
    "webhook.disabled": then(webhook, lambda bench: bench.broker.webhooks.disable("w", "410", bench.now_us)),
    "webhook.opened": then(webhook, lambda bench: bench.broker.webhooks.note("w", "opened", {}, bench.now_us)),
    "webhook.deleted": then(webhook, asks(WebhookDelete("w"))),
    "log_level.set": asks(LogLevelSet(LogLevelRule("topic", "orders", "debug"))),
    "log_level.reset": asks(LogLevelSet(LogLevelRule("topic", "orders", "debug")), LogLevelReset()),
}
"""What causes each kind of event."""

FACT_EVENTS: dict[type, set[str]] = {
    facts.TopicSet: {"topic.created", "topic.altered"},
    facts.TopicDeleted: {"topic.deleted"},
    facts.OffsetsCommitted: {"group.created", "group.altered"},
    facts.GroupDeleted: {"group.deleted"},
    facts.Committed: {"group.created", "dead_letter.added", "dead_letter.redriven"},
    facts.ScheduleStored: {"schedule.created", "schedule.altered", "schedule.paused", "schedule.resumed"},
    facts.ScheduleDeleted: {"schedule.deleted"},
    route_facts.RouteStored: {"route.created", "route.altered"},
    route_facts.RouteRemoved: {"route.deleted"},
    route_facts.RouteAdvanced: set(),  # progress
    route_facts.RouteTargetBound: set(),  # follows from a topic's event
    webhook_facts.WebhookStored: {"webhook.created", "webhook.altered"},
    webhook_facts.WebhookDeleted: {"webhook.deleted"},
    webhook_facts.WebhookStateSet: {"webhook.paused", "webhook.resumed", "webhook.disabled"},
    facts.ServicePolicySet: {"policy.altered"},
    facts.LogLevelStored: {"log_level.set", "log_level.reset"},
    # About messages, progress or the broker itself, and not about structures:
    facts.BrokerStarted: set(),
    facts.ProducersCheckpointed: set(),
    facts.TransactionApplied: set(),
    facts.TransactionShared: set(),
    facts.TransactionUnshared: set(),
    facts.ScheduleAdvanced: set(),
    facts.TopicFilesRemoved: set(),
    facts.IdsReserved: set(),
    facts.OffsetsReserved: set(),
    facts.IdempotencyKeyUsed: set(),
    facts.IdempotencyReceiptStored: set(),
    # About security, which the audit trail tells of:
    definition_facts.DefinitionsChanged: set(),
    facts.TenantErased: set(),
    definition_facts.TokensUsed: set(),
    audit_facts.AuditCheckpointed: set(),
}
LEASED_FACT_EVENTS: dict[str, set[str]] = {
    "SubscriptionSet": {"subscription.created", "subscription.altered"},
    "SubscriptionDeleted": {"subscription.deleted"},
    "SubscriptionStateReset": {"subscription.reset"},
    # About messages, or parts of a snapshot:
    "MessagesLeased": set(),
    "LeaseExtended": set(),
    "MessagesSettled": set(),
    "MessagesReleased": set(),
    "MessageEdited": set(),
    "IndexSnapshotBegun": set(),
    "IndexSnapshotChunks": set(),
    "IndexSnapshotRest": set(),
    "SubscriptionBroken": set(),
    "SettledEdits": set(),
}
REQUEST_EVENTS: dict[str, set[str]] = {
    "TopicCreate": {"topic.created"},
    "TopicAlter": {"topic.altered"},
    "TopicDelete": {"topic.deleted"},
    "TopicTrim": set(),  # removes messages
    "SubscriptionCreate": {"subscription.created"},
    "SubscriptionAlter": {"subscription.altered"},
    "SubscriptionReset": {"subscription.reset"},
    "SubscriptionDelete": {"subscription.deleted"},
    "Redrive": {"dead_letter.redriven"},
    "GroupSeek": {"group.altered"},
    "GroupDelete": {"group.deleted"},
    "ScheduleSet": {"schedule.created", "schedule.altered"},
    "ScheduleRemove": {"schedule.deleted"},
    "SchedulePause": {"schedule.paused", "schedule.resumed"},
    "ScheduleRun": set(),  # publishes a message
    "RouteSet": {"route.created", "route.altered"},
    "RouteRemove": {"route.deleted"},
    "WebhookSet": {"webhook.created", "webhook.altered"},
    "WebhookAlter": {"webhook.altered"},
    "WebhookPause": {"webhook.paused", "webhook.resumed"},
    "WebhookDelete": {"webhook.deleted"},
    "WebhookTest": set(),  # sends a ping
    "WebSubSubscribe": {"webhook.created", "webhook.altered"},  # once the callback has confirmed it
    "WebSubUnsubscribe": {"webhook.deleted"},
    "ServiceRegister": {"service.registered", "service.altered"},
    "ServiceDeregister": {"service.deregistered"},
    "ServeOpen": set(),  # lasts as long as the connection, and is counted by SwitchboardDescribe
    "ServicePolicyAlter": {"policy.altered"},
    "ErrorReport": set(),  # goes to the topic of errors
    "LogLevelSet": {"log_level.set"},
    "LogLevelReset": {"log_level.reset"},
    # Security definitions are told of in the audit trail, which fewer may read than events.
    "SecurityDescribe": set(),
    "SecurityAlter": set(),
    "RoleSet": set(),
    "RoleRemove": set(),
    "BindingAdd": set(),
    "BindingRemove": set(),
    "TokenCreate": set(),
    "TokenList": set(),
    "TokenRevoke": set(),
    "TenantCreate": set(),
    "TenantList": set(),
    "TenantAlter": set(),
    "TenantDelete": set(),
    "AccessExplain": set(),
    # The cluster is told of in the log of its nodes: whoever takes over cannot know what the last owner has told.
    "ClusterMove": set(),
    "ClusterDrain": set(),
    "ClusterUpgrade": set(),
}
STRUCTURAL = {Verb.CREATE, Verb.ALTER, Verb.DELETE, Verb.SCHEDULE, Verb.ROUTE, Verb.SERVE, Verb.ADMINISTER}


@pytest.mark.parametrize("named", CHANGES)
def test_every_change_is_an_event(bench: Workbench, named: str) -> None:
    CHANGES[named](bench)
    assert f"$events.{named}" in subjects(bench)


def test_every_fact_says_which_events_it_has() -> None:
    own = set(get_args(AnyFact)) - set(get_args(LeasedFact))
    assert own == set(FACT_EVENTS), "a new fact: say here which events tell of it"
    assert {fact.__name__ for fact in get_args(LeasedFact)} == set(LEASED_FACT_EVENTS)
    told = set().union(*FACT_EVENTS.values(), *LEASED_FACT_EVENTS.values())
    assert told <= set(CHANGES)


def test_every_request_that_changes_structures_says_which_events_it_has() -> None:
    structural = {
        request.__name__
        for request in REQUESTS.values()
        if any(permission.verb in STRUCTURAL for permission in request.declared.permissions)
    }
    assert structural == set(REQUEST_EVENTS), "a new request that changes structures: say here which events tell of it"
    assert set().union(*REQUEST_EVENTS.values()) <= set(CHANGES)


def test_an_event_says_what_when_and_who(bench: Workbench) -> None:
    session = bench.connect("deployment")
    bench.ask(TopicCreate("orders", {"partitions": 3}), session=session)
    event = events(bench)[0]
    assert (event.kind, event.action, event.name, event.by) == ("topic", "created", "orders", "deployment")
    assert (event.time_us, event.details["settings"]["partitions"]) == (bench.now_us, 3)


def test_ids_are_unique_across_restarts(tmp_path: Path) -> None:
    ids = []
    for name in ("orders", "bills"):
        bench = Workbench(str(tmp_path))
        bench.ask(TopicCreate(name))
        ids += [event.id for event in events(bench)]
        bench.close()
    assert len(set(ids[-3:])) == len(ids[-3:])
    assert len(ids) > 3


def test_events_are_recorded_after_a_restart(tmp_path: Path) -> None:
    bench = Workbench(str(tmp_path))
    bench.ask(TopicCreate("orders"))
    assert subjects(bench) == ["$events.topic.created"] * 2
    bench.ask(TopicDelete("orders"))
    bench.close()
    bench = Workbench(str(tmp_path))
    names = [(event.action, event.name) for event in events(bench)]
    assert names == [("created", "orders"), ("created", "headrace.events"), ("deleted", "orders")]
    bench.close()


def test_a_broker_that_nobody_observes_has_no_topic_for_events(bench: Workbench) -> None:
    bench.ask(TopicCreate("orders"))
    assert [info.topic for info in bench.ask(TopicList("*")).topics] == ["orders"]


def test_events_can_be_recorded_from_the_start(tmp_path: Path) -> None:
    bench = Workbench(str(tmp_path), settings=BrokerSettings(record_events=True))
    assert bench.ask(TopicList("*")).topics == []
    bench.ask(TopicCreate("orders"))
    bench.run()
    told = [decode_event(value) for value in bench.values("headrace.events")]
    assert [(event.action, event.name) for event in told] == [("created", "orders"), ("created", "headrace.events")]
    bench.close()


def test_a_topic_for_events_that_somebody_else_created_gets_those_in_memory(bench: Workbench) -> None:
    bench.ask(TopicCreate("orders"))
    bench.ask(TopicCreate("headrace.events"))
    told = [decode_event(value) for value in bench.values("headrace.events")]
    assert [event.name for event in told] == ["orders", "headrace.events"]
    settings = bench.ask(TopicList("headrace.events")).topics[0].settings
    assert settings["retain_bytes"] == 16 << 20


def test_tenants_see_their_own_events_only(bench: Workbench) -> None:
    acme = bench.connect("a", tenant="acme")
    bench.ask(TopicCreate("orders"), session=acme)
    bench.ask(SubscriptionCreate("orders"), session=acme)
    bench.ask(ServiceRegister(ServiceDefinition("billing", "i1")), session=acme)
    bench.ask(TopicCreate("secret"))
    assert [event.name for event in events(bench)] == ["secret", "headrace.events"]
    told = events(bench, acme)
    assert [event.name for event in told] == ["orders", "default", "billing", "headrace.events"]
    assert told[1].details["topic"] == "orders"
    assert "acme" not in str(told)


def test_routes_end_with_their_source(bench: Workbench) -> None:
    bench.ask(ROUTE)
    bench.ask(TopicDelete("orders"))
    told = [(event.kind, event.action) for event in events(bench) if event.action == "deleted"]
    assert sorted(told) == [("route", "deleted"), ("topic", "deleted")]


def test_live_observers_hear_of_changes_without_a_topic(bench: Workbench) -> None:
    heard: list[tuple[str, str]] = []

    def emit(subject: str, columns: Any, _: int) -> None:
        heard.append((subject, decode_event(columns.values[0]).name))

    bench.broker._observability.events.emit = emit
    bench.ask(TopicCreate("orders"), session=bench.connect("a", tenant="acme"))
    assert heard == [("acme/$events.topic.created", "orders")]


def test_observers_subscribe_to_subjects(bench: Workbench) -> None:
    """A live subscription of a tenant gets its events, and no other tenant's."""
    session, acme = bench.connect("observer"), bench.connect("observer", tenant="acme")
    bench.ask(SubjectSubscribe("$events.topic.*"), session=session)
    bench.ask(SubjectSubscribe("$events.>"), session=acme)
    bench.ask(TopicCreate("orders"))
    (pushed,) = bench.pushed
    assert decode_event(parse(memoryview(pushed.body)).columns().values[0]).name == "orders"
    bench.ask(ServiceRegister(ServiceDefinition("billing", "i1")))
    assert len(bench.pushed) == 1


def test_observers_hear_of_a_change_when_the_journal_has_it(tmp_path: Path) -> None:
    bench = Workbench(str(tmp_path))
    heard: list[str] = []
    bench.broker._observability.events.emit = lambda *event: heard.append(event[0])
    bench.syncing_later = True
    answer = bench.begin(TopicCreate("orders"))
    while not answer.resolved:
        assert heard == []
        assert bench.step()
    bench.run()
    assert heard == ["default/$events.topic.created"]
    bench.close()


def test_a_burst_is_one_batch_per_turn(bench: Workbench) -> None:
    events(bench)
    for number in range(300):
        bench.begin(TopicCreate(f"t{number}"))
    bench.run()
    assert len(events(bench)) == 301
    assert len(bench.batches("headrace.events")) < 10


def test_order_is_kept_in_large_bursts(bench: Workbench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bus_events, "_TOGETHER", 7)
    events(bench)
    for number in range(50):
        bench.begin(TopicCreate(f"t{number}"))
    bench.run()
    assert [event.name for event in events(bench)][1:] == [f"t{number}" for number in range(50)]


def test_too_many_are_counted_and_dropped(bench: Workbench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bus_events, "EVENTS_PENDING_MAX", 3)
    events(bench)
    for number in range(10):
        bench.begin(TopicCreate(f"t{number}"))
    bench.run()
    told = events(bench)[1:]
    assert [event.name for event in told] == ["t0", "t1", "t2"]
    bench.ask(TopicCreate("last"))
    dropped = [event for event in events(bench) if event.kind == "event"]
    assert [event.details for event in dropped] == [{"count": 7}]


def test_a_backlog_in_memory_is_bounded(bench: Workbench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bus_events, "_BACKLOG", 5)
    for number in range(20):
        bench.ask(TopicCreate(f"t{number}"))
    assert [event.name for event in events(bench)] == [f"t{n}" for n in range(15, 20)] + ["headrace.events"]


def test_events_that_cannot_be_stored_do_not_fail_the_change(
    bench: Workbench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    events(bench)
    active = bench.broker._topics.active(bench.broker._topics.get("headrace.events"), 0)

    def refuse(*_: object) -> None:
        raise HeadraceError("no room")

    monkeypatch.setattr(active, "publish", refuse)
    with caplog.at_level(logging.WARNING):
        assert bench.ask(TopicCreate("orders")).topic == "orders"
    assert "events not recorded  tenant=default" in caplog.text
    monkeypatch.undo()
    bench.ask(TopicCreate("bills"))
    assert [event.name for event in events(bench)] == ["headrace.events", "bills"]


def test_a_deleted_topic_for_events_ends_the_recording(bench: Workbench) -> None:
    events(bench)
    bench.ask(TopicDelete("headrace.events"))
    bench.ask(TopicCreate("orders"))
    assert [info.topic for info in bench.ask(TopicList("*")).topics] == ["orders"]
    assert [event.name for event in events(bench)] == ["headrace.events", "orders", "headrace.events"]


def test_what_is_no_event_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="no event of the bus"):
        decode_event(b"{}")


def test_events_of_logging_levels_say_which_one_was_reset(bench: Workbench) -> None:
    bench.ask(LogLevelSet(LogLevelRule("topic", "orders", "debug")))
    bench.ask(LogLevelSet(LogLevelRule("producer", "shop", "error")))
    bench.ask(LogLevelReset("producer", "nobody"))
    bench.ask(LogLevelReset("topic", "orders"))
    told = [(event.action, event.name, event.details) for event in events(bench) if event.kind == "log_level"]
    assert told[2:] == [("reset", "topic", {"pattern": "orders", "level": "debug"})]
    bench.ask(LogLevelSet(LogLevelRule("broker", "", "error")))
    bench.ask(LogLevelReset())
    bench.ask(LogLevelReset())
    reset = [
        (event.name, event.details["level"]) for event in events(bench) if event.subject == "$events.log_level.reset"
    ]
    assert reset[1:] == [("broker", "error"), ("producer", "error")]


def test_every_kind_of_event_is_known() -> None:
    assert {subject.partition(".")[0] for subject in CHANGES} | {"event"} == set(EVENT_KINDS)


WRITES: dict[str, Callable[[str], tuple[Request[Any], bool]]] = {
    "publish": lambda topic: (Publish(topic, 0), True),
    "publish once": lambda topic: (PublishOnce(topic, b"k" * 16, b"r" * 16, []), True),
    "stage": lambda topic: (TransactionStage("t", 1, topic, 0), True),
    "schedule": lambda topic: (ScheduleSet(ScheduleDefinition("beat", topic, "every 1h")), False),
    "route": lambda topic: (RouteSet(RouteDefinition("r", [topic], source="orders", key="a")), False),
    "errors of a route": lambda topic: (
        RouteSet(RouteDefinition("r", ["bills"], source="orders", key="a", error_topic=topic)),
        False,
    ),
}


@pytest.mark.parametrize("way", WRITES)
@pytest.mark.parametrize("topic", ["headrace.events", "headrace.errors", "headrace.results", "acme/headrace.events"])
def test_only_the_broker_writes_to_its_topics(bench: Workbench, topic: str, way: str) -> None:
    events(bench)
    bench.ask(TransactionBegin("t"))
    if "route" in way and "/" in topic:
        pytest.skip("a route stays in its tenant anyway")
    request, has_body = WRITES[way](topic)
    body = bench.batch([b"oops"]).data if has_body else b""
    with pytest.raises(InvalidArgument, match="only the broker itself writes to"):
        bench.ask(request, body)
    with pytest.raises(InvalidArgument, match="only the broker itself writes to"):
        bench.ask(WRITES[way](bare_name(topic))[0], body, session=bench.connect(tenant="acme"))


def test_clients_write_to_other_topics_of_headrace(bench: Workbench) -> None:
    for topic in ("headrace.ingress", "headrace.pipelines", "headrace.archive"):
        bench.publish(topic, [b"x"])


def test_readers_skip_what_is_no_event(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(topics, "BROKER_TOPICS", frozenset())  # as before, when everybody could write there
    with headrace.open(":memory:") as bus:
        bus.events.record()
        bus.publish("headrace.events", b"oops")
        bus.create_topic("orders")
        assert [event.name for event in bus.events.history()] == ["headrace.events", "orders"]
        assert "no event" in caplog.text
        with bus.events.follow("earliest", timeout=0.5) as following:
            assert [message.value.name for message in following] == ["headrace.events", "orders"]


@pytest.mark.parametrize("topic", ["headrace.errors", "headrace.audit"])
def test_a_refused_publish_does_not_make_a_topic_of_the_broker(bench: Workbench, topic: str) -> None:
    with pytest.raises(InvalidArgument, match="only the broker itself writes to"):
        bench.publish(topic, [b"oops"])
    with pytest.raises(InvalidArgument, match="only the broker itself writes to"):
        bench.ask(PartitionCount(topic))
    with pytest.raises(TopicNotFound):
        bench.ask(TopicDescribe(topic))


def test_a_publish_to_a_partition_that_a_new_topic_does_not_have_makes_no_topic(bench: Workbench) -> None:
    begun = bench.ask(TransactionBegin("t"))
    with pytest.raises(PartitionNotFound, match="no topic orders, and a new one has no partition 99; it has 0 to"):
        bench.publish("orders", [b"oops"], partition=99)
    with pytest.raises(PartitionNotFound, match="a new one has no partition 99"):
        bench.ask(TransactionStage("t", begun.epoch, "orders", 99), bench.batch([b"oops"]).data)
    batch = bench.batch([b"oops"]).data
    once = PublishOnce("orders", b"k" * 16, b"r" * 16, [PartitionBatch(99, len(batch))])
    with pytest.raises(PartitionNotFound, match="a new one has no partition 99"):
        bench.ask(once, batch)
    with pytest.raises(TopicNotFound):
        bench.ask(TopicDescribe("orders"))
