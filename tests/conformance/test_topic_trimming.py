"""Trimming topics through the client: over each transport, with each face."""

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from tests.conformance.stage import Run

from headrace import errors


def test_old_messages_go_by_offset_and_by_time(run: Run, topic: str) -> None:
    async def story(bus: Any) -> None:
        now = datetime.now(UTC)
        await bus.create_topic(topic, partitions=2)
        for age in range(10, 0, -1):
            await bus.publish(topic, b"message", timestamp=now - timedelta(hours=age), partition=age % 2)

        assert await bus.trim_topic(topic, {1: 2}) == {1: 2}
        assert await bus.trim_topic(topic, before=now - timedelta(hours=2, minutes=30)) == {0: 4, 1: 4}
        assert await bus.trim_topic(topic, before="latest") == {0: 5, 1: 5}
        with pytest.raises(errors.InvalidArgument):
            await bus.trim_topic(topic)
        with pytest.raises(errors.TopicNotFound):
            await bus.trim_topic("nowhere", {0: 1})

    run(story)


def test_a_group_that_is_behind_goes_on_where_messages_are(run: Run, topic: str) -> None:
    async def story(bus: Any) -> None:
        await bus.create_topic(topic)
        await bus.publish_many(topic, [b"%d" % number for number in range(10)])
        await bus.commit(topic, {(topic, 0): 2})
        assert await bus.trim_topic(topic, {0: 5}) == {0: 2}
        assert await bus.trim_topic(topic, {0: 5}, unread=True) == {0: 5}
        async with bus.subscribe(topic, group=topic, timeout=20) as messages:
            async for message in messages:
                assert message.offset == 5
                break

    run(story)
