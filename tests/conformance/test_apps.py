"""One suite for apps: over all transports, for threads and for asyncio."""

import asyncio
import json
import threading
from typing import Any

import pytest
from tests.conformance.stage import Run, published, running, threaded

import headrace
from headrace import errors


def test_a_handler_gets_every_message(run: Run, topic: str) -> None:
    async def story(bus: Any) -> None:
        await published(bus, topic, *(b"%d" % number for number in range(50)))
        seen: list[int] = []

        def prepare(app: headrace.App) -> None:
            @app.on(topic, concurrency=4, deserializer="json", retry={"deliveries_max": 5})
            def handle(job: Any) -> None:
                seen.append(job.value)

        async with running(bus, prepare) as at_work:
            await at_work.until(lambda: len(seen) == 50)
        info = await bus.queue(topic).stats()
        assert sorted(seen) == list(range(50))
        assert (info.acked, info.leased, info.settings["deliveries_max"]) == (50, 0, 5)

    run(story)


def test_a_handler_serves_several_topics(run: Run, topic: str) -> None:
    async def story(bus: Any) -> None:
        topics = [f"{topic}-{number}" for number in range(3)]
        await bus.publish(topics, b"for all")
        seen: list[str] = []

        def prepare(app: headrace.App) -> None:
            @app.on(topics)
            def handle(job: Any) -> None:
                seen.append(job.topic)

            with pytest.raises(errors.InvalidArgument, match="the list is empty"):
                app.on([])(handle)

        async with running(bus, prepare) as at_work:
            await at_work.until(lambda: len(seen) == 3)
        assert sorted(seen) == topics

    run(story)


def test_a_handler_that_fails_is_tried_again_until_its_message_is_dead(run: Run, topic: str) -> None:
    async def story(bus: Any) -> None:
        await bus.create_topic(topic)
        await bus.create_subscription(topic, deliveries_max=9)
        await published(bus, topic, b"bad", b"refused", b"later", b"good", b"{not json")
        seen: list[tuple[Any, int, bytes | None]] = []

        def prepare(app: headrace.App) -> None:
            def decoded(raw: bytes) -> str:
                return raw.decode() if raw[:1] != b"{" else json.loads(raw)

            @app.on(topic, deserializer=decoded, retry={"deliveries_max": 2, "retry_seconds": 0.01})
            def handle(job: Any) -> None:
                seen.append((job.value, job.deliveries, job.state))
                if job.value == "bad":
                    raise LookupError("where is it?")
                if job.value == "refused":
                    raise headrace.Reject("not for us")
                if job.value == "later" and job.deliveries == 1:
                    raise headrace.Retry(0.02, state=b"half", reason="not yet")

        queue = bus.queue(topic)
        async with running(bus, prepare) as at_work:

            async def settled() -> bool:
                info = await queue.stats()
                return (info.acked, info.dead) == (2, 3)

            await at_work.until(settled)
        assert sorted(seen, key=repr) == [
            ("bad", 1, None),
            ("bad", 2, None),
            ("good", 1, None),
            ("later", 1, None),
            ("later", 2, b"half"),
            ("refused", 1, None),
        ]
        reasons = {message.value: message.reason for message in await queue.find(status="dead")}
        assert "LookupError: where is it?" in reasons[b"bad"]
        assert "in handle" in reasons[b"bad"]
        assert reasons[b"refused"] == "not for us"
        assert "JSONDecodeError" in reasons[b"{not json"]

    run(story)


def test_no_verdict_stops_an_app(run: Run, topic: str) -> None:
    async def story(bus: Any) -> None:
        strange = [ValueError("bad"), None, "caf\udce9", 5]
        await published(bus, topic, *(b"%d" % number for number in range(len(strange))), b"cancelled", b"good")
        await bus.create_subscription(topic, deliveries_max=1)
        seen: list[bytes] = []

        async def handle(job: Any) -> None:
            seen.append(job.value)
            if job.value.isdigit():
                raise headrace.Reject(strange[int(job.value)])
            if job.value == b"cancelled":
                raise asyncio.CancelledError

        def prepare(app: headrace.App) -> None:
            app.on(topic)(handle)

        async with running(bus, prepare) as at_work:

            async def settled() -> bool:
                info = await bus.queue(topic).stats()
                return (info.acked, info.dead) == (1, len(strange) + 1)

            await at_work.until(settled)
        assert len(seen) == len(strange) + 2

    run(story)


def test_handlers_of_both_kinds_run_before_their_messages_are_acknowledged(run: Run, topic: str) -> None:
    async def story(bus: Any) -> None:
        await published(bus, topic, b"a", b"b")
        await bus.create_subscription(topic, "plain")
        await bus.create_subscription(topic, "wrapped")
        await bus.create_subscription(topic, "silent")
        seen: list[tuple[str, bytes | None]] = []
        loops: set[object] = set()

        async def handle(job: Any) -> None:
            await asyncio.sleep(0.001)
            loops.add(asyncio.get_running_loop())
            seen.append(("coroutine", job.value))

        async def handle_nothing() -> None:
            await asyncio.sleep(0)
            loops.add(asyncio.get_running_loop())
            seen.append(("silent", None))

        def prepare(app: headrace.App) -> None:
            app.on(topic, concurrency=2)(handle)
            app.on(topic, subscription="plain")(lambda job: seen.append(("plain", job.value)))
            app.on(topic, subscription="wrapped")(lambda job: handle(job))
            app.on(topic, subscription="silent")(handle_nothing)

        async with running(bus, prepare) as at_work:
            await at_work.until(lambda: len(seen) == 8)
        assert sorted(seen, key=repr) == sorted(
            [
                *2 * [("coroutine", b"a"), ("coroutine", b"b")],
                *2 * [("silent", None)],
                ("plain", b"a"),
                ("plain", b"b"),
            ],
            key=repr,
        )
        assert len(loops) == 1  # so that handlers can share what belongs to a loop
        assert (await bus.queue(topic).stats()).acked == 2

    run(story)


def test_a_coroutine_that_fails_is_tried_again(run: Run, topic: str) -> None:
    async def story(bus: Any) -> None:
        await published(bus, topic, b"bad", b"refused", b"stops")
        await bus.create_subscription(topic)
        deliveries: list[int] = []

        async def handle(job: Any) -> None:
            await asyncio.sleep(0)
            if job.value == b"refused":
                raise headrace.Reject("not for us")
            if job.value == b"stops":
                raise StopIteration  # what loops and futures do not take
            deliveries.append(job.deliveries)
            raise LookupError("where is it?")

        def prepare(app: headrace.App) -> None:
            app.on(topic, retry={"deliveries_max": 2, "retry_seconds": 0.01})(handle)

        async with running(bus, prepare) as at_work:

            async def all_dead() -> bool:
                return bool((await bus.queue(topic).stats()).dead == 3)

            await at_work.until(all_dead)
        assert deliveries == [1, 2]

    run(story)


def test_a_long_handler_keeps_its_message(run: Run, topic: str) -> None:
    """Also a plain function in an app for asyncio, whose loop it must not block."""

    async def story(bus: Any) -> None:
        await published(bus, topic, b"long")
        queues = {name: bus.queue(topic, name) for name in ("plain", "coroutine")}
        for name in queues:
            await bus.create_subscription(topic, name)
        begun, finish = [], threading.Event()

        def handle(job: Any) -> None:
            begun.append(job.deliveries)
            assert finish.wait(60)

        async def handle_beside(job: Any) -> None:
            await asyncio.to_thread(handle, job)

        def prepare(app: headrace.App) -> None:
            app.on(topic, subscription="plain", lease=3)(handle)
            app.on(topic, subscription="coroutine", lease=3)(handle_beside)

        async def until_us() -> list[int]:
            return [found.until_us for queue in queues.values() for found in await queue.find(status="leased")]

        async with running(bus, prepare) as at_work:
            try:
                await at_work.until(lambda: len(begun) == 2)
                before = await until_us()

                async def extended() -> bool:
                    return all(after > first for first, after in zip(before, await until_us(), strict=True))

                await at_work.until(extended)
            finally:
                finish.set()
        for queue in queues.values():
            info = await queue.stats()
            assert (info.acked, info.delivered, info.expired_leases) == (1, 1, 0)

    run(story)


def test_an_app_that_is_stopped_finishes_and_gives_back(run: Run, topic: str) -> None:
    async def story(bus: Any) -> None:
        await published(bus, topic, *(b"%d" % number for number in range(10)))
        begun, go_on = threading.Event(), threading.Event()

        def prepare(app: headrace.App) -> None:
            @app.on(topic, prefetch=5)
            def handle() -> Any:
                begun.set()
                return go_on.wait(20) if threaded(bus) else asyncio.to_thread(go_on.wait, 20)

        async with running(bus, prepare) as at_work:
            await at_work.until(begun.is_set)
            at_work.app.stop()
            go_on.set()
        info = await bus.queue(topic).stats()
        assert (info.acked, info.ready, info.leased) == (1, 9, 0)
        assert {message.deliveries for message in await bus.queue(topic).find()} == {0}

    run(story)


def test_an_error_that_ends_programs_ends_the_app_and_gives_back(run: Run, topic: str) -> None:
    async def story(bus: Any) -> None:
        await published(bus, topic, b"a")

        def prepare(app: headrace.App) -> None:
            @app.on(topic)
            def handle() -> None:
                raise Ending

        class Ending(BaseException):
            """What is no Exception."""

        with pytest.raises(Ending):
            async with running(bus, prepare) as at_work:
                await at_work.ended()
        info = await bus.queue(topic).stats()
        assert (info.acked, info.leased, info.ready) == (0, 0, 1)

    run(story)


def test_a_function_is_called_every_so_often(run: Run, topic: str) -> None:
    async def story(bus: Any) -> None:
        seen: list[bytes] = []

        def prepare(app: headrace.App) -> None:
            @app.every("every 1s", name=f"tick-{topic}")
            def tick(job: Any) -> None:
                seen.append(job.headers["headrace-cron"])

            @app.every("@yearly", name=f"idle-{topic}", zone="Europe/Berlin")
            def idle() -> None:
                seen.append(b"idle")

            with pytest.raises(errors.InvalidArgument):
                app.every("@daily", name=f"tick-{topic}")(tick)

        async def there() -> bool:
            return bool(await bus.crons(f"every.idle-{topic}"))

        for _ in range(2):  # an app that begins again leaves the schedule as it is
            async with running(bus, prepare) as at_work:
                await at_work.until(there)
                await bus.cron_run(f"idle-{topic}")
                await at_work.until(lambda: b"idle" in seen)
            seen.remove(b"idle")
        async with running(bus, prepare) as at_work:
            await at_work.until(lambda: seen)
        assert seen[0] == f"tick-{topic}".encode()
        (info,) = await bus.crons(f"every.idle-{topic}")
        assert info.definition.zone == "Europe/Berlin"
        for name in ("tick", "idle"):
            await bus.cron_remove(f"{name}-{topic}")

    run(story)
