"""Versions of keys: a message is appended only if its key has as many messages as its publisher thinks."""

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from headrace.broker import version_gate
from headrace.broker.pending_answer import AnswerWithBody, PendingAnswer
from headrace.broker.settings import BrokerSettings
from headrace.engines import partition as partition_module
from headrace.model.batch import NO_PRODUCER, Producer, parse
from headrace.model.errors import (
    BatchTooLarge,
    Busy,
    EventsMissing,
    HeadraceError,
    InvalidArgument,
    LimitExceeded,
    UnexpectedVersion,
)
from headrace.model.key_versions import History, HistoryPage, version_in
from headrace.model.partitioning import by_key
from headrace.model.requests import (
    Publish,
    Published,
    TopicAlter,
    TopicCreate,
    TopicTrim,
    TransactionBegin,
    TransactionCommit,
    TransactionStage,
)
from headrace.testing.workbench import Workbench

SECONDS = 60.0


@pytest.fixture
def data() -> Iterator[str]:
    """A directory in memory, where syncing takes no time."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").exists() else None) as directory:
        yield f"{directory}/data"


def opened(data: str | None = None, **settings: Any) -> Workbench:
    """A broker with the topic `accounts`, which counts versions."""
    bench = Workbench(data)
    bench.ask(TopicCreate("accounts", {"key_versions": True, **settings}, exist_ok=True))
    return bench


def begun(bench: Workbench, key: str, *values: str, expected: int | None = None, **more: Any) -> Any:
    """Begin to publish events of one key."""
    producer = more.pop("producer", NO_PRODUCER)
    headers = [more.pop("headers")] * len(values) if "headers" in more else None
    batch = bench.batch(
        [value.encode() for value in values], producer, keys=[key.encode()] * len(values), headers=headers
    )
    partition = more.pop("partition", 0)
    topic = more.pop("topic", "accounts")
    return bench.begin(Publish(topic, partition, expected_version=expected, **more), batch.data)


def publish(bench: Workbench, key: str, *values: str, expected: int | None = None, **more: Any) -> Published:
    outcome = begun(bench, key, *values, expected=expected, **more)
    bench.run()
    outcome = outcome.outcome if isinstance(outcome, PendingAnswer) else outcome
    if isinstance(outcome, HeadraceError):
        raise outcome
    assert isinstance(outcome, Published)
    return outcome


def page(bench: Workbench, key: str, start: int = 0, topic: str = "accounts", **more: Any) -> HistoryPage:
    answer = bench.ask(History(topic, key.encode(), start, **more))
    return answer.answer if isinstance(answer, AnswerWithBody) else answer


def history(bench: Workbench, key: str, start: int = 0, topic: str = "accounts", **more: Any) -> list[tuple[int, str]]:
    """All events of a key, with their versions."""
    found: list[tuple[int, str]] = []
    following: int | None = start
    while following is not None:
        answer = bench.ask(History(topic, key.encode(), following, **more))
        if isinstance(answer, HistoryPage):
            assert not answer.offsets
            return found
        columns = parse(memoryview(answer.body)).columns()
        assert columns.keys == [key.encode()] * len(columns.values)
        assert [version_in(headers) for headers in columns.headers or ()] == answer.answer.versions
        found += [
            (version, (value or b"").decode())
            for version, value in zip(answer.answer.versions, columns.values, strict=True)
        ]
        following = answer.answer.following
    return found


def test_an_event_is_appended_only_if_its_key_has_as_many_as_expected() -> None:
    bench = opened()
    publish(bench, "ann", "opened", expected=0)
    publish(bench, "ann", "paid in", "paid out", expected=1)
    publish(bench, "bob", "opened", expected=0)
    with pytest.raises(UnexpectedVersion, match="the next version of b'ann' is 3, not 1") as caught:
        publish(bench, "ann", "closed", expected=1)
    assert caught.value.details == {"expected": 1, "actual": 3}
    with pytest.raises(UnexpectedVersion):
        publish(bench, "ann", "opened", expected=0)
    with pytest.raises(UnexpectedVersion):
        publish(bench, "eve", "closed", expected=1)
    assert history(bench, "ann") == [(0, "opened"), (1, "paid in"), (2, "paid out")]
    assert history(bench, "bob") == [(0, "opened")]
    assert history(bench, "eve") == []
    assert page(bench, "ann").next_version == 3


def test_messages_that_expect_nothing_count_too() -> None:
    bench = opened()
    waiting = [begun(bench, "ann", "1"), begun(bench, "bob", "1"), begun(bench, "ann", "2")]  # gathered
    second = begun(bench, "ann", "3", expected=2)
    bench.run()
    assert all(isinstance(one.outcome, Published) for one in waiting)
    assert not isinstance(second, HeadraceError)
    assert history(bench, "ann") == [(0, "1"), (1, "2"), (2, "3")]


def test_of_those_who_expect_the_same_the_first_wins() -> None:
    bench = opened()
    outcomes = [begun(bench, "ann", name, expected=0) for name in "abc"]
    bench.run()
    assert [isinstance(one, UnexpectedVersion) for one in outcomes] == [False, True, True]
    assert history(bench, "ann") == [(0, "a")]


def test_a_repeated_batch_is_recognised_before_its_version_is_checked(data: str) -> None:
    bench = opened(data)
    first = publish(bench, "ann", "opened", expected=0, producer=Producer(99, 0, 0))
    publish(bench, "ann", "closed", expected=1, producer=Producer(99, 0, 1))
    again = publish(bench, "ann", "opened", expected=0, producer=Producer(99, 0, 0))
    assert (again.duplicate, again.base_offset) == (True, first.base_offset)
    bench.close()
    bench = opened(data)
    assert publish(bench, "ann", "closed", expected=1, producer=Producer(99, 0, 1)).duplicate
    assert history(bench, "ann") == [(0, "opened"), (1, "closed")]


def test_what_a_client_says_about_versions_is_replaced() -> None:
    bench = opened()
    publish(bench, "ann", "opened", headers={"headrace-version": b"17", "lang": b"en"})
    publish(bench, "ann", "closed", expected=1)
    (first, _) = [headers for batch in bench.batches("accounts") for headers in batch.columns().headers or ()]
    assert first == {"headrace-version": b"0", "lang": b"en"}
    no_key = bench.batch([b"?", b"!"], keys=[None, b"bob"], headers=[{"headrace-version": b"3"}, None])
    bench.ask(Publish("accounts", 0), no_key.data)
    assert bench.batches("accounts")[-1].columns().headers == [None, {"headrace-version": b"0"}]


@pytest.mark.parametrize(
    "settings",
    [
        {"retain_seconds": 10},
        {"retain_bytes": 1 << 20},
        {"validity": "ttl", "ttl_seconds": 5},
        {"validity": "until_consumed"},
        {"durability": "written"},
    ],
)
def test_settings_that_would_lose_count_are_refused(data: str, settings: dict[str, Any]) -> None:
    bench = Workbench(data)
    with pytest.raises(InvalidArgument, match="key_versions"):
        bench.ask(TopicCreate("accounts", {"key_versions": True, **settings}))


def test_what_cannot_be_numbered_is_refused() -> None:
    bench = opened(partitions=4)
    bench.publish("plain", [b"x"])
    wrong = next(number for number in range(4) if number != by_key(b"ann", 4))
    right = by_key(b"ann", 4)
    with pytest.raises(InvalidArgument, match="needs the setting key_versions"):
        publish(bench, "ann", "1", expected=0, topic="plain")
    with pytest.raises(InvalidArgument, match=f"which is {right}, not {wrong}"):
        publish(bench, "ann", "1", partition=wrong)
    with pytest.raises(InvalidArgument, match="must have the same"):
        bench.ask(Publish("accounts", 0, expected_version=0), bench.batch([b"x"]).data)
    with pytest.raises(InvalidArgument, match="expected_version is 0 to"):
        publish(bench, "ann", "1", partition=right, expected=-1)
    with pytest.raises(BatchTooLarge, match="smaller batch_count"):
        publish(bench, "ann", *["x"] * 5000, partition=right)
    with pytest.raises(InvalidArgument, match="cannot become more"):
        bench.ask(TopicAlter("accounts", {"partitions": 8}))
    with pytest.raises(InvalidArgument, match="cannot be trimmed"):
        bench.ask(TopicTrim("accounts", {0: 1}))
    with pytest.raises(InvalidArgument, match="no history of keys"):
        bench.ask(History("plain", b"ann"))
    with pytest.raises(InvalidArgument, match="a page has"):
        bench.ask(History("accounts", b"ann", messages_max=0))
    assert bench.values("accounts", wrong) == bench.values("accounts", right) == []


def test_versions_survive_a_restart_and_a_kill(data: str) -> None:
    bench = opened(data)
    for number in range(5):
        publish(bench, "ann", f"{number}", expected=number)
    for closing in (True, False, False):
        if closing:
            bench.close()
        bench = opened(data)
        with pytest.raises(UnexpectedVersion):
            publish(bench, "ann", "stale", expected=4)
        count = page(bench, "ann").next_version
        publish(bench, "ann", f"{count}", expected=count)
    assert history(bench, "ann") == [(number, f"{number}") for number in range(8)]


def test_publishes_wait_while_the_keys_of_a_large_log_are_read(data: str) -> None:
    bench = opened(data)
    for number in range(40):
        publish(bench, f"k{number % 4}", f"{number}")
    bench.close()
    with patch.object(partition_module, "_INDEXED_TOGETHER", 3):
        bench = Workbench(data)
        outcomes = [
            begun(bench, "k0", "a", expected=10),
            begun(bench, "k1", "b"),
            begun(bench, "k0", "c", expected=10),
            begun(bench, "k0", "d", expected=11),
        ]
        reading = bench.begin(History("accounts", b"k0"))
        assert all(isinstance(one, PendingAnswer) and not one.resolved for one in (*outcomes, reading))
        bench.run()
    assert [type(one.outcome) for one in outcomes] == [Published, Published, UnexpectedVersion, Published]
    assert history(bench, "k0")[-2:] == [(10, "a"), (11, "d")]
    assert history(bench, "k1")[-1] == (10, "b")
    bench.close()


def test_not_too_much_waits(data: str) -> None:
    bench = opened(data)
    publish(bench, "ann", "1")
    bench.close()
    with (
        patch.object(partition_module, "_INDEXED_TOGETHER", 1),
        patch.object(version_gate, "WAITING_PUBLISH_BYTES_MAX", 300),
    ):
        bench = Workbench(data)
        first, second, third = (begun(bench, "ann", "2") for _ in range(3))
        assert isinstance(third, Busy)
        bench.run()
    assert isinstance(first.outcome, Published)
    assert history(bench, "ann")[-1][0] == 2
    bench.close()
    assert isinstance(second.outcome, Published)


def test_a_topic_can_begin_to_count_later(data: str) -> None:
    bench = Workbench(data)
    bench.ask(TopicCreate("accounts", {}))
    publish(bench, "ann", "1", headers={"headrace-version": b"99"})
    publish(bench, "ann", "2")
    bench.ask(TopicAlter("accounts", {"key_versions": True}))
    publish(bench, "ann", "3", expected=2)
    bench.close()
    bench = Workbench(data)
    publish(bench, "ann", "4", expected=3)
    assert page(bench, "ann").versions == [0, 1, 2, 3]
    bench.ask(TopicAlter("accounts", {"key_versions": False}))
    with pytest.raises(InvalidArgument):
        publish(bench, "ann", "5", expected=4)
    publish(bench, "ann", "5")
    bench.ask(TopicAlter("accounts", {"key_versions": True}))
    publish(bench, "ann", "6", expected=5)
    bench.close()


def compacted(bench: Workbench) -> None:
    bench.tick(SECONDS)
    bench.tick(SECONDS)


def compacting(data: str, **settings: Any) -> Workbench:
    bench = Workbench(data, settings=BrokerSettings(maintenance_seconds=1.0, compact_seconds=1.0))
    bench.ask(TopicCreate("accounts", {"compact_by_key": True, "segment_bytes": 4096, **settings}, exist_ok=True))
    return bench


def test_versions_survive_compaction(data: str) -> None:
    bench = compacting(data, key_versions=True)
    for number in range(200):
        publish(bench, f"k{number % 5}", f"{number}" + "x" * 50, expected=number // 5)
    publish(bench, "gone", "x", expected=0)
    bench.ask(Publish("accounts", 0, expected_version=1), bench.batch([None], keys=[b"gone"]).data)  # type: ignore[list-item]
    for number in range(200, 300):
        publish(bench, f"k{number % 5}", f"{number}" + "x" * 50, expected=number // 5)
    bench.tick(0)
    compacted(bench)
    versions = page(bench, "k0").versions
    assert versions == list(range(versions[0], 60))
    assert versions[0] > 0
    assert page(bench, "gone").versions == [1]
    assert page(bench, "k0", 0, messages_max=1).versions == versions[:1]
    publish(bench, "k0", "more", expected=60)
    for closing in (True, False):
        if closing:
            bench.close()
        bench = compacting(data)
        with pytest.raises(UnexpectedVersion):
            publish(bench, "k1", "stale", expected=59)
        with pytest.raises(UnexpectedVersion):
            publish(bench, "gone", "again", expected=0)
        assert page(bench, "k0").versions[-1] == 60
        assert page(bench, "gone").next_version == 2
    bench.close()


def test_compaction_keeps_what_does_not_tell_its_version(data: str) -> None:
    bench = compacting(data)
    bench.ask(TopicAlter("accounts", {"compact_by_key": False}))
    for number in range(100):
        publish(bench, f"k{number % 5}", f"{number}" + "x" * 50)
    bench.ask(TopicAlter("accounts", {"key_versions": True, "compact_by_key": True}))
    for number in range(100, 300):
        publish(bench, f"k{number % 5}", f"{number}" + "x" * 50, expected=number // 5)
    compacted(bench)
    bench.close()
    bench = compacting(data)
    found = page(bench, "k0").versions
    assert found[:20] == list(range(20))
    assert 20 < len(found) < 60
    publish(bench, "k0", "next", expected=60)
    bench.close()


def test_compaction_keeps_them_while_the_keys_are_still_read(data: str) -> None:
    bench = compacting(data)
    bench.ask(TopicAlter("accounts", {"compact_by_key": False}))
    for number in range(200):
        publish(bench, f"k{number % 5}", f"{number}" + "x" * 50)
    bench.ask(TopicAlter("accounts", {"key_versions": True}))
    bench.close()
    bench = compacting(data)
    bench.ask(TopicAlter("accounts", {"compact_by_key": True}))
    partition = bench.broker._topics.get("accounts").active_partitions[0].partition
    partition.forget_key_index()
    with patch.object(partition_module, "_INDEXED_TOGETHER", 3):
        steps = partition.load_key_index()
        next(steps)
        assert partition.key_index is None
        partition.compact_by_key()
        assert all(step is None for step in steps)
    assert page(bench, "k0").versions == list(range(40))
    bench.close()


def test_versions_are_not_counted_while_messages_are_removed(data: str) -> None:
    bench = compacting(data)
    for number in range(200):
        publish(bench, f"k{number % 5}", f"{number}" + "x" * 50)
    bench.now_us += 60_000_000
    bench.broker.tick(bench.now_us)
    while not bench.broker._maintenance._removing:
        assert bench.step()
    refused = bench.begin(TopicAlter("accounts", {"key_versions": True}))
    assert isinstance(refused, Busy)
    bench.run()
    bench.ask(TopicAlter("accounts", {"key_versions": True}))
    counts = {key: page(bench, key).next_version for key in ("k0", "k1")}
    bench.close()
    bench = compacting(data)
    assert {key: page(bench, key).next_version for key in ("k0", "k1")} == counts
    bench.close()


def test_a_topic_in_memory_refuses_more_instead_of_forgetting() -> None:
    bench = opened(memory_bytes=64 << 20, message_bytes_max=8 << 20)
    large = "x" * (7 << 20)
    outcomes = [begun(bench, "ann", large) for _ in range(20)]
    bench.run()
    count = sum(isinstance(one, Published) for one in outcomes)
    assert 5 <= count < 10
    assert all(isinstance(one, Published | LimitExceeded) for one in outcomes)
    with pytest.raises(LimitExceeded, match="raise memory_bytes"):
        publish(bench, "ann", large, expected=count)
    assert page(bench, "ann", 0, messages_max=1).next_version == count
    assert page(bench, "ann", 0, messages_max=1).versions == [0]
    bench.ask(TopicAlter("accounts", {"memory_bytes": 128 << 20}))
    publish(bench, "ann", "small", expected=count)


def test_history_comes_in_pages() -> None:
    bench = opened()
    for start in range(0, 1000, 100):
        publish(bench, "ann", *[f"{start + at}" for at in range(100)], expected=start)
        publish(bench, "bob", "x" * 1000)
    assert history(bench, "ann", 0, messages_max=7) == [(at, f"{at}") for at in range(1000)]
    assert [version for version, _ in history(bench, "ann", 990)] == list(range(990, 1000))
    first = page(bench, "bob", 0, bytes_max=1500)
    assert (first.versions, first.following, first.next_version) == (list(range(8)), 8, 10)
    assert len(history(bench, "bob", 0, bytes_max=1)) == 10
    assert page(bench, "ann", 1000).offsets == []


def test_history_shows_only_what_is_synced(data: str) -> None:
    bench = opened(data)
    publish(bench, "ann", "1", expected=0)
    bench.syncing_later = True
    waiting = begun(bench, "ann", "2", expected=1)
    assert isinstance(waiting, PendingAnswer)
    answer = bench.begin(History("accounts", b"ann"))
    assert not waiting.resolved
    bench.run()
    assert answer.outcome.answer.versions == [0]
    assert answer.outcome.answer.next_version == 1
    assert page(bench, "ann").next_version == 2


def test_a_damaged_event_is_told(data: str) -> None:
    bench = opened(data)
    publish(bench, "ann", "first")
    publish(bench, "ann", "DAMAGED")
    publish(bench, "ann", "third")
    bench.close()
    (log,) = [path for path in Path(data).rglob("*") if path.is_file() and b"DAMAGED" in path.read_bytes()]
    content = log.read_bytes()
    bench = opened(data)
    assert len(history(bench, "ann")) == 3
    log.write_bytes(content.replace(b"DAMAGED", b"damaged"))
    with pytest.raises(EventsMissing, match="version 1 of the key is damaged"):
        history(bench, "ann")
    bench.close()


def test_tenants_have_versions_of_their_own() -> None:
    bench = opened()
    publish(bench, "ann", "ours", expected=0)
    session = bench.connect("theirs", "acme")
    bench.ask(TopicCreate("accounts", {"key_versions": True}), session=session)
    batch = bench.batch([b"theirs"], keys=[b"ann"])
    bench.ask(Publish("accounts", 0, expected_version=0), batch.data, session)
    answer = bench.ask(History("accounts", b"ann"), session=session)
    assert parse(memoryview(answer.body)).columns().values == [b"theirs"]
    batch = bench.batch([b"stale"], keys=[b"ann"])
    with pytest.raises(UnexpectedVersion):
        bench.ask(Publish("accounts", 0, expected_version=0), batch.data, session)
    with pytest.raises(InvalidArgument, match="session can use no other's"):
        bench.ask(History("other/accounts", b"ann"), session=session)


# Transactions.


def staged(bench: Workbench, epoch: int, key: str, *values: str, expected: int | None = None, **more: Any) -> int:
    batch = bench.batch([value.encode() for value in values], keys=[key.encode()] * len(values))
    topic = more.get("topic", "accounts")
    request = TransactionStage("move", epoch, topic, more.get("partition", 0), expected)
    return bench.ask(request, batch.data).stage  # type: ignore[no-any-return]


def test_a_transaction_expects_versions_of_several_keys(data: str) -> None:
    bench = opened(data)
    publish(bench, "ann", "opened", expected=0)
    epoch = bench.ask(TransactionBegin("move")).epoch
    staged(bench, epoch, "ann", "paid out", expected=1)
    staged(bench, epoch, "bob", "opened", expected=0)
    staged(bench, epoch, "bob", "paid in", expected=1)
    staged(bench, epoch, "plain", "x", topic="plain")
    bench.ask(TransactionCommit("move", epoch))
    assert history(bench, "ann") == [(0, "opened"), (1, "paid out")]
    assert history(bench, "bob") == [(0, "opened"), (1, "paid in")]
    epoch = bench.ask(TransactionBegin("move")).epoch
    staged(bench, epoch, "ann", "paid out", expected=2)
    staged(bench, epoch, "bob", "paid in", expected=1)
    with pytest.raises(UnexpectedVersion, match="b'bob' is 2, not 1"):
        bench.ask(TransactionCommit("move", epoch))
    assert len(history(bench, "ann")) == len(history(bench, "bob")) == 2
    with pytest.raises(InvalidArgument, match="needs the setting key_versions"):
        staged(bench, epoch, "ann", "x", expected=0, topic="plain")
    bench.close()


def test_nothing_comes_between_a_commit_and_its_messages(data: str) -> None:
    bench = opened(data)
    bench.syncing_later = True
    epoch = bench.ask(TransactionBegin("move")).epoch
    staged(bench, epoch, "ann", "1", "2", expected=0)
    committing = bench.begin(TransactionCommit("move", epoch))
    while not bench.broker._ledger.state.unsettled:
        assert bench.step()
    plain, late = begun(bench, "ann", "plain"), begun(bench, "ann", "late", expected=0)
    next_epoch = bench.begin(TransactionBegin("other")).epoch
    batch = bench.batch([b"other"], keys=[b"ann"])
    bench.begin(TransactionStage("other", next_epoch, "accounts", 0, 2), batch.data)
    other = bench.begin(TransactionCommit("other", next_epoch))
    bench.run()
    assert isinstance(committing.outcome, object)
    assert not isinstance(committing.outcome, HeadraceError)
    assert isinstance(late.outcome, UnexpectedVersion)
    assert isinstance(plain.outcome, Published)
    names = [value for _, value in history(bench, "ann")]
    assert names[:2] == ["1", "2"]
    assert sorted(names[2:]) in (["other", "plain"], ["plain"])
    assert ("other" in names) != isinstance(other.outcome, UnexpectedVersion)
    assert "other" not in names or names[2] == "other"
    bench.close()


def test_a_commit_waits_until_what_it_is_built_on_is_synced(data: str) -> None:
    bench = opened(data)
    epoch = bench.ask(TransactionBegin("move")).epoch
    staged(bench, epoch, "ann", "2", expected=1)
    bench.syncing_later = True
    first = begun(bench, "ann", "1", expected=0)
    partition = bench.broker._topics.get("accounts").active_partitions[0].partition
    assert partition.synced_offset == 0
    committing = bench.begin(TransactionCommit("move", epoch))
    while not bench.broker._ledger.state.commits:
        assert bench.step()
    assert partition.synced_offset == 1, "a power loss could take the first event back, and leave the second"
    bench.run()
    assert isinstance(first.outcome, Published)
    assert not isinstance(committing.outcome, HeadraceError)
    assert history(bench, "ann") == [(0, "1"), (1, "2")]
    bench.close()


def test_a_commit_that_a_restart_interrupts_keeps_its_versions(data: str) -> None:
    bench = opened(data)
    bench.syncing_later = True
    epoch = bench.ask(TransactionBegin("move")).epoch
    staged(bench, epoch, "ann", "1", "2", expected=0)
    bench.begin(TransactionCommit("move", epoch))
    while not bench.broker._ledger.state.unsettled:
        assert bench.step()
    bench = Workbench(data)  # killed
    late = begun(bench, "ann", "late", expected=0)
    bench.run()
    outcome = late.outcome if isinstance(late, PendingAnswer) else late
    assert isinstance(outcome, UnexpectedVersion)
    assert history(bench, "ann") == [(0, "1"), (1, "2")]
    bench.close()


def test_a_shared_transaction_remembers_what_it_expects(data: str) -> None:
    bench = opened(data)
    epoch = bench.ask(TransactionBegin("move", 0, join=True)).epoch
    stage = staged(bench, epoch, "ann", "1", expected=1)
    bench.close()
    bench = Workbench(data)
    with pytest.raises(UnexpectedVersion):
        bench.ask(TransactionCommit("move", epoch, [stage]))
    publish(bench, "ann", "0", expected=0)
    bench.ask(TransactionCommit("move", epoch, [stage]))
    assert history(bench, "ann") == [(0, "0"), (1, "1")]
    bench.close()
