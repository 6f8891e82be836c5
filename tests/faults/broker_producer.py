"""A producer that writes down every message that was acknowledged; it publishes in every way there is."""

import asyncio
import time
from collections.abc import Callable, Iterator
from random import Random
from typing import Any, NamedTuple

from tests.faults.broker_records import Book, Plan

import headrace

_TIMEOUT_S = 60.0


class Step(NamedTuple):
    """Some messages, and how they are published: one by one, asynchronously, or together."""

    way: str
    counters: range


def steps(plan: Plan, dice: Random) -> Iterator[Step]:
    """What the producer does, for as long as it lives."""
    counter = 0
    while True:
        way = dice.choice(("publish", "send", "send", "many"))
        count = {"publish": 1, "send": dice.randint(1, 60), "many": dice.choice((2, 30, 200))}[way]
        counters = range(counter, counter + count)
        if way == "many" and not plan.keyed:
            counters = plan.block(counter)[:count]
        yield Step(way, counters)
        counter = counters[-1] + 1


class _Acknowledging:
    """Writes down what was acknowledged."""

    def __init__(self, plan: Plan, book: Book) -> None:
        self.plan = plan
        self.book = book
        self.error: headrace.HeadraceError | None = None

    def arguments(self, counter: int) -> dict[str, Any]:
        plan = self.plan
        if plan.keyed:
            return {"value": plan.value(counter), "key": plan.key(counter)}
        return {"value": plan.value(counter), "partition": plan.partition(counter)}

    def arguments_of_many(self, counters: range) -> dict[str, Any]:
        plan = self.plan
        values = [plan.value(counter) for counter in counters]
        if plan.keyed:
            return {"values": values, "keys": [plan.key(counter) for counter in counters]}
        return {"values": values, "partition": plan.partition(counters[0])}

    def one(self, counter: int, receipt: Any) -> None:
        assert (receipt.topic, receipt.partition) == (self.plan.topic, self.plan.partition(counter))
        self.book.write((counter, receipt.offset))

    def many(self, counters: range, receipts: list[Any]) -> None:
        assert sum(receipt.count for receipt in receipts) == len(counters)
        if len(receipts) == 1:
            start = receipts[0].offset
            self.book.write(*((counter, start + at) for at, counter in enumerate(counters)))
        else:  # which message is where is not told
            self.book.write(*((counter, -1) for counter in counters))

    def told(self, counter: int) -> Callable[[Any, Any], None]:
        def tell(receipt: Any, error: headrace.HeadraceError | None) -> None:
            if error is not None:
                self.error = error
            else:
                self.one(counter, receipt)

        return tell

    def check(self) -> None:
        if self.error is not None:
            raise self.error


def produce(number: int, seed: int, url: str, book: str) -> None:
    """Publish for as long as we live."""
    plan = Plan(number)
    taking = _Acknowledging(plan, Book(book))
    dice = Random(f"{seed}/producer/{number}")
    if plan.asynchronous:
        asyncio.run(_produce_async(url, taking, dice))
    else:
        _produce(url, taking, dice)


def _produce(url: str, taking: _Acknowledging, dice: Random) -> None:
    bus = headrace.connect(url, timeout=_TIMEOUT_S, wait=_TIMEOUT_S)
    producer = bus.producer(taking.plan.topic, buffer_bytes=1 << 20)
    for way, counters in steps(taking.plan, dice):
        if way == "publish":
            taking.one(counters[0], producer.publish(**taking.arguments(counters[0])))
        elif way == "many":
            taking.many(counters, producer.publish_many(**taking.arguments_of_many(counters)))
        else:
            for counter in counters:
                producer.send(**taking.arguments(counter), callback=taking.told(counter))
            if dice.random() < 0.3:
                producer.flush()
        taking.check()
        time.sleep(dice.uniform(0, 0.01))


async def _produce_async(url: str, taking: _Acknowledging, dice: Random) -> None:
    bus = await headrace.connect_async(url, timeout=_TIMEOUT_S, wait=_TIMEOUT_S)
    producer = bus.producer(taking.plan.topic, buffer_bytes=1 << 20)
    for way, counters in steps(taking.plan, dice):
        if way == "publish":
            taking.one(counters[0], await producer.publish(**taking.arguments(counters[0])))
        elif way == "many":
            taking.many(counters, await producer.publish_many(**taking.arguments_of_many(counters)))
        else:
            for counter in counters:
                await producer.send(**taking.arguments(counter), callback=taking.told(counter))
            if dice.random() < 0.3:
                await producer.flush()
        taking.check()
        await asyncio.sleep(dice.uniform(0, 0.01))
