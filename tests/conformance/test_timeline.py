"""One suite for messages with a time, and for schedules: over all transports, with both faces."""

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from tests.conformance.stage import Run, published, values

from headrace import errors


def test_a_scheduled_message_is_moved_updated_and_cancelled(run: Run, topic: str) -> None:
    async def story(bus: Any) -> None:
        await bus.create_topic(topic)
        await bus.create_subscription(topic)
        queue = bus.queue(topic)
        noon = datetime(2040, 1, 1, 12, tzinfo=UTC)
        one = await bus.schedule(topic, b"one", at=noon, key="k", headers={"h": "1"}, priority=2)
        two = await bus.schedule(topic, b"two", in_=timedelta(days=1))
        assert (one.id, one.version, two.offset) == (f"{topic}/0/0@{one.topic_id}", 1, 1)
        assert one.topic_id == (await bus.describe_topic(topic)).id
        await one.move(at=noon + timedelta(hours=1))
        await one.update(value=b"uno")
        await one.update(headers={"h": "2"}, priority=7)
        await two.cancel()
        assert one.version == 4
        (message,) = await queue.find()
        assert (message.value, message.headers, message.priority) == (b"uno", {"h": b"2"}, 7)
        assert (message.key, message.version) == (b"k", 4)
        assert message.ready_us == 1000 * int((noon + timedelta(hours=1)).timestamp() * 1000)
        assert (await one.look()).value == b"uno"
        with pytest.raises(errors.MessageGone):
            await two.move(in_=5)
        await bus.scheduled(two.id, version=1).cancel()  # as if the answer had been lost
        assert two.version == 2
        with pytest.raises(errors.MessageGone):
            await two.look()
        await one.move(in_=-1)
        (job,) = await queue.lease(1, wait=5)
        assert (job.value, job.version) == (b"uno", 5)
        with pytest.raises(errors.MessageLeased) as refused:
            await one.cancel()
        assert refused.value.details["holder"] == "me"
        await queue.ack(job)
        with pytest.raises(errors.MessageGone):
            await one.cancel()

    run(story)


def test_only_the_version_that_was_seen_is_changed_and_only_by_its_owner(run: Run, topic: str) -> None:
    async def story(bus: Any) -> None:
        mine = await bus.schedule(topic, b"v", in_=3600, owner="ann")
        other = bus.scheduled(mine.id, version=1, owner="ann")
        await other.move(in_=7200)
        with pytest.raises(errors.StaleVersion) as refused:
            await mine.move(in_=60)
        assert refused.value.details["version"] == 2
        with pytest.raises(errors.NotOwner):
            await bus.scheduled(mine.id, owner="bob").cancel()
        with pytest.raises(errors.NotOwner):
            await bus.scheduled(mine.id).cancel()
        await bus.create_subscription(topic, "any")
        whichever = bus.scheduled(mine.id, owner="ann")
        await whichever.update(priority=1, in_=60)
        await whichever.update(value=b"w")
        seen = await whichever.look()
        assert (seen.value, seen.priority, seen.version) == (b"w", 1, 4)
        assert seen.headers == {"headrace-owner": b"ann"}
        await whichever.cancel()
        assert whichever.version is None

    run(story)


def test_the_future_is_looked_at_and_changed_as_a_whole(run: Run, topic: str) -> None:
    async def story(bus: Any) -> None:
        await bus.create_topic(topic, partitions=2)
        await bus.create_subscription(topic)
        queue = bus.queue(topic)
        begin = datetime(2040, 1, 1, tzinfo=UTC)
        begin_us = int(begin.timestamp()) * 1_000_000
        hours = range(20)
        await bus.publish_many(
            topic,
            [b"%d" % hour for hour in hours],
            keys=[b"even" if hour % 2 == 0 else b"odd" for hour in hours],
            headers=[{"headrace-owner": "ann"} if hour < 5 else {"shop": "b"} for hour in hours],
            dues=[begin_us + hour * 3_600_000_000 for hour in hours],
        )
        assert len(await queue.find()) == 20
        assert len(await queue.find(limit=7)) == 7
        assert [len(page) async for page in queue.find_pages(status="waiting", page=8)] == [8, 8, 4]
        found = await queue.find(
            status="waiting", due_from=begin + timedelta(hours=3), due_to=begin + timedelta(hours=6)
        )
        assert values(found) == [b"3", b"4", b"5"]
        assert sorted(values(await queue.find(owner="ann", key="odd"))) == [b"1", b"3"]
        assert len(await queue.find(headers={"shop": "b"})) == 15
        assert values(await queue.find(messages=[found[0]])) == [b"3"]
        assert await queue.find(status="ready") == await queue.peek(5) == []
        forecast = await queue.forecast(begin + timedelta(hours=4), 7200, 3)
        assert (forecast.counts, forecast.before, forecast.after) == ([2, 2, 2], 4, 10)

        outcomes = await queue.edit_matching(shift=timedelta(days=1), key="even")
        assert [each.outcome for each in outcomes].count("applied") == 7
        assert [each.outcome for each in outcomes].count("not_owner") == 3
        outcomes = await queue.edit_matching(
            value=b"new", headers={"x": "1"}, owner="ann", due_to=begin + timedelta(hours=2)
        )
        assert {each.outcome for each in outcomes} == {"applied"}
        assert len(await queue.find(headers={"x": "1"}, owner="ann")) == 2
        outcomes = await queue.edit_matching(delete=True, matching_headers={"shop": "b"}, status="waiting")
        assert len(outcomes) == 15
        assert len(await queue.find()) == 5
        outcomes = await queue.edit_matching(due=begin - timedelta(days=9999), priority=5, owner="ann")
        assert len(outcomes) == 5
        assert len(await queue.peek(3)) == 3
        assert len(await queue.lease(10)) == 5

    run(story)


def test_the_future_of_a_topic_without_a_subscription(run: Run, topic: str) -> None:
    async def story(bus: Any) -> None:
        begin = datetime(2040, 1, 1, tzinfo=UTC)
        one = await bus.schedule(topic, b"one", at=begin, owner="ann")
        await bus.schedule(topic, b"two", at=begin + timedelta(hours=1))
        queue = bus.queue(topic)
        assert (await one.look()).value == b"one"
        assert values(await queue.find(status="waiting")) == [b"one", b"two"]
        forecast = await queue.forecast(begin, 3600, 2)
        assert (forecast.counts, forecast.before, forecast.after) == ([1, 1], 0, 0)
        outcomes = await queue.edit_matching(shift=7200, owner="ann")
        assert [each.outcome for each in outcomes] == ["applied"]
        assert values(await queue.find(status="waiting")) == [b"two", b"one"]

    run(story)


def test_a_bulk_shift_changes_each_of_many_messages_once(run: Run, topic: str) -> None:
    async def story(bus: Any) -> None:
        await bus.create_subscription(topic)
        begin_us = 2_208_988_800_000_000
        await bus.publish_many(topic, [b""] * 2500, dues=[begin_us + at for at in range(2500)])
        outcomes = await bus.queue(topic).edit_matching(shift=0.001, status="waiting")
        assert [each.version for each in outcomes] == [2] * 2500
        times = [one.ready_us async for page in bus.queue(topic).find_pages(status="waiting") for one in page]
        assert times == [begin_us + 1000 + at for at in range(2500)]

    run(story)


def test_a_handle_outlives_its_topic_and_does_no_harm_to_the_next(run: Run, topic: str) -> None:
    async def story(bus: Any) -> None:
        mine = await bus.schedule(topic, b"mine", in_=3600)
        await bus.delete_topic(topic)
        yours = await bus.schedule(topic, b"yours", in_=3600)
        assert (mine.partition, mine.offset) == (yours.partition, yours.offset)
        for change in (lambda: mine.cancel(), lambda: mine.move(in_=1), lambda: mine.look()):
            with pytest.raises(errors.MessageGone):
                await change()
        with pytest.raises(errors.MessageGone):
            await bus.scheduled(mine.id).cancel()
        assert (await yours.look()).value == b"yours"
        await bus.scheduled(f"{topic}/0/0").cancel()  # whichever topic it is

    run(story)


def test_a_queue_is_paused_and_resumed(run: Run, topic: str) -> None:
    async def story(bus: Any) -> None:
        await published(bus, topic, b"a")
        queue = bus.queue(topic)
        await bus.create_subscription(topic)
        assert (await queue.pause()).settings["paused"] is True
        assert await queue.lease(1, wait=0.02) == []
        assert (await queue.resume()).settings["paused"] is False
        assert values(await queue.lease(1)) == [b"a"]

    run(story)


# Schedules.


def test_a_schedule_lives_and_dies(run: Run, topic: str) -> None:
    async def story(bus: Any) -> None:
        await bus.create_topic(topic)
        name = f"cron-{topic}"
        made = await bus.cron_add(
            name, topic, "0 12 * * *", b"noon", zone="Europe/Berlin", key="k", headers={"h": "1"}, missed="skip"
        )
        schedule = made.definition
        assert (schedule.name, schedule.topic, schedule.value, schedule.key) == (name, topic, b"noon", b"k")
        with pytest.raises(errors.ScheduleExists):
            await bus.cron_add(name, topic, "@daily", replace=False)
        assert [info.definition.name for info in await bus.crons(topic)] == [name]
        assert name in [info.definition.name for info in await bus.crons()]
        summer = datetime(2030, 7, 1, tzinfo=UTC)
        (first, second) = await bus.cron_next(name, runs=2, after=summer)
        assert (first, second) == (summer.replace(hour=10), summer.replace(day=2, hour=10))
        tried = await bus.cron_next(when="*/20 * * * *", runs=3, after=summer)
        assert [each.minute for each in tried] == [20, 40, 0]
        assert (await bus.cron_pause(name)).definition.paused is True
        assert (await bus.cron_pause(name, False)).definition.paused is False
        assert (await bus.cron_run(name)).last_us > made.last_us
        (job,) = await bus.queue(topic).lease(1, wait=5)
        assert (job.value, job.key, job.headers["headrace-cron"]) == (b"noon", b"k", name.encode())
        with pytest.raises(errors.InvalidArgument):
            await bus.cron_next()
        with pytest.raises(errors.InvalidArgument):
            await bus.cron_add(name, topic, "not a time")
        await bus.cron_remove(name)
        with pytest.raises(errors.ScheduleNotFound):
            await bus.cron_remove(name)

    run(story)


def test_a_handle_that_cancels_twice_says_so_twice(run: Run, topic: str) -> None:
    async def story(bus: Any) -> None:
        reminder = await bus.schedule(topic, b"x", in_=3600)
        await reminder.cancel()
        await reminder.cancel()
        assert await bus.queue(topic).find() == []

    run(story)


def test_a_handle_finds_its_message_where_it_is_pending(run: Run, topic: str) -> None:
    async def story(bus: Any) -> None:
        reminder = await bus.schedule(topic, b"x", in_=0)
        for name in ("default", "other"):
            await bus.create_subscription(topic, name)
        done = bus.queue(topic)
        await done.ack(await done.lease(1, wait=10))
        assert (await reminder.look()).status == "ready"
        await reminder.update(value=b"y")
        assert (await bus.queue(topic, "other").lease(1, wait=10))[0].value == b"y"

    run(story)


def test_dead_letters_cannot_go_where_they_come_from(run: Run, topic: str) -> None:
    async def story(bus: Any) -> None:
        await bus.create_topic(topic)
        with pytest.raises(errors.InvalidArgument, match="dead_letter_topic"):
            await bus.create_subscription(topic, dead_letter_topic=topic)
        await bus.create_subscription(topic)
        with pytest.raises(errors.InvalidArgument, match="dead_letter_topic"):
            await bus.alter_subscription(topic, dead_letter_topic=topic)

    run(story)
