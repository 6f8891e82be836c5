"""Benchmarks with very many pending messages: restart time after a kill, and memory."""

import time
from collections import deque
from collections.abc import Iterator

from headrace.bench.broker_workloads import HeadraceNode
from headrace.bench.leased_workloads import HeadraceQueue
from headrace.bench.measure import Benchmark, Figure, Sample, Subject, check, duration
from headrace.bench.payload import Payload
from headrace.bench.queues import BATCH, FAR_S, Dated, scattered
from headrace.bench.servers import answers
from headrace.client._sync.connecting import connect
from headrace.client.leasing.jobs import Job

MILLION = 1_000_000
_SETTLE_S = 1.0
"""How long a broker is idle before its memory is measured, in seconds."""
_MEANWHILE = 20
"""Batches that are leased and acknowledged, and as many enqueued, before a broker is killed."""
_WARM_UP = 10
_HALF = "every other batch has no due time, the others are due in an hour or two, in no order"
_WAITING = "all due in an hour or two, in no order; fifo; none ever leased"
_READY = "all ready, without a due time; fifo; none ever leased"
_PRIORITY = "all ready, without a due time, of 256 priorities; discipline priority; none ever leased"
_QUEUE = "bench"


def benchmarks(million: int = MILLION) -> list[Benchmark]:
    """All of it; what counts as a million can be less."""
    payload = Payload()
    told = {**payload.params, "durability": HeadraceQueue.words}
    cases = {
        "headrace": (5 * million, _WAITING),
        "headrace_5m_ready": (5 * million, _READY),
        "headrace_1m": (million, _WAITING),
        "headrace_1m_ready": (million, _READY),
        "headrace_1m_priority": (million, _PRIORITY),
    }
    return [
        Benchmark({"restart_1m_s": duration()}, [_restarting(payload, million)], told, 1),
        Benchmark({"restart_5m_s": duration()}, [_restarting(payload, 5 * million)], told, 1),
        Benchmark(
            {"bytes_per_pending": Figure("bytes", False, lambda _, taken: taken.amount)},
            [_Memory(name, payload, count, kind).subject() for name, (count, kind) in cases.items()],
            told,
            1,
        ),
    ]


def _dated(payload: Payload, batches: int) -> Iterator[Dated]:
    """Batches of messages that wait."""
    far_us = time.time_ns() // 1000 + FAR_S * 1_000_000
    for number, values in enumerate(payload.batches(batches * payload.batch)):
        yield values, scattered(far_us, number * payload.batch, payload.batch)


class _KilledNode(HeadraceNode):
    """A broker that is killed, and started again with the data that it left; it is ready when it has leased."""

    def __init__(self) -> None:
        super().__init__()
        self.jobs: list[Job] = []
        """The first that it leased."""
        self._place = ""
        self._again = False

    def kill_and_start(self) -> float:
        """The seconds from its start until its first lease is answered."""
        self._again = True
        self._stop()
        self._start(self._place, synced=True)
        return self.ready_s

    def _start(self, place: str, *, synced: bool) -> None:
        self._place = place
        super()._start(place, synced=synced)

    def _answers(self) -> bool:
        if not self._again:
            return super()._answers()
        if not answers(self.port, b"", b""):
            return False
        with connect(self.address) as bus:
            self.jobs = bus.queue(_QUEUE).lease(BATCH)
        return True


def _restarting(payload: Payload, count: int) -> Subject:
    node = _KilledNode()
    contestant = HeadraceQueue(node)
    kept: list[_Restarting] = []

    def prepare(place: str) -> None:
        node.start(place, synced=True)
        try:
            kept.append(_Restarting(contestant, payload, count))
        except BaseException:
            node.stop()
            raise

    def sample(_: str, __: int) -> Sample:
        return Sample(kept[0].sample(node))

    params = {
        "pending": count,
        "of_these": _HALF,
        "measured": f"kill -9, then from the start of `headrace serve` until a lease of {BATCH} is answered",
        "meanwhile": f"before each kill {_MEANWHILE} batches are leased and acked, and as many enqueued",
    }
    return Subject(contestant.name, sample, params, 1, prepare, node.stop)


class _Restarting:
    """A queue, and which batches of the payload are ready in it."""

    def __init__(self, contestant: HeadraceQueue, payload: Payload, count: int) -> None:
        self._contestant = contestant
        self._payload = payload
        self._pending = count // BATCH * BATCH
        self._ready: deque[int] = deque()
        """The first offset of each."""
        contestant.create(_QUEUE)
        contestant.schedule(_QUEUE, self._every_other(self._pending // BATCH))

    def _every_other(self, batches: int) -> Iterator[Dated]:
        for number, (values, dues) in enumerate(_dated(self._payload, batches)):
            if number % 2:
                yield values, dues
            else:
                self._ready.append(number * BATCH)
                yield values, []

    def sample(self, node: _KilledNode) -> float:
        self._work()
        seconds = node.kill_and_start()
        with connect(node.address) as bus:
            self._settle(node.jobs)
            check(not bus.queue(_QUEUE).ack(node.jobs), "acks were refused")
        self._enqueue(1)
        left = self._contestant.left(_QUEUE)
        check(left == self._pending, f"{left} messages are left in the queue, not {self._pending}")
        return seconds

    def _work(self) -> None:
        """Something to be found again, and something not to be."""
        with connect(self._contestant.node.address) as bus:
            queue = bus.queue(_QUEUE)
            for _ in range(min(_MEANWHILE, len(self._ready) - 1)):
                jobs = queue.lease(BATCH)
                self._settle(jobs)
                check(not queue.ack(jobs), "acks were refused")
                self._enqueue(1)

    def _settle(self, jobs: list[Job]) -> None:
        """These must be the next that are ready."""
        expected = self._payload.expected(self._ready.popleft(), BATCH)
        check([job.value for job in jobs] == expected, "wrong messages were handed over")

    def _enqueue(self, batches: int) -> None:
        """The first batch of the payload, again."""
        for _ in range(batches):
            self._contestant.enqueue(_QUEUE, self._payload.batches(BATCH))
            self._ready.append(0)


class _Memory:
    """A broker whose memory is looked at before and after messages were enqueued."""

    def __init__(self, name: str, payload: Payload, count: int, kind: str) -> None:
        self._name = name
        self._payload = payload
        self._count = count // BATCH * BATCH
        self._kind = kind
        self._contestant = HeadraceQueue()
        self._before = 0

    def subject(self) -> Subject:
        """What is measured."""
        params = {
            "pending": self._count,
            "of_these": self._kind,
            "measured": "resident memory (RSS) of `headrace serve`, less what it had before they were enqueued and "
            f"{_WARM_UP} batches had been enqueued, leased and acked; one broker, looked at for each sample",
        }
        return Subject(self._name, self._sample, params, 1, self._prepare, self._contestant.node.stop)

    def _prepare(self, place: str) -> None:
        contestant = self._contestant
        contestant.node.start(place, synced=True)
        try:
            contestant.create(_QUEUE)
            contestant.enqueue(_QUEUE, self._payload.batches(_WARM_UP * BATCH))
            contestant.drained(_QUEUE, _WARM_UP * BATCH, self._payload)
            time.sleep(_SETTLE_S)
            self._before = contestant.node.memory_bytes
            self._fill()
            left = contestant.left(_QUEUE)
            check(left == self._count, f"{left} messages are pending, not {self._count}")
        except BaseException:
            contestant.node.stop()
            raise

    def _fill(self) -> None:
        if self._kind == _WAITING:
            self._contestant.schedule(_QUEUE, _dated(self._payload, self._count // BATCH))
        elif self._kind == _READY:
            self._contestant.enqueue(_QUEUE, self._payload.batches(self._count))
        else:
            with connect(self._contestant.node.address) as bus, bus.producer(_QUEUE) as producer:
                bus.alter_subscription(_QUEUE, discipline="priority")
                for values in self._payload.batches(self._count):
                    producer.send_many(values, priorities=[value[0] for value in values])
                producer.flush()

    def _sample(self, _: str, __: int) -> Sample:
        time.sleep(_SETTLE_S)
        return Sample(_SETTLE_S, amount=(self._contestant.node.memory_bytes - self._before) / self._count)
