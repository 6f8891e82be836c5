"""Keeps pages in a user's browser away from a broker that asks for no credentials."""

import re
from collections.abc import Sequence
from ipaddress import ip_address

from headrace.gateways.http.problems import HttpError
from headrace.model.arguments import shown

Headers = dict[bytes, bytes]

_REMEMBERED_MAX = 256
_HOST = re.compile(rb"(?:\[([0-9A-Fa-f:.]+)\]|([A-Za-z0-9._-]+))(?::[0-9]{0,5})?")
"""An address of IPv6 in brackets, another address or a name; and a port."""
_OWN_SITES = (b"same-origin", b"none")
_ALLOWED_METHODS = b"GET, POST, PUT, PATCH, DELETE"
_ALLOWED_HEADERS = b"authorization, content-type, headrace-tenant, idempotency-key, if-match, last-event-id"
_EVENT_HEADER = re.compile(rb"ce-[a-z0-9]{1,100}")
_EXPOSED_HEADERS = b"etag, link, location, retry-after"
_PREFLIGHT_SECONDS = 600


class HostGuard:
    """Checks Host and Origin of requests without credentials.

    A name that an attacker lets point to this machine (DNS rebinding) is refused by its Host, a page of another site by
    its Origin. Addresses in numbers cannot be rebound, so that of the socket is always good.
    """

    def __init__(self, hosts: Sequence[str], origins: Sequence[str], webhook_origins: Sequence[str] = ()) -> None:
        self._hosts = {"localhost", *(host.lower() for host in hosts)}
        self._origins = {origin.rstrip("/").lower().encode() for origin in origins}
        self._webhook_origins = {origin.lower().encode() for origin in webhook_origins}
        self._good: set[tuple[bytes, str]] = set()
        """Hosts that were found good, each with the address of the socket."""

    def check(self, headers: Headers, local_host: str) -> None:
        """Refuse a request of a foreign Host, or of a page that is not listed."""
        host = headers.get(b"host", b"")
        if (host, local_host) not in self._good:
            self._check_host(host, local_host)
        if b"origin" in headers or headers.get(b"sec-fetch-site", b"none") not in _OWN_SITES:
            self._check_origin(headers, host)

    def allowed_origin(self, headers: Headers) -> bytes:
        """The Origin of a request, if it is listed; else nothing."""
        origin = headers.get(b"origin", b"")
        return origin if origin and (origin.lower() in self._origins or b"*" in self._origins) else b""

    def answer_headers(self, headers: Headers) -> list[tuple[bytes, bytes]]:
        """What lets a page that is listed read the answer."""
        origin = self.allowed_origin(headers)
        if not origin:
            return []
        return [
            (b"access-control-allow-origin", origin),
            (b"access-control-expose-headers", _EXPOSED_HEADERS),
            (b"vary", b"origin"),
        ]

    def preflight_headers(self, headers: Headers) -> list[tuple[bytes, bytes]]:
        """What a page that is listed may send, besides the headers of every answer to it."""
        asked = headers.get(b"access-control-request-headers", b"").lower().replace(b" ", b"").split(b",")
        attributes = [name for name in asked if _EVENT_HEADER.fullmatch(name)]
        return [
            (b"access-control-allow-methods", _ALLOWED_METHODS),
            (b"access-control-allow-headers", b", ".join([_ALLOWED_HEADERS, *attributes])),
            (b"access-control-max-age", b"%d" % _PREFLIGHT_SECONDS),
        ]

    def webhook_headers(self, headers: Headers) -> list[tuple[bytes, bytes]]:
        """The permission for a listed sender of webhooks, at any rate; nothing for others. It allows no page."""
        origin = headers[b"webhook-request-origin"].strip()
        is_listed = origin.lower() in self._webhook_origins or b"*" in self._webhook_origins
        if not is_listed or not _HOST.fullmatch(origin):
            return []
        rate = [(b"webhook-allowed-rate", b"*")] if b"webhook-request-rate" in headers else []
        return [(b"webhook-allowed-origin", origin), *rate]

    def _check_host(self, host: bytes, local_host: str) -> None:
        name = host_name(host)
        if name not in self._hosts and "*" not in self._hosts and not _is_address_of(name, local_host):
            raise HttpError(
                "host_refused",
                f"the Host {shown(host.decode('latin-1'))} is none of this broker's names; use its address in numbers, "
                "or add the name to the setting http_hosts",
            )
        if len(self._good) >= _REMEMBERED_MAX:
            self._good.clear()
        self._good.add((host, local_host))

    def _check_origin(self, headers: Headers, host: bytes) -> None:
        origin = headers.get(b"origin")
        own = origin is not None and origin.partition(b"://")[::2] in ((b"http", host), (b"https", host))
        if own or self.allowed_origin(headers):
            return
        if origin is None and headers.get(b"sec-fetch-site", b"none") in _OWN_SITES:
            return
        named = "another site" if origin is None else f"the Origin {shown(origin.decode('latin-1'))}"
        raise HttpError(
            "origin_refused",
            f"a page of {named} may not use this broker; the setting http_origins lists those that may",
        )


def host_name(host: bytes) -> str:
    """The name in a Host, without the port; empty if there is none. What is no host and port is refused.

    >>> host_name(b"[::1]:7391"), host_name(b"LocalHost:7391"), host_name(b"")
    ('::1', 'localhost', '')
    """
    if not host:
        return ""
    found = _HOST.fullmatch(host)
    if found is None:
        raise HttpError("malformed_request", f"the Host {shown(host.decode('latin-1'))} is no host and port")
    return (found[1] or found[2]).decode("ascii").lower()


def _is_address_of(name: str, local_host: str) -> bool:
    """Whether a name is the address, in numbers, of a socket or of this machine's loopback."""
    try:
        address = ip_address(name)
        return address.is_loopback or address == ip_address(local_host.partition("%")[0])
    except ValueError:
        return False
