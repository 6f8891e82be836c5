"""Groups at work: who is a member through which connection, and how far each group has come."""

import logging
from collections.abc import Iterable
from functools import partial
from typing import NamedTuple

from headrace.broker.active_partition import ActivePartition
from headrace.broker.deadlines import Deadlines
from headrace.broker.facts import GroupDeleted, OffsetsCommitted
from headrace.broker.groups import AssignedPartition, Changes, Group
from headrace.broker.ledger import Ledger
from headrace.broker.pending_answer import PendingAnswer
from headrace.broker.ports import Ports, Session
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
_AGAIN_US = 1_000_000
_TICKED_MAX = 100
"""Groups that are looked at in one tick: the next one comes at once if more are due."""


class _Start(NamedTuple):
    """Where a group begins that has no position yet."""

    at: str
    time_us: int


class GroupCoordinator:
    """All groups."""

    def __init__(self, topics: TopicRegistry, ledger: Ledger, ports: Ports) -> None:
        self._topics = topics
        self._ledger = ledger
        self._ports = ports
        self._groups: dict[str, Group] = {}
        """Those with members."""
        self._starts: dict[str, _Start] = {}
        self._sessions: dict[tuple[str, str], Session] = {}
        self._interests = TopicInterests()
        self._deadlines = Deadlines[str]()
        """When a group has something to do, or earlier: a sign of life does not change it."""
        self._epoch = ledger.state.session << 32
        """No group that has no members any more has had a greater one."""
        topics.changed.connect(self.topic_changed)

    def __len__(self) -> int:
        return len(self._ledger.state.groups)

    def join(self, session: Session, request: GroupJoin, now_us: int) -> GroupJoined:
        """A member comes, or comes back after its connection broke."""
        name = checked_group(request.group)
        if not 0 < len(request.member) <= _MEMBER_CHARS_MAX:
            raise InvalidArgument(f"a member's id has 1 to {_MEMBER_CHARS_MAX} characters")
        if not _SESSION_MS_MIN <= request.session_ms <= _SESSION_MS_MAX:
            raise InvalidArgument(f"session_ms is {_SESSION_MS_MIN} to {_SESSION_MS_MAX}, not {request.session_ms}")
        if not request.topics and not request.patterns:
            raise InvalidArgument("a member wants some topics, or a pattern of them")
        if request.start not in ("earliest", "latest", "time"):
            raise InvalidArgument(f"a group starts at earliest, latest or time, not {request.start}")
        if request.missing not in ("refuse", "create", "wait"):
            raise InvalidArgument(f"for missing topics say refuse, create or wait, not {request.missing}")
        for wanted in (*request.topics, *request.patterns):
            _check_tenants(name, wanted)
        topics = [self._wanted(topic, request.missing, now_us) for topic in request.topics]
        group = self._groups.get(name)
        if group is None:
            group = self._groups[name] = Group(name, self._epoch)
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
            changes[request.member].assigned = []  # the answer has them
        self._push(group, changes, now_us)
        return GroupJoined(group.generation, self._places(group, group.held(request.member), now_us))

    def _wanted(self, name: str, missing: str, now_us: int) -> str:
        """The whole name of a topic that a member wants; one that is waited for may not exist."""
        if missing == "create":
            return str(self._topics.get_or_create(name, now_us))
        if missing == "wait" and self._topics.find(name) is None:
            return str(parse_topic(name))
        return str(self._topics.get(name))

    def release(self, session: Session, request: GroupRelease, now_us: int) -> Answer:
        """A member has finished with partitions that were revoked."""
        group = self._member_of(session, request.group, request.member)
        places = [AssignedPartition(self._name(place.topic), place.partition, place.epoch) for place in request.places]
        self._push(group, group.release(request.member, places, now_us), now_us)
        return Done()

    def leave(self, session: Session, request: GroupLeave, now_us: int) -> Answer:
        """A member goes."""
        group = self._member_of(session, request.group, request.member)
        self._detach(group.name, request.member)
        self._push(group, group.leave(request.member, now_us), now_us)
        return Done()

    def commit(self, _session: Session, request: Commit, now_us: int) -> PendingAnswer[Answer]:
        """A group has come so far."""
        moved = self.checked_move(request.group, request.member, request.places)
        self._ledger.record(now_us, moved)
        return self._ledger.durably(Done())

    def checked_move(self, name: str, member: str, places: list[PartitionOffset]) -> OffsetsCommitted:
        """What a commit means, if it may be made."""
        name = checked_group(name)
        group = self._groups.get(name)
        if not member and group is not None and group.members:
            raise GroupInUse(f"the group {name} has members: only they commit")
        if member and group is None:
            raise UnknownMember(f"the group {name} has no members; join it first")
        found = []
        for place in places:
            topic = self._topics.get(place.topic)
            _check_tenants(name, str(topic))
            active = self._topics.active(topic, place.partition)
            if not 0 <= place.offset <= max(active.end_offset, active.partition.first_offset):
                raise InvalidArgument(f"{topic} partition {place.partition} has no offset {place.offset} to go on with")
            if member and group is not None:
                group.check(member, str(topic), place.partition, place.epoch)
            found.append((topic.id, place.partition, place.offset))
        return OffsetsCommitted(name, found)

    def listed(self, session: Session, _request: GroupList, _now_us: int) -> Answer:
        """All groups of the session's tenant."""
        state = self._ledger.state
        names = sorted({*state.groups, *(name for name, group in self._groups.items() if group.members)})
        found = []
        for name in names:
            if tenant_of(name) != session.tenant:
                continue
            places = self._group_places(name)
            members = self._groups[name].members if name in self._groups else {}
            topics = sorted({place.topic for place in places})
            found.append(GroupSummary(name, len(members), topics, sum(place.lag for place in places)))
        return Groups(found)

    def describe(self, _session: Session, request: GroupDescribe, _now_us: int) -> Answer:
        """A group."""
        return self._info(self._known(request.group))

    def seek(self, _session: Session, request: GroupSeek, now_us: int) -> PendingAnswer[Answer]:
        """Move a group; its members go on from there."""
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
        group = self._groups.get(name)
        if group is not None:
            self._push(group, group.restart(str(topic), numbers, now_us), now_us)
        return self._ledger.durably(self._info(name))

    def delete(self, _session: Session, request: GroupDelete, now_us: int) -> PendingAnswer[Answer]:
        """Forget a group."""
        name = self._known(request.group)
        if name in self._groups and self._groups[name].members:
            raise GroupInUse(f"the group {name} has members; end them first")
        self._ledger.record(now_us, GroupDeleted(name))
        self._deadlines.remove(name)
        self._groups.pop(name, None)
        self._starts.pop(name, None)
        return self._ledger.durably(Done())

    def touch(self, session: Session, now_us: int) -> None:
        """A sign of life of all members behind a connection."""
        for name, member in session.memberships:
            if name in self._groups and member in self._groups[name].members:
                self._groups[name].touch(member, now_us)

    def disconnect(self, session: Session) -> None:
        """The connection is gone; its members have time to come back."""
        for key in session.memberships:
            if self._sessions.get(key) is session:
                del self._sessions[key]
        session.memberships.clear()

    def tick(self, now_us: int) -> None:
        """Give up members that were out of touch for too long."""
        for name in self._deadlines.pop_due(now_us, _TICKED_MAX):
            group = self._groups.get(name)
            if group is None:
                continue
            try:
                self._push(group, group.tick(now_us), now_us)
            except Exception as error:  # noqa: BLE001 it is told; all others go on
                self._deadlines.set(name, now_us + _AGAIN_US)
                self._ledger.failures.note(("group", name), error, "group tick failed; trying again  group=%s", name)
            else:
                self._ledger.failures.worked(("group", name))

    def next_tick_us(self) -> int | None:
        """When a member may have to be given up; or earlier, if something was heard of it since."""
        return self._deadlines.next_us()

    def topic_changed(self, topic: Topic, now_us: int) -> None:
        """A topic came, went, or got more partitions."""
        for name in self._interests.groups(str(topic)):
            group = self._groups.get(name)
            if group is not None:
                self._push(group, group.topics_changed(self._topics.partitions, now_us), now_us)

    def consumed_offset(self, topic: Topic, partition: int) -> int | None:
        """What every group has passed; None when no group reads the topic."""
        return min(self._ledger.state.positions(topic.id, partition).values(), default=None)

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
            raise UnknownMember(f"{member} is no member of the group {name} on this connection; join again")
        return self._groups[name]

    def _push(self, group: Group, changes: Changes, now_us: int) -> None:
        """Tell members what changes for them, after what is being answered now."""
        for member, change in changes.items():
            if member not in group.members:
                self._tell_lost(group, member, change.lost)
                continue
            session = self._sessions.get((group.name, member))
            if session is None or not (change.assigned or change.revoked or change.lost):
                continue
            assignment = Assignment(
                group.name,
                member,
                group.generation,
                self._places(group, change.assigned, now_us),
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
            self._groups.pop(group.name, None)
            self._starts.pop(group.name, None)

    def _tell_lost(self, group: Group, member: str, lost: Iterable[AssignedPartition]) -> None:
        """A member was given up; if its connection is still there it hears of it."""
        session = self._sessions.get((group.name, member))
        self._detach(group.name, member)
        if session is not None:
            assignment = Assignment(group.name, member, group.generation, lost=_without_offsets(lost))
            self._ports.call_soon(partial(session.push, assignment))

    def _places(self, group: Group, assigned: Iterable[AssignedPartition], now_us: int) -> list[PartitionOffset]:
        """Where a member begins; a group without a position gets one now, and keeps it."""
        positions = self._ledger.state.groups.get(group.name, {})
        start = self._starts.get(group.name, _Start("earliest", 0))
        places, new = [], []
        for name, number, epoch in assigned:
            topic = self._topics.known(name)
            offset = positions.get((topic.id, number))
            if offset is None or topic.settings.durability is not Durability.SYNCED:
                active = self._opened(topic, number)
                offset = positions.get((topic.id, number))  # messages may be gone, and the group moved behind them
                if offset is None and active is not None:
                    offset = offset_at(active, start.at, start.time_us)
                    new.append((topic.id, number, offset))
            places.append(PartitionOffset(name, number, offset or 0, epoch))
        try:
            if new:
                self._ledger.record(now_us, OffsetsCommitted(group.name, new))
        except HeadraceError as error:
            # The members begin there all the same; their commits will say where the group is.
            logger.warning("start offsets of a group not recorded  group=%s reason=%s", group.name, error)
        return places

    def _opened(self, topic: Topic, number: int) -> ActivePartition | None:
        try:
            return self._topics.active(topic, number)
        except HeadraceError as error:
            logger.warning("partition unreadable  topic=%s partition=%s reason=%s", topic, number, error)
            return None  # whoever reads there is told why that does not work

    def _known(self, name: str) -> str:
        name = checked_group(name)
        if name not in self._ledger.state.groups and name not in self._groups:
            raise GroupNotFound(f"there is no group {name}")
        return name

    def _name(self, topic: str) -> str:
        found = self._topics.find(topic)
        return topic if found is None else str(found)

    def _info(self, name: str) -> GroupInfo:
        group = self._groups.get(name)
        members = {member.id: member.client for member in group.members.values()} if group is not None else {}
        return GroupInfo(name, group.generation if group is not None else 0, members, self._group_places(name))

    def _group_places(self, name: str) -> list[GroupPartition]:
        group = self._groups.get(name)
        places = []
        positions = self._ledger.state.groups.get(name, {})
        for topic_id, number in sorted(positions):
            topic = self._topics.by_id.get(topic_id)
            if topic is None:
                continue  # deleted
            end, trouble = 0, ""
            try:
                end = self._topics.active(topic, number).end_offset
            except (HeadraceError, OSError) as error:  # one that cannot be opened must not hide all others
                trouble = str(error)
            offset = positions[topic_id, number]  # only now: opening a partition may have moved it
            owner = group.owner(str(topic), number) if group is not None else None
            lag = max(end - offset, 0)
            places.append(GroupPartition(str(topic), number, offset, end or offset, lag, owner or "", trouble))
        return places


def _check_tenants(group: str, topic: str) -> None:
    """Refuse a topic, or a pattern of topics, to a group of another tenant; a group of the default one reads any."""
    if tenant_of(group) not in (DEFAULT_TENANT, tenant_of(topic)):
        raise InvalidArgument(f"the group {group} reads topics of its own tenant, not {topic}; use another group")


def find_offsets(topics: TopicRegistry, request: Offsets) -> OffsetsFound:
    """The offsets of a topic's partitions at a time."""
    topic = topics.get(request.topic)
    numbers = request.partitions or range(topic.settings.partitions)
    return OffsetsFound(
        {number: offset_at(topics.active(topic, number), request.at, request.time_us) for number in numbers}
    )


def offset_at(active: ActivePartition, at: str, time_us: int) -> int:
    """An offset of a partition by words."""
    if at == "earliest":
        return active.partition.first_offset
    if at == "latest":
        return active.end_offset
    if at == "time":
        return min(active.partition.find_time(time_us), max(active.end_offset, active.partition.first_offset))
    raise InvalidArgument(f"an offset is asked for by earliest, latest or time, not {at}")


def _without_offsets(assigned: Iterable[AssignedPartition]) -> list[PartitionOffset]:
    return [PartitionOffset(topic, partition, 0, epoch) for topic, partition, epoch in assigned]
