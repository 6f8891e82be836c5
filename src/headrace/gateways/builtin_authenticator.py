"""The authenticator of the base install: opaque tokens, the local user, and whoever gives no credentials."""

import os
from collections.abc import Callable, Sequence

from headrace.broker.pending_answer import PendingAnswer
from headrace.gateways.authentication import (
    ANONYMOUS_MECHANISM,
    BEARER_MECHANISM,
    CERTIFICATE_MECHANISM,
    PEER_MECHANISM,
    Peer,
    shown_mechanism,
)
from headrace.model.errors import InvalidArgument, NotAuthenticated
from headrace.model.identity import ANONYMOUS, LOCAL, Identity
from headrace.security.certificates import DEFAULT_NAME_RULES, identity_name
from headrace.security.definitions import DefinitionsStore, SecurityDefinitions, checked_identity
from headrace.security.tokens import PREFIX, verified_token

_ROOT = 0

VerifyJwt = Callable[[bytes, Peer], "Identity | PendingAnswer[Identity]"]
"""Takes a JWT and the peer; raises, or resolves with, NotAuthenticated for one that is not accepted."""


class BuiltinAuthenticator:
    """Says who a client is by the security definitions of the broker that it is attached to.

    - `bearer`: an opaque token `hr_...`; anything else goes to the verifier of JWTs, if there is one.
    - `certificate`: the name in a TLS certificate of the client.
    - `peer`, or no credentials: on a Unix socket, or in the broker's process, the broker's user and root are the
      administrator `local`, so that nobody is locked out.
    - no credentials elsewhere: anonymous, who may do nothing once security is enabled unless a role is bound to that.
    """

    api = 1

    def __init__(self) -> None:
        self._definitions: DefinitionsStore | None = None
        self._now_us: Callable[[], int] = int
        self._certificate_rules: Sequence[str] = DEFAULT_NAME_RULES
        self.verify_jwt: VerifyJwt | None = None
        """Verifies bearer tokens that are not opaque."""

    def attach(
        self,
        definitions: DefinitionsStore,
        now_us: Callable[[], int],
        certificate_rules: Sequence[str] = DEFAULT_NAME_RULES,
    ) -> None:
        """Use the definitions of a broker and its clock; the rules say where a certificate has the identity's name."""
        self._definitions, self._now_us = definitions, now_us
        self._certificate_rules = certificate_rules

    def __call__(self, mechanism: str, credentials: bytes, peer: Peer) -> "Identity | PendingAnswer[Identity]":
        """Say who a client is."""
        if mechanism == BEARER_MECHANISM:
            return self._bearer(credentials, peer)
        if mechanism == CERTIFICATE_MECHANISM:
            return self._certificate(peer)
        if mechanism == PEER_MECHANISM and not is_owner(peer):
            raise NotAuthenticated(
                "only the broker's user and root are known by their Unix socket: connect with a token instead"
            )
        if mechanism in (PEER_MECHANISM, ANONYMOUS_MECHANISM):
            return LOCAL if is_owner(peer) else ANONYMOUS
        raise NotAuthenticated(f"this broker does not know {shown_mechanism(mechanism)}: use a token (bearer)")

    def _bearer(self, credentials: bytes, peer: Peer) -> "Identity | PendingAnswer[Identity]":
        try:
            text = credentials.decode("ascii")
        except UnicodeDecodeError:
            text = ""
        if self.verify_jwt is not None and not text.startswith(PREFIX):
            return self.verify_jwt(credentials, peer)
        token_id, token = verified_token(self._document(), text, self._now_us())
        return Identity(token.identity, token.tenant, token_id=token_id, expires_us=token.expires_us)

    def _certificate(self, peer: Peer) -> Identity:
        """The identity that the names of a certificate tell, which a CA of the broker's choice has signed."""
        name = "" if peer.certificate is None else identity_name(peer.certificate, self._certificate_rules)
        try:
            return Identity(checked_identity(name), expires_us=peer.certificate_expires_us)
        except InvalidArgument as error:
            raise NotAuthenticated(
                "the client's certificate names no identity: give it a URI headrace:NAME, or a common name, without "
                "spaces, '*' and '?', or see the setting tls_client_names"
            ) from error

    def _document(self) -> SecurityDefinitions:
        return SecurityDefinitions() if self._definitions is None else self._definitions.load()


def is_owner(peer: Peer) -> bool:
    """Whether the system says that the client is run by the broker's user, or by root."""
    return peer.user_id is not None and peer.user_id in (os.geteuid(), _ROOT)
