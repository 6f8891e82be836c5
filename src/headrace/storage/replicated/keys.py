"""The keys of a cluster's objects in its shared store, and the names in a node's directory. FORMAT.md lists them."""

from typing import NamedTuple

NODE_STATE_NAME = "node.json"
"""What a node remembers of itself, in its directory."""
SHARDS_NAME = "shards"
"""The directory of a node's copies of shards."""


class Position(NamedTuple):
    """A position in the committed log of a shard: so many WAL objects of this epoch, and all of earlier epochs."""

    epoch: int
    objects: int

    def __str__(self) -> str:
        return f"{self.epoch}:{self.objects}"


class ShardKeys:
    """The keys of one shard.

    >>> ShardKeys("trading", 17).wal(3, 42)
    'trading/shards/017/wal/00000003/000000000042'
    """

    def __init__(self, cluster: str, shard: int) -> None:
        self.root = f"{cluster}/shards/{shard:03d}"
        self.manifest = f"{self.root}/manifest"
        self.wal_prefix = f"{self.root}/wal/"
        self.checkpoint_prefix = f"{self.root}/checkpoints/"
        self.chunk_prefix = f"{self.root}/chunks/"

    def epoch_prefix(self, epoch: int) -> str:
        """What the keys of all WAL objects of an epoch begin with."""
        return f"{self.wal_prefix}{epoch:08d}/"

    def wal(self, epoch: int, position: int) -> str:
        """The key of a WAL object; the first of an epoch has position 0."""
        return f"{self.epoch_prefix(epoch)}{position:012d}"

    def position(self, key: str) -> tuple[int, int]:
        """The epoch and the position in the key of a WAL object."""
        epoch, position = key.removeprefix(self.wal_prefix).split("/")
        return int(epoch), int(position)

    def checkpoint(self, name: str) -> str:
        """The key of a checkpoint."""
        return f"{self.checkpoint_prefix}{name}"

    def chunk(self, name: str) -> str:
        """The key of a chunk of a file."""
        return f"{self.chunk_prefix}{name}"


def cluster_key(cluster: str) -> str:
    """The key of the record with the number of shards and the format, which is put once."""
    return f"{cluster}/cluster"


def definitions_key(cluster: str) -> str:
    """The key of the security definitions."""
    return f"{cluster}/definitions"


def nodes_prefix(cluster: str) -> str:
    """What the keys of all nodes' records begin with."""
    return f"{cluster}/nodes/"


def node_key(cluster: str, node: str) -> str:
    """The key of the record in which a node says where it is, and that it is alive."""
    return f"{nodes_prefix(cluster)}{node}"
