"""The log interface: all that engines and the embedded log use of a log, wherever its messages are stored."""

from abc import ABC, abstractmethod
from typing import ClassVar

from headrace.model.batch import Batch
from headrace.model.durability import Durability
from headrace.model.errors import DurabilityUnavailable
from headrace.storage.compaction import Keep
from headrace.storage.disk import SyncCallback as SyncCallback
from headrace.storage.reader import LogReader
from headrace.storage.recovery import Findings
from headrace.storage.settings import LogSettings


class StoredLog(LogReader, ABC):
    """A log that one thread appends to and any thread reads.

    Callers never ask which kind of log they have. What legitimately differs between kinds is an attribute here, and
    every method means the same for all of them; tests/conformance runs the same suite over each. A new home for data is
    not another log but another Disk: see storage/disk.py.
    """

    __slots__ = ()

    durable: ClassVar[bool]
    """Whether messages can be synced, and are still there when the log is opened again."""
    append_durability: ClassVar[Durability]
    """The durability that messages have as soon as `append` returns."""
    durability_max: Durability
    """The durability that messages have once they are synced; a log never reaches a higher one."""

    owner: bytes
    """Whose the log is, encoded; empty for a log that is nobody's."""
    findings: Findings
    """What recovery found when the log was opened."""
    survived_offset: int
    """The end of the messages found when the log was opened; the first new offset may be higher."""

    @property
    @abstractmethod
    def location(self) -> str:
        """Where the messages are, for people to read."""

    @property
    def writer_at_work(self) -> bool:
        """This object is the writer."""
        return True

    @property
    @abstractmethod
    def batch_bytes_max(self) -> int:
        """The size of the largest batch that the log takes."""

    # Append and sync.

    @abstractmethod
    def append(self, batch: Batch, now_us: int, durability: Durability = Durability.MEMORY) -> "AppendReceipt":
        """Append a batch, and request a sync if `durability` is synced or replicated; the receipt can wait.

        Raises DurabilityUnavailable if the log can never reach it. When this raises, nothing was appended.
        """

    @property
    @abstractmethod
    def synced_offset(self) -> int:
        """All messages before this offset are on the disk; 0 if the log is not durable."""

    @property
    @abstractmethod
    def is_small_backlog(self) -> bool:
        """Whether there is something to sync, but only a few bytes."""

    @property
    def sync_latency_s(self) -> float:
        """How long a small sync takes, about; 0 if nothing is synced."""
        return 0.0

    @property
    def overlaps_syncs(self) -> bool:
        """Whether the next sync is better requested before the last is done, as each takes long."""
        return False

    @abstractmethod
    def awaits_sync(self, offset: int) -> bool:
        """Whether a sync would make messages before an offset more durable than they are."""

    @abstractmethod
    def reached(self, offset: int) -> Durability:
        """The durability that all messages before an offset have now."""

    @abstractmethod
    def request_sync(self) -> None:
        """Have all that was appended synced soon, without waiting for it."""

    @abstractmethod
    def when_synced(self, offset: int, callback: SyncCallback) -> None:
        """Call back, on any thread, when no sync could make the messages before an offset more durable.

        A log that is not durable calls back at once.
        """

    @abstractmethod
    def wait_synced(self, offset: int, timeout_s: float | None = None) -> None:
        """Return when `when_synced` would call back; raises what it would report, or Timeout."""

    # Remove.

    @abstractmethod
    def truncate_before(self, offset: int) -> None:
        """Remove the messages before an offset."""

    @abstractmethod
    def truncate_after(self, offset: int) -> None:
        """Remove the messages from an offset on; the next message appended gets that offset."""

    @abstractmethod
    def compact(self, keep: Keep) -> int:
        """Rewrite all segments but the last with only the messages that the rule keeps; returns the bytes freed.

        Offsets stay as they are.
        """

    def retention_offset(self, now_us: int, *, age_us: int | None = None, bytes_max: int | None = None) -> int:
        """The first offset to keep when segments may be so old, and all together so large; the last one always stays.

        0 if all segments may stay.
        """
        offset = 0
        layout = self._layout()
        kept_bytes = sum(segment.end for segment in layout)
        for segment in layout[:-1]:
            too_old = age_us is not None and segment.append_time < now_us - age_us
            if not too_old and (bytes_max is None or kept_bytes <= bytes_max):
                break
            offset = segment.next_offset
            kept_bytes -= segment.end
        return offset

    def retain(self, now_us: int, *, age_us: int | None = None, bytes_max: int | None = None) -> int:
        """Remove whole segments that are too old, or too many bytes from the end; returns the first offset left."""
        self.truncate_before(self.retention_offset(now_us, age_us=age_us, bytes_max=bytes_max))
        return self.first_offset

    # Settings and end.

    @abstractmethod
    def alter(self, settings: LogSettings, now_us: int) -> None:
        """Use other settings from now on."""

    @abstractmethod
    def set_owner(self, owner: bytes) -> None:
        """Store another owner with the log; a durable one has it on the disk with the next sync."""

    @abstractmethod
    def close(self, *, is_deleted: bool = False) -> None:
        """Sync what can be synced and release everything; raises if not all of it could be synced.

        The files of a log that is deleted are not prepared for the next opening.
        """


class AppendReceipt:
    """The receipt of one append: the offsets of its messages, and the durability that they have reached by now."""

    __slots__ = ("_log", "base_offset", "next_offset")

    def __init__(self, log: StoredLog, base_offset: int, next_offset: int) -> None:
        self._log = log
        self.base_offset = base_offset
        self.next_offset = next_offset

    @property
    def reached(self) -> Durability:
        """The durability of the messages now."""
        return self._log.reached(self.next_offset)

    def wait(self, durability: Durability, timeout_s: float | None = None) -> None:
        """Return when the messages have this durability; raises DurabilityUnavailable if they never will."""
        if self._log.append_durability >= durability:
            return
        if self._log.durability_max < durability:
            raise DurabilityUnavailable
        self._log.wait_synced(self.next_offset, timeout_s)
