"""Results of jobs: the ids of jobs that are to be answered, and the requests that open and store their results."""

import re
from typing import NamedTuple

from headrace.model.arguments import shown
from headrace.model.errors import InvalidArgument
from headrace.model.kinds import Kind
from headrace.model.leasing import Holding, Settlement
from headrace.model.request import Answer, Permission, Request, Resource, Verb, declare
from headrace.model.subscription import DEFAULT_SUBSCRIPTION

RESULTS_TOPIC = "headrace.results"
"""The topic of a tenant's results: the key is the job's id."""
REPLY_HEADER = "headrace-reply"
"""The header of a job whose publisher waits for the result: the job's id."""
RESULT_HEADER = "headrace-result"
"""The header of a result: what its value is, one of RESULT_KINDS."""

BYTES_RESULT, TEXT_RESULT, JSON_RESULT, ERROR_RESULT = "bytes", "text", "json", "error"
RESULT_KINDS = (BYTES_RESULT, TEXT_RESULT, JSON_RESULT, ERROR_RESULT)
"""Bytes as they are, UTF-8 text, JSON, or the common error object in JSON."""

MESSAGE_EXPIRED, JOB_REJECTED, DELIVERIES_EXHAUSTED = "message_expired", "job_rejected", "deliveries_exhausted"
"""Codes of the error objects of jobs that failed for good; also `lease_expired`, if the last holder vanished."""

JOB_ID_PATTERN = r"^([0-9]{1,6})-([0-9]{1,18})-[A-Za-z0-9_-]{16,64}$"
"""How the id of a job looks: partition, offset, and what makes it unique."""
_ID = re.compile(JOB_ID_PATTERN.strip("^$"))


class JobId(NamedTuple):
    """The id of a job whose result can be awaited. It says from where on the result is to be looked for."""

    text: str
    partition: int
    """The partition of the results topic."""
    offset: int
    """The result is not before this offset."""


def job_id(partition: int, offset: int, unique: str) -> JobId:
    """The id of a new job.

    >>> job_id(3, 1042, "l6bdQ2pV0hXo_f5A")
    JobId(text='3-1042-l6bdQ2pV0hXo_f5A', partition=3, offset=1042)
    """
    return JobId(f"{partition}-{offset}-{unique}", partition, offset)


def parse_job_id(text: str) -> JobId:
    """The job's id that a text is; raises InvalidArgument for anything else."""
    given: object = text
    found = _ID.fullmatch(given) if isinstance(given, str) else None
    if found is None:
        raise InvalidArgument(
            f"{shown(text)} is no job's id: take that of the handle which publish(reply=True) returned"
        )
    return JobId(text, int(found[1]), int(found[2]))


class ResultsOpened(Answer):
    """The answer to ResultsOpen."""

    ends: list[int]
    """The offset of the next result in each partition."""


@declare(Kind.RESULTS_OPEN, Permission(Verb.CONSUME, Resource.TOPIC))
class ResultsOpen(Request[ResultsOpened]):
    """Create the results topic of the session's tenant if it does not exist, and tell where it ends."""


@declare(Kind.JOB_FINISH, Permission(Verb.LEASE, Resource.SUBSCRIPTION, "topic", "subscription"))
class JobFinish(Request[Settlement]):
    """This job is done: acknowledge it, and store its result, which is the body; both or neither.

    The body is a batch of one message, whose key is the job's id. Accepted when Ack would be.
    """

    topic: str
    holding: Holding
    """One message."""
    subscription: str = DEFAULT_SUBSCRIPTION
