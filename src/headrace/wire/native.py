"""The native protocol: kinds of frames, and which head belongs to which. PROTOCOL.md tells it all."""

from enum import IntEnum
from typing import Any

import msgspec

from headrace.model.errors import HeadraceError, ProtocolError, error_of
from headrace.model.leasing import (
    Ack,
    Edit,
    Edited,
    EditMatching,
    Extend,
    Find,
    Forecast,
    Forecasted,
    Found,
    Lease,
    Leased,
    LeaseStop,
    Redrive,
    Redriven,
    Reject,
    Release,
    Settlement,
    SubscriptionAlter,
    SubscriptionCreate,
    SubscriptionDelete,
    SubscriptionDescribe,
    SubscriptionInfo,
    SubscriptionList,
    SubscriptionReset,
    Subscriptions,
)
from headrace.model.recurring import (
    CronInfo,
    CronList,
    CronNext,
    CronPause,
    CronRemove,
    CronRun,
    CronRuns,
    Crons,
    CronSet,
)
from headrace.model.requests import (
    Assignment,
    BrokerInfo,
    Commit,
    Done,
    GroupDelete,
    GroupDescribe,
    GroupInfo,
    GroupJoin,
    GroupJoined,
    GroupLeave,
    GroupList,
    GroupRelease,
    Groups,
    GroupSeek,
    Info,
    Offsets,
    OffsetsFound,
    Publish,
    Published,
    TopicAlter,
    TopicCreate,
    TopicDelete,
    TopicDescribe,
    TopicInfo,
    TopicList,
    Topics,
    TopicTrim,
    TopicTrimmed,
    TransactionAbort,
    TransactionBegin,
    TransactionBegun,
    TransactionCommit,
    TransactionCommitted,
    TransactionStage,
    TransactionStaged,
    Words,
)

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

    CRON_SET = 90
    CRON_REMOVE = 91
    CRON_LIST = 92
    CRON_PAUSE = 93
    CRON_RUN = 94
    CRON_NEXT = 95

    # From the broker.
    ANSWER = 128
    FAILURE = 129
    DELIVERY = 130
    STREAM_END = 131
    ASSIGNMENT = 132
    DRAIN = 133


class Hello(Words):
    """Must come first on a connection."""

    protocol_min: int = PROTOCOL_VERSION
    protocol_max: int = PROTOCOL_VERSION
    client: str = ""
    """Name and version of the client's software."""
    name: str = ""
    """What the client calls itself in lists and logs."""
    features: list[str] = msgspec.field(default_factory=list)
    """What the client can do beyond the version; the answer has those that both can."""


class Welcome(Words):
    """The answer to Hello."""

    protocol: int
    server: str
    broker_id: str
    time_us: int
    heartbeat_ms: int
    """Whoever says nothing for three times as long is taken for dead: send a Ping when idle for this long."""
    frame_bytes_max: int
    features: list[str] = msgspec.field(default_factory=list)


class Ping(Words):
    """Are you there? Keeps the connection, and the memberships of groups that it holds, alive."""


class Pong(Words):
    """The answer to Ping."""

    time_us: int


class Fetch(Words):
    """Batches from an offset on, in the body of the answer."""

    topic: str
    partition: int
    offset: int
    bytes_max: int = 1 << 20
    wait_ms: int = 0
    """How long to wait for something to come when there is nothing."""
    verify: bool = False
    """Have the broker check the batch with the offset whole, and fail with `corrupt_batch` if it is damaged."""


class Fetched(Words):
    """The answer to Fetch, with batches of one partition in the body. The first may begin before the offset."""

    next_offset: int
    """Where to go on."""
    end_offset: int
    """Behind the last message that could be read."""


class StreamOpen(Words):
    """Deliver batches from an offset on, as they come. The request's correlation is the stream's name from then on.

    The answer comes first. Deliveries follow with the same correlation, as far as the credit reaches.
    """

    topic: str
    partition: int
    offset: int
    credit_bytes: int


class StreamOpened(Words):
    """The answer to StreamOpen."""

    first_offset: int
    end_offset: int
    topic_id: int


class StreamCredit(Words):
    """So many bytes more may be delivered."""

    stream: int
    bytes: int


class StreamClose(Words):
    """No more deliveries, please. After the answer there are none."""

    stream: int


class Delivery(Words):
    """Batches of a stream, in the body. They cost their bytes of credit; the last ones may exceed it."""

    next_offset: int
    end_offset: int
    """Behind the last message that could be read: the difference is the lag."""


class Failure(Words):
    """The answer when something is wrong, to any request; also the head of a Stream_end."""

    code: str
    text: str
    retryable: bool = False
    details: dict[str, Any] = msgspec.field(default_factory=dict)


REQUESTS: dict[Kind, type[Words]] = {
    Kind.HELLO: Hello,
    Kind.PING: Ping,
    Kind.INFO: Info,
    Kind.TOPIC_CREATE: TopicCreate,
    Kind.TOPIC_ALTER: TopicAlter,
    Kind.TOPIC_DELETE: TopicDelete,
    Kind.TOPIC_LIST: TopicList,
    Kind.TOPIC_DESCRIBE: TopicDescribe,
    Kind.TOPIC_TRIM: TopicTrim,
    Kind.PUBLISH: Publish,
    Kind.FETCH: Fetch,
    Kind.OFFSETS: Offsets,
    Kind.STREAM_OPEN: StreamOpen,
    Kind.STREAM_CREDIT: StreamCredit,
    Kind.STREAM_CLOSE: StreamClose,
    Kind.GROUP_JOIN: GroupJoin,
    Kind.GROUP_RELEASE: GroupRelease,
    Kind.GROUP_LEAVE: GroupLeave,
    Kind.GROUP_LIST: GroupList,
    Kind.GROUP_DESCRIBE: GroupDescribe,
    Kind.GROUP_SEEK: GroupSeek,
    Kind.GROUP_DELETE: GroupDelete,
    Kind.COMMIT: Commit,
    Kind.TRANSACTION_BEGIN: TransactionBegin,
    Kind.TRANSACTION_STAGE: TransactionStage,
    Kind.TRANSACTION_COMMIT: TransactionCommit,
    Kind.TRANSACTION_ABORT: TransactionAbort,
    Kind.SUBSCRIPTION_CREATE: SubscriptionCreate,
    Kind.SUBSCRIPTION_ALTER: SubscriptionAlter,
    Kind.SUBSCRIPTION_DELETE: SubscriptionDelete,
    Kind.SUBSCRIPTION_LIST: SubscriptionList,
    Kind.SUBSCRIPTION_DESCRIBE: SubscriptionDescribe,
    Kind.SUBSCRIPTION_RESET: SubscriptionReset,
    Kind.LEASE: Lease,
    Kind.ACK: Ack,
    Kind.EXTEND: Extend,
    Kind.RELEASE: Release,
    Kind.REJECT: Reject,
    Kind.LEASE_STOP: LeaseStop,
    Kind.FIND: Find,
    Kind.FORECAST: Forecast,
    Kind.EDIT: Edit,
    Kind.EDIT_MATCHING: EditMatching,
    Kind.REDRIVE: Redrive,
    Kind.CRON_SET: CronSet,
    Kind.CRON_REMOVE: CronRemove,
    Kind.CRON_LIST: CronList,
    Kind.CRON_PAUSE: CronPause,
    Kind.CRON_RUN: CronRun,
    Kind.CRON_NEXT: CronNext,
}
"""What a client may ask, with the class of the head."""

ANSWERS: dict[Kind, type[Words]] = {
    Kind.HELLO: Welcome,
    Kind.PING: Pong,
    Kind.INFO: BrokerInfo,
    Kind.TOPIC_CREATE: TopicInfo,
    Kind.TOPIC_ALTER: TopicInfo,
    Kind.TOPIC_DELETE: Done,
    Kind.TOPIC_LIST: Topics,
    Kind.TOPIC_DESCRIBE: TopicInfo,
    Kind.TOPIC_TRIM: TopicTrimmed,
    Kind.PUBLISH: Published,
    Kind.FETCH: Fetched,
    Kind.OFFSETS: OffsetsFound,
    Kind.STREAM_OPEN: StreamOpened,
    Kind.STREAM_CLOSE: Done,
    Kind.GROUP_JOIN: GroupJoined,
    Kind.GROUP_RELEASE: Done,
    Kind.GROUP_LEAVE: Done,
    Kind.GROUP_LIST: Groups,
    Kind.GROUP_DESCRIBE: GroupInfo,
    Kind.GROUP_SEEK: GroupInfo,
    Kind.GROUP_DELETE: Done,
    Kind.COMMIT: Done,
    Kind.TRANSACTION_BEGIN: TransactionBegun,
    Kind.TRANSACTION_STAGE: TransactionStaged,
    Kind.TRANSACTION_COMMIT: TransactionCommitted,
    Kind.TRANSACTION_ABORT: Done,
    Kind.SUBSCRIPTION_CREATE: SubscriptionInfo,
    Kind.SUBSCRIPTION_ALTER: SubscriptionInfo,
    Kind.SUBSCRIPTION_DELETE: Done,
    Kind.SUBSCRIPTION_LIST: Subscriptions,
    Kind.SUBSCRIPTION_DESCRIBE: SubscriptionInfo,
    Kind.SUBSCRIPTION_RESET: SubscriptionInfo,
    Kind.LEASE: Leased,
    Kind.ACK: Settlement,
    Kind.EXTEND: Settlement,
    Kind.RELEASE: Settlement,
    Kind.REJECT: Settlement,
    Kind.LEASE_STOP: Done,
    Kind.FIND: Found,
    Kind.FORECAST: Forecasted,
    Kind.EDIT: Edited,
    Kind.EDIT_MATCHING: Edited,
    Kind.REDRIVE: Redriven,
    Kind.CRON_SET: CronInfo,
    Kind.CRON_REMOVE: Done,
    Kind.CRON_LIST: Crons,
    Kind.CRON_PAUSE: CronInfo,
    Kind.CRON_RUN: CronInfo,
    Kind.CRON_NEXT: CronRuns,
}
"""What is answered to what."""

PUSHES: dict[Kind, type[Words]] = {
    Kind.DELIVERY: Delivery,
    Kind.STREAM_END: Failure,
    Kind.ASSIGNMENT: Assignment,
    Kind.DRAIN: Done,
}
"""What the broker says unasked."""

_decoders = {kind: msgspec.msgpack.Decoder(head) for kind, head in (REQUESTS | PUSHES).items()}
_answer_decoders = {kind: msgspec.msgpack.Decoder(head) for kind, head in ANSWERS.items()}
_failure_decoder = msgspec.msgpack.Decoder(Failure)


# Every look at a member of an enumeration is a call, and these are compared with the kind of every answer.
_ANSWER, _FAILURE = int(Kind.ANSWER), int(Kind.FAILURE)


def decode(kind: int, head: memoryview) -> Any:
    """The head of a request or of something pushed."""
    decoder = _decoders.get(kind)  # type: ignore[call-overload]
    if decoder is None:
        raise ProtocolError(f"frames of kind {kind} are unknown")
    return _decoded(decoder, head)


def decode_answer(asked: Kind, kind: int, head: memoryview) -> Any:
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
