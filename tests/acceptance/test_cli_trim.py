"""`headrace topic trim`, used as a person or a script uses it."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

import headrace
from headrace.cli.main import main
from headrace.server import EmbeddedServer


@pytest.fixture
def address(tmp_path: Path) -> Iterator[str]:
    """A broker with a topic of two partitions, ten messages in each."""
    server = EmbeddedServer(str(tmp_path), host="127.0.0.1", port=0)
    host, port = server._server.addresses[0]
    url = f"headrace://{host}:{port}"
    with headrace.connect(url) as bus:
        bus.create_topic("orders", partitions=2)
        for number in range(2):
            bus.publish_many("orders", [b"order"] * 10, partition=number)
    try:
        yield url
    finally:
        server.close()


def test_old_messages_are_removed(address: str, capfd: pytest.CaptureFixture[str]) -> None:
    trim = ["topic", "trim", "orders", "--connect", address, "--yes"]
    assert main([*trim, "--before-offset", "3", "--partition", "0"]) == 0
    assert capfd.readouterr().out == "removed 3 messages of topic orders\n"
    assert main([*trim, "--before-time", "now", "--json"]) == 0
    content = json.loads(capfd.readouterr().out)
    assert content == {"topic": "orders", "removed": 17, "first_offsets": {"0": 10, "1": 10}}


def test_what_is_still_to_be_read_is_kept_and_told(address: str, capfd: pytest.CaptureFixture[str]) -> None:
    with headrace.connect(address) as bus:
        bus.commit("billing", {("orders", 0): 4})
    trim = ["topic", "trim", "orders", "--connect", address, "--yes", "--before-offset", "8", "--partition", "0"]
    assert main(trim) == 0
    told = capfd.readouterr()
    assert told.out == "removed 4 messages of topic orders\n"
    assert "--unread removes them too" in told.err
    assert main([*trim, "--unread"]) == 0
    assert capfd.readouterr().out == "removed 4 messages of topic orders\n"


def test_a_partition_must_be_named_and_the_user_must_be_sure(address: str, capfd: pytest.CaptureFixture[str]) -> None:
    trim = ["topic", "trim", "orders", "--connect", address]
    assert main([*trim, "--before-offset", "3", "--yes"]) == 2
    assert "say which with --partition" in capfd.readouterr().err
    assert main([*trim, "--before-time", "now"]) == 2
    assert "give --yes" in capfd.readouterr().err
    assert main(trim) == 2
