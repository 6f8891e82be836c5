"""Where a broker is: addresses as users write them."""

import os
import socket
from typing import NamedTuple, Protocol
from urllib.parse import quote, unquote_to_bytes, urlsplit

from headrace.client.connection.environment import URL_VARIABLE
from headrace.model.arguments import shortened, shown
from headrace.model.errors import InvalidArgument
from headrace.model.topic import checked_tenant
from headrace.wire.native import DEFAULT_PORT

DEFAULT_ADDRESS = f"headrace://127.0.0.1:{DEFAULT_PORT}"
_EXAMPLES = f"{DEFAULT_ADDRESS} or headrace+unix:///run/headrace.sock"

_UNIX_SCHEMES = ("headrace+unix", "unix")


class Address(NamedTuple):
    """A broker's address: host and port, or the path of a Unix socket, and perhaps a tenant."""

    host: str
    port: int
    path: str = ""
    tenant: str = ""

    def __str__(self) -> str:
        query = f"?tenant={self.tenant}" if self.tenant else ""
        if self.path:
            return f"headrace+unix://{quote(os.fsencode(self.path))}{query}"
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"headrace://{host}:{self.port}{query}"


class Nearby(Protocol):
    """A broker in this process, which hands out connected sockets."""

    def connect(self) -> socket.socket: ...


Target = Address | Nearby
"""What can be connected to."""


def default_address() -> str:
    """The address to use where none is given: $HEADRACE_URL, or else that of this machine."""
    return checked_address(os.environ.get(URL_VARIABLE) or DEFAULT_ADDRESS, f"${URL_VARIABLE}")


def checked_address(text: str, source: str) -> str:
    """Return the text if it is an address; otherwise raise an error that names the source of the text."""
    try:
        parse_address(text)
    except InvalidArgument as error:
        raise InvalidArgument(f"{source}: {error}") from error
    return text


def parse_address(text: str) -> Address:
    """The address that a text stands for.

    >>> parse_address("headrace://localhost?tenant=acme")
    Address(host='localhost', port=7390, path='', tenant='acme')
    >>> str(parse_address("headrace+unix:///run/headrace.sock"))
    'headrace+unix:///run/headrace.sock'
    >>> parse_address("unix:///run/a%20b%23c.sock").path
    '/run/a b#c.sock'
    """
    if not isinstance(text, str):
        raise InvalidArgument(f"an address is text, not {shown(text)}; write {_EXAMPLES}")
    try:
        parts = urlsplit(text)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise InvalidArgument(f"{shown(text)} is no address: {shortened(error)}; write {_EXAMPLES}") from error
    if "#" in text:
        raise InvalidArgument(f"{shown(text)} is no address: one has no fragment; write {_EXAMPLES}")
    tenant = _queried_tenant(text)
    if port == 0:
        raise InvalidArgument(f"{shown(text)} is no address: a port is 1 to 65535; write {_EXAMPLES}")
    if parts.scheme in _UNIX_SCHEMES and parts.path and not parts.netloc:
        path = os.fsdecode(unquote_to_bytes(parts.path))
        if "\0" in path:
            raise InvalidArgument(f"{shown(text)} is no address: it has a null character; write {_EXAMPLES}")
        return Address("", 0, path, tenant)
    if parts.scheme == "headrace" and host and parts.path in ("", "/") and "@" not in parts.netloc:
        return Address(host, port or DEFAULT_PORT, "", tenant)
    raise InvalidArgument(f"{shown(text)} is no address of a broker; write {_EXAMPLES}")


def with_tenant(text: str, tenant: str) -> str:
    """An address with a tenant, in the place of one that it has.

    >>> with_tenant("headrace://localhost", "acme")
    'headrace://localhost:7390?tenant=acme'
    """
    return str(parse_address(text)._replace(tenant=checked_tenant(tenant)))


def _queried_tenant(text: str) -> str:
    """The tenant that an address's query names; a query names nothing else."""
    _, question_mark, query = text.partition("?")
    name, _, tenant = query.partition("=")
    if not question_mark:
        return ""
    if name != "tenant" or not tenant:
        raise InvalidArgument(f"{shown(text)} is no address: its query names a tenant, `?tenant=NAME`, and no more")
    return checked_tenant(tenant)


def place_of(target: Target) -> str:
    """Where a broker is, in one word."""
    return str(target) if isinstance(target, Address) else "embedded"


def unreachable(target: Target, error: BaseException | str) -> str:
    """What to tell a user whose broker cannot be reached."""
    where = str(target) if isinstance(target, Address) else "the broker in this process"
    hint = "; is it running? Start it with `headrace serve`" if isinstance(target, Address) else ""
    if isinstance(target, Address) and target.path and isinstance(error, PermissionError):
        hint = (
            "; this user has no permission for the socket, which is for the broker's user alone: run as that user, or "
            "use the broker's TCP address"
        )
    return f"cannot reach a broker at {where}: {error}{hint}"
