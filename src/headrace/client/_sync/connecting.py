"""Connecting to a broker: what a program calls to get a bus."""

from collections.abc import Callable

from headrace.client._sync.bus import Bus
from headrace.client.connection.addresses import Nearby, default_address, parse_address, with_tls
from headrace.client.connection.identity import checked_client_tenant
from headrace.client.connection.tls_options import GivenPath, tls_options
from headrace.client.connection.token_source import token_source


def connect(
    address: str | None = None,
    *,
    name: str = "",
    timeout: float = 30.0,
    wait: float = 0.0,
    tenant: str = "",
    ca: GivenPath = None,
    certificate: GivenPath = None,
    key: GivenPath = None,
    server_name: str | None = None,
    token: str | None = None,
    token_file: GivenPath = None,
) -> Bus:
    """Connect to a broker.

    Parameters:
        address: `headrace://host:port`, `http://host:port/prefix` or `headrace+unix:///path/to/socket`, with TLS
            `headraces://` or `https://`, perhaps with `?tenant=NAME`; by default $HEADRACE_URL, or else
            `headrace://127.0.0.1:7390`. Of a cluster, the hosts of some or all nodes: `headrace://a:7390,b:7390`.
        name: what this program calls itself in the broker's lists and logs; by default host, process and a number.
        timeout: how many seconds a request may take, reconnecting and repeating included.
        wait: for how many seconds to keep trying if the broker cannot be reached yet. While no node of a cluster
            serves, 0 means `timeout`.
        tenant: whose topics, groups and schedules names mean; by default the address's, or else `default`.
        ca: with TLS, the file of the CAs to trust; by default $HEADRACE_CA, or else those of the system.
        certificate: with TLS, the file of this client's certificate; by default $HEADRACE_CERTIFICATE, or else none.
        key: the file of its private key; by default $HEADRACE_KEY, or else that of the certificate.
        server_name: with TLS, the name that the broker's certificate must have; by default the host of the address.
        token: the token to authenticate with; by default $HEADRACE_TOKEN. It is never in the address.
        token_file: the file that the token is read from, for every new connection; by default the address's, or else
            $HEADRACE_TOKEN_FILE.
    """
    target = parse_address(default_address() if address is None else address)
    target = with_tls(target, tls_options(ca, certificate, key, server_name))
    given = token_source(token, token_file, target.token_file)
    bus = Bus(target, name, timeout, None, checked_client_tenant(tenant) or target.tenant, given)
    bus._connect(wait)
    return bus


def attach(
    broker: Nearby, close: Callable[[], None], *, name: str = "", timeout: float = 30.0, tenant: str = ""
) -> Bus:
    """Connect to a broker in this process, which is closed with the bus."""
    bus = Bus(broker, name, timeout, close, checked_client_tenant(tenant))
    bus._connect()
    return bus
