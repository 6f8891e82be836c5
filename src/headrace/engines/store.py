"""Opens a broker's logs, partitions and journals by name, below one directory or all in memory."""

from copy import copy

from headrace.engines.ballast import Ballast
from headrace.engines.data_directory import OWN, TOPICS, DataDirectory
from headrace.engines.journal import Journal
from headrace.engines.partition import Partition
from headrace.engines.producers import Producers, saved_offset
from headrace.model.durability import Durability
from headrace.model.errors import CorruptFile, HeadraceError, LogFailed
from headrace.model.topic import Storage, TopicSettings
from headrace.storage.log import FileLog
from headrace.storage.memory import MemoryLog
from headrace.storage.owner import PartitionOwner
from headrace.storage.runtime import StorageRuntime
from headrace.storage.settings import DEFAULT_SETTINGS, LogSettings
from headrace.storage.stored_log import StoredLog
from headrace.storage.sync_counts import SyncCounts

_PARTS = 8
"""Segments per retention limit: retention removes whole segments, so fewer would make it coarse."""
_JOURNAL_SETTINGS = LogSettings(segment_bytes=4 << 20)
_STAGING_SETTINGS = LogSettings(segment_bytes=256 << 20)
_MEMORY_JOURNAL_BYTES = 1 << 30
_SECOND_US = 1_000_000


class Store:
    """Opens a broker's logs. Without a directory all of them are in memory."""

    def __init__(self, host: StorageRuntime, directory: str | None) -> None:
        self._host = host
        self.directory = directory
        self.data = DataDirectory(host, directory) if directory else None
        """The data directory, if there is one."""
        self.ballast = Ballast(host.disk, f"{directory}/{OWN}/ballast" if directory else None)

    @property
    def sync_counts(self) -> SyncCounts:
        """How much has been synced."""
        return self._host.sync_counts

    @property
    def is_replicated(self) -> bool:
        """Whether what is synced is in the shared store of a cluster."""
        return self.data is not None and self._host.disk.is_replicated

    @property
    def boot_id(self) -> bytes:
        """Differs after each start of the machine, which loses what was not synced; empty if that cannot be known."""
        return self._host.disk.boot_id()

    def open_partition(
        self,
        name: str,
        settings: TopicSettings,
        saved: bytes | None,
        floor: int = 0,
        owner: PartitionOwner | None = None,
    ) -> Partition:
        """A topic's partition, with the last checkpoint of its producers; the owner is stored in its files.

        No new message gets an offset below the floor.
        """
        known = 0 if saved is None else saved_offset(saved)
        try:
            return Partition(self._open(name, settings, max(floor, known), lost_floor(settings, saved), owner), saved)
        except OSError as error:
            raise as_headrace_error(error) from error

    def open_journal(self, name: str) -> Journal:
        """A journal of the broker's own."""
        try:
            return Journal(self._open_own(name, _JOURNAL_SETTINGS))
        except CorruptFile as error:
            assert self.data is not None  # what is in memory has no files
            raise self.data.damaged(f"the journal cannot be opened: {error}") from error

    def open_staging(self, name: str) -> Partition:
        """A log of the broker's own, for the messages of open transactions."""
        log = self._open_own(name, _STAGING_SETTINGS)
        return Partition(log, Producers().save(log.next_offset))  # no producers: there is nothing to read from the log

    def map_again(self) -> None:
        """Drop all mappings of files: one of them could not be read."""
        self._host.map_again()

    def close(self) -> None:
        """End the threads that sync."""
        self._host.close()

    def _open(
        self, name: str, settings: TopicSettings, floor: int, lost_floor: int, owner: PartitionOwner | None
    ) -> StoredLog:
        if self.data is None or settings.storage is Storage.MEMORY:
            drop_oldest = not settings.key_versions
            return MemoryLog(settings.memory_bytes, first_offset=floor, drop_oldest=drop_oldest)
        root = f"{self.directory}/{TOPICS}"
        if owner is not None:
            owner = self.data.checked_owner(f"{root}/{name}", owner)

        def opened() -> FileLog:
            encoded = None if owner is None else owner.encoded()
            path = f"{root}/{name}"
            return FileLog(
                self._host,
                path,
                log_settings(settings),
                owned=True,
                floor=floor,
                lost_floor=lost_floor,
                owner=encoded,
                root=root,
            )

        log = opened()
        if log.segments and log.segments[-1].checkpoint != log.segments[-1].end:
            # After a crash the names of its files may not be on the disk yet; closing syncs them.
            survived_offset = log.survived_offset
            log.close()
            log = opened()
            log.survived_offset = survived_offset
        return log if settings.storage is Storage.DISK else MemoryLog(settings.memory_bytes, log)

    def _open_own(self, name: str, settings: LogSettings) -> StoredLog:
        if self.directory is None:
            return MemoryLog(_MEMORY_JOURNAL_BYTES)
        return FileLog(self._host, f"{self.directory}/{OWN}/{name}", settings, owned=True)


def lost_floor(settings: TopicSettings, saved: bytes | None) -> int:
    """The offset below which all messages of a partition were synced, given the last checkpoint of its producers."""
    # A checkpoint is stored after what it covers was synced: in a synced topic those messages cannot be missing.
    return saved_offset(saved) if saved is not None and settings.durability >= Durability.SYNCED else 0


def as_headrace_error(error: OSError) -> HeadraceError:
    """An error of the disk as a HeadraceError; one that is that already is copied, as no error is its own cause."""
    return copy(error) if isinstance(error, HeadraceError) else LogFailed(f"the disk failed: {error}")


def log_settings(settings: TopicSettings) -> LogSettings:
    """How a topic's partitions use their files."""
    segment_bytes = settings.segment_bytes or DEFAULT_SETTINGS.segment_bytes
    if settings.segment_bytes is None and settings.retain_bytes is not None:
        segment_bytes = max(min(segment_bytes, settings.retain_bytes // _PARTS), 64 << 10)
    seconds = settings.segment_seconds
    age = settings.retain_seconds or settings.ttl_seconds
    if seconds is None and age is not None:
        seconds = age / _PARTS
    return LogSettings(
        segment_bytes=segment_bytes,
        segment_age_us=None if seconds is None else max(round(seconds * _SECOND_US), 1),
        memory_bytes=settings.memory_bytes,
        drop_oldest=not settings.key_versions,
    )
