"""Those beside whom the log is measured: a bare file, SQLite, and queues from PyPI."""

import contextlib
import os
import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from headrace.bench.log_workloads import IN_FLIGHT_MAX
from headrace.bench.measure import Sample, Subject, Unavailable, check
from headrace.bench.payload import Payload
from headrace.model.batch import Columns, encode

_CHUNK = 1000


def append_written(payload: Payload) -> list[Subject]:
    """Appending batches, safe from a killed process."""
    return [
        raw_batches(payload, synced=False),
        sqlite_batches(payload, synced=False),
        litequeue_batches(payload, synced=False),
        persist_queue_file(payload),
    ]


def append_synced(payload: Payload) -> list[Subject]:
    """Appending batches, safe from a power loss."""
    return [
        raw_batches(payload, synced=True),
        sqlite_batches(payload, synced=True),
        litequeue_batches(payload, synced=True),
        persist_queue_sqlite(payload),
    ]


def append_single(payload: Payload) -> list[Subject]:
    """One call for each message."""
    return [
        raw_single(payload),
        sqlite_single(payload),
        litequeue_batches(payload, synced=False, last_synced=True),
        persist_queue_sqlite(payload),
    ]


def append_synced_latency(payload: Payload) -> list[Subject]:
    """One message synced, then the next."""
    return [raw_latency(payload), sqlite_latency(payload)]


def _timed(work: Callable[[], object]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


# A bare file


def raw_batches(payload: Payload, *, synced: bool) -> Subject:
    """The bytes of the same batches, encoded beforehand, and nothing else."""
    encoded = [bytes(encode(Columns(values), 0).data) for values in payload.pool]

    def sample(place: str, count: int) -> Sample:
        batches = count // payload.batch
        with _new_file(f"{place}/raw") as fd:
            seconds = _timed(lambda: _write_batches(fd, encoded, batches, synced))
        with open(f"{place}/raw", "rb") as file:
            for at in range(batches):
                right = encoded[at % len(encoded)]
                check(file.read(len(right)) == right, f"batch {at} is wrong")
            check(not file.read(1), "there is more than was written")
        return Sample(seconds)

    words = "written: os.write, never synced"
    if synced:
        words = f"synced: os.write, fdatasync after every {IN_FLIGHT_MAX} batches and at the end"
    return Subject(
        "raw_write", sample, {"api": "os.write of batches encoded before", "durability": words}, payload.batch
    )


def _write_batches(fd: int, encoded: list[bytes], batches: int, synced: bool) -> None:
    for at in range(batches):
        os.write(fd, encoded[at % len(encoded)])
        if synced and at % IN_FLIGHT_MAX == IN_FLIGHT_MAX - 1:
            os.fdatasync(fd)
    if synced:
        os.fdatasync(fd)


def raw_single(payload: Payload) -> Subject:
    """Values in a row in a buffered file, with nothing to tell where one ends."""

    def sample(place: str, count: int) -> Sample:
        with open(f"{place}/raw", "wb", buffering=128 << 10) as file:
            seconds = _timed(lambda: _write_each(file, payload.batches(count)))
        _check_raw_values(f"{place}/raw", payload, count)
        return Sample(seconds)

    words = "synced: fdatasync at the end, none before"
    return Subject("raw_write", sample, {"api": "file.write, 128 KiB buffer", "durability": words}, payload.batch)


def _write_each(file: Any, batches: Iterable[list[bytes]]) -> None:
    for values in batches:
        for value in values:
            file.write(value)
    file.flush()
    os.fdatasync(file.fileno())


def raw_latency(payload: Payload) -> Subject:
    """One value written and synced, then the next."""

    def sample(place: str, count: int) -> Sample:
        with _new_file(f"{place}/raw") as fd:
            taken = _taken(lambda value: _write_and_sync(fd, value), payload.values(count))
        _check_raw_values(f"{place}/raw", payload, count)
        return taken

    params = {"api": "os.write, then os.fdatasync, of a growing file", "durability": "synced: each message"}
    return Subject("raw_write", sample, params)


def _write_and_sync(fd: int, value: bytes) -> None:
    os.write(fd, value)
    os.fdatasync(fd)


def _taken(work: Callable[[bytes], object], values: Iterable[bytes]) -> Sample:
    latencies = []
    for value in values:
        begin = time.perf_counter()
        work(value)
        latencies.append(time.perf_counter() - begin)
    return Sample(sum(latencies), latencies)


def _check_raw_values(path: str, payload: Payload, count: int) -> None:
    def lists() -> Iterator[list[bytes]]:
        with open(path, "rb") as file:
            while chunk := file.read(payload.size * _CHUNK):
                yield [chunk[at : at + payload.size] for at in range(0, len(chunk), payload.size)]

    payload.check(lists(), count)


@contextlib.contextmanager
def _new_file(path: str) -> Iterator[int]:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    try:
        yield fd
    finally:
        os.close(fd)


# SQLite

_INSERT = "INSERT INTO log (value) VALUES (?)"
_SYNCHRONOUS = {False: "NORMAL", True: "FULL"}
_SQLITE_WORDS = {
    False: "written: WAL, synchronous=NORMAL (synced at checkpoints only, of 1,000 pages each)",
    True: "synced: WAL, synchronous=FULL (each transaction)",
}


@contextlib.contextmanager
def _sqlite(place: str, *, synced: bool) -> Iterator[sqlite3.Connection]:
    with contextlib.closing(sqlite3.connect(f"{place}/log.sqlite", isolation_level=None)) as database:
        database.execute("PRAGMA journal_mode=WAL")
        database.execute(f"PRAGMA synchronous={_SYNCHRONOUS[synced]}")
        database.execute("CREATE TABLE IF NOT EXISTS log (at INTEGER PRIMARY KEY, value BLOB NOT NULL)")
        yield database


def _check_rows(database: sqlite3.Connection, payload: Payload, count: int, query: str) -> None:
    cursor = database.execute(query)
    payload.check(([row[0] for row in rows] for rows in iter(lambda: cursor.fetchmany(_CHUNK), [])), count)


_ROWS = "SELECT value FROM log ORDER BY at"


def sqlite_batches(payload: Payload, *, synced: bool) -> Subject:
    """A table, and a transaction for each batch."""

    def sample(place: str, count: int) -> Sample:
        with _sqlite(place, synced=synced) as database:
            seconds = _timed(lambda: _insert_batches(database, payload.batches(count)))
            _check_rows(database, payload, count, _ROWS)
        return Sample(seconds)

    params = {"api": "executemany, one transaction a batch", "durability": _SQLITE_WORDS[synced]}
    return Subject("sqlite", sample, params, payload.batch)


def _insert_batches(database: sqlite3.Connection, batches: Iterable[list[bytes]]) -> None:
    for values in batches:
        database.execute("BEGIN")
        database.executemany(_INSERT, zip(values, strict=True))
        database.execute("COMMIT")


def sqlite_single(payload: Payload) -> Subject:
    """A statement for each message, a transaction for a thousand."""

    def sample(place: str, count: int) -> Sample:
        with _sqlite(place, synced=False) as database:
            seconds = _timed(lambda: _insert_each(database, payload.batches(count)))
            _check_rows(database, payload, count, _ROWS)
        return Sample(seconds)

    words = "synced: WAL, synchronous=NORMAL, and FULL for the last transaction"
    params = {"api": f"execute a message, one transaction for {payload.batch}", "durability": words}
    return Subject("sqlite", sample, params, payload.batch)


def _insert_each(database: sqlite3.Connection, batches: Iterable[list[bytes]]) -> None:
    for values in batches:
        database.execute("BEGIN")
        for value in values:
            database.execute(_INSERT, (value,))
        database.execute("COMMIT")
    # The WAL is synced as a whole with the next transaction that is to be synced.
    database.execute("PRAGMA synchronous=FULL")
    database.execute("PRAGMA user_version=1")


def sqlite_latency(payload: Payload) -> Subject:
    """A transaction for each message."""

    def sample(place: str, count: int) -> Sample:
        with _sqlite(place, synced=True) as database:
            taken = _taken(lambda value: database.execute(_INSERT, (value,)), payload.values(count))
            _check_rows(database, payload, count, _ROWS)
        return taken

    params = {"api": "execute, one transaction a message", "durability": _SQLITE_WORDS[True]}
    return Subject("sqlite", sample, params)


def sqlite_reading(payload: Payload) -> Subject:
    """All values of a table in order."""

    def sample(place: str, count: int) -> Sample:
        with _sqlite(place, synced=False) as database:
            _insert_batches(database, payload.batches(count))
        with _sqlite(place, synced=False) as database:
            begin = time.perf_counter()
            seen = _fetch(database, payload.batch)
            seconds = time.perf_counter() - begin
            check(seen == count, f"{seen} rows came back of {count}")
            _check_rows(database, payload, count, _ROWS)
        return Sample(seconds)

    params = {
        "api": f"SELECT in order, fetchmany({payload.batch}), a list of the values",
        "durability": "as stored; SQLite has no checksums; the files are in the page cache",
    }
    return Subject("sqlite", sample, params, payload.batch)


def _fetch(database: sqlite3.Connection, batch: int) -> int:
    seen = 0
    cursor = database.execute(_ROWS)
    while rows := cursor.fetchmany(batch):
        values = [row[0] for row in rows]
        seen += len(values)
    return seen


# Queues from PyPI


def litequeue_batches(payload: Payload, *, synced: bool, last_synced: bool = False) -> Subject:
    """A call for each message, for it has no other, and a transaction for each batch."""

    def sample(place: str, count: int) -> Sample:
        try:
            import litequeue  # type: ignore[import-untyped]
        except ImportError as error:
            raise Unavailable(f"litequeue is not installed: {error}") from error
        queue = litequeue.LiteQueue(f"{place}/queue.sqlite")
        with contextlib.closing(queue.conn) as database:
            database.execute(f"PRAGMA synchronous={_SYNCHRONOUS[synced]}")
            seconds = _timed(lambda: _put_batches(queue, payload.batches(count), last_synced))
            _check_rows(database, payload, count, "SELECT data FROM Queue ORDER BY message_id")
        return Sample(seconds)

    words = _SQLITE_WORDS[synced] if not last_synced else "synced: WAL, synchronous=NORMAL, and FULL at the end"
    params = {"api": f"LiteQueue.put a message, one transaction for {payload.batch}", "durability": words}
    return Subject("litequeue", sample, params, payload.batch)


def _put_batches(queue: Any, batches: Iterable[list[bytes]], last_synced: bool) -> None:
    for values in batches:
        with queue.transaction():
            for value in values:
                queue.put(value)
    if last_synced:
        queue.conn.execute("PRAGMA synchronous=FULL")
        queue.conn.execute("PRAGMA user_version=1")


def persist_queue_file(payload: Payload) -> Subject:
    """The queue in plain files, which it writes at every put."""
    return _persist_queue(
        payload,
        lambda module, place: module.Queue(place, chunksize=payload.batch, tempdir=place),
        "persistqueue.Queue.put a message; it has no call for more",
        "written: at every put; each file of 1,000 is synced when it is full",
    )


def persist_queue_sqlite(payload: Payload) -> Subject:
    """The queue in SQLite, which commits at every put."""
    return _persist_queue(
        payload,
        lambda module, place: module.SQLiteQueue(place),
        "persistqueue.SQLiteQueue.put a message; it has no call for more and no buffer",
        "synced: WAL, synchronous=FULL (SQLite's default), a transaction a message",
    )


def _persist_queue(payload: Payload, opened: Callable[[Any, str], Any], api: str, words: str) -> Subject:
    def sample(place: str, count: int) -> Sample:
        try:
            import persistqueue
        except ImportError as error:
            raise Unavailable(f"persist-queue is not installed: {error}") from error
        queue = opened(persistqueue, f"{place}/queue")
        seconds = _timed(lambda: _put_each(queue, payload.values(count)))
        check(queue.qsize() == count, f"{queue.qsize()} messages are in the queue, not {count}")
        payload.check(([queue.get_nowait()] for _ in range(count)), count)
        return Sample(seconds)

    return Subject("persist_queue", sample, {"api": api, "durability": words}, 100)


def _put_each(queue: Any, values: Iterable[bytes]) -> None:
    for value in values:
        queue.put(value)
