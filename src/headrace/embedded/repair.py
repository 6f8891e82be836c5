"""Making a damaged log whole again."""

import os

from headrace.embedded import shared
from headrace.model.errors import LogInUse, LogNotFound
from headrace.storage.beacon import Beacon
from headrace.storage.disk import OpenFile
from headrace.storage.follower import LIVE
from headrace.storage.host import Host
from headrace.storage.log import FileLog
from headrace.storage.recovery import Findings


def repair(path: str | os.PathLike[str]) -> Findings:
    """Look at every byte of a log that nobody writes, set damage aside and make the log whole again."""
    host = shared.host()
    directory = os.path.abspath(os.fspath(path))
    live = lock_file(host, directory, create=False)
    if not host.disk.lock(live):
        raise LogInUse(f"{directory} is open for writing elsewhere; close it there first")
    log = FileLog(host, directory, create=False, repair=True)
    beacon = Beacon(host.disk, live, write=True)
    beacon.begin(log.first_offset, log.next_offset)
    log.close()
    beacon.close()
    return log.findings


def lock_file(host: Host, directory: str, *, create: bool) -> OpenFile:
    """The file of a log that its writer locks, made if need be."""
    disk = host.disk
    path = f"{directory}/{LIVE}"
    if create:
        disk.make_directory(directory)
    elif not disk.exists(directory) or not disk.names(directory):
        raise LogNotFound(f"there is no log in {directory}")
    try:
        return disk.open(path, write=True)
    except LogNotFound:
        return disk.open(path, create=True)
