"""A log that another process writes: read from its files; the writer's beacon announces new messages."""

from collections.abc import Sequence

from headrace.model.errors import LogNotFound
from headrace.storage.beacon import Beacon
from headrace.storage.meta import read_meta
from headrace.storage.offline_reader import OfflineLogReader
from headrace.storage.runtime import StorageRuntime
from headrace.storage.segment import FileSegment

LIVE = "live"


class Follower(OfflineLogReader):
    """A log opened for reading only; a writer in another process may come and go."""

    def __init__(self, host: StorageRuntime, directory: str) -> None:
        try:
            self.beacon = Beacon(host.disk, host.disk.open(f"{directory}/{LIVE}"), write=False)
            self._begin(host, directory)
        except LogNotFound as error:
            raise LogNotFound(f"there is no log in {directory}") from error
        self._changes = self._cuts = -1
        session = self.beacon.session  # read before the lock is tried: a writer may come right after that
        if self.writer_at_work:
            self._left_by: int | None = None
            self._end = 0
        else:
            # The beacon may be older or newer than the files, so the ends are read from the files; and only now, as a
            # writer may have truncated the log and left since it was opened here.
            self._left_by = session
            self._first_offset = read_meta(host, directory).first_offset
            self._end = self._find_end()

    @property
    def first_offset(self) -> int:
        """The oldest offset that can be read."""
        return self._first_offset if self._left_by == self.beacon.session else self.beacon.first_offset

    @property
    def next_offset(self) -> int:
        """The offset that the next message will have."""
        return self._end if self._left_by == self.beacon.session else self.beacon.next_offset

    @property
    def writer_at_work(self) -> bool:
        """Whether a process has the log open for writing."""
        live = self.host.disk.open(f"{self.directory}/{LIVE}")
        free = self.host.disk.lock(live, shared=True)
        if free:
            self.host.disk.unlock(live)
        return not free

    @property
    def segments(self) -> Sequence[FileSegment]:
        """The segments now, oldest first."""
        return self._layout()

    def _layout(self) -> Sequence[FileSegment]:
        # Again if the files changed meanwhile: the listed segments may all be gone, and new ones be there.
        while self.beacon.changes != self._changes:
            with self._lock:
                self._reload()
        return self._segments

    def _reload(self) -> None:
        changes, cuts = self.beacon.changes, self.beacon.cuts
        known = {segment.base_offset: segment for segment in self._segments} if cuts == self._cuts else {}
        self._replace(self._opened(known))
        self._changes, self._cuts = changes, cuts
