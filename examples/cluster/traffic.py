"""A producer and a consumer, each in a thread, which remember enough to prove that nothing was lost or doubled."""

import threading
import time
from typing import NamedTuple

import headrace

TOPIC = "numbers"
GROUP = "demo"
_TIMEOUT_S = 60.0
_PACE_S = 0.002


class Acknowledged(NamedTuple):
    """A message that the cluster has acknowledged; its number is its index."""

    offset: int
    begun_s: float
    acknowledged_s: float


class Worker(threading.Thread):
    """A thread that works until it is told to stop, and whose error the main thread raises."""

    def __init__(self, url: str) -> None:
        super().__init__(name=type(self).__name__, daemon=True)
        self.url = url
        self.stopping = threading.Event()
        self.error: BaseException | None = None

    def run(self) -> None:
        """Work, and keep the error."""
        try:
            with headrace.connect(self.url, timeout=_TIMEOUT_S) as bus:
                self.work(bus)
        except BaseException as error:  # noqa: BLE001 the main thread raises it
            self.error = error

    def work(self, bus: headrace.Bus) -> None:
        """Do it."""
        raise NotImplementedError

    def check(self) -> None:
        """Raise what has ended the thread."""
        if self.error is not None:
            raise RuntimeError(f"the {type(self).__name__.lower()} failed: {self.error}") from self.error

    def stop(self) -> None:
        """Let it end."""
        self.stopping.set()
        self.join(_TIMEOUT_S + 10)
        self.check()


class Producer(Worker):
    """Publishes 0, 1, 2 and so on, each once the one before is acknowledged."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.acknowledged: list[Acknowledged] = []

    def work(self, bus: headrace.Bus) -> None:
        """Publish until it is told to stop."""
        bus.create_topic(TOPIC, exist_ok=True)
        while not self.stopping.is_set():
            begun_s = time.monotonic()
            receipt = bus.publish(TOPIC, b"%d" % len(self.acknowledged))
            self.acknowledged.append(Acknowledged(receipt.offset, begun_s, time.monotonic()))
            time.sleep(_PACE_S)

    def first_after(self, moment_s: float, patience_s: float = _TIMEOUT_S) -> float:
        """Wait for the first message that was begun after a moment; returns when it was acknowledged."""
        at = len(self.acknowledged)
        while time.monotonic() < moment_s + patience_s:
            self.check()
            for each in self.acknowledged[at:]:
                at += 1
                if each.begun_s > moment_s:
                    return each.acknowledged_s
            time.sleep(0.005)
        raise RuntimeError(f"nothing was acknowledged for {patience_s:g} s")


class Consumer(Worker):
    """Reads the topic as a member of a consumer group, which continues after a failover where it was."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.seen: dict[int, bytes] = {}
        self.wrong: list[str] = []

    def work(self, bus: headrace.Bus) -> None:
        """Read until it is told to stop."""
        while not self.stopping.is_set():
            with bus.subscribe(TOPIC, group=GROUP, start="earliest", timeout=1.0) as subscription:
                for batch in subscription.batches():
                    for offset, value in zip(batch.offsets, batch.values, strict=True):
                        self.take(offset, value or b"")
                    if self.stopping.is_set():
                        break

    def take(self, offset: int, value: bytes) -> None:
        """Remember a message; one offset must never have two values."""
        before = self.seen.setdefault(offset, value)
        if before != value:
            self.wrong.append(f"offset {offset} was {before!r} and is {value!r}")


def missing(url: str, producer: Producer, consumer: Consumer) -> list[str]:
    """What is wrong: read the whole topic anew, and compare it with the receipts and with what the consumer saw."""
    stored: dict[int, bytes] = {}
    with headrace.connect(url, timeout=_TIMEOUT_S) as bus:
        end = bus.offsets(TOPIC, at="latest")[0]
        with bus.subscribe(TOPIC, start="earliest", timeout=_TIMEOUT_S) as subscription:
            for batch in subscription.batches():
                stored.update(zip(batch.offsets, (value or b"" for value in batch.values), strict=True))
                if batch.offsets[-1] >= end - 1:
                    break
    wrong = list(consumer.wrong)
    for number, receipt in enumerate(producer.acknowledged):
        if stored.get(receipt.offset) != b"%d" % number:
            wrong.append(f"number {number} is not at offset {receipt.offset}: it is {stored.get(receipt.offset)!r}")
    if len(set(stored.values())) != len(stored):
        wrong.append(f"{len(stored) - len(set(stored.values()))} numbers are stored twice")
    unseen = [offset for offset in stored if offset not in consumer.seen]
    if unseen:
        wrong.append(f"the consumer has not seen {len(unseen)} messages, such as that of offset {unseen[0]}")
    return wrong
