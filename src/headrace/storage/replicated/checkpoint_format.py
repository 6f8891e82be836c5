"""The codec of checkpoints: the files of a shard at one position of its log, by the hashes of their chunks.

object = `HRCP` | version u8 | three zeros | msgpack | CRC-32C of all before
"""

import hashlib
import struct
from collections.abc import Iterator
from typing import NamedTuple

import msgspec
from crc32c import crc32c

from headrace.model.errors import CorruptFile, UnsupportedFormat
from headrace.storage.replicated.keys import Position

CHUNK_BYTES = 8 << 20
"""Files are cut at multiples of this."""
MAGIC = b"HRCP"
VERSION = 1
_HEAD = struct.Struct("<4sB3x")
_CRC = struct.Struct("<I")


class ChunkRef(msgspec.Struct, array_like=True, frozen=True):
    """A chunk of a file, and the object that holds it."""

    digest: bytes
    """The SHA-256 of its bytes."""
    upload: str
    """Which checkpoint uploaded it: its epoch and a random text. No object's name is ever used again."""

    @property
    def name(self) -> str:
        """The name of the object."""
        return f"{self.digest.hex()}-{self.upload}"


class CheckpointFile(msgspec.Struct, array_like=True, frozen=True):
    """A file of a checkpoint."""

    path: bytes
    """Relative to the shard's directory."""
    length: int
    data_end: int
    """The end of the chunks: there are zeros from here to the length."""
    chunks: tuple[ChunkRef, ...]

    def spans(self) -> Iterator[tuple[int, int, ChunkRef]]:
        """Position and length of each chunk."""
        for number, chunk in enumerate(self.chunks):
            begin = number * CHUNK_BYTES
            yield begin, min(CHUNK_BYTES, self.data_end - begin), chunk


class Checkpoint(msgspec.Struct, array_like=True, frozen=True):
    """The state of a shard's directory at a position of its log."""

    epoch: int
    objects: int
    time_us: int
    """When it was made, by its owner's clock."""
    directories: tuple[bytes, ...]
    """The paths of all, also of empty ones, each after the one that holds it."""
    files: tuple[CheckpointFile, ...]
    """None if `parts` has them."""
    bindings: dict[int, bytes]
    """The file ids of the epoch with their paths, which later operations of the epoch use."""
    seals: tuple[tuple[int, int], ...]
    """Epoch and position of the seal of every earlier epoch."""
    parts: tuple[ChunkRef, ...] = ()
    """Chunks with the files of a checkpoint that would be too large for one object, as one msgpack array."""

    @property
    def position(self) -> Position:
        """The position of the state."""
        return Position(self.epoch, self.objects)

    def chunk_names(self) -> set[str]:
        """The names of all chunks that it needs."""
        names = {chunk.name for file in self.files for chunk in file.chunks}
        return names | {part.name for part in self.parts}


_decoder = msgspec.msgpack.Decoder(Checkpoint)
_files_decoder = msgspec.msgpack.Decoder(tuple[CheckpointFile, ...])


class CheckpointName(NamedTuple):
    """What the name of a checkpoint says; names sort like positions."""

    position: Position
    time_us: int
    upload: str

    def __str__(self) -> str:
        return f"{self.position.epoch:08d}-{self.position.objects:012d}-{self.time_us:016d}-{self.upload}"


def parse_checkpoint_name(name: str) -> CheckpointName:
    """The parts of a checkpoint's name.

    >>> parse_checkpoint_name("00000003-000000000042-1700000000000000-5f0c9a1e").position
    Position(epoch=3, objects=42)
    """
    epoch, objects, time_us, upload = name.split("-")
    return CheckpointName(Position(int(epoch), int(objects)), int(time_us), upload)


def upload_epoch(chunk_name: str) -> int:
    """The epoch in the name of a chunk: that of the owner that uploaded it."""
    return int(chunk_name.split("-")[1])


def encode_checkpoint(checkpoint: Checkpoint) -> bytes:
    """The bytes of a checkpoint's object."""
    data = _HEAD.pack(MAGIC, VERSION) + msgspec.msgpack.encode(checkpoint)
    return data + _CRC.pack(crc32c(data))


def decode_checkpoint(data: bytes, key: str) -> Checkpoint:
    """The checkpoint in the bytes of an object; raises CorruptFile if they are damaged."""
    if len(data) < _HEAD.size + _CRC.size or data[:4] != MAGIC:
        raise CorruptFile(f"{key} is not a checkpoint", key=key)
    if data[4] != VERSION:
        raise UnsupportedFormat(f"{key} has version {data[4]}, this Headrace knows version {VERSION}")
    if _CRC.unpack_from(data, len(data) - _CRC.size)[0] != crc32c(memoryview(data)[: -_CRC.size]):
        raise CorruptFile(f"{key} is damaged", key=key)
    return _decoder.decode(memoryview(data)[_HEAD.size : -_CRC.size])


def encode_files(files: tuple[CheckpointFile, ...]) -> bytes:
    """The files of a checkpoint by themselves, for its `parts`."""
    return msgspec.msgpack.encode(files)


def decode_files(data: bytes) -> tuple[CheckpointFile, ...]:
    """The files in the bytes of a checkpoint's parts, whose hashes were compared."""
    return _files_decoder.decode(data)


def digest_of(data: bytes | memoryview) -> bytes:
    """The SHA-256 of a chunk."""
    return hashlib.sha256(data).digest()


def path_bytes(path: str) -> bytes:
    """A path as it is stored."""
    return path.encode("utf-8", "surrogateescape")


def path_text(path: bytes) -> str:
    """A path as a Disk takes it."""
    return path.decode("utf-8", "surrogateescape")
