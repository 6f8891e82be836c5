"""The requests about leased subscriptions, and their answers. See requests.py."""

from collections.abc import Sequence
from typing import Any

import msgspec

from headrace.model.arguments import shown
from headrace.model.errors import InvalidArgument
from headrace.model.headers import Headers
from headrace.model.kinds import Kind
from headrace.model.limits import REASON_CHARS_MAX
from headrace.model.offsets import spread
from headrace.model.request import Answer, Permission, Request, Resource, Verb, WireStruct, declare
from headrace.model.requests import Done
from headrace.model.subscription import DEFAULT_SUBSCRIPTION

OWNER_HEADER = "headrace-owner"
"""The header that names the producer group a message belongs to: only in its name can the message be edited."""
SUBSCRIPTION_HEADER = "headrace-subscription"
"""The header of a message that is only for the leased subscription it names: one that was redriven."""

_CUT = "\n[...]\n"


def cut_reason(reason: Any) -> str:
    """The reason, without its middle if it is too long.

    >>> len(cut_reason("a" * 10_000))
    8000
    """
    if not isinstance(reason, str):
        raise InvalidArgument(f"a reason is a text, not {shown(reason)}")
    text: str = reason.encode("utf-8", "backslashreplace").decode()  # file names may have what is no character
    if len(text) <= REASON_CHARS_MAX:
        return text
    kept = REASON_CHARS_MAX - len(_CUT)
    # The end of a traceback names the error, its beginning only the first calls.
    return text[: kept // 4] + _CUT + text[-(kept - kept // 4) :]


class Timing(WireStruct):
    """How late messages with a `due` were handed over: how many by at most how many microseconds."""

    bounds_us: list[int] = []
    counts: list[int] = []
    """One more than bounds: the last counts what was later than all of them."""
    early: int = 0
    """Handed over before they were due: must be 0."""


class SubscriptionInfo(Answer):
    """A leased subscription as it is now; the answer to all but the list and the deletion."""

    tenant_fields = ("topic", "settings.dead_letter_topic")

    topic: str
    subscription: str
    created_us: int
    settings: dict[str, Any]
    waiting: int = 0
    """Not ready yet: `due` in the future, or given back until later."""
    ready: int = 0
    leased: int = 0
    dead: int = 0
    """In the dead letter topic, and not redriven."""
    ready_since_us: int = 0
    """The publishing time of the oldest message that is ready, 0 if there is none."""
    next_ready_us: int = 0
    """When the next one will be ready, 0 if none is waiting."""
    delivered: int = 0
    acked: int = 0
    released: int = 0
    expired_leases: int = 0
    """These four count since the broker was started."""
    timing: Timing = msgspec.field(default_factory=Timing)
    """Also since the broker was started."""
    dropped: int = 0
    """Messages that were dropped because there were too many, since the broker was started."""
    error: str = ""
    """Why it could not be opened; empty when it is at work."""


# Subscriptions.


@declare(
    Kind.SUBSCRIPTION_CREATE,
    Permission(Verb.CREATE, Resource.SUBSCRIPTION, "topic", "subscription"),
    Permission(Verb.PUBLISH, Resource.TOPIC, "settings.dead_letter_topic"),
)
class SubscriptionCreate(Request[SubscriptionInfo]):
    """Make a leased subscription of a topic."""

    tenant_fields = ("settings.dead_letter_topic",)

    topic: str
    subscription: str = DEFAULT_SUBSCRIPTION
    settings: dict[str, Any] = {}
    """Plain values by the names of SubscriptionSettings."""
    start: str = "earliest"
    """Which messages it has: all there are (`earliest`), those to come (`latest`), from an `offset` or a `time` on."""
    start_offset: int = 0
    start_us: int = 0
    exist_ok: bool = False
    """Fine if it exists, whatever its settings are."""
    create_topic: bool = True
    """Make the topic as well if there is none and the broker may make topics by itself."""


@declare(
    Kind.SUBSCRIPTION_ALTER,
    Permission(Verb.ALTER, Resource.SUBSCRIPTION, "topic", "subscription"),
    Permission(Verb.PUBLISH, Resource.TOPIC, "settings.dead_letter_topic"),
)
class SubscriptionAlter(Request[SubscriptionInfo]):
    """Change settings of a subscription while it is in use."""

    tenant_fields = ("settings.dead_letter_topic",)

    topic: str
    settings: dict[str, Any]
    subscription: str = DEFAULT_SUBSCRIPTION


@declare(Kind.SUBSCRIPTION_RESET, Permission(Verb.ALTER, Resource.SUBSCRIPTION, "topic", "subscription"))
class SubscriptionReset(Request[SubscriptionInfo]):
    """Open a subscription anew: what is settled stays so, all else is found anew in the log, and leases are over."""

    topic: str
    subscription: str = DEFAULT_SUBSCRIPTION
    start: str = ""
    """Forget also what is settled, and begin as a new one: `earliest`, `latest`, from an `offset` or a `time` on."""
    start_offset: int = 0
    start_us: int = 0


@declare(Kind.SUBSCRIPTION_DELETE, Permission(Verb.DELETE, Resource.SUBSCRIPTION, "topic", "subscription"))
class SubscriptionDelete(Request[Done]):
    """Forget a subscription; the topic keeps its messages."""

    topic: str
    subscription: str = DEFAULT_SUBSCRIPTION


@declare(Kind.SUBSCRIPTION_DESCRIBE, Permission(Verb.DESCRIBE, Resource.SUBSCRIPTION, "topic", "subscription"))
class SubscriptionDescribe(Request[SubscriptionInfo]):
    """What is there to know about a subscription?"""

    topic: str
    subscription: str = DEFAULT_SUBSCRIPTION


class Subscriptions(Answer):
    """The answer to SubscriptionList."""

    subscriptions: list[SubscriptionInfo]


@declare(Kind.SUBSCRIPTION_LIST, Permission(Verb.DESCRIBE, Resource.SUBSCRIPTION))
class SubscriptionList(Request[Subscriptions]):
    """Which leased subscriptions are there?"""

    tenant_fields = ("topic",)

    topic: str = ""
    """Of this topic; empty: of all topics of the session's tenant."""


class LeasedPortion(WireStruct):
    """Messages of one partition under one lease; the answer's body has batches with their contents."""

    partition: int
    lease: int
    """The token: to be given with whatever is said about these messages."""
    until_us: int
    """When the lease ends, by the broker's clock."""
    offsets: list[int]
    """In the order in which the subscription hands them out; the batches' messages are in the same order."""
    deliveries: list[int] = []
    """How often each has been handed out by now; empty: for the first time, all of them."""
    versions: list[int] = []
    """The version of each, which rises when a message is edited; empty: 1, all of them."""
    states: dict[int, bytes] = {}
    """What the last holder left for the next, by offset."""
    following: int = 0
    """So many more follow the last of the offsets, without a gap."""

    @property
    def all_offsets(self) -> Sequence[int]:
        """The offsets, and those that follow."""
        return spread(self.offsets, self.following)


class Leased(Answer):
    """The answer to Lease. The body has the portions' batches, in the same order; none when there is nothing."""

    portions: list[LeasedPortion]


# Leases.


@declare(Kind.LEASE, Permission(Verb.LEASE, Resource.SUBSCRIPTION, "topic", "subscription"), while_draining=False)
class Lease(Request[Leased]):
    """Hand out messages, to be settled before the lease ends; else they are handed out again."""

    topic: str
    subscription: str = DEFAULT_SUBSCRIPTION
    messages_max: int = 1
    bytes_max: int = 1 << 20
    """Of values, keys and headers; one message is handed out in any case."""
    lease_ms: int = 0
    """How long the lease lasts; 0: as the subscription's settings say."""
    wait_ms: int = 0
    """How long to wait for a message when there is none. The answer may then have none."""
    ahead_ms: int = 0
    """Also hand out what is due within so long: the holder keeps it back until then, when its lease begins."""
    create: bool = True
    """Make the subscription, with its defaults and with all messages, if the topic has none of that name."""
    create_topic: bool = False
    """Make the topic as well if there is none and the broker may make topics by itself."""


@declare(Kind.LEASE_STOP, Permission(Verb.LEASE, Resource.SUBSCRIPTION, "topic", "subscription"))
class LeaseStop(Request[Done]):
    """Answer the leases of this connection that wait for messages of a subscription, with none. Said before giving back
    what was not begun, which would otherwise come again.
    """

    topic: str
    subscription: str = DEFAULT_SUBSCRIPTION


class Holding(WireStruct):
    """Messages of a partition that were leased under one token."""

    partition: int
    lease: int
    offsets: list[int]
    following: int = 0
    """So many more follow the last of the offsets, without a gap."""

    @property
    def all_offsets(self) -> Sequence[int]:
        """The offsets, and those that follow."""
        return spread(self.offsets, self.following)


class Refusal(WireStruct):
    """A message about which what was asked was not done."""

    partition: int
    offset: int
    code: str
    """`lease_expired`, `not_lease_holder` or `message_gone`."""


class Settlement(Answer):
    """The answer to Ack, Extend, Release and Reject: done for all messages but these."""

    refused: list[Refusal] = []
    until_us: int = 0
    """When the lease ends now, after Extend."""


@declare(Kind.ACK, Permission(Verb.LEASE, Resource.SUBSCRIPTION, "topic", "subscription"))
class Ack(Request[Settlement]):
    """These are done. Accepted also after the lease ended, if nobody else has taken the message since."""

    topic: str
    holdings: list[Holding]
    subscription: str = DEFAULT_SUBSCRIPTION
    late_us: list[int] = []
    """How late messages with a `due` were handed over, in microseconds, for the statistics."""


@declare(Kind.EXTEND, Permission(Verb.LEASE, Resource.SUBSCRIPTION, "topic", "subscription"))
class Extend(Request[Settlement]):
    """Keep these for longer: from now on for so long."""

    topic: str
    holdings: list[Holding]
    lease_ms: int = 0
    """0: as the subscription's settings say."""
    subscription: str = DEFAULT_SUBSCRIPTION


@declare(Kind.RELEASE, Permission(Verb.LEASE, Resource.SUBSCRIPTION, "topic", "subscription"))
class Release(Request[Settlement]):
    """Give these back. Without delay_ms and until_us the subscription's retry policy says until when they rest."""

    topic: str
    holdings: list[Holding]
    delay_ms: int | None = None
    """For so long; 0: they can be handed out again at once."""
    until_us: int | None = None
    """Until this time."""
    reason: str = ""
    """Kept for the dead letter, should it come to that."""
    states: dict[int, bytes] = {}
    """What the next holder should know, by offset (of the first holding)."""
    undelivered: bool = False
    """They were never looked at: the delivery does not count."""
    subscription: str = DEFAULT_SUBSCRIPTION


@declare(Kind.REJECT, Permission(Verb.LEASE, Resource.SUBSCRIPTION, "topic", "subscription"))
class Reject(Request[Settlement]):
    """These cannot be processed: they go to the dead letter topic."""

    topic: str
    holdings: list[Holding]
    reason: str = ""
    subscription: str = DEFAULT_SUBSCRIPTION


# Finding and editing messages.


class MessageId(WireStruct):
    """A message, and the version in which it was seen; None: whichever it has."""

    partition: int
    offset: int
    version: int | None = None


class Selection(WireStruct):
    """Some of the messages that a subscription has not settled: those to which all of this applies."""

    status: str = ""
    """`waiting`, `ready`, `leased`, `dead`; empty: all but dead."""
    due_from_us: int | None = None
    due_to_us: int | None = None
    """Ready from the first to before the second: without `due` since it was published, a dead one since it died."""
    key: bytes | None = None
    owner: str = ""
    headers: Headers = {}
    """Pairs that the message has, among others."""
    messages: list[MessageId] = []
    """Only these; of dead ones, their places in the dead letter topic."""


class FoundMessage(WireStruct):
    """A message as a subscription has it now."""

    partition: int
    offset: int
    status: str
    ready_us: int = 0
    """When it will be ready, or since when it is."""
    deliveries: int = 0
    version: int = 1
    holder: str = ""
    """Who has it leased, and until when."""
    until_us: int = 0
    reason: str = ""
    """Why it is dead, or was given back."""


class Found(Answer):
    """The answer to Find, with a batch of the messages' contents in the body, in the same order."""

    messages: list[FoundMessage]
    after: str = ""
    """For the next page; empty when this is the last."""
    topic_id: int = 0
    """Of the topic that has the messages."""


@declare(Kind.FIND, Permission(Verb.LEASE, Resource.SUBSCRIPTION, "topic", "subscription"))
class Find(Request[Found]):
    """Which messages are there? In the order of partition and offset; waiting ones in the order of time, partition and
    offset. A topic without a leased subscription answers what a new one would have.
    """

    topic: str
    selection: Selection = msgspec.field(default_factory=Selection)
    subscription: str = DEFAULT_SUBSCRIPTION
    messages_max: int = 100
    after: str = ""
    """Where the page before ended."""
    topic_id: int = 0
    """Only in the topic with this id, not in one of the same name that was made since; 0: whichever it is."""


class Forecasted(Answer):
    """The answer to Forecast: messages in each bucket of time, and before and after all of them."""

    counts: list[int]
    before: int = 0
    """Waiting or ready, and due before the first bucket."""
    after: int = 0


@declare(Kind.FORECAST, Permission(Verb.LEASE, Resource.SUBSCRIPTION, "topic", "subscription"))
class Forecast(Request[Forecasted]):
    """How many messages come due when?"""

    topic: str
    from_us: int
    bucket_us: int
    buckets: int = 24
    subscription: str = DEFAULT_SUBSCRIPTION


class MessageChange(WireStruct):
    """What becomes of messages. A new value comes in the body: a batch of one message with that value and headers."""

    due_us: int | None = None
    shift_us: int = 0
    """Move it by so much, instead of to a time: from when it will be ready, or else from when it was published."""
    priority: int | None = None
    replace: bool = False
    """Replace value and headers by those in the body."""
    delete: bool = False


class EditOutcome(WireStruct):
    """What became of an edit of a message."""

    partition: int
    offset: int
    outcome: str
    """`applied`, `stale_version`, `message_leased`, `message_gone` or `not_owner`; or the code of the error that ended
    the request after other messages were changed. Deleting again what was deleted from this version is `applied`.
    """
    version: int = 0
    """The one it has now."""
    holder: str = ""
    """Who has it leased."""


class Edited(Answer):
    """The answer to Edit and EditMatching."""

    outcomes: list[EditOutcome]
    after: str = ""
    """Where to go on; empty when all that match have been looked at."""


@declare(Kind.EDIT, Permission(Verb.EDIT_OWN, Resource.TOPIC, "topic"))
class Edit(Request[Edited]):
    """Change messages that no leased subscription of the topic has in hand, and that not all of them are done with."""

    topic: str
    messages: list[MessageId]
    change: MessageChange
    owner: str = ""
    """In whose name: a message with an owner is changed in no other."""
    topic_id: int = 0
    """Only in the topic with this id: in another one of its name the messages are gone; 0: whichever it is."""


@declare(Kind.EDIT_MATCHING, Permission(Verb.EDIT_OWN, Resource.TOPIC, "topic"))
class EditMatching(Request[Edited]):
    """The same for all messages that are selected, up to a number of them, in the order of partition and offset: each
    is changed once, wherever it is moved.
    """

    topic: str
    selection: Selection
    change: MessageChange
    subscription: str = DEFAULT_SUBSCRIPTION
    owner: str = ""
    """In whose name; given one, only messages of this owner are selected."""
    messages_max: int = 1000
    after: str = ""
    """Where the last such request ended."""


class Redriven(Answer):
    """The answer to Redrive."""

    messages: int
    after: str = ""
    """Where to go on; empty when all that match have been looked at."""

    @property
    def more(self) -> bool:
        """Whether there may be more that match."""
        return bool(self.after)


@declare(Kind.REDRIVE, Permission(Verb.ALTER, Resource.SUBSCRIPTION, "topic", "subscription"))
class Redrive(Request[Redriven]):
    """Put dead messages back where they died, to be handed out anew."""

    topic: str
    subscription: str = DEFAULT_SUBSCRIPTION
    selection: Selection = msgspec.field(default_factory=Selection)
    messages_max: int = 1000
    after: str = ""
    """Where the last such request ended."""
