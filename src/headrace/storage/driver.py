"""Where logs can live: in files, or in memory. The rest of Headrace knows no other storage words than these."""

import re
from collections.abc import Iterator
from typing import Protocol

from headrace.model.batch import Batch
from headrace.model.durability import Durability
from headrace.model.errors import InvalidArgument, LogNotFound
from headrace.storage.append_receipt import AppendReceipt
from headrace.storage.compaction import Keep
from headrace.storage.log import FileLog
from headrace.storage.memory import MemoryLog
from headrace.storage.meta import NAME as META_NAME
from headrace.storage.reader import ByteRange
from headrace.storage.runtime import StorageRuntime
from headrace.storage.settings import DEFAULT_SETTINGS, LogSettings

_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,199}")


class StoredLog(Protocol):
    """A log, wherever it lives. Every method means the same everywhere; see FileLog."""

    @property
    def first_offset(self) -> int: ...
    @property
    def next_offset(self) -> int: ...
    @property
    def synced_offset(self) -> int: ...
    @property
    def size_bytes(self) -> int: ...
    def append(self, batch: Batch, now_us: int, durability: Durability = ...) -> AppendReceipt: ...
    def wait_synced(self, offset: int, timeout_s: float | None = None) -> None: ...
    def batches(self, offset: int, *, until: int | None = None, skip_corrupt: bool = False) -> Iterator[Batch]: ...
    def byte_range(self, offset: int, bytes_max: int, until: int | None = None) -> ByteRange | None: ...
    def find_time(self, time_us: int) -> int: ...
    def truncate_before(self, offset: int) -> None: ...
    def truncate_after(self, offset: int) -> None: ...
    def retain(self, now_us: int, *, age_us: int | None = None, bytes_max: int | None = None) -> int: ...
    def compact(self, keep: Keep) -> int: ...
    def close(self) -> None: ...


class Driver(Protocol):
    """A place with named logs."""

    def open(self, name: str) -> StoredLog:
        """The log of that name, made if there is none."""

    def names(self) -> list[str]:
        """The logs there are."""

    def delete(self, name: str) -> None:
        """Remove a log that nobody has open."""


class FileDriver:
    """Logs in the directories below one."""

    def __init__(
        self, host: StorageRuntime, root: str, settings: LogSettings = DEFAULT_SETTINGS, *, owned: bool = False
    ) -> None:
        """Logs that are `owned` are a broker's: no embedded log writes there."""
        self._host = host
        self._owned = owned
        self._root = root.rstrip("/")
        self._settings = settings

    def open(self, name: str, settings: LogSettings | None = None, floor: int = 0) -> FileLog:
        """The log of that name, made if there is none; with settings of its own if they are given."""
        return FileLog(self._host, self._path(name), settings or self._settings, owned=self._owned, floor=floor)

    def names(self) -> list[str]:
        """The logs there are."""
        disk = self._host.disk
        return [name for name in disk.names(self._root) if disk.exists(f"{self._root}/{name}/{META_NAME}")]

    def delete(self, name: str) -> None:
        """Remove a log that nobody has open."""
        path = self._path(name)
        if not self._host.disk.exists(path):
            raise LogNotFound(f"there is no log {name}")
        self._host.disk.remove_directory(path)

    def _path(self, name: str) -> str:
        return f"{self._root}/{checked_name(name)}"


class MemoryDriver:
    """Logs in memory, each bounded; with a file driver, what leaves memory goes to disk and can still be read."""

    def __init__(self, bytes_max: int, spill: FileDriver | None = None) -> None:
        self._bytes_max = bytes_max
        self._spill = spill
        self._logs: dict[str, MemoryLog] = {}

    def open(self, name: str) -> MemoryLog:
        """The log of that name, made if there is none; it lasts until it is deleted."""
        if checked_name(name) not in self._logs:
            spill = self._spill.open(name) if self._spill is not None else None
            self._logs[name] = MemoryLog(self._bytes_max, spill)
        return self._logs[name]

    def names(self) -> list[str]:
        """The logs there are."""
        return sorted(self._logs)

    def delete(self, name: str) -> None:
        """Remove a log."""
        if name not in self._logs:
            raise LogNotFound(f"there is no log {name}")
        self._logs.pop(name).close()
        if self._spill is not None:
            self._spill.delete(name)


def checked_name(name: str) -> str:
    """The name, if it may be a log's or a cursor's."""
    if type(name) is not str or not _NAME.fullmatch(name):
        raise InvalidArgument(
            f"{name!r} cannot be a name: use 1 to 200 letters, digits, '_', '-' and '.', not beginning with '.'"
        )
    return name
