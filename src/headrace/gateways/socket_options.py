"""Options of the sockets of connections: how much the system buffers, and closing without what it has not sent."""

import asyncio
import socket
import struct
from contextlib import suppress

_AT_ONCE = struct.pack("ii", 1, 0)


def limit_unsent(transport: asyncio.BaseTransport, size_bytes: int) -> None:
    """Let the system keep about so many bytes that it has not sent, where it can be told."""
    if hasattr(socket, "TCP_NOTSENT_LOWAT"):
        _set(transport, socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, size_bytes)


def reset(transport: asyncio.WriteTransport) -> None:
    """Close a connection at once; what the client has not received is thrown away, by the system too."""
    _set(transport, socket.SOL_SOCKET, socket.SO_LINGER, _AT_ONCE)
    transport.abort()


def _set(transport: asyncio.BaseTransport, level: int, option: int, content: int | bytes) -> None:
    found = transport.get_extra_info("socket")
    if found is not None:
        with suppress(OSError):  # a socket of another family, or one that the client has closed
            found.setsockopt(level, option, content)
