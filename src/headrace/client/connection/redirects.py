"""Which of the URLs that a cluster tells a client are followed: those that fit, and are as secure as the user's own.

The rule. An address with TLS, or a Unix socket, is *private*: nobody on the network reads what is sent. From a private
address the client follows private ones only, that is, those with TLS; from one without TLS it follows both. There is
one exception: from a Unix socket a client that has no token also follows an address without TLS, as the command line
does on a machine whose broker belongs to a cluster without security. Hence a token, which the client sends to every
node that it dials, never goes over a less secure connection than the one that the user chose, and neither does a
message. The options of TLS are the user's for every node: the same CAs, the same certificate, the same `server_name`.
"""

from collections.abc import Iterable
from ipaddress import ip_address
from urllib.parse import urlsplit

from headrace.client.connection.addresses import HOSTS_MAX, SCHEMES, Address, parse_address
from headrace.client.connection.tls_options import TlsOptions, tls_options_of_environment
from headrace.model.errors import InvalidArgument
from headrace.wire.native import UPGRADE_PATH

URLS_MAX = 4 * HOSTS_MAX
"""How many URLs of a list are looked at: as many nodes as may be, each with an address of every scheme."""
_URL_CHARS_MAX = 1024


def fitting_addresses(given: Address, urls: object, *, has_token: bool) -> list[Address]:
    """The addresses among URLs that a client of the given address can dial, in their order; at most 64.

    Those with the scheme of the given address are preferred: only if there are none, those that are equally secure,
    and then those that are more secure. What is no address of a broker is ignored.

    >>> urls = ["headrace://b:7390", "headraces://b:7393", "http://b:7391"]
    >>> [str(each) for each in fitting_addresses(parse_address("headraces://a?ca=ca.pem"), urls, has_token=True)]
    ['headraces://b:7393?ca=ca.pem']
    """
    best: dict[int, dict[Address, None]] = {}
    for address in _addresses(urls):
        rank = _rank(given, address, has_token)
        if rank is not None:
            best.setdefault(rank, {})[_with_options_of(given, address)] = None
    return list(best[min(best)])[:HOSTS_MAX] if best else []


def redirect_url(location: str) -> str | None:
    """The URL of the node that the header `Location` of an answer to the upgrade names; None if it names none.

    >>> redirect_url("http://b:7391/headrace/v1/native")
    'http://b:7391/headrace'
    """
    url = location.removesuffix(UPGRADE_PATH)
    return url if url.startswith(("http://", "https://")) else None


def _addresses(urls: object) -> Iterable[Address]:
    for url in urls[:URLS_MAX] if isinstance(urls, list | tuple) else ():
        if not isinstance(url, str) or len(url) > _URL_CHARS_MAX or "?" in url:
            continue
        try:
            address = parse_address(url)
            if urlsplit(url).port is not None and not address.others and not _is_unspecified(address.host):
                yield address
        except (InvalidArgument, ValueError):
            continue


def _is_unspecified(host: str) -> bool:
    """Whether it is the address of no host, such as 0.0.0.0, on which a node can listen but not be reached."""
    try:
        return ip_address(host.partition("%")[0]).is_unspecified
    except ValueError:
        return False


def _rank(given: Address, address: Address, has_token: bool) -> int | None:
    """How well an address fits, 0 best; None if it is not followed."""
    if address.path:
        return None
    if given.path:
        return 0 if address.has_tls else None if has_token else 1
    if given.has_tls and not address.has_tls:
        return None
    if address.scheme == given.scheme:
        return 0
    return 1 if address.has_tls == given.has_tls else 2


def _with_options_of(given: Address, address: Address) -> Address:
    tls = TlsOptions()
    if address.has_tls:
        tls = given.tls if given.has_tls else tls_options_of_environment()
    return address._replace(tenant=given.tenant, token_file=given.token_file, tls=tls)


def security_of(address: Address) -> str:
    """What an error says about the security that a redirect must have."""
    return "TLS" if address.has_tls or address.path else f"one of {', '.join(f'{name}://' for name in SCHEMES)}"
