"""Upgrades a data directory from the former format; may be killed at any moment and run again."""

from collections.abc import Callable
from typing import NamedTuple

import msgspec

from headrace.broker.staging import with_new_crc
from headrace.engines.api import FORMAT, FORMER_FORMAT, UPGRADING, DataDirectory


class Upgraded(NamedTuple):
    """The result of an upgrade."""

    path: str
    from_format: int
    """The format before the upgrade; the current one if nothing had to be upgraded."""
    format: int
    logs: int
    segments: int
    """The number of rewritten files."""

    @staticmethod
    def of_log(path: str, segments: int) -> "Upgraded":
        """The result for a log without a broker."""
        return Upgraded(path, FORMER_FORMAT if segments else FORMAT, FORMAT, 1, segments)

    @property
    def changed(self) -> bool:
        """Whether anything was upgraded."""
        return self.from_format != self.format


def upgrade(data: DataDirectory, progress: Callable[[int], None]) -> Upgraded:
    """Upgrade a directory whose lock the caller holds; reports progress in bytes read."""
    found = data.stored_format()
    if found is not None and found.number == FORMAT and not found.required & UPGRADING:
        return Upgraded(data.path, FORMAT, FORMAT, 0, 0)
    if found is not None:
        # First: from here on, no version of Headrace uses the directory until the upgrade is complete.
        data.write_format(msgspec.structs.replace(found, number=FORMAT, required=found.required | UPGRADING))
    logs, done_bytes = data.logs(), 0

    def looked_at(size_bytes: int) -> None:
        nonlocal done_bytes
        done_bytes += size_bytes
        progress(done_bytes)

    segments = sum(
        data.upgrade_log(path, looked_at, with_new_crc if path == data.staging_path else None) for path in logs
    )
    if found is not None:
        data.write_format(msgspec.structs.replace(found, number=FORMAT, required=found.required & ~UPGRADING))
    return Upgraded(data.path, FORMER_FORMAT, FORMAT, len(logs), segments)
