"""Broker, consumers and producers of a queue are killed at random moments; nothing is held twice, lost, or early."""

import os
import time
from collections import defaultdict
from pathlib import Path
from random import Random, SystemRandom
from typing import NamedTuple

import pytest
from tests.faults.broker_process import SMALL_JOURNAL, BrokerProcess
from tests.faults.broker_records import Pages
from tests.faults.fork_server import PATIENCE_S, Nursery
from tests.faults.leased_people import LEASE_S, PARTITIONS, TOPIC, parsed
from tests.faults.test_broker_kill import Crowd

ROUNDS = int(os.environ.get("HEADRACE_KILLS", "18"))
"""Of each of the tests here."""
PRODUCERS = 2
CONSUMERS = 3
NEWS_BYTES = 200
"""What producers write down, some five messages, before there is a kill."""
PEACE = 0.2
LEASE_US = round(LEASE_S * 1e6)

Place = tuple[int, int]


class Held(NamedTuple):
    """A lease as its holder saw it."""

    consumer: int
    token: int
    granted_us: int
    """Or when its holder saw it, if that cannot be told."""
    until_us: int
    seen_us: int
    value: bytes


class Story:
    """What everyone wrote down, and what the broker may be held to for it."""

    def __init__(self, directory: Path) -> None:
        self._producers = Pages(directory, "producer-*.book")
        self._consumers = Pages(directory, "consumer-*.book")
        self.published: dict[Place, bytes] = {}
        self.moved: dict[Place, list[tuple[int, int]]] = defaultdict(list)
        self.held: dict[Place, list[Held]] = defaultdict(list)
        self.extended: dict[tuple[Place, int, int], int] = {}
        """Leases to when they ended at last."""
        self.ending: dict[tuple[Place, int, int], int] = {}
        """Leases to when their holders asked for something that ends them."""
        self.acked: dict[Place, int] = {}
        self.acking: set[Place] = set()

    def hear(self) -> None:
        """Take in what was written down since."""
        for _, (what, *words) in self._producers.new():
            place = int(words[0]), int(words[1])
            if what == "published":
                self.published[place] = words[2].encode()
            else:
                self.moved[place].append((int(words[3]), int(words[2])))
        for number, (what, *words) in self._consumers.new():
            place, token, time_us = (int(words[0]), int(words[1])), int(words[2]), int(words[3])
            if what == "begin":
                granted_us = time_us - LEASE_US if words[4] == "1" else int(words[5])
                self.held[place].append(Held(number, token, granted_us, time_us, int(words[5]), words[6].encode()))
            elif what == "extended":
                self.extended[place, token, number] = time_us
            elif what == "acked":
                self.acked.setdefault(place, time_us)
            elif what in ("acking", "releasing"):
                self.ending.setdefault((place, token, number), time_us)
                if what == "acking":
                    self.acking.add(place)

    def check(self) -> None:
        """None early, none twice at once, none again after it was acked."""
        for place, leases in [(place, list(leases)) for place, leases in self.held.items()]:
            for one in leases:
                _, _, due_us = parsed(one.value)
                assert self.published.get(place, one.value) == one.value, f"{place} is another message"
                assert one.seen_us >= due_us, f"{place} came {due_us - one.seen_us} us before it was due"
                for confirmed_us, moved_us in self.moved[place]:
                    early = confirmed_us < one.granted_us < moved_us or confirmed_us < one.seen_us < moved_us
                    assert not early, f"{place} was moved to {moved_us}, and came {moved_us - one.seen_us} us before"
                acked_us = self.acked.get(place, 1 << 62)
                again = acked_us < one.granted_us < one.until_us
                assert not again, f"{place} came again after {acked_us}, when it was acked: {one} of {leases}"
            self._check_overlaps(place, leases)

    def _check_overlaps(self, place: Place, leases: list[Held]) -> None:
        for one in leases:
            for other in leases:
                if other.token != one.token and one.granted_us <= other.granted_us < other.until_us:
                    if other.granted_us < self._end_us(place, one):
                        self.hear()  # books are read one after the other: that it had ended may be news
                    end_us = self._end_us(place, one)
                    assert other.granted_us >= end_us, f"{place} is held twice: {one} until {end_us}, and {other}"

    def _end_us(self, place: Place, one: Held) -> int:
        """Until when a lease was valid at least."""
        key = place, one.token, one.consumer
        return min(max(one.until_us, self.extended.get(key, 0)), self.ending.get(key, 1 << 62))

    def left(self) -> list[Place]:
        """Messages that were acknowledged to their producers, and that nobody has settled."""
        self.hear()
        return [place for place in self.published if place not in self.acked and place not in self.acking]


class Stage:
    """A broker, producers and consumers at work."""

    def __init__(self, nursery: Nursery, directory: Path, seed: int) -> None:
        self.broker = BrokerProcess(nursery, directory / "data", *SMALL_JOURNAL)
        self.story = Story(directory)
        urls = self.broker.tcp_url, self.broker.unix_url
        self.producers = Crowd(nursery, "producer", "tests.faults.leased_people:produce", seed, urls)
        self.consumers = Crowd(nursery, "consumer", "tests.faults.leased_people:consume", seed, urls)

    def open(self) -> None:
        """Begin."""
        self.broker.start()
        with self.broker.connect() as bus:
            bus.create_topic(TOPIC, partitions=PARTITIONS, segment_bytes=1 << 20)
            bus.create_subscription(TOPIC, lease_seconds=LEASE_S, deliveries_max=0, retry_seconds=0.1)
        for _ in range(PRODUCERS):
            self.producers.start()
        for _ in range(CONSUMERS):
            self.consumers.start()

    def strike(self, victims: str, dice: Random) -> None:
        """Kill some in one moment, and start them again, in any order."""
        if "broker" in victims and dice.random() < PEACE:
            self.broker.stop()
        elif "broker" in victims:
            self.broker.kill()
        if "clients" in victims:
            for crowd in (self.producers, self.consumers):
                if dice.random() < 0.7:
                    crowd.kill(dice.choice(crowd.members))
        begin = [self.broker.start] if "broker" in victims else []
        begin += [self.producers.start] * (PRODUCERS - len(self.producers.members))
        begin += [self.consumers.start] * (CONSUMERS - len(self.consumers.members))
        dice.shuffle(begin)
        for start in begin:
            start()

    def check(self) -> None:
        """Nobody ended but who was killed, and all that was written down goes together."""
        self.producers.check()
        self.consumers.check()
        self.story.hear()
        self.story.check()

    def finish(self) -> None:
        """No more is produced; the consumers get to the end."""
        for producer in list(self.producers.members):
            self.producers.kill(producer)
        with self.broker.connect() as bus:
            queue = bus.queue(TOPIC)
            deadline = time.monotonic() + PATIENCE_S
            while (left := self.story.left()) or (info := queue.stats()).waiting + info.ready + info.leased:
                self.check()
                assert time.monotonic() < deadline, f"{left} are lost; {queue.stats()}"
                time.sleep(0.05)
            assert info.dead == 0
        self.check()


@pytest.mark.parametrize("victims", ["broker", "broker and clients", "clients"])
def test_no_message_is_held_twice_or_lost_or_early(tmp_path: Path, victims: str) -> None:
    seed = int(os.environ.get("HEADRACE_SEED", SystemRandom().getrandbits(32)))
    print(f"HEADRACE_SEED={seed}")  # pytest shows it when the test fails
    dice = Random(seed)
    with Nursery(tmp_path) as nursery:
        stage = Stage(nursery, tmp_path, seed)
        stage.open()
        for number in range(1, ROUNDS + 1):
            if number % 4:  # else who was started has hardly begun
                stage.producers.wait_for_news(NEWS_BYTES)
            time.sleep(dice.uniform(0, 0.4 if number % 4 else 0.05))
            stage.strike(victims, dice)
            if number % 3 == 0:
                stage.check()
        stage.finish()
        stage.broker.stop()
    assert len(stage.story.published) > ROUNDS, "this tested next to nothing"
