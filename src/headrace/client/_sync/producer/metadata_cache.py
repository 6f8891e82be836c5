"""What is known about topics, so that a producer need not ask for every message."""

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
    """The shapes of topics, asked for once and then now and then."""

    def __init__(self, broker: ReconnectingConnection) -> None:
        self._broker = broker
        self._known: dict[str, TopicMetadata] = {}
        self._asked: dict[str, float] = {}
        self._lock = Lock()

    def known(self, topic: str) -> TopicMetadata | None:
        """What is known, without waiting; if that is old it is asked for anew beside."""
        try:
            metadata = self._known.get(topic)
        except TypeError as error:  # costs nothing where there is none
            raise InvalidArgument(f"a topic's name is a str, not {shown(topic)}") from error
        if metadata is not None and now() - self._asked[topic] > _FRESH_S and self._broker.connection is not None:
            self._asked[topic] = now()
            tell = partial(self._described, topic)
            self._broker.connection.request_nowait(TopicDescribe(topic), b"", tell)
        return metadata

    def get(self, topic: str, deadline: float | None = None) -> TopicMetadata:
        """The shape of a topic, which the broker may make now if there is none."""
        metadata = self.known(topic)
        if metadata is None:
            if deadline is None:
                deadline = now() + self._broker.timeout
            with self._lock:
                metadata = self._known.get(topic)
                if metadata is None:
                    head = TopicDescribe(topic, create=True)
                    info = self._broker.request(head, timeout=deadline - now())
                    metadata = self.learn(topic, info)
        return metadata

    def refreshed(self, topic: str, refusal: HeadraceError, deadline: float) -> TopicMetadata:
        """Ask anew, because by what is known something must be refused; if the broker does not say, it is refused."""
        self.forget(topic)
        try:
            return self.get(topic, deadline)
        except HeadraceError as error:
            raise refusal from error

    def learn(self, topic: str, info: TopicInfo) -> TopicMetadata:
        """Somebody was told this about a topic."""
        metadata = metadata_of(info)
        self._asked[topic] = now()
        self._known[topic] = metadata
        return metadata

    def forget(self, topic: str) -> None:
        """The topic is not what it was."""
        if isinstance(topic, str):  # nothing is known by another name
            self._known.pop(topic, None)

    def disown(self) -> None:
        """In a forked child: ask anew, which makes the connection."""
        self._known, self._asked, self._lock = {}, {}, Lock()

    def _described(self, topic: str, answer: TopicInfo | HeadraceError, _body: Bytes) -> None:
        if isinstance(answer, TopicInfo):
            self.learn(topic, answer)
        elif not answer.retryable:
            self.forget(topic)
