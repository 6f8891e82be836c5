"""Ballast: a file whose only use is to be deleted when the disk is full, so that removing messages has space."""

import threading
from collections.abc import Callable
from random import Random

from headrace.model.errors import DiskFailed, DiskFull
from headrace.storage.disk import Disk

BALLAST_BYTES = 1 << 20


class Ballast:
    """The ballast of a data directory. Removing messages first writes a few bytes, for which it makes space."""

    def __init__(self, disk: Disk, path: str | None) -> None:
        """Ballast at a path; without a path there is never any."""
        self._disk = disk
        self._path = path
        self._lock = threading.Lock()
        self._there: bool | None = None
        """Unknown before the first look."""
        self.dropped = False
        """Whether it was deleted and not written again yet: the space it left is for work that frees more."""

    def use(self, work: Callable[[], object]) -> None:
        """Run work that frees space; if the disk is full, drop the ballast and run it once more."""
        try:
            work()
        except DiskFull:
            if not self.drop():
                raise
            work()

    def drop(self) -> bool:
        """Delete the ballast; returns whether there was any."""
        with self._lock:
            if self._path is None or self._there is False or not self._disk.exists(self._path):
                return False
            self._disk.remove(self._path)
            self._there, self.dropped = False, True
            return True

    def restore(self) -> None:
        """Write the ballast, or raise DiskFull; slow, and allowed on any thread."""
        with self._lock:
            if self._path is None or self._there:
                return
            if not self._is_whole(self._path):
                self._disk.remove(self._path, sync=False)
                self._write(self._path)
            self._there, self.dropped = True, False

    def _is_whole(self, path: str) -> bool:
        return self._disk.exists(path) and self._disk.size(self._disk.open(path)) == BALLAST_BYTES

    def _write(self, path: str) -> None:
        file = self._disk.open(path, create=True)
        try:
            # Not zeros, for which some file systems allocate no blocks.
            self._disk.write(file, 0, Random(0).randbytes(BALLAST_BYTES))
        except (DiskFull, DiskFailed):
            self._disk.remove(path, sync=False)
            raise
