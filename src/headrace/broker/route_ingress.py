"""The ingress: stores messages that were published to subjects for the routes that take them."""

from collections.abc import Callable

from crc32c import crc32c

from headrace.broker.pending_answer import PendingAnswer
from headrace.broker.ports import Session
from headrace.broker.routes import RouteRegistry
from headrace.broker.switchboard import parse_subject
from headrace.broker.topics import TopicRegistry
from headrace.model.batch import Batch, Columns, encode
from headrace.model.codec import Codec
from headrace.model.headers import replaced_headers
from headrace.model.requests import Publish, Published
from headrace.model.route_requests import SUBJECT_HEADER

PublishBatch = Callable[[Session, Publish, Batch, int], Published | PendingAnswer[Published]]


class RouteIngress:
    """Appends messages of subjects to the ingress topic of their tenant, with the subject in a header."""

    def __init__(self, routes: RouteRegistry, topics: TopicRegistry, publish: PublishBatch) -> None:
        self._routes = routes
        self._topics = topics
        self._publish = publish

    def takes(self, subject: str) -> bool:
        """Whether a route by key or pattern takes messages of a subject."""
        return len(self._routes) > 0 and self._routes.takes_subject(*parse_subject(subject))

    def append(self, session: Session, subject: str, batch: Batch, now_us: int) -> PendingAnswer[Published]:
        """Store a producer's batch; resolves when it is as durable as the topic says."""
        tenant, bare = parse_subject(subject)
        name = self._routes.ingress(tenant)
        topic = self._topics.get_or_create(name, now_us)
        number = crc32c(bare.encode()) % topic.settings.partitions
        stored = self._publish(session, Publish(name, number), _with_subject(batch, bare), now_us)
        if isinstance(stored, PendingAnswer):
            return stored
        answer: PendingAnswer[Published] = PendingAnswer()
        answer.resolve(stored)
        return answer


def _with_subject(batch: Batch, subject: str) -> Batch:
    """The batch with the subject in a header of each message."""
    columns, content = batch.columns(), subject.encode()
    given = columns.headers or [None] * batch.count
    headers = [replaced_headers(each, {SUBJECT_HEADER: content}) for each in given]
    written = Columns(
        columns.values,
        columns.keys,
        columns.timestamps,
        headers,
        columns.dues,
        columns.priorities,
        columns.expires,
    )
    return encode(written, batch.time_max, codec=Codec(batch.codec))
