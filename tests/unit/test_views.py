"""Virtual topics (views): a topic filtered by a content query, with the source's offsets and no messages of its own."""

import asyncio
import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headrace.broker.pending_answer import AnswerWithBody
from headrace.broker.repair import repair, verify
from headrace.broker.settings import BrokerSettings
from headrace.broker.streams import WaitingFetch
from headrace.broker.subscriptions import VIEW_OFFSETS
from headrace.engines.data_directory import DataDirectory
from headrace.gateways.native.frame_writer import FrameWriter
from headrace.gateways.native.stream_pump import StreamPump
from headrace.model.batch import Columns, encode, parse
from headrace.model.content.query import ContentQuery
from headrace.model.errors import (
    CorruptBatch,
    DataDirectoryDamaged,
    HeadraceError,
    InvalidArgument,
    InvalidContentQuery,
    OffsetOutOfRange,
    SubscriptionFull,
    TopicFailed,
    TopicHasViews,
    TopicIsView,
    TopicNotFound,
)
from headrace.model.leasing import (
    Ack,
    Edit,
    EditMatching,
    Find,
    Forecast,
    Holding,
    Lease,
    MessageChange,
    MessageId,
    Redrive,
    Reject,
    Release,
    Selection,
    SubscriptionAlter,
    SubscriptionCreate,
    SubscriptionDelete,
    SubscriptionDescribe,
)
from headrace.model.reading import Fetch
from headrace.model.requests import (
    Commit,
    GroupDescribe,
    GroupJoin,
    GroupSeek,
    Offsets,
    PartitionOffset,
    Publish,
    TopicAlter,
    TopicCreate,
    TopicDelete,
    TopicDescribe,
    TopicList,
    TopicTrim,
    TransactionBegin,
    TransactionStage,
)
from headrace.model.route_requests import RouteDefinition, RouteSet
from headrace.model.schedule_requests import ScheduleDefinition, ScheduleSet
from headrace.model.topic import TopicSettings
from headrace.storage.runtime import StorageRuntime
from headrace.testing import InlineWorker
from headrace.testing.workbench import Workbench

QUERY = {"jsonpath": "$[?$.amount > 100]"}


@pytest.fixture
def bench() -> Workbench:
    bench = Workbench()
    bench.ask(TopicCreate("orders", {"partitions": 2}))
    create_view(bench)
    return bench


def create_view(bench: Workbench, name: str = "large", query: dict[str, Any] | None = None, **more: Any) -> Any:
    return bench.ask(TopicCreate(name, {"view_of": "orders", "view_query": query or QUERY}, **more))


def order(amount: int, **more: Any) -> bytes:
    return json.dumps({"amount": amount, **more}).encode()


def publish(bench: Workbench, *amounts: int, partition: int = 0) -> None:
    bench.publish("orders", [order(amount) for amount in amounts], partition)


def amounts(bench: Workbench, topic: str = "large", partition: int = 0, offset: int = 0) -> list[int]:
    return [
        json.loads(message.value or b"")["amount"]
        for batch in bench.batches(topic, partition, offset)
        for message in batch.messages()
        if message.offset >= offset
    ]


class Leases:
    """What was leased at once."""

    def __init__(self, bench: Workbench, topic: str = "large", count: int = 100, **given: Any) -> None:
        answer = bench.ask(Lease(topic, messages_max=count, **given))
        self.portions = answer.answer.portions if isinstance(answer, AnswerWithBody) else []
        self.holdings = [Holding(one.partition, one.lease, one.offsets, one.following) for one in self.portions]
        self.offsets = [offset for one in self.portions for offset in one.all_offsets]
        self.values: list[bytes | None] = []
        position, body = 0, memoryview(answer.body if isinstance(answer, AnswerWithBody) else b"")
        while position < len(body):
            batch = parse(body, position)
            self.values += batch.columns().values
            position += batch.length


# Creating.


def test_a_view_has_the_settings_and_partitions_of_its_source(bench: Workbench) -> None:
    info = bench.ask(TopicDescribe("large"))
    source = bench.ask(TopicDescribe("orders"))
    assert info.settings == {**source.settings, "view_of": "orders", "view_query": QUERY}
    assert [one.partition for one in info.partitions] == [0, 1]
    assert source.views == ["large"]
    assert "view_of" not in source.settings
    assert [one.topic for one in bench.ask(TopicList()).topics] == ["large", "orders"]


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"view_of": "orders"}, InvalidArgument),
        ({"view_query": QUERY}, InvalidArgument),
        ({"view_of": "orders", "view_query": {}}, InvalidContentQuery),
        ({"view_of": "orders", "view_query": {"jsonpath": "$["}}, InvalidContentQuery),
        ({"view_of": "orders", "view_query": {"regex": "(?<=a)"}}, InvalidContentQuery),
        ({"view_of": "orders", "view_query": {"regex": "a", "exact": 1}}, InvalidContentQuery),
        ({"view_of": "orders", "view_query": {"like": "a"}}, InvalidArgument),
        ({"view_of": "orders", "view_query": "$.a"}, InvalidArgument),
        ({"view_of": "nothing", "view_query": QUERY}, TopicNotFound),
        ({"view_of": "", "view_query": QUERY}, InvalidArgument),
        ({"view_of": "other", "view_query": QUERY}, InvalidArgument),
        ({"view_of": "large", "view_query": QUERY}, TopicIsView),
        ({"view_of": "acme/orders", "view_query": QUERY}, InvalidArgument),
        ({"view_of": "orders", "view_query": QUERY, "retain_bytes": 1000}, InvalidArgument),
        ({"view_of": "orders", "view_query": QUERY, "partitions": 3}, InvalidArgument),
        ({"view_of": "orders", "view_query": QUERY, "middleware": [{"name": "compress"}]}, InvalidArgument),
        ({"view_of": "orders", "view_query": QUERY, "key_versions": True}, InvalidArgument),
    ],
)
def test_views_that_cannot_be_are_refused(
    bench: Workbench, settings: dict[str, Any], error: type[HeadraceError]
) -> None:
    bench.ask(TopicCreate("acme/orders"))
    with pytest.raises(error):
        bench.ask(TopicCreate("other", settings))
    assert [one.topic for one in bench.ask(TopicList()).topics] == ["large", "orders"]


def test_names_of_the_broker_are_no_views(bench: Workbench) -> None:
    with pytest.raises(InvalidArgument, match="of the broker itself"):
        create_view(bench, "headrace.events")


def test_view_settings_are_no_defaults_of_other_topics() -> None:
    with pytest.raises(InvalidArgument, match="cannot be defaults"):
        BrokerSettings(topic=TopicSettings(view_of="orders", view_query=ContentQuery(regex="a")))


def test_the_source_stays_while_there_are_views(bench: Workbench) -> None:
    create_view(bench, "more")
    with pytest.raises(TopicHasViews, match="delete large, more first") as caught:
        bench.ask(TopicDelete("orders"))
    assert caught.value.details == {"views": ["large", "more"]}
    bench.ask(TopicDelete("more"))
    bench.ask(TopicDelete("large"))
    bench.ask(TopicDelete("orders"))
    assert bench.ask(TopicList()).topics == []


# Changing is refused.


CHANGES: list[Callable[[Workbench], Any]] = [
    lambda bench: bench.publish("large", [order(500)]),
    lambda bench: bench.publish("large", [order(500)] * 30, 1),
    lambda bench: bench.ask(TopicTrim("large", {0: 1})),
    lambda bench: bench.ask(TopicAlter("large", {"view_query": {"regex": "a"}})),
    lambda bench: bench.ask(TopicAlter("large", {"retain_seconds": 10})),
    lambda bench: bench.ask(TopicAlter("large", {"partitions": 5})),
    lambda bench: bench.ask(Edit("large", [MessageId(0, 0)], MessageChange(delete=True))),
    lambda bench: bench.ask(EditMatching("large", selection=Selection(), change=MessageChange(delete=True))),
    lambda bench: bench.ask(ScheduleSet(ScheduleDefinition("nightly", "large", "@daily"))),
    lambda bench: bench.ask(SubscriptionCreate("orders", settings={"dead_letter_topic": "large"})),
    lambda bench: stage(bench, "large"),
]


def stage(bench: Workbench, topic: str) -> Any:
    begun = bench.ask(TransactionBegin("t"))
    return bench.ask(TransactionStage("t", begun.epoch, topic, 0), bench.batch([order(500)]).data)


@pytest.mark.parametrize("change", CHANGES)
def test_changing_a_view_is_refused(bench: Workbench, change: Callable[[Workbench], Any]) -> None:
    publish(bench, 500)
    with pytest.raises(TopicIsView) as caught:
        change(bench)
    assert caught.value.code == "topic_is_view"
    assert "orders" in str(caught.value)
    assert amounts(bench) == [500]


def test_a_topic_cannot_become_a_view(bench: Workbench) -> None:
    bench.ask(TopicCreate("plain"))
    with pytest.raises(InvalidArgument, match="cannot become one"):
        bench.ask(TopicAlter("plain", {"view_of": "orders", "view_query": QUERY}))


def test_dead_letters_do_not_go_back_to_the_source(bench: Workbench) -> None:
    with pytest.raises(InvalidArgument, match="from which large reads"):
        bench.ask(SubscriptionCreate("large", settings={"dead_letter_topic": "orders"}))
    bench.ask(SubscriptionCreate("orders"))
    with pytest.raises(TopicIsView):
        bench.ask(SubscriptionAlter("orders", settings={"dead_letter_topic": "large"}))


def test_routes_and_views_keep_apart(bench: Workbench) -> None:
    for definition in (
        RouteDefinition("one", ["target"], source="large", all=True),
        RouteDefinition("one", ["large"], source="other", all=True),
        RouteDefinition("one", ["target"], source="other", all=True, error_topic="large"),
    ):
        with pytest.raises(TopicIsView):
            bench.ask(RouteSet(definition))
    bench.ask(RouteSet(RouteDefinition("one", ["target"], source="orders", all=True, error_topic="lost")))
    bench.ask(TopicDelete("target"))
    for name in ("target", "lost"):
        with pytest.raises(InvalidArgument, match="routes write to"):
            create_view(bench, name)
    bench.ask(TopicCreate("target"))
    publish(bench, 200)
    bench.tick(2)
    assert bench.values("target") == bench.values("large") == [order(200)]


# Reading.


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        (QUERY, [150, 200]),
        ({"partial": {"amount": 150}}, [150]),
        ({"exact": {"amount": 50}}, [50]),
        ({"regex": '"amount": [12]'}, [150, 200]),
        ({"jsonpath": "$.missing"}, []),
        ({"jsonpath": "$"}, [50, 150, 200, 70]),
    ],
)
def test_a_view_shows_what_its_query_selects(bench: Workbench, query: dict[str, Any], expected: list[int]) -> None:
    create_view(bench, "view", query)
    publish(bench, 50, 150)
    publish(bench, 200)
    publish(bench, 70)
    assert amounts(bench, "view") == expected


def test_messages_keep_their_offsets_and_everything_else(bench: Workbench) -> None:
    columns = Columns(
        [order(1), order(200), b"no JSON", None, order(300)],
        [b"a", b"b", b"c", b"d", b"e"],
        [bench.now_us + at for at in range(5)],
        [None, {"h": b"1"}, None, None, {"h": b"2"}],
        priorities=[None, 5, None, None, 7],
    )
    bench.ask(Publish("orders", 1), encode(columns, bench.now_us).data)
    [batch] = bench.batches("large", 1)
    second, last = batch.messages()
    assert (second.offset, second.key, second.timestamp, second.priority) == (1, b"b", bench.now_us + 1, 5)
    assert (last.offset, last.key, last.headers, last.priority) == (4, b"e", {"h": b"2"}, 7)


def test_old_messages_are_there_from_any_offset_and_time(bench: Workbench) -> None:
    for amount in range(90, 120):
        bench.now_us += 1_000_000
        publish(bench, amount)
    create_view(bench, "later")  # after they were published
    assert amounts(bench, "later") == list(range(101, 120))
    assert amounts(bench, "later", offset=20) == list(range(110, 120))
    found = bench.ask(Offsets("later", at="time", time_us=bench.now_us - 4_000_000))
    assert amounts(bench, "later", offset=found.offsets[0]) == [115, 116, 117, 118, 119]
    with pytest.raises(OffsetOutOfRange):
        amounts(bench, "later", offset=31)


def test_streams_wake_when_the_source_grows(bench: Workbench) -> None:
    woken: list[int] = []
    stream = bench.open_stream("large", on_ready=lambda: woken.append(1))
    assert stream.read(1 << 20, bench.now_us) is None
    publish(bench, 200)
    assert woken
    part = stream.read(1 << 20, bench.now_us)
    assert part is not None
    assert [json.loads(value or b"")["amount"] for value in parse(part.view).columns().values] == [200]
    woken.clear()
    publish(bench, 1)
    assert woken
    part = stream.read(1 << 20, bench.now_us)
    assert part is not None
    assert (parse(part.view).count, part.next_offset) == (0, 2)  # the reader gets on, without messages
    stream.close()


def test_a_read_looks_at_a_bounded_number_of_messages(bench: Workbench) -> None:
    create_view(bench, "rare", {"jsonpath": "$.rare"})
    for _ in range(5):
        bench.publish("orders", [order(1)] * 1000)
    stream = bench.open_stream("rare")
    offsets = []
    while (part := stream.read(1 << 20, bench.now_us)) is not None:
        offsets.append(part.next_offset)
        assert part.cost_bytes >= 1 << 19
    assert offsets == [1000, 2000, 3000, 4000, 5000]
    again = bench.open_stream("rare")
    part = again.read(1 << 20, bench.now_us)
    assert part is not None
    assert part.cost_bytes == 0  # the result is shared among readers


class Transport(asyncio.Transport):
    """Takes whatever is written."""

    def __init__(self) -> None:
        super().__init__()
        self.written = 0

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """It has no buffer."""

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.written += len(data)


def test_a_connection_gives_others_a_turn_after_each_costly_read(bench: Workbench) -> None:
    create_view(bench, "rare", {"jsonpath": "$.rare"})
    for _ in range(20):
        bench.publish("orders", [order(1)] * 1000)
    turns: list[FrameWriter] = []
    out = FrameWriter(Transport(), turns.append, lambda _: None, lambda _, error: pytest.fail(str(error)))
    stream = bench.open_stream("rare")
    StreamPump(out, 1, stream)
    count = 0
    while turns:
        before = stream._offset
        turns.pop().deliver(bench.now_us)
        assert stream._offset - before <= 2000
        count += 1
    assert stream._offset == 20_000
    assert count >= 10


def test_fetches_get_answers_and_wait(bench: Workbench) -> None:
    publish(bench, 1, 200)
    answer = bench.ask(Fetch("large", 0, 0))
    assert answer.answer.next_offset == 2
    assert list(parse(memoryview(answer.body)).columns().values) == [order(200)]
    waiting = bench.begin(Fetch("large", 0, 2, wait_ms=1000))
    assert isinstance(waiting, WaitingFetch)
    woken: list[int] = []
    waiting.start(lambda: woken.append(1))
    publish(bench, 300)
    assert woken
    found = waiting.read(bench.now_us)
    assert found is not None
    assert found.answer.next_offset == 3
    assert bench.ask(Fetch("large", 0, 0, verify=True)).answer.next_offset == 3


def test_readers_of_a_deleted_view_end(bench: Workbench) -> None:
    woken: list[int] = []
    stream = bench.open_stream("large", on_ready=lambda: woken.append(1))
    assert stream.read(1 << 20, bench.now_us) is None
    bench.ask(TopicDelete("large"))
    assert woken
    with pytest.raises(TopicNotFound):
        stream.read(1 << 20, bench.now_us)
    publish(bench, 200)
    create_view(bench, query={"jsonpath": "$[?$.amount > 250]"})
    publish(bench, 300)
    assert amounts(bench) == [300]


def test_a_view_shows_nothing_before_its_source_does(tmp_path: Path) -> None:
    bench = Workbench(str(tmp_path / "data"))
    bench.ask(TopicCreate("orders"))
    create_view(bench)
    bench.syncing_later = True
    answer = bench.begin(Publish("orders", 0), bench.batch([order(200)] * 20).data)
    assert amounts(bench) == amounts(bench, "orders") == []
    bench.run()
    assert amounts(bench) == amounts(bench, "orders") == [200] * 20
    assert not isinstance(answer, HeadraceError)


def test_messages_over_the_budget_are_left_out_counted_and_logged(
    bench: Workbench, caplog: pytest.LogCaptureFixture
) -> None:
    create_view(bench, "view", {"jsonpath": "$..a"})
    caplog.set_level(logging.WARNING)
    deep = b"[" * 500 + b"]" * 500
    wide = json.dumps([[]] * 40_000).encode()
    bench.publish("orders", [deep, wide, order(1, a=2)])
    assert [message.offset for batch in bench.batches("view") for message in batch.messages()] == [2]
    for _ in range(3):
        bench.publish("orders", [deep])
        bench.batches("view")
        bench.tick(6)
    assert bench.ask(TopicDescribe("view")).view_failed == 5
    assert bench.ask(TopicDescribe("large")).view_failed == 0
    told = [record for record in caplog.records if "left out of a view" in record.getMessage()]
    assert len(told) == 1
    assert "view=view" in told[0].getMessage()
    bench.publish("orders", [deep])
    bench.batches("view")
    bench.tick(61)
    told = [record for record in caplog.records if "left out of a view" in record.getMessage()]
    assert len(told) == 2
    assert [record.getMessage().rpartition("=")[2] for record in told] == ["3", "3"]


# The source grows and shrinks.


def test_partitions_follow_the_source(bench: Workbench) -> None:
    joined = bench.ask(GroupJoin("billing", "ann", ["large"]))
    assert [place.partition for place in joined.assigned] == [0, 1]
    bench.ask(SubscriptionCreate("large"))
    bench.ask(TopicAlter("orders", {"partitions": 4, "message_bytes_max": 5000}))
    info = bench.ask(TopicDescribe("large"))
    assert (len(info.partitions), info.settings["message_bytes_max"]) == (4, 5000)
    publish(bench, 200, partition=3)
    assert amounts(bench, partition=3) == [200]
    bench.tick(1)
    assert Leases(bench).values == [order(200)]
    assert len(bench.ask(GroupDescribe("billing")).places) == 4


def test_retention_of_the_source_is_that_of_its_views(tmp_path: Path) -> None:
    bench = Workbench(str(tmp_path / "data"))
    bench.ask(TopicCreate("orders", {"retain_bytes": 1, "segment_bytes": 4096}))
    create_view(bench)
    for _ in range(10):
        bench.publish("orders", [order(200, pad="x" * 500)] * 10)
    bench.tick(10)
    first = bench.ask(TopicDescribe("orders")).partitions[0].first_offset
    assert 0 < first == bench.ask(TopicDescribe("large")).partitions[0].first_offset
    with pytest.raises(OffsetOutOfRange):
        amounts(bench, offset=first - 1)
    assert len(amounts(bench, offset=first)) == 100 - first


def test_messages_wait_for_the_consumers_of_views(tmp_path: Path) -> None:
    bench = Workbench(str(tmp_path / "data"))
    bench.ask(TopicCreate("orders", {"validity": "until_consumed", "segment_bytes": 4096}))
    create_view(bench)
    for number in range(40):
        bench.publish("orders", [order(99 + number % 5, pad="x" * 500)])

    def first() -> int:
        bench.tick(10)
        return int(bench.ask(TopicDescribe("orders")).partitions[0].first_offset)

    bench.ask(Commit("source", [PartitionOffset("orders", 0, 40)]))
    bench.ask(Commit("viewers", [PartitionOffset("large", 0, 10)]))
    assert 0 < first() <= 10
    bench.ask(SubscriptionCreate("large"))
    bench.ask(Commit("viewers", [PartitionOffset("large", 0, 40)]))
    assert first() <= 12  # the first one that matches
    leases = Leases(bench)
    assert all(json.loads(value or b"")["amount"] > 100 for value in leases.values)
    bench.ask(Ack("large", leases.holdings[:1]))
    assert first() > 12


def test_trimming_the_source_spares_what_views_have_not_consumed(tmp_path: Path) -> None:
    bench = Workbench(str(tmp_path / "data"))
    bench.ask(TopicCreate("orders", {"segment_bytes": 4096}))
    create_view(bench)
    for _ in range(40):
        bench.publish("orders", [order(200, pad="x" * 500)])
    bench.ask(Commit("viewers", [PartitionOffset("large", 0, 20)]))
    assert bench.ask(TopicTrim("orders", {0: 40})).offsets[0] <= 20
    assert bench.ask(TopicTrim("orders", {0: 40}, unread=True)).offsets[0] > 20


def test_damage_is_told_as_by_the_source(tmp_path: Path) -> None:
    bench = Workbench(str(tmp_path / "data"))
    bench.ask(TopicCreate("orders"))
    create_view(bench)
    for amount in (200, 300, 400):
        bench.publish("orders", [order(amount)] * 20)
    second = bytes(bench.batches("orders")[1].data)
    [path] = [path for path in tmp_path.rglob("*") if path.is_file() and second in path.read_bytes()]
    with path.open("r+b") as file:
        file.seek(path.read_bytes().index(second) + len(second) - 1)
        file.write(b"X")
    with pytest.raises(CorruptBatch) as caught:
        amounts(bench)
    assert (caught.value.first_offset, caught.value.next_offset) == (20, 40)
    assert amounts(bench, offset=40) == [400] * 20
    bench.ask(SubscriptionCreate("large"))
    assert Leases(bench).values == [order(200)] * 20 + [order(400)] * 20
    assert bench.ask(TopicDescribe("large")).partitions[0].damaged == [(20, 40)]


# Middleware of the source.


def test_views_see_what_the_consumers_of_the_source_see() -> None:
    bench = Workbench()
    hide = {"name": "redact", "fields": ["$.card"], "when": "deliver"}
    bench.ask(TopicCreate("orders", {"middleware": [hide]}))
    create_view(bench, "hidden", {"regex": "4711"})
    create_view(bench)
    bench.ask(SubscriptionCreate("large"))
    bench.publish("orders", [order(200, card="4711")])
    assert bench.values("hidden") == []  # a query cannot find out what is hidden
    [value] = bench.values("large")
    assert b"4711" not in (value or b"")
    assert Leases(bench).values == [value]
    assert bench.ask(TopicDescribe("large")).settings["middleware"] == []


def test_middleware_that_is_added_later_counts_for_views(bench: Workbench) -> None:
    bench.publish("orders", [order(200, card="4711")])
    create_view(bench, "hidden", {"regex": "4711"})
    assert len(bench.values("hidden")) == 1
    hide = {"name": "redact", "fields": ["$.card"], "when": "deliver"}
    bench.ask(TopicAlter("orders", {"middleware": [hide]}))
    assert bench.values("hidden") == []
    assert b"4711" not in (bench.values("large")[0] or b"")
    bench.ask(TopicAlter("orders", {"middleware": []}))
    assert len(bench.values("hidden")) == 1


# Groups.


def test_groups_read_views_and_their_lag_counts_source_offsets(bench: Workbench) -> None:
    publish(bench, 1, 200, 2)
    bench.ask(Commit("billing", [PartitionOffset("large", 0, 1)]))
    info = bench.ask(GroupDescribe("billing"))
    assert [(one.topic, one.partition, one.offset, one.lag) for one in info.places] == [("large", 0, 1, 2)]
    assert bench.ask(TopicDescribe("large")).groups == ["billing"]
    assert bench.ask(TopicDescribe("orders")).groups == []
    bench.ask(GroupSeek("billing", "large", to="latest"))
    assert sum(one.lag for one in bench.ask(GroupDescribe("billing")).places) == 0


# Leased subscriptions.


def test_leases_have_only_what_matches(bench: Workbench) -> None:
    publish(bench, 1, 200, 2, 300)
    leases = Leases(bench)
    assert (leases.values, leases.offsets) == ([order(200), order(300)], [1, 3])
    bench.ask(Ack("large", leases.holdings))
    publish(bench, *[5] * 30, 400)
    assert Leases(bench).values == [order(400)]
    info = bench.ask(SubscriptionDescribe("large"))
    assert (info.leased, info.ready, info.acked) == (1, 0, 2)


def test_waiting_leases_are_served_when_something_matches(bench: Workbench) -> None:
    waiting = bench.begin(Lease("large", wait_ms=10_000))
    bench.run()
    publish(bench, 5)
    assert waiting.outcome is None
    publish(bench, 500)
    assert isinstance(waiting.outcome, AnswerWithBody)


@pytest.mark.parametrize(
    ("discipline", "expected"),
    [("fifo", [1, 2, 4]), ("lifo", [4, 2, 1]), ("priority", [2, 1, 4]), ("deadline", [4, 1, 2])],
)
def test_every_discipline_orders_a_view(bench: Workbench, discipline: str, expected: list[int]) -> None:
    bench.ask(SubscriptionCreate("large", settings={"discipline": discipline}))
    columns = Columns(
        [order(1), order(200), order(300), order(2), order(400)],
        priorities=[9, 5, 7, 9, 1],
        dues=[None, bench.now_us - 20, bench.now_us - 10, None, bench.now_us - 30],
    )
    bench.ask(Publish("orders", 0), encode(columns, bench.now_us).data)
    found = [Leases(bench, count=1).offsets[0] for _ in range(3)]
    assert found == expected


def test_a_large_batch_is_filtered_in_turns(bench: Workbench) -> None:
    bench.ask(SubscriptionCreate("large"))
    bench.begin(Publish("orders", 0), bench.batch([order(1), order(200)] * (2 * VIEW_OFFSETS)).data)
    subscription = next(iter(bench.broker._subscriptions))
    ends = set()
    while bench.step():
        ends.add(subscription.indexes[0].end)
    assert ends >= {VIEW_OFFSETS * turn for turn in range(1, 5)}
    assert bench.ask(SubscriptionDescribe("large")).ready == 2 * VIEW_OFFSETS


def test_dead_letters_of_a_view_and_their_way_back(bench: Workbench) -> None:
    for name in ("large", "orders"):
        bench.ask(SubscriptionCreate(name))
    create_view(bench, "other", {"jsonpath": "$.amount"})
    bench.ask(SubscriptionCreate("other"))
    publish(bench, 1, 200)
    leases = Leases(bench)
    bench.ask(Reject("large", leases.holdings, reason="broken"))
    assert bench.ask(SubscriptionDescribe("large")).dead == 1
    assert [info.topic for info in bench.ask(TopicList("large*")).topics] == ["large", "large.dead"]
    for name in ("orders", "other"):
        bench.ask(Ack(name, Leases(bench, name).holdings))
    assert bench.ask(Redrive("large")).messages == 1
    assert Leases(bench).values == [order(200)]
    assert Leases(bench, "orders").values == Leases(bench, "other").values == []  # it is for one subscription alone
    assert bench.ask(SubscriptionDescribe("large")).dead == 0


def test_released_messages_of_a_view_come_again(bench: Workbench) -> None:
    publish(bench, 1, 200)
    leases = Leases(bench)
    bench.ask(Release("large", leases.holdings, delay_ms=1000))
    assert Leases(bench).values == []
    bench.tick(2)
    assert Leases(bench).values == [order(200)]


def test_a_full_subscription_of_a_view_refuses_publishing_to_the_source(bench: Workbench) -> None:
    bench.ask(SubscriptionCreate("large", settings={"messages_max": 2, "overflow": "refuse"}))
    publish(bench, 200, 300)
    with pytest.raises(SubscriptionFull):
        publish(bench, 1)
    bench.ask(Ack("large", Leases(bench).holdings))
    publish(bench, 1)
    bench.ask(SubscriptionDelete("large"))
    publish(bench, 200, 300, 400)


def test_time_to_live_of_the_source_counts_in_views(bench: Workbench) -> None:
    bench.ask(TopicCreate("short", {"validity": "ttl", "ttl_seconds": 10}))
    bench.ask(TopicCreate("view", {"view_of": "short", "view_query": QUERY}))
    bench.ask(SubscriptionCreate("view"))
    bench.publish("short", [order(200)])
    bench.tick(5)
    bench.publish("short", [order(300)])
    assert amounts(bench, "view") == [200, 300]
    bench.tick(6)
    assert amounts(bench, "view") == [300]
    assert Leases(bench, "view").values == [order(300)]
    bench.ask(TopicAlter("short", {"ttl_seconds": 100}))
    bench.publish("short", [order(400)])
    bench.tick(50)
    assert amounts(bench, "view")[-1] == 400


def test_the_timeline_of_a_view_has_only_what_matches(bench: Workbench) -> None:
    later = bench.now_us + 60_000_000
    columns = Columns([order(1), order(200), order(300)], dues=[later, later, later + 60_000_000])
    bench.ask(Publish("orders", 0), encode(columns, bench.now_us).data)
    found = bench.ask(Find("large", selection=Selection(status="waiting")))
    assert [one.offset for one in found.answer.messages] == [1, 2]
    assert bench.ask(Forecast("large", later, 60_000_000, 2)).counts == [1, 1]


# Restarts.


def test_views_and_their_consumers_survive_a_restart(tmp_path: Path) -> None:
    bench = Workbench(str(tmp_path / "data"))
    bench.ask(TopicCreate("orders", {"partitions": 2}))
    create_view(bench)
    bench.ask(SubscriptionCreate("large"))
    publish(bench, 1, 200, 300)
    bench.ask(Ack("large", [Leases(bench, count=1).holdings[0]]))
    bench.ask(Commit("billing", [PartitionOffset("large", 0, 2)]))
    bench.ask(TopicAlter("orders", {"partitions": 3}))
    for close in (True, False):  # in order, and killed
        if close:
            bench.close()
        bench = Workbench(str(tmp_path / "data"), now_us=bench.now_us + 60_000_000)
        info = bench.ask(TopicDescribe("large"))
        assert (info.settings["view_of"], info.settings["view_query"], len(info.partitions)) == ("orders", QUERY, 3)
        assert bench.ask(TopicDescribe("orders")).views == ["large"]
        assert amounts(bench) == [200, 300]
        assert bench.ask(SubscriptionDescribe("large")).ready == 1
        assert [one.lag for one in bench.ask(GroupDescribe("billing")).places] == [1]
        with pytest.raises(TopicHasViews):
            bench.ask(TopicDelete("orders"))
    assert Leases(bench).values == [order(300)]
    assert not (tmp_path / "data" / "topics" / "2").exists()
    bench.ask(TopicDelete("large"))
    bench.tick(1)
    bench.close()
    bench = Workbench(str(tmp_path / "data"), now_us=bench.now_us)
    assert [info.topic for info in bench.ask(TopicList()).topics] == ["orders"]
    bench.ask(TopicDelete("orders"))
    bench.close()


def test_a_view_without_its_source_fails_alone(bench: Workbench, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR)
    topics = bench.broker._topics
    view = topics.get("large")
    del topics._by_name[topics.get("orders").name], topics._by_text["orders"]
    topics._attach_view(view)
    with pytest.raises(TopicFailed, match="delete this view"):
        amounts(bench)
    bench.ask(TopicDelete("large"))


# Tenants.


def test_views_of_another_tenant() -> None:
    bench = Workbench()
    acme = bench.connect("acme", tenant="acme")
    bench.ask(TopicCreate("orders"))
    bench.ask(TopicCreate("orders"), session=acme)
    info = bench.ask(TopicCreate("large", {"view_of": "orders", "view_query": QUERY}), session=acme)
    assert (info.topic, info.settings["view_of"]) == ("large", "orders")
    bench.publish("acme/orders", [order(200)])
    bench.publish("orders", [order(999)])
    answer = bench.ask(Fetch("large", 0, 0), session=acme)
    assert list(parse(memoryview(answer.body)).columns().values) == [order(200)]
    assert bench.ask(TopicDescribe("orders"), session=acme).views == ["large"]
    assert bench.ask(TopicDescribe("acme/large")).settings["view_of"] == "acme/orders"
    with pytest.raises(TopicHasViews) as caught:
        bench.ask(TopicDelete("orders"), session=acme)
    assert caught.value.details == {"views": ["large"]}
    assert "acme/" not in str(caught.value)
    with pytest.raises(TopicIsView) as refused:
        bench.ask(Publish("large", 0), bench.batch([b"1"]).data, session=acme)
    assert "acme/" not in str(refused.value)
    with pytest.raises(InvalidArgument):
        bench.ask(TopicCreate("spy", {"view_of": "default/orders", "view_query": QUERY}), session=acme)


# Data directories.


def checked_data(data: Path) -> DataDirectory:
    return DataDirectory(StorageRuntime(flusher=InlineWorker(), preparer=InlineWorker()), str(data))


def filled_data(data: Path) -> int:
    """A data directory with a view that has a group and a subscription; returns the time."""
    bench = Workbench(str(data))
    bench.ask(TopicCreate("orders", {"partitions": 2}))
    create_view(bench)
    bench.ask(SubscriptionCreate("large"))
    publish(bench, 1, 200, 300)
    bench.ask(Commit("billing", [PartitionOffset("large", 0, 2)]))
    bench.close()
    return bench.now_us


def test_verify_and_repair_know_topics_without_files(tmp_path: Path) -> None:
    now_us = filled_data(tmp_path / "data")
    found = verify(checked_data(tmp_path / "data"), lambda _: None, running=False)
    assert (found.problems, found.notes, found.topics) == ([], [], 2)
    done = repair(checked_data(tmp_path / "data"), "new", now_us, lambda _: None)
    assert done.topics == ["large", "orders"]
    bench = Workbench(str(tmp_path / "data"), now_us=now_us)
    assert amounts(bench) == [200, 300]
    assert [one.lag for one in bench.ask(GroupDescribe("billing")).places] == [1]
    assert Leases(bench).values == [order(200), order(300)]


def test_a_lost_journal_loses_views_and_nothing_of_their_source(tmp_path: Path) -> None:
    data = tmp_path / "data"
    now_us = filled_data(data)
    shutil.rmtree(checked_data(data).journal_path)
    with pytest.raises(DataDirectoryDamaged):
        Workbench(str(data), now_us=now_us)
    done = repair(checked_data(data), "new", now_us, lambda _: None)
    assert done.topics == ["orders"]
    bench = Workbench(str(data), now_us=now_us)
    assert amounts(bench, "orders") == [1, 200, 300]
    create_view(bench)
    assert amounts(bench) == [200, 300]


def test_deleting_a_view_survives_a_kill_at_any_step(tmp_path: Path) -> None:
    bench = Workbench(str(tmp_path / "data"))
    bench.ask(TopicCreate("orders"))
    publish(bench, 200)
    for turn in range(4):
        create_view(bench)
        bench.ask(SubscriptionCreate("large"))
        pending = bench.begin(TopicDelete("large"))
        for _ in range(turn):
            bench.step()
        bench = Workbench(str(tmp_path / "data"), now_us=bench.now_us + 1)
        names = [info.topic for info in bench.ask(TopicList()).topics]
        assert names == ["orders"] or not pending.outcome
        if "large" in names:
            assert amounts(bench) == [200]
            bench.ask(TopicDelete("large"))
    assert amounts(bench, "orders") == [200]
