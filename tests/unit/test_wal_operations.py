"""The codec of WAL objects, and the applier: bytes come back as they were, damage is found, and ids follow files."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.model.errors import UnsupportedFormat
from headrace.storage.replicated.applier import Applier, OperationMismatch
from headrace.storage.replicated.operations import (
    FRAME_BYTES,
    OPERATIONS,
    SEAL,
    CreateFile,
    DamagedObject,
    MakeDirectory,
    OpenExisting,
    Operation,
    Remove,
    RemoveDirectory,
    Rename,
    Truncate,
    WalHeader,
    Write,
    Zero,
    decode_header,
    decode_object,
    decode_operations,
    encode_object,
    encode_operation,
    encode_seal,
)
from headrace.testing import MemoryDisk

NONCE = bytes(range(16))
IDS = st.integers(1, 2**32 - 1)
NUMBERS = st.integers(0, 2**64 - 1)
PATHS = st.lists(
    st.text(st.characters(exclude_characters="/\0", exclude_categories=("Cs",)), min_size=1, max_size=10).filter(
        lambda name: name not in (".", "..")
    ),
    min_size=1,
    max_size=4,
).map("/".join)
EVERY_OPERATION: st.SearchStrategy[Operation] = st.one_of(
    st.builds(CreateFile, IDS, PATHS),
    st.builds(OpenExisting, IDS, PATHS),
    st.builds(Write, IDS, NUMBERS, st.binary(max_size=50)),
    st.builds(Zero, IDS, NUMBERS, NUMBERS),
    st.builds(Truncate, IDS, NUMBERS),
    st.builds(Rename, PATHS, PATHS),
    st.builds(Remove, PATHS),
    st.builds(MakeDirectory, PATHS),
    st.builds(RemoveDirectory, PATHS),
)


@given(st.lists(EVERY_OPERATION, max_size=10), NUMBERS, NUMBERS, st.integers(-(2**63), 2**63 - 1))
def test_operations_come_back_as_they_were(operations: list[Operation], epoch: int, position: int, time: int) -> None:
    header = WalHeader(OPERATIONS, epoch, position, NONCE, time, len(operations))
    data = encode_object(header, [encode_operation(operation) for operation in operations])
    found, decoded = decode_object(data)
    assert found == header == decode_header(data)
    assert decoded == operations
    assert [type(operation) for operation in decoded] == [type(operation) for operation in operations]
    assert list(decode_operations(b"".join(map(encode_operation, operations)))) == operations


@given(st.lists(EVERY_OPERATION, max_size=3), st.data())
def test_every_flipped_bit_and_every_missing_byte_is_found(operations: list[Operation], draw: st.DataObject) -> None:
    header = WalHeader(OPERATIONS, 1, 2, NONCE, 3, len(operations))
    data = bytearray(encode_object(header, [encode_operation(operation) for operation in operations]))
    length = draw.draw(st.integers(0, len(data) - 1))
    with pytest.raises(DamagedObject):
        decode_object(bytes(data[:length]))
    bit = draw.draw(st.integers(0, 8 * len(data) - 1))
    data[bit // 8] ^= 1 << bit % 8
    with pytest.raises(DamagedObject):
        decode_object(bytes(data))


def test_a_seal_says_who_sealed() -> None:
    seal = encode_seal(3, 42, NONCE, 1_000, 5)
    assert len(seal) == FRAME_BYTES
    assert decode_object(seal) == (WalHeader(SEAL, 3, 42, NONCE, 1_000, 0, 5), [])


def test_a_later_version_is_refused_not_mistaken_for_damage() -> None:
    kind = encode_object(WalHeader(7, 1, 2, NONCE, 3))
    with pytest.raises(UnsupportedFormat, match="kind 7"):
        decode_header(kind)


@pytest.mark.parametrize("path", ["/etc/passwd", "a/../../b", "..", "", "a//b", "./a"])
def test_a_path_never_leaves_the_directory(path: str) -> None:
    with pytest.raises(DamagedObject, match="not a path"):
        list(decode_operations(encode_operation(Remove(path))))


def content(disk: MemoryDisk, path: str) -> bytes:
    file = disk.open(path)
    return disk.read(file, 0, disk.size(file))


def test_ids_follow_files_through_renames() -> None:
    disk = MemoryDisk()
    applier = Applier(disk, "/root")
    applier.apply(
        [
            MakeDirectory("d"),
            CreateFile(1, "d/a"),
            Write(1, 0, b"old"),
            CreateFile(2, "d/a.tmp"),
            Write(2, 0, b"new"),
            Rename("d/a.tmp", "d/a"),
            Write(2, 3, b" content"),
            Rename("d", "e"),
            Truncate(2, 8),
            Zero(2, 7, 3),
        ]
    )
    assert content(disk, "/root/e/a") == b"new con" + bytes(3)
    assert applier.bindings == {2: "e/a"}
    with pytest.raises(OperationMismatch, match="Write"):
        applier.apply([Write(1, 0, b"x")])
    continued = Applier(disk, "/root", applier.bindings)
    continued.apply([Write(2, 0, b"N")])
    assert content(disk, "/root/e/a")[:3] == b"New"
    continued.apply([RemoveDirectory("e"), Remove("none")])
    assert continued.bindings == {}
    assert disk.names("/root") == []


def test_an_operation_that_does_not_fit_is_refused() -> None:
    disk = MemoryDisk()
    applier = Applier(disk, "/root")
    applier.apply([CreateFile(1, "a")])
    for operation in (CreateFile(2, "a"), OpenExisting(2, "b"), Rename("b", "c"), Write(9, 0, b""), Zero(9, 0, 1)):
        with pytest.raises(OperationMismatch, match=type(operation).__name__):
            applier.apply([operation])
    applier.begin_epoch()
    with pytest.raises(OperationMismatch):
        applier.apply([Write(1, 0, b"x")])
    applier.apply([OpenExisting(1, "a"), Write(1, 0, b"x")])
    assert content(disk, "/root/a") == b"x"


def test_more_files_than_are_kept_open() -> None:
    disk = MemoryDisk()
    applier = Applier(disk, "/root")
    applier.apply([CreateFile(number, f"f{number}") for number in range(1, 200)])
    applier.apply([Write(number, 0, b"%d" % number) for number in range(1, 200)])
    assert all(content(disk, f"/root/f{number}") == b"%d" % number for number in range(1, 200))
