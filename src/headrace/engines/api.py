"""All that the broker knows of engines and of storage."""

from headrace.engines.journal import Journal
from headrace.engines.partition import Appended, Partition, Slice
from headrace.engines.producers import FORGOTTEN, PRODUCER_MIN
from headrace.engines.store import Store, explained, log_settings

__all__ = [
    "FORGOTTEN",
    "PRODUCER_MIN",
    "Appended",
    "Journal",
    "Partition",
    "Slice",
    "Store",
    "explained",
    "log_settings",
]
