"""Producers and consumers of a leased subscription, to be killed; they write down what they do for the test to see."""

import asyncio
import time
from collections.abc import Callable, Iterator
from random import Random
from typing import Any

from tests.faults.broker_records import Book

import headrace
from headrace.model.errors import ConnectionFailed, MessageGone, MessageLeased, StaleVersion

TOPIC = "jobs"
PARTITIONS = 2
LEASE_S = 1.2
_TIMEOUT_S = 60.0


def now_us() -> int:
    """The time; the broker is on the same machine."""
    return time.time_ns() // 1000


def value_of(number: int, counter: int, due_us: int) -> bytes:
    """What the message says: whose it is, and when it is due."""
    return b"%d.%d.%d" % (number, counter, due_us)


def parsed(value: bytes) -> tuple[int, int, int]:
    """Producer, number and due time of a message."""
    number, counter, due_us = map(int, value.split(b"."))
    return number, counter, due_us


def produce(number: int, seed: int, url: str, book: str) -> None:
    """Publish for as long as we live: jobs for now, and reminders that are moved at times."""
    dice, pages = Random(f"{seed}/producer/{number}"), Book(book)
    bus = headrace.connect(url, timeout=_TIMEOUT_S, wait=_TIMEOUT_S)
    for counter in range(10**9):
        partition = dice.randrange(PARTITIONS)
        if dice.random() < 0.5:
            value = value_of(number, counter, 0)
            receipt = bus.publish(TOPIC, value, partition=partition)
            pages.write(("published", partition, receipt.offset, value.decode()))
        else:
            due_us = now_us() + dice.randrange(1_000_000)
            value = value_of(number, counter, due_us)
            reminder = bus.schedule(TOPIC, value, at=due_us, partition=partition)
            pages.write(("published", reminder.partition, reminder.offset, value.decode()))
            if dice.random() < 0.4:
                _move(reminder, pages, reminder.partition, reminder.offset, due_us + dice.randrange(500_000))
        time.sleep(dice.uniform(0, 0.01))


def _move(reminder: Any, pages: Book, partition: int, offset: int, due_us: int) -> None:
    try:
        reminder.move(at=due_us)
    except (MessageLeased, MessageGone):
        return
    except (ConnectionFailed, StaleVersion):
        return  # it may have been moved just before the broker died
    pages.write(("moved", partition, offset, due_us, now_us()))


def consume(number: int, seed: int, url: str, book: str) -> None:
    """Lease for as long as we live, each consumer in another way."""
    dice, pages = Random(f"{seed}/consumer/{number}"), Book(book)
    if number % 3 == 0:
        asyncio.run(_by_jobs_async(url, pages, dice))
    elif number % 3 == 1:
        _by_hand(url, pages, dice)
    else:
        _by_jobs(url, pages, dice)
    raise AssertionError("there is nothing more to consume, says the client")


def _begin(pages: Book, job: Any, *, by_hand: bool) -> None:
    pages.write(
        ("begin", job.partition, job.offset, job.lease, job.until, int(by_hand), now_us(), (job.value or b"").decode())
    )


def _by_hand(url: str, pages: Book, dice: Random) -> None:
    bus = headrace.connect(url, timeout=_TIMEOUT_S, wait=_TIMEOUT_S)
    queue = bus.queue(TOPIC)
    while True:
        jobs = queue.lease(max=dice.choice((1, 5, 50)), lease=LEASE_S, wait=0.5)
        for job in jobs:
            _begin(pages, job, by_hand=True)
        for what, some in _shared_out(jobs, dice):
            if what == "ack":
                _settled(pages, "ack", some, queue.ack)
            elif what == "release":
                _settled(pages, "releas", some, lambda some: queue.release(some, delay=0.05))
            elif what == "extend":
                least_us = now_us() + round(LEASE_S * 1e6)
                refused = {(one.partition, one.offset) for one in queue.extend(some, LEASE_S)}
                kept = [job for job in some if (job.partition, job.offset) not in refused]
                pages.write(*(("extended", job.partition, job.offset, job.lease, least_us) for job in kept))
                _settled(pages, "ack", kept, queue.ack)
            # Else they are forgotten: their leases end.


def _shared_out(jobs: list[Any], dice: Random) -> Iterator[tuple[str, list[Any]]]:
    """What is done with which."""
    while jobs:
        count = dice.randint(1, len(jobs))
        some, jobs = jobs[:count], jobs[count:]
        if dice.random() < 0.1:
            time.sleep(dice.uniform(0, 0.3))
        yield dice.choice(("ack", "ack", "ack", "ack", "release", "extend", "forget")), some


def _settled(pages: Book, what: str, jobs: list[Any], settle: Callable[[list[Any]], Any]) -> None:
    """Write down what is about to be asked for, acking or releasing, and what of it was done."""
    if not jobs:
        return
    pages.write(*((f"{what}ing", job.partition, job.offset, job.lease, now_us()) for job in jobs))
    refused = {(one.partition, one.offset) for one in settle(jobs)}
    done = [job for job in jobs if (job.partition, job.offset) not in refused]
    pages.write(*((f"{what}ed", job.partition, job.offset, job.lease, now_us()) for job in done))


def _by_jobs(url: str, pages: Book, dice: Random) -> None:
    bus = headrace.connect(url, timeout=_TIMEOUT_S, wait=_TIMEOUT_S)
    queue = bus.queue(TOPIC)
    for job in queue.jobs(prefetch=20, ack="manual"):
        _begin(pages, job, by_hand=False)
        if dice.random() < 0.9:
            _settled(pages, "ack", [job], queue.ack)
        else:  # nothing is just forgotten: the client keeps what it was told to keep
            _settled(pages, "releas", [job], queue.release)


async def _by_jobs_async(url: str, pages: Book, dice: Random) -> None:
    bus = await headrace.connect_async(url, timeout=_TIMEOUT_S, wait=_TIMEOUT_S)
    async for job in bus.queue(TOPIC).jobs(prefetch=20, ack="auto"):
        _begin(pages, job, by_hand=False)
        if dice.random() < 0.05:
            await asyncio.sleep(dice.uniform(0, 0.1))
        pages.write(("acking", job.partition, job.offset, job.lease, now_us()))
