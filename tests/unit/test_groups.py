"""Consumer groups: single events one by one, and any sequence of them against what must always be true."""

from collections import Counter

import pytest
from hypothesis import given, note
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from headrace.broker.assignment import Partition, divide, wanted_topics
from headrace.broker.groups import AssignedPartition, AssignmentChange, Changes, Group
from headrace.model.errors import MemberFenced, UnknownMember

SESSION_US = 10_000_000


def join(group: Group, member: str, *topics: str, now_us: int = 0, **available: int) -> Changes:
    """A member that wants all topics there are, or these."""
    return group.join(member, f"{member}'s", topics or tuple(available), (), SESSION_US, available, now_us)


def places(assigned: list[AssignedPartition]) -> list[Partition]:
    return [one[:2] for one in assigned]


def shared(*members: str, partitions: int) -> Group:
    """A group of these members that has come to rest."""
    group = Group("billing", 0)
    for member in members:
        for other, change in join(group, member, orders=partitions).items():
            group.release(other, change.revoked, 0)
    return group


# Which topics are wanted.


@pytest.mark.parametrize(
    ("pattern", "topic", "matches"),
    [
        ("*", "orders", True),
        ("*", "acme/orders", False),
        ("acme/*", "acme/orders", True),
        ("acme/*", "orders", False),
        ("orders-?", "orders-1", True),
        ("orders-?", "orders-", False),
        ("orders-?", "orders-10", False),
        ("Orders", "orders", False),
        ("order[s]", "orders", False),
        ("order[s]", "order[s]", True),
        ("order.", "orders", False),
        ("", "orders", False),
        ("*" + "a*" * 40 + "b", "a" * 120, False),  # takes no time
    ],
)
def test_a_pattern_matches_a_whole_name(pattern: str, topic: str, matches: bool) -> None:
    assert wanted_topics([], [pattern], [topic]) == ({topic} if matches else set())


def test_wanted_topics_are_those_that_there_are() -> None:
    assert wanted_topics(["audit", "gone"], ["orders*"], {"audit": 1, "orders-eu": 1, "else": 1}) == {
        "audit",
        "orders-eu",
    }


# Dividing.

NAMES = st.sampled_from("abcdef")
WISHES = st.dictionaries(NAMES, st.frozensets(st.sampled_from(["s", "t", "u"])), max_size=6)
COUNTS = st.dictionaries(st.sampled_from(["s", "t", "u"]), st.integers(0, 9), min_size=3)
PLACED = st.dictionaries(st.tuples(st.sampled_from("stu"), st.integers(0, 9)), NAMES)


def assert_balanced(wishes: dict[str, frozenset[str]], divided: dict[Partition, str]) -> None:
    """No move to a member that wants the partition would make loads more even."""
    loads = Counter(divided.values())
    for (topic, number), member in divided.items():
        for other, topics in wishes.items():
            assert topic not in topics or loads[member] - loads[other] < 2, f"{other} should have {topic}/{number}"


@given(WISHES, COUNTS, PLACED, st.data())
def test_division_is_complete_balanced_and_stable(
    wishes: dict[str, frozenset[str]], counts: dict[str, int], placed: dict[Partition, str], data: st.DataObject
) -> None:
    kept = data.draw(st.sets(st.sampled_from(sorted(placed)))) if placed else set()
    divided = divide(wishes, counts, placed, kept)
    wanted = {(topic, n) for topics in wishes.values() for topic in topics for n in range(counts[topic])}
    assert divided.keys() == wanted
    assert all(topic in wishes[member] for (topic, _), member in divided.items())
    assert_balanced(wishes, divided)
    assert divide(wishes, counts, divided, divided.keys()) == divided


@given(st.integers(1, 8), st.lists(st.integers(0, 12), min_size=1, max_size=5))
def test_members_with_the_same_wishes_get_the_same_of_each_topic(members: int, sizes: list[int]) -> None:
    counts = {f"t{number}": size for number, size in enumerate(sizes)}
    wishes = {f"m{number}": frozenset(counts) for number in range(members)}
    divided = divide(wishes, counts, {}, set())
    for topic in [*counts, None]:
        loads = Counter(dict.fromkeys(wishes, 0))
        loads.update(member for (name, _), member in divided.items() if topic in (name, None))
        assert max(loads.values()) - min(loads.values()) <= 1


def test_one_who_comes_gets_some_of_every_topic() -> None:
    both = {"a": frozenset({"audit", "orders"})}
    alone = divide(both, {"audit": 4, "orders": 4}, {}, set())
    divided = divide({**both, "b": both["a"]}, {"audit": 4, "orders": 4}, alone, alone.keys())
    assert Counter((member, topic) for (topic, _), member in divided.items()) == {
        (member, topic): 2 for member in "ab" for topic in ("audit", "orders")
    }


def test_what_nobody_reads_moves_before_what_is_read() -> None:
    wishes = {"a": frozenset("st"), "b": frozenset("s")}
    placed = {("s", number): "a" for number in range(4)}
    divided = divide(wishes, {"s": 4, "t": 0}, placed, kept={("s", 2), ("s", 3)})
    assert divided == {("s", 0): "b", ("s", 1): "b", ("s", 2): "a", ("s", 3): "a"}


@given(WISHES, COUNTS, PLACED, st.data())
def test_division_depends_on_no_order_but_that_of_members(
    wishes: dict[str, frozenset[str]], counts: dict[str, int], placed: dict[Partition, str], data: st.DataObject
) -> None:
    counts_again = dict(data.draw(st.permutations(list(counts.items()))))
    placed_again = dict(data.draw(st.permutations(list(placed.items()))))
    assert divide(wishes, counts, placed, set()) == divide(wishes, counts_again, placed_again, set())


# One event at a time; the stories in tests/scenarios/groups tell of longer ones.


def test_epochs_are_greater_than_the_one_given() -> None:
    group = Group("billing", 7 << 32)
    change = join(group, "alice", orders=1)["alice"]
    assert change == AssignmentChange(assigned=[AssignedPartition("orders", 0, (7 << 32) + 1)])
    assert group.generation == (7 << 32) + 1
    assert Group("billing", 5).generation == 5


def test_a_member_is_remembered_as_it_came() -> None:
    group = Group("billing", 0)
    group.join("alice", "worker-1", ["orders"], ["a*"], 5, {"orders": 1}, 100)
    member = group.members["alice"]
    assert (member.id, member.client, member.topics, member.patterns) == ("alice", "worker-1", ("orders",), ("a*",))
    assert (member.session_us, member.seen_us) == (5, 100)
    assert list(member.owned.values()) == group.held("alice") == [AssignedPartition("orders", 0, 1)]
    with pytest.raises(TypeError):
        group.members["mallory"] = member  # type: ignore[index]


@pytest.mark.parametrize(
    "act",
    [
        lambda group: group.leave("bob", 0),
        lambda group: group.release("bob", [], 0),
        lambda group: group.touch("bob", 0),
        lambda group: group.held("bob"),
        lambda group: group.check("bob", "orders", 0, 1),
    ],
)
def test_a_stranger_is_told_to_join(act) -> None:
    with pytest.raises(UnknownMember, match=r"group 'billing' has no member 'bob'.*join again"):
        act(shared("alice", partitions=1))


def test_refusals_explain_themselves() -> None:
    group = shared("alice", "bob", partitions=2)
    group.check("alice", "orders", 0, 1)
    with pytest.raises(MemberFenced, match=r"in group 'billing', partition 0 of 'orders' is read by 'alice'"):
        group.check("bob", "orders", 0, 1)
    with pytest.raises(MemberFenced, match=r"partition 2 of 'orders' is not assigned to 'bob', nor to anyone"):
        group.check("bob", "orders", 2, 1)
    group.restart("orders", [0], 0)
    with pytest.raises(MemberFenced, match=r"assigned to 'alice' again: its epoch is 4 now, not 1"):
        group.check("alice", "orders", 0, 1)


def test_only_what_is_revoked_can_be_released() -> None:
    group = Group("billing", 0)
    (kept, revoked) = join(group, "alice", orders=2)["alice"].assigned
    assert group.release("alice", [kept, revoked], 0) == {}
    assert join(group, "bob", orders=2) == {"alice": AssignmentChange(revoked=[revoked])}
    assert group.held("alice") == [kept]
    assert group.owner("orders", 1) == "alice"
    group.check("alice", *revoked)
    assert group.release("alice", [kept, revoked._replace(epoch=9)], 0) == {}
    assert group.release("bob", [revoked], 0) == {}
    assert group.release("alice", iter([revoked]), 0) == {
        "bob": AssignmentChange(assigned=[AssignedPartition("orders", 1, 3)])
    }
    assert group.release("alice", [revoked], 0) == {}


def test_release_is_a_sign_of_life_and_clocks_do_not_run_backwards() -> None:
    group = shared("alice", partitions=1)
    group.release("alice", [], 50)
    group.touch("alice", 20)
    join(group, "alice", orders=1, now_us=10)
    assert group.members["alice"].seen_us == 50


def test_the_next_tick_is_the_first_thing_that_can_happen() -> None:
    group = Group("billing", 0)
    assert group.next_tick_us() is None
    assert group.tick(1 << 60) == {}
    join(group, "alice", orders=2, now_us=0)
    assert group.next_tick_us() == SESSION_US
    join(group, "bob", orders=2, now_us=5)  # revokes one of alice's
    group.touch("alice", 10)
    assert group.next_tick_us() == 5 + SESSION_US
    group.touch("bob", 10)
    assert group.tick(4 + SESSION_US) == {}
    changes = group.tick(5 + SESSION_US)
    assert changes["alice"] == AssignmentChange(lost=[AssignedPartition("orders", 1, 1)])
    assert changes["bob"] == AssignmentChange(assigned=[AssignedPartition("orders", 1, 3)])
    assert group.next_tick_us() == 10 + SESSION_US


def test_members_that_expire_together_are_told_and_the_living_get_all() -> None:
    group = shared("alice", "bob", "carol", partitions=3)
    group.touch("carol", 1)
    changes = group.tick(SESSION_US)
    assert list(group.members) == ["carol"]
    assert [name for name, change in changes.items() if change.expired] == ["alice", "bob"]
    assert places(changes["alice"].lost + changes["bob"].lost) == places(changes["carol"].assigned)
    assert len(group.held("carol")) == 3


def test_one_without_partitions_is_told_that_it_expired() -> None:
    group = shared("alice", "bob", partitions=1)
    generation = group.generation
    group.touch("alice", 1)
    assert group.tick(SESSION_US) == {"bob": AssignmentChange(expired=True)}
    assert group.generation == generation


def test_what_a_member_no_longer_wants_is_revoked_even_if_nobody_else_does() -> None:
    group = Group("billing", 0)
    available = {"audit": 1, "orders": 1}
    join(group, "alice", **available)
    changes = join(group, "alice", "orders", **available)
    assert places(changes["alice"].revoked) == [("audit", 0)]
    assert places(group.held("alice")) == [("orders", 0)]
    assert group.release("alice", changes["alice"].revoked, 0) == {}
    assert group.owner("audit", 0) is None
    with pytest.raises(MemberFenced):
        group.check("alice", *changes["alice"].revoked[0])


def test_a_deleted_topic_is_lost_even_while_it_is_revoked() -> None:
    group = Group("billing", 0)
    given_out = join(group, "alice", orders=2)["alice"].assigned
    join(group, "bob", orders=2)
    assert group.topics_changed({}, 0) == {"alice": AssignmentChange(lost=given_out)}
    assert group.next_tick_us() == SESSION_US
    assert len(group.topics_changed({"orders": 2}, 0)) == 2


def test_topics_that_nobody_wants_change_nothing() -> None:
    group = shared("alice", partitions=2)
    generation = group.generation
    assert group.topics_changed({"orders": 2, "other": 8}, 0) == {}
    assert group.restart("other", range(8), 0) == {}
    assert group.generation == generation


def test_a_seek_ends_the_wait_for_a_release() -> None:
    group = Group("billing", 0)
    _, revoked = join(group, "alice", orders=2)["alice"].assigned
    join(group, "bob", orders=2)
    changes = group.restart("orders", [1], 0)
    assert changes["alice"] == AssignmentChange(lost=[revoked])
    assert places(changes["bob"].assigned) == [("orders", 1)]
    assert group.release("alice", [revoked], 0) == {}


def test_the_one_it_was_meant_for_leaves_and_the_next_gets_it() -> None:
    group = Group("billing", 0)
    join(group, "alice", orders=4)
    revoked = join(group, "bob", orders=4)["alice"].revoked
    assert group.leave("bob", 0) == {}
    assert join(group, "carol", orders=4) == {}
    assert places(group.release("alice", revoked, 0)["carol"].assigned) == places(revoked)


def test_one_who_comes_gets_what_is_on_its_way_before_what_is_read() -> None:
    group = Group("billing", 0)
    join(group, "alice", orders=4)
    revoked = join(group, "bob", orders=4)["alice"].revoked
    assert join(group, "carol", orders=4) == {}
    changes = group.release("alice", revoked, 0)
    assert {name: len(change.assigned) for name, change in changes.items()} == {"bob": 1, "carol": 1}


def test_changes_come_in_the_order_of_names_also_when_they_are_told_again() -> None:
    group = Group("billing", 0)
    join(group, "alice", orders=4)
    join(group, "bob", orders=4)
    for count in (6, 8):
        assert list(group.join("alice", "", [], [], SESSION_US, {"orders": count}, 0)) == ["alice", "bob"]


# Any sequence of events.

MEMBERS = st.sampled_from(["ann", "bob", "cat", "dan", "eve"])
TOPICS = ["audit", "orders", "orders-eu"]
LOOKS = st.sampled_from([(tuple(TOPICS), ()), (("orders",), ()), (("audit",), ("orders*",)), ((), ("*",)), ((), ())])


class GroupOfMembers(RuleBasedStateMachine):
    """A group, and what each of its members knows from what it was told."""

    @initialize(topics=st.dictionaries(st.sampled_from(TOPICS), st.integers(1, 7)), alike=st.booleans())
    def begin(self, topics: dict[str, int], alike: bool) -> None:
        self.alike = alike  # all members want the same
        self.available = topics
        self.group, self.twin = Group("billing", 1 << 32), Group("billing", 1 << 32)
        self.now = 0
        self.held: dict[str, set[AssignedPartition]] = {}  # of the members there are
        self.revoked: dict[str, set[AssignedPartition]] = {}
        self.deadlines: dict[str, int] = {}
        self.given: dict[AssignedPartition, str] = {}  # all that ever was

    def do(self, act) -> Changes:
        """The same to both groups: they decide the same. Then members hear of it."""
        before = self.group.generation
        changes = act(self.group)
        note(f"{changes}")
        assert changes == act(self.twin)
        assert list(changes) == sorted(changes)
        new = [one for name, told in changes.items() for one in told.revoked if one not in self.revoked[name]]
        new += [one for told in changes.values() for one in told.assigned + told.lost]
        assert self.group.generation == before + bool(new)
        for name, change in changes.items():  # what is taken is taken before anything is given
            assert change != AssignmentChange()
            held, revoked = self.held.get(name, set()), self.revoked.get(name, set())
            assert held | revoked >= set(change.lost)
            held -= set(change.lost)
            revoked -= set(change.lost)
            assert held | revoked >= set(change.revoked)
            held -= set(change.revoked)
            revoked |= set(change.revoked)
        for name, change in changes.items():
            for one in change.assigned:
                assert one.epoch == self.group.generation
                assert all(one.epoch > other.epoch for other in self.given if other[:2] == one[:2])
                self.given[one] = name
                assert one[:2] not in {
                    other[:2] for mine in (self.held, self.revoked) for s in mine.values() for other in s
                }
                self.held[name].add(one)
        return changes

    def forget(self, name: str) -> None:
        del self.held[name], self.revoked[name], self.deadlines[name]

    @rule(name=MEMBERS, look=LOOKS, session=st.sampled_from([5, 10, 40]))
    def join(self, name: str, look: tuple[tuple[str, ...], tuple[str, ...]], session: int) -> None:
        topics, patterns = (TOPICS, ()) if self.alike else look
        again, others = name in self.held, len(self.held.keys() - {name})
        for mine in (self.held, self.revoked):
            mine.setdefault(name, set())
        before = self.held[name] | self.revoked[name]
        changes = self.do(lambda group: group.join(name, "", topics, patterns, session, self.available, self.now))
        self.deadlines[name] = self.now + session
        assert set(changes.get(name, AssignmentChange()).revoked) == self.revoked[name]
        assert self.held[name] | self.revoked[name] >= before
        if self.alike:
            moved = sum(len(change.revoked) for other, change in changes.items() if other != name)
            assert moved <= (0 if again else -(-sum(self.available.values()) // (others + 1)))

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.held)))
        self.forget(name)
        changes = self.do(lambda group: group.leave(name, self.now))
        assert not self.alike or not any(change.revoked or change.lost for change in changes.values())

    @precondition(lambda self: any(self.revoked.values()))
    @rule(data=st.data(), noise=st.booleans())
    def release(self, data: st.DataObject, noise: bool) -> None:
        name = data.draw(st.sampled_from(sorted(name for name, revoked in self.revoked.items() if revoked)))
        finished = data.draw(st.sets(st.sampled_from(sorted(self.revoked[name])), min_size=1))
        said = finished | (self.given.keys() - self.revoked[name] if noise else set())
        self.revoked[name] -= finished
        changes = self.do(lambda group: group.release(name, sorted(said), self.now))
        assert not any(change.revoked or change.lost for change in changes.values())
        self.deadlines[name] = self.now + self.group.members[name].session_us

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def touch(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.held)))
        before = self.group.generation
        self.group.touch(name, self.now)
        self.twin.touch(name, self.now)
        self.deadlines[name] = self.now + self.group.members[name].session_us
        assert self.group.generation == before

    @rule(passes=st.integers(1, 30))
    def tick(self, passes: int) -> None:
        due = self.group.next_tick_us()
        self.now += passes
        changes = self.do(lambda group: group.tick(self.now))
        expired = {name for name, deadline in self.deadlines.items() if deadline <= self.now}
        assert {name for name, change in changes.items() if change.expired} == expired
        assert bool(changes) == (due is not None and due <= self.now)
        for name in expired:
            assert not self.held[name]
            assert not self.revoked[name]
            self.forget(name)
        if not expired:
            assert not any(change.revoked for change in changes.values())
        after = self.group.next_tick_us()
        assert after is None or after > self.now

    @rule(topic=st.sampled_from(TOPICS), count=st.integers(0, 7))
    def topic_changes(self, topic: str, count: int) -> None:
        before = self.available
        self.available = {**before, topic: max(count, before.get(topic, 0))}
        if not count:
            del self.available[topic]
        self.do(lambda group: group.topics_changed(self.available, self.now))
        assert self.do(lambda group: group.topics_changed(self.available, self.now)) == {}

    @rule(topic=st.sampled_from(TOPICS), numbers=st.sets(st.integers(0, 7)))
    def seek(self, topic: str, numbers: set[int]) -> None:
        owners = {number: self.group.owner(topic, number) for number in numbers}
        changes = self.do(lambda group: group.restart(topic, numbers, self.now))
        lost = {one.partition: name for name, change in changes.items() for one in change.lost}
        assert lost == {number: owner for number, owner in owners.items() if owner is not None}

    @rule()
    def come_to_rest(self) -> None:
        """Once all is released, every partition that is wanted is read, evenly, and nothing more happens."""
        for name, revoked in self.revoked.items():
            finished = sorted(revoked)
            revoked.clear()
            self.do(lambda group, name=name, finished=finished: group.release(name, finished, self.now))
            self.deadlines[name] = self.now + self.group.members[name].session_us
        assert not any(self.revoked.values())
        divided = {one[:2]: name for name, held in self.held.items() for one in held}
        wishes = self.wishes()
        assert all(topic in wishes[name] for (topic, _), name in divided.items())
        assert_balanced(wishes, divided)
        loads = [(wishes[name], len(held)) for name, held in self.held.items()]
        assert all(abs(load - other) < 2 for wish, load in loads for same, other in loads if wish == same)

    def wishes(self) -> dict[str, frozenset[str]]:
        known = self.group.members.values()
        return {one.id: wanted_topics(one.topics, one.patterns, self.available) for one in known}

    @invariant()
    def members_know_what_they_have(self) -> None:
        if not hasattr(self, "group"):
            return
        assert self.group.members.keys() == self.held.keys()
        for name in self.held:
            assert self.group.held(name) == sorted(self.held[name])
            assert set(self.group.members[name].owned.values()) == self.held[name] | self.revoked[name]

    @invariant()
    def every_wanted_partition_has_one_owner(self) -> None:
        if not hasattr(self, "group"):
            return
        owned = [(one[:2], name) for mine in (self.held, self.revoked) for name, s in mine.items() for one in s]
        owners = dict(owned)
        assert len(owners) == len(owned)
        wanted = frozenset[str]().union(*self.wishes().values())
        assert owners.keys() >= {(topic, number) for topic in wanted for number in range(self.available[topic])}
        for topic in TOPICS:
            for number in range(8):
                assert self.group.owner(topic, number) == owners.get((topic, number))

    @invariant()
    def only_the_owner_commits(self) -> None:
        if not hasattr(self, "group"):
            return
        for one, first in self.given.items():
            for name in {first, *self.held}:
                mine = one in self.held.get(name, set()) | self.revoked.get(name, set())
                assert may_commit(self.group, name, one) == mine


def may_commit(group: Group, member: str, one: AssignedPartition) -> bool:
    try:
        group.check(member, *one)
    except MemberFenced:
        return member not in group.members  # which would be the wrong error
    except UnknownMember:
        return member in group.members
    return True


TestGroupOfMembers = GroupOfMembers.TestCase
