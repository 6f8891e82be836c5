"""Damage under a running broker: every reader gets a definite answer, and nothing vanishes silently."""

import contextlib
import logging
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.faults.test_bit_rot import batches

import headrace
from headrace.cli.main import main
from headrace.model.batch import HEADER_BYTES
from headrace.model.errors import CorruptBatch
from headrace.server import EmbeddedServer
from headrace.storage.disk import LocalDisk
from headrace.storage.log import FileLog
from headrace.storage.runtime import StorageRuntime

TOPIC = "orders"
DAMAGED = range(4, 6)
"""The offsets of the batch that is damaged; there are five batches of two messages."""


def values(offsets: Iterator[int] | range | list[int]) -> list[bytes]:
    """What the messages with these offsets say."""
    return [b"message %d" % offset for offset in offsets]


def flip(path: Path, position: int) -> None:
    """Turn over a bit."""
    with path.open("r+b") as file:
        file.seek(position)
        byte = file.read(1)[0]
        file.seek(position)
        file.write(bytes([byte ^ 4]))


def damaged_batch(data: Path) -> tuple[Path, int]:
    """Where the batch is that is damaged."""
    for segment in data.glob("topics/**/*.seg"):
        for place in batches(segment.parent):
            if place.first_offset == DAMAGED.start and segment.name == place.path:
                return segment, place.position
    raise AssertionError("there is no such batch")


def damage_body(data: Path) -> None:
    """Damage a message: only the checksum of its batch tells."""
    path, position = damaged_batch(data)
    flip(path, position + HEADER_BYTES + 5)


def damage_header(data: Path) -> None:
    """Damage the header of a batch."""
    path, position = damaged_batch(data)
    flip(path, position + 12)


def damage_and_repair(data: Path) -> None:
    """Damage a message, and let a repair make it a gap."""
    damage_body(data)
    host = StorageRuntime(LocalDisk())
    log = FileLog(host, str(damaged_batch(data)[0].parent), create=False, owned=True, repair=True)
    assert [(lost.first_offset, lost.next_offset) for lost in log.findings.lost] == [(DAMAGED.start, DAMAGED.stop)]
    log.close()
    host.close()


KINDS = {"body": damage_body, "header": damage_header, "repaired": damage_and_repair}


@pytest.fixture(params=KINDS)
def data(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """The data of a broker in which two messages are damaged, each kind of damage in turn."""
    directory = tmp_path / "data"
    with headrace.open(directory) as bus:
        for offset in range(0, 10, 2):
            bus.publish_many(TOPIC, values(range(offset, offset + 2)))
    KINDS[request.param](directory)
    return directory


def taken(subscription: Any, count: int) -> list[bytes]:
    """The values of the next messages."""
    found: list[bytes] = []
    for message in subscription:
        found.append(message.value)
        if len(found) == count:
            break
    return found


@pytest.mark.parametrize("group", [None, "billing"])
def test_a_reader_is_told_the_range_and_goes_on_behind_it(data: Path, group: str | None) -> None:
    with headrace.open(data) as bus, bus.subscribe(TOPIC, group=group, timeout=10) as orders:
        assert taken(orders, 4) == values(range(4))
        with pytest.raises(CorruptBatch, match=r"messages 4 to 5 are damaged \(orders\[0\]") as raised:
            next(iter(orders))
        assert (raised.value.first_offset, raised.value.next_offset) == (DAMAGED.start, DAMAGED.stop)
        assert "skip_corrupt" not in str(raised.value)
        assert taken(orders, 4) == values(range(6, 10))


def test_a_member_that_starts_again_is_told_again(data: Path) -> None:
    with headrace.open(data) as bus:
        for expected in (values(range(4)), []):
            found: list[bytes] = []
            with bus.subscribe(TOPIC, group="billing", timeout=10) as orders, pytest.raises(CorruptBatch):
                found.extend(message.value for message in orders)
            assert found == expected


@pytest.mark.parametrize("group", [None, "billing"])
def test_what_is_skipped_is_told_logged_counted_and_listed(
    data: Path, group: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    told: list[headrace.DamagedRange] = []
    on_corrupt: list[Any] = ["skip", told.append]
    with headrace.open(data) as bus, caplog.at_level(logging.WARNING):
        for number, policy in enumerate(on_corrupt):
            name = group and f"{group}-{number}"
            with bus.subscribe(TOPIC, group=name, timeout=10, on_corrupt=policy) as orders:
                assert taken(orders, 8) == values([*range(4), *range(6, 10)])
                assert orders.skipped == 2
        (info,) = bus.describe_topic(TOPIC).partitions
    assert [(found.topic, found.partition, found.first_offset, found.next_offset) for found in told] == [
        (TOPIC, 0, *DAMAGED[:1], DAMAGED.stop)
    ]
    assert any("skipped damaged messages" in line and "first_offset=4" in line for line in caplog.messages)
    assert info.damaged == [(DAMAGED.start, DAMAGED.stop)]


def test_a_fetch_is_told_the_range(data: Path) -> None:
    with headrace.open(data) as bus:
        found = [batch.base_offset for batch in bus.fetch(TOPIC, 0, 0)]
        assert found == [0, 2]
        with pytest.raises(CorruptBatch) as raised:
            bus.fetch(TOPIC, 0, 4)
        assert raised.value.next_offset == DAMAGED.stop
        assert [batch.base_offset for batch in bus.fetch(TOPIC, 0, raised.value.next_offset)] == [6, 8]


def test_the_broker_logs_a_damaged_range_once(data: Path, caplog: pytest.LogCaptureFixture) -> None:
    with headrace.open(data) as bus:
        for _ in range(3):
            with contextlib.suppress(CorruptBatch):
                bus.fetch(TOPIC, 0, 4)
            with bus.subscribe(TOPIC, timeout=10) as orders, pytest.raises(CorruptBatch):
                list(orders)
        wait_for(lambda: bus.describe_topic(TOPIC).partitions[0].damaged)
    assert len([line for line in caplog.messages if line.startswith("damaged messages")]) <= 1


def wait_for(is_true: Callable[[], object]) -> None:
    """Look again and again; the test's own limit ends it."""
    while not is_true():
        pass


@pytest.mark.parametrize("ending", ["--no-follow", "--limit=8", "--group=audit"])
def test_tail_fails_or_says_what_it_skipped(data: Path, ending: str, capfd: pytest.CaptureFixture[str]) -> None:
    server = EmbeddedServer(str(data), host="127.0.0.1", port=0)
    host, port = server._server.addresses[0]
    try:
        tail = ["tail", TOPIC, "--connect", f"headrace://{host}:{port}", "--values", "--from", "earliest", ending]
        tail += ["--no-follow"] if ending.startswith("--group") else []
        assert main(tail) == 1
        told = capfd.readouterr()
        assert told.out.encode().splitlines() == values(range(4))
        assert "messages 4 to 5 are damaged" in told.err
        assert "--skip-corrupt" in told.err
        assert main([*tail, "--skip-corrupt"]) == 0
        told = capfd.readouterr()
        printed = [*range(4), *range(6, 10)] if not ending.startswith("--group") else range(6, 10)
        assert told.out.encode().splitlines() == values(list(printed))
        assert "skipped damaged messages of orders[0], offsets 4 to 5" in told.err
        assert main(["topic", "describe", TOPIC, "--connect", f"headrace://{host}:{port}"]) == 0
        assert "damaged  partition 0: offsets 4 to 5" in capfd.readouterr().out
    finally:
        server.close()


def test_a_handler_is_not_called_for_damaged_messages(data: Path) -> None:
    seen: list[bytes] = []
    with headrace.open(data) as bus:
        with pytest.raises(CorruptBatch):
            bus.subscribe(TOPIC, group="billing", timeout=10).run(lambda message: seen.append(message.value))
        assert seen == values(range(4))
        skipping = bus.subscribe(TOPIC, group="billing", timeout=0.5, on_corrupt="skip")
        skipping.run(lambda message: seen.append(message.value))
    assert seen == values([*range(4), *range(6, 10)])


def has_dead(queue: headrace.Queue) -> int:
    """How many dead letters there are."""
    return queue.stats().dead


@pytest.mark.parametrize("discipline", ["fifo", "priority"])
def test_damaged_messages_are_dead_letters_of_a_leased_subscription(data: Path, discipline: str) -> None:
    for restart in range(2):
        with headrace.open(data) as bus:
            queue = bus.queue(TOPIC)
            if not restart:
                bus.create_subscription(TOPIC, discipline=discipline)
                with bus.lease(TOPIC, max=20, wait=10) as jobs:
                    assert sorted(job.value for job in jobs) == values([*range(4), *range(6, 10)])
            wait_for(partial(has_dead, queue))
            (letter,) = queue.find(status="dead")
            assert letter.reason == "lost: messages 4 to 5 are damaged in the log"
            assert letter.value is None
            assert letter.headers is not None
            assert (letter.headers["headrace-dead-offset"], letter.headers["headrace-dead-lost"]) == (b"4", b"2")
            assert queue.redrive() == 0  # there is nothing to put back
            info = queue.stats()
            assert (info.ready, info.leased, info.waiting, info.dead) == (0, 0, 0, 1)


def test_messages_that_are_damaged_while_they_wait_are_dead_letters(tmp_path: Path) -> None:
    directory = tmp_path / "data"
    with headrace.open(directory) as bus:
        bus.create_topic(TOPIC)
        bus.create_subscription(TOPIC)
        for offset in range(0, 10, 2):
            bus.publish_many(TOPIC, values(range(offset, offset + 2)))
        assert bus.queue(TOPIC).stats().ready == 10  # all of them are known, and none was read
        damage_body(directory)
        got: list[bytes] = []
        while len(got) < 8:
            with bus.lease(TOPIC, max=3, wait=10) as jobs:
                got += [job.value for job in jobs]
        assert got == values([*range(4), *range(6, 10)])
        wait_for(partial(has_dead, bus.queue(TOPIC)))
        (letter,) = bus.queue(TOPIC).find(status="dead")
        assert letter.reason == "lost: messages 4 to 5 are damaged in the log"
