"""The broker's WebSocket: both subprotocols, streams with credit, leases, subjects, and what ends a connection."""

import json
import logging
import socket
import ssl
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from tests.certificates import make_ca, tls_broker
from tests.http_client import EventReader, HttpClient, HttpProcess, http_server, needs_http, url_of
from tests.scenarios.test_http_upgrade import code_of, eventually
from tests.scenarios.test_security import Secured
from tests.socket_client import JSON, MESSAGE_PACK, SocketClient, close_code, handshake, raw_frame, raw_socket

import headrace
from headrace.server import EmbeddedServer

ConnectionClosed = pytest.importorskip("websockets.exceptions").ConnectionClosed
pytestmark = needs_http


@pytest.fixture(scope="module")
def server() -> Iterator[EmbeddedServer]:
    with http_server(http_origins=["https://app.example.org"], http_hosts=["broker.example.org"]) as served:
        yield served


@pytest.fixture(params=[JSON, MESSAGE_PACK])
def client(request: pytest.FixtureRequest, server: EmbeddedServer) -> Iterator[SocketClient]:
    with SocketClient(url_of(server), request.param) as client:
        yield client


@pytest.fixture
def secured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Secured]:
    for name in ("HEADRACE_TOKEN", "HEADRACE_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)
    broker = Secured(tmp_path)
    yield broker
    broker.close()


@pytest.fixture
def topic(request: pytest.FixtureRequest) -> str:
    kept = [char if char.isalnum() else "-" for char in request.node.name.removeprefix("test_")]
    return "".join(kept).strip("-")


def read_to_end(end: socket.socket) -> None:
    while end.recv(1 << 20):
        pass


def values(messages: list[Any]) -> list[Any]:
    return [message["value"] for message in messages]


# Requests.


def test_messages_are_published_and_read(client: SocketClient, topic: str) -> None:
    binary: Any = "/wA=" if client._is_json else b"\xff\0"
    published = client.ask(
        "Publish",
        [{"key": "ann", "value": {"id": 1}, "headers": [["lang", "en"]]}, {"value_base64": binary}, {"value": None}],
        topic=topic,
    )["answer"]
    assert published == {"count": 3, "receipts": [{"partition": 0, "offset": 0, "count": 3, "durability": "memory"}]}
    fetched = client.ask("Fetch", topic=topic, partition=0, offset=0)
    first, second, third = fetched["messages"]
    assert fetched["answer"] == {"next_offset": 3, "end_offset": 3}
    assert (first["key"], first["value"], first["offset"]) == ("ann", {"id": 1}, 0)
    assert [list(pair) for pair in first["headers"]] == [["lang", "en"], ["content-type", "application/json"]]
    assert second["value_base64"] == binary
    assert third["value"] is None
    assert client.ask("TopicDescribe", topic=topic)["answer"]["partitions"][0]["next_offset"] == 3


def test_a_problem_has_the_id_of_its_request(client: SocketClient, topic: str) -> None:
    assert client.problem("TopicDescribe", topic="there-is-none") == "topic_not_found"
    assert client.problem("TopicDescribe", topi=topic) == "invalid_field"
    assert client.problem("NoSuchRequest") == "unsupported_operation"
    assert client.problem("Hello", protocol_min=1, protocol_max=1) == "unsupported_operation"
    assert client.problem("PublishOnce") == "unsupported_operation"
    assert client.problem("Publish", topic=topic) == "invalid_field"
    assert client.problem("Publish", [{"valeu": 1}], topic=topic) == "invalid_field"
    assert client.problem("Publish", [{"value": 1}], topic=topic, expected_offset=5) == "unexpected_offset"
    assert client.problem("Fetch", topic=topic, partition=0, offset=7) == "topic_not_found"
    assert client.problem("StreamOpen", topic=topic, position="x") == "invalid_field"
    assert client.problem("Ack", topic=topic, messages=[]) == "invalid_field"
    assert client.problem("Publish", [{"value": 1}], topic=topic, idempotency_key="ü") == "invalid_field"


def test_a_repeated_publish_has_no_second_effect(client: SocketClient, topic: str) -> None:
    for _ in range(2):
        receipts = client.ask("Publish", [{"value": 1}], topic=topic, idempotency_key="5f1c")["answer"]["receipts"]
        assert [receipt["offset"] for receipt in receipts] == [0]
    assert client.problem("Publish", [{"value": 2}], topic=topic, idempotency_key="5f1c") == "idempotency_key_reused"


def test_many_requests_in_a_row_keep_their_order(client: SocketClient, topic: str) -> None:
    client.ask("TopicCreate", topic=topic, settings={"partitions": 4})
    sent = [
        client.send("Publish", [{"key": f"{key}", "value": number} for key in range(8)], topic=topic)
        for number in range(300)
    ]
    assert {client.receive()["id"] for _ in sent} == set(sent)
    seen: dict[str, list[int]] = {}
    for partition in range(4):
        for message in client.ask("Fetch", topic=topic, partition=partition, offset=0)["messages"]:
            seen.setdefault(message["key"], []).append(message["value"])
    assert all(numbers == sorted(numbers) for numbers in seen.values())
    assert sum(map(len, seen.values())) == 2400


def test_transactions_are_requests_as_any(client: SocketClient, topic: str) -> None:
    client.ask("TopicCreate", topic=topic)
    begun = client.ask("TransactionBegin", transaction=topic)["answer"]
    name = {"transaction": topic, "epoch": begun["epoch"]}
    staged = client.ask("TransactionStage", [{"value": 1}, {"value": 2}], topic=topic, partition=0, **name)["answer"]
    client.ask("TransactionCommit", stages=[staged["stage"]], **name)
    assert values(client.ask("Fetch", topic=topic, partition=0, offset=0)["messages"]) == [1, 2]


def test_a_member_of_a_group_is_told_its_partitions(client: SocketClient, server: EmbeddedServer, topic: str) -> None:
    client.ask("TopicCreate", topic=topic, settings={"partitions": 2})
    joined = client.ask("GroupJoin", group=topic, member="me", topics=[topic])["answer"]
    assert len(joined["assigned"]) == 2
    client.ask("Commit", group=topic, member="me", places=joined["assigned"])
    with SocketClient(url_of(server)) as other:
        other.ask("GroupJoin", group=topic, member="you", topics=[topic])
        assert len(client.push("Assignment")["fields"]["revoked"]) == 1
    client.ask("GroupLeave", group=topic, member="me")


def test_a_fetch_waits(client: SocketClient, topic: str) -> None:
    client.ask("TopicCreate", topic=topic)
    waiting = client.send("Fetch", topic=topic, partition=0, offset=0, wait_ms=30_000)
    client.send("Publish", [{"value": "here"}], topic=topic)
    found = [client.receive() for _ in range(2)]
    assert values(next(frame for frame in found if frame["id"] == waiting)["messages"]) == ["here"]
    assert not client.ask("Fetch", topic=topic, partition=0, offset=1, wait_ms=1)["messages"]


# Streams.


def test_a_stream_sends_as_much_as_its_credit(client: SocketClient, topic: str) -> None:
    client.ask("Publish", [{"value": number} for number in range(10)], topic=topic)
    stream = client.ask("StreamOpen", topic=topic, start="earliest", credit_messages=3)["answer"]
    assert stream["position"] == "0:0"
    assert values(client.take("Delivery", 3)) == [0, 1, 2]
    client.ask("Info")
    assert not client.pushed
    client.send("StreamCredit", stream=stream["stream"], messages=100)
    assert values(client.take("Delivery", 7)) == list(range(3, 10))
    client.ask("StreamClose", stream=stream["stream"])
    client.ask("Publish", [{"value": "unseen"}], topic=topic)
    assert not client.pushed


def test_the_ids_are_those_of_events(client: SocketClient, server: EmbeddedServer, topic: str) -> None:
    client.ask("TopicCreate", topic=topic, settings={"partitions": 3})
    client.ask("Publish", [{"key": str(number), "value": number} for number in range(30)], topic=topic)
    client.ask("StreamOpen", topic=topic, start="earliest")
    seen = client.take("Delivery", 30)
    events = EventReader(url_of(server), f"/v1/topics/{topic}/messages?start=earliest")
    behind_all = events.take(30)[-1].id
    events.close()
    assert seen[-1]["id"] == behind_all
    with SocketClient(url_of(server)) as other:
        other.ask("StreamOpen", topic=topic, position=seen[17]["id"])
        rest = other.take("Delivery", 12)
    assert sorted(values(rest) + values(seen[:18])) == list(range(30))


def test_a_slow_reader_gets_everything(client: SocketClient, server: EmbeddedServer, topic: str) -> None:
    client.ask("LeaseOpen", topic=topic, create_topic=True, credit_messages=1000, credit_bytes=1 << 30)
    client.ask("StreamOpen", topic=topic)
    with closing(HttpClient(url_of(server))) as sender:
        for number in range(100):
            sender.publish(topic, f"{number} " + "x" * 100_000)
    time.sleep(0.2)  # so long it reads nothing, and more comes than fits
    sent = client.send("Info")
    seen: dict[str, list[int]] = {"Delivery": [], "LeaseDelivery": []}
    while any(len(numbers) < 100 for numbers in seen.values()):
        frame = client.receive()
        if frame.get("id") != sent:
            seen[frame["push"]] += [int(message["value"].split()[0]) for message in frame["messages"]]
    assert seen == {"Delivery": list(range(100)), "LeaseDelivery": list(range(100))}


def test_a_stream_ends_with_its_topic(client: SocketClient, topic: str) -> None:
    client.ask("Publish", [{"value": 1}], topic=topic)
    stream = client.ask("StreamOpen", topic=topic)["answer"]["stream"]
    client.ask("TopicDelete", topic=topic)
    end = client.push("StreamEnd")["fields"]
    assert (end["stream"], end["problem"]["code"]) == (stream, "topic_not_found")


def test_streams_are_limited(client: SocketClient, topic: str) -> None:
    client.ask("TopicCreate", topic=topic)
    for _ in range(64):
        client.ask("StreamOpen", topic=topic)
    assert client.problem("StreamOpen", topic=topic) == "limit_exceeded"


def test_a_hundred_sockets_on_one_topic(server: EmbeddedServer, topic: str) -> None:
    url = url_of(server)
    with closing(HttpClient(url)) as sender, ThreadPoolExecutor(20) as threads:
        sender.publish(topic, "first")
        clients = list(threads.map(lambda _: SocketClient(url), range(100)))
        try:
            list(threads.map(lambda one: one.ask("StreamOpen", topic=topic), clients))
            for number in range(20):
                sender.publish(topic, number)
            for seen in threads.map(lambda one: values(one.take("Delivery", 20)), clients):
                assert seen == list(range(20))
        finally:
            list(threads.map(lambda one: one.connection.close(), clients))


# Leases.


def test_a_standing_lease_delivers_and_settles(client: SocketClient, topic: str) -> None:
    client.ask("Publish", [{"value": number} for number in range(5)], topic=topic)
    standing = client.ask("LeaseOpen", topic=topic, subscription="work", credit_messages=2)["answer"]["standing"]
    held = client.take("LeaseDelivery", 2)
    assert values(held) == [0, 1]
    assert all(message["deliveries"] == 1 and message["until_us"] for message in held)
    name = {"topic": topic, "subscription": "work"}
    places = [{field: message[field] for field in ("partition", "offset", "lease")} for message in held]
    assert client.ask("Ack", messages=places[:1], **name)["answer"] == {}
    client.ask("Extend", messages=places[1:], lease_ms=60_000, **name)
    client.ask("Release", messages=places[1:], delay_ms=0, **name)
    client.send("LeaseCredit", standing=standing, messages=4)
    again = client.take("LeaseDelivery", 4)
    assert values(again) == [1, 2, 3, 4]
    assert again[0]["deliveries"] == 2
    places = [{field: message[field] for field in ("partition", "offset", "lease")} for message in again]
    client.ask("Reject", messages=places[:1], reason="no", **name)
    client.ask("Ack", messages=places[1:], **name)
    counts = client.ask("SubscriptionDescribe", **name)["answer"]
    assert (counts["acked"], counts.get("ready", 0), counts.get("leased", 0)) == (4, 0, 0)
    client.ask("LeaseClose", standing=standing)


def test_session_bound_leases_end_with_the_connection(server: EmbeddedServer, topic: str) -> None:
    url, name = url_of(server), {"topic": topic, "subscription": "work"}
    with SocketClient(url) as first:
        first.ask("Publish", [{"value": number} for number in range(3)], topic=topic)
        first.ask("LeaseOpen", credit_messages=3, session_bound=True, **name)
        held = first.take("LeaseDelivery", 3)
        first.ask("Ack", messages=[{field: held[1][field] for field in ("partition", "offset", "lease")}], **name)
        with SocketClient(url) as second:
            assert second.ask("Lease", **name)["messages"] == []
            first.connection.close()
            again = second.ask("Lease", messages_max=10, wait_ms=20_000, **name)["messages"]
            again += second.ask("Lease", messages_max=10, **name)["messages"]
            assert sorted(values(again)) == [0, 2]


def test_a_killed_broker_repeats_nothing_that_was_acknowledged(tmp_path: Path) -> None:
    broker = HttpProcess(tmp_path)
    name = {"topic": "jobs", "subscription": "work"}
    acked: set[int] = set()
    try:
        with SocketClient(broker.url) as client:
            client.ask("Publish", [{"value": number} for number in range(200)], topic="jobs", durability="synced")
        for _ in range(2):
            client = SocketClient(broker.url)
            client.ask("LeaseOpen", credit_messages=40, session_bound=True, **name)
            held = client.take("LeaseDelivery", 40)
            assert acked.isdisjoint(values(held))
            for message in held[:25]:
                place = {field: message[field] for field in ("partition", "offset", "lease")}
                client.ask("Ack", messages=[place], **name)
                acked.add(message["value"])
            broker.kill()
            broker.start()
        with SocketClient(broker.url) as client:
            left: Counter[int] = Counter()
            while found := client.ask("Lease", messages_max=1000, **name)["messages"]:
                left.update(values(found))
        assert set(left) == set(range(200)) - acked
        assert max(left.values()) == 1
    finally:
        broker.stop()


# Subjects, requests and replies.


def test_subjects_and_requests_reach_other_clients(client: SocketClient, server: EmbeddedServer, topic: str) -> None:
    subject = f"s.{topic}"
    with headrace.connect(url_of(server)) as bus:
        subscription = client.ask("SubjectSubscribe", pattern=f"{subject}.*")["answer"]["subscription"]
        assert client.ask("SubjectPublish", [{"value": {"n": 1}}], subject=f"{subject}.x")["answer"]["receivers"] == 1
        delivery = client.push("SubjectDelivery")
        assert (delivery["fields"]["subscription"], delivery["fields"]["subject"]) == (subscription, f"{subject}.x")
        assert values(delivery["messages"]) == [{"n": 1}]
        client.ask("SubjectUnsubscribe", subscription=subscription)

        client.ask("ServeOpen", subject=subject)
        asked: list[Any] = []
        thread = threading.Thread(target=lambda: asked.append(bus.request(subject, b"[1, 2]", timeout=30)))
        thread.start()
        request = client.push("RequestDelivery")
        client.send("ReplySend", [{"value": 3}], request=request["fields"]["request"])
        thread.join(30)
        assert asked[0] == b"3" or asked[0].value == b"3"
        assert client.problem("RequestSend", [{"value": 1}], subject="nobody.here", timeout_ms=1000) == "no_responders"


def test_a_socket_asks_a_socket(client: SocketClient, server: EmbeddedServer, topic: str) -> None:
    with SocketClient(url_of(server)) as responder:
        responder.ask("ServeOpen", subject=topic)
        asked = client.send("RequestSend", [{"value": {"a": 1}}], subject=topic, timeout_ms=20_000)
        request = responder.push("RequestDelivery")
        assert values(request["messages"]) == [{"a": 1}]
        responder.send("ReplySend", [{"value": ["done"]}], request=request["fields"]["request"])
        assert values(client.answer(asked)["messages"]) == [["done"]]
        failing = client.send("RequestSend", subject=topic, timeout_ms=20_000)
        responder.push("RequestDelivery")
        responder.connection.close()
        assert client.answer(failing)["problem"]["code"] == "responder_lost"


# Tenants and credentials.


def test_the_tenant_is_in_the_query_or_a_header(server: EmbeddedServer, topic: str) -> None:
    url = url_of(server)
    with SocketClient(url, query="?tenant=acme") as queried, SocketClient(url, Headrace_Tenant="acme") as named:
        queried.ask("Publish", [{"value": "acme's"}], topic=topic)
        assert values(named.ask("Fetch", topic=topic, partition=0, offset=0)["messages"]) == ["acme's"]
    with SocketClient(url) as other:
        assert other.problem("TopicDescribe", topic=topic) == "topic_not_found"
    refused = HttpClient(url).raw(
        handshake(url, Headrace_Tenant="other").replace(b"/v1/socket", b"/v1/socket?tenant=a")
    )
    assert code_of(refused) == (422, "invalid_field")


def test_a_token_in_a_subprotocol_is_neither_echoed_nor_logged(
    server: EmbeddedServer, caplog: pytest.LogCaptureFixture
) -> None:
    url = url_of(server)
    with caplog.at_level(logging.DEBUG):
        refused = HttpClient(url).raw(
            handshake(url, Sec_WebSocket_Protocol=f"{JSON}, headrace.bearer.c2VjcmV0LXRva2Vu")
        )
    assert code_of(refused) == (401, "not_authenticated")
    assert b"c2VjcmV0" not in refused
    assert b"secret-token" not in refused
    assert "c2VjcmV0" not in caplog.text
    assert "secret-token" not in caplog.text


# What is refused, and what ends a connection.


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ({"Sec_WebSocket_Key": None}, (400, "malformed_request")),
        ({"Sec_WebSocket_Key": "c2hvcnQ="}, (400, "malformed_request")),
        ({"Sec_WebSocket_Key": "no base64 at all!!"}, (400, "malformed_request")),
        ({"Sec_WebSocket_Version": "8"}, (426, "upgrade_required")),
        ({"Sec_WebSocket_Version": None}, (426, "upgrade_required")),
        ({"Upgrade": "headrace"}, (426, "upgrade_required")),
        ({"Content_Length": "0"}, (400, "malformed_request")),
        ({"Sec_WebSocket_Protocol": "mqtt"}, (422, "invalid_field")),
        ({"Sec_WebSocket_Protocol": "headrace.bearer.YQ"}, (422, "invalid_field")),
        ({"Sec_WebSocket_Protocol": f"{JSON}, headrace.bearer.YQ, headrace.bearer.YQ"}, (422, "invalid_field")),
        ({"Sec_WebSocket_Protocol": f"{JSON}, headrace.bearer."}, (401, "not_authenticated")),
        ({"Sec_WebSocket_Protocol": f"{JSON}, headrace.bearer.DQo"}, (401, "not_authenticated")),
        ({"Headrace_Tenant": "no tenant!"}, (422, "invalid_argument")),
        ({"Origin": "https://evil.example.org"}, (403, "origin_refused")),
        ({"Origin": "null"}, (403, "origin_refused")),
        ({"Host": "evil.example.org"}, (403, "host_refused")),
        (
            {"Origin": "https://evil.example.org", "Sec_WebSocket_Protocol": f"{JSON}, headrace.bearer.YQ"},
            (403, "origin_refused"),
        ),
    ],
)  # fmt: skip
def test_a_wrong_handshake_is_refused(server: EmbeddedServer, headers: Any, expected: tuple[int, str]) -> None:
    url = url_of(server)
    assert code_of(HttpClient(url).raw(handshake(url, **headers))) == expected


def test_a_listed_origin_and_no_subprotocol_are_good(server: EmbeddedServer) -> None:
    url = url_of(server)
    request = handshake(url, Origin="https://app.example.org", Sec_WebSocket_Protocol=None)
    answer = HttpClient(url).raw(request, closes=False)
    assert answer.startswith(b"HTTP/1.1 101 ")
    assert b"sec-websocket-protocol" not in answer.lower()


DEEP = b"[" * 100_000


@pytest.mark.parametrize(
    ("subprotocol", "sent", "expected"),
    [
        (JSON, raw_frame(1, b"\xff\xfe{}"), 1007),
        (JSON, raw_frame(1, b'{"id":1,"request":"Info","fields":{"x":"\xff"}}'), 1007),
        (JSON, raw_frame(2, b"{}"), 1003),
        (MESSAGE_PACK, raw_frame(1, b"\x80"), 1003),
        (MESSAGE_PACK, raw_frame(2, b"\xc1"), 1007),
        (JSON, raw_frame(1, b"", length=(1 << 20) + 1), 1009),
        (JSON, raw_frame(1, b"", length=1 << 62), 1009),
        (JSON, raw_frame(1, b"x" * (600 << 10), fin=False) + raw_frame(0, b"x" * (600 << 10)), 1009),
        (JSON, raw_frame(1, b"{}", masked=False), 1002),
        (JSON, raw_frame(3, b""), 1002),
        (JSON, raw_frame(0, b"x"), 1002),
        (JSON, raw_frame(1, b"x", fin=False) + raw_frame(1, b"y"), 1002),
        (JSON, raw_frame(9, b"x", fin=False), 1002),
        (JSON, raw_frame(9, b"x" * 126), 1002),
        (JSON, b"\xf1\x80\0\0\0\0", 1002),
        (JSON, raw_frame(8, b"\x03"), 1002),
        (JSON, raw_frame(8, b"\x03\xe8"), 1000),
        (JSON, raw_frame(1, b"{", fin=False) + raw_frame(0, b"", fin=False) * 1001, 1008),
        (JSON, raw_frame(9, b"") * 300, 1008),
        (JSON, raw_frame(10, b"") * 300, 1008),
    ],
)
def test_hostile_frames_end_the_connection(
    server: EmbeddedServer, subprotocol: str, sent: bytes, expected: int
) -> None:
    with raw_socket(url_of(server), subprotocol) as end:
        end.sendall(sent)
        assert close_code(end) == expected
        while end.recv(1 << 16):
            pass
    eventually(lambda: not server._server._connections())
    gateway = next(each for each in server._server.gateways if hasattr(each, "application"))
    assert (gateway.requests, gateway.received_bytes, gateway.streams) == (0, 0, 0)


def test_frames_that_are_no_requests_are_told(server: EmbeddedServer) -> None:
    with SocketClient(url_of(server)) as client:
        for text, given in (
            ("[]", None),
            ("{}", None),
            ("1", None),
            ('{"id": 1}', 1),
            ('{"id": 29.5, "request": "Info"}', 29.5),
            ('{"id": "a", "request": 5}', "a"),
            ('{"id": [7], "request": "Info"}', None),
            (f'{{"id": "{"x" * 65}", "request": "Info"}}', "x" * 65),
            (f'{{"id": {1 << 60}, "request": "Info"}}', 1 << 60),
            (f'{{"id": {"9" * 400}, "request": "Info"}}', None),
            ('{"id":1,"request":"Info","x":1}', 1),
        ):
            client.connection.send(text)
            frame = client.receive()
            assert (frame["id"], frame["problem"]["code"]) == (given, "invalid_field")
        client.connection.send(["[", "]"])
        assert client.receive()["id"] is None
        assert client.ask("Info")["answer"]["connections"] >= 1


def test_what_cannot_be_decoded_ends_nothing(server: EmbeddedServer) -> None:
    with SocketClient(url_of(server)) as client:
        for text in ("no json", '{"id":1,"request":"\\ud800"}', '{"id":1,"request":"Info","fields":' + DEEP.decode()):
            client.connection.send(text)
            problem = client.receive()["problem"]
            assert (problem["status"], problem["code"]) == (400, "invalid_json")
        assert client.ask("Info")["answer"]["connections"] >= 1
    with SocketClient(url_of(server), MESSAGE_PACK) as client:
        client.connection.send(b"\x81\xa6fields" + b"\x91" * 100_000)
        assert client.receive()["problem"]["status"] == 400
        assert client.ask("Info")["answer"]["connections"] >= 1


def test_what_json_has_not_is_no_value(server: EmbeddedServer, topic: str) -> None:
    with SocketClient(url_of(server), MESSAGE_PACK) as client:
        client.ask("Publish", [{"key": "s1", "value": 21.5}], topic=topic)
        for value in (float("nan"), float("-inf"), {"t": [float("inf")]}, b"\0", {"raw": [b"\0\xff"]}):
            frame = client.answer(client.send("Publish", [{"key": "s1", "value": value}], topic=topic))
            assert (frame["problem"]["status"], frame["problem"]["code"]) == (422, "invalid_field")
        client.ask("Publish", [{"key": "s2", "value": ["\u00c4\u00ca", 1e308]}], topic=topic)
        fetched = client.ask("Fetch", topic=topic, partition=0, offset=0)["messages"]
        assert values(fetched) == [21.5, ["\u00c4\u00ca", 1e308]]


def test_a_flood_of_requests_is_answered(server: EmbeddedServer, topic: str) -> None:
    with SocketClient(url_of(server)) as client:
        client.ask("TopicCreate", topic=topic)
        waiting = [
            client.send("Fetch", topic=topic, partition=0, offset=0, wait_ms=50 + number % 50) for number in range(2000)
        ]
        assert {client.receive()["id"] for _ in waiting} == set(waiting)


def test_a_client_that_reads_nothing_is_cut() -> None:
    with http_server(heartbeat_ms=200) as served:
        with closing(HttpClient(url_of(served))) as sender:
            sender.publish("large", *("x" * 10_000 for _ in range(90)))
        with raw_socket(url_of(served)) as end:
            ask = json.dumps({"id": 1, "request": "Fetch", "fields": {"topic": "large", "partition": 0, "offset": 0}})
            for _ in range(40):
                end.sendall(raw_frame(1, ask.encode()))
            eventually(lambda: not served._server._connections())


@pytest.mark.parametrize("request_name", ["Fetch", "StreamOpen"])
def test_waiting_pings_are_no_sign_of_life(request_name: str) -> None:
    with http_server(heartbeat_ms=1000) as served:
        with closing(HttpClient(url_of(served))) as sender:
            for _ in range(10):
                sender.publish("large", *("x" * 10_000 for _ in range(90)))
        gateway = next(each for each in served._server.gateways if hasattr(each, "application"))
        fields: dict[str, Any] = {"topic": "large", "start": "earliest", "credit_messages": 100_000}
        if request_name == "Fetch":
            fields = {"topic": "large", "partition": 0, "offset": 0}
        with raw_socket(url_of(served)) as end:
            ask = json.dumps({"id": 1, "request": request_name, "fields": fields})
            end.sendall(raw_frame(1, ask.encode()) * (40 if request_name == "Fetch" else 1))
            eventually(lambda: any(one.paused for one in gateway.connections))
            (connection,) = gateway.connections
            assert connection.transport.get_write_buffer_size() < 2 << 20
            eventually(lambda: not served._server._connections())
            with pytest.raises(ConnectionResetError):  # what it has not received is gone
                read_to_end(end)


def test_a_client_that_is_silent_is_cut() -> None:
    with (
        http_server(heartbeat_ms=100) as served,
        raw_socket(url_of(served)) as silent,
        SocketClient(url_of(served)) as alive,
    ):
        opcodes = []
        while part := silent.recv(1 << 16):
            opcodes.append(part[0] & 15)
        assert opcodes == [9]  # a ping, to which it sends no pong
        assert alive.ask("Info")["answer"]["connections"] == 1


def test_half_a_frame_and_silence_is_cut() -> None:
    with http_server(heartbeat_ms=100) as served, raw_socket(url_of(served)) as end:
        end.sendall(raw_frame(1, b"{", length=1000))
        eventually(lambda: not served._server._connections())


def test_a_broker_that_stops_says_so(tmp_path: Path) -> None:
    broker = HttpProcess(tmp_path)
    with raw_socket(broker.url) as end:
        codes: list[int] = []
        reader = threading.Thread(target=lambda: codes.append(close_code(end)))
        reader.start()
        assert broker.stop() == 0
        reader.join(30)
        assert codes == [1001]


def test_draining_is_pushed_before(tmp_path: Path) -> None:
    broker = HttpProcess(tmp_path)
    with SocketClient(broker.url) as client:
        client.ask("Publish", [{"value": 1}], topic="jobs")
        client.ask("LeaseOpen", topic="jobs", credit_messages=1)
        client.take("LeaseDelivery", 1)
        stopping = threading.Thread(target=broker.stop)
        stopping.start()
        told = [client.receive() for _ in range(2)]
        assert {frame["push"]: frame["fields"].get("code") for frame in told} == {"Drain": None, "LeaseEnd": "draining"}
        stopping.join(30)


# Security.


def test_a_token_opens_what_its_roles_allow(secured: Secured) -> None:
    for given in ({"token": secured.token}, {"Authorization": f"Bearer {secured.token}"}):
        with SocketClient(secured.http, **given) as client:  # type: ignore[arg-type]
            client.ask("StreamOpen", topic="orders", start="earliest")
            assert values(client.take("Delivery", 1)) == ["first"]
            assert [topic["topic"] for topic in client.ask("TopicList")["answer"]["topics"]] == ["orders"]
            assert client.problem("Publish", [{"value": 1}], topic="orders") == "forbidden"
            assert client.problem("StreamOpen", topic="secrets") == "forbidden"
            assert client.problem("LeaseOpen", topic="secrets") == "forbidden"
            assert client.problem("SubjectSubscribe", pattern=">") == "forbidden"
    url = secured.http
    assert code_of(HttpClient(url).raw(handshake(url))) == (401, "not_authenticated")
    wrong = handshake(
        url, Authorization=f"Bearer {secured.token}", Sec_WebSocket_Protocol=f"{JSON}, headrace.bearer.YQ"
    )
    assert code_of(HttpClient(url).raw(wrong)) == (422, "invalid_field")


def test_a_revoked_token_ends_the_connection(secured: Secured) -> None:
    with SocketClient(secured.http, token=secured.token) as client:
        client.ask("StreamOpen", topic="orders")
        secured.admin.auth.revoke(secured.created.info.id)
        secured.admin.publish("orders", b"unseen")
        with pytest.raises(ConnectionClosed) as closed:
            client.receive()
        assert closed.value.rcvd is not None
        assert closed.value.rcvd.code == 1008
        assert closed.value.rcvd.reason.startswith("token_revoked: ")


@pytest.mark.parametrize("loop", ["uvloop", "asyncio"])
def test_with_tls_on_either_event_loop(tmp_path: Path, loop: str) -> None:
    files = make_ca(tmp_path).make_server()
    trust = ssl.create_default_context(cafile=files.ca)
    with tls_broker(files, loop=loop, listen=["https://127.0.0.1:0"]) as served:
        url = next(url for url in served._server.listening if url.startswith("https://"))
        with SocketClient(url, tls=trust) as client:
            client.ask("Publish", [{"value": "x" * 100_000}] * 9, topic="large")
            client.ask("StreamOpen", topic="large", start="earliest")
            assert len(client.take("Delivery", 9)) == 9
            client.connection.send(b"{}")
            with pytest.raises(ConnectionClosed) as closed:
                client.receive()
            assert closed.value.rcvd is not None
            assert closed.value.rcvd.code == 1003
        eventually(lambda: not served._server._connections())
