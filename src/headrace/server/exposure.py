"""Addresses that a network can reach: served only with security, or with the setting `insecure`."""

import logging
from collections.abc import Iterable, Sequence
from ipaddress import ip_address
from urllib.parse import urlsplit

from headrace.gateways.addresses import ListenAddress
from headrace.model.errors import SecurityRequired

logger = logging.getLogger("headrace.server")


def is_exposed(address: ListenAddress) -> bool:
    """Whether others than programs on this machine can reach an address."""
    if address.path and not address.host:
        return False  # a Unix socket
    return _is_of_network(address.host)


def _is_of_network(host: str) -> bool:
    host = host.partition("%")[0]
    if host.lower() == "localhost":
        return False
    try:
        return not ip_address(host).is_loopback
    except ValueError:
        return True  # a name, which may mean any address


def check_exposed(exposed: Sequence[ListenAddress], *, enabled: bool, insecure: bool) -> None:
    """Refuse to listen where a network reaches a broker without security, unless that is said to be intended."""
    if not exposed or enabled:
        return
    if insecure:
        warn_exposed(exposed)
        return
    raise SecurityRequired(
        f"cannot listen on {exposed[0]}: everybody who reaches that address could do everything, as security is not "
        "enabled. Start the broker without that address, run `headrace auth init` on this machine, and start it again; "
        "or give --insecure"
    )


def check_disabling(exposed: Sequence[ListenAddress], nodes: Iterable[str], *, insecure: bool) -> None:
    """Refuse to disable security while a network reaches the broker, unless that is said to be intended.

    `nodes` are the URLs of all nodes of its cluster: those that a network reaches could not take over any more.
    """
    if insecure:
        return
    reached = [*map(str, exposed), *(url for url in nodes if _is_of_network(urlsplit(url).hostname or ""))]
    if reached:
        raise SecurityRequired(
            f"security cannot be disabled while the broker, or a node of its cluster, listens on {reached[0]}: "
            "everybody who reaches that address could do everything. Start it again on its machine's own addresses "
            "only, or all nodes with --insecure; then disable security"
        )


def warn_exposed(exposed: Sequence[ListenAddress]) -> None:
    """Tell loudly that everybody in the network can do everything."""
    for address in exposed:
        logger.warning(
            "INSECURE: everybody who reaches this address can do everything; run `headrace auth init`  address=%s",
            address,
        )
