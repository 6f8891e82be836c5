"""Benchmarks of the log with a second process: visibility to a reader, and recovery after a killed writer."""

import contextlib
import logging
import os
import shutil
import time
import traceback
from collections.abc import Iterable, Iterator
from itertools import cycle
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from headrace.bench import processes
from headrace.bench.measure import Sample, Subject, WrongResult, check
from headrace.bench.payload import Payload
from headrace.embedded.log import Log
from headrace.model.batch import Columns, encode
from headrace.storage import index
from headrace.storage.segment import offset_in_name

VISIBILITY_RATE = 1000
"""The rate of messages whose visibility is timed, per second."""
_VISIBILITY_WARM_UP = 20
_PATIENCE_S = 30.0
_UNSYNCED_S = 0.05
"""How long a writer goes on after its last sync, before it is killed."""


class _Failure(NamedTuple):
    """The report of a failure in another process."""

    text: str


def visibility(payload: Payload) -> Subject:
    """The time from before an append until another process has the message."""

    def sample(place: str, count: int) -> Sample:
        path = os.path.join(place, "log")
        total = count + _VISIBILITY_WARM_UP
        ours, theirs = processes.spawn.Pipe()
        with Log(path) as log, _killed_at_end(_watch, theirs, path, payload.size, payload.batch, total):
            _received(ours)
            sent = _append_paced(log, payload.values(total))
            came, wrong = _received(ours)
        check(wrong is None, f"the other process saw a wrong value at offset {wrong}")
        check(len(came) == total, f"the other process saw {len(came)} messages of {total}")
        latencies = [(after - before) / 1e9 for before, after in zip(sent, came, strict=True)]
        return Sample((sent[-1] - sent[0]) / 1e9, latencies[_VISIBILITY_WARM_UP:])

    params = {
        "api": "Log.append and flush(sync=False) here, Log.tail in another process",
        "durability": "written; synced every 0.1 s (the default)",
        "warm_up": f"the first {_VISIBILITY_WARM_UP} messages do not count",
    }
    return Subject("headrace", sample, params)


def _append_paced(log: Log, values: Iterable[bytes]) -> list[int]:
    """Append and flush at the rate; returns when each append began, in monotonic nanoseconds."""
    sent = []
    due_ns = time.monotonic_ns()
    for value in values:
        due_ns += 1_000_000_000 // VISIBILITY_RATE
        wait_ns = due_ns - time.monotonic_ns()
        if wait_ns > 0:
            time.sleep(wait_ns / 1e9)
        sent.append(time.monotonic_ns())
        log.append(value)
        log.flush(sync=False)
    return sent


def _watch(results: Connection, path: str, size: int, batch: int, count: int) -> None:
    """In another process: note when each message comes, then compare the values."""
    payload = Payload(size, batch)
    with Log(path, readonly=True) as log:
        results.send("ready")
        came, values = _tail(log, count)
    wrong = next((at for at, value in enumerate(values) if [value] != payload.expected(at, 1)), None)
    results.send((came, wrong))


def _tail(log: Log, count: int) -> tuple[list[int], list[bytes | None]]:
    came, values = [], []
    for message in log.tail(0, timeout=_PATIENCE_S):
        came.append(time.monotonic_ns())
        values.append(message.value)
        if len(came) == count:
            break
    return came, values


class KilledLog:
    """A log whose writer was killed, opened again and again: each time a fresh copy, as opening mends it."""

    def __init__(self, payload: Payload, log_bytes: int, segment_bytes: int | None) -> None:
        self._payload = payload
        self._log_bytes = log_bytes
        self._segment_bytes = segment_bytes
        self._source = ""
        self._safe_offset = 0

    def subjects(self) -> list[Subject]:
        """With the indexes that a killed process leaves, and without any."""
        torn = f"{self._log_bytes >> 20} MiB and more, its writer killed and the last batch torn in half"
        params = {
            "api": "Log(path)",
            "log": f"{torn}; a copy for each sample, synced before the clock starts and in the page cache",
            "durability": "what was found is synced when Log() returns",
        }
        indexed = {**params, "indexes": "as the killed writer left them"}
        lost = {**params, "indexes": "all lost: every batch is checked"}
        return [
            Subject("headrace", self._sample, indexed, prepare=self._make),
            Subject("headrace_indexes_lost", self._sample_without_indexes, lost, prepare=self._make),
        ]

    def _make(self, place: str) -> None:
        """Have another process write the log, and kill it while it writes."""
        if self._source and os.path.exists(self._source):
            return
        self._source = os.path.join(place, "log")
        size, batch = self._payload.size, self._payload.batch
        ours, theirs = processes.spawn.Pipe()
        with _killed_at_end(
            _write_until_killed, theirs, self._source, size, batch, self._log_bytes, self._segment_bytes
        ):
            self._safe_offset = _received(ours)
            time.sleep(_UNSYNCED_S)

    def _sample(self, place: str, _: int, *, indexes: bool = True) -> Sample:
        path = os.path.join(place, "log")
        shutil.copytree(self._source, path)
        self._tear(path)
        if not indexes:
            for name in os.listdir(path):
                if name.endswith(index.SUFFIX):
                    os.unlink(os.path.join(path, name))
        _sync_files(path)
        with _warnings_hidden():
            begin = time.perf_counter()
            log = Log(path)
            seconds = time.perf_counter() - begin
        with log:
            count = log.next_offset
            check(log.recovery.torn_bytes > 0, "recovery did not see the torn batch")
            check(not log.recovery.lost, f"recovery lost messages: {log.recovery.lost}")
            check(count >= self._safe_offset, f"{self._safe_offset - count} flushed messages are gone")
            self._payload.check((batch.columns().values for batch in log.batches()), count)
        return Sample(seconds)

    def _sample_without_indexes(self, place: str, count: int) -> Sample:
        return self._sample(place, count, indexes=False)

    def _tear(self, path: str) -> None:
        """A killed process tears a batch only by rare luck, so write half of one behind the last."""
        batch = encode(Columns(self._payload.pool[0]), 0)
        last = max(name for name in os.listdir(path) if offset_in_name(name) is not None)
        with open(os.path.join(path, last), "ab") as file:
            file.write(memoryview(batch.data)[: batch.length // 2])


def _write_until_killed(
    results: Connection, path: str, size: int, batch: int, log_bytes: int, segment_bytes: int | None
) -> None:
    """In another process: tell when the log is large enough, and go on; nobody should wait for the end."""
    payload = Payload(size, batch)
    log = Log(path, segment_bytes=segment_bytes)
    written = 0
    told = False
    for values in cycle(payload.pool):
        log.append_many(values)
        written += size * batch
        if written >= log_bytes and not told:
            results.send(log.flush())
            told = True
        if written >= 2 * log_bytes:
            return


@contextlib.contextmanager
def _killed_at_end(target: Any, results: Connection, *arguments: Any) -> Iterator[None]:
    """Run a function in another process meanwhile."""
    process = processes.start(_report, target, results, *arguments)
    results.close()
    try:
        yield
    finally:
        process.kill()
        process.join()
        process.close()


def _report(target: Any, results: Connection, *arguments: Any) -> None:
    """In another process: run a function, and send why it failed if it does."""
    try:
        target(results, *arguments)
    except Exception:  # noqa: BLE001 whatever it is, the other side has to be told
        results.send(_Failure(traceback.format_exc()))


def _received(results: Connection) -> Any:
    if not results.poll(_PATIENCE_S):
        raise WrongResult(f"the other process said nothing for {_PATIENCE_S} s")
    try:
        answer = results.recv()
    except EOFError:
        raise WrongResult("the other process ended without an answer") from None
    if isinstance(answer, _Failure):
        raise WrongResult(f"the other process failed: {answer.text}")
    return answer


@contextlib.contextmanager
def _warnings_hidden() -> Iterator[None]:
    """The torn batch is meant to be found; nobody needs to be told."""
    logger = logging.getLogger("headrace.storage")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def _sync_files(path: str) -> None:
    for folder, _, names in os.walk(path):
        for name in names:
            fd = os.open(os.path.join(folder, name), os.O_RDONLY)
            os.fsync(fd)
            os.close(fd)
