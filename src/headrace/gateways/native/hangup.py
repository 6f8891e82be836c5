"""Noticing that a client is gone while nothing is read from its connection."""

import asyncio
import select

_GONE = getattr(select, "POLLRDHUP", 0) | select.POLLHUP | select.POLLERR


def hung_up(transport: asyncio.Transport) -> bool:
    """Whether the other side has closed the connection; some systems tell only when it is broken."""
    poll = select.poll()
    poll.register(transport.get_extra_info("socket").fileno(), _GONE)
    return bool(poll.poll(0))
