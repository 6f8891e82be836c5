"""Times at which messages are due, names of scheduled messages, and why one was not changed."""

from datetime import timedelta
from typing import NamedTuple

from headrace.client.leasing.message_selection import span_us
from headrace.client.times import Moment, microseconds
from headrace.model.arguments import shown
from headrace.model.errors import (
    HeadraceError,
    InvalidArgument,
    MessageGone,
    MessageLeased,
    MessageTooLarge,
    NotOwner,
    StaleVersion,
)
from headrace.model.leasing import EditOutcome


def moment_of(at: Moment | None, in_: float | timedelta | None, now_us: int) -> int:
    """A time that is given as such, or by how far away it is; in microseconds since 1970.

    >>> moment_of(None, 1.5, 1_000_000)
    2500000
    """
    if (at is None) == (in_ is None):
        raise InvalidArgument("say when: at a time, or in so many seconds; one of the two")
    if at is not None:
        return microseconds(at)
    assert in_ is not None
    return now_us + span_us(in_)


class MessageName(NamedTuple):
    """What names a message for good: a topic that is made again under the same name has another id.

    >>> str(MessageName("reminders", 0, 17, 3))
    'reminders/0/17@3'
    """

    topic: str
    partition: int
    offset: int
    topic_id: int = 0
    """0: whichever topic has that name."""

    def __str__(self) -> str:
        known = f"@{self.topic_id}" if self.topic_id else ""
        return f"{self.topic}/{self.partition}/{self.offset}{known}"


def parse_id(text: str) -> MessageName:
    """The message that a text names.

    >>> parse_id("reminders/0/17@3")
    MessageName(topic='reminders', partition=0, offset=17, topic_id=3)
    >>> parse_id("reminders/0/17").topic_id
    0
    """
    topic, *numbers = str(text).rsplit("/", 2)
    offset, at, topic_id = numbers[-1].partition("@") if numbers else ("", "", "")
    numbers = [*numbers[:-1], offset, topic_id if at else "0"]
    if topic and len(numbers) == 3 and all(number.isascii() and number.isdigit() for number in numbers):
        return MessageName(topic, *map(int, numbers))
    raise InvalidArgument(f"{shown(text)} is no message; write topic/partition/offset, such as reminders/0/17")


def edit_error(name: str, outcome: EditOutcome) -> HeadraceError:
    """Why a message was not changed."""
    if outcome.outcome == StaleVersion.code:
        return StaleVersion(f"{name} was changed since: it has version {outcome.version}", version=outcome.version)
    if outcome.outcome == MessageLeased.code:
        by = f" by {outcome.holder}" if outcome.holder else ""
        return MessageLeased(f"{name} is leased{by}; nothing was changed", holder=outcome.holder)
    if outcome.outcome == NotOwner.code:
        return NotOwner(f"{name} belongs to another owner; nothing was changed")
    if outcome.outcome == MessageGone.code:
        return MessageGone(f"{name} is settled, deleted or unknown")
    if outcome.outcome == MessageTooLarge.code:
        return MessageTooLarge(
            f"the new value of {name} is too large for its topic, with the headers that it keeps; the topic's setting "
            "message_bytes_max is the limit"
        )
    return HeadraceError(f"{name}: {outcome.outcome}")
