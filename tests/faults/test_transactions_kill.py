"""Writers and the broker are killed, or fall asleep, in transactions: each is done once and wholly, or not at all."""

import os
import signal
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from random import Random, SystemRandom

from tests.faults.broker_process import PATIENCE_S, SMALL_JOURNAL, BrokerProcess
from tests.faults.broker_records import Pages, mark
from tests.faults.broker_transactions import (
    OUTPUTS,
    SESSION_S,
    STARTS,
    WRITERS,
    group_of,
    input_topic,
    input_value,
    output_values,
)
from tests.faults.fork_server import Child, Nursery

import headrace
from headrace.model.errors import GroupNotFound

ROUNDS = int(os.environ.get("HEADRACE_KILLS", "22"))
Place = tuple[str, int]


def until(reached: Callable[[], bool]) -> None:
    """Wait for something to be so."""
    deadline = time.monotonic() + PATIENCE_S
    while not reached():
        assert time.monotonic() < deadline, "it never came to be"
        time.sleep(0.01)


class Stage:
    """A broker, writers that commit transactions, and one who watches."""

    def __init__(self, nursery: Nursery, directory: Path, seed: int) -> None:
        self.broker = BrokerProcess(nursery, directory / "data", *SMALL_JOURNAL)
        self._nursery = nursery
        self._seed = seed
        self._urls = self.broker.tcp_url, self.broker.unix_url
        self._lives = 0
        self._writers: dict[int, Child] = {}
        self._watcher: Child | None = None
        self._written = Pages(directory, "writer-*.book")
        self._watched = Pages(directory, "watcher-*.book")
        self.committed: dict[int, set[int]] = defaultdict(set)
        """Writers to the sequences that were acknowledged."""
        self.failures: dict[str, int] = defaultdict(int)
        self.seen: dict[Place, dict[int, int]] = defaultdict(dict)

    def open(self) -> None:
        """Make the topics, and the messages to be transformed."""
        self.broker.start()
        with self.broker.connect() as bus:
            bus.create_topic("out-a", partitions=2)
            bus.create_topic("out-b", durability="written")
            for writer in range(WRITERS):
                bus.create_topic(input_topic(writer))
                bus.publish_many(input_topic(writer), [input_value(writer, at) for at in range(STARTS[-1])])
        self.start_missing()

    def start_missing(self) -> None:
        """Start writers that are not alive, and one who watches."""
        for writer in range(WRITERS):
            if writer not in self._writers:
                self._writers[writer] = self._start("writer", "write", writer)
        if self._watcher is None:
            self._watcher = self._start("watcher", "watch")

    def kill_writers(self, writers: list[int]) -> None:
        """Kill some."""
        for writer in writers:
            self._writers.pop(writer).kill()

    def strike(self, number: int, dice: Random) -> None:
        """Kill some writers, or the broker, or both; or let one sleep until it is given up for dead."""
        if number % 5 == 0:
            writer = dice.choice(list(self._writers))
            time.sleep(dice.uniform(0, 0.2))
            self._writers[writer].signal(signal.SIGSTOP)
            time.sleep(SESSION_S + 0.2)
            self._writers[writer].signal(signal.SIGCONT)
        else:
            self.kill_writers(dice.sample(range(WRITERS), dice.randint(0, 2)))
            if dice.random() < 0.8:
                self.broker.kill()
                self.broker.start()
        self.start_missing()
        time.sleep(dice.uniform(0.1, 1.2))
        self.check_alive()

    def check_alive(self) -> None:
        """Nobody ended by itself, for that was an error."""
        for child in (*self._writers.values(), *([self._watcher] if self._watcher else [])):
            child.check()

    def check(self) -> int:
        """With all writers dead: transactions are done wholly or not at all. Returns how many are."""
        assert not self._writers
        self.hear()
        done = 0
        with self.broker.connect() as bus:
            until(lambda: _visible(bus))
            logs = {place: _fetched(bus, *place) for place in OUTPUTS}
            counts = _check_once_and_in_order(logs)
            for writer in range(WRITERS):
                position, count = _position(bus, writer), counts[writer]
                assert position == STARTS[count], f"writer {writer} did {count}, but the group is at {position}"
                assert self.committed[writer] <= set(range(count)), f"writer {writer} did more than {count}"
                done += count
        for at, seen in self.seen.items():
            for offset, value in seen.items():
                assert offset < len(logs[at]), f"{at} {offset} was seen and is gone"
                assert value == mark(logs[at][offset]), f"{at} {offset} was seen as something else"
        return done

    def hear(self) -> None:
        """Take in what was written down."""
        for number, (what, sequence, detail) in self._written.new():
            if what == "failed":
                self.failures[detail] += 1
            else:
                # Books are numbered by their writers' lives, of which each writer has every third or so.
                self.committed[number % WRITERS].add(int(sequence))
        for _, (topic, partition, offset, value) in self._watched.new():
            before = self.seen[topic, int(partition)].setdefault(int(offset), int(value))
            assert before == int(value), f"{topic} {partition} {offset} changed"

    def finish(self) -> None:
        """Nobody is killed any more: writers go on, and the one who watches sees all that there is."""
        time.sleep(1)
        self.check_alive()
        self.kill_writers(list(self._writers))
        self.check()
        with self.broker.connect() as bus:
            ends = _ends(bus)
        deadline = time.monotonic() + PATIENCE_S
        while {place: len(seen) for place, seen in self.seen.items()} != ends:
            assert time.monotonic() < deadline, f"of {ends} only {[len(seen) for seen in self.seen.values()]} was seen"
            self.check_alive()
            time.sleep(0.02)
            self.hear()

    def _start(self, role: str, function: str, *arguments: int) -> Child:
        # The number of a life tells the writer: the first argument, if there is one.
        self._lives += 1
        life = self._lives * WRITERS + (arguments[0] if arguments else 0)
        name = f"{role}-{life}"
        book = self._nursery.directory / f"{name}.book"
        url = self._urls[self._lives % 2]
        role_function = f"tests.faults.broker_transactions:{function}"
        return self._nursery.start(name, role_function, *arguments, life, self._seed, url, str(book))


def _ends(bus: headrace.Bus) -> dict[Place, int]:
    return {(topic, number): end for topic in dict(OUTPUTS) for number, end in bus.offsets(topic).items()}


def _visible(bus: headrace.Bus) -> bool:
    """Whether as much can be read as was consumed: a commit is safe before the partitions are synced."""
    return set(_ends(bus).values()) == {sum(_position(bus, writer) for writer in range(WRITERS))}


def _position(bus: headrace.Bus, writer: int) -> int:
    """How much of its input a writer has consumed."""
    try:
        return sum(place.offset for place in bus.describe_group(group_of(writer)).places)
    except GroupNotFound:
        return 0  # it was killed before it came to anything


def _fetched(bus: headrace.Bus, topic: str, partition: int) -> list[bytes]:
    values: list[bytes] = []
    while batches := bus.fetch(topic, partition, len(values)):
        for batch in batches:
            assert batch.base_offset == len(values)
            values += [value or b"" for value in batch.columns().values]
    return values


def _check_once_and_in_order(logs: dict[Place, list[bytes]]) -> dict[int, int]:
    """Every output has the same transactions, whole, once and in order; returns how many of each writer."""
    found: list[dict[int, int]] = []
    for output, place in enumerate(OUTPUTS):
        values, counts, at = logs[place], dict.fromkeys(range(WRITERS), 0), 0
        while at < len(values):
            writer = int(values[at].partition(b".")[0])
            expected = output_values(writer, counts[writer], output)
            assert values[at : at + len(expected)] == expected, f"{place} at {at}: not transaction {counts[writer]}"
            counts[writer] += 1
            at += len(expected)
        found.append(counts)
    assert found[0] == found[1] == found[2], "a transaction is in one partition and not in another"
    return found[0]


def test_transactions_are_done_once_and_wholly(tmp_path: Path) -> None:
    seed = int(os.environ.get("HEADRACE_SEED", SystemRandom().getrandbits(32)))
    print(f"HEADRACE_SEED={seed}")  # pytest shows it when the test fails
    dice = Random(seed)
    done = 0
    with Nursery(tmp_path) as nursery:
        stage = Stage(nursery, tmp_path, seed)
        stage.open()
        for number in range(1, ROUNDS + 1):
            stage.strike(number, dice)
            if number % 3 == 0:
                stage.kill_writers(list(range(WRITERS)))
                stage.broker.kill()
                stage.broker.start()
                now_done = stage.check()
                assert now_done >= done, "what was done is gone"
                done = now_done
                stage.start_missing()
        stage.finish()
        stage.broker.stop()
    print(f"{done} transactions, failed attempts: {dict(stage.failures)}")
    assert done > 10 * ROUNDS, f"{done} transactions in all: this tested next to nothing"


class Hesitation:
    """A process that has consumed two messages, and has not committed yet what it made of them."""

    def __init__(self, nursery: Nursery, broker: BrokerProcess, bus: headrace.Bus, partitions: int) -> None:
        bus.create_topic("hesitant", partitions=partitions)
        bus.create_topic("made")
        for number in range(2):
            bus.publish("hesitant", b"%d" % number, partition=number % partitions)
        self._bus = bus
        self._book = nursery.directory / "hesitant.book"
        self._permission = nursery.directory / "permission"
        arguments = broker.tcp_url, str(self._book), str(self._permission)
        self.process = nursery.start("hesitant", "tests.faults.broker_transactions:hesitate", *arguments)
        self._wait_for_line(1)

    def wait_for_members(self, count: int) -> None:
        """Wait until the group has so many."""
        until(lambda: len(self._bus.describe_group("hesitant").members) == count)

    def commit(self) -> str:
        """Let it commit now; returns what came of that."""
        self._permission.touch()
        return self._wait_for_line(2)

    def check(self, committed: str) -> None:
        """What was consumed and what was made of it are committed together, or neither."""
        consumed = sum(place.offset for place in self._bus.describe_group("hesitant").places)
        assert consumed == (2 if committed == "committed" else 0)
        until(lambda: self._bus.offsets("made")[0] == consumed)

    def _wait_for_line(self, number: int) -> str:
        def lines() -> list[str]:
            self.process.check()
            return self._book.read_text().splitlines() if self._book.exists() else []

        until(lambda: len(lines()) >= number)
        return lines()[number - 1]


def test_who_slept_too_long_does_not_commit_what_is_no_longer_its_own(tmp_path: Path) -> None:
    with Nursery(tmp_path) as nursery:
        broker = BrokerProcess(nursery, tmp_path / "data")
        broker.start()
        with broker.connect() as bus:
            hesitation = Hesitation(nursery, broker, bus, partitions=1)
            hesitation.process.signal(signal.SIGSTOP)
            hesitation.wait_for_members(0)
            hesitation.process.signal(signal.SIGCONT)
            hesitation.wait_for_members(1)
            assert hesitation.commit() == "member_fenced"
            hesitation.check("member_fenced")


def test_what_is_being_consumed_when_another_member_comes_is_committed_or_given_up(tmp_path: Path) -> None:
    with Nursery(tmp_path) as nursery:
        broker = BrokerProcess(nursery, tmp_path / "data")
        broker.start()
        with broker.connect() as bus, broker.connect() as other_bus:
            hesitation = Hesitation(nursery, broker, bus, partitions=2)
            with other_bus.subscribe("hesitant", group="hesitant", commit="manual"):
                hesitation.wait_for_members(2)
                time.sleep(0.1)  # it is told, and lets go of what it does not use
                hesitation.check(hesitation.commit())
