"""Conformance checks for authors of plug-ins: each raises AssertionError with a text that says what is wrong."""

import asyncio
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from headrace.broker.middleware_chain import MiddlewareChain, MiddlewareStep
from headrace.broker.pending_answer import PendingAnswer
from headrace.client.results import Received
from headrace.gateways.authentication import Peer
from headrace.model.batch import Columns, encode
from headrace.model.errors import HeadraceError, InvalidArgument, MessageRefused
from headrace.model.headers import RepeatedHeaders
from headrace.model.identity import Identity
from headrace.model.message import Message
from headrace.model.middleware import MiddlewareContext
from headrace.plugins import API
from headrace.server import Server, server_settings

_PATIENCE_S = 30.0
_JSON_SAMPLES: tuple[Any, ...] = ({"id": 1, "tags": ["a", "b"]}, [1, 2.5, None], "grün", 0)


def sample_messages(topic: str = "orders") -> list[Message]:
    """Messages of all kinds: with and without key, value and headers; text and bytes; a header that repeats."""
    repeated = RepeatedHeaders(["tag", "tag"], [b"a", None])
    return [
        Received(0, b"3 apples", 1_700_000_000_000_000, b"ann", {"lang": b"en"}, topic=topic),
        Received(1, b"\x00\xff", 1_700_000_000_000_001, None, repeated, topic=topic),
        Received(2, None, 1_700_000_000_000_002, b"\xfe", None, topic=topic),
        Received(3, b"", 1_700_000_000_000_003, b"", None, topic=topic),
    ]


def check_serializer(factory: Any, samples: Sequence[Any] = _JSON_SAMPLES) -> None:
    """Check a serializer: bytes come out, the same value comes back, and no state is kept between values."""
    made = _made(factory, "serializer", "content_type", "encode", "decode")
    assert type(made.content_type) is str, f"content_type is text, not {made.content_type!r}"
    for turn in range(2):
        for sample in samples:
            encoded = _called(f"encode({sample!r})", made.encode, sample)
            assert type(encoded) is bytes, f"encode({sample!r}) returned {type(encoded).__name__}; it must be bytes"
            decoded = _called(f"decode({encoded!r})", made.decode, encoded)
            again = "" if not turn else ", the second time"
            assert decoded == sample, f"encode, then decode makes {decoded!r} of {sample!r}{again}"


def check_sink(factory: Any, url: str, delivered: Callable[[], int] | None = None) -> None:
    """Check a sink: it takes messages of all kinds, several threads at once, and closes.

    `delivered` returns how many messages have arrived; without it only what the sink says is checked.
    """
    sink = _made(factory, "sink", "deliver", "close", arguments=(url,))
    messages = sample_messages()
    before = delivered() if delivered is not None else 0
    expected = 0
    for batch in ([], messages[:1], messages):
        returned = _called(f"deliver of {len(batch)} messages", sink.deliver, batch)
        assert returned is None, f"deliver returned {returned!r}: failure is an exception, and success None"
        expected += len(batch)
    failures: list[BaseException] = []

    def deliver() -> None:
        try:
            for message in messages:
                sink.deliver([message])
        except BaseException as error:  # noqa: BLE001  # told below, on the thread that checks
            failures.append(error)

    threads = [threading.Thread(target=deliver) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(_PATIENCE_S)
    assert not any(thread.is_alive() for thread in threads), "deliver does not return when several threads call it"
    assert not failures, f"deliver fails when several threads call it: {failures[0]!r}"
    expected += 3 * len(messages)
    if delivered is not None:
        found = delivered() - before
        assert found == expected, f"{found} of {expected} messages had arrived when deliver returned"
    for time in ("", " a second time"):
        assert _called(f"close{time}", sink.close) is None, "close returns None"


def check_authenticator(
    factory: Any,
    accepted: Sequence[tuple[str, bytes]],
    refused: Sequence[tuple[str, bytes]] = (("no-such-mechanism", b"?"),),
) -> None:
    """Check an authenticator: it knows who gives the accepted credentials, and refuses the others with an error."""
    authenticate = _made(factory, "authenticator", "__call__")
    peer = Peer("check", "192.0.2.1:7")
    for mechanism, credentials in accepted:
        answer = _answered(authenticate, mechanism, credentials, peer)
        assert isinstance(answer, Identity), f"{mechanism} with good credentials gives {answer!r}, not an Identity"
    for mechanism, credentials in refused:
        try:
            answer = _answered(authenticate, mechanism, credentials, peer)
        except HeadraceError:
            continue
        except Exception as error:
            raise AssertionError(
                f"{mechanism} with wrong credentials raises {error!r}: raise a HeadraceError, which clients are told"
            ) from error
        assert isinstance(answer, HeadraceError), f"{mechanism} with wrong credentials is let in as {answer!r}"


def check_middleware(
    factory: Any,
    options: Mapping[str, Any] | None = None,
    values: Sequence[bytes | None] = (b'{"item": "plum"}', b"", b"\x00\xff"),
    *,
    wrong_options: Mapping[str, Any] | None = None,
) -> None:
    """Check a middleware: it keeps to the columns that it needs, and returns what the broker can store and deliver."""
    made = _made(factory, "middleware", arguments=(dict(options or {}),))
    if wrong_options is not None:
        try:
            factory(dict(wrong_options))
        except InvalidArgument:
            pass
        else:
            raise AssertionError(f"the options {wrong_options!r} are accepted: raise InvalidArgument for them")
    try:
        chain = MiddlewareChain([MiddlewareStep("checked", made)])
    except InvalidArgument as error:
        raise AssertionError(str(error)) from error
    context = MiddlewareContext("orders", "default", 0, 1_700_000_000_000_000, "ann", "check")
    for count in {1, len(values)}:
        columns = Columns(list(values[:count]), keys=[b"k"] * count, headers=[{"lang": b"en"}] * count)
        batch = encode(columns, context.time_us)
        try:
            chain.process(batch, context)
        except MessageRefused:
            pass  # it may refuse what it wants
        except HeadraceError as error:
            raise AssertionError(str(error)) from error
    if getattr(made, "on_deliver", None) is not None:
        _check_delivery(made, list(values), context)


def check_gateway(url: str, talk: Callable[[str], None] | None = None) -> None:
    """Check the gateway that is installed for the scheme of a URL, which listens with port 0: it starts and stops.

    `talk` is called in a thread with the URL on which it listens, to speak the protocol; what it raises is raised.
    """

    async def check() -> None:
        server = Server(server_settings({"data": ":memory:", "listen": [url], "insecure": True, "drain_seconds": 1}))
        await asyncio.wait_for(server.start(), _PATIENCE_S)
        try:
            (gateway,) = [each for each in server.gateways if each is not server.native]
            listening = [one for one in server.listening if urlsplit(one).scheme == urlsplit(url).scheme]
            assert listening, f"start returned {server.listening}: none of these URLs has the scheme of {url}"
            assert urlsplit(listening[0]).port != 0, f"start returned {listening[0]}: tell the port that was chosen"
            statistics = gateway.statistics()
            assert len(statistics) == 2, f"statistics returned {statistics!r}, not GatewayStatistics"
            descriptors = gateway.descriptors()
            assert all(type(one) is int and one >= 0 for one in descriptors), f"descriptors returned {descriptors!r}"
            assert gateway.busy is False, "busy is true although nobody has asked anything"
            if talk is not None:
                await asyncio.wait_for(asyncio.to_thread(talk, listening[0]), _PATIENCE_S)
        finally:
            stopped = await asyncio.wait_for(server.stop(), _PATIENCE_S)
        assert stopped, "requests were still without answers when the server stopped"
        for call in (gateway.close, gateway.abort):
            call()  # both may be called again
        left = gateway.statistics().connections
        assert left == 0, f"{left} connections are left after close and abort"

    asyncio.run(check())


def _check_delivery(made: Any, values: list[bytes | None], context: MiddlewareContext) -> None:
    columns = Columns(values, headers=[{"lang": b"en"}] * len(values))
    before = list(columns.values), [dict(headers or {}) for headers in columns.headers or ()]
    delivered = _called("on_deliver", made.on_deliver, columns, context)
    assert isinstance(delivered, Columns), f"on_deliver returned {type(delivered).__name__}; it must be Columns"
    assert len(delivered.values) == len(values), "on_deliver returned another number of messages"
    after = list(columns.values), [dict(headers or {}) for headers in columns.headers or ()]
    assert before == after, "on_deliver changed the columns that it was given, which others read too: return others"


def _made(factory: Any, what: str, *members: str, arguments: tuple[Any, ...] = ()) -> Any:
    """What a factory makes, if factory and product are what Headrace expects."""
    api = getattr(factory, "api", None)
    assert api == API, f"the {what} says api = {api!r}: give it `api = {API}`, the interface that it is written for"
    assert callable(factory), f"the {what} is a {type(factory).__name__}, which cannot be called to make one"
    made = _called(f"making the {what}", factory, *arguments)
    lacking = [member for member in members if not hasattr(made, member)]
    assert not lacking, f"the {what} lacks {', '.join(lacking)}"
    return made


def _called(what: str, call: Callable[..., Any], *arguments: Any) -> Any:
    try:
        return call(*arguments)
    except Exception as error:
        raise AssertionError(f"{what} raised {type(error).__name__}: {error}") from error


def _answered(authenticate: Any, mechanism: str, credentials: bytes, peer: Peer) -> Any:
    """What an authenticator says, waiting for it if it answers later."""
    answer = authenticate(mechanism, credentials, peer)
    if not isinstance(answer, PendingAnswer):
        return answer

    async def wait() -> Any:
        return await asyncio.wait_for(asyncio.ensure_future(_awaited(answer)), _PATIENCE_S)

    return asyncio.run(wait())


async def _awaited(answer: "PendingAnswer[Identity]") -> Any:
    return await answer
