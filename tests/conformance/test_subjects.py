"""One suite for subjects and request/reply: over all transports, for threads and for asyncio."""

import asyncio
import json
import threading
from pathlib import Path
from typing import Any

import pytest
from tests.conformance.stage import Run, running, threaded

import headrace
from headrace import errors


async def asked(bus: Any, *args: Any, **named: Any) -> Any:
    """Ask in a thread, if the bus has that face: the app's handlers may need this one's loop."""
    if threaded(bus):
        return await asyncio.to_thread(bus.inner.request, *args, **named)
    return await bus.request(*args, **named)


async def responders(bus: Any, count: int) -> None:
    """Wait until so many responders are there."""
    while (await bus.subjects.info()).responders != count:
        await asyncio.sleep(0.005)


# Live subscriptions.


def test_a_live_subscription_receives_what_is_published(run: Run, topic: str) -> None:
    async def story(bus: Any) -> None:
        subject = topic.replace("-", ".")
        async with bus.subjects.subscribe(f"{subject}.*", timeout=5) as live:
            published = await bus.subjects.publish(f"{subject}.eu", b"1", key="k", headers={"h": "x"}, timestamp=7)
            assert (published.receivers, published.stored) == (1, False)
            await bus.subjects.publish_many(f"{subject}.us", [b"2", b"3"], keys=[None, b"q"])
            await bus.subjects.publish(f"{subject}.us", {"n": 4}, serializer="json")
            assert (await bus.subjects.publish(subject, b"no")).receivers == 0
            got = []
            async for message in live:
                got.append(message)
                if len(got) == 4:
                    break
        assert [(one.subject, one.value) for one in got] == [
            (f"{subject}.eu", b"1"),
            (f"{subject}.us", b"2"),
            (f"{subject}.us", b"3"),
            (f"{subject}.us", b'{"n":4}'),
        ]
        assert (got[0].key, got[0].headers, got[0].timestamp) == (b"k", {"h": b"x"}, 7)
        assert got[0].header_list == [("h", b"x")]
        assert got[2].key == b"q"
        assert got[3].json() == {"n": 4}
        assert (await bus.subjects.publish(f"{subject}.eu", b"1")).receivers == 0, "it ended with the block"

    run(story)


def test_an_iteration_ends_by_timeout_and_stop(run: Run, topic: str) -> None:
    async def story(bus: Any) -> None:
        live = bus.subjects.subscribe(topic, timeout=0.05)
        assert [message async for message in live] == []
        async with bus.subjects.subscribe(topic) as live:
            await bus.subjects.publish_many(topic, [b"1", b"2", b"3"])
            got = []
            async for message in live:
                got.append(message.value)
                if len(got) == 3:
                    live.stop()
            assert got == [b"1", b"2", b"3"]
        with pytest.raises(errors.Closed):
            await live.begin()

    run(story)


def test_no_messages_are_sent_to_nobody(run: Run, topic: str) -> None:
    async def story(bus: Any) -> None:
        async with bus.subjects.subscribe(topic, timeout=0.05) as live:
            published = await bus.subjects.publish_many(topic, [])
            assert (published.receivers, published.stored) == (0, False)
            assert [message async for message in live] == []

    run(story)


def test_a_full_buffer_loses_messages_and_counts_them(run: Run, topic: str) -> None:
    async def story(bus: Any) -> None:
        async with bus.subjects.subscribe(topic, timeout=1, buffer_messages=3) as live:
            for number in range(10):
                await bus.subjects.publish(topic, b"%d" % number)
            while live.dropped < 7:
                await asyncio.sleep(0.005)
            assert [message.value async for message in live] == [b"0", b"1", b"2"]
            assert live.dropped == 7
            assert "dropped=7" in repr(live.inner if threaded(bus) else live)

    run(story)


def test_members_of_a_queue_share_messages(run: Run, topic: str) -> None:
    async def story(bus: Any) -> None:
        async with (
            bus.subjects.subscribe(topic, queue="q", timeout=0.1) as ann,
            bus.subjects.subscribe(topic, queue="q", timeout=0.1) as bob,
        ):
            for number in range(10):
                assert (await bus.subjects.publish(topic, b"%d" % number)).receivers == 1
            got = [[message.value async for message in one] for one in (ann, bob)]
        assert sorted(got[0] + got[1]) == [b"%d" % number for number in range(10)]
        assert len(got[0]) == len(got[1]) == 5

    run(story)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda bus: bus.subjects.publish("a..b", b""),
        lambda bus: bus.subjects.publish("a.*", b""),
        lambda bus: bus.subjects.publish("$events.x", b""),
        lambda bus: bus.subjects.publish(7, b""),
        lambda bus: bus.subjects.publish("a", "text"),
        lambda bus: bus.subjects.publish("a", b"", headers=5),
        lambda bus: bus.subjects.publish_many("a..b", []),
        lambda bus: bus.subjects.publish_many("a", [b"1"], keys=[b"1", b"2"]),
        lambda bus: bus.request("a..b"),
        lambda bus: bus.request(7),
        lambda bus: bus.request("a", "text"),
        lambda bus: bus.request("a", timeout=0),
        lambda bus: bus.request("a", callback=7),
        lambda bus: bus.request("a", callback="nothing://here"),
        lambda bus: bus.request("a", callback="no/good/topic"),
    ],
)
def test_wrong_arguments_are_refused(run: Run, wrong: Any) -> None:
    async def story(bus: Any) -> None:
        with pytest.raises(errors.InvalidArgument):
            await wrong(bus)
        for given in (
            {"pattern": "a.>.b"},
            {"pattern": 7},
            {"pattern": "a", "queue": 7},
            {"pattern": "a", "timeout": -1},
        ):
            with pytest.raises(errors.InvalidArgument):
                bus.subjects.subscribe(**given)
        with pytest.raises(errors.InvalidArgument):
            async with bus.subjects.subscribe("a", queue="a/b"):
                pass

    run(story)


def test_large_messages_and_replies_come_whole(run: Run, topic: str) -> None:
    async def story(bus: Any) -> None:
        large = bytes(range(256)) * 4096
        async with bus.subjects.subscribe(topic, timeout=5) as live:
            await bus.subjects.publish(topic, large)
            async for message in live:
                assert message.value == large
                break

        def prepare(app: Any) -> None:
            app.serves(topic)(lambda request: request.value)

        async with running(bus, prepare):
            await responders(bus, 1)
            assert (await asked(bus, topic, large)).value == large

    run(story)


# Request and reply.


def test_a_request_is_answered(run: Run, topic: str) -> None:
    async def story(bus: Any) -> None:
        def prepare(app: Any) -> None:
            @app.serves(topic, concurrency=2, deserializer="json")
            def quote(request: headrace.IncomingRequest) -> Any:
                assert request.subject == topic
                assert 0 < request.timeout <= 5
                return headrace.Reply({"item": request.value}, headers={"lang": request.headers["lang"]})

        async with running(bus, prepare):
            await responders(bus, 1)
            reply = await asked(bus, topic, "plum", serializer="json", headers={"lang": "en"})
        assert reply.json() == {"item": "plum"}
        assert reply.headers == {"lang": b"en"}
        assert reply.header_list == [("lang", b"en")]
        assert (await bus.subjects.info()).responders == 0, "the app has ended"

    run(story)


@pytest.mark.parametrize(
    ("returned", "value"),
    [
        (b"x", b"x"),
        ("ä", "ä".encode()),
        (None, b""),
        ([1, None], b"[1,null]"),
        (bytearray(b"y"), b"y"),
        (True, b"true"),
    ],
)
def test_what_a_handler_returns_is_the_reply(run: Run, topic: str, returned: Any, value: bytes) -> None:
    async def story(bus: Any) -> None:
        def prepare(app: Any) -> None:
            app.serves(topic)(lambda: returned)

        async with running(bus, prepare):
            await responders(bus, 1)
            assert (await asked(bus, topic)).value == value

    run(story)


def test_coroutines_can_be_handlers(run: Run, topic: str) -> None:
    async def story(bus: Any) -> None:
        def prepare(app: Any) -> None:
            @app.serves(topic, concurrency=3)
            async def handle(request: headrace.IncomingRequest) -> bytes:
                await asyncio.sleep(0.001)
                if not request.value:
                    raise LookupError("empty")
                return bytes(request.value)

        async with running(bus, prepare):
            await responders(bus, 1)
            assert (await asked(bus, topic, b"x")).value == b"x"
            with pytest.raises(errors.ServiceFailed, match="LookupError: empty"):
                await asked(bus, topic)

    run(story)


class OutOfStock(Exception):
    """An error with a code of its own."""

    code = "out_of_stock"
    retryable = True

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.details = {"item": "plum"}


@pytest.mark.parametrize(
    ("raised", "code", "text", "retryable"),
    [
        (ValueError("no plums"), "value_error", "ValueError: no plums", False),
        (headrace.Reject("not for us"), "rejected", "not for us", False),
        (headrace.Retry(reason="later"), "retry_later", "later", True),
        (OutOfStock("none left"), "out_of_stock", "OutOfStock: none left", True),
        (errors.TopicNotFound("there is no topic x"), "topic_not_found", "there is no topic x", False),
        (errors.ServiceFailed("deep", error_code="below", retryable=True), "below", "deep", True),
    ],
)
def test_a_failing_handler_gives_the_error_object(
    run: Run, topic: str, raised: Exception, code: str, text: str, retryable: bool
) -> None:
    async def story(bus: Any) -> None:
        def prepare(app: Any) -> None:
            @app.serves(topic)
            def handle() -> None:
                secret = "hunter2"  # noqa: F841  # a traceback with local variables would tell it
                raise raised

        async with running(bus, prepare):
            await responders(bus, 1)
            with pytest.raises(errors.ServiceFailed) as caught:
                await asked(bus, topic)
        error = caught.value
        assert (error.error_code, str(error), error.retryable) == (code, text, retryable)
        assert error.error_details == ({"item": "plum"} if code == "out_of_stock" else {})
        assert "hunter2" not in repr((error.args, error.details))
        assert "File" not in repr((error.args, error.details))

    run(story)


def test_a_request_that_cannot_be_read_and_a_reply_that_cannot_be_sent(run: Run, topic: str) -> None:
    async def story(bus: Any) -> None:
        def prepare(app: Any) -> None:
            app.serves(topic, deserializer="json")(lambda _: object())

        async with running(bus, prepare):
            await responders(bus, 1)
            with pytest.raises(errors.ServiceFailed, match="cannot be deserialized") as unread:
                await asked(bus, topic, b"{")
            with pytest.raises(errors.ServiceFailed, match="a reply is bytes, text") as unsent:
                await asked(bus, topic, b"{}")
        assert unread.value.error_code == "invalid_argument"
        assert unsent.value.error_code == "cannot_serialize"

    run(story)


def test_nobody_there_and_no_answer_in_time(run: Run, topic: str) -> None:
    async def story(bus: Any) -> None:
        with pytest.raises(errors.NoResponders):
            await bus.request(topic, timeout=60)
        release = threading.Event()

        def prepare(app: Any) -> None:
            app.serves(topic)(lambda: release.wait(10))

        async with running(bus, prepare):
            await responders(bus, 1)
            with pytest.raises(errors.Timeout, match=r"within 0\.05 s"):
                await asked(bus, topic, timeout=0.05)
            with pytest.raises(errors.Timeout, match="were busy"):
                await asked(bus, topic, timeout=0.05)
            release.set()
        assert (await bus.subjects.info()).late_replies >= 1

    run(story)


def test_many_requests_share_the_responders(run: Run, topic: str) -> None:
    async def story(bus: Any) -> None:
        seen: dict[int, int] = {}
        most: list[int] = [0, 0]
        guard = threading.Lock()

        def prepare(app: Any) -> None:
            for number in range(2):

                def handle(request: Any, number: int = number) -> Any:
                    with guard:
                        most[number] += 1
                        assert most[number] <= 3
                        seen[number] = seen.get(number, 0) + 1
                    with guard:
                        most[number] -= 1
                    return request.value

                app.serves(topic, concurrency=3)(handle)

        async with running(bus, prepare):
            await responders(bus, 2)
            values = [b"%d" % number for number in range(60)]
            replies = await asyncio.gather(*(asked(bus, topic, value) for value in values))
        assert [reply.value for reply in replies] == values
        assert seen[0] + seen[1] == 60
        assert min(seen.values()) > 0

    run(story)


def test_a_reply_goes_to_a_function_or_a_topic(run: Run, topic: str) -> None:
    async def story(bus: Any) -> None:
        def prepare(app: Any) -> None:
            app.serves(topic)(lambda request: headrace.Reply(request.value, {"h": "x"}))

        told: list[Any] = []
        async with running(bus, prepare):
            await responders(bus, 1)
            assert await bus.request(topic, b"1", callback=told.append) is None
            await bus.request(f"{topic}.nobody", b"2", callback=told.append)

            async def tell(outcome: Any) -> None:
                told.append(outcome)

            await bus.request(topic, b"3", callback=tell)
            await bus.request(topic, b"4", callback=f"{topic}-replies")
            await bus.request(f"{topic}.nobody", b"5", callback=f"{topic}-replies")
            while len(told) < 3:
                await asyncio.sleep(0.005)
            stored = []
            async with bus.subscribe(f"{topic}-replies", timeout=10, create=True) as replies:
                async for message in replies:
                    stored.append(message)
                    if len(stored) == 2:
                        break
        assert sorted(one.value for one in told if isinstance(one, headrace.Reply)) == [b"1", b"3"]
        assert [type(one) for one in told if not isinstance(one, headrace.Reply)] == [errors.NoResponders]
        good, bad = sorted(stored, key=lambda one: "headrace-error" in one.headers)
        assert (good.value, good.headers) == (b"4", {"h": b"x", "headrace-subject": topic.encode()})
        assert bad.headers["headrace-error"] == b"no_responders"
        assert b'"retryable":true' in bad.value

    run(story)


def test_a_reply_goes_to_a_url(run: Run, topic: str, tmp_path: Path) -> None:
    async def story(bus: Any) -> None:
        path = tmp_path / "replies.ndjson"
        await bus.request(topic, callback=f"file://{path}")
        while not path.exists() or not path.read_bytes().endswith(b"\n"):
            await asyncio.sleep(0.005)
        told = json.loads(path.read_text())
        assert json.loads(told["value"])["code"] == "no_responders"
        assert ["headrace-error", "no_responders"] in told["headers"]

    run(story)


def test_a_callback_that_fails_harms_nobody(run: Run, topic: str) -> None:
    async def story(bus: Any) -> None:
        told: list[Any] = []

        def fail(_: Any) -> None:
            raise RuntimeError("callback failed")

        for _ in range(10):
            await bus.request(topic, callback=fail)
        await bus.request(topic, callback=told.append)
        while not told:
            await asyncio.sleep(0.005)

    run(story)


def test_an_app_checks_what_it_serves(run: Run) -> None:
    async def story(bus: Any) -> None:
        app = headrace.App(bus.inner) if threaded(bus) else headrace.AsyncApp(bus)
        for wrong in ({"subject": "a..b"}, {"subject": 7}, {"subject": "a", "concurrency": 0}):
            with pytest.raises(errors.InvalidArgument):
                app.serves(**wrong)(lambda: None)
        with pytest.raises(errors.InvalidArgument):
            app.serves("a", concurrency=100_000)(lambda: None)
        with pytest.raises(errors.InvalidArgument):
            app.serves("a", deserializer="xml")(lambda: None)
        app.serves("a.*")(lambda: None)
        assert "handlers=1" in repr(app)

    run(story)
