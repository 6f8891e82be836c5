"""Who is at the other end of a session."""

from typing import NamedTuple


class Identity(NamedTuple):
    """An authenticated name, and the tenant it belongs to (empty: it has none of its own, and may ask for any)."""

    name: str
    tenant: str = ""


ANONYMOUS = Identity("anonymous")
"""Whoever connects without authenticating."""
