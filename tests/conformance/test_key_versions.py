"""Versions of keys and multicast, over every transport and with both faces of the client."""

import asyncio
from typing import Any

import pytest
from tests.conformance.stage import Run

import headrace
from headrace import errors
from headrace.model.partitioning import by_key


async def _events(bus: Any, topic: str, key: str, **start: int) -> list[tuple[int | None, bytes | None]]:
    return [(event.version, event.value) async for event in bus.history(topic, key, **start)]


def test_an_aggregate_is_published_and_read(run: Run, topic: str) -> None:
    async def story(bus: Any) -> None:
        await bus.create_topic(topic, key_versions=True, partitions=4)
        await bus.publish(topic, b"opened", key="ann", expected_version=0, headers={"by": "web"})
        receipts = await bus.publish_many(topic, [b"in", b"out"], key="ann", expected_version=1)
        assert [receipt.count for receipt in receipts] == [2]
        await bus.publish_many(topic, [b"opened", b"noise"], keys=["bob", None])
        with pytest.raises(errors.UnexpectedVersion, match="is 3, not 2") as caught:
            await bus.publish(topic, b"closed", key="ann", expected_version=2)
        assert (caught.value.expected, caught.value.actual) == (2, 3)  # type: ignore[attr-defined]
        with pytest.raises(errors.UnexpectedVersion):
            await bus.publish_many(topic, [b"a", b"b"], key="bob", expected_version=0)
        await bus.publish(topic, None, key="ann", expected_version=3)
        assert await _events(bus, topic, "ann") == [(0, b"opened"), (1, b"in"), (2, b"out"), (3, None)]
        assert await _events(bus, topic, "ann", start_version=2) == [(2, b"out"), (3, None)]
        assert await _events(bus, topic, "eve") == []
        (first, *_) = [event async for event in bus.history(topic, b"ann")]
        assert (first.key, first.topic, first.headers["by"]) == (b"ann", topic, b"web")
        read = []
        async with bus.subscribe(topic, timeout=0.5) as messages:
            async for message in messages:
                read.append((message.key, message.version))
        assert sorted(read, key=repr) == sorted(
            [(b"ann", 0), (b"ann", 1), (b"ann", 2), (b"ann", 3), (b"bob", 0), (None, None)], key=repr
        )

    run(story)


def test_wrong_expectations_are_refused_before_they_are_sent(run: Run, topic: str) -> None:
    async def story(bus: Any) -> None:
        await bus.create_topic(topic, key_versions=True, partitions=2)
        await bus.create_topic(f"{topic}-plain")
        for wrong in (-1, "1", 1.0, True):
            with pytest.raises(errors.InvalidArgument, match="expected_version is"):
                await bus.publish(topic, b"x", key="ann", expected_version=wrong)
        with pytest.raises(errors.InvalidArgument, match="is about a key"):
            await bus.publish(topic, b"x", expected_version=0)
        with pytest.raises(errors.InvalidArgument, match="about one key"):
            await bus.publish_many(topic, [b"x", b"y"], keys=["ann", "bob"], expected_version=0)
        with pytest.raises(errors.InvalidArgument, match="either `key`"):
            await bus.publish_many(topic, [b"x", b"y"], keys=["ann", "bob"], key="ann")
        with pytest.raises(errors.InvalidArgument, match="can be published together"):
            await bus.publish_many(topic, [b"x"] * 5000, key="ann", expected_version=0)
        with pytest.raises(errors.InvalidArgument, match="needs the setting key_versions"):
            await bus.publish(f"{topic}-plain", b"x", key="ann", expected_version=0)
        with pytest.raises(errors.InvalidArgument, match="no history"):
            await _events(bus, f"{topic}-plain", "ann")
        with pytest.raises(errors.InvalidArgument, match="the partition of the key"):
            await bus.publish(topic, b"x", key="ann", expected_version=0, partition=1 - by_key(b"ann", 2))
        assert await _events(bus, topic, "ann") == []

    run(story)


def test_what_expects_a_version_creates_no_topic(run: Run, topic: str) -> None:
    async def story(bus: Any) -> None:
        with pytest.raises(errors.TopicNotFound, match=topic):
            await bus.publish(topic, b"x", key="ann", expected_version=0)
        with pytest.raises(errors.TopicNotFound, match=topic):
            await bus.publish_many(topic, [b"x"], key="ann", expected_version=0)
        with pytest.raises(errors.TopicNotFound, match=topic):
            async with bus.transaction(topic) as transaction:
                await transaction.publish(topic, b"x", key="ann", expected_version=0)
        with pytest.raises(errors.TopicNotFound, match=topic):
            async with bus.transaction(topic) as transaction:
                await transaction.publish_many(topic, [b"x"], key="ann", expected_version=0)
        with pytest.raises(errors.TopicNotFound):
            await bus.describe_topic(topic)
        await bus.create_topic(topic, key_versions=True)
        await bus.publish(topic, b"x", key="ann", expected_version=0)

    run(story)


def test_a_long_history_comes_in_pages(run: Run, topic: str) -> None:
    async def story(bus: Any) -> None:
        await bus.create_topic(topic, key_versions=True)
        for start in range(0, 3000, 500):
            values = [b"%d" % at for at in range(start, start + 500)]
            await bus.publish_many(topic, values, key="ann", expected_version=start)
        assert await _events(bus, topic, "ann") == [(at, b"%d" % at) for at in range(3000)]

    run(story)


def test_of_concurrent_writers_of_an_aggregate_exactly_one_wins(run: Run, topic: str) -> None:
    async def story(bus: Any) -> None:
        await bus.create_topic(topic, key_versions=True)

        async def write(name: bytes) -> bool:
            try:
                await bus.publish(topic, name, key="ann", expected_version=0)
            except errors.UnexpectedVersion:
                return False
            return True

        outcomes = await asyncio.gather(*(write(b"%d" % number) for number in range(20)))
        assert sum(outcomes) == 1
        ((version, value),) = await _events(bus, topic, "ann")
        assert (version, value) == (0, b"%d" % outcomes.index(True))

    run(story)


def test_a_transaction_expects_versions(run: Run, topic: str) -> None:
    async def story(bus: Any) -> None:
        await bus.create_topic(topic, key_versions=True, partitions=3)
        async with bus.transaction(f"{topic}-1") as transaction:
            await transaction.publish(topic, b"opened", key="ann", expected_version=0)
            await transaction.publish_many(topic, [b"in", b"out"], key="ann", expected_version=1)
            await transaction.publish(topic, b"opened", key="bob", expected_version=0, headers={"by": "web"})
        assert len(await _events(bus, topic, "ann")) == 3

        async def stale() -> None:
            async with bus.transaction(f"{topic}-2") as transaction:
                await transaction.publish(topic, b"out", key="ann", expected_version=3)
                await transaction.publish(topic, b"in", key="bob", expected_version=0)

        with pytest.raises(errors.UnexpectedVersion):
            await stale()
        assert len(await _events(bus, topic, "ann")) == 3
        assert await _events(bus, topic, "bob") == [(0, b"opened")]

    run(story)


def test_a_message_goes_to_several_topics_together(run: Run, topic: str) -> None:
    async def story(bus: Any) -> None:
        topics = [f"{topic}-{name}" for name in ("orders", "audit", "billing")]
        await bus.create_topic(topics[0], partitions=3)
        for number in range(5):
            receipts = await bus.publish(topics, b"%d" % number, key="ann", headers={"by": "web"})
            assert [receipt.topic for receipt in receipts] == topics
            assert [receipt.offset for receipt in receipts] == [number] * 3
            assert not any(receipt.duplicate for receipt in receipts)
        (single,) = await bus.publish((topics[1],), b"alone")
        assert single.offset == 5
        async with bus.subscribe(*topics, timeout=0.5) as messages:
            found = [(message.topic, message.value) async for message in messages]
        expected = [(name, b"%d" % number) for name in topics for number in range(5)]
        assert sorted(found) == sorted([*expected, (topics[1], b"alone")])
        spread = [(await bus.publish(topics, b"x"))[0].partition for _ in range(6)]
        assert len(set(spread)) > 1

    run(story)


def test_multicasts_run_side_by_side(run: Run, topic: str) -> None:
    async def story(bus: Any) -> None:
        topics = [f"{topic}-{number}" for number in range(3)]

        async def some(by: int) -> None:
            for number in range(5):
                await bus.publish(topics, b"%d.%d" % (by, number))

        await asyncio.gather(*(some(by) for by in range(4)))
        assert [await bus.offsets(name) for name in topics] == [{0: 20}] * 3

    run(story)


def test_what_one_topic_refuses_no_topic_gets(run: Run, topic: str) -> None:
    async def story(bus: Any) -> None:
        good, small = f"{topic}-good", f"{topic}-small"
        await bus.create_topic(good)
        await bus.create_topic(small, message_bytes_max=10)
        with pytest.raises(errors.MessageTooLarge):
            await bus.publish([good, small], b"x" * 100)
        for wrong in ([], [good, good], [good, 3]):
            with pytest.raises(errors.InvalidArgument):
                await bus.publish(wrong, b"x")
        with pytest.raises(errors.InvalidArgument, match="use a transaction"):
            await bus.publish([good, small], b"x", key="a", expected_version=0)
        await bus.create_subscription(small, "full", messages_max=1)
        await bus.publish(small, b"1")
        with pytest.raises(errors.SubscriptionFull):
            await bus.publish([good, small], b"x")
        assert await bus.offsets(good) == {0: 0}
        await bus.publish([good], b"x")
        assert await bus.offsets(good) == {0: 1}

    run(story)


def test_tenants_have_their_own(topic: str, served: dict[str, str]) -> None:
    with headrace.connect(served["tcp"]) as ours, headrace.connect(served["tcp"], tenant="acme") as theirs:
        for bus in (ours, theirs):
            bus.create_topic(topic, key_versions=True)
            bus.publish(topic, b"opened", key="ann", expected_version=0)
        receipts = theirs.publish([topic, "audit"], b"closed", key="ann")
        assert [(receipt.topic, receipt.offset) for receipt in receipts] == [(topic, 1), ("audit", 0)]
        assert [event.value for event in theirs.history(topic, "ann")] == [b"opened", b"closed"]
        assert [event.value for event in ours.history(topic, "ann")] == [b"opened"]
        with pytest.raises(errors.TopicNotFound):
            ours.offsets("audit")
