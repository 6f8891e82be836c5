"""Clients of a cluster in processes of their own; each writes down what it asks for and what it is told.

They use the client library with the addresses of all nodes, as programs do. Only the sticky one speaks the protocol by
itself: it stays with one node, so that a node that another has replaced keeps being asked.
"""

import contextlib
import os
import socket
import time
from collections.abc import Callable
from random import Random
from typing import Any

from tests.faults.broker_raw import batch_of
from tests.faults.cluster_history import (
    ASK,
    BEGIN,
    COMMIT,
    COMMITTED,
    DONE_WHOLE,
    GIVEN_UP,
    JOIN,
    LEASED,
    POSITION,
    READ,
    REFUSED,
    SEND,
    SENT,
    TOLD,
    UNSENT,
    HistoryFile,
    Record,
)
from tests.native_client import NativeClient

import headrace
from headrace.model.errors import HeadraceError
from headrace.model.leasing import Ack, Holding, Lease
from headrace.model.requests import Publish

EVENTS, JOBS, STICKY, ONE, TWO = "events", "jobs", "sticky", "one", "two"
TOPICS = {EVENTS: 2, JOBS: 1, STICKY: 1, ONE: 1, TWO: 1}
"""Topics to their numbers of partitions."""
LEASE_S = 1.0
LONG_LEASE_S = 8.0
"""Longer than any failover: a lease that only the old owner knows of overlaps with another of the new one."""
TIMEOUT_S = 30.0
STOP = "stop"
"""A file of this name in the directory ends producers, which then finish what they began."""
_REASSIGNED = ("member_fenced", "unknown_member")
_PASSING = ("transaction_not_found", "transaction_fenced", *_REASSIGNED)


class _GivenUp(Exception):
    """A client changes its mind in the middle of a transaction."""


class _Client:
    def __init__(self, name: str, seed: int, url: str, directory: str) -> None:
        self.name = name
        self.dice = Random(f"{seed}/{name}")
        self.history = HistoryFile(os.path.join(directory, f"{name}.history"), name)
        self._stop = os.path.join(directory, STOP)
        self.bus: headrace.Bus = headrace.connect(url, timeout=TIMEOUT_S, wait=TIMEOUT_S)
        self.counter = 0

    @property
    def is_stopped(self) -> bool:
        return os.path.exists(self._stop)

    def pause(self, seconds_max: float) -> None:
        time.sleep(self.dice.uniform(0, seconds_max))


def produce(name: str, seed: int, url: str, directory: str) -> None:
    """Publish to a topic, in every way there is, until it is stopped."""
    client = _Client(name, seed, url, directory)
    topic, partitions = (JOBS, 1) if name.startswith("jobs") else (EVENTS, TOPICS[EVENTS])
    producer = client.bus.producer(topic)
    ways: list[Callable[[_Client, Any, str, int], None]] = [_publish_one, _publish_many, _send]
    while not client.is_stopped:
        client.dice.choice(ways)(client, producer, topic, client.dice.randrange(partitions))
        client.pause(0.06 if topic == EVENTS else 0.1)
    producer.close()


def _values(client: _Client, topic: str, count: int) -> list[str]:
    """The next values, written down as about to be sent."""
    numbers = range(client.counter + 1, client.counter + count + 1)
    client.counter += count
    values = [f"{client.name}.{number}" for number in numbers]
    client.history.write(
        *(Record(SEND, topic=topic, value=value, number=number) for number, value in zip(numbers, values, strict=True))
    )
    return values


def _publish_one(client: _Client, producer: Any, topic: str, partition: int) -> None:
    [value] = _values(client, topic, 1)
    try:
        receipt = producer.publish(value.encode(), partition=partition)
    except HeadraceError as error:
        client.history.write(Record(UNSENT, topic=topic, value=value, error=f"{error.code}: {error}"))
    else:
        _acknowledged(client, receipt, [value])


def _publish_many(client: _Client, producer: Any, topic: str, partition: int) -> None:
    values = _values(client, topic, client.dice.randint(2, 10))
    try:
        receipts = producer.publish_many([value.encode() for value in values], partition=partition)
    except HeadraceError as error:
        texts = f"{error.code}: {error}"
        client.history.write(*(Record(UNSENT, topic=topic, value=value, error=texts) for value in values))
    else:
        for receipt in receipts:
            _acknowledged(client, receipt, values[: receipt.count])
            del values[: receipt.count]


def _send(client: _Client, producer: Any, topic: str, partition: int) -> None:
    for value in _values(client, topic, client.dice.randint(1, 8)):

        def told(receipt: Any, error: HeadraceError | None, value: str = value) -> None:
            if error is not None:
                client.history.write(Record(UNSENT, topic=topic, value=value, error=f"{error.code}: {error}"))
            else:
                _acknowledged(client, receipt, [value])

        producer.send(value.encode(), partition=partition, callback=told)
    if client.dice.random() < 0.5:
        with contextlib.suppress(HeadraceError):  # each message's callback has said it
            producer.flush()


def _acknowledged(client: _Client, receipt: Any, values: list[str]) -> None:
    client.history.write(
        *(
            Record(SENT, topic=receipt.topic, partition=receipt.partition, offset=receipt.offset + at, value=value)
            for at, value in enumerate(values)
        )
    )


def replay(name: str, seed: int, url: str, directory: str) -> None:
    """Read all topics from the beginning, and write down which value each offset has."""
    client = _Client(name, seed, url, directory)
    for batch in client.bus.subscribe(*TOPICS).batches():
        client.history.write(
            *(
                Record(READ, topic=batch.topic, partition=batch.partition, offset=offset, value=(value or b"").decode())
                for offset, value in zip(batch.offsets, batch.values, strict=True)
            )
        )
    raise AssertionError("there is nothing more to read, says the client")


def work(name: str, seed: int, url: str, directory: str) -> None:
    """Lease jobs; acknowledge most of them, release some, and let the leases of others end."""
    client = _Client(name, seed, url, directory)
    queue = client.bus.queue(JOBS)
    while True:
        try:
            client.pause(0.06)  # so that there are jobs in the queue at any time
            lease_s = client.dice.choice((LEASE_S, LEASE_S, LEASE_S, LONG_LEASE_S))
            jobs = queue.lease(max=client.dice.choice((1, 2, 5)), lease=lease_s, wait=0.5)
        except HeadraceError as error:
            if not error.retryable:
                raise
            client.history.write(Record("not leased", error=f"{error.code}: {error}"))
            continue
        lease_us = round(lease_s * 1e6)
        client.history.write(
            *(
                Record(
                    LEASED,
                    topic=JOBS,
                    partition=job.partition,
                    offset=job.offset,
                    value=(job.value or b"").decode(),
                    token=job.lease,
                    begin_us=job.until - lease_us,
                    until_us=job.until,
                )
                for job in jobs
            )
        )
        while jobs:
            count = client.dice.randint(1, len(jobs))
            some, jobs = jobs[:count], jobs[count:]
            if client.dice.random() < 0.1:
                client.pause(0.3)
            verb = client.dice.choice(("ack", "ack", "ack", "ack", "ack", "release", "forget"))
            if verb != "forget":
                _settle(client, verb, some, queue.ack if verb == "ack" else queue.release)


def _wall_us() -> int:
    return time.time_ns() // 1000


def _settle(client: _Client, verb: str, jobs: list[Any], settle: Callable[[list[Any]], Any]) -> None:
    client.counter += 1
    number, asked_us = client.counter, _wall_us()

    def records(what: str, time_us: int, errors: dict[tuple[int, int], str]) -> list[Record]:
        return [
            Record(
                what,
                topic=JOBS,
                partition=job.partition,
                offset=job.offset,
                token=job.lease,
                number=number,
                verb=verb,
                begin_us=time_us,
                error=errors.get((job.partition, job.offset), ""),
            )
            for job in jobs
        ]

    client.history.write(*records(ASK, asked_us, {}))
    try:
        refused = {(one.partition, one.offset): one.code for one in settle(jobs)}
    except HeadraceError as error:
        if not error.retryable:
            raise
        client.history.write(Record("not settled", number=number, error=f"{error.code}: {error}"))
        return  # nobody knows whether it was done
    told_us = _wall_us()
    told = records(TOLD, told_us, refused)
    for record, job in zip(told, jobs, strict=True):
        if job.until <= told_us and not record.error:
            # The client repeats what a lost connection left open, and takes "gone" for its own doing: after the end
            # of the lease it may have been another's.
            record.what = "told late"
    client.history.write(*told)


def consume(name: str, seed: int, url: str, directory: str) -> None:
    """Consume as a group, commit, and join anew every now and then: the group goes on where it committed."""
    client = _Client(name, seed, url, directory)
    group = f"group-{name}"
    while True:
        client.counter += 1
        client.history.write(Record(JOIN, number=client.counter))
        subscription = client.bus.subscribe(EVENTS, group=group, commit="manual", session_timeout=2.0)
        with contextlib.suppress(_GivenUp):
            _consume(client, group, subscription)
        subscription.close()


def _consume(client: _Client, group: str, subscription: Any) -> None:
    begun: set[int] = set()
    for batch in subscription.batches():
        place: Any = {"topic": batch.topic, "partition": batch.partition}
        if batch.partition not in begun:
            begun.add(batch.partition)
            first = batch.offsets[0]
            client.history.write(Record(POSITION, value=group, offset=first, number=client.counter, **place))
        client.history.write(
            *(
                Record(READ, offset=offset, value=(value or b"").decode(), verb=group, **place)
                for offset, value in zip(batch.offsets, batch.values, strict=True)
            )
        )
        if client.dice.random() < 0.3 and not _commit(client, group, subscription, place, batch.next_offset):
            raise _GivenUp
        if client.dice.random() < 0.05:
            raise _GivenUp


def _commit(client: _Client, group: str, subscription: Any, place: dict[str, Any], offset: int) -> bool:
    client.history.write(Record(COMMIT, value=group, offset=offset, **place))
    try:
        subscription.commit()
    except HeadraceError as error:
        what = "not committed" if error.retryable or error.code in _REASSIGNED else REFUSED
        client.history.write(Record(what, value=group, offset=offset, error=f"{error.code}: {error}", **place))
        return False
    client.history.write(Record(COMMITTED, value=group, offset=offset, **place))
    return True


def transact(name: str, seed: int, url: str, directory: str) -> None:
    """Write to two topics in one transaction after the other, again under the same number until it is committed."""
    client = _Client(name, seed, url, directory)
    attempt = 0
    sequence = 0
    while not client.is_stopped:
        attempt += 1
        values = [(topic, f"{name}.{sequence}.{attempt}.{topic}.{at}") for topic in (ONE, TWO) for at in range(3)]
        word: Any = {"value": name, "number": sequence, "token": attempt}
        client.history.write(Record(BEGIN, values=values, **word))
        try:
            is_repeated = _transact(client, sequence, values)
        except _GivenUp:
            client.history.write(Record(GIVEN_UP, **word))
            continue
        except HeadraceError as error:
            client.history.write(Record("in doubt", error=f"{error.code}: {error}", **word))
            if not error.retryable and error.code not in _PASSING:
                raise
            continue
        if is_repeated:
            word["token"] = 0  # an earlier attempt, whose answer was lost
        client.history.write(Record(DONE_WHOLE, **word))
        sequence += 1
        client.pause(0.1)


def _transact(client: _Client, sequence: int, values: list[tuple[str, str]]) -> bool:
    """Do it; whether it had been done before."""
    with client.bus.transaction(client.name, sequence=sequence, timeout=TIMEOUT_S) as transaction:
        for topic, value in values:
            transaction.publish(topic, value.encode(), partition=0)
        if client.dice.random() < 0.05:
            client.pause(0.2)
        if client.dice.random() < 0.05 and not transaction.already_committed:
            raise _GivenUp
    return bool(transaction.already_committed)


def stick(name: str, seed: int, address: str, directory: str, node: str) -> None:
    """Publish to one node, and lease from it, for as long as it answers, whoever serves; never follow a redirect."""
    dice = Random(f"{seed}/{name}")
    history = HistoryFile(os.path.join(directory, f"{name}.history"), name)
    stop = os.path.join(directory, STOP)
    counter = 0
    while not os.path.exists(stop):
        with contextlib.suppress(OSError, EOFError, HeadraceError), _connected(address, name) as client:
            while not os.path.exists(stop):
                counter += 1
                if dice.random() < 0.5:
                    _stick_one(client, history, node, counter, f"{name}.{counter}")
                else:
                    _hold_one(client, history, node, counter, dice)
                time.sleep(0.02)
        time.sleep(0.1)


def _connected(address: str, name: str) -> NativeClient:
    host, _, port = address.rpartition(":")
    client = NativeClient(socket.create_connection((host, int(port)), timeout=5), TIMEOUT_S)
    try:
        client.hello(name)
    except BaseException:
        client.close()
        raise
    return client


def _stick_one(client: NativeClient, history: HistoryFile, node: str, counter: int, value: str) -> None:
    history.write(Record(SEND, topic=STICKY, value=value, number=counter, node=node))
    answer = client.ask(Publish(STICKY, 0), batch_of(value.encode()))
    history.write(Record(SENT, topic=STICKY, value=value, offset=answer.base_offset, node=node))


def _hold_one(client: NativeClient, history: HistoryFile, node: str, counter: int, dice: Random) -> None:
    """Lease a job from the node; acknowledge it, or leave it. Nothing is repeated, so every answer is exact."""
    lease_s = dice.choice((LEASE_S, LEASE_S, LEASE_S, LONG_LEASE_S))
    lease = Lease(JOBS, messages_max=1, lease_ms=round(lease_s * 1000), wait_ms=0)
    for portion in client.ask(lease).portions:
        [offset] = portion.all_offsets
        word: Any = {
            "topic": JOBS,
            "partition": portion.partition,
            "offset": offset,
            "token": portion.lease,
            "node": node,
        }
        begin_us = portion.until_us - round(lease_s * 1e6)
        history.write(Record(LEASED, begin_us=begin_us, until_us=portion.until_us, **word))
        if dice.random() < 0.8:
            word.update(number=counter, verb="ack")
            history.write(Record(ASK, begin_us=_wall_us(), **word))
            answer = client.ask(Ack(JOBS, [Holding(portion.partition, portion.lease, [offset])]))
            refused = "".join(one.code for one in answer.refused)
            history.write(Record(TOLD, begin_us=_wall_us(), error=refused, **word))
