"""What is done to a broker's data directory from outside: checked, repaired, brought over from an earlier format."""

import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from headrace.broker.repair import CheckedLog as CheckedLog
from headrace.broker.repair import Repaired as Repaired
from headrace.broker.repair import Verified as Verified
from headrace.broker.repair import repair, verify
from headrace.broker.upgrade import Upgraded as Upgraded
from headrace.broker.upgrade import upgrade
from headrace.engines.api import DataDirectory
from headrace.model.errors import LogInUse
from headrace.server import DirectoryLock
from headrace.storage.disk import Disk, OpenFile, PrivateDisk
from headrace.storage.follower import LIVE
from headrace.storage.ownership import data_directory
from headrace.storage.recovery import segment_bases
from headrace.storage.runtime import StorageRuntime


def verify_data(path: str, progress: Callable[[int], None]) -> Verified:
    """Check a whole data directory, changing nothing; a broker may be at work in it. Progress is told in bytes."""
    host = StorageRuntime()
    try:
        return verify(DataDirectory(host, path), progress, running=DirectoryLock.is_held(host.disk, path))
    finally:
        host.close()


def repair_data(path: str, progress: Callable[[int], None]) -> Repaired:
    """Make a data directory usable again that a broker refuses; none may be at work in it."""
    with _locked_data(path) as data:
        return repair(data, secrets.token_hex(8), time.time_ns() // 1000, progress)


def upgrade_data(path: str, progress: Callable[[int], None]) -> Upgraded:
    """Bring a data directory, or a log without a broker, over from an earlier format; nobody may be at work in it."""
    host = StorageRuntime()
    if segment_bases(host, path) and data_directory(host.disk, path) is None:
        return _upgrade_lone_log(host, path, progress)
    host.close()
    with _locked_data(path) as data:
        return upgrade(data, progress)


def _upgrade_lone_log(host: StorageRuntime, path: str, progress: Callable[[int], None]) -> Upgraded:
    locked = _locked_log(host.disk, path)
    try:
        segments = DataDirectory(host, path).upgrade_log(path, progress)
        return Upgraded.of_log(path, segments)
    finally:
        if locked is not None:
            host.disk.unlock(locked)
        host.close()


def _locked_log(disk: Disk, path: str) -> OpenFile | None:
    """The file that a writer of a log keeps locked; None when the log never had a writer of its own."""
    live = f"{path}/{LIVE}"
    if not disk.exists(live):
        return None
    file = disk.open(live, write=True)
    if not disk.lock(file):
        raise LogInUse(f"{path} is in use by another process")
    return file


@contextmanager
def _locked_data(path: str) -> Iterator[DataDirectory]:
    """A data directory in which nobody else works meanwhile."""
    host = StorageRuntime(PrivateDisk())
    data = DataDirectory(host, path)
    data.check_used()  # before a lock is made there
    lock = DirectoryLock(host.disk, path)
    try:
        yield data
    finally:
        lock.release()
        host.close()


def data_bytes(path: str) -> int:
    """How large the logs of a data directory are, about: what verifying or repairing it has to look at."""
    return DataDirectory(StorageRuntime(), path).size_bytes()
