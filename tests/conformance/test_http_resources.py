"""Every resource over HTTP, with a real server and a client that knows nothing of Headrace."""

import gzip
import json
import re
from collections.abc import Iterator
from itertools import islice
from typing import Any
from urllib.parse import quote

import pytest
from tests.http_client import NDJSON, HttpClient, http_server, native_url_of, needs_http, url_of

import headrace
from headrace.server import EmbeddedServer

pytestmark = needs_http

ORDERS = "/v1/topics/orders/messages"
BILLING = "/v1/topics/orders/subscriptions/billing"


@pytest.fixture(scope="module")
def server() -> Iterator[EmbeddedServer]:
    with http_server() as served:
        yield served


@pytest.fixture
def client(server: EmbeddedServer) -> Iterator[HttpClient]:
    """A client of a broker without topics."""
    client = HttpClient(url_of(server))
    for topic in client.get("/v1/topics?limit=1000").json["topics"]:
        assert client.ask("DELETE", f"/v1/topics/{quote(topic['topic'], safe='')}").status == 204
    for group in client.get("/v1/groups").json["groups"]:
        assert client.ask("DELETE", f"/v1/groups/{group['group']}").status == 204
    for schedule in client.get("/v1/schedules").json["schedules"]:
        assert client.ask("DELETE", f"/v1/schedules/{schedule['definition']['name']}").status == 204
    yield client
    client.close()


def read(client: HttpClient, query: str = "", partition: int = 0) -> Any:
    reply = client.get(f"/v1/topics/orders/partitions/{partition}/messages{query}")
    assert reply.status == 200, reply
    return reply.json


# Topics.


def test_a_topic_is_made_described_altered_and_deleted(client: HttpClient) -> None:
    made = client.post("/v1/topics", {"topic": "orders", "settings": {"partitions": 2}})
    assert (made.status, made.json["settings"]["partitions"]) == (201, 2)
    assert client.post("/v1/topics", {"topic": "orders"}).code == "topic_exists"
    assert client.post("/v1/topics", {"topic": "orders", "exist_ok": True}).status == 201
    altered = client.ask("PATCH", "/v1/topics/orders", {"settings": {"partitions": 3, "retain_seconds": 60}})
    assert altered.json["settings"]["retain_seconds"] == 60
    assert [one["partition"] for one in client.get("/v1/topics/orders").json["partitions"]] == [0, 1, 2]
    assert client.ask("DELETE", "/v1/topics/orders").status == 204
    gone = client.get("/v1/topics/orders")
    assert (gone.status, gone.code) == (404, "topic_not_found")


def test_topics_are_listed_in_pages_by_pattern(client: HttpClient) -> None:
    for name in ("a1", "a2", "a3", "b1", "grüße, %d"):
        if "," not in name:
            assert client.post("/v1/topics", {"topic": name}).status == 201
    first = client.get("/v1/topics?pattern=a*&limit=2").json
    assert [one["topic"] for one in first["topics"]] == ["a1", "a2"]
    second = client.get(f"/v1/topics?pattern=a*&limit=2&after={first['next']}").json
    assert ([one["topic"] for one in second["topics"]], second["next"]) == (["a3"], "")


def test_names_may_have_any_character_and_a_tenant(client: HttpClient) -> None:
    path = quote("größe 100%", safe="")
    assert client.post(f"/v1/topics/{path}/messages", {"value": 1}).status in (201, 202)
    assert client.get(f"/v1/topics/{path}").json["topic"] == "größe 100%"
    acme = {"Headrace-Tenant": "acme"}
    assert client.ask("POST", ORDERS, {"value": 1}, acme).status in (201, 202)
    assert [one["topic"] for one in client.ask("GET", "/v1/topics", None, acme).json["topics"]] == ["orders"]
    assert client.get("/v1/topics/orders").code == "topic_not_found"
    assert client.get("/v1/topics/acme%2Forders").json["topic"] == "acme/orders"
    assert client.ask("GET", "/v1/topics/other%2Forders", None, acme).status == 422
    assert client.ask("DELETE", "/v1/topics/orders", None, acme).status == 204


def test_offsets_and_trims(client: HttpClient) -> None:
    client.publish("orders", *range(5))
    assert client.get("/v1/topics/orders/offsets").json == {"offsets": {"0": 5}}
    assert client.get("/v1/topics/orders/offsets?at=earliest").json == {"offsets": {"0": 0}}
    assert client.get("/v1/topics/orders/offsets?time=2020-01-01T00:00:00Z").json == {"offsets": {"0": 0}}
    assert client.post("/v1/topics/orders/trims", {"offsets": {"0": 2}}).json == {"offsets": {"0": 2}}
    assert read(client)["messages"][0]["value"] == 2


# Messages.


def test_a_message_comes_back_as_it_was_published(client: HttpClient) -> None:
    envelope = {
        "key": "ann",
        "value": {"id": 1, "text": "grüße"},
        "headers": [["lang", "en"], ["lang", "de"], ["nothing", None], ["bin", {"base64": "/w=="}]],
        "timestamp": "2026-01-01T00:00:00Z",
        "due": 1_700_000_000_000_000,
        "priority": 7,
        "expires": 1_900_000_000_000_000,
    }
    published = client.post(ORDERS, envelope)
    assert published.status == 202  # the broker has no disk
    assert published.json == {"partition": 0, "offset": 0, "count": 1, "durability": "memory"}
    (found,) = read(client)["messages"]
    assert found == {
        **envelope,
        "partition": 0,
        "offset": 0,
        "timestamp": 1_767_225_600_000_000,
        "headers": [*envelope["headers"], ["content-type", "application/json"]],
    }


def test_values_follow_their_content_type(client: HttpClient) -> None:
    text = [["content-type", "text/plain"]]
    client.post(ORDERS, [
        {"value": "a"}, {"value": "a", "headers": text}, {"value_base64": "/wA="}, {"value": None, "key": "k"},
        {"value_base64": "eyJhIjogMX0=", "headers": [["content-type", "application/vnd.x+json; charset=utf-8"]]},
        {"value_base64": "ewp9", "headers": [["Content-Type", "application/json"]]},
        {"value_base64": "ew==", "headers": [["content-type", "application/json"]]},
        {"key_base64": "/w==", "value_base64": "YQ=="},
    ])  # fmt: skip
    found = read(client)["messages"]
    assert [one.get("value", "absent") for one in found] == ["a", "a", "absent", None, {"a": 1}, {}, "{", "a"]
    assert found[2]["value_base64"] == "/wA="
    assert found[7]["key_base64"] == "/w=="
    assert client.post(ORDERS, {"value": 1, "headers": text}).code == "invalid_argument"
    assert client.post(ORDERS, {"value": 1, "value_base64": ""}).code == "invalid_argument"
    assert client.post(ORDERS, {"key": "a"}).code == "invalid_argument"


def test_arrays_and_lines_are_published(client: HttpClient) -> None:
    reply = client.post(ORDERS, [{"value": 1}, {"value": 2}])
    assert reply.json == {
        "count": 2,
        "receipts": [{"partition": 0, "offset": 0, "count": 2, "durability": "memory"}],
    }
    lines = b"\n".join(b'{"value": %d}' % at for at in range(10_000))
    reply = client.ask("POST", ORDERS, lines, NDJSON)
    assert (reply.status, reply.json["count"]) == (202, 10_000)
    assert [one["offset"] for one in reply.json["receipts"]] == [2, 4098, 8194]
    assert [one["value"] for one in read(client, "?offset=10000&limit=2")["messages"]] == [9998, 9999]
    wrong = client.ask("POST", ORDERS, b'{"value": 1}\n{"valu": 2}\n', NDJSON)
    assert (wrong.status, wrong.code) == (422, "invalid_field")
    assert "valu" in wrong.json["detail"]
    assert read(client, "?at=latest")["next_offset"] == 10_002


def test_keys_decide_the_partition_as_for_the_native_client(client: HttpClient, server: EmbeddedServer) -> None:
    client.post("/v1/topics", {"topic": "orders", "settings": {"partitions": 4}})
    keys = [f"k{at}" for at in range(20)]
    client.post(ORDERS, [{"key": key, "value": key} for key in keys])
    by_http = {
        message["key"]: partition for partition in range(4) for message in read(client, "", partition)["messages"]
    }
    assert by_http.keys() == set(keys)
    with headrace.connect(native_url_of(server)) as bus:
        for key in keys:
            assert bus.publish("orders", b"n", key=key).partition == by_http[key]
    assert client.post(f"{ORDERS}?partition=3", {"value": 1}).json["partition"] == 3
    assert client.post(ORDERS, {"value": 1, "partition": 2}).json["partition"] == 2
    missing = client.post(ORDERS, {"value": 1, "partition": 9})
    assert (missing.status, missing.code) == (404, "partition_not_found")
    assert len({client.post(ORDERS, {"value": 1}).json["partition"] for _ in range(8)}) == 4


def test_a_topic_that_was_made_again_with_fewer_partitions_is_noticed(client: HttpClient) -> None:
    client.post("/v1/topics", {"topic": "orders", "settings": {"partitions": 4}})
    client.publish("orders", 1)
    client.ask("DELETE", "/v1/topics/orders")
    client.post("/v1/topics", {"topic": "orders"})
    assert [client.post(ORDERS, {"value": 1}).json["partition"] for _ in range(4)] == [0] * 4


def test_if_match_publishes_only_at_the_offset(client: HttpClient) -> None:
    assert client.post(ORDERS, {"value": 1}, If_Match='"0"').json["offset"] == 0
    refused = client.post(ORDERS, {"value": 2}, If_Match='"0"')
    assert (refused.status, refused.code) == (412, "unexpected_offset")
    assert client.post(ORDERS, [{"value": 2}, {"value": 3}], If_Match='"1"').status == 202
    assert client.post(ORDERS, {"value": 2}, If_Match="0").code == "invalid_field"
    assert [one["value"] for one in read(client)["messages"]] == [1, 2, 3]


def test_if_match_needs_the_partition_where_there_are_several(client: HttpClient) -> None:
    client.post("/v1/topics", {"topic": "orders", "settings": {"partitions": 3}})
    for body in ({"value": 1}, [{"value": 1}], {"value": 1, "key": "ann"}):
        refused = client.post(ORDERS, body, If_Match='"0"')
        assert (refused.status, refused.code) == (422, "invalid_field")
        assert "partition" in refused.json["detail"]
    assert client.post(f"{ORDERS}?partition=1", {"value": 1}, If_Match='"0"').json["partition"] == 1
    assert client.post(ORDERS, {"value": 1, "partition": 1}, If_Match='"0"').code == "unexpected_offset"
    assert client.post(ORDERS, [{"value": 1, "partition": 1}], If_Match='"1"').status == 202


def test_an_unexpected_offset_makes_no_topic(client: HttpClient) -> None:
    for body in ({"value": 1}, [{"value": 1}], {"value": 1, "partition": 0}, [{"value": 1, "partition": 0}]):
        refused = client.post(ORDERS, body, If_Match='"7"')
        assert (refused.status, refused.code) == (412, "unexpected_offset")
        assert refused.json["details"] == {"next_offset": 0}
        assert client.get("/v1/topics/orders").code == "topic_not_found"


SCHEMA = {
    "name": "schema",
    "schema": {"type": "object", "properties": {"id": {"type": "integer"}}, "required": ["id"]},
}


def test_a_publish_that_is_stored_in_part_says_so(client: HttpClient) -> None:
    settings = {"partitions": 3, "middleware": [SCHEMA]}
    client.post("/v1/topics", {"topic": "orders", "settings": settings})
    good, bad = {"value": {"id": 1}}, {"value": {"id": "x"}}
    refused = client.post(ORDERS, [{"partition": 0, **good}, {"partition": 1, **good}, {"partition": 2, **bad}])
    problem = refused.json
    assert (refused.status, refused.code) == (422, "message_refused")
    assert problem["details"]["indexes"] == [2]
    assert [one["partition"] for one in problem["details"]["receipts"]] == [0, 1]
    assert "2 of 3 messages were stored" in problem["detail"]
    assert "message 2 of the request" in problem["detail"]
    assert "nothing was stored" not in problem["detail"]
    lines = b'{"value":{"id":1}}\n' * 5000 + b'{"value":{"id":"x"}}'
    many = client.ask("POST", f"{ORDERS}?partition=2", lines, NDJSON).json
    assert many["details"]["indexes"] == [5000]
    assert many["details"]["receipts"][0]["count"] == 4096
    assert "4096 of 5001 messages were stored" in many["detail"]
    ends = [one["next_offset"] for one in client.get("/v1/topics/orders").json["partitions"]]
    assert ends == [1, 1, 4096]
    whole = client.post(f"{ORDERS}?partition=0", [good, bad]).json
    assert "nothing was stored" in whole["detail"]
    assert (whole["details"]["indexes"], "receipts" in whole["details"]) == ([1], False)


def test_receipts_with_dead_letters_are_the_same_with_and_without_a_key(client: HttpClient) -> None:
    good, bad = {"value": {"id": 1}}, {"value": {"id": "x"}}
    found = []
    for keys in ({}, {"Idempotency_Key": "a"}):
        settings = {"middleware": [{**SCHEMA, "on_invalid": "dead_letter"}]}
        client.post("/v1/topics", {"topic": "orders", "settings": settings})
        found.append(client.post(ORDERS, [good, bad, good], **keys).json)
        assert [one["offset"] for one in read(client)["messages"]] == [0, 2]
        client.ask("DELETE", "/v1/topics/orders")
    assert found[0] == found[1]
    client.post("/v1/topics", {"topic": "orders", "settings": settings})
    one = client.post(ORDERS, bad, Idempotency_Key="a").json
    assert (one["partition"], one["offset"], one["count"]) == (0, None, 0)
    many = client.post(ORDERS, [bad], Idempotency_Key="b").json
    assert (many["count"], many["receipts"]) == (1, [one])


def test_an_idempotency_key_has_one_effect(client: HttpClient) -> None:
    first = client.post(ORDERS, {"value": 1}, Idempotency_Key="a")
    again = client.post(ORDERS, {"value": 1}, Idempotency_Key="a")
    assert first.body == again.body
    assert (first.headers.get("idempotency-replayed"), again.headers["idempotency-replayed"]) == (None, "true")
    other = client.post(ORDERS, {"value": 2}, Idempotency_Key="a")
    assert (other.status, other.code) == (422, "idempotency_key_reused")
    assert client.post(f"{ORDERS}?partition=0", {"value": 1}, Idempotency_Key="a").status == 422
    many = [client.post(ORDERS, [{"value": 2}, {"value": 3}], Idempotency_Key="b").json for _ in range(3)]
    assert [one["receipts"][0]["offset"] for one in many] == [1, 1, 1]
    assert [one["value"] for one in read(client)["messages"]] == [1, 2, 3]
    assert client.post(ORDERS, {"value": 1}, Idempotency_Key="a b").code == "invalid_field"
    assert client.post(ORDERS, {"value": 1}, Idempotency_Key="a", If_Match='"0"').code == "invalid_field"


def test_messages_are_read_by_offset_time_and_limit(client: HttpClient) -> None:
    client.post(ORDERS, [{"value": at, "timestamp": at * 1_000_000} for at in range(10)])
    client.post(ORDERS, [{"value": at, "timestamp": at * 1_000_000} for at in range(10, 20)])
    page = read(client, "?offset=3&limit=4")
    assert ([one["value"] for one in page["messages"]], page["next_offset"]) == ([3, 4, 5, 6], 7)
    assert page["end_offset"] == 20
    assert [one["value"] for one in read(client, f"?offset={page['next_offset']}&limit=2")["messages"]] == [7, 8]
    assert read(client, "?time=10000000")["messages"][0]["value"] == 10
    assert read(client, "?offset=20") == {"messages": [], "next_offset": 20, "end_offset": 20}
    beyond = client.get("/v1/topics/orders/partitions/0/messages?offset=21")
    assert (beyond.status, beyond.code, beyond.json["details"]["next_offset"]) == (416, "offset_out_of_range", 20)
    assert client.get("/v1/topics/orders/partitions/7/messages").code == "partition_not_found"
    assert client.get("/v1/topics/orders/partitions/x/messages").code == "path_not_found"
    assert client.get("/v1/topics/orders/partitions/0/messages?offset=1&time=1").code == "invalid_field"


def test_a_long_poll_waits_for_a_message(client: HttpClient, server: EmbeddedServer) -> None:
    client.publish("orders", 1)
    assert read(client, "?offset=1&wait=0.05") == {"messages": [], "next_offset": 1, "end_offset": 1}
    waiting = HttpClient(url_of(server))
    waiting._connection.request("GET", "/v1/topics/orders/partitions/0/messages?offset=1&wait=30")
    client.publish("orders", 2)
    page = json.loads(waiting._connection.getresponse().read())
    assert [one["value"] for one in page["messages"]] == [2]
    waiting.close()


# Groups.


def test_groups_commit_seek_and_are_described(client: HttpClient) -> None:
    client.publish("orders", *range(10))
    assert client.post("/v1/groups/g/commits", {"topic": "orders", "position": "0:4"}).status == 204
    group = client.get("/v1/groups/g").json
    assert (group["places"][0]["offset"], group["places"][0]["lag"]) == (4, 6)
    offsets = [{"topic": "orders", "partition": 0, "offset": 6}]
    assert client.post("/v1/groups/g/commits", {"offsets": offsets}).status == 204
    assert [(one["group"], one["lag"]) for one in client.get("/v1/groups").json["groups"]] == [("g", 4)]
    moved = client.post("/v1/groups/g/seeks", {"topic": "orders", "to": "latest"})
    assert moved.json["places"][0]["lag"] == 0
    assert client.post("/v1/groups/g/commits", {"topic": "orders", "position": "0:99"}).status == 422
    assert client.ask("DELETE", "/v1/groups/g").status == 204
    assert client.get("/v1/groups/g").code == "group_not_found"


# Leased subscriptions.


def test_leases_are_acked_extended_released_and_rejected(client: HttpClient) -> None:
    client.publish("orders", *range(6))
    made = client.post("/v1/topics/orders/subscriptions", {"subscription": "billing"})
    assert (made.status, made.json["ready"]) == (201, 6)
    leased = client.post(f"{BILLING}/leases", {"messages_max": 5}).json["messages"]
    assert [one["value"] for one in leased] == [0, 1, 2, 3, 4]
    places = [{name: one[name] for name in ("partition", "offset", "lease")} for one in leased]
    assert client.post(f"{BILLING}/acks", {"messages": places[:2]}).json == {}
    assert client.post(f"{BILLING}/extensions", {"messages": places[2:3], "lease_ms": 60_000}).json["until_us"]
    assert client.post(f"{BILLING}/releases", {"messages": places[2:3], "delay_ms": 0}).json == {}
    assert client.post(f"{BILLING}/rejections", {"messages": places[3:4], "reason": "no"}).json == {}
    refused = client.post(f"{BILLING}/acks", {"messages": [{**places[3], "lease": 99}]}).json["refused"]
    assert [one["offset"] for one in refused] == [3]
    lag = client.get(f"{BILLING}/lag").json
    assert {name: lag[name] for name in ("ready", "leased", "dead", "lag")} == {
        "ready": 2, "leased": 1, "dead": 1, "lag": 3,
    }  # fmt: skip
    again = client.post(f"{BILLING}/leases", {}).json["messages"]
    assert (again[0]["value"], again[0]["deliveries"]) == (2, 2)
    assert client.post(f"{BILLING}/redrives").json["messages"] == 1
    assert client.post(f"{BILLING}/resets", {"start": "earliest"}).json["ready"] >= 6


def test_a_lease_without_a_body_waits_or_has_nothing(client: HttpClient) -> None:
    client.post("/v1/topics", {"topic": "orders"})
    assert client.post(f"{BILLING}/leases").json == {"messages": []}
    assert client.post(f"{BILLING}/leases", {"wait_ms": 20}).json == {"messages": []}
    assert client.post("/v1/topics/none/subscriptions/x/leases").code == "topic_not_found"
    assert client.post(f"{BILLING}/leases", {"create": False, "messages_max": 0}).code == "invalid_field"


def test_subscriptions_are_listed_altered_and_deleted(client: HttpClient) -> None:
    for name in ("a", "b"):
        client.post("/v1/topics/orders/subscriptions", {"subscription": name})
    assert client.post("/v1/topics/orders/subscriptions", {"subscription": "a"}).code == "subscription_exists"
    path = "/v1/topics/orders/subscriptions"
    assert [one["subscription"] for one in client.get(path).json["subscriptions"]] == ["a", "b"]
    assert [one["subscription"] for one in client.get("/v1/subscriptions?limit=1").json["subscriptions"]] == ["a"]
    altered = client.ask("PATCH", f"{path}/a", {"settings": {"paused": True}})
    assert altered.json["settings"]["paused"] is True
    assert client.ask("PATCH", f"{path}/a", {"settings": {"pausd": True}}).code == "invalid_field"
    assert client.ask("DELETE", f"{path}/a").status == 204
    assert client.get(f"{path}/a").code == "subscription_not_found"


# The timeline.


def test_messages_on_the_timeline_are_found_and_edited(client: HttpClient) -> None:
    due = 2_000_000_000_000_000
    client.post(ORDERS, [{"key": key, "value": key, "due": due + at} for at, key in enumerate("ab")])
    client.post("/v1/topics/orders/subscriptions", {"subscription": "billing"})
    found = client.get(f"{BILLING}/messages?status=waiting&limit=1").json
    assert [one["value"] for one in found["messages"]] == ["a"]
    rest = client.get(f"{BILLING}/messages?status=waiting&limit=1&after={quote(found['next'])}").json
    assert [(one["value"], one["status"]) for one in rest["messages"]] == [("b", "waiting")]
    assert client.get(f"{BILLING}/messages?key=b").json["messages"][0]["offset"] == 1
    one = client.get("/v1/topics/orders/messages/0:0?subscription=billing")
    assert one.headers["etag"] == '"1"'
    edited = client.ask("PATCH", "/v1/topics/orders/messages/0:0", {"due": due + 9}, {"If-Match": '"1"'})
    assert (edited.status, edited.headers["etag"]) == (200, '"2"')
    stale = client.ask("PATCH", "/v1/topics/orders/messages/0:0", {"due": due}, {"If-Match": '"1"'})
    assert (stale.status, stale.code, stale.json["details"]["version"]) == (412, "stale_version", 2)
    assert client.ask("PATCH", "/v1/topics/orders/messages/0:0", {"value": {"new": 1}}).status == 200
    assert client.get("/v1/topics/orders/messages/0:0?subscription=billing").json["value"] == {"new": 1}
    count = client.get(f"{BILLING}/forecast?start={due}&bucket_seconds=1&buckets=2").json
    assert count["counts"] == [2, 0]
    shifted = client.post(f"{BILLING}/edits", {"selection": {"key": "b"}, "change": {"shift_us": -10}}).json
    assert [one["outcome"] for one in shifted["outcomes"]] == ["applied"]
    assert client.ask("DELETE", "/v1/topics/orders/messages/0:0", None, {"If-Match": '"3"'}).status == 204
    gone = client.get("/v1/topics/orders/messages/0:0?subscription=billing")
    assert (gone.status, gone.code) == (410, "message_gone")


def test_a_leased_message_cannot_be_edited(client: HttpClient) -> None:
    client.publish("orders", 1)
    client.post(f"{BILLING}/leases")
    refused = client.ask("PATCH", "/v1/topics/orders/messages/0:0", {"priority": 3})
    assert (refused.status, refused.code) == (409, "message_leased")


# Schedules and transactions.


def test_schedules_are_made_paused_run_and_removed(client: HttpClient) -> None:
    given = {"topic": "reports", "when": "0 6 * * *", "zone": "Europe/Berlin", "value": {"daily": True}}
    assert client.ask("PUT", "/v1/schedules/daily", given).json["definition"]["when"] == "0 6 * * *"
    assert client.get("/v1/schedules/daily").json["next_us"] > 0
    assert len(client.get("/v1/schedules/daily/runs?runs=3").json["times_us"]) == 3
    assert client.ask("PATCH", "/v1/schedules/daily", {"paused": True}).json["definition"]["paused"] is True
    assert client.post("/v1/schedules/daily/runs").status == 201
    (message,) = client.get("/v1/topics/reports/partitions/0/messages?wait=10").json["messages"]
    assert message["value"] == {"daily": True}
    assert client.ask("PUT", "/v1/schedules/x", {**given, "when": "no"}).status == 422
    assert [one["definition"]["name"] for one in client.get("/v1/schedules?topic=reports").json["schedules"]] == [
        "daily"
    ]
    assert client.ask("DELETE", "/v1/schedules/daily").status == 204
    assert client.get("/v1/schedules/daily").code == "schedule_not_found"


def test_a_transaction_is_committed_once(client: HttpClient) -> None:
    client.publish("orders", 1, 2)
    given = {
        "transaction": "billing",
        "sequence": 1,
        "messages": [{"topic": "bills", "value": 1}, {"topic": "audit", "value": 2}],
        "group": "billing",
        "offsets": [{"topic": "orders", "partition": 0, "offset": 2}],
    }
    first, again = (client.post("/v1/transactions", given) for _ in range(2))
    assert (first.status, len(first.json["places"]), again.json["repeated"]) == (200, 2, True)
    for topic in ("bills", "audit"):
        assert len(client.get(f"/v1/topics/{topic}/partitions/0/messages").json["messages"]) == 1
    assert client.get("/v1/groups/billing").json["places"][0]["offset"] == 2
    wrong = {**given, "sequence": 2, "offsets": [{"topic": "orders", "partition": 0, "offset": 99}]}
    assert client.post("/v1/transactions", wrong).status == 422
    assert len(client.get("/v1/topics/bills/partitions/0/messages").json["messages"]) == 1


# The broker, and what HTTP adds.


def test_the_broker_tells_about_itself(client: HttpClient) -> None:
    assert client.get("/healthz").json == {"status": "ok"}
    assert client.get("/readyz").json == {"status": "ok"}
    assert client.get("/v1/broker").json["topics"] == 0
    page = client.get("/v1/docs")
    assert page.headers["content-type"].startswith("text/html")
    assert b"id='topic_not_found'" in page.body
    assert not re.search(rb"(?:src|href|url)\s*[=(]\s*['\"]?https?:", page.body), "it loads nothing from elsewhere"


def test_metrics_are_openmetrics_with_bounded_labels(client: HttpClient) -> None:
    parser = pytest.importorskip("prometheus_client.openmetrics.parser")
    client.publish("orders", 1, 2)
    client.post(f"{BILLING}/leases")
    client.post("/v1/groups/g/commits", {"topic": "orders", "position": "0:1"})
    for at in range(50):
        client.get(f"/v1/topics/none-{at}")
        client.get(f"/nothing/{at}")
    reply = client.get("/metrics")
    families = {family.name: family for family in parser.text_string_to_metric_families(reply.body.decode())}
    requests = families["headrace_http_requests"].samples
    counted = {(one.labels["path"], one.labels["status"]): one.value for one in requests}
    assert counted["/v1/topics/{topic}", "404"] >= 50
    assert not any("none-" in path or "nothing" in path for path, _ in counted)
    lags = {one.labels["group"]: one.value for one in families["headrace_group_lag"].samples}
    assert lags == {"g": 1}
    states = {one.labels["state"]: one.value for one in families["headrace_subscription_messages"].samples}
    assert (states["leased"], states["ready"]) == (1, 1)
    for name in ("memory_bytes", "open_files", "cpu_seconds", "uptime_seconds", "syncs", "native_failures"):
        assert f"headrace_{name}" in families
    assert families["headrace_memory_bytes"].samples[0].value > 0
    asked = {(one.labels["request"], one.labels["outcome"]) for one in families["headrace_requests"].samples}
    assert {("Lease", "accepted"), ("TopicDescribe", "refused")} <= asked
    connections = {one.labels["gateway"]: one.value for one in families["headrace_connections"].samples}
    assert connections["http"] >= 1
    assert "native" in connections


def test_bodies_may_be_compressed_both_ways(client: HttpClient) -> None:
    packed = gzip.compress(json.dumps([{"value": "x" * 100}] * 50).encode())
    headers = {"Content-Type": "application/json", "Content-Encoding": "gzip"}
    assert client.ask("POST", ORDERS, packed, headers).json["count"] == 50
    plain = client.get("/v1/topics/orders/partitions/0/messages")
    small = client.ask("GET", "/v1/topics/orders/partitions/0/messages", None, {"Accept-Encoding": "gzip, br"})
    assert small.headers["content-encoding"] == "gzip"
    assert gzip.decompress(small.body) == plain.body
    assert len(small.body) < len(plain.body) / 5
    smaller = client.ask("GET", "/v1/topics/orders/partitions/0/messages", None, {"Accept-Encoding": "gzip, zstd"})
    assert (smaller.headers["content-encoding"], smaller.headers["vary"]) == ("zstd", "accept-encoding")
    assert len(smaller.body) < len(plain.body) / 5


def test_one_cursor_for_every_exit(client: HttpClient, server: EmbeddedServer) -> None:
    client.publish("orders", *range(4))
    client.post("/v1/groups/g/commits", {"topic": "orders", "position": "0:2"})
    with headrace.connect(native_url_of(server)) as bus, bus.subscribe("orders", group="g") as subscription:
        assert [message.value for message in islice(subscription, 2)] == [b"2", b"3"]


def test_a_head_has_no_body_and_options_tells_the_methods(client: HttpClient) -> None:
    assert client.ask("HEAD", "/v1/topics").body == b""
    assert client.ask("OPTIONS", "/v1/topics").headers["allow"] == "GET, OPTIONS, POST"
    refused = client.ask("PUT", "/v1/topics", {})
    assert (refused.status, refused.headers["allow"], refused.code) == (405, "GET, POST", "method_not_allowed")
    assert client.get("/v2/topics").code == "path_not_found"


# What is wrong is told.


def test_a_commit_has_a_position_or_offsets(client: HttpClient) -> None:
    client.publish("orders", 1)
    offsets = [{"topic": "orders", "partition": 0, "offset": 1}]
    for body in (
        {},
        {"offsets": []},
        {"topic": "orders"},
        {"topic": "orders", "position": ""},
        {"position": "0:1"},
        {"topic": "orders", "position": "0:1", "offsets": offsets},
    ):
        refused = client.post("/v1/groups/g/commits", body)
        assert (refused.status, refused.code) == (422, "invalid_field"), body
    assert client.post("/v1/groups/g/commits").code == "invalid_field"
    assert client.post("/v1/groups/g/commits", {"topic": "none", "position": "0:0"}).code == "topic_not_found"
    assert client.get("/v1/groups").json["groups"] == []
    client.post("/v1/topics/orders/trims", {"offsets": {"0": 1}, "unread": True})
    assert client.post("/v1/groups/g/commits", {"topic": "orders", "position": "0:0"}).status == 204


def test_bodies_without_a_message_are_refused(client: HttpClient) -> None:
    assert client.post(ORDERS, []).code == "invalid_field"
    for body in (b"", b"\n \n"):
        refused = client.ask("POST", ORDERS, body, NDJSON)
        assert (refused.status, refused.code) == (422, "invalid_field")
        assert "no message" in refused.json["detail"]


def test_a_bad_line_is_told_by_its_number(client: HttpClient) -> None:
    good = b'{"value":1}\n'
    for lines, bad, code in (
        (0, b'{"x":1}', "invalid_field"),
        (3, b"{", "invalid_json"),
        (30_000, b"[]", "invalid_field"),
    ):
        refused = client.ask("POST", ORDERS, good * lines + b"\n" + bad + b"\n" + good, NDJSON)
        assert refused.code == code
        assert refused.json["detail"].startswith(f"line {lines + 2}: ")


@pytest.mark.parametrize("field", ["due", "expires", "timestamp"])
def test_a_time_that_cannot_be_stored_is_named(client: HttpClient, field: str) -> None:
    for moment in ("9999-12-31T23:00:00Z", "0001-01-01T00:00:00Z", 1 << 62):
        for body in ({"value": 1, field: moment}, [{"value": 1, field: moment}]):
            refused = client.post(ORDERS, body)
            assert refused.status == 422
            assert field in refused.json["detail"]


def test_half_a_surrogate_pair_is_told(client: HttpClient) -> None:
    for body in (b'{"value":"\\ud800"}', b'{"value":1,"key":"\\udc00"}', b'[{"value":"a\\uD83Db"}]'):
        refused = client.ask("POST", ORDERS, body, {"Content-Type": "application/json"})
        assert (refused.status, refused.code) == (400, "invalid_json")
        assert "surrogate" in refused.json["detail"]
    whole = b'{"value":"\\ud83d\\ude00"}'
    assert client.ask("POST", ORDERS, whole, {"Content-Type": "application/json"}).status == 202


def test_a_per_cent_sign_stands_for_a_byte(client: HttpClient) -> None:
    for path in ("/v1/topics/%", "/v1/topics/a%zz", "/v1/topics/%2/messages", "/v1/topics?after=%zz"):
        refused = client.get(path)
        assert (refused.status, refused.code) == (400, "invalid_encoding")


def test_a_message_of_no_subscription_names_the_query(client: HttpClient) -> None:
    client.publish("orders", 1)
    assert client.post(f"{BILLING}/leases").status == 200
    assert client.get(f"{ORDERS}/0:0?subscription=billing").status == 200
    for path in (f"{ORDERS}/0:0", f"{ORDERS}/0:7?subscription=billing"):
        assert "?subscription=" in client.get(path).json["detail"]
