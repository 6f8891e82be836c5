"""Names in certificates: who a client with a certificate is, and which names a server's certificate is for."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

IDENTITY_URI = "headrace:"
"""A URI among the names of a client's certificate that begins like this tells the client's identity."""
NAME_RULES = ("uri", "common_name", "dns", "email")
"""Where the name of an identity may come from; a setting lists those to try, in order."""
DEFAULT_NAME_RULES = ("uri", "common_name")


class CertificateNames(NamedTuple):
    """The names that a certificate is for."""

    common_name: str = ""
    uris: tuple[str, ...] = ()
    dns: tuple[str, ...] = ()
    addresses: tuple[str, ...] = ()
    """IP addresses."""
    emails: tuple[str, ...] = ()


def certificate_names(decoded: Mapping[str, Any]) -> CertificateNames:
    """The names of a certificate, in the form that `ssl.SSLSocket.getpeercert` returns.

    >>> certificate_names({"subject": ((("commonName", "ann"),),), "subjectAltName": (("URI", "headrace:ann"),)})
    CertificateNames(common_name='ann', uris=('headrace:ann',), dns=(), addresses=(), emails=())
    """
    subject = [pair for group in decoded.get("subject", ()) for pair in group]
    others = decoded.get("subjectAltName", ())
    return CertificateNames(
        next((text for kind, text in subject if kind == "commonName"), ""),
        _of_kind(others, "URI"),
        _of_kind(others, "DNS"),
        _of_kind(others, "IP Address"),
        _of_kind(others, "email"),
    )


def identity_name(names: CertificateNames, rules: Sequence[str] = DEFAULT_NAME_RULES) -> str:
    """The name of the identity that a client's certificate stands for: that of the first rule that finds one.

    `uri` is the first URI `headrace:NAME`, `common_name` that of the subject, `dns` and `email` the first of their
    kind. Empty if the certificate has none of them.

    >>> identity_name(CertificateNames("ann", uris=("spiffe://x", "headrace:billing")))
    'billing'
    >>> identity_name(CertificateNames("ann", uris=("spiffe://x",)))
    'ann'
    >>> identity_name(CertificateNames("ann"), ["email"])
    ''
    """
    found = {
        "uri": next((uri.removeprefix(IDENTITY_URI) for uri in names.uris if uri.startswith(IDENTITY_URI)), ""),
        "common_name": names.common_name,
        "dns": next(iter(names.dns), ""),
        "email": next(iter(names.emails), ""),
    }
    return next((found[rule] for rule in rules if found[rule]), "")


def is_named(names: CertificateNames, host: str) -> bool:
    """Whether a certificate is for the name of a host; `*` stands for one label, at the left.

    >>> is_named(CertificateNames(dns=("*.example.org",)), "Broker.Example.org")
    True
    >>> is_named(CertificateNames(dns=("*.example.org",)), "a.b.example.org")
    False
    """
    host = host.lower().rstrip(".")
    wildcard = f"*.{host.partition('.')[2]}"
    return any(name.lower() in (host, wildcard) for name in names.dns)


def _of_kind(names: Iterable[tuple[str, str]], kind: str) -> tuple[str, ...]:
    return tuple(text for each, text in names if each == kind)
