"""Routes, requests, subjects, services, configuration, histories and jobs, as any client of HTTP sees them."""

import http.client
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import quote

import pytest
from tests.http_client import EventReader, HttpClient, http_server, native_url_of, needs_http, url_of

import headrace
from headrace.server import EmbeddedServer

pytestmark = needs_http

INSTANCE = "/v1/services/billing/instances/b1"
LEVELS = "/v1/configuration/log-levels"


@pytest.fixture
def server() -> Iterator[EmbeddedServer]:
    with http_server() as served:
        yield served


@pytest.fixture
def client(server: EmbeddedServer) -> Iterator[HttpClient]:
    client = HttpClient(url_of(server))
    yield client
    client.close()


@pytest.fixture
def bus(server: EmbeddedServer) -> Iterator[headrace.Bus]:
    with headrace.connect(native_url_of(server)) as bus:
        yield bus


def values(client: HttpClient, topic: str) -> list[Any]:
    return [one["value"] for one in client.get(f"/v1/topics/{topic}/partitions/0/messages").json["messages"]]


def eventually(found: Any, expected: Any) -> None:
    """Wait until a function returns what is expected."""
    deadline = time.monotonic() + 20
    while (last := found()) != expected:
        assert time.monotonic() < deadline, last
        time.sleep(0.01)


@contextmanager
def serving(bus: headrace.Bus, subject: str, handler: Callable[[Any], Any]) -> Iterator[None]:
    """Answer requests to a subject."""
    app = headrace.App(bus)
    app.serves(subject)(handler)
    thread = threading.Thread(target=app.run)
    thread.start()
    try:
        eventually(lambda: bus.subjects.info().responders, 1)
        yield
    finally:
        app.stop()
        thread.join(20)


# Routes.


def test_a_route_is_made_explained_replaced_and_removed(client: HttpClient) -> None:
    for topic in ("orders", "eu", "rest"):
        assert client.post("/v1/topics", {"topic": topic}).status == 201
    made = client.post(
        "/v1/routes", {"name": "eu", "source": "orders", "targets": ["eu"], "content": {"partial": {"region": "eu"}}}
    )
    assert (made.status, made.json["definition"]["content"]) == (201, {"partial": {"region": "eu"}})
    assert client.post("/v1/routes", {"name": "eu", "targets": ["eu"], "all": True}).code == "route_exists"
    explained = client.post("/v1/route-explanations", {"source": "orders", "value": {"region": "eu"}}).json
    assert (explained["targets"], explained["routes"][0]["is_taken"]) == (["eu"], True)
    client.publish("orders", {"region": "eu"}, {"region": "us"})
    eventually(lambda: values(client, "eu"), [{"region": "eu"}])
    headers = {"region": "us", "any": None, "bytes": {"base64": "/w=="}}
    replaced = client.ask(
        "PUT", "/v1/routes/eu", {"source": "orders", "targets": ["rest"], "headers": headers, "headers_match": "any"}
    )
    assert (replaced.status, replaced.json["definition"]["headers"]) == (200, headers)
    assert client.get("/v1/routes/eu").json["definition"]["targets"] == ["rest"]
    assert client.ask("DELETE", "/v1/routes/eu").status == 204
    assert client.get("/v1/routes/eu").code == "route_not_found"
    assert client.ask("DELETE", "/v1/routes/eu").code == "route_not_found"


def test_routes_are_listed_in_pages_and_by_topic(client: HttpClient) -> None:
    for name in ("a", "b", "c"):
        assert client.post("/v1/routes", {"name": name, "targets": [f"to-{name}"], "key": name}).status == 201
    first = client.get("/v1/routes?limit=2").json
    assert [one["definition"]["name"] for one in first["routes"]] == ["a", "b"]
    second = client.get(f"/v1/routes?limit=2&after={first['next']}").json
    assert ([one["definition"]["name"] for one in second["routes"]], second["next"]) == (["c"], "")
    assert [one["definition"]["name"] for one in client.get("/v1/routes?topic=to-b").json["routes"]] == ["b"]


@pytest.mark.parametrize(
    ("query", "position"),
    [
        ({"regex": "a(b"}, 0),
        ({"regex": "ab[z-a]"}, 3),
        ({"regex": "a**"}, 1),
        ({"regex": "(a+)+\\1"}, 5),
        ({"regex": "((a{0,100}){0,100}){0,100}"}, None),
        ({"regex": "x" * 2000}, None),
        ({"jsonpath": "$.a["}, 4),
        ({"jsonpath": "$[?@.a =="}, 9),
        ({"jsonpath": "$" + "[?@" * 200}, None),
        ({"jsonpath": "no path"}, 0),
        ({"jsonpath": "$.a", "regex": "a"}, None),
        ({"partial": {"a": 1e400}}, None),
        ({}, None),
    ],
)
def test_a_bad_content_query_is_refused_with_its_position(client: HttpClient, query: Any, position: int | None) -> None:
    body = json.dumps({"targets": ["eu"], "source": "orders", "content": query}).replace("Infinity", "1e400").encode()
    client.post("/v1/topics", {"topic": "orders"})
    refused = client.ask("PUT", "/v1/routes/eu", body, {"Content-Type": "application/json"})
    assert refused.status in (400, 422), refused
    view = {"topic": "view", "settings": {"view_of": "orders", "view_query": query}}
    refused_view = client.ask("POST", "/v1/topics", json.dumps(view).replace("Infinity", "1e400").encode(), {
        "Content-Type": "application/json"
    })  # fmt: skip
    assert refused_view.status in (400, 422), refused_view
    if position is not None:
        for one in (refused, refused_view):
            assert (one.status, one.code) == (422, "invalid_content_query")
            assert one.json["details"]["position"] == position, one.json
    assert client.get("/v1/routes").json["routes"] == []


# Requests and replies.


def test_a_request_is_answered_with_the_reply_and_its_content_type(client: HttpClient, bus: headrace.Bus) -> None:
    def double(request: Any) -> Any:
        return json.dumps({"twice": json.loads(request.value)["n"] * 2}).encode()

    with serving(bus, "math.double", double):
        reply = client.ask("POST", "/v1/requests/math.double", {"n": 21})
        assert (reply.status, reply.json) == (200, {"twice": 42})
        assert reply.headers["content-type"] == "application/octet-stream"
        waited = client.post("/v1/requests/math.double", {"n": 1}, Prefer="wait=5")
        assert (waited.json, waited.headers["preference-applied"]) == ({"twice": 2}, "wait=5")
        assert "sandbox" in waited.headers["content-security-policy"]
        assert client.post("/v1/requests/math.double?timeout=1", {"n": 1}, Prefer="wait=5").code == "invalid_field"
    nobody = client.post("/v1/requests/math.double", {"n": 1})
    assert (nobody.status, nobody.code) == (404, "no_responders")
    assert client.post("/v1/requests/%24events.a", {"n": 1}).status == 422
    assert client.post("/v1/requests/a%20b", {"n": 1}).status == 422


def test_a_request_that_is_not_answered_in_time_gets_504(client: HttpClient, bus: headrace.Bus) -> None:
    done = threading.Event()

    def slow(_: Any) -> bytes:
        done.wait(20)
        return b""

    with serving(bus, "slow", slow):
        late = client.post("/v1/requests/slow?timeout=0.05")
        assert (late.status, late.code) == (504, "timeout")
        done.set()


def test_an_error_of_the_responder_is_told(client: HttpClient, bus: headrace.Bus) -> None:
    def refuse(_: Any) -> bytes:
        raise ValueError("no credit")

    with serving(bus, "pay", refuse):
        failed = client.post("/v1/requests/pay", {"n": 1})
    assert (failed.status, failed.code) == (502, "service_failed")
    assert "no credit" in failed.json["detail"]


def test_headers_of_requests_pass_but_credentials_do_not(client: HttpClient, bus: headrace.Bus) -> None:
    seen: dict[str, Any] = {}

    def look(request: Any) -> bytes:
        seen.update(request.headers)
        return b"<b>"

    given = {
        "Content-Type": "text/plain",
        "Cookie": "secret=1",
        "X-Token": "secret",
        "Traceparent": "00-1-2-01",
        "Headrace-Header-Lang": "gr%C3%BC%20n",
    }
    with serving(bus, "look", look):
        assert client.ask("POST", "/v1/requests/look", b"hello", given).body == b"<b>"
    assert seen == {"content-type": b"text/plain", "traceparent": b"00-1-2-01", "lang": "grü n".encode()}


# Subjects.


def test_what_is_published_to_a_subject_reaches_those_who_listen(
    client: HttpClient, bus: headrace.Bus, server: EmbeddedServer
) -> None:
    assert client.post("/v1/subjects/news.eu/messages", {"value": 1}).json == {}
    reader = EventReader(url_of(server), f"/v1/subjects/{quote('news.#')}/messages")
    eventually(lambda: client.get("/v1/subjects").json.get("subscriptions"), 1)
    sent = client.post("/v1/subjects/news.eu/messages", [{"value": {"a": 1}, "key": "k"}, {"value_base64": "/w=="}])
    assert sent.json == {"receivers": 1}
    bus.subjects.publish("news.us", b"plain")
    first, second, third = (event.data for event in reader.take(3))
    assert (first["subject"], first["key"], first["value"]) == ("news.eu", "k", {"a": 1})
    assert second["value_base64"] == "/w=="
    assert (third["subject"], third["value"]) == ("news.us", "plain")
    assert "dropped" not in first
    reader.close()
    eventually(lambda: client.get("/v1/subjects").json.get("subscriptions", 0), 0)
    assert client.get("/v1/subjects").json["delivered"] == 3


def test_members_of_a_queue_take_turns(client: HttpClient, server: EmbeddedServer) -> None:
    readers = [EventReader(url_of(server), "/v1/subjects/work/messages?queue=q") for _ in range(2)]
    eventually(lambda: client.get("/v1/subjects").json.get("subscriptions"), 2)
    for number in range(4):
        assert client.post("/v1/subjects/work/messages", {"value": number}).json == {"receivers": 1}
    assert sorted(event.data["value"] for reader in readers for event in reader.take(2)) == [0, 1, 2, 3]
    for reader in readers:
        reader.close()


def test_a_client_that_does_not_read_loses_messages_and_is_told_how_many(client: HttpClient) -> None:
    head = b"GET /v1/subjects/big/messages HTTP/1.1\r\nHost: localhost\r\nAccept: application/x-ndjson\r\n\r\n"
    with socket.create_connection((client.host, client.port), timeout=20) as slow:
        slow.sendall(head)
        eventually(lambda: client.get("/v1/subjects").json.get("subscriptions"), 1)
        sent = 0
        while not client.get("/v1/subjects").json.get("dropped"):
            client.post("/v1/subjects/big/messages", {"value": "x" * 500_000})
            sent += 1
            assert sent < 200, "the client was never too slow"
        received = b""
        while b'"dropped":' not in received:
            assert client.post("/v1/subjects/big/messages", {"value": "small"}).status == 200
            received = received[-100:] + slow.recv(1 << 20)


def test_a_live_stream_is_of_a_tenant_and_of_a_registered_service(client: HttpClient) -> None:
    acme = {"Headrace-Tenant": "acme"}
    connection = http.client.HTTPConnection(client.host, client.port, timeout=20)
    ask = client.ask
    assert ask("PATCH", "/v1/configuration", {"require_registration": True}, acme).status == 200
    definition = json.dumps({"consumes": ["orders"]})
    connection.request("PUT", INSTANCE, definition, {**acme, "Content-Type": "application/json"})
    assert connection.getresponse().read() == b'{"ttl_ms":30000}'
    connection.request("GET", "/v1/subjects/news/messages", headers=acme)
    stream = connection.getresponse()
    assert stream.status == 200
    assert ask("PUT", INSTANCE, {"consumes": ["orders"]}, acme).status == 200
    assert ask("POST", "/v1/subjects/news/messages", {"value": 1}, acme).json == {"receivers": 1}
    assert ask("POST", "/v1/subjects/news/messages", {"value": 2}).json == {}
    assert stream.readline() == b"\n"
    assert json.loads(stream.readline())["subject"] == "news"
    assert ask("DELETE", INSTANCE, None, acme).status == 204
    assert json.loads(stream.readline())["error"]["code"] == "not_registered"
    connection.close()


def test_bad_subjects_and_patterns_are_refused(client: HttpClient) -> None:
    for path in ("a..b", "a%20b", "%24events.x", "a,b", quote("a.*"), "x" * 300):
        assert client.post(f"/v1/subjects/{path}/messages", {"value": 1}).status == 422
    for path in ("a..b", quote("a.>.b"), "x" * 300):
        assert client.get(f"/v1/subjects/{path}/messages").status == 422
    assert client.post("/v1/subjects/a/messages", {"value": 1, "partition": 0}).code == "invalid_field"
    assert client.post("/v1/subjects/a/messages", []).code == "invalid_field"
    assert client.ask("POST", "/v1/subjects/a/messages", b"x", {"Content-Type": "text/plain"}).status == 415
    assert client.ask("GET", "/v1/subjects/a/messages", None, {"Accept": "text/html"}).status == 406


def test_events_about_the_bus_can_be_received_live(client: HttpClient, server: EmbeddedServer) -> None:
    reader = EventReader(url_of(server), f"/v1/subjects/{quote('$events.>')}/messages")
    eventually(lambda: client.get("/v1/subjects").json.get("subscriptions"), 1)
    client.post("/v1/topics", {"topic": "orders"})
    (event,) = reader.take(1)
    assert (event.data["subject"], json.loads(event.data["value"])["name"]) == ("$events.topic.created", "orders")
    reader.close()
    assert client.post("/v1/events").status == 204
    assert json.loads(values(client, "headrace.events")[0])["kind"] == "topic"


# Services.


def test_a_service_is_registered_kept_alive_and_forgotten(client: HttpClient, server: EmbeddedServer) -> None:
    definition = {"version": "1.4", "consumes": ["orders"], "serves": ["pay.*"], "ttl_ms": 60_000}
    assert client.ask("PUT", INSTANCE, definition).json == {"ttl_ms": 60_000}
    first = client.get(INSTANCE).json
    other = HttpClient(url_of(server))
    assert other.ask("PUT", INSTANCE, {**definition, "version": "1.5"}).status == 200  # on another connection
    again = other.get(INSTANCE).json
    assert (again["version"], again["registered_us"]) == ("1.5", first["registered_us"])
    assert again["seen_us"] >= first["seen_us"]
    listed = client.get("/v1/services?consumes=orders").json["services"]
    assert [one["name"] for one in listed] == ["billing"]
    assert client.get("/v1/services?serves=pay.card").json["services"][0]["name"] == "billing"
    assert client.get("/v1/services?produces=orders").json["services"] == []
    assert client.get("/v1/services/billing").json["instances_total"] == 1
    third = HttpClient(url_of(server))
    assert third.ask("DELETE", INSTANCE).status == 204
    assert third.get("/v1/services/billing").code == "service_not_found"
    assert third.ask("DELETE", INSTANCE).code == "service_not_found"
    assert client.ask("PUT", INSTANCE, {"ttl_ms": 1}).code == "invalid_field"
    other.close()
    third.close()


def test_errors_are_reported_and_listed(client: HttpClient) -> None:
    client.ask("PUT", INSTANCE, {})
    errors = [{"code": "card_refused", "message": "no credit", "topic": "orders"}]
    assert client.post("/v1/errors", {"service": "billing", "instance": "b1", "errors": errors}).status == 204
    (found,) = client.get("/v1/errors?service=billing").json["services"]
    assert (found["total"], found["codes"], found["last"][0]["message"]) == (1, {"card_refused": 1}, "no credit")
    assert client.get("/v1/errors?last_max=0").json["services"][0].get("last", []) == []
    assert client.get("/v1/errors?last_max=-1").status == 422


# Configuration.


def test_the_configuration_is_changed_while_the_broker_runs(client: HttpClient) -> None:
    before = client.get("/v1/configuration").json
    assert (before["log_levels"], before["require_registration"]) == ([], False)
    assert before["limits"]["topics_max"] > 0
    rule = {"scope": "topic", "pattern": "orders*", "level": "debug"}
    assert client.ask("PUT", LEVELS, rule).json == {"rules": [rule]}
    assert client.ask("PUT", LEVELS, {**rule, "level": "loud"}).code == "invalid_field"
    assert client.get(LEVELS).json == {"rules": [rule]}
    assert client.get("/v1/configuration").json["log_levels"] == [rule]
    assert client.ask("DELETE", f"{LEVELS}?scope=topic&pattern={quote('orders*')}").json == {"rules": []}
    altered = client.ask("PATCH", "/v1/configuration", {"require_registration": True})
    assert altered.json == {"require_registration": True}
    refused = client.post("/v1/topics/orders/messages", {"value": 1})
    assert (refused.status, refused.code) == (403, "not_registered")
    assert client.ask("PUT", INSTANCE, {"produces": ["orders"]}).status == 200
    client.publish("orders", 1)  # the connection is a registered service's now
    assert client.ask("PATCH", "/v1/configuration", {"require_registration": False}).status == 200


# Keys and jobs.


def test_the_history_of_a_key_is_read_in_pages(client: HttpClient) -> None:
    client.post("/v1/topics", {"topic": "orders", "settings": {"key_versions": True, "partitions": 3}})
    for number in range(5):
        client.post("/v1/topics/orders/messages", {"key": "ann/1", "value": number})
    client.post("/v1/topics/orders/messages", {"key": "bob", "value": "other"})
    path = f"/v1/topics/orders/keys/{quote('ann/1', safe='')}/history"
    first = client.get(f"{path}?limit=3").json
    assert [(one["version"], one["value"]) for one in first["messages"]] == [(0, 0), (1, 1), (2, 2)]
    assert (first["next_version"], first["following"]) == (5, 3)
    rest = client.get(f"{path}?start_version={first['following']}").json
    assert ([one["value"] for one in rest["messages"]], rest["following"]) == ([3, 4], None)
    assert client.get("/v1/topics/orders/keys/nobody/history").json["messages"] == []
    client.post("/v1/topics", {"topic": "plain"})
    assert client.get("/v1/topics/plain/keys/a/history").code == "invalid_argument"


def test_a_job_is_published_finished_and_its_result_read(client: HttpClient, bus: headrace.Bus) -> None:
    work = "/v1/topics/images/subscriptions/default"
    published = client.post("/v1/topics/images/jobs", {"value": {"resize": "cat.jpg"}})
    job = published.json["job"]
    assert (published.status, published.headers["location"]) == (201, f"/v1/results/{job}")
    assert client.get(f"/v1/results/{job}").json == {"job": job, "status": "pending"}
    (leased,) = client.post(f"{work}/leases").json["messages"]
    assert dict(leased["headers"])["headrace-reply"] == job
    place = {name: leased[name] for name in ("partition", "offset", "lease")}
    finish = {"message": place, "job": job, "value": {"width": 3}}
    assert client.post(f"{work}/results", {**finish, "value_base64": ""}).code == "invalid_field"
    assert client.post(f"{work}/results", finish).json == {}
    assert client.get(published.headers["location"]).json == {"job": job, "status": "done", "value": {"width": 3}}
    assert client.post(f"{work}/results", finish).json["refused"]
    assert bus.job_result(job).result(timeout=10) == {"width": 3}
    assert client.get("/v1/results/nonsense").code == "invalid_argument"


def test_a_result_is_waited_for(client: HttpClient, bus: headrace.Bus, server: EmbeddedServer) -> None:
    jobs = [client.post("/v1/topics/images/jobs", {"value": number}).json["job"] for number in range(2)]
    found: list[Any] = []

    def wait() -> None:
        other = HttpClient(url_of(server))
        found.extend(other.get(f"/v1/results/{job}?wait=20").json for job in jobs)
        other.close()

    waiting = threading.Thread(target=wait)
    waiting.start()
    app = headrace.App(bus)

    @app.on("images")
    def resize(job: Any) -> str:
        if job.value == b"1":
            raise headrace.Reject("no image")
        return "done"

    working = threading.Thread(target=app.run)
    working.start()
    waiting.join(20)
    app.stop()
    working.join(20)
    assert (found[0]["status"], found[0]["value"]) == ("done", "done")
    assert (found[1]["status"], found[1]["error"]["code"]) == ("failed", "job_rejected")
