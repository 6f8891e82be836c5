"""The supervisor's copies of records, from which it publishes lost records again."""

import logging
from pathlib import Path

from headrace.spark.pipelines.paths import Folder
from headrace.spark.pipelines.records import TOPIC, PipelineRecord
from headrace.spark.pipelines.registry import Registry

logger = logging.getLogger("headrace.pipelines")


class RecordCopies:
    """The copies of the records of one host, each in the directory of its pipeline."""

    def __init__(self, home: Path, host: str) -> None:
        self._home = home
        self._host = host
        self._stored: dict[str, PipelineRecord] = {}

    def store(self, records: list[PipelineRecord]) -> None:
        """Write copies of records that differ from the stored ones."""
        for record in records:
            if self._stored.get(record.name) != record:
                try:
                    Folder(self._home / record.name).write_record(record)
                except OSError as error:
                    logger.warning("record copy not written  pipeline=%s error=%s", record.name, error)
                self._stored[record.name] = record

    def restore_missing(self, registry: Registry) -> None:
        """Publish records again that are missing in the topic, unless the pipeline was removed."""
        for folder in [Folder(path) for path in sorted(self._home.iterdir()) if path.is_dir()]:
            record = folder.record()
            if record is None or record.name in registry.records or not record.belongs_to(self._host, str(self._home)):
                continue
            self._stored.pop(record.name, None)
            if record.name in registry.removed:
                folder.forget_record()
                continue
            _publish(registry, record)


def _publish(registry: Registry, lost: PipelineRecord) -> None:
    registry.change(lost.name, lambda now: lost if now is None else None)
    logger.warning("record was missing; published again  topic=%s pipeline=%s", TOPIC, lost.name)
