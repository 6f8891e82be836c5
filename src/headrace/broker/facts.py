"""What a broker has to remember: the facts of its journal, and all of them together."""

from collections.abc import Iterator
from itertools import chain
from typing import Any

import msgspec

from headrace.broker.fact import Fact
from headrace.broker.leased_facts import LeasedFact, LeasedSubscriptionsState
from headrace.model.errors import UnsupportedFormat
from headrace.model.limits import PARTITIONS_MAX
from headrace.model.schedule_requests import ScheduleDefinition


class BrokerStarted(Fact, tag=1):
    """The broker was started, for the so-and-so-many-th time."""

    broker_id: str
    session: int


class TopicSet(Fact, tag=2):
    """A topic was made, or its settings changed."""

    id: int
    name: str
    created_us: int
    settings: dict[str, Any]
    revision: int = 0
    """How often the settings were changed."""


class TopicDeleted(Fact, tag=3):
    """A topic was deleted; its files are to be removed."""

    id: int


class OffsetsCommitted(Fact, tag=4):
    """A group has come so far: topic id, partition and offset."""

    group: str
    places: list[tuple[int, int, int]]


class GroupDeleted(Fact, tag=5):
    """A group was deleted."""

    group: str


class ProducersCheckpointed(Fact, tag=6):
    """What a partition knows of its producers; its log tells the rest."""

    partition: str
    saved: bytes


class Committed(Fact, tag=7):
    """A transaction was committed: from now on its batches belong to their partitions, and its group has moved."""

    number: int
    transaction: str
    epoch: int
    sequence: int
    time_us: int
    stages: list[tuple[int, int, int]]
    """Offset in the staging log, topic id and partition."""
    group: str
    places: list[tuple[int, int, int]]


class TransactionApplied(Fact, tag=8):
    """All batches of a committed transaction are synced in their partitions."""

    number: int


class TransactionShared(Fact, tag=9):
    """A transaction was begun that processes share: it outlives the broker's end."""

    transaction: str
    epoch: int
    sequence: int
    timeout_us: int


class TransactionUnshared(Fact, tag=10):
    """A transaction that processes shared has ended without a commit."""

    transaction: str
    epoch: int


class ScheduleRunLocation(msgspec.Struct, array_like=True, frozen=True):
    """Where to look for the message of a schedule's last run."""

    topic_id: int
    partition: int
    published_us: int


class ScheduleStored(Fact, tag=30):
    """A schedule was made or changed, and has come so far."""

    definition: ScheduleDefinition
    id: int
    """Another one when it begins anew."""
    created_us: int
    done_us: int
    """What was to be done up to this time is done, or left out."""
    runs: int = 0
    last_us: int = 0
    place: ScheduleRunLocation | None = None


class ScheduleAdvanced(Fact, tag=31):
    """A schedule has come as far as this, with so many runs more, none perhaps."""

    name: str
    id: int
    done_us: int
    runs: int
    last_us: int = 0
    place: ScheduleRunLocation | None = None


class ScheduleDeleted(Fact, tag=32):
    """A schedule was removed."""

    name: str


class TopicFilesRemoved(Fact, tag=60):
    """The files of a deleted topic are gone."""

    id: int


class IdsReserved(Fact, tag=61):
    """Ids up to these are not given out again, whoever had them."""

    topic_id: int = 0
    subscription_id: int = 0
    commits: int = 0


class OffsetsReserved(Fact, tag=70):
    """Messages of a partition may be seen before they are safe, up to this offset; after a loss it goes on there."""

    topic_id: int
    partition: int
    end: int
    boot_id: bytes
    """Of the machine: in another boot, messages before the end that were not synced may be lost."""


AnyFact = (
    BrokerStarted
    | TopicSet
    | TopicDeleted
    | OffsetsCommitted
    | GroupDeleted
    | ProducersCheckpointed
    | Committed
    | TransactionApplied
    | TransactionShared
    | TransactionUnshared
    | ScheduleStored
    | ScheduleAdvanced
    | ScheduleDeleted
    | TopicFilesRemoved
    | IdsReserved
    | OffsetsReserved
    | LeasedFact
)
_decoder = msgspec.msgpack.Decoder(AnyFact)
_encoder = msgspec.msgpack.Encoder()


def encode_fact(fact: Fact) -> bytes:
    """A fact as the journal keeps it."""
    return _encoder.encode(fact)


def decode_fact(content: bytes) -> AnyFact:
    """A fact as it was encoded; its checksum was good, so one that is not understood is a newer Headrace's."""
    try:
        fact: AnyFact = _decoder.decode(content)
    except msgspec.MsgspecError as error:
        raise UnsupportedFormat(
            f"the journal has a fact that this Headrace does not know ({error}); use the Headrace that wrote it"
        ) from error
    return fact


def partition_name(topic_id: int, number: int) -> str:
    """The name of a partition's log, which no other topic ever has."""
    return f"{topic_id}/{number}"


def _numbers(topic: TopicSet | None) -> range:
    """The numbers of all partitions that a topic ever had: they only become more."""
    count = 0 if topic is None else topic.settings.get("partitions", 1)
    return range(count if isinstance(count, int) and count <= PARTITIONS_MAX else PARTITIONS_MAX)


class BrokerState:
    """All facts together, in memory."""

    def __init__(self) -> None:
        self.broker_id = ""
        self.session = 0
        self.topic_id = 0
        """The last one given out."""
        self.topics: dict[int, TopicSet] = {}
        self.gone: set[int] = set()
        """Deleted topics whose files are not all removed: all that the broker may ever remove."""
        self.groups: dict[str, dict[tuple[int, int], int]] = {}
        """Groups to positions by topic id and partition."""
        self._readers: dict[int, set[str]] = {}
        """The groups that have a position in a topic, by its id."""
        self.producers: dict[str, bytes] = {}
        self.commits = 0
        """The number of the last transaction committed."""
        self.transactions: dict[str, Committed] = {}
        """The last commit of each name, without its batches."""
        self.unsettled: dict[int, Committed] = {}
        self.shared: dict[str, TransactionShared] = {}
        """Open transactions that processes share, by name."""
        self.schedules: dict[str, ScheduleStored] = {}
        self.reserved: dict[tuple[int, int], OffsetsReserved] = {}
        """By topic id and partition, of partitions that may lose messages which somebody has seen."""
        self.leased = LeasedSubscriptionsState()

    def apply_bytes(self, content: bytes) -> None:
        """Take in a fact as the journal has it."""
        self.apply(decode_fact(content))

    def apply(self, fact: AnyFact) -> None:
        """Take in a fact."""
        if isinstance(fact, LeasedFact):
            self.leased.apply(fact)
            return
        match fact:
            case BrokerStarted():
                self.broker_id, self.session = fact.broker_id, fact.session
            case TopicSet():
                self.topics[fact.id] = fact
                self.topic_id = max(self.topic_id, fact.id)
            case TopicDeleted():
                self.forget_topic(fact.id)
                self.topic_id = max(self.topic_id, fact.id)
                self.gone.add(fact.id)
            case TopicFilesRemoved():
                self.gone.discard(fact.id)
            case IdsReserved():
                self.topic_id = max(self.topic_id, fact.topic_id)
                self.commits = max(self.commits, fact.commits)
                self.leased.subscription_id = max(self.leased.subscription_id, fact.subscription_id)
            case OffsetsCommitted():
                self._move(fact.group, fact.places)
            case GroupDeleted():
                for topic_id, _ in self.groups.pop(fact.group, ()):
                    self._readers[topic_id].discard(fact.group)
            case ProducersCheckpointed():
                self.producers[fact.partition] = fact.saved
            case Committed():
                self._commit(fact)
            case TransactionApplied():
                self.unsettled.pop(fact.number, None)
            case TransactionShared():
                self.shared[fact.transaction] = fact
            case TransactionUnshared():
                self._unshare(fact.transaction, fact.epoch)
            case ScheduleStored():
                self.schedules[fact.definition.name] = fact
            case ScheduleAdvanced():
                self._ran(fact)
            case ScheduleDeleted():
                self.schedules.pop(fact.name, None)
            case OffsetsReserved():
                if fact.topic_id in self.topics:
                    self.reserved[fact.topic_id, fact.partition] = fact

    def forget_transactions(self, before_us: int) -> None:
        """Forget the names of transactions that were not used since a time; the last commit tells their number."""
        self.transactions = {
            name: commit
            for name, commit in self.transactions.items()
            if commit.time_us >= before_us or commit.number == self.commits or commit.number in self.unsettled
        }

    def facts(self) -> Iterator[Fact]:
        """The fewest facts that tell all of it as it is now, however late they are asked for."""
        return chain(list(self._plain_facts()), self.leased.facts())

    def _plain_facts(self) -> Iterator[Fact]:
        """What is not about leased subscriptions."""
        yield BrokerStarted(self.broker_id, self.session)
        # Who had the last ones may be gone, but they must not be given out again.
        yield IdsReserved(self.topic_id, self.leased.subscription_id, self.commits)
        for topic_id in sorted(self.gone):
            yield TopicDeleted(topic_id)
        yield from self.topics.values()
        for group, positions in self.groups.items():
            yield OffsetsCommitted(
                group, [(topic, partition, offset) for (topic, partition), offset in positions.items()]
            )
        for partition, saved in self.producers.items():
            yield ProducersCheckpointed(partition, saved)
        for commit in sorted(self.transactions.values(), key=lambda commit: commit.number):
            if commit.number not in self.unsettled:
                yield commit
                yield TransactionApplied(commit.number)
        for _, commit in sorted(self.unsettled.items()):
            # Groups have moved on since: what they were moved by does not count again.
            yield msgspec.structs.replace(commit, group="", places=[])
        yield from self.shared.values()
        yield from self.schedules.values()
        yield from self.reserved.values()

    def groups_of(self, topic_id: int) -> list[str]:
        """The groups that have a position in a topic, by name."""
        return sorted(self._readers.get(topic_id, ()))

    def positions(self, topic_id: int, partition: int) -> dict[str, int]:
        """The positions in a partition by group; looks at the groups of the topic alone."""
        place = (topic_id, partition)
        readers = self._readers.get(topic_id, ())
        return {group: self.groups[group][place] for group in readers if place in self.groups[group]}

    def groups_within(self, topic_id: int, partition: int, begin: int, end: int) -> list[str]:
        """The groups whose position in a partition is one of these offsets."""
        return sorted(group for group, at in self.positions(topic_id, partition).items() if begin <= at < end)

    def known_end(self, topic_id: int, partition: int) -> int:
        """The end of the offsets of a partition that anything here refers to."""
        positions = self.positions(topic_id, partition).values()
        return max(self.leased.known_end(topic_id, partition), max(positions, default=0))

    def forget_topic(self, topic_id: int) -> None:
        """Forget a topic, with all that belongs to it."""
        topic = self.topics.pop(topic_id, None)
        numbers = _numbers(topic)
        for number in numbers:
            self.producers.pop(partition_name(topic_id, number), None)
            self.reserved.pop((topic_id, number), None)
        for group in self._readers.pop(topic_id, ()):
            for number in numbers:
                self.groups[group].pop((topic_id, number), None)
        self.leased.forget_topic(topic_id, numbers)

    def _move(self, group: str, places: list[tuple[int, int, int]]) -> None:
        positions = self.groups.setdefault(group, {})
        for topic_id, partition, offset in places:
            if topic_id in self.topics:
                positions[topic_id, partition] = offset
                self._readers.setdefault(topic_id, set()).add(group)

    def _commit(self, fact: Committed) -> None:
        self.commits = max(self.commits, fact.number)
        self.unsettled[fact.number] = fact
        self._unshare(fact.transaction, fact.epoch)
        before = self.transactions.get(fact.transaction)
        if before is None or before.number < fact.number:
            self.transactions[fact.transaction] = msgspec.structs.replace(fact, stages=[], group="", places=[])
            if fact.group:
                self._move(fact.group, fact.places)

    def _unshare(self, transaction: str, epoch: int) -> None:
        shared = self.shared.get(transaction)
        if shared is not None and shared.epoch == epoch:
            del self.shared[transaction]

    def _ran(self, fact: ScheduleAdvanced) -> None:
        kept = self.schedules.get(fact.name)
        if kept is not None and kept.id == fact.id:  # else it began anew while this was on its way
            self.schedules[fact.name] = msgspec.structs.replace(
                kept,
                done_us=max(kept.done_us, fact.done_us),
                runs=kept.runs + fact.runs,
                last_us=fact.last_us or kept.last_us,
                place=fact.place or kept.place,
            )
