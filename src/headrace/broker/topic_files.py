"""The files of topics: records of their owners, removal after deletion, and files that the journal does not know."""

import logging
from functools import partial

from headrace.broker.active_partition import ActivePartition
from headrace.broker.facts import IdsReserved, TopicFilesRemoved
from headrace.broker.inspection import knows, proof_of_loss
from headrace.broker.ledger import Ledger
from headrace.broker.ports import Ports
from headrace.engines.api import DataDirectory, PartitionOwner, as_headrace_error
from headrace.model.errors import HeadraceError

logger = logging.getLogger("headrace.broker")


class TopicFiles:
    """Keeps the files in the data directory in step with the journal; a broker without one has none."""

    def __init__(self, data: DataDirectory | None, ledger: Ledger, ports: Ports) -> None:
        self._data = data
        self._ledger = ledger
        self._ports = ports

    def store_owner(self, active: ActivePartition, owner: PartitionOwner) -> None:
        """Store new settings with a partition's files; if that fails, the next opening does it."""
        try:
            active.partition.set_owner(owner)
        except (HeadraceError, OSError) as error:
            logger.info("settings not stored with the partition  path=%s reason=%s", active.partition.location, error)

    def remove_once(self, topic_id: int, active_partitions: list[ActivePartition], outcome: object) -> None:
        """Remove a deleted topic's files, once its deletion is synced."""
        if not isinstance(outcome, HeadraceError):
            self._ports.background(partial(self._remove, topic_id, active_partitions))

    def _remove(self, topic_id: int, active_partitions: list[ActivePartition]) -> None:
        for active in active_partitions:
            try:
                active.partition.close(is_deleted=True)
            except HeadraceError as error:
                where = active.partition.location
                logger.info("partition not closed before its removal  path=%s reason=%s", where, error)
        try:
            if self._data is not None:
                self._data.delete_topic(topic_id, self._ledger.state.broker_id)
        except OSError as error:
            raise as_headrace_error(error) from error
        self._ports.call_threadsafe(partial(self._forget, topic_id))

    def _forget(self, topic_id: int) -> None:
        try:
            self._ledger.record(self._ledger.now_us, TopicFilesRemoved(topic_id))
        except HeadraceError as error:
            logger.info(
                "files of a deleted topic not removed; retrying at the next start  topic_id=%s reason=%s",
                topic_id,
                error,
            )

    def check(self) -> None:
        """Continue to remove deleted topics' files, and set aside partitions that the journal does not know.

        Raises when the journal must have known one: the journal has lost facts, and a repair needs the files.
        """
        data, state = self._data, self._ledger.state
        if data is None:
            return
        unknown = [place for place in data.partitions() if place.topic_id not in state.gone and not knows(state, place)]
        for place in unknown:
            if proof := proof_of_loss(data, state, place):
                raise data.damaged(proof)
        for place in unknown:
            data.set_aside.move(place.path, "the journal knows no such partition")
        if last := max((place.topic_id for place in unknown), default=0):
            # A power loss may have come before the journal had the topic; its id must not be used again.
            self._ledger.record(self._ledger.now_us, IdsReserved(topic_id=last))
        for path in data.unknown_names():
            logger.warning("unknown file in the data directory; left as it is  path=%s", path)
        for topic_id in sorted(state.gone):
            self._ports.background(partial(self._remove, topic_id, []))
