"""Registered services: who is there, for how long, and who may use the bus."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

import headrace
from headrace.broker import service_discovery, services
from headrace.broker.facts import BrokerState, decode_fact, encode_fact
from headrace.broker.ports import Session
from headrace.model.batch import NO_PRODUCER
from headrace.model.bus_event import EventsRecord
from headrace.model.errors import (
    HeadraceError,
    InvalidArgument,
    LimitExceeded,
    NoResponders,
    NotRegistered,
    ResponderLost,
    ServiceNotFound,
)
from headrace.model.identity import Identity
from headrace.model.leasing import Lease, SubscriptionCreate
from headrace.model.reading import Fetch, StreamCredit, StreamOpen
from headrace.model.requests import (
    GroupList,
    Info,
    Publish,
    TopicCreate,
    TopicDelete,
    TopicDescribe,
    TopicList,
    TransactionBegin,
)
from headrace.model.service_requests import (
    ErrorReport,
    ServiceDefinition,
    ServiceDeregister,
    ServiceDescribe,
    ServiceError,
    ServiceInfo,
    ServiceList,
    ServicePolicyAlter,
    ServiceRegister,
)
from headrace.model.standing_lease import LeaseEnd, LeaseOpen
from headrace.model.subject_requests import RequestSend, ServeOpen, SubjectEnd, SubjectPublish, SubjectSubscribe
from headrace.testing.workbench import Workbench


@pytest.fixture
def bench() -> Iterator[Workbench]:
    bench = Workbench()
    yield bench
    bench.close()


def remote(bench: Workbench, name: str = "remote", tenant: str = "", identity: str = "") -> Session:
    who = {"identity": Identity(identity)} if identity else {}
    return bench.broker.connect(bench.pushed.append, name, bench.now_us, tenant=tenant, **who)


def register(
    bench: Workbench, name: str = "billing", instance: str = "i1", session: Session | None = None, **more: Any
) -> None:
    ttl_ms = more.pop("ttl_ms", 10_000)
    bench.ask(ServiceRegister(ServiceDefinition(name, instance, **more), ttl_ms), session=session)


def found(bench: Workbench, session: Session | None = None, **wanted: str) -> list[str]:
    return [info.name for info in bench.ask(ServiceList(**wanted), session=session).services]


def describe(bench: Workbench, name: str = "billing") -> ServiceInfo:
    info = bench.ask(ServiceDescribe(name))
    assert isinstance(info, ServiceInfo)
    return info


def is_there(bench: Workbench, instance: str = "i1", name: str = "billing") -> bool:
    try:
        return instance in [one.instance for one in describe(bench, name).instances]
    except ServiceNotFound:
        return False


def test_a_service_says_what_it_is(bench: Workbench) -> None:
    schema = {"type": "object", "required": ["id"]}
    session = remote(bench, "host-1")
    register(
        bench,
        session=session,
        version="1.2",
        metadata={"region": "eu"},
        produces=["bills"],
        consumes=["orders"],
        serves=["price.quote"],
        schemas={"bills": schema},
    )
    info = describe(bench)
    assert (info.produces, info.consumes, info.serves) == (["bills"], ["orders"], ["price.quote"])
    assert info.schemas == {"bills": schema}
    one = info.instances[0]
    assert (one.instance, one.version, one.client, one.metadata) == ("i1", "1.2", "host-1", {"region": "eu"})
    assert (one.registered_us, one.ttl_ms, one.connected) == (bench.now_us, 10_000, True)


def test_several_instances_are_one_service(bench: Workbench) -> None:
    register(bench, instance="i1", produces=["bills"], schemas={"bills": {"title": "old"}})
    bench.tick(1)
    register(bench, instance="i2", produces=["reminders"], schemas={"bills": {"title": "new"}})
    info = describe(bench)
    assert [one.instance for one in info.instances] == ["i1", "i2"]
    assert info.produces == ["bills", "reminders"]
    assert info.schemas == {"bills": {"title": "new"}}
    assert bench.ask(ServiceList()).services[0].schemas == {}


def test_services_are_found_by_what_they_do(bench: Workbench) -> None:
    register(bench, "billing", produces=["bills"], consumes=["orders"])
    register(bench, "shop", produces=["orders"], serves=["price.quote"])
    assert found(bench) == ["billing", "shop"]
    assert found(bench, name="shop") == ["shop"]
    assert found(bench, produces="orders") == ["shop"]
    assert found(bench, consumes="orders") == ["billing"]
    assert found(bench, serves="price.quote") == ["shop"]
    register(bench, "stock", serves=["stock.*.count", "price.>"])
    assert found(bench, serves="price.quote") == ["shop", "stock"]
    assert found(bench, serves="stock.apples.count") == ["stock"]
    assert found(bench, serves="stock.apples") == []
    assert found(bench, produces="bills", consumes="bills") == []
    assert found(bench, name="nobody") == []


def test_an_instance_expires_without_a_sign_of_life(bench: Workbench) -> None:
    session = remote(bench)
    register(bench, session=session)
    bench.tick(9)
    bench.broker.touch(session, bench.now_us)
    bench.tick(9)
    assert is_there(bench)
    bench.tick(1.1)
    assert not is_there(bench)
    with pytest.raises(ServiceNotFound, match="headrace service list"):
        describe(bench)


def test_the_broker_wakes_when_an_instance_expires(bench: Workbench) -> None:
    register(bench, ttl_ms=300)
    assert bench.broker.tick(bench.now_us) <= bench.now_us + 300_000


def test_an_instance_stays_through_a_reconnect(bench: Workbench) -> None:
    session = remote(bench)
    register(bench, session=session)
    registered_us = describe(bench).instances[0].registered_us
    bench.broker.disconnect(session, bench.now_us)
    bench.tick(5)
    assert [one.connected for one in describe(bench).instances] == [False]
    again = remote(bench)
    register(bench, session=again)
    bench.tick(9)
    one = describe(bench).instances[0]
    assert (one.connected, one.registered_us) == (True, registered_us)


def test_a_killed_instance_vanishes(bench: Workbench) -> None:
    session = remote(bench)
    register(bench, session=session)
    bench.broker.disconnect(session, bench.now_us)
    bench.tick(10.1)
    assert not is_there(bench)


def test_one_that_expired_while_connected_is_back_with_its_next_sign_of_life(bench: Workbench) -> None:
    session = remote(bench)
    register(bench, session=session)
    bench.tick(60)
    assert not is_there(bench)
    bench.broker.touch(session, bench.now_us)
    assert is_there(bench)
    bench.tick(10.1)
    assert not is_there(bench)


def test_one_that_expired_does_not_displace_its_successor(bench: Workbench) -> None:
    session, other = remote(bench), remote(bench, "other")
    register(bench, session=session)
    bench.tick(60)
    register(bench, session=other, version="2")
    bench.broker.touch(session, bench.now_us)
    assert [one.version for one in describe(bench).instances] == ["2"]


def test_deregistering_takes_effect_at_once_for_all_sessions_of_the_instance(bench: Workbench) -> None:
    first, second = remote(bench), remote(bench)
    register(bench, session=first)
    register(bench, session=second)
    bench.broker.disconnect(first, bench.now_us)
    assert describe(bench).instances[0].connected
    bench.ask(ServiceDeregister("billing", "i1"), session=second)
    assert not is_there(bench)
    assert not second.services
    bench.ask(ServiceDeregister("billing", "i1"), session=second)  # without effect


def test_an_instance_is_found_by_the_client_that_registered_it_last(bench: Workbench) -> None:
    registry = bench.broker._services
    for number in range(5):
        register(bench, session=remote(bench, f"client-{number}"))
    assert registry.service_of("default", "client-3") is None
    live = registry.service_of("default", "client-4")
    assert live is not None
    assert live.key == ("billing", "i1")
    bench.tick(60)
    assert registry.service_of("default", "client-4") is None


def test_nobody_deregisters_anothers_instance(bench: Workbench) -> None:
    register(bench, session=remote(bench))
    bench.ask(ServiceDeregister("billing", "i1"), session=remote(bench, "other"))
    assert is_there(bench)


def test_any_session_of_the_same_identity_deregisters_if_it_says_so(bench: Workbench) -> None:
    register(bench, session=remote(bench, identity="ann"))
    with pytest.raises(InvalidArgument, match="registered by ann"):
        bench.ask(ServiceDeregister("billing", "i1", any_session=True), session=remote(bench, identity="bob"))
    assert is_there(bench)
    bench.ask(ServiceDeregister("billing", "i1", any_session=True), session=remote(bench, identity="ann"))
    assert not is_there(bench)


def test_an_instance_belongs_to_an_identity(bench: Workbench) -> None:
    register(bench, session=remote(bench, identity="ann"))
    with pytest.raises(InvalidArgument, match="registered by ann"):
        register(bench, session=remote(bench, identity="bob"))


def test_the_number_of_instances_is_bounded(bench: Workbench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(services, "SERVICE_INSTANCES_MAX", 3)
    for number in range(3):
        register(bench, instance=f"i{number}")
    with pytest.raises(LimitExceeded):
        register(bench, instance="i3")
    bench.ask(ServiceDeregister("billing", "i0"))
    register(bench, instance="i3")


@pytest.mark.parametrize(
    ("definition", "ttl_ms", "text"),
    [
        (ServiceDefinition("", "i1"), 1000, "cannot name a service"),
        (ServiceDefinition("a*", "i1"), 1000, "cannot name a service"),
        (ServiceDefinition("billing", ""), 1000, "cannot name a service instance"),
        (ServiceDefinition("billing", "i1", produces=["*"]), 1000, "cannot name a topic"),
        (ServiceDefinition("billing", "i1", serves=["a..b"]), 1000, "a..b"),
        (ServiceDefinition("billing", "i1", metadata={"a": "x" * 16_384}), 1000, "leave out some metadata"),
        (ServiceDefinition("billing", "i1", "1" * 101), 1000, "up to 100 characters"),
        (ServiceDefinition("billing", "i1"), 99, "ttl_ms must be"),
        (ServiceDefinition("billing", "i1"), 3_600_001, "ttl_ms must be"),
    ],
)
def test_what_is_refused(bench: Workbench, definition: ServiceDefinition, ttl_ms: int, text: str) -> None:
    with pytest.raises(InvalidArgument, match=text):
        bench.ask(ServiceRegister(definition, ttl_ms))
    assert found(bench) == []


def test_what_services_say_of_themselves_is_bounded(bench: Workbench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(services, "SERVICES_TENANT_BYTES_MAX", 4000)
    monkeypatch.setattr(services, "SERVICES_BYTES_MAX", 6000)
    large = {"a": "x" * 1800}
    acme = remote(bench, tenant="acme")
    for number in range(2):
        register(bench, instance=f"i{number}", metadata=large)
    with pytest.raises(LimitExceeded, match="leave out metadata"):
        register(bench, instance="i2", metadata=large)
    register(bench, instance="i0", metadata=large, version="2")
    register(bench, session=acme, metadata=large)
    with pytest.raises(LimitExceeded):
        register(bench, instance="i2", session=acme, metadata=large)
    register(bench, instance="i1")  # says less of itself
    register(bench, instance="i2", session=acme, metadata=large)
    for session in (None, acme):
        for instance in ("i0", "i1", "i2"):
            bench.ask(ServiceDeregister("billing", instance), session=session)
    assert bench.broker._services._bytes == 0
    assert bench.broker._services._tenant_bytes == {}


def test_large_services_are_listed_and_described(bench: Workbench) -> None:
    for number in range(150):
        metadata = {"a": "x" * 14_000}
        register(bench, instance=f"i{number:03}", metadata=metadata, produces=[f"t{number}-{n}" for n in range(100)])
    (listed,) = bench.ask(ServiceList()).services
    assert (len(listed.instances), listed.instances_total, listed.truncated) == (100, 150, True)
    assert listed.instances[0].metadata == {}
    assert len(listed.produces) == 100
    assert len(msgspec.msgpack.encode(listed)) < 100_000
    assert found(bench, produces="t149-99") == ["billing"]
    assert found(bench, produces="t150-1") == []
    info = describe(bench)
    assert info.instances[0].metadata == {"a": "x" * 14_000}
    assert (len(info.instances) < 150, info.instances_total, info.truncated) == (True, 150, True)
    assert len(msgspec.msgpack.encode(info)) < 2 << 20
    for number in range(150):
        schemas = {f"s{number}": {"title": "x" * 14_000}}
        register(bench, "shop", instance=f"i{number}", schemas=schemas)
    shop = describe(bench, "shop")
    assert (len(shop.instances), shop.truncated) == (150, True)
    assert 50 < len(shop.schemas) < 100
    assert not bench.ask(ServiceList("nobody")).services


@pytest.mark.parametrize("tenant", ["", "acme"])
def test_lists_have_pages(bench: Workbench, tenant: str) -> None:
    session = remote(bench, tenant=tenant)
    for number in range(450):
        produces = [f"topic-of-a-long-name-{number}-{n}" for n in range(100)]
        register(bench, f"s{number:03}", session=session, produces=produces)
    names, after, pages = list[str](), "", 0
    while pages == 0 or after:
        page = bench.ask(ServiceList(after=after), session=session)
        assert len(msgspec.msgpack.encode(page)) < 600_000
        names += [info.name for info in page.services]
        after, pages = page.next, pages + 1
    assert names == [f"s{number:03}" for number in range(450)]
    assert pages == 3


def test_many_instances_are_listed_in_slices(bench: Workbench) -> None:
    for number in range(450):
        register(bench, f"s{number:03}")
    assert len(found(bench)) == 450


def test_tenants_are_isolated(bench: Workbench) -> None:
    acme, zeta = remote(bench, tenant="acme"), remote(bench, tenant="zeta")
    register(bench, session=acme, produces=["bills"])
    assert found(bench, acme) == ["billing"]
    assert found(bench, acme, produces="bills") == ["billing"]
    assert found(bench, zeta) == found(bench) == []
    info = bench.ask(ServiceDescribe("billing"), session=acme)
    assert (info.name, info.produces) == ("billing", ["bills"])
    with pytest.raises(ServiceNotFound, match="service billing is"):
        bench.ask(ServiceDescribe("billing"), session=zeta)
    bench.ask(ServiceDeregister("billing", "i1"), session=acme)
    assert found(bench, acme) == []


# The policy.


def publish(bench: Workbench, session: Session) -> None:
    bench.ask(Publish("orders", 0), bench.batch([b"a"], NO_PRODUCER).data, session=session)


def test_with_the_policy_only_registered_services_use_the_bus(bench: Workbench) -> None:
    session = remote(bench)
    publish(bench, session)
    assert bench.ask(ServicePolicyAlter(True)).require_registration
    assert bench.ask(ServiceList()).require_registration
    with pytest.raises(NotRegistered, match=r"bus\.services\.register.*headrace service policy") as refused:
        publish(bench, session)
    assert refused.value.code == "not_registered"
    register(bench, session=session)
    publish(bench, session)
    bench.ask(ServiceDeregister("billing", "i1"), session=session)
    with pytest.raises(NotRegistered):
        publish(bench, session)
    bench.ask(ServicePolicyAlter(False))
    publish(bench, session)


@pytest.mark.parametrize(
    "request_",
    [
        Fetch("orders", 0, 0),
        Fetch("headrace.events", 0, 0),
        Lease("orders"),
        TopicCreate("bills"),
        TopicDelete("orders"),
        TopicDescribe("new", create=True),
        SubscriptionCreate("orders"),
        TransactionBegin("t"),
        ErrorReport("billing", "i1", [ServiceError("a", "b")]),
    ],
    ids=lambda request: type(request).__name__,
)
def test_what_the_unregistered_may_not_do_from_elsewhere(bench: Workbench, request_: Any) -> None:
    bench.ask(TopicCreate("orders"))
    bench.ask(EventsRecord())
    bench.ask(ServicePolicyAlter(True))
    with pytest.raises(NotRegistered):
        bench.ask(request_, session=remote(bench))


@pytest.mark.parametrize(
    "request_",
    [Info(), TopicList("*"), TopicDescribe("orders"), GroupList(), ServiceList(), EventsRecord()],
    ids=lambda request: type(request).__name__,
)
def test_what_everybody_may_do(bench: Workbench, request_: Any) -> None:
    bench.ask(TopicCreate("orders"))
    bench.ask(ServicePolicyAlter(True))
    bench.ask(request_, session=remote(bench))


def test_the_administrator_on_the_brokers_machine_is_not_locked_out(bench: Workbench) -> None:
    bench.ask(ServicePolicyAlter(True))
    assert bench.session.is_local
    bench.ask(TopicCreate("orders"))
    bench.ask(SubscriptionCreate("orders"))
    bench.ask(TopicDelete("orders"))
    bench.ask(EventsRecord())
    bench.ask(Fetch("headrace.events", 0, 0))
    with pytest.raises(NotRegistered):
        publish(bench, bench.session)
    bench.ask(ServicePolicyAlter(False), session=remote(bench))
    publish(bench, bench.session)


@pytest.mark.parametrize("cause", ["policy", "deregistered"])
@pytest.mark.parametrize("tenant", ["", "acme"])
def test_what_the_unregistered_have_open_ends(bench: Workbench, cause: str, tenant: str) -> None:
    session, other = remote(bench, tenant=tenant), remote(bench, "other", tenant)
    bench.ask(TopicCreate("orders"), session=session)
    bench.ask(SubscriptionCreate("orders"), session=session)
    register(bench, "shop", session=other)
    if cause == "deregistered":
        register(bench, session=session)
        bench.ask(ServicePolicyAlter(True), session=session)
    streams = {one: bench.begin(StreamOpen("orders", 0, 0, 1000, 1), session=one) for one in (session, other)}
    fetches = {one: bench.begin(Fetch("orders", 0, 0, wait_ms=60_000), session=one) for one in (session, other)}
    leases = {one: bench.begin(Lease("orders", wait_ms=60_000), session=one) for one in (session, other)}
    bench.ask(LeaseOpen("orders", credit_messages=10), session=session)
    for one in (session, other):
        bench.ask(SubjectSubscribe("prices.>"), session=one)
        bench.ask(ServeOpen(f"quote.{one.client}"), session=one)
    asked = bench.begin(RequestSend("quote.remote", 60_000), session=other)
    bench.run()
    woken: list[object] = []
    streams[session].start(lambda: woken.append("stream"))
    fetches[session].start(lambda: woken.append("fetch"))
    if cause == "deregistered":
        bench.ask(ServiceDeregister("billing", "i1"), session=session)
    else:
        bench.ask(ServicePolicyAlter(True), session=session)
    assert sorted(woken) == ["fetch", "stream"]
    bench.ask(StreamCredit(1, 1 << 20), session=other)
    with pytest.raises(NotRegistered):
        streams[session].read(1000, bench.now_us)
    with pytest.raises(NotRegistered):
        fetches[session].read(bench.now_us)
    assert isinstance(leases[session].outcome, NotRegistered)
    (end,) = [pushed for pushed in bench.pushed if isinstance(pushed, LeaseEnd)]
    assert end.code == "not_registered"
    ends = [pushed for pushed in bench.pushed if isinstance(pushed, SubjectEnd)]
    assert [(end.code, end.subscription is None, end.responder is None) for end in ends] == [
        ("not_registered", False, True),
        ("not_registered", True, False),
    ]
    assert isinstance(asked.outcome, ResponderLost)
    assert bench.ask(SubjectPublish("prices.apples"), bench.batch([b"1"]).data, session=other).receivers == 1
    with pytest.raises(NoResponders):
        bench.ask(RequestSend("quote.remote", 60_000), session=other)
    assert not leases[other].resolved
    bench.ask(Publish("orders", 0), bench.batch([b"secret"]).data, session=other)
    assert streams[other].read(1000, bench.now_us) is not None
    assert fetches[other].read(bench.now_us) is not None
    assert leases[other].resolved, "nobody else gets the message"


def test_a_local_reader_of_events_goes_on_with_the_policy(bench: Workbench) -> None:
    bench.session.is_local = True
    bench.ask(EventsRecord())
    bench.publish("orders", [b"x"])
    own, orders = bench.open_stream("headrace.events"), bench.open_stream("orders")
    bench.ask(ServicePolicyAlter(True))
    assert own.read(1 << 20, bench.now_us) is not None
    with pytest.raises(NotRegistered):
        orders.read(1000, bench.now_us)


def test_each_tenant_has_its_own_policy(bench: Workbench) -> None:
    acme, zeta = remote(bench, tenant="acme"), remote(bench, tenant="zeta")
    bench.ask(ServicePolicyAlter(True), session=acme)
    with pytest.raises(NotRegistered, match="the tenant acme"):
        publish(bench, acme)
    publish(bench, zeta)
    publish(bench, remote(bench))
    assert not bench.ask(ServiceList()).require_registration


def test_the_policy_survives_a_restart_and_a_snapshot(tmp_path: Path) -> None:
    bench = Workbench(str(tmp_path))
    acme = bench.connect("a", tenant="acme")
    bench.ask(ServicePolicyAlter(True), session=acme)
    bench.ask(ServicePolicyAlter(True))
    bench.ask(ServicePolicyAlter(False))
    state = BrokerState()
    for fact in bench.broker._ledger.state.facts():
        state.apply(decode_fact(encode_fact(fact)))
    assert set(state.service_policies) == {"acme"}
    bench = Workbench(str(tmp_path))  # the one before was killed
    with pytest.raises(NotRegistered):
        publish(bench, remote(bench, tenant="acme"))
    publish(bench, remote(bench))
    bench.close()


def test_instances_register_again_after_a_restart(tmp_path: Path) -> None:
    bench = Workbench(str(tmp_path))
    register(bench)
    bench = Workbench(str(tmp_path))
    assert not is_there(bench)
    register(bench)
    assert is_there(bench)
    bench.close()


def test_a_policy_that_cannot_be_written_does_not_apply(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Workbench(str(tmp_path))

    def fail(*_: object) -> None:
        raise HeadraceError("no journal")

    monkeypatch.setattr(bench.broker._ledger, "record", fail)
    with pytest.raises(HeadraceError):
        bench.ask(ServicePolicyAlter(True))
    monkeypatch.undo()
    publish(bench, remote(bench))
    bench.close()


def test_a_client_follows_the_pages_of_a_list(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service_discovery, "_PAGE_BYTES", 1)
    with headrace.open(":memory:") as bus:
        for name in ("billing", "shop", "stock"):
            bus.services.register(name, consumes=["orders"])
        assert [info.name for info in bus.services.list()] == ["billing", "shop", "stock"]
        assert [info.name for info in bus.services.find(consumes="orders")] == ["billing", "shop", "stock"]
