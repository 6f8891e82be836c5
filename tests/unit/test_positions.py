"""How far groups have come: commits that count, commits that do not, and moving a group."""

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.broker.pending_answer import AnswerWithBody
from headrace.model.errors import (
    DiskFull,
    GroupInUse,
    GroupNotFound,
    HeadraceError,
    InvalidArgument,
    MemberFenced,
    UnknownMember,
)
from headrace.model.leasing import Lease, SubscriptionCreate
from headrace.model.requests import (
    Commit,
    Done,
    GroupDelete,
    GroupDescribe,
    GroupJoin,
    GroupLeave,
    GroupList,
    GroupSeek,
    PartitionOffset,
    Publish,
    TopicCreate,
    TopicDelete,
    TopicDescribe,
)
from headrace.testing import FaultyDisk, Unsynced
from headrace.testing.workbench import Workbench

LARGE = [b"large"] * 20
"""So many messages are not gathered with others."""


@pytest.fixture
def data() -> Iterator[str]:
    """A directory in memory, where syncing takes no time."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").exists() else None) as directory:
        yield f"{directory}/data"


@pytest.fixture
def disk() -> FaultyDisk:
    return FaultyDisk()


def position(bench: Workbench, group: str, topic: str = "orders", partition: int = 0) -> int:
    places = bench.ask(GroupDescribe(group)).places
    return next(place.offset for place in places if (place.topic, place.partition) == (topic, partition))


def test_positions_survive(data: str, disk: FaultyDisk) -> None:
    bench = Workbench(data, disk=disk)
    bench.ask(TopicCreate("orders", {"partitions": 2}))
    bench.publish("orders", LARGE)
    bench.ask(Commit("billing", [PartitionOffset("orders", 0, 7), PartitionOffset("orders", 1, 0)]))
    disk.power_loss(Unsynced.LOST)
    bench = Workbench(data, disk=disk)
    place = bench.ask(GroupDescribe("billing")).places[0]
    assert (place.offset, place.end_offset, place.lag) == (7, 20, 13)
    (listed,) = bench.ask(GroupList()).groups
    assert (listed.group, listed.members, listed.topics, listed.lag) == ("billing", 0, ["orders"], 13)
    assert bench.ask(TopicDescribe("orders")).groups == ["billing"]


@pytest.mark.parametrize(
    "place", [PartitionOffset("orders", 0, -1), PartitionOffset("orders", 0, 21), PartitionOffset("orders", 1, 0)]
)
def test_positions_that_cannot_be(data: str, place: PartitionOffset) -> None:
    bench = Workbench(data)
    bench.publish("orders", LARGE)
    with pytest.raises(HeadraceError):
        bench.ask(Commit("billing", [PartitionOffset("orders", 0, 1), place]))
    with pytest.raises(GroupNotFound):
        bench.ask(GroupDescribe("billing"))


def test_a_position_is_no_greater_than_what_can_be_read(data: str) -> None:
    bench = Workbench(data)
    bench.publish("orders", [b"a"])
    bench.syncing_later = True
    bench.begin(Publish("orders", 0), bench.batch(LARGE).data)
    assert isinstance(bench.begin(Commit("billing", [PartitionOffset("orders", 0, 21)])), InvalidArgument)


def test_only_members_commit_and_only_what_they_have(data: str) -> None:
    bench = Workbench(data)
    bench.publish("orders", LARGE)
    (place,) = bench.ask(GroupJoin("billing", "anna", ["orders"])).assigned
    with pytest.raises(GroupInUse):
        bench.ask(Commit("billing", [PartitionOffset("orders", 0, 1)]))
    with pytest.raises(UnknownMember):
        bench.ask(Commit("billing", [PartitionOffset("orders", 0, 1, place.epoch)], "bert"))
    with pytest.raises(MemberFenced):
        bench.ask(Commit("billing", [PartitionOffset("orders", 0, 1, place.epoch + 1)], "anna"))
    bench.ask(Commit("billing", [PartitionOffset("orders", 0, 1, place.epoch)], "anna"))
    assert position(bench, "billing") == 1


def test_epochs_are_never_given_out_again(data: str, disk: FaultyDisk) -> None:
    """Neither when all members have gone, nor after a power loss at once."""
    epochs = []
    for _ in range(3):
        bench = Workbench(data, disk=disk)
        for _ in range(2):
            epochs.append(bench.ask(GroupJoin("billing", "anna", ["orders"], missing="create")).assigned[0].epoch)
            bench.ask(GroupLeave("billing", "anna"))
        disk.power_loss(Unsynced.LOST)
    assert sorted(set(epochs)) == epochs


def test_a_group_that_begins_again_begins_where_it_says(data: str) -> None:
    bench = Workbench(data)
    bench.publish("orders", LARGE)
    bench.publish("bills", LARGE)
    assert bench.ask(GroupJoin("billing", "anna", ["orders"], start="latest")).assigned[0].offset == 20
    bench.ask(GroupLeave("billing", "anna"))
    assert bench.ask(GroupJoin("billing", "bert", ["bills"], start="earliest")).assigned[0].offset == 0
    bench.ask(GroupLeave("billing", "bert"))
    assert bench.ask(GroupJoin("billing", "cora", ["orders"])).assigned[0].offset == 20


def test_a_group_is_moved(data: str) -> None:
    bench = Workbench(data)
    bench.ask(TopicCreate("orders", {"partitions": 2}))
    for at in range(5):
        for number in (0, 1):
            bench.ask(Publish("orders", number), bench.batch([b"a"], timestamps=[100 * at]).data)
    with pytest.raises(GroupNotFound):
        bench.ask(GroupSeek("billing", "orders", to="latest"))
    before = bench.ask(GroupJoin("billing", "anna", ["orders"])).assigned
    for request, offsets in (
        (GroupSeek("billing", "orders", to="latest"), [5, 5]),
        (GroupSeek("billing", "orders", [1], "offset", 3), [5, 3]),
        (GroupSeek("billing", "orders", [0], "time", time_us=150), [2, 3]),
        (GroupSeek("billing", "orders", to="earliest"), [0, 0]),
    ):
        assert [place.offset for place in bench.ask(request).places] == offsets
    assert [place.offset for place in bench.pushed[-1].assigned] == [0, 0]
    with pytest.raises(MemberFenced):
        bench.ask(Commit("billing", [before[0]], "anna"))
    for wrong in (GroupSeek("billing", "orders", [0], "offset", 6), GroupSeek("billing", "orders", to="there")):
        with pytest.raises(HeadraceError):
            bench.ask(wrong)


@pytest.mark.parametrize("change", ["seek", "leave", "give up", "delete the topic"])
@pytest.mark.parametrize("slow", [False, True])
def test_a_commit_in_the_turn_in_which_a_group_changes(data: str, change: str, slow: bool) -> None:
    """Whoever commits before the change is answered as done, and after it is refused, though nothing was synced yet."""
    bench = Workbench(data)
    bench.publish("orders", LARGE)
    bench.ask(SubscriptionCreate("orders"))
    epoch = bench.ask(GroupJoin("billing", "anna", ["orders"], session_ms=1000)).assigned[0].epoch
    bert = bench.connect("bert")
    bench.ask(GroupJoin("billing", "bert", ["orders"], session_ms=600_000), session=bert)
    bench.syncing_later = slow
    leased = bench.begin(Lease("orders"))  # which is still to be written
    before = bench.begin(Commit("billing", [PartitionOffset("orders", 0, 3, epoch)], "anna"))
    changes = {
        "seek": GroupSeek("billing", "orders", [0], "offset", 5),
        "leave": GroupLeave("billing", "anna"),
        "delete the topic": TopicDelete("orders"),
    }
    if change == "give up":
        bench.now_us += 2_000_000
        bench.broker.tick(bench.now_us)
    else:
        bench.begin(changes[change])
    after = bench.begin(Commit("billing", [PartitionOffset("orders", 0, 4, epoch)], "anna"))
    bench.run()
    assert isinstance(leased.outcome, AnswerWithBody)
    assert isinstance(before.outcome, Done)
    assert isinstance(after, HeadraceError)
    if change != "delete the topic":
        assert position(bench, "billing") == (5 if change == "seek" else 3)


def test_a_group_with_members_is_not_deleted(data: str) -> None:
    bench = Workbench(data)
    bench.ask(GroupJoin("billing", "anna", ["orders"], missing="create"))
    with pytest.raises(GroupInUse):
        bench.ask(GroupDelete("billing"))
    bench.ask(GroupLeave("billing", "anna"))
    bench.ask(GroupDelete("billing"))
    bench = Workbench(data)
    assert bench.ask(GroupList()).groups == []


def test_groups_are_listed_by_tenant(data: str) -> None:
    bench = Workbench(data)
    for topic, group in (("orders", "billing"), ("orders", "default/audit"), ("acme/orders", "acme/billing")):
        bench.publish(topic, [b"a"])
        bench.ask(Commit(group, [PartitionOffset(topic, 0, 1)]))
    assert [group.group for group in bench.ask(GroupList()).groups] == ["audit", "billing"]
    in_acme = bench.connect(tenant="acme")
    assert [group.group for group in bench.ask(GroupList(), session=in_acme).groups] == ["billing"]
    with pytest.raises(InvalidArgument, match="own tenant"):
        bench.ask(Commit("acme/billing", [PartitionOffset("orders", 0, 1)]))


def test_a_group_may_begin_on_a_full_disk(data: str, disk: FaultyDisk) -> None:
    bench = Workbench(data, disk=disk)
    bench.publish("orders", LARGE)
    disk.capacity_bytes = disk.used_bytes
    with contextlib.suppress(DiskFull):
        while True:
            bench.ask(Commit("somebody", [PartitionOffset("orders", 0, 0)]))
    (place,) = bench.ask(GroupJoin("billing", "anna", ["orders"])).assigned
    assert place.offset == 0
    with pytest.raises(DiskFull):
        bench.ask(Commit("billing", [PartitionOffset("orders", 0, 1, place.epoch)], "anna"))
    bench.ask(GroupJoin("billing", "bert", ["orders"]))
    bench.tick(100)
    disk.capacity_bytes = None
    bench.ask(GroupJoin("billing", "cora", ["orders"]))
