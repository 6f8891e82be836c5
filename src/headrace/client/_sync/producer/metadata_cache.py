"""The metadata of topics, cached so that a producer does not ask the broker for every message."""

from functools import partial

from headrace.client._sync.concurrency import Lock, now
from headrace.client._sync.connection.reconnecting import ReconnectingConnection
from headrace.client.connection.request_router import Bytes
from headrace.client.producer.topic_metadata import TopicMetadata, metadata_of
from headrace.model.arguments import shown
from headrace.model.errors import HeadraceError, InvalidArgument
from headrace.model.requests import TopicDescribe, TopicInfo

_FRESH_S = 30.0
"""Partitions may be added; so long after that a producer knows them all."""


class MetadataCache:
    """Holds the metadata of topics; fetches it with the first use of a topic, and again when it is old."""

    def __init__(self, broker: ReconnectingConnection) -> None:
        self._broker = broker
        self._known: dict[str, TopicMetadata] = {}
        self._asked: dict[str, float] = {}
        self._lock = Lock()

    def known(self, topic: str) -> TopicMetadata | None:
        """Return the cached metadata without waiting; if it is old, a request for new metadata is sent."""
        try:
            metadata = self._known.get(topic)
        except TypeError as error:  # costs nothing where there is none
            raise InvalidArgument(f"a topic's name is a str, not {shown(topic)}") from error
        if metadata is not None and now() - self._asked[topic] > _FRESH_S and self._broker.connection is not None:
            self._asked[topic] = now()
            tell = partial(self._described, topic)
            self._broker.connection.request_nowait(TopicDescribe(topic), b"", tell)
        return metadata

    def get(self, topic: str, deadline: float | None = None, *, create: bool = True) -> TopicMetadata:
        """Return the metadata of a topic, which the broker may create now, unless `create` is false."""
        metadata = self.known(topic)
        if metadata is None:
            if deadline is None:
                deadline = now() + self._broker.timeout
            with self._lock:
                metadata = self._known.get(topic)
                if metadata is None:
                    head = TopicDescribe(topic, create=create)
                    info = self._broker.request(head, timeout=deadline - now())
                    metadata = self.learn(topic, info)
        return metadata

    def refreshed(self, topic: str, refusal: HeadraceError, deadline: float) -> TopicMetadata:
        """Fetch the metadata again before a message is refused because of it; raises the refusal if that fails."""
        self.forget(topic)
        try:
            return self.get(topic, deadline)
        except HeadraceError as error:
            raise refusal from error

    def learn(self, topic: str, info: TopicInfo) -> TopicMetadata:
        """Cache what the broker said about a topic."""
        metadata = metadata_of(info)
        self._asked[topic] = now()
        self._known[topic] = metadata
        return metadata

    def forget(self, topic: str) -> None:
        """Drop the metadata of a topic that has changed."""
        if isinstance(topic, str):  # nothing is known by another name
            self._known.pop(topic, None)

    def disown(self) -> None:
        """In a forked child: drop everything; the next request makes a connection."""
        self._known, self._asked, self._lock = {}, {}, Lock()

    def _described(self, topic: str, answer: TopicInfo | HeadraceError, _body: Bytes) -> None:
        if isinstance(answer, TopicInfo):
            self.learn(topic, answer)
        elif not answer.retryable:
            self.forget(topic)
