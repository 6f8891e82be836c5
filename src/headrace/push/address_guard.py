"""Decides to which addresses the broker may connect when a user gives it a URL."""

from collections.abc import Iterable
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_network

from headrace.model.errors import AddressRefused, InvalidArgument
from headrace.model.receiver_url import ReceiverUrl

Address = IPv4Address | IPv6Address
Network = IPv4Network | IPv6Network

LOOPBACK = "loopback"
"""Instead of a network: this machine itself."""
_LOOPBACK_NETWORKS = ("127.0.0.0/8", "::1/128")

# By the IANA registries of special-purpose addresses, as of 2026. The module ipaddress of older Pythons misses some.
_REFUSED: list[tuple[Network, str]] = [
    (ip_network(network), what)
    for network, what in (
        ("0.0.0.0/8", "this host"),
        ("10.0.0.0/8", "private"),
        ("100.64.0.0/10", "shared by the customers of a provider"),
        ("127.0.0.0/8", "loopback"),
        ("169.254.0.0/16", "link-local, where clouds have their metadata"),
        ("172.16.0.0/12", "private"),
        ("192.0.0.0/24", "reserved for protocols"),
        ("192.0.2.0/24", "for documentation"),
        ("192.31.196.0/24", "reserved for protocols"),
        ("192.52.193.0/24", "reserved for protocols"),
        ("192.88.99.0/24", "a relay of 6to4"),
        ("192.168.0.0/16", "private"),
        ("192.175.48.0/24", "reserved for protocols"),
        ("198.18.0.0/15", "for benchmarks"),
        ("198.51.100.0/24", "for documentation"),
        ("203.0.113.0/24", "for documentation"),
        ("168.63.129.16/32", "the platform of a cloud"),
        ("224.0.0.0/4", "multicast"),
        ("240.0.0.0/4", "reserved"),
        ("::/128", "this host"),
        ("::1/128", "loopback"),
        ("fc00::/7", "private"),
        ("fe80::/10", "link-local"),
        ("fec0::/10", "private"),
        ("ff00::/8", "multicast"),
        ("2001::/32", "a tunnel of Teredo"),
        ("2001::/23", "reserved for protocols"),
        ("2001:db8::/32", "for documentation"),
        ("2002::/16", "a tunnel of 6to4"),
        ("2620:4f:8000::/48", "reserved for protocols"),
        ("3fff::/20", "for documentation"),
    )
]
_GLOBAL_UNICAST = IPv6Network("2000::/3")
"""All addresses of IPv6 that are assigned to anybody are here."""
_NAT64 = IPv6Network("64:ff9b::/96")
_WELL_KNOWN_PORTS = frozenset({80, 443})
_SYSTEM_PORTS_END = 1024


class AddressGuard:
    """Refuses addresses that are not of the public internet, but for the networks that the operator allows.

    A name says nothing: the guard is asked about the address that a name was resolved to, by the code that connects to
    exactly that address. In networks that the operator allows, every port is allowed; elsewhere those of HTTP, and the
    ones from 1024 on, because ports below are other protocols'.
    """

    def __init__(self, allowed: Iterable[str] = ()) -> None:
        """Allow these networks, in CIDR notation, besides the public internet; `loopback` is this machine."""
        self._allowed = parse_networks(allowed)

    def check_url(self, url: ReceiverUrl) -> None:
        """Refuse a URL whose host is an address that is refused. Names are checked when they are resolved."""
        if (address := url.address) is not None:
            self.check(address, url.port, url.host)

    def check(self, address: Address, port: int, host: str) -> None:
        """Refuse to connect to an address to which the host of a URL was resolved."""
        plain = _embedded(address)
        if any(plain in network for network in self._allowed):
            return
        if (reason := _refusal(plain)) is not None:
            named = f"{host} is" if host == str(address) else f"{host} resolves to {address}, which is"
            raise AddressRefused(
                f"{named} {reason}; give a receiver on the public internet, or allow its network in the broker's "
                "setting webhook_networks",
                host=host,
                address=str(address),
            )
        if port < _SYSTEM_PORTS_END and port not in _WELL_KNOWN_PORTS:
            raise AddressRefused(
                f"port {port} of {host} is another protocol's; give a receiver on port 80, 443, or 1024 and above, or "
                "allow its network in the broker's setting webhook_networks",
                host=host,
                address=str(address),
                port=port,
            )


def parse_networks(networks: Iterable[str]) -> list[Network]:
    """The networks of the setting `webhook_networks`; an error names the one that is wrong."""
    parsed: list[Network] = []
    for network in networks:
        try:
            if "%" in network:
                raise ValueError("it has a zone")
            parsed += [ip_network(each) for each in (_LOOPBACK_NETWORKS if network == LOOPBACK else (network,))]
        except ValueError as error:
            raise InvalidArgument(
                f"webhook_networks are like 10.1.0.0/16 or fd00::/8, or the word loopback, not {network!r}: {error}"
            ) from error
    return parsed


def _embedded(address: Address) -> Address:
    """The address of IPv4 that one of IPv6 stands for, if it is mapped or translated (NAT64); else the address."""
    if isinstance(address, IPv6Address):
        if address.ipv4_mapped is not None:
            return address.ipv4_mapped
        if address in _NAT64:
            return IPv4Address(int(address) & 0xFFFF_FFFF)
    return address


def _refusal(address: Address) -> str | None:
    """Why no user may have the broker connect to an address; None if any may."""
    if isinstance(address, IPv6Address) and address.scope_id is not None:
        return "of one network interface"
    for network, what in _REFUSED:
        if address in network:
            return what
    if isinstance(address, IPv6Address) and address not in _GLOBAL_UNICAST:
        return "not global"
    return None
