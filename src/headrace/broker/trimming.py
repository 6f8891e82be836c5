"""Removing old messages of a topic at once, when somebody asks for it: by default nothing that is still to be read."""

from collections.abc import Callable
from contextlib import suppress
from functools import partial

from headrace.broker.lane import Lane
from headrace.broker.later import Later
from headrace.broker.membership import Membership
from headrace.broker.ports import Ports
from headrace.broker.subscriptions import SubscriptionRegistry
from headrace.broker.topics import Topic, Topics
from headrace.engines.api import explained
from headrace.model.errors import DiskFull, HeadraceError, InternalError, InvalidArgument, TopicNotFound
from headrace.model.request import Answer
from headrace.model.requests import TopicTrim, TopicTrimmed


class Trimming:
    """Trims topics. Work on files is done in the background; the answer comes when it lasts."""

    def __init__(
        self, topics: Topics, membership: Membership, subscriptions: SubscriptionRegistry, ports: Ports
    ) -> None:
        self._topics = topics
        self._membership = membership
        self._subscriptions = subscriptions
        self._ports = ports
        self._open = 0

    @property
    def idle(self) -> bool:
        """Whether nobody waits for an answer."""
        return not self._open

    def trim(self, request: TopicTrim, now_us: int) -> TopicTrimmed | Later[Answer]:
        """Remove what comes before the offsets; answers with the first offsets there are then."""
        topic = self._topics.get(request.topic)
        if request.topic_id not in (0, topic.id):
            raise TopicNotFound(f"the topic {topic} was made again: its id is {topic.id}, not {request.topic_id}")
        lanes = [self._topics.lane(topic, number) for number in sorted(request.offsets)]
        if wrong := [offset for offset in request.offsets.values() if offset < 0]:
            raise InvalidArgument(f"there is no offset {wrong[0]}; they begin with 0")
        answer = _Gathered(len(lanes), self._answered)
        if not lanes:
            return TopicTrimmed({})
        self._open += 1
        for lane in lanes:
            bound = min(request.offsets[lane.number], lane.end_offset)
            if not request.unread:
                bound = min(bound, self.unread_from(topic, lane))
            if bound <= lane.partition.first_offset:
                answer.add(lane, None)
                continue
            # Before messages go: who produced them, and who has passed them, must be safe.
            kept = self._topics.keep_producers(topic, lane, now_us, at_once=True)
            kept.then(partial(self._remove, lane, bound, answer))
        return answer.later

    def unread_from(self, topic: Topic, lane: Lane) -> int:
        """The first offset that some group or leased subscription has still to read; the end if there is none."""
        by_groups = self._membership.consumed_offset(topic, lane.number)
        by_leases = self._subscriptions.consumed_offset(topic, lane.number)
        return min(offset for offset in (by_groups, by_leases, lane.end_offset) if offset is not None)

    def _remove(self, lane: Lane, bound: int, answer: "_Gathered", outcome: object) -> None:
        """Have it removed in the background, unless the disk does not even take notes."""

        def job() -> None:
            failure: HeadraceError | None = InternalError()
            try:
                if isinstance(outcome, HeadraceError):
                    raise outcome
                if lane.gone is not None:
                    raise TopicNotFound(str(lane.gone))
                ballast = self._topics.ballast
                ballast.use(partial(lane.partition.truncate_before, bound))
                failure = None
                with suppress(DiskFull):  # maintenance tries again
                    ballast.restore()
            except HeadraceError as error:
                failure = error
            except OSError as error:
                failure = explained(error)
            finally:
                self._ports.from_thread(partial(answer.add, lane, failure))

        self._ports.background(job)

    def _answered(self) -> None:
        self._open -= 1


class _Gathered:
    """The answer that is ready when all partitions are."""

    def __init__(self, count: int, answered: Callable[[], None]) -> None:
        self.later: Later[Answer] = Later()
        self._left = count
        self._answered = answered
        self._offsets: dict[int, int] = {}
        self._failure: HeadraceError | None = None

    def add(self, lane: Lane, failure: HeadraceError | None) -> None:
        """A partition is done, or cannot be."""
        self._failure = self._failure or failure
        self._offsets[lane.number] = lane.partition.first_offset
        self._left -= 1
        if not self._left:
            self._answered()
            self.later.settle(self._failure or TopicTrimmed(dict(sorted(self._offsets.items()))))
