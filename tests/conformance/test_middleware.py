"""One suite for middleware: what clients see of it, by every way in and out of a broker."""

import json
from typing import Any

import pytest
from tests.conformance.stage import Run

import headrace
from headrace import errors

SCHEMA = {"name": "schema", "schema": {"type": "object", "required": ["id"]}}
GOOD, BAD = b'{"id":1}', b'{"no":1}'


async def received(bus: Any, topic: str, count: int) -> list[Any]:
    """The first messages of a topic."""
    found: list[Any] = []
    async with bus.subscribe(topic, timeout=20) as subscription:
        async for message in subscription:
            found.append(message)
            if len(found) == count:
                break
    return found


def test_messages_are_changed_in_order(run: Run, topic: str) -> None:
    async def story(bus: Any) -> None:
        hide = {"name": "redact", "fields": ["$.card"]}
        await bus.create_topic(topic, middleware=[hide, {"name": "transform", "from": "json", "to": "msgpack"}])
        await bus.publish(topic, b'{"card":1}')
        await bus.publish_many(topic, [b'{"card":2}', b"{}"])
        async with bus.producer(topic) as producer:
            await producer.send(b'{"card":3}')
        async with bus.transaction(f"{topic}-writer") as transaction:
            await transaction.publish(topic, b'{"card":4}')
        hidden = b"\x81\xa4card\xa3***"
        messages = await received(bus, topic, 5)
        assert [message.value for message in messages] == [hidden, hidden, b"\x80", hidden, hidden]
        assert {message.headers["content-type"] for message in messages} == {b"application/msgpack"}
        info = await bus.describe_topic(topic)
        assert info.settings["middleware"][0] == hide

    run(story)


def test_an_invalid_message_refuses_its_batch(run: Run, topic: str) -> None:
    async def story(bus: Any) -> None:
        await bus.create_topic(topic, middleware=[SCHEMA])
        with pytest.raises(errors.MessageRefused) as caught:
            await bus.publish_many(topic, [GOOD, BAD, GOOD])
        assert caught.value.details["indexes"] == [1]
        assert "required" in caught.value.details["reasons"][0]
        with pytest.raises(errors.MessageRefused):
            async with bus.transaction(f"{topic}-writer") as transaction:
                await transaction.publish(topic, BAD)
        # A producer goes on after a refusal, under numbers without a gap.
        outcomes: list[int | None] = []
        async with bus.producer(topic) as producer:
            for value in (GOOD, BAD, BAD, GOOD):
                sent = await producer.send(value)
                try:
                    outcomes.append((await sent.result()).offset)
                except errors.MessageRefused:
                    outcomes.append(None)
        assert outcomes == [0, None, None, 1]
        assert (await bus.publish(topic, GOOD)).offset == 2

    run(story)


def test_dead_letters_leave_gaps_and_receipts_stay_right(run: Run, topic: str) -> None:
    async def story(bus: Any) -> None:
        await bus.create_topic(topic, middleware=[{**SCHEMA, "on_invalid": "dead_letter"}])
        (receipt,) = await bus.publish_many(topic, [GOOD, BAD, b'{"id":2}'])
        assert (receipt.offset, receipt.count, receipt.stored) == (0, 3, None)
        assert (await bus.publish(topic, BAD)).offset == 3
        assert (await bus.publish(topic, b'{"id":3}')).offset == 4
        messages = await received(bus, topic, 3)
        assert [(one.offset, json.loads(one.value)["id"]) for one in messages] == [(0, 1), (2, 2), (4, 3)]
        letters = await received(bus, f"{topic}.dead", 2)
        assert [one.value for one in letters] == [BAD, BAD]
        assert letters[0].headers["headrace-dead-middleware"] == b"schema"
        jobs = await bus.queue(topic).lease(10, wait=20)
        assert [job.offset for job in jobs] == [0, 2, 4]

    run(story)


def test_receipts_tell_how_many_are_stored(run: Run, topic: str) -> None:
    async def story(bus: Any) -> None:
        await bus.create_topic(topic, middleware=[{"name": "split"}])
        receipt = await bus.publish(topic, b"[1,2,3]")
        assert (receipt.offset, receipt.count, receipt.stored) == (0, 1, 3)
        (receipt,) = await bus.publish_many(topic, [b"[4]", b"[5,6]"])
        assert (receipt.offset, receipt.count, receipt.stored) == (3, 2, 3)
        assert [message.value for message in await received(bus, topic, 6)] == [b"%d" % at for at in range(1, 7)]

    run(story)


def test_consumers_get_what_delivery_leaves(run: Run, topic: str) -> None:
    async def story(bus: Any) -> None:
        await bus.create_topic(topic, middleware=[{"name": "redact", "fields": ["$.card"], "when": "deliver"}])
        await bus.publish_many(topic, [b'{"card":1}', b"no JSON"])
        first, second = await received(bus, topic, 2)
        assert first.value == b'{"card":"***"}'
        assert second.value is None
        assert second.headers == {"headrace-middleware-error": b"redact"}
        fetched = await bus.fetch(topic, 0, 0)
        assert [value for batch in fetched for value in batch.columns().values] == [b'{"card":"***"}', None]
        jobs = await bus.queue(topic).lease(1, wait=20)
        assert [job.value for job in jobs] == [b'{"card":"***"}']
        await bus.alter_topic(topic, middleware=[])
        assert [message.value for message in await received(bus, topic, 2)] == [b'{"card":1}', b"no JSON"]

    run(story)


def test_middleware_that_is_not_there_is_refused(run: Run, topic: str) -> None:
    async def story(bus: Any) -> None:
        with pytest.raises(errors.PluginUnavailable, match="there is no plug-in 'nothing'"):
            await bus.create_topic(topic, middleware=[{"name": "nothing"}])
        with pytest.raises(errors.InvalidArgument, match="there is no option 'level'"):
            await bus.create_topic(topic, middleware=[{"name": "compress", "level": 1}])
        assert topic not in [info.topic for info in await bus.topics()]

    run(story)


def test_large_batches_run_on_threads_and_keep_their_order(run: Run, topic: str) -> None:
    async def story(bus: Any) -> None:
        await bus.create_topic(topic, middleware=[{"name": "compress", "codec": "lz4"}])
        for number in range(20):
            size = 100_000 if number % 3 else 10
            await bus.publish(topic, b"%d-" % number + b"x" * size)
        messages = await received(bus, topic, 20)
        assert [int(message.value.partition(b"-")[0]) for message in messages] == list(range(20))

    run(story)


def test_enrich_names_the_client(run: Run, topic: str) -> None:
    async def story(bus: Any) -> None:
        await bus.create_topic(topic, middleware=[{"name": "enrich"}])
        await bus.publish(topic, b"1", headers={"headrace-client": "somebody else"})
        (message,) = await received(bus, topic, 1)
        assert message.headers["headrace-client"] == b"me"
        assert int(message.headers["headrace-time"]) > 1_600_000_000_000_000

    run(story)


def test_the_interface_is_public() -> None:
    from headrace import middleware

    assert middleware.API == 1
    assert issubclass(errors.MessageRefused, errors.HeadraceError)
    assert headrace.TopicSettings().middleware == ()
