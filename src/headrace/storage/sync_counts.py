"""Counts syncs of logs, on whichever thread they run."""

import threading


class SyncCounts:
    """How many syncs there were, how long they took, and how much they wrote."""

    def __init__(self) -> None:
        self.count = 0
        self.seconds = 0.0
        self.size_bytes = 0
        self._lock = threading.Lock()

    def add(self, seconds: float, size_bytes: int) -> None:
        """Count a sync."""
        with self._lock:  # syncs run on the flusher thread, and inline on the broker's
            self.count += 1
            self.seconds += seconds
            self.size_bytes += size_bytes
