"""What can be asked of a broker and what it answers: the same words through every gateway.

On the wire each is a map with these names. Unknown names are ignored, so that a newer side may say more.
"""

from typing import Any

import msgspec


class Words(msgspec.Struct, omit_defaults=True):
    """A request, an answer, or a part of one."""


class Info(Words):
    """What is there to know about the broker?"""


class BrokerInfo(Words):
    """The answer to Info."""

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
    subscriptions: int = 0
    """Leased ones."""
    crons: int = 0
    """Recurrences."""
    listening: list[str] = []
    """The addresses at which it listens."""
    pid: int = 0
    """Its process."""
    memory_bytes: int = 0
    """What its process has in use."""
    limits: dict[str, int] = {}
    """By name: how much of something there may be at most."""


# Topics.


class TopicCreate(Words):
    """Make a topic."""

    topic: str
    settings: dict[str, Any] = {}
    """Plain values by the names of TopicSettings; the broker's defaults for the others."""
    exist_ok: bool = False
    """Fine if it exists, whatever its settings are."""


class TopicAlter(Words):
    """Change settings of a topic, while it is in use."""

    topic: str
    settings: dict[str, Any]


class TopicDelete(Words):
    """Remove a topic and its messages."""

    topic: str


class TopicDescribe(Words):
    """What is there to know about a topic?"""

    topic: str
    create: bool = False
    """Make it if there is none and the broker may make topics by itself."""


class PartitionInfo(Words):
    """A partition as it is now."""

    partition: int
    first_offset: int
    next_offset: int
    """Behind the last message that can be read."""
    bytes: int
    damaged: list[tuple[int, int]] = []
    """Ranges of offsets whose messages were found damaged since the broker opened the partition: first and next."""


class TopicInfo(Words):
    """A topic as it is now; the answer to TopicCreate, TopicAlter and TopicDescribe."""

    topic: str
    id: int
    """A topic that is deleted and made again has another."""
    created_us: int
    settings: dict[str, Any]
    partitions: list[PartitionInfo] = []
    groups: list[str] = []
    error: str = ""
    """Why it could not be opened; empty when it is at work."""


class TopicList(Words):
    """Which topics are there?"""

    pattern: str = "*"
    """`*` stands for any characters, `?` for one. Without a tenant it is about the default one's topics."""
    tenant: str = ""


class Topics(Words):
    """The answer to TopicList, without the partitions."""

    topics: list[TopicInfo]


class TopicTrim(Words):
    """Remove the oldest messages of partitions: those before an offset."""

    topic: str
    offsets: dict[int, int]
    """Partitions to the offsets before which messages go; never behind the end."""
    unread: bool = False
    """Also those that some group or leased subscription of the topic has still to read."""
    topic_id: int = 0
    """Only if the topic has this id: one that was made again under the name is another. 0: whichever has the name."""


class TopicTrimmed(Words):
    """The answer to TopicTrim, when it lasts."""

    offsets: dict[int, int]
    """Those partitions to the first offsets that they have now."""


class Done(Words):
    """The answer where there is nothing more to say."""


# Publishing and reading.


class Publish(Words):
    """Append the batch in the body to a partition."""

    topic: str
    partition: int
    durability: int = 0
    """At least this; the topic's own if that is more."""
    expected_offset: int | None = None
    """Only if this is the offset that the batch would get."""


class Published(Words):
    """The answer to Publish."""

    base_offset: int
    durability: int
    append_time: int
    duplicate: bool = False
    """The batch had been appended before: this is its first place."""
    topic_id: int = 0
    """Of the topic: another one of the same name has another."""


class Offsets(Words):
    """Which offsets do partitions have at a time?"""

    topic: str
    partitions: list[int] = []
    """None: all of them."""
    at: str = "latest"
    """`earliest`, `latest`, or `time`."""
    time_us: int = 0


class OffsetsFound(Words):
    """The answer to Offsets: partitions to offsets."""

    offsets: dict[int, int]


# Groups.


class Place(Words):
    """A position in a partition."""

    topic: str
    partition: int
    offset: int
    epoch: int = 0
    """Of the assignment under which it is said; 0 by one who is no member."""


class GroupJoin(Words):
    """Take part in a group, which divides partitions among its members; repeated after a reconnect."""

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
    tenant: str = ""
    missing: str = "refuse"
    """What to do about named topics that do not exist: `refuse`, `create` (if the broker may), or `wait` for them."""


class GroupJoined(Words):
    """The answer to GroupJoin: what the member has now. Assignments tell what changes."""

    generation: int
    assigned: list[Place]


class Assignment(Words):
    """The broker tells a member what changes for it."""

    group: str
    member: str
    generation: int
    assigned: list[Place] = []
    """Begin to read these."""
    revoked: list[Place] = []
    """Finish with these, commit, and then release them."""
    lost: list[Place] = []
    """These are no longer yours; commits are refused."""


class GroupRelease(Words):
    """The member has finished with partitions that were revoked."""

    group: str
    member: str
    places: list[Place]
    """Their offsets do not matter: commit before."""


class GroupLeave(Words):
    """The member leaves; its partitions go to others at once."""

    group: str
    member: str


class Commit(Words):
    """Remember how far a group has come: the offsets to go on with."""

    group: str
    places: list[Place]
    member: str = ""
    """Empty: by one who is no member, which a group with members refuses."""


class GroupList(Words):
    """Which groups are there?"""

    tenant: str = ""


class GroupSummary(Words):
    """A group in a list."""

    group: str
    members: int
    topics: list[str]
    lag: int


class Groups(Words):
    """The answer to GroupList."""

    groups: list[GroupSummary]


class GroupDescribe(Words):
    """What is there to know about a group?"""

    group: str


class GroupPlace(Words):
    """How far a group has come in a partition, and who reads it."""

    topic: str
    partition: int
    offset: int
    end_offset: int
    lag: int
    member: str = ""
    error: str = ""
    """Why the partition cannot be opened; then its end and the lag are not known."""


class GroupInfo(Words):
    """The answer to GroupDescribe and GroupSeek."""

    group: str
    generation: int
    members: dict[str, str]
    """Members to the names of their clients."""
    places: list[GroupPlace]


class GroupSeek(Words):
    """Move a group: members go on from there."""

    group: str
    topic: str
    partitions: list[int] = []
    """None: all of them."""
    to: str = "offset"
    """`offset`, `earliest`, `latest` or `time`."""
    offset: int = 0
    time_us: int = 0


class GroupDelete(Words):
    """Forget a group and its positions; it must have no members."""

    group: str


# Transactions.


class TransactionBegin(Words):
    """Begin a transaction. An open one of the same name is aborted, and its process fenced, unless both share it."""

    transaction: str
    sequence: int | None = None
    """Which transaction of this name it is: one that was committed is not done again. None: the next."""
    timeout_ms: int = 60_000
    """Aborted when nothing was heard of it for so long."""
    join: bool = False
    """Share it: whoever begins it in this way too takes part in it, and a restart of the broker does not end it."""


class TransactionBegun(Words):
    """The answer to TransactionBegin."""

    epoch: int
    """To be said in all that follows."""
    sequence: int
    committed: bool = False
    """It was committed before: there is nothing to do."""


class TransactionStage(Words):
    """Keep the batch in the body until the commit; nobody sees it before."""

    transaction: str
    epoch: int
    topic: str
    partition: int


class TransactionStaged(Words):
    """The answer to TransactionStage."""

    stage: int


class TransactionCommit(Words):
    """Make all of it visible, at once and for good."""

    transaction: str
    epoch: int
    stages: list[int] | None = None
    """Only these of what was staged, in this order; None: all, in the order in which they came."""
    group: str = ""
    member: str = ""
    places: list[Place] = []
    """Positions of a group that are committed with it."""


class TransactionCommitted(Words):
    """The answer to TransactionCommit."""

    sequence: int
    repeated: bool = False
    """It was committed before; this changed nothing."""
    places: list[Place] = []
    """Where the staged batches begin, in the order of the stages; none of those that could not be appended yet."""


class TransactionAbort(Words):
    """Forget all of it."""

    transaction: str
    epoch: int
