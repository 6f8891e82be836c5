"""Who is at the other end of a session."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

NO_CLAIMS: Mapping[str, Any] = MappingProxyType({})


class Identity(NamedTuple):
    """An authenticated name, the tenant it belongs to, and how it was authenticated."""

    name: str
    tenant: str = ""
    """Empty: it has none of its own, and may ask for any."""
    claims: Mapping[str, Any] = NO_CLAIMS
    """Claims of a JWT, to which roles can be bound."""
    token_id: str = ""
    """The id of the opaque token that it was authenticated with."""
    expires_us: int = 0
    """When its sessions end; 0: never."""
    roles: tuple[str, ...] = ()
    """Roles that it has by the way it came in, without a binding."""


ANONYMOUS = Identity("anonymous")
"""Whoever connects without authenticating."""
LOCAL = Identity("local", roles=("administrator",))
"""The user that runs the broker, or root, on its Unix socket or in its process."""
RESERVED_NAMES = frozenset({ANONYMOUS.name, LOCAL.name})
"""Names that no token can have."""
