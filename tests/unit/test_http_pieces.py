"""The parts of the HTTP gateway that need no server, and that code and documents say the same."""

import asyncio
import gzip
import importlib
import inspect
import json
import re
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import msgspec
import pytest
from tests.http_client import needs_http

from headrace.cli.configuration import configure
from headrace.gateways.http import installation
from headrace.model import errors
from headrace.model.envelope import (
    EnvelopeContent,
    MessageEnvelope,
    StoredFields,
    describe_message,
    envelope_key,
    parse_time_text,
)
from headrace.model.errors import (
    Busy,
    Fenced,
    GatewayUnavailable,
    HeadraceError,
    InvalidArgument,
    NotServing,
    TopicNotFound,
)
from headrace.model.metric_requests import MetricFamily, MetricSample, gauge
from headrace.server import ServerSettings, server_settings
from headrace.server.gateway_list import listen_addresses, load_gateways

pytestmark = needs_http


def problems() -> Any:
    return importlib.import_module("headrace.gateways.http.problems")


def resource_table() -> Any:
    return importlib.import_module("headrace.gateways.http.resource_table")


# Errors.


def test_every_error_code_has_a_status() -> None:
    kinds = {kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, HeadraceError)}
    assert problems().STATUSES.keys() == {kind.code for kind in kinds}


def test_no_code_of_http_is_one_of_the_brokers() -> None:
    assert not problems().HttpError.codes.keys() & problems().STATUSES.keys()


def test_a_problem_says_what_the_error_says() -> None:
    module = problems()
    problem = module.problem_of(TopicNotFound("there is no topic x", nearest=["y"]))
    assert msgspec.to_builtins(problem) == {
        "type": "/v1/docs#topic_not_found",
        "title": "topic not found",
        "status": 404,
        "detail": "there is no topic x",
        "code": "topic_not_found",
        "retryable": False,
        "details": {"nearest": ["y"]},
    }
    busy = module.problem_of(Busy())
    assert (busy.status, busy.retryable) == (429, True)
    assert module.problem_headers(busy) == [(b"retry-after", b"1")]
    doubtful = module.problem_of(Fenced())
    assert (doubtful.status, doubtful.retryable) == (503, False)
    assert module.problem_headers(doubtful) == [], "nobody repeats by himself what may have happened"
    assert b'"code":"fenced"' in module.raw_problem(module.begun_error(NotServing("it hands over")))
    assert isinstance(module.begun_error(Busy()), Busy)
    odd = module.problem_of(InvalidArgument("x", cause=object()))
    assert json.loads(module.encode_problem(odd))["details"]["cause"]


# The document.


def test_every_route_is_in_the_document_and_nothing_else() -> None:
    table = resource_table()
    document = table.make_document(table.ROUTES, "1")
    described = {(method.upper(), path) for path, methods in document["paths"].items() for method in methods}
    assert described == {(route.method, route.path) for route in table.ROUTES}
    for route in table.ROUTES:
        operation = document["paths"][route.path][route.method.lower()]
        named = {one["name"] for one in operation["parameters"] if one["in"] == "query"}
        assert named == (set(route.query.__struct_fields__) if route.query else set())
        assert ("requestBody" in operation) == (route.body is not None)
        assert str(route.status) in operation["responses"]


def test_every_handler_reads_only_what_its_route_declares() -> None:
    """A handler that decodes a body or a query of another type than its route would make the document wrong."""
    for route in resource_table().ROUTES:
        source = inspect.getsource(route.handler)
        if "def handle(" in source:
            continue  # made by request_route, of the same declaration
        queried = set(re.findall(r"call\.query\((\w+)\)", source))
        assert queried == ({route.query.__name__} if route.query else set()), route
        reads = "call.decoded(" in source or "call.read_body()" in source
        assert reads == (route.body is not None), route
        module = sys.modules[route.handler.__module__]
        for name in re.findall(r"call\.decoded\((\w+)\)", source):
            assert getattr(module, name).type is route.body, route


def test_every_field_of_a_body_and_every_route_is_explained() -> None:
    table = resource_table()
    document = table.make_document(table.ROUTES, "1")
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            assert operation["summary"], (method, path)
    settings = document["components"]["schemas"]["TopicSettingsFields"]["properties"]
    assert "never less" in settings["partitions"]["description"]


def test_examples_are_taken_as_they_are_shown() -> None:
    for route in resource_table().ROUTES:
        if route.example is not None:
            kind = route.body[0] if isinstance(route.body, tuple) else route.body
            msgspec.json.decode(json.dumps(route.example), type=kind)


# The router.


def test_paths_are_found_with_quoted_parameters() -> None:
    table = resource_table()
    router = importlib.import_module("headrace.gateways.http.router").Router(table.ROUTES)
    route, parameters = router.find(b"/v1/topics/a%2Fb%20c/subscriptions/d", "GET")
    assert (route.path, parameters) == ("/v1/topics/{topic}/subscriptions/{subscription}", ["a/b c", "d"])
    for path in (b"/", b"/v1", b"/v1/topics/", b"/v1/topics//messages", b"/v1/topics/a/b", b"//v1/topics", b""):
        with pytest.raises(problems().HttpError):
            router.find(path, "GET")


# Compression.


def content_encoding() -> Any:
    return importlib.import_module("headrace.gateways.http.content_encoding")


@pytest.mark.parametrize("name", [b"gzip", b"x-gzip", b"ZSTD"])
def test_unpacking_stops_at_the_limit(name: bytes) -> None:
    module = content_encoding()
    packed = module.zstd.compress(b"a" * 1000) if name == b"ZSTD" else gzip.compress(b"a" * 1000)
    assert asyncio.run(module.unpack(packed, name, 1000)) == b"a" * 1000
    for wrong in (packed + b"x", packed + packed, packed[:-1], b"", b"no such format"):
        with pytest.raises(problems().HttpError) as refused:
            asyncio.run(module.unpack(wrong, name, 4000))
        assert refused.value.code == "invalid_encoding"
    with pytest.raises(problems().HttpError) as refused:
        asyncio.run(module.unpack(packed, name, 999))
    assert refused.value.status == 413


def test_what_is_packed_can_be_unpacked() -> None:
    module = content_encoding()
    plain = bytes(range(256)) * 5000
    assert gzip.decompress(asyncio.run(module.pack(plain, b"gzip"))) == plain
    assert module.zstd.decompress(asyncio.run(module.pack(plain, b"zstd"))) == plain
    for name in (b"gzip", b"zstd"):
        assert asyncio.run(module.unpack(asyncio.run(module.pack(plain, name)), name, len(plain))) == plain


def test_a_frame_with_too_large_a_window_is_refused() -> None:
    module = content_encoding()
    compressor = module.zstd.ZstdCompressor(options={module.zstd.CompressionParameter.window_log: 24})
    packed = compressor.compress(b"a" * 1000) + compressor.flush()
    with pytest.raises(problems().HttpError) as refused:
        asyncio.run(module.unpack(packed, b"zstd", 1 << 20))
    assert refused.value.code == "invalid_encoding"


@pytest.mark.parametrize(
    ("accepted", "chosen"),
    [
        (b"", b""),
        (b"br", b""),
        (b"gzip", b"gzip"),
        (b"GZIP, deflate, br, zstd", b"zstd"),
        (b"gzip, zstd;q=0.9", b"gzip"),
        (b"zstd;q=0, gzip;q=0.001", b"gzip"),
        (b"zstd; q=0.0, gzip ; Q=0", b""),
        (b"*", b"zstd"),
        (b"*;q=0, gzip", b"gzip"),
        (b"identity;q=1, zstd;q=0.5", b""),
        (b"zstd;q=nonsense", b"zstd"),
        (b",,;q=1, gzip", b"gzip"),
    ],
)
def test_the_encoding_with_the_best_quality_is_chosen(accepted: bytes, chosen: bytes) -> None:
    assert content_encoding().chosen_encoding(accepted, 5000) == chosen


# Metrics.


def test_metrics_keep_every_digit_and_escape_names() -> None:
    metrics = importlib.import_module("headrace.gateways.http.metrics")
    lag = MetricFamily("lag", "gauge", "Lag.", [MetricSample(1_234_567_890_123, {"group": 'a"b\\c\nd'})])
    assert 'headrace_lag{group="a\\"b\\\\c\\nd"} 1234567890123' in metrics.family_text(lag).splitlines()
    assert "headrace_late_seconds 0.25" in metrics.family_text(gauge("late_seconds", "Late.", 0.25, "seconds"))


# The envelope.


def test_an_envelope_is_stored_and_read_back() -> None:
    decode = msgspec.json.Decoder(MessageEnvelope).decode
    fields = StoredFields()
    for text in (
        b'{"value": {"a":1}, "key": "k"}',
        b'{"value_base64": "/w==", "key_base64": "/w=="}',
        b'{"value": null}',
    ):
        envelope = decode(text)
        fields.add(envelope, envelope_key(envelope))
    columns = fields.columns(5)
    assert columns.values == [b'{"a":1}', b"\xff", None]
    assert columns.keys == [b"k", b"\xff", None]
    assert columns.headers == [{"content-type": b"application/json"}, None, None]
    assert (columns.timestamps, columns.dues, columns.priorities) == (None, None, None)
    pretty = describe_message(EnvelopeContent(0, 0, 0), b'{\n "a": 1\r\n}', None, {"content-type": b"application/json"})
    assert b"\n" not in msgspec.json.encode(pretty)
    assert json.loads(msgspec.json.encode(pretty))["value"] == {"a": 1}


def test_times_are_read_from_text() -> None:
    assert parse_time_text("-5") == -5
    for wrong in ("99999999999999999999", "2026-01-01T00:00:00", "now", "2026-13-01T00:00:00Z"):
        with pytest.raises(InvalidArgument):
            parse_time_text(wrong)


# Settings and addresses.


def test_serve_listens_for_http_where_nothing_else_is_said() -> None:
    def address(flags: dict[str, str | list[str]]) -> str:
        return configure(flags, {}, "/dev/null", {}).settings.http_address

    assert address({}) == installation.DEFAULT_HTTP_ADDRESS
    assert address({"port": "0"}) == ""
    assert address({"host": "0.0.0.0"}) == ""
    assert address({"listen": ["headrace://127.0.0.1:0"]}) == ""
    assert address({"port": "0", "http_address": "127.0.0.1:0"}) == "127.0.0.1:0"
    assert address({"http_address": ""}) == ""
    with patch.object(importlib.import_module("headrace.cli.configuration"), "missing_packages", lambda: ["uvicorn"]):
        assert address({}) == ""


def test_without_the_extra_an_address_of_http_says_what_to_install() -> None:
    settings = ServerSettings(data=":memory:", listen=["http://127.0.0.1:0"])
    with (
        patch.object(installation, "find_spec", lambda _: None),
        pytest.raises(GatewayUnavailable, match=r"pip install 'headrace\[http\]'"),
    ):
        load_gateways(listen_addresses(settings))


@pytest.mark.parametrize(
    "given",
    [
        {"http_address": "http://a"},
        {"http_address": "a/b"},
        {"http_address": "user@a:1"},
        {"http_origins": ["app.example.org"]},
        {"http_origins": ["https://a/b"]},
        {"http_body_bytes_max": 1},
        {"http_request_seconds": 0},
        {"http_stream_seconds": -1},
    ],
)
def test_wrong_settings_are_refused(given: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument, match="http_"):
        server_settings({"data": ":memory:", **given})


@pytest.mark.parametrize("url", ["http://", "http://a/b", "http://a?x=1", "http://u@a", "http:///x"])
def test_wrong_addresses_are_refused(url: str) -> None:
    gateway = importlib.import_module("headrace.gateways.http.gateway")
    addresses = importlib.import_module("headrace.gateways.addresses")
    with pytest.raises(InvalidArgument):
        gateway._checked_address(addresses.parse_listen_address(url))


def test_nothing_of_the_extra_is_imported_unless_an_address_names_it() -> None:
    import subprocess

    script = (
        "import sys, headrace\n"
        "with headrace.open(':memory:') as bus: bus.publish('a', b'1')\n"
        "print([name for name in sys.modules if name.split('.')[0] in ('uvicorn', 'httptools', 'click', 'h11')])"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, check=True, cwd=Path(__file__).parents[2]
    )
    assert done.stdout.strip() == b"[]", done


def test_a_header_with_a_very_long_name_is_not_sent() -> None:
    pieces = importlib.import_module("headrace.gateways.http.message_headers")
    headers = {"n" + "x" * 70_000: b"v", "ce-" + "x" * 300: b"v", "kept": b"v"}
    assert pieces.response_headers(headers)[1] == ((b"headrace-header-kept", b"v"),)
