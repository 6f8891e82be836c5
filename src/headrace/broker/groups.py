"""Consumer groups: who reads which partition, and whose commits count. Events in, decisions out.

A partition has one owner at a time. One that has to move is first revoked: its owner finishes, commits and releases it,
or is given up, and only then is it assigned to the next. Every assignment has an epoch that no other assignment of that
partition ever had, so that a member that was thought dead cannot commit in the name of the living.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple

from headrace.broker.assignment import Partition, divide, wanted_topics
from headrace.broker.deadlines import Deadlines
from headrace.model.errors import MemberFenced, UnknownMember


class AssignedPartition(NamedTuple):
    """A partition in a member's hands; the epoch tells this assignment from all others of the partition."""

    topic: str
    partition: int
    epoch: int


@dataclass(slots=True)
class AssignmentChange:
    """What changes for a member."""

    assigned: list[AssignedPartition] = field(default_factory=list)
    """It begins to read these."""
    revoked: list[AssignedPartition] = field(default_factory=list)
    """It finishes with these and releases them; until then it may commit."""
    lost: list[AssignedPartition] = field(default_factory=list)
    """These are no longer its own, as of now."""
    expired: bool = False
    """It was out of touch for too long and is no member any more."""


Changes = dict[str, AssignmentChange]
"""By member; members for whom nothing changes are not in it."""


@dataclass(slots=True)
class Member:
    """A member of a group."""

    id: str
    client: str
    topics: tuple[str, ...]
    patterns: tuple[str, ...]
    session_us: int
    """How long it may be out of touch, or take to release what is revoked."""
    seen_us: int
    owned: dict[Partition, AssignedPartition] = field(default_factory=dict)
    """What it reads, with what is being revoked from it."""

    @property
    def expires_us(self) -> int:
        """When it is given up if it stays out of touch."""
        return self.seen_us + self.session_us


class Group:
    """A group's members and the partitions they have. All epochs and generations are greater than `epoch`."""

    def __init__(self, name: str, epoch: int) -> None:
        self.name = name
        self._generation = epoch
        self._members: dict[str, Member] = {}  # in the order in which they came
        self._wishes: dict[str, frozenset[str]] = {}  # members to topics; in the same order
        self._counts: dict[str, int] = {}  # partitions of the topics that somebody wants
        self._owners: dict[Partition, str] = {}
        self._release_by_us: dict[Partition, int] = {}  # what is being revoked
        self._expiries = Deadlines[str]()
        self._releases = Deadlines[Partition]()  # the same as _release_by_us
        self._targets: dict[Partition, str] = {}  # who is to have it; the owner, unless it is being revoked

    @property
    def generation(self) -> int:
        """Rises with every change of an assignment."""
        return self._generation

    @property
    def members(self) -> Mapping[str, Member]:
        """The members by id, in the order in which they came."""
        return MappingProxyType(self._members)

    # Events. Each returns what changes for whom.

    def join(
        self,
        member: str,
        client: str,
        topics: Sequence[str],
        patterns: Sequence[str],
        session_us: int,
        available: Mapping[str, int],
        now_us: int,
    ) -> Changes:
        """A member comes, or comes again and keeps what it has, though its wishes may have changed.

        One that comes again may have missed what it was told: it hears once more what is being revoked from it.
        """
        known = self._members.get(member)
        seen_us = max(now_us, known.seen_us) if known else now_us
        owned = known.owned if known else {}
        self._members[member] = Member(member, client, tuple(topics), tuple(patterns), session_us, seen_us, owned)
        self._expiries.set(member, seen_us + session_us)
        changes = self.topics_changed(available, now_us)
        if revoked := sorted(one for place, one in owned.items() if place in self._release_by_us):
            changes.setdefault(member, AssignmentChange()).revoked = revoked
        return dict(sorted(changes.items(), key=lambda entry: entry[0]))

    def leave(self, member: str, now_us: int) -> Changes:
        """A member goes; it has finished with all that it had."""
        self._remove(self._known(member))
        changes: Changes = defaultdict(AssignmentChange)
        self._divide(changes, now_us)
        return self._concluded(changes)

    def release(self, member: str, partitions: Iterable[AssignedPartition], now_us: int) -> Changes:
        """A member has finished with partitions that were revoked; others, and what it no longer has, do not matter."""
        self.touch(member, now_us)
        known = self._known(member)
        released = {(one.topic, one.partition) for one in partitions if self._is_revoked(known, one)}
        for place in released:
            self._free(place)
        changes: Changes = defaultdict(AssignmentChange)
        self._settle(released, changes, now_us)
        return self._concluded(changes)

    def touch(self, member: str, now_us: int) -> None:
        """A member shows that it is alive."""
        known = self._known(member)
        known.seen_us = max(known.seen_us, now_us)
        self._expiries.set(member, known.expires_us)

    def tick(self, now_us: int) -> Changes:
        """Time has passed: give up members out of touch, and wait no longer for what should have been released."""
        due_us = self.next_tick_us()
        if due_us is None or due_us > now_us:
            return {}
        changes: Changes = defaultdict(AssignmentChange)
        expired = [member for member in self._members.values() if member.expires_us <= now_us]
        for member in expired:
            changes[member.id].expired = True
            changes[member.id].lost += member.owned.values()
            self._remove(member)
        overdue = [place for place, by_us in self._release_by_us.items() if by_us <= now_us]
        self._lose(overdue, changes)
        if expired:
            self._divide(changes, now_us)
        else:
            self._settle(overdue, changes, now_us)
        return self._concluded(changes)

    def next_tick_us(self) -> int | None:
        """When tick() has something to do if nothing else happens; None: never."""
        times_us = (self._expiries.next_us(), self._releases.next_us())
        return min((time_us for time_us in times_us if time_us is not None), default=None)

    def topics_changed(self, available: Mapping[str, int], now_us: int) -> Changes:
        """Topics came, went or grew: these are there now, with so many partitions."""
        wishes = self._wishes_among(available)
        counts = {topic: available[topic] for topic in frozenset[str]().union(*wishes.values())}
        changes: Changes = defaultdict(AssignmentChange)
        gone = [place for place in self._owners if place[1] >= available.get(place[0], 0)]
        if gone or wishes != self._wishes or counts != self._counts:
            self._lose(gone, changes)
            self._wishes, self._counts = wishes, counts
            self._divide(changes, now_us)
        return self._concluded(changes)

    def restart(self, topic: str, partitions: Iterable[int], now_us: int) -> Changes:
        """The group was moved in these partitions: reading begins anew, and what was read before is not committed."""
        places = [(topic, number) for number in sorted(set(partitions)) if (topic, number) in self._owners]
        changes: Changes = defaultdict(AssignmentChange)
        self._lose(places, changes)
        self._settle(places, changes, now_us)
        return self._concluded(changes)

    # Questions.

    def held(self, member: str) -> list[AssignedPartition]:
        """What a member may read now, without what is being revoked from it."""
        owned = self._known(member).owned
        return sorted(one for place, one in owned.items() if place not in self._release_by_us)

    def owner(self, topic: str, partition: int) -> str | None:
        """Who reads a partition, or has not released it yet."""
        return self._owners.get((topic, partition))

    def check(self, member: str, topic: str, partition: int, epoch: int) -> None:
        """May the member commit there, under the assignment of that epoch? Raises if not."""
        one = self._known(member).owned.get((topic, partition))
        if one is not None and one.epoch == epoch:
            return
        place = f"partition {partition} of {topic!r}"
        if one is not None:
            why = f"{place} was assigned to {member!r} anew: its epoch is {one.epoch} now, not {epoch}"
        elif (owner := self.owner(topic, partition)) is not None:
            why = f"{place} is read by {owner!r}, not by {member!r}"
        else:
            why = f"{place} is not assigned to {member!r}, nor to anyone else"
        raise MemberFenced(f"in group {self.name!r}, {why}")

    def _known(self, member: str) -> Member:
        known = self._members.get(member)
        if known is None:
            raise UnknownMember(
                f"group {self.name!r} has no member {member!r}: it left, was out of touch for too long, or has not "
                "joined since the broker started; join again"
            )
        return known

    # How it is done: places lose their owners, targets are chosen, and then the one is brought in line with the other.

    def _wishes_among(self, available: Mapping[str, int]) -> dict[str, frozenset[str]]:
        # Members mostly want the same: what they want is worked out once.
        shared: dict[tuple[tuple[str, ...], tuple[str, ...]], frozenset[str]] = {}
        for member in self._members.values():
            wish = (member.topics, member.patterns)
            if wish not in shared:
                shared[wish] = wanted_topics(*wish, available)
        return {member.id: shared[member.topics, member.patterns] for member in self._members.values()}

    def _remove(self, member: Member) -> None:
        for place in list(member.owned):
            self._free(place)
        del self._members[member.id], self._wishes[member.id]
        self._expiries.remove(member.id)

    def _lose(self, places: Iterable[Partition], changes: Changes) -> None:
        """Take them from their owners at once."""
        for place in places:
            owner = self._owners[place]
            changes[owner].lost.append(self._members[owner].owned[place])
            self._free(place)

    def _free(self, place: Partition) -> None:
        del self._members[self._owners.pop(place)].owned[place]
        if self._release_by_us.pop(place, None) is not None:
            self._releases.remove(place)

    def _is_revoked(self, member: Member, one: AssignedPartition) -> bool:
        place = (one.topic, one.partition)
        return member.owned.get(place) == one and place in self._release_by_us

    def _divide(self, changes: Changes, now_us: int) -> None:
        """Choose who is to have what, and do what can be done of it now."""
        # A member that is told to give up a partition is told for good: for all others it is as if nobody had it.
        kept = self._owners.keys() - self._release_by_us.keys()
        self._targets = divide(self._wishes, self._counts, self._targets, kept)
        self._settle(self._owners.keys() | self._targets.keys(), changes, now_us)

    def _settle(self, places: Iterable[Partition], changes: Changes, now_us: int) -> None:
        """Assign what is free to whom it is meant for; revoke what is meant for another than its owner."""
        for place in places:
            owner, target = self._owners.get(place), self._targets.get(place)
            if owner is None and target is not None:
                one = AssignedPartition(*place, self._generation + 1)
                self._owners[place] = target
                self._members[target].owned[place] = one
                changes[target].assigned.append(one)
            elif owner is not None and owner != target and place not in self._release_by_us:
                self._release_by_us[place] = now_us + self._members[owner].session_us
                self._releases.set(place, self._release_by_us[place])
                changes[owner].revoked.append(self._members[owner].owned[place])

    def _concluded(self, changes: Changes) -> Changes:
        """The changes in an order that depends on nothing but the events."""
        for change in changes.values():
            change.assigned.sort()
            change.revoked.sort()
            change.lost.sort()
        if any(change.assigned or change.revoked or change.lost for change in changes.values()):
            self._generation += 1
        return {member: changes[member] for member in sorted(changes)}
