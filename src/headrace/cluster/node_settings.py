"""What a node is told, what serves its shard, and the clocks that it uses."""

import time
from typing import NamedTuple, Protocol

from headrace.cluster.shards import OwnedShard
from headrace.storage.replicated.manifest import FORMAT


class NodeSettings(NamedTuple):
    """What a node is told."""

    cluster: str
    node: str
    directory: str
    """Where it has its data."""
    addresses: tuple[str, ...]
    """URLs of the native protocol at which it is reached."""
    http_addresses: tuple[str, ...] = ()
    zone: str = ""
    version: str = ""
    heartbeat_s: float = 1.0
    format_max: int = FORMAT
    follows: bool = True
    """False: it claims at once, or fails with LogInUse if another node serves; it ends when it loses the shard."""
    start_s: float = 0.0
    """How long it waits for a store that does not answer when it starts."""


class ShardHost(Protocol):
    """What serves a shard, and answers clients while it does not: the server around the node."""

    def is_reachable(self) -> bool:
        """Whether clients could connect if this node served; a node that is not takes over only if no other does."""

    async def start_serving(self, owned: OwnedShard) -> None:
        """Serve clients from the shard's directory, by its replicated disk."""

    async def abort_serving(self) -> None:
        """Drop all connections and the broker at once, and flush nothing: the disk is dead. Then stand by."""

    async def finish_serving(self) -> None:
        """Refuse new work, finish what was begun, tell clients where to go, and close the broker.

        The connections of followers stay open, so that they learn of the release by their end.
        """

    async def end_serving(self) -> None:
        """Close the connections that are left, and stand by."""


def monotonic_us() -> int:
    """The node's own clock, which no one sets."""
    return time.monotonic_ns() // 1000


def time_us() -> int:
    """The time of day."""
    return time.time_ns() // 1000
