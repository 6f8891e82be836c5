"""The last offset of each key of a partition, for compaction; however many there are, without a long pause."""

from headrace.model.batch import Batch
from headrace.storage.worker import Pace

_SHARDS = 1 << 8
"""With two million keys each has 8,000, which takes less than a millisecond; more of them would be slower to use."""
_MASK = _SHARDS - 1


class LastOffsets:
    """Where each key was seen last.

    A dictionary that grows copies all of its entries in one call, which no other thread can interrupt, and one that is
    freed visits all of them: with two million keys everybody else waits for a tenth of a second. So there are many.
    """

    def __init__(self) -> None:
        self._shards: list[dict[bytes, int]] = [{} for _ in range(_SHARDS)]

    def note(self, batch: Batch) -> None:
        """Note the keys of a batch that follows all those before."""
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

    def clear(self, pace: Pace) -> None:
        """Forget all of them, in portions."""
        for shard in self._shards:
            pace.step(len(shard), 0)
            shard.clear()
