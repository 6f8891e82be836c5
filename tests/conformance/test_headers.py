"""One suite for headers: a name may repeat and a value may be None, by every way in and out of a broker."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.conformance.stage import Run

import headrace
from headrace import errors

PAIRS = [("trace", b"1"), ("lang", "de"), ("trace", None), ("", b""), ("trace", b"\xff")]
STORED = [("trace", b"1"), ("lang", b"de"), ("trace", None), ("", b""), ("trace", b"\xff")]
LAST = {"trace": b"\xff", "lang": b"de", "": b""}


async def received(bus: Any, topic: str, count: int) -> list[Any]:
    """The first messages of a topic."""
    found: list[Any] = []
    async with bus.subscribe(topic, timeout=20) as subscription:
        async for message in subscription:
            found.append(message)
            if len(found) == count:
                break
    return found


def test_every_way_to_publish_keeps_all_headers(run: Run, topic: str) -> None:
    async def story(bus: Any) -> None:
        await bus.create_topic(topic)
        await bus.publish(topic, b"one", headers=PAIRS)
        await bus.publish_many(topic, [b"two", b"three", b"four"], headers=[PAIRS, {"a": None}, None])
        async with bus.producer(topic) as producer:
            await producer.send(b"five", headers=PAIRS)
        async with bus.transaction(f"{topic}-writer") as transaction:
            await transaction.publish(topic, b"six", headers=PAIRS)
            await transaction.publish_many(topic, [b"seven"], headers=[PAIRS])
        messages = await received(bus, topic, 7)
        assert [message.value for message in messages] == [b"one", b"two", b"three", b"four", b"five", b"six", b"seven"]
        assert [message.header_list for message in messages] == [
            STORED,
            STORED,
            [("a", None)],
            [],
            STORED,
            STORED,
            STORED,
        ]
        assert [message.headers for message in messages] == [LAST, LAST, {"a": None}, None, LAST, LAST, LAST]
        assert dict(messages[0].headers) == LAST
        assert messages[0].headers["trace"] == b"\xff"

        await bus.publish(topic, b"again", headers=messages[0].headers)  # what was received can be published
        assert (await received(bus, topic, 8))[7].header_list == STORED

    run(story)


def test_a_mapping_stays_a_plain_dictionary(run: Run, topic: str) -> None:
    async def story(bus: Any) -> None:
        await bus.publish_many(topic, [b"", b""], headers=[{"b": b"1", "a": "2"}, [("b", b"1"), ("a", "2")]])
        for message in await received(bus, topic, 2):
            assert type(message.headers) is dict
            assert message.header_list == [("b", b"1"), ("a", b"2")]

    run(story)


@pytest.mark.parametrize(
    "wrong", [[("a",)], ["ab"], "ab", b"ab", 5, [("a", 1)], [(None, b"1")], {"a": [b"1"]}], ids=repr
)
def test_what_is_no_header_is_refused(run: Run, topic: str, wrong: Any) -> None:
    async def story(bus: Any) -> None:
        with pytest.raises(errors.InvalidArgument, match="header"):
            await bus.publish(topic, b"", headers=wrong)

    run(story)


def test_leased_dead_and_redriven_messages_keep_all_headers(run: Run, topic: str) -> None:
    async def story(bus: Any) -> None:
        await bus.create_topic(topic)
        await bus.create_subscription(topic, deliveries_max=1)
        await bus.publish(topic, b"job", headers=PAIRS)
        queue = bus.queue(topic)
        for _ in range(2):  # the second time it was redriven before
            (job,) = await queue.lease(1, wait=10)
            assert job.header_list[: len(STORED)] == STORED
            await queue.reject(job, "cannot be read")
            (dead,) = await queue.find(status="dead")
            assert dead.header_list[: len(STORED)] == STORED
            assert dead.headers["headrace-dead-reason"] == b"cannot be read"
            assert await queue.redrive() == 1
        (job,) = await queue.lease(1, wait=10)
        assert job.header_list == [*STORED, ("headrace-subscription", b"default")]

    run(story)


def test_messages_are_found_by_any_of_their_headers(run: Run, topic: str) -> None:
    async def story(bus: Any) -> None:
        await bus.create_topic(topic)
        await bus.create_subscription(topic)
        await bus.publish_many(topic, [b"a", b"b", b"c"], headers=[PAIRS, {"trace": None}, {"trace": b"1"}])
        queue = bus.queue(topic)
        wanted: dict[bytes, Any] = {
            b"ac": {"trace": b"1"},
            b"ab": {"trace": None},
            b"a": [("trace", b"1"), ("trace", None)],
            b"": {"other": None},
        }
        for found, headers in wanted.items():
            assert b"".join([message.value for message in await queue.find(headers=headers)]) == found

    run(story)


def test_scheduled_and_edited_messages_keep_all_headers(run: Run, topic: str) -> None:
    async def story(bus: Any) -> None:
        await bus.create_topic(topic)
        await bus.create_subscription(topic)
        queue = bus.queue(topic)
        scheduled = await bus.schedule(topic, b"later", in_=3600, headers=PAIRS, owner="ann")
        (message,) = await queue.find()
        assert message.header_list == [*STORED, ("headrace-owner", b"ann")]
        await scheduled.update(value=b"other")
        assert (await scheduled.look()).header_list == [*STORED, ("headrace-owner", b"ann")]
        await bus.scheduled(scheduled.id, owner="ann").update(headers=[("x", None), ("x", b"1")])
        assert (await scheduled.look()).header_list == [("x", None), ("x", b"1"), ("headrace-owner", b"ann")]
        await bus.scheduled(scheduled.id, owner="ann").move(in_=0)
        (job,) = await queue.lease(1, wait=10)
        assert job.header_list == [("x", None), ("x", b"1"), ("headrace-owner", b"ann")]

    run(story)


def test_a_schedule_publishes_all_headers(run: Run, topic: str) -> None:
    async def story(bus: Any) -> None:
        await bus.create_topic(topic)
        made = await bus.cron_add(f"cron-{topic}", topic, "0 12 * * *", b"noon", headers=PAIRS)
        assert made.definition.headers.pairs() == STORED
        await bus.cron_run(f"cron-{topic}")
        (job,) = await bus.queue(topic).lease(1, wait=10)
        assert job.header_list[: len(STORED)] == STORED
        assert job.headers["headrace-cron"] == f"cron-{topic}".encode()
        await bus.cron_remove(f"cron-{topic}")

    run(story)


_name = st.text(st.characters(exclude_categories=["Cs"]), max_size=5)
_content = st.one_of(st.none(), st.binary(max_size=5), st.text(st.characters(exclude_categories=["Cs"]), max_size=5))
_headers = st.one_of(
    st.none(),
    st.dictionaries(_name, _content, max_size=4),
    st.lists(st.tuples(st.one_of(_name, st.sampled_from("ab")), _content), max_size=5),
)


def _expected(headers: Any) -> list[tuple[str, bytes | None]]:
    pairs = headers.items() if isinstance(headers, dict) else headers or ()
    return [(name, content.encode() if isinstance(content, str) else content) for name, content in pairs]


def test_headers_of_any_kind_come_back_as_they_were_published() -> None:
    with headrace.open(":memory:") as bus:
        bus.create_topic("t")
        bus.create_subscription("t", "s")

        @settings(deadline=None, max_examples=60)
        @given(st.lists(_headers, min_size=1, max_size=4), st.sampled_from(["none", "lz4", "zstd"]))
        def check(column: list[Any], compression: str) -> None:
            values = [b"%d" % number for number in range(len(column))]
            receipt = bus.publish_many("t", values, headers=column)[0]
            with bus.producer("t", compression=compression) as producer:
                for value, headers in zip(values, column, strict=True):
                    producer.send(value, headers=headers)
            expected = [_expected(headers) for headers in column] * 2
            batches = bus.fetch("t", 0, receipt.offset)
            messages = [message for batch in batches for message in batch.messages()]
            assert [message.header_list for message in messages] == expected
            assert [dict(message.headers or {}) for message in messages] == [dict(pairs) for pairs in expected]
            with bus.lease("t", subscription="s", max=len(expected), wait=10) as jobs:
                assert [job.header_list for job in jobs] == expected

        check()
