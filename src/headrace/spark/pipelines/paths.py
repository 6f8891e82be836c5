"""The files of a pipeline: checkpoints, log, record copy, and its driver's lock and status."""

import fcntl
import ipaddress
import os
import socket
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

from headrace.client.connection.addresses import parse_address
from headrace.model.errors import InvalidArgument
from headrace.model.requests import BrokerInfo
from headrace.spark.errors import PipelineInUse
from headrace.spark.pipelines.processes import start_mark
from headrace.spark.pipelines.records import PipelineRecord, decoded, encoded

PIPELINES = "pipelines"
_LOCK = "driver.lock"
_DRIVER = "driver.json"
_LOG = "log"
_RECORD = "record.json"
_SHARDS = "shards"
"""The folder of a node's directory that has the replicas."""
_LOOK_EVERY_S = 0.1


class DriverProcess(msgspec.Struct):
    """The driver's status file, which its process writes beside its lock."""

    pid: int
    started: str
    """Start time of the process, which distinguishes it from a later one with the same id."""
    begun_us: int
    phase: str = "starting"
    """`starting`, `running`, `stopping`; at last `finished`, `stopped` (by a signal) or `failed`."""
    error: str = ""
    permanent: bool = False
    """Whether a restart would fail again until somebody changes something."""
    queries: list[str] = []
    checkpoints: str = ""
    supervised: bool = False
    """Whether a supervisor has started it."""
    ui: str = ""
    """Address of Spark's web UI."""
    doing: str = ""
    """The current step of the start."""


_decoder = msgspec.json.Decoder(DriverProcess)


class Folder:
    """The directory of one pipeline."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)

    @property
    def log(self) -> Path:
        """The log of the driver and Spark."""
        return self.path / _LOG

    @property
    def checkpoints(self) -> Path:
        """The default directory of checkpoints."""
        return self.path / "checkpoints"

    def make(self) -> None:
        """Create the directory, if it does not exist."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InvalidArgument(f"cannot make {self.path}: {error.strerror}") from error

    def driver(self) -> DriverProcess | None:
        """Return the status of the last driver, or None."""
        try:
            return _decoder.decode((self.path / _DRIVER).read_bytes())
        except (OSError, msgspec.DecodeError):
            return None

    def write_driver(self, driver: DriverProcess) -> None:
        """Write a driver's status atomically."""
        new = self.path / f"{_DRIVER}.new"
        new.write_bytes(msgspec.json.encode(driver))
        new.replace(self.path / _DRIVER)

    def record(self) -> PipelineRecord | None:
        """Return the supervisor's copy of the pipeline's record, or None."""
        try:
            return decoded((self.path / _RECORD).read_bytes())
        except OSError:
            return None

    def write_record(self, record: PipelineRecord) -> None:
        """Write a copy of the pipeline's record, in case the broker loses it."""
        self.make()
        new = self.path / f"{_RECORD}.new"
        with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            file.write(encoded(record))
        new.replace(self.path / _RECORD)

    def forget_record(self) -> None:
        """Remove the copy of the record."""
        (self.path / _RECORD).unlink(missing_ok=True)

    def lock(self, wait: float = 0.0, check: Callable[[], None] = lambda: None) -> "Lock":
        """Take the driver's lock; raises PipelineInUse with the holder's process id."""
        self.make()
        end = time.monotonic() + wait
        while (lock := try_lock(self.path / _LOCK)) is None:
            if time.monotonic() >= end:
                driver = self.driver()
                who = f"It is process {driver.pid}." if driver is not None else f"See {self.path / _LOCK}."
                raise PipelineInUse(f"{PipelineInUse.__doc__} {who}")
            check()
            time.sleep(_LOOK_EVERY_S)
        return lock

    def locked(self) -> bool:
        """Return whether a driver, or a process that it has left behind, holds the lock."""
        return is_locked(self.path / _LOCK)

    def forget_driver(self) -> None:
        """Remove the status of the last driver."""
        (self.path / _DRIVER).unlink(missing_ok=True)


class Lock:
    """A file lock, held as long as any process has its file descriptor open."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        """Child processes that inherit it keep the lock held."""

    def release(self) -> None:
        """Release the lock in this process."""
        os.close(self.fd)


def try_lock(path: Path) -> Lock | None:
    """Take a lock; returns None if another process holds it."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        return None
    return Lock(fd)


def is_locked(path: Path) -> bool:
    """Return whether a process holds a lock; a lock of another user counts as held."""
    try:
        if not path.exists():
            return False
        lock = try_lock(path)
    except PermissionError:
        return True
    if lock is not None:
        lock.release()
    return lock is None


def this_driver() -> DriverProcess:
    """Return the status of this process as a driver."""
    return DriverProcess(os.getpid(), start_mark(os.getpid()) or "", time.time_ns() // 1000)


def home_of(info: BrokerInfo, address: str, environ: Mapping[str, str]) -> Path:
    """Return the directory of a broker's pipelines: in its data directory if that is local, else in the user's.

    The data directory of a node of a cluster is a replica that is compared with the store, and another node may serve
    tomorrow: nothing else belongs there.
    """
    data, tenant = Path(info.data), parse_address(address).tenant
    folder = f"{PIPELINES}@{tenant}" if tenant else PIPELINES  # tenants may have pipelines of the same name
    is_usable = (data / "broker" / "journal").is_dir() and os.access(data, os.W_OK) and not is_replica(data)
    if is_here(address) and is_usable:
        return data / folder
    state = environ.get("XDG_STATE_HOME") or os.path.join(os.path.expanduser("~"), ".local", "state")
    return Path(state) / "headrace" / folder / info.broker_id


def is_replica(data: Path) -> bool:
    """Return whether a data directory is that of a shard, in the directory of a node.

    >>> is_replica(Path("/var/lib/headrace/shards/000")), is_replica(Path("/var/lib/headrace"))
    (True, False)
    """
    return data.parent.name == _SHARDS and data.name.isdecimal()


def is_here(address: str) -> bool:
    """Return whether an address is on this machine; one of several hosts is not, as the broker moves between them.

    >>> is_here("headrace://127.0.0.1:7390"), is_here("headrace://192.0.2.7:7390"), is_here("headrace://localhost,a")
    (True, False, False)
    """
    target = parse_address(address)
    if target.others:
        return False
    if target.path or target.host in ("localhost", socket.gethostname()):
        return True
    try:
        return ipaddress.ip_address(target.host).is_loopback
    except ValueError:
        return False


def is_local_path(place: str) -> bool:
    """Return whether a path or URL is in the local file system.

    >>> is_local_path("/data/checkpoints"), is_local_path("s3a://bucket/checkpoints")
    (True, False)
    """
    return "://" not in place or place.startswith("file:")
