"""Files that the broker or a repair has moved out of use; nothing ever deletes them."""

import logging
from typing import NamedTuple

from headrace.storage.disk import Disk

logger = logging.getLogger("headrace.storage")

SET_ASIDE = "set-aside"
_COPY_BYTES = 1 << 20
_REASON_BYTES_MAX = 4096


class SetAside(NamedTuple):
    """A file or directory that was set aside."""

    path: str
    reason: str


class SetAsideFiles:
    """The folder `set-aside` of a data directory: each entry has a file beside it with the reason."""

    def __init__(self, disk: Disk, data_path: str) -> None:
        self._disk = disk
        self._data_path = data_path
        self._path = f"{data_path}/{SET_ASIDE}"

    def move(self, path: str, reason: str) -> str:
        """Move a file or directory there; returns its new path."""
        target = self._free_path(path)
        self._write_reason(target, reason)
        self._disk.rename(path, target)
        self._disk.sync_directory(path.rpartition("/")[0])
        logger.warning("set aside: %s", reason, extra={"path": path, "moved_to": target})
        return target

    def copy(self, path: str, reason: str) -> str:
        """Copy a directory there, whole or not at all; returns the path of the copy."""
        target = self._free_path(path)
        if self._disk.exists(f"{target}.tmp"):
            self._disk.remove_directory(f"{target}.tmp")  # left by a process that was killed while it copied
        self._copy_files(path, f"{target}.tmp")
        self._write_reason(target, reason)
        self._disk.rename(f"{target}.tmp", target)
        return target

    def entries(self) -> list[SetAside]:
        """All that was set aside so far, with the reasons."""
        found = []
        for name in self._disk.names(self._path):
            if not name.endswith((".reason", ".tmp")):
                note = f"{self._path}/{name}.reason"
                reason = (
                    self._disk.read(self._disk.open(note), 0, _REASON_BYTES_MAX) if self._disk.exists(note) else b""
                )
                found.append(SetAside(f"{self._path}/{name}", reason.decode("utf-8", "replace")))
        return found

    def _free_path(self, path: str) -> str:
        """A path that is not in use: named after the path below the data directory, with a number."""
        self._disk.make_directory(self._path, private=True)
        name = path.removeprefix(f"{self._data_path}/").replace("/", "-")
        number = 1
        while self._disk.exists(f"{self._path}/{name}.{number}"):
            number += 1
        return f"{self._path}/{name}.{number}"

    def _write_reason(self, target: str, reason: str) -> None:
        self._disk.remove(f"{target}.reason")
        file = self._disk.open(f"{target}.reason", create=True)
        self._disk.write(file, 0, reason.encode()[:_REASON_BYTES_MAX])
        self._disk.sync(file)

    def _copy_files(self, source: str, target: str) -> None:
        self._disk.make_directory(target)
        for name in self._disk.names(source):
            if self._disk.is_directory(f"{source}/{name}"):
                self._copy_files(f"{source}/{name}", f"{target}/{name}")
                continue
            original, copy = self._disk.open(f"{source}/{name}"), self._disk.open(f"{target}/{name}", create=True)
            position = 0
            while chunk := self._disk.read(original, position, _COPY_BYTES):
                self._disk.write(copy, position, chunk)
                position += len(chunk)
            self._disk.sync(copy)
        self._disk.sync_directory(target)
