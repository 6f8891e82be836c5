"""Administration of consumer groups: each method sends one request."""

from collections.abc import Mapping, Sequence

from headrace.client._sync.connection.reconnecting import ReconnectingConnection
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


class GroupAdmin:
    """Lists, describes, moves and deletes consumer groups."""

    def __init__(self, broker: ReconnectingConnection) -> None:
        self._broker = broker

    def list_all(self) -> list[GroupSummary]:
        """List the groups."""
        answer = self._broker.request(GroupList())
        return answer.groups

    def describe(self, group: str) -> GroupInfo:
        """Describe a group."""
        return self._broker.request(GroupDescribe(group))

    def seek(self, group: str, topic: str, to: Start, partitions: Sequence[int] | None) -> GroupInfo:
        """Move the positions of a group in a topic."""
        spot = spot_at(to)
        head = GroupSeek(group, topic, listed(partitions or (), "partitions"), spot.kind)
        if spot.kind == "time":
            head.time_us = spot.value
        else:
            head.offset = spot.value
        return self._broker.request(head)

    def delete(self, group: str) -> None:
        """Delete a group and its positions."""
        self._broker.request(GroupDelete(group), repeat=False)

    def commit(self, group: str, positions: Mapping[tuple[str, int], int]) -> None:
        """Set positions of a group that has no active members."""
        try:
            offsets = [PartitionOffset(topic, partition, offset) for (topic, partition), offset in positions.items()]
        except (AttributeError, TypeError, ValueError) as error:
            meant = "positions are topics and partitions to offsets, such as {('orders', 0): 1000}"
            raise InvalidArgument(f"{meant}, not {shown(positions)}") from error
        self._broker.request(Commit(group, offsets))
