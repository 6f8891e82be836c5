"""WebSub, told by a subscriber: it finds the hub, subscribes, confirms, receives, renews and leaves."""

import hashlib
import hmac
import queue
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import parse_qsl, quote, urlencode, urlsplit

import pytest
from tests.http_client import HttpClient, HttpProcess, Reply, http_server, needs_http, url_of

from headrace.model import limits
from headrace.push import intent_verifier

pytestmark = needs_http

FORM = {"Content-Type": "application/x-www-form-urlencoded"}
WAIT_S = 20.0


class Content(NamedTuple):
    """Content that the hub distributed."""

    headers: dict[str, str]
    body: bytes


class Subscriber:
    """A callback that confirms, unless it is told to answer otherwise."""

    def __init__(self) -> None:
        self.asked: queue.Queue[dict[str, str]] = queue.Queue()
        """The queries of all GET requests."""
        self.received: queue.Queue[Content] = queue.Queue()
        self.answer: Callable[[dict[str, str]], tuple[int, bytes]] = lambda query: (
            200,
            query["hub.challenge"].encode(),
        )
        self.status = 204
        """What it answers to content."""
        self.location = ""
        subscriber = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                query = dict(parse_qsl(urlsplit(self.path).query, keep_blank_values=True))
                subscriber.asked.put(query)
                status, body = (200, b"") if query["hub.mode"] == "denied" else subscriber.answer(query)
                self.respond(status, body)

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                subscriber.received.put(Content({name.lower(): text for name, text in self.headers.items()}, body))
                self.respond(subscriber.status, b"")

            def respond(self, status: int, body: bytes) -> None:
                self.send_response(status)
                if subscriber.location:
                    self.send_header("Location", subscriber.location)
                if status != 204:
                    self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.callback = f"http://127.0.0.1:{self._server.server_address[1]}/callback?id=7"
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    def next_asked(self) -> dict[str, str]:
        return self.asked.get(timeout=WAIT_S)

    def next_received(self) -> Content:
        return self.received.get(timeout=WAIT_S)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


class Hub:
    """The broker as subscribers see it."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.client = HttpClient(url)

    def ask(self, mode: str, callback: str, topic: str = "orders", **more: str) -> Reply:
        """Send a request, again while the hub is busy with the one before."""
        ends = time.monotonic() + WAIT_S
        while (reply := self.ask_once(mode, callback, topic, **more)).status == 429 and time.monotonic() < ends:
            time.sleep(0.05)
        return reply

    def ask_once(self, mode: str, callback: str, topic: str = "orders", **more: str) -> Reply:
        fields = {"hub.mode": mode, "hub.callback": callback, "hub.topic": self.topic_url(topic)}
        fields |= {f"hub.{name}": text for name, text in more.items()}
        return self.form({name: text for name, text in fields.items() if text})

    def form(self, fields: dict[str, str], **headers: str) -> Reply:
        given = {name.replace("_", "-"): text for name, text in headers.items()}
        return self.client.ask("POST", "/v1/hub", urlencode(fields).encode(), {**FORM, **given})

    def topic_url(self, topic: str) -> str:
        return f"{self.url}/v1/topics/{quote(topic, safe='')}/messages"

    def subscriptions(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.client.get("/v1/webhooks").json["webhooks"]
        return found

    def until_subscriptions(self, count: int) -> list[dict[str, Any]]:
        ends = time.monotonic() + WAIT_S
        while len(found := self.subscriptions()) != count:
            assert time.monotonic() < ends, found
            time.sleep(0.02)
        return found


@pytest.fixture
def hub() -> Iterator[Hub]:
    with hub_of() as made:
        yield made


@contextmanager
def hub_of(**settings: Any) -> Iterator[Hub]:
    with http_server(webhook_networks=["loopback"], **settings) as server:
        made = Hub(url_of(server))
        assert made.client.post("/v1/topics", {"topic": "orders"}).status == 201
        yield made
        made.client.close()


@pytest.fixture
def subscriber() -> Iterator[Subscriber]:
    made = Subscriber()
    yield made
    made.close()


def test_a_subscriber_finds_the_hub_and_receives_signed_content(hub: Hub, subscriber: Subscriber) -> None:
    for method, path in (("GET", "/v1/topics/orders"), ("HEAD", "/v1/topics/orders/messages")):
        link = hub.client.ask(method, path).headers["link"]
        links = {rel: url for url, rel in re.findall(r'<([^>]*)>; rel="([^"]*)"', link)}
        assert links == {"hub": f"{hub.url}/v1/hub", "self": hub.topic_url("orders")}
    hub.client.publish("orders", "before")
    accepted = hub.ask("subscribe", subscriber.callback, secret="s3cret ü", lease_seconds="3600")
    assert accepted.status == 202
    assert accepted.json == {"lease_seconds": 3600}

    asked = subscriber.next_asked()
    challenge = asked.pop("hub.challenge")
    assert len(challenge) >= 32
    assert asked == {
        "id": "7",  # the callback's own
        "hub.mode": "subscribe",
        "hub.topic": hub.topic_url("orders"),
        "hub.lease_seconds": "3600",
    }
    (subscription,) = hub.until_subscriptions(1)
    definition = subscription["definition"]
    assert definition["websub"]["topic_url"] == hub.topic_url("orders")
    assert "s3cret" not in str(subscription)

    hub.client.publish("orders", {"order": 1})
    content = subscriber.next_received()
    assert content.body == b'{"order": 1}'
    assert content.headers["content-type"] == "application/json"
    assert content.headers["link"] == f'<{hub.url}/v1/hub>; rel="hub", <{hub.topic_url("orders")}>; rel="self"'
    expected = hmac.new("s3cret ü".encode(), content.body, hashlib.sha256).hexdigest()
    assert content.headers["x-hub-signature"] == f"sha256={expected}"
    assert "webhook-signature" not in content.headers

    assert hub.ask("unsubscribe", subscriber.callback).status == 202
    asked = subscriber.next_asked()
    assert (asked["hub.mode"], asked["hub.topic"]) == ("unsubscribe", hub.topic_url("orders"))
    assert "hub.lease_seconds" not in asked
    hub.until_subscriptions(0)
    hub.client.publish("orders", {"order": 2})
    assert hub.ask("unsubscribe", subscriber.callback).code == "webhook_not_found"
    assert subscriber.asked.empty()
    assert subscriber.received.empty()


def test_subscribing_again_renews_the_lease_and_replaces_the_secret(hub: Hub, subscriber: Subscriber) -> None:
    hub.ask("subscribe", subscriber.callback, lease_seconds="60")
    subscriber.next_asked()
    (before,) = hub.until_subscriptions(1)
    hub.client.publish("orders", 1)
    assert "x-hub-signature" not in subscriber.next_received().headers
    reply = hub.ask("subscribe", subscriber.callback, lease_seconds="99999999", secret="new")
    assert reply.json == {"lease_seconds": limits.WEBSUB_LEASE_SECONDS_MAX}  # less than was asked for
    assert subscriber.next_asked()["hub.lease_seconds"] == str(limits.WEBSUB_LEASE_SECONDS_MAX)
    ends = time.monotonic() + WAIT_S
    while hub.subscriptions()[0]["definition"]["websub"] == before["definition"]["websub"]:
        assert time.monotonic() < ends
        time.sleep(0.02)
    hub.client.publish("orders", 2)
    assert "x-hub-signature" in subscriber.next_received().headers
    (after,) = hub.subscriptions()
    assert after["definition"]["name"] == before["definition"]["name"]


def test_a_lease_that_is_not_renewed_ends(hub: Hub, subscriber: Subscriber) -> None:
    hub.ask("subscribe", subscriber.callback, lease_seconds="1")
    subscriber.next_asked()
    hub.until_subscriptions(1)
    hub.until_subscriptions(0)
    hub.client.publish("orders", 1)
    assert hub.client.get("/v1/topics/orders/subscriptions").json["subscriptions"] == []
    assert subscriber.asked.empty()  # an end that was agreed on is no denial


REFUSALS: dict[str, Callable[[dict[str, str]], tuple[int, bytes]]] = {
    "another challenge": lambda _: (200, b"something else"),
    "the challenge and more": lambda query: (200, query["hub.challenge"].encode() + b"\n"),
    "nothing": lambda _: (204, b""),
    "404": lambda query: (404, query["hub.challenge"].encode()),
    "500": lambda query: (500, query["hub.challenge"].encode()),
    "a redirect": lambda query: (302, query["hub.challenge"].encode()),
    "an endless body": lambda query: (200, query["hub.challenge"].encode() + bytes(1 << 20)),
}


@pytest.mark.parametrize("answer", REFUSALS)
def test_a_callback_that_does_not_confirm_gets_nothing(hub: Hub, subscriber: Subscriber, answer: str) -> None:
    other = Subscriber()
    subscriber.answer, subscriber.location = REFUSALS[answer], other.callback
    assert hub.ask("subscribe", subscriber.callback).status == 202
    subscriber.next_asked()
    until_taken(hub, subscriber)
    hub.client.publish("orders", 1)
    assert hub.subscriptions() == []
    assert other.asked.empty()
    other.close()


def test_a_callback_that_hangs_is_given_up(hub: Hub, subscriber: Subscriber, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(intent_verifier, "_TIMEOUT_S", 1.0)
    release = threading.Event()

    def hang(query: dict[str, str]) -> tuple[int, bytes]:
        release.wait(WAIT_S)
        return 200, query["hub.challenge"].encode()

    subscriber.answer = hang
    assert hub.ask("subscribe", subscriber.callback).status == 202
    subscriber.next_asked()
    until_taken(hub, subscriber)
    assert hub.subscriptions() == []
    release.set()


def test_an_unsubscription_that_the_callback_does_not_confirm_has_no_effect(hub: Hub, subscriber: Subscriber) -> None:
    hub.ask("subscribe", subscriber.callback)
    subscriber.next_asked()
    hub.until_subscriptions(1)
    subscriber.answer = lambda _: (404, b"")
    assert hub.ask("unsubscribe", subscriber.callback).status == 202
    assert subscriber.next_asked()["hub.mode"] == "unsubscribe"
    until_taken(hub, subscriber, "unsubscribe")
    hub.client.publish("orders", 1)
    assert subscriber.next_received().body == b"1"


def test_a_subscriber_that_is_gone_is_forgotten(hub: Hub, subscriber: Subscriber) -> None:
    hub.ask("subscribe", subscriber.callback)
    subscriber.next_asked()
    hub.until_subscriptions(1)
    subscriber.status = 410
    hub.client.publish("orders", 1)
    subscriber.next_received()
    hub.until_subscriptions(0)
    assert subscriber.asked.empty()


def test_a_subscriber_that_is_gone_gets_no_further_content(tmp_path: Path, subscriber: Subscriber) -> None:
    with hub_of(data=tmp_path) as hub:
        hub.ask("subscribe", subscriber.callback)
        subscriber.next_asked()
        hub.until_subscriptions(1)
        subscriber.status = 410
        hub.client.publish("orders", 1)
        hub.until_subscriptions(0)
    assert subscriber.received.qsize() == 1


def test_content_that_is_not_taken_is_sent_again(hub: Hub, subscriber: Subscriber) -> None:
    hub.ask("subscribe", subscriber.callback)
    subscriber.next_asked()
    hub.until_subscriptions(1)
    subscriber.status = 500
    hub.client.publish("orders", 1)
    first = subscriber.next_received()
    subscriber.status = 200
    second = subscriber.next_received()
    assert second.body == first.body
    assert second.headers["webhook-id"] == first.headers["webhook-id"]


def test_a_subscriber_is_told_when_its_subscription_is_ended_by_others(hub: Hub, subscriber: Subscriber) -> None:
    for topic in ("first", "second"):
        hub.client.post("/v1/topics", {"topic": topic})
        hub.ask("subscribe", subscriber.callback, topic)
        subscriber.next_asked()
        found = hub.until_subscriptions(1)
        if topic == "first":
            assert hub.client.ask("DELETE", f"/v1/webhooks/{found[0]['definition']['name']}").status == 204
        else:
            assert hub.client.ask("DELETE", "/v1/topics/second").status == 204
        denied = subscriber.next_asked()
        reason = "an administrator deleted it" if topic == "first" else "its topic was deleted"
        assert denied == {"id": "7", "hub.mode": "denied", "hub.topic": hub.topic_url(topic), "hub.reason": reason}
        hub.until_subscriptions(0)


def test_administrators_may_pause_and_delete_but_not_change_a_subscription(hub: Hub, subscriber: Subscriber) -> None:
    hub.ask("subscribe", subscriber.callback)
    subscriber.next_asked()
    (found,) = hub.until_subscriptions(1)
    path = f"/v1/webhooks/{found['definition']['name']}"
    assert hub.client.ask("PATCH", path, {"url": "http://127.0.0.1:9/"}).code == "invalid_argument"
    assert hub.client.ask("PATCH", path, {"rotate": True}).code == "invalid_argument"
    assert hub.client.ask("PUT", path, {"topic": "orders", "url": "http://127.0.0.1:9/"}).code == "invalid_argument"
    assert hub.client.post(f"{path}/test").code == "invalid_argument"  # a ping would count as content
    assert hub.client.post(f"{path}/pause").status == 200
    hub.client.publish("orders", 1)
    assert hub.client.post(f"{path}/resume").status == 200
    assert subscriber.next_received().body == b"1"


@pytest.mark.parametrize(
    ("fields", "status", "code"),
    [
        ({}, 422, "invalid_field"),
        ({"hub.mode": "celebrate"}, 422, "invalid_field"),
        ({"hub.callback": ""}, 422, "invalid_field"),
        ({"hub.callback": "ftp://127.0.0.1/"}, 422, "invalid_argument"),
        ({"hub.callback": "http://user:secret@127.0.0.1/"}, 422, "invalid_argument"),
        ({"hub.callback": "http://10.0.0.1/"}, 422, "address_refused"),
        ({"hub.callback": "http://169.254.169.254/latest/"}, 422, "address_refused"),
        ({"hub.topic": ""}, 422, "invalid_field"),
        ({"hub.topic": "orders"}, 422, "invalid_field"),
        ({"hub.topic": "http://elsewhere.example/v1/topics/orders/messages"}, 422, "invalid_field"),
        ({"hub.topic": "{url}/v1/groups/orders"}, 422, "invalid_field"),
        ({"hub.topic": "{url}/v1/topics/orders/messages?start=earliest"}, 422, "invalid_field"),
        ({"hub.topic": "{url}/v1/topics/%FF/messages"}, 422, "invalid_field"),
        ({"hub.topic": "{url}/v1/topics/nothing/messages"}, 404, "topic_not_found"),
        ({"hub.lease_seconds": "-1"}, 422, "invalid_field"),
        ({"hub.lease_seconds": "soon"}, 422, "invalid_field"),
        ({"hub.secret": "x" * 200}, 422, "invalid_argument"),
    ],
)
def test_a_request_that_is_wrong_is_refused_at_once(
    hub: Hub, subscriber: Subscriber, fields: dict[str, str], status: int, code: str
) -> None:
    whole = {"hub.mode": "subscribe", "hub.callback": subscriber.callback, "hub.topic": hub.topic_url("orders")}
    given = {name: text.replace("{url}", hub.url) for name, text in fields.items()}
    reply = hub.form({**whole, **given} if fields else {})
    assert (reply.status, reply.code) == (status, code), reply.json
    assert subscriber.asked.empty()


def test_forms_that_cannot_be_read_are_refused(hub: Hub) -> None:
    assert hub.client.post("/v1/hub", {"hub.mode": "subscribe"}).code == "unsupported_media_type"
    for body, code in (
        (b"hub.mode=%zz", "invalid_encoding"),
        (b"hub.mode=%ff", "invalid_encoding"),
        (b"hub.mode=subscribe&hub.mode=unsubscribe", "invalid_field"),
        (b"a" * 20_000, "body_too_large"),
        (b"&".join(b"a%d=1" % n for n in range(100)), "invalid_encoding"),
    ):
        assert hub.client.ask("POST", "/v1/hub", body, FORM).code == code, body


def test_a_callback_in_a_private_network_is_refused_whatever_its_name(subscriber: Subscriber) -> None:
    """Names are resolved when the callback is asked, and nothing is sent then."""
    with http_server() as server:  # allows nothing but the public internet
        hub = Hub(url_of(server))
        hub.client.post("/v1/topics", {"topic": "orders"})
        assert hub.ask("subscribe", subscriber.callback).code == "address_refused"
        for host in ("localhost", "127.1", "0x7f.1"):
            assert hub.ask("subscribe", subscriber.callback.replace("127.0.0.1", host)).status == 202
        until_taken(hub, subscriber, callback=subscriber.callback.replace("127.0.0.1", "localhost"))
        assert hub.subscriptions() == []
        assert subscriber.asked.empty()
        hub.client.close()


def test_a_page_in_a_browser_cannot_subscribe_anybody(subscriber: Subscriber) -> None:
    """A form needs no preflight, so the Origin alone tells."""
    with hub_of(http_origins=["https://app.example.org"]) as hub:
        fields = {"hub.mode": "subscribe", "hub.callback": subscriber.callback, "hub.topic": hub.topic_url("orders")}
        for headers in ({"Origin": "https://evil.example"}, {"Origin": "null"}, {"Sec_Fetch_Site": "cross-site"}):
            assert hub.form(fields, **headers).code == "origin_refused"
        assert hub.form(fields, Host="rebound.example").code == "host_refused"
        assert subscriber.asked.empty()
        assert hub.form(fields, Origin="https://app.example.org").status == 202


def test_the_hub_cannot_be_used_to_flood_somebody(subscriber: Subscriber, monkeypatch: pytest.MonkeyPatch) -> None:
    release = threading.Event()

    def hang(_: dict[str, str]) -> tuple[int, bytes]:
        release.wait(WAIT_S)
        return 404, b""

    subscriber.answer = hang
    with hub_of() as hub:
        replies = [hub.ask_once("subscribe", f"{subscriber.callback}&n={number}") for number in range(20)]
        assert [reply.status for reply in replies].count(202) == limits.WEBSUB_PENDING_HOST_MAX
        assert {reply.code for reply in replies if reply.status != 202} == {"busy"}
        same = hub.ask_once("subscribe", f"{subscriber.callback}&n=0")
        assert "being asked about this subscription" in same.json["detail"]
        release.set()
    monkeypatch.setattr(intent_verifier, "WEBSUB_REQUESTS_BURST", 3)
    monkeypatch.setattr(intent_verifier, "WEBSUB_REQUESTS_PER_SECOND", 0.0001)
    subscriber.answer = lambda _: (404, b"")
    with hub_of() as hub:
        replies = [hub.ask_once("subscribe", f"{subscriber.callback}&n={number}") for number in range(10)]
        assert [reply.status for reply in replies] == [202] * 3 + [429] * 7


def test_subscriptions_are_limited(subscriber: Subscriber, monkeypatch: pytest.MonkeyPatch) -> None:
    from headrace.broker import websub_subscriptions

    monkeypatch.setattr(websub_subscriptions, "WEBSUB_TOPIC_SUBSCRIPTIONS_MAX", 2)
    monkeypatch.setattr(websub_subscriptions, "WEBSUB_SUBSCRIPTIONS_MAX", 3)
    with hub_of() as hub:
        hub.client.post("/v1/topics", {"topic": "other"})
        hub.client.post("/v1/topics", {"topic": "third"})
        for number, topic in enumerate(("orders", "orders", "other"), 1):
            assert hub.ask("subscribe", f"{subscriber.callback}&n={number}", topic).status == 202
            hub.until_subscriptions(number)
            if number == 2:
                refused = hub.ask("subscribe", f"{subscriber.callback}&n=9")
                assert refused.code == "limit_exceeded"
                assert "topic" in refused.json["detail"]
        assert hub.ask("subscribe", subscriber.callback, "third").code == "limit_exceeded"
        assert hub.ask("subscribe", f"{subscriber.callback}&n=1").status == 202  # to renew is possible


def test_two_subscribers_whom_one_place_is_left_for(subscriber: Subscriber, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both are asked; the second one to confirm is denied."""
    from headrace.broker import websub_subscriptions

    monkeypatch.setattr(websub_subscriptions, "WEBSUB_TOPIC_SUBSCRIPTIONS_MAX", 1)
    both = threading.Barrier(2)

    def wait_for_both(query: dict[str, str]) -> tuple[int, bytes]:
        both.wait(WAIT_S)
        return 200, query["hub.challenge"].encode()

    subscriber.answer = wait_for_both
    with hub_of() as hub:
        for number in (1, 2):
            assert hub.ask("subscribe", f"{subscriber.callback}&n={number}").status == 202
        asked = [subscriber.next_asked() for _ in range(3)]
        assert [one["hub.mode"] for one in asked] == ["subscribe", "subscribe", "denied"]
        assert "maximum" in asked[2]["hub.reason"]
        assert len(hub.subscriptions()) == 1


def test_publish_is_answered_and_unknown_fields_are_ignored(hub: Hub, subscriber: Subscriber) -> None:
    assert hub.form({"hub.mode": "publish", "hub.url": hub.topic_url("orders")}).status == 202
    assert hub.form({"hub.mode": "publish", "hub.topic": hub.topic_url("nothing")}).status == 404
    assert hub.ask("subscribe", subscriber.callback, verify="async", lease_seconds="0").status == 202
    assert subscriber.next_asked()["hub.lease_seconds"] == str(limits.WEBSUB_LEASE_SECONDS_MIN)


def test_topics_of_a_tenant_are_its_own(hub: Hub, subscriber: Subscriber) -> None:
    acme = {"Headrace-Tenant": "acme"}
    assert hub.client.ask("POST", "/v1/topics", {"topic": "orders"}, acme).status == 201
    fields = {"hub.mode": "subscribe", "hub.callback": subscriber.callback, "hub.topic": hub.topic_url("orders")}
    assert hub.form(fields, Headrace_Tenant="acme").status == 202
    subscriber.next_asked()
    ends = time.monotonic() + WAIT_S
    while not hub.client.ask("GET", "/v1/webhooks", None, acme).json["webhooks"]:
        assert time.monotonic() < ends
        time.sleep(0.02)
    assert hub.subscriptions() == []
    hub.client.publish("orders", "of the default tenant")
    assert hub.client.ask("POST", "/v1/topics/orders/messages", [{"value": "acme's"}], acme).status == 202
    assert subscriber.next_received().body == b'"acme\'s"'
    assert hub.form({**fields, "hub.mode": "unsubscribe"}).code == "webhook_not_found"
    assert hub.form({**fields, "hub.mode": "unsubscribe"}, Headrace_Tenant="acme").status == 202


def test_subscriptions_survive_a_kill(tmp_path: Path, subscriber: Subscriber) -> None:
    process = HttpProcess(tmp_path, "--webhook-networks", "loopback")
    try:
        hub = Hub(process.url)
        hub.client.post("/v1/topics", {"topic": "orders"})
        hub.ask("subscribe", f"{subscriber.callback}&n=1", secret="s")
        hub.until_subscriptions(1)
        hub.client.close()
        process.kill()
        process.start()
        hub = Hub(process.url)
        hub.client.publish("orders", "after")
        content = subscriber.next_received()
        assert content.body == b'"after"'
        assert "x-hub-signature" in content.headers
        assert len(hub.subscriptions()) == 1
        assert hub.ask("unsubscribe", f"{subscriber.callback}&n=1").status == 202
        hub.until_subscriptions(0)
        hub.client.close()
        process.kill()
        process.start()
        hub = Hub(process.url)
        hub.until_subscriptions(0)
        hub.client.close()
    finally:
        process.kill()


def until_taken(hub: Hub, subscriber: Subscriber, mode: str = "subscribe", callback: str = "") -> None:
    """Wait until the hub has dealt with the last request: then it takes the same one again."""
    subscriber.answer = lambda _: (404, b"")
    assert hub.ask(mode, callback or subscriber.callback).status == 202
