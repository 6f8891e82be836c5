"""Virtual topics (views): a view's partition is its source's, filtered by a content query when it is read."""

import logging
from collections.abc import Callable

import msgspec

from headrace.broker.active_partition import ActivePartition, Answer
from headrace.broker.ports import Ports
from headrace.engines.api import PART_MESSAGES, Appended, DerivedCache, DerivedPart, DerivedPartition, Slice
from headrace.model.batch import Batch, Columns
from headrace.model.content.decoded_values import DecodedValues
from headrace.model.content.matcher import QueryMatcher, compile_query
from headrace.model.content.query import ContentQuery
from headrace.model.errors import HeadraceError, InvalidArgument, TopicIsView
from headrace.model.requests import Publish, Published
from headrace.model.topic import SYSTEM_PREFIX, TopicName, TopicSettings, topic_settings

logger = logging.getLogger("headrace.broker")

_LOGGED_US = 60_000_000
"""How often messages that a view leaves out are logged."""
_DECODED_TOGETHER = 64
_READ_STEPS = 8192
"""Steps of the query after which a read ends, about two milliseconds; at least one message is looked at."""
_OWN = frozenset({"view_of", "view_query", "partitions"})
"""The settings that whoever creates a view may give."""


class ContentFilter:
    """Keeps the messages whose values a content query selects."""

    def __init__(self, matcher: QueryMatcher) -> None:
        self._matcher = matcher

    def derive(self, columns: Columns, start: int, stop: int) -> DerivedPart:
        """Select among the messages of a part; ends early when they take many steps."""
        matched: list[int] = []
        failed: list[int] = []
        at, left = start, _READ_STEPS
        while at < stop and left > 0:
            # A few at a time: documents that live long make the garbage collector look at them.
            values = columns.values[at : min(at + _DECODED_TOGETHER, stop)]
            selection = self._matcher.select(DecodedValues(values), 0, left)
            matched += [at + index for index in selection.matched]
            failed += [at + index for index in selection.failed]
            at += selection.end
            left -= selection.steps
        return DerivedPart(matched, at, failed, work=(_READ_STEPS - left) * PART_MESSAGES // _READ_STEPS)


class ActiveView(ActivePartition):
    """One partition of a virtual topic: shows what the source's partition shows, and refuses to publish."""

    def __init__(
        self,
        topic: str,
        topic_id: int,
        source: ActivePartition,
        partition: DerivedPartition,
        settings: TopicSettings,
        ports: Ports,
    ) -> None:
        super().__init__(topic, topic_id, source.number, partition, settings, ports)
        self._source = source
        self._derived = partition
        self._listens = False

    @property
    def failed_count(self) -> int:
        """Messages left out because the query took too long for them."""
        return self._derived.failed_count

    @property
    def end_offset(self) -> int:
        """The source's: a view shows nothing that its source does not show."""
        return self._source.end_offset

    def alter(self, settings: TopicSettings, now_us: int) -> None:  # noqa: ARG002
        """Take over the source's settings, and read what the source's consumers see from now on."""
        self.settings = settings
        self._derived.read_from(self._source.delivered)
        self.wake()

    def check_publish(self, request: Publish) -> int:  # noqa: ARG002
        """Refuse: a view stores nothing."""
        raise refused(self.topic, self.settings, "publish to")

    def publish(
        self,
        request: Publish,  # noqa: ARG002
        batch: Batch,  # noqa: ARG002
        now_us: int,  # noqa: ARG002
        *,
        alone: bool = False,  # noqa: ARG002
    ) -> Published | Answer:
        """Refuse: a view stores nothing."""
        raise refused(self.topic, self.settings, "publish to")

    def committed(self, batch: Batch, mark: int, now_us: int) -> Appended:  # noqa: ARG002
        """Refuse: a view stores nothing."""
        raise refused(self.topic, self.settings, "publish to")

    def forwarded(self, batch: Batch, now_us: int) -> None:  # noqa: ARG002
        """Refuse: a view stores nothing."""
        raise refused(self.topic, self.settings, "route to")

    def when_synced(self, tell: Callable[[HeadraceError | None], None]) -> None:
        """Call back when everything in the source is synced."""
        self._source.when_synced(tell)

    def read(self, offset: int, bytes_max: int, now_us: int, on_ready: Callable[[], None] | None) -> Slice | None:
        """Whole batches from an offset on; None when there are none, and then `on_ready` is called once."""
        if self.gone is None and self._source.gone is not None:
            raise type(self._source.gone)(str(self._source.gone))
        return super().read(offset, bytes_max, now_us, on_ready)

    def listen(self, on_ready: Callable[[], None]) -> None:
        """Call this once when there may be more to read in the source."""
        super().listen(on_ready)
        if not self._listens:
            self._listens = True
            self._source.listen(self._wake_readers)

    def end(self) -> None:
        """Refuse all reading: the view was deleted."""
        self._source.forget(self._wake_readers)
        super().end()

    def _wake_readers(self) -> None:
        self._listens = False
        self.wake()


class ViewFactory:
    """Makes the partitions of views, which share a cache, and logs what their queries fail on."""

    def __init__(self, ports: Ports, cache: DerivedCache) -> None:
        self._ports = ports
        self._cache = cache
        self._matchers: dict[int, QueryMatcher] = {}
        self._unlogged: dict[int, tuple[str, int]] = {}
        """The names of views, by id, that have left out messages since that was last logged, and how many."""
        self._logged_us: dict[int, int] = {}

    def open(self, topic: str, topic_id: int, settings: TopicSettings, source: ActivePartition) -> ActiveView:
        """The partition of a view over one of its source; raises ContentSupportMissing."""
        assert settings.view_query is not None
        if topic_id not in self._matchers:
            self._matchers[topic_id] = compile_query(settings.view_query)
        content_filter = ContentFilter(self._matchers[topic_id])
        derived = DerivedPartition(
            source.delivered, content_filter, self._cache, lambda count: self._failed(topic, topic_id, count)
        )
        return ActiveView(topic, topic_id, source, derived, settings, self._ports)

    def forget(self, topic_id: int) -> None:
        """A view was deleted."""
        self._matchers.pop(topic_id, None)
        self._unlogged.pop(topic_id, None)
        self._logged_us.pop(topic_id, None)

    def _failed(self, topic: str, topic_id: int, count: int) -> None:
        self._unlogged[topic_id] = topic, self._unlogged.get(topic_id, ("", 0))[1] + count

    def log_failures(self, now_us: int) -> None:
        """Log how many messages views have left out, at most once a minute for each."""
        for topic_id, (topic, count) in list(self._unlogged.items()):
            last_us = self._logged_us.get(topic_id)
            if last_us is None or not last_us <= now_us < last_us + _LOGGED_US:
                self._logged_us[topic_id] = now_us
                del self._unlogged[topic_id]
                logger.warning(
                    "messages left out of a view; its query takes too long for them  view=%s messages=%s", topic, count
                )


def new_view_settings(name: TopicName, given: dict[str, object]) -> TopicSettings:
    """The settings that were given for a new view, checked as far as they can be without its source."""
    if others := sorted(given.keys() - _OWN):
        raise InvalidArgument(
            f"a virtual topic has the settings of its source: leave out {', '.join(others)}, or alter the source"
        )
    settings = topic_settings({own: given.get(own) for own in ("view_of", "view_query")})
    assert settings.view_of is not None
    assert settings.view_query is not None
    compile_query(settings.view_query)
    if str(name) == settings.view_of:
        raise InvalidArgument(f"{name} cannot be a view of itself")
    if name.topic.startswith(SYSTEM_PREFIX):
        raise InvalidArgument(
            f"{name} cannot be a view: names with {SYSTEM_PREFIX} are for topics of the broker itself"
        )
    return settings


def inherited(source: TopicSettings, view_of: str, view_query: ContentQuery | None) -> TopicSettings:
    """The settings of a view: those of its source, and its query.

    Middleware is the source's, which changes messages before the view looks at them; keys are counted there, too.
    """
    return msgspec.structs.replace(
        source, view_of=view_of, view_query=view_query, middleware=(), middleware_seconds=5.0, key_versions=False
    )


def check_stores(topic: str, settings: TopicSettings, action: str) -> None:
    """Refuse a view where messages are to be stored or changed."""
    if settings.view_of is not None:
        raise refused(topic, settings, action)


def refused(topic: str, settings: TopicSettings, action: str) -> TopicIsView:
    """The error about what cannot be done with a view."""
    source = settings.view_of or ""
    return TopicIsView(
        f"cannot {action} {topic}: it is a virtual topic (view), which stores nothing; use its source, {source}",
        view_of=source,
    )
