"""One suite for routes: over all transports, for threads and for asyncio."""

from typing import Any

import pytest
from tests.conformance.stage import Run

from headrace import errors


async def values(bus: Any, topic: str, count: int) -> list[bytes]:
    """The values of a topic, once there are so many."""
    found: list[bytes] = []
    while len(found) < count:
        for batch in await bus.fetch(topic, 0, len(found), wait=5):
            found += batch.columns().values
    return found


def test_messages_follow_their_routes(run: Run, topic: str) -> None:
    async def story(bus: Any) -> None:
        eu, big, rest = f"{topic}-eu", f"{topic}-big", f"{topic}-rest"
        info = await bus.routes.add(f"{topic}-eu", source=topic, pattern="eu.#", to=[eu])
        assert (info.definition.targets, info.definition.error_topic) == ([eu], f"{topic}.errors")
        await bus.routes.add(f"{topic}-big", source=topic, content={"jsonpath": "$[?@ > 10]"}, to=big)
        await bus.routes.add(f"{topic}-ch", source=topic, headers={"country": "CH"}, to=big)
        await bus.routes.add(f"{topic}-rest", source=topic, unmatched=True, to=rest)
        await bus.publish(topic, b'{"n": 5}', key="eu.1")
        await bus.publish(topic, b'{"n": 50}', key="us.1")
        await bus.publish(topic, b"text", headers={"country": "CH"})
        await bus.publish(topic, b"nothing")
        assert await values(bus, eu, 1) == [b'{"n": 5}']
        assert await values(bus, big, 2) == [b'{"n": 50}', b"text"]
        assert await values(bus, rest, 1) == [b"nothing"]
        names = [one.definition.name for one in await bus.routes.list(topic)]
        assert names == [f"{topic}-{name}" for name in ("big", "ch", "eu", "rest")]

    run(story)


def test_routes_are_explained_replaced_and_removed(run: Run, topic: str) -> None:
    async def story(bus: Any) -> None:
        name, out = f"{topic}-r", f"{topic}-out"
        await bus.routes.add(name, source=topic, key="a.b", to=out)
        told = await bus.routes.explain(source=topic, subject="a.b")
        assert (told.targets, told.routes[0].is_taken) == ([out], True)
        assert (await bus.routes.explain(source=topic, key="a.c")).targets == []
        with pytest.raises(errors.RouteExists):
            await bus.routes.add(name, source=topic, all=True, to=out)
        await bus.routes.add(name, source=topic, key="a.b", to=out, exist_ok=True)
        await bus.routes.add(name, source=topic, all=True, to=out, replace=True)
        with pytest.raises(errors.RouteLoop):
            await bus.routes.add(f"{name}2", source=out, all=True, to=topic)
        await bus.routes.remove(name)
        with pytest.raises(errors.RouteNotFound):
            await bus.routes.remove(name)
        for wrong in ({}, {"key": "a", "all": True}, {"content": {"jsonpath": "no"}}, {"content": {"what": 1}}):
            with pytest.raises(errors.InvalidArgument):
                await bus.routes.add(name, source=topic, to=out, **wrong)

    run(story)


def test_messages_without_a_topic_and_subjects_reach_topics(run: Run, topic: str) -> None:
    async def story(bus: Any) -> None:
        out, word = f"{topic}-out", topic.replace("-", "_")
        await bus.routes.add(f"{topic}-s", pattern=f"{word}.*", to=out)
        receipt = await bus.publish(None, b"1", headers={"headrace-subject": f"{word}.a"})
        assert receipt.topic == "headrace.ingress"
        await bus.publish_many(None, [b"2", b"other"], keys=[f"{word}.b", "other"])
        published = await bus.subjects.publish(f"{word}.c", b"3")
        assert published.stored
        assert await values(bus, out, 3) == [b"1", b"2", b"3"]
        assert not (await bus.subjects.publish(f"{word}.c.d", b"4")).stored

    run(story)
