"""Routes: which messages they take, where these end up, and what a broker refuses."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from headrace.broker.route_facts import RouteStored
from headrace.broker.route_forwarder import _SLICE_MESSAGES, RouteForwarder
from headrace.broker.route_table import CompiledRoute, RouteTable
from headrace.broker.settings import BrokerSettings
from headrace.broker.subject_trie import SubjectTrie
from headrace.engines.api import FORWARDER_MIN
from headrace.model.batch import Columns, Producer
from headrace.model.content.query import ContentQuery
from headrace.model.errors import (
    InvalidArgument,
    InvalidContentQuery,
    LimitExceeded,
    MessageTooLarge,
    RouteExists,
    RouteLoop,
    RouteNotFound,
    TopicIsView,
    TopicNotFound,
)
from headrace.model.headers import headers_from_pairs
from headrace.model.limits import ROUTES_MAX
from headrace.model.message import Message
from headrace.model.partitioning import by_key
from headrace.model.requests import (
    Commit,
    PartitionOffset,
    Publish,
    TopicAlter,
    TopicCreate,
    TopicDelete,
    TopicDescribe,
    TopicTrim,
)
from headrace.model.route_requests import (
    RouteDefinition,
    RouteExplain,
    RouteInfo,
    RouteList,
    RouteRemove,
    RouteSet,
)
from headrace.model.subject_requests import SubjectPublish
from headrace.testing import FaultyDisk, Unsynced
from headrace.testing.workbench import Workbench


@pytest.fixture
def bench() -> Workbench:
    return Workbench()


def add(bench: Workbench, name: str, *targets: str, source: str = "in", session: Any = None, **condition: Any) -> Any:
    """Make a route."""
    definition = RouteDefinition(name, list(targets), source=source, **condition)
    return bench.ask(RouteSet(definition), session=session)


def publish(bench: Workbench, *values: bytes, topic: str = "in", partition: int = 0, **columns: Any) -> None:
    """Publish a batch, whose columns have one entry for each value."""
    bench.ask(Publish(topic, partition), bench.batch(list(values), **columns).data)


def messages(bench: Workbench, topic: str, partition: int = 0) -> list[Message]:
    return [message for batch in bench.batches(topic, partition) for message in batch.messages()]


def listed(bench: Workbench) -> dict[str, RouteInfo]:
    return {info.definition.name: info for info in bench.ask(RouteList()).routes}


# Conditions.


def test_a_key_takes_messages_with_that_subject(bench: Workbench) -> None:
    add(bench, "eu", "europe", key="orders.eu")
    headers = [{"headrace-subject": b"orders.eu"}, {"headrace-subject": b"orders.us"}, None, None]
    publish(bench, b"a", b"b", b"c", b"d", keys=[None, b"orders.eu", b"orders.eu", b"\xff\xfe"], headers=headers)
    assert bench.values("europe") == [b"a", b"c"], "the header comes before the key"


@pytest.mark.parametrize(
    ("pattern", "taken"),
    [
        ("orders.*", [b"orders.eu"]),
        ("orders.#", [b"orders", b"orders.eu", b"orders.eu.paid"]),
        ("orders.>", [b"orders.eu", b"orders.eu.paid"]),
        ("*.eu.#", [b"orders.eu", b"orders.eu.paid"]),
        ("#", [b"orders", b"orders.eu", b"orders.eu.paid", b"returns", b"odd key, with \xc3\xbc"]),
    ],
)
def test_a_pattern_takes_subjects(bench: Workbench, pattern: str, taken: list[bytes]) -> None:
    add(bench, "some", "out", pattern=pattern)
    keys = [b"orders", b"orders.eu", b"orders.eu.paid", b"returns", b"$own.subject", b"odd key, with \xc3\xbc"]
    publish(bench, *keys, b"none", keys=[*keys, None])
    assert bench.values("out") == taken


def test_a_fan_out_takes_all(bench: Workbench) -> None:
    add(bench, "all", "a", "b", "c", all=True)
    publish(bench, b"1", b"2")
    assert [bench.values(topic) for topic in "abc"] == [[b"1", b"2"]] * 3


def test_headers_take_all_or_any(bench: Workbench) -> None:
    add(bench, "all", "all", headers={"country": b"CH", "kind": b"new"})
    add(bench, "any", "any", headers={"country": b"CH", "urgent": None}, headers_match="any")
    publish(
        bench,
        *(b"ab", b"a", b"u", b"none", b"repeated", b"bare"),
        headers=[
            {"country": b"CH", "kind": b"new"},
            {"country": b"CH", "kind": b"old"},
            {"urgent": b"whatever"},
            {"country": b"DE"},
            headers_from_pairs([("country", b"DE"), ("country", b"CH"), ("kind", b"new")]),
            None,
        ],
    )
    assert bench.values("all") == [b"ab", b"repeated"]
    assert bench.values("any") == [b"ab", b"a", b"u", b"repeated"]


def test_content_takes_what_a_query_selects(bench: Workbench) -> None:
    add(bench, "path", "path", content=ContentQuery(jsonpath="$.items[?@.price > 10]"))
    add(bench, "partial", "partial", content=ContentQuery(partial={"country": "CH"}))
    add(bench, "regex", "regex", content=ContentQuery(regex="^ERROR"))
    values = [b'{"items": [{"price": 12}], "country": "CH"}', b'{"items": []}', b"ERROR: no JSON"]
    publish(bench, *values)
    assert [bench.values(topic) for topic in ("path", "partial", "regex")] == [values[:1], values[:1], values[2:]]


def test_the_unmatched_go_where_they_are_sent(bench: Workbench) -> None:
    add(bench, "eu", "europe", pattern="eu.*")
    add(bench, "big", "big", content=ContentQuery(jsonpath="$.big"))
    add(bench, "rest", "rest", unmatched=True)
    publish(bench, b"{}", b'{"big": 1}', b"x", keys=[b"eu.1", None, b"us.1"])
    assert [bench.values(topic) for topic in ("europe", "big", "rest")] == [[b"{}"], [b'{"big": 1}'], [b"x"]]


def test_a_target_gets_a_message_once_although_several_routes_lead_there(bench: Workbench) -> None:
    add(bench, "one", "out", pattern="a.*")
    add(bench, "two", "out", "other", pattern="*.b")
    add(bench, "three", "out", headers={"h": None})
    publish(bench, b"1", b"2", b"3", keys=[b"a.b", b"c.b", b"a.c"], headers=[{"h": b""}, None, None])
    assert bench.values("out") == [b"1", b"2", b"3"]
    assert bench.values("other") == [b"1", b"2"]


# Messages.


def test_messages_keep_everything_they_have(bench: Workbench) -> None:
    add(bench, "all", "out", all=True)
    columns = {
        "keys": [b"k", None],
        "timestamps": [5, 6],
        "headers": [{"h": b"1"}, headers_from_pairs([("a", b"1"), ("a", None)])],
        "dues": [None, 9],
        "priorities": [3, None],
        "expires": [None, 1_900_000_000_000_000],
    }
    publish(bench, b"1", b"2", **columns)
    assert messages(bench, "out") == messages(bench, "in")


def test_keys_keep_their_order_in_a_target_with_more_partitions(bench: Workbench) -> None:
    bench.ask(TopicCreate("in", {"partitions": 2}))
    bench.ask(TopicCreate("out", {"partitions": 3}))
    add(bench, "all", "out", all=True)
    for number in range(30):
        key = b"k%d" % (number % 5)
        publish(bench, b"%d" % number, partition=by_key(key, 2), keys=[key])
    publish(bench, b"no key", partition=1)
    for partition in range(3):
        found = messages(bench, "out", partition)
        assert all(message.key is None or by_key(message.key, 3) == partition for message in found)
        for key in {message.key for message in found} - {None}:
            mine = [int(message.value or b"") for message in found if message.key == key]
            assert mine == sorted(mine)
            assert len(mine) == 6
    assert b"no key" in bench.values("out", 1), "by the source's partition"


def test_large_batches_are_forwarded_in_slices_and_in_order(bench: Workbench) -> None:
    add(bench, "all", "a", "b", all=True)
    values = [b"%d" % number for number in range(3 * _SLICE_MESSAGES + 7)]
    bench.publish("in", values)
    assert bench.values("a") == bench.values("b") == values
    assert len(bench.batches("a")) == 4, "one batch for each slice"
    small = len(bench.batches("a"))
    for number in range(100):
        bench.begin(Publish("in", 0), bench.batch([b"s%d" % number]).data)
    bench.run()
    assert len(bench.values("a")) == len(values) + 100
    assert len(bench.batches("a")) < small + 10, "small batches are forwarded together"


def test_routes_go_on_from_one_topic_to_the_next(bench: Workbench) -> None:
    add(bench, "one", "b", source="a", all=True)
    add(bench, "two", "c", source="b", all=True)
    add(bench, "three", "d", "e", source="c", all=True)
    publish(bench, b"1", topic="a")
    assert bench.values("d") == bench.values("e") == [b"1"]


def test_a_compressed_batch_stays_compressed_unless_the_target_says_otherwise(tmp_path: Path) -> None:
    bench = Workbench(str(tmp_path / "data"))
    bench.ask(TopicCreate("plain", {"compression": "none"}))
    bench.ask(TopicCreate("packed", {"compression": "lz4"}))
    add(bench, "all", "plain", "packed", "as-is", all=True)
    publish(bench, b"x" * 5000)
    assert [bench.batches(topic)[0].codec for topic in ("plain", "packed", "as-is")] == [0, 1, 0]


# Routes that come and go.


def test_a_route_is_about_messages_published_from_then_on(bench: Workbench) -> None:
    publish(bench, b"before")
    add(bench, "all", "out", all=True)
    publish(bench, b"during")
    bench.ask(RouteRemove("all"))
    publish(bench, b"after")
    assert bench.values("out") == [b"during"]
    assert not listed(bench)
    bench.tick(2.0)
    assert not bench.broker._ledger.state.routes.sources, "nothing is remembered of it"


def test_messages_published_before_a_route_is_removed_are_forwarded(bench: Workbench) -> None:
    add(bench, "all", "out", all=True)
    for number in range(20):
        bench.begin(Publish("in", 0), bench.batch([b"%d" % number]).data)
    bench.begin(RouteRemove("all"))
    bench.begin(Publish("in", 0), bench.batch([b"after"]).data)
    bench.run()
    assert bench.values("out") == [b"%d" % number for number in range(20)]


def test_a_route_is_replaced_while_messages_flow(bench: Workbench) -> None:
    add(bench, "all", "old", all=True)
    bench.ask(TopicCreate("new"))
    for number in range(60):
        bench.begin(Publish("in", 0), bench.batch([b"%d" % number]).data)
        if number == 29:
            bench.begin(RouteSet(RouteDefinition("all", ["new"], source="in", all=True), replace=True))
    bench.run()
    assert bench.values("old") == [b"%d" % number for number in range(30)]
    assert bench.values("new") == [b"%d" % number for number in range(30, 60)]


def test_a_route_can_move_to_another_source(bench: Workbench) -> None:
    add(bench, "copy", "out", source="in", all=True)
    bench.ask(RouteSet(RouteDefinition("copy", ["out"], source="in2", all=True), replace=True))
    publish(bench, b"no")
    publish(bench, b"yes", topic="in2")
    assert bench.values("out") == [b"yes"]


def test_routes_survive_a_restart_and_go_on_where_they_were(tmp_path: Path) -> None:
    bench = Workbench(str(tmp_path / "data"))
    bench.ask(TopicCreate("in", {"partitions": 2}))
    add(bench, "all", "out", all=True)
    add(bench, "path", "path", content=ContentQuery(jsonpath="$.a"))
    publish(bench, b'{"a": 1}')
    before = listed(bench)
    bench.close()
    bench = Workbench(str(tmp_path / "data"), now_us=bench.now_us)
    assert listed(bench) == before
    publish(bench, b'{"a": 2}', partition=1)
    assert sorted(bench.values("out")) == sorted(bench.values("path")) == [b'{"a": 1}', b'{"a": 2}']  # type: ignore[type-var]


def test_a_target_is_deleted_and_made_again(tmp_path: Path) -> None:
    bench = Workbench(str(tmp_path / "data"))
    add(bench, "all", "out", "other", all=True)
    publish(bench, b"1")
    bench.ask(TopicDelete("out"))
    publish(bench, b"2")
    bench.ask(TopicCreate("out"))
    publish(bench, b"3")
    assert bench.values("out") == [b"3"]
    assert bench.values("other") == [b"1", b"2", b"3"]
    (error,) = messages(bench, "in.errors")
    assert error.value == b"2"
    assert error.headers == {
        "headrace-route-name": b"all",
        "headrace-route-target": b"out",
        "headrace-route-reason": b"there is no topic out",
        "headrace-route-topic": b"in",
        "headrace-route-partition": b"0",
        "headrace-route-offset": b"1",
    }


def test_a_target_is_deleted_before_it_is_synced(tmp_path: Path) -> None:
    """The forwarder does not wait for it any more."""
    bench = Workbench(str(tmp_path / "data"))
    add(bench, "all", "out", "other", all=True)
    publish(bench, b"0")
    bench.syncing_later = True
    bench.begin(Publish("in", 0), bench.batch([b"1"]).data)
    out = bench.broker._topics.active(bench.broker._topics.get("out"), 0)
    while out.partition.next_offset < 2:
        assert bench.step(), "nothing was forwarded"
    bench.begin(TopicDelete("out"))
    bench.run()
    for number in range(2, 6):
        bench.begin(Publish("in", 0), bench.batch([b"%d" % number]).data)
        bench.run()
    assert bench.values("other") == [b"%d" % number for number in range(6)]
    bench.tick(2.0)
    source = bench.broker._topics.get("in")
    assert bench.broker._routes.consumed_offset(source, 0) == 6


def test_behind_counts_what_is_not_synced_in_the_targets(tmp_path: Path) -> None:
    bench = Workbench(str(tmp_path / "data"))
    add(bench, "all", "out", all=True)
    publish(bench, b"0")
    assert listed(bench)["all"].behind == 0
    bench.syncing_later = True
    bench.begin(Publish("in", 0), bench.batch([b"1"]).data)
    out = bench.broker._topics.active(bench.broker._topics.get("out"), 0)
    while out.partition.next_offset < 2:
        assert bench.step(), "nothing was forwarded"
    source = next(iter(bench.broker._routes._sources.values()))
    assert source.forwarders[0].position == 2
    assert out.end_offset == 1, "the message cannot be read yet"
    assert source.forwarders[0].behind == 1
    bench.run()
    assert out.end_offset == 2
    assert source.forwarders[0].behind == 0


def test_behind_is_known_after_a_restart_before_anything_is_forwarded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Workbench(str(tmp_path / "data"))
    add(bench, "all", "out", all=True)
    source = next(iter(bench.broker._routes._sources.values()))
    source.holds += 1
    publish(bench, b"0", b"1", b"2")
    bench.close()
    with monkeypatch.context() as patch:
        patch.setattr(RouteForwarder, "run", lambda *_: 0)  # it has no turn yet
        bench = Workbench(str(tmp_path / "data"), now_us=bench.now_us)
        source = next(iter(bench.broker._routes._sources.values()))
        assert not source.forwarders[0].is_open
        assert listed(bench)["all"].behind == 3
    source.start()
    bench.run()
    assert listed(bench)["all"].behind == 0
    assert bench.values("out") == [b"0", b"1", b"2"]


def test_a_deleted_source_takes_its_routes_with_it(tmp_path: Path) -> None:
    bench = Workbench(str(tmp_path / "data"))
    add(bench, "all", "out", all=True)
    publish(bench, b"1")
    bench.ask(TopicDelete("in"))
    assert not listed(bench)
    publish(bench, b"2")
    assert bench.values("out") == [b"1"]
    add(bench, "back", "in", source="out", all=True)  # no loop any more
    bench.close()
    assert listed(Workbench(str(tmp_path / "data"))).keys() == {"back"}


def test_a_source_that_grows_is_forwarded_as_a_whole(bench: Workbench) -> None:
    add(bench, "all", "out", all=True)
    bench.ask(TopicAlter("in", {"partitions": 3}))
    for partition in range(3):
        publish(bench, b"%d" % partition, partition=partition)
    assert sorted(bench.values("out")) == [b"0", b"1", b"2"]  # type: ignore[type-var]


# What cannot be delivered.


def test_a_message_too_large_for_a_target_goes_to_the_error_topic(bench: Workbench) -> None:
    bench.ask(TopicCreate("small", {"message_bytes_max": 10}))
    add(bench, "all", "small", "large", all=True, error_topic="failures")
    publish(bench, b"short", b"x" * 11, b"tiny")
    assert bench.values("small") == [b"short", b"tiny"]
    assert len(bench.values("large")) == 3
    (error,) = messages(bench, "failures")
    assert error.headers["headrace-route-reason"] == b"the message has 11 bytes, and small takes 10 at most"  # type: ignore[index]
    bench.ask(TopicAlter("small", {"message_bytes_max": 20}))
    publish(bench, b"x" * 11)
    assert bench.values("small")[-1] == b"x" * 11


def test_a_query_over_its_budget_sends_the_message_to_the_error_topic_and_the_route_stays(bench: Workbench) -> None:
    add(bench, "deep", "out", content=ContentQuery(jsonpath="$..[?@..a]..[?@..a]"))
    add(bench, "rest", "rest", unmatched=True)
    hostile = b"[" * 60 + b'{"a": 1}' + b",[1]" * 60 + b"]" * 60
    publish(bench, b'[[{"a": 1}]]', hostile, b"[[1]]")
    assert hostile in bench.values("in.errors")
    assert hostile not in bench.values("rest")
    assert bench.values("rest") == [b"[[1]]"]
    publish(bench, b'{"b": [{"c": [{"a": 1}]}]}')
    assert listed(bench)["deep"].error == ""


def test_hostile_messages_are_forwarded_a_few_at_a_time(bench: Workbench) -> None:
    """A slice ends when its queries have used up their steps, however many messages there are."""
    add(bench, "deep", "out", content=ContentQuery(jsonpath="$..[?@..a]..[?@..a]"))
    hostile = b"[" * 60 + b'{"a": 1}' + b",[1]" * 60 + b"]" * 60
    publish(bench, *[hostile] * 20)
    assert len(bench.values("in.errors")) == 20
    assert len(bench.batches("in.errors")) >= 10


@pytest.mark.parametrize("pattern", ["#.#.#.#.#.#.#", ".".join(["*", "#"] * 4), "#.a.#.a"])
def test_hostile_patterns_take_no_time(bench: Workbench, pattern: str) -> None:
    for number in range(50):
        add(bench, f"r{number}", "out", pattern=f"{pattern}.x{number}")
    key = b".".join([b"a"] * 31 + [b"x7"])
    publish(bench, b"1", b"2", keys=[key, b"a." + key])
    assert bench.values("out") == [b"1"], "a key with more tokens than a subject has is none"


def test_patterns_that_fit_in_too_many_ways_are_refused(bench: Workbench) -> None:
    refused = 0
    for number in range(300):
        words = [("a", "*")[number >> bit & 1] for bit in range(9)]
        try:
            add(bench, f"r{number}", "out", pattern=".".join(["#", *words, "z"]))
        except LimitExceeded as error:
            assert "too many ways" in str(error)  # noqa: PT017 only some are refused
            refused += 1
    assert 0 < refused < 300
    assert len(listed(bench)) == 300 - refused
    assert add(bench, "other", "out", source="in2", pattern="#.a.*.z"), "each source has its own"
    assert add(bench, "plain", "out", pattern="a.b"), "what costs nothing is taken"


def test_new_subjects_are_looked_up_a_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    table, looked_up = RouteTable(), 0
    definition = RouteDefinition("r", ["out"], source="in", pattern="#.a.*.#.b.*.z")
    table.add(CompiledRoute(RouteStored(definition, 1, 0, 1, {})))
    columns = Columns([b""] * 100, [b"%d" % (number // 2) for number in range(100)])

    def find(trie: SubjectTrie[Any], _subject: str) -> list[Any]:
        nonlocal looked_up
        looked_up += trie.weight
        return []

    monkeypatch.setattr(SubjectTrie, "find", find)
    counts = []
    while columns.values:
        (count, looked_up), portion = (0, 0), table.decide(columns, set())
        while not count:
            try:
                next(portion)
            except StopIteration as end:
                count = end.value.count
        assert looked_up <= 16_384
        counts.append(count)
        columns = Columns(columns.values[count:], (columns.keys or [])[count:])
    assert sum(counts) == 100
    assert len(counts) > 5


def test_a_failing_target_holds_its_own_source_only(tmp_path: Path) -> None:
    """The forwarder tries again, in order, when there is room; other sources go on."""
    from headrace.model.leasing import Ack, Holding, Lease, SubscriptionCreate

    bench = Workbench(str(tmp_path / "data"))
    add(bench, "all", "full", "other", all=True)
    add(bench, "free", "out", source="in2", all=True)
    bench.ask(SubscriptionCreate("full", "jobs", {"messages_max": 2, "overflow": "refuse"}))
    for number in range(4):
        publish(bench, b"%d" % number)
    publish(bench, b"free", topic="in2")
    assert bench.values("out") == [b"free"]
    assert bench.values("full") == [b"0", b"1"]
    assert listed(bench)["all"].behind == 2
    assert "messages_max" in listed(bench)["all"].error
    assert not listed(bench)["free"].error
    leased = bench.ask(Lease("full", "jobs", 2)).answer
    holding = [Holding(one.partition, one.lease, list(one.all_offsets)) for one in leased.portions]
    bench.ask(Ack("full", subscription="jobs", holdings=holding))
    bench.tick(1.5)
    assert bench.values("full") == bench.values("other") == [b"0", b"1", b"2", b"3"]
    assert not listed(bench)["all"].error


def test_a_full_disk_is_waited_for(tmp_path: Path) -> None:
    disk = FaultyDisk()
    bench = Workbench(str(tmp_path / "data"), disk=disk)
    bench.ask(TopicCreate("in", {"storage": "memory"}))
    add(bench, "all", "out", all=True)
    publish(bench, b"1")
    disk.capacity_bytes = disk.used_bytes
    publish(bench, b"2" * 3000)
    publish(bench, b"3" * 300_000)
    assert listed(bench)["all"].error
    disk.capacity_bytes = None
    bench.tick(2.0)
    assert bench.values("out") == [b"1", b"2" * 3000, b"3" * 300_000]


# What is refused.


def test_loops_are_refused(bench: Workbench) -> None:
    with pytest.raises(RouteLoop, match="a -> a"):
        add(bench, "self", "b", "a", source="a", all=True)
    add(bench, "one", "b", source="a", all=True)
    add(bench, "two", "c", source="b", all=True)
    with pytest.raises(RouteLoop, match="c -> a -> b -> c") as caught:
        add(bench, "three", "d", "a", source="c", all=True)
    assert caught.value.details["topics"] == ["c", "a", "b", "c"]
    with pytest.raises(TopicNotFound):
        bench.ask(TopicDescribe("d"))  # a refused route leaves nothing behind
    bench.ask(RouteRemove("two"))
    add(bench, "three", "a", source="c", all=True)


def test_loops_through_the_ingress_and_error_topics_are_refused(bench: Workbench) -> None:
    add(bench, "in", "orders", source="", pattern="orders.*")
    with pytest.raises(RouteLoop, match=r"headrace\.ingress"):
        add(bench, "out", "headrace.ingress", source="orders", all=True)
    with pytest.raises(RouteLoop):
        add(bench, "out", "orders", source="headrace.ingress.errors", all=True, error_topic="headrace.ingress")
    with pytest.raises(RouteLoop):
        add(bench, "errors", "headrace.ingress", source="headrace.ingress.errors", all=True)


def test_replacing_a_route_frees_its_edges(bench: Workbench) -> None:
    add(bench, "one", "b", source="a", all=True)
    with pytest.raises(RouteLoop):
        add(bench, "two", "a", source="b", all=True)
    bench.ask(RouteSet(RouteDefinition("one", ["a"], source="b", all=True), replace=True))


@pytest.mark.parametrize(
    ("condition", "text"),
    [
        ({}, "exactly one of"),
        ({"all": True, "key": "a"}, "exactly one of"),
        ({"pattern": "a..b"}, "no pattern"),
        ({"key": ""}, "a key has"),
        ({"headers": {}}, "headers"),
        ({"headers": {"a": b""}, "headers_match": "some"}, "all or any"),
        ({"all": True, "error_topic": "out"}, "both a target and the error topic"),
    ],
)
def test_bad_definitions_are_refused(bench: Workbench, condition: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidArgument, match=text):
        add(bench, "bad", "out", **condition)
    assert not listed(bench)


def test_other_things_are_refused(bench: Workbench) -> None:
    with pytest.raises(InvalidArgument, match="targets"):
        add(bench, "bad", all=True)
    with pytest.raises(InvalidContentQuery):
        add(bench, "bad", "out", content=ContentQuery(jsonpath="no path"))
    with pytest.raises(RouteNotFound):
        bench.ask(RouteRemove("none"))
    add(bench, "one", "out", all=True)
    with pytest.raises(RouteExists):
        add(bench, "one", "out", all=True)
    same = RouteDefinition("one", ["out"], source="in", all=True)
    assert bench.ask(RouteSet(same, exist_ok=True)).definition.error_topic == "in.errors"
    with pytest.raises(RouteExists):
        bench.ask(RouteSet(RouteDefinition("one", ["out"], source="in", key="a"), exist_ok=True))
    with pytest.raises(InvalidArgument, match="are the broker's"):
        bench.publish("in", [b"1"], producer=Producer(FORWARDER_MIN + 5, 0, 0))


def test_virtual_topics_are_neither_sources_nor_targets(bench: Workbench) -> None:
    bench.ask(TopicCreate("stored"))
    bench.ask(TopicCreate("view", {"view_of": "stored", "view_query": {"regex": "a"}}))
    for source, target, errors in (("in", "view", ""), ("view", "out", ""), ("in", "out", "view")):
        with pytest.raises(TopicIsView, match="route"):
            add(bench, "bad", target, source=source, all=True, error_topic=errors)
    add(bench, "all", "out", all=True)
    bench.ask(TopicDelete("out"))
    with pytest.raises(InvalidArgument, match="routes write to out"):
        bench.ask(TopicCreate("out", {"view_of": "stored", "view_query": {"regex": "a"}}))


def test_targets_are_made_only_if_the_broker_may() -> None:
    bench = Workbench(settings=BrokerSettings(auto_create_topics=False))
    with pytest.raises(TopicNotFound):
        add(bench, "one", "out", all=True)
    for topic in ("in", "out"):
        bench.ask(TopicCreate(topic))
    add(bench, "one", "out", all=True)
    bench.ask(TopicCreate("orders"))
    add(bench, "ingress", "orders", source="", all=True)  # the ingress makes itself
    publish(bench, b"1", topic="")
    assert bench.values("orders") == [b"1"]


def test_ten_thousand_routes(bench: Workbench) -> None:
    """A message that takes three of them is forwarded without a look at the others."""
    for number in range(ROUTES_MAX - 3):
        kind = ({"key": f"k.{number}"}, {"pattern": f"p.{number}.*"}, {"headers": {"h": b"%d" % number}})[number % 3]
        bench.begin(RouteSet(RouteDefinition(f"r{number}", [f"t{number % 10}"], source="in", **kind)))
    bench.run()
    publish(bench, b"1", b"2", b"3", keys=[b"k.999", b"p.1000.x", None], headers=[None, None, {"h": b"1001"}])
    assert [bench.values(f"t{number}") for number in (9, 0, 1)] == [[b"1"], [b"2"], [b"3"]]
    for number in range(3):
        add(bench, f"last{number}", "t0", key=f"last{number}")
    with pytest.raises(LimitExceeded):
        add(bench, "more", "t0", all=True)


# The ingress.


def test_messages_without_a_topic_go_to_the_ingress(bench: Workbench) -> None:
    add(bench, "orders", "orders", source="", content=ContentQuery(jsonpath="$.item"))
    publish(bench, b'{"item": 1}', b'{"other": 2}', topic="")
    assert bench.values("orders") == [b'{"item": 1}']
    info = bench.ask(TopicDescribe("headrace.ingress"))
    assert info.settings["retain_seconds"] == 86_400
    assert info.partitions[0].next_offset == 2


def test_subjects_that_a_route_takes_are_stored(bench: Workbench) -> None:
    add(bench, "eu", "europe", source="", pattern="orders.eu.#")
    add(bench, "all", "copy", source="", all=True)

    def send(subject: str, *values: bytes) -> Any:
        return bench.ask(SubjectPublish(subject), bench.batch(list(values)).data)

    assert send("orders.eu.1", b"1", b"2").stored
    assert not send("orders.us.1", b"3").stored, "only routes by subject make a message of a subject durable"
    assert bench.values("europe") == bench.values("copy") == [b"1", b"2"]
    assert messages(bench, "europe")[0].headers == {"headrace-subject": b"orders.eu.1"}
    with pytest.raises(MessageTooLarge):
        send("orders.eu.1", b"." * (2 << 20))
    for topic in ("headrace.ingress", "europe"):
        bench.ask(TopicAlter(topic, {"message_bytes_max": 4 << 20}))
    assert send("orders.eu.1", b"." * (2 << 20)).stored
    bench.ask(RouteRemove("eu"))
    assert not send("orders.eu.1", b"4").stored


def test_tenants_have_routes_and_an_ingress_of_their_own(bench: Workbench) -> None:
    acme = bench.connect(tenant="acme")
    add(bench, "eu", "europe", source="", pattern="orders.*")
    info = add(bench, "eu", "europe", source="", session=acme, pattern="orders.*")
    assert info.definition.source == "headrace.ingress"
    assert info.definition.targets == ["europe"]
    assert bench.ask(SubjectPublish("orders.1"), bench.batch([b"acme"]).data, session=acme).stored
    bench.ask(Publish("", 0), bench.batch([b"too"], keys=[b"orders.2"]).data, session=acme)
    assert bench.values("acme/europe") == [b"acme", b"too"]
    assert bench.values("europe") == []
    assert [one.definition.name for one in bench.ask(RouteList(), session=acme).routes] == ["eu"]
    explained = bench.ask(RouteExplain(key=b"orders.1"), session=acme)
    assert (explained.source, explained.targets) == ("headrace.ingress", ["europe"])
    with pytest.raises(InvalidArgument, match="tenant"):
        add(bench, "theft", "default/europe", session=acme, all=True)
    with pytest.raises(InvalidArgument, match="its own tenant"):
        add(bench, "theft", "acme/europe", all=True)
    bench.ask(RouteRemove("eu"), session=acme)
    assert listed(bench).keys() == {"eu"}


def test_observers_are_told_of_routes() -> None:
    bench = Workbench(settings=BrokerSettings(record_events=True))
    add(bench, "copy", "out", all=True)
    bench.ask(RouteSet(RouteDefinition("copy", ["out"], source="in", key="a"), replace=True))
    bench.ask(RouteRemove("copy"))
    add(bench, "copy", "out", all=True)
    bench.ask(TopicDelete("in"))
    bench.tick(1.0)
    told = [json.loads(value or b"") for value in bench.values("headrace.events")]
    assert [one["action"] for one in told if one["kind"] == "route"] == [
        *("created", "altered", "deleted", "created", "deleted")
    ]


# Explaining.


def test_explain_tells_why(bench: Workbench) -> None:
    add(bench, "a-key", "out", key="orders.eu")
    add(bench, "b-pattern", "out", "more", pattern="orders.*")
    add(bench, "c-headers", "out", headers={"x": None, "y": b"1"})
    add(bench, "d-content", "out", content=ContentQuery(partial={"a": 1}))
    add(bench, "e-rest", "rest", unmatched=True)
    told = bench.ask(RouteExplain("in", b'{"a": 2}', b"orders.us", {"x": b"1"}))
    assert [(one.name, one.is_taken, one.reason) for one in told.routes] == [
        ("a-key", False, "its key 'orders.us' is not orders.eu"),
        ("b-pattern", True, "its key 'orders.us' matches orders.*"),
        ("c-headers", False, "all of its headers are needed: the message has x, and not y"),
        ("d-content", False, 'the value does not match content partial {"a":1}'),
        ("e-rest", False, "another route takes it"),
    ]
    assert told.targets == ["out", "more"]
    told = bench.ask(RouteExplain("in", b"no JSON"))
    assert told.targets == ["rest"]
    assert {one.name: one.reason for one in told.routes}["d-content"] == "the value is not JSON"
    assert bench.ask(RouteExplain()).routes == []
    with pytest.raises(TopicNotFound):
        bench.ask(RouteExplain("none"))


# What keeps messages, and what removes them.


def test_until_consumed_waits_for_routes(tmp_path: Path) -> None:
    settings = BrokerSettings(maintenance_seconds=1.0)
    bench = Workbench(str(tmp_path / "data"), settings=settings)
    bench.ask(TopicCreate("in", {"validity": "until_consumed", "segment_bytes": 4096}))
    add(bench, "all", "out", all=True)
    for number in range(20):
        publish(bench, b"%d" % number + b"." * 1000)
    bench.ask(Commit("readers", [PartitionOffset("in", 0, 20)]))
    routes = bench.broker._routes
    routes._advance_us = 1 << 60  # positions are not recorded: after a crash, messages would be looked at again
    bench.tick(2.0)
    assert bench.ask(TopicDescribe("in")).partitions[0].first_offset == 0
    routes._advance_us = 0
    bench.tick(1.0)
    bench.tick(2.0)
    assert bench.ask(TopicDescribe("in")).partitions[0].first_offset > 0
    assert len(bench.values("out")) == 20


@pytest.mark.parametrize("limit", [{"retain_bytes": 8000}, {"retain_seconds": 1.0}])
def test_retention_waits_for_a_target_that_takes_no_messages(tmp_path: Path, limit: dict[str, Any]) -> None:
    from headrace.model.leasing import SubscriptionCreate, SubscriptionDelete

    bench = Workbench(str(tmp_path / "data"), settings=BrokerSettings(maintenance_seconds=1.0))
    bench.ask(TopicCreate("in", {"segment_bytes": 4096} | limit))
    add(bench, "all", "out", all=True)
    bench.ask(SubscriptionCreate("out", "jobs", {"messages_max": 1, "overflow": "refuse"}))
    for number in range(40):
        publish(bench, b"%d" % number + b"." * 1000)
    for _ in range(5):
        bench.tick(1.5)
    assert "messages_max" in listed(bench)["all"].error
    assert bench.ask(TopicDescribe("in")).partitions[0].first_offset <= len(bench.values("out"))
    bench.ask(SubscriptionDelete("out", "jobs"))
    for _ in range(5):
        bench.tick(1.5)
    assert [value.split(b".")[0] for value in bench.values("out")] == [b"%d" % number for number in range(40)]
    assert listed(bench)["all"].lost == 0
    assert bench.ask(TopicDescribe("in")).partitions[0].first_offset > 0, "retention goes on"


def test_what_a_topic_in_memory_drops_before_it_is_forwarded_is_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    bench = Workbench(str(tmp_path / "data"))
    bench.ask(TopicCreate("in", {"storage": "memory", "memory_bytes": 64 << 20}))
    add(bench, "all", "out", all=True)
    source = next(iter(bench.broker._routes._sources.values()))
    source.holds += 1
    for number in range(80):
        publish(bench, b"%d" % number + b"." * 1_000_000)
    first = bench.ask(TopicDescribe("in")).partitions[0].first_offset
    assert first > 0
    with caplog.at_level(logging.WARNING):
        source.release()
        bench.run()
    assert f"messages removed before they were forwarded  topic=in partition=0 first=0 last={first - 1}" in caplog.text
    assert listed(bench)["all"].lost == first
    assert len(bench.values("out")) == 80 - first


def test_a_trim_leaves_what_is_not_forwarded(tmp_path: Path) -> None:
    bench = Workbench(str(tmp_path / "data"))
    bench.ask(TopicCreate("in", {"segment_bytes": 4096}))
    add(bench, "all", "out", all=True)
    for number in range(20):
        publish(bench, b"%d" % number + b"." * 1000)
    assert bench.ask(TopicTrim("in", {0: 20})).offsets == {0: 0}, "the position is not recorded yet"
    bench.tick(2.0)
    assert bench.ask(TopicTrim("in", {0: 20})).offsets == {0: 20}


def test_compaction_of_a_target_keeps_what_recognises_repeats(tmp_path: Path) -> None:
    """All messages of a target are trimmed, and the broker killed before it recorded its position."""
    bench = Workbench(str(tmp_path / "data"))
    bench.ask(TopicCreate("out", {"segment_bytes": 4096}))
    add(bench, "all", "out", all=True)
    publish(bench, *(b"%d" % number for number in range(10)))
    assert len(bench.values("out")) == 10
    bench.ask(TopicTrim("out", {0: 10}))
    bench = Workbench(str(tmp_path / "data"), now_us=bench.now_us)
    assert bench.values("out", offset=10) == []
    publish(bench, b"new")
    assert bench.values("out", offset=10) == [b"new"]


def test_topics_in_memory_are_sources_and_targets(tmp_path: Path) -> None:
    """After a restart they are empty, and go on with what is published then."""
    bench = Workbench(str(tmp_path / "data"))
    bench.ask(TopicCreate("memory-in", {"storage": "memory"}))
    bench.ask(TopicCreate("memory-out", {"storage": "memory"}))
    add(bench, "one", "disk-out", source="memory-in", all=True)
    add(bench, "two", "memory-out", "copy", source="disk-in", all=True)
    for number in range(3):
        publish(bench, b"%d" % number, topic="memory-in")
        publish(bench, b"%d" % number, topic="disk-in")
    before = [b"0", b"1", b"2"]
    assert bench.values("disk-out") == bench.values("memory-out") == before
    for kill in (True, False):
        if not kill:
            bench.close()
        bench = Workbench(str(tmp_path / "data"), now_us=bench.now_us)
        end = bench.ask(TopicDescribe("memory-out")).partitions[0].first_offset
        assert bench.values("memory-out", offset=end) == []
        new = b"killed" if kill else b"restarted"
        publish(bench, new, topic="memory-in")
        publish(bench, new, topic="disk-in")
        before.append(new)
        assert bench.values("disk-out") == bench.values("copy") == before
        assert bench.values("memory-out", offset=end) == [new]


def test_a_source_that_is_only_written_may_lose_messages_and_no_target_gets_one_twice(tmp_path: Path) -> None:
    disk = FaultyDisk(7)
    bench = Workbench(str(tmp_path / "data"), disk=disk)
    bench.ask(TopicCreate("in", {"durability": "written"}))
    add(bench, "all", "out", all=True)
    sent: list[bytes] = []
    for round_ in range(6):
        for number in range(5):
            sent.append(b"%d.%d" % (round_, number))
            publish(bench, sent[-1])
        disk.power_loss(Unsynced.RANDOM)
        bench = Workbench(str(tmp_path / "data"), disk=disk, now_us=bench.now_us)
    found = bench.values("out")
    assert len(set(found)) == len(found)
    assert [value for value in sent if value in found] == found


def test_a_checkpoint_remembers_forwarders(tmp_path: Path) -> None:
    bench = Workbench(str(tmp_path / "data"))
    add(bench, "all", "out", all=True)
    publish(bench, b"1")
    routes = bench.broker._routes
    routes._advance_us = 1 << 60
    publish(bench, b"2")
    topic = bench.broker._topics.get("out")
    bench.broker._topics.keep_producers(topic, bench.broker._topics.active(topic, 0), bench.now_us, at_once=True)
    bench.run()
    bench = Workbench(str(tmp_path / "data"), now_us=bench.now_us)
    assert bench.values("out") == [b"1", b"2"]
