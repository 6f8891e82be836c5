"""Addresses to listen on, as URLs: the scheme names the gateway."""

import os
import re
from typing import NamedTuple
from urllib.parse import quote, unquote_to_bytes, urlsplit

from headrace.model.arguments import shown_url
from headrace.model.errors import InvalidArgument
from headrace.wire.native import DEFAULT_PORT

NATIVE_SCHEMES = ("headrace", "headraces", "unix", "headrace+unix")
"""Schemes of the native protocol: on TCP, with TLS, and twice on a Unix socket."""
TLS_SCHEMES = ("headraces", "https")
_UNIX_SCHEMES = ("unix", "headrace+unix")
_SCHEME = re.compile(r"[a-z][a-z0-9+.-]*\Z")
_EXAMPLES = f"write headrace://127.0.0.1:{DEFAULT_PORT} or unix:///run/headrace.sock"


class ListenAddress(NamedTuple):
    """An address to listen on."""

    url: str
    """As it was given."""
    scheme: str
    host: str = ""
    port: int | None = None
    """The port; 0 for any that is free, None where the address has none."""
    path: str = ""
    """The path of a Unix socket, or whatever else a gateway makes of it."""

    def __str__(self) -> str:
        return self.url

    @property
    def has_tls(self) -> bool:
        """Whether connections are encrypted."""
        return self.scheme in TLS_SCHEMES

    @property
    def is_unix(self) -> bool:
        """Whether it is a Unix socket of the native protocol."""
        return self.scheme in _UNIX_SCHEMES


def tcp_address(host: str, port: int, *, tls: bool = False) -> ListenAddress:
    """The address of the native protocol at a host and port."""
    scheme = "headraces" if tls else "headrace"
    return ListenAddress(tcp_url(scheme, host, port), scheme, host, port)


def unix_address(path: str) -> ListenAddress:
    """The address of the native protocol on a Unix socket."""
    return ListenAddress(unix_url("unix", path), "unix", path=path)


def tcp_url(scheme: str, host: str, port: int) -> str:
    """A host and port as a URL.

    >>> tcp_url("headrace", "::1", 7390)
    'headrace://[::1]:7390'
    """
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def unix_url(scheme: str, path: str) -> str:
    """The path of a Unix socket as a URL.

    >>> unix_url("headrace+unix", "/run/a b#c.sock")
    'headrace+unix:///run/a%20b%23c.sock'
    """
    return f"{scheme}://{quote(os.fsencode(os.path.abspath(path)))}"


def parse_listen_address(url: str) -> ListenAddress:
    """The address that a URL stands for.

    >>> parse_listen_address("headrace://127.0.0.1:7390").port
    7390
    >>> parse_listen_address("unix:///run/headrace.sock").path
    '/run/headrace.sock'
    """
    try:
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port
    except ValueError as error:
        reason = "it has a user" if "@" in url else error  # the error may repeat a password
        raise InvalidArgument(f"listen: {shown_url(url)} is no URL ({reason}); {_EXAMPLES}") from None
    if "://" not in url or not _SCHEME.match(parts.scheme):
        raise InvalidArgument(f"listen: {shown_url(url)} is no URL; {_EXAMPLES}")
    address = ListenAddress(url, parts.scheme, host, port, os.fsdecode(unquote_to_bytes(parts.path)))
    if "\0" in f"{host}{address.path}":
        raise InvalidArgument(f"listen: {shown_url(url)} has a null character; {_EXAMPLES}")
    if parts.scheme not in NATIVE_SCHEMES:
        return address  # the rest is for its gateway to judge
    if "?" in url or "#" in url or "@" in parts.netloc:
        raise InvalidArgument(
            f"listen: {shown_url(url)} has a query, a fragment or a user, which no address has; {_EXAMPLES}"
        )
    if parts.scheme in _UNIX_SCHEMES:
        if parts.netloc or not address.path.startswith("/") or address.path == "/":
            raise InvalidArgument(f"listen: {shown_url(url)} names no file by its whole path; {_EXAMPLES}")
        return address
    if not host or address.path not in ("", "/"):
        raise InvalidArgument(f"listen: {shown_url(url)} must be a host and a port; {_EXAMPLES}")
    return address._replace(port=DEFAULT_PORT if port is None else port, path="")
