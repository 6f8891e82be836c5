"""One suite for the client: over a broker in the same process, TCP, a Unix socket and HTTP; for threads and asyncio."""

import asyncio
import tempfile
from collections.abc import Awaitable, Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from tests.certificates import make_ca
from tests.conformance.faces import awaitable
from tests.http_client import also_http, needs_http

import headrace
from headrace import errors
from headrace.server import EmbeddedServer

Story = Callable[[Any], Awaitable[None]]
Run = Callable[[Story], None]


@pytest.fixture(scope="module")
def served() -> Iterator[dict[str, str]]:
    """A broker that listens, for all tests of this module: each has topics and groups of its own."""
    with tempfile.TemporaryDirectory(prefix="headrace-") as directory:
        path = f"{directory}/s"
        addresses = ["headrace://127.0.0.1:0", "headraces://127.0.0.1:0", f"unix://{path}"]
        addresses += ["http://127.0.0.1:0"] if also_http() else []
        files = make_ca(Path(directory) / "ca").make_server()
        tls = {"tls_certificate": files.certificate, "tls_key": files.key}
        server = EmbeddedServer(f"{directory}/data", listen=addresses, **tls)
        names = {"headrace": "tcp", "headraces": "tls", "headrace+unix": "unix", "http": "http"}
        try:
            found = {names[url.partition(":")[0]]: url for url in server._server.listening}
            yield {**found, "tls": f"{found['tls']}?ca={files.ca}"}
        finally:
            server.close()


@pytest.fixture(params=["embedded", "tcp", "tls", "unix", pytest.param("http", marks=needs_http)])
def transport(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=["sync", "async"])
def run(request: pytest.FixtureRequest, transport: str, served: dict[str, str], tmp_path: Path) -> Run:
    """Runs a story with a bus."""

    async def bus_and(story: Story) -> None:
        if request.param == "sync":
            opened = headrace.open(tmp_path) if transport == "embedded" else headrace.connect(served[transport])
            async with awaitable(opened) as bus:
                await story(bus)
        else:
            if transport == "embedded":
                bus = await headrace.open_async(tmp_path)
            else:
                bus = await headrace.connect_async(served[transport])
            async with bus:
                await story(bus)

    return lambda story: asyncio.run(asyncio.wait_for(bus_and(story), 60))


@pytest.fixture
def topic(request: pytest.FixtureRequest) -> str:
    """A name that no other test uses."""
    kept = [char if char.isalnum() else "-" for char in request.node.name.removeprefix("test_")]
    return "".join(kept).strip("-")


async def values(subscription: Any) -> list[Any]:
    return [message.value async for message in subscription]


async def read(bus: Any, count: int, *topics: str, **settings: Any) -> list[Any]:
    """The values of so many messages: whoever knows how many there are need not wait for the end."""
    seen: list[Any] = []
    async with bus.subscribe(*topics, timeout=20, **settings) as subscription:
        async for message in subscription:
            seen.append(message.value)
            if len(seen) == count:
                break
    return seen


# Topics.


def test_a_topic_lives_and_dies(run: Run, topic: str) -> None:
    async def story(bus: Any) -> None:
        made = await bus.create_topic(topic, partitions=3, retain_seconds=60)
        assert (made.topic, len(made.partitions), made.settings["retain_seconds"]) == (topic, 3, 60)
        with pytest.raises(errors.TopicExists):
            await bus.create_topic(topic)
        assert (await bus.create_topic(topic, exist_ok=True, partitions=9)).id == made.id
        assert (await bus.alter_topic(topic, partitions=4)).settings["partitions"] == 4
        assert [info.topic for info in await bus.topics(f"{topic[:-1]}?")] == [topic]
        await bus.delete_topic(topic)
        with pytest.raises(errors.TopicNotFound):
            await bus.describe_topic(topic)

    run(story)


def test_a_wrong_setting_is_named(run: Run, topic: str) -> None:
    async def story(bus: Any) -> None:
        with pytest.raises(errors.InvalidArgument, match="partitions"):
            await bus.create_topic(topic, partitions=0)
        with pytest.raises(errors.InvalidArgument, match="colour"):
            await bus.create_topic(topic, colour="blue")

    run(story)


def test_the_broker_tells_about_itself(run: Run) -> None:
    async def story(bus: Any) -> None:
        info = await bus.info()
        assert info.broker_id
        assert info.connections >= 1

    run(story)


# Publishing.


def test_a_message_comes_back_whole(run: Run, topic: str) -> None:
    async def story(bus: Any) -> None:
        noon = datetime(2030, 1, 1, 12, tzinfo=UTC)
        receipt = await bus.publish(
            topic, b"v", key="k", headers={"a": "ä", "b": b"\0"}, timestamp=noon, priority=5, due=1, expires=1 << 57
        )
        assert (receipt.topic, receipt.partition, receipt.offset, receipt.count) == (topic, 0, 0, 1)
        assert receipt.durability is headrace.Durability.SYNCED
        expected = headrace.Received(
            0, b"v", 1893499200000000, b"k", {"a": "ä".encode(), "b": b"\0"}, 1, 5, 1 << 57, topic, 0
        )
        async with bus.subscribe(topic, timeout=20) as subscription:
            async for message in subscription:
                assert message == expected
                break

    run(story)


def test_many_messages_cost_one_batch(run: Run, topic: str) -> None:
    async def story(bus: Any) -> None:
        (receipt,) = await bus.publish_many(topic, [b"%d" % number for number in range(1000)])
        assert (receipt.offset, receipt.count) == (0, 1000)
        (batch,) = await bus.fetch(topic, 0, 0)
        assert batch.count == 1000
        assert await bus.publish_many(topic, []) == []

    run(story)


def test_more_than_a_batch_holds_is_divided_and_stays_in_order(run: Run, topic: str) -> None:
    async def story(bus: Any) -> None:
        payload = [b"%06d" % number + bytes(number % 300) for number in range(5000)]
        (receipt,) = await bus.publish_many(topic, iter(payload))
        assert (receipt.offset, receipt.count) == (0, 5000)
        assert await read(bus, 5000, topic) == payload

    run(story)


def test_keys_stay_together_and_keyless_batches_go_round(run: Run, topic: str) -> None:
    async def story(bus: Any) -> None:
        await bus.create_topic(topic, partitions=4)
        keys = [b"key-%d" % (number % 50) for number in range(500)]
        receipts = await bus.publish_many(topic, [b"%d" % number for number in range(500)], keys=keys)
        assert sum(receipt.count for receipt in receipts) == 500
        homes: dict[bytes, set[int]] = {}
        async with bus.subscribe(topic, timeout=20) as subscription:
            async for message in subscription:
                homes.setdefault(message.key, set()).add(message.partition)
                if len(homes) == 50 and subscription.lag <= 1:
                    break
        assert all(len(partitions) == 1 for partitions in homes.values())
        single = await bus.publish(topic, b"x", key="key-7")
        assert {single.partition} == homes[b"key-7"]
        keyless = {(await bus.publish(topic, b"x")).partition for _ in range(4)}
        assert keyless == {0, 1, 2, 3}
        assert (await bus.publish(topic, b"x", key="key-7", partition=2)).partition == 2

    run(story)


def test_a_partition_that_is_not_there(run: Run, topic: str) -> None:
    async def story(bus: Any) -> None:
        with pytest.raises(errors.PartitionNotFound, match="0 to 0"):
            await bus.publish(topic, b"x", partition=1)
        with pytest.raises(errors.PartitionNotFound):
            await bus.publish_many(topic, [b"x"], partition=-1)

    run(story)


def test_only_at_the_expected_offset(run: Run, topic: str) -> None:
    async def story(bus: Any) -> None:
        assert (await bus.publish(topic, b"a", expected_offset=0)).offset == 0
        with pytest.raises(errors.UnexpectedOffset):
            await bus.publish(topic, b"b", expected_offset=0)
        # What was refused leaves no trace: the next one gets through.
        assert (await bus.publish(topic, b"c", expected_offset=1)).offset == 1
        assert (await bus.publish(topic, b"d")).offset == 2

    run(story)


def test_a_refused_message_takes_no_other_with_it(run: Run, topic: str) -> None:
    async def story(bus: Any) -> None:
        await bus.create_topic(topic, message_bytes_max=10)
        with pytest.raises(errors.MessageTooLarge):
            await bus.publish(topic, bytes(11))
        with pytest.raises(errors.MessageTooLarge):
            await bus.publish_many(topic, [b"x", bytes(11)])
        await bus.alter_topic(topic, message_bytes_max=5)
        async with bus.producer(topic) as producer:
            sents = [await producer.send(b"%d" % number) for number in range(10)]
            assert [(await sent).offset for sent in sents] == list(range(10))

    run(story)


def test_durability_as_asked(run: Run, topic: str) -> None:
    async def story(bus: Any) -> None:
        await bus.create_topic(topic, durability="written")
        # It may be more than was asked for: the disk may be done before the answer is on its way.
        assert (await bus.publish(topic, b"x")).durability >= headrace.Durability.WRITTEN
        assert (await bus.publish(topic, b"x", durability="synced")).durability is headrace.Durability.SYNCED

    run(story)


@pytest.mark.parametrize("compression", ["none", "lz4", "zstd"])
def test_compression(run: Run, topic: str, compression: str) -> None:
    async def story(bus: Any) -> None:
        async with bus.producer(topic, compression=compression) as producer:
            await producer.publish_many([b"again and again"] * 500)
        (batch,) = await bus.fetch(topic, 0, 0)
        assert ["none", "lz4", "zstd"][batch.codec] == compression
        assert await read(bus, 500, topic) == [b"again and again"] * 500

    run(story)


def test_the_topic_chooses_the_compression(run: Run, topic: str) -> None:
    async def story(bus: Any) -> None:
        await bus.create_topic(topic, compression="zstd")
        await bus.publish_many(topic, [b"again and again"] * 500)
        (batch,) = await bus.fetch(topic, 0, 0)
        assert batch.codec == 2

    run(story)


# Producers.


def test_sent_messages_linger_together(run: Run, topic: str) -> None:
    async def story(bus: Any) -> None:
        told: list[tuple[Any, Any]] = []
        async with bus.producer(topic, linger=0.05) as producer:
            sents = [await producer.send(b"%d" % number) for number in range(20)]
            await producer.send(b"keyed", "k", callback=lambda receipt, error: told.append((receipt, error)))
            receipts = [await sent.result(10) for sent in sents]
        assert [receipt.offset for receipt in receipts] == list(range(20))
        assert {receipt.count for receipt in receipts} == {1}
        (batch,) = await bus.fetch(topic, 0, 0)
        assert batch.count == 21
        assert [(receipt.offset, error) for receipt, error in told] == [(20, None)]

    run(story)


def test_batches_by_count_and_by_bytes(run: Run, topic: str) -> None:
    async def story(bus: Any) -> None:
        receipts: list[headrace.Receipt] = []
        async with bus.producer(topic, linger=30, batch_count=10, after_ack=[receipts.append]) as producer:
            for _ in range(25):
                await producer.send(b"x")
        async with bus.producer(topic, linger=30, batch_bytes=100, after_ack=[receipts.append]) as producer:
            for _ in range(5):
                await producer.send(bytes(50))
        assert [receipt.count for receipt in receipts] == [10, 10, 5, 2, 2, 1]

    run(story)


def test_serializers_and_deserializers(run: Run, topic: str) -> None:
    async def story(bus: Any) -> None:
        async with bus.producer(topic, serializer="json") as producer:
            await producer.publish({"id": 1})
            await producer.publish_many([[2], "drei", None])
        assert await read(bus, 4, topic, deserializer="json") == [{"id": 1}, [2], "drei", None]
        async with bus.producer(topic, serializer=lambda number: b"%d" % number) as producer:
            await producer.send(42)
            with pytest.raises(headrace.CannotSerialize, match="str"):
                await producer.send("text")
        with pytest.raises(errors.InvalidArgument, match="serializer"):
            await bus.publish(topic, {"not": "bytes"})

    run(story)


def test_hooks_see_change_and_drop(run: Run, topic: str) -> None:
    async def story(bus: Any) -> None:
        acknowledged: list[headrace.Receipt] = []

        def sign(message: headrace.OutgoingMessage) -> headrace.OutgoingMessage | None:
            if message.value == b"secret":
                return None
            message.headers = {**(message.headers or {}), "signed": "yes"}
            return message

        async with bus.producer(topic, before_publish=[sign], after_ack=[acknowledged.append]) as producer:
            assert (await producer.publish(b"secret")).count == 0
            assert (await producer.publish(b"public")).offset == 0
            await producer.publish_many([b"a", b"secret", b"b"])
        batches = await bus.fetch(topic, 0, 0)
        messages = [message for batch in batches for message in batch.messages()]
        assert [message.value for message in messages] == [b"public", b"a", b"b"]
        assert all(message.headers == {"signed": b"yes"} for message in messages)
        assert sum(receipt.count for receipt in acknowledged) == 3

    run(story)


def test_a_full_buffer_raises_or_blocks(run: Run, topic: str) -> None:
    async def story(bus: Any) -> None:
        producer = bus.producer(topic, on_full="raise", buffer_bytes=5000, batch_count=1)

        async def send_on_and_on() -> None:
            for _ in range(10_000):
                await producer.send(bytes(1000))

        with pytest.raises(errors.Busy):
            await send_on_and_on()
        await producer.close()
        async with bus.producer(topic, buffer_bytes=5000, batch_count=1) as patient:
            for _ in range(200):
                await patient.send(bytes(1000))

    run(story)


def test_close_delivers_what_is_gathered(run: Run, topic: str) -> None:
    async def story(bus: Any) -> None:
        producer = bus.producer(topic, linger=30)
        sents = [await producer.send(b"x") for _ in range(7)]
        await producer.close()
        assert [(await sent).offset for sent in sents] == list(range(7))
        with pytest.raises(errors.Closed):
            await producer.send(b"late")

    run(story)


# Reading by index.


def test_from_an_offset_a_time_and_the_end(run: Run, topic: str) -> None:
    async def story(bus: Any) -> None:
        noon = datetime(2030, 1, 1, 12, tzinfo=UTC)
        times = [noon + timedelta(minutes=minute) for minute in range(10)]
        await bus.publish_many(topic, [b"%d" % minute for minute in range(10)], timestamps=times)
        for minute in range(10, 13):
            await bus.publish(topic, b"%d" % minute, timestamp=noon + timedelta(minutes=minute))
        assert await read(bus, 5, topic, start=8) == [b"8", b"9", b"10", b"11", b"12"]
        assert await read(bus, 2, topic, start=noon + timedelta(minutes=11)) == [b"11", b"12"]
        assert await bus.offsets(topic) == {0: 13}
        assert await bus.offsets(topic, "earliest") == {0: 0}
        async with bus.subscribe(topic, start="latest", timeout=2) as late:
            await bus.publish(topic, b"news")
            async for message in late:
                assert message.value == b"news"
                break

    run(story)


def test_batches_are_cut_where_one_asked(run: Run, topic: str) -> None:
    async def story(bus: Any) -> None:
        await bus.publish_many(topic, [b"%d" % number for number in range(10)], keys=[b"k"] * 10)
        async for batch in bus.subscribe(topic, start=7, timeout=0.1).batches():
            assert (list(batch.offsets), batch.values) == ([7, 8, 9], [b"7", b"8", b"9"])
            assert (batch.topic, batch.partition, len(batch), batch.next_offset) == (topic, 0, 3, 10)
            assert [message.offset for message in batch.messages()] == [7, 8, 9]
            assert batch.columns().keys == [b"k"] * 3

    run(story)


def test_several_topics_and_chosen_partitions(run: Run, topic: str) -> None:
    async def story(bus: Any) -> None:
        await bus.create_topic(f"{topic}-a", partitions=2)
        await bus.publish(f"{topic}-a", b"a0", partition=0)
        await bus.publish(f"{topic}-a", b"a1", partition=1)
        await bus.publish(f"{topic}-b", b"b0")
        assert sorted(await read(bus, 3, f"{topic}-a", f"{topic}-b")) == [b"a0", b"a1", b"b0"]
        assert await read(bus, 1, f"{topic}-a", partitions=[1]) == [b"a1"]
        assert await read(bus, 1, f"{topic}-a", start={1: 0}) == [b"a1"]

    run(story)


def test_patterns_find_new_topics(run: Run, topic: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for face in ("_async", "_sync"):
        monkeypatch.setattr(f"headrace.client.{face}.consumer.discovery._REFRESH_S", 0.1)

    async def story(bus: Any) -> None:
        await bus.publish(f"{topic}-1", b"old")
        found = []
        async with bus.subscribe(pattern=f"{topic}-?", timeout=10) as subscription:
            async for message in subscription:
                found.append((message.topic, message.value))
                if len(found) == 2:
                    break
                await bus.publish(f"{topic}-2", b"new")
        assert found == [(f"{topic}-1", b"old"), (f"{topic}-2", b"new")]

    run(story)


def test_messages_past_their_time_are_passed_over(run: Run, topic: str) -> None:
    async def story(bus: Any) -> None:
        await bus.publish_many(topic, [b"gone", b"here", b"gone"], expires=[1, 1 << 57, 1])
        async with bus.subscribe(topic, timeout=0.1) as subscription:
            assert await values(subscription) == [b"here"]
            assert subscription.lag == 0

    run(story)


def test_a_message_that_cannot_be_deserialized_is_not_lost(run: Run, topic: str) -> None:
    async def story(bus: Any) -> None:
        await bus.publish_many(topic, [b"1", b"?", b"3"])
        async with bus.subscribe(topic, deserializer="json", timeout=0.1) as subscription:
            with pytest.raises(headrace.CannotDeserialize, match="message 1 of") as caught:
                await values(subscription)
            assert caught.value.message.value == b"?"
            assert await values(subscription) == [3]
        assert await read(bus, 2, topic, deserializer="json", on_error="skip") == [1, 3]
        mended = await read(bus, 3, topic, deserializer="json", on_error=lambda error: error.offset)
        assert mended == [1, 1, 3]

    run(story)


def test_leaving_a_loop_and_coming_back(run: Run, topic: str) -> None:
    async def story(bus: Any) -> None:
        await bus.publish_many(topic, [b"%d" % number for number in range(6)])
        async with bus.subscribe(topic, timeout=0.1) as subscription:
            seen = []
            for _ in range(3):
                async for message in subscription:
                    seen.append(message.value)
                    if len(seen) % 2 == 0:
                        break
            assert seen == [b"0", b"1", b"2", b"3", b"4", b"5"]
            await subscription.seek(4)
            assert await values(subscription) == [b"4", b"5"]
            await subscription.seek("earliest")
            assert len(await values(subscription)) == 6

    run(story)


def test_an_offset_that_is_not_there(run: Run, topic: str, caplog: pytest.LogCaptureFixture) -> None:
    async def story(bus: Any) -> None:
        await bus.publish(topic, b"x")
        with pytest.raises(errors.OffsetOutOfRange):
            await values(bus.subscribe(topic, start=99, on_out_of_range="raise", timeout=5))
        assert await read(bus, 1, topic, start=99) == [b"x"]
        assert "going on with the earliest" in caplog.text

    run(story)


def test_stop_ends_the_iteration(run: Run, topic: str) -> None:
    async def story(bus: Any) -> None:
        await bus.publish_many(topic, [b"a", b"b", b"c"])
        async with bus.subscribe(topic) as subscription:
            async for message in subscription:
                if message.value == b"b":
                    subscription.stop()
                assert message.value in (b"a", b"b", b"c")
        with pytest.raises(errors.Closed):
            await values(subscription)

    run(story)


def test_fetch_waits_for_what_is_to_come(run: Run, topic: str) -> None:
    async def story(bus: Any) -> None:
        await bus.create_topic(topic)
        assert await bus.fetch(topic, 0, 0, wait=0.05) == []
        await bus.publish(topic, b"x")
        (batch,) = await bus.fetch(topic, 0, 0, wait=5)
        assert list(batch.columns().values) == [b"x"]

    run(story)


# Groups.


def test_a_group_goes_on_where_it_was(run: Run, topic: str) -> None:
    async def story(bus: Any) -> None:
        await bus.publish_many(topic, [b"%d" % number for number in range(10)])
        async with bus.subscribe(topic, group=topic, timeout=5) as subscription:
            async for message in subscription:
                if message.offset == 3:
                    break
        assert [place.offset for place in (await bus.describe_group(topic)).places] == [4]
        assert await read(bus, 6, topic, group=topic) == [b"%d" % n for n in range(4, 10)]

    run(story)


def test_what_an_exception_interrupts_comes_again(run: Run, topic: str) -> None:
    async def story(bus: Any) -> None:
        await bus.publish_many(topic, [b"a", b"b", b"c"])

        async def interrupted() -> None:
            async with bus.subscribe(topic, group=topic, timeout=5) as subscription:
                async for message in subscription:
                    if message.value == b"b":
                        raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            await interrupted()
        assert await read(bus, 2, topic, group=topic) == [b"b", b"c"]

    run(story)


def test_manual_commits(run: Run, topic: str) -> None:
    async def story(bus: Any) -> None:
        await bus.publish_many(topic, [b"%d" % number for number in range(10)])
        async with bus.subscribe(topic, group=topic, commit="manual", timeout=0.2) as subscription:
            async for message in subscription:
                if message.offset == 4:
                    await subscription.commit()
                if message.offset == 6:
                    await subscription.commit(message)
        async with bus.subscribe(topic, group=topic, commit="manual", timeout=0.2) as subscription:
            async for batch in subscription.batches():
                assert batch.values == [b"7", b"8", b"9"]
                await subscription.commit(batch)
            assert subscription.lag == 0
        assert [(each.lag, each.topics) for each in await bus.groups() if each.group == topic] == [(0, [topic])]
        async with bus.subscribe(topic) as alone:
            with pytest.raises(errors.InvalidArgument, match="group"):
                await alone.commit()

    run(story)


def test_a_group_is_moved(run: Run, topic: str) -> None:
    async def story(bus: Any) -> None:
        await bus.publish_many(topic, [b"%d" % number for number in range(5)])
        assert len(await read(bus, 5, topic, group=topic)) == 5
        await bus.seek_group(topic, topic, 3)
        assert await read(bus, 2, topic, group=topic) == [b"3", b"4"]
        await bus.commit(topic, {(topic, 0): 4})
        assert await read(bus, 1, topic, group=topic) == [b"4"]
        async with bus.subscribe(topic, group=topic, timeout=0.2) as subscription:
            await subscription.seek("earliest")
            assert len(await values(subscription)) == 5
        await bus.delete_group(topic)
        with pytest.raises(errors.GroupNotFound):
            await bus.describe_group(topic)

    run(story)


def test_a_member_at_work_hears_that_its_group_was_moved(run: Run, topic: str) -> None:
    async def story(bus: Any) -> None:
        await bus.publish_many(topic, [b"%d" % number for number in range(3)])
        seen = []
        async with bus.subscribe(topic, group=topic, timeout=2) as subscription:
            async for message in subscription:
                seen.append(message.value)
                if len(seen) == 3:
                    await bus.seek_group(topic, topic, "earliest")
                if len(seen) == 6:
                    break
        assert seen == [b"0", b"1", b"2"] * 2

    run(story)


def test_a_coroutine_function_handles_messages_in_both_clients(run: Run, topic: str) -> None:
    async def story(bus: Any) -> None:
        await bus.publish_many(topic, [b"a", b"b"])
        seen: list[bytes] = []

        async def handle(message: Any) -> None:
            await asyncio.sleep(0)
            seen.append(message.value)

        for workers in (1, 2):
            await bus.subscribe(topic, group=f"{topic}-{workers}", timeout=0.5).run(handle, workers=workers)
        assert seen == [b"a", b"b"] * 2
        with pytest.raises(errors.InvalidArgument, match="handler"):
            await bus.subscribe(topic, timeout=0.5).run(divmod)

    run(story)


def test_workers_keep_the_order_of_partitions(run: Run, topic: str) -> None:
    async def story(bus: Any) -> None:
        await bus.create_topic(topic, partitions=4)
        for partition in range(4):
            for start in range(0, 100, 20):
                await bus.publish_many(topic, [b"%d" % n for n in range(start, start + 20)], partition=partition)
        seen: dict[int, list[bytes]] = {partition: [] for partition in range(4)}
        async with bus.subscribe(topic, group=topic, timeout=0.5) as subscription:
            await subscription.run(lambda message: seen[message.partition].append(message.value), workers=3)
        assert all(came == [b"%d" % n for n in range(100)] for came in seen.values())
        assert {place.lag for place in (await bus.describe_group(topic)).places} == {0}

    run(story)


def test_a_failing_handler_ends_the_run_and_its_message_comes_again(run: Run, topic: str) -> None:
    async def story(bus: Any) -> None:
        await bus.publish_many(topic, [b"a", b"bad", b"c"])

        def handle(message: headrace.Received) -> None:
            if message.value == b"bad":
                raise ZeroDivisionError

        for workers in (1, 2):
            with pytest.raises(ZeroDivisionError):
                await bus.subscribe(topic, group=topic, timeout=5).run(handle, workers=workers)
        told: list[bytes] = []
        await bus.subscribe(topic, group=topic, timeout=0.2).run(
            handle, on_error=lambda message, _error: told.append(message.value)
        )
        assert told == [b"bad"]
        assert {place.lag for place in (await bus.describe_group(topic)).places} == {0}

    run(story)


# Transactions.


def test_a_transaction_counts_whole_or_not_at_all(run: Run, topic: str) -> None:
    async def story(bus: Any) -> None:
        await bus.create_topic(f"{topic}-a", partitions=2)
        await bus.create_topic(f"{topic}-b")
        async with bus.transaction(topic, sequence=1) as transaction:
            await transaction.publish(f"{topic}-a", b"one", key="k")
            await transaction.publish_many(f"{topic}-b", [b"%d" % number for number in range(3000)])
            assert await bus.offsets(f"{topic}-b") == {0: 0}
        assert await read(bus, 3000, f"{topic}-b") == [b"%d" % number for number in range(3000)]
        assert await read(bus, 1, f"{topic}-a") == [b"one"]

        async def interrupted() -> None:
            async with bus.transaction(topic, sequence=2) as transaction:
                await transaction.publish(f"{topic}-a", b"never")
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            await interrupted()
        async with bus.transaction(topic, sequence=1) as transaction:
            assert transaction.already_committed
            await transaction.publish(f"{topic}-a", b"again")
        assert sum((await bus.offsets(f"{topic}-a")).values()) == 1

    run(story)


def test_a_transaction_commits_positions(run: Run, topic: str) -> None:
    async def story(bus: Any) -> None:
        await bus.publish_many(f"{topic}-in", [b"1", b"2", b"3"])
        async with bus.subscribe(f"{topic}-in", group=topic, commit="manual", timeout=20) as subscription:
            async for message in subscription:
                async with bus.transaction(topic) as transaction:
                    await transaction.publish(f"{topic}-out", message.value * 2)
                    transaction.commit_positions(subscription)
                if message.value == b"2":
                    break
        assert await read(bus, 2, f"{topic}-out") == [b"11", b"22"]
        assert await read(bus, 1, f"{topic}-in", group=topic) == [b"3"]

    run(story)


# The bus.


def test_nothing_works_when_it_is_closed(run: Run, topic: str) -> None:
    async def story(bus: Any) -> None:
        producer = bus.producer(topic, linger=30)
        sent = await producer.send(b"on its way")
        await bus.close()
        assert (await sent).offset == 0
        for attempt in (lambda: bus.publish(topic, b"x"), lambda: bus.topics(), lambda: bus.info()):
            with pytest.raises(errors.Closed):
                await attempt()

    run(story)
