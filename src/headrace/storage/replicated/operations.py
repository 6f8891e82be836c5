"""The codec of WAL objects: the ordered changes to the files of a shard, or a seal. FORMAT.md has every byte.

    object = header | operations | CRC-32C of all before

A writer keeps the encoded operations as a list of parts and calls `encode_object` when it cuts an object, so that the
data of a write is copied once when it is recorded and once when the object is made.
"""

import struct
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from crc32c import crc32c

from headrace.model.errors import UnsupportedFormat

MAGIC = b"HRWO"
VERSION = 1
OPERATIONS, SEAL = 0, 1
"""The kinds of WAL objects."""
NONCE_BYTES = 16
_CREATE, _OPEN, _WRITE, _ZERO, _TRUNCATE, _RENAME, _REMOVE, _MAKE, _REMOVE_DIRECTORY = range(1, 10)

# magic version kind zero | epoch position nonce time_us sealed_by count length
_HEADER = struct.Struct("<4sBBH QQ16sqQII")
_CRC = struct.Struct("<I")
_ID_PATH = struct.Struct("<BIH")
_ID_POSITION_U32 = struct.Struct("<BIQI")
_ID_POSITION_U64 = struct.Struct("<BIQQ")
_ID_U64 = struct.Struct("<BIQ")
_PATH = struct.Struct("<BH")
_PATHS = struct.Struct("<BHH")

HEADER_BYTES = _HEADER.size
FRAME_BYTES = HEADER_BYTES + _CRC.size
"""The size of an object without operations."""
WRITE_HEAD_BYTES = _ID_POSITION_U32.size


class DamagedObject(Exception):
    """The bytes are not a whole WAL object."""


class CreateFile(NamedTuple):
    """A new, empty file, which later operations name by its id. Ids are per epoch, from 1."""

    file_id: int
    path: str
    """Paths are relative to the shard's directory, with `/` between the parts."""


class OpenExisting(NamedTuple):
    """Binds an id to a file that the checkpoint has, or that an earlier epoch made."""

    file_id: int
    path: str


class Write(NamedTuple):
    """Bytes of a file, which grows if it ends before them."""

    file_id: int
    position: int
    data: bytes | memoryview


class Zero(NamedTuple):
    """Zeros in a file, which grows if it ends before them."""

    file_id: int
    position: int
    length: int


class Truncate(NamedTuple):
    """The length of a file; one that grows has zeros there."""

    file_id: int
    length: int


class Rename(NamedTuple):
    """Another path of a file or directory; a file at the new path is replaced. Ids stay with their files."""

    source: str
    target: str


class Remove(NamedTuple):
    """The end of a file; its id is never used again."""

    path: str


class MakeDirectory(NamedTuple):
    """A new directory."""

    path: str


class RemoveDirectory(NamedTuple):
    """The end of a directory and of all that is in it."""

    path: str


Operation = CreateFile | OpenExisting | Write | Zero | Truncate | Rename | Remove | MakeDirectory | RemoveDirectory

_WITH_PATH: dict[int, type[Remove] | type[MakeDirectory] | type[RemoveDirectory]] = {
    _REMOVE: Remove,
    _MAKE: MakeDirectory,
    _REMOVE_DIRECTORY: RemoveDirectory,
}
_TAGS = {kind: tag for tag, kind in _WITH_PATH.items()}


class WalHeader(NamedTuple):
    """The header of a WAL object."""

    kind: int
    """OPERATIONS or SEAL."""
    epoch: int
    position: int
    """Counts the objects of the epoch from 0."""
    nonce: bytes
    """Random, one for each claim: a writer recognises its own object after a lost answer."""
    time_us: int
    """When the object was made, by its writer's clock; for restoring to a moment, never for ordering."""
    operations: int = 0
    """How many there are."""
    sealed_by: int = 0
    """Of a seal: the epoch whose owner put it."""


def encode_write_head(file_id: int, position: int, length: int) -> bytes:
    """The encoded Write of so many bytes, without the bytes themselves, which the caller puts behind it."""
    return _ID_POSITION_U32.pack(_WRITE, file_id, position, length)


def encode_operation(operation: Operation) -> bytes:
    """The bytes of an operation."""
    match operation:
        case Write(file_id, position, data):
            return encode_write_head(file_id, position, len(data)) + data
        case CreateFile(file_id, path) | OpenExisting(file_id, path):
            name = _encode_path(path)
            return _ID_PATH.pack(_CREATE if type(operation) is CreateFile else _OPEN, file_id, len(name)) + name
        case Zero(file_id, position, length):
            return _ID_POSITION_U64.pack(_ZERO, file_id, position, length)
        case Truncate(file_id, length):
            return _ID_U64.pack(_TRUNCATE, file_id, length)
        case Rename(source, target):
            old, new = _encode_path(source), _encode_path(target)
            return _PATHS.pack(_RENAME, len(old), len(new)) + old + new
        case Remove(path) | MakeDirectory(path) | RemoveDirectory(path):
            name = _encode_path(path)
            return _PATH.pack(_TAGS[type(operation)], len(name)) + name


def decode_operations(data: bytes | memoryview) -> Iterator[Operation]:
    """The operations in these bytes, one after the other; the data of writes are views of them.

    Raises DamagedObject at one that is cut off or unknown.
    """
    view = memoryview(data)
    at = 0
    while at < len(view):
        try:
            operation, at = _decode_operation(view, at)
        except (struct.error, UnicodeDecodeError) as error:
            raise DamagedObject(f"an operation at byte {at} is damaged: {error}") from error
        yield operation


def encode_object(header: WalHeader, parts: Sequence[bytes | bytearray | memoryview] = ()) -> bytes:
    """A WAL object with the operations that are encoded in these parts."""
    length = sum(map(len, parts))
    head = _HEADER.pack(
        *(MAGIC, VERSION, header.kind, 0, header.epoch, header.position, header.nonce),
        *(header.time_us, header.sealed_by, header.operations, length),
    )
    crc = crc32c(head)
    for part in parts:
        crc = crc32c(part, crc)
    return b"".join((head, *parts, _CRC.pack(crc)))


def encode_seal(epoch: int, position: int, nonce: bytes, time_us: int, sealed_by: int) -> bytes:
    """A seal: the object that the owner of a later epoch puts into the first free position of an earlier one."""
    return encode_object(WalHeader(SEAL, epoch, position, nonce, time_us, sealed_by=sealed_by))


def decode_header(data: bytes | memoryview) -> WalHeader:
    """The header of a whole WAL object, after its checksum was compared.

    Raises DamagedObject, or UnsupportedFormat if a later Headrace wrote it.
    """
    if len(data) < FRAME_BYTES or bytes(data[:4]) != MAGIC:
        raise DamagedObject(f"{len(data)} bytes are not a WAL object")
    _, version, kind, _, epoch, position, nonce, time_us, sealed_by, count, length = _HEADER.unpack_from(data)
    view = memoryview(data)
    if len(data) != FRAME_BYTES + length or _CRC.unpack_from(data, len(data) - 4)[0] != crc32c(view[:-4]):
        raise DamagedObject(f"the WAL object {epoch}:{position} is damaged")
    if version != VERSION or kind not in (OPERATIONS, SEAL):
        raise UnsupportedFormat(
            f"the WAL object {epoch}:{position} has version {version} and kind {kind}, which this Headrace does not "
            "know; use the Headrace that wrote it, or a newer one"
        )
    return WalHeader(kind, epoch, position, nonce, time_us, count, sealed_by)


def decode_object(data: bytes) -> tuple[WalHeader, list[Operation]]:
    """The header and the operations of a WAL object; a seal has none. Raises what `decode_header` does."""
    header = decode_header(data)
    operations = list(decode_operations(memoryview(data)[HEADER_BYTES : -_CRC.size]))
    if len(operations) != header.operations:
        raise DamagedObject(f"the WAL object {header.epoch}:{header.position} has {len(operations)} operations")
    return header, operations


def _decode_operation(view: memoryview, at: int) -> tuple[Operation, int]:
    tag = view[at]
    if tag == _WRITE:
        _, file_id, position, length = _ID_POSITION_U32.unpack_from(view, at)
        begin = at + _ID_POSITION_U32.size
        return Write(file_id, position, _cut(view, begin, length)), begin + length
    if tag in (_CREATE, _OPEN):
        _, file_id, length = _ID_PATH.unpack_from(view, at)
        begin = at + _ID_PATH.size
        kind = CreateFile if tag == _CREATE else OpenExisting
        return kind(file_id, _decode_path(_cut(view, begin, length))), begin + length
    if tag == _ZERO:
        return Zero(*_ID_POSITION_U64.unpack_from(view, at)[1:]), at + _ID_POSITION_U64.size
    if tag == _TRUNCATE:
        return Truncate(*_ID_U64.unpack_from(view, at)[1:]), at + _ID_U64.size
    if tag == _RENAME:
        _, length, more = _PATHS.unpack_from(view, at)
        begin = at + _PATHS.size
        source, target = _cut(view, begin, length), _cut(view, begin + length, more)
        return Rename(_decode_path(source), _decode_path(target)), begin + length + more
    if tag in _WITH_PATH:
        _, length = _PATH.unpack_from(view, at)
        begin = at + _PATH.size
        return _WITH_PATH[tag](_decode_path(_cut(view, begin, length))), begin + length
    raise DamagedObject(f"there is no operation {tag}")


def _cut(view: memoryview, begin: int, length: int) -> memoryview:
    if begin + length > len(view):
        raise DamagedObject("the operations end too early")
    return view[begin : begin + length]


def _encode_path(path: str) -> bytes:
    return path.encode("utf-8", "surrogateescape")


def _decode_path(name: memoryview) -> str:
    path = str(name, "utf-8", "surrogateescape")
    if not {"", ".", ".."}.isdisjoint(path.split("/")):  # never outside the shard's directory, whoever wrote it
        raise DamagedObject(f"{path!r} is not a path below the shard's directory")
    return path
