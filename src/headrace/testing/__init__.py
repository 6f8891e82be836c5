"""For tests, yours too: a broker on a virtual clock, disks that fail or stay in memory, and checks of plug-ins."""

from headrace.testing.faulty_disk import FaultyDisk, Flip, PowerLoss
from headrace.testing.inline import InlineWorker
from headrace.testing.memory_disk import MemoryDisk
from headrace.testing.plugin_checks import (
    check_authenticator,
    check_gateway,
    check_middleware,
    check_serializer,
    check_sink,
)
from headrace.testing.survival import Unsynced
from headrace.testing.workbench import Workbench

__all__ = [
    "FaultyDisk",
    "Flip",
    "InlineWorker",
    "MemoryDisk",
    "PowerLoss",
    "Unsynced",
    "Workbench",
    "check_authenticator",
    "check_gateway",
    "check_middleware",
    "check_serializer",
    "check_sink",
]
