"""Webhooks over HTTP: every path, what is refused, and that secrets are told once."""

from collections.abc import Iterator

import pytest
from standardwebhooks import Webhook
from tests.http_client import HttpClient, http_server, needs_http, url_of
from tests.webhook_stage import ThreadedReceiver, needs_outgoing, threaded_receiver, until

pytestmark = [needs_http, needs_outgoing]
HOOK = "/v1/webhooks/billing"


@pytest.fixture
def client() -> Iterator[HttpClient]:
    with http_server(webhook_networks=["loopback"]) as server:
        client = HttpClient(url_of(server))
        yield client
        client.close()


@pytest.fixture
def receiver() -> Iterator[ThreadedReceiver]:
    with threaded_receiver() as served:
        yield served


def test_the_life_of_a_webhook(client: HttpClient, receiver: ThreadedReceiver) -> None:
    fields = {"topic": "orders", "url": receiver.url, "headers": {"authorization": "Bearer x"}}
    made = client.ask("PUT", HOOK, {**fields, "settings": {"deliveries_max": 3, "retry_seconds": 0.01}})
    assert made.status == 200
    (secret,) = made.json["secrets"]
    client.publish("orders", {"n": 1})
    (request,) = receiver.wait_for(1)
    assert Webhook(secret).verify(request.body, request.headers)["value"] == {"n": 1}
    info = until(lambda: (found := client.get(HOOK).json).get("delivered") and found)
    assert "secrets" not in info
    assert info["definition"]["headers"] == {"authorization": "(hidden)"}
    (entry,) = client.get(f"{HOOK}/deliveries").json["deliveries"]
    assert (entry["status"], entry["outcome"]) == (200, "delivered")
    assert client.get(f"{HOOK}/deliveries?failed=true").json["deliveries"] == []
    assert client.post(f"{HOOK}/pause", {"reason": "tea"}).json["reason"] == "tea"
    assert client.post(f"{HOOK}/test").json["status"] == 200
    assert client.post(f"{HOOK}/resume").json.get("state", "active") == "active"
    patched = client.ask("PATCH", HOOK, {"concurrency": 8, "rotate": True, "headers": {"authorization": None}}).json
    assert (patched["secret_count"], len(patched["secrets"])) == (2, 1)
    assert patched["definition"]["concurrency"] == 8
    assert "headers" not in patched["definition"]
    again = client.ask("PUT", HOOK, fields)
    assert (again.status, again.json.get("secrets"), again.json["secret_count"]) == (200, None, 2)
    assert [one["definition"]["name"] for one in client.get("/v1/webhooks?topic=orders").json["webhooks"]] == [
        "billing"
    ]
    assert client.ask("DELETE", HOOK).status == 204
    assert client.get(HOOK).code == "webhook_not_found"
    assert client.get("/v1/webhooks").json["webhooks"] == []


def test_what_is_refused(client: HttpClient, receiver: ThreadedReceiver) -> None:
    def put(**fields: object) -> tuple[int, str]:
        reply = client.ask("PUT", HOOK, {"topic": "orders", "url": receiver.url, **fields})
        return reply.status, reply.code

    assert put(url="http://169.254.169.254/latest") == (422, "address_refused")
    assert put(url="ftp://example.org/") == (422, "invalid_argument")
    assert put(format="xml") == (422, "invalid_field")
    assert put(batch_max=0) == (422, "invalid_field")
    assert put(nonsense=1) == (422, "invalid_field")
    assert put(secrets=["abc"]) == (422, "invalid_argument")
    assert put(settings={"paused": True}) == (422, "invalid_argument")
    for method, path in (("GET", ""), ("DELETE", ""), ("POST", "/test"), ("POST", "/pause"), ("POST", "/resume")):
        assert client.ask(method, HOOK + path).code == "webhook_not_found"
    assert client.get(f"{HOOK}/deliveries?limit=1000").code == "invalid_field"
    assert client.get("/v1/webhooks").json["webhooks"] == []
