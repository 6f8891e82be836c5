"""Who a client is: the one function that every gateway asks before it opens a session."""

import asyncio
import socket
import ssl
import struct
from collections.abc import Callable
from typing import NamedTuple

from headrace.broker.pending_answer import PendingAnswer
from headrace.model.errors import NotAuthenticated, UnsupportedOperation
from headrace.model.identity import ANONYMOUS, Identity
from headrace.plugins import AUTHENTICATORS, make_plugin
from headrace.security.certificates import CertificateNames, certificate_names

ANONYMOUS_MECHANISM = "anonymous"
"""The mechanism of clients that give no credentials."""
CERTIFICATE_MECHANISM = "certificate"
"""The mechanism of clients without other credentials whose TLS certificate was accepted; its bytes are the DER form."""
BEARER_MECHANISM = "bearer"
"""The mechanism of clients that give a token."""
PEER_MECHANISM = "peer"
"""The mechanism of clients on a Unix socket whom the system vouches for."""
_MECHANISM_CHARS_MAX = 16
_PEER_CREDENTIALS = struct.Struct("3i")


class Peer(NamedTuple):
    """The other end of a connection."""

    gateway: str
    """The name of the gateway that the client came in through."""
    address: str = ""
    """Where the client is, as text; empty on a Unix socket and for a client in this process."""
    is_local: bool = False
    """Whether the client is on this machine."""
    certificate: CertificateNames | None = None
    """The names of the client's TLS certificate, which one of the CAs in tls_client_ca has signed."""
    certificate_expires_us: int = 0
    """When the certificate ends, and with it sessions that it authenticates; 0 without one."""
    user_id: int | None = None
    """The user that the client runs as, if the system tells: on a Unix socket, or in this process."""


Authenticate = Callable[[str, bytes, Peer], "Identity | PendingAnswer[Identity]"]
"""Takes the mechanism, the credentials and the peer; raises, or resolves with, an error for a client to refuse."""


class AnonymousAuthenticator:
    """An authenticator that checks nothing."""

    api = 1

    def __call__(self, mechanism: str, credentials: bytes, peer: Peer) -> Identity:
        """Let everybody in who gives no credentials."""
        return authenticate_anonymous(mechanism, credentials, peer)


def load_authenticator(name: str) -> Authenticate:
    """Make the authenticator of that name; raises PluginUnavailable if there is none, or it cannot be used."""
    made: Authenticate = make_plugin(AUTHENTICATORS, name, ("__call__",))
    return made


def transport_credentials(transport: asyncio.BaseTransport, peer: Peer) -> tuple[str, bytes, Peer]:
    """The mechanism and credentials of a client that gives none itself: its TLS certificate, if it has shown one.

    The peer has the names of the certificate then, also for clients that give other credentials; and the user of a
    client on a Unix socket.
    """
    peer = peer._replace(user_id=peer_user_id(transport))
    connection = transport.get_extra_info("ssl_object")
    encoded = None if connection is None else connection.getpeercert(binary_form=True)
    if encoded is None:
        return ANONYMOUS_MECHANISM, b"", peer
    decoded = connection.getpeercert()
    expires_us = ssl.cert_time_to_seconds(decoded["notAfter"]) * 1_000_000
    peer = peer._replace(certificate=certificate_names(decoded), certificate_expires_us=expires_us)
    return CERTIFICATE_MECHANISM, encoded, peer


def authenticate_anonymous(mechanism: str, credentials: bytes, peer: Peer) -> Identity:  # noqa: ARG001
    """Let everybody in as ANONYMOUS: this broker checks no credentials."""
    if mechanism not in (ANONYMOUS_MECHANISM, CERTIFICATE_MECHANISM):
        raise UnsupportedOperation(
            f"this broker cannot authenticate with {shown_mechanism(mechanism)}: connect without credentials"
        )
    return ANONYMOUS


def shown_mechanism(mechanism: str) -> str:
    """A mechanism in an error; what cannot be the name of one may be a token, which the client gave without a scheme.

    >>> shown_mechanism("basic"), shown_mechanism("hr_0123_secret")
    ("the mechanism 'basic'", 'that mechanism')
    """
    is_name = mechanism.isascii() and mechanism.isalpha() and len(mechanism) <= _MECHANISM_CHARS_MAX
    return f"the mechanism {mechanism!r}" if is_name else "that mechanism"


def as_not_authenticated(error: Exception) -> NotAuthenticated:
    """An authenticator's error as one that says that the client is not authenticated."""
    return error if isinstance(error, NotAuthenticated) else NotAuthenticated(str(error))


def peer_user_id(transport: asyncio.BaseTransport) -> int | None:
    """The user that the other end of a Unix socket runs as; None of any other connection, or where nobody tells."""
    connected = transport.get_extra_info("socket")
    if connected is None or connected.family != socket.AF_UNIX or not hasattr(socket, "SO_PEERCRED"):
        return None
    _, user_id, _ = _PEER_CREDENTIALS.unpack(
        connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER_CREDENTIALS.size)
    )
    return int(user_id)
