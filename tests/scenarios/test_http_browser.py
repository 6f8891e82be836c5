"""A real browser: a page that is listed reads events, and a page that is not can neither read nor publish."""

import json
import queue
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from tests.http_client import WAIT_S, HttpClient, http_server, needs_http, url_of

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = [
    needs_http,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium: install it with apt-get install chromium"),
]

READS = """
const seen = [];
const source = new EventSource(broker + "/v1/topics/orders/messages?position=0:0");
source.onmessage = event => {
  seen.push([event.lastEventId, JSON.parse(event.data).value]);
  if (seen.length == 2) fetch(broker + "/v1/topics/orders/messages", {
    method: "POST", headers: {"content-type": "application/json"}, body: JSON.stringify({value: "from the page"})});
  if (seen.length == 3) { source.close(); report(seen); }
};
source.onerror = () => { if (source.readyState == 2) report("failed"); };
"""

CONVERSES = """
const seen = [];
const socket = new WebSocket(broker.replace("http", "ws") + "/v1/socket", ["headrace.json"]);
const ask = (id, request, fields, messages) => socket.send(JSON.stringify({id, request, fields, messages}));
socket.onopen = () => ask(1, "StreamOpen", {topic: "orders", position: "0:0"});
socket.onmessage = event => {
  const frame = JSON.parse(event.data);
  if (frame.id == 1) ask(2, "Publish", {topic: "orders"}, [{value: "from the page"}]);
  if (frame.push == "Delivery") seen.push(...frame.messages.map(message => [message.id, message.value]));
  if (seen.length == 3) report([socket.protocol, ...seen]);
};
socket.onerror = () => report("failed");
"""

ATTACKS = """
const outcomes = {};
async function attempt(name, call) {
  try { outcomes[name] = await call(); } catch (error) { outcomes[name] = "refused by the browser"; }
}
(async () => {
  const messages = broker + "/v1/topics/orders/messages";
  const body = JSON.stringify({value: "stolen"});
  await attempt("simple", async () => (await fetch(messages, {method: "POST", mode: "no-cors", body})).type);
  await attempt("json", async () =>
    (await fetch(messages, {method: "POST", headers: {"content-type": "application/json"}, body})).status);
  const attributes = {"ce-specversion": "1.0", "ce-id": "1", "ce-source": "/page", "ce-type": "stolen"};
  await attempt("event", async () => (await fetch(messages, {method: "POST", headers: attributes, body})).status);
  await attempt("simple event", async () =>
    (await fetch(messages, {method: "POST", mode: "no-cors", headers: attributes, body})).type);
  const event = JSON.stringify({specversion: "1.0", id: "1", source: "/page", type: "stolen", data: 1});
  await attempt("event beacon", async () =>
    navigator.sendBeacon(messages, new Blob([event], {type: "application/cloudevents+json"})));
  await attempt("beacon", async () => navigator.sendBeacon(messages, new Blob([body], {type: "text/plain"})));
  const form = {"hub.mode": "subscribe", "hub.topic": messages, "hub.callback": "http://example.org/stolen"};
  await attempt("hub", async () =>
    (await fetch(broker + "/v1/hub", {method: "POST", mode: "no-cors", body: new URLSearchParams(form)})).type);
  await attempt("delete", async () => (await fetch(broker + "/v1/topics/orders", {method: "DELETE"})).status);
  await attempt("read", async () => await (await fetch(broker + "/v1/topics")).text());
  await attempt("socket", () => new Promise(resolve => {
    const socket = new WebSocket(broker.replace("http", "ws") + "/v1/socket", ["headrace.json"]);
    socket.onopen = () => resolve("open");
    socket.onerror = () => resolve("refused by the broker");
  }));
  await attempt("events", () => new Promise(resolve => {
    const source = new EventSource(messages + "?start=earliest");
    source.onmessage = event => resolve(event.data);
    source.onerror = () => resolve("refused by the broker");
  }));
  report(outcomes);
})();
"""


class Site:
    """A web site with one page, which reports what it saw."""

    def __init__(self) -> None:
        self.reports: queue.Queue[Any] = queue.Queue()
        self.page = b""
        site = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.send_response(200)
                self.send_header("content-type", "text/html")
                self.end_headers()
                self.wfile.write(site.page)

            def do_POST(self) -> None:
                site.reports.put(json.loads(self.rfile.read(int(self.headers["content-length"]))))
                self.send_response(204)
                self.end_headers()

            def log_message(self, *_: object) -> None:
                """Say nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()
        self.origin = f"http://127.0.0.1:{self._server.server_port}"

    def script(self, broker: str, script: str) -> None:
        report = "const report = seen => fetch('/', {method: 'POST', body: JSON.stringify(seen)});"
        self.page = f"<script>const broker = '{broker}'; {report} {script}</script>".encode()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@pytest.fixture
def site() -> Iterator[Site]:
    site = Site()
    yield site
    site.close()


@contextmanager
def browser(*arguments: str) -> Iterator["subprocess.Popen[bytes]"]:
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        command = [
            str(CHROMIUM), "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
            "--no-first-run", "--disable-background-networking", f"--user-data-dir={profile}", *arguments,
        ]  # fmt: skip
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
            try:
                yield process
            finally:
                process.kill()


def test_a_page_that_is_listed_reads_and_publishes(site: Site) -> None:
    with http_server(http_origins=[site.origin]) as server:
        client = HttpClient(url_of(server))
        client.publish("orders", 1, 2)
        site.script(client.url, READS)
        with browser(site.origin):
            seen = site.reports.get(timeout=2 * WAIT_S)
        assert seen == [["0:1", 1], ["0:2", 2], ["0:3", "from the page"]]
        client.close()


def test_a_page_that_is_listed_opens_a_websocket(site: Site) -> None:
    with http_server(http_origins=[site.origin]) as server:
        client = HttpClient(url_of(server))
        client.publish("orders", 1, 2)
        site.script(client.url, CONVERSES)
        with browser(site.origin):
            seen = site.reports.get(timeout=2 * WAIT_S)
        assert seen == ["headrace.json", ["0:1", 1], ["0:2", 2], ["0:3", "from the page"]]
        client.close()


def test_a_page_that_is_not_listed_can_do_nothing(site: Site) -> None:
    with http_server() as server:
        client = HttpClient(url_of(server))
        client.publish("orders", "secret")
        site.script(client.url, ATTACKS)
        with browser(site.origin):
            outcomes = site.reports.get(timeout=2 * WAIT_S)
        assert outcomes == {
            "simple": "opaque",  # sent, and answered with 403
            "json": "refused by the browser",
            "event": "refused by the browser",
            "simple event": "opaque",  # sent without the attributes, and answered with 403
            "event beacon": True,  # the browser asked first, and did not send it
            "beacon": True,  # sent, and answered with 403
            "hub": "opaque",  # a form, which needs no preflight: sent, and answered with 403
            "delete": "refused by the browser",
            "read": "refused by the browser",
            "socket": "refused by the broker",
            "events": "refused by the broker",
        }
        messages = client.get("/v1/topics/orders/partitions/0/messages").json["messages"]
        assert [one["value"] for one in messages] == ["secret"]
        counted = client.get("/v1/metrics").body.decode()
        assert "/v1/hub" not in counted, counted  # it reached no handler
        client.close()


def test_a_name_that_was_rebound_to_this_machine_gets_nothing() -> None:
    with http_server() as server:
        client = HttpClient(url_of(server))
        client.publish("orders", "secret")
        rules = "--host-resolver-rules=MAP evil.example.org 127.0.0.1"
        with browser(rules, "--dump-dom", f"http://evil.example.org:{client.port}/v1/topics") as process:
            shown, _ = process.communicate(timeout=2 * WAIT_S)
        assert b"host_refused" in shown
        assert b"orders" not in shown
        client.close()
