"""Benchmarks for any work queue: enqueueing, leasing and acknowledging, and punctuality of due messages."""

import abc
import itertools
import struct
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar, NamedTuple, Protocol

from headrace.bench.measure import Figure, Sample, Subject, Unavailable, check, percentile
from headrace.bench.payload import Payload
from headrace.bench.receiver import Arrived, Receive, Receiver
from headrace.bench.servers import ServerNode

BATCH = 1000
"""The number of messages per lease."""
CONSUMERS = 16
"""The number of concurrent consumers that each lease one message at a time."""
FAR_S = 3000
"""In how many seconds those are due, at the earliest, that only wait while others are measured."""
_HOUR_US, _STRIDE = 3_600_000_000, 2_654_435_761
"""They have no divisor in common: as many multiples of the second as the first has units are all different in it."""
_DUE = struct.Struct("<q")
_LEAD_S = 0.5
_LEAD_TRIES = 4
_SETTLED_PATIENCE_S = 5.0
_SETTLED_POLL_S = 0.01

Take = Callable[[Sequence[bytes]], None]
"""Called with the values of a lease before they are acknowledged."""
Dated = tuple[list[bytes], list[int]]
"""Values, and when each is due, in microseconds since 1970; no times: all are ready."""


def scattered(from_us: int, first: int, count: int) -> list[int]:
    """Times within an hour, no two alike and in no order: those of messages with these numbers.

    >>> scattered(0, 1, 3)
    [2654435761, 1708871522, 763307283]
    """
    return [from_us + number * _STRIDE % _HOUR_US for number in range(first, first + count)]


class Worked(NamedTuple):
    """The combined result of all consumers."""

    seconds: float
    values: Sequence[bytes]


class Timeline(NamedTuple):
    """How much waits, and how much of it comes due, while the time is kept."""

    pending: int = 1_000_000
    per_second: int = 10_000
    seconds: float = 1.0
    why_fewer: str = ""

    def at_most(self, pending: int, per_second: int, why: str) -> "Timeline":
        """The same for somebody who cannot have so many, and why."""
        if pending >= self.pending and per_second >= self.per_second:
            return self
        return Timeline(min(self.pending, pending), min(self.per_second, per_second), self.seconds, why)

    @property
    def params(self) -> dict[str, Any]:
        """What is told of it."""
        told: dict[str, Any] = {"pending": self.pending, "due_per_second": self.per_second, "seconds": self.seconds}
        return {**told, "why_fewer": self.why_fewer} if self.why_fewer else told


class Receiving(Protocol):
    """Another process that consumes what comes due."""

    def receiving(self, topic: str, count: int) -> AbstractContextManager[Callable[[], Arrived]]:
        """Have it consume meanwhile; what is given waits for the last message and returns them all."""

    def close(self) -> None:
        """End the process."""


class WorkQueue(abc.ABC):
    """A queue and a Python client of it. What it cannot do it leaves out, and is not asked for.

    Methods that return seconds connect before these begin and tidy up after they end.
    """

    name: str
    words: ClassVar[str]
    """How durable a message, a lease and an acknowledgement are once they are answered."""
    api: ClassVar[Mapping[str, str]]
    """What is called to `enqueue`, lease in `batches` or as `singles`, and to keep the `timeline`."""

    def __init__(self, node: ServerNode) -> None:
        self.node = node

    @abc.abstractmethod
    def create(self, queue: str) -> None:
        """Make a queue."""

    @abc.abstractmethod
    def delete(self, queue: str) -> None:
        """Drop it and what it holds."""

    @abc.abstractmethod
    def enqueue(self, queue: str, batches: Iterable[list[bytes]]) -> float:
        """Put all into a queue; returns the seconds until all are acknowledged."""

    def fill(self, queue: str, batches: Iterable[list[bytes]]) -> None:
        """Enqueue all, to be leased."""
        self.enqueue(queue, batches)

    def lease_batches(self, queue: str, count: int, take: Take) -> float:
        """Lease many, give them to `take`, acknowledge them, and so on for so many; returns the seconds."""
        raise NotImplementedError

    def lease_singles(self, queue: str, count: int, consumers: int) -> Worked:
        """Have consumers lease and acknowledge all that is there, each of them one message at a time."""
        raise NotImplementedError

    @abc.abstractmethod
    def left(self, queue: str) -> int:
        """Messages that are not acknowledged, leased or not."""

    def drained(self, queue: str, count: int, payload: Payload) -> None:
        """Fail unless a queue has just the first values of the payload, in order; they are gone then."""
        kept: list[Sequence[bytes]] = []
        self.lease_batches(queue, count, kept.append)
        payload.check(kept, count)

    def timeline(self, whole: Timeline) -> Timeline:
        """As much of it as can be had in the time there is."""
        return whole

    def schedule(self, queue: str, batches: Iterable[Dated]) -> None:
        """Enqueue messages, each to be handed over when it is due."""
        raise NotImplementedError

    def receive(self) -> Receive:
        """What consumes those in another process, and tells when, in nanoseconds since 1970, each was handed over."""
        raise NotImplementedError

    def receiver(self, place: str, queue: str) -> Receiving:
        """That process."""
        del place, queue
        return Receiver(self.receive())


class _Bench:
    """A queue whose node runs while it is measured."""

    _numbers = itertools.count()

    def __init__(self, contestant: WorkQueue) -> None:
        self.contestant = contestant

    def subject(self, workload: str, sample: Callable[[str, int], Sample], step: int) -> Subject:
        """What is measured."""
        contestant = self.contestant
        params = {"api": contestant.api[workload], "durability": contestant.words}
        return Subject(contestant.name, sample, params, step, self.start, contestant.node.stop)

    def start(self, place: str) -> None:
        self.contestant.node.start(place, synced=True)

    def queue(self) -> str:
        """A new one."""
        queue = f"bench{next(self._numbers)}"
        self.contestant.create(queue)
        return queue

    def done(self, queue: str) -> None:
        """Fail unless all of a queue is acknowledged, and drop it."""
        self.settled(queue, 0)
        self.contestant.delete(queue)

    def settled(self, queue: str, wanted: int) -> None:
        """Fail unless so many are left, soon."""
        deadline = time.monotonic() + _SETTLED_PATIENCE_S
        while (left := self.contestant.left(queue)) != wanted and time.monotonic() < deadline:
            time.sleep(_SETTLED_POLL_S)
        check(left == wanted, f"{left} messages are left in the queue, not {wanted}")


def enqueueing(contestant: WorkQueue, payload: Payload) -> Subject:
    """Batches one after the other, as many under way as the client does well with."""
    bench = _Bench(contestant)

    def sample(_: str, count: int) -> Sample:
        queue = bench.queue()
        seconds = contestant.enqueue(queue, payload.batches(count))
        contestant.drained(queue, count, payload)
        bench.done(queue)
        return Sample(seconds)

    return bench.subject("enqueue", sample, payload.batch)


def leasing_batches(contestant: WorkQueue, payload: Payload) -> Subject:
    """One consumer that leases and acknowledges many messages at once."""
    bench = _Bench(contestant)

    def sample(_: str, count: int) -> Sample:
        queue = bench.queue()
        contestant.fill(queue, payload.batches(count))
        kept: list[Sequence[bytes]] = []
        seconds = contestant.lease_batches(queue, count, kept.append)
        payload.check(kept, count)
        bench.done(queue)
        return Sample(seconds)

    return bench.subject("batches", sample, payload.batch)


def leasing_singles(contestant: WorkQueue, payload: Payload, consumers: int = CONSUMERS) -> Subject:
    """Many consumers at once, each of which leases one message and acknowledges it before it leases the next."""
    bench = _Bench(contestant)

    def sample(_: str, count: int) -> Sample:
        queue = bench.queue()
        contestant.fill(queue, payload.batches(count))
        seconds, values = contestant.lease_singles(queue, count, consumers)
        check_all(values, payload.expected(0, count))
        bench.done(queue)
        return Sample(seconds)

    return bench.subject("singles", sample, payload.batch)


def check_all(values: Sequence[bytes], expected: Sequence[bytes]) -> None:
    """Fail unless these are the ones that were enqueued, each as often as it was, in whichever order."""
    check(len(values) == len(expected), f"{len(values)} messages were handed over of {len(expected)}")
    check(sorted(values) == sorted(expected), "messages were lost, changed, or handed over twice")


def timing() -> dict[str, Figure]:
    """How late messages are: the least (less than 0 is early), the middle, and nearly the most."""
    return {
        "timeline_error_p50_ms": percentile(50, "ms"),
        "timeline_error_p99_ms": percentile(99, "ms"),
        "timeline_error_min_ms": percentile(0, "ms"),
    }


def keeping_time(contestant: WorkQueue, payload: Payload, whole: Timeline) -> Subject:
    """From when messages are due to when another process has them, while very many others wait in the same queue."""
    bench = _Bench(contestant)
    wanted = contestant.timeline(whole)
    kept: list[_Kept] = []

    def prepare(place: str) -> None:
        bench.start(place)
        try:
            kept.append(_Kept(bench, payload, wanted, place))
        except BaseException:
            contestant.node.stop()
            raise

    def finish() -> None:
        while kept:
            kept.pop().receiver.close()
        contestant.node.stop()

    def sample(_: str, __: int) -> Sample:
        return kept[0].sample()

    subject = bench.subject("timeline", sample, 1)
    return subject._replace(prepare=prepare, finish=finish, params={**subject.params, **wanted.params})


class _Kept:
    """A queue with its waiting messages, and the consuming process."""

    def __init__(self, bench: _Bench, payload: Payload, wanted: Timeline, place: str) -> None:
        self._bench = bench
        self._payload = payload
        self._wanted = wanted
        self._queue = bench.queue()
        self._per_s = self._wait_long()
        self.receiver = bench.contestant.receiver(place, self._queue)

    def _wait_long(self) -> float:
        """Schedule those that are not due for long; returns how many of them in a second."""
        batch = self._payload.batch
        count = max(self._wanted.pending // batch, 1) * batch
        far_us = time.time_ns() // 1000 + FAR_S * 1_000_000
        batches = enumerate(self._payload.batches(count))
        dated = ((values, scattered(far_us, number * batch, batch)) for number, values in batches)
        begin = time.perf_counter()
        self._bench.contestant.schedule(self._queue, dated)
        self._pending = count
        return count / (time.perf_counter() - begin)

    def sample(self) -> Sample:
        count = max(round(self._wanted.per_second * self._wanted.seconds), 1)
        lead_s = _LEAD_S + 2 * count / self._per_s
        for _ in range(_LEAD_TRIES):
            with self.receiver.receiving(self._queue, count) as arrived:
                values, dues = self._come_due(count, time.time_ns() // 1000 + round(lead_s * 1e6))
                self._bench.contestant.schedule(self._queue, self._batches(values, dues))
                scheduled_us = time.time_ns() // 1000
                times_ns, handed = arrived()
            check_all(handed, values)
            self._bench.settled(self._queue, self._pending)
            if scheduled_us < dues[0]:
                arrivals = zip(times_ns, handed, strict=True)
                late = [(at_ns - _DUE.unpack_from(value)[0] * 1000) / 1e9 for at_ns, value in arrivals]
                return Sample(self._wanted.seconds, late)
            lead_s *= 2
        raise Unavailable(f"{count} messages could not be scheduled in {lead_s / 2:.1f} s, before the first was due")

    def _come_due(self, count: int, first_us: int) -> Dated:
        dues = [first_us + number * 1_000_000 // self._wanted.per_second for number in range(count)]
        pairs = zip(dues, self._payload.values(count), strict=True)
        values = [_DUE.pack(due) + value[_DUE.size :] for due, value in pairs]
        return values, dues

    def _batches(self, values: list[bytes], dues: list[int]) -> Iterator[Dated]:
        for at in range(0, len(values), self._payload.batch):
            yield values[at : at + self._payload.batch], dues[at : at + self._payload.batch]
