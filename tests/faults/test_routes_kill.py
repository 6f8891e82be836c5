"""A broker that forwards messages is killed again and again: every target has its messages once, in order."""

import json
import os
import time
from pathlib import Path
from random import Random, SystemRandom

from tests.faults.broker_process import SMALL_JOURNAL, BrokerProcess
from tests.faults.fork_server import PATIENCE_S, Nursery

import headrace

KILLS = int(os.environ.get("HEADRACE_KILLS", "8"))


def test_routes_survive_kills(tmp_path: Path) -> None:
    seed = SystemRandom().randrange(1 << 32)
    print(f"seed {seed}")
    dice = Random(seed)
    with Nursery(tmp_path) as nursery:
        broker = BrokerProcess(nursery, tmp_path / "data", *SMALL_JOURNAL)
        broker.start()
        with broker.connect() as bus:
            bus.create_topic("in", partitions=2)
            bus.create_topic("wide", partitions=3)
            bus.routes.add("all", source="in", all=True, to=["copy", "wide"])
            bus.routes.add("even", source="in", pattern="even.#", to="even")
            bus.routes.add("tens", source="in", content={"jsonpath": "$.tens"}, to="tens")
            bus.routes.add("on", source="copy", all=True, to="end")
            with bus.producer("in", linger=0.001) as producer:
                number = 0
                for _ in range(KILLS):
                    ends = time.monotonic() + dice.uniform(0.05, 0.6)
                    while time.monotonic() < ends:
                        for _ in range(dice.choice((1, 20, 200))):
                            word = "even" if number % 2 == 0 else "odd"
                            value = {"number": number, **({"tens": 1} if number % 10 == 0 else {})}
                            producer.send(json.dumps(value).encode(), key=f"{word}.{number % 7}")
                            number += 1
                        time.sleep(dice.uniform(0, 0.02))
                    broker.kill()
                    broker.start()
                producer.flush()
        broker.kill()
        broker.start()
        with broker.connect() as bus:
            _await_forwarded(bus)
            _check(bus, number)
        broker.stop()


def _await_forwarded(bus: headrace.Bus) -> None:
    deadline = time.monotonic() + PATIENCE_S
    quiet = 0
    while quiet < 3:  # a message forwarded to `copy` goes on from there
        assert time.monotonic() < deadline, "messages are not forwarded"
        quiet = 0 if any(info.behind for info in bus.routes.list()) else quiet + 1
        time.sleep(0.05)


def _check(bus: headrace.Bus, count: int) -> None:
    sources = [_read(bus, "in", partition) for partition in range(2)]
    assert sorted(number for source in sources for number in source) == list(range(count))
    for topic, wanted in {
        "copy": lambda _: True,
        "end": lambda _: True,
        "wide": lambda _: True,
        "even": lambda number: number % 2 == 0,
        "tens": lambda number: number % 10 == 0,
    }.items():
        partitions = [_read(bus, topic, at) for at in range(3 if topic == "wide" else 1)]
        expected = {number for number in range(count) if wanted(number)}
        assert sorted(number for found in partitions for number in found) == sorted(expected), f"{topic}: not each once"
        for found in partitions:
            for source in sources:
                mine = set(source)
                there = [number for number in found if number in mine]
                places = {number: at for at, number in enumerate(source)}
                assert there == sorted(there, key=places.__getitem__), f"{topic}: not in order"


def _read(bus: headrace.Bus, topic: str, partition: int) -> list[int]:
    found: list[int] = []
    while batches := bus.fetch(topic, partition, len(found)):
        for batch in batches:
            assert batch.base_offset == len(found)
            found += [json.loads(value or b"")["number"] for value in batch.columns().values]
    return found
