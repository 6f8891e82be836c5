"""What a broker has to remember of leased subscriptions."""

import logging
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import Any

from headrace.broker.fact import Fact
from headrace.broker.signal import Signal
from headrace.engines.api import (
    EditRecord,
    FrozenIndex,
    JournaledPartition,
    LeasedPartition,
    PackedEdits,
    Partition,
    ReleaseNote,
    ReplayedPartition,
    SavedChunk,
    SavedRest,
    SettledChunks,
    new_replayed_partition,
    open_leased_partition,
    pack_edits,
    unpacked,
    whole,
)
from headrace.model.subscription import SubscriptionSettings

logger = logging.getLogger("headrace.broker")

_NO_PARTITIONS: dict[int, JournaledPartition] = {}


class SubscriptionSet(Fact, tag=20):
    """A leased subscription was made, or its settings changed."""

    id: int
    topic_id: int
    name: str
    created_us: int
    settings: dict[str, Any]
    starts: dict[int, int]
    """Where it begins in which partition; elsewhere it has all messages."""


class SubscriptionDeleted(Fact, tag=21):
    """A leased subscription was deleted."""

    id: int


class MessagesLeased(Fact, tag=22):
    """Messages were leased."""

    subscription: int
    partition: int
    number: int
    holder: str
    until_us: int
    offsets: bytes


class LeaseExtended(Fact, tag=23):
    """A lease was extended."""

    subscription: int
    partition: int
    number: int
    until_us: int
    offsets: bytes


class MessagesSettled(Fact, tag=24):
    """Messages were acknowledged, or went elsewhere."""

    subscription: int
    partition: int
    offsets: bytes


class MessagesReleased(Fact, tag=25):
    """Messages were released."""

    subscription: int
    partition: int
    offsets: bytes
    ready_us: list[int]
    counted: bool
    time_us: int
    holder: str = ""
    reason: str = ""
    states: dict[int, bytes] = {}  # noqa: RUF012 msgspec copies it


class MessageEdited(Fact, tag=26):
    """A message was changed."""

    topic_id: int
    partition: int
    offset: int
    edit: EditRecord
    moved: bool
    time_us: int


class IndexSnapshotBegun(Fact, tag=27):
    """How a subscription stands in a partition: chunks and the rest follow."""

    subscription: int
    partition: int
    end: int


class IndexSnapshotChunks(Fact, tag=28):
    """What has become of some messages of a partition."""

    subscription: int
    partition: int
    chunks: list[SavedChunk]


class IndexSnapshotRest(Fact, tag=29):
    """What else there is to remember."""

    subscription: int
    partition: int
    rest: SavedRest


class SubscriptionStateReset(Fact, tag=80):
    """What was known of a subscription's messages is forgotten: what follows tells it anew."""

    id: int


class SubscriptionBroken(Fact, tag=81):
    """What the journal says of a subscription could not be followed: it rests until it is reset."""

    id: int
    reason: str


class SettledEdits(Fact, tag=90):
    """Edits of messages that all subscriptions have settled, in snapshots."""

    topic_id: int
    partition: int
    edits: PackedEdits


LeasedFact = (
    SubscriptionSet
    | SubscriptionDeleted
    | MessagesLeased
    | LeaseExtended
    | MessagesSettled
    | MessagesReleased
    | MessageEdited
    | IndexSnapshotBegun
    | IndexSnapshotChunks
    | IndexSnapshotRest
    | SubscriptionStateReset
    | SubscriptionBroken
    | SettledEdits
)


class LeasedSubscriptionsState:
    """All of that together, in memory."""

    def __init__(self) -> None:
        self.subscriptions: dict[int, SubscriptionSet] = {}
        self.subscription_id = 0
        """The last one given out."""
        self.edits: dict[tuple[int, int], dict[int, EditRecord]] = {}
        """By topic id and partition, and by offset."""
        self.broken: dict[int, str] = {}
        """The subscriptions whose facts could not be followed, and why."""
        self.broke: Signal[int] = Signal()
        """The facts of a subscription cannot be followed any more."""
        self._settled_edits: dict[tuple[int, int], list[PackedEdits]] = {}
        """Of messages that all subscriptions have settled: they matter again to a new subscription."""
        self._settled_ends: dict[tuple[int, int], int] = {}
        """The last offset among those, or one behind it: edits of later messages need not be looked for there."""
        self.unsubscribed: dict[tuple[int, int], LeasedPartition] = {}
        """Indexes for queries of topics without a subscription, by topic id and partition: edits reach them too."""
        self._by_topic: dict[int, list[int]] = {}
        """The subscriptions of each topic."""
        self._replayed: dict[int, dict[int, ReplayedPartition]] = {}
        """By subscription and partition: what the facts add up to, until the partition is opened."""
        self._partitions: dict[int, dict[int, JournaledPartition]] = {}
        """By subscription and partition: what takes in the facts, a replayed partition or the live one."""

    def partition(self, subscription: int, partition: int) -> JournaledPartition:
        """What takes in a subscription's facts about a partition."""
        found = self._partitions.get(subscription, _NO_PARTITIONS).get(partition)
        return self._replay(subscription, partition) if found is None else found

    def _replay(self, subscription: int, partition: int) -> ReplayedPartition:
        start = self.subscriptions[subscription].starts.get(partition, 0)
        replayed = new_replayed_partition(start)
        self._replayed.setdefault(subscription, {})[partition] = replayed
        self._partitions.setdefault(subscription, {})[partition] = replayed
        return replayed

    def open_partition(
        self,
        subscription: int,
        number: int,
        partition: Partition,
        settings: SubscriptionSettings,
        ttl_us: int | None,
        address: str,
        delivered: Partition,
    ) -> LeasedPartition:
        """Turn the replayed state of a partition into a live one, which takes in the facts from now on."""
        self.partition(subscription, number)
        replayed, fact = self._replayed[subscription].pop(number), self.subscriptions[subscription]
        edits = self.edits_of(fact.topic_id, number)
        live = open_leased_partition(replayed, partition, address, settings, ttl_us, edits, delivered)
        self._partitions[subscription][number] = live
        return live

    def edits_of(self, topic_id: int, partition: int) -> dict[int, EditRecord]:
        """What was changed in a partition, for subscriptions that have not settled all of it."""
        return self.edits.setdefault((topic_id, partition), {})

    def known_end(self, topic_id: int, partition: int) -> int:
        """The end of the offsets of a partition that subscriptions and edits refer to."""
        ends = [1 + self.last_edited(topic_id, partition)]
        for number in self._by_topic.get(topic_id, ()):
            found = self._partitions.get(number, _NO_PARTITIONS).get(partition)
            start = self.subscriptions[number].starts.get(partition, 0)
            ends.append(start if found is None else found.end)
        return max(ends)

    def edit_of(self, topic_id: int, partition: int, offset: int) -> EditRecord:
        """What was changed about a message."""
        place = topic_id, partition
        found = self.edits.get(place, {}).get(offset)
        if found is None and offset <= self._settled_ends.get(place, -1):
            packs = reversed(self._settled_edits.get(place, []))
            found = next((edit for packed in packs if (edit := packed.get(offset)) is not None), None)
        return found or EditRecord(1)

    def recall_edits(self, topic_id: int) -> None:
        """Have all edits of a topic at hand again: somebody will look at settled messages."""
        for place in [place for place in self._settled_edits if place[0] == topic_id]:
            recalled: dict[int, EditRecord] = {}
            del self._settled_ends[place]
            for packed in self._settled_edits.pop(place):
                recalled.update(packed.items())
            edits = self.edits_of(*place)  # the indexes hold this very dictionary
            recalled.update(edits)
            edits.update(recalled)

    def apply(self, fact: LeasedFact) -> None:
        """Take in a fact."""
        match fact:
            case (
                MessagesLeased()
                | MessagesSettled()
                | LeaseExtended()
                | MessagesReleased()
                | IndexSnapshotBegun()
                | IndexSnapshotChunks()
                | IndexSnapshotRest()
            ):
                if fact.subscription in self.subscriptions and fact.subscription not in self.broken:
                    try:
                        self._apply_to(self.partition(fact.subscription, fact.partition), fact)
                    except Exception as error:  # noqa: BLE001 it is told
                        self._break(fact.subscription, error)
            case SubscriptionSet():
                if fact.id not in self.subscriptions:
                    self._by_topic.setdefault(fact.topic_id, []).append(fact.id)
                    self.recall_edits(fact.topic_id)
                self.subscriptions[fact.id] = fact
                self.subscription_id = max(self.subscription_id, fact.id)
            case SubscriptionDeleted():
                gone = self.subscriptions.pop(fact.id, None)
                if gone is not None:
                    self._by_topic[gone.topic_id].remove(fact.id)
                self._forget_indexes(fact.id)
            case SubscriptionStateReset():
                self._forget_indexes(fact.id)
            case SubscriptionBroken():
                self.broken[fact.id] = fact.reason
            case MessageEdited():
                self._edit(fact)
            case SettledEdits():
                self._keep_packed((fact.topic_id, fact.partition), fact.edits)

    def _break(self, subscription: int, error: Exception) -> None:
        """What goes wrong with one subscription is no harm to others: it rests until it is reset."""
        logger.error("leased subscription broken  id=%s", subscription, exc_info=error)
        self.broken[subscription] = f"{type(error).__name__}: {error}"
        self.broke(subscription)

    def _forget_indexes(self, subscription: int) -> None:
        self.broken.pop(subscription, None)
        self._replayed.pop(subscription, None)
        self._partitions.pop(subscription, None)

    def _apply_to(self, partition: JournaledPartition, fact: LeasedFact) -> None:
        match fact:
            case MessagesLeased():
                partition.apply_leased(fact.number, fact.holder, fact.until_us, unpacked(fact.offsets))
            case MessagesSettled():
                partition.apply_settled(unpacked(fact.offsets))
            case LeaseExtended():
                partition.apply_extended(fact.number, fact.until_us, unpacked(fact.offsets))
            case MessagesReleased():
                note = ReleaseNote(fact.time_us, fact.holder, fact.reason) if fact.reason else None
                offsets = unpacked(fact.offsets)
                partition.apply_returned(offsets, fact.ready_us, fact.counted, note, fact.states, fact.time_us)
            case IndexSnapshotBegun():
                self._replayed[fact.subscription][fact.partition].begin_snapshot(fact.end)
            case IndexSnapshotChunks():
                self._replayed[fact.subscription][fact.partition].load_chunks(fact.chunks)
            case IndexSnapshotRest():
                self._replayed[fact.subscription][fact.partition].load_rest(fact.rest)

    def _edit(self, fact: MessageEdited) -> None:
        edits = self.edits_of(fact.topic_id, fact.partition)
        edit = edits[fact.offset] = whole(fact.edit)
        for number in self._by_topic.get(fact.topic_id, ()):
            if number not in self.broken:
                try:
                    self.partition(number, fact.partition).apply_edit(fact.offset, edit, fact.moved, fact.time_us)
                except Exception as error:  # noqa: BLE001 it is told
                    self._break(number, error)
        view = self.unsubscribed.get((fact.topic_id, fact.partition))
        if view is not None:
            view.apply_edit(fact.offset, edit, fact.moved, fact.time_us)

    def facts(self) -> Iterator[Fact]:
        """The fewest facts that tell all of it as it is now, however late they are asked for."""
        edits = [(place, dict(edits)) for place, edits in self.edits.items()]
        settled = [(place, list(packs)) for place, packs in self._settled_edits.items()]
        frozen: list[tuple[int, int, FrozenIndex]] = []
        for subscription, partitions in list(self._partitions.items()):
            try:
                frozen += [(subscription, number, partition.frozen()) for number, partition in partitions.items()]
            except Exception as error:  # noqa: BLE001 it is told
                self._break(subscription, error)
        return self._told(edits, list(self.subscriptions.values()), settled, frozen)

    def _told(
        self,
        edits: list[tuple[tuple[int, int], dict[int, EditRecord]]],
        subscriptions: list[SubscriptionSet],
        settled: list[tuple[tuple[int, int], list[PackedEdits]]],
        frozen: list[tuple[int, int, FrozenIndex]],
    ) -> Iterator[Fact]:
        for (topic_id, partition), edited in edits:
            for offset, edit in edited.items():
                yield MessageEdited(topic_id, partition, offset, edit, moved=False, time_us=0)
        yield from subscriptions
        for (topic_id, partition), packs in settled:
            for packed in packs:  # after the subscriptions, each of which would recall them
                yield SettledEdits(topic_id, partition, packed)
        broken = dict(self.broken)
        for subscription, partition, index in frozen:
            try:
                yield IndexSnapshotBegun(subscription, partition, index.end)
                for chunks in index.chunks():
                    yield IndexSnapshotChunks(subscription, partition, chunks)
                for rest in index.rest():
                    yield IndexSnapshotRest(subscription, partition, rest)
            except Exception as error:  # noqa: BLE001 it is told
                self._break(subscription, error)
                broken[subscription] = self.broken[subscription]
        for subscription, reason in broken.items():
            yield SubscriptionBroken(subscription, reason)

    def settled(self, subscription: int, flush: Callable[[], None]) -> Generator[None, None, list[Fact]]:
        """The facts that tell only which messages a subscription has settled, and how often others were tried.

        They are found in slices, and tell how it is in the end, when `flush` has let all count that was decided.
        """
        saved: dict[int, SettledChunks] = {}
        for number, partition in list(self._partitions.get(subscription, _NO_PARTITIONS).items()):
            saved[number] = partition.settled_chunks()
            yield from saved[number].steps()
        flush()
        facts: list[Fact] = []
        for number, partition in self._partitions.get(subscription, _NO_PARTITIONS).items():
            end, groups = (saved[number] if number in saved else partition.settled_chunks()).finish()
            facts.append(IndexSnapshotBegun(subscription, number, end))
            facts += [IndexSnapshotChunks(subscription, number, chunks) for chunks in groups]
        return facts

    def forget_topic(self, topic_id: int, partitions: Iterable[int]) -> None:
        """A topic with these partitions is gone, and its subscriptions with it."""
        for subscription in list(self._by_topic.get(topic_id, ())):
            self.apply(SubscriptionDeleted(subscription))
        for partition in partitions:
            for table in (self.edits, self._settled_edits, self._settled_ends, self.unsubscribed):
                table.pop((topic_id, partition), None)
        self._by_topic.pop(topic_id, None)

    def forget_edits(self, topic_id: int, partition: int, first_offset: int, within: Iterable[int]) -> None:
        """Forget those of some edits whose messages are no more, and pack those that all subscriptions have settled.

        Versions never go back: an edit is remembered as long as its message is in the log.
        """
        place = topic_id, partition
        edits = self.edits.get(place, {})
        floor = self.settled_offset(topic_id, partition)
        settled: dict[int, EditRecord] = {}
        for offset in within:
            if offset < max(first_offset, floor) and offset in edits:
                edit = edits.pop(offset)
                if offset >= first_offset:
                    settled[offset] = edit
        if settled:
            self._keep_packed(place, pack_edits(settled))

    def _keep_packed(self, place: tuple[int, int], packed: PackedEdits) -> None:
        self._settled_edits.setdefault(place, []).append(packed)
        self._settled_ends[place] = max(self._settled_ends.get(place, -1), packed.last)

    def forget_settled_edits(self, topic_id: int, partition: int, first_offset: int) -> None:
        """Forget packed edits of messages that are no more."""
        packs = self._settled_edits.get((topic_id, partition))
        if packs:
            packs[:] = [packed for packed in packs if packed.last >= first_offset]

    def edited_offsets(self, topic_id: int, partition: int) -> set[int]:
        """Of which messages edits are known."""
        place = topic_id, partition
        return set(self.edits.get(place, ())).union(*(one.edited() for one in self._settled_edits.get(place, ())))

    def forget_messages(self, topic_id: int, partition: int, offsets: set[int]) -> None:
        """Forget the edits of messages that are no more."""
        place = topic_id, partition
        edits = self.edits.get(place, {})
        for offset in offsets.intersection(edits):
            del edits[offset]
        packs = self._settled_edits.get(place, [])
        for at, packed in enumerate(packs):
            if not offsets.isdisjoint(packed.edited()):
                packs[at] = pack_edits({offset: edit for offset, edit in packed.items() if offset not in offsets})
        packs[:] = [packed for packed in packs if packed.edited()]

    def has_edits(self, topic_id: int, partition: int) -> bool:
        """Whether anything is known of edits in a partition."""
        place = topic_id, partition
        return bool(self.edits.get(place) or self._settled_edits.get(place))

    def has_subscriptions(self, topic_id: int) -> bool:
        """Whether a topic has a leased subscription."""
        return bool(self._by_topic.get(topic_id))

    def settled_offset(self, topic_id: int, partition: int) -> int:
        """All subscriptions of a topic have settled what comes before; 0 if it has none."""
        floors = [self.partition(number, partition).floor for number in self._by_topic.get(topic_id, ())]
        return min(floors, default=0)

    def last_edited(self, topic_id: int, partition: int) -> int:
        """The last offset of which an edit is known; -1 if there is none."""
        place = topic_id, partition
        return max(
            max(self.edits.get(place, ()), default=-1),
            self._settled_ends.get(place, -1),
        )
