"""Broker, producers and consumers are killed at random moments; what was acknowledged is there, once and in order."""

import os
import shutil
import time
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from random import Random, SystemRandom
from tempfile import TemporaryDirectory

import pytest
from tests.faults.broker_process import PATIENCE_S, SMALL_JOURNAL, BrokerProcess
from tests.faults.broker_records import GROUP, PARTITIONS, TOPICS, Pages, Plan, mark, parsed
from tests.faults.fork_server import Child, Nursery

import headrace
from headrace.storage.log import FileLog
from headrace.storage.runtime import StorageRuntime

ROUNDS = int(os.environ.get("HEADRACE_KILLS", "24"))
"""Of each of the tests here."""
PRODUCERS = 3
CONSUMERS = 3
NEWS_BYTES = 200
"""What producers write down, some twenty acknowledgements, before there is a kill."""
FILES_EVERY = 8
PEACE = 0.2
"""How often the broker ends in peace instead, and takes leave of its clients."""

Place = tuple[str, int]


class Model:
    """What producers and consumers wrote down, and what the broker may be held to for it."""

    def __init__(self, directory: Path) -> None:
        self._published = Pages(directory, "producer-*.book")
        self._processed = Pages(directory, "consumer-*.book")
        self.acknowledged: dict[int, dict[int, int]] = defaultdict(dict)
        """Producers to their messages to offsets; -1 when the client was not told."""
        self.processed: dict[Place, dict[int, int]] = defaultdict(dict)
        """What stands at an offset, as consumers saw it."""
        self._positions: dict[Place, int] = {}

    def hear(self) -> None:
        """Take in what was written down since."""
        for number, (counter, offset) in self._published.new():
            assert int(counter) not in self.acknowledged[number], f"message {counter} was acknowledged twice"
            self.acknowledged[number][int(counter)] = int(offset)
        for number, (topic, partition, offset, seen) in self._processed.new():
            before = self.processed[topic, int(partition)].setdefault(int(offset), int(seen))
            assert before == int(seen), f"consumer {number} saw another message at {topic} {partition} {offset}"

    def check_positions(self, bus: headrace.Bus) -> None:
        """The group is never behind a message that nobody processed, and never goes back."""
        positions = {(at.topic, at.partition): at.offset for at in bus.describe_group(GROUP).places}
        self.hear()  # after the question: a message is written down before the group goes on
        for place, position in positions.items():
            assert position >= self._positions.get(place, 0), f"the group went back in {place}"
            self._positions[place] = position
            processed = self.processed[place]
            missing = [offset for offset in range(position) if offset not in processed]
            assert not missing, f"in {place} the group is at {position}, but {missing} were not processed"

    def check_log(self, logs: dict[Place, list[bytes]]) -> None:
        """Everything acknowledged is in the log, where it was said to be, once and in order; and nothing else is."""
        places: dict[tuple[int, int], tuple[Place, int]] = {}
        counts: dict[tuple[int, Place], int] = defaultdict(int)
        for place, values in logs.items():
            last: dict[int, int] = {}
            for offset, value in enumerate(values):
                number, counter = parsed(value)
                plan = Plan(number)
                assert value == plan.value(counter)
                assert place == (plan.topic, plan.partition(counter))
                assert (number, counter) not in places, f"{place} has {number}.{counter} twice"
                assert counter > last.get(number, -1), f"{place} has {number}.{counter} behind {last[number]}"
                last[number] = counter
                places[number, counter] = place, offset
                counts[number, place] += 1
            self._check_without_holes(place, last, counts)
            for offset, seen in self.processed[place].items():
                assert offset < len(values), f"{place} {offset} was consumed, but is not there"
                assert seen == mark(values[offset]), f"at {place} {offset} something else was consumed"
        for number, messages in self.acknowledged.items():
            for counter, offset in messages.items():
                assert (number, counter) in places, f"{number}.{counter} was acknowledged, but is lost"
                assert offset in (-1, places[number, counter][1]), f"{number}.{counter} is not at offset {offset}"

    def _check_without_holes(self, place: Place, last: dict[int, int], counts: dict[tuple[int, Place], int]) -> None:
        """Of each producer there is all that it sent to this partition up to the last one."""
        for number, counter in last.items():
            plan = Plan(number)
            sent = sum(plan.partition(before) == place[1] for before in range(counter + 1))
            assert counts[number, place] == sent, f"{place} lacks messages of {number} before {counter}"

    def behind(self, logs: dict[Place, list[bytes]]) -> list[tuple[Place, int]]:
        """What no consumer has processed."""
        self.hear()
        return [
            (place, offset)
            for place, values in logs.items()
            for offset in range(len(values))
            if offset not in self.processed[place]
        ]


class Crowd:
    """Producers or consumers: so many at a time, and a new one for each that is killed."""

    def __init__(self, nursery: Nursery, role: str, function: str, seed: int, urls: Iterable[str]) -> None:
        self._nursery = nursery
        self._role = role
        self._function = function
        self._seed = seed
        self._urls = list(urls)
        self.members: list[Child] = []
        self.started = 0

    def start(self) -> None:
        """Let one more begin."""
        number = self.started
        self.started += 1
        name = f"{self._role}-{number}"
        book = self._nursery.directory / f"{name}.book"
        url = self._urls[number % len(self._urls)]
        self.members.append(self._nursery.start(name, self._function, number, self._seed, url, str(book)))

    def kill(self, member: Child) -> None:
        """Kill one."""
        self.members.remove(member)
        member.kill()

    def wait_for_news(self, news_bytes: int) -> None:
        """Wait until they have written so much more down: on a busy machine they may have hardly begun by now."""
        wanted, deadline = self._written_bytes() + news_bytes, time.monotonic() + PATIENCE_S
        while self._written_bytes() < wanted:
            self.check()
            assert time.monotonic() < deadline, f"nothing is heard of the {self._role}s"
            time.sleep(0.005)

    def _written_bytes(self) -> int:
        return sum(book.stat().st_size for book in self._nursery.directory.glob(f"{self._role}-*.book"))

    def check(self) -> None:
        """All of them must be alive."""
        for member in self.members:
            member.check()


class Stage:
    """A broker, producers and consumers at work."""

    def __init__(self, nursery: Nursery, directory: Path, seed: int) -> None:
        self.broker = BrokerProcess(nursery, directory / "data", *SMALL_JOURNAL)
        self.model = Model(directory)
        urls = self.broker.tcp_url, self.broker.unix_url
        produce, consume = "tests.faults.broker_producer:produce", "tests.faults.broker_consumer:consume"
        self.producers = Crowd(nursery, "producer", produce, seed, urls)
        self.consumers = Crowd(nursery, "consumer", consume, seed, urls)

    def open(self) -> None:
        """Begin."""
        self.broker.start()
        with self.broker.connect() as bus:
            for topic, durability in TOPICS.items():
                bus.create_topic(topic, partitions=PARTITIONS, durability=durability, segment_bytes=1 << 20)
        for _ in range(PRODUCERS):
            self.producers.start()
        for _ in range(CONSUMERS):
            self.consumers.start()
        self.consumers.wait_for_news(1)

    def strike(self, victims: str, dice: Random) -> None:
        """Kill some in one moment, and start them again, in any order."""
        if "broker" in victims and dice.random() < PEACE:
            self.broker.stop()
        elif "broker" in victims:
            self.broker.kill()
        crowds = [crowd for crowd in (self.producers, self.consumers) if crowd.members and dice.random() < 0.7]
        if "clients" in victims:
            for crowd in crowds or [self.producers]:
                crowd.kill(dice.choice(crowd.members))
        begin = [self.broker.start] if "broker" in victims else []
        begin += [self.producers.start] * (PRODUCERS - len(self.producers.members))
        begin += [self.consumers.start] * (CONSUMERS - len(self.consumers.members))
        dice.shuffle(begin)
        for start in begin:
            start()

    def check(self) -> None:
        """Nobody ended but who was killed; the group has processed all that it says."""
        self.producers.check()
        self.consumers.check()
        with self.broker.connect() as bus:
            self.model.check_positions(bus)

    def check_files(self) -> None:
        """Look at the files of the broker, which must be dead."""
        self.model.hear()
        self.model.check_log({place: _stored(path) for place, path in self.broker.logs().items()})

    def finish(self) -> dict[Place, list[bytes]]:
        """No more is produced; the consumers get to the end. Returns what is in the log, as clients read it."""
        for producer in list(self.producers.members):
            self.producers.kill(producer)
        with self.broker.connect() as bus:
            logs, before = _fetched_all(bus), None
            while logs != before:  # what the dead have sent may still be on its way
                time.sleep(0.1)
                logs, before = _fetched_all(bus), logs
            deadline = time.monotonic() + PATIENCE_S
            while behind := self.model.behind(logs):
                self.consumers.check()
                assert time.monotonic() < deadline, f"{len(behind)} are not consumed, such as {behind[:5]}"
                time.sleep(0.05)
            self.model.check_positions(bus)
        return logs


def _stored(path: Path) -> list[bytes]:
    with TemporaryDirectory() as place:
        # A copy: opening a log repairs what a crash has left, and that is to be left to the broker.
        copy = shutil.copytree(path, f"{place}/copy")
        host = StorageRuntime()
        log = FileLog(host, str(copy), create=False, owned=True)
        assert not log.findings.lost
        messages = [message for batch in log.batches(log.first_offset) for message in batch.messages()]
        log.close()
        host.close()
    assert [message.offset for message in messages] == list(range(len(messages)))
    return [message.value or b"" for message in messages]


def _fetched_all(bus: headrace.Bus) -> dict[Place, list[bytes]]:
    return {(topic, number): _fetched(bus, topic, number) for topic in TOPICS for number in range(PARTITIONS)}


def _fetched(bus: headrace.Bus, topic: str, partition: int) -> list[bytes]:
    values: list[bytes] = []
    while batches := bus.fetch(topic, partition, len(values)):
        for batch in batches:
            assert batch.base_offset == len(values)
            values += [value or b"" for value in batch.columns().values]
    return values


@pytest.mark.parametrize("victims", ["broker", "broker and clients", "clients"])
def test_nothing_acknowledged_is_lost_or_doubled(tmp_path: Path, victims: str) -> None:
    seed = int(os.environ.get("HEADRACE_SEED", SystemRandom().getrandbits(32)))
    print(f"HEADRACE_SEED={seed}")  # pytest shows it when the test fails
    dice = Random(seed)
    with Nursery(tmp_path) as nursery:
        stage = Stage(nursery, tmp_path, seed)
        stage.open()
        for number in range(1, ROUNDS + 1):
            if number % 4:  # else who was started has hardly begun
                stage.producers.wait_for_news(NEWS_BYTES)
            time.sleep(dice.uniform(0, 0.2 if number % 4 else 0.05))
            if number % FILES_EVERY == 0:
                stage.broker.kill()
                stage.check_files()
                stage.broker.start()
            else:
                stage.strike(victims, dice)
            if number % 3 == 0:
                stage.check()
        logs = stage.finish()
        stage.broker.stop()
        stage.check_files()
        stage.model.check_log(logs)
    acknowledged = sum(map(len, stage.model.acknowledged.values()))
    assert acknowledged > 10 * ROUNDS, f"{acknowledged} messages in all: this tested next to nothing"
    for path in stage.broker.logs().values():
        with headrace.Log(path, readonly=True) as log:
            assert log.verify().sound
