"""Sinks: files and web servers get every message, what fails is tried again, and what is refused for good is dead."""

import json
import threading
from collections.abc import Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from tests.installed_plugins import on_path, write_package

import headrace
from headrace import errors
from headrace.client.producer.serializing import deserializer_of, serializer_of
from headrace.sinks import open_sink
from headrace.testing.plugin_checks import sample_messages


class Receiver(ThreadingHTTPServer):
    """A web server that notes what is posted to it, and answers as it is told."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.got: list[Any] = []
        self.statuses: list[int] = []
        self.redirect = ""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Receiver

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.got.append((self.path, self.headers["Content-Type"], json.loads(body)))
        status = self.server.statuses.pop(0) if self.server.statuses else 204
        self.send_response(status)
        if self.server.redirect:
            self.send_header("Location", self.server.redirect)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        """Nothing."""


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with Receiver() as serving:
        thread = threading.Thread(target=serving.serve_forever, args=(0.01,))
        thread.start()
        yield serving
        serving.shutdown()
        thread.join()


def url(receiver: Receiver) -> str:
    return f"http://127.0.0.1:{receiver.server_port}/hooks?a=1"


EXPECTED = {
    "topic": "orders",
    "partition": 0,
    "offset": 0,
    "timestamp": 1_700_000_000_000_000,
    "key": "ann",
    "value": "3 apples",
    "headers": [["lang", "en"]],
}


def test_a_message_is_posted_as_json(receiver: Receiver) -> None:
    sink = open_sink(url(receiver))
    sink.deliver(sample_messages())
    sink.close()
    assert receiver.got[0] == ("/hooks?a=1", "application/json", EXPECTED)
    bodies = [body for _, _, body in receiver.got]
    assert (bodies[1]["value_base64"], bodies[1]["key"]) == ("AP8=", None)
    assert bodies[1]["headers"] == [["tag", "a"], ["tag", None]]
    assert (bodies[2]["value"], bodies[2]["key_base64"]) == (None, "/g==")
    assert (bodies[3]["value"], bodies[3]["key"]) == ("", "")


@pytest.mark.parametrize(("status", "retryable"), [(500, True), (503, True), (429, True), (302, True), (404, False)])
def test_an_answer_other_than_2xx_is_an_error(receiver: Receiver, status: int, retryable: bool) -> None:
    receiver.statuses = [status]
    receiver.redirect = url(receiver)
    sink = open_sink(url(receiver))
    with pytest.raises(errors.DeliveryRefused, match=f"answered {status}") as raised:
        sink.deliver(sample_messages())
    assert raised.value.retryable is retryable
    assert len(receiver.got) == 1, "neither redirects nor the messages behind are sent"
    sink.close()


def test_a_receiver_that_is_not_there_is_an_error_that_may_pass() -> None:
    sink = open_sink("http://127.0.0.1:1/")
    with pytest.raises(errors.DeliveryRefused, match="cannot deliver to 127") as raised:
        sink.deliver(sample_messages())
    assert raised.value.retryable


@pytest.mark.parametrize(
    "wrong",
    ["orders", "", "nowhere://x", "http://", "http://me:pw@host/", "http://a b/", "http://h:x/", "file://host/x"],
)
def test_a_wrong_url_is_refused(wrong: str) -> None:
    with pytest.raises(errors.InvalidArgument):
        open_sink(wrong)
    app = headrace.App("headrace://127.0.0.1:1")
    with pytest.raises(errors.InvalidArgument):
        app.deliver("orders", to=wrong)


def test_a_file_has_a_line_for_each_message_also_behind_a_cut_off_one(tmp_path: Path) -> None:
    path = tmp_path / "a b.ndjson"
    path.write_text('{"cut')
    for _ in range(2):
        sink = open_sink(path.as_uri())
        sink.deliver(sample_messages()[:1])
        sink.close()
    cut, *lines = path.read_text().splitlines()
    assert cut == '{"cut'
    assert [json.loads(line) for line in lines] == [EXPECTED] * 2


def test_an_app_delivers_retries_and_gives_up(receiver: Receiver, tmp_path: Path) -> None:
    receiver.statuses = [503, 204, 400]
    with headrace.open(":memory:") as bus:
        bus.publish_many("orders", [b"later", b"wrong", b"good"])
        app = headrace.App(bus)
        app.deliver("orders", to=url(receiver), retry={"retry_seconds": 0.01})
        copy = tmp_path / "copy.ndjson"
        app.deliver("orders", to=copy.as_uri(), subscription="copy")
        thread = threading.Thread(target=app.run, kwargs={"stop_on_signals": False})
        thread.start()
        done = threading.Event()
        while not done.wait(0.01):
            with suppress(errors.SubscriptionNotFound):  # the app has not made them yet
                first, second = bus.queue("orders", "sink").stats(), bus.queue("orders", "copy").stats()
                if (first.acked, first.dead, second.acked) == (2, 1, 3):
                    done.set()
        app.stop()
        thread.join()
        assert len(receiver.got) == 4
        (dead,) = bus.queue("orders", "sink").find(status="dead")
        assert "DeliveryRefused: 127.0.0.1 answered 400" in dead.reason
        assert sorted(json.loads(line)["value"] for line in copy.read_text().splitlines()) == ["good", "later", "wrong"]


# Serializers.


def test_serializers_have_names_and_content_types() -> None:
    for name in ("msgpack", "application/vnd.msgpack", "json", "application/json"):
        assert deserializer_of(name)(serializer_of(name)({"id": [1]})) == {"id": [1]}  # type: ignore[misc]
    with headrace.open(":memory:") as bus:
        with bus.producer("orders", serializer="msgpack") as producer:
            producer.publish({"id": 1})
        with bus.subscribe("orders", deserializer="msgpack", timeout=10) as orders:
            assert next(iter(orders)).value == {"id": 1}


def test_a_plug_in_serializes_and_an_unknown_name_lists_the_known_ones(tmp_path: Path) -> None:
    source = """
class Reversed:
    api = 1
    content_type = "text/x-reversed"
    def encode(self, value): return value.encode()[::-1]
    def decode(self, data): return data[::-1].decode()
class Half:
    api = 1
    encode = None
"""
    groups = {"headrace.serializers": {"reversed": "other_texts:Reversed", "half": "other_texts:Half"}}
    with on_path(write_package(tmp_path, "other-texts", groups, source)):
        assert serializer_of("reversed")("plum") == b"mulp"
        assert deserializer_of("reversed")(b"mulp") == "plum"  # type: ignore[misc]
        with pytest.raises(errors.InvalidArgument, match=r"no serializer 'revers'; use .*'json', .*'reversed'"):
            serializer_of("revers")
        with pytest.raises(errors.PluginUnavailable, match="lacks content_type, decode"):
            deserializer_of("half")
    with pytest.raises(errors.InvalidArgument, match="no deserializer 7"):
        deserializer_of(7)  # type: ignore[arg-type]
