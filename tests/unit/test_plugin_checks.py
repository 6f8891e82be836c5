"""The checks for authors of plug-ins let good ones pass, and tell what is wrong with each bad one."""

# ruff: noqa: ARG002  the plug-ins here have the parameters that the interface says

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.installed_plugins import on_path, write_package

from headrace.client.producer.serializing import JsonSerializer, MessagePackSerializer
from headrace.gateways.authentication import AnonymousAuthenticator
from headrace.middleware.redact import make_redact
from headrace.model.batch import Columns
from headrace.model.errors import HeadraceError, InvalidArgument, PluginUnavailable
from headrace.model.identity import Identity
from headrace.sinks.file_sink import FileSink
from headrace.testing import check_authenticator, check_gateway, check_middleware, check_serializer, check_sink


def refused(text: str, check: Callable[..., None], *arguments: Any, **named: Any) -> None:
    with pytest.raises(AssertionError) as raised:
        check(*arguments, **named)
    assert text in str(raised.value)


def test_good_ones_pass(tmp_path: Path) -> None:
    check_serializer(JsonSerializer)
    check_serializer(MessagePackSerializer, [{"raw": b"\xff"}])
    path = tmp_path / "out.ndjson"
    check_sink(FileSink, path.as_uri(), lambda: len(path.read_text().splitlines()) if path.exists() else 0)
    check_authenticator(AnonymousAuthenticator, [("anonymous", b"")], [("password", b"secret")])
    options = {"fields": ["$.item"], "when": "deliver"}
    check_middleware(make_redact, options, [b'{"item": "plum"}', b"[]"], wrong_options={"feilds": []})


class Reversing:
    api = 1
    content_type = "text/plain"

    def encode(self, value: Any) -> Any:
        return json.dumps(value).encode()

    def decode(self, data: bytes) -> Any:
        return json.loads(data)


def test_serializers() -> None:
    class NoApi(Reversing):
        api = 0

    class Text(Reversing):
        def encode(self, value: Any) -> Any:
            return json.dumps(value)

    class Lossy(Reversing):
        def decode(self, data: bytes) -> Any:
            return str(json.loads(data))

    class Raising(Reversing):
        def decode(self, data: bytes) -> Any:
            raise KeyError(data)

    class Lacking:
        api = 1
        content_type = "x"

    check_serializer(Reversing)
    refused("give it `api = 1`", check_serializer, NoApi)
    refused("returned str; it must be bytes", check_serializer, Text)
    refused("encode, then decode makes", check_serializer, Lossy)
    refused("raised KeyError", check_serializer, Raising)
    refused("lacks encode, decode", check_serializer, Lacking)


class Counting:
    api = 1

    def __init__(self, url: str) -> None:
        self.count, self.lock = 0, threading.Lock()
        COUNTERS.append(self)

    def deliver(self, messages: Any) -> Any:
        with self.lock:
            self.count += len(messages)

    def close(self) -> None:
        pass


COUNTERS: list[Counting] = []


def test_sinks() -> None:
    def delivered() -> int:
        return COUNTERS[-1].count

    class Late(Counting):
        def deliver(self, messages: Any) -> Any:
            self.count += max(len(messages) - 1, 0)

    class Telling(Counting):
        def deliver(self, messages: Any) -> Any:
            return len(messages)

    class TextOnly(Counting):
        def deliver(self, messages: Any) -> Any:
            for message in messages:
                message.value.decode()

    class OneThread(Counting):
        def __init__(self, url: str) -> None:
            super().__init__(url)
            self.thread = threading.current_thread()

        def deliver(self, messages: Any) -> Any:
            if threading.current_thread() is not self.thread:
                raise RuntimeError("wrong thread")

    class CloseOnce(Counting):
        def close(self) -> None:
            del self.lock

    check_sink(Counting, "counting://", delivered)
    refused("messages had arrived when deliver returned", check_sink, Late, "late://", delivered)
    refused("failure is an exception, and success None", check_sink, Telling, "telling://")
    refused("raised", check_sink, TextOnly, "text://")
    refused("several threads call it: RuntimeError('wrong thread')", check_sink, OneThread, "one://")
    refused("close a second time raised AttributeError", check_sink, CloseOnce, "once://")


def test_authenticators() -> None:
    class LetsIn:
        api = 1

        def __call__(self, mechanism: str, credentials: bytes, peer: Any) -> Any:
            return Identity("anybody")

    class Names:
        api = 1

        def __call__(self, mechanism: str, credentials: bytes, peer: Any) -> Any:
            return "ann"

    class Raises:
        api = 1

        def __call__(self, mechanism: str, credentials: bytes, peer: Any) -> Any:
            if mechanism != "token":
                raise KeyError(mechanism)
            return Identity("ann")

    good = [("token", b"x")]
    refused("is let in as", check_authenticator, LetsIn, good)
    refused("gives 'ann', not an Identity", check_authenticator, Names, good)
    refused("raise a HeadraceError", check_authenticator, Raises, good)


class Untouched:
    api = 1
    inline = True
    needs = ("values",)

    def __init__(self, options: Any) -> None:
        if options.get("bad"):
            raise InvalidArgument("bad")

    def on_publish(self, columns: Columns, context: Any) -> Any:
        return columns


def test_middleware() -> None:
    class Fewer(Untouched):
        def on_publish(self, columns: Columns, context: Any) -> Any:
            columns.values = list(columns.values)[:-1]
            return columns

    class Greedy(Untouched):
        needs = ()

        def on_publish(self, columns: Columns, context: Any) -> Any:
            return list(columns.values)

    class Nothing(Untouched):
        def on_publish(self, columns: Columns, context: Any) -> Any:
            return None

    class Changing(Untouched):
        def on_deliver(self, columns: Columns, context: Any) -> Any:
            columns.values = [b"changed"] * len(columns.values)
            return columns

    class Waiting(Untouched):
        inline = False

        def on_deliver(self, columns: Columns, context: Any) -> Any:
            return columns

    check_middleware(Untouched, wrong_options={"bad": True})
    refused("raise InvalidArgument for them", check_middleware, Untouched, wrong_options={"good": True})
    refused("returned 0 messages", check_middleware, Fewer)
    refused("raised LookupError", check_middleware, Greedy)
    refused("instead of columns", check_middleware, Nothing)
    refused("changed the columns that it was given", check_middleware, Changing)
    refused("not inline", check_middleware, Waiting)


GATEWAY = """
from headrace.gateways.gateway import GatewayStatistics

class Gateway:
    api = 1
    busy = False
    def __init__(self, context, addresses):
        pass
    async def start(self):
        return ["{url}"]
    def statistics(self):
        return GatewayStatistics({connections}, 0)
    def descriptors(self):
        return {descriptors}
    stop_accepting = drain = ignore_requests = close = abort = lambda self: None
"""


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({}, ""),
        ({"url": "other://a:1"}, "none of these URLs has the scheme"),
        ({"url": "checked://a:0"}, "tell the port that was chosen"),
        ({"connections": 2}, "2 connections are left"),
        ({"descriptors": "[None]"}, "descriptors returned [None]"),
    ],
)
def test_gateways(given: dict[str, Any], text: str, tmp_path: Path) -> None:
    source = GATEWAY
    for name, fill in {"url": "checked://a:1", "connections": 0, "descriptors": "[]", **given}.items():
        source = source.replace("{" + name + "}", str(fill))
    groups = {"headrace.gateways": {"checked": "checked_gateway:Gateway"}}
    with on_path(write_package(tmp_path, "checked-gateway", groups, source)):
        if not text:
            check_gateway("checked://a:0", print)
        else:
            refused(text, check_gateway, "checked://a:0")

    with pytest.raises(HeadraceError, match="no plug-in 'checked'"):
        check_gateway("checked://a:0")


def test_an_authenticator_is_chosen_by_name(tmp_path: Path) -> None:
    import headrace

    source = """
from headrace.model.errors import UnsupportedOperation
class Nobody:
    api = 1
    def __call__(self, mechanism, credentials, peer):
        raise UnsupportedOperation("nobody is let in")
"""
    groups = {"headrace.authenticators": {"nobody": "nobody_else:Nobody"}}
    with on_path(write_package(tmp_path, "nobody-else", groups, source)):
        with pytest.raises(HeadraceError, match="nobody is let in"):
            headrace.open(":memory:", authenticator="nobody", timeout=2)
        with headrace.open(":memory:", authenticator="anonymous") as bus:
            assert bus.info().topics == 0
        with pytest.raises(PluginUnavailable, match=r"no plug-in 'nobdy' in headrace\.authenticators; .*nobody"):
            headrace.open(":memory:", authenticator="nobdy")
