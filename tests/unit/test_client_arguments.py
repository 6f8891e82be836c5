"""Arguments that cannot be used and brokers that cannot be reached are told as errors of Headrace; nothing breaks."""

import asyncio
import pickle
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta
from typing import Any

import msgspec
import pytest

import headrace
from headrace import errors
from headrace.client.connection.addresses import parse_address
from headrace.model.arguments import shown
from headrace.server import ServerSettings

NUMBERS: list[Any] = [
    float("nan"),
    float("inf"),
    10**30,
    -1,
    "x",
    b"",
    1.5,
    timedelta.max,
    datetime(2030, 1, 1),
    10**5000,
]
NAMES: list[Any] = ["\udc80", "a" * 1000, "", 5, b"t", "x\0"]

Use = Callable[[Any, Any], Any]

WITH_NUMBERS: dict[str, Use] = {
    "publish timestamp": lambda bus, bad: bus.publish("t", b"", timestamp=_unless(bad, -1)),
    "publish due": lambda bus, bad: bus.publish("t", b"", due=_unless(bad, -1)),
    "publish priority": lambda bus, bad: bus.publish("t", b"", priority=_unless(bad, -1)),
    "publish partition": lambda bus, bad: bus.publish("t", b"", partition=bad),
    "publish expected_offset": lambda bus, bad: bus.publish("t", b"", expected_offset=bad),
    "publish_many values": lambda bus, bad: bus.publish_many("t", _unless(bad, b"")),
    "publish_many keys": lambda bus, bad: bus.publish_many("t", [b""], keys=_unless(bad, "x")),
    "producer linger": lambda bus, bad: bus.producer("t", linger=_unless(bad, 1.5)),
    "producer batch_bytes": lambda bus, bad: bus.producer("t", batch_bytes=bad),
    "subscribe session_timeout": lambda bus, bad: bus.subscribe("t", session_timeout=_unless(bad, 1.5)),
    "subscribe partitions": lambda bus, bad: bus.subscribe("t", partitions=_unless(bad, b"")),
    "subscribe start": lambda bus, bad: bus.subscribe("t", start=bad),
    "lease max": lambda bus, bad: bus.queue("t").lease(bad),
    "lease lease": lambda bus, bad: bus.queue("t").lease(1, lease=_unless(bad, 1.5)),
    "jobs prefetch": lambda bus, bad: bus.queue("t").jobs(bad),
    "ack": lambda bus, bad: bus.queue("t").ack(_unless(bad, b"")),
    "ack many": lambda bus, bad: bus.queue("t").ack([bad]),
    "find limit": lambda bus, bad: bus.queue("t").find(limit=_unless(bad, 10**30)),
    "find messages": lambda bus, bad: bus.queue("t").find(messages=_unless(bad, b"")),
    "schedule at": lambda bus, bad: bus.schedule("t", b"", at=_unless(bad, -1)),
    "schedule in": lambda bus, bad: bus.schedule("t", b"", in_=_unless(bad, 1.5, -1)),
    "fetch offset": lambda bus, bad: bus.fetch("t", 0, bad),
    "trim": lambda bus, bad: bus.trim_topic("t", bad),
    "commit": lambda bus, bad: bus.commit("g", bad),
    "transaction timeout": lambda bus, bad: bus.transaction("x", timeout=_unless(bad, 1.5)),
}
WITH_TIMEOUTS: dict[str, Use] = {
    "connect timeout": lambda _, wait: headrace.open(":memory:", timeout=wait).close(),
    "app": lambda bus, wait: headrace.App(bus, wait=wait),
    "producer": lambda bus, wait: bus.producer("t", timeout=wait).publish(b"x"),
    "flush": lambda bus, wait: _sending(bus).flush(wait),
    "close": lambda bus, wait: _sending(bus).close(wait),
    "result": lambda bus, wait: _sending(bus).send(b"x").result(wait),
    "results": lambda bus, wait: _sending(bus).send_many([b"x"]).result(wait),
    "subscribe": lambda bus, wait: next(iter(bus.subscribe("t", timeout=wait))),
    "jobs": lambda bus, wait: next(iter(bus.queue("t", "j").jobs(timeout=wait))),
    "fetch": lambda bus, wait: bus.fetch("t", 0, 0, wait=wait),
    "lease": lambda bus, wait: bus.queue("t", "l").lease(wait=wait),
    "leased": lambda bus, wait: bus.queue("t", "l").leased(wait=wait).__enter__(),
    "commit": lambda bus, wait: _committed(bus, wait),
}
WITH_NAMES: dict[str, Use] = {
    "publish": lambda bus, bad: bus.publish(bad, b""),
    "lease": lambda bus, bad: bus.queue(bad).lease(),
    "subscribe": lambda bus, bad: next(iter(bus.subscribe(bad, timeout=0))),
    "group": lambda bus, bad: next(iter(bus.subscribe("t", group=bad, timeout=0))),
    "describe": lambda bus, bad: bus.describe_topic(bad),
    "transaction": lambda bus, bad: bus.transaction(bad).begin(),
    "cron": lambda bus, bad: bus.cron_add(bad, "t", "@daily"),
    "compression": lambda bus, bad: bus.producer(compression=bad),
    "durability": lambda bus, bad: bus.publish("t", b"", durability=bad),
    "headers": lambda bus, bad: bus.publish("t", b"", headers=bad or 5),
    "connect": lambda _, bad: headrace.connect(bad),
    "scheduled": lambda bus, bad: bus.scheduled(bad),
}


WRONG_TYPES: dict[str, Callable[[Any, Any], Any]] = {
    "publish": lambda bus, bad: bus.publish(bad, b"x"),
    "publish_many": lambda bus, bad: bus.publish_many(bad, [b"x"]),
    "describe_topic": lambda bus, bad: bus.describe_topic(bad),
    "create_topic": lambda bus, bad: bus.create_topic(bad),
    "delete_topic": lambda bus, bad: bus.delete_topic(bad),
    "topics": lambda bus, bad: bus.topics(bad),
    "offsets": lambda bus, bad: bus.offsets(bad),
    "fetch": lambda bus, bad: bus.fetch(bad, 0, 0),
    "fetch partition": lambda bus, bad: bus.fetch("t", [bad], 0),
    "describe_group": lambda bus, bad: bus.describe_group(bad),
    "delete_group": lambda bus, bad: bus.delete_group(bad),
    "commit": lambda bus, bad: bus.commit(bad, {("t", 0): 1}),
    "lease": lambda bus, bad: bus.queue(bad).lease(1),
    "lease subscription": lambda bus, bad: bus.queue("t", bad).lease(1),
    "lease bytes_max": lambda bus, bad: bus.queue("t").lease(1, bytes_max=[bad]),
    "leased": lambda bus, bad: bus.lease(bad).__enter__(),
    "jobs": lambda bus, bad: next(iter(bus.queue(bad).jobs(1))),
    "find": lambda bus, bad: bus.queue(bad).find(),
    "describe_subscription": lambda bus, bad: bus.describe_subscription(bad),
    "transaction": lambda bus, bad: bus.transaction(bad).begin(),
}

NO_CALLABLES: dict[str, Use] = {
    "queue deserializer": lambda bus, bad: bus.queue("t", deserializer=bad),
    "lease deserializer": lambda bus, bad: bus.lease("t", deserializer=bad),
    "subscribe deserializer": lambda bus, bad: bus.subscribe("t", deserializer=bad),
    "app deserializer": lambda bus, bad: headrace.App(bus).on("t", deserializer=bad)(print),
    "producer serializer": lambda bus, bad: bus.producer("t", serializer=bad),
    "producer partitioner": lambda bus, bad: bus.producer("t", partitioner=bad),
    "producer before_publish": lambda bus, bad: bus.producer("t", before_publish=bad or None),
    "producer after_ack": lambda bus, bad: bus.producer("t", after_ack=bad or None),
    "send callback": lambda bus, bad: bus.producer("t").send(b"x", callback=bad),
    "run handler": lambda bus, bad: bus.subscribe("t").run(bad),
    "run on_error": lambda bus, bad: bus.subscribe("t").run(print, on_error=bad),
    "subscribe on_error": lambda bus, bad: bus.subscribe("t", on_error=bad),
    "subscribe on_corrupt": lambda bus, bad: bus.subscribe("t", on_corrupt=bad),
    "app handler": lambda bus, bad: headrace.App(bus).on("t")(bad),
    "every handler": lambda bus, bad: headrace.App(bus).every("@daily", name="n")(bad),
}
NO_SETTINGS: dict[str, Use] = {
    **{
        f"create {name}": lambda bus, bad, name=name: bus.create_subscription("t", "s", **{name: bad})
        for name in msgspec.structs.asdict(headrace.SubscriptionSettings())
    },
    **{
        f"alter {name}": lambda bus, bad, name=name: bus.alter_subscription("t", **{name: bad})
        for name in msgspec.structs.asdict(headrace.SubscriptionSettings())
    },
    "create topic": lambda bus, bad: bus.create_topic("u", partitions=bad),
    "alter topic": lambda bus, bad: bus.alter_topic("t", partitions=bad),
    "on": lambda bus, bad: headrace.App(bus).on("t", retry={"lease_seconds": bad})(print),
    "on retry": lambda bus, bad: headrace.App(bus).on("t", retry=bad)(print),
    "on subscription": lambda bus, bad: headrace.App(bus).on("t", subscription=bad)(print),
    "every retry": lambda bus, bad: headrace.App(bus).every("@daily", name="n", retry=bad)(print),
    "publish_many partition": lambda bus, bad: bus.publish_many("t", [b"x"], partition=bad),
    "send_many partition": lambda bus, bad: bus.producer("t").send_many([b"x"], partition=bad),
    "publish partition": lambda bus, bad: bus.publish("t", b"x", partition=bad),
    "transaction": lambda bus, bad: _published_in_transaction(bus, bad),
    "seek": lambda bus, bad: bus.subscribe("t").seek(bad),
    "run workers": lambda bus, bad: bus.subscribe("t").run(print, workers=bad),
    "retry state": lambda _, bad: headrace.Retry(state=bad),
}
WRONG_FLAGS: dict[str, Use] = {
    "lease": lambda bus, bad: bus.lease("t", create=bad).__enter__(),
    "queue": lambda bus, bad: bus.queue("t", create=bad).lease(1),
    "jobs": lambda bus, bad: next(iter(bus.queue("t", create=bad).jobs(timeout=0))),
    "subscribe": lambda bus, bad: bus.subscribe("t", create=bad, timeout=0),
    "describe_topic": lambda bus, bad: bus.describe_topic("t", create=bad),
    "create_subscription": lambda bus, bad: bus.create_subscription("t", "s", create=bad),
    "create_topic": lambda bus, bad: bus.create_topic("t", exist_ok=bad),
}


def _unless(bad: Any, *fine: Any) -> Any:
    """What is bad here too."""
    return "nothing of the kind" if bad in fine else bad


def _sending(bus: headrace.Bus) -> headrace.Producer:
    producer = bus.producer("t")
    producer.send(b"x")
    return producer


def _published_in_transaction(bus: headrace.Bus, partition: Any) -> None:
    with bus.transaction("many") as transaction:
        transaction.publish_many("t", [b"x"], partition=partition)


def _committed(bus: headrace.Bus, wait: Any) -> None:
    with bus.transaction("waiting") as transaction:
        transaction.publish("t", b"x")
        transaction.commit(wait)


@pytest.fixture(scope="module")
def bus() -> Iterator[headrace.Bus]:
    with headrace.open(":memory:") as opened:
        opened.publish("t", b"value")
        opened.create_subscription("t")
        yield opened


def check(bus: headrace.Bus, use: Use, bad: Any) -> None:
    with pytest.raises(errors.HeadraceError) as told:
        use(bus, bad)
    assert str(pickle.loads(pickle.dumps(told.value))) == str(told.value)
    assert not bus.publish("t", b"after").duplicate  # it goes on as before


@pytest.mark.parametrize("bad", NUMBERS, ids=shown)
@pytest.mark.parametrize("name", WITH_NUMBERS)
def test_numbers_and_times_that_cannot_be_used(bus: headrace.Bus, name: str, bad: Any) -> None:
    check(bus, WITH_NUMBERS[name], bad)


@pytest.mark.parametrize("bad", [float("nan"), -1, -float("inf"), "1", [], {}, True], ids=shown)
@pytest.mark.parametrize("name", WITH_TIMEOUTS)
def test_timeouts_that_cannot_be(bus: headrace.Bus, name: str, bad: Any) -> None:
    with pytest.raises(errors.InvalidArgument, match=r"(timeout|wait) is a number of seconds"):
        WITH_TIMEOUTS[name](bus, bad)


@pytest.mark.parametrize("wait", [float("inf"), 1e308, 2**63, 10**400], ids=shown)
@pytest.mark.parametrize("name", WITH_TIMEOUTS)
def test_very_long_timeouts_are_for_ever(bus: headrace.Bus, name: str, wait: Any) -> None:
    for _ in range(3):
        bus.publish("t", b"x")  # for those who wait for messages
    WITH_TIMEOUTS[name](bus, wait)


def test_who_waits_for_ever_gets_what_comes_later(bus: headrace.Bus) -> None:
    bus.create_topic("later")
    with ThreadPoolExecutor() as threads:
        waits = [timedelta.max, float("inf"), 1e308]
        waiting = [threads.submit(bus.queue("later").lease, 1, wait=wait) for wait in waits]
        while not all(each.done() for each in waiting):
            bus.publish("later", b"x")
        assert [len(each.result()) for each in waiting] == [1, 1, 1]


@pytest.mark.parametrize("bad", [timedelta.max, 8 * 86_400, -1, "x"], ids=shown)
def test_leases_that_cannot_last_so_long(bus: headrace.Bus, bad: Any) -> None:
    for use in (bus.queue("t").lease, bus.queue("t").leased, bus.queue("t").jobs):
        with pytest.raises(errors.InvalidArgument, match=r"lease is|length of time"):
            use(lease=bad)


@pytest.mark.parametrize("bad", NAMES, ids=lambda bad: ascii(bad)[:12])
@pytest.mark.parametrize("name", WITH_NAMES)
def test_names_that_cannot_be_used(bus: headrace.Bus, name: str, bad: Any) -> None:
    check(bus, WITH_NAMES[name], bad)


@pytest.mark.parametrize("bad", [1, None, b"t", [], {}], ids=repr)
@pytest.mark.parametrize("name", WRONG_TYPES)
def test_a_wrong_type_does_not_end_the_connection(bus: headrace.Bus, name: str, bad: Any) -> None:
    if bad is None and name in ("publish", "publish_many"):
        pytest.skip("without a topic it goes to the ingress")
    link = bus._broker.connection
    with pytest.raises(errors.InvalidArgument):
        WRONG_TYPES[name](bus, bad)
    assert bus.describe_topic("t").topic == "t"
    assert bus._broker.connection is link


@pytest.mark.parametrize("bad", [0, None, "yes", [], {}], ids=repr)
@pytest.mark.parametrize("name", WRONG_FLAGS)
def test_what_is_neither_true_nor_false_does_not_end_the_connection(bus: headrace.Bus, name: str, bad: Any) -> None:
    with pytest.raises(errors.InvalidArgument):
        WRONG_FLAGS[name](bus, bad)
    link = bus._broker.connection, bus._consuming and bus._consuming.connection
    assert bus.describe_topic("t").topic == "t"
    assert (bus._broker.connection, bus._consuming and bus._consuming.connection) == link


@pytest.mark.parametrize("bad", [5, [5], {"a": 1}, 1.5, object()], ids=lambda bad: type(bad).__name__)
@pytest.mark.parametrize("name", NO_CALLABLES)
def test_what_cannot_be_called_is_refused_when_it_is_given(bus: headrace.Bus, name: str, bad: Any) -> None:
    with pytest.raises(errors.InvalidArgument):
        NO_CALLABLES[name](bus, bad)


@pytest.mark.parametrize("bad", [object(), [0], (1,), {1}, b"x", 1 + 1j], ids=lambda bad: type(bad).__name__)
@pytest.mark.parametrize("name", NO_SETTINGS)
def test_settings_and_numbers_of_another_kind(bus: headrace.Bus, name: str, bad: Any) -> None:
    with pytest.raises(errors.HeadraceError):
        NO_SETTINGS[name](bus, {1j} if name == "retry state" else bad)


@pytest.mark.parametrize("bad", ["2", 1.5, None, 0, True], ids=repr)
def test_workers_and_partitions_that_cannot_be(bus: headrace.Bus, bad: Any) -> None:
    with pytest.raises(errors.InvalidArgument, match="workers"):
        bus.subscribe("t").run(print, workers=bad)
    if bad not in (None, "2"):
        with pytest.raises(errors.InvalidArgument, match="partitions"), bus.subscribe("t") as subscription:
            subscription.seek(0, partitions=bad)


@pytest.mark.parametrize("bad", [{0: None}, {0: "x"}, {0: -1}, {0: 1.5}, {"0": 0}, {0: [1]}, {0: 1 << 63}], ids=repr)
def test_offsets_to_start_at_that_cannot_be(bus: headrace.Bus, bad: Any) -> None:
    with pytest.raises(errors.InvalidArgument, match="start is partitions to offsets"):
        bus.subscribe("t", start=bad)


@pytest.mark.parametrize("bad", [True, 5, "t", 10**5000], ids=shown)
def test_what_is_no_message_no_batch_and_no_subscription(bus: headrace.Bus, bad: Any) -> None:
    with bus.subscribe("t", group="g", commit="manual") as subscription, pytest.raises(errors.InvalidArgument):
        subscription.commit(bad)
    for nothing in (None, bad):
        with bus.transaction("x") as transaction:
            with pytest.raises(errors.InvalidArgument):
                transaction.commit_positions(nothing)
            with pytest.raises(errors.InvalidArgument):
                transaction.stage("t", 0, nothing)
    with bus.producer("t", before_publish=[lambda _: bad]) as producer:
        with pytest.raises(errors.InvalidArgument, match="before_publish"):
            producer.publish(b"x")
        with pytest.raises(errors.InvalidArgument, match="before_publish"):
            producer.send_many([b"x"])


@pytest.mark.parametrize(
    "address",
    [
        "headrace://",
        "headrace://host:99999",
        "headrace://" + "a" * 300,
        "headrace://.",
        "headrace://127.0.0.1:1",
        "headrace+unix:///" + "x" * 200,
        "headrace+unix:///nowhere/at/all",
        "headrace+unix:///a\0b",
    ],
)
def test_addresses_that_cannot_be_reached(address: str) -> None:
    with pytest.raises(errors.HeadraceError):
        headrace.connect(address, timeout=5)
    with pytest.raises(errors.HeadraceError):
        asyncio.run(headrace.connect_async(address, timeout=5))


@pytest.mark.parametrize(
    "address",
    [
        "headrace://127.0.0.1:0",
        "headrace://127.0.0.1:7390?x=1",
        "headrace://127.0.0.1:7390/?",
        "headrace://127.0.0.1:7390#x",
        "headrace://127.0.0.1:7390/topic",
        "headrace://:secret@127.0.0.1",
        "headrace+unix:///run/headrace.sock?x=1",
        "headrace+unix:///run/headrace.sock#x",
        "http://:secret@127.0.0.1",
        "http://127.0.0.1:7391/#x",
    ],
)
def test_addresses_of_which_a_part_would_be_ignored(address: str) -> None:
    with pytest.raises(errors.InvalidArgument, match="is no address"):
        parse_address(address)


HUGE = "x" * (1 << 20)
WITH_HUGE: dict[str, Use] = {
    "topic": lambda bus, bad: bus.publish(bad, b"x"),
    "durability": lambda bus, bad: bus.publish("t", b"x", durability=bad),
    "headers": lambda bus, bad: bus.publish("t", b"x", headers=[bad]),
    "header": lambda bus, bad: bus.publish("t", b"x", headers={bad: 5}),
    "header's text": lambda bus, bad: bus.publish("t", b"x", headers={"a": [bad]}),
    "header in UTF-8": lambda bus, bad: bus.publish("t", b"x", headers={f"{bad!r}\udc80": b""}),
    "key in UTF-8": lambda bus, bad: bus.publish("t", b"x", key=f"{bad!r}\udc80"),
    "partition": lambda bus, bad: bus.publish("t", b"x", partition=bad),
    "timestamp": lambda bus, bad: bus.publish("t", b"x", timestamp=bad),
    "compression": lambda bus, bad: bus.producer("t", compression=bad),
    "on_full": lambda bus, bad: bus.producer("t", on_full=bad),
    "serializer": lambda bus, bad: bus.producer("t", serializer=bad),
    "partitioner": lambda bus, bad: bus.producer("t", partitioner=bad),
    "timeout": lambda bus, bad: bus.producer("t", timeout=bad),
    "deserializer": lambda bus, bad: bus.queue("t", deserializer=bad),
    "ack": lambda bus, bad: bus.queue("t").jobs(ack=bad),
    "status": lambda bus, bad: bus.queue("t").find(status=bad),
    "start": lambda bus, bad: bus.subscribe("t", start=bad),
    "start at": lambda bus, bad: bus.subscribe("t", start={0: bad}),
    "commit": lambda bus, bad: bus.subscribe("t", commit=bad),
    "on_corrupt": lambda bus, bad: bus.subscribe("t", on_corrupt=bad),
    "on_out_of_range": lambda bus, bad: bus.subscribe("t", on_out_of_range=bad),
    "on_error": lambda bus, bad: bus.subscribe("t", on_error=bad),
    "run on_error": lambda bus, bad: bus.subscribe("t").run(print, on_error=bad),
    "handler": lambda bus, bad: headrace.App(bus).on("t")(bad),
    "on": lambda bus, bad: headrace.App(bus).on(bad)(print),
    "on subscription": lambda bus, bad: headrace.App(bus).on("t", subscription=bad)(print),
    "on retry": lambda bus, bad: headrace.App(bus).on("t", retry={"retry": bad})(print),
    "every": lambda bus, bad: headrace.App(bus).every(bad)(print),
    "every zone": lambda bus, bad: headrace.App(bus).every("@daily", zone=bad)(print),
    "every name": lambda bus, bad: headrace.App(bus).every("@daily", name=bad)(print),
    "every missed": lambda bus, bad: headrace.App(bus).every("@daily", name="n", missed=bad)(print),
    "every overlap": lambda bus, bad: headrace.App(bus).every("@daily", name="n", overlap=bad)(print),
    "cron": lambda bus, bad: bus.cron_add("n", "t", bad),
    "scheduled": lambda bus, bad: bus.scheduled(bad),
    "create_topic": lambda bus, bad: bus.create_topic("u", storage=bad),
    "topic durability": lambda bus, bad: bus.create_topic("u", durability=bad),
    "create_subscription": lambda bus, bad: bus.create_subscription("t", "s", retry=bad),
    "alter_subscription": lambda bus, bad: bus.alter_subscription("t", retry=bad),
    "alter dead_letter_topic": lambda bus, bad: bus.alter_subscription("t", dead_letter_topic=bad),
    "name": lambda _, bad: headrace.open(":memory:", name=bad),
    "connect": lambda _, bad: headrace.connect(bad),
    "connect to": lambda _, bad: headrace.connect(f"headrace://{bad!r}:x"),
}


@pytest.mark.parametrize("bad", [HUGE, HUGE.encode()], ids=["str", "bytes"])
@pytest.mark.parametrize("name", WITH_HUGE)
def test_errors_do_not_repeat_a_large_argument(bus: headrace.Bus, name: str, bad: Any) -> None:
    with pytest.raises(errors.HeadraceError) as told:
        WITH_HUGE[name](bus, bad)
    assert len(str(told.value)) < 1500
    assert bus.describe_topic("t").topic == "t"


OPENED: list[tuple[Any, dict[str, Any], str]] = [
    (":memory:", {"nonsense": 1}, "nonsense"),
    (":memory:", {"port": None}, "port"),
    (":memory:", {"port": "\ud800"}, "settings are wrong"),
    (":memory:", {"topic": None}, "topic"),
    (":memory:", {"topic": {"compression": "\ud800"}}, "settings are wrong"),
    (":memory:", {"topic": {"retain_seconds": float("nan")}}, "retain_seconds"),
    (":memory:", {"host": "a\0b"}, "host"),
    (":memory:", {"host": "\ud800"}, "host"),
    (":memory:", {"host": "x" * 100}, "host"),
    (":memory:", {"unix_socket": "a\0b"}, "unix_socket"),
    (":memory:", {"port": 1 << 70}, "port"),
    (b"", {}, "data"),
    (None, {}, "data"),
    (5, {}, "data"),
    (b"x", {}, "data"),
    ("", {}, "data"),
    ("a\0b", {}, "data"),
    ("\ud800", {}, "data"),
    (":memory:", {"unix_socket": "\ud800"}, "unix_socket"),
    *(
        (":memory:", {name: number}, name)
        for name, kind in ServerSettings.__annotations__.items()
        if kind is float
        for number in (float("nan"), float("inf"), -float("inf"), 1e308)
    ),
]


@pytest.mark.parametrize(("path", "settings", "named"), OPENED, ids=[str(number) for number in range(len(OPENED))])
def test_settings_that_a_broker_cannot_have(path: Any, settings: dict[str, Any], named: str) -> None:
    with pytest.raises(errors.InvalidArgument, match=named):
        headrace.open(path, **settings).close()


def test_with_asyncio_it_is_the_same() -> None:
    async def story() -> None:
        async with await headrace.open_async(":memory:", timeout=float("inf")) as bus:
            producer = bus.producer("t", timeout=1e308)
            assert (await (await producer.send(b"x")).result(10**400)).count == 1
            await producer.flush(float("inf"))
            assert len(await bus.queue("t").lease(1, wait=timedelta.max)) == 1
            with pytest.raises(errors.InvalidArgument, match="timeout is"):
                await producer.flush("x")  # type: ignore[arg-type]
            with pytest.raises(errors.InvalidArgument, match="create is"):
                bus.queue("t", create=None)  # type: ignore[arg-type]
        with pytest.raises(errors.InvalidArgument, match="data"):
            await headrace.open_async(None)  # type: ignore[arg-type]

    asyncio.run(story())
