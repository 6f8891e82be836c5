"""Brings the data directory of an earlier Headrace over, while no broker works in it."""

from collections.abc import Callable

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


def upgrade_data(path: str, progress: Callable[[int], None]) -> Upgraded:
    """Bring a data directory, or a log without a broker, over from an earlier format; nobody may be at work in it."""
    host = StorageRuntime()
    if segment_bases(host, path) and data_directory(host.disk, path) is None:
        return _upgrade_lone_log(host, path, progress)
    host.close()
    host = StorageRuntime(PrivateDisk())
    data = DataDirectory(host, path)
    data.check_used()  # before a lock is made there
    data.known_format()
    lock = DirectoryLock(host.disk, path)
    try:
        return upgrade(data, progress)
    finally:
        lock.release()
        host.close()


def _upgrade_lone_log(host: StorageRuntime, path: str, progress: Callable[[int], None]) -> Upgraded:
    locked = _locked_log(host.disk, path)
    try:
        return Upgraded.of_log(path, DataDirectory(host, path).upgrade_log(path, progress))
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
