"""Opens a WebSocket: checks the request for it, finds out who the client is, and hands the connection over."""

import binascii
from base64 import b64decode, urlsafe_b64decode
from typing import TYPE_CHECKING

import msgspec

from headrace.gateways.http.call import Call, tenant_of
from headrace.gateways.http.problems import HttpError
from headrace.gateways.http.route import Route
from headrace.gateways.http.upgrade import CONNECTIONS, switching_response
from headrace.gateways.http.websocket.frames import CODECS, Codec
from headrace.model.errors import Draining, NotAuthenticated

if TYPE_CHECKING:
    from headrace.gateways.http.connection import HttpConnection

SOCKET_PROTOCOL = "websocket"
BEARER_PREFIX = "headrace.bearer."
"""Begins a subprotocol that is the client's token, in base64url: pages in a browser cannot set a header."""
_CREDENTIALS_NEEDED = (
    "this broker has security enabled, and the client gave no credentials: give a token with the header Authorization, "
    f"or as the subprotocol {BEARER_PREFIX}…"
)
_VERSION = b"13"
_KEY_BYTES = 16


class SocketQuery(msgspec.Struct, forbid_unknown_fields=True):
    """Whose names the session uses."""

    tenant: str = ""
    """As Headrace-Tenant, for clients that cannot set a header."""


async def open_socket(call: Call) -> None:
    """Answer a request for a WebSocket."""
    from websockets.utils import accept_key

    from headrace.gateways.http.websocket.connection import SocketConnection

    gateway, connection, headers = call.gateway, call.connection, call.headers
    tenant = _tenant(call, call.query(SocketQuery).tenant)
    if gateway.draining:
        raise Draining
    key = _checked_key(headers)
    codec, chosen, token = _subprotocol(connection)
    authorization = headers.get(b"authorization", b"")
    if token:
        if authorization:
            raise HttpError("invalid_field", f"give Authorization or {BEARER_PREFIX}…, not both")
        authorization = b"Bearer " + token
    socket = SocketConnection(gateway, codec)
    identity = await connection.identify(authorization)
    session = connection.open_session(socket.push, socket.end_session, SOCKET_PROTOCOL, identity, tenant)
    socket.session = session
    more = [(b"sec-websocket-accept", accept_key(key).encode())]
    more += [(b"sec-websocket-protocol", chosen.encode())] if chosen else []
    try:
        if session.access is not None and session.access.is_empty:
            raise NotAuthenticated(_CREDENTIALS_NEEDED)
        connection.upgrade(switching_response(SOCKET_PROTOCOL, tuple(more)), socket.adopt)
    except (ConnectionResetError, NotAuthenticated):
        gateway.broker.disconnect(session, gateway.now_us())
        raise


def _checked_key(headers: dict[bytes, bytes]) -> str:
    """The key of the request, from which the answer is made."""
    if headers.get(b"sec-websocket-version") != _VERSION:
        raise HttpError("upgrade_required", "Sec-WebSocket-Version must be 13", ((b"sec-websocket-version", _VERSION),))
    key = headers.get(b"sec-websocket-key", b"")
    try:
        fits = len(b64decode(key, validate=True)) == _KEY_BYTES
    except binascii.Error:
        fits = False
    if not fits:
        raise HttpError("malformed_request", "Sec-WebSocket-Key must be 16 bytes in base64")
    return key.decode("ascii")


def _subprotocol(connection: "HttpConnection") -> tuple[Codec, str, bytes]:
    """The codec, the subprotocol to name in the answer, and the token among those that the client offers."""
    lines = [content for name, content in connection.scope["headers"] if name == b"sec-websocket-protocol"]
    offered = [one.strip() for line in lines for one in line.decode("latin-1").split(",")]
    tokens = [one.removeprefix(BEARER_PREFIX) for one in offered if one.startswith(BEARER_PREFIX)]
    if len(tokens) > 1:
        raise HttpError("invalid_field", f"a client offers one {BEARER_PREFIX}…")
    token = b""
    if tokens:
        try:
            token = urlsafe_b64decode(tokens[0] + "=" * (-len(tokens[0]) % 4))
        except ValueError:
            token = b""
        if not token or not token.isascii() or not token.decode().isprintable():
            raise NotAuthenticated(f"what follows {BEARER_PREFIX} must be a token in base64url")
    chosen = next((one for one in offered if one in CODECS), "")
    if offered and not chosen:
        raise HttpError("invalid_field", f"offer one of the subprotocols {', '.join(CODECS)}")
    return CODECS[chosen or next(iter(CODECS))], chosen, token


def _tenant(call: Call, queried: str) -> str:
    named = tenant_of(call.headers)
    if named and queried and named != queried:
        raise HttpError("invalid_field", "Headrace-Tenant and ?tenant= name different tenants; give one of them")
    return named or queried


SOCKET_ROUTES = [
    Route(
        "GET",
        "/v1/socket",
        open_socket,
        "A WebSocket: requests to the broker and messages as they come, as frames of JSON or MessagePack",
        CONNECTIONS,
        query=SocketQuery,
        status=101,
        upgrade=SOCKET_PROTOCOL,
    ),
]
