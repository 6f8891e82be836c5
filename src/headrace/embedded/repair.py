"""Repair of a damaged log."""

import os
import time
from collections.abc import Callable

from headrace.embedded import process_shared
from headrace.embedded.cursor import committed_end
from headrace.model.arguments import check_callable, shown
from headrace.model.errors import InvalidArgument, LogInUse, LogNotFound
from headrace.storage.beacon import Beacon
from headrace.storage.disk import OpenFile, open_or_make
from headrace.storage.follower import LIVE
from headrace.storage.log import FileLog
from headrace.storage.meta import NAME as META
from headrace.storage.ownership import LOCK_NAME, data_directory, is_owned
from headrace.storage.recovery import Findings, segment_bases
from headrace.storage.runtime import StorageRuntime

_LOCK_TRIES = 20
_LOCK_PAUSE_S = 0.005


def repair(path: str | os.PathLike[str], progress: Callable[[int], None] | None = None) -> Findings:
    """Check every byte of a log that nobody writes to, quarantine damage, and make the log consistent again.

    Parameters:
        path: the directory of the log.
        progress: called with the number of bytes that were checked.

    Returns:
        The findings: damaged ranges, and what was done.

    Raises:
        LogNotFound: if there is no log in the directory.
        LogInUse: if a process writes to the log, or a broker runs on it.

    Example:
        >>> with Log(directory) as log:
        ...     offset = log.append(b"a")
        >>> findings = headrace.repair(directory)
    """
    if progress is not None:
        check_callable(progress, "progress")
    host = process_shared.host()
    directory = os.path.abspath(checked_path(path))
    if is_owned(host, directory):
        return _repair_owned(host, directory, progress)
    live = locked(host, directory, create=False)
    try:
        floor = committed_end(host.disk, directory)
        log = FileLog(host, directory, create=False, repair=True, progress=progress, floor=floor)
        beacon = Beacon(host.disk, live, write=True)
    except BaseException:
        host.disk.unlock(live)
        raise
    try:
        beacon.begin(log.first_offset, log.next_offset)
        log.close()
    finally:
        beacon.close()
    return log.findings


def _repair_owned(host: StorageRuntime, directory: str, progress: Callable[[int], None] | None) -> Findings:
    """Repair a broker's log; the broker's lock shows that it is not running."""
    data = data_directory(host.disk, directory)
    lock = host.disk.open(f"{data}/{LOCK_NAME}", write=True) if data is not None else None
    if lock is not None and not host.disk.lock(lock):
        raise LogInUse(f"{directory} is a log of a running broker; stop the broker in {data} first")
    try:
        log = FileLog(host, directory, create=False, owned=True, repair=True, progress=progress)
        log.close()
    finally:
        if lock is not None:
            host.disk.unlock(lock)
    return log.findings


def checked_path(path: str | os.PathLike[str]) -> str:
    """Validate the path of a directory; returns it as text."""
    text: object = os.fspath(path) if isinstance(path, os.PathLike) else path
    if not isinstance(text, str) or not text or "\0" in text or not _can_be_encoded(text):
        raise InvalidArgument(f"a log's path is the name of a directory, as text, not {shown(path)}")
    return text


def _can_be_encoded(text: str) -> bool:
    """Return whether the text can be encoded as a file name; half of a surrogate pair cannot."""
    try:
        os.fsencode(text)
    except UnicodeError:
        return False
    return True


def locked(host: StorageRuntime, directory: str, *, create: bool) -> OpenFile:
    """Lock the writer's file of a log, which readers may hold briefly; creates it if it does not exist."""
    disk = host.disk
    if not create and not disk.exists(f"{directory}/{META}") and not segment_bases(host, directory):
        raise LogNotFound(f"there is no log in {directory}")
    disk.make_directory(directory)
    live = open_or_make(disk, f"{directory}/{LIVE}")
    for _ in range(_LOCK_TRIES):
        if disk.lock(live):
            return live
        time.sleep(_LOCK_PAUSE_S)
    raise LogInUse(f"{directory} is open for writing elsewhere; close it there, or open it with readonly=True")
