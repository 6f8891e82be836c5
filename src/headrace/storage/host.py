"""What all logs of a process share: the disk, a bounded number of open files and mappings, and two threads."""

from typing import TYPE_CHECKING

from headrace.storage.disk import Disk, OpenFile
from headrace.storage.index import Index
from headrace.storage.pool import Pool
from headrace.storage.quickness import Quickness
from headrace.storage.worker import Worker

if TYPE_CHECKING:
    from headrace.storage.segment import FileSegment

FILES_MAX = 256
VIEWS_MAX = 64
INDEXES_MAX = 32


class Host:
    """The shared means of a process's logs; ten thousand logs need no more open files than one."""

    def __init__(
        self,
        disk: Disk | None = None,
        *,
        files_max: int = FILES_MAX,
        views_max: int = VIEWS_MAX,
        indexes_max: int = INDEXES_MAX,
        flusher: Worker | None = None,
        preparer: Worker | None = None,
    ) -> None:
        self.disk = disk or Disk()
        self.files: Pool[FileSegment, OpenFile] = Pool(files_max)
        self.views: Pool[FileSegment, memoryview] = Pool(views_max)
        self.indexes: Pool[FileSegment, Index] = Pool(indexes_max)
        self.flusher = flusher or Worker("headrace-flush")
        self.quickness = Quickness()
        self.preparer = preparer or Worker("headrace-prepare")

    def forget(self, segment: "FileSegment") -> None:
        """Let go of all that is open of a segment."""
        self.files.drop(segment)
        self.views.drop(segment)
        self.indexes.drop(segment)

    def close(self) -> None:
        """End the threads, once their jobs are done."""
        self.flusher.stop()
        self.preparer.stop()
