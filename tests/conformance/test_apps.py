"""One suite for apps: over all transports, for threads and for asyncio."""

import asyncio
import json
import threading
import time
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


def test_a_long_handler_keeps_its_message(run: Run, topic: str) -> None:
    async def story(bus: Any) -> None:
        await published(bus, topic, b"long", b"long")
        await bus.create_subscription(topic)
        seen: list[int] = []
        pause = time.sleep if threaded(bus) else asyncio.sleep

        def prepare(app: headrace.App) -> None:
            @app.on(topic, lease=0.4)
            def handle(job: Any) -> Any:
                seen.append(job.deliveries)
                return pause(0.6)

        async with running(bus, prepare) as at_work:

            async def settled() -> bool:
                return bool((await bus.queue(topic).stats()).acked == 2)

            await at_work.until(settled)
        info = await bus.queue(topic).stats()
        assert (seen, info.expired_leases) == ([1, 1], 0)

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

        for _ in range(2):  # an app that begins again leaves the recurrence as it is
            async with running(bus, prepare) as at_work:
                await at_work.until(there)
                await bus.cron_run(f"idle-{topic}")
                await at_work.until(lambda: b"idle" in seen)
            seen.remove(b"idle")
        async with running(bus, prepare) as at_work:
            await at_work.until(lambda: seen)
        assert seen[0] == f"tick-{topic}".encode()
        (info,) = await bus.crons(f"every.idle-{topic}")
        assert info.recurrence.zone == "Europe/Berlin"
        for name in ("tick", "idle"):
            await bus.cron_remove(f"{name}-{topic}")

    run(story)
