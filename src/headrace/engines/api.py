"""Everything that the broker knows of engines and of storage.

A leased subscription has two objects in a partition. A ReplayedPartition adds up the journal's facts; the broker's
state owns it. When the partition is opened, `open_leased_partition` makes a LeasedPartition of it, which the live
Subscription owns and which takes in the facts from then on. The broker calls both only by the verbs below.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol

from headrace.engines.ballast import Ballast
from headrace.engines.data_directory import (
    FORMAT,
    FORMAT_NAME,
    FORMER_FORMAT,
    UNFINISHED,
    UPGRADING,
    DataDirectory,
    DataFormat,
    LogExtent,
    PartitionPath,
)
from headrace.engines.delivered_partition import DeliveredPartition
from headrace.engines.derived_cache import DerivedCache
from headrace.engines.derived_partition import PART_MESSAGES, BatchTransform, DerivedPart, DerivedPartition
from headrace.engines.journal import Gap, Journal, Snapshot
from headrace.engines.key_index import KeyCounts, KeyEntry, KeyIndex, key_counts
from headrace.engines.leased.contents import Contents
from headrace.engines.leased.disciplines import RANK_BITS
from headrace.engines.leased.edits import Content, EditRecord, PackedEdits, pack_edits, whole
from headrace.engines.leased.index import Extended, LeasedIndex
from headrace.engines.leased.index_snapshot import FrozenIndex, SavedChunk, SavedRest, SettledChunks
from headrace.engines.leased.inspection import ForecastCounter, MessageCounts, MessageState, NextTimes
from headrace.engines.leased.leases import SESSION_BOUND_US, LeaseRecord
from headrace.engines.leased.packing import packed, unpacked
from headrace.engines.leased.release_notes import ReleaseNote
from headrace.engines.leased.replayed import ReplayedIndex
from headrace.engines.leased.taken import TakenMessages
from headrace.engines.partition import Appended, Partition, Slice, check_version
from headrace.engines.producers import FORGOTTEN, FORWARDER_MIN, PRODUCER_MIN, forwarded_by, forwarder_id, marked
from headrace.engines.store import Store, as_headrace_error, log_settings, lost_floor
from headrace.model.batch import Columns
from headrace.model.subscription import SubscriptionSettings
from headrace.storage.owner import FoundOwner, PartitionOwner
from headrace.storage.recovery import Findings
from headrace.storage.upgrade import FormerBatch, UpgradedLog, UpgradeGap

__all__ = [
    "FORGOTTEN",
    "FORMAT",
    "FORMAT_NAME",
    "FORMER_FORMAT",
    "FORWARDER_MIN",
    "PART_MESSAGES",
    "PRODUCER_MIN",
    "RANK_BITS",
    "SESSION_BOUND_US",
    "UNFINISHED",
    "UPGRADING",
    "Appended",
    "Ballast",
    "BatchTransform",
    "Content",
    "DataDirectory",
    "DataFormat",
    "DeliveredPartition",
    "DerivedCache",
    "DerivedPart",
    "DerivedPartition",
    "EditRecord",
    "Findings",
    "ForecastCounter",
    "FormerBatch",
    "FoundOwner",
    "FrozenIndex",
    "Gap",
    "Journal",
    "JournaledPartition",
    "KeyCounts",
    "KeyEntry",
    "KeyIndex",
    "LeasedPartition",
    "LogExtent",
    "MessageCounts",
    "MessageState",
    "NextTimes",
    "PackedEdits",
    "Partition",
    "PartitionOwner",
    "PartitionPath",
    "ReleaseNote",
    "ReplayedPartition",
    "SavedChunk",
    "SavedRest",
    "SettledChunks",
    "Slice",
    "Snapshot",
    "Store",
    "StoredMessages",
    "TakenMessages",
    "UpgradeGap",
    "UpgradedLog",
    "as_headrace_error",
    "check_version",
    "forwarded_by",
    "forwarder_id",
    "key_counts",
    "log_settings",
    "lost_floor",
    "marked",
    "new_replayed_partition",
    "open_leased_partition",
    "pack_edits",
    "packed",
    "stored_messages",
    "unpacked",
    "whole",
]


class JournaledPartition(Protocol):
    """A subscription in a partition, as far as the journal's facts reach."""

    @property
    def end(self) -> int: ...
    @property
    def floor(self) -> int: ...
    def apply_leased(self, number: int, holder: str, until_us: int, offsets: Sequence[int]) -> None: ...
    def apply_extended(self, number: int, until_us: int, offsets: Sequence[int]) -> None: ...
    def apply_settled(self, offsets: Sequence[int]) -> None: ...
    def apply_returned(
        self,
        offsets: Sequence[int],
        ready_us: Sequence[int],
        counted: bool,
        note: ReleaseNote | None,
        states: Mapping[int, bytes],
        now_us: int,
    ) -> None: ...
    def apply_edit(self, offset: int, edit: EditRecord, moved: bool, now_us: int) -> None: ...
    def frozen(self) -> FrozenIndex: ...
    def settled_chunks(self) -> SettledChunks: ...


class ReplayedPartition(JournaledPartition, Protocol):
    """The state that the journal's facts add up to, before the partition is opened."""

    def begin_snapshot(self, end: int) -> None: ...
    def load_chunks(self, chunks: Sequence[SavedChunk]) -> None: ...
    def load_rest(self, saved: SavedRest) -> None: ...


class LeasedPartition(JournaledPartition, Protocol):
    """A subscription's live index of an open partition."""

    # Follow the log, the settings and the time.
    def load(self, end_offset: int, now_us: int) -> Iterator[None]: ...
    def catch_up(self, end_offset: int, now_us: int) -> None: ...
    def alter(self, settings: SubscriptionSettings, now_us: int) -> Iterator[None]: ...
    def expire_after(self, ttl_us: int | None) -> Iterator[None]: ...
    def forget_before(self, offset: int) -> None: ...
    def forget_missing(self, offsets: Sequence[int]) -> None: ...
    def watch(self, on_change: Callable[[], object]) -> None: ...
    def is_behind(self, now_us: int) -> bool: ...
    def make_due_ready(self, now_us: int) -> int: ...
    def ended(self, now_us: int, most: int) -> list[int]: ...
    def expired(self, now_us: int, most: int | None = None) -> list[int]: ...
    def expire_later(self, offsets: Sequence[int], time_us: int) -> None: ...
    def take_lost(self, now_us: int) -> list[range]: ...
    def lose_later(self, damaged: range, time_us: int) -> None: ...

    # Decide about messages, and undo the decision.
    def take(
        self,
        count: int,
        bytes_max: int,
        now_us: int,
        ahead_us: int = 0,
        until_key: int | None = None,
        least: int = 1,
    ) -> TakenMessages | None: ...
    def give_back(self, taken: TakenMessages, now_us: int) -> None: ...
    def checked(
        self, number: int, offsets: Sequence[int], now_us: int, *, late: bool
    ) -> tuple[Sequence[int], list[tuple[int, str]]]: ...
    def reserve(self, offsets: Sequence[int]) -> list[LeaseRecord]: ...
    def restore(self, reserved: Sequence[LeaseRecord], now_us: int) -> None: ...
    def extend(self, offsets: Sequence[int], until_us: int) -> list[Extended]: ...
    def shorten(self, extended: Sequence[Extended]) -> None: ...
    def leave(self, offsets: Sequence[int]) -> None: ...
    def stay(self, offsets: Sequence[int], now_us: int) -> None: ...
    def ready_times(self, offsets: Sequence[int], wanted_us: Sequence[int]) -> list[int]: ...

    # Read contents.
    def read_contents_from(self, partition: Partition) -> None: ...
    def read(self, offsets: Sequence[int]) -> tuple[Columns, list[int]]: ...
    def read_some(self, offsets: Sequence[int], bytes_max: int) -> tuple[Columns, list[int], Sequence[int]]: ...
    def read_stored(self, offsets: Sequence[int]) -> tuple[Columns, list[int]]: ...
    def parts(self, offsets: Sequence[int]) -> Iterator[tuple[Columns, list[int]]]: ...
    def damaged_among(self, offsets: Sequence[int]) -> Iterator[range]: ...

    # Look.
    @property
    def first_keys(self) -> tuple[int | None, int | None]: ...
    @property
    def next_end_us(self) -> int | None: ...
    @property
    def unsettled_count(self) -> int: ...
    @property
    def staying_count(self) -> int: ...
    @property
    def leased_count(self) -> int: ...
    @property
    def is_edited(self) -> bool: ...
    def next_times(self) -> NextTimes: ...
    def has_expired(self, now_us: int) -> bool: ...
    def status(self, offset: int) -> str: ...
    def message_state(self, offset: int) -> MessageState: ...
    def rests_until(self, offset: int) -> int | None: ...
    def holder(self, offset: int) -> str | None: ...
    def last_holders(self, offsets: Sequence[int]) -> list[str]: ...
    def failures(self, offsets: Sequence[int]) -> list[int]: ...
    def release_notes(self, offset: int) -> Sequence[ReleaseNote]: ...
    def counts(self) -> MessageCounts: ...
    def offsets(self, wanted: str, start: int) -> Iterator[int]: ...
    def ready_later(self, least_us: int, beyond_us: int | None, after: int = -1) -> Iterator[tuple[int, int]]: ...
    def ready_later_max(self, least_us: int, beyond_us: int | None) -> int: ...
    def forecast(self, bounds: Sequence[int]) -> ForecastCounter: ...
    def oldest_ready(self, count: int) -> list[int]: ...
    def settled_rule(self) -> Callable[[int], bool]: ...
    def mark(self, marks: dict[int, bytearray], offset: int) -> None: ...
    def count_marked(self, marks: Mapping[int, bytes | bytearray]) -> int: ...


class StoredMessages(Protocol):
    """Reads the messages of a partition as they were published, without edits."""

    def read_stored(self, offsets: Sequence[int]) -> tuple[Columns, list[int]]: ...


def new_replayed_partition(start: int) -> ReplayedPartition:
    """The state of a subscription that begins at an offset, and of which the journal has said nothing yet."""
    return ReplayedIndex(start)


def open_leased_partition(
    replayed: ReplayedPartition,
    partition: Partition,
    name: str,
    settings: SubscriptionSettings,
    ttl_us: int | None,
    edits: Mapping[int, EditRecord],
    delivered: Partition | None = None,
) -> LeasedPartition:
    """Take over what the journal said, which is not used any more; `load` reads the rest from the log.

    Contents are read from the partition as it is `delivered`, if that differs.
    """
    assert isinstance(replayed, ReplayedIndex)
    return LeasedIndex(replayed, partition, name, settings, ttl_us, edits, delivered)


def stored_messages(partition: Partition) -> StoredMessages:
    """A reader of single messages, with a small cache of decoded batches."""
    return Contents(partition)
