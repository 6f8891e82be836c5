"""One suite for topics that do not exist: nobody who reads makes one by a slip of the pen."""

import logging
from typing import Any

import pytest
from tests.conformance.stage import Run, published, running, values

import headrace
from headrace import errors


async def _first(messages: Any) -> Any:
    async for message in messages:
        return message
    return None


async def _names(bus: Any, topic: str) -> list[str]:
    return [info.topic for info in await bus.topics(f"{topic}*")]


def test_what_reads_makes_no_topic_and_names_the_nearest(run: Run, topic: str) -> None:
    async def story(bus: Any) -> None:
        await bus.create_topic(topic)
        typo = topic[:-2] + topic[-1] + topic[-2]
        queue = bus.queue(typo)
        reads = [
            lambda: _first(bus.subscribe(typo)),
            lambda: _first(bus.subscribe(typo, group=typo)),
            lambda: _first(bus.subscribe(topic, typo, group=typo)),
            lambda: _first(queue.jobs()),
            lambda: bus.lease(typo).__aenter__(),
            lambda: bus.lease(typo, wait=5).__aenter__(),
            lambda: queue.lease(),
            lambda: queue.find(),
            lambda: queue.stats(),
            lambda: queue.forecast(0, 1.0, 2),
            lambda: bus.fetch(typo, 0, 0),
            lambda: bus.offsets(typo),
            lambda: bus.describe_topic(typo),
            lambda: bus.create_subscription(typo, create=False),
        ]
        for read in reads:
            with pytest.raises(errors.TopicNotFound) as refused:
                await read()
            assert f"there is no topic {typo}; did you mean {topic}" in str(refused.value)
            assert refused.value.details["nearest"][0] == topic
        assert await _names(bus, topic[:-2]) == [topic]

    run(story)


def test_create_makes_the_topic(run: Run, topic: str) -> None:
    async def story(bus: Any) -> None:
        async with bus.subscribe(f"{topic}-1", create=True, timeout=0):
            pass
        async with bus.subscribe(f"{topic}-2", group=topic, create=True, timeout=0):
            pass
        async with bus.lease(f"{topic}-3", create=True) as jobs:
            assert jobs == []
        queue = bus.queue(f"{topic}-4", create=True)
        assert await _first(queue.jobs(timeout=0)) is None
        assert await bus.queue(f"{topic}-5", create=True).lease() == []
        assert await _names(bus, topic) == [f"{topic}-{number}" for number in range(1, 6)]

    run(story)


def test_a_handler_waits_for_its_topic_and_says_so_once(run: Run, topic: str, caplog: pytest.LogCaptureFixture) -> None:
    async def story(bus: Any) -> None:
        seen: list[bytes] = []

        def prepare(app: headrace.App) -> None:
            app.on(topic, retry={"deliveries_max": 7})(lambda job: seen.append(job.value))
            app.on(topic, subscription="second")(lambda job: seen.append(job.value))

        def waits() -> int:
            return sum(record.getMessage().startswith("handler waits") for record in caplog.records)

        caplog.set_level(logging.INFO, "headrace.client")
        async with running(bus, prepare) as at_work:
            await at_work.until(waits)
            assert await _names(bus, topic) == []
            await published(bus, topic, b"first")
            await at_work.until(lambda: seen == [b"first", b"first"])
            assert waits() == 1
            assert (await bus.queue(topic).stats()).settings["deliveries_max"] == 7

            await bus.delete_topic(topic)
            await at_work.until(lambda: waits() == 2)
            assert await _names(bus, topic) == []
            await published(bus, topic, b"again")
            await at_work.until(lambda: seen[2:] == [b"again", b"again"])
            assert (await bus.queue(topic).stats()).settings["deliveries_max"] == 7
        assert waits() == 2
        warning = next(record.getMessage() for record in caplog.records if record.levelno == logging.WARNING)
        assert f"`headrace topic create {topic}` makes it" in warning

    run(story)


def test_an_app_ends_while_a_handler_waits_for_its_topic(run: Run, topic: str) -> None:
    async def story(bus: Any) -> None:
        def prepare(app: headrace.App) -> None:
            app.on(topic)(lambda _job: None)

        async with running(bus, prepare):
            await bus.info()
        assert await _names(bus, topic) == []

    run(story)


def test_a_group_waits_for_a_topic_that_was_deleted_and_is_made_again(run: Run, topic: str) -> None:
    async def story(bus: Any) -> None:
        await published(bus, topic, b"first")
        async with bus.subscribe(topic, group=topic, timeout=20) as subscription:
            assert (await _first(subscription)).value == b"first"
            await bus.delete_topic(topic)
            await published(bus, topic, b"again")
            assert (await _first(subscription)).value == b"again"

    run(story)


def test_publishing_makes_topics_as_the_broker_is_set(topic: str) -> None:
    with headrace.open(":memory:", auto_create_topics=False) as bus:
        with pytest.raises(errors.TopicNotFound):
            bus.publish(topic, b"x")
        with pytest.raises(errors.TopicNotFound), bus.lease(topic, create=True):
            pass
        with pytest.raises(errors.TopicNotFound), bus.subscribe(topic, create=True):
            pass
        bus.create_topic(topic)
        bus.publish(topic, b"x")
        with bus.lease(topic) as jobs:
            assert values(jobs) == [b"x"]
