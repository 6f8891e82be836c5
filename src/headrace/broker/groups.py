"""Consumer groups as a state machine: members and topics change, and the group assigns and revokes partitions.

A partition has one owner at a time. To move a partition, the group first revokes it, and assigns it to the next member
after the owner has finished, committed and released it, or has expired. Every assignment of a partition has an epoch of
its own, so an expired member that is still running cannot commit offsets for a partition that has moved.
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
    """A partition assigned to a member; the epoch identifies this assignment among all of the partition."""

    topic: str
    partition: int
    epoch: int


@dataclass(slots=True)
class AssignmentChange:
    """How one event changes the partitions of a member."""

    assigned: list[AssignedPartition] = field(default_factory=list)
    """The member begins to read these."""
    revoked: list[AssignedPartition] = field(default_factory=list)
    """The member finishes with these and releases them; until then it may commit."""
    lost: list[AssignedPartition] = field(default_factory=list)
    """The member has lost these already, and may not commit them."""
    expired: bool = False
    """The member sent no heartbeat for its session timeout, and the group has removed it."""


Changes = dict[str, AssignmentChange]
"""Changes by member id; members without changes are left out."""


@dataclass(slots=True)
class Member:
    """A member of a group."""

    id: str
    client: str
    topics: tuple[str, ...]
    patterns: tuple[str, ...]
    session_us: int
    """The session timeout: the maximum time without a heartbeat, or until a revoked partition is released."""
    seen_us: int
    owned: dict[Partition, AssignedPartition] = field(default_factory=dict)
    """Its partitions, including those that are being revoked."""

    @property
    def expires_us(self) -> int:
        """When the member expires without another heartbeat."""
        return self.seen_us + self.session_us


class Group:
    """A group's members and their partitions. All epochs and generations are greater than `epoch`."""

    def __init__(self, name: str, epoch: int) -> None:
        self.name = name
        self._generation = epoch
        self._members: dict[str, Member] = {}  # in the order in which they joined
        self._wanted: dict[str, frozenset[str]] = {}  # topics by member; in the same order
        self._counts: dict[str, int] = {}  # partitions per topic that a member wants
        self._owners: dict[Partition, str] = {}
        self._release_by_us: dict[Partition, int] = {}  # deadlines of the partitions that are being revoked
        self._expiries = Deadlines[str]()
        self._releases = Deadlines[Partition]()  # the deadlines of _release_by_us, ordered
        self._targets: dict[Partition, str] = {}  # the member that each partition is meant for

    @property
    def generation(self) -> int:
        """A number that grows with every change of an assignment."""
        return self._generation

    @property
    def members(self) -> Mapping[str, Member]:
        """The members by id, in the order in which they joined."""
        return MappingProxyType(self._members)

    # Events. Each returns the changes by member.

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
        """Add a member, or update the topics of one that joins again and keeps its partitions.

        A member that joins again may have missed notifications, so its revoked partitions are reported once more.
        """
        known = self._members.get(member)
        seen_us = max(now_us, known.seen_us) if known else now_us
        owned = known.owned if known else {}
        self._members[member] = Member(member, client, tuple(topics), tuple(patterns), session_us, seen_us, owned)
        self._expiries.set(member, seen_us + session_us)
        changes = self.topics_changed(available, now_us)
        if revoked := sorted(one for partition, one in owned.items() if partition in self._release_by_us):
            changes.setdefault(member, AssignmentChange()).revoked = revoked
        return dict(sorted(changes.items(), key=lambda entry: entry[0]))

    def leave(self, member: str, now_us: int) -> Changes:
        """Remove a member that has finished with all of its partitions."""
        self._remove(self._known(member))
        changes: Changes = defaultdict(AssignmentChange)
        self._divide(changes, now_us)
        return self._conclude(changes)

    def release(self, member: str, partitions: Iterable[AssignedPartition], now_us: int) -> Changes:
        """Take revoked partitions from a member that has finished with them; ignores all other partitions."""
        self.touch(member, now_us)
        known = self._known(member)
        released = {(one.topic, one.partition) for one in partitions if self._is_revoked(known, one)}
        for partition in released:
            self._free(partition)
        changes: Changes = defaultdict(AssignmentChange)
        self._reconcile(released, changes, now_us)
        return self._conclude(changes)

    def touch(self, member: str, now_us: int) -> None:
        """Record a heartbeat of a member."""
        known = self._known(member)
        known.seen_us = max(known.seen_us, now_us)
        self._expiries.set(member, known.expires_us)

    def tick(self, now_us: int) -> Changes:
        """Remove expired members, and take revoked partitions whose release is overdue."""
        due_us = self.next_tick_us()
        if due_us is None or due_us > now_us:
            return {}
        changes: Changes = defaultdict(AssignmentChange)
        expired = [member for member in self._members.values() if member.expires_us <= now_us]
        for member in expired:
            changes[member.id].expired = True
            changes[member.id].lost += member.owned.values()
            self._remove(member)
        overdue = [partition for partition, by_us in self._release_by_us.items() if by_us <= now_us]
        self._lose(overdue, changes)
        if expired:
            self._divide(changes, now_us)
        else:
            self._reconcile(overdue, changes, now_us)
        return self._conclude(changes)

    def next_tick_us(self) -> int | None:
        """When tick() is due if no other event comes first; None for never."""
        times_us = (self._expiries.next_us(), self._releases.next_us())
        return min((time_us for time_us in times_us if time_us is not None), default=None)

    def topics_changed(self, available: Mapping[str, int], now_us: int) -> Changes:
        """Divide anew after topics were created, deleted or grew; `available` maps all topics to partition counts."""
        wanted = self._match_topics(available)
        counts = {topic: available[topic] for topic in frozenset[str]().union(*wanted.values())}
        changes: Changes = defaultdict(AssignmentChange)
        gone = [partition for partition in self._owners if partition[1] >= available.get(partition[0], 0)]
        if gone or wanted != self._wanted or counts != self._counts:
            self._lose(gone, changes)
            self._wanted, self._counts = wanted, counts
            self._divide(changes, now_us)
        return self._conclude(changes)

    def restart(self, topic: str, partitions: Iterable[int], now_us: int) -> Changes:
        """Assign partitions anew after a seek, so that members cannot commit what they read before it."""
        owned = [(topic, number) for number in sorted(set(partitions)) if (topic, number) in self._owners]
        changes: Changes = defaultdict(AssignmentChange)
        self._lose(owned, changes)
        self._reconcile(owned, changes, now_us)
        return self._conclude(changes)

    # Questions.

    def held(self, member: str) -> list[AssignedPartition]:
        """The partitions that a member may read now, without those that are being revoked."""
        owned = self._known(member).owned
        return sorted(one for partition, one in owned.items() if partition not in self._release_by_us)

    def owner(self, topic: str, partition: int) -> str | None:
        """The member that reads a partition, or has not released it yet."""
        return self._owners.get((topic, partition))

    def check(self, member: str, topic: str, partition: int, epoch: int) -> None:
        """Raise MemberFenced unless the member may commit the partition under the assignment of this epoch."""
        one = self._known(member).owned.get((topic, partition))
        if one is not None and one.epoch == epoch:
            return
        subject = f"partition {partition} of {topic!r}"
        if one is not None:
            why = f"{subject} was assigned to {member!r} again: its epoch is {one.epoch} now, not {epoch}"
        elif (owner := self.owner(topic, partition)) is not None:
            why = f"{subject} is read by {owner!r}, not by {member!r}"
        else:
            why = f"{subject} is not assigned to {member!r}, nor to anyone else"
        raise MemberFenced(f"in group {self.name!r}, {why}")

    def _known(self, member: str) -> Member:
        known = self._members.get(member)
        if known is None:
            raise UnknownMember(
                f"group {self.name!r} has no member {member!r}: it left, sent no heartbeat for its session timeout, "
                "or has not joined since the broker started; join again"
            )
        return known

    # Every event frees partitions, chooses a target for each, and then reconciles the owners with the targets.

    def _match_topics(self, available: Mapping[str, int]) -> dict[str, frozenset[str]]:
        # Most members want the same topics, so each distinct combination is matched once.
        shared: dict[tuple[tuple[str, ...], tuple[str, ...]], frozenset[str]] = {}
        for member in self._members.values():
            key = (member.topics, member.patterns)
            if key not in shared:
                shared[key] = wanted_topics(*key, available)
        return {member.id: shared[member.topics, member.patterns] for member in self._members.values()}

    def _remove(self, member: Member) -> None:
        for partition in list(member.owned):
            self._free(partition)
        del self._members[member.id], self._wanted[member.id]
        self._expiries.remove(member.id)

    def _lose(self, partitions: Iterable[Partition], changes: Changes) -> None:
        """Take partitions from their owners at once."""
        for partition in partitions:
            owner = self._owners[partition]
            changes[owner].lost.append(self._members[owner].owned[partition])
            self._free(partition)

    def _free(self, partition: Partition) -> None:
        del self._members[self._owners.pop(partition)].owned[partition]
        if self._release_by_us.pop(partition, None) is not None:
            self._releases.remove(partition)

    def _is_revoked(self, member: Member, one: AssignedPartition) -> bool:
        partition = (one.topic, one.partition)
        return member.owned.get(partition) == one and partition in self._release_by_us

    def _divide(self, changes: Changes, now_us: int) -> None:
        """Choose a target for every partition, and move those that can move now."""
        # A revocation is final: partitions that are being revoked count as free.
        kept = self._owners.keys() - self._release_by_us.keys()
        self._targets = divide(self._wanted, self._counts, self._targets, kept)
        self._reconcile(self._owners.keys() | self._targets.keys(), changes, now_us)

    def _reconcile(self, partitions: Iterable[Partition], changes: Changes, now_us: int) -> None:
        """Assign free partitions to their targets, and revoke those whose owner is not the target."""
        for partition in partitions:
            owner, target = self._owners.get(partition), self._targets.get(partition)
            if owner is None and target is not None:
                one = AssignedPartition(*partition, self._generation + 1)
                self._owners[partition] = target
                self._members[target].owned[partition] = one
                changes[target].assigned.append(one)
            elif owner is not None and owner != target and partition not in self._release_by_us:
                self._release_by_us[partition] = now_us + self._members[owner].session_us
                self._releases.set(partition, self._release_by_us[partition])
                changes[owner].revoked.append(self._members[owner].owned[partition])

    def _conclude(self, changes: Changes) -> Changes:
        """Sort the changes, so that their order depends on the events alone, and advance the generation."""
        for change in changes.values():
            change.assigned.sort()
            change.revoked.sort()
            change.lost.sort()
        if any(change.assigned or change.revoked or change.lost for change in changes.values()):
            self._generation += 1
        return {member: changes[member] for member in sorted(changes)}
