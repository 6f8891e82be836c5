"""Ownership of logs: only the broker writes its logs, whether it runs or not."""

from headrace.model.errors import LogNotFound, LogOwned
from headrace.storage.disk import Disk
from headrace.storage.meta import read_meta
from headrace.storage.runtime import StorageRuntime

LOCK_NAME = "lock"
"""The file in a broker's data directory that a running broker keeps locked."""
_FOLDERS = ("topics", "broker")
"""The folders of a data directory that hold logs."""
_DEPTH_MAX = 4


def data_directory(disk: Disk, directory: str) -> str | None:
    """The data directory that a log lies in; None if it lies in none."""
    if _is_data_directory(disk, directory):
        return directory
    inner = directory
    for _ in range(_DEPTH_MAX):
        outer, _, name = inner.rpartition("/")
        if name in _FOLDERS and _is_data_directory(disk, outer):
            return outer
        inner = outer
    return None


def _is_data_directory(disk: Disk, directory: str) -> bool:
    return disk.exists(f"{directory}/{LOCK_NAME}") and disk.exists(f"{directory}/broker")


def is_owned(host: StorageRuntime, directory: str) -> bool:
    """Whether a log is a broker's: by its record, wherever it was copied to, or else by its path."""
    try:
        owned = bool(read_meta(host, directory).owner)
    except LogNotFound:
        owned = False
    return owned or data_directory(host.disk, directory) is not None


def check_not_owned(host: StorageRuntime, directory: str) -> None:
    """Raise LogOwned if a log is a broker's."""
    if is_owned(host, directory):
        raise LogOwned(
            f"{directory} is a log of a broker, and only the broker writes there; publish to its topic instead, or "
            "read it with readonly=True"
        )
