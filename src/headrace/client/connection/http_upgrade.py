"""The first bytes of a connection over HTTP: asks the server to switch to the native protocol. Does no I/O itself."""

import re
from typing import Any

import msgspec

from headrace.client.connection.addresses import Address
from headrace.client.connection.redirects import redirect_url
from headrace.model.arguments import shown, shown_url
from headrace.model.errors import ConnectionFailed, Draining, HeadraceError, NotServing, error_of
from headrace.wire.native import UPGRADE_PATH, UPGRADE_PROTOCOL

_HEAD_BYTES_MAX = 16 << 10
_PROBLEM_BYTES_MAX = 16 << 10
_SHOWN_CHARS = 60
_STATUS_LINE = re.compile(rb"HTTP/1\.[01] ([0-9]{3})(?: [^\r\n]*)?")
_HINTS = {
    400: "the server does not understand the request; is it a Headrace broker of this version?",
    401: "a proxy in between asks for credentials, which this client gives only to the broker",
    403: "the broker, or a proxy in between, refuses the request",
    404: "the server has no such path; is it a Headrace broker, and is the path in the address that of the proxy?",
    426: "a proxy in between has removed the headers Upgrade and Connection; let it pass them on",
    502: "a proxy in between cannot reach the broker",
    503: "the broker, or a proxy in between, serves nobody at the moment",
    504: "a proxy in between cannot reach the broker",
}
_REDIRECTS = (307, 308)
"""A node that follows sends clients to the one that serves with these; a proxy that redirects for good uses others."""
_NO_UPGRADE = "it does not switch protocols; a proxy in between must pass the headers Upgrade and Connection on"


class HttpUpgrade:
    """Makes the request, and reads the response."""

    def __init__(self, address: Address) -> None:
        self._address = address
        self._received = bytearray()

    def request(self) -> bytes:
        """The request for the native protocol."""
        address = self._address
        named = address._replace(host=address.host.partition("%")[0].encode("idna").decode("ascii"))
        return (
            f"GET {address.prefix}{UPGRADE_PATH} HTTP/1.1\r\nHost: {named.authority}\r\nConnection: Upgrade\r\n"
            f"Upgrade: {UPGRADE_PROTOCOL}\r\nUser-Agent: headrace\r\n\r\n"
        ).encode("ascii")

    def receive(self, data: bytes) -> bytes | None:
        """Take what arrived, `b""` for the end; returns what follows the response, or None while it is not whole.

        Raises ConnectionFailed if the server answers anything but the switch to the native protocol, and NotServing or
        Draining if it is a node of a cluster that says so.
        """
        self._received += data
        head, end, rest = bytes(self._received).partition(b"\r\n\r\n")
        line = head.partition(b"\r\n")[0]
        if not b"HTTP/1.".startswith(line[:7]) and not line.startswith(b"HTTP/1."):
            raise ConnectionFailed(f"it does not speak HTTP: it sent {_shown(line)}; is it the port of HTTP?")
        if not end:
            if not data:
                after = f"after {_shown(head)}" if head else "without an answer"
                raise ConnectionFailed(f"the server closed the connection {after}; is it the port of HTTP?")
            if len(head) > _HEAD_BYTES_MAX:
                raise ConnectionFailed(f"its answer has a head of more than {_HEAD_BYTES_MAX} bytes")
            return None
        found = _STATUS_LINE.fullmatch(line)
        if found is None:
            raise ConnectionFailed(f"it does not speak HTTP/1.1: it sent {_shown(line)}")
        headers = _headers(head)
        status = int(found[1])
        if status == 101:
            if headers.get("upgrade", "").lower() != UPGRADE_PROTOCOL:
                raise ConnectionFailed(
                    f"it switches to {shown(headers.get('upgrade', ''))}, not to {UPGRADE_PROTOCOL!r}"
                )
            return rest
        if data and len(rest) < min(_length(headers), _PROBLEM_BYTES_MAX):
            return None  # the body tells more
        raise _not_serving(status, headers, rest) or ConnectionFailed(_refusal(status, headers, rest))


def _not_serving(status: int, headers: dict[str, str], body: bytes) -> HeadraceError | None:
    """What a node answers that does not serve: a redirect to the one that does, or that there is none."""
    if status in _REDIRECTS:
        url = redirect_url(headers.get("location", ""))
        return None if url is None else NotServing(f"it refers to {shown_url(url)}", addresses=[url])
    problem = _problem(headers, body) if status == 503 else {}
    if problem.get("code") not in (NotServing.code, Draining.code):
        return None
    details = problem.get("details")
    return error_of(problem["code"], _detail(problem), True, details if isinstance(details, dict) else {})


def _refusal(status: int, headers: dict[str, str], body: bytes) -> str:
    """Say what a server's answer means to the user."""
    found = f"it answers {status} to GET {UPGRADE_PATH}"
    if 300 <= status < 400 and "location" in headers:
        return f"{found}, and refers to {shown(headers['location'])}; connect to that address"
    problem = _detail(_problem(headers, body)) if status != 404 else ""
    return f"{found}: {problem or _HINTS.get(status, _NO_UPGRADE)}"


def _problem(headers: dict[str, str], body: bytes) -> dict[str, Any]:
    """The members of a problem document; none if there is no such document."""
    if not headers.get("content-type", "").startswith("application/problem+json"):
        return {}
    try:
        document: Any = msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError):
        return {}
    return document if isinstance(document, dict) else {}


def _detail(problem: dict[str, Any]) -> str:
    return str(problem.get("detail", ""))


def _headers(head: bytes) -> dict[str, str]:
    """The headers of a response by their names in lower case."""
    found = {}
    for line in head.split(b"\r\n")[1:]:
        name, _, text = line.partition(b":")
        found[name.strip().lower().decode("latin-1")] = text.strip().decode("latin-1")
    return found


def _length(headers: dict[str, str]) -> int:
    length = headers.get("content-length", "")
    return int(length) if length.isascii() and length.isdigit() and len(length) < 10 else 0


def _shown(data: bytes) -> str:
    text = data[:_SHOWN_CHARS].decode("latin-1")
    return shown(text if text.isprintable() else data[:_SHOWN_CHARS])
