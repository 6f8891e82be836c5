"""Opaque tokens: `hr_<id>_<secret>`, of which only the SHA-256 of the secret is stored.

The secret has 256 random bits: nobody can try them all, so a fast hash is enough, and checking one is cheap.
"""

import hmac
import re
import secrets
from hashlib import sha256

from headrace.model.errors import NotAuthenticated, TokenExpired, TokenRevoked
from headrace.security.definitions import SecurityDefinitions, TokenDefinition

PREFIX = "hr_"
"""What every opaque token begins with, so that scanners of code recognise one."""
_ID_BYTES = 9
_SECRET_BYTES = 32
_TOKEN = re.compile(r"hr_([A-Za-z0-9]{12})_([A-Za-z0-9_-]{43})")
_NO_HASH = bytes(32)
_REFUSAL = "the token is not known to this broker: create one with `headrace auth token create`"


def new_token() -> tuple[str, str, bytes]:
    """Make a token: its id, the token itself, and the hash of its secret.

    >>> id, token, hash = new_token()
    >>> token.startswith(f"hr_{id}_"), len(hash)
    (True, 32)
    """
    token_id = secrets.token_hex(_ID_BYTES)[:12]
    secret = secrets.token_urlsafe(_SECRET_BYTES)
    return token_id, f"{PREFIX}{token_id}_{secret}", _hashed(secret)


def verified_token(definitions: SecurityDefinitions, token: str, now_us: int) -> tuple[str, TokenDefinition]:
    """The id and the definition of a token that is known and neither expired nor revoked; else an error.

    An unknown id takes the same comparison as a wrong secret, and gets the same answer.
    """
    match = _TOKEN.fullmatch(token)
    token_id, secret = match.groups() if match is not None else ("", "")
    known = definitions.tokens.get(token_id)
    same = hmac.compare_digest(_hashed(secret), _NO_HASH if known is None else known.hash)
    if known is None or not same:
        raise NotAuthenticated(_REFUSAL)
    check_usable(token_id, known, now_us)
    return token_id, known


def check_usable(token_id: str, token: TokenDefinition, now_us: int) -> None:
    """Refuse a token that was revoked or has expired."""
    if token.revoked_us:
        raise TokenRevoked(f"the token {token_id} of {token.identity} was revoked: ask an administrator for another")
    if 0 < token.expires_us <= now_us:
        raise TokenExpired(
            f"the token {token_id} of {token.identity} has expired: create another with `headrace auth token create`"
        )


def _hashed(secret: str) -> bytes:
    return sha256(secret.encode()).digest()
