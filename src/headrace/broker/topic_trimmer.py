"""Trims topics on request: removes old messages, by default only those that all subscriptions have consumed."""

from collections.abc import Callable
from contextlib import suppress
from functools import partial

from headrace.broker.active_partition import ActivePartition
from headrace.broker.group_coordinator import GroupCoordinator
from headrace.broker.pending_answer import PendingAnswer
from headrace.broker.ports import Ports
from headrace.broker.routes import RouteRegistry
from headrace.broker.subscriptions import SubscriptionRegistry
from headrace.broker.topics import Topic, TopicRegistry
from headrace.broker.views import check_stores
from headrace.engines.api import as_headrace_error
from headrace.model.errors import DiskFull, HeadraceError, InternalError, InvalidArgument, TopicNotFound
from headrace.model.request import Answer
from headrace.model.requests import TopicTrim, TopicTrimmed


class TopicTrimmer:
    """Trims topics; works on files in the background, and answers when the removal is durable."""

    def __init__(
        self,
        topics: TopicRegistry,
        membership: GroupCoordinator,
        subscriptions: SubscriptionRegistry,
        routes: RouteRegistry,
        ports: Ports,
    ) -> None:
        self._topics = topics
        self._groups = membership
        self._subscriptions = subscriptions
        self._routes = routes
        self._ports = ports
        self._open = 0

    @property
    def idle(self) -> bool:
        """Whether nobody waits for an answer."""
        return not self._open

    def trim(self, request: TopicTrim, now_us: int) -> TopicTrimmed | PendingAnswer[Answer]:
        """Remove messages before the given offsets; answers with the new first offsets."""
        topic = self._topics.get(request.topic)
        if request.topic_id not in (0, topic.id):
            raise TopicNotFound(
                f"the topic {topic} was deleted and created again: its id is {topic.id}, not {request.topic_id}"
            )
        check_stores(str(topic), topic.settings, "trim")
        if topic.settings.key_versions:
            raise InvalidArgument(
                f"{topic} cannot be trimmed: it has key_versions, which count all messages of a key; use "
                "compact_by_key, or turn key_versions off"
            )
        active_partitions = [self._topics.active(topic, number) for number in sorted(request.offsets)]
        if wrong := [offset for offset in request.offsets.values() if offset < 0]:
            raise InvalidArgument(f"an offset must be 0 or more, not {wrong[0]}")
        answer = _TrimAnswer(len(active_partitions), self._answered)
        if not active_partitions:
            return TopicTrimmed({})
        self._open += 1
        for active in active_partitions:
            bound = min(request.offsets[active.number], active.end_offset)
            if not request.unread:
                bound = min(bound, self.unread_from(topic, active))
            if bound <= active.partition.first_offset:
                answer.add(active, None)
                continue
            # Before messages are removed, their producers and the consumers' offsets must be synced.
            kept = self._topics.keep_producers(topic, active, now_us, at_once=True)
            kept.then(partial(self._remove, active, bound, answer))
        return answer.pending_answer

    def unread_from(self, topic: Topic, active: ActivePartition) -> int:
        """The first offset that a group, leased subscription or route has yet to consume; the end if there is none."""
        by_groups = self._groups.consumed_offset(topic, active.number)
        by_leases = self._subscriptions.consumed_offset(topic, active.number)
        by_routes = self._routes.consumed_offset(topic, active.number)
        return min(offset for offset in (by_groups, by_leases, by_routes, active.end_offset) if offset is not None)

    def _remove(self, active: ActivePartition, bound: int, answer: "_TrimAnswer", outcome: object) -> None:
        """Truncate in the background, unless the journal could not be written."""

        def job() -> None:
            failure: HeadraceError | None = InternalError()
            try:
                if isinstance(outcome, HeadraceError):
                    raise outcome
                if active.gone is not None:
                    raise TopicNotFound(str(active.gone))
                ballast = self._topics.ballast
                ballast.use(partial(active.partition.truncate_before, bound))
                failure = None
                with suppress(DiskFull):  # maintenance retries
                    ballast.restore()
            except HeadraceError as error:
                failure = error
            except OSError as error:
                failure = as_headrace_error(error)
            finally:
                self._ports.call_threadsafe(partial(answer.add, active, failure))

        self._ports.background(job)

    def _answered(self) -> None:
        self._open -= 1


class _TrimAnswer:
    """An answer that resolves when all partitions are trimmed."""

    def __init__(self, count: int, answered: Callable[[], None]) -> None:
        self.pending_answer: PendingAnswer[Answer] = PendingAnswer()
        self._left = count
        self._answered = answered
        self._offsets: dict[int, int] = {}
        self._failure: HeadraceError | None = None

    def add(self, active: ActivePartition, failure: HeadraceError | None) -> None:
        """Record that a partition was trimmed, or failed."""
        self._failure = self._failure or failure
        self._offsets[active.number] = active.partition.first_offset
        self._left -= 1
        if not self._left:
            self._answered()
            self.pending_answer.resolve(self._failure or TopicTrimmed(dict(sorted(self._offsets.items()))))
