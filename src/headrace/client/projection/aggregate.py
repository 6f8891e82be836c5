"""An aggregate: the state of one key."""

from typing import Any

import msgspec


class Aggregate(msgspec.Struct, frozen=True):
    """The state of one key, and how many events it is made of."""

    key: bytes | str
    state: Any
    version: int
    """How many events it has: the version of the next one."""
