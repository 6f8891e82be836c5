"""The AsyncAPI document of a real server: valid for the parser of others, with the schemas of topics and services."""

import json
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import pytest
from tests.http_client import HttpClient, http_server, needs_http, url_of
from tests.npm_packages import needs_npm, run_node

from headrace.server import EmbeddedServer

needs_schemas = pytest.mark.skipif(find_spec("jsonschema_rs") is None, reason="jsonschema-rs is not installed")
pytestmark = [needs_http, needs_schemas]

PARSER = "@asyncapi/parser@3.6.3"
ORDER = {
    "type": "object",
    "properties": {"id": {"type": "integer"}, "lines": {"type": "array", "items": {"$ref": "#/$defs/line"}}},
    "required": ["id"],
    "$defs": {"line": {"type": "object", "properties": {"of": {"$ref": "#"}, "size": {"$ref": "#/$defs/size"}},
                       "examples": [{"size": 1}]}, "size": {"type": "integer", "minimum": 0}},
}  # fmt: skip
PRICE = {"type": "object", "properties": {"sku": {"type": "string"}}}
ODD_SCHEMAS: dict[str, Any] = {
    "external": {"$ref": "https://example.org/schema.json"},
    "anchor": {"$defs": {"a": {"$anchor": "here"}}, "$ref": "#here"},
    "missing": {"$ref": "#/nowhere"},
    "wrong": {"type": "no such type"},
    "data": {"const": {"$ref": "#/definitely/data"}},
    "identified": {"$id": "https://example.org/a", "properties": {"a": {"$id": "b", "type": "string"}}},
}
PARSE = """
const { Parser } = require("@asyncapi/parser");
new Parser().parse(given).then(({ document, diagnostics }) => answer({
  valid: document !== undefined,
  errors: diagnostics.filter(one => one.severity <= 1).map(one => one.path.join("/") + ": " + one.message),
  channels: document ? document.channels().all().map(one => one.address()) : [],
  operations: document ? document.operations().all().map(one => one.id()) : [],
  payloads: document ? document.messages().all().filter(one => one.hasPayload()).map(one => one.name()) : [],
}));
"""


@pytest.fixture
def server() -> Iterator[EmbeddedServer]:
    with http_server() as served:
        yield served


@pytest.fixture
def client(server: EmbeddedServer) -> Iterator[HttpClient]:
    client = HttpClient(url_of(server))
    yield client
    client.close()


def create(client: HttpClient, topic: str, **settings: Any) -> None:
    assert client.post("/v1/topics", {"topic": topic, "settings": settings}).status == 201


def create_all(client: HttpClient) -> None:
    """Topics with and without schemas, a view, a service, and names that need care."""
    create(client, "orders", partitions=3, middleware=[{"name": "schema", "schema": ORDER}])
    create(client, "plain")
    for name in ("größe 1", "größe_1", "a{b}", 'q"<script>', "100%", "anything"):
        create(client, name)
    create(client, "open", middleware=[{"name": "schema", "schema": True}])
    create(client, "large", view_of="orders", view_query={"jsonpath": "$[?@.id > 1]"})
    fields = {
        "version": "1.4", "produces": ["orders"], "consumes": ["plain"], "serves": ["prices.get", "odd.*"],
        "schemas": {"prices.get": PRICE, "plain": PRICE, "odd.*": ODD_SCHEMAS["anchor"]}, "ttl_ms": 600_000,
    }  # fmt: skip
    assert client.ask("PUT", "/v1/services/pricing/instances/1", fields).status == 200


def document_of(client: HttpClient, query: str = "", **headers: str) -> Any:
    reply = client.get(f"/v1/asyncapi.json{query}", **headers)
    assert reply.status == 200, reply
    return reply.json


def test_a_document_tells_topics_services_and_schemas(client: HttpClient) -> None:
    create_all(client)
    document = document_of(client)
    assert document["asyncapi"] == "3.0.0"
    assert document["servers"]["http"]["host"] == f"127.0.0.1:{client.port}"
    assert document["servers"]["ws"]["pathname"] == "/v1/socket"
    assert document["servers"]["native"]["protocol"] == "headrace"
    orders = document["channels"]["topic.orders"]
    assert (orders["address"], orders["x-headrace-partitions"]) == ("orders", 3)
    place = orders["messages"]["message"]["payload"]["$ref"]
    schema = document["components"]["schemas"][place.rpartition("/")[2]]["schema"]
    assert schema["required"] == ["id"]
    assert schema["properties"]["lines"]["items"]["$ref"] == f"{place}/schema/$defs/line"
    send = document["operations"]["send.topic.orders"]
    assert send["x-headrace-http"] == {"method": "POST", "path": "/v1/topics/orders/messages"}
    assert send["tags"] == [{"name": "pricing"}]
    assert "send.topic.large" not in document["operations"]  # nobody publishes to a view
    request = document["operations"]["request.subject.prices.get"]
    assert request["reply"] == {"channel": {"$ref": "#/channels/replies"}}
    assert document["channels"]["topic.plain"]["messages"]["pricing"]["contentType"] == "application/json"
    addresses = {one["address"] for one in document["channels"].values()}
    assert {"größe 1", "größe_1", "a%7Bb%7D", "100%", 'q"<script>', "prices.get", "odd.*", None} <= addresses


@needs_npm
def test_the_parser_of_others_finds_no_error(client: HttpClient) -> None:
    create_all(client)
    for name, schema in ODD_SCHEMAS.items():
        fields = {"produces": ["anything"], "schemas": {"anything": schema}, "ttl_ms": 600_000}
        assert client.ask("PUT", f"/v1/services/{name}/instances/1", fields).status == 200
    reply = client.get("/v1/asyncapi.json")
    parsed = run_node(PARSER, PARSE, reply.body.decode())
    assert parsed["errors"] == []
    assert parsed["valid"]
    assert {"orders", "prices.get", "größe 1"} <= set(parsed["channels"])
    assert {"send.topic.orders", "receive.topic.orders", "request.subject.prices.get"} <= set(parsed["operations"])
    assert "orders" in parsed["payloads"]
    empty = run_node(PARSER, PARSE, client.get("/v1/asyncapi.json?topics=none").body.decode())
    assert (empty["valid"], empty["errors"]) == (True, [])


def test_schemas_that_cannot_be_part_of_it_are_told_as_text(client: HttpClient) -> None:
    create(client, "anything")
    for name, schema in ODD_SCHEMAS.items():
        fields = {"produces": ["anything"], "schemas": {"anything": schema}}
        assert client.ask("PUT", f"/v1/services/{name}/instances/1", fields).status == 200
    schemas = document_of(client)["components"]["schemas"]
    for name, schema in ODD_SCHEMAS.items():
        told = schemas[f"topic.anything.{name}"]["schema"]
        assert json.loads(told["x-json-schema"]) == schema


def test_a_session_sees_its_tenant(client: HttpClient) -> None:
    create(client, "orders")
    acme = {"Headrace-Tenant": "acme"}
    assert client.ask("POST", "/v1/topics", {"topic": "own"}, acme).status == 201
    assert list(document_of(client)["channels"]) == ["topic.orders"]
    assert list(document_of(client, **acme)["channels"]) == ["topic.own"]


def test_a_document_goes_on_in_the_next(client: HttpClient) -> None:
    for number in range(7):
        create(client, f"t{number}")
    seen: list[str] = []
    after = ""
    for _ in range(3):
        document = document_of(client, f"?limit=3&after={after}&topics=t*")
        seen += [one["address"] for one in document["channels"].values()]
        after = document["info"].get("x-headrace-next", "")
    assert seen == [f"t{number}" for number in range(7)]
    assert after == ""
    assert client.get("/v1/asyncapi.json?limit=10001").code == "invalid_field"
    assert client.get("/v1/asyncapi.json?page=1").code == "invalid_field"


def test_the_page_shows_it_and_loads_nothing(client: HttpClient) -> None:
    create_all(client)
    reply = client.get("/v1/asyncapi")
    assert reply.headers["content-type"] == "text/html; charset=utf-8"
    assert reply.headers["content-security-policy"] == "default-src 'none'; style-src 'unsafe-inline'"
    text = reply.body.decode()
    assert ">orders</h3>" in text
    assert "#/$defs/line" in text
    assert "&quot;required&quot;" in text
    assert "<script>" not in text
    assert "http://" not in text.replace("http://json-schema.org", "")
    assert "More topics" not in text


def test_a_page_of_many_topics_links_to_the_next(client: HttpClient) -> None:
    for number in range(201):
        create(client, f"t{number:03}")
    first = client.get("/v1/asyncapi").body.decode()
    assert first.count("<h3") == 200
    assert "/v1/asyncapi?topics=%2A&amp;after=t199" in first
    assert client.get("/v1/asyncapi?topics=%2A&after=t199").body.decode().count("<h3") == 1


def test_thousands_of_topics_are_one_document(client: HttpClient) -> None:
    for number in range(1200):
        create(client, f"t{number:04}")
    document = document_of(client)
    assert len(document["channels"]) == 1200
    assert len(document["operations"]) == 2400
    assert "x-headrace-next" not in document["info"]
