"""Starting a node: while its store may be starting, too, and while another process may have its name."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from headrace.cluster.node_record import STOPPED, NodeRecord
from headrace.cluster.retry_pause import RetryPause
from headrace.model.errors import LogInUse, StoreUnavailable

logger = logging.getLogger("headrace.cluster")

START_S = 30.0
"""How long a node waits for its store when it starts, before it ends with the error."""
_PAUSE_S = 1.0
_STALE_BEATS = 2.5
"""A record that does not change for so many heartbeats is that of a process which is gone."""
_LOOKS = 10

T = TypeVar("T")


async def until_answered(call: Callable[[], Awaitable[T]], patience_s: float) -> T:
    """Call something again for so many seconds while the store does not answer; raises StoreUnavailable then."""
    deadline = time.monotonic() + patience_s
    told = RetryPause(time.monotonic)
    while True:
        try:
            return await call()
        except StoreUnavailable as error:
            if time.monotonic() + _PAUSE_S > deadline:
                raise
            if told.is_news(error):
                logger.warning("store not reached at the start; trying again  reason=%s", error)
            await asyncio.sleep(_PAUSE_S)


async def wait_for_name(
    read: Callable[[], Awaitable[NodeRecord | None]], process_before: str, heartbeat_s: float
) -> NodeRecord | None:
    """Make sure that no live process has the name of the node that starts; raises LogInUse if one has.

    Returns the record that is to be replaced. `process_before` is the last process in the directory of the node: it
    has ended, so that nothing is waited for when a node is started again. Otherwise the record must not change for
    two heartbeats.
    """
    first = await read()
    if first is None or first.role == STOPPED or first.process == process_before:
        return first
    deadline = time.monotonic() + _STALE_BEATS * heartbeat_s
    while time.monotonic() < deadline:
        await asyncio.sleep(_STALE_BEATS * heartbeat_s / _LOOKS)
        found = await read()
        if found is None or found.role == STOPPED:
            return found
        if (found.process, found.beat) != (first.process, first.beat):
            where = f" at {found.addresses[0]}" if found.addresses else ""
            raise LogInUse(
                f"another process has the name {found.node} in the cluster, and is alive{where}: give this node "
                "another name with --node"
            )
    return first
