"""Times at which messages are due, names of scheduled messages, and why one was not changed."""

from datetime import timedelta

from headrace.client.selecting import span_us
from headrace.client.times import Moment, microseconds
from headrace.model.errors import HeadraceError, InvalidArgument, MessageGone, MessageLeased, NotOwner, StaleVersion
from headrace.model.leasing import Outcome


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


def parse_id(text: str) -> tuple[str, int, int]:
    """Topic, partition and offset of a scheduled message.

    >>> parse_id("reminders/0/17")
    ('reminders', 0, 17)
    """
    topic, *numbers = str(text).rsplit("/", 2)
    if topic and len(numbers) == 2 and all(number.isascii() and number.isdigit() for number in numbers):
        return topic, int(numbers[0]), int(numbers[1])
    raise InvalidArgument(f"{text!r} is no message; write topic/partition/offset, such as reminders/0/17")


def edit_error(name: str, outcome: Outcome) -> HeadraceError:
    """Why a message was not changed."""
    if outcome.outcome == StaleVersion.code:
        return StaleVersion(f"{name} was changed since: it has version {outcome.version}", version=outcome.version)
    if outcome.outcome == MessageLeased.code:
        by = f" by {outcome.holder}" if outcome.holder else ""
        return MessageLeased(f"{name} is leased{by}; nothing was changed", holder=outcome.holder)
    if outcome.outcome == NotOwner.code:
        return NotOwner(f"{name} belongs to another producer group; nothing was changed")
    if outcome.outcome == MessageGone.code:
        return MessageGone(f"{name} is settled, deleted or unknown")
    return HeadraceError(f"{name}: {outcome.outcome}")
