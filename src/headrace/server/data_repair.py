"""Checking and repairing a data directory without a broker."""

import secrets
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from headrace.server.directory_lock import DirectoryLock

if TYPE_CHECKING:
    from headrace.broker.repair import Repaired, Verified


def verify_data(path: str, progress: Callable[[int], None]) -> "Verified":
    """Check a whole data directory and change nothing; a broker may work in it. `progress` gets the bytes checked."""
    from headrace.broker.repair import verify
    from headrace.engines.api import DataDirectory
    from headrace.storage.runtime import StorageRuntime

    host = StorageRuntime()
    try:
        return verify(DataDirectory(host, path), progress, running=DirectoryLock.is_held(host.disk, path))
    finally:
        host.close()


def repair_data(path: str, progress: Callable[[int], None]) -> "Repaired":
    """Repair a data directory that a broker refuses to open; no broker may work in it."""
    from headrace.broker.repair import repair
    from headrace.engines.api import DataDirectory
    from headrace.storage.disk import PrivateDisk
    from headrace.storage.runtime import StorageRuntime

    host = StorageRuntime(PrivateDisk())
    data = DataDirectory(host, path)
    data.check_used()  # before a lock is made there
    lock = DirectoryLock(host.disk, path)
    try:
        return repair(data, secrets.token_hex(8), time.time_ns() // 1000, progress)
    finally:
        lock.release()
        host.close()


def data_bytes(path: str) -> int:
    """Estimate the size of the logs in a data directory, which `verify_data` and `repair_data` read."""
    from headrace.engines.api import DataDirectory
    from headrace.storage.runtime import StorageRuntime

    return DataDirectory(StorageRuntime(), path).size_bytes()
