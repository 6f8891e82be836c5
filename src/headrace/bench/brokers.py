"""Benchmarks for any broker: publishing, consuming, latency, many clients, and footprint."""

import abc
import asyncio
import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

from headrace.bench.measure import Figure, Sample, Subject, check
from headrace.bench.payload import Payload
from headrace.bench.receiver import Receive, Receiver
from headrace.bench.servers import ServerNode

RATE = 1000
"""The rate of messages whose latency is measured, per second."""
CLIENTS = 100
WARM_UP = 50
"""Warm-up messages, whose latency is not counted."""
_SETTLE_S = 0.5
"""How long a server is idle before its memory is measured, in seconds."""

Take = Callable[[Sequence[bytes]], None]
"""Called with the consumed values, in order, in the portions that the client returns."""


class PublishPace:
    """When to publish, at a steady rate, whatever became of what was published before.

    A message counts from its call, unless the call before took longer than its turn: then from when it was due.
    """

    def __init__(self, per_second: int = RATE) -> None:
        self._step_ns = 1_000_000_000 // per_second
        self._due_ns = self._called_ns = time.monotonic_ns()

    def wait(self) -> int:
        """Sleep until the next turn; returns the time its message counts from."""
        delay_s, held_up = self._next()
        if delay_s > 0:
            time.sleep(delay_s)
        return self._called(held_up)

    async def turn(self) -> int:
        """The same on an event loop."""
        delay_s, held_up = self._next()
        if delay_s > 0:
            await asyncio.sleep(delay_s)
        return self._called(held_up)

    def _next(self) -> tuple[float, bool]:
        now_ns = time.monotonic_ns()
        self._due_ns += self._step_ns
        return (self._due_ns - now_ns) / 1e9, now_ns - self._called_ns > self._step_ns

    def _called(self, held_up: bool) -> int:
        self._called_ns = time.monotonic_ns()
        return min(self._due_ns, self._called_ns) if held_up else self._called_ns


class Contestant(abc.ABC):
    """A broker and a Python client of it. What it cannot do it leaves out, and is not asked for.

    Methods that return seconds connect before these begin and tidy up after they end.
    """

    name: str
    words: ClassVar[Mapping[bool, str]]
    """How durable a message is once it is acknowledged, for not synced and synced."""
    api: ClassVar[Mapping[str, str]]
    """What is called to `publish`, `consume`, measure `latency`, publish `single` messages."""

    def __init__(self, node: ServerNode) -> None:
        self.node = node

    @abc.abstractmethod
    def create(self, topic: str) -> None:
        """Make a topic, a stream, a queue, or whatever it is called."""

    @abc.abstractmethod
    def delete(self, topic: str) -> None:
        """Drop it and what it holds."""

    @abc.abstractmethod
    def publish(self, topic: str, batches: Iterable[list[bytes]]) -> float:
        """Publish all; returns the seconds until all are acknowledged."""

    def fill(self, topic: str, batches: Iterable[list[bytes]]) -> None:
        """Publish all, to be consumed."""
        self.publish(topic, batches)

    @abc.abstractmethod
    def consume(self, topic: str, count: int, take: Take) -> float:
        """Give the first messages of a topic to `take`; returns the seconds until it has had them all."""

    def warm_up(self, payload: Payload) -> None:
        """Bring a server up to speed that gets faster with use."""
        del payload

    keeps_consumed = True
    """Whether messages can be consumed again."""

    def publish_paced(self, topic: str, values: Iterable[bytes], pace: PublishPace) -> list[int]:
        """Publish one by one without waiting for acknowledgements; returns the start time of each."""
        raise NotImplementedError

    def receive(self) -> Receive:
        """What receives those in another process."""
        raise NotImplementedError

    def publish_single(self, topic: str, shares: Sequence[Sequence[bytes]]) -> float:
        """Publish each share over a connection of its own, each message once that before is acknowledged."""
        raise NotImplementedError


class Comparison:
    """Checks that the consumed values are the published ones."""

    def __init__(self, payload: Payload) -> None:
        self._payload = payload
        self._seen = 0

    def take(self, values: Sequence[bytes]) -> None:
        """Check the next values."""
        right = list(values) == self._payload.expected(self._seen, len(values))
        check(right, f"wrong values between offset {self._seen} and {self._seen + len(values)}")
        self._seen += len(values)

    def finish(self, count: int) -> None:
        """Fail unless all values were seen."""
        check(self._seen == count, f"{self._seen} messages came back of {count}")


class _Bench:
    """A contestant whose node runs while it is measured."""

    _numbers = itertools.count()

    def __init__(self, contestant: Contestant, payload: Payload, *, synced: bool) -> None:
        self.contestant = contestant
        self.payload = payload
        self._synced = synced

    def subject(self, workload: str, sample: Callable[[str, int], Sample], step: int) -> Subject:
        """What is measured."""
        contestant = self.contestant
        params = {"api": contestant.api[workload], "durability": contestant.words[self._synced]}
        return Subject(contestant.name, sample, params, step, self.start, contestant.node.stop)

    def start(self, place: str) -> None:
        self.contestant.node.start(place, synced=self._synced)
        try:
            self.contestant.warm_up(self.payload)
        except BaseException:
            self.contestant.node.stop()
            raise

    def topic(self) -> str:
        """A new one."""
        topic = f"bench{next(self._numbers)}"
        self.contestant.create(topic)
        return topic

    def verify(self, topic: str, count: int) -> None:
        """Fail unless a topic holds just the first values of the payload."""
        comparison = Comparison(self.payload)
        self.contestant.consume(topic, count, comparison.take)
        comparison.finish(count)


def publishing(contestant: Contestant, payload: Payload, *, synced: bool) -> Subject:
    """Publishes batches one after the other, with the client's best number in flight."""
    bench = _Bench(contestant, payload, synced=synced)

    def sample(_: str, count: int) -> Sample:
        topic = bench.topic()
        seconds = contestant.publish(topic, payload.batches(count))
        bench.verify(topic, count)
        contestant.delete(topic)
        return Sample(seconds)

    return bench.subject("publish", sample, payload.batch)


def consuming(contestant: Contestant, payload: Payload) -> Subject:
    """Everything in a topic, as Python objects."""
    bench = _Bench(contestant, payload, synced=False)
    filled: dict[str, int] = {}

    def topic_of(count: int) -> str:
        for topic, there in list(filled.items()):
            if there == count and contestant.keeps_consumed:  # of a longer one, the last read would take too many
                return topic
            contestant.delete(topic)
            del filled[topic]
        topic = bench.topic()
        contestant.fill(topic, payload.batches(count))
        filled[topic] = count
        return topic

    def sample(_: str, count: int) -> Sample:
        topic = topic_of(count)
        if not contestant.keeps_consumed:
            comparison = Comparison(payload)
            seconds = contestant.consume(topic, count, comparison.take)
            comparison.finish(count)
            return Sample(seconds)
        tally = _Tally(payload.size)
        seconds = contestant.consume(topic, count, tally.take)
        check(tally.seen == count, f"{tally.seen} messages came back of {count}")
        bench.verify(topic, count)
        return Sample(seconds)

    return bench.subject("consume", sample, payload.batch)


class _Tally:
    """Counts values, and looks at one of each batch: the others are compared when nobody counts the time."""

    def __init__(self, size: int) -> None:
        self.seen = 0
        self._size = size

    def take(self, values: Sequence[bytes]) -> None:
        check(len(values[-1]) == self._size, "a value is not as long as it should be")
        self.seen += len(values)


def latency(contestant: Contestant, payload: Payload, *, synced: bool) -> Subject:
    """Latency from the publish call here until another process has the message."""
    bench = _Bench(contestant, payload, synced=synced)
    receivers: list[Receiver] = []

    def prepare(place: str) -> None:
        bench.start(place)
        try:
            receivers.append(Receiver(contestant.receive()))
        except BaseException:
            finish()
            raise

    def finish() -> None:
        while receivers:
            receivers.pop().close()
        contestant.node.stop()

    def sample(_: str, count: int) -> Sample:
        topic = bench.topic()
        total = count + WARM_UP
        with receivers[0].receiving(topic, total) as arrived:
            begun = contestant.publish_paced(topic, payload.values(total), PublishPace())
            times, values = arrived()
        check(list(values) == list(payload.expected(0, total)), "the other process received wrong values")
        contestant.delete(topic)
        latencies = [(after - before) / 1e9 for before, after in zip(begun, times, strict=True)]
        return Sample((begun[-1] - begun[0]) / 1e9, latencies[WARM_UP:])

    subject = bench.subject("latency", sample, 1)
    params = {**subject.params, "warm_up": f"the first {WARM_UP} messages do not count"}
    return subject._replace(prepare=prepare, finish=finish, params=params)


def publishing_single(contestant: Contestant, payload: Payload, clients: int = CLIENTS) -> Subject:
    """Many concurrent clients, each of which waits for an acknowledgement before it sends the next message."""
    bench = _Bench(contestant, payload, synced=True)

    def sample(_: str, count: int) -> Sample:
        topic = bench.topic()
        share = count // clients
        values = list(payload.values(count))
        shares = [values[at : at + share] for at in range(0, count, share)]
        seconds = contestant.publish_single(topic, shares)
        seen: list[bytes] = []
        contestant.consume(topic, count, seen.extend)
        check_shares(seen, shares)
        contestant.delete(topic)
        return Sample(seconds)

    return bench.subject("single", sample, clients)


def check_shares(seen: Sequence[bytes], shares: Sequence[Sequence[bytes]]) -> None:
    """Fail unless these are all the values of all shares, each share in its order."""
    owners = {value: owner for owner, share in enumerate(shares) for value in share}
    coming: list[Iterator[bytes]] = [iter(share) for share in shares]
    for value in seen:
        check(value in owners, "there is a value that nobody published")
        check(next(coming[owners[value]], None) == value, f"client {owners[value]}'s messages are out of order")
    check(len(seen) == sum(map(len, shares)), f"{len(seen)} messages came back of {sum(map(len, shares))}")


class Footprint(NamedTuple):
    """A server that is started to measure its start-up time and memory."""

    name: str
    node: ServerNode
    params: Mapping[str, Any]


def starting(footprint: Footprint) -> Subject:
    """Time from the start of the process to its first answer, and the memory of the idle process."""
    node = footprint.node

    def sample(place: str, _: int) -> Sample:
        node.start(place, synced=False)
        try:
            time.sleep(_SETTLE_S)
            return Sample(node.ready_s, amount=node.memory_bytes)
        finally:
            node.stop()

    return Subject(footprint.name, sample, footprint.params, prepare=lambda _: node.find())


def megabytes() -> Figure:
    """The amount of bytes that a sample tells, in units of 1,000,000."""
    return Figure("MB", False, lambda _, taken: taken.amount / 1e6)
