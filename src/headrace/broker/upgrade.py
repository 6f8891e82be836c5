"""Upgrades a data directory from the former format; may be killed at any moment and run again."""

from collections.abc import Callable
from typing import NamedTuple

import msgspec

from headrace.broker.staging import with_new_crc
from headrace.engines.api import FORMAT, FORMER_FORMAT, UPGRADING, DataDirectory, UpgradedLog, UpgradeGap


class Upgraded(NamedTuple):
    """The result of an upgrade."""

    path: str
    from_format: int
    """The format before the upgrade; the current one if nothing had to be upgraded."""
    format: int
    logs: int
    segments: int
    """The number of rewritten files."""
    damaged: list[UpgradeGap]
    """The damaged messages that gaps have replaced."""

    @staticmethod
    def of_log(path: str, done: UpgradedLog) -> "Upgraded":
        """The result for a log without a broker."""
        return Upgraded(path, FORMER_FORMAT if done.segments else FORMAT, FORMAT, 1, done.segments, done.damaged)

    @property
    def changed(self) -> bool:
        """Whether anything was upgraded."""
        return self.from_format != self.format


def upgrade(data: DataDirectory, progress: Callable[[int], None]) -> Upgraded:
    """Bring the directory over; whoever calls this holds its lock. Progress is told in bytes looked at."""
    found = data.known_format()
    if found.number == FORMAT and not found.required & UPGRADING:
        return Upgraded(data.path, FORMAT, FORMAT, 0, 0, [])
    # First of all: from now on neither an earlier Headrace nor this one uses the directory before it is done.
    data.write_format(msgspec.structs.replace(found, number=FORMAT, required=found.required | UPGRADING))
    done = upgrade_logs(data, progress)
    data.write_format(msgspec.structs.replace(found, number=FORMAT, required=found.required & ~UPGRADING))
    damaged = [one for log in done for one in log.damaged]
    return Upgraded(data.path, FORMER_FORMAT, FORMAT, len(done), sum(log.segments for log in done), damaged)


def upgrade_logs(data: DataDirectory, progress: Callable[[int], None]) -> list[UpgradedLog]:
    """Bring over those logs of a data directory that are not yet; the format file stays as it is."""
    done_bytes = 0

    def looked_at(size_bytes: int) -> None:
        nonlocal done_bytes
        done_bytes += size_bytes
        progress(done_bytes)

    return [
        data.upgrade_log(path, looked_at, with_new_crc if path == data.staging_path else None) for path in data.logs()
    ]
