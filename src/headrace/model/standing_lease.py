"""Standing lease requests: the broker leases messages as they become ready, as far as the consumer's credit reaches."""

from typing import Any

import msgspec

from headrace.model.kinds import Kind
from headrace.model.leasing import LeasedPortion
from headrace.model.request import Answer, Permission, Request, Resource, Verb, declare
from headrace.model.requests import Done
from headrace.model.subscription import DEFAULT_SUBSCRIPTION


class LeaseOpened(Answer):
    """The answer to LeaseOpen. Deliveries follow it."""

    standing: int
    """The number of the standing request."""


@declare(Kind.LEASE_OPEN, Permission(Verb.LEASE, Resource.SUBSCRIPTION, "topic", "subscription"), while_draining=False)
class LeaseOpen(Request[LeaseOpened]):
    """Lease messages to this connection as they become ready, until the request is closed or the credit is used up."""

    topic: str
    subscription: str = DEFAULT_SUBSCRIPTION
    credit_messages: int = 1
    """So many messages may be delivered before more credit is given."""
    credit_bytes: int = 1 << 20
    """So many bytes of values, keys and headers; the last message delivered may exceed it."""
    lease_ms: int = 0
    """How long each lease lasts; 0: as the subscription's settings say. Without meaning if session_bound."""
    ahead_ms: int = 0
    """Also deliver what is due within so long: the holder keeps it back until then, when its lease begins."""
    session_bound: bool = False
    """Leases last as long as the connection, and end at once with it: they need not be extended."""
    create: bool = True
    """Make the subscription, with its defaults and with all messages, if the topic has none of that name."""
    create_topic: bool = False
    """Make the topic as well if there is none and the broker may make topics by itself."""


@declare(Kind.LEASE_CREDIT, answered=False)
class LeaseCredit(Request[Done]):
    """So many messages and bytes more may be delivered. Without effect if the standing request has ended."""

    standing: int
    messages: int = 0
    bytes: int = 0
    ahead_ms: int | None = None
    """From now on deliver also what is due within so long; None: as before."""


@declare(Kind.LEASE_CLOSE)
class LeaseClose(Request[Done]):
    """Deliver no more. What was leased before is delivered before the answer; after the answer nothing is."""

    standing: int
    keep_leases: bool = False
    """Leave session-bound messages that were delivered with the connection; else they are given back, and their
    delivery does not count."""


class LeaseDelivery(Answer):
    """Pushed: messages leased to a standing request. The body has the portions' batches, in the same order."""

    standing: int
    portions: list[LeasedPortion]
    size_bytes: int = 0
    """So many bytes of credit it costs."""


class LeaseEnd(Answer):
    """Pushed: the broker has ended a standing request, and this is why."""

    standing: int
    code: str
    text: str
    retryable: bool = False
    details: dict[str, Any] = msgspec.field(default_factory=dict)
