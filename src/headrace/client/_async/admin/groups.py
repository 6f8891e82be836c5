"""Administration of consumer groups: each method sends one request."""

from collections.abc import Mapping, Sequence

from headrace.client._async.connection.reconnecting import AsyncReconnectingConnection
from headrace.client.times import Start, listed, spot_at
from headrace.model.arguments import shown
from headrace.model.errors import InvalidArgument
from headrace.model.requests import (
    Commit,
    GroupDelete,
    GroupDescribe,
    GroupInfo,
    GroupList,
    GroupSeek,
    GroupSummary,
    PartitionOffset,
)


class AsyncGroupAdmin:
    """Lists, describes, moves and deletes consumer groups."""

    def __init__(self, broker: AsyncReconnectingConnection) -> None:
        self._broker = broker

    async def list_all(self) -> list[GroupSummary]:
        """List the groups."""
        answer = await self._broker.request(GroupList())
        return answer.groups

    async def describe(self, group: str) -> GroupInfo:
        """Describe a group."""
        return await self._broker.request(GroupDescribe(group))

    async def seek(self, group: str, topic: str, to: Start, partitions: Sequence[int] | None) -> GroupInfo:
        """Move the positions of a group in a topic."""
        spot = spot_at(to)
        head = GroupSeek(group, topic, listed(partitions or (), "partitions"), spot.kind)
        if spot.kind == "time":
            head.time_us = spot.value
        else:
            head.offset = spot.value
        return await self._broker.request(head)

    async def delete(self, group: str) -> None:
        """Delete a group and its positions."""
        await self._broker.request(GroupDelete(group), repeat=False)

    async def commit(self, group: str, positions: Mapping[tuple[str, int], int]) -> None:
        """Set positions of a group that has no active members."""
        try:
            offsets = [PartitionOffset(topic, partition, offset) for (topic, partition), offset in positions.items()]
        except (AttributeError, TypeError, ValueError) as error:
            meant = "positions are topics and partitions to offsets, such as {('orders', 0): 1000}"
            raise InvalidArgument(f"{meant}, not {shown(positions)}") from error
        await self._broker.request(Commit(group, offsets))
