"""Messages that were leased, and what is said about them."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import repeat
from typing import Any

from headrace.client.connection.request_router import Bytes
from headrace.client.results import Received
from headrace.model.batch import Batch, parse
from headrace.model.errors import (
    HeadraceError,
    InvalidArgument,
    LeaseExpired,
    MessageGone,
    NotLeaseHolder,
    ProtocolError,
)
from headrace.model.leasing import Found, Holding, Leased, LeasedPortion, Refusal
from headrace.model.limits import LEASE_MESSAGES_MAX
from headrace.model.offsets import gathered
from headrace.model.standing_lease import LeaseDelivery

_NAMED_MAX = 10
"""How many messages an error names."""
_MANY = 16
"""Fewer leased messages are looked through as quickly as a list that knows of them is made."""


class Job(Received, frozen=True, gc=False):
    """A message that was leased: to be acknowledged, given back or rejected before its lease ends."""

    subscription: str = ""
    lease: int = 0
    """The token under which it is held."""
    until: int = 0
    """When the lease ends, by the broker's clock, unless it is extended."""
    deliveries: int = 1
    """How often it has been handed out, this time included."""
    version: int = 1
    """Rises when the message is edited."""
    state: bytes | None = None
    """What its last holder left for the next."""


class LeasedJobs(list[Job]):
    """Messages that were leased together: a list, which knows what to say to settle all of them.

    To find that out takes as long as a third of making the messages. Whoever changes the list makes it an ordinary one.
    """

    __slots__ = ("_holdings", "_leased")

    def __init__(self, jobs: Iterable[Job], portions: Sequence[LeasedPortion]) -> None:
        super().__init__(jobs)
        self._leased = tuple(self)
        self._holdings = [Holding(each.partition, each.lease, each.offsets, each.following) for each in portions]

    @property
    def holdings(self) -> list[Holding] | None:
        """What they are held under; None if these are not all that were leased, or not only those."""
        return self._holdings if tuple(self) == self._leased else None  # nearly always the same objects: no comparing


class PendingMessage(Received, frozen=True, gc=False):
    """A message that a leased subscription has not settled, as it was found."""

    status: str = ""
    """`waiting`, `ready`, `leased` or `dead`."""
    ready_us: int = 0
    """When it will be ready, or since when it is."""
    deliveries: int = 0
    version: int = 1
    holder: str = ""
    """Who has it leased."""
    until_us: int = 0
    """And until when."""
    reason: str = ""
    """Why it is dead, or was given back."""
    topic_id: int = 0
    """Of the topic that has it, which of a dead one is the dead letter topic."""


def leased_jobs(topic: str, subscription: str, answer: Leased | LeaseDelivery, body: Bytes) -> list[Job]:
    """The messages of an answer to Lease, or of a delivery."""
    jobs: list[Job] = []
    rest = memoryview(body)
    for portion in answer.portions:
        offsets, seen = portion.all_offsets, 0
        while seen < len(offsets):
            batch, rest = _first_batch(rest)
            if not 0 < batch.count <= len(offsets) - seen:
                raise _miscounted(len(offsets), seen + batch.count)
            part = slice(seen, seen + batch.count)
            jobs += _batch_jobs(topic, subscription, portion, offsets[part], part, batch)
            seen += batch.count
    return LeasedJobs(jobs, answer.portions) if len(jobs) >= _MANY else jobs


def _batch_jobs(
    topic: str, subscription: str, portion: LeasedPortion, offsets: Sequence[int], part: slice, batch: Batch
) -> Iterator[Job]:
    columns, states = batch.columns(), portion.states
    fields: list[Iterable[Any]] = [
        offsets,
        columns.values,
        columns.timestamps or repeat(batch.time_max),
        columns.keys or repeat(None),
        columns.headers or repeat(None),
        columns.dues or repeat(None),
        columns.priorities or repeat(None),
        columns.expires or repeat(None),
        repeat(topic),
        repeat(portion.partition),
        repeat(subscription),
        repeat(portion.lease),
        repeat(portion.until_us),
    ]
    if portion.deliveries or portion.versions or states:
        fields += portion.deliveries[part] or repeat(1), portion.versions[part] or repeat(1), map(states.get, offsets)
    return map(Job, *fields)


def found_messages(topic: str, answer: Found, body: Bytes) -> list[PendingMessage]:
    """The messages of an answer to Find."""
    if not answer.messages:
        return []
    batch, _ = _first_batch(memoryview(body))
    if batch.count != len(answer.messages):
        raise _miscounted(len(answer.messages), batch.count)
    columns = batch.columns()
    messages = answer.messages
    return list(
        map(
            PendingMessage,
            [found.offset for found in messages],
            columns.values,
            columns.timestamps or repeat(batch.time_max),
            columns.keys or repeat(None),
            columns.headers or repeat(None),
            columns.dues or repeat(None),
            columns.priorities or repeat(None),
            columns.expires or repeat(None),
            repeat(topic),
            [found.partition for found in messages],
            [found.status for found in messages],
            [found.ready_us for found in messages],
            [found.deliveries for found in messages],
            [found.version for found in messages],
            [found.holder for found in messages],
            [found.until_us for found in messages],
            [found.reason for found in messages],
            repeat(answer.topic_id),
        )
    )


def _first_batch(view: memoryview) -> tuple[Batch, memoryview]:
    """The batch that begins here, and what is behind it."""
    batch = parse(view)
    batch.verify()
    return batch, view[batch.length :]


def _miscounted(named: int, sent: int) -> HeadraceError:
    return ProtocolError(f"the broker named {named} messages and sent {sent}")


def holdings_of(jobs: Sequence[Job]) -> list[Holding]:
    """The messages by partition and token, as settling them wants it."""
    known = jobs.holdings if type(jobs) is LeasedJobs else None
    if known is not None:
        return known
    try:
        return _holdings_by_token(jobs)
    except (AttributeError, TypeError) as error:
        raise InvalidArgument("only leased messages can be settled: a Job, or a list of them") from error


def _holdings_by_token(jobs: Sequence[Job]) -> list[Holding]:
    if len({job.lease for job in jobs}) == 1 and len({job.partition for job in jobs}) == 1:  # nearly always
        return [holding_of(jobs[0].partition, jobs[0].lease, [job.offset for job in jobs])]
    found: dict[tuple[int, int], list[int]] = {}
    partition = lease = -1
    offsets: list[int] = []
    for job in jobs:
        if job.lease != lease or job.partition != partition:
            partition, lease = job.partition, job.lease
            offsets = found.setdefault((partition, lease), [])
        offsets.append(job.offset)
    return [holding_of(partition, lease, offsets) for (partition, lease), offsets in found.items()]


def holding_of(partition: int, lease: int, offsets: Sequence[int]) -> Holding:
    """Messages of a partition that were leased under one token."""
    return Holding(partition, lease, *gathered(offsets))


def in_requests(holdings: Sequence[Holding], messages_max: int = LEASE_MESSAGES_MAX) -> list[list[Holding]]:
    """The holdings, divided so that no request is about more messages than it may be."""
    requests: list[list[Holding]] = [[]]
    room = messages_max
    for holding in holdings:
        offsets = holding.all_offsets
        for start in range(0, len(offsets), messages_max):
            part = offsets[start : start + messages_max]
            if len(part) > room:
                requests.append([])
                room = messages_max
            requests[-1].append(holding_of(holding.partition, holding.lease, part))
            room -= len(part)
    return requests if requests[0] else []


_REFUSALS: dict[str, tuple[type[HeadraceError], str]] = {
    "lease_expired": (LeaseExpired, "its lease is over"),
    "not_lease_holder": (NotLeaseHolder, "it is not leased under this token, or not any more"),
    "message_gone": (MessageGone, "it has been settled, or removed"),
}


def refusal_error(job: Job, code: str) -> HeadraceError:
    """The error that tells why something was not done about a message."""
    kind, why = _REFUSALS.get(code, (HeadraceError, code))
    text = f"message {job.offset} of {job.topic}[{job.partition}]: {why}"
    return kind(text, topic=job.topic, partition=job.partition, offset=job.offset)


def refusals_error(topic: str, refused: Sequence[Refusal]) -> HeadraceError:
    """The error that names the messages that were not acknowledged, and tells why; at least one."""
    first = next((each for each in refused if each.code != "message_gone"), refused[0])
    kind, why = _REFUSALS.get(first.code, (HeadraceError, first.code))
    if kind is not MessageGone:
        why += "; it may be processed again, and a longer lease leaves more time to extend it"
    named = ", ".join(f"{each.offset} of {topic}[{each.partition}]" for each in refused[:_NAMED_MAX])
    others = f" and {len(refused) - _NAMED_MAX} more" if len(refused) > _NAMED_MAX else ""
    text = f"not acknowledged: message {named}{others}: {why}"
    return kind(text, topic=topic, partition=first.partition, offset=first.offset)


def refused_codes(refused: Sequence[Refusal]) -> dict[tuple[int, int], str]:
    """Why something was not done, by partition and offset."""
    return {(refusal.partition, refusal.offset): refusal.code for refusal in refused}
