"""A small durable record: two slots in one file, written in turn, so that a torn write leaves the older one."""

import struct

from crc32c import crc32c

from headrace.storage.disk import Disk, OpenFile, open_or_make

# magic sequence length | payload | crc over all before
_HEAD = struct.Struct("<4sQH")
_CRC = struct.Struct("<I")
_MAGIC = b"\xa7HRR"
_SLOT_BYTES = 4096
PAYLOAD_BYTES_MAX = _SLOT_BYTES - _HEAD.size - _CRC.size


def is_torn(content: bytes) -> bool:
    """Whether a file holds only what a crash during the first write of a record may leave."""
    left = content.strip(b"\0")
    return left.startswith(_MAGIC) or _MAGIC.startswith(left)


def is_readable(content: bytes) -> bool:
    """Whether a file is empty, holds only zeros, or has at least one slot whose checksum is right."""
    return not content.strip(b"\0") or any(
        _slot(content[position : position + _SLOT_BYTES]) for position in (0, _SLOT_BYTES)
    )


def _slot(slot: bytes) -> tuple[int, bytes] | None:
    """The sequence and the content in a slot; None if its checksum is not right."""
    if len(slot) < _HEAD.size + _CRC.size:
        return None
    magic, sequence, length = _HEAD.unpack_from(slot)
    end = _HEAD.size + length
    if magic != _MAGIC or end + _CRC.size > len(slot) or _CRC.unpack_from(slot, end)[0] != crc32c(slot[:end]):
        return None
    return sequence, slot[_HEAD.size : end]


class SlottedRecord:
    """A few bytes that are replaced atomically: the newer of two slots whose checksum is right."""

    __slots__ = ("_disk", "file")

    def __init__(self, disk: Disk, path: str, *, write: bool, create: bool = False) -> None:
        """Open the record, or create an empty one, which is durable once its directory and its content are synced."""
        self._disk = disk
        self.file: OpenFile = open_or_make(disk, path) if create else disk.open(path, write=write)

    def load(self) -> bytes | None:
        """The content stored last; None if there is none, or both slots are damaged."""
        slots = self._slots()
        return max(slots)[1] if slots else None

    def store(self, payload: bytes, *, sync: bool = True) -> None:
        """Replace the content; durable when this returns, if `sync`."""
        assert len(payload) <= PAYLOAD_BYTES_MAX
        sequence = max((sequence for sequence, _ in self._slots()), default=0) + 1
        self._allocate()
        slot = _HEAD.pack(_MAGIC, sequence, len(payload)) + payload
        self._disk.write(self.file, sequence % 2 * _SLOT_BYTES, slot + _CRC.pack(crc32c(slot)))
        if sync:
            self._disk.sync(self.file)

    def _allocate(self) -> None:
        """Allocate both slots at first, so that replacing the content works on a full disk."""
        size = self._disk.size(self.file)
        if size < 2 * _SLOT_BYTES:
            self._disk.zero(self.file, size, 2 * _SLOT_BYTES - size)

    def _slots(self) -> list[tuple[int, bytes]]:
        read = (self._disk.read(self.file, position, _SLOT_BYTES) for position in (0, _SLOT_BYTES))
        return [slot for slot in map(_slot, read) if slot is not None]
