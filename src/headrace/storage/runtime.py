"""What all logs of a process share: the disk, a bounded number of open files and mappings, and two threads."""

import weakref
from typing import TYPE_CHECKING

from headrace.storage.disk import Disk, LocalDisk, OpenFile, after_fork
from headrace.storage.index import Index
from headrace.storage.inline_sync import InlineSyncPolicy
from headrace.storage.lookups import Lookups
from headrace.storage.pool import Pool
from headrace.storage.sync_counts import SyncCounts
from headrace.storage.worker import Worker

if TYPE_CHECKING:
    from headrace.storage.segment import FileSegment

FILES_MAX = 256
VIEWS_MAX = 64
INDEXES_MAX = 32
POSITIONS_MAX = 16 << 10
"""More than there are active readers; twice as many take 9 MB."""
SPANS_MAX = 1 << 10
_FILES_MIN = 8
_VIEWS_MIN = 4


def descriptor_shares(descriptors: int) -> tuple[int, int]:
    """How many files and mappings, each of which takes a descriptor, fit into half of the limit."""
    half = descriptors // 2
    return min(max(half * 4 // 5, _FILES_MIN), FILES_MAX), min(max(half // 5, _VIEWS_MIN), VIEWS_MAX)


class StorageRuntime:
    """The resources that logs share; ten thousand logs need no more open files than one."""

    def __init__(
        self,
        disk: Disk | None = None,
        *,
        files_max: int | None = None,
        views_max: int | None = None,
        indexes_max: int = INDEXES_MAX,
        flusher: Worker | None = None,
        preparer: Worker | None = None,
    ) -> None:
        """Use this disk, or the local one. By default the numbers of files and mappings fit the limit on open files."""
        self.disk = disk or LocalDisk()
        self.files_max, self.views_max = descriptor_shares(self.disk.descriptors_max())
        self.files_max = self.files_max if files_max is None else files_max
        self.views_max = self.views_max if views_max is None else views_max
        self.files: Pool[FileSegment, OpenFile] = Pool(self.files_max)
        self.views: Pool[FileSegment, memoryview] = Pool(self.views_max)
        self.indexes: Pool[FileSegment, Index] = Pool(indexes_max)
        self.lookups = Lookups(POSITIONS_MAX, SPANS_MAX)
        self.flusher = flusher or Worker("headrace-flush")
        self.inline_sync = InlineSyncPolicy()
        self.sync_counts = SyncCounts()
        self.preparer = preparer or Worker("headrace-prepare")
        # Weakly: the disk may outlive this, and a cycle would keep all open files until the garbage collector runs.
        close_some = weakref.WeakMethod(self._close_some)
        self.disk.close_some = lambda: (call := close_some()) is not None and call()
        _hosts.add(self)

    def forget(self, segment: "FileSegment") -> None:
        """Close all that is open of a segment."""
        self.files.drop(segment)
        self.views.drop(segment)
        self.indexes.drop(segment)

    def map_again(self) -> None:
        """Drop all mappings: a file may be shorter than it was when it was mapped."""
        self.views.clear()

    def close(self) -> None:
        """End the threads after their jobs."""
        self.flusher.stop()
        self.preparer.stop()

    def abandon(self) -> None:
        """In a forked child: start with files and threads of its own, as the parent's are shared or missing."""
        for pool in (self.files, self.views, self.indexes):
            pool.abandon()
        for worker in (self.flusher, self.preparer):
            worker.abandon()

    def _close_some(self) -> bool:
        """Close the less recently used files, as the process may open no more; returns whether there were any."""
        closed = self.files.evict_half()
        return self.views.evict_half() or closed


_hosts: weakref.WeakSet[StorageRuntime] = weakref.WeakSet()


def _abandon_all() -> None:
    for host in list(_hosts):
        host.abandon()


after_fork(_abandon_all)
