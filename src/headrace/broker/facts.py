"""The facts of a broker's journal, and the state that they add up to."""

from collections.abc import Iterator
from itertools import chain
from typing import Any

import msgspec

from headrace.broker.audit_facts import AuditCheckpointed, AuditState
from headrace.broker.definition_facts import DefinitionFact, DefinitionsState
from headrace.broker.fact import Fact
from headrace.broker.leased_facts import LeasedFact, LeasedSubscriptionsState
from headrace.broker.route_facts import RouteFact, RoutesState
from headrace.broker.webhook_facts import WebhookFact, WebhooksState
from headrace.model.errors import UnsupportedFormat
from headrace.model.limits import PARTITIONS_MAX
from headrace.model.schedule_requests import ScheduleDefinition


class BrokerStarted(Fact, tag=1):
    """The broker was started; the session number counts its starts."""

    broker_id: str
    session: int


class TopicSet(Fact, tag=2):
    """A topic was created, or its settings changed."""

    id: int
    name: str
    created_us: int
    settings: dict[str, Any]
    revision: int = 0
    """How often the settings were changed."""


class TopicDeleted(Fact, tag=3):
    """A topic was deleted; the broker still has to remove its files."""

    id: int


class OffsetsCommitted(Fact, tag=4):
    """A group committed offsets: topic id, partition and offset."""

    group: str
    places: list[tuple[int, int, int]]


class GroupDeleted(Fact, tag=5):
    """A group was deleted."""

    group: str


class ProducersCheckpointed(Fact, tag=6):
    """A checkpoint of a partition's producer state; replaying the log behind it gives the rest."""

    partition: str
    saved: bytes


class Committed(Fact, tag=7):
    """A transaction was committed: its batches count as published, and its group's offsets as committed."""

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
    """A transaction was begun that several processes share; it survives a restart of the broker."""

    transaction: str
    epoch: int
    sequence: int
    timeout_us: int


class TransactionUnshared(Fact, tag=10):
    """A shared transaction ended without a commit."""

    transaction: str
    epoch: int


class ScheduleRunLocation(msgspec.Struct, array_like=True, frozen=True):
    """Where to look for the message of a schedule's last run."""

    topic_id: int
    partition: int
    published_us: int


class ScheduleStored(Fact, tag=30):
    """A schedule was created or changed; tells its definition and its progress."""

    definition: ScheduleDefinition
    id: int
    """Changes when the schedule starts over."""
    created_us: int
    done_us: int
    """All runs up to this time were published or skipped."""
    runs: int = 0
    last_us: int = 0
    place: ScheduleRunLocation | None = None


class ScheduleAdvanced(Fact, tag=31):
    """A schedule published or skipped its runs up to a time; `runs` counts the published ones."""

    name: str
    id: int
    done_us: int
    runs: int
    last_us: int = 0
    place: ScheduleRunLocation | None = None


class ScheduleDeleted(Fact, tag=32):
    """A schedule was deleted."""

    name: str


class TopicFilesRemoved(Fact, tag=60):
    """The broker removed the files of a deleted topic."""

    id: int


class IdsReserved(Fact, tag=61):
    """The broker never assigns ids up to these again."""

    topic_id: int = 0
    subscription_id: int = 0
    commits: int = 0


class IdempotencyKeyUsed(Fact, tag=120):
    """A client's batches were committed under an idempotency key, by the commit recorded just before."""

    topic_id: int
    key_hash: bytes
    request_hash: bytes
    time_us: int
    parts: list[tuple[int, int, int]]
    """Of each batch: its partition, how many messages it has, and an offset at or before theirs."""
    number: int = 0
    """The number of the commit; 0 in the record of the commit itself."""
    offsets: list[int] = msgspec.field(default_factory=list)
    """The first offset of each batch; empty until they are known."""


class IdempotencyReceiptStored(Fact, tag=121):
    """The offsets of the batches that were committed under an idempotency key."""

    topic_id: int
    key_hash: bytes
    offsets: list[int]


class OffsetsReserved(Fact, tag=70):
    """Readers may see messages up to this offset before they are synced; after a loss the partition continues there."""

    topic_id: int
    partition: int
    end: int
    boot_id: bytes
    """Of the machine: in another boot, messages before the end that were not synced may be lost."""


class ServicePolicySet(Fact, tag=105):
    """A tenant's policy about services was changed."""

    tenant: str
    require_registration: bool


class LogLevelStored(Fact, tag=106):
    """A logging level was set; an empty level says that it was reset."""

    tenant: str
    scope: str
    pattern: str
    level: str


class TenantErased(Fact, tag=146):
    """All that a tenant had was deleted: nothing is remembered of it that another one of that name would meet."""

    tenant: str


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
    | IdempotencyKeyUsed
    | IdempotencyReceiptStored
    | ServicePolicySet
    | LogLevelStored
    | TenantErased
    | AuditCheckpointed
    | DefinitionFact
    | RouteFact
    | WebhookFact
    | LeasedFact
)
_decoder = msgspec.msgpack.Decoder(AnyFact)
_encoder = msgspec.msgpack.Encoder()


def encode_fact(fact: Fact) -> bytes:
    """Encode a fact for the journal."""
    return _encoder.encode(fact)


def decode_fact(content: bytes) -> AnyFact:
    """Decode a fact; its checksum was good, so one that cannot be decoded was written by a newer Headrace."""
    try:
        fact: AnyFact = _decoder.decode(content)
    except msgspec.MsgspecError as error:
        raise UnsupportedFormat(
            f"the journal has a fact that this Headrace does not know ({error}); use the Headrace that wrote it"
        ) from error
    return fact


def partition_name(topic_id: int, number: int) -> str:
    """Return the name of a partition's log, unique for all topics that ever existed."""
    return f"{topic_id}/{number}"


def _numbers(topic: TopicSet | None) -> range:
    """Return the numbers of all partitions that a topic ever had: partitions are only added."""
    count = 0 if topic is None else topic.settings.get("partitions", 1)
    return range(count if isinstance(count, int) and count <= PARTITIONS_MAX else PARTITIONS_MAX)


class BrokerState:
    """The state that all facts add up to, in memory."""

    def __init__(self) -> None:
        self.broker_id = ""
        self.session = 0
        self.topic_id = 0
        """The last one assigned."""
        self.topics: dict[int, TopicSet] = {}
        self.gone: set[int] = set()
        """Deleted topics whose files still exist: the only files that the broker may remove."""
        self.groups: dict[str, dict[tuple[int, int], int]] = {}
        """Committed offsets by group, then by topic id and partition."""
        self._readers: dict[int, set[str]] = {}
        """The groups with a committed offset in a topic, by topic id."""
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
        """By topic id and partition, of partitions that may lose messages which a reader has seen."""
        self.idempotency: dict[int, dict[bytes, IdempotencyKeyUsed]] = {}
        """By topic id, then by the hash of a key: in the order of time."""
        self.service_policies: dict[str, ServicePolicySet] = {}
        """By tenant, of those that require registration."""
        self.log_levels: dict[tuple[str, str, str], LogLevelStored] = {}
        """By tenant, scope and pattern."""
        self.audit = AuditState()
        self.definitions = DefinitionsState()
        self.routes = RoutesState()
        self.webhooks = WebhooksState()
        self.leased = LeasedSubscriptionsState()

    def apply_bytes(self, content: bytes) -> None:
        """Apply an encoded fact."""
        self.apply(decode_fact(content))

    def apply(self, fact: AnyFact) -> None:
        """Apply a fact."""
        if isinstance(fact, LeasedFact):
            self.leased.apply(fact)
            return
        if isinstance(fact, RouteFact):
            self.routes.apply(fact)
            return
        if isinstance(fact, WebhookFact):
            self.webhooks.apply(fact)
            return
        if isinstance(fact, DefinitionFact):
            self.definitions.apply(fact)
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
            case IdempotencyKeyUsed():
                self._use_key(fact)
            case IdempotencyReceiptStored():
                used = self.idempotency.get(fact.topic_id, {}).get(fact.key_hash)
                if used is not None:
                    self.idempotency[fact.topic_id][fact.key_hash] = msgspec.structs.replace(used, offsets=fact.offsets)
            case ServicePolicySet():
                self._set_policy(fact)
            case LogLevelStored():
                self._set_log_level(fact)
            case AuditCheckpointed():
                self.audit.apply(fact)
            case TenantErased():
                self._erase_tenant(fact.tenant)

    def forget_transactions(self, before_us: int) -> None:
        """Forget transactions without a commit since a time; the very last commit stays, for its number."""
        self.transactions = {
            name: commit
            for name, commit in self.transactions.items()
            if commit.time_us >= before_us or commit.number == self.commits or commit.number in self.unsettled
        }

    def facts(self) -> Iterator[Fact]:
        """Return the facts of a snapshot of the state as it is now, however late the iterator is used."""
        return chain(list(self._plain_facts()), self.leased.facts())

    def _plain_facts(self) -> Iterator[Fact]:
        """Yield the facts that are not about leased subscriptions."""
        yield BrokerStarted(self.broker_id, self.session)
        # Whatever had the last ids may be deleted, but the ids must never be assigned again.
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
            # The groups have committed other offsets since: applying the commit again must not move them back.
            yield msgspec.structs.replace(commit, group="", places=[])
        yield from self.shared.values()
        yield from self.schedules.values()
        yield from self.reserved.values()
        for used in self.idempotency.values():
            yield from used.values()
        yield from self.service_policies.values()
        yield from self.log_levels.values()
        yield from self.audit.facts()
        yield from self.definitions.facts()
        yield from self.routes.facts()
        yield from self.webhooks.facts()

    def groups_of(self, topic_id: int) -> list[str]:
        """Return the groups with a committed offset in a topic, sorted by name."""
        return sorted(self._readers.get(topic_id, ()))

    def positions(self, topic_id: int, partition: int) -> dict[str, int]:
        """Return the committed offsets in a partition by group; looks only at the groups of the topic."""
        place = (topic_id, partition)
        readers = self._readers.get(topic_id, ())
        return {group: self.groups[group][place] for group in readers if place in self.groups[group]}

    def groups_within(self, topic_id: int, partition: int, begin: int, end: int) -> list[str]:
        """Return the groups whose committed offset in a partition is within a range."""
        return sorted(group for group, at in self.positions(topic_id, partition).items() if begin <= at < end)

    def known_end(self, topic_id: int, partition: int) -> int:
        """Return the offset behind the highest one of a partition that the state refers to."""
        positions = self.positions(topic_id, partition).values()
        routed = self.routes.known_end(topic_id, partition)
        return max(self.leased.known_end(topic_id, partition), routed, max(positions, default=0))

    def forget_topic(self, topic_id: int) -> None:
        """Forget a topic and all state that belongs to it."""
        topic = self.topics.pop(topic_id, None)
        self.idempotency.pop(topic_id, None)
        numbers = _numbers(topic)
        for number in numbers:
            self.producers.pop(partition_name(topic_id, number), None)
            self.reserved.pop((topic_id, number), None)
        for group in self._readers.pop(topic_id, ()):
            for number in numbers:
                self.groups[group].pop((topic_id, number), None)
        self.leased.forget_topic(topic_id, numbers)
        self.routes.forget_topic(topic_id)
        self.webhooks.forget_topic(topic_id)

    def forget_keys(self, topic_id: int, before_us: int, most: int) -> int:
        """Forget up to so many idempotency keys of a topic that were used before a time; returns how many."""
        used = self.idempotency.get(topic_id, {})
        old: list[bytes] = []
        for key_hash, fact in used.items():
            if fact.time_us >= before_us or len(old) >= most:
                break
            old.append(key_hash)
        for key_hash in old:
            del used[key_hash]
        if not used:
            self.idempotency.pop(topic_id, None)
        return len(old)

    def _use_key(self, fact: IdempotencyKeyUsed) -> None:
        if fact.topic_id in self.topics:
            used = self.idempotency.setdefault(fact.topic_id, {})
            used.pop(fact.key_hash, None)  # an expired one: what was used last stands last
            used[fact.key_hash] = fact if fact.number else msgspec.structs.replace(fact, number=self.commits)

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

    def _set_policy(self, fact: ServicePolicySet) -> None:
        if fact.require_registration:
            self.service_policies[fact.tenant] = fact
        else:
            self.service_policies.pop(fact.tenant, None)

    def _erase_tenant(self, tenant: str) -> None:
        prefix = f"{tenant}/"
        self.transactions = {name: one for name, one in self.transactions.items() if not name.startswith(prefix)}
        self.service_policies.pop(tenant, None)
        self.audit.forget(tenant)
        self.log_levels = {key: one for key, one in self.log_levels.items() if key[0] != tenant}

    def _set_log_level(self, fact: LogLevelStored) -> None:
        key = fact.tenant, fact.scope, fact.pattern
        if fact.level:
            self.log_levels[key] = fact
        else:
            self.log_levels.pop(key, None)

    def _ran(self, fact: ScheduleAdvanced) -> None:
        kept = self.schedules.get(fact.name)
        if kept is not None and kept.id == fact.id:  # else it started over while this fact was being written
            self.schedules[fact.name] = msgspec.structs.replace(
                kept,
                done_us=max(kept.done_us, fact.done_us),
                runs=kept.runs + fact.runs,
                last_us=fact.last_us or kept.last_us,
                place=fact.place or kept.place,
            )
