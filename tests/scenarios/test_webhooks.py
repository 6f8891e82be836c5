"""Webhooks from a real broker to real receivers: what arrives, what is tried again, and what is given up."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from standardwebhooks import Webhook
from tests.http_client import HttpClient, http_server, needs_http, url_of
from tests.receivers import Arrived
from tests.webhook_stage import (
    ThreadedReceiver,
    answers,
    needs_outgoing,
    sending_bus,
    threaded_receiver,
    until,
)

import headrace
from headrace.client._sync.bus import Bus
from headrace.errors import (
    AddressRefused,
    InvalidArgument,
    WebhookExists,
    WebhookNotFound,
)
from headrace.model.security_requests import SecurityAlter
from headrace.server import EmbeddedServer

pytestmark = [needs_http, needs_outgoing]
SOON = {"retry_seconds": 0.01, "retry_jitter": 0.0}


@pytest.fixture
def bus() -> Iterator[Bus]:
    with sending_bus() as opened:
        yield opened


@pytest.fixture
def receiver() -> Iterator[ThreadedReceiver]:
    with threaded_receiver() as served:
        yield served


def test_a_message_arrives_signed(bus: Bus, receiver: ThreadedReceiver) -> None:
    (secret,) = bus.webhooks.set("billing", "orders", receiver.url, headers={"x-api-key": "abc"}).secrets
    bus.publish("orders", b'{"n": 1}', key="k", headers={"content-type": "application/json"})
    (request,) = receiver.wait_for(1)
    payload = Webhook(secret).verify(request.body, request.headers)
    assert (payload["value"], payload["key"], payload["partition"], payload["offset"]) == ({"n": 1}, "k", 0, 0)
    assert request.headers["content-type"] == "application/json"
    assert request.headers["headrace-topic"] == "orders"
    assert request.headers["headrace-webhook"] == "billing"
    assert request.headers["x-api-key"] == "abc"
    until(lambda: bus.webhooks.describe("billing").delivered == 1)
    info = bus.webhooks.describe("billing")
    assert (info.ready, info.leased, info.waiting, info.definition.headers) == (0, 0, 0, {"x-api-key": "(hidden)"})
    (entry,) = bus.webhooks.deliveries("billing")
    assert (entry.status, entry.outcome, entry.attempt, entry.id) == (
        200,
        "delivered",
        1,
        request.headers["webhook-id"],
    )


def test_a_failed_request_is_tried_again_under_the_same_id(bus: Bus, receiver: ThreadedReceiver) -> None:
    (secret,) = bus.webhooks.set("billing", "orders", receiver.url, **SOON).secrets
    receiver.statuses = [500, 302, 404]
    bus.publish("orders", b"a")
    requests = receiver.wait_for(4)
    assert len({one.headers["webhook-id"] for one in requests}) == 1
    assert [one.headers["headrace-attempt"] for one in requests] == ["1", "2", "3", "4"]
    for one in requests:
        Webhook(secret).verify(one.body, one.headers)
    outcomes = until(lambda: len(found := bus.webhooks.deliveries("billing")) == 4 and found)
    assert [(one.status, one.outcome) for one in reversed(outcomes)] == [
        (500, "retry"), (302, "retry"), (404, "retry"), (200, "delivered"),
    ]  # fmt: skip
    assert "redirects are not followed" in outcomes[2].error


def test_after_the_last_attempt_it_is_a_dead_letter_with_the_reason(bus: Bus, receiver: ThreadedReceiver) -> None:
    bus.webhooks.set("billing", "orders", receiver.url, deliveries_max=2, **SOON)
    receiver.statuses = [500, 503]
    bus.publish("orders", b"a")
    receiver.wait_for(2)
    until(lambda: bus.webhooks.describe("billing").dead == 1)
    queue = bus.queue("orders", "webhook.billing")
    (dead,) = queue.find(status="dead")
    assert "the receiver answered 503" in dead.reason
    assert [one.outcome for one in bus.webhooks.deliveries("billing")] == ["dead", "retry"]
    queue.redrive()
    receiver.wait_for(3)
    assert receiver.values() == ["a", "a", "a"]


def test_retry_after_keeps_the_receiver_alone(bus: Bus, receiver: ThreadedReceiver) -> None:
    bus.webhooks.set("billing", "orders", receiver.url, **SOON)
    receiver.statuses = ["429 Slow Down\r\nRetry-After: 3600"]
    bus.publish("orders", b"a")
    receiver.wait_for(1)
    info = until(lambda: (found := bus.webhooks.describe("billing")).waiting and found)
    assert info.circuit_until_us > info.created_us + 3_500_000_000
    bus.publish("orders", b"b")
    until(lambda: bus.webhooks.describe("billing").ready == 1)
    assert len(receiver.requests) == 1


def test_a_receiver_that_takes_a_message_may_ask_for_a_pause_too(bus: Bus, receiver: ThreadedReceiver) -> None:
    bus.webhooks.set("billing", "orders", receiver.url, concurrency=1, **SOON)
    receiver.statuses = ["202 Accepted\r\nRetry-After: 99999999999999999999"]
    bus.publish_many("orders", [b"a", b"b"])
    info = until(lambda: (found := bus.webhooks.describe("billing")).delivered and found)
    assert info.created_us + 86_000_000_000 < info.circuit_until_us < info.created_us + 87_000_000_000
    until(lambda: bus.webhooks.describe("billing").ready == 1)
    assert (len(receiver.requests), bus.webhooks.describe("billing").circuit) == (1, "closed")


def test_after_410_no_further_request_is_sent(tmp_path: Path, receiver: ThreadedReceiver) -> None:
    """A broker with a disk needs a while to settle the message, in which it could be sent again."""
    receiver.script = answers("410 Gone")
    with sending_bus(str(tmp_path)) as bus:
        bus.webhooks.set("billing", "orders", receiver.url, concurrency=8)
        bus.publish("orders", b"a")
        until(lambda: bus.webhooks.describe("billing").state == "disabled")
        until(lambda: bus.webhooks.describe("billing").ready == 1)
        assert len(receiver.requests) == 1
        bus.publish_many("orders", [b"%d" % number for number in range(50)])
        bus.webhooks.resume("billing")
        until(lambda: bus.webhooks.describe("billing").state == "disabled")
        until(lambda: bus.webhooks.describe("billing").ready == 51)
        sent = receiver.values()[1:]
        assert len(set(sent)) == len(sent) <= 8  # those that were under way


def test_410_disables_the_webhook_and_keeps_what_is_not_delivered(bus: Bus, receiver: ThreadedReceiver) -> None:
    bus.webhooks.set("billing", "orders", receiver.url, concurrency=1)
    bus.events.record()
    receiver.statuses = [410]
    bus.publish_many("orders", [b"a", b"b"])
    until(lambda: bus.webhooks.describe("billing").state == "disabled")
    info = until(lambda: (found := bus.webhooks.describe("billing")).ready == 2 and found)
    assert info.reason == "the receiver answered 410 Gone"
    assert "$events.webhook.disabled" in {event.subject for event in bus.events.history()}
    assert len(receiver.requests) == 1
    assert bus.webhooks.resume("billing").state == "active"
    receiver.wait_for(3)
    assert receiver.values()[1:] == ["a", "b"]


def test_a_paused_webhook_sends_nothing_but_a_ping(bus: Bus, receiver: ThreadedReceiver) -> None:
    (secret,) = bus.webhooks.set("billing", "orders", receiver.url).secrets
    assert bus.webhooks.pause("billing", "maintenance").reason == "maintenance"
    bus.publish("orders", b"a")
    entry = bus.webhooks.test("billing")
    assert (entry.status, entry.outcome, entry.offset) == (200, "delivered", -1)
    (ping,) = receiver.requests
    assert Webhook(secret).verify(ping.body, ping.headers)["value"] == {"ping": "billing", "topic": "orders"}
    assert bus.webhooks.describe("billing").ready == 1
    bus.webhooks.resume("billing")
    receiver.wait_for(2)
    assert receiver.values()[1] == "a"


def test_a_new_webhook_sends_what_comes_or_everything(bus: Bus, receiver: ThreadedReceiver) -> None:
    bus.publish("orders", b"old")
    bus.webhooks.set("new", "orders", receiver.url)
    bus.publish("orders", b"new")
    receiver.wait_for(1)
    bus.webhooks.set("all", "orders", receiver.url, start="earliest", concurrency=1)
    receiver.wait_for(3)
    assert receiver.values() == ["new", "old", "new"]


def test_requests_are_signed_with_both_secrets_while_they_are_changed(bus: Bus, receiver: ThreadedReceiver) -> None:
    (first,) = bus.webhooks.set("billing", "orders", receiver.url).secrets
    (second,) = bus.webhooks.alter("billing", rotate=True).secrets
    bus.publish("orders", b"a")
    (request,) = receiver.wait_for(1)
    assert len(request.headers["webhook-signature"].split(" ")) == 2
    for secret in (first, second):
        Webhook(secret).verify(request.body, request.headers)
    info = bus.webhooks.alter("billing", rotate=True)
    assert (info.secret_count, len(info.secrets)) == (2, 1)
    bus.publish("orders", b"b")
    request = receiver.wait_for(2)[1]
    Webhook(second).verify(request.body, request.headers)
    with pytest.raises(Exception, match="No matching signature"):
        Webhook(first).verify(request.body, request.headers)
    for shown in (bus.webhooks.describe("billing"), *bus.webhooks.list()):
        assert shown.secrets == []
        assert first not in repr(shown)


def test_messages_of_a_key_arrive_one_after_the_other(bus: Bus, receiver: ThreadedReceiver) -> None:
    at_once: dict[str, int] = {}
    failed: set[str] = set()

    async def slow(request: Arrived, writer: asyncio.StreamWriter) -> bool:
        envelope = json.loads(request.body)
        key = envelope["key"]
        at_once[key] = at_once.get(key, 0) + 1
        assert at_once[key] == 1
        await asyncio.sleep(0.01)
        at_once[key] -= 1
        status = 500 if envelope["value"] == "1" and key not in failed else 200
        failed.add(key) if status == 500 else None
        writer.write(f"HTTP/1.1 {status} X\r\nContent-Length: 0\r\n\r\n".encode())
        await writer.drain()
        return True

    receiver.script = slow
    bus.create_topic("orders", partitions=2)
    bus.webhooks.set("billing", "orders", receiver.url, ordered_by_key=True, concurrency=8, **SOON)
    for number in range(5):
        for key in "abc":
            bus.publish("orders", str(number).encode(), key=key)
    receiver.wait_for(18)
    for key in "abc":
        came = [one["value"] for one in receiver.bodies() if one["key"] == key]
        assert came == ["0", "1", "1", "2", "3", "4"]


def test_batches_are_arrays(bus: Bus, receiver: ThreadedReceiver) -> None:
    (secret,) = bus.webhooks.set("billing", "orders", receiver.url, batch_max=10, concurrency=1).secrets
    bus.publish_many("orders", [str(number).encode() for number in range(25)])
    until(lambda: len(receiver.values()) == 25)
    assert sorted(receiver.values(), key=int) == [str(number) for number in range(25)]
    assert max(len(body) for body in receiver.bodies()) <= 10
    for request in receiver.requests:
        Webhook(secret).verify(request.body, request.headers)
    assert len({request.headers["webhook-id"] for request in receiver.requests}) == len(receiver.requests)


def test_other_formats(bus: Bus, receiver: ThreadedReceiver) -> None:
    for name in ("raw", "cloudevents-binary", "cloudevents-structured", "cloudevents-batch"):
        bus.webhooks.set(name, "orders", receiver.url, format=name)
    bus.publish("orders", b"<a/>", key="k 1", headers={"content-type": "application/xml"})
    requests = {one.headers["headrace-webhook"]: one for one in receiver.wait_for(4)}
    raw = requests["raw"]
    assert (raw.body, raw.headers["content-type"], raw.headers["headrace-key"]) == (b"<a/>", "application/xml", "k%201")
    binary = requests["cloudevents-binary"]
    assert (binary.body, binary.headers["content-type"], binary.headers["ce-specversion"]) == (
        b"<a/>", "application/xml", "1.0",
    )  # fmt: skip
    structured, batch = requests["cloudevents-structured"], requests["cloudevents-batch"]
    assert structured.headers["content-type"].startswith("application/cloudevents+json")
    assert batch.headers["content-type"].startswith("application/cloudevents-batch+json")
    assert json.loads(batch.body) == [json.loads(structured.body)]
    assert json.loads(structured.body)["id"] == binary.headers["ce-id"]


def test_the_circuit_opens_after_failures_and_closes_again(bus: Bus, receiver: ThreadedReceiver) -> None:
    bus.events.record()
    receiver.script = answers("500 No")
    bus.webhooks.set("billing", "orders", receiver.url, concurrency=1, deliveries_max=0, **SOON)
    bus.publish("orders", b"a")
    info = until(lambda: (found := bus.webhooks.describe("billing")).circuit != "closed" and found)
    assert info.failures >= 5
    assert "answered 500" in info.last_error
    receiver.script = answers("200 OK")
    until(lambda: bus.webhooks.describe("billing").circuit == "closed")
    until(lambda: bus.webhooks.describe("billing").delivered == 1)
    told = [event.action for event in bus.events.history() if event.kind == "webhook"]
    assert told == ["created", "opened", "closed"]


def test_a_receiver_is_asked_for_permission(bus: Bus, receiver: ThreadedReceiver) -> None:
    async def permits(request: Arrived, writer: asyncio.StreamWriter) -> bool:
        head = ""
        if request.method == "OPTIONS":
            head = (
                f"WebHook-Allowed-Origin: {request.headers['webhook-request-origin']}\r\nWebHook-Allowed-Rate: 6000\r\n"
            )
        writer.write(f"HTTP/1.1 200 OK\r\n{head}Content-Length: 0\r\n\r\n".encode())
        await writer.drain()
        return True

    receiver.script = permits
    bus.webhooks.set("billing", "orders", receiver.url, validate=True, origin="broker.example.org")
    bus.publish_many("orders", [b"a", b"b"])
    requests = receiver.wait_for(3)
    assert [one.method for one in requests] == ["OPTIONS", "POST", "POST"]
    assert requests[0].headers["webhook-request-origin"] == "broker.example.org"


def test_without_permission_the_webhook_is_disabled(bus: Bus, receiver: ThreadedReceiver) -> None:
    bus.webhooks.set("billing", "orders", receiver.url, validate=True)
    bus.publish("orders", b"a")
    until(lambda: bus.webhooks.describe("billing").state == "disabled")
    assert "WebHook-Allowed-Origin" in bus.webhooks.describe("billing").reason
    assert [one.method for one in receiver.requests] == ["OPTIONS"]


def test_only_some_messages_through_a_view(bus: Bus, receiver: ThreadedReceiver) -> None:
    bus.create_topic("orders")
    bus.create_topic("large", view_of="orders", view_query={"jsonpath": "$[?@ > 10]"})
    bus.webhooks.set("large", "large", receiver.url)
    for number in (1, 20, 3, 40):
        bus.publish("orders", json.dumps({"n": number}).encode(), headers={"content-type": "application/json"})
    receiver.wait_for(2)
    assert sorted(one["n"] for one in receiver.values()) == [20, 40]


def test_what_cannot_be_defined(bus: Bus, receiver: ThreadedReceiver) -> None:
    define = bus.webhooks.set
    for url in ("ftp://example.org/", "https://a:b@example.org/", "nonsense"):
        with pytest.raises(InvalidArgument):
            define("a", "orders", url)
    with pytest.raises(AddressRefused, match="webhook_networks"):
        define("a", "orders", "http://10.0.0.1/")
    for wrong in (
        {"format": "xml"}, {"format": "raw", "batch_max": 2}, {"batch_max": 0}, {"concurrency": 1000},
        {"timeout_seconds": 0.0}, {"headers": {"webhook-id": "1"}}, {"headers": {"a b": "1"}},
        {"headers": {"a": "x\r\nb: c"}}, {"secrets": ["whsec_a"]}, {"secrets": ["secret"]}, {"deliveries_max": 300},
        {"paused": True}, {"headers": {"authorization": "(hidden)"}}, {"start": "time"}, {"origin": "a b"},
    ):  # fmt: skip
        with pytest.raises(InvalidArgument):
            define("a", "orders", receiver.url, **wrong)  # type: ignore[arg-type]
    assert bus.webhooks.list() == []
    assert bus.subscriptions() == []
    define("a", "orders", receiver.url)
    with pytest.raises(WebhookExists):
        define("a", "orders", receiver.url)
    with pytest.raises(InvalidArgument, match="topic cannot be changed"):
        define("a", "others", receiver.url, replace=True)
    for action in (bus.delete_subscription, lambda *at: bus.alter_subscription(*at, deliveries_max=3)):
        with pytest.raises(InvalidArgument, match="belongs to the webhook a"):
            action("orders", "webhook.a")
    with pytest.raises(WebhookNotFound):
        bus.webhooks.describe("b")


def test_a_definition_is_altered_while_requests_wait(bus: Bus, receiver: ThreadedReceiver) -> None:
    released = asyncio.Event()

    async def waits(_: Arrived, writer: asyncio.StreamWriter) -> bool:
        await released.wait()
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
        await writer.drain()
        return True

    receiver.script = waits
    bus.webhooks.set("billing", "orders", receiver.url, concurrency=1, headers={"authorization": "secret"})
    bus.publish_many("orders", [b"a", b"b", b"c"])
    receiver.wait_for(1)
    with threaded_receiver() as other:
        info = bus.webhooks.alter("billing", url=other.url, concurrency=3, settings={"deliveries_max": 2})
        assert info.definition.settings == {"deliveries_max": 2}
        other.wait_for(2)
        assert sorted(other.values()) == ["b", "c"]
        assert other.requests[0].headers["authorization"] == "secret"
        until(lambda: bus.webhooks.describe("billing").in_flight == 1)
        receiver._loop.call_soon_threadsafe(released.set)
        until(lambda: bus.webhooks.describe("billing").delivered == 3)
        assert len(receiver.requests) == 1


def test_a_webhook_is_deleted_with_its_subscription_and_with_its_topic(bus: Bus, receiver: ThreadedReceiver) -> None:
    bus.webhooks.set("a", "orders", receiver.url)
    bus.webhooks.set("b", "orders", receiver.url)
    bus.webhooks.delete("a")
    assert [one.subscription for one in bus.subscriptions()] == ["webhook.b"]
    bus.publish("orders", b"1")
    assert receiver.wait_for(1)[0].headers["headrace-webhook"] == "b"
    bus.delete_topic("orders")
    assert bus.webhooks.list() == []
    bus.webhooks.set("b", "orders", receiver.url)
    bus.publish("orders", b"2")
    assert receiver.wait_for(2)[1].headers["webhook-id"] != receiver.requests[0].headers["webhook-id"]


def test_a_reset_subscription_is_delivered_again(bus: Bus, receiver: ThreadedReceiver) -> None:
    bus.webhooks.set("a", "orders", receiver.url)
    bus.publish("orders", b"1")
    receiver.wait_for(1)
    until(lambda: bus.webhooks.describe("a").delivered == 1)
    bus.reset_subscription("orders", "webhook.a", start="earliest")
    receiver.wait_for(2)
    assert receiver.values() == ["1", "1"]


def test_webhooks_belong_to_a_tenant_and_need_no_registration(receiver: ThreadedReceiver) -> None:
    server = EmbeddedServer(":memory:", host="127.0.0.1", port=0, webhook_networks=["loopback"])
    host, port = server._server.addresses[0]
    address = f"headrace://{host}:{port}"
    try:
        with headrace.connect(address, tenant="acme") as acme, headrace.connect(address) as other:
            acme.webhooks.set("a", "orders", receiver.url, dead_letter_topic="dead")
            other.webhooks.set("a", "orders", receiver.url)
            acme.publish("orders", b"1")
            acme.services.require_registration(True)
            (request,) = receiver.wait_for(1)
            assert request.headers["headrace-topic"] == "orders"
            (info,) = acme.webhooks.list()
            assert (info.definition.name, info.definition.topic) == ("a", "orders")
            assert info.definition.settings == {"dead_letter_topic": "dead"}
            assert [one.subscription for one in acme.subscriptions()] == ["webhook.a"]
    finally:
        server.close()


def test_metrics_count_messages_and_open_circuits(receiver: ThreadedReceiver) -> None:
    with http_server(webhook_networks=["loopback"]) as server:
        client = HttpClient(url_of(server))
        assert b"headrace_webhook" not in client.get("/metrics").body
        client.ask("PUT", "/v1/webhooks/a", {"topic": "orders", "url": receiver.url})
        client.publish("orders", 1, 2)
        delivered = b'headrace_webhook_messages_total{webhook="a",outcome="delivered"} 2'
        until(
            lambda: (
                delivered
                in client.get("/metrics").body.replace(
                    b'outcome="delivered",webhook="a"', b'webhook="a",outcome="delivered"'
                )
            )
        )
        shown = client.get("/metrics").body
        assert b'headrace_webhooks{state="active"} 1' in shown
        assert b"headrace_webhook_circuits_open 0" in shown
        client.close()


def test_a_webhook_goes_on_when_security_is_enabled(bus: Bus, receiver: ThreadedReceiver) -> None:
    """What it may do was decided when it was defined."""
    bus.webhooks.set("a", "orders", receiver.url)
    bus.schedule("orders", b"1", in_=0.3)
    bus._broker.request(SecurityAlter(True))
    receiver.wait_for(1)


def test_a_tenant_is_deleted_with_its_webhooks(bus: Bus, receiver: ThreadedReceiver) -> None:
    for number in range(3):
        bus.webhooks.set("acme/billing", "acme/orders", receiver.url)
        bus.publish("acme/orders", b"a")
        receiver.wait_for(number + 1)
        bus.tenants.delete("acme", cascade=True)
        assert [one.tenant for one in bus.tenants.list()] == ["default"]
