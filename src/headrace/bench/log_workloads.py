"""Benchmarks of the log: appending, reading, and encoding batches."""

import os
import time
from collections import deque
from collections.abc import Callable, Iterable

from headrace.bench.log_processes import VISIBILITY_RATE, KilledLog, visibility
from headrace.bench.measure import Benchmark, Sample, Subject, check, duration, each_us, percentile, rate
from headrace.bench.payload import Payload
from headrace.embedded.log import Log
from headrace.model.batch import HEADER_BYTES, Columns, encode, parse, received
from headrace.model.durability import Durability
from headrace.storage.log import FileLog
from headrace.storage.runtime import StorageRuntime
from headrace.storage.stored_log import AppendReceipt

IN_FLIGHT_MAX = 64
"""Batches that are appended and not known to be synced."""
_TIME_US = 1_700_000_000_000_000


def benchmarks(payload: Payload, *, visibility_s: float = 1.0) -> dict[str, Benchmark]:
    """The benchmarks of `headrace log bench`, by name."""
    params, most = payload.params, payload.count_max
    one_by_one = {"size": payload.size, "batch": 1}
    written, synced = Durability.WRITTEN, Durability.SYNCED
    return {
        "append_written": Benchmark(
            {"append_written": rate()}, [_appending(payload, written), _embedded(payload, written)], params, None, most
        ),
        "append_synced": Benchmark(
            {"append_synced": rate()}, [_appending(payload, synced), _embedded(payload, synced)], params, None, most
        ),
        "append_single": Benchmark({"append_single": rate()}, [_single(payload)], one_by_one, None, most),
        "read_list": Benchmark({"read_list": rate()}, [_reading(payload, _read_lists)], params, None, most),
        "iterate": Benchmark({"iterate": rate()}, [_reading(payload, _iterate)], params, None, most),
        "visibility": Benchmark(
            {"visibility_p50_us": percentile(50, "µs"), "visibility_p99_us": percentile(99, "µs")},
            [visibility(payload)],
            {**one_by_one, "messages_per_second": VISIBILITY_RATE},
            max(round(VISIBILITY_RATE * visibility_s), 1),
        ),
    }


def more_benchmarks(payload: Payload, *, log_bytes: int, segment_bytes: int | None = None) -> dict[str, Benchmark]:
    """Additional benchmarks for developers."""
    one_by_one = {"size": payload.size, "batch": 1}
    killed = KilledLog(payload, log_bytes, segment_bytes)
    return {
        "append_synced_latency": Benchmark(
            {
                "append_synced_latency_p50_ms": percentile(50, "ms"),
                "append_synced_latency_p99_ms": percentile(99, "ms"),
            },
            [_latency(payload)],
            one_by_one,
        ),
        "recover": Benchmark({"recover_1gib_s": duration()}, killed.subjects(), {"size": payload.size}, 1),
        "batch_encode": Benchmark({"batch_encode_us": each_us()}, [_encoding(payload)], one_by_one),
        "batch_decode": Benchmark({"batch_decode_us": each_us()}, [_decoding(payload)], one_by_one),
    }


def _appending(payload: Payload, durability: Durability) -> Subject:
    """Batches encoded and appended to the storage engine's log."""

    def sample(place: str, count: int) -> Sample:
        host = StorageRuntime()
        path = os.path.join(place, "log")
        log = FileLog(host, path)
        append = _append_synced if durability is Durability.SYNCED else _append_written
        begin = time.perf_counter()
        append(log, payload.batches(count))
        seconds = time.perf_counter() - begin
        check(durability < Durability.SYNCED or log.synced_offset == count, f"only {log.synced_offset} are synced")
        payload.check((batch.columns().values for batch in log.batches(0)), count)
        log.close()
        host.close()
        return Sample(seconds)

    words = {
        Durability.WRITTEN: "written: each batch is with the operating system when append returns; never synced",
        Durability.SYNCED: f"synced: group commit, at most {IN_FLIGHT_MAX} batches not synced yet, none at the end",
    }
    params = {"api": "storage FileLog.append of a batch encoded from a list", "durability": words[durability]}
    return Subject("headrace", sample, params, payload.batch)


def _append_written(log: FileLog, batches: Iterable[list[bytes]]) -> None:
    data = bytearray(HEADER_BYTES)
    for values in batches:
        now_us = time.time_ns() // 1000
        log.append(encode(Columns(values), now_us, buffer=data), now_us)


def _append_synced(log: FileLog, batches: Iterable[list[bytes]]) -> None:
    data = bytearray(HEADER_BYTES)
    in_flight: deque[AppendReceipt] = deque()
    for values in batches:
        now_us = time.time_ns() // 1000
        in_flight.append(log.append(encode(Columns(values), now_us, buffer=data), now_us, Durability.SYNCED))
        if len(in_flight) == IN_FLIGHT_MAX:
            in_flight.popleft().wait(Durability.SYNCED)
    for receipt in in_flight:
        receipt.wait(Durability.SYNCED)


def _embedded(payload: Payload, durability: Durability) -> Subject:
    """The same through the embedded log, which gathers its own batches."""
    synced = durability is Durability.SYNCED

    def sample(place: str, count: int) -> Sample:
        path = os.path.join(place, "log")
        with Log(path, sync_every=0.1 if synced else None) as log:
            begin = time.perf_counter()
            _append_many(log, payload.batches(count), sync=synced)
            seconds = time.perf_counter() - begin
            payload.check_log(path, count)
        return Sample(seconds)

    words = "written: flush(sync=False) at the end; sync_every=None"
    if synced:
        words = "synced: flush() at the end, and every 0.1 s before (the default); batches are not waited for"
    return Subject(
        "headrace_embedded", sample, {"api": "Log.append_many of a list", "durability": words}, payload.batch
    )


def _append_many(log: Log, batches: Iterable[list[bytes]], *, sync: bool) -> None:
    for values in batches:
        log.append_many(values)
    log.flush(sync=sync)


def _single(payload: Payload) -> Subject:
    """One call for each message."""

    def sample(place: str, count: int) -> Sample:
        path = os.path.join(place, "log")
        with Log(path) as log:
            begin = time.perf_counter()
            _append_each(log, payload.batches(count))
            seconds = time.perf_counter() - begin
            payload.check_log(path, count)
        return Sample(seconds)

    words = "synced: flush() at the end, and every 0.1 s before (the default)"
    return Subject("headrace", sample, {"api": "Log.append, buffered", "durability": words}, payload.batch)


def _append_each(log: Log, batches: Iterable[list[bytes]]) -> None:
    for values in batches:
        for value in values:
            log.append(value)
    log.flush()


def _latency(payload: Payload) -> Subject:
    """One message appended and synced, then the next."""

    def sample(place: str, count: int) -> Sample:
        path = os.path.join(place, "log")
        with Log(path) as log:
            begin = time.perf_counter()
            latencies = _append_and_flush(log, payload.values(count))
            seconds = time.perf_counter() - begin
            payload.check_log(path, count)
        return Sample(seconds, latencies)

    return Subject("headrace", sample, {"api": "Log.append, then flush()", "durability": "synced: each message"})


def _append_and_flush(log: Log, values: Iterable[bytes]) -> list[float]:
    latencies = []
    for value in values:
        begin = time.perf_counter()
        log.append(value)
        log.flush()
        latencies.append(time.perf_counter() - begin)
    return latencies


def _reading(payload: Payload, read: Callable[[Log], list[tuple[int, bytes | None]]]) -> Subject:
    """All of a log, from beginning to end."""

    def sample(place: str, count: int) -> Sample:
        path = os.path.join(place, "log")
        payload.fill(path, count)
        with Log(path, readonly=True) as log:
            begin = time.perf_counter()
            seen = read(log)
            seconds = time.perf_counter() - begin
        for offset, value in seen:
            check([value] == payload.expected(offset, 1), f"the value at offset {offset} is wrong")
        check(seen[-1][0] == count - 1, f"the last message is {seen[-1][0]}, not {count - 1}")
        payload.check_log(path, count)
        return Sample(seconds)

    params = {
        "api": "Log.batches, each batch.columns().values" if read is _read_lists else "for message in log",
        "durability": "as stored; every checksum is verified; the files are in the page cache",
    }
    return Subject("headrace", sample, params, payload.batch)


def _read_lists(log: Log) -> list[tuple[int, bytes | None]]:
    """Get every list of values; returns the last of each, with its offset."""
    seen = []
    offset = 0
    for batch in log.batches():
        values = batch.columns().values
        offset += len(values)
        seen.append((offset - 1, values[-1]))
    return seen


def _iterate(log: Log) -> list[tuple[int, bytes | None]]:
    """Look at the value of every message; returns the last, with its offset."""
    for message in log:
        value = message.value
    return [(message.offset, value)]


def _encoding(payload: Payload) -> Subject:
    """A batch of one message made."""

    def sample(_: str, count: int) -> Sample:
        value = payload.pool[0][0]
        begin = time.perf_counter()
        data = _encode_each([value], count)
        seconds = time.perf_counter() - begin
        batch = parse(memoryview(_placed(bytearray(data))))
        batch.verify()
        check(batch.columns().values == [value], "the batch holds another value")
        return Sample(seconds)

    return Subject("headrace", sample, {"api": "encode(Columns([value]), time)", "durability": "none: in memory"}, 1000)


def _encode_each(values: list[bytes], count: int) -> bytes | bytearray | memoryview:
    for _ in range(count):
        batch = encode(Columns(values), _TIME_US)
    return batch.data


def _decoding(payload: Payload) -> Subject:
    """A stored batch of one message checked and read."""

    def sample(_: str, count: int) -> Sample:
        value = payload.pool[0][0]
        batch = encode(Columns([value]), _TIME_US)
        view = memoryview(_placed(bytearray(batch.data)))
        begin = time.perf_counter()
        seen = _decode_each(view, count)
        seconds = time.perf_counter() - begin
        check(seen == value, "the batch came back with another value")
        return Sample(seconds)

    params = {"api": "parse, verify, columns().values[0]", "durability": "none: in memory"}
    return Subject("headrace", sample, params, 1000)


def _decode_each(view: memoryview, count: int) -> bytes | None:
    for _ in range(count):
        batch = parse(view)
        batch.verify()
        value = batch.columns().values[0]
    return value


def _placed(data: bytearray) -> bytearray:
    """A batch as it is stored."""
    received(data).place(0, 0, 1)
    return data
