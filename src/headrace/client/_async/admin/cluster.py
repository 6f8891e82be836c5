"""The cluster that a broker is part of: describes it, and hands its shard over from node to node."""

from headrace.client._async.concurrency import Monitor, now
from headrace.client._async.connection.reconnecting import AsyncReconnectingConnection
from headrace.model.arguments import checked_timeout
from headrace.model.cluster_requests import (
    ClusterDescribe,
    ClusterDrain,
    ClusterMove,
    ClusterMoveBegun,
    ClusterStatus,
    ClusterUpgrade,
    ClusterUpgraded,
)
from headrace.model.errors import Timeout

_POLL_S = 0.05


class AsyncClusterAdmin:
    """Describes the cluster that the broker is part of, and hands its shard over. It is `bus.cluster`.

    Every node can be asked: clients are redirected to the one that serves.

    Example:
        >>> status = await bus.cluster.describe()  # doctest: +SKIP
        >>> status.shards[0].owner  # doctest: +SKIP
        'node-1'
    """

    def __init__(self, bus: object, broker: AsyncReconnectingConnection) -> None:
        self._bus = bus  # it closes its connections when nobody holds it
        self._broker = broker

    async def describe(self) -> ClusterStatus:
        """Describe the cluster: its store, its shards with their owners, and its nodes with their roles and lag.

        Returns:
            The cluster, as the node that serves knows it.

        Raises:
            UnsupportedOperation: if the broker is not part of a cluster.
            Forbidden: if this client may not see the cluster.
            NotServing: if no node serves within the time-out of the bus.

        Example:
            >>> for node in (await bus.cluster.describe()).nodes:  # doctest: +SKIP
            ...     print(node.node, node.role, node.lag_objects)
            node-1 serving 0
            node-2 following 0
        """
        return await self._broker.request(ClusterDescribe())

    async def drain(self, node: str, *, drained: bool = True, timeout: float = 60.0) -> ClusterStatus:
        """Let a node serve nothing, such as before its machine is restarted; or let it serve again.

        If the node serves, it hands over to another one first. Clients continue there by themselves.

        Parameters:
            node: the name of the node.
            drained: false to let it serve again.
            timeout: how long to wait until another node serves, in seconds; 0: only begin.

        Returns:
            The cluster afterwards.

        Raises:
            InvalidArgument: if there is no such node, or no other that could serve.
            Busy: if the node, or another that is to serve, does not follow within the time-out of the bus.
            Timeout: if no other node serves within the time-out; it may still happen.
            UnsupportedOperation: if the broker is not part of a cluster.
            Forbidden: if this client may not administer the cluster.

        Example:
            >>> status = await bus.cluster.drain("node-1")  # doctest: +SKIP
            >>> status.shards[0].owner  # doctest: +SKIP
            'node-2'
        """
        checked_timeout(timeout, "timeout")
        return await self._moved(await self._broker.request(ClusterDrain(node, drained)), timeout)

    async def move(self, shard: int, node: str, *, timeout: float = 60.0) -> ClusterStatus:
        """Hand a shard over to another node. Clients continue there by themselves.

        Parameters:
            shard: the number of the shard; a cluster of one shard has number 0.
            node: the name of the node that is to serve it.
            timeout: how long to wait until it does, in seconds; 0: only begin.

        Returns:
            The cluster afterwards.

        Raises:
            InvalidArgument: if there is no such shard or node, or if the node cannot serve.
            Busy: if the node does not follow within the time-out of the bus.
            Timeout: if the node does not serve within the time-out; it may still happen.
            UnsupportedOperation: if the broker is not part of a cluster.
            Forbidden: if this client may not administer the cluster.

        Example:
            >>> status = await bus.cluster.move(0, "node-2")  # doctest: +SKIP
            >>> status.shards[0].owner  # doctest: +SKIP
            'node-2'
        """
        checked_timeout(timeout, "timeout")
        return await self._moved(await self._broker.request(ClusterMove(shard, node)), timeout)

    async def upgrade(self) -> ClusterUpgraded:
        """Write the newest format that every live node knows; nodes of earlier versions cannot serve from then on.

        Returns:
            The format before and now, which are the same if nothing was to do.

        Raises:
            UnsupportedOperation: if the broker is not part of a cluster.
            Forbidden: if this client may not administer the cluster.

        Example:
            >>> (await bus.cluster.upgrade()).format  # doctest: +SKIP
            1
        """
        return await self._broker.request(ClusterUpgrade())

    async def _moved(self, begun: ClusterMoveBegun, timeout: float) -> ClusterStatus:
        """Wait until the shard has another owner, if one was asked for."""
        deadline, monitor = now() + timeout, Monitor()
        while True:
            status = await self.describe()
            if not timeout or not begun.successor or is_moved(status, begun):
                return status
            if now() >= deadline:
                raise Timeout(
                    f"shard {begun.shard} was not handed over from {begun.node} to {begun.successor} within "
                    f"{timeout:g} s; it may still happen: `headrace cluster status` shows it"
                )
            with monitor.guard:
                await monitor.wait(_POLL_S)


def is_moved(status: ClusterStatus, begun: ClusterMoveBegun) -> bool:
    """Whether a shard has a later owner than when the hand-over began."""
    return any(one.shard == begun.shard and one.epoch > begun.epoch for one in status.shards)
