"""Keeps a follower's copy of the shard up to date, and makes it anew when it is in doubt."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from typing import Protocol, TypeVar

from headrace.cluster.node_record import BLOCKED, FOLLOWING, RESTORING
from headrace.cluster.peers import wait_for_event
from headrace.cluster.retry_pause import RetryPause
from headrace.cluster.shards import DISK_FAULTS, IN_DOUBT, STORE_FAULTS, ShardReplica
from headrace.model.errors import HeadraceError, StoreUnavailable

logger = logging.getLogger("headrace.cluster")

T = TypeVar("T")

_POLL_OBJECTS = 64
"""A follower applies so many objects before it looks whether something else is to be done."""
_POLL_S = 0.5
"""How often a follower looks for objects that nobody told it of."""
_RETRY_S_MIN, _RETRY_S = 0.05, 0.5
"""How soon a request that the store did not answer is repeated; the pause doubles up to the latter."""
_DISK_RETRY_S_MAX = 30.0


class Blocking(Protocol):
    """Runs a call on the thread that alone touches the copy."""

    def __call__(self, call: Callable[[], T], /) -> Awaitable[T]:
        """Run it after all that was given before."""


class CopyKeeper:
    """Restores the copy and applies what is committed, on the event loop of its node."""

    def __init__(self, replica: ShardReplica, blocking: Blocking, set_role: Callable[[str], None]) -> None:
        """`set_role` tells whether the copy is being restored, or whole."""
        self._replica = replica
        self._blocking = blocking
        self._set_role = set_role
        self.more = asyncio.Event()
        """Set when there may be something to apply."""
        self.lags = True
        """Whether the last look at the log ended before the end of the log."""
        self._pause = RetryPause(time.monotonic)
        self._retry_s, self._disk_s = _RETRY_S_MIN, _RETRY_S
        self._doubts = 0

    async def run(self) -> None:
        """Restore the copy if need be, and apply what is committed, until it is cancelled."""
        while True:
            try:
                if not self._replica.is_restored:
                    await self._restore()
                applied = await self._blocking(partial(self._replica.poll, _POLL_OBJECTS))
            except StoreUnavailable as error:
                logger.debug("store not reached by the follower; trying again  reason=%s", error)
                await asyncio.sleep(self._retry_s)
                self._retry_s = min(2 * self._retry_s, _RETRY_S)
                continue
            except STORE_FAULTS as error:
                await self._wait_blocked(error)
                continue
            except IN_DOUBT as error:
                await self.wait_in_doubt(error)
                continue
            except DISK_FAULTS as error:
                self._disk_s = min(2 * self._disk_s, _DISK_RETRY_S_MAX)
                logger.warning("disk failed; restoring the copy again in %g s  reason=%s", self._disk_s, error)
                self._set_role(RESTORING)
                await self._blocking(self._replica.drop)
                await asyncio.sleep(self._disk_s)
                continue
            self._note_success()
            self._set_role(FOLLOWING)
            self.lags = applied >= _POLL_OBJECTS
            if not self.lags:
                self.more.clear()
                await wait_for_event(self.more, _POLL_S)

    def _note_success(self) -> None:
        """The copy is as far as the store's log."""
        if self._replica.problem:
            self._replica.problem = ""
            logger.info("copy goes on  position=%s", self._replica.position)
        self._retry_s, self._disk_s, self._doubts = _RETRY_S_MIN, _RETRY_S, 0
        self._pause.reset()

    async def _wait_blocked(self, error: HeadraceError) -> None:
        """The store lacks something, or has it damaged: wait, and look whether a later checkpoint leads past it."""
        self.block(error)
        with suppress(StoreUnavailable, *STORE_FAULTS):
            await self._blocking(self._replica.drop_if_passed)
        await asyncio.sleep(self._pause.failed())

    def block(self, error: HeadraceError) -> None:
        """Claim nothing with this copy, and say why."""
        self._replica.problem = f"the store lacks what the copy needs, or has it damaged: {error}"
        self._set_role(BLOCKED)
        if self._pause.is_news(error):
            logger.error("copy blocked by a fault of the store; trying again  reason=%s", error)

    async def wait_in_doubt(self, error: Exception) -> None:
        """Have the copy compared with the checkpoint next: at once, and after a pause if that did not help."""
        if self._pause.is_news(error):
            logger.warning("copy in doubt; comparing it with the checkpoint  reason=%s", error)
        await self._blocking(self._replica.drop)
        self._doubts += 1
        if self._doubts > 1:
            await asyncio.sleep(self._pause.failed())

    async def _restore(self) -> None:
        self.lags = True
        self._set_role(RESTORING)
        began = time.monotonic()
        await self._blocking(self._replica.restore)
        took_s = time.monotonic() - began
        logger.info("restored  position=%s seconds=%.3f", self._replica.position, took_s)
