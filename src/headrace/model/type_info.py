"""Builds what msgspec knows about the fields of types when modules are imported, which one thread does."""

from typing import Any

import msgspec


def build_type_info(*types: Any) -> None:
    """Let these types be converted and decoded by any thread, also in a forked child.

    msgspec builds what it needs at the first use, and publishes that before it is whole. Another thread that uses the
    type meanwhile, or the child of a fork in between, would end with a segmentation fault.
    """
    for one in types:
        msgspec.msgpack.Decoder(one)
