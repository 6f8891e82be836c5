"""What can be asked of a broker and what it answers: the same words through every gateway.

On the wire each is a map with these names. Unknown names are ignored, so that a newer side may say more.
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
    """Its process."""
    memory_bytes: int = 0
    """What its process has in use."""
    limits: dict[str, int] = {}
    """By name: how much of something there may be at most."""


@declare(Kind.INFO, Permission(Verb.DESCRIBE, Resource.BROKER))
class Info(Request[BrokerInfo]):
    """What is there to know about the broker?"""


class PartitionInfo(WireStruct):
    """A partition as it is now."""

    partition: int
    first_offset: int
    next_offset: int
    """Behind the last message that can be read."""
    bytes: int
    damaged: list[tuple[int, int]] = []
    """Ranges of offsets whose messages were found damaged since the broker opened the partition: first and next."""


class TopicInfo(Answer):
    """A topic as it is now; the answer to TopicCreate, TopicAlter and TopicDescribe."""

    tenant_fields = ("topic", "groups")

    topic: str
    id: int
    """A topic that is deleted and made again has another."""
    created_us: int
    settings: dict[str, Any]
    partitions: list[PartitionInfo] = []
    groups: list[str] = []
    error: str = ""
    """Why it could not be opened; empty when it is at work."""


# Topics.


@declare(Kind.TOPIC_CREATE, Permission(Verb.CREATE, Resource.TOPIC, "topic"), while_draining=False)
class TopicCreate(Request[TopicInfo]):
    """Make a topic."""

    topic: str
    settings: dict[str, Any] = {}
    """Plain values by the names of TopicSettings; the broker's defaults for the others."""
    exist_ok: bool = False
    """Fine if it exists, whatever its settings are."""


@declare(Kind.TOPIC_ALTER, Permission(Verb.ALTER, Resource.TOPIC, "topic"), while_draining=False)
class TopicAlter(Request[TopicInfo]):
    """Change settings of a topic, while it is in use."""

    topic: str
    settings: dict[str, Any]


class Done(Answer):
    """The answer where there is nothing more to say."""


@declare(Kind.TOPIC_DELETE, Permission(Verb.DELETE, Resource.TOPIC, "topic"), while_draining=False)
class TopicDelete(Request[Done]):
    """Remove a topic and its messages."""

    topic: str


@declare(Kind.TOPIC_DESCRIBE, Permission(Verb.DESCRIBE, Resource.TOPIC, "topic"))
class TopicDescribe(Request[TopicInfo]):
    """What is there to know about a topic?"""

    topic: str
    create: bool = False
    """Make it if there is none and the broker may make topics by itself."""


class Topics(Answer):
    """The answer to TopicList, without the partitions."""

    topics: list[TopicInfo]


@declare(Kind.TOPIC_LIST, Permission(Verb.DESCRIBE, Resource.TOPIC))
class TopicList(Request[Topics]):
    """Which topics are there?"""

    tenant_fields = ("pattern",)

    pattern: str = "*"
    """`*` stands for any characters, `?` for one. Without a tenant it is about topics of the session's."""


class TopicTrimmed(Answer):
    """The answer to TopicTrim, when it lasts."""

    offsets: dict[int, int]
    """Those partitions to the first offsets that they have now."""


@declare(Kind.TOPIC_TRIM, Permission(Verb.DELETE, Resource.TOPIC, "topic"), while_draining=False)
class TopicTrim(Request[TopicTrimmed]):
    """Remove the oldest messages of partitions: those before an offset."""

    topic: str
    offsets: dict[int, int]
    """Partitions to the offsets before which messages go; never behind the end."""
    unread: bool = False
    """Also those that some group or leased subscription of the topic has still to read."""
    topic_id: int = 0
    """Only if the topic has this id: one that was made again under the name is another. 0: whichever has the name."""


class Published(Answer):
    """The answer to Publish."""

    base_offset: int
    durability: int
    append_time: int
    duplicate: bool = False
    """The batch had been appended before: this is its first place."""
    topic_id: int = 0
    """Of the topic: another one of the same name has another."""


# Publishing and reading.


@declare(Kind.PUBLISH, Permission(Verb.PUBLISH, Resource.TOPIC, "topic"), while_draining=False)
class Publish(Request[Published]):
    """Append the batch in the body to a partition."""

    topic: str
    partition: int
    durability: int = 0
    """At least this; the topic's own if that is more."""
    expected_offset: int | None = None
    """Only if this is the offset that the batch would get."""


class OffsetsFound(Answer):
    """The answer to Offsets: partitions to offsets."""

    offsets: dict[int, int]


@declare(Kind.OFFSETS, Permission(Verb.CONSUME, Resource.TOPIC, "topic"))
class Offsets(Request[OffsetsFound]):
    """Which offsets do partitions have at a time?"""

    topic: str
    partitions: list[int] = []
    """None: all of them."""
    at: str = "latest"
    """`earliest`, `latest`, or `time`."""
    time_us: int = 0


# Groups.


class PartitionOffset(WireStruct):
    """A position in a partition."""

    tenant_fields = ("topic",)

    topic: str
    partition: int
    offset: int
    epoch: int = 0
    """Of the assignment under which it is said; 0 by one who is no member."""


class GroupJoined(Answer):
    """The answer to GroupJoin: what the member has now. Assignments tell what changes."""

    generation: int
    assigned: list[PartitionOffset]


@declare(
    Kind.GROUP_JOIN,
    Permission(Verb.CONSUME, Resource.GROUP, "group"),
    Permission(Verb.CONSUME, Resource.TOPIC, "topics"),
    while_draining=False,
)
class GroupJoin(Request[GroupJoined]):
    """Take part in a group, which divides partitions among its members; repeated after a reconnect."""

    tenant_fields = ("patterns",)

    group: str
    member: str
    """An id that the client made up and keeps."""
    topics: list[str] = []
    patterns: list[str] = []
    start: str = "earliest"
    """Where a group without a position begins: `earliest`, `latest` or `time`."""
    start_us: int = 0
    session_ms: int = 10_000
    """How long a member may be out of touch before its partitions are given to others."""
    missing: str = "refuse"
    """What to do about named topics that do not exist: `refuse`, `create` (if the broker may), or `wait` for them."""


class Assignment(Answer):
    """The broker tells a member what changes for it."""

    tenant_fields = ("group",)

    group: str
    member: str
    generation: int
    assigned: list[PartitionOffset] = []
    """Begin to read these."""
    revoked: list[PartitionOffset] = []
    """Finish with these, commit, and then release them."""
    lost: list[PartitionOffset] = []
    """These are no longer yours; commits are refused."""


@declare(Kind.GROUP_RELEASE, Permission(Verb.CONSUME, Resource.GROUP, "group"))
class GroupRelease(Request[Done]):
    """The member has finished with partitions that were revoked."""

    group: str
    member: str
    places: list[PartitionOffset]
    """Their offsets do not matter: commit before."""


@declare(Kind.GROUP_LEAVE, Permission(Verb.CONSUME, Resource.GROUP, "group"))
class GroupLeave(Request[Done]):
    """The member leaves; its partitions go to others at once."""

    group: str
    member: str


@declare(Kind.COMMIT, Permission(Verb.CONSUME, Resource.GROUP, "group"))
class Commit(Request[Done]):
    """Remember how far a group has come: the offsets to go on with."""

    group: str
    places: list[PartitionOffset]
    member: str = ""
    """Empty: by one who is no member, which a group with members refuses."""


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
    """Which groups are there, of the session's tenant?"""


class GroupPartition(WireStruct):
    """How far a group has come in a partition, and who reads it."""

    tenant_fields = ("topic",)

    topic: str
    partition: int
    offset: int
    end_offset: int
    lag: int
    member: str = ""
    error: str = ""
    """Why the partition cannot be opened; then its end and the lag are not known."""


class GroupInfo(Answer):
    """The answer to GroupDescribe and GroupSeek."""

    tenant_fields = ("group",)

    group: str
    generation: int
    members: dict[str, str]
    """Members to the names of their clients."""
    places: list[GroupPartition]


@declare(Kind.GROUP_DESCRIBE, Permission(Verb.DESCRIBE, Resource.GROUP, "group"))
class GroupDescribe(Request[GroupInfo]):
    """What is there to know about a group?"""

    group: str


@declare(Kind.GROUP_SEEK, Permission(Verb.ALTER, Resource.GROUP, "group"))
class GroupSeek(Request[GroupInfo]):
    """Move a group: members go on from there."""

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
    """Forget a group and its positions; it must have no members."""

    group: str


class TransactionBegun(Answer):
    """The answer to TransactionBegin."""

    epoch: int
    """To be said in all that follows."""
    sequence: int
    committed: bool = False
    """It was committed before: there is nothing to do."""


# Transactions.


@declare(Kind.TRANSACTION_BEGIN, Permission(Verb.PUBLISH, Resource.TRANSACTION, "transaction"), while_draining=False)
class TransactionBegin(Request[TransactionBegun]):
    """Begin a transaction. An open one of the same name is aborted, and its process fenced, unless both share it."""

    transaction: str
    sequence: int | None = None
    """Which transaction of this name it is: one that was committed is not done again. None: the next."""
    timeout_ms: int = 60_000
    """Aborted when nothing was heard of it for so long."""
    join: bool = False
    """Share it: whoever begins it in this way too takes part in it, and a restart of the broker does not end it."""


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
    """Keep the batch in the body until the commit; nobody sees it before."""

    transaction: str
    epoch: int
    topic: str
    partition: int


class TransactionCommitted(Answer):
    """The answer to TransactionCommit."""

    sequence: int
    repeated: bool = False
    """It was committed before; this changed nothing."""
    places: list[PartitionOffset] = []
    """Where the staged batches begin, in the order of the stages; none of those that could not be appended yet."""


@declare(
    Kind.TRANSACTION_COMMIT,
    Permission(Verb.PUBLISH, Resource.TRANSACTION, "transaction"),
    Permission(Verb.CONSUME, Resource.GROUP, "group"),
)
class TransactionCommit(Request[TransactionCommitted]):
    """Make all of it visible, at once and for good."""

    transaction: str
    epoch: int
    stages: list[int] | None = None
    """Only these of what was staged, in this order; None: all, in the order in which they came."""
    group: str = ""
    member: str = ""
    places: list[PartitionOffset] = []
    """Positions of a group that are committed with it."""


@declare(Kind.TRANSACTION_ABORT, Permission(Verb.PUBLISH, Resource.TRANSACTION, "transaction"))
class TransactionAbort(Request[Done]):
    """Forget all of it."""

    transaction: str
    epoch: int
