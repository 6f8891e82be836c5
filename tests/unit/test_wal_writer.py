"""The writer of the write-ahead log: threads, doubts, fencing and giving up."""

import threading
import time

import pytest
from tests.replica import KEYS, DoubtfulStore, committed, open_writer, seal, wait_until

from headrace.model.errors import Closed, Fenced, StoreUnavailable, Timeout
from headrace.storage.replicated.keys import Position
from headrace.storage.replicated.operations import MakeDirectory, decode_object, encode_operation
from headrace.storage.replicated.wal import EAGER_BYTES
from headrace.storage.replicated.writer import WalWriter
from headrace.storage.stores.memory import MemoryStore
from headrace.storage.stores.store import KeyExists


def record(writer: WalWriter, number: int = 0) -> None:
    writer.record(encode_operation(MakeDirectory(f"d{number}")))


def directories(store: MemoryStore) -> list[str]:
    return [operation.path for operations in committed(store) for operation in operations]  # type: ignore[union-attr]


@pytest.mark.parametrize("seed", range(5))
def test_everything_arrives_once_and_in_order_whatever_requests_and_answers_are_lost(seed: int) -> None:
    store = DoubtfulStore(seed, doubt=0.3, delay_s=0.002)
    writer = open_writer(store)
    for number in range(60):
        record(writer, number)
        if number % 3 == 0:
            writer.push()
        if number % 10 == 0:
            writer.wait()
            assert len(directories(store)) > number
    position = writer.flush(60)
    assert directories(store) == [f"d{number}" for number in range(60)]
    assert position == writer.committed == Position(1, len(list(committed(store))))
    counts = writer.statistics()
    assert (counts.objects, counts.backlog_bytes, counts.in_flight) == (position.objects, 0, 0)
    assert counts.retries > 0
    assert counts.bytes == sum(len(stored.data) for stored in store._objects.values())
    writer.close()


def test_a_later_object_is_not_acknowledged_before_an_earlier_one() -> None:
    store = DoubtfulStore(1, doubt=0.0)
    store.blocked.add(KEYS.wal(1, 0))
    writer = open_writer(store)
    done: list[int] = []
    threads = []
    for number in range(3):
        record(writer, number)
        thread = threading.Thread(target=lambda: (writer.wait(), done.append(1)))
        thread.start()
        threads.append(thread)
        wait_until(lambda number=number: writer.statistics().in_flight + len(store.puts) > number)
    wait_until(lambda: len(store.puts) == 2)
    time.sleep(0.02)
    assert done == []
    assert writer.committed == Position(1, 0)
    with pytest.raises(Timeout):
        writer.wait(timeout=0.01)
    store.blocked.clear()
    for thread in threads:
        thread.join(30)
    assert len(done) == 3
    assert store.puts == [KEYS.wal(1, 1), KEYS.wal(1, 2), KEYS.wal(1, 0)]
    writer.close()


def test_an_answer_that_was_lost_is_recognised_by_the_nonce() -> None:
    class Losing(MemoryStore):
        def put_new(self, key: str, data: bytes) -> None:
            super().put_new(key, data)
            raise StoreUnavailable("the answer was lost")

    store = Losing()
    writer = open_writer(store)
    record(writer)
    writer.wait()
    assert writer.statistics().retries == 1
    assert len(list(committed(store))) == 1
    writer.close()


@pytest.mark.parametrize("acknowledged_before", [0, 3])
def test_a_seal_fences_once_and_for_all(acknowledged_before: int) -> None:
    store, fenced = MemoryStore(), []
    writer = open_writer(store, on_fenced=lambda: fenced.append(threading.current_thread()))
    for number in range(acknowledged_before):
        record(writer, number)
        writer.wait()
    seal(store)
    for number in range(4):
        writer.record_write(1, number, bytes(EAGER_BYTES))
    with pytest.raises(Fenced, match="seal of epoch 2"):
        writer.wait()
    with pytest.raises(Fenced):
        writer.flush(1)
    wait_until(lambda: len(fenced) == 1)
    assert isinstance(writer.failure, Fenced)
    writer.abandon()
    writer.close()
    assert isinstance(writer.failure, Fenced)
    assert len(fenced) == 1
    assert len(directories(store)) == acknowledged_before


def test_another_writer_of_the_same_epoch_fences_too() -> None:
    store = MemoryStore()
    first, second = open_writer(store), open_writer(store, nonce=b"x" * 16)
    record(first)
    first.wait()
    record(second)
    with pytest.raises(Fenced, match="another writer"):
        second.wait()


def test_objects_that_are_put_although_another_sealed_are_never_acknowledged() -> None:
    """The put of position 1 succeeds behind the seal at position 0: it does not count, and nobody is told."""
    store = DoubtfulStore(1, doubt=0.0)
    store.blocked.add(KEYS.wal(1, 0))
    writer = open_writer(store)
    record(writer, 0)
    writer.push()
    wait_until(lambda: writer.statistics().in_flight == 1)
    record(writer, 1)
    writer.push()
    wait_until(lambda: store.puts == [KEYS.wal(1, 1)])
    assert seal(store) == 0
    store.blocked.clear()
    with pytest.raises(Fenced):
        writer.wait()
    assert writer.committed == Position(1, 0)
    assert directories(store) == []


def test_giving_up_while_the_store_does_not_answer() -> None:
    release = threading.Event()

    class Hanging(MemoryStore):
        def put_new(self, key: str, data: bytes) -> None:
            release.wait(60)
            super().put_new(key, data)

    store = Hanging()
    writer = open_writer(store)
    record(writer)
    failures: list[BaseException] = []

    def wait() -> None:
        try:
            writer.wait()
        except StoreUnavailable as error:
            failures.append(error)

    waiting = threading.Thread(target=wait)
    waiting.start()
    wait_until(lambda: writer.statistics().in_flight == 1)
    writer.abandon()
    waiting.join(30)
    assert len(failures) == 1
    with pytest.raises(StoreUnavailable):
        writer.check()
    release.set()
    wait_until(lambda: len(list(committed(store))) == 1)
    assert writer.committed == Position(1, 0)


def test_a_store_that_contradicts_itself_or_breaks_is_asked_again() -> None:
    class Odd(MemoryStore):
        answers = 0

        def put_new(self, key: str, data: bytes) -> None:
            self.answers += 1
            if self.answers == 1:
                raise KeyExists(key)
            if self.answers == 2:
                raise ValueError("a mistake of the driver")
            super().put_new(key, data)

    store = Odd()
    writer = open_writer(store)
    record(writer)
    writer.wait()
    assert store.answers == 3
    writer.close()
    with pytest.raises(Closed):
        writer.check()


def test_a_writer_begins_behind_the_object_of_the_claim() -> None:
    store = MemoryStore()
    writer = open_writer(store, position=1)
    record(writer)
    assert writer.cut() == (Position(1, 2), 1)
    writer.wait()
    assert store.names("") == [KEYS.wal(1, 1)]
    assert writer.committed == Position(1, 2)
    stored = store.get(KEYS.wal(1, 1))
    assert stored is not None
    assert decode_object(stored.data)[0].time_us == 1_000


def test_followers_are_told_of_commits() -> None:
    store = MemoryStore()
    seen: list[int] = []
    writer = open_writer(store, on_committed=lambda: seen.append(writer.committed.objects))
    for number in range(5):
        record(writer, number)
        writer.wait()
    wait_until(lambda: seen == [1, 2, 3, 4, 5])


def test_no_more_threads_than_puts_in_flight_and_none_after_the_end() -> None:
    store = DoubtfulStore(1, doubt=0.0, delay_s=0.01)
    writer = open_writer(store, epoch=77)
    for number in range(40):
        writer.record_write(1, number, bytes(EAGER_BYTES))
    names = [thread.name for thread in threading.enumerate()]
    assert 1 <= names.count("headrace-wal-77") <= 4
    writer.flush(30)
    writer.close()
    wait_until(lambda: "headrace-wal-77" not in [thread.name for thread in threading.enumerate()])


def test_a_waiting_thread_puts_by_itself_while_the_store_is_quick() -> None:
    threads: list[str] = []

    class Watched(MemoryStore):
        def put_new(self, key: str, data: bytes) -> None:
            threads.append(threading.current_thread().name)
            super().put_new(key, data)

    store = Watched()
    writer = open_writer(store, clock=lambda: 0.0)
    for number in range(3):
        record(writer, number)
        writer.wait()
    assert threads[0].startswith("headrace-wal")
    assert threads[2] == threading.current_thread().name


def test_puts_to_a_slow_store_begin_at_distances_and_take_together_what_came_meanwhile() -> None:
    clock = [100.0]
    store = DoubtfulStore(1, doubt=0.0)
    store.blocked.add(KEYS.wal(1, 0))
    writer = open_writer(store, clock=lambda: clock[0])
    writer._latency_s = 0.04
    told: list[object] = []
    record(writer, 0)
    writer.when_committed(told.append)
    wait_until(lambda: writer.statistics().in_flight == 1)
    for number in (1, 2, 3):
        record(writer, number)
        writer.when_committed(told.append)
    time.sleep(0.03)
    assert writer.statistics().in_flight == 1
    clock[0] += 0.011
    wait_until(lambda: store.puts == [KEYS.wal(1, 1)])
    assert told == []
    store.blocked.clear()
    wait_until(lambda: told == [None] * 4)
    assert [len(operations) for operations in committed(store)] == [1, 3]
    writer.close()


def test_who_waits_without_a_thread_is_told_of_the_end_of_the_epoch() -> None:
    store = MemoryStore()
    writer = open_writer(store)
    seal(store)
    told: list[object] = []
    record(writer)
    writer.when_committed(told.append)
    wait_until(lambda: len(told) == 1)
    assert isinstance(told[0], Fenced)
    writer.when_committed(told.append)
    assert isinstance(told[1], Fenced)
    writer.close()


def test_a_callback_that_fails_keeps_nobody_else_waiting(caplog: pytest.LogCaptureFixture) -> None:
    writer = open_writer(MemoryStore())
    told: list[object] = []

    def fail(_: object) -> None:
        raise ValueError("a mistake")

    record(writer)
    writer.when_committed(fail)
    record(writer)
    writer.when_committed(told.append)
    wait_until(lambda: told == [None])
    wait_until(lambda: "callback of a sync failed" in caplog.text)
    writer.close()
