"""Virtual topics (views) through the client: over each transport, with each face."""

import json
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from tests.conformance.stage import Run

from headrace import errors

LARGE = {"jsonpath": "$[?$.amount > 100]"}


def order(amount: int) -> bytes:
    return json.dumps({"amount": amount}).encode()


async def filled(bus: Any, topic: str, view: str, amounts: range) -> None:
    await bus.create_topic(topic, partitions=2)
    await bus.create_topic(view, view_of=topic, view_query=LARGE)
    await bus.publish_many(topic, [order(amount) for amount in amounts], partition=0)


def amounts_of(messages: list[Any]) -> list[int]:
    return [json.loads(message.value)["amount"] for message in messages]


async def read(subscription: Any, count: int) -> list[Any]:
    found: list[Any] = []
    async with subscription as messages:
        async for message in messages:
            found.append(message)
            if len(found) == count:
                break
    return found


def test_subscribing_with_and_without_a_group(run: Run, topic: str) -> None:
    async def story(bus: Any) -> None:
        view = f"{topic}-view"
        await filled(bus, topic, view, range(90, 120))
        found = await read(bus.subscribe(view, timeout=20), 19)
        assert amounts_of(found) == list(range(101, 120))
        assert [message.offset for message in found] == list(range(11, 30))
        first = await read(bus.subscribe(view, group=f"{topic}-g", timeout=20), 5)
        assert amounts_of(first) == [101, 102, 103, 104, 105]
        rest = await read(bus.subscribe(view, group=f"{topic}-g", timeout=20), 14)
        assert amounts_of(rest)[-1] == 119
        await bus.publish_many(topic, [order(1), order(500)], partition=0)
        [last] = await read(bus.subscribe(view, start={0: 30, 1: 0}, timeout=20), 1)
        assert (last.offset, amounts_of([last])) == (31, [500])

    run(story)


def test_replay_from_an_old_offset_and_time(run: Run, topic: str) -> None:
    async def story(bus: Any) -> None:
        view, now = f"{topic}-view", datetime.now(UTC)
        await bus.create_topic(topic)
        for age in range(10, 0, -1):
            await bus.publish(topic, order(100 * (age % 3)), timestamp=now - timedelta(hours=age))
        await bus.create_topic(view, view_of=topic, view_query=LARGE)
        offsets = await bus.offsets(view, now - timedelta(hours=6))
        found = await read(bus.subscribe(view, start=offsets, timeout=20), 2)
        assert [message.offset for message in found] == [5, 8]
        batches = await bus.fetch(view, 0, 0)
        assert [message.offset for batch in batches for message in batch.messages()] == [2, 5, 8]

    run(story)


def test_leases_of_a_view(run: Run, topic: str) -> None:
    async def story(bus: Any) -> None:
        view = f"{topic}-view"
        await filled(bus, topic, view, range(95, 110))
        queue = bus.queue(view)
        jobs = await queue.lease(100, wait=5)
        assert [json.loads(job.value)["amount"] for job in jobs] == list(range(101, 110))
        await queue.ack(jobs)
        await bus.publish_many(topic, [order(5), order(700)], partition=1)
        [job] = await queue.lease(100, wait=20)
        assert json.loads(job.value) == {"amount": 700}
        await queue.reject([job], reason="broken")
        assert (await queue.stats()).dead == 1

    run(story)


def test_what_cannot_be_done_with_a_view_has_a_code(run: Run, topic: str) -> None:
    async def story(bus: Any) -> None:
        view = f"{topic}-view"
        await filled(bus, topic, view, range(2))
        with pytest.raises(errors.TopicIsView):
            await bus.publish(view, b"x")
        with pytest.raises(errors.TopicIsView):
            await bus.trim_topic(view, {0: 1})
        with pytest.raises(errors.TopicIsView):
            await bus.alter_topic(view, view_query={"regex": "a"})
        with pytest.raises(errors.TopicHasViews):
            await bus.delete_topic(topic)
        with pytest.raises(errors.InvalidContentQuery):
            await bus.create_topic(f"{view}2", view_of=topic, view_query={"jsonpath": "amount > 1"})
        assert (await bus.describe_topic(topic)).views == [view]
        await bus.delete_topic(view)
        await bus.delete_topic(topic)

    run(story)
