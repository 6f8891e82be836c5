"""A member of a group that writes down every message before it lets the group go on behind it."""

import asyncio
import time
from contextlib import suppress
from random import Random
from typing import Any

from tests.faults.broker_records import GROUP, TOPICS, Book, mark

import headrace
from headrace.model.errors import MemberFenced, UnknownMember

_TIMEOUT_S = 60.0
_REASSIGNED = MemberFenced, UnknownMember
"""What a commit says when partitions went to another member, or came back anew: messages will be delivered again."""
_AUTO: Any = {"group": GROUP, "session_timeout": 2.0, "commit": "auto", "commit_interval": 0.05}
_MANUAL: Any = {"group": GROUP, "session_timeout": 2.0, "commit": "manual"}


class _Writing:
    """Writes down what was processed."""

    def __init__(self, book: Book) -> None:
        self._book = book

    def one(self, message: Any) -> None:
        self._book.write((message.topic, message.partition, message.offset, mark(message.value)))

    def many(self, batch: Any) -> None:
        self._book.write(
            *(
                (batch.topic, batch.partition, offset, mark(value))
                for offset, value in zip(batch.offsets, batch.values, strict=True)
            )
        )


def consume(number: int, seed: int, url: str, book: str) -> None:
    """Consume for as long as we live, each member in another way."""
    dice = Random(f"{seed}/consumer/{number}")
    writing = _Writing(Book(book))
    ways = (_one_by_one, _in_batches, _with_workers, _one_by_one_async, _in_batches_async)
    way = ways[number % len(ways)]
    if asyncio.iscoroutinefunction(way):
        asyncio.run(way(url, writing, dice))
    else:
        way(url, writing, dice)
    raise AssertionError("there is nothing more to consume, says the client")


def _one_by_one(url: str, writing: _Writing, dice: Random) -> None:
    bus = headrace.connect(url, timeout=_TIMEOUT_S, wait=_TIMEOUT_S)
    for message in bus.subscribe(*TOPICS, **_AUTO):
        writing.one(message)
        if dice.random() < 0.01:
            time.sleep(0.005)


def _in_batches(url: str, writing: _Writing, dice: Random) -> None:
    bus = headrace.connect(url, timeout=_TIMEOUT_S, wait=_TIMEOUT_S)
    subscription = bus.subscribe(*TOPICS, **_MANUAL)
    for batch in subscription.batches():
        writing.many(batch)
        if dice.random() < 0.3:
            with suppress(*_REASSIGNED):
                subscription.commit()


def _with_workers(url: str, writing: _Writing, dice: Random) -> None:
    del dice
    bus = headrace.connect(url, timeout=_TIMEOUT_S, wait=_TIMEOUT_S)
    subscription = bus.subscribe(*TOPICS, **_AUTO)
    subscription.run(writing.one, workers=3)


async def _one_by_one_async(url: str, writing: _Writing, dice: Random) -> None:
    bus = await headrace.connect_async(url, timeout=_TIMEOUT_S, wait=_TIMEOUT_S)
    subscription = bus.subscribe(*TOPICS, **_MANUAL)
    async for message in subscription:
        writing.one(message)
        if dice.random() < 0.05:
            with suppress(*_REASSIGNED):
                await subscription.commit()


async def _in_batches_async(url: str, writing: _Writing, dice: Random) -> None:
    del dice
    bus = await headrace.connect_async(url, timeout=_TIMEOUT_S, wait=_TIMEOUT_S)
    async for batch in bus.subscribe(*TOPICS, **_AUTO).batches():
        writing.many(batch)
