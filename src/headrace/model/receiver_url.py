"""The URL of a receiver, to which the broker sends messages over HTTP: its rules and its parts."""

import re
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address, ip_address
from urllib.parse import SplitResult, quote, urlsplit

from headrace.model.arguments import shown
from headrace.model.errors import InvalidArgument

URL_CHARACTERS_MAX = 2048
_NAME = re.compile(r"(?=.{1,253}\Z)[a-z0-9_]([a-z0-9_-]*[a-z0-9_])?(\.[a-z0-9_]([a-z0-9_-]*[a-z0-9_])?)*")
_UNSAFE = re.compile(r"[\x00-\x20\x7f-\xa0\\\u2028\u2029\ufeff]")
_PRINTABLE = "".join(map(chr, range(0x21, 0x7F)))
_DEFAULT_PORTS = {"http": 80, "https": 443}


@dataclass(frozen=True)
class ReceiverUrl:
    """The parts of a receiver's URL, as they are sent."""

    scheme: str
    """http or https."""
    host: str
    """A name in ASCII and lower case, or an address; one of IPv6 has no brackets."""
    port: int
    target: str
    """The path and the query, in ASCII."""

    @property
    def address(self) -> IPv4Address | IPv6Address | None:
        """The address, if the host is one. Spellings such as 0x7f.1 are names: the system's resolver reads them."""
        try:
            return ip_address(self.host)
        except ValueError:
            return None

    @property
    def authority(self) -> str:
        """The host and the port, as the header Host has them."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == _DEFAULT_PORTS[self.scheme] else f"{host}:{self.port}"

    @property
    def text(self) -> str:
        """The URL in its normal form."""
        return f"{self.scheme}://{self.authority}{self.target}"


def parse_receiver_url(url: str) -> ReceiverUrl:
    """Check a receiver's URL; returns its parts. An error says what is wrong with it."""
    if len(url) > URL_CHARACTERS_MAX:
        raise InvalidArgument(f"the URL of a receiver has {URL_CHARACTERS_MAX} characters at most, not {len(url)}")
    if found := _UNSAFE.search(url):
        raise InvalidArgument(
            f"the URL of a receiver has the character U+{ord(found[0]):04X} at position {found.start()}; "
            "leave it out, or write it as %XX"
        )
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise InvalidArgument(f"{shown(url)} is no URL: {error}") from error
    if parts.scheme not in _DEFAULT_PORTS:
        raise InvalidArgument(f"the URL of a receiver begins with http:// or https://, and {shown(url)} does not")
    if "@" in parts.netloc:
        raise InvalidArgument("the URL of a receiver has no user and no password; send credentials in a header")
    if parts.fragment:
        raise InvalidArgument("the URL of a receiver has no fragment, which is never sent; leave out # and the rest")
    if port == 0:
        raise InvalidArgument("the port of a receiver is 1 to 65535, not 0")
    target = quote(parts.path or "/", safe=_PRINTABLE)
    if parts.query:
        target += "?" + quote(parts.query, safe=_PRINTABLE)
    return ReceiverUrl(parts.scheme, _host(parts, url), port or _DEFAULT_PORTS[parts.scheme], target)


def _host(parts: SplitResult, url: str) -> str:
    host = parts.hostname or ""
    if "[" in parts.netloc or "]" in parts.netloc:
        try:
            if "%" in host:
                raise ValueError("it has a zone")
            return str(IPv6Address(host))
        except ValueError as error:
            raise InvalidArgument(f"[{host}] is no address of IPv6: {error}") from error
    host = (host if host.isascii() else _as_ascii(host)).removesuffix(".")
    if not _NAME.fullmatch(host):
        raise InvalidArgument(f"the URL of a receiver is http://HOST:PORT/PATH, and {shown(url)} has no usable host")
    return host


def _as_ascii(host: str) -> str:
    """An international name in the form that DNS has (IDNA 2008 with the mapping of UTS 46)."""
    try:
        import idna
    except ImportError as error:
        raise InvalidArgument(
            f"the host {shown(host)} has other characters than ASCII; write it as xn--…, or install headrace[http]"
        ) from error
    try:
        return idna.encode(host, uts46=True).decode("ascii").lower()
    except idna.IDNAError as error:
        raise InvalidArgument(f"{shown(host)} is no international name: {error}") from error
