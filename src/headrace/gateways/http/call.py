"""One request as its handler sees it: the parameters, the body, the client's session, and the broker."""

import re
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar
from urllib.parse import parse_qsl

import msgspec

from headrace.broker.pending_answer import AnswerWithBody, PendingAnswer
from headrace.gateways.http.content_encoding import unpack
from headrace.gateways.http.problems import HttpError
from headrace.model.arguments import shortened
from headrace.model.batch import Bytes
from headrace.model.errors import Busy, InvalidArgument
from headrace.model.partition_count import PartitionCount
from headrace.model.request import AnswerType, Request

if TYPE_CHECKING:
    from headrace.broker.ports import Session
    from headrace.gateways.http.connection import HttpConnection
    from headrace.gateways.http.gateway import HttpGateway
    from headrace.gateways.http.route import Route

JSON_TYPE = b"application/json"
_QUERY_FIELDS_MAX = 64
_HELD_BYTES_FREE = 64 << 10
"""Bodies so small are not counted: they arrive in one go."""
_EMPTY = memoryview(bytearray())
_REGEX = re.compile(r"matching regex '.*'(?= - at|$)")
_HALF_PAIR = re.compile(
    rb"\\u[dD][89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F])|(?<!\\u[dD][89abAB][0-9a-fA-F]{2})\\u[dD][c-fC-F][0-9a-fA-F]{2}"
)
_SEARCHED_BYTES = 1 << 20
INVALID_ESCAPE = re.compile(rb"%(?![0-9a-fA-F]{2})")
"""A per cent sign in a path or a query that stands for no byte."""

T = TypeVar("T")
Message = dict[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]


class Reply(NamedTuple):
    """The answer to a request."""

    status: int
    body: bytes = b""
    content_type: bytes = JSON_TYPE
    headers: tuple[tuple[bytes, bytes], ...] = ()


class ClientGone(Exception):
    """The client has closed the connection: nobody waits for an answer."""


_encode = msgspec.json.Encoder().encode


def json_reply(answer: Any, status: int = 200, headers: tuple[tuple[bytes, bytes], ...] = ()) -> Reply:
    """An answer as JSON."""
    return Reply(status, _encode(answer), JSON_TYPE, headers)


class Call:
    """A request of a client."""

    __slots__ = (
        "connection",
        "gateway",
        "headers",
        "parameters",
        "query_string",
        "receive",
        "route",
        "send",
        "session",
    )

    def __init__(
        self,
        gateway: "HttpGateway",
        connection: "HttpConnection",
        session: "Session",
        route: "Route",
        parameters: list[str],
        headers: dict[bytes, bytes],
        query_string: bytes,
        receive: Receive,
        send: Send,
    ) -> None:
        self.gateway = gateway
        self.connection = connection
        self.session = session
        self.route = route
        self.parameters = parameters
        self.headers = headers
        self.query_string = query_string
        self.receive = receive
        self.send = send

    def query(self, kind: type[T]) -> T:
        """The query of the path, as the route declares it."""
        return decode_fields(self.query_fields(), kind)

    def query_fields(self) -> dict[str, str]:
        """The fields of the query, each once."""
        if not self.query_string:
            return {}
        return parse_fields(self.query_string, "the query")

    async def read_body(self) -> bytes:
        """The body, unpacked if it is compressed, and refused if it is too large."""
        bytes_max = self.gateway.settings.http_body_bytes_max
        length = self.headers.get(b"content-length")
        if length is not None and (len(length) > 15 or int(length) > bytes_max):
            raise HttpError("body_too_large", f"the body has {length.decode()[:20]} bytes, more than {bytes_max}")
        message = await self.receive()
        if message["type"] != "http.request":
            raise ClientGone
        body: bytes = message["body"]
        if message["more_body"]:
            body = await self._read_rest(body, bytes_max)
        encoding = self.headers.get(b"content-encoding")
        return body if encoding is None else await unpack(body, encoding, bytes_max)

    async def _read_rest(self, first: bytes, bytes_max: int) -> bytes:
        gateway, body = self.gateway, bytearray(first)
        counted = 0
        try:
            while True:
                gateway.received_bytes += len(body) - counted
                counted = len(body)
                if gateway.received_bytes > gateway.settings.receive_bytes_max and counted > _HELD_BYTES_FREE:
                    raise Busy("the broker is receiving too many large requests at once; try again in a moment")
                if counted > bytes_max:
                    raise HttpError("body_too_large", f"the body has more than {bytes_max} bytes")
                message = await self.receive()
                if message["type"] != "http.request":
                    raise ClientGone
                body += message["body"]
                if not message["more_body"]:
                    break
            if len(body) > bytes_max:
                raise HttpError("body_too_large", f"the body has more than {bytes_max} bytes")
            return bytes(body)
        finally:
            gateway.received_bytes -= counted

    def media_type(self) -> bytes:
        """The Content-Type without parameters."""
        return self.headers.get(b"content-type", b"").partition(b";")[0].strip().lower()

    async def decoded(self, decoder: "msgspec.json.Decoder[T]") -> T:
        """The body as JSON; none at all counts as an object without fields."""
        body = await self.read_body()
        kind = self.media_type()
        if not body and not kind:
            body = b"{}"
        elif kind != JSON_TYPE:
            raise unsupported_type(JSON_TYPE)
        return decode_json(body, decoder)

    async def ask(self, request: Request[AnswerType], body: memoryview = _EMPTY) -> AnswerType:
        """Ask the broker; the answer has no body, or only one that nobody needs."""
        answer = await self.ask_whole(request, body)
        found: AnswerType = answer.answer if isinstance(answer, AnswerWithBody) else answer
        return found

    async def ask_with_body(self, request: Request[AnswerType], body: memoryview = _EMPTY) -> tuple[AnswerType, Bytes]:
        """Ask the broker; returns the answer, and its body, which may be empty."""
        answer = await self.ask_whole(request, body)
        return (answer.answer, answer.body) if isinstance(answer, AnswerWithBody) else (answer, b"")

    async def ask_whole(self, request: Request[AnswerType], body: memoryview = _EMPTY) -> Any:
        """Ask the broker; returns the answer, with its body if it has one, or what waits for it."""
        gateway = self.gateway
        outcome = gateway.broker.ask(self.session, request, body, gateway.now_us())
        if isinstance(outcome, PendingAnswer):
            return await self.connection.answered(outcome)
        return outcome


def tenant_of(headers: dict[bytes, bytes]) -> str:
    """The tenant that a request names; empty if it names none."""
    tenant = headers.get(b"headrace-tenant")
    if tenant is None:
        return ""
    if not tenant:
        raise HttpError("invalid_field", "the header Headrace-Tenant is empty; leave it out, or name a tenant")
    try:
        return tenant.decode("ascii")
    except UnicodeDecodeError as error:
        raise InvalidArgument("the header Headrace-Tenant is no tenant's name") from error


def count_partitions(call: Call, topic: str) -> int:
    """The number of a topic's partitions; the topic is made if there is none and the broker may."""
    counted: Any = call.gateway.broker.ask(call.session, PartitionCount(topic), _EMPTY, call.gateway.now_us())
    partitions: int = counted.partitions
    return partitions


def unsupported_type(*accepted: bytes) -> HttpError:
    """The error about a body of another type than the path takes."""
    names = b", ".join(accepted)
    return HttpError(
        "unsupported_media_type", f"the Content-Type of the body must be {names.decode()}", ((b"accept", names),)
    )


def decode_json(body: bytes, decoder: "msgspec.json.Decoder[T]") -> T:
    """Decode JSON; an error says where it is wrong."""
    try:
        if not body.isascii():
            body.decode()  # embedded values are taken as they are
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        raise HttpError("invalid_field", field_error(error)) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise HttpError("invalid_json", f"the body is no JSON: {json_error(body, error)}") from error
    except RecursionError as error:
        raise HttpError("invalid_json", "the body is nested too deeply") from error


def field_error(error: msgspec.ValidationError) -> str:
    """Which field is wrong, and why; patterns are in the description of the interface.

    >>> field_error(msgspec.ValidationError("Expected `str` matching regex '^[a-z]+$' - at `$.name`"))
    'Expected `str` of the form that /v1/openapi.json shows - at `$.name`'
    """
    return _REGEX.sub("of the form that /v1/openapi.json shows", shortened(error))


def json_error(text: bytes, error: Exception) -> str:
    """What is wrong with a text that is no JSON."""
    half = _HALF_PAIR.search(text, 0, _SEARCHED_BYTES)
    if half is not None:
        return f"{half[0].decode()} is half of a surrogate pair, and no character; write both halves"
    return shortened(error)


def parse_fields(encoded: bytes, what: str) -> dict[str, str]:
    """The fields of a query or a form, each once."""
    if INVALID_ESCAPE.search(encoded):
        raise HttpError("invalid_encoding", f"{what} has a % without two hexadecimal digits; write %25 for it")
    try:
        pairs = parse_qsl(
            encoded.decode("ascii"), keep_blank_values=True, errors="strict", max_num_fields=_QUERY_FIELDS_MAX
        )
    except ValueError as error:  # UnicodeDecodeError too
        raise HttpError("invalid_encoding", f"{what} cannot be read: {error}") from error
    fields = dict(pairs)
    if len(fields) != len(pairs):
        raise HttpError("invalid_field", f"a field stands twice in {what}; give each once")
    return fields


def decode_fields(fields: dict[str, str], kind: type[T]) -> T:
    """Fields of a query, as texts, as their types."""
    try:
        found = msgspec.convert(fields, kind, strict=False)
    except msgspec.ValidationError as error:
        raise HttpError("invalid_field", f"the query is wrong: {field_error(error)}") from error
    for name in fields:
        if getattr(found, name) is None:  # msgspec reads it so
            raise HttpError("invalid_field", f"the query is wrong: leave `{name}` out instead of null")
    return found
