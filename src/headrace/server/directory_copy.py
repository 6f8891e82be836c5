"""Makes a copy of a data directory whole or not at all, whenever the process that makes it ends."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from headrace.model.errors import InvalidArgument, LogInUse
from headrace.server.directory_lock import DirectoryLock

if TYPE_CHECKING:
    from headrace.storage.disk import Disk

_CONTENT = "content"


class DirectoryCopy:
    """A copy that is being made of a data directory: fill `content`, then `finish`.

    It is made in a folder of the target. As long as that folder is there, nobody takes the target for a data directory.
    """

    def __init__(self, disk: "Disk", target: str) -> None:
        """Raises InvalidArgument if the target has more than what an earlier attempt left before it moved anything."""
        from headrace.engines.api import UNFINISHED

        self._disk = disk
        self._target = target
        self._unfinished = os.path.join(target, UNFINISHED)
        self.content = os.path.join(self._unfinished, _CONTENT)
        """The directory to fill."""
        self._was_there = self._checked()
        self._lock: DirectoryLock | None = None
        self._moved: list[str] = []
        """What was moved into the target so far."""

    def begin(self) -> None:
        """Make the folder, without what an earlier attempt left. Raises LogInUse while another process copies there."""
        self._disk.make_directory(self._target, private=True)
        self._lock = DirectoryLock(self._disk, self._unfinished)
        if os.path.isdir(self.content):
            self._disk.remove_directory(self.content)

    def finish(self) -> None:
        """Move the content, which is on the disk, into the target, the format file last; raises if that is missing."""
        from headrace.engines.api import FORMAT_NAME

        names = os.listdir(self.content)
        names.remove(FORMAT_NAME)
        for name in (*sorted(names), FORMAT_NAME):
            if name == FORMAT_NAME:
                self._disk.sync_directory(self._target)
            self._moved.append(os.path.join(self._target, name))
            self._disk.rename(os.path.join(self.content, name), self._moved[-1], sync=False)
        self._disk.sync_directory(self._target)
        self._release()
        self._disk.remove_directory(self._unfinished)

    def abandon(self) -> None:
        """Remove what was copied, the folder last; a target that was there is empty then, as it was."""
        for path in (*self._moved, self._unfinished):
            if os.path.isdir(path):
                shutil.rmtree(path, ignore_errors=True)
            elif os.path.lexists(path):
                os.unlink(path)
        self._release()
        if not self._was_there:
            os.rmdir(self._target)

    def _release(self) -> None:
        if self._lock is not None:
            self._lock.release()

    def _checked(self) -> bool:
        """Whether the target is there; raises if it has something that an earlier attempt did not begin with."""
        if not os.path.lexists(self._target):
            return False
        names = os.listdir(self._target) if os.path.isdir(self._target) else [""]
        name = os.path.basename(self._unfinished)
        if name in names and len(names) > 1:
            raise InvalidArgument(
                f"{self._target} has a copy of a cluster that was begun and not finished ({name}), and other files: "
                "remove the directory, or give one that is new"
            )
        if names and names != [name]:
            raise InvalidArgument(f"{self._target} exists and is not an empty directory; give one that is new")
        return True


@contextmanager
def whole_copy(disk: "Disk", target: str) -> Iterator[str]:
    """The directory to fill with a copy, which becomes the target's content if that raises nothing."""
    copy = DirectoryCopy(disk, target)
    try:
        copy.begin()
        yield copy.content
        copy.finish()
    except LogInUse:
        raise  # what is there is another process's
    except BaseException:
        with suppress(OSError):  # what made the copy fail matters more, and what is left is known to be unfinished
            copy.abandon()
        raise
