"""The write-ahead log of an epoch, simulated: any order of answers, and commits in order."""

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.model.errors import Fenced, StoreUnavailable
from headrace.storage.replicated.operations import (
    OPERATIONS,
    MakeDirectory,
    Operation,
    WalHeader,
    Write,
    decode_object,
    encode_object,
    encode_operation,
    encode_seal,
)
from headrace.storage.replicated.wal import (
    EAGER_BYTES,
    IN_FLIGHT_MAX,
    PART_BYTES,
    PendingObject,
    PutOutcome,
    WriteAheadLog,
)
from headrace.storage.stores.store import OBJECT_BYTES_MAX

NONCE, OTHER = b"n" * 16, b"o" * 16


def record(wal: WriteAheadLog, number: int) -> Operation:
    operation = MakeDirectory(f"d{number}")
    wal.record(encode_operation(operation))
    return operation


def taken(wal: WriteAheadLog) -> PendingObject:
    found = wal.next_put()
    assert found is not None
    return found


def operations(pending: PendingObject) -> list[Operation]:
    header, found = decode_object(pending.encoded(1, NONCE, lambda: 7))
    assert header == WalHeader(OPERATIONS, 1, pending.position, NONCE, 7, len(found))
    return found


@given(st.integers(0, 2**32), st.integers(1, 200))
def test_objects_are_acknowledged_in_any_order_and_committed_in_order(seed: int, steps: int) -> None:
    random = Random(seed)
    wal = WriteAheadLog(1, NONCE)
    recorded: list[Operation] = []
    flying: list[PendingObject] = []
    stored: dict[int, list[Operation]] = {}
    acknowledged: set[int] = set()
    told: list[int] = []
    waiting = 0
    for _ in range(steps):
        action = random.randrange(5)
        if action == 0:
            recorded.append(record(wal, len(recorded)))
        elif action == 1:
            sequence = random.randint(0, wal.recorded)
            waiting += wal.wait(sequence, lambda sequence=sequence: told.append(sequence))
        elif action == 2 and random.random() < 0.2:
            wal.cut()
        elif action == 3:
            pending = wal.next_put()
            assert pending is None or len(flying) < IN_FLIGHT_MAX
            if pending is not None:
                flying.append(pending)
                stored[pending.position] = operations(pending)
        elif flying:
            pending = flying.pop(random.randrange(len(flying)))
            acknowledged.add(pending.position)
            for waiter in wal.acknowledge(pending.position):
                waiter()
                assert told[-1] <= wal.committed
        assert wal.in_flight == len(flying)
        run = next(position for position in range(len(stored) + 1) if position not in acknowledged)
        assert wal.committed_objects == run
        assert [each for position in range(run) for each in stored[position]] == recorded[: wal.committed]
        assert wal.backlog_bytes == sum(len(encode_operation(each)) for each in recorded[wal.committed :])
    assert wal.failure is None
    while (pending := wal.next_put()) is not None or flying:
        if pending is not None:
            flying.append(pending)
            stored[pending.position] = operations(pending)
        else:
            for waiter in wal.acknowledge(flying.pop().position):
                waiter()
    assert len(told) == waiting


def test_an_object_is_cut_when_somebody_waits_or_much_is_recorded() -> None:
    wal = WriteAheadLog(1, NONCE)
    record(wal, 0)
    assert wal.next_put() is None
    wal.want(1)
    assert operations(taken(wal)) == [MakeDirectory("d0")]
    wal.record_write(1, 0, bytes(EAGER_BYTES))
    assert taken(wal).position == 1
    record(wal, 1)
    assert wal.next_put() is None
    assert wal.cut() == wal.cut() == 3
    assert taken(wal).position == 2


def test_no_object_is_too_large_and_parts_of_a_write_make_the_whole() -> None:
    wal = WriteAheadLog(1, NONCE)
    data = Random(1).randbytes(34 << 20)
    record(wal, 0)
    wal.record_write(5, 1000, data)
    wal.want(wal.recorded)
    copy = bytearray(len(data))
    while (pending := wal.next_put()) is not None:
        encoded = pending.encoded(1, NONCE, lambda: 7)
        assert len(encoded) <= OBJECT_BYTES_MAX
        for write in operations(pending):
            if isinstance(write, Write):
                assert len(write.data) <= PART_BYTES
                copy[write.position - 1000 : write.position - 1000 + len(write.data)] = write.data
        wal.acknowledge(pending.position)
    assert copy == data
    assert wal.backlog_bytes == 0


def test_the_same_bytes_each_time() -> None:
    wal = WriteAheadLog(1, NONCE)
    record(wal, 0)
    wal.want(1)
    pending = taken(wal)
    times = iter([5, 6])
    assert pending.encoded(1, NONCE, lambda: next(times)) is pending.encoded(1, NONCE, lambda: next(times))


@pytest.mark.parametrize(
    ("found", "outcome"),
    [
        (encode_object(WalHeader(OPERATIONS, 3, 0, NONCE, 1)), PutOutcome.COMMITTED),
        (None, PutOutcome.AGAIN),
        (encode_object(WalHeader(OPERATIONS, 3, 0, OTHER, 1)), PutOutcome.FENCED),
        (encode_object(WalHeader(OPERATIONS, 2, 0, NONCE, 1)), PutOutcome.FENCED),
        (encode_seal(3, 0, OTHER, 1, 4), PutOutcome.FENCED),
        (b"something else", PutOutcome.FENCED),
    ],
)
def test_what_is_there_decides(found: bytes | None, outcome: PutOutcome) -> None:
    wal = WriteAheadLog(3, NONCE)
    assert wal.compare(found) is outcome
    if outcome is PutOutcome.FENCED and found is not None:
        assert "epoch 3 is over: position 0 has" in str(wal.fenced_error(0, found))


def test_after_a_failure_nothing_is_put_or_acknowledged() -> None:
    wal = WriteAheadLog(1, NONCE)
    record(wal, 0)
    assert wal.wait(1, lambda: None)
    pending = taken(wal)
    record(wal, 1)
    assert len(wal.fail(Fenced())) == 1
    assert wal.acknowledge(pending.position) == []
    assert (wal.committed, wal.committed_objects) == (0, 0)
    wal.want(2)
    assert wal.next_put() is None
    assert not wal.wait(2, lambda: None)
    wal.fail(StoreUnavailable())
    assert isinstance(wal.failure, Fenced)
