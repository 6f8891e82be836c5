"""Topics: made, altered, listed, described and deleted while the broker runs, and after whatever ended it."""

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace.broker.settings import BrokerSettings
from headrace.model.errors import (
    DiskFull,
    InvalidArgument,
    LimitExceeded,
    LogFailed,
    MessageTooLarge,
    PartitionNotFound,
    TopicExists,
    TopicNotFound,
)
from headrace.model.leasing import Lease, SubscriptionCreate
from headrace.model.limits import MESSAGE_BYTES_MAX, PARTITIONS_MAX
from headrace.model.requests import (
    Commit,
    GroupJoin,
    Offsets,
    PartitionOffset,
    Publish,
    TopicAlter,
    TopicCreate,
    TopicDelete,
    TopicDescribe,
    TopicList,
)
from headrace.model.suggestions import nearest
from headrace.model.topic import TopicSettings
from headrace.testing import FaultyDisk, Unsynced
from headrace.testing.workbench import START_US, Workbench


def create(bench: Workbench, topic: str, **settings: Any) -> Any:
    return bench.ask(TopicCreate(topic, settings))


def names(bench: Workbench, pattern: str = "*", tenant: str = "") -> list[str]:
    return [info.topic for info in bench.ask(TopicList(pattern), session=bench.connect(tenant=tenant)).topics]


def partition_files(directory: Path) -> list[str]:
    return sorted(os.listdir(directory / "topics")) if (directory / "topics").exists() else []


def use_up_the_journals_room(bench: Workbench, topic: str) -> None:
    """On a full disk there may be a little room left in a file."""
    with contextlib.suppress(DiskFull):
        while True:
            bench.ask(Commit("somebody", [PartitionOffset(topic, 0, 0)]))


@pytest.fixture
def data() -> Iterator[str]:
    """A directory in memory, where syncing takes no time."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").exists() else None) as directory:
        yield f"{directory}/data"


# Making them.


def test_a_topic_is_described_as_it_was_made() -> None:
    bench = Workbench()
    info = create(bench, "orders", partitions=3, message_bytes_max=1000)
    assert (info.topic, info.id, info.created_us, len(info.partitions)) == ("orders", 1, START_US, 3)
    assert (info.settings["partitions"], info.settings["message_bytes_max"]) == (3, 1000)
    described = bench.ask(TopicDescribe("orders"))
    assert described == info


def test_topics_survive_restarts_and_kills(data: str) -> None:
    bench = Workbench(data)
    made = create(bench, "orders", partitions=2, retain_seconds=60.0)
    bench.publish("orders", [b"a"], partition=1)
    bench = Workbench(data)  # killed
    assert bench.ask(TopicDescribe("orders")).settings == made.settings
    bench.close()
    bench = Workbench(data)
    assert bench.ask(TopicDescribe("orders")).created_us == made.created_us
    assert bench.values("orders", 1) == [b"a"]


def test_settings_that_are_not_given_are_the_brokers_own(data: str) -> None:
    own = TopicSettings(partitions=4, message_bytes_max=500)
    bench = Workbench(data, settings=BrokerSettings(topic=own))
    assert create(bench, "orders", partitions=2).settings == {**own.as_dict(), "partitions": 2}


@pytest.mark.parametrize(
    "wrong",
    [
        {"partitions": 0},
        {"partitions": PARTITIONS_MAX + 1},
        {"partitions": 2**70},
        {"partitions": "many"},
        {"partitions": 1.5},
        {"partitions": None},
        {"storage": "tape"},
        {"storage": ["disk"]},
        {"storage": "memory", "durability": "synced"},
        {"validity": "forever"},
        {"validity": "ttl"},
        {"ttl_seconds": 5},
        {"validity": "ttl", "ttl_seconds": 0},
        {"validity": "ttl", "ttl_seconds": -1},
        {"retain_seconds": 0},
        {"retain_seconds": float("nan")},
        {"retain_seconds": float("inf")},
        {"retain_bytes": 0},
        {"retain_bytes": 2**61},
        {"segment_bytes": 100},
        {"segment_bytes": 2**40},
        {"segment_seconds": 0},
        {"compact_by_key": "yes"},
        {"compact_by_key": True, "validity": "until_consumed"},
        {"message_bytes_max": 0},
        {"message_bytes_max": MESSAGE_BYTES_MAX + 1},
        {"durability": "certain"},
        {"durability": 2},
        {"durability": None},
        {"compression": "rar"},
        {"memory_bytes": 1},
        {"colour": "blue"},
    ],
)
def test_settings_that_cannot_be_are_refused(data: str, wrong: dict[str, Any]) -> None:
    bench = Workbench(data)
    with pytest.raises(InvalidArgument):
        create(bench, "orders", **wrong)
    create(bench, "others")
    with pytest.raises(InvalidArgument):
        bench.ask(TopicAlter("others", wrong))
    assert names(bench) == ["others"]
    assert bench.ask(TopicDescribe("others")).settings == TopicSettings().as_dict()


@pytest.mark.parametrize(
    "name",
    [
        "",
        "/",
        "a/",
        "/a",
        "a/b/c",
        ".",
        "..",
        "acme/..",
        " a",
        "a ",
        "a\u2003",
        "a\n",
        "a*",
        "a?",
        "a,b",
        "a\x7f",
        "a\x85",
        "a\u2028b",
        "a\u202eb",
        "a\ud800",
        "a" * 250,
        "ü/a",
        "_t/a",
        "t" * 41 + "/a",
        "../a",
        "a\0",
    ],
)
def test_names_that_cannot_be_are_refused(name: str) -> None:
    bench = Workbench()
    with pytest.raises(InvalidArgument):
        create(bench, name)
    if name:  # without one it goes to the ingress
        with pytest.raises(InvalidArgument):
            bench.publish(name, [b"a"])
    assert names(bench) == []


@pytest.mark.parametrize(
    "name",
    [
        "a",
        "A.b-c_9",
        "9",
        "_a",
        ".a",
        "-a",
        "...",
        "$SYS",
        "a b",
        "grüße ✓",
        "a'\"`\\$(b)|&;",
        "a@b:c=d#e%2F",
        "[a]{1}+<>~!",
        "a" * 249,
        "\U0001f600" * 249,
        "t" * 40 + "/" + "a" * 249,
    ],
)
def test_names_that_can_be(data: str, name: str) -> None:
    bench = Workbench(data)
    create(bench, name)
    bench.publish(name, [b"a"])
    bench = Workbench(data)
    assert bench.ask(TopicDescribe(name)).topic == name
    assert bench.values(name) == [b"a"]


def test_tenants_have_topics_of_their_own() -> None:
    bench = Workbench()
    bench.publish("orders", [b"ours"])
    bench.publish("acme/orders", [b"theirs"])
    assert bench.values("default/orders") == [b"ours"]
    assert bench.values("acme/orders") == [b"theirs"]
    assert names(bench) == ["orders"]
    assert names(bench, "acme/*") == ["acme/orders"]
    assert names(bench, tenant="acme") == ["orders"]
    assert names(bench, tenant="default") == ["orders"]
    with pytest.raises(TopicExists):
        create(bench, "default/orders")


def test_names_whose_parts_could_be_mixed_up_have_their_own_messages(data: str) -> None:
    bench = Workbench(data)
    for name in ("a.b/c", "a/b.c", "a.b.c"):
        bench.publish(name, [name.encode()])
    assert [bench.values(name) for name in ("a.b/c", "a/b.c", "a.b.c")] == [[b"a.b/c"], [b"a/b.c"], [b"a.b.c"]]


def test_topics_are_listed_by_pattern() -> None:
    bench = Workbench()
    for name in ("orders-1", "orders-2", "bills", "acme/orders-1"):
        create(bench, name)
    assert names(bench) == ["bills", "orders-1", "orders-2"]
    assert names(bench, "orders-?") == ["orders-1", "orders-2"]
    assert names(bench, "acme/*") == names(bench, "*/*") == ["acme/orders-1"]
    assert names(bench, "*", "acme") == names(bench, "acme/*", "acme") == ["orders-1"]
    assert names(bench, "[ob]*") == []


def test_a_name_is_taken_once_unless_that_is_fine() -> None:
    bench = Workbench()
    made = create(bench, "orders", partitions=2)
    with pytest.raises(TopicExists):
        create(bench, "orders")
    again = bench.ask(TopicCreate("orders", {"partitions": 5}, exist_ok=True))
    assert (again.id, len(again.partitions)) == (made.id, 2)


def test_there_are_only_so_many_topics() -> None:
    bench = Workbench(settings=BrokerSettings(topics_max=2))
    create(bench, "a")
    bench.publish("b", [b"1"])
    with pytest.raises(LimitExceeded):
        create(bench, "c")
    with pytest.raises(LimitExceeded):
        bench.publish("c", [b"1"])
    bench.ask(TopicDelete("a"))
    create(bench, "c")


def test_a_broker_in_memory_has_topics_in_memory() -> None:
    bench = Workbench()
    assert create(bench, "orders").settings["storage"] == "memory"
    for storage in ("disk", "spill"):
        with pytest.raises(InvalidArgument):
            create(bench, "others", storage=storage)


def test_making_a_topic_with_many_partitions_opens_none_of_them(data: str) -> None:
    bench = Workbench(data)
    info = create(bench, "orders", partitions=PARTITIONS_MAX)
    assert [partition.partition for partition in info.partitions] == list(range(PARTITIONS_MAX))
    assert partition_files(Path(data)) == []


# By themselves.


def test_topics_make_themselves() -> None:
    bench = Workbench(settings=BrokerSettings(topic=TopicSettings(partitions=2)))
    bench.publish("published", [b"a"])
    bench.ask(GroupJoin("group", "member", ["joined"], missing="create"))
    bench.ask(Lease("leased", create_topic=True))
    bench.ask(SubscriptionCreate("subscribed"))
    assert len(bench.ask(TopicDescribe("described", create=True)).partitions) == 2
    assert names(bench) == ["described", "joined", "leased", "published", "subscribed"]


def test_reading_makes_no_topics() -> None:
    bench = Workbench()
    for request in (
        GroupJoin("group", "member", ["typo"]),
        Lease("typo"),
        Lease("typo", create=False),
        SubscriptionCreate("typo", create_topic=False),
        TopicDescribe("typo"),
    ):
        with pytest.raises(TopicNotFound):
            bench.ask(request)
    with pytest.raises(TopicNotFound):
        bench.values("typo")
    bench.ask(GroupJoin("group", "member", ["typo"], missing="wait"))
    with pytest.raises(InvalidArgument):
        bench.ask(GroupJoin("group", "member", ["typo"], missing="perhaps"))
    assert names(bench) == []


def test_a_member_gets_a_topic_that_it_waited_for() -> None:
    bench = Workbench()
    assert bench.ask(GroupJoin("group", "member", ["orders"], missing="wait")).assigned == []
    bench.publish("orders", [b"a"])
    joined = bench.ask(GroupJoin("group", "member", ["orders"], missing="wait"))
    assert [(place.topic, place.partition) for place in joined.assigned] == [("orders", 0)]


def test_an_error_names_the_topics_that_may_have_been_meant() -> None:
    bench = Workbench()
    for topic in ("orders", "Orders.eu", "order", "payments", "acme/ordres", "x"):
        bench.ask(TopicCreate(topic))
    expected = {
        "ordres": ["orders"],
        "ORDERS": ["orders", "order"],
        "rders": ["orders", "order"],
        "payment": ["payments"],
        "acme/orders": ["acme/ordres"],
        "nothing-alike": [],
        "y": [],
    }
    for name, near in expected.items():
        with pytest.raises(TopicNotFound) as refused:
            bench.ask(TopicDescribe(name))
        assert refused.value.details["nearest"] == near, name
        assert f"`headrace topic create {name}` makes it" in str(refused.value)


def test_looking_for_near_names_among_many_compares_few() -> None:
    looked_at = 0

    def names() -> Iterator[str]:
        nonlocal looked_at
        for number in range(1_000_000):
            looked_at += 1
            yield f"orders-{number:06}"

    assert len(nearest("orders-00000x", names())) == 3
    assert looked_at <= 10_000


def test_topics_do_not_make_themselves_where_that_is_not_wanted() -> None:
    bench = Workbench(settings=BrokerSettings(auto_create_topics=False))
    with pytest.raises(TopicNotFound):
        bench.publish("orders", [b"a"])
    with pytest.raises(TopicNotFound):
        bench.values("orders")
    with pytest.raises(TopicNotFound):
        bench.ask(GroupJoin("group", "member", ["orders"]))
    with pytest.raises(TopicNotFound):
        bench.ask(TopicDescribe("orders", create=True))
    assert names(bench) == []


@pytest.mark.parametrize(
    "request_", [TopicDescribe("orders"), TopicAlter("orders", {}), TopicDelete("orders"), Offsets("orders")]
)
def test_what_is_asked_of_a_topic_that_is_not_there_does_not_make_it(request_: Any) -> None:
    bench = Workbench()
    with pytest.raises(TopicNotFound):
        bench.ask(request_)
    assert names(bench) == []


def test_a_broken_batch_makes_no_topic() -> None:
    bench = Workbench()
    body = bytearray(bench.batch([b"a"]).data)
    body[-1] ^= 1
    with pytest.raises(Exception, match="checksum"):
        bench.ask(Publish("orders", 0), body)
    assert names(bench) == []


# Altering them.


def test_a_topic_is_altered_while_it_is_in_use(data: str) -> None:
    bench = Workbench(data)
    create(bench, "orders")
    bench.publish("orders", [b"x" * 1000])
    info = bench.ask(TopicAlter("orders", {"partitions": 3, "message_bytes_max": 100}))
    assert (len(info.partitions), info.partitions[0].next_offset) == (3, 1)
    with pytest.raises(MessageTooLarge):
        bench.publish("orders", [b"x" * 1000])
    bench.publish("orders", [b"y"], partition=2)
    bench = Workbench(data)
    assert bench.values("orders", 2) == [b"y"]
    assert bench.ask(TopicDescribe("orders")).settings == info.settings


def test_partitions_and_storage_are_for_good(data: str) -> None:
    bench = Workbench(data)
    create(bench, "orders", partitions=2)
    for wrong in ({"partitions": 1}, {"storage": "memory"}, {"storage": "spill"}):
        with pytest.raises(InvalidArgument):
            bench.ask(TopicAlter("orders", wrong))
    with pytest.raises(PartitionNotFound):
        bench.publish("orders", [b"a"], partition=2)
    with pytest.raises(PartitionNotFound):
        bench.publish("orders", [b"a"], partition=-1)


def test_what_becomes_synced_only_later_is_read_only_later(data: str) -> None:
    bench = Workbench(data)
    create(bench, "orders", durability="written")
    bench.publish("orders", [b"a"], durability=2)
    bench.syncing_later = True
    bench.begin(Publish("orders", 0), bench.batch([b"a"] * 20).data)
    assert len(bench.values("orders")) == 21
    bench.begin(TopicAlter("orders", {"durability": "synced"}))
    assert bench.values("orders") == [b"a"]
    bench.run()
    assert len(bench.values("orders")) == 21


# Deleting them.


def test_a_deleted_topic_is_gone_with_its_messages_and_positions(data: str) -> None:
    bench = Workbench(data)
    first = create(bench, "orders", partitions=2)
    bench.publish("orders", [b"a"])
    bench.ask(Commit("billing", [PartitionOffset("orders", 0, 1)]))
    bench.ask(TopicDelete("orders"))
    assert names(bench) == []
    assert partition_files(Path(data)) == []
    second = create(bench, "orders")
    assert second.id > first.id
    assert second.groups == []
    assert bench.values("orders") == []
    bench = Workbench(data)
    assert bench.values("orders") == []


def test_ids_are_never_given_out_again(data: str) -> None:
    settings = BrokerSettings(journal_bytes=1)  # a snapshot after everything
    ids = []
    for _ in range(3):
        bench = Workbench(data, settings=settings)
        ids.append(create(bench, "orders").id)
        bench.ask(TopicDelete("orders"))
    assert ids == [1, 2, 3]


def test_who_waits_for_an_answer_when_a_topic_is_deleted_gets_one(data: str) -> None:
    bench = Workbench(data)
    create(bench, "orders")
    bench.syncing_later = True
    large = bench.begin(Publish("orders", 0), bench.batch([b"a"] * 20).data)
    small = bench.begin(Publish("orders", 0), bench.batch([b"b"]).data)
    bench.ask(TopicDelete("orders"))
    assert (large.outcome.base_offset, small.outcome.base_offset) == (0, 20)


def test_the_files_of_a_deleted_topic_stay_until_it_is_certainly_gone(data: str) -> None:
    disk = FaultyDisk()
    bench = Workbench(data, disk=disk)
    bench.publish("orders", [b"a"])
    bench.syncing_later = True
    bench.begin(TopicDelete("orders"))
    disk.power_loss(Unsynced.LOST)
    bench = Workbench(data, disk=disk)
    assert bench.values("orders") == [b"a"]


def test_what_a_crash_left_of_a_deleted_topic_is_removed_at_the_next_start(data: str) -> None:
    bench = Workbench(data)
    bench.publish("orders", [b"a"])
    bench.syncing_later = True
    bench.begin(TopicDelete("orders"))
    assert len(partition_files(Path(data))) == 1
    Workbench(data)
    assert partition_files(Path(data)) == []


# When the disk fails.


def test_a_topic_that_made_itself_is_as_safe_as_what_was_published_to_it(data: str) -> None:
    disk = FaultyDisk()
    bench = Workbench(data, disk=disk)
    bench.publish("orders", [b"a"])
    disk.power_loss(Unsynced.LOST)
    assert Workbench(data, disk=disk).values("orders") == [b"a"]


def test_a_message_is_not_safe_before_its_topic_is(data: str) -> None:
    """The journal is slow, the partition is quick: nobody is told, and nobody reads."""
    disk = FaultyDisk()
    bench = Workbench(data, disk=disk)
    bench.syncing_later = True
    bench.begin(TopicCreate("orders"))
    bench.syncing_later = False
    published = bench.begin(Publish("orders", 0), bench.batch([b"a"] * 20).data)
    assert published.outcome is None
    assert bench.values("orders") == []
    bench.run()
    assert published.outcome.base_offset == 0
    assert len(bench.values("orders")) == 20


def test_a_topic_that_cannot_be_kept_has_no_messages(data: str) -> None:
    """The journal fails, the partition does not: everybody is told, sooner or later."""
    disk = FaultyDisk()
    bench = Workbench(data, disk=disk)
    bench.syncing_later = True
    created = bench.begin(TopicCreate("orders"))
    bench.syncing_later = False
    large = bench.begin(Publish("orders", 0), bench.batch([b"a"] * 20).data)
    disk.fail_sync()
    bench.run()
    small = bench.begin(Publish("orders", 0), bench.batch([b"b"]).data)
    bench.run()
    outcomes = [getattr(asked, "outcome", asked) for asked in (created, large, small)]
    assert [type(outcome) for outcome in outcomes] == [LogFailed] * 3
    bench.tick(10)
    assert bench.broker.idle


def test_directories_are_safe_though_whoever_made_them_was_killed(data: str) -> None:
    disk = FaultyDisk()
    disk.make_directory(data)
    disk.make_directory(f"{data}/topics", sync=False)
    bench = Workbench(data, disk=disk)
    bench.publish("orders", [b"a"])
    disk.power_loss(Unsynced.LOST)
    assert Workbench(data, disk=disk).values("orders") == [b"a"]


def test_partitions_that_were_added_are_safe_before_their_messages_are(data: str) -> None:
    disk = FaultyDisk()
    bench = Workbench(data, disk=disk)
    create(bench, "orders")
    bench.syncing_later = True
    bench.begin(TopicAlter("orders", {"partitions": 2}))
    published = bench.publish("orders", [b"a"] * 20, partition=1)
    assert published.base_offset == 0
    disk.power_loss(Unsynced.LOST)
    assert len(Workbench(data, disk=disk).values("orders", 1)) == 20


def test_the_id_of_a_topic_that_a_power_loss_took_is_not_given_to_its_files(data: str) -> None:
    """A message came to the disk, but its topic did not: the next topic of that name does not have it."""
    disk = FaultyDisk()
    bench = Workbench(data, disk=disk)
    bench.syncing_later = True
    bench.begin(TopicCreate("orders"))
    bench.syncing_later = False
    bench.begin(Publish("orders", 0), bench.batch([b"lost"] * 20).data)
    disk.power_loss(Unsynced.LOST)
    bench = Workbench(data, disk=disk)
    assert create(bench, "orders").id == 2
    assert bench.values("orders") == []


def test_a_full_disk_makes_no_topic_and_later_it_works(data: str) -> None:
    disk = FaultyDisk()
    bench = Workbench(data, disk=disk)
    create(bench, "there")
    bench.publish("there", [b"a"])
    disk.capacity_bytes = disk.used_bytes
    use_up_the_journals_room(bench, "there")
    for request in (TopicCreate("orders"), TopicAlter("there", {"partitions": 2}), TopicDelete("there")):
        with pytest.raises(DiskFull):
            bench.ask(request)
    with pytest.raises(DiskFull):
        bench.publish("orders", [b"a"])
    assert names(bench) == ["there"]
    assert len(bench.ask(TopicDescribe("there")).partitions) == 1
    disk.capacity_bytes = None
    create(bench, "orders")
    bench.ask(TopicDelete("there"))
    assert names(Workbench(data, disk=disk)) == ["orders"]
