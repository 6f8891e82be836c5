"""Connections of HTTP that go on with another protocol: the native one, for clients behind proxies of HTTP."""

from typing import TYPE_CHECKING

from headrace.gateways.http.call import Call
from headrace.gateways.http.problems import HttpError
from headrace.gateways.http.route import Route
from headrace.model.errors import Draining
from headrace.wire.native import UPGRADE_PATH, UPGRADE_PROTOCOL

if TYPE_CHECKING:
    from headrace.gateways.http.connection import HttpConnection

CONNECTIONS = "connections"


def check_upgrade(protocol: str, method: str, headers: dict[bytes, bytes], connection: "HttpConnection") -> None:
    """Refuse a request that does not ask for this protocol, or has a body."""
    asked = [name.strip().lower() for name in headers.get(b"upgrade", b"").split(b",")]
    if method != "GET" or protocol.encode() not in asked or not connection.asks_for_upgrade:
        raise HttpError(
            "upgrade_required",
            f"this path speaks {protocol}; send GET with Connection: Upgrade and Upgrade: {protocol}, by HTTP/1.1; a "
            "proxy in between may have removed them",
            ((b"upgrade", protocol.encode()), (b"connection", b"upgrade")),
        )
    if b"content-length" in headers or b"transfer-encoding" in headers:
        raise HttpError("malformed_request", "a request for another protocol has no body")


def switching_response(protocol: str, headers: tuple[tuple[bytes, bytes], ...] = ()) -> bytes:
    """The response after which a connection speaks another protocol."""
    lines = [b"HTTP/1.1 101 Switching Protocols", b"upgrade: " + protocol.encode(), b"connection: upgrade"]
    lines += [b"%s: %s" % header for header in headers]
    return b"\r\n".join([*lines, b"", b""])


async def upgrade_native(call: Call) -> None:
    """Hand the connection over to the native gateway; the client authenticates by its Hello."""
    # Authorization, which is for proxies here, excuses no foreign Host or Origin.
    call.gateway.application.check_guarded(call.connection.scope, call.headers)
    if call.gateway.draining:
        raise Draining
    call.connection.upgrade(switching_response(UPGRADE_PROTOCOL), call.gateway.adopt_native)


UPGRADE_ROUTES = [
    Route(
        "GET",
        UPGRADE_PATH,
        upgrade_native,
        "The native protocol on this connection, after `Upgrade: headrace`",
        CONNECTIONS,
        status=101,
        upgrade=UPGRADE_PROTOCOL,
    ),
]
