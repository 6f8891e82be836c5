"""Who a client is: the one function that every gateway asks before it opens a session."""

from collections.abc import Callable
from typing import NamedTuple

from headrace.broker.pending_answer import PendingAnswer
from headrace.model.errors import UnsupportedOperation
from headrace.model.identity import ANONYMOUS, Identity
from headrace.plugins import AUTHENTICATORS, make_plugin

ANONYMOUS_MECHANISM = "anonymous"
"""The mechanism of clients that give no credentials."""


class Peer(NamedTuple):
    """The other end of a connection."""

    gateway: str
    """The name of the gateway that the client came in through."""
    address: str = ""
    """Where the client is, as text; empty on a Unix socket and for a client in this process."""
    is_local: bool = False
    """Whether the client is on this machine."""


Authenticate = Callable[[str, bytes, Peer], "Identity | PendingAnswer[Identity]"]
"""Takes the mechanism, the credentials and the peer; raises, or resolves with, an error for a client to refuse."""


class AnonymousAuthenticator:
    """The authenticator that is used when no other is named."""

    api = 1

    def __call__(self, mechanism: str, credentials: bytes, peer: Peer) -> Identity:
        """Let everybody in who gives no credentials."""
        return authenticate_anonymous(mechanism, credentials, peer)


def load_authenticator(name: str) -> Authenticate:
    """Make the authenticator of that name; raises PluginUnavailable if there is none, or it cannot be used."""
    made: Authenticate = make_plugin(AUTHENTICATORS, name, ("__call__",))
    return made


def authenticate_anonymous(mechanism: str, credentials: bytes, peer: Peer) -> Identity:  # noqa: ARG001
    """Let everybody in as ANONYMOUS: this broker checks no credentials."""
    if mechanism != ANONYMOUS_MECHANISM:
        raise UnsupportedOperation(
            f"this broker cannot authenticate with {mechanism!r}: connect without credentials", mechanism=mechanism
        )
    return ANONYMOUS
