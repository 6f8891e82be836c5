"""The record `meta` of a log: its id, its first offset, its owner, and the boot in which it was last opened."""

import secrets
import struct
from typing import NamedTuple

from headrace.model.errors import LogNotFound
from headrace.storage.record import SlottedRecord
from headrace.storage.recovery import segment_bases
from headrace.storage.runtime import StorageRuntime
from headrace.storage.scan import find_log_id
from headrace.storage.segment import FileSegment, segment_path

NAME = "meta"
_META = struct.Struct("<IQ16s")
OWNED = b"\xc0"
"""The owner of a log that is a broker's without further details: nil in MessagePack."""


class Meta(NamedTuple):
    """The content of the record."""

    log_id: int
    first_offset: int
    boot_id: bytes
    owner: bytes = b""
    """The encoded owner, which storage does not decode; empty if the log has none."""

    @property
    def is_reconstructed(self) -> bool:
        """Whether the record is missing or damaged, and this is what the segments say."""
        return not self.boot_id

    def power_lost(self, host: StorageRuntime) -> bool:
        """Whether writes may have been lost or reordered since a writer last opened the log."""
        return not host.disk.kept_order_since(self.boot_id)


def open_meta(host: StorageRuntime, directory: str, *, create: bool) -> Meta:
    """Read the record for a writer, which creates the log if there is none."""
    path = f"{directory}/{NAME}"
    if not host.disk.exists(path) and not segment_bases(host, directory):
        if not create:
            raise LogNotFound(f"there is no log in {directory}")
        host.disk.make_directory(directory, sync=False)
    return _read(host, directory, SlottedRecord(host.disk, path, write=True, create=True))


def read_meta(host: StorageRuntime, directory: str) -> Meta:
    """Read the record for a reader; if only the record is missing, it is derived from the segments."""
    try:
        record = SlottedRecord(host.disk, f"{directory}/{NAME}", write=False)
    except LogNotFound:
        if not segment_bases(host, directory):
            raise
        return _derived(host, directory)
    return _read(host, directory, record)


def store_meta(
    host: StorageRuntime, directory: str, log_id: int, first_offset: int, owner: bytes, *, sync: bool
) -> None:
    """Write the record, with the current boot."""
    record = SlottedRecord(host.disk, f"{directory}/{NAME}", write=True)
    record.store(_META.pack(log_id, first_offset, host.disk.boot_id()) + owner, sync=sync)


def sync_meta(host: StorageRuntime, directory: str) -> None:
    """Return when the record is on the disk."""
    host.disk.sync(SlottedRecord(host.disk, f"{directory}/{NAME}", write=True).file)


def _read(host: StorageRuntime, directory: str, record: SlottedRecord) -> Meta:
    """The content of the record; derived from the segments if it is empty or damaged."""
    content = record.load()
    if content is not None:
        log_id, first_offset, boot_id = _META.unpack_from(content)
        return Meta(log_id, first_offset, boot_id, content[_META.size :])
    return _derived(host, directory)


def _derived(host: StorageRuntime, directory: str) -> Meta:
    for base in segment_bases(host, directory):
        segment = FileSegment.open(host, segment_path(directory, base), 0, writable=False)
        log_id = segment.log_id or find_log_id(segment, segment.begin, segment.size())
        host.forget(segment)
        if log_id:
            return Meta(log_id, 0, b"")
    # No batch was ever written here, or only the names of files have survived.
    return Meta(1 + secrets.randbelow((1 << 32) - 1), 0, b"")
