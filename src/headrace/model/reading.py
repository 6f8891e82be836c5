"""Reading: fetches, and streams that deliver batches as far as the reader's credit reaches."""

from headrace.model.kinds import Kind
from headrace.model.request import Answer, Permission, Request, Resource, Verb, declare
from headrace.model.requests import Done


class Fetched(Answer):
    """The answer to Fetch, with batches of one partition in the body. The first may begin before the offset."""

    next_offset: int
    """Where to go on."""
    end_offset: int
    """Behind the last message that could be read."""


@declare(Kind.FETCH, Permission(Verb.CONSUME, Resource.TOPIC, "topic"), awaits_commit=False)
class Fetch(Request[Fetched]):
    """Read batches from an offset on; they are in the body of the answer."""

    topic: str
    partition: int
    offset: int
    bytes_max: int = 1 << 20
    wait_ms: int = 0
    """How long to wait for something to come when there is nothing."""
    verify: bool = False
    """Have the broker check the batch with the offset whole, and fail with `corrupt_batch` if it is damaged."""


class StreamOpened(Answer):
    """The answer to StreamOpen."""

    first_offset: int
    end_offset: int
    topic_id: int


@declare(Kind.STREAM_OPEN, Permission(Verb.CONSUME, Resource.TOPIC, "topic"), awaits_commit=False)
class StreamOpen(Request[StreamOpened]):
    """Deliver batches from an offset on, as they come: first the answer, then deliveries as far as the credit reaches.

    In the native protocol the correlation of the request is the number of the stream, and of its deliveries.
    """

    topic: str
    partition: int
    offset: int
    credit_bytes: int
    stream: int = 0
    """The number of the stream among those of the session; a gateway that numbers its requests sets it."""


@declare(Kind.STREAM_CREDIT, answered=False)
class StreamCredit(Request[Answer]):
    """Let the broker deliver so many bytes more."""

    stream: int
    bytes: int


@declare(Kind.STREAM_CLOSE, awaits_commit=False)
class StreamClose(Request[Done]):
    """End a stream: no deliveries follow the answer."""

    stream: int


class Delivery(Answer):
    """Batches of a stream, in the body. They cost their bytes of credit; the last ones may exceed it."""

    next_offset: int
    end_offset: int
    """Behind the last message that could be read: the difference is the lag."""
