"""Administration of topics: each method sends one request, and learns what the answer says about the topic."""

from collections.abc import Mapping, Sequence
from typing import Any

from headrace.client._sync.concurrency import now
from headrace.client._sync.connection.reconnecting import ReconnectingConnection
from headrace.client._sync.producer.metadata_cache import MetadataCache
from headrace.client.times import When, listed, spot_in_time
from headrace.model.arguments import shown
from headrace.model.errors import InvalidArgument
from headrace.model.request import Request
from headrace.model.requests import (
    Offsets,
    TopicAlter,
    TopicCreate,
    TopicDelete,
    TopicDescribe,
    TopicInfo,
    TopicList,
    TopicTrim,
)


class TopicAdmin:
    """Creates, alters, lists, trims and deletes topics."""

    def __init__(self, broker: ReconnectingConnection, metadata_cache: MetadataCache) -> None:
        self._broker = broker
        self._metadata_cache = metadata_cache

    def create(self, topic: str, settings: dict[str, Any], exist_ok: bool) -> TopicInfo:
        """Create a topic."""
        return self._info(TopicCreate(topic, settings, exist_ok), topic, repeat=exist_ok)

    def alter(self, topic: str, settings: dict[str, Any]) -> TopicInfo:
        """Change settings of a topic."""
        return self._info(TopicAlter(topic, settings), topic)

    def delete(self, topic: str) -> None:
        """Delete a topic with its messages."""
        self._metadata_cache.forget(topic)
        self._broker.request(TopicDelete(topic), repeat=False)
        self._metadata_cache.forget(topic)

    def list_matching(self, pattern: str) -> list[TopicInfo]:
        """List the topics whose names match a pattern."""
        answer = self._broker.request(TopicList(pattern))
        return answer.topics

    def describe(self, topic: str, create: bool) -> TopicInfo:
        """Describe a topic, and create it first if that is wanted."""
        return self._info(TopicDescribe(topic, create), topic)

    def trim(
        self, topic: str, offsets: Mapping[int, int] | None, before: When | None, unread: bool, topic_id: int
    ) -> dict[int, int]:
        """Remove the messages before offsets or a time; returns the first offset that each partition has left."""
        if (offsets is None) == (before is None):
            raise InvalidArgument("say which messages go: give either offsets or a time")
        deadline = now() + self._broker.timeout
        if offsets is not None and not isinstance(offsets, Mapping):
            raise InvalidArgument(f"offsets are partitions to offsets, such as {{0: 1000}}, not {shown(offsets)}")
        if offsets is None:
            assert before is not None
            offsets = self.offsets(topic, before, None)
        head = TopicTrim(topic, dict(offsets), unread, topic_id)
        answer = self._broker.request(head, timeout=deadline - now())
        return answer.offsets

    def offsets(self, topic: str, at: When, partitions: Sequence[int] | None) -> dict[int, int]:
        """Find the offset of each partition at a time."""
        spot = spot_in_time(at)
        head = Offsets(topic, listed(partitions or (), "partitions"), spot.kind, spot.value)
        answer = self._broker.request(head)
        return answer.offsets

    def _info(self, request: Request[TopicInfo], topic: str, *, repeat: bool = True) -> TopicInfo:
        info = self._broker.request(request, repeat=repeat)
        self._metadata_cache.learn(topic, info)
        return info
