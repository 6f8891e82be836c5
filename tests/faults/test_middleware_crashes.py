"""Middleware with dead letters: the power goes off at every step, and each message is in exactly one topic, once."""

import tempfile
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest

from headrace.broker.settings import BrokerSettings
from headrace.model.batch import Producer
from headrace.model.requests import TopicCreate, TransactionBegin, TransactionCommit, TransactionStage
from headrace.testing import FaultyDisk, Unsynced
from headrace.testing.workbench import Workbench

MEMORY = Path("/dev/shm")
DEAD = {"name": "schema", "schema": {"type": "object"}, "on_invalid": "dead_letter"}


@pytest.fixture
def data() -> Iterator[str]:
    with tempfile.TemporaryDirectory(dir=MEMORY if MEMORY.exists() else None) as directory:
        yield f"{directory}/data"


def value(number: int, is_valid: bool) -> bytes:
    return b'{"id":%d}' % number if is_valid else b"%d" % number


class Publisher:
    """Publishes batches under numbers, and sends the last one again after a crash until it is acknowledged."""

    def __init__(self, data: str, disk: FaultyDisk, settings: BrokerSettings | None = None) -> None:
        self.data, self.disk, self.settings = data, disk, settings or BrokerSettings()
        self.bench = self.start()
        self.bench.ask(TopicCreate("orders", {"middleware": [DEAD]}))
        self.sequence = 0
        self.receipts: dict[bytes, int] = {}
        """Which offset each message has, or would have."""
        self.valid: list[bytes] = []
        self.invalid: list[bytes] = []

    def start(self) -> Workbench:
        return Workbench(self.data, disk=self.disk, settings=self.settings)

    def restart(self, unsynced: Unsynced = Unsynced.RANDOM) -> None:
        self.disk.power_loss(unsynced)
        self.bench = self.start()

    def publish(self, marks: list[bool], unsynced: Unsynced = Unsynced.RANDOM) -> None:
        """Publish messages that are valid or not, however often the power goes off."""
        count = len(self.receipts)
        values = [value(count + at, mark) for at, mark in enumerate(marks)]
        self.valid += [one for one, mark in zip(values, marks, strict=True) if mark]
        self.invalid += [one for one, mark in zip(values, marks, strict=True) if not mark]
        while True:
            try:
                published = self.bench.publish("orders", values, producer=Producer(99, 0, self.sequence))
                break
            except Exception:  # noqa: BLE001 the power is off
                assert self.disk.crashed
                self.restart(unsynced)
        self.sequence += 1
        self.receipts |= {one: published.base_offset + at for at, one in enumerate(values)}

    def check(self) -> None:
        """Each message is there once, where its receipt says, or is a dead letter."""
        found = {one.value: one.offset for batch in self.bench.batches("orders") for one in batch.messages()}
        assert list(found) == self.valid
        assert len(self.bench.values("orders")) == len(self.valid)
        assert all(found[one] == self.receipts[one] for one in self.valid if one is not None)
        letters = self.bench.values("orders.dead") if self.invalid else []
        assert letters == self.invalid


@pytest.mark.parametrize("unsynced", [Unsynced.RANDOM, Unsynced.LOST])
@pytest.mark.parametrize("operations", range(1, 40))
def test_a_power_loss_at_any_moment_of_a_batch_with_dead_letters(
    data: str, operations: int, unsynced: Unsynced
) -> None:
    disk = FaultyDisk(operations)
    publisher = Publisher(data, disk)
    publisher.publish([True])
    disk.crash_after(operations)
    publisher.publish([True, False, True], unsynced)
    publisher.publish([False], unsynced)
    publisher.publish([True], unsynced)
    publisher.check()
    publisher.restart(unsynced)
    publisher.check()


@pytest.mark.parametrize("seed", range(8))
def test_power_losses_again_and_again(data: str, seed: int) -> None:
    random, disk = Random(seed), FaultyDisk(seed)
    publisher = Publisher(data, disk, BrokerSettings(journal_bytes=3000))  # with snapshots in between
    for _ in range(60):
        if random.random() < 0.4:
            disk.crash_after(random.randrange(1, 60))
        publisher.publish([random.random() < 0.6 for _ in range(random.randrange(1, 6))])
        if disk.crashed:
            publisher.restart()
    disk.crash_after(0)
    publisher.restart()
    publisher.check()
    # A producer that sends its last batch again learns where it is.
    published = publisher.bench.publish("orders", [b"x"], producer=Producer(99, 0, publisher.sequence - 1))
    assert published.duplicate
    publisher.check()


@pytest.mark.parametrize("operations", range(1, 45))
def test_a_power_loss_at_any_moment_of_a_transaction_with_dead_letters(data: str, operations: int) -> None:
    disk = FaultyDisk(operations)
    bench = Workbench(data, disk=disk)
    bench.ask(TopicCreate("orders", {"middleware": [DEAD]}))
    disk.crash_after(operations)
    for _ in range(3):
        try:
            begun = bench.ask(TransactionBegin("t", 0))
            if not begun.committed:
                for values in ([value(1, True), value(2, False)], [value(3, False)]):
                    bench.ask(TransactionStage("t", begun.epoch, "orders", 0), bench.batch(values).data)
                bench.ask(TransactionCommit("t", begun.epoch))
        except Exception:  # noqa: BLE001 the power is off
            assert disk.crashed
            disk.power_loss(Unsynced.RANDOM)
            bench = Workbench(data, disk=disk)
    disk.crash_after(0)
    disk.power_loss(Unsynced.RANDOM)
    bench = Workbench(data, disk=disk)
    assert bench.values("orders") == [value(1, True)]
    assert bench.values("orders.dead") == [value(2, False), value(3, False)]
