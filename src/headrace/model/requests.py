"""The requests that a broker takes, and its answers, the same through every gateway.

On the wire each is a map by the names of its fields. Readers ignore unknown names, so that a newer side may send more.
"""

from typing import Any

from headrace.model.kinds import Kind
from headrace.model.request import Answer, Permission, Request, Resource, Verb, WireStruct, declare


class BrokerInfo(Answer):
    """The answer to Info. To a session of another tenant than the default one it counts what that tenant has."""

    broker_id: str
    version: str
    started_us: int
    time_us: int
    topics: int
    partitions_open: int
    groups: int
    connections: int
    transactions_open: int
    data: str
    """Its directory, or `:memory:`; empty for clients that are not on the broker's machine."""
    subscriptions: int = 0
    """Leased ones."""
    schedules: int = 0
    listening: list[str] = []
    """The addresses at which it listens; without Unix sockets for clients that are not on the broker's machine."""
    pid: int = 0
    """Process id."""
    memory_bytes: int = 0
    """Memory that the process uses."""
    limits: dict[str, int] = {}
    """Limits by name."""


@declare(Kind.INFO, Permission(Verb.DESCRIBE, Resource.BROKER), awaits_commit=False)
class Info(Request[BrokerInfo]):
    """Describe the broker."""


class PartitionInfo(WireStruct):
    """A partition as it is now."""

    partition: int
    first_offset: int
    next_offset: int
    """The offset after the last message that can be read."""
    bytes: int
    damaged: list[tuple[int, int]] = []
    """Ranges of offsets whose messages were found damaged since the broker opened the partition: first and next."""


class TopicInfo(Answer):
    """A topic as it is now; the answer to TopicCreate, TopicAlter and TopicDescribe."""

    tenant_fields = ("topic", "groups", "settings.view_of", "views")

    topic: str
    id: int
    """A topic that is deleted and created again gets another."""
    created_us: int
    settings: dict[str, Any]
    partitions: list[PartitionInfo] = []
    groups: list[str] = []
    error: str = ""
    """Why it could not be opened; empty when it works."""
    views: list[str] = []
    """The virtual topics that read from it."""
    view_failed: int = 0
    """Of a virtual topic: messages that it leaves out because its query took too long for them, since the start."""


# Topics.


@declare(
    Kind.TOPIC_CREATE,
    Permission(Verb.CREATE, Resource.TOPIC, "topic"),
    Permission(Verb.CONSUME, Resource.TOPIC, "settings.view_of"),
    while_draining=False,
)
class TopicCreate(Request[TopicInfo]):
    """Create a topic."""

    tenant_fields = ("settings.view_of",)

    topic: str
    settings: dict[str, Any] = {}
    """Plain values by the names of TopicSettings; the broker's defaults apply to the others."""
    exist_ok: bool = False
    """Accept an existing topic, whatever its settings are."""


@declare(
    Kind.TOPIC_ALTER,
    Permission(Verb.ALTER, Resource.TOPIC, "topic"),
    Permission(Verb.CONSUME, Resource.TOPIC, "settings.view_of"),
    while_draining=False,
)
class TopicAlter(Request[TopicInfo]):
    """Change settings of a topic while it is in use."""

    tenant_fields = ("settings.view_of",)

    topic: str
    settings: dict[str, Any]


class Done(Answer):
    """The answer to requests that return nothing."""


@declare(Kind.TOPIC_DELETE, Permission(Verb.DELETE, Resource.TOPIC, "topic"), while_draining=False)
class TopicDelete(Request[Done]):
    """Delete a topic and its messages."""

    topic: str


@declare(Kind.TOPIC_DESCRIBE, Permission(Verb.DESCRIBE, Resource.TOPIC, "topic"))
class TopicDescribe(Request[TopicInfo]):
    """Describe a topic."""

    topic: str
    create: bool = False
    """Create the topic if it does not exist and auto_create_topics is on."""


class Topics(Answer):
    """The answer to TopicList; the topics come without their partitions."""

    topics: list[TopicInfo]


@declare(Kind.TOPIC_LIST, Permission(Verb.DESCRIBE, Resource.TOPIC))
class TopicList(Request[Topics]):
    """List topics."""

    tenant_fields = ("pattern",)

    pattern: str = "*"
    """`*` stands for any characters, `?` for one. Without a tenant it is about topics of the session's."""


class TopicTrimmed(Answer):
    """The answer to TopicTrim, sent when the removal is durable."""

    offsets: dict[int, int]
    """By partition: its first offset now."""


@declare(Kind.TOPIC_TRIM, Permission(Verb.DELETE, Resource.TOPIC, "topic"), while_draining=False)
class TopicTrim(Request[TopicTrimmed]):
    """Remove the oldest messages of partitions: those before an offset."""

    topic: str
    offsets: dict[int, int]
    """By partition: the offset before which messages are removed; never behind the end."""
    unread: bool = False
    """Also remove messages that a group or leased subscription of the topic has yet to read."""
    topic_id: int = 0
    """Only if the topic has this id, which changes when a topic is created again. 0: any topic of that name."""


class Published(Answer):
    """The answer to Publish."""

    base_offset: int
    durability: int
    append_time: int
    duplicate: bool = False
    """The batch was appended before: this is its original offset."""
    topic_id: int = 0
    """Id of the topic; a later topic of the same name has another."""
    stored: int | None = None
    """How many messages were stored in the topic, if its middleware may make more or fewer; of a repeated batch those
    that are left, or 0 if that is not known."""


# Publishing and reading.


@declare(Kind.PUBLISH, Permission(Verb.PUBLISH, Resource.TOPIC, "topic"), while_draining=False, awaits_commit=False)
class Publish(Request[Published]):
    """Append the batch in the body to a partition."""

    topic: str
    partition: int
    durability: int = 0
    """The durability to wait for, at least the topic's own."""
    expected_offset: int | None = None
    """Append only if this is the offset that the batch gets."""
    expected_version: int | None = None
    """Append only if the key, the same in all messages, has so many messages; of a topic with key_versions."""


class OffsetsFound(Answer):
    """The answer to Offsets: offsets by partition."""

    offsets: dict[int, int]


@declare(Kind.OFFSETS, Permission(Verb.CONSUME, Resource.TOPIC, "topic"))
class Offsets(Request[OffsetsFound]):
    """Find the offsets of partitions at a time."""

    topic: str
    partitions: list[int] = []
    """None: all of them."""
    at: str = "latest"
    """`earliest`, `latest`, or `time`."""
    time_us: int = 0


# Groups.


class PartitionOffset(WireStruct):
    """An offset in a partition."""

    tenant_fields = ("topic",)

    topic: str
    partition: int
    offset: int
    epoch: int = 0
    """Epoch of the assignment under which a member sends it; 0 from a client that is no member."""


class GroupJoined(Answer):
    """The answer to GroupJoin: the member's partitions now. Assignments push changes."""

    generation: int
    assigned: list[PartitionOffset]


@declare(
    Kind.GROUP_JOIN,
    Permission(Verb.CONSUME, Resource.GROUP, "group"),
    Permission(Verb.CONSUME, Resource.TOPIC, "topics"),
    Permission(Verb.CONSUME, Resource.TOPIC, "patterns"),
    while_draining=False,
)
class GroupJoin(Request[GroupJoined]):
    """Join a group, which divides partitions among its members; clients repeat it after a reconnect."""

    tenant_fields = ("patterns",)

    group: str
    member: str
    """An id that the client chooses and keeps."""
    topics: list[str] = []
    patterns: list[str] = []
    start: str = "earliest"
    """Where a group without committed offsets starts: `earliest`, `latest` or `time`."""
    start_us: int = 0
    session_ms: int = 10_000
    """Session timeout: after so long without a sign of life the member's partitions go to others."""
    missing: str = "refuse"
    """What to do about named topics that do not exist: `refuse`, `create` (if the broker may), or `wait` for them."""


class Assignment(Answer):
    """Pushed to a member when its partitions change."""

    tenant_fields = ("group",)

    group: str
    member: str
    generation: int
    assigned: list[PartitionOffset] = []
    """Partitions to start reading."""
    revoked: list[PartitionOffset] = []
    """Partitions to finish, commit and then release."""
    lost: list[PartitionOffset] = []
    """Partitions that now belong to others; the broker refuses commits."""


@declare(
    Kind.GROUP_RELEASE,
    Permission(Verb.CONSUME, Resource.GROUP, "group"),
    Permission(Verb.CONSUME, Resource.TOPIC, "places.topic"),
)
class GroupRelease(Request[Done]):
    """Release revoked partitions that the member has finished with."""

    group: str
    member: str
    places: list[PartitionOffset]
    """The broker ignores their offsets: commit before."""


@declare(Kind.GROUP_LEAVE, Permission(Verb.CONSUME, Resource.GROUP, "group"))
class GroupLeave(Request[Done]):
    """Leave a group; the member's partitions go to others at once."""

    group: str
    member: str


@declare(
    Kind.COMMIT,
    Permission(Verb.CONSUME, Resource.GROUP, "group"),
    Permission(Verb.CONSUME, Resource.TOPIC, "places.topic"),
)
class Commit(Request[Done]):
    """Commit offsets of a group: those of the next messages to read."""

    group: str
    places: list[PartitionOffset]
    member: str = ""
    """Empty for a client that is no member; a group with members refuses that."""


class GroupSummary(WireStruct):
    """A group in a list."""

    tenant_fields = ("group", "topics")

    group: str
    members: int
    topics: list[str]
    lag: int


class Groups(Answer):
    """The answer to GroupList."""

    groups: list[GroupSummary]


@declare(Kind.GROUP_LIST, Permission(Verb.DESCRIBE, Resource.GROUP))
class GroupList(Request[Groups]):
    """List the groups of the session's tenant."""


class GroupPartition(WireStruct):
    """A group's committed offset in a partition, its lag, and the member that reads it."""

    tenant_fields = ("topic",)

    topic: str
    partition: int
    offset: int
    end_offset: int
    lag: int
    member: str = ""
    error: str = ""
    """Why the partition cannot be opened; its end and the lag are then unknown."""


class GroupInfo(Answer):
    """The answer to GroupDescribe and GroupSeek."""

    tenant_fields = ("group",)

    group: str
    generation: int
    members: dict[str, str]
    """By member: the name of its client."""
    places: list[GroupPartition]


@declare(Kind.GROUP_DESCRIBE, Permission(Verb.DESCRIBE, Resource.GROUP, "group"))
class GroupDescribe(Request[GroupInfo]):
    """Describe a group."""

    group: str


@declare(
    Kind.GROUP_SEEK,
    Permission(Verb.ALTER, Resource.GROUP, "group"),
    Permission(Verb.DESCRIBE, Resource.TOPIC, "topic"),
)
class GroupSeek(Request[GroupInfo]):
    """Set a group's offsets; its members continue from there."""

    tenant_fields = ("topic",)

    group: str
    topic: str
    partitions: list[int] = []
    """None: all of them."""
    to: str = "offset"
    """`offset`, `earliest`, `latest` or `time`."""
    offset: int = 0
    time_us: int = 0


@declare(Kind.GROUP_DELETE, Permission(Verb.DELETE, Resource.GROUP, "group"))
class GroupDelete(Request[Done]):
    """Delete a group and its offsets; it must have no members."""

    group: str


class TransactionBegun(Answer):
    """The answer to TransactionBegin."""

    epoch: int
    """To be sent with every further request of the transaction."""
    sequence: int
    committed: bool = False
    """The transaction was committed before: there is nothing to do."""


# Transactions.


@declare(Kind.TRANSACTION_BEGIN, Permission(Verb.PUBLISH, Resource.TRANSACTION, "transaction"), while_draining=False)
class TransactionBegin(Request[TransactionBegun]):
    """Begin a transaction. Aborts an open one of the same name and fences its process, unless both share it."""

    transaction: str
    sequence: int | None = None
    """The transaction's number under its name; a committed one is recognised. None: the next."""
    timeout_ms: int = 60_000
    """The broker aborts the transaction after so long without a request about it."""
    join: bool = False
    """Share the transaction with all processes that begin it so; it survives a restart of the broker."""


class TransactionStaged(Answer):
    """The answer to TransactionStage."""

    stage: int


@declare(
    Kind.TRANSACTION_STAGE,
    Permission(Verb.PUBLISH, Resource.TRANSACTION, "transaction"),
    Permission(Verb.PUBLISH, Resource.TOPIC, "topic"),
    while_draining=False,
)
class TransactionStage(Request[TransactionStaged]):
    """Stage the batch in the body; readers see it after the commit."""

    transaction: str
    epoch: int
    topic: str
    partition: int
    expected_version: int | None = None
    """As for Publish; checked at the commit, and counted from the messages that the transaction staged before."""


class TransactionCommitted(Answer):
    """The answer to TransactionCommit."""

    sequence: int
    repeated: bool = False
    """The transaction was committed before; this request changed nothing."""
    places: list[PartitionOffset] = []
    """First offsets of the staged batches, in the order of the stages; without those not appended yet."""


@declare(
    Kind.TRANSACTION_COMMIT,
    Permission(Verb.PUBLISH, Resource.TRANSACTION, "transaction"),
    Permission(Verb.CONSUME, Resource.GROUP, "group"),
    Permission(Verb.CONSUME, Resource.TOPIC, "places.topic"),
)
class TransactionCommit(Request[TransactionCommitted]):
    """Commit a transaction: all staged batches become visible together."""

    transaction: str
    epoch: int
    stages: list[int] | None = None
    """The staged batches to commit, in this order; None: all, in the order of their staging."""
    group: str = ""
    member: str = ""
    places: list[PartitionOffset] = []
    """Offsets of a group to commit with the transaction."""


@declare(Kind.TRANSACTION_ABORT, Permission(Verb.PUBLISH, Resource.TRANSACTION, "transaction"))
class TransactionAbort(Request[Done]):
    """Abort a transaction and discard its staged batches."""

    transaction: str
    epoch: int
