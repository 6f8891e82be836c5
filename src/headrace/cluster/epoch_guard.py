"""The guard of an owner's epoch: gives up writing when the store has not confirmed it for too long."""

import threading
from collections.abc import Callable

from headrace.cluster.claims import UNCONFIRMED_US
from headrace.model.errors import StoreUnavailable
from headrace.storage.replicated.writer import WalWriter

_LOOK_S = 0.25


class EpochGuard:
    """A thread that abandons the writer of an epoch that was not confirmed in time.

    The event loop decides the same and steps down. But it may itself be waiting for the store, such as in a sync while
    the broker opens or closes a log; what is abandoned wakes it.
    """

    def __init__(self, writer: WalWriter, confirmed_us: int, now_us: Callable[[], int]) -> None:
        """`confirmed_us` is when the claim began, by the clock `now_us`."""
        self._writer = writer
        self._confirmed_us = confirmed_us
        self._now_us = now_us
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._run, name="headrace-epoch-guard", daemon=True)
        self._thread.start()

    def confirm(self, began_us: int) -> None:
        """A round of the heartbeat that began at this time has confirmed the epoch; any thread may call it."""
        self._confirmed_us = max(self._confirmed_us, began_us)

    @property
    def confirmed_us(self) -> int:
        """When the last round began that confirmed the epoch."""
        return self._confirmed_us

    def stop(self) -> None:
        """End, without waiting."""
        self._ends.set()

    def _run(self) -> None:
        while not self._ends.wait(_LOOK_S):
            if self._now_us() - self._confirmed_us >= UNCONFIRMED_US:
                self._writer.abandon(
                    StoreUnavailable(f"the shared store has not confirmed the epoch for {UNCONFIRMED_US // 10**6} s")
                )
                return
