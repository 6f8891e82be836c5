"""Where a pipeline's files are: its checkpoints, its log, and the lock that its driver holds."""

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
_LOOK_EVERY_S = 0.1


class DriverProcess(msgspec.Struct):
    """What the process that drives a pipeline writes of itself beside its lock."""

    pid: int
    started: str
    """Tells it from a later process with the same id."""
    begun_us: int
    phase: str = "starting"
    """`starting`, `running`, `stopping`; at last `finished`, `stopped` (by a signal) or `failed`."""
    error: str = ""
    permanent: bool = False
    """Whether the error would come again: somebody has to change something first."""
    queries: list[str] = []
    checkpoints: str = ""
    supervised: bool = False
    """Whether a supervisor has started it."""
    ui: str = ""
    """Where Spark's own pages are."""
    doing: str = ""
    """While it starts: what it is at."""


class Folder:
    """The directory of one pipeline."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)

    @property
    def log(self) -> Path:
        """What the driver and Spark have to say."""
        return self.path / _LOG

    @property
    def checkpoints(self) -> Path:
        """Where queries keep how far they are, unless it is said otherwise."""
        return self.path / "checkpoints"

    def make(self) -> None:
        """Make it, if it is not there."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InvalidArgument(f"cannot make {self.path}: {error.strerror}") from error

    def driver(self) -> DriverProcess | None:
        """What the last driver wrote of itself."""
        try:
            return msgspec.json.decode((self.path / _DRIVER).read_bytes(), type=DriverProcess)
        except (OSError, msgspec.DecodeError):
            return None

    def write_driver(self, driver: DriverProcess) -> None:
        """Write what a driver says of itself, whole or not at all."""
        new = self.path / f"{_DRIVER}.new"
        new.write_bytes(msgspec.json.encode(driver))
        new.replace(self.path / _DRIVER)

    def record(self) -> PipelineRecord | None:
        """The copy of the pipeline's record that its supervisor keeps."""
        try:
            return decoded((self.path / _RECORD).read_bytes())
        except OSError:
            return None

    def write_record(self, record: PipelineRecord) -> None:
        """Keep a copy of the pipeline's record, should the broker lose it."""
        self.make()
        new = self.path / f"{_RECORD}.new"
        with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            file.write(encoded(record))
        new.replace(self.path / _RECORD)

    def forget_record(self) -> None:
        """Remove the copy: the pipeline was removed."""
        (self.path / _RECORD).unlink(missing_ok=True)

    def lock(self, wait: float = 0.0, check: Callable[[], None] = lambda: None) -> "Lock":
        """Become the driver, or say who is."""
        self.make()
        end = time.monotonic() + wait
        while (lock := taken(self.path / _LOCK)) is None:
            if time.monotonic() >= end:
                driver = self.driver()
                who = f"It is process {driver.pid}." if driver is not None else f"See {self.path / _LOCK}."
                raise PipelineInUse(f"{PipelineInUse.__doc__} {who}")
            check()
            time.sleep(_LOOK_EVERY_S)
        return lock

    def locked(self) -> bool:
        """Whether there is a driver, or something that one has left and that is not quite dead."""
        return is_locked(self.path / _LOCK)

    def forget_driver(self) -> None:
        """Remove what the last driver wrote of itself."""
        (self.path / _DRIVER).unlink(missing_ok=True)


class Lock:
    """Held for as long as any process has it in its hands."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        """To be handed on to what works for the holder: then the lock lives as long as that does."""

    def release(self) -> None:
        """Let it go, as far as this process is concerned."""
        os.close(self.fd)


def taken(path: Path) -> Lock | None:
    """Take a lock; None if another process has it."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        return None
    return Lock(fd)


def is_locked(path: Path) -> bool:
    """Whether a process has a lock; another user's counts as one that has."""
    try:
        if not path.exists():
            return False
        lock = taken(path)
    except PermissionError:
        return True
    if lock is not None:
        lock.release()
    return lock is None


def this_driver() -> DriverProcess:
    """What this process is."""
    return DriverProcess(os.getpid(), start_mark(os.getpid()) or "", time.time_ns() // 1000)


def home_of(info: BrokerInfo, address: str, environ: Mapping[str, str]) -> Path:
    """Where the pipelines of a broker have their directories: beside its data if that is here, else in the user's."""
    data, tenant = Path(info.data), parse_address(address).tenant
    folder = f"{PIPELINES}@{tenant}" if tenant else PIPELINES  # tenants may have pipelines of the same name
    if is_here(address) and (data / "broker" / "journal").is_dir() and os.access(data, os.W_OK):
        return data / folder
    state = environ.get("XDG_STATE_HOME") or os.path.join(os.path.expanduser("~"), ".local", "state")
    return Path(state) / "headrace" / folder / info.broker_id


def is_here(address: str) -> bool:
    """Whether an address is one of this machine.

    >>> is_here("headrace://127.0.0.1:7390"), is_here("headrace://192.0.2.7:7390")
    (True, False)
    """
    target = parse_address(address)
    if target.path or target.host in ("localhost", socket.gethostname()):
        return True
    try:
        return ipaddress.ip_address(target.host).is_loopback
    except ValueError:
        return False


def is_local_path(place: str) -> bool:
    """Whether checkpoints there are files of this machine.

    >>> is_local_path("/data/checkpoints"), is_local_path("s3a://bucket/checkpoints")
    (True, False)
    """
    return "://" not in place or place.startswith("file:")
