"""One suite for names of any script and with nearly any sign: over all transports, with both faces, and on the disk."""

import tempfile
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.conformance.stage import Run, values

import headrace
from headrace import errors
from headrace.model.names import file_name, quoted_name, unquoted_name
from headrace.model.topic import checked_group, parse_topic
from headrace.testing.workbench import Workbench

NAMES = [
    "_internal",
    ".hidden",
    "-x",
    "two words",
    "grüße/✓".replace("/", "%2F"),
    "a'\"`\\$(b)|&;",
    "a@b:c=d#e",
    "[a]+<>",
]
LONG = "ß" * 249


@pytest.mark.parametrize("name", [*NAMES, "n" * 249, LONG], ids=range(len(NAMES) + 2))
def test_a_name_serves_for_topics_groups_subscriptions_and_schedules(run: Run, topic: str, name: str) -> None:
    async def story(bus: Any) -> None:
        name_here = f"{topic}{name}"[-249:] if len(name) == 249 else f"{name}-{topic}"
        await bus.create_topic(name_here)
        await bus.publish(name_here, b"a", key="k")
        assert name_here in [info.topic for info in await bus.topics()]
        assert [info.topic for info in await bus.topics(name_here)] == [name_here]
        assert name_here in [info.topic for info in await bus.topics(f"{name_here[:-1]}?")]
        async with bus.subscribe(name_here, group=name_here, timeout=20) as subscription:
            async for message in subscription:
                assert (message.topic, message.value) == (name_here, b"a")
                break
        assert (await bus.describe_group(name_here)).group == name_here

        await bus.create_subscription(name_here, name, deliveries_max=1)
        queue = bus.queue(name_here, name)
        (job,) = await queue.lease(1, wait=10)
        await queue.reject(job, "no")
        assert values(await queue.find(status="dead")) == [b"a"]
        assert await queue.redrive() == 1
        later = await bus.schedule(name_here, b"later", in_=3600)
        await bus.scheduled(later.id).cancel()

        await bus.cron_add(name_here, name_here, "@daily", b"noon")
        assert (await bus.cron_run(name_here)).definition.topic == name_here
        await bus.cron_remove(name_here)
        await bus.delete_topic(name_here)
        with pytest.raises(errors.TopicNotFound):
            await bus.describe_topic(name_here)

    run(story)


@pytest.mark.parametrize(
    "wrong", ["", ".", "..", "a*", "a?", "a,b", " a", "a ", "a\n", "a\0", "a\u202eb", "n" * 250], ids=range(12)
)
def test_what_can_be_no_name_is_refused_everywhere(run: Run, topic: str, wrong: str) -> None:
    async def story(bus: Any) -> None:
        await bus.create_topic(topic, exist_ok=True)
        with pytest.raises(errors.InvalidArgument):
            await bus.create_topic(wrong)
        with pytest.raises(errors.InvalidArgument):
            await bus.describe_group(wrong)
        with pytest.raises(errors.InvalidArgument):
            await bus.create_subscription(topic, wrong)
        with pytest.raises(errors.InvalidArgument):
            await bus.cron_add(wrong, topic, "@daily")

    run(story)


_text = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=60)
_name = _text.map(lambda text: quoted_name(text)[:249].strip()).filter(lambda name: name not in ("", ".", ".."))


@settings(deadline=None, max_examples=30)
@given(st.lists(_name, min_size=1, max_size=4, unique=True))
def test_topics_of_any_name_outlive_a_restart(names: list[str]) -> None:
    with tempfile.TemporaryDirectory() as data:
        bench = Workbench(f"{data}/d")
        for name in names:
            bench.publish(name, [name.encode()])
        bench = Workbench(f"{data}/d")
        assert [bench.values(name) for name in names] == [[name.encode()] for name in names]
        with headrace.open(":memory:") as bus:
            for name in names:
                bus.create_topic(name)
            assert [info.topic for info in bus.topics()] == sorted(names)
            for name in names:
                bus.delete_topic(name)
            assert bus.topics() == []


@given(_text)
def test_any_name_of_another_protocol_can_be_quoted(text: str) -> None:
    quoted = quoted_name(text)
    assert unquoted_name(quoted) == text
    if len(quoted) <= 249:
        assert parse_topic(quoted).topic == checked_group(quoted) == quoted


@given(st.lists(st.one_of(_name, st.just(LONG), st.just(LONG[1:] + "s")), max_size=20, unique=True))
def test_file_names_are_short_plain_and_differ(names: list[str]) -> None:
    found = [file_name(name) for name in names]
    assert len(set(found)) == len(names)
    assert all(len(name) <= 200 and name.isascii() and "/" not in name for name in found)
    assert not {".", "..", ""}.intersection(found)
