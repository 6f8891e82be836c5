"""The options of the source and the sink for connections with TLS and with a token."""

from collections.abc import Mapping

from headrace.client.connection.addresses import DEFAULT_ADDRESS, parse_address, with_options, with_token_file
from headrace.client.connection.tls_options import tls_options
from headrace.model.errors import InvalidArgument

TLS_NAMES = ("tls.ca", "tls.certificate", "tls.key", "tls.serverName")
"""Paths are those on the driver and on every executor."""
TOKEN_NAMES = ("token", "tokenFile")
"""Spark itself hides options of these names in plans and logs. The file is one on the driver and on every executor."""


def address_with_tls(plain: Mapping[str, str]) -> str:
    """The address that options name, by names in lower case, with the options of TLS; raises InvalidArgument.

    >>> address_with_tls({"address": "headraces://localhost", "tls.ca": "/etc/headrace/ca.pem"})
    'headraces://localhost:7390?ca=/etc/headrace/ca.pem'
    >>> address_with_tls({"address": "headraces://a,b:7400", "tls.ca": "/etc/headrace/ca.pem"})
    'headraces://a:7390,b:7400?ca=/etc/headrace/ca.pem'
    """
    text = plain.get("address", DEFAULT_ADDRESS)
    address = parse_address(text)
    ca, certificate, key, server_name = (plain.get(name.lower()) for name in TLS_NAMES)
    given = tls_options(ca, certificate, key, server_name)
    text = str(with_options(address, given.over(address.tls), address.place)) if given.given() else text
    return with_token_file(text, plain["tokenfile"]) if plain.get("tokenfile") else text


def given_token(plain: Mapping[str, str]) -> str:
    """The token among the options; empty if there is none."""
    token = plain.get("token", "")
    if token and plain.get("tokenfile"):
        raise InvalidArgument("give the option token or tokenFile, not both")
    return token
