"""CloudEvents over HTTP against a real server: the SDKs of others write and read events in every mode."""

import json
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.http_client import EventReader, HttpClient, Reply, http_server, needs_http, url_of
from tests.known import quick_place
from tests.npm_packages import needs_npm, run_node

from headrace.server import EmbeddedServer

sdk = pytest.importorskip("cloudevents.core.bindings.http", reason="the package cloudevents is not installed")
from cloudevents.core.formats.json import JSONFormat  # noqa: E402 only if it is there
from cloudevents.core.v1.event import CloudEvent  # noqa: E402

pytestmark = needs_http

STRUCTURED = "application/cloudevents+json"
BATCH = "application/cloudevents-batch+json"
NPM = "cloudevents@10.0.0"
REQUIRED = {"ce-specversion": "1.0", "ce-id": "1", "ce-source": "/till", "ce-type": "sold"}
ATTRIBUTES = {
    "id": "7 € 50%",
    "source": "/till/1",
    "type": "org.example.sold",
    "subject": 'a "quoted" subject',
    "time": datetime(2026, 11, 18, 2, 0, 0, 123456, UTC),
    "partitionkey": "ann",
    "traceid": "ä",
}


@pytest.fixture(scope="module")
def server() -> Iterator[EmbeddedServer]:
    origins = {"http_origins": ["https://app.example.org"], "http_webhook_origins": ["events.example.org"]}
    with quick_place() as place, http_server(place / "data", **origins) as served:
        yield served


@pytest.fixture
def client(server: EmbeddedServer) -> Iterator[HttpClient]:
    client = HttpClient(url_of(server))
    yield client
    client.close()


@pytest.fixture
def topic(request: pytest.FixtureRequest) -> str:
    """A topic of the test's own."""
    return "t" + format(abs(hash(request.node.nodeid)), "x")


def publish(client: HttpClient, topic: str, headers: Any, body: Any = b"", query: str = "") -> Reply:
    return client.ask("POST", f"/v1/topics/{topic}/messages{query}", bytes(body), dict(headers))


def read(client: HttpClient, topic: str, offset: int, *, binary: bool = False) -> Any:
    """The event with an offset, as the SDK reads it."""
    path = f"/v1/topics/{topic}/partitions/0/messages/{offset}"
    reply = client.get(f"{path}?format=cloudevents-binary") if binary else client.get(path, Accept=STRUCTURED)
    assert reply.status == 200, reply
    message = sdk.HTTPMessage(headers=reply.headers, body=reply.body)
    return sdk.from_binary_event(message) if binary else sdk.from_structured_event(message)


@pytest.mark.parametrize("write", [sdk.to_binary_event, sdk.to_structured_event])
@pytest.mark.parametrize("binary", [False, True])
@pytest.mark.parametrize(
    ("content_type", "data"),
    [
        ("application/json", {"ü": [1, None]}),
        ("text/plain", "zwei\nZeilen"),
        ("image/png", b"\x89PNG\xff"),
        (None, None),
    ],
)
def test_the_python_sdk_reads_what_it_wrote(
    client: HttpClient, topic: str, write: Any, binary: bool, content_type: str | None, data: Any
) -> None:
    kind = {"datacontenttype": content_type} if content_type else {}
    request = write(CloudEvent(attributes={**ATTRIBUTES, **kind, "specversion": "1.0"}, data=data))
    receipt = publish(client, topic, request.headers, request.body)
    assert receipt.status == 201
    assert receipt.json == {"partition": 0, "offset": 0, "count": 1, "durability": "synced"}
    event = read(client, topic, 0, binary=binary)
    found = {name: event.get_attributes()[name] for name in ATTRIBUTES}
    assert found == ATTRIBUTES
    assert event.get_data() == data or (data is None and event.get_data() in (b"", ""))
    (stored,) = client.get(f"/v1/topics/{topic}/partitions/0/messages").json["messages"]
    assert stored["key"] == "ann"
    assert stored["timestamp"] == 1_794_967_200_123_456


def test_the_python_sdk_reads_batches_and_streams(client: HttpClient, topic: str, server: EmbeddedServer) -> None:
    events = [
        CloudEvent(attributes={**ATTRIBUTES, "specversion": "1.0", "id": str(n)}, data={"n": n}) for n in range(5)
    ]
    written = b"[%s]" % b",".join(sdk.to_structured_event(event).body for event in events)
    receipts = publish(client, topic, {"Content-Type": BATCH}, written)
    assert (receipts.status, receipts.json["count"]) == (201, 5)
    page = client.get(f"/v1/topics/{topic}/partitions/0/messages?offset=1&limit=2", Accept=BATCH)
    assert page.headers["content-type"] == f"{BATCH}; charset=utf-8"
    assert page.headers["link"] == '<?offset=3&limit=2>; rel="next"'
    assert ids(page.body) == ["1", "2"]
    whole = client.get(f"/v1/topics/{topic}/messages?limit=3", Accept=BATCH)
    assert ids(whole.body) == ["0", "1", "2"]
    following = whole.headers["link"].partition("<")[2].partition(">")[0]
    assert following == "?position=0:3&limit=3"
    rest = client.get(f"/v1/topics/{topic}/messages{following}", Accept=BATCH)
    assert ids(rest.body) == ["3", "4"]
    again = client.get(f"/v1/topics/{topic}/messages?position=0:5", Accept=BATCH)
    assert again.json == []
    reader = EventReader(url_of(server), f"/v1/topics/{topic}/messages?start=earliest&format=cloudevents")
    streamed = reader.take(5)
    reader.close()
    assert [JSONFormat().read(None, json.dumps(one.data)).get_id() for one in streamed] == ["0", "1", "2", "3", "4"]
    assert streamed[2].id == "0:3"
    lines = EventReader(
        url_of(server), f"/v1/topics/{topic}/messages?start=earliest&format=cloudevents", Accept="application/x-ndjson"
    )
    event = JSONFormat().read(None, lines.response.readline())
    lines.close()
    assert (event.get_id(), event.get_extension("headraceposition")) == ("0", "0:1")


def ids(body: bytes) -> list[str]:
    return [JSONFormat().read(None, json.dumps(one)).get_id() for one in json.loads(body)]


def test_a_batch_has_events_of_all_partitions(client: HttpClient) -> None:
    client.post("/v1/topics", {"topic": "wide", "settings": {"partitions": 3}})
    for n in range(9):
        publish(client, "wide", {**REQUIRED, "ce-id": str(n)}, b"x", f"?partition={n % 3}")
    seen: list[str] = []
    query = "?limit=4"
    for _ in range(4):
        page = client.get(f"/v1/topics/wide/messages{query}", Accept=BATCH)
        assert len(page.json) <= 4
        seen += ids(page.body)
        query = page.headers["link"].partition("<")[2].partition(">")[0]
    assert sorted(seen) == [str(n) for n in range(9)]


WRITE = """
const { CloudEvent, HTTP } = require("cloudevents");
const binary = HTTP.binary(new CloudEvent(given));
const structured = HTTP.structured(new CloudEvent(given));
const batch = "[" + structured.body + "," + structured.body + "]";
answer([binary, structured, {headers: {"content-type": "application/cloudevents-batch+json"}, body: batch}]);
"""
READ = """
const { HTTP } = require("cloudevents");
answer(given.map(message => HTTP.toEvent(message)));
"""


@needs_npm
def test_the_javascript_sdk_reads_what_it_wrote(client: HttpClient) -> None:
    event = {
        "specversion": "1.0", "id": "9", "source": "/till", "type": "sold", "subject": "s", "n": 3, "ok": True,
        "time": "2026-11-18T02:00:00.000Z", "datacontenttype": "application/json", "data": {"a": [1, "ü"]},
    }  # fmt: skip
    for message in run_node(NPM, WRITE, event):
        receipt = publish(client, "javascript", message["headers"], message["body"].encode())
        assert receipt.status == 201, receipt
    answers = []
    path = "/v1/topics/javascript/partitions/0/messages"
    for offset in range(4):
        answers.append(client.get(f"{path}/{offset}", Accept=STRUCTURED))
        answers.append(client.get(f"{path}/{offset}?format=cloudevents-binary"))
    answers.append(client.get(path, Accept=BATCH))
    given = [{"headers": one.headers, "body": one.body.decode()} for one in answers]
    found = run_node(NPM, READ, given)
    events = [*found[:-1], *found[-1]]
    assert len(events) == 12
    for one in events:
        texts = {**one, "n": str(one["n"]), "ok": str(one["ok"]).lower()}
        assert texts == {**event, "n": "3", "ok": "true"}
    assert [type(one["n"]) for one in found[-1]] == [str, int, int, int]  # in binary mode every attribute is a text


def test_publishing_events_has_everything_that_other_publishes_have(client: HttpClient, topic: str) -> None:
    once = {**REQUIRED, "Idempotency-Key": "k1", "Content-Type": "text/plain"}
    first = publish(client, topic, once, b"a")
    again = publish(client, topic, once, b"a")
    assert first.json == again.json
    assert again.headers["idempotency-replayed"] == "true"
    reused = publish(client, topic, {**once, "ce-id": "2"}, b"a")
    assert (reused.status, reused.code) == (422, "idempotency_key_reused")
    stale = publish(client, topic, {**REQUIRED, "If-Match": '"0"'}, b"a")
    assert (stale.status, stale.code) == (412, "unexpected_offset")
    assert publish(client, topic, {**REQUIRED, "If-Match": '"1"'}, b"a", "?durability=synced").json["offset"] == 1
    empty = publish(client, topic, {"Content-Type": BATCH}, b"[]")
    assert (empty.status, empty.json) == (201, {"count": 0, "receipts": []})


def test_ordinary_messages_are_events_with_generated_attributes(client: HttpClient, topic: str) -> None:
    client.post(f"/v1/topics/{topic}/messages", {"value": {"id": 1}, "key": "ann"})
    event = read(client, topic, 0)
    assert event.get_id() == f"{topic}/0/0"
    assert event.get_source().endswith(f"/topics/{topic}")
    assert event.get_type() == "headrace.message.json"
    assert event.get_data() == {"id": 1}
    assert event.get_extension("partitionkey") == "ann"


@pytest.mark.parametrize(
    ("headers", "body", "status", "code", "told"),
    [
        ({"ce-specversion": "1.0"}, b"", 422, "invalid_event", "id"),
        ({**REQUIRED, "ce-specversion": "0.3"}, b"", 422, "invalid_event", "specversion"),
        ({**REQUIRED, "ce-time": "now"}, b"", 422, "invalid_event", "time"),
        ({**REQUIRED, "ce-upper_case": "x"}, b"", 422, "invalid_event", "a to z"),
        ({**REQUIRED, "ce-subject": "%FF"}, b"", 422, "invalid_event", "ce-subject"),
        ({"Content-Type": STRUCTURED}, b"{", 422, "invalid_event", "JSON"),
        ({"Content-Type": STRUCTURED}, b"[]", 422, "invalid_event", "JSON"),
        ({"Content-Type": BATCH}, b"{}", 422, "invalid_event", "array"),
        ({"Content-Type": BATCH}, b"[1]", 422, "invalid_event", "event 0 of the batch"),
        ({"Content-Type": "application/cloudevents+avro"}, b"x", 415, "unsupported_media_type", STRUCTURED),
        ({"Content-Type": BATCH}, b"[" + b" " * (1 << 20) + b"]", 413, "body_too_large", "send several"),
        ({"Content-Type": "text/plain"}, b"x", 415, "unsupported_media_type", "application/json"),
        ({}, b"x", 415, "unsupported_media_type", "application/json"),
    ],
)
def test_bad_events_are_refused_and_nothing_is_stored(
    client: HttpClient, headers: Any, body: bytes, status: int, code: str, told: str
) -> None:
    refused = publish(client, "bad", headers, body)
    assert (refused.status, refused.code) == (status, code)
    assert told in refused.json["detail"]
    assert client.get("/v1/topics/bad").status == 404


@pytest.mark.parametrize(
    "content_type",
    ["", "text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=a",
     "text/plain; application/cloudevents+json", "text/plain, application/cloudevents+json"],
)  # fmt: skip
def test_no_request_that_a_browser_sends_without_asking_can_publish(client: HttpClient, content_type: str) -> None:
    event = b'{"specversion": "1.0", "id": "1", "source": "/page", "type": "t", "data": 1}'
    for body in (event, b"[%s]" % event):
        refused = publish(client, "bad", {"Content-Type": content_type}, body)
        assert (refused.status, refused.code) == (415, "unsupported_media_type")


def test_a_topic_that_transforms_events_takes_those_of_every_mode(client: HttpClient) -> None:
    entry = {"name": "transform", "from": "cloudevents-structured", "to": "cloudevents-binary"}
    client.post("/v1/topics", {"topic": "binary", "settings": {"middleware": [entry]}})
    event = b'{"specversion": "1.0", "id": "2", "source": "/till", "type": "t", "data": 1}'
    assert publish(client, "binary", REQUIRED, b"x").status == 201
    assert publish(client, "binary", {"Content-Type": STRUCTURED}, event).status == 201
    headers = [["content-type", STRUCTURED]]
    stored = client.post("/v1/topics/binary/messages", {"value": json.loads(event), "headers": headers})
    assert stored.status == 201
    assert [read(client, "binary", offset).get_id() for offset in range(3)] == ["1", "2", "2"]


def test_an_attribute_that_stands_twice_is_refused(client: HttpClient) -> None:
    head = b"POST /v1/topics/bad/messages HTTP/1.1\r\nHost: localhost\r\nContent-Length: 0\r\nConnection: close\r\n"
    events = b"ce-specversion: 1.0\r\nce-id: 1\r\nce-id: 2\r\nce-source: a\r\nce-type: t\r\n\r\n"
    assert client.raw(head + events).startswith(b"HTTP/1.1 400 ")


def test_one_message_by_its_offset(client: HttpClient, topic: str) -> None:
    client.publish(topic, 1)
    path = f"/v1/topics/{topic}/partitions/0/messages"
    assert client.get(f"{path}/0").json["value"] == 1
    assert client.get(f"{path}/1").code == "offset_out_of_range"
    assert client.get(f"{path}/x").code == "path_not_found"
    assert client.get(f"{path}/0?format=xml").code == "invalid_field"
    html = publish(client, topic, {**REQUIRED, "Content-Type": "text/html"}, b"<script>alert(1)</script>")
    shown = client.get(f"{path}/{html.json['offset']}?format=cloudevents-binary")
    assert shown.headers["content-type"] == "text/html"
    assert shown.headers["content-security-policy"] == "default-src 'none'; sandbox"
    assert shown.headers["x-content-type-options"] == "nosniff"


def test_a_sender_asks_for_permission(client: HttpClient) -> None:
    path = "/v1/topics/orders/messages"
    asked = {"WebHook-Request-Origin": "events.example.org", "WebHook-Request-Rate": "120"}
    given = client.ask("OPTIONS", path, None, asked)
    assert given.status == 204
    assert given.headers["webhook-allowed-origin"] == "events.example.org"
    assert given.headers["webhook-allowed-rate"] == "*"
    assert "POST" in given.headers["allow"]
    assert not [name for name in given.headers if name.startswith("access-control-")]
    for other, headers in (
        (path, {"WebHook-Request-Origin": "evil.example.org"}),
        (path, {"WebHook-Request-Origin": "https://app.example.org"}),
        ("/v1/topics", asked),
        (path, {**asked, "Origin": "https://app.example.org"}),
    ):
        refused = client.ask("OPTIONS", other, None, headers)
        assert refused.status == 204
        assert "webhook-allowed-origin" not in refused.headers
    page = client.ask("OPTIONS", path, None, {**asked, "Origin": "https://events.example.org"})
    assert (page.status, page.code) == (403, "origin_refused")


def test_a_page_that_is_listed_may_send_attributes(client: HttpClient) -> None:
    path, page = "/v1/topics/orders/messages", {"Origin": "https://app.example.org"}
    asked = {**page, "Access-Control-Request-Headers": "ce-id, ce-source,x-other,ce-a b"}
    allowed = client.ask("OPTIONS", path, None, asked).headers["access-control-allow-headers"]
    assert allowed.endswith(", ce-id, ce-source, ce-ab")
    assert "x-other" not in allowed


TEXT = st.text(st.characters(codec="utf-8", exclude_categories=["Cc", "Cn"]), min_size=1, max_size=20)


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.fixed_dictionaries({"id": TEXT, "source": TEXT, "type": TEXT, "myext": TEXT}), st.binary(max_size=50))
def test_any_event_comes_back(client: HttpClient, attributes: dict[str, str], data: bytes) -> None:
    attributes = {**attributes, "specversion": "1.0", "datacontenttype": "application/octet-stream"}
    request = sdk.to_binary_event(CloudEvent(attributes=attributes, data=data))
    receipt = publish(client, "any", request.headers, request.body)
    assert receipt.status == 201, receipt
    for binary in (False, True):
        event = read(client, "any", receipt.json["offset"], binary=binary)
        assert {name: event.get_attributes()[name] for name in attributes} == attributes
        found = event.get_data() or b""
        assert (found.encode() if isinstance(found, str) else found) == data
