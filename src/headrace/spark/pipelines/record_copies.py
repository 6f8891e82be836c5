"""The supervisor's own copies of records: what the broker has lost is published again from them."""

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
        self._kept: dict[str, PipelineRecord] = {}

    def keep(self, records: list[PipelineRecord]) -> None:
        """Keep these, where they differ from what is kept."""
        for record in records:
            if self._kept.get(record.name) != record:
                try:
                    Folder(self._home / record.name).write_record(record)
                except OSError as error:
                    logger.warning("no copy of the record of %s was kept: %s", record.name, error)
                self._kept[record.name] = record

    def heal(self, registry: Registry) -> None:
        """Publish again what is missing in the topic, unless it says that the pipeline was removed."""
        for folder in [Folder(path) for path in sorted(self._home.iterdir()) if path.is_dir()]:
            record = folder.record()
            if record is None or record.name in registry.records or not record.belongs_to(self._host, str(self._home)):
                continue
            self._kept.pop(record.name, None)
            if record.name in registry.removed:
                folder.forget_record()
                continue
            _publish(registry, record)


def _publish(registry: Registry, lost: PipelineRecord) -> None:
    registry.change(lost.name, lambda now: lost if now is None else None)
    logger.warning("%s had lost the record of %s, which is published again", TOPIC, lost.name)
