"""For tests, yours too: a broker on a virtual clock, disks and stores that fail on command, and checks of plug-ins."""

from headrace.testing.cluster_workbench import ClusterAnswer, ClusterClient, ClusterWorkbench
from headrace.testing.faulty_disk import FaultyDisk, Flip, PowerLoss
from headrace.testing.faulty_store import FaultyStore, StoreOperation
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
    "ClusterAnswer",
    "ClusterClient",
    "ClusterWorkbench",
    "FaultyDisk",
    "FaultyStore",
    "Flip",
    "InlineWorker",
    "MemoryDisk",
    "PowerLoss",
    "StoreOperation",
    "Unsynced",
    "Workbench",
    "check_authenticator",
    "check_gateway",
    "check_middleware",
    "check_serializer",
    "check_sink",
]
