"""Streams over HTTP and WebSocket of a topic with a damaged batch: the damage is told, everything else delivered."""

import json
from base64 import b64encode
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
from tests.http_client import EventReader, HttpClient, http_server, native_url_of, needs_http, url_of
from tests.socket_client import JSON, SocketClient

import headrace
from headrace.server import EmbeddedServer

pytestmark = needs_http

COUNT, BATCH = 400, 20
BURIED = bytes(range(50, 100))
"""The value in which a bit flips."""
PATH = "/v1/topics/orders/messages"
WANTED = {(partition, offset) for partition in (0, 1) for offset in range(COUNT)}


class DamagedTopic:
    """A topic of two partitions; the first has a batch in the middle with a bit that flipped."""

    def __init__(self, server: EmbeddedServer, data: Path) -> None:
        self.url = url_of(server)
        self.client = HttpClient(self.url)
        with headrace.connect(native_url_of(server)) as bus:
            bus.create_topic("orders", partitions=2)
        randbytes = Random(1).randbytes  # they do not compress
        buried = b64encode(BURIED).decode()
        for partition in (0, 1):
            for number in range(COUNT // BATCH):
                texts = [b64encode(randbytes(50)).decode() for _ in range(BATCH)]
                texts[7] = buried if (partition, number) == (0, 9) else texts[7]
                messages = [{"value_base64": text, "partition": partition} for text in texts]
                assert self.client.post(PATH, messages).status == 201
        (segment,) = (data / "topics/1/0").glob("*.seg")
        content = segment.read_bytes()
        position = content.index(BURIED)
        with segment.open("r+b") as file:
            file.seek(position)
            file.write(bytes([content[position] ^ 0x40]))
        problem = self._problem()
        self.damaged = range(problem["first_offset"], problem["next_offset"])
        assert self.damaged == range(9 * BATCH, 10 * BATCH)
        self.good = WANTED - {(0, offset) for offset in self.damaged}

    def _problem(self) -> Any:
        """What reading page by page meets."""
        offset = 0
        while (page := self.client.get(f"/v1/topics/orders/partitions/0/messages?offset={offset}")).status == 200:
            offset = page.json["next_offset"]
        assert page.code == "corrupt_batch"
        assert page.json["details"]["first_offset"] == offset
        return page.json["details"]


@pytest.fixture
def topic(tmp_path: Path) -> Iterator[DamagedTopic]:
    with http_server(tmp_path / "data") as server:
        made = DamagedTopic(server, tmp_path / "data")
        yield made
        made.client.close()


def places(messages: list[Any]) -> set[tuple[int, int]]:
    found = [(one["partition"], one["offset"]) for one in messages]
    assert len(found) == len(set(found)), "a message came twice"
    return set(found)


def test_an_event_stream_tells_of_damage_and_goes_on(topic: DamagedTopic) -> None:
    reader = EventReader(topic.url, f"{PATH}?start=earliest")
    events = reader.take(len(topic.good) + 1)
    reader.close()
    (told,) = [event for event in events if event.name == "error"]
    assert (told.data["code"], told.data["details"]["next_offset"]) == ("corrupt_batch", topic.damaged.stop)
    assert places([event.data for event in events if event.name == "message"]) == topic.good
    again = EventReader(topic.url, PATH, Last_Event_ID=told.id)  # as a browser connects again
    seen = places([event.data for event in events[: events.index(told)] if event.name == "message"])
    assert places([event.data for event in again.take(len(topic.good - seen))]) == topic.good - seen
    again.close()


def test_lines_of_json_tell_of_damage_and_go_on(topic: DamagedTopic) -> None:
    reader = EventReader(topic.url, f"{PATH}?start=earliest", Accept="application/x-ndjson")
    lines = [json.loads(reader.response.readline()) for _ in range(len(topic.good) + 1)]
    reader.close()
    (told,) = [line for line in lines if "error" in line]
    assert told["error"]["code"] == "corrupt_batch"
    assert f"0:{topic.damaged.stop}" in told["id"].split(",")
    assert places([line for line in lines if "error" not in line]) == topic.good


def test_a_stream_over_websocket_says_where_to_go_on(topic: DamagedTopic) -> None:
    found: list[Any] = []
    position: dict[str, Any] = {"start": "earliest"}
    with SocketClient(topic.url, JSON) as client:
        ended = None
        while len(found) < len(topic.good):
            if ended is None:
                client.ask("StreamOpen", topic="orders", credit_messages=10 * COUNT, **position)
                ended = False
            push = client.pushed.popleft() if client.pushed else client.receive()
            if push["push"] == "Delivery":
                found += push["messages"]
            else:
                assert push["push"] == "StreamEnd"
                assert push["fields"]["problem"]["code"] == "corrupt_batch"
                assert f"0:{topic.damaged.stop}" in push["fields"]["position"].split(",")
                position, ended = {"position": push["fields"]["position"]}, None
    assert places(found) == topic.good
