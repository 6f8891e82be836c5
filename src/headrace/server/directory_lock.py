"""The lock on a data directory."""

import logging
import os
from typing import TYPE_CHECKING

from headrace.model.errors import DiskFull, LogInUse
from headrace.storage.ownership import LOCK_NAME

if TYPE_CHECKING:
    from headrace.storage.disk import Disk, OpenFile

logger = logging.getLogger("headrace.server")


class DirectoryLock:
    """Lets one server at a time work in a data directory; the others learn its process id."""

    def __init__(self, disk: "Disk", directory: str) -> None:
        from headrace.storage.disk import open_or_make

        disk.make_directory(directory, private=True)
        self._disk = disk
        path = os.path.join(directory, LOCK_NAME)
        self._file: OpenFile | None = open_or_make(disk, path)
        if not disk.lock(self._file):
            holder = disk.read(self._file, 0, 32).decode("ascii", "replace").strip()
            by = f"process {holder}" if holder.isdigit() else "another process"
            raise LogInUse(f"{directory} is in use by {by}", pid=int(holder) if holder.isdigit() else None)
        try:
            # In place, and no longer than the first time: that needs no room on a full disk.
            disk.write(self._file, 0, b"%-31d\n" % os.getpid())
        except DiskFull as error:
            logger.warning("process id not recorded  path=%s reason=%s", path, error)

    @staticmethod
    def is_held(disk: "Disk", directory: str) -> bool:
        """Whether a server works in a directory."""
        path = os.path.join(directory, LOCK_NAME)
        if not disk.exists(path):
            return False
        file = disk.open(path)
        free = disk.lock(file, shared=True)
        if free:
            disk.unlock(file)
        return not free

    def release(self) -> None:
        """Unlock the directory: closing the file is not enough, because a forked child may hold it too."""
        if self._file is not None:
            self._disk.unlock(self._file)
            self._file = None

    def disown(self) -> None:
        """In a forked child: drop the file, and leave the lock with the parent."""
        self._file = None
