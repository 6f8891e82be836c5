"""The native protocol: encodes and decodes the heads of frames. PROTOCOL.md specifies it."""

from typing import Any

import msgspec

from headrace.model import (  # importing them declares their requests
    audit,  # noqa: F401
    bus_event,  # noqa: F401
    cluster_requests,  # noqa: F401
    idempotency,  # noqa: F401
    job_requests,  # noqa: F401  importing them declares their requests
    leasing,  # noqa: F401
    log_level_requests,  # noqa: F401
    metric_requests,  # noqa: F401
    partition_count,  # noqa: F401
    route_requests,  # noqa: F401
    schedule_requests,  # noqa: F401
    security_requests,  # noqa: F401
    service_requests,  # noqa: F401
    subject_requests,  # noqa: F401
    tenant_requests,  # noqa: F401
    webhook_requests,  # noqa: F401
    websub_requests,  # noqa: F401
)
from headrace.model.errors import HeadraceError, ProtocolError, error_of
from headrace.model.kinds import Kind as Kind
from headrace.model.reading import Delivery
from headrace.model.request import REQUESTS, Answer, Request, declare
from headrace.model.requests import Assignment, Done
from headrace.model.standing_lease import LeaseDelivery, LeaseEnd
from headrace.model.subject_requests import RequestDelivery, SubjectDelivery, SubjectEnd

DEFAULT_PORT = 7390
DEFAULT_HTTP_PORT = 7391
UPGRADE_PATH = "/v1/native"
"""Where HTTP switches a connection to this protocol."""
UPGRADE_PROTOCOL = "headrace"
"""What the request for it names in `Upgrade`."""
PROTOCOL_VERSION = 1


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
    nodes: list[str] = msgspec.field(default_factory=list)
    """Of a cluster: the URLs at which clients reach its nodes, this one's among them; empty for a plain broker."""


@declare(Kind.HELLO, by_gateway=True)
class Hello(Request[Welcome]):
    """Opens a connection: the first frame."""

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
    mechanism: str = ""
    """How the client authenticates: `bearer` with a token; empty: it gives no credentials."""
    credentials: bytes = b""

    def __repr__(self) -> str:
        return f"Hello(client={self.client!r}, name={self.name!r}, tenant={self.tenant!r})"  # no credentials


class Pong(Answer):
    """The answer to Ping."""

    time_us: int


@declare(Kind.PING, by_gateway=True)
class Ping(Request[Pong]):
    """Keeps the connection and its group memberships alive."""


class Failure(Answer):
    """The answer to a request that failed; also the head of STREAM_END."""

    code: str
    text: str
    retryable: bool = False
    details: dict[str, Any] = msgspec.field(default_factory=dict)


ANSWERS = {kind: request.declared.answer for kind, request in REQUESTS.items() if request.declared.answer is not None}
"""The class of the answer to each kind of request."""

PUSHES: dict[Kind, type[Answer]] = {
    Kind.DELIVERY: Delivery,
    Kind.STREAM_END: Failure,
    Kind.ASSIGNMENT: Assignment,
    Kind.DRAIN: Done,
    Kind.LEASE_DELIVERY: LeaseDelivery,
    Kind.LEASE_END: LeaseEnd,
    Kind.SUBJECT_DELIVERY: SubjectDelivery,
    Kind.REQUEST_DELIVERY: RequestDelivery,
    Kind.SUBJECT_END: SubjectEnd,
}
"""What the broker sends without a request."""

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
    """An error as the head of a frame."""
    return Failure(code=error.code, text=str(error), retryable=error.retryable, details=error.details)


def failure_error(told: Failure) -> HeadraceError:
    """The error of a failure frame's head."""
    return error_of(told.code, told.text, told.retryable, told.details)


def _decoded(decoder: Any, head: memoryview) -> Any:
    try:
        return decoder.decode(head)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"a frame's head cannot be read: {error}") from error
