"""One suite for services, their errors, events about the bus and logging levels: over all transports, both faces."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from tests.conformance.stage import Run, published, running, threaded

from headrace import ServiceError, errors
from headrace.client._sync.admin.service_registrations import ServiceRegistrations
from headrace.model.errors import ConnectionFailed


async def until(holds: Callable[[], Awaitable[bool]]) -> None:
    """Wait until something holds; the test's time-out bounds it."""
    while not await holds():
        await asyncio.sleep(0.01)


def lines(bus: Any) -> list[Any]:
    """The connections of a bus, of either face."""
    inner = bus.inner if threaded(bus) else bus
    return [line for line in (inner._broker, inner._consuming) if line is not None]


def break_connections(bus: Any) -> None:
    for line in lines(bus):
        if line.connection is not None:  # else it is broken already
            line.connection.end(ConnectionFailed("cut by the test"))


def test_a_service_registers_and_is_found(run: Run, topic: str) -> None:
    async def story(bus: Any) -> None:
        schema = {"type": "object"}
        instance = await bus.services.register(
            topic,
            version="1.2",
            metadata={"region": "eu"},
            produces=[f"{topic}.bills"],
            consumes=[f"{topic}.orders"],
            serves=[f"{topic}.quote"],
            schemas={f"{topic}.bills": schema},
        )
        info = await bus.services.describe(topic)
        assert [(one.instance, one.version, one.client) for one in info.instances] == [(instance, "1.2", "me")]
        assert info.schemas == {f"{topic}.bills": schema}
        for wanted in ({"produces": f"{topic}.bills"}, {"consumes": f"{topic}.orders"}, {"serves": f"{topic}.quote"}):
            assert [one.name for one in await bus.services.find(**wanted)] == [topic]
        assert topic in [one.name for one in await bus.services.list()]
        await bus.services.deregister(topic)
        with pytest.raises(errors.ServiceNotFound):
            await bus.services.describe(topic)

    run(story)


def test_a_service_registers_again_after_a_reconnect(run: Run, topic: str) -> None:
    async def story(bus: Any) -> None:
        instance = await bus.services.register(topic, ttl=60)
        break_connections(bus)

        async def connected() -> bool:
            (one,) = (await bus.services.describe(topic)).instances
            assert one.instance == instance
            return bool(one.connected)

        await until(connected)

    run(story)


def test_a_service_lives_longer_than_its_ttl_while_it_is_connected(run: Run, topic: str) -> None:
    async def story(bus: Any) -> None:
        await bus.services.register(topic, ttl=0.3)
        await asyncio.sleep(1)
        assert len((await bus.services.describe(topic)).instances) == 1

    run(story)


def test_what_is_refused_is_not_registered_later(run: Run, topic: str) -> None:
    async def story(bus: Any) -> None:
        with pytest.raises(errors.InvalidArgument):
            await bus.services.register(topic, metadata={"a": "x" * 100_000})
        with pytest.raises(errors.InvalidArgument):
            await bus.services.register(topic, schemas={"orders": "no object"})
        for ttl in (0, 3601):
            with pytest.raises(errors.InvalidArgument, match=r"0\.1 to 3600"):
                await bus.services.register(topic, ttl=ttl)
        break_connections(bus)
        assert topic not in [one.name for one in await bus.services.list()]

    run(story)


def test_registered_services_use_a_bus_that_requires_it(run: Run, topic: str) -> None:
    async def story(bus: Any) -> None:
        await bus.create_topic(topic)
        await bus.services.require_registration(True)
        try:
            assert await bus.services.is_registration_required()
            with pytest.raises(errors.NotRegistered):
                await bus.publish(topic, b"a")
            await bus.services.register(topic)
            await bus.publish(topic, b"a")
            async with bus.subscribe(topic, group=topic, timeout=10) as messages:  # another connection
                assert (await anext(aiter(messages))).value == b"a"
                break_connections(bus)
                await bus.publish(topic, b"b")
                assert (await anext(aiter(messages))).value == b"b"
        finally:
            await bus.services.require_registration(False)

    run(story)


def test_live_subscriptions_end_when_registration_is_required(run: Run, topic: str) -> None:
    async def story(bus: Any) -> None:
        try:
            async with bus.subjects.subscribe(f"{topic}.>", timeout=10) as messages:
                await bus.subjects.publish(f"{topic}.a", b"a")
                assert (await anext(aiter(messages))).value == b"a"
                await bus.services.require_registration(True)
                with pytest.raises(errors.NotRegistered):
                    await anext(aiter(messages))
        finally:
            await bus.services.require_registration(False)

    run(story)


def test_nothing_is_sent_over_a_new_connection_before_the_registration(
    run: Run, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    up = ServiceRegistrations.connection_up

    def slowly(registrations: ServiceRegistrations, connection: Any) -> None:
        time.sleep(0.1)  # others send meanwhile, if they can
        up(registrations, connection)

    async def story(bus: Any) -> None:
        await bus.create_topic(topic)
        await bus.create_subscription(topic)
        await bus.publish_many(topic, [b"a", b"b"])
        await bus.services.register(topic)
        await bus.services.require_registration(True)
        try:
            for _ in range(2):
                async with bus.lease(topic, max=1, lease=60):
                    break_connections(bus)
                    await bus.publish(topic, b"c")
                    break_connections(bus)
        finally:
            await bus.services.require_registration(False)

    monkeypatch.setattr(ServiceRegistrations, "connection_up", slowly)
    run(story)


def test_an_app_is_a_service_and_reports_its_failures(run: Run, topic: str) -> None:
    async def story(bus: Any) -> None:
        await bus.publish_many(topic, [b"bad", b"good"], keys=["ann", "ann"])

        def prepare(app: Any) -> None:
            @app.on(topic, retry={"deliveries_max": 2, "retry_seconds": 0.01})
            def handle(job: Any) -> None:
                if job.value == b"bad":
                    raise LookupError("where is it?")

        async with running(bus, prepare, service=topic, version="7"):

            async def reported() -> bool:
                found = await bus.services.errors(topic)
                return bool(found) and found[0].codes == {"lookup_error": 2, "dead_letter": 1}

            await until(reported)
            info = await bus.services.describe(topic)
            assert (info.consumes, info.instances[0].version, info.errors) == ([topic], "7", 3)
        (found,) = await bus.services.errors(topic)
        first = found.last[-1]
        assert (first.service, first.instance) == (topic, info.instances[0].instance)
        assert (first.topic, first.offset, first.key, first.message) == (topic, 0, "ann", "LookupError: where is it?")
        assert first.traceback.startswith("Traceback")
        assert first.traceback.rstrip().endswith("LookupError: where is it?")
        assert topic not in [one.name for one in await bus.services.list()]
        assert "headrace.errors" in [info.topic for info in await bus.topics("headrace.*")]

    run(story)


def test_an_app_registers_its_subjects_and_reports_failed_requests(run: Run, topic: str) -> None:
    async def story(bus: Any) -> None:
        subject = f"{topic}.quote"

        def prepare(app: Any) -> None:
            @app.serves(subject)
            def quote(_: Any) -> bytes:
                raise KeyError("plum")

        async with running(bus, prepare, service=topic):

            async def serving() -> bool:
                return bool(await bus.services.find(serves=subject))

            await until(serving)

            async def served() -> bool:
                try:
                    await bus.request(subject, b"", timeout=10)
                except errors.NoResponders:
                    return False
                except errors.ServiceFailed:
                    return True
                return False

            await until(served)

            async def reported() -> bool:
                return bool(await bus.services.errors(topic))

            await until(reported)
        (found,) = await bus.services.errors(topic)
        (error,) = found.last
        assert (error.code, error.subject, error.topic, error.partition) == ("key_error", subject, "", None)

    run(story)


def test_an_app_that_is_no_service_reports_nothing(run: Run, topic: str) -> None:
    async def story(bus: Any) -> None:
        await published(bus, topic, b"bad")
        seen: list[bytes] = []

        def prepare(app: Any) -> None:
            @app.on(topic)
            def handle(job: Any) -> None:
                seen.append(job.value)
                if len(seen) == 1:
                    raise LookupError("where is it?")

        async with running(bus, prepare) as at_work:
            await at_work.until(lambda: len(seen) == 2)
        assert await bus.services.errors(topic) == []

    run(story)


def test_errors_can_be_reported_by_hand(run: Run, topic: str) -> None:
    async def story(bus: Any) -> None:
        instance = await bus.services.register(topic)
        await bus.services.report(topic, [ServiceError(code="no_stock", message="no apples")])
        (found,) = await bus.services.errors(topic)
        assert (found.codes, found.last[0].instance) == ({"no_stock": 1}, instance)
        with pytest.raises(errors.InvalidArgument):
            await bus.services.report(topic, [])

    run(story)


def test_events_are_read_and_followed(run: Run, topic: str) -> None:
    async def story(bus: Any) -> None:
        await bus.create_topic(topic)
        told = [(event.subject, event.by) for event in await bus.events.history() if event.name == topic]
        assert told == [("$events.topic.created", "me")]
        async with await bus.events.follow(timeout=10) as events:
            await bus.alter_topic(topic, partitions=3)
            await bus.delete_topic(topic)
            seen: list[str] = []
            async for message in events:
                if message.value.name == topic:
                    seen.append(message.value.action)
                    if message.value.action == "deleted":
                        break
        assert seen == ["altered", "deleted"]
        with pytest.raises(errors.InvalidArgument):
            await bus.events.history(0)

    run(story)


def test_logging_levels_are_set_listed_and_reset(run: Run, topic: str) -> None:
    async def story(bus: Any) -> None:
        await bus.logging.set("debug", topic=f"{topic}.*")
        await bus.logging.set("error", consumer="slow")
        told = [(rule.scope, rule.pattern, rule.level) for rule in await bus.logging.list()]
        assert told == [("consumer", "slow", "error"), ("topic", f"{topic}.*", "debug")]
        await bus.logging.reset(consumer="slow")
        await bus.logging.reset(topic=f"{topic}.*")
        assert await bus.logging.list() == []
        with pytest.raises(errors.InvalidArgument):
            await bus.logging.set("loud", topic=topic)
        with pytest.raises(errors.InvalidArgument):
            await bus.logging.set("debug", topic=topic, consumer="slow")

    run(story)
