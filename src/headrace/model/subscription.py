"""Leased subscriptions: every setting one can have."""

from collections.abc import Mapping
from enum import Enum
from typing import Any

import msgspec

from headrace.model.arguments import shortened, shown
from headrace.model.errors import InvalidArgument
from headrace.model.limits import DELIVERIES_MAX, LEASE_SECONDS_MAX
from headrace.model.topic import checked_name, parse_topic
from headrace.model.type_info import build_type_info

DEFAULT_SUBSCRIPTION = "default"
"""The subscription of a topic that is meant when none is named."""
DEAD_SUFFIX = ".dead"
"""What a topic's own dead letter topic has behind the name."""


class Discipline(Enum):
    """In which order a subscription hands out the messages that are ready."""

    FIFO = "fifo"
    """The one published first."""
    LIFO = "lifo"
    """The one published last."""
    PRIORITY = "priority"
    """The one with the greatest priority, 0 where none was given; among equals the one published first."""
    DEADLINE = "deadline"
    """The one that was due first; a message without `due` was due when it was published."""


class RetryGrowth(Enum):
    """How the delay grows from one attempt at a message to the next."""

    FIXED = "fixed"
    """Always retry_seconds."""
    LINEAR = "linear"
    """retry_seconds more each time."""
    EXPONENTIAL = "exponential"
    """Twice as long each time."""


class Expired(Enum):
    """What becomes of messages that were not settled before they expired."""

    DROP = "drop"
    DEAD = "dead"
    """They go to the dead letter topic."""


class Rejected(Enum):
    """What becomes of messages that a holder rejects."""

    DEAD = "dead"
    """They go to the dead letter topic."""
    DROP = "drop"


class Overflow(Enum):
    """What happens when a subscription has as many messages as it may have."""

    REFUSE = "refuse"
    """Publishing to the topic is refused until some are settled."""
    DROP_OLDEST = "drop_oldest"
    """The oldest messages that are ready are dropped."""


class SubscriptionSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Every setting of a leased subscription; all can be changed while it is in use."""

    discipline: Discipline = Discipline.FIFO
    """`fifo`, `lifo`, `priority` or `deadline`."""
    lease_seconds: float = 30.0
    """How long a lease lasts if whoever takes it does not say."""
    deliveries_max: int = 20
    """A message that was handed out so often without success is dead: 1 to 255; 0 for no limit (counts end at 255)."""
    dead_letter_topic: str = ""
    """Where dead messages go; by default the topic's own name with `.dead` behind it. A change leaves earlier ones
    where they are."""
    expired: Expired = Expired.DROP
    """What becomes of expired messages: `drop` or `dead`."""
    rejected: Rejected = Rejected.DEAD
    """What becomes of rejected messages: `dead` (they go to the dead letter topic) or `drop`."""
    retry: RetryGrowth = RetryGrowth.EXPONENTIAL
    """How the delay before the next attempt grows: `fixed`, `linear` or `exponential`."""
    retry_seconds: float = 1.0
    """The delay after the first attempt, when the holder gives a message back without saying until when."""
    retry_seconds_max: float = 3600.0
    """No delay is longer, jitter included."""
    retry_jitter: float = 0.1
    """Each delay is longer or shorter by a random part of itself, up to this, within retry_seconds_max."""
    ordered_by_key: bool = False
    """At most one message of a key is leased at a time, and none overtakes a retry; those without a key are free."""
    paused: bool = False
    """Nothing is handed out; what is leased can be settled."""
    messages_max: int | None = None
    """So many messages that are not settled are enough, over all partitions; see `overflow`. The batch that reaches it
    is taken whole."""
    bytes_max: int | None = None
    """So many bytes of them are enough, counted with the average size of what each partition stores."""
    overflow: Overflow = Overflow.REFUSE
    """What happens then: `refuse` (publishing fails with `subscription_full`) or `drop_oldest` (of those that are
    ready)."""
    single_active_consumer: bool = False
    """Of the standing lease requests only the oldest gets messages, the others stand by; leases by hand get none while
    there is one."""
    delete_unused_seconds: float | None = None
    """The subscription is deleted when nobody has leased, held, settled, or had a standing request for so long."""

    def __post_init__(self) -> None:
        if not 0 < self.lease_seconds <= LEASE_SECONDS_MAX:
            raise InvalidArgument(f"lease_seconds must be more than 0 and at most {LEASE_SECONDS_MAX}")
        if not 0 <= self.deliveries_max <= DELIVERIES_MAX:
            raise InvalidArgument(f"deliveries_max must be 0 to {DELIVERIES_MAX}, not {self.deliveries_max}")
        if not 0 <= self.retry_seconds <= self.retry_seconds_max <= 1e8:
            raise InvalidArgument("retry_seconds and retry_seconds_max must be at least 0, the second not the smaller")
        if not 0 <= self.retry_jitter <= 1:
            raise InvalidArgument(f"retry_jitter must be 0 to 1, not {self.retry_jitter}")
        if self.dead_letter_topic:
            parse_topic(self.dead_letter_topic)
        for name in ("messages_max", "bytes_max"):
            limit = getattr(self, name)
            if limit is not None and not 0 < limit < 1 << 63:
                raise InvalidArgument(f"{name} must be more than 0, or none, not {limit}")
        unused_s = self.delete_unused_seconds
        if unused_s is not None and not 0 < unused_s <= 1e8:
            raise InvalidArgument(f"delete_unused_seconds must be more than 0 and at most 1e8, or none, not {unused_s}")

    def as_dict(self) -> dict[str, Any]:
        """The settings by name, in plain values."""
        content: dict[str, Any] = msgspec.to_builtins(self)
        return content

    def retry_us(self, deliveries: int, luck: float) -> int:
        """How long a message that was handed out so often waits for the next attempt; `luck` is 0 to 1.

        >>> SubscriptionSettings(retry_seconds=2, retry_jitter=0).retry_us(3, 0.5)
        8000000
        """
        nth = min(max(deliveries, 1), 64)
        factor: int = {RetryGrowth.FIXED: 1, RetryGrowth.LINEAR: nth}.get(self.retry, 1 << (nth - 1))
        seconds = min(self.retry_seconds * factor, self.retry_seconds_max)
        seconds *= 1 + self.retry_jitter * (2 * luck - 1)
        return round(min(seconds, self.retry_seconds_max) * 1e6)


build_type_info(SubscriptionSettings)


def subscription_settings(given: dict[str, Any], base: SubscriptionSettings | None = None) -> SubscriptionSettings:
    """Settings from plain values by name, over those of `base`; says which one is wrong."""
    try:
        return msgspec.convert({**(base or SubscriptionSettings()).as_dict(), **given}, SubscriptionSettings)
    except (msgspec.ValidationError, UnicodeError) as error:
        told = shortened(error.__cause__ or error)
        raise InvalidArgument(f"a subscription's settings are wrong: {told}") from error


def plain_settings(given: Mapping[str, Any]) -> dict[str, Any]:
    """Settings as they are sent: enumerations by their values; refuses what no setting can be."""
    plain: dict[str, Any] = {}
    for name, value in given.items():
        plain[name] = value.value if isinstance(value, Enum) else value
        if not isinstance(plain[name], str | int | float | None):
            raise InvalidArgument(f"{shown(name)} of a subscription is a text, a number or a bool, not {shown(value)}")
    return plain


def checked_subscription(name: str) -> str:
    """The name, if it may be a subscription's."""
    return checked_name(name, "subscription")
