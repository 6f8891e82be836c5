"""Messages that a webhook has leased, taken out of the deliveries of its standing lease request."""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import msgspec

from headrace.model.batch import Bytes, parse
from headrace.model.leasing import Holding
from headrace.model.message import Message
from headrace.model.standing_lease import LeaseDelivery


class LeasedMessage(NamedTuple):
    """A message under a lease."""

    message: Message
    partition: int
    lease: int
    attempt: int
    """How often it has been handed out by now."""
    bytes: int
    """Its part of the delivery's credit."""


def leased_messages(delivery: LeaseDelivery, body: Bytes) -> Iterator[LeasedMessage]:
    """The messages of a delivery, in the order in which the subscription hands them out."""
    view, position = memoryview(bytes(body)), 0  # a copy: what is in memory or mapped may change meanwhile
    count = sum(len(portion.all_offsets) for portion in delivery.portions)
    share, rest = divmod(delivery.size_bytes, max(count, 1))
    for portion in delivery.portions:
        offsets, seen = portion.all_offsets, 0
        while seen < len(offsets):
            batch = parse(view, position)
            batch.verify()
            position += batch.length
            for stored in batch.messages():
                message = msgspec.structs.replace(stored, offset=offsets[seen])
                attempt = portion.deliveries[seen] if portion.deliveries else 1
                yield LeasedMessage(message, portion.partition, portion.lease, attempt, share + rest)
                rest = 0
                seen += 1


def holdings(messages: Iterable[LeasedMessage]) -> list[Holding]:
    """The messages as requests name them."""
    by_lease: dict[tuple[int, int], list[int]] = {}
    for one in messages:
        by_lease.setdefault((one.partition, one.lease), []).append(one.message.offset)
    return [Holding(partition, lease, offsets) for (partition, lease), offsets in by_lease.items()]
