"""Tasks fill transactions that they share while the broker is killed: each is done once and wholly, or not at all."""

import os
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from random import Random, SystemRandom

from tests.faults.broker_process import SMALL_JOURNAL, BrokerProcess
from tests.faults.fork_server import Nursery

import headrace
from headrace.model.batch import Columns, encode

ROUNDS = int(os.environ.get("HEADRACE_KILLS", "16"))
TASKS = 3
PARTITIONS = 2
NAME, TOPIC = "shared", "out"
_TIMEOUT_S = 60.0


def value(sequence: int, task: int, batch: int, attempt: int) -> bytes:
    """A message; large ones make the broker need another file now and then."""
    return b"%d.%d.%d.%d." % (sequence, task, batch, attempt) + b"y" * (60_000 if batch == 3 else 10)


def batches_of(sequence: int, task: int) -> int:
    """How many batches a task stages."""
    return 1 + (sequence * 5 + task * 3) % 6


class Job:
    """Tasks and a driver, as Spark has them."""

    def __init__(self, broker: BrokerProcess, seed: int) -> None:
        self._broker = broker
        self._dice = Random(seed)
        self._tasks = ThreadPoolExecutor(TASKS)
        self._attempts = 0
        self.kills = 0
        self.counted: dict[int, int] = {}
        """Sequences to the attempts that were committed."""

    def do(self, sequence: int) -> None:
        """Do a transaction, sometimes with attempts before it that nobody counts, and sometimes again after it."""
        dice = self._dice
        if dice.random() < 0.3:
            self._staged(sequence)
        epochs, stages = self._staged(sequence)
        assert len(set(epochs)) == 1, "the transaction was begun anew"
        committing = self._tasks.submit(self._commit, sequence, epochs[0], stages)
        self._strike()
        committing.result()
        self.counted[sequence] = self._attempts
        if dice.random() < 0.3:
            self._strike()
            self._commit(sequence, epochs[0], stages)
        if dice.random() < 0.3:
            again, _ = self._staged(sequence)
            assert again == [0] * TASKS, "it was committed, and can be done again"

    def close(self) -> None:
        """No more tasks."""
        self._tasks.shutdown()

    def _staged(self, sequence: int) -> tuple[list[int], list[int]]:
        self._attempts += 1
        tasks: list[Future[tuple[int, list[int]]]] = []
        for task in range(TASKS):
            tasks.append(self._tasks.submit(self._stage, sequence, task, self._attempts, self._dice.uniform(0, 0.02)))
        self._strike()
        done = [task.result() for task in tasks]
        return [epoch for epoch, _ in done], [stage for _, stages in done for stage in stages]

    def _stage(self, sequence: int, task: int, attempt: int, pause_s: float) -> tuple[int, list[int]]:
        with headrace.connect(self._broker.tcp_url, timeout=_TIMEOUT_S, wait=_TIMEOUT_S) as bus:
            part = bus.transaction(NAME, sequence=sequence, timeout=_TIMEOUT_S)
            part.join()
            if part.already_committed:
                return 0, []
            for batch in range(batches_of(sequence, task)):
                content = value(sequence, task, batch, attempt)
                part.stage(TOPIC, batch % PARTITIONS, encode(Columns([content]), 0))
                time.sleep(pause_s)
            return part.epoch, part.staged()

    def _commit(self, sequence: int, epoch: int, stages: list[int]) -> None:
        with headrace.connect(self._broker.tcp_url, timeout=_TIMEOUT_S, wait=_TIMEOUT_S) as bus:
            whole = bus.transaction(NAME, sequence=sequence)
            whole.adopt_stages(epoch, stages)
            whole.commit()

    def _strike(self) -> None:
        """Perhaps kill the broker, in a moment."""
        if self._dice.random() < 0.5:
            time.sleep(self._dice.uniform(0, 0.1))
            self._broker.kill()
            self._broker.start()
            self.kills += 1


def test_shared_transactions_are_done_once_and_wholly(tmp_path: Path) -> None:
    seed = int(os.environ.get("HEADRACE_SEED", SystemRandom().getrandbits(32)))
    print(f"HEADRACE_SEED={seed}")  # pytest shows it when the test fails
    with Nursery(tmp_path) as nursery:
        broker = BrokerProcess(nursery, tmp_path / "data", *SMALL_JOURNAL)
        broker.start()
        with broker.connect() as bus:
            bus.create_topic(TOPIC, partitions=PARTITIONS)
        job = Job(broker, seed)
        for sequence in range(ROUNDS):
            job.do(sequence)
        job.close()
        with broker.connect() as bus:
            for partition in range(PARTITIONS):
                assert _fetched(bus, partition) == [
                    value(sequence, task, batch, job.counted[sequence])
                    for sequence in range(ROUNDS)
                    for task in range(TASKS)
                    for batch in range(partition, batches_of(sequence, task), PARTITIONS)
                ]
            assert bus.info().transactions_open == 0
        broker.stop()
    print(f"{ROUNDS} transactions, {job.kills} kills")


def _fetched(bus: headrace.Bus, partition: int) -> list[bytes]:
    values: list[bytes] = []
    while batches := bus.fetch(TOPIC, partition, len(values)):
        values += [content or b"" for batch in batches for content in batch.columns().values]
    return values
