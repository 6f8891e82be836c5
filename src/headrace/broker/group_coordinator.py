"""The group coordinator: memberships by connection, assignments pushed to members, and committed offsets."""

import logging
from collections.abc import Generator, Iterable
from functools import partial
from typing import Any, NamedTuple

from headrace.broker.active_partition import ActivePartition
from headrace.broker.deadlines import Deadlines
from headrace.broker.facts import GroupDeleted, OffsetsCommitted
from headrace.broker.groups import AssignedPartition, Changes, Group
from headrace.broker.ledger import Ledger
from headrace.broker.pending_answer import PendingAnswer
from headrace.broker.ports import Ports, Session
from headrace.broker.signal import Signal
from headrace.broker.topic_interests import TopicInterests
from headrace.broker.topics import Topic, TopicRegistry
from headrace.model.durability import Durability
from headrace.model.errors import GroupInUse, GroupNotFound, HeadraceError, InvalidArgument, UnknownMember
from headrace.model.request import Answer
from headrace.model.requests import (
    Assignment,
    Commit,
    Done,
    GroupDelete,
    GroupDescribe,
    GroupInfo,
    GroupJoin,
    GroupJoined,
    GroupLeave,
    GroupList,
    GroupPartition,
    GroupRelease,
    Groups,
    GroupSeek,
    GroupSummary,
    Offsets,
    OffsetsFound,
    PartitionOffset,
)
from headrace.model.topic import DEFAULT_TENANT, checked_group, parse_topic, tenant_of

logger = logging.getLogger("headrace.broker")

_SESSION_MS_MIN, _SESSION_MS_MAX = 100, 3_600_000
_MEMBER_CHARS_MAX = 200
_RETRY_US = 1_000_000
_TICKED_MAX = 100
"""Maximum groups per tick; if more are due, the next tick follows at once."""


class _Start(NamedTuple):
    """The start offset of a group that has not committed any."""

    at: str
    time_us: int


class GroupCoordinator:
    """Coordinates all groups."""

    def __init__(self, topics: TopicRegistry, ledger: Ledger, ports: Ports) -> None:
        self._topics = topics
        self._ledger = ledger
        self._ports = ports
        self._groups: dict[str, Group] = {}
        """The groups that have members."""
        self._starts: dict[str, _Start] = {}
        self._sessions: dict[tuple[str, str], Session] = {}
        self._interests = TopicInterests()
        self._deadlines = Deadlines[str]()
        """When each group is due for a tick, or earlier: heartbeats do not move it."""
        self._epoch = ledger.state.session << 32
        """At least the generation of every group that has lost all of its members; new groups begin behind it."""
        self.making: Signal[str] = Signal()
        """Emitted before a group is made; a listener refuses by raising."""
        self.group_changed: Signal[str, str, int] = Signal()
        """A group was `created`, `altered` or `deleted`, with the time."""
        self.member_changed: Signal[str, str, str, str, int] = Signal()
        """A member has `joined` or `left`, or `expired`: the group, the member, its client and the time."""
        topics.changed.connect(self.topic_changed)

    def __len__(self) -> int:
        return len(self._ledger.state.groups)

    def join(self, session: Session, request: GroupJoin, now_us: int) -> GroupJoined:
        """Add a member to a group, or attach one that has reconnected."""
        name = checked_group(request.group)
        if not 0 < len(request.member) <= _MEMBER_CHARS_MAX:
            raise InvalidArgument(f"a member's id must have 1 to {_MEMBER_CHARS_MAX} characters")
        if not _SESSION_MS_MIN <= request.session_ms <= _SESSION_MS_MAX:
            raise InvalidArgument(
                f"session_ms must be {_SESSION_MS_MIN} to {_SESSION_MS_MAX}, not {request.session_ms}"
            )
        if not request.topics and not request.patterns:
            raise InvalidArgument("a member must name at least one topic or pattern")
        if request.start not in ("earliest", "latest", "time"):
            raise InvalidArgument(f"start must be earliest, latest or time, not {request.start}")
        if request.missing not in ("refuse", "create", "wait"):
            raise InvalidArgument(f"missing must be refuse, create or wait, not {request.missing}")
        for wanted in (*request.topics, *request.patterns):
            _check_tenants(name, wanted)
        if self.is_new(name):
            self.making(name)
        topics = [self._wanted(topic, request.missing, now_us) for topic in request.topics]
        group = self._groups.get(name)
        if group is None:
            group = self._groups[name] = Group(name, self._epoch)
            if name not in self._ledger.state.groups:
                self.group_changed(name, "created", now_us)
        if request.member not in group.members:
            self.member_changed(name, "joined", request.member, session.client, now_us)
        self._starts.setdefault(name, _Start(request.start, request.start_us))
        self._attach(session, name, request.member)
        self._interests.set(name, request.member, topics, request.patterns)
        changes = group.join(
            request.member,
            session.client,
            topics,
            request.patterns,
            request.session_ms * 1000,
            self._topics.partitions,
            now_us,
        )
        if request.member in changes:
            changes[request.member].assigned = []  # the answer lists them
        self._push(group, changes, now_us)
        return GroupJoined(group.generation, self._start_offsets(group, group.held(request.member), now_us))

    def _wanted(self, name: str, missing: str, now_us: int) -> str:
        """The full name of a topic that a member wants; with `wait` the topic need not exist."""
        if missing == "create":
            return str(self._topics.get_or_create(name, now_us))
        if missing == "wait" and self._topics.find(name) is None:
            return str(parse_topic(name))
        return str(self._topics.get(name))

    def release(self, session: Session, request: GroupRelease, now_us: int) -> Answer:
        """Release revoked partitions that a member has finished with."""
        group = self._member_of(session, request.group, request.member)
        places = [AssignedPartition(self._name(place.topic), place.partition, place.epoch) for place in request.places]
        self._push(group, group.release(request.member, places, now_us), now_us)
        return Done()

    def leave(self, session: Session, request: GroupLeave, now_us: int) -> Answer:
        """Remove a member from its group."""
        group = self._member_of(session, request.group, request.member)
        self._detach(group.name, request.member)
        self.member_changed(group.name, "left", request.member, session.client, now_us)
        self._push(group, group.leave(request.member, now_us), now_us)
        return Done()

    def commit(self, _session: Session, request: Commit, now_us: int) -> PendingAnswer[Answer]:
        """Commit offsets of a group."""
        moved = self.checked_move(request.group, request.member, request.places)
        is_new = self.is_new(moved.group)
        self._ledger.record(now_us, moved)
        if is_new:
            self.group_changed(moved.group, "created", now_us)
        return self._ledger.durably(Done())

    def is_new(self, name: str) -> bool:
        """Whether there is no group of that name yet."""
        return name not in self._ledger.state.groups and name not in self._groups

    def checked_move(self, name: str, member: str, places: list[PartitionOffset]) -> OffsetsCommitted:
        """The fact that a commit records; raises if the commit is not allowed."""
        name = checked_group(name)
        group = self._groups.get(name)
        if not member and group is not None and group.members:
            raise GroupInUse(
                f"the group {name} has members, and only they may commit; commit as a member, or end them first"
            )
        if member and group is None:
            raise UnknownMember(f"the group {name} has no members; join it first")
        found = []
        for place in places:
            topic = self._topics.get(place.topic)
            _check_tenants(name, str(topic))
            active = self._topics.active(topic, place.partition)
            if not 0 <= place.offset <= max(active.end_offset, active.partition.first_offset):
                raise InvalidArgument(
                    f"offset {place.offset} is outside partition {place.partition} of {topic}; commit an offset in it"
                )
            if member and group is not None:
                group.check(member, str(topic), place.partition, place.epoch)
            found.append((topic.id, place.partition, place.offset))
        if self.is_new(name):
            self.making(name)
        return OffsetsCommitted(name, found)

    def listed(self, session: Session, _request: GroupList, _now_us: int) -> Answer:
        """All groups of the session's tenant."""
        found = []
        for name in self.names():
            if tenant_of(name) != session.tenant:
                continue
            places = self._group_partitions(name)
            topics = sorted({place.topic for place in places})
            lag = sum(place.lag for place in places)
            found.append(GroupSummary(name, self.count_members(name), topics, lag))
        return Groups(found)

    def names(self) -> list[str]:
        """The names of all groups, with their tenants."""
        with_members = (name for name, group in self._groups.items() if group.members)
        return sorted({*self._ledger.state.groups, *with_members})

    def count_members(self, name: str) -> int:
        """How many members a group has; 0 if there is no such group."""
        group = self._groups.get(name)
        return 0 if group is None else len(group.members)

    def lag(self, name: str) -> Generator[None, Any, int]:
        """How many messages a group has yet to read; yields after each partition that had to be opened."""
        places = yield from self._partition_steps(name)
        return sum(place.lag for place in places)

    def describe(self, _session: Session, request: GroupDescribe, _now_us: int) -> Answer:
        """Describe a group."""
        return self._info(self._known(request.group))

    def seek(self, _session: Session, request: GroupSeek, now_us: int) -> PendingAnswer[Answer]:
        """Set the offsets of a group; its members continue from there."""
        name = self._known(request.group)
        topic = self._topics.get(request.topic)
        _check_tenants(name, str(topic))
        numbers = request.partitions or list(range(topic.settings.partitions))
        places = []
        for number in numbers:
            active = self._topics.active(topic, number)
            offset = request.offset if request.to == "offset" else offset_at(active, request.to, request.time_us)
            active.check_offset(offset)
            places.append((topic.id, number, offset))
        self._ledger.record(now_us, OffsetsCommitted(name, places))
        self.group_changed(name, "altered", now_us)
        group = self._groups.get(name)
        if group is not None:
            self._push(group, group.restart(str(topic), numbers, now_us), now_us)
        return self._ledger.durably(self._info(name))

    def delete(self, _session: Session, request: GroupDelete, now_us: int) -> PendingAnswer[Answer]:
        """Delete a group and its offsets."""
        name = self._known(request.group)
        if name in self._groups and self._groups[name].members:
            raise GroupInUse(f"the group {name} has members; stop them first")
        self._ledger.record(now_us, GroupDeleted(name))
        self._deadlines.remove(name)
        self._groups.pop(name, None)
        self._starts.pop(name, None)
        self.group_changed(name, "deleted", now_us)
        return self._ledger.durably(Done())

    def remove(self, name: str, now_us: int) -> None:
        """Delete a group with its members, whose tenant is deleted."""
        self._ledger.record(now_us, GroupDeleted(name))
        group = self._groups.pop(name, None)
        if group is not None:
            self._epoch = max(self._epoch, group.generation)
            for member in list(group.members):
                self._detach(name, member)
        self._deadlines.remove(name)
        self._starts.pop(name, None)
        self.group_changed(name, "deleted", now_us)

    def touch(self, session: Session, now_us: int) -> None:
        """Record a heartbeat for all members of a connection."""
        for name, member in session.memberships:
            if name in self._groups and member in self._groups[name].members:
                self._groups[name].touch(member, now_us)

    def disconnect(self, session: Session) -> None:
        """Detach the members of a closed connection; they may reconnect until their sessions time out."""
        for key in session.memberships:
            if self._sessions.get(key) is session:
                del self._sessions[key]
        session.memberships.clear()

    def tick(self, now_us: int) -> None:
        """Remove members whose sessions have timed out."""
        for name in self._deadlines.pop_due(now_us, _TICKED_MAX):
            group = self._groups.get(name)
            if group is None:
                continue
            try:
                self._push(group, group.tick(now_us), now_us)
            except Exception as error:  # noqa: BLE001 logged; all other groups continue
                self._deadlines.set(name, now_us + _RETRY_US)
                self._ledger.failures.note(("group", name), error, "group tick failed; trying again  group=%s", name)
            else:
                self._ledger.failures.worked(("group", name))

    def next_tick_us(self) -> int | None:
        """When the next member may expire, or earlier if it has sent a heartbeat since."""
        return self._deadlines.next_us()

    def topic_changed(self, topic: Topic, now_us: int) -> None:
        """Divide partitions anew after a topic was created, deleted or grew."""
        for name in self._interests.groups(str(topic)):
            group = self._groups.get(name)
            if group is not None:
                self._push(group, group.topics_changed(self._topics.partitions, now_us), now_us)

    def consumed_offset(self, topic: Topic, partition: int) -> int | None:
        """The lowest offset that any group has committed; None when no group reads the topic or a view of it."""
        state, topics = self._ledger.state, self._topics.with_views(topic)
        return min((offset for each in topics for offset in state.positions(each.id, partition).values()), default=None)

    def _attach(self, session: Session, name: str, member: str) -> None:
        key = name, member
        before = self._sessions.get(key)
        if before is not None and before is not session:
            before.memberships.discard(key)
        self._sessions[key] = session
        session.memberships.add(key)

    def _detach(self, name: str, member: str) -> None:
        self._interests.remove(name, member)
        session = self._sessions.pop((name, member), None)
        if session is not None:
            session.memberships.discard((name, member))

    def _member_of(self, session: Session, name: str, member: str) -> Group:
        name = checked_group(name)
        if (name, member) not in session.memberships or name not in self._groups:
            raise UnknownMember(f"{member} is not a member of the group {name} on this connection; join again")
        return self._groups[name]

    def _push(self, group: Group, changes: Changes, now_us: int) -> None:
        """Push assignment changes to the members, after the current answer."""
        for member, change in changes.items():
            if member not in group.members:
                self._push_lost(group, member, change.lost, now_us)
                continue
            session = self._sessions.get((group.name, member))
            if session is None or not (change.assigned or change.revoked or change.lost):
                continue
            assignment = Assignment(
                group.name,
                member,
                group.generation,
                self._start_offsets(group, change.assigned, now_us),
                _without_offsets(change.revoked),
                _without_offsets(change.lost),
            )
            self._ports.call_soon(partial(session.push, assignment))
        due_us = group.next_tick_us()
        if due_us is not None:
            self._deadlines.set(group.name, due_us)
        if not group.members:
            self._epoch = max(self._epoch, group.generation)
            self._deadlines.remove(group.name)
            self._starts.pop(group.name, None)
            if self._groups.pop(group.name, None) is not None and group.name not in self._ledger.state.groups:
                self.group_changed(group.name, "deleted", now_us)  # it has committed nothing

    def _push_lost(self, group: Group, member: str, lost: Iterable[AssignedPartition], now_us: int) -> None:
        """Notify an expired member, if it is still connected."""
        session = self._sessions.get((group.name, member))
        self.member_changed(group.name, "expired", member, "" if session is None else session.client, now_us)
        self._detach(group.name, member)
        if session is not None:
            assignment = Assignment(group.name, member, group.generation, lost=_without_offsets(lost))
            self._ports.call_soon(partial(session.push, assignment))

    def _start_offsets(self, group: Group, assigned: Iterable[AssignedPartition], now_us: int) -> list[PartitionOffset]:
        """Assigned partitions with their start offsets; commits the start of partitions without a committed offset."""
        positions = self._ledger.state.groups.get(group.name, {})
        start = self._starts.get(group.name, _Start("earliest", 0))
        places, new = [], []
        for name, number, epoch in assigned:
            topic = self._topics.known(name)
            offset = positions.get((topic.id, number))
            if offset is None or topic.settings.durability < Durability.SYNCED:
                active = self._opened(topic, number)
                offset = positions.get((topic.id, number))  # opening it may have moved the group past lost messages
                if offset is None and active is not None:
                    offset = offset_at(active, start.at, start.time_us)
                    new.append((topic.id, number, offset))
            places.append(PartitionOffset(name, number, offset or 0, epoch))
        try:
            if new:
                self._ledger.record(now_us, OffsetsCommitted(group.name, new))
        except HeadraceError as error:
            # The members start there all the same, and their commits will record the offsets.
            logger.warning("group start offsets not recorded  group=%s reason=%s", group.name, error)
        return places

    def _opened(self, topic: Topic, number: int) -> ActivePartition | None:
        try:
            return self._topics.active(topic, number)
        except HeadraceError as error:
            logger.warning("partition unreadable  topic=%s partition=%s reason=%s", topic, number, error)
            return None  # reading from it answers with the error

    def _known(self, name: str) -> str:
        name = checked_group(name)
        if name not in self._ledger.state.groups and name not in self._groups:
            raise GroupNotFound(f"there is no group {name}; groups exist once a member has joined or committed")
        return name

    def _name(self, topic: str) -> str:
        found = self._topics.find(topic)
        return topic if found is None else str(found)

    def _info(self, name: str) -> GroupInfo:
        group = self._groups.get(name)
        members = {member.id: member.client for member in group.members.values()} if group is not None else {}
        return GroupInfo(name, group.generation if group is not None else 0, members, self._group_partitions(name))

    def _group_partitions(self, name: str) -> list[GroupPartition]:
        steps = self._partition_steps(name)
        while True:
            try:
                next(steps)
            except StopIteration as ended:
                places: list[GroupPartition] = ended.value
                return places

    def _partition_steps(self, name: str) -> Generator[None, Any, list[GroupPartition]]:
        """The partitions of a group; yields after each that had to be opened."""
        places = []
        for topic_id, number in sorted(self._ledger.state.groups.get(name, {})):
            topic = self._topics.by_id.get(topic_id)
            if topic is None:
                continue  # deleted
            end, failure = 0, ""
            is_opening = number not in topic.active_partitions
            try:
                end = self._topics.active(topic, number).end_offset
            except (HeadraceError, OSError) as error:  # one unreadable partition must not hide all others
                failure = str(error)
            # Read after opening, which may have moved it; the group may be gone since the last slice.
            offset = self._ledger.state.groups.get(name, {}).get((topic_id, number))
            if offset is None:
                continue
            group = self._groups.get(name)
            owner = group.owner(str(topic), number) if group is not None else None
            lag = max(end - offset, 0)
            places.append(GroupPartition(str(topic), number, offset, end or offset, lag, owner or "", failure))
            if is_opening:
                yield
        return places


def _check_tenants(group: str, topic: str) -> None:
    """Refuse topics and patterns of another tenant; groups of the default tenant may read any."""
    if tenant_of(group) not in (DEFAULT_TENANT, tenant_of(topic)):
        raise InvalidArgument(
            f"the group {group} may read topics of its own tenant only, not {topic}; use a group of that tenant"
        )


def find_offsets(topics: TopicRegistry, request: Offsets) -> OffsetsFound:
    """The offsets of a topic's partitions at earliest, latest or a timestamp."""
    topic = topics.get(request.topic)
    numbers = request.partitions or range(topic.settings.partitions)
    return OffsetsFound(
        {number: offset_at(topics.active(topic, number), request.at, request.time_us) for number in numbers}
    )


def offset_at(active: ActivePartition, at: str, time_us: int) -> int:
    """The offset of a partition at earliest, latest or a timestamp."""
    if at == "earliest":
        return active.partition.first_offset
    if at == "latest":
        return active.end_offset
    if at == "time":
        return min(active.partition.find_time(time_us), max(active.end_offset, active.partition.first_offset))
    raise InvalidArgument(f"at must be earliest, latest or time, not {at}")


def _without_offsets(assigned: Iterable[AssignedPartition]) -> list[PartitionOffset]:
    return [PartitionOffset(topic, partition, 0, epoch) for topic, partition, epoch in assigned]
