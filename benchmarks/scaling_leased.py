"""How leasing grows with what there is, and what must not hold up a broker with leased subscriptions."""

import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path

from benchmarks.loop_pauses import Event, MeteredBroker, Watch
from headrace.bench.measure import WrongResult, check
from headrace.broker.pending_answer import PendingAnswer
from headrace.client._sync.bus import Bus
from headrace.client._sync.connecting import connect
from headrace.client.leasing.jobs import Job
from headrace.engines.data_directory import JOURNAL
from headrace.model.leasing import Ack, Holding, Lease, Leased, SubscriptionCreate, SubscriptionDescribe
from headrace.model.requests import Publish, TopicCreate
from headrace.testing.workbench import Workbench

_TOPIC = "jobs"
_BATCH = 1000
_LEASES = 200
_HOUR_US = 3_600_000_000
_SETTINGS = {"deliveries_max": 0, "retry_seconds": 0.0}
_LEASE_S = 1.0
_FACT = bytes(100_000)
_PATIENCE_S = 60.0
_POLL_S = 0.02
_AFTERWARDS_S = 0.2
"""How long what follows from an event is watched."""


def partitions_lease_us(partitions: int) -> float:
    """The time to lease and acknowledge a message of a topic that has so many partitions, all of them in use."""
    with _broker() as bench:
        bench.ask(TopicCreate(_TOPIC, {"storage": "memory", "durability": "memory", "partitions": partitions}))
        bench.ask(SubscriptionCreate(_TOPIC))
        for number in range(partitions):
            bench.publish(_TOPIC, [b"x"], number)
            _settle(bench, bench.ask(Lease(_TOPIC)))
        return _median_us(bench, lambda: bench.publish(_TOPIC, [b"x"], partitions - 1))


def pending_lease_us(pending: int) -> float:
    """The time to lease and acknowledge a message while so many others are not due yet."""
    with _broker() as bench:
        bench.ask(TopicCreate(_TOPIC, {"storage": "memory", "durability": "memory"}))
        bench.ask(SubscriptionCreate(_TOPIC))
        for first in range(0, pending, _BATCH):
            some = range(first, min(first + _BATCH, pending))
            dues = [bench.now_us + _HOUR_US + number * 7919 % 1_000_003 for number in some]
            bench.ask(Publish(_TOPIC, 0), bench.batch([b"x"] * len(some), dues=dues).data)
        found = _median_us(bench, lambda: bench.publish(_TOPIC, [b"x"]))
        check(bench.ask(SubscriptionDescribe(_TOPIC)).waiting == pending, "messages are missing that are not due yet")
        return found


def waiting_lease_us(waiting: int) -> float:
    """The time from publishing a message until the first of so many consumers that wait has it."""
    with _broker() as bench:
        bench.ask(TopicCreate(_TOPIC, {"storage": "memory", "durability": "memory"}))
        bench.ask(SubscriptionCreate(_TOPIC))
        bench.run()
        line = [_wait_for_message(bench) for _ in range(waiting)]
        times_s = []
        for _ in range(_LEASES):
            request, body = Publish(_TOPIC, 0), bench.batch([b"x"]).data
            began_s = time.perf_counter()
            bench.begin(request, body)
            bench.run()
            times_s.append(time.perf_counter() - began_s)
            served = [one for one in line if one.outcome is not None]
            check(len(served) == 1 and served[0] is line[0], "not the first who waits was served, or not only that one")
            _settle(bench, line.pop(0).outcome)
            line.append(_wait_for_message(bench))
        return _median(times_s) * 1e6


def _wait_for_message(bench: Workbench) -> PendingAnswer[object]:
    later = bench.begin(Lease(_TOPIC, wait_ms=60_000))
    bench.run()
    check(isinstance(later, PendingAnswer) and later.outcome is None, "a lease is answered though there is no message")
    answer: PendingAnswer[object] = later
    return answer


def _median_us(bench: Workbench, publish: Callable[[], object]) -> float:
    """The median time to lease and acknowledge the one message that is ready, in microseconds."""
    times_s = []
    for _ in range(_LEASES):
        publish()
        began_s = time.perf_counter()
        _settle(bench, bench.ask(Lease(_TOPIC)))
        times_s.append(time.perf_counter() - began_s)
    return _median(times_s) * 1e6


def _median(times_s: list[float]) -> float:
    return sorted(times_s)[len(times_s) // 2]


def _settle(bench: Workbench, answer: object) -> None:
    words = getattr(answer, "answer", answer)
    if not isinstance(words, Leased):
        raise WrongResult(f"{answer!r} in place of a lease")
    portions = words.portions
    check(sum(len(portion.offsets) for portion in portions) == 1, "not one message was leased")
    holdings = [Holding(portion.partition, portion.lease, portion.offsets) for portion in portions]
    check(not bench.ask(Ack(_TOPIC, holdings)).refused, "an acknowledgement was refused")


@contextmanager
def _broker() -> Iterator[Workbench]:
    """A broker on files, in memory where there is such a place: syncing is not what is measured."""
    fast = "/dev/shm" if Path("/dev/shm").exists() else None
    with tempfile.TemporaryDirectory(dir=fast) as directory:
        bench = Workbench(f"{directory}/data")
        try:
            yield bench
        finally:
            bench.close()


# What must not hold up the event loop.


def subscription_creation(messages: int = 1_000_000) -> Event:
    """A leased subscription of so many messages is made."""
    names = (f"subscription-{number}" for number in count())

    def prepare(broker: MeteredBroker) -> None:
        with connect(broker.address) as bus:
            bus.create_topic(_TOPIC)
            _publish(bus, messages)

    def happen(broker: MeteredBroker) -> Watch:
        name = next(names)
        with connect(broker.address) as bus:
            with broker.watched() as watch:
                bus.create_subscription(_TOPIC, name)
                _wait(lambda: bus.describe_subscription(_TOPIC, name).ready == messages, "messages are missing")
                time.sleep(_AFTERWARDS_S)
            bus.delete_subscription(_TOPIC, name)
        return watch

    return Event("subscription creation", messages, happen, prepare)


def mass_expiry(messages: int = 100_000) -> Event:
    """The leases of so many messages end at about the same time."""

    def prepare(broker: MeteredBroker) -> None:
        with connect(broker.address) as bus:
            bus.create_topic(_TOPIC)
            bus.create_subscription(_TOPIC, **_SETTINGS)
            _publish(bus, messages)

    def happen(broker: MeteredBroker) -> Watch:
        with connect(broker.address) as bus:
            held, deadline_s = 0, time.monotonic() + _LEASE_S
            while held < messages:
                jobs = bus.queue(_TOPIC).lease(_BATCH, lease=max(deadline_s - time.monotonic(), 0.1), bytes_max=1 << 24)
                held += len(jobs)
                check(bool(jobs), f"only {held} of {messages} messages could be leased")
            with broker.watched() as watch:
                _wait(lambda: bus.describe_subscription(_TOPIC).ready == messages, "leases have not ended")
                time.sleep(_AFTERWARDS_S)
        return watch

    return Event("mass expiry", messages, happen, prepare)


def snapshot(messages: int = 200_000) -> Event:
    """The journal is replaced by a snapshot while every other of so many messages is settled."""

    def prepare(broker: MeteredBroker) -> None:
        with connect(broker.address) as bus:
            bus.create_topic(_TOPIC)
            bus.create_subscription(_TOPIC)
            _publish(bus, messages)
            kept: list[Job] = []
            for _ in range(0, messages, _BATCH):
                jobs = bus.queue(_TOPIC).lease(_BATCH, lease=3600)
                check(not bus.queue(_TOPIC).ack(jobs[::2]), "acks were refused")
                kept += jobs[1::2]
            check(len(kept) == messages // 2, f"{len(kept)} messages are left of {messages}")
        happen(broker)

    def happen(broker: MeteredBroker) -> Watch:
        """Write large facts until the journal begins elsewhere: the snapshot before has made room."""
        before = _first_file(broker)
        with connect(broker.address) as bus:
            with broker.watched() as watch:
                _wait(lambda: _first_file(broker) != before, "there was no snapshot", lambda: _write_fact(bus))
                time.sleep(_AFTERWARDS_S)
            left = bus.describe_subscription(_TOPIC).leased
            check(left == messages // 2, f"{left} messages are leased, not {messages // 2}")
        return watch

    return Event("snapshot", messages, happen, prepare, {"journal_bytes": 1 << 20})


def _first_file(broker: MeteredBroker) -> str:
    """The journal's first segment: they are named by their first offset."""
    return min(name for name in os.listdir(os.path.join(broker.data, JOURNAL)) if name[0].isdigit())


def _write_fact(bus: Bus) -> None:
    bus.cron_add("bench", _TOPIC, "@yearly", _FACT + os.urandom(8), paused=True)


def _publish(bus: Bus, messages: int) -> None:
    with bus.producer(_TOPIC) as producer:
        for first in range(0, messages, _BATCH):
            producer.send_many([b"x" * 20] * min(_BATCH, messages - first))
        producer.flush()


def _wait(reached: Callable[[], bool], otherwise: str, meanwhile: Callable[[], None] | None = None) -> None:
    deadline_s = time.monotonic() + _PATIENCE_S
    while not reached():
        check(time.monotonic() < deadline_s, otherwise)
        if meanwhile is None:
            time.sleep(_POLL_S)
        else:
            meanwhile()
