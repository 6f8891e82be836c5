"""One envelope through every exit of HTTP: whatever a message has, each exit tells it in the same way."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from tests.http_client import EventReader, HttpClient, http_server, needs_http, url_of

from headrace.server import EmbeddedServer

pytestmark = needs_http

MESSAGES = "/v1/topics/mixed/messages"
PARTITION = "/v1/topics/mixed/partitions/0/messages"
SUBSCRIPTION = "/v1/topics/mixed/subscriptions/work"
ENVELOPE = ("key", "key_base64", "value", "value_base64", "headers", "timestamp", "due", "priority", "expires")
PUBLISHED: list[dict[str, Any]] = [
    {"key": "ann", "value": {"a": [1, None, "ü"]}},
    {"key": "ann", "value": "a text", "headers": [["content-type", "text/plain"]]},
    {"key": "ann", "value_base64": "/w==", "headers": [["n", None], ["n", "1"], ["b", {"base64": "/w=="}]]},
    {"key": "ann", "value": {"lines": 2}, "timestamp": "2026-11-18T02:00:00.000001Z"},
    {"key": "ann", "value": 1, "due": 1, "priority": 3, "expires": "2130-01-01T00:00:00Z"},
    {"key": "ann", "value": "{ no json", "headers": [["content-type", "text/plain"], ["ce_id", "7"]]},
    {"key": "ann", "value_base64": "ewo=", "headers": [["content-type", "application/json"]]},
    {"key": "ann", "value": None},
]


@pytest.fixture
def server() -> Iterator[EmbeddedServer]:
    with http_server() as served:
        yield served


@pytest.fixture
def client(server: EmbeddedServer) -> Iterator[HttpClient]:
    client = HttpClient(url_of(server))
    yield client
    client.close()


def lines_of(url: str, count: int) -> list[Any]:
    reader = EventReader(url, f"{MESSAGES}?start=earliest", Accept="application/x-ndjson")
    found = [json.loads(reader.response.readline()) for _ in range(count)]
    reader.close()
    return found


def events_of(url: str, count: int) -> list[Any]:
    reader = EventReader(url, f"{MESSAGES}?start=earliest")
    found = [event.data for event in reader.take(count)]
    reader.close()
    return found


def test_every_exit_tells_a_message_in_the_same_way(client: HttpClient) -> None:
    client.post("/v1/topics", {"topic": "mixed", "settings": {"key_versions": True}})
    client.post("/v1/topics/mixed/subscriptions", {"subscription": "work", "start": "earliest"})
    for message in PUBLISHED:
        assert client.post(MESSAGES, message).status in (201, 202), message
    count = len(PUBLISHED)
    pending = client.get(f"{SUBSCRIPTION}/messages").json["messages"]
    exits = {
        "fetch": client.get(PARTITION).json["messages"],
        "one by one": [client.get(f"{PARTITION}/{offset}").json for offset in range(count)],
        "events": events_of(client.url, count),
        "lines": lines_of(client.url, count),
        "pending": pending,
        "one pending": [client.get(f"{MESSAGES}/0:{one['offset']}?subscription=work").json for one in pending],
        "history": client.get("/v1/topics/mixed/keys/ann/history").json["messages"],
        "leases": client.post(f"{SUBSCRIPTION}/leases", {"messages_max": 100}).json["messages"],
    }
    told = {
        name: {one["offset"]: {field: one[field] for field in ENVELOPE if field in one} for one in messages}
        for name, messages in exits.items()
    }
    assert sorted(told["fetch"]) == list(range(count))
    for name, messages in told.items():
        assert messages == told["fetch"], name
    first, text, raw, timed, planned, *_, broken, gone = told["fetch"].values()
    assert (first["key"], first["value"]) == ("ann", {"a": [1, None, "ü"]})
    assert text["value"] == "a text"
    assert raw["value_base64"] == "/w=="
    assert raw["headers"][:3] == [["n", None], ["n", "1"], ["b", {"base64": "/w=="}]]
    assert timed["timestamp"] == 1_794_967_200_000_001
    assert (planned["due"], planned["priority"], planned["expires"]) == (1, 3, 5_049_129_600_000_000)
    assert broken["value"] == "{\n"  # it is no JSON, whatever its header says
    assert gone["value"] is None
