"""A broker is killed and its journal destroyed in many ways: it refuses, is repaired, and has every message."""

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

import pytest
from tests.commands import Finished, run_command
from tests.faults.broker_process import SMALL_JOURNAL, BrokerProcess
from tests.faults.fork_server import Nursery
from tests.unit.test_data_directory import DESTROYED, Destroy, segments

import headrace

SOON_S = 120.0


def flip(data: Path) -> None:
    """Damage in many places."""
    for path in segments(str(data)):
        content = bytearray(path.read_bytes())
        end = len(content.rstrip(b"\0"))
        for position in range(70, end, max(end // 12, 1)):
            content[position] ^= 1 << Random(position).randrange(8)
        path.write_bytes(content)


def halve(data: Path) -> None:
    """The end is missing, and with it whole topics."""
    for path in segments(str(data)):
        os.truncate(path, len(path.read_bytes().rstrip(b"\0")) // 2)


@pytest.fixture
def broker() -> Iterator[BrokerProcess]:
    with TemporaryDirectory() as directory, Nursery(Path(directory)) as nursery:
        yield BrokerProcess(nursery, Path(directory, "data"), *SMALL_JOURNAL)


def command(*arguments: str) -> Finished:
    done = run_command(arguments, timeout_s=SOON_S)
    assert b"Traceback" not in done.stderr, done.stderr.decode()
    return done


def filled(broker: BrokerProcess) -> dict[str, list[bytes]]:
    """Topics with messages that were acknowledged as synced; killed when all of them were."""
    broker.start()
    expected: dict[str, list[bytes]] = {}
    with broker.connect() as bus:
        for number in range(12):
            name = f"topic-{number}"
            bus.create_topic(name, partitions=2, message_bytes_max=10_000 + number)
            expected[name] = [b"%d.%d" % (number, at) for at in range(30)]
            bus.publish_many(name, expected[name], partition=1)
            bus.publish("jobs", b"%d" % number)
            with bus.transaction(f"nightly-{number}") as transaction:
                transaction.publish("all", b"%d" % number)
        with bus.lease("jobs", max=4) as jobs:
            assert len(jobs) == 4
    broker.kill()
    return expected


def check(broker: BrokerProcess, expected: dict[str, list[bytes]]) -> None:
    """All of it is there, in its place."""
    with broker.connect() as bus:
        for number, (name, values) in enumerate(expected.items()):
            info = bus.describe_topic(name)
            assert (info.settings["partitions"], info.settings["message_bytes_max"]) == (2, 10_000 + number)
            found = [message for batch in bus.fetch(name, 1, 0) for message in batch.messages()]
            assert [message.value for message in found] == values
        assert len([1 for batch in bus.fetch("all", 0, 0) for _ in batch.messages()]) >= len(expected)
        with bus.transaction("another") as transaction:
            transaction.publish("all", b"new")
        assert [message.value for batch in bus.fetch("all", 0, 0) for message in batch.messages()][-1] == b"new"


@pytest.mark.parametrize("destroy", [*DESTROYED, flip, halve])
def test_whatever_became_of_the_journal_every_message_is_there(broker: BrokerProcess, destroy: Destroy) -> None:
    expected = filled(broker)
    destroy(broker.data)
    refused = command("serve", "--data", str(broker.data), "--port", "0", "--json")
    assert refused.returncode == 1
    error = json.loads(refused.stderr.splitlines()[-1])["error"]
    assert error["code"] == "data_directory_damaged"
    assert f"headrace repair {broker.data}" in error["message"]
    assert command("verify", str(broker.data)).returncode == 3
    done = command("repair", str(broker.data), "--json")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert set(expected) <= set(told["topics"])
    assert command("verify", str(broker.data)).returncode == 0
    for _ in range(2):
        broker.start()
        check(broker, expected)
        broker.kill()


def test_another_brokers_journal_is_refused(broker: BrokerProcess) -> None:
    expected = filled(broker)
    other = f"{broker.data}-other"
    with headrace.open(other) as bus:
        bus.publish("theirs", b"x")
    shutil.rmtree(broker.data / "broker")
    shutil.copytree(f"{other}/broker", broker.data / "broker")
    refused = command("serve", "--data", str(broker.data), "--port", "0")
    assert b"[data_directory_damaged]" in refused.stderr
    assert command("repair", str(broker.data)).returncode == 0
    broker.start()
    check(broker, expected)
    broker.kill()


def test_nothing_is_repaired_while_a_broker_is_at_work(broker: BrokerProcess) -> None:
    broker.start()
    with broker.connect() as bus:
        bus.publish("orders", b"a")
        refused = command("repair", str(broker.data))
        assert (refused.returncode, b"[log_in_use]" in refused.stderr) == (1, True)
        assert command("verify", str(broker.data)).returncode == 0
        assert bus.publish("orders", b"b").offset == 1
    broker.kill()
