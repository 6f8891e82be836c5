"""Which partitions a subscription without a group reads: found when it begins, and looked for now and then."""

import logging
from collections.abc import Mapping, Sequence
from functools import partial

from headrace.client._sync.concurrency import Timer, Timers, now
from headrace.client._sync.connection.reconnecting import ReconnectingConnection
from headrace.client._sync.consumer.fetcher import Fetcher
from headrace.client.connection.request_router import Bytes
from headrace.client.times import Start, spot_at
from headrace.model.arguments import shown
from headrace.model.errors import HeadraceError, PartitionNotFound
from headrace.model.requests import Offsets, OffsetsFound, TopicDescribe, TopicInfo, TopicList, Topics

logger = logging.getLogger("headrace.client")

_REFRESH_S = 2.0


class Discovery:
    """Finds partitions by topics and patterns, and lets the fetcher read them."""

    def __init__(
        self,
        broker: ReconnectingConnection,
        fetcher: Fetcher,
        timers: Timers,
        topics: Sequence[str],
        patterns: Sequence[str],
        partitions: Sequence[int] | None,
        create: bool = False,
    ) -> None:
        self._broker = broker
        self._fetcher = fetcher
        self._timers = timers
        self._topics = topics
        self._patterns = patterns
        self._partitions = partitions
        self._create = create
        self._pending: set[tuple[str, int]] = set()
        """Partitions whose first offset was requested."""
        self._timer: Timer | None = None
        self._closed = False

    def begin(self, start: Start | Mapping[int, int], deadline: float) -> None:
        """Find the partitions, and begin to read them."""
        for topic in self._topics:
            head = TopicDescribe(topic, create=self._create)
            info = self._broker.request(head, timeout=deadline - now())
            self._begin_topic(info, start, deadline, optional=False)
        for pattern in self._patterns:
            found = self._broker.request(TopicList(pattern), timeout=deadline - now())
            for info in found.topics:
                self._begin_topic(info, start, deadline, optional=True)
        self._refresh_later()

    def close(self) -> None:
        """Stop looking for new partitions."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()

    def _begin_topic(self, info: TopicInfo, start: Start | Mapping[int, int], deadline: float, optional: bool) -> None:
        new = self._new(info)
        if not new:
            return
        if isinstance(start, Mapping):
            offsets: Mapping[int, int] = start
            new = [number for number in new if number in start]
        elif (spot := spot_at(start)).kind == "offset":
            offsets = dict.fromkeys(new, spot.value)
        else:
            head = Offsets(info.topic, new, spot.kind, spot.value)
            answer = self._broker.request(head, timeout=deadline - now())
            offsets = answer.offsets
        for number in new:
            self._fetcher.add(info.topic, number, offsets[number], optional=optional)

    def _new(self, info: TopicInfo) -> list[int]:
        """Return the partitions of a topic that are wanted and not read yet."""
        count = info.settings["partitions"]
        numbers = range(count) if self._partitions is None else self._partitions
        for number in numbers:
            if not 0 <= number < count:
                raise PartitionNotFound(f"{info.topic} has partitions 0 to {count - 1}, not {shown(number)}")
        known = self._fetcher.readers.keys() | self._pending
        return [number for number in numbers if (info.topic, number) not in known]

    def _refresh_later(self) -> None:
        # Partitions that were asked for by number do not become more.
        if not self._closed and (self._partitions is None or self._patterns):
            self._timer = self._timers.later(_REFRESH_S, self._refresh)

    def _refresh(self) -> None:
        connection = self._broker.connection
        if connection is not None and not self._closed:
            for topic in self._topics:
                connection.request_nowait(TopicDescribe(topic), b"", self._described)
            for pattern in self._patterns:
                connection.request_nowait(TopicList(pattern), b"", self._listed)
        self._refresh_later()

    def _described(self, answer: TopicInfo | HeadraceError, _body: Bytes) -> None:
        """Read partitions that were added to a topic from their beginning."""
        if isinstance(answer, TopicInfo) and not self._closed and (new := self._new(answer)):
            tell = partial(self._found, answer.topic, new)
            connection = self._broker.connection
            if connection is not None:
                self._pending.update((answer.topic, number) for number in new)
                connection.request_nowait(Offsets(answer.topic, new, "earliest"), b"", tell)

    def _listed(self, answer: Topics | HeadraceError, body: Bytes) -> None:
        if isinstance(answer, Topics):
            for info in answer.topics:
                self._described(info, body)

    def _found(self, topic: str, new: list[int], answer: OffsetsFound | HeadraceError, _body: Bytes) -> None:
        self._pending.difference_update((topic, number) for number in new)
        if isinstance(answer, OffsetsFound) and not self._closed:
            for number in new:
                self._fetcher.add(topic, number, answer.offsets[number], optional=topic not in self._topics)
