"""What can be asked about a cluster, and what is answered. See requests.py."""

import msgspec

from headrace.model.kinds import Kind
from headrace.model.request import Answer, Permission, Request, Resource, Verb, WireStruct, declare


class OwnerReport(Answer):
    """The answer to NodeReport: how far the owner of the shard is."""

    node: str
    """The owner."""
    epoch: int
    objects: int
    """So many WAL objects of the epoch are committed."""
    committed_us: int = 0
    """When the last of them was committed, by the owner's clock; 0: none was."""
    time_us: int = 0
    """The owner's clock."""
    releasing: bool = False
    """Whether the owner is handing the shard over."""
    successor: str = ""
    """The node that is to serve next, while it hands over."""
    drained: bool | None = None
    """Whether the follower is to serve nothing; None: nobody has asked the owner for either."""


class ShardStatus(WireStruct):
    """A shard of a cluster, as its owner knows it."""

    shard: int
    epoch: int
    owner: str
    addresses: list[str] = msgspec.field(default_factory=list)
    """Where clients reach the owner."""
    objects: int = 0
    """Committed WAL objects of the epoch."""
    backlog_bytes: int = 0
    """Recorded, and not committed yet."""
    format: int = 0
    """The format in which the shard is written."""
    checkpoint: str = ""
    """The name of the newest checkpoint; empty before the first."""
    checkpoint_epoch: int = 0
    checkpoint_objects: int = 0
    """Where in the log the newest checkpoint is."""
    checkpoint_us: int = 0
    """When it was written; 0: not by this owner."""
    serving_us: int = 0
    """Since when the owner serves."""
    releasing: bool = False
    successor: str = ""


class NodeStatus(WireStruct):
    """A node of a cluster, by its record in the store and its reports to the owner."""

    node: str
    role: str
    """serving, following, restoring, claiming, releasing, stopped or blocked; `silent` if it was not heard for long."""
    addresses: list[str] = msgspec.field(default_factory=list)
    http_addresses: list[str] = msgspec.field(default_factory=list)
    version: str = ""
    format_max: int = 0
    """The highest format that it reads and writes."""
    zone: str = ""
    beat: int = 0
    """Counts the changes of its record."""
    beat_age_us: int = 0
    """How long ago the owner saw the last change of its record."""
    epoch: int = 0
    objects: int = 0
    """How far it has applied the log."""
    lag_objects: int = 0
    lag_us: int = 0
    """How long it is behind the owner; 0: not at all."""
    drained: bool = False
    """Whether it was asked to serve nothing."""


class ClusterStatus(Answer):
    """The answer to ClusterDescribe."""

    cluster: str
    store: str
    """Where the shared store is, without credentials."""
    node: str
    """The node that answers."""
    shards: list[ShardStatus]
    nodes: list[NodeStatus]
    format_max: int = 0
    """The format that `cluster upgrade` would write: the highest that every live node knows."""
    time_us: int = 0


class ClusterMoveBegun(Answer):
    """The answer to ClusterMove and ClusterDrain: who hands over to whom. ClusterDescribe tells when it is done."""

    shard: int
    epoch: int
    """The shard has a higher one once it is moved."""
    node: str
    """The owner so far."""
    successor: str = ""
    """Empty: nothing is handed over, because the node owns nothing."""


class ClusterUpgraded(Answer):
    """The answer to ClusterUpgrade."""

    format: int
    """The format that is written from now on."""
    format_before: int


@declare(Kind.NODE_REPORT, Permission(Verb.FOLLOW, Resource.CLUSTER))
class NodeReport(Request[OwnerReport]):
    """Tell the owner of a shard how far a follower is. Nodes send it twice a second."""

    node: str
    shard: int = 0
    epoch: int = 0
    objects: int = 0
    """How far the follower has applied the log."""
    role: str = "following"
    version: str = ""
    format_max: int = 0
    drained: bool = False


@declare(Kind.CLUSTER_DESCRIBE, Permission(Verb.DESCRIBE, Resource.CLUSTER))
class ClusterDescribe(Request[ClusterStatus]):
    """Describe the cluster: its shards with their owners, and its nodes."""


@declare(Kind.CLUSTER_MOVE, Permission(Verb.ADMINISTER, Resource.CLUSTER))
class ClusterMove(Request[ClusterMoveBegun]):
    """Hand a shard over to another node."""

    shard: int
    node: str


@declare(Kind.CLUSTER_DRAIN, Permission(Verb.ADMINISTER, Resource.CLUSTER))
class ClusterDrain(Request[ClusterMoveBegun]):
    """Let a node serve nothing: what it owns is handed over to another one; or let it serve again."""

    node: str
    drained: bool = True
    """False: it may serve again."""


@declare(Kind.CLUSTER_UPGRADE, Permission(Verb.ADMINISTER, Resource.CLUSTER))
class ClusterUpgrade(Request[ClusterUpgraded]):
    """Write the newest format that every live node of the cluster knows; older nodes cannot serve from then on."""
