"""The native protocol: kinds of frames, and which head belongs to which. PROTOCOL.md tells it all."""

from enum import IntEnum
from typing import Any

import msgspec

from headrace.model import leasing, schedule_requests  # noqa: F401  importing them declares their requests
from headrace.model.errors import HeadraceError, ProtocolError, error_of
from headrace.model.request import REQUESTS, Answer, Permission, Request, Resource, Verb, declare
from headrace.model.requests import Assignment, Done

DEFAULT_PORT = 7390
PROTOCOL_VERSION = 1


class Kind(IntEnum):
    """What a frame is."""

    HELLO = 1
    PING = 2
    INFO = 3

    TOPIC_CREATE = 10
    TOPIC_ALTER = 11
    TOPIC_DELETE = 12
    TOPIC_LIST = 13
    TOPIC_DESCRIBE = 14
    TOPIC_TRIM = 15

    PUBLISH = 20

    FETCH = 30
    OFFSETS = 31
    STREAM_OPEN = 32
    STREAM_CREDIT = 33  # has no answer
    STREAM_CLOSE = 34

    GROUP_JOIN = 40
    GROUP_RELEASE = 41
    GROUP_LEAVE = 42
    GROUP_LIST = 43
    GROUP_DESCRIBE = 44
    GROUP_SEEK = 45
    GROUP_DELETE = 46
    COMMIT = 47

    TRANSACTION_BEGIN = 50
    TRANSACTION_STAGE = 51
    TRANSACTION_COMMIT = 52
    TRANSACTION_ABORT = 53

    SUBSCRIPTION_CREATE = 60
    SUBSCRIPTION_ALTER = 61
    SUBSCRIPTION_DELETE = 62
    SUBSCRIPTION_LIST = 63
    SUBSCRIPTION_DESCRIBE = 64
    SUBSCRIPTION_RESET = 65

    LEASE = 70
    ACK = 71
    EXTEND = 72
    RELEASE = 73
    REJECT = 74
    LEASE_STOP = 75

    FIND = 80
    FORECAST = 81
    EDIT = 82
    EDIT_MATCHING = 83
    REDRIVE = 84

    SCHEDULE_SET = 90
    SCHEDULE_REMOVE = 91
    SCHEDULE_LIST = 92
    SCHEDULE_PAUSE = 93
    SCHEDULE_RUN = 94
    SCHEDULE_NEXT = 95

    # From the broker.
    ANSWER = 128
    FAILURE = 129
    DELIVERY = 130
    STREAM_END = 131
    ASSIGNMENT = 132
    DRAIN = 133


class Welcome(Answer):
    """The answer to Hello."""

    protocol: int
    server: str
    broker_id: str
    time_us: int
    heartbeat_ms: int
    """Whoever says nothing for three times as long is taken for dead: send a Ping when idle for this long."""
    frame_bytes_max: int
    features: list[str] = msgspec.field(default_factory=list)


@declare(1)
class Hello(Request[Welcome]):
    """Must come first on a connection."""

    protocol_min: int = PROTOCOL_VERSION
    protocol_max: int = PROTOCOL_VERSION
    client: str = ""
    """Name and version of the client's software."""
    name: str = ""
    """What the client calls itself in lists and logs."""
    tenant: str = ""
    """Whose names the session's names are, where they say no tenant; by default the identity's, else `default`."""
    features: list[str] = msgspec.field(default_factory=list)
    """What the client can do beyond the version; the answer has those that both can."""


class Pong(Answer):
    """The answer to Ping."""

    time_us: int


@declare(2)
class Ping(Request[Pong]):
    """Are you there? Keeps the connection, and the memberships of groups that it holds, alive."""


class Fetched(Answer):
    """The answer to Fetch, with batches of one partition in the body. The first may begin before the offset."""

    next_offset: int
    """Where to go on."""
    end_offset: int
    """Behind the last message that could be read."""


@declare(30, Permission(Verb.CONSUME, Resource.TOPIC, "topic"))
class Fetch(Request[Fetched]):
    """Batches from an offset on, in the body of the answer."""

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


@declare(32, Permission(Verb.CONSUME, Resource.TOPIC, "topic"))
class StreamOpen(Request[StreamOpened]):
    """Deliver batches from an offset on, as they come. The request's correlation is the stream's name from then on.

    The answer comes first. Deliveries follow with the same correlation, as far as the credit reaches.
    """

    topic: str
    partition: int
    offset: int
    credit_bytes: int


@declare(33, answered=False)
class StreamCredit(Request[Answer]):
    """So many bytes more may be delivered."""

    stream: int
    bytes: int


@declare(34)
class StreamClose(Request[Done]):
    """No more deliveries, please. After the answer there are none."""

    stream: int


class Delivery(Answer):
    """Batches of a stream, in the body. They cost their bytes of credit; the last ones may exceed it."""

    next_offset: int
    end_offset: int
    """Behind the last message that could be read: the difference is the lag."""


class Failure(Answer):
    """The answer when something is wrong, to any request; also the head of a Stream_end."""

    code: str
    text: str
    retryable: bool = False
    details: dict[str, Any] = msgspec.field(default_factory=dict)


ANSWERS = {kind: request.declared.answer for kind, request in REQUESTS.items() if request.declared.answer is not None}
"""What is answered to what."""

PUSHES: dict[Kind, type[Answer]] = {
    Kind.DELIVERY: Delivery,
    Kind.STREAM_END: Failure,
    Kind.ASSIGNMENT: Assignment,
    Kind.DRAIN: Done,
}
"""What the broker says unasked."""

_decoders: dict[int, Any] = {kind: msgspec.msgpack.Decoder(head) for kind, head in (*REQUESTS.items(), *PUSHES.items())}
_answer_decoders = {kind: msgspec.msgpack.Decoder(head) for kind, head in ANSWERS.items()}
_failure_decoder = msgspec.msgpack.Decoder(Failure)


# Every look at a member of an enumeration is a call, and these are compared with the kind of every answer.
_ANSWER, _FAILURE = int(Kind.ANSWER), int(Kind.FAILURE)


def decode(kind: int, head: memoryview) -> Any:
    """The head of a request or of something pushed."""
    decoder = _decoders.get(kind)
    if decoder is None:
        raise ProtocolError(f"frames of kind {kind} are unknown")
    return _decoded(decoder, head)


def decode_answer(asked: int, kind: int, head: memoryview) -> Any:
    """The head of the answer to a request of kind `asked`; a Failure is raised as the error that it tells."""
    if kind == _FAILURE:
        raise failure_error(_decoded(_failure_decoder, head))
    if kind != _ANSWER:
        raise ProtocolError(f"a frame of kind {kind} is no answer")
    return _decoded(_answer_decoders[asked], head)


def failure(error: HeadraceError) -> Failure:
    """The head that tells of an error."""
    return Failure(code=error.code, text=str(error), retryable=error.retryable, details=error.details)


def failure_error(told: Failure) -> HeadraceError:
    """The error that a head tells of."""
    return error_of(told.code, told.text, told.retryable, told.details)


def _decoded(decoder: Any, head: memoryview) -> Any:
    try:
        return decoder.decode(head)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"a frame's head cannot be read: {error}") from error
