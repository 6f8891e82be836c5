"""Where a broker is: addresses as users write them."""

import os
import re
import socket
from typing import NamedTuple, Protocol
from urllib.parse import quote, unquote_to_bytes, urlsplit

from headrace.client.connection.environment import URL_VARIABLE
from headrace.client.connection.tls_options import TlsOptions, tls_options_of_environment
from headrace.model.arguments import shortened, shown, shown_url
from headrace.model.errors import HeadraceError, InvalidArgument
from headrace.model.topic import checked_tenant
from headrace.wire.native import DEFAULT_HTTP_PORT, DEFAULT_PORT

DEFAULT_ADDRESS = f"headrace://127.0.0.1:{DEFAULT_PORT}"
_NO_USER = "an address has no user and no password: give token=..., $HEADRACE_TOKEN, or a file with token_file"
_EXAMPLES = f"{DEFAULT_ADDRESS}, http://127.0.0.1:{DEFAULT_HTTP_PORT} or headrace+unix:///run/headrace.sock"

_SEVERAL = "several hosts of a cluster are one list, such as headrace://a:7390,b:7390"
HOSTS_MAX = 64
"""How many hosts an address can list."""
_UNIX_SCHEMES = ("headrace+unix", "unix")
_AUTHORITY = re.compile(r"([^/?#:]*://)([^/?#]*)(.*)", re.DOTALL)
_PREFIX = re.compile(r"(?:/[A-Za-z0-9._~!$&'()*+,;=:@%-]+)*")


class Scheme(NamedTuple):
    """What the scheme of an address with a host says."""

    port: int
    """The port where the address has none."""
    upgrades: bool = False
    """Whether the connection begins with HTTP, which is asked to switch to the native protocol."""
    tls: bool = False
    """Whether the connection is encrypted."""


SCHEMES = {
    "headrace": Scheme(DEFAULT_PORT),
    "headraces": Scheme(DEFAULT_PORT, tls=True),
    "http": Scheme(DEFAULT_HTTP_PORT, upgrades=True),
    "https": Scheme(DEFAULT_HTTP_PORT, upgrades=True, tls=True),
}
"""All schemes of addresses with a host."""


class Address(NamedTuple):
    """A broker's address: host and port, or the path of a Unix socket, and perhaps a tenant.

    The address of a cluster has several hosts; all else is the same for all of them.
    """

    host: str
    port: int
    path: str = ""
    """The path of a Unix socket."""
    tenant: str = ""
    scheme: str = "headrace"
    prefix: str = ""
    """Of HTTP: the path under which a proxy has the broker; empty, or with a slash before but none behind."""
    tls: TlsOptions = TlsOptions()
    token_file: str = ""
    """The file that the token is read from; the token itself is never in an address."""
    others: tuple[tuple[str, int], ...] = ()
    """Hosts and ports of further nodes of a cluster."""

    def __str__(self) -> str:
        given = {"tenant": self.tenant, "token_file": self.token_file, **self.tls.given()}
        query = "&".join(f"{name}={quote(os.fsencode(text))}" for name, text in given.items() if text)
        query = f"?{query}" if query else ""
        if self.path:
            return f"headrace+unix://{quote(os.fsencode(self.path))}{query}"
        hosts = ",".join(each.authority for each in self.each())
        return f"{self.scheme}://{hosts}{self.prefix}{query}"

    def each(self) -> "list[Address]":
        """The addresses of all hosts, each by itself."""
        hosts = [(self.host, self.port), *self.others]
        return [self._replace(host=host, port=port, others=()) for host, port in hosts]

    @property
    def place(self) -> str:
        """The address without the files that are used with it."""
        return str(self._replace(tls=TlsOptions(), token_file=""))

    @property
    def authority(self) -> str:
        """Host and port as a URL has them; of several the first."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def upgrades(self) -> bool:
        """Whether the connection begins with HTTP."""
        return not self.path and SCHEMES[self.scheme].upgrades

    @property
    def has_tls(self) -> bool:
        """Whether the connection is encrypted."""
        return not self.path and SCHEMES[self.scheme].tls


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

    >>> parse_address("headrace://localhost?tenant=acme")[:5]
    ('localhost', 7390, '', 'acme', 'headrace')
    >>> str(parse_address("headraces://localhost?ca=/etc/headrace/ca.pem"))
    'headraces://localhost:7390?ca=/etc/headrace/ca.pem'
    >>> str(parse_address("http://broker.example.org:80/headrace/"))
    'http://broker.example.org:80/headrace'
    >>> str(parse_address("headrace://a:7390,b,[::1]:7392?tenant=acme"))
    'headrace://a:7390,b:7390,[::1]:7392?tenant=acme'
    >>> str(parse_address("headrace+unix:///run/headrace.sock"))
    'headrace+unix:///run/headrace.sock'
    >>> parse_address("unix:///run/a%20b%23c.sock").path
    '/run/a b#c.sock'
    """
    if not isinstance(text, str):
        raise InvalidArgument(f"an address is text, not {shown(text)}; write {_EXAMPLES}")
    found = _AUTHORITY.fullmatch(text)
    if found is None or "," not in found[2]:
        return _parse_one(text)
    scheme, authorities, rest = found.groups()
    if "@" in authorities:
        raise InvalidArgument(f"{shown_url(text)} is no address of a broker; {_NO_USER}")
    hosts = authorities.split(",")
    if not all(hosts) or len(hosts) > HOSTS_MAX or "//" in rest.partition("?")[0]:
        raise InvalidArgument(f"{shown_url(text)} is no address: {_SEVERAL}, {HOSTS_MAX} at most; write {_EXAMPLES}")
    first, *others = [_parse_one(f"{scheme}{host}{rest}") for host in hosts]
    listed = dict.fromkeys((other.host, other.port) for other in others)
    listed.pop((first.host, first.port), None)
    return first._replace(others=tuple(listed))


def _parse_one(text: str) -> Address:
    """The address of one host, or of a Unix socket."""
    try:
        parts = urlsplit(text)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        if "@" in text:  # the error may tell what precedes it
            raise InvalidArgument(f"{shown_url(text)} is no address; {_NO_USER}") from None
        raise InvalidArgument(f"{shown_url(text)} is no address: {shortened(error)}; write {_EXAMPLES}") from error
    if "@" in parts.netloc:
        raise InvalidArgument(f"{shown_url(text)} is no address of a broker; {_NO_USER}")
    if "#" in text:
        raise InvalidArgument(f"{shown_url(text)} is no address: one has no fragment; write {_EXAMPLES}")
    tenant, token_file, tls = _queried(text)
    if port == 0:
        raise InvalidArgument(f"{shown_url(text)} is no address: a port is 1 to 65535; write {_EXAMPLES}")
    if parts.scheme in _UNIX_SCHEMES and parts.path and not parts.netloc:
        path = os.fsdecode(unquote_to_bytes(parts.path))
        if "\0" in path:
            raise InvalidArgument(f"{shown_url(text)} is no address: it has a null character; write {_EXAMPLES}")
        return with_options(Address("", 0, path, tenant, token_file=token_file), tls, text)
    scheme, prefix = SCHEMES.get(parts.scheme), parts.path.rstrip("/")
    fits = scheme is not None and (not prefix or (scheme.upgrades and _PREFIX.fullmatch(prefix) is not None))
    if scheme is not None and fits and host:
        found = Address(host, port or scheme.port, "", tenant, parts.scheme, prefix, token_file=token_file)
        return with_options(found, tls, text)
    raise InvalidArgument(f"{shown_url(text)} is no address of a broker; write {_EXAMPLES}")


def with_tenant(text: str, tenant: str) -> str:
    """An address with a tenant, in the place of one that it has.

    >>> with_tenant("headrace://localhost", "acme")
    'headrace://localhost:7390?tenant=acme'
    """
    return str(parse_address(text)._replace(tenant=checked_tenant(tenant)))


def with_tls(address: Address, options: TlsOptions) -> Address:
    """An address with these options of TLS before its own, and with those of the environment where both have none.

    The environment says nothing about connections that are not encrypted.
    """
    address = with_options(address, options.over(address.tls), str(address))
    return address._replace(tls=address.tls.over(tls_options_of_environment())) if address.has_tls else address


def with_options(address: Address, options: TlsOptions, text: str) -> Address:
    """An address with these options of TLS instead of its own; `text` is how errors name it."""
    if options.given() and not address.has_tls:
        why = (
            "a Unix socket has no TLS"
            if address.path
            else "its connections have no TLS; write headraces:// or https://"
        )
        raise InvalidArgument(f"{shown_url(text)} cannot have {next(iter(options.given()))}: {why}")
    return address._replace(tls=options)


def with_token_file(text: str, path: str) -> str:
    """An address with the file of a token, in the place of one that it has.

    >>> with_token_file("headrace://localhost", "/etc/headrace/token")
    'headrace://localhost:7390?token_file=/etc/headrace/token'
    """
    return str(parse_address(text)._replace(token_file=path))


def _queried(text: str) -> tuple[str, str, TlsOptions]:
    """The tenant, the file of the token and the options of TLS that an address's query names, and nothing else."""
    _, question_mark, query = text.partition("?")
    found: dict[str, str] = {}
    for pair in query.split("&") if question_mark else ():
        name, _, content = pair.partition("=")
        value = os.fsdecode(unquote_to_bytes(content))
        if name == "token":
            raise InvalidArgument(
                "a token is never in an address, where logs and lists of processes would show it: give token=..., "
                "$HEADRACE_TOKEN, or a file with token_file"
            )
        if name not in ("tenant", "token_file", *TlsOptions._fields) or name in found or not value or "\0" in value:
            raise InvalidArgument(
                f"{shown_url(text)} is no address: its query names a tenant, `?tenant=NAME`, a token_file, and with "
                f"TLS {', '.join(TlsOptions._fields)}, each once, and no more"
            )
        found[name] = value
    tenant, token_file = found.pop("tenant", ""), found.pop("token_file", "")
    if "key" in found and "certificate" not in found:
        raise InvalidArgument(
            f"{shown_url(text)} is no address: its key is that of a certificate, which it does not name"
        )
    return checked_tenant(tenant) if tenant else "", token_file, TlsOptions(**found)


def place_of(target: Target) -> str:
    """Where a broker is, in one word."""
    return target.place if isinstance(target, Address) else "embedded"


def unreachable(target: Target, error: BaseException | str) -> str:
    """What to tell a user whose broker cannot be reached."""
    where = target.place if isinstance(target, Address) else "the broker in this process"
    hint = "; is it running? Start it with `headrace serve`" if isinstance(target, Address) else ""
    if isinstance(error, HeadraceError):
        hint = ""  # it says itself what to do
    elif isinstance(target, Address) and target.upgrades:
        command = f"headrace serve --http-address {target.authority}"
        hint = f"; is it running, and does it listen for HTTP? Start it with `{command}`"
    if isinstance(target, Address) and target.path and isinstance(error, PermissionError):
        hint = (
            "; this user has no permission for the socket, which is for the broker's user alone: run as that user, or "
            "use the broker's TCP address"
        )
    return f"cannot reach a broker at {where}: {error}{hint}"
