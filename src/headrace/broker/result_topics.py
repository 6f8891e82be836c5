"""The topics that hold the results of jobs, one in each tenant, and the results of jobs that failed for good."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from headrace.broker.subscription import Subscription
from headrace.broker.topics import Topic, TopicRegistry
from headrace.model.batch import Batch, Columns, encode
from headrace.model.errors import InvalidArgument
from headrace.model.headers import Headers, header_text
from headrace.model.job_requests import (
    ERROR_RESULT,
    REPLY_HEADER,
    RESULT_HEADER,
    RESULTS_TOPIC,
    JobId,
    ResultsOpened,
    parse_job_id,
)
from headrace.model.limits import RESULT_BYTES_MAX
from headrace.model.requests import TopicCreate
from headrace.model.topic import TopicName

_PARTITIONS = 8
_TEXT_CHARS_MAX = 1000
_ENVELOPE_BYTES = 4096
"""Room for the key and the headers of a result."""


class JobFailure(NamedTuple):
    """A message that is not tried again, and why."""

    headers: Headers | None
    offset: int
    code: str
    reason: str
    deliveries: int


class ResultTopics:
    """Creates the results topics, and writes the error objects of failed jobs."""

    def __init__(self, topics: TopicRegistry, result_seconds: float) -> None:
        self._topics = topics
        self._result_seconds = result_seconds

    def open(self, tenant: str, now_us: int) -> ResultsOpened:
        """Create the topic of a tenant if it does not exist, and tell the offsets of the next results."""
        topic = self.create(tenant, now_us)
        return ResultsOpened([active.partition.next_offset for active in self._topics.all_active(topic)])

    def exists(self, tenant: str) -> bool:
        """Whether anybody in the tenant ever waited for a result."""
        return self._topics.find(str(TopicName(tenant, RESULTS_TOPIC))) is not None

    def create(self, tenant: str, now_us: int) -> Topic:
        """The topic of a tenant, created if it does not exist."""
        settings: dict[str, Any] = {
            "partitions": _PARTITIONS,
            "validity": "keep",
            "ttl_seconds": None,
            "retain_seconds": self._result_seconds,
            "compact_by_key": True,
            "message_bytes_max": RESULT_BYTES_MAX + _ENVELOPE_BYTES,
        }
        name = str(TopicName(tenant, RESULTS_TOPIC))
        return self._topics.create(TopicCreate(name, settings, exist_ok=True), now_us)

    def failures(
        self, subscription: Subscription, partition: int, failed: Sequence[JobFailure], now_us: int
    ) -> list[tuple[Topic, int, Batch]]:
        """The results of those failed messages whose publishers wait for one, by topic and partition."""
        answered = [(id, failure) for failure in failed if (id := reply_of(failure.headers)) is not None]
        if not answered:
            return []
        topic = self.create(subscription.topic.name.tenant, now_us)
        by_partition: dict[int, list[tuple[JobId, JobFailure]]] = {}
        for id, failure in answered:
            by_partition.setdefault(id.partition % topic.settings.partitions, []).append((id, failure))
        return [
            (topic, number, _error_batch(subscription, partition, some, now_us))
            for number, some in by_partition.items()
        ]


def reply_of(headers: Headers | None) -> JobId | None:
    """The id of a job whose publisher waits for the result; None for others, and for what is no id."""
    if not headers or REPLY_HEADER not in headers:
        return None
    try:
        return parse_job_id(header_text(headers, REPLY_HEADER).decode())
    except (InvalidArgument, UnicodeDecodeError):
        return None  # anybody can publish such a header


def _error_batch(
    subscription: Subscription, partition: int, failed: Sequence[tuple[JobId, JobFailure]], now_us: int
) -> Batch:
    header: Headers = {RESULT_HEADER: ERROR_RESULT.encode()}
    errors = []
    for _, failure in failed:
        details = {
            "topic": subscription.topic.name.topic,
            "partition": partition,
            "offset": failure.offset,
            "subscription": subscription.name,
            "deliveries": failure.deliveries,
        }
        text = _summary(failure.reason)
        errors.append({"code": failure.code, "message": text, "retryable": False, "details": details})
    columns = Columns(
        [msgspec.json.encode(error) for error in errors],
        keys=[id.text.encode() for id, _ in failed],
        headers=[header] * len(failed),
    )
    return encode(columns, now_us)


def _summary(reason: str) -> str:
    """A reason without the traceback that it may begin with: whoever waits is told the error, not the code."""
    if reason.startswith("Traceback "):
        lines = [line for line in reason.splitlines() if line and not line[0].isspace()]
        reason = lines[-1] if lines else ""
    return reason[:_TEXT_CHARS_MAX]
