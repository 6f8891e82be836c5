"""Where a broker's logs are: partitions and journals by name, below one directory or all in memory."""

from contextlib import suppress
from copy import copy

from headrace.engines.journal import Journal
from headrace.engines.partition import Partition
from headrace.engines.producers import Producers, saved_offset
from headrace.model.errors import HeadraceError, LogFailed, LogNotFound
from headrace.model.topic import Storage, TopicSettings
from headrace.storage.disk import Disk
from headrace.storage.driver import FileDriver, StoredLog
from headrace.storage.host import Host
from headrace.storage.memory import MemoryLog
from headrace.storage.record import Record
from headrace.storage.settings import DEFAULT_SETTINGS, LogSettings

_PARTS = 8
"""Retention removes whole segments: a log of fewer would be trimmed coarsely."""
_JOURNAL_SETTINGS = LogSettings(segment_bytes=4 << 20)
_STAGING_SETTINGS = LogSettings(segment_bytes=256 << 20)
_MEMORY_JOURNAL_BYTES = 1 << 30
_SECOND_US = 1_000_000


class Store:
    """Opens a broker's logs. Without a directory all of them are in memory."""

    def __init__(self, host: Host, directory: str | None) -> None:
        self._host = host
        self.directory = directory
        self._partitions = FileDriver(host, f"{directory}/topics", owned=True) if directory else None
        self._own = FileDriver(host, f"{directory}/broker", owned=True) if directory else None
        if directory:
            for name in ("topics", "broker"):
                host.disk.make_directory(f"{directory}/{name}")
            # Always: whoever made them may have been killed before their names were on the disk.
            host.disk.sync_directory(directory)

    @property
    def boot_id(self) -> bytes:
        """Another one after each start of the machine, which loses what was not synced; empty: nobody knows."""
        return self._host.disk.boot_id()

    def open_partition(self, name: str, settings: TopicSettings, saved: bytes | None, floor: int = 0) -> Partition:
        """A topic's partition, with what was saved of its producers; no new message has an offset below the floor."""
        if saved is not None:
            floor = max(floor, saved_offset(saved))
        try:
            return Partition(self._open(name, settings, floor), saved)
        except OSError as error:
            raise explained(error) from error

    def open_journal(self, name: str) -> Journal:
        """A journal of the broker's own."""
        return Journal(self._open_own(name, _JOURNAL_SETTINGS))

    def open_counter(self, name: str) -> "Counter":
        """A number of the broker's own that can be replaced on a full disk."""
        return Counter(self._host.disk, f"{self.directory}/broker/{name}" if self.directory else None)

    def open_staging(self, name: str) -> Partition:
        """A log of the broker's own, for messages on their way."""
        log = self._open_own(name, _STAGING_SETTINGS)
        return Partition(log, Producers().save(log.next_offset))  # nobody's: there is nothing to look for in the log

    def partition_names(self) -> list[str]:
        """The partitions there are on the disk."""
        return self._partitions.names() if self._partitions else []

    def delete_partition(self, name: str) -> None:
        """Remove a partition that is closed, if it is on the disk. Takes a while; on any thread."""
        if self._partitions is not None:
            with suppress(LogNotFound):
                self._partitions.delete(name)

    def close(self) -> None:
        """End the threads that sync."""
        self._host.close()

    def _open(self, name: str, settings: TopicSettings, floor: int) -> StoredLog:
        if self._partitions is None or settings.storage is Storage.MEMORY:
            return MemoryLog(settings.memory_bytes, first_offset=floor)
        log = self._partitions.open(name, log_settings(settings), floor)
        if log.segments and log.segments[-1].checkpoint != log.segments[-1].end:
            # A crash left it: the names of its files may not be on the disk yet, which closing sees to.
            survived_offset = log.survived_offset
            log.close()
            log = self._partitions.open(name, log_settings(settings))
            log.survived_offset = survived_offset
        return log if settings.storage is Storage.DISK else MemoryLog(settings.memory_bytes, log)

    def _open_own(self, name: str, settings: LogSettings) -> StoredLog:
        return self._own.open(name, settings) if self._own is not None else MemoryLog(_MEMORY_JOURNAL_BYTES)


class Counter:
    """A number in a file whose room is taken when it is first stored; without a path, in memory."""

    def __init__(self, disk: Disk, path: str | None) -> None:
        self._disk = disk
        self._record = Record(disk, path, write=True, create=True) if path else None
        self._number: int | None = None

    def load(self) -> int | None:
        """What was stored last, if anything was."""
        content = self._record.load() if self._record is not None else None
        return int.from_bytes(content, "little") if content is not None else self._number

    def store(self, number: int) -> None:
        """Replace the number, durably."""
        self._number = number
        if self._record is not None:
            is_new = self._record.load() is None
            self._record.store(number.to_bytes(8, "little"))
            if is_new:
                self._disk.sync_directory(self._record.file.path.rpartition("/")[0])


def explained(error: OSError) -> HeadraceError:
    """What the disk says, as an error of ours; some are that already, and are copied, for none is its own cause."""
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
    )
