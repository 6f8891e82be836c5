"""What a broker has to remember of leased subscriptions."""

import logging
from collections.abc import Callable, Iterator
from typing import Any

from headrace.broker.fact import Fact
from headrace.engines.api import (
    Content,
    EditRecord,
    LeasedIndex,
    Note,
    SavedChunk,
    SavedRest,
    saving,
    unpacked,
)

logger = logging.getLogger("headrace.broker")


class SubscriptionSet(Fact, tag=20):
    """A leased subscription was made, or its settings changed."""

    id: int
    topic_id: int
    name: str
    created_us: int
    settings: dict[str, Any]
    starts: dict[int, int]
    """Where it begins in which partition; elsewhere it has all messages."""


class SubscriptionGone(Fact, tag=21):
    """A leased subscription was deleted."""

    id: int


class HandedOut(Fact, tag=22):
    """Messages were leased."""

    subscription: int
    partition: int
    number: int
    holder: str
    until_us: int
    offsets: bytes


class KeptLonger(Fact, tag=23):
    """A lease was extended."""

    subscription: int
    partition: int
    number: int
    until_us: int
    offsets: bytes


class Finished(Fact, tag=24):
    """Messages were acknowledged, or went elsewhere."""

    subscription: int
    partition: int
    offsets: bytes


class GivenBack(Fact, tag=25):
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


class Edited(Fact, tag=26):
    """A message was changed."""

    topic_id: int
    partition: int
    offset: int
    edit: EditRecord
    moved: bool
    time_us: int


class IndexKept(Fact, tag=27):
    """How a subscription stands in a partition: chunks and the rest follow."""

    subscription: int
    partition: int
    end: int


class ChunksKept(Fact, tag=28):
    """What has become of some messages of a partition."""

    subscription: int
    partition: int
    chunks: list[SavedChunk]


class RestKept(Fact, tag=29):
    """What else there is to remember."""

    subscription: int
    partition: int
    rest: SavedRest


class SubscriptionReset(Fact, tag=80):
    """What was known of a subscription's messages is forgotten: what follows tells it anew."""

    id: int


class SubscriptionBroken(Fact, tag=81):
    """What the journal says of a subscription could not be followed: it rests until it is reset."""

    id: int
    reason: str


LeasedFact = (
    SubscriptionSet
    | SubscriptionGone
    | HandedOut
    | KeptLonger
    | Finished
    | GivenBack
    | Edited
    | IndexKept
    | ChunksKept
    | RestKept
    | SubscriptionReset
    | SubscriptionBroken
)


class LeasedState:
    """All of that together, in memory."""

    def __init__(self) -> None:
        self.subscriptions: dict[int, SubscriptionSet] = {}
        self.subscription_id = 0
        """The last one given out."""
        self.edits: dict[tuple[int, int], dict[int, EditRecord]] = {}
        """By topic id and partition, and by offset."""
        self.broken: dict[int, str] = {}
        """The subscriptions whose facts could not be followed, and why."""
        self.on_broken: Callable[[int], None] = lambda _: None
        """Called with such a subscription when that happens."""
        self._indexes: dict[tuple[int, int], LeasedIndex] = {}

    def index(self, subscription: int, partition: int) -> LeasedIndex:
        """A subscription's state in a partition."""
        index = self._indexes.get((subscription, partition))
        if index is None:
            start = self.subscriptions[subscription].starts.get(partition, 0)
            index = self._indexes[subscription, partition] = LeasedIndex(start)
        return index

    def edits_of(self, topic_id: int, partition: int) -> dict[int, EditRecord]:
        """What was changed in a partition."""
        return self.edits.setdefault((topic_id, partition), {})

    def known_end(self, topic_id: int, partition: int) -> int:
        """The end of the offsets of a partition that subscriptions and edits refer to."""
        ends = [1 + max(self.edits.get((topic_id, partition), ()), default=-1)]
        for one in self.subscriptions.values():
            if one.topic_id == topic_id:
                index = self._indexes.get((one.id, partition))
                ends.append(one.starts.get(partition, 0) if index is None else index.statuses.end)
        return max(ends)

    def apply(self, fact: LeasedFact) -> None:
        """Take in a fact."""
        match fact:
            case HandedOut() | Finished() | KeptLonger() | GivenBack() | IndexKept() | ChunksKept() | RestKept():
                if fact.subscription in self.subscriptions and fact.subscription not in self.broken:
                    try:
                        self._apply_to(self.index(fact.subscription, fact.partition), fact)
                    except Exception as error:  # noqa: BLE001 it is told
                        self._break(fact.subscription, error)
            case SubscriptionSet():
                self.subscriptions[fact.id] = fact
                self.subscription_id = max(self.subscription_id, fact.id)
            case SubscriptionGone():
                self.subscriptions.pop(fact.id, None)
                self._forget_indexes(fact.id)
            case SubscriptionReset():
                self._forget_indexes(fact.id)
            case SubscriptionBroken():
                self.broken[fact.id] = fact.reason
            case Edited():
                self._edit(fact)

    def _break(self, subscription: int, error: Exception) -> None:
        """What goes wrong with one subscription is no harm to others: it rests until it is reset."""
        logger.error("leased subscription broken  id=%s", subscription, exc_info=error)
        self.broken[subscription] = f"{type(error).__name__}: {error}"
        self.on_broken(subscription)

    def _forget_indexes(self, subscription: int) -> None:
        self.broken.pop(subscription, None)
        self._indexes = {key: index for key, index in self._indexes.items() if key[0] != subscription}

    def _apply_to(self, index: LeasedIndex, fact: LeasedFact) -> None:
        match fact:
            case HandedOut():
                index.apply_leased(fact.number, fact.holder, fact.until_us, unpacked(fact.offsets))
            case Finished():
                index.apply_settled(unpacked(fact.offsets))
            case KeptLonger():
                index.apply_extended(fact.number, fact.until_us, unpacked(fact.offsets))
            case GivenBack():
                note = Note(fact.time_us, fact.holder, fact.reason) if fact.reason else None
                offsets = unpacked(fact.offsets)
                index.apply_returned(offsets, fact.ready_us, fact.counted, note, fact.states, fact.time_us)
            case IndexKept():
                saving.begin(index, fact.end)
            case ChunksKept():
                saving.load_chunks(index, fact.chunks)
            case RestKept():
                saving.load_rest(index, fact.rest)

    def _edit(self, fact: Edited) -> None:
        edits = self.edits_of(fact.topic_id, fact.partition)
        # Decoded ones are plain lists inside.
        content = None if fact.edit.content is None else Content(*fact.edit.content)
        edit = edits[fact.offset] = fact.edit._replace(content=content)
        for subscription in self.subscriptions.values():
            if subscription.topic_id == fact.topic_id and subscription.id not in self.broken:
                try:
                    index = self.index(subscription.id, fact.partition)
                    index.apply_edit(fact.offset, edit, fact.moved, fact.time_us)
                except Exception as error:  # noqa: BLE001 it is told
                    self._break(subscription.id, error)

    def facts(self) -> Iterator[Fact]:
        """The fewest facts that tell all of it."""
        for (topic_id, partition), edits in self.edits.items():
            for offset, edit in edits.items():
                yield Edited(topic_id, partition, offset, edit, moved=False, time_us=0)
        yield from self.subscriptions.values()
        for (subscription, partition), index in list(self._indexes.items()):
            try:
                rest = RestKept(subscription, partition, saving.save_rest(index))
                found = [*settled_facts(subscription, partition, index), rest]
            except Exception as error:  # noqa: BLE001 it is told
                self._break(subscription, error)
            else:
                yield from found
        for subscription, reason in self.broken.items():
            yield SubscriptionBroken(subscription, reason)

    def settled(self, subscription: int) -> list[Fact]:
        """The facts that tell only which messages a subscription has settled, and how often others were tried."""
        return [
            fact
            for (one, partition), index in self._indexes.items()
            if one == subscription
            for fact in settled_facts(subscription, partition, index)
        ]

    def forget_topic(self, topic_id: int) -> None:
        """A topic is gone, and its subscriptions with it."""
        for subscription in [one for one in self.subscriptions.values() if one.topic_id == topic_id]:
            self.apply(SubscriptionGone(subscription.id))
        for key in [key for key in self.edits if key[0] == topic_id]:
            del self.edits[key]

    def forget_edits(self, topic_id: int, partition: int, first_offset: int) -> None:
        """Forget edits of messages that are no more, or that all subscriptions are done with.

        What was deleted stays so for subscriptions to come.
        """
        edits = self.edits.get((topic_id, partition), {})
        floors = [
            self.index(one.id, partition).statuses.floor
            for one in self.subscriptions.values()
            if one.topic_id == topic_id
        ]
        floor = min(floors, default=0)
        for offset in [offset for offset in edits if offset < max(first_offset, floor)]:
            if offset < first_offset or not edits[offset].deleted:
                del edits[offset]
            else:
                edits[offset] = EditRecord(edits[offset].version, deleted=True)


def settled_facts(subscription: int, partition: int, index: LeasedIndex) -> list[Fact]:
    """Which messages of a partition a subscription has settled, and how often others were handed out in vain."""
    chunks = [ChunksKept(subscription, partition, chunks) for chunks in saving.save_chunks(index)]
    return [IndexKept(subscription, partition, index.statuses.end), *chunks]
