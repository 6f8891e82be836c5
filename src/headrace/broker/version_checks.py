"""Checks the versions that transactions expect, and reserves the keys of commits until they are appended."""

import logging
from collections.abc import Callable, Sequence

from headrace.broker.active_partition import ActivePartition
from headrace.broker.staging import StagedBatch, StagingLog
from headrace.broker.topics import TopicRegistry
from headrace.broker.version_gate import VersionGate, VersionHold
from headrace.engines.api import check_version, key_counts
from headrace.model.batch import Batch
from headrace.model.errors import HeadraceError, InvalidArgument

logger = logging.getLogger("headrace.broker")

Postponed = Callable[[Callable[[HeadraceError | None], None]], None]
"""Calls back when a check can be made again, or with the error."""


class VersionChecks:
    """What transactions have to do with the versions of keys."""

    def __init__(self, staging: StagingLog, topics: TopicRegistry) -> None:
        self._staging = staging
        self._topics = topics

    def check_batch(self, active: ActivePartition, batch: Batch, expected: int | None) -> None:
        """Refuse a batch that cannot be staged for a topic with key_versions, or expects a version in another one."""
        if active.gate is None:
            raise InvalidArgument(
                f"{active.topic} does not count versions: expected_version needs the setting key_versions"
            )
        active.gate.check_batch(batch, active.topic, active.number, active.settings.partitions, expected)

    def check(self, chosen: Sequence[StagedBatch]) -> Postponed | None:
        """Compare the versions that staged batches expect with those that their keys would get.

        If that cannot be decided yet, returns a function that calls back when it may be. That is so while keys are
        being read, and before a sync: a power loss could take messages that count back, and leave the commit.
        """
        if all(staged.expected_version is None for staged in chosen):
            return None
        following: dict[tuple[int, int, bytes], int] = {}
        unsynced: Postponed | None = None
        for staged in chosen:
            active = self._active(staged)
            if active is None or active.gate is None:
                if staged.expected_version is not None:
                    raise InvalidArgument("key_versions was turned off for a topic of the transaction; abort it")
                continue
            if not active.gate.is_known:
                return active.gate.when_known
            active.flush()  # what was gathered comes before
            expected = staged.expected_version
            for key, count in self._keys(staged).items():
                place = staged.topic_id, staged.partition, key
                version = following.get(place)
                if version is None:
                    version = active.gate.next_version(key)
                    unsynced = unsynced or self._unsynced(active, key, expected)
                if expected is not None:
                    check_version(key, expected, version)
                following[place] = version + count
        return unsynced

    def hold(self, stages: Sequence[StagedBatch], batches: Sequence[Batch] = ()) -> list[VersionHold]:
        """Reserve the keys of a commit that was just recorded, and must be applied whatever happens here."""
        holds: dict[tuple[int, int], tuple[VersionGate, dict[bytes, int]]] = {}
        unknown: list[VersionHold] = []
        for at, staged in enumerate(stages):
            try:
                active = self._active(staged)
            except (HeadraceError, OSError) as error:  # nobody can publish to it either
                logger.warning("partition not opened  topic_id=%s reason=%s", staged.topic_id, error)
                continue
            if active is None or active.gate is None:
                continue
            active.flush()  # what was gathered was there before
            try:
                added = key_counts(batches[at]) if batches else self._keys(staged)
            except HeadraceError as error:
                logger.warning("keys of a commit unknown  topic=%s reason=%s", active.topic, error)
                unknown.append(active.gate.hold(None))
                continue
            _, keys = holds.setdefault((staged.topic_id, staged.partition), (active.gate, {}))
            for key, count in added.items():
                keys[key] = keys.get(key, 0) + count
        return [*unknown, *(gate.hold(keys) for gate, keys in holds.values())]

    def _active(self, staged: StagedBatch) -> ActivePartition | None:
        """The partition of a batch, if its topic has versions."""
        topic = self._topics.by_id.get(staged.topic_id)
        if topic is None or not topic.settings.key_versions:
            return None
        return self._topics.active(topic, staged.partition)

    def _keys(self, staged: StagedBatch) -> dict[bytes, int]:
        """How many messages each key has in a batch; read again after a restart."""
        if staged.keys is None:
            staged.keys = key_counts(self._staging.batch_at(staged.offset))
        return staged.keys

    def _unsynced(self, active: ActivePartition, key: bytes, expected: int | None) -> Postponed | None:
        assert active.gate is not None
        last = None if expected is None else active.gate.index.last_offset(key)
        return active.when_synced if last is not None and active.partition.awaits_sync(last + 1) else None
