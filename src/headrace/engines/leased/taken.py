"""Messages that were taken out of a subscription, to be leased together."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from headrace.engines.leased.pending import Entries, Entry
from headrace.model.batch import Batch, Columns, message_bytes


@dataclass(slots=True)
class TakenMessages:
    """Messages that were taken out, to be leased."""

    offsets: Sequence[int]
    stored: Sequence[Batch]
    """The first of them, as they are stored."""
    columns: Columns
    """The others."""
    size_bytes: int
    """Of their values, keys and headers; of those that are stored a little more."""
    entries: Entries
    """Where they were, should they have to go back."""
    begins_us: int
    """When the lease begins: now, or when the last one of them is due."""
    deliveries: list[int] = field(default_factory=list)
    """How often each has been handed out by now; empty: once, all of them."""
    versions: list[int] = field(default_factory=list)
    """Empty: 1, all of them."""
    states: dict[int, bytes] = field(default_factory=dict)


def without(entry: Entry, offsets: set[int]) -> Entry:
    """What was taken out, but for these."""
    runs, keys, entered = entry
    kept = [(key, offset) for key, offset in zip(keys, entered, strict=True) if offset not in offsets]
    return runs, [key for key, _ in kept], [offset for _, offset in kept]


def fitting(columns: Columns, bytes_max: int, least: int) -> tuple[int, int]:
    """How many of the messages have so many bytes together, so many at least, and how many bytes they have."""
    total = sum(map(len, filter(None, columns.values)))
    if total <= bytes_max and columns.keys is None and columns.headers is None:
        return len(columns.values), total
    total = 0
    for index in range(len(columns.values)):
        size = message_bytes(columns, index)
        if total + size > bytes_max and index >= least:
            return index, total
        total += size
    return len(columns.values), total
