"""One suite for leasing: over a broker in the same process, TCP and a Unix socket; for threads and for asyncio."""

import asyncio
import json
import threading
import time
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from tests.conformance.stage import Run, published, threaded, values

from headrace import errors

# Subscriptions.


def test_a_subscription_lives_and_dies(run: Run, topic: str) -> None:
    async def story(bus: Any) -> None:
        await bus.create_topic(topic)
        made = await bus.create_subscription(topic, "s", discipline="priority", deliveries_max=3)
        assert (made.topic, made.subscription, made.settings["deliveries_max"]) == (topic, "s", 3)
        with pytest.raises(errors.SubscriptionExists):
            await bus.create_subscription(topic, "s")
        again = await bus.create_subscription(topic, "s", exist_ok=True, deliveries_max=9)
        assert again.settings["deliveries_max"] == 3
        assert (await bus.alter_subscription(topic, "s", lease_seconds=5)).settings["lease_seconds"] == 5
        assert [info.subscription for info in await bus.subscriptions(topic)] == ["s"]
        assert (topic, "s") in [(info.topic, info.subscription) for info in await bus.subscriptions()]
        assert (await bus.describe_subscription(topic, "s")).settings["discipline"] == "priority"
        assert (await bus.describe_subscription(topic, "s")).error == ""
        await bus.delete_subscription(topic, "s")
        for asked in (bus.describe_subscription, bus.reset_subscription):
            with pytest.raises(errors.SubscriptionNotFound):
                await asked(topic, "s")
        with pytest.raises(errors.InvalidArgument, match="colour"):
            await bus.create_subscription(topic, "t", colour="blue")

    run(story)


def test_a_subscription_begins_where_it_is_told(run: Run, topic: str) -> None:
    async def story(bus: Any) -> None:
        await published(bus, topic, b"0", b"1")
        await asyncio.sleep(0.002)
        now = datetime.now(UTC)
        await asyncio.sleep(0.002)
        await published(bus, topic, b"2")
        starts: dict[str, Any] = {"first": "earliest", "last": "latest", "offset": 1, "time": now}
        for name, start in starts.items():
            await bus.create_subscription(topic, name, start=start)
        await published(bus, topic, b"3")
        seen = {name: values(await bus.queue(topic, name).lease(10)) for name in starts}
        assert seen == {
            "first": [b"0", b"1", b"2", b"3"],
            "last": [b"3"],
            "offset": [b"1", b"2", b"3"],
            "time": [b"2", b"3"],
        }

    run(story)


# Leasing by hand.


def test_a_subscription_is_reset(run: Run, topic: str) -> None:
    async def story(bus: Any) -> None:
        await published(bus, topic, b"0", b"1", b"2")
        queue = bus.queue(topic)
        first, second = await queue.lease(2)
        await queue.ack(first)
        assert (await bus.reset_subscription(topic)).ready == 2
        with pytest.raises(errors.NotLeaseHolder):
            await queue.ack(second)
        assert values(await queue.lease(10)) == [b"1", b"2"]
        for start, ready in (("earliest", 3), (2, 1), ("latest", 0), (datetime.now(UTC) - timedelta(hours=1), 3)):
            assert (await bus.reset_subscription(topic, start=start)).ready == ready

    run(story)


def test_a_job_is_leased_and_acknowledged(run: Run, topic: str) -> None:
    async def story(bus: Any) -> None:
        await bus.publish(topic, b"v", key="k", headers={"h": "1"}, priority=3)
        queue = bus.queue(topic)
        (job,) = await queue.lease(5, lease=20)
        assert (job.value, job.key, job.headers, job.priority) == (b"v", b"k", {"h": b"1"}, 3)
        assert (job.topic, job.partition, job.offset, job.subscription) == (topic, 0, 0, "default")
        assert (job.deliveries, job.version, job.state) == (1, 1, None)
        assert abs(job.until - bus.clock.now_us() - 20_000_000) < 10_000_000
        assert await queue.lease(5) == []
        assert await queue.ack(job) is None
        with pytest.raises(errors.MessageGone):
            await queue.ack(job)
        assert (await queue.stats()).acked == 1

    run(story)


def test_lists_are_settled_at_once_with_the_refusals_told(run: Run, topic: str) -> None:
    async def story(bus: Any) -> None:
        await bus.create_topic(topic, partitions=3)
        await bus.publish_many(topic, [b"%d" % n for n in range(30)], keys=[b"%d" % n for n in range(30)])
        queue = bus.queue(topic)
        jobs = await queue.lease(30)
        assert sorted(values(jobs), key=int) == [b"%d" % n for n in range(30)]
        assert await queue.ack(jobs[:10]) == []
        refused = await queue.ack(jobs[5:15])
        assert {(each.partition, each.offset) for each in refused} == {
            (job.partition, job.offset) for job in jobs[5:10]
        }
        assert {each.code for each in refused} == {"message_gone"}
        assert await queue.extend(jobs[15:], 60) == []
        assert await queue.release(jobs[15:20], 0) == []
        assert await queue.reject(jobs[20:], "no use") == []
        assert await queue.ack([]) == []
        info = await queue.stats()
        assert (info.ready, info.leased, info.dead, info.acked) == (5, 0, 10, 15)

    run(story)


def test_a_lease_ends_and_another_gets_the_message(run: Run, topic: str) -> None:
    async def story(bus: Any) -> None:
        await published(bus, topic, b"a", b"b")
        queue = bus.queue(topic)
        first, second = await queue.lease(2, lease=0.05)
        (again,) = await queue.lease(1, wait=5)
        assert (again.offset, again.deliveries) == (first.offset, 2)
        with pytest.raises(errors.NotLeaseHolder):
            await queue.ack(first)
        await queue.ack(second)  # late, but nobody has taken it since
        with pytest.raises(errors.NotLeaseHolder):
            await queue.release(first)
        await queue.ack(again)

    run(story)


def test_a_lease_is_extended_by_hand(run: Run, topic: str) -> None:
    async def story(bus: Any) -> None:
        await published(bus, topic, b"a")
        queue = bus.queue(topic)
        (job,) = await queue.lease(1, lease=5)
        await queue.extend(job, 3600)
        (held,) = await queue.find(status="leased")
        assert held.until_us > job.until + 1_800_000_000
        assert await queue.lease(1) == []
        await queue.ack(job)

    run(story)


def test_waiting_ends_when_a_message_comes(run: Run, topic: str) -> None:
    async def story(bus: Any) -> None:
        await bus.create_topic(topic)
        queue = bus.queue(topic)
        await bus.schedule(topic, b"soon", in_=0.1)
        begun = time.monotonic()
        (job,) = await queue.lease(3, wait=20)
        assert (job.value, time.monotonic() - begun < 10) == (b"soon", True)
        assert bus.clock.now_us() + bus.clock.error_us >= job.due
        await queue.ack(job)
        assert await queue.lease(3, wait=0.01) == []

    run(story)


def test_a_message_is_given_back_with_a_state_for_the_next(run: Run, topic: str) -> None:
    async def story(bus: Any) -> None:
        await published(bus, topic, b"a", b"b", b"c")
        queue = bus.queue(topic)
        one, two, three = await queue.lease(3)
        await queue.release(one, 0, reason="tired", state=b"half")
        await queue.release(two, until=datetime.now(UTC) + timedelta(hours=1))
        await queue.release(three, timedelta(hours=1))
        (job,) = await queue.lease(3)
        assert (job.offset, job.state, job.deliveries) == (0, b"half", 2)
        resting = await queue.find(status="waiting")
        assert [message.offset for message in resting] == [1, 2]
        with pytest.raises(errors.InvalidArgument):
            await queue.release(job, 1, until=datetime.now(UTC))
        assert await queue.release([job], 0, state=b"more") == []
        assert (await queue.lease(1))[0].state == b"more"

    run(story)


def test_dead_letters_tell_their_story_and_come_back(run: Run, topic: str) -> None:
    async def story(bus: Any) -> None:
        await bus.create_topic(topic)
        await bus.create_subscription(topic, deliveries_max=2)
        await published(bus, topic, b"a", b"b", b"c", headers={"h": "1"})
        queue = bus.queue(topic)
        one, two, three = await queue.lease(3)
        await queue.reject(one, "cannot be read")
        await queue.release(two, 0, reason="first try")
        (two,) = await queue.lease(1)
        await queue.release(two, 0, reason="second try")
        await queue.ack(three)
        assert (await queue.stats()).dead == 2
        dead = await queue.find(status="dead")
        assert sorted(values(dead)) == [b"a", b"b"]
        (letter,) = [message for message in dead if message.value == b"b"]
        headers = letter.headers
        assert (letter.status, headers["h"]) == ("dead", b"1")
        assert headers["headrace-dead-reason"] == b"second try"
        assert (headers["headrace-dead-topic"], headers["headrace-dead-offset"]) == (topic.encode(), b"1")
        assert headers["headrace-dead-deliveries"] == b"2"
        history = json.loads(headers["headrace-dead-history"])
        assert [entry["reason"] for entry in history] == ["first try", "second try"]
        assert {entry["holder"] for entry in history} == {"me"}
        assert await queue.redrive(messages=[letter]) == 1
        (back,) = await queue.lease(5)
        assert (back.value, back.deliveries, back.headers["h"]) == (b"b", 1, b"1")
        assert "headrace-dead-reason" not in back.headers
        assert await queue.redrive() == 1
        assert await queue.redrive() == 0
        assert (await queue.stats()).dead == 0

    run(story)


def test_a_block_acknowledges_what_it_was_not_told_about(run: Run, topic: str) -> None:
    async def story(bus: Any) -> None:
        await published(bus, topic, b"a", b"b", b"c")
        queue = bus.queue(topic)
        async with bus.lease(topic, max=2) as jobs:
            assert values(jobs) == [b"a", b"b"]
            await queue.release(jobs[0], 0)
        info = await queue.stats()
        assert (info.ready, info.leased, info.acked) == (2, 0, 1)

        async def failing() -> None:
            async with bus.lease(topic, max=1, lease=60, subscription="default") as jobs:
                assert jobs[0].deliveries == 2
                _ = 1 / 0

        with pytest.raises(ZeroDivisionError):
            await failing()
        (waiting,) = await queue.find(status="waiting")
        assert "ZeroDivisionError" in waiting.reason
        async with bus.lease(topic, wait=0.01, deserializer="str") as jobs:
            assert values(jobs) == ["c"]
        async with bus.lease(topic) as jobs:
            assert jobs == []

    run(story)


def test_a_block_keeps_its_messages_for_as_long_as_it_takes(run: Run, topic: str) -> None:
    async def story(bus: Any) -> None:
        await published(bus, topic, b"a")
        async with bus.lease(topic, lease=2) as jobs:
            while (await bus.queue(topic).find(status="leased"))[0].until_us == jobs[0].until:
                await asyncio.to_thread(time.sleep, 0.02)
            assert await bus.queue(topic).lease(1) == []
        assert (len(jobs), (await bus.queue(topic).stats()).acked) == (1, 1)

    run(story)


def test_what_cannot_be_deserialized_is_given_back(run: Run, topic: str) -> None:
    async def story(bus: Any) -> None:
        await bus.create_topic(topic)
        await bus.create_subscription(topic, deliveries_max=1)
        await published(bus, topic, b"{}", b"not json", b"[1]")
        queue = bus.queue(topic, deserializer="json")
        assert values(await queue.lease(5)) == [{}, [1]]
        await published(bus, topic, b"neither", b"7")
        jobs = queue.jobs(timeout=1)
        assert [job.value async for job in jobs] == [7]
        dead = await queue.find(status="dead")
        assert sorted(values(dead)) == [b"neither", b"not json"]
        assert all("JSON" in message.reason or "DecodeError" in message.reason for message in dead)

    run(story)


def test_many_take_at_once_and_nobody_gets_anothers_message(run: Run, topic: str) -> None:
    async def story(bus: Any) -> None:
        await published(bus, topic, *(b"%d" % number for number in range(200)))
        queue, seen = bus.queue(topic), []

        async def consume(face: Any) -> None:
            while jobs := await face.lease(1):
                seen.append(jobs[0].value)
                await face.ack(jobs[0])

        if threaded(bus):
            threads = [threading.Thread(target=asyncio.run, args=(consume(queue),)) for _ in range(8)]
            for thread in threads:
                thread.start()
            for thread in threads:
                await asyncio.to_thread(thread.join)
        else:
            await asyncio.gather(*(consume(queue) for _ in range(8)))
        assert sorted(seen, key=int) == [b"%d" % number for number in range(200)]
        assert (await queue.stats()).acked == 200

    run(story)


def test_wrong_arguments_are_refused(run: Run, topic: str) -> None:
    async def story(bus: Any) -> None:
        await bus.create_topic(topic)
        queue = bus.queue(topic)
        for wrong in ({"max": 0}, {"lease": -1}, {"wait": "1"}):
            with pytest.raises(errors.InvalidArgument):
                await queue.lease(**wrong)
        for wrong in ({"prefetch": 0}, {"ack": "never"}, {"lease": -1}):
            with pytest.raises(errors.InvalidArgument):
                queue.jobs(**wrong)
        with pytest.raises(errors.InvalidArgument):
            bus.scheduled("x")
        with pytest.raises(errors.InvalidArgument):
            await bus.schedule(topic, b"", at=1, in_=1)
        with pytest.raises(errors.InvalidArgument):
            await queue.edit_matching()
        with pytest.raises(errors.HeadraceError):
            await bus.queue("a/b/c").lease(1)

    run(story)


# One after the other.


def test_jobs_are_acknowledged_when_the_next_is_asked_for(run: Run, topic: str) -> None:
    async def story(bus: Any) -> None:
        await published(bus, topic, *(b"%d" % number for number in range(25)))
        queue = bus.queue(topic)
        seen = [job.value async for job in queue.jobs(10, timeout=1)]
        assert seen == [b"%d" % number for number in range(25)]
        info = await queue.stats()
        assert (info.ready, info.leased, info.acked) == (0, 0, 25)

    run(story)


def test_a_loop_that_is_left_gives_back_what_it_had(run: Run, topic: str) -> None:
    async def story(bus: Any) -> None:
        await published(bus, topic, b"a", b"b", b"c")
        queue = bus.queue(topic)
        async with queue.jobs(timeout=5) as jobs:
            async for job in jobs:
                if job.value == b"b":
                    break
        info = await queue.stats()
        assert (info.ready, info.leased, info.acked) == (1, 0, 2)

        async def failing() -> None:
            async with jobs:
                async for job in jobs:
                    assert job.deliveries == 1  # leased before, but never looked at
                    _ = 1 / 0

        jobs = queue.jobs(timeout=5)
        with pytest.raises(ZeroDivisionError):
            await failing()
        (waiting,) = await queue.find()
        assert (waiting.status, waiting.deliveries) == ("waiting", 1)
        assert "ZeroDivisionError" in waiting.reason
        with pytest.raises(errors.Closed):
            _ = [job async for job in jobs]

    run(story)


def test_jobs_end_when_they_are_stopped(run: Run, topic: str) -> None:
    async def story(bus: Any) -> None:
        await published(bus, topic, b"a", b"b", b"c")
        queue = bus.queue(topic)
        jobs, seen = queue.jobs(), []
        async for job in jobs:
            seen.append(job.value)
            jobs.stop()
        info = await queue.stats()
        assert (seen, info.ready, info.leased, info.acked) == ([b"a"], 2, 0, 1)

    run(story)


def test_jobs_are_settled_by_hand(run: Run, topic: str) -> None:
    async def story(bus: Any) -> None:
        await published(bus, topic, b"a", b"b", b"c")
        queue = bus.queue(topic)
        async for job in queue.jobs(ack="manual", timeout=1):
            if job.value == b"a":
                await queue.ack(job)
            elif job.value == b"b":
                await queue.reject(job, "b")
        info = await queue.stats()
        assert (info.acked, info.dead, info.leased) == (1, 1, 1)
        async for job in bus.queue(topic, "other").jobs(timeout=1):
            await queue.ack([]) if job.value == b"a" else await bus.queue(topic, "other").release(job, 60)
        other = await bus.queue(topic, "other").stats()
        assert (other.acked, other.waiting) == (1, 2)

    run(story)


def test_jobs_come_when_they_are_due_and_never_before(run: Run, topic: str) -> None:
    async def story(bus: Any) -> None:
        await bus.create_topic(topic)
        queue = bus.queue(topic)
        begin_us = bus.clock.now_us()
        dues = [begin_us + ms * 1000 for ms in (250, 150, 200, 151, 152)]
        await bus.publish_many(topic, [b"0", b"1", b"2", b"3", b"4"], dues=dues)
        await published(bus, topic, b"now")
        seen = []
        async with queue.jobs(timeout=5) as jobs:
            async for job in jobs:
                assert job.due is None or bus.clock.now_us() >= job.due
                seen.append(job.value)
                if len(seen) == 6:
                    break
        assert seen == [b"now", b"1", b"3", b"4", b"2", b"0"]
        timing = (await queue.stats()).timing
        assert (sum(timing.counts), timing.early) == (5, 0)
        assert bus.clock.error_us < 1_000_000

    run(story)


def test_a_message_that_is_given_back_rests_also_when_others_lease_ahead(run: Run, topic: str) -> None:
    async def story(bus: Any) -> None:
        await published(bus, topic, b"a")
        queue, times = bus.queue(topic), []
        async with queue.jobs(ack="manual", timeout=5) as jobs:
            async for job in jobs:
                times.append(bus.clock.now_us())
                if job.deliveries == 2:
                    await queue.ack(job)
                    break
                await queue.release(job, 0.2)
        assert times[1] - times[0] >= 200_000

    run(story)


# Trouble.


def test_broken_connections_are_bridged(run: Run, topic: str) -> None:
    async def story(bus: Any) -> None:
        await published(bus, topic, *(b"%d" % number for number in range(10)))
        queue, inner = bus.queue(topic), bus.inner if threaded(bus) else bus

        def cut() -> None:
            for line in (inner._broker, inner._consuming):
                if line.connection is not None:
                    line.connection.end(errors.ConnectionFailed("cut"))

        (one,) = await queue.lease(1, lease=0.3)
        cut()
        await queue.ack(one)
        cut()
        (two,) = await queue.lease(1, lease=2)  # an answer may be cut off, too
        cut()
        await queue.release(two, 0)
        seen = []
        async with queue.jobs(2, lease=2, timeout=30) as jobs:  # an answer may be cut off, too
            async for job in jobs:
                seen.append(job.value)
                if job.value in (b"3", b"7"):
                    cut()
                if len(seen) == 9:
                    break
        assert sorted(seen) == [b"%d" % number for number in range(1, 10)]
        assert (await queue.stats()).acked == 10

    run(story)


def test_a_bus_that_is_closed_gives_back_what_it_had(run: Run, topic: str) -> None:
    async def story(bus: Any) -> None:
        await published(bus, topic, *(b"%d" % number for number in range(5)))
        queue = bus.queue(topic)
        jobs = queue.jobs(timeout=10)
        async for job in jobs:
            assert job.value == b"0"
            await jobs.close()
            break
        info = await queue.stats()
        assert (info.ready, info.waiting, info.leased, info.acked) == (4, 1, 0, 0)
        await bus.close()
        for name, args in (("lease", [1]), ("ack", [job]), ("ack", [[job]]), ("stats", [])):
            with pytest.raises(errors.HeadraceError):
                await getattr(queue, name)(*args)
        with pytest.raises(errors.Closed):
            bus.queue(topic)

    run(story)
