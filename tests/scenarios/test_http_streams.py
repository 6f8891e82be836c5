"""Streams over HTTP: the id of an event is the whole position; slow readers and gone messages."""

import json
import socket
import threading
import time
from collections.abc import Iterator

import pytest
from tests.http_client import WAIT_S, EventReader, HttpClient, http_server, needs_http, url_of

from headrace.runtime.process_info import memory_bytes
from headrace.server import EmbeddedServer

pytestmark = needs_http

STREAM = "/v1/topics/orders/messages"


@pytest.fixture
def server() -> Iterator[EmbeddedServer]:
    with http_server(heartbeat_ms=200) as served:
        yield served


@pytest.fixture
def client(server: EmbeddedServer) -> Iterator[HttpClient]:
    client = HttpClient(url_of(server))
    yield client
    client.close()


def test_events_come_as_they_are_published_and_go_on_behind_the_last_id(client: HttpClient) -> None:
    client.publish("orders", 1, 2)
    reader = EventReader(client.url, f"{STREAM}?start=earliest")
    assert reader.response.getheader("content-type") == "text/event-stream"
    assert [(one.id, one.data["value"]) for one in reader.take(2)] == [("0:1", 1), ("0:2", 2)]
    client.publish("orders", 3)
    assert [one.data["value"] for one in reader.take(1)] == [3]
    reader.close()
    client.publish("orders", 4)
    again = EventReader(client.url, STREAM, Last_Event_ID=reader.id)
    assert [one.data["value"] for one in again.take(1)] == [4]
    again.close()
    by_query = EventReader(client.url, f"{STREAM}?position=0:1")
    assert [one.data["value"] for one in by_query.take(3)] == [2, 3, 4]
    by_query.close()


def test_a_reader_without_a_position_gets_what_comes(client: HttpClient) -> None:
    client.publish("orders", 1)
    reader = EventReader(client.url, STREAM)
    first = threading.Thread(target=lambda: client.publish("orders", 2))
    first.start()
    assert [one.data["value"] for one in reader.take(1)] == [2]
    first.join()
    reader.close()


def test_the_id_has_all_partitions(client: HttpClient) -> None:
    client.post("/v1/topics", {"topic": "orders", "settings": {"partitions": 3}})
    client.post(STREAM, [{"value": at, "partition": at % 3} for at in range(9)])
    reader = EventReader(client.url, f"{STREAM}?start=earliest")
    seen = [(one.data["partition"], one.data["offset"]) for one in reader.take(4)]
    reader.close()
    rest = EventReader(client.url, STREAM, Last_Event_ID=reader.id)
    events = rest.take(5)
    rest.close()
    seen += [(one.data["partition"], one.data["offset"]) for one in events]
    assert sorted(seen) == [(partition, offset) for partition in range(3) for offset in range(3)]
    assert events[-1].id == "0:3,1:3,2:3"


def test_lines_of_json_have_the_same_ids(client: HttpClient) -> None:
    client.publish("orders", 1, 2)
    reader = EventReader(client.url, f"{STREAM}?start=earliest", Accept="application/x-ndjson")
    lines = [json.loads(reader.response.readline()) for _ in range(2)]
    assert [(one["id"], one["value"]) for one in lines] == [("0:1", 1), ("0:2", 2)]
    assert reader.response.readline() == b"\n"  # a heartbeat
    reader.close()


def test_an_idle_stream_has_heartbeats_and_new_partitions(client: HttpClient) -> None:
    client.post("/v1/topics", {"topic": "orders"})
    reader = EventReader(client.url, STREAM)
    lines = [reader.response.readline() for _ in range(4)]
    assert lines == [b"retry: 1000\n", b"id: 0:0\n", b"\n", b":\n"]
    client.ask("PATCH", "/v1/topics/orders", {"settings": {"partitions": 2}})
    client.post(STREAM, {"value": "new", "partition": 1})
    (event,) = reader.take(1)
    assert (event.id, event.data["value"]) == ("0:0,1:1", "new")
    reader.close()


def test_a_group_goes_on_where_it_committed(client: HttpClient) -> None:
    client.publish("orders", 1, 2, 3)
    reader = EventReader(client.url, f"{STREAM}?group=g")
    assert [one.data["value"] for one in reader.take(2)] == [1, 2]
    reader.close()
    assert client.get("/v1/groups/g").code == "group_not_found"  # nothing is committed yet: at least once
    again = EventReader(client.url, f"{STREAM}?group=g", Last_Event_ID=reader.id)
    assert [one.data["value"] for one in again.take(1)] == [3]
    again.close()
    assert client.get("/v1/groups/g").json["places"][0]["offset"] == 2
    client.post("/v1/groups/g/commits", {"topic": "orders", "position": again.id})
    client.publish("orders", 4)
    last = EventReader(client.url, f"{STREAM}?group=g")
    assert [one.data["value"] for one in last.take(1)] == [4]
    last.close()


def test_a_reader_that_falls_behind_retention_is_told(client: HttpClient) -> None:
    client.publish("orders", *range(10))
    client.post("/v1/topics/orders/trims", {"offsets": {"0": 5}})
    refused = client.ask("GET", STREAM, None, {"Accept": "text/event-stream", "Last-Event-ID": "0:1"})
    assert (refused.status, refused.code) == (416, "offset_out_of_range")  # a browser does not come again
    assert client.ask("GET", STREAM, None, {"Last-Event-ID": "0:1;drop"}).code == "invalid_field"
    assert client.ask("GET", STREAM, None, {"Accept": "image/png"}).code == "not_acceptable"
    assert client.get("/v1/topics/none/messages").code == "topic_not_found"


def test_a_stream_of_a_deleted_topic_ends_with_an_error(client: HttpClient) -> None:
    client.publish("orders", 1)
    reader = EventReader(client.url, STREAM)
    client.ask("DELETE", "/v1/topics/orders")
    (event,) = list(reader)
    assert (event.name, event.data["code"]) == ("error", "topic_not_found")
    reader.close()


def test_who_reads_nothing_is_cut_and_costs_little(server: EmbeddedServer, client: HttpClient) -> None:
    client.publish("orders", "x")
    with socket.create_connection((client.host, client.port), timeout=WAIT_S) as end:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        end.sendall(b"GET /v1/topics/orders/messages?start=earliest HTTP/1.1\r\nHost: localhost\r\n\r\n")
        for _ in range(40):
            client.publish("orders", "y" * 500_000)
        gateway = server._server.gateways[1]
        (connection,) = [one for one in gateway.connections if one.client[1] == end.getsockname()[1]]  # type: ignore[attr-defined]
        assert connection.transport.get_write_buffer_size() < 2 << 20
        deadline_s = time.monotonic() + WAIT_S
        while connection in gateway.connections and time.monotonic() < deadline_s:  # type: ignore[attr-defined]
            time.sleep(0.05)
        assert connection not in gateway.connections  # type: ignore[attr-defined]
    assert client.get("/healthz").status == 200


def test_a_client_that_goes_leaves_nothing_behind(server: EmbeddedServer, client: HttpClient) -> None:
    client.publish("orders", 1)
    readers = [EventReader(client.url, f"{STREAM}?start=earliest") for _ in range(20)]
    for reader in readers:
        reader.take(1)
        reader.close()
    polls = [HttpClient(client.url) for _ in range(5)]
    for at, poll in enumerate(polls):
        path = ("/v1/topics/orders/partitions/0/messages?offset=1&wait=60", "/v1/topics/orders/subscriptions/s/leases")
        body = None if not at % 2 else b'{"wait_ms": 60000}'
        headers = {} if body is None else {"Content-Type": "application/json"}
        poll._connection.request("GET" if body is None else "POST", path[at % 2], body, headers)
    time.sleep(0.2)
    for poll in polls:
        poll.close()
    gateway = server._server.gateways[1]
    deadline_s = time.monotonic() + WAIT_S
    while len(gateway.connections) > 1 and time.monotonic() < deadline_s:  # type: ignore[attr-defined]
        time.sleep(0.02)
    assert len(gateway.connections) == 1  # type: ignore[attr-defined]
    assert (gateway.streams, gateway.requests, gateway.on_drain) == (0, 0, set())  # type: ignore[attr-defined]
    broker = gateway.broker  # type: ignore[attr-defined]
    assert not broker._readers._fetches
    assert not any(broker._readers._streams.values())


def test_a_stopping_broker_ends_streams_and_polls() -> None:
    with http_server() as server:
        client = HttpClient(url_of(server))
        client.publish("orders", 1)
        reader = EventReader(client.url, f"{STREAM}?start=earliest")
        reader.take(1)
        poll = HttpClient(client.url)
        poll._connection.request("GET", "/v1/topics/orders/partitions/0/messages?offset=1&wait=60")
        time.sleep(0.1)
        closing = threading.Thread(target=server.close)
        started_s = time.monotonic()
        closing.start()
        assert list(reader) == []
        assert json.loads(poll._connection.getresponse().read())["messages"] == []
        closing.join()
        assert time.monotonic() - started_s < WAIT_S
        with pytest.raises(OSError, match=r"."):
            socket.create_connection((client.host, client.port), timeout=WAIT_S)
        for one in (reader, poll, client):
            one.close()


def test_five_hundred_streams_of_a_topic_take_little_memory(server: EmbeddedServer, client: HttpClient) -> None:
    client.publish("orders", 0)
    before = memory_bytes()
    readers = [EventReader(client.url, f"{STREAM}?position=0:1") for _ in range(500)]
    for at in range(1, 11):
        client.publish("orders", [at, "x" * 10_000])
    for reader in readers:
        assert [one.data["value"][0] for one in reader.take(10)] == list(range(1, 11))
    assert memory_bytes() - before < 100 << 20  # of both sides, which share this process
    gateway = server._server.gateways[1]
    assert gateway.streams == 500  # type: ignore[attr-defined]
    assert len(gateway.encoded_batches._known) <= 11  # type: ignore[attr-defined]
    for reader in readers:
        reader.close()


def test_ipv6_and_several_addresses_are_served() -> None:
    with socket.socket(socket.AF_INET6) as trial:
        try:
            trial.bind(("::1", 0))
        except OSError:
            pytest.skip("this machine has no IPv6")
    server = EmbeddedServer(":memory:", listen=["http://[::1]:0", "http://127.0.0.1:0"])
    urls = server._server.listening
    assert urls[0].startswith("http://[::1]:")
    for url in urls:
        client = HttpClient(url.replace("[", "").replace("]", ""))
        host = url.removeprefix("http://")
        assert client.ask("GET", "/healthz", None, {"Host": host}).status == 200
        client.close()
    server.close()


def test_a_slow_reader_that_falls_behind_retention_gets_an_error_and_the_stream_ends() -> None:
    with http_server() as server:
        client = HttpClient(url_of(server))
        client.publish("orders", "first")
        with socket.create_connection((client.host, client.port), timeout=WAIT_S) as end:
            end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 64 << 10)
            head = b"GET /v1/topics/orders/messages?start=earliest HTTP/1.1\r\nHost: localhost\r\n"
            end.sendall(head + b"Accept: text/event-stream\r\n\r\n")
            for _ in range(40):
                client.publish("orders", "y" * 500_000)
            assert client.post("/v1/topics/orders/trims", {"offsets": {"0": 41}}).json == {"offsets": {"0": 41}}
            client.publish("orders", "last")
            end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4 << 20)  # now it hurries
            received = bytearray()
            while not received.endswith(b"0\r\n\r\n"):
                part = end.recv(1 << 20)
                assert part, "the stream was cut before its end"
                received += part
        assert b'"value":"last"' not in received  # nothing is skipped silently
        assert b"event: error\ndata: " in received
        assert b'"code":"offset_out_of_range"' in received
        client.close()


def test_a_client_of_http_1_0_gets_a_stream_without_chunks() -> None:
    with http_server() as server:
        client = HttpClient(url_of(server))
        client.publish("orders", 1)
        with socket.create_connection((client.host, client.port), timeout=WAIT_S) as end:
            end.sendall(f"GET {STREAM}?start=earliest HTTP/1.0\r\nHost: localhost\r\n\r\n".encode())
            received = b""
            while not received.endswith(b"}\n"):
                received += end.recv(1 << 16)
            head, _, body = received.partition(b"\r\n\r\n")
            assert b"transfer-encoding" not in head
            assert b"connection: close" in head
            assert json.loads(body)["value"] == 1
            client.ask("DELETE", "/v1/topics/orders")  # ends the stream
            rest = b""
            while part := end.recv(1 << 16):
                rest += part
        assert json.loads(rest)["error"]["code"] == "topic_not_found"
        plain = client.raw(b"GET /healthz HTTP/1.0\r\nHost: localhost\r\n\r\n")
        assert plain.endswith(b'\r\n\r\n{"status":"ok"}')
        gone = client.raw(b"DELETE /v1/groups/none HTTP/1.0\r\nHost: localhost\r\n\r\n")
        assert json.loads(gone.partition(b"\r\n\r\n")[2])["code"] == "group_not_found"
        client.close()


def test_a_long_poll_of_a_view_waits_for_a_message_of_the_view() -> None:
    with http_server() as server:
        client, publisher = HttpClient(url_of(server)), HttpClient(url_of(server))
        client.publish("orders", {"country": "CH"})
        view = {"view_of": "orders", "view_query": {"partial": {"country": "CH"}}}
        assert client.post("/v1/topics", {"topic": "swiss", "settings": view}).status == 201
        found: list[dict[str, object]] = []
        path = "/v1/topics/swiss/partitions/0/messages?at=latest&wait=20"
        poll = threading.Thread(target=lambda: found.append(client.get(path).json))
        poll.start()
        for country in ("DE", "FR", "CH"):
            time.sleep(0.2)
            publisher.publish("orders", {"country": country})
        poll.join(WAIT_S)
        (page,) = found
        assert [one["offset"] for one in page["messages"]] == [3]  # type: ignore[index, attr-defined]
        started = time.monotonic()
        ended = publisher.get("/v1/topics/swiss/partitions/0/messages?at=latest&wait=0.3").json
        assert (ended["messages"], time.monotonic() - started > 0.2) == ([], True)
        for one in (client, publisher):
            one.close()
