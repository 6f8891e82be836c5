"""Holders of leases and the broker are killed and stopped; no two leases of a message are ever valid at once."""

import os
import signal
import time
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from random import Random, SystemRandom

import pytest
from tests.faults.broker_process import SMALL_JOURNAL, BrokerProcess
from tests.faults.broker_records import Book, Pages
from tests.faults.fork_server import PATIENCE_S, Child, Nursery
from tests.faults.lease_history import LeaseHistory, Place
from tests.faults.lease_holders import LEASE_MS, LEASE_US, TOPIC, Holder, now_us, read_history
from tests.faults.test_broker_kill import Crowd

import headrace

PARTITIONS = 2
HOLDERS = 4
MESSAGES = 25
"""Published in each round."""
NEWS_BYTES = 2000


class Stage:
    """A broker and holders of leases."""

    def __init__(self, nursery: Nursery, directory: Path, seed: int) -> None:
        self.broker = BrokerProcess(nursery, directory / "data", *SMALL_JOURNAL)
        self.holders = Crowd(nursery, "holder", "tests.faults.lease_holders:hold", seed, [self.broker.tcp_url])
        self.dice = Random(seed)
        self.published: list[Place] = []
        self.bus: headrace.Bus
        self._pages = Pages(directory, "holder-*.book")

    def open(self) -> None:
        """Begin."""
        self.broker.start()
        self.broker.connect().close()
        self.bus = headrace.connect(self.broker.tcp_url, timeout=PATIENCE_S, wait=PATIENCE_S)
        self.bus.create_topic(TOPIC, partitions=PARTITIONS, segment_bytes=1 << 20)
        self.bus.create_subscription(TOPIC, lease_seconds=LEASE_MS / 1000, deliveries_max=8, retry_seconds=0.02)

    def publish(self, count: int) -> None:
        """Publish some messages."""
        for _ in range(count):
            partition = self.dice.randrange(PARTITIONS)
            receipt = self.bus.publish(TOPIC, b"work", partition=partition)
            self.published.append((partition, receipt.offset))

    def strike(self) -> None:
        """Kill or stop somebody."""
        what = self.dice.choice(("kill broker", "kill holder", "stop broker", "stop holder", "stop both"))
        holder = self.dice.choice(self.holders.members)
        if what == "kill broker":
            self.broker.kill()
            self.broker.start()
        elif what == "kill holder":
            self.holders.kill(holder)
            self.holders.start()
        else:
            self._stop([self.broker.pid] if "broker" in what or "both" in what else [], holder, what)

    def _stop(self, pids: list[int], holder: Child, what: str) -> None:
        """Let processes stand still for a while, often for longer than their leases last."""
        pids = pids if what == "stop broker" else [*pids, holder.pid]
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        time.sleep(self.dice.uniform(0.05, 2.5 * LEASE_MS / 1000))
        self.dice.shuffle(pids)
        for pid in pids:
            os.kill(pid, signal.SIGCONT)

    def finish(self) -> LeaseHistory:
        """The holders get to the end; all that they wrote down goes together."""
        queue, deadline = self.bus.queue(TOPIC), time.monotonic() + PATIENCE_S
        while (info := queue.stats()).waiting + info.ready + info.leased:
            self.holders.check()
            assert time.monotonic() < deadline, f"not all is settled: {info}"
            time.sleep(0.02)
        for holder in list(self.holders.members):
            self.holders.kill(holder)
        history = self.heard()
        history.check_end(self.published, self._dead())
        self.bus.close()
        self.broker.stop()
        return history

    def heard(self) -> LeaseHistory:
        """What all holders wrote down."""
        history = LeaseHistory()
        read_history(self._pages, history)
        return history

    def _dead(self) -> Counter[Place]:
        found: Counter[Place] = Counter()
        for partition in range(PARTITIONS):
            offset = 0
            while batches := self.bus.fetch(f"{TOPIC}.dead", partition, offset):
                for batch in batches:
                    offset = batch.next_offset
                    headers = [message.headers or {} for message in batch.messages()]
                    found.update((int(one[_PARTITION]), int(one[_OFFSET])) for one in headers)
        return found


_PARTITION, _OFFSET = "headrace-dead-partition", "headrace-dead-offset"


def run(directory: Path, rounds: int) -> None:
    seed = int(os.environ.get("HEADRACE_SEED", SystemRandom().getrandbits(32)))
    print(f"HEADRACE_SEED={seed}")  # pytest shows it when the test fails
    with Nursery(directory) as nursery:
        stage = Stage(nursery, directory, seed)
        stage.open()
        stage.bus.create_topic(f"{TOPIC}.dead", partitions=PARTITIONS)
        for _ in range(HOLDERS):
            stage.holders.start()
        for _ in range(rounds):
            stage.publish(MESSAGES)
            stage.holders.wait_for_news(NEWS_BYTES)
            time.sleep(stage.dice.uniform(0, 0.2))
            stage.strike()
        history = stage.finish()
    said = Counter((one.verb, one.outcome) for story in history.stories.values() for one in story.said)
    print(sorted(said.items()))
    leases = sum(len(story.leases) for story in history.stories.values())
    assert leases > len(stage.published), "this tested next to nothing"


def test_no_two_leases_are_valid_at_once(tmp_path: Path) -> None:
    run(tmp_path, 10)


@pytest.mark.long
@pytest.mark.parametrize("turn", range(3))
def test_no_two_leases_are_valid_at_once_for_long(tmp_path: Path, turn: int) -> None:  # noqa: ARG001
    run(tmp_path, 100)


def test_a_broker_that_stood_still_finds_requests_and_ended_leases(tmp_path: Path) -> None:
    with Nursery(tmp_path) as nursery, ExitStack() as closing:
        stage = Stage(nursery, tmp_path, 1)
        stage.open()
        stage.publish(60)
        books = [Book(tmp_path / f"holder-{number}.book") for number in range(9)]
        holders = [Holder(stage.broker.port, str(number), book) for number, book in enumerate(books)]
        for holder in holders:
            closing.callback(holder.client.close)
        held = [(holder, *one) for holder in holders[:6] for one in holder.lease(10, 0)]
        waiting = [(holder, holder.ask_to_lease(30, 30_000)) for holder in holders[6:]]
        os.kill(stage.broker.pid, signal.SIGSTOP)
        asked = []
        for number, (holder, partition, token, _, offsets) in enumerate(held):
            for verb in (("extend", "ack"), ("ack",), ("extend",), ("release",), ("extend", "release"))[number % 5]:
                asked.append((holder, holder.ask(verb, partition, token, offsets)))
        ends_us = max(until_us for _, _, _, until_us, _ in held)
        time.sleep(max(ends_us - now_us() + LEASE_US // 10, 0) / 1e6)
        os.kill(stage.broker.pid, signal.SIGCONT)
        outcomes = [holder.hear(*one) for holder, one in asked]
        taken = [holder.leased(sent) for holder, sent in waiting]
        stage.heard().check()
        assert taken[0], "what was given back goes to those who wait"
        assert outcomes
        stage.bus.close()
        stage.broker.stop()
