"""The last offset of each key of a partition, for compaction; no operation on it takes long, however many keys."""

from headrace.model.batch import Batch
from headrace.storage.worker import CpuThrottle

_SHARDS = 1 << 8
"""With two million keys each has 8,000, and growing takes less than a millisecond; more shards would be slower."""
_MASK = _SHARDS - 1


class LastOffsets:
    """The offset of the last message of each key.

    A dictionary that grows copies all of its entries in one call, during which no other thread runs, and one that is
    freed visits all of them: with two million keys that takes a tenth of a second. Hence many small dictionaries.
    """

    def __init__(self) -> None:
        self._shards: list[dict[bytes, int]] = [{} for _ in range(_SHARDS)]

    def note(self, batch: Batch) -> None:
        """Record the keys of a batch that follows all batches recorded before."""
        shards, base, columns = self._shards, batch.base_offset, batch.columns()
        for place, key in zip(batch.places(columns), columns.keys or (), strict=columns.keys is not None):
            if key is not None:
                shards[hash(key) & _MASK][key] = base + place

    def kept(self, batch: Batch) -> list[int] | None:
        """The indices of a batch's messages that are the last of their keys, or have none; None for all of them."""
        shards, base, columns = self._shards, batch.base_offset, batch.columns()
        if columns.keys is None:
            return None
        kept = [
            index
            for index, (place, key) in enumerate(zip(batch.places(columns), columns.keys, strict=True))
            if key is None or shards[hash(key) & _MASK].get(key, 0) <= base + place
        ]
        return None if len(kept) == batch.count else kept

    def clear(self, throttle: CpuThrottle) -> None:
        """Forget all keys, in portions."""
        for shard in self._shards:
            throttle.step(len(shard), 0)
            shard.clear()
