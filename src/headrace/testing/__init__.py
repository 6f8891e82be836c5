"""For tests, yours too: a disk that fails on command, a disk in memory, and a worker without a thread."""

from headrace.testing.faulty_disk import FaultyDisk, Flip, PowerLoss
from headrace.testing.inline import InlineWorker
from headrace.testing.memory_disk import MemoryDisk
from headrace.testing.survival import Unsynced

__all__ = ["FaultyDisk", "Flip", "InlineWorker", "MemoryDisk", "PowerLoss", "Unsynced"]
