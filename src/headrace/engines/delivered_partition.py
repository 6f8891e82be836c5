"""A partition as its consumers see it: the stored messages after the middleware that changes deliveries."""

from typing import Protocol

from headrace.engines.derived_cache import DerivedCache
from headrace.engines.derived_partition import BatchTransform, DerivedPartition
from headrace.engines.partition import Partition
from headrace.model.batch import Columns


class DeliverTransform(BatchTransform, Protocol):
    """Changes messages, and leaves as many of them."""

    def delivered(self, columns: Columns) -> Columns: ...


class DeliveredPartition(DerivedPartition):
    """The messages of a partition, changed when they are read; the change can be replaced by another."""

    _transform: DeliverTransform

    def __init__(self, source: Partition, transform: DeliverTransform, cache: DerivedCache) -> None:
        super().__init__(source, transform, cache)
        self._generation = 0

    def use(self, transform: DeliverTransform) -> None:
        """Change messages in another way from now on."""
        self._transform = transform
        self._generation += 1

    def delivered(self, columns: Columns) -> Columns:
        """Messages that are not stored, such as edited ones, as consumers see them."""
        return self._transform.delivered(columns)

    @property
    def rewrites(self) -> int:
        """How often the source was compacted, or the change replaced."""
        return self._source.rewrites + (self._generation << 32)

    def _key(self, offset: int) -> tuple[Partition, str, int, int]:
        return self, "delivered", self.rewrites, offset
