"""Detects a client that has closed its connection while reading is paused."""

import asyncio
import select

_GONE = getattr(select, "POLLRDHUP", 0) | select.POLLHUP | select.POLLERR


def hung_up(transport: asyncio.Transport) -> bool:
    """Whether the client has closed the connection; some systems report only a broken one."""
    poll = select.poll()
    poll.register(transport.get_extra_info("socket").fileno(), _GONE)
    return bool(poll.poll(0))
