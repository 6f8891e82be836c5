"""How many partitions topics have, remembered for a moment: a publish needs to know."""

from itertools import count
from typing import TYPE_CHECKING

from headrace.model.requests import TopicDescribe

if TYPE_CHECKING:
    from headrace.gateways.http.call import Call

_REMEMBERED_US = 1_000_000
_REMEMBERED_MAX = 10_000


class PartitionCounts:
    """The number of partitions by tenant and topic."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, str], tuple[int, int]] = {}
        """The number, and until when it is good."""
        self._turns = count()

    async def get(self, call: "Call", topic: str) -> int:
        """The number of a topic's partitions; the topic is made if there is none and the broker may."""
        key, now_us = (call.session.tenant, topic), call.gateway.now_us()
        known = self._known.get(key)
        if known is not None and known[1] > now_us:
            return known[0]
        described = await call.ask(TopicDescribe(topic, create=True))
        partitions = len(described.partitions) or 1
        if len(self._known) >= _REMEMBERED_MAX:
            self._known.clear()
        self._known[key] = partitions, now_us + _REMEMBERED_US
        return partitions

    def forget(self, call: "Call", topic: str) -> None:
        """Look again the next time."""
        self._known.pop((call.session.tenant, topic), None)

    def next_partition(self, partitions: int) -> int:
        """The partition for messages without a key: each in its turn."""
        return next(self._turns) % partitions
