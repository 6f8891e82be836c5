"""All that the broker knows of engines and of storage."""

from headrace.engines.ballast import Ballast
from headrace.engines.data_directory import DataDirectory, DataFormat, PartitionPath
from headrace.engines.journal import Gap, Journal, Snapshot
from headrace.engines.leased import index_snapshot, inspection
from headrace.engines.leased.contents import Contents
from headrace.engines.leased.disciplines import RANK_BITS
from headrace.engines.leased.edits import Content, EditRecord, PackedEdits, pack_edits, whole
from headrace.engines.leased.index import LeasedIndex, ReleaseNote
from headrace.engines.leased.index_snapshot import SavedChunk, SavedRest
from headrace.engines.leased.packing import packed, unpacked
from headrace.engines.leased.taken import TakenMessages
from headrace.engines.partition import Appended, Partition, Slice
from headrace.engines.producers import FORGOTTEN, PRODUCER_MIN
from headrace.engines.store import Store, as_headrace_error, log_settings
from headrace.storage.owner import FoundOwner, PartitionOwner
from headrace.storage.recovery import Findings

__all__ = [
    "FORGOTTEN",
    "PRODUCER_MIN",
    "RANK_BITS",
    "Appended",
    "Ballast",
    "Content",
    "Contents",
    "DataDirectory",
    "DataFormat",
    "EditRecord",
    "Findings",
    "FoundOwner",
    "Gap",
    "Journal",
    "LeasedIndex",
    "PackedEdits",
    "Partition",
    "PartitionOwner",
    "PartitionPath",
    "ReleaseNote",
    "SavedChunk",
    "SavedRest",
    "Slice",
    "Snapshot",
    "Store",
    "TakenMessages",
    "as_headrace_error",
    "index_snapshot",
    "inspection",
    "log_settings",
    "pack_edits",
    "packed",
    "unpacked",
    "whole",
]
