"""Views against a model: whatever happens to the source, reading a view is filtering the source."""

import json
import re
import tempfile
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from headrace.broker import subscriptions
from headrace.broker.pending_answer import AnswerWithBody
from headrace.broker.settings import BrokerSettings
from headrace.engines import derived_partition
from headrace.model.batch import Columns, encode, parse
from headrace.model.codec import Codec
from headrace.model.leasing import Ack, Holding, Lease, Release, SubscriptionCreate, SubscriptionDescribe
from headrace.model.message import Message
from headrace.model.reading import Fetch
from headrace.model.requests import (
    Commit,
    GroupDescribe,
    PartitionOffset,
    Publish,
    TopicAlter,
    TopicCreate,
    TopicDescribe,
    TopicTrim,
)
from headrace.testing.workbench import Workbench

VALUES: list[bytes | None] = [
    b'{"yes": 1, "k": 1}',
    b'{"yes": null}',
    b'{"k": 1}',
    b'[{"yes": 1}]',
    b'{"k": 12, "pad": "' + b"x" * 300 + b'"}',
    b'{"yes": [],"pad": "' + b"x" * 300 + b'"}',
    b"no JSON",
    b"[" * 200 + b"]" * 200,
    None,
]
VIEWS: dict[str, dict[str, Any]] = {
    "path": {"jsonpath": "$.yes"},
    "filter": {"jsonpath": "$..[?@.yes == 1 || @ == null]"},
    "partial": {"partial": {"k": 1}},
    "regex": {"regex": r'"k": 1\b'},
}
KINDS: list[dict[str, Any]] = [
    {"compact_by_key": True},
    {"validity": "until_consumed"},
    {"retain_bytes": 20_000},
    {"durability": "written"},
]


def is_wanted(view: str, value: bytes | None) -> bool:
    """What each query means, in other words."""
    try:
        document = json.loads(value or b"")
    except ValueError:
        document = None
    if view == "regex":
        return value is not None and re.search(rb'"k": 1\b', value) is not None
    if document is None or (value or b"").startswith(b"[["):
        return False
    if view == "path":
        return isinstance(document, dict) and "yes" in document
    if view == "partial":
        return isinstance(document, dict) and document.get("k") == 1
    return document in ([{"yes": 1}], {"yes": None})


class ViewsAgainstTheSource(RuleBasedStateMachine):
    """A source of up to three partitions, a view of each kind of query, a group and a leased subscription on each."""

    def __init__(self) -> None:
        super().__init__()
        memory = "/dev/shm" if Path("/dev/shm").exists() else None
        self.directory = tempfile.TemporaryDirectory(dir=memory)
        self.patches = [
            patch.object(derived_partition, "PART_MESSAGES", 7),
            patch.object(subscriptions, "VIEW_OFFSETS", 5),
        ]
        for each in self.patches:
            each.start()
        self.bench = self.started()
        self.acked: dict[str, set[tuple[int, int]]] = {view: set() for view in VIEWS}
        self.held: dict[str, list[Holding]] = {view: [] for view in VIEWS}
        self.committed: dict[str, int] = {}
        self.partitions = 1

    def started(self, **more: Any) -> Workbench:
        bench = Workbench(f"{self.directory.name}/data", settings=BrokerSettings(journal_bytes=4096), **more)
        bench.broker._maintenance._compact_us = 1 << 62  # only when a rule says so
        return bench

    @initialize(kind=st.sampled_from(KINDS))
    def begin(self, kind: dict[str, Any]) -> None:
        self.kind = kind
        self.bench.ask(TopicCreate("source", {"segment_bytes": 4096, **kind}))
        for view, query in VIEWS.items():
            self.bench.ask(TopicCreate(view, {"view_of": "source", "view_query": query}))
            self.bench.ask(SubscriptionCreate(view, settings={"deliveries_max": 0, "lease_seconds": 10_000}))

    def teardown(self) -> None:
        self.bench.close()
        self.directory.cleanup()
        for each in self.patches:
            each.stop()

    # What happens.

    @rule(
        partition=st.integers(0, 2),
        values=st.lists(st.sampled_from(VALUES), min_size=1, max_size=25),
        codec=st.sampled_from([Codec.NONE, Codec.LZ4, Codec.ZSTD]),
        keyed=st.booleans(),
    )
    def publish(self, partition: int, values: list[bytes | None], codec: Codec, keyed: bool) -> None:
        keys = [b"%d" % (at % 5) for at in range(len(values))] if keyed else None
        batch = encode(Columns(values, keys), self.bench.now_us, codec=codec)
        self.bench.ask(Publish("source", partition % self.partitions), batch.data)

    @rule(partition=st.integers(0, 2), values=st.lists(st.sampled_from(VALUES), min_size=2, max_size=9))
    def publish_together(self, partition: int, values: list[bytes | None]) -> None:
        for value in values:  # the broker gathers them into one batch
            batch = encode(Columns([value], [b"g"]), self.bench.now_us)
            self.bench.begin(Publish("source", partition % self.partitions), batch.data)
        self.bench.run()

    @rule()
    def grow(self) -> None:
        self.partitions = min(self.partitions + 1, 3)
        self.bench.ask(TopicAlter("source", {"partitions": self.partitions}))

    @precondition(lambda self: not any(self.held.values()))
    @rule(partition=st.integers(0, 2))
    def compact(self, partition: int) -> None:
        topic = self.bench.broker._topics.get("source")
        active = self.bench.broker._topics.active(topic, partition % self.partitions)
        self.bench.broker._maintenance._compact(topic, active, active.partition.compact_by_key)
        self.bench.run()

    @precondition(lambda self: not any(self.held.values()))
    @rule(partition=st.integers(0, 2), count=st.integers(1, 30))
    def trim(self, partition: int, count: int) -> None:
        number = partition % self.partitions
        self.bench.ask(TopicTrim("source", {number: self.first("source", number) + count}, unread=True))

    @precondition(lambda self: not any(self.held.values()))
    @rule()
    def let_time_pass(self) -> None:
        self.bench.tick(10)

    @rule(in_order=st.booleans())
    def restart(self, in_order: bool) -> None:
        if in_order:
            self.bench.close()
        self.bench = self.started(now_us=self.bench.now_us + 1_000_000)

    @rule(view=st.sampled_from(list(VIEWS)), count=st.integers(1, 12))
    def lease(self, view: str, count: int) -> None:
        answer = self.bench.ask(Lease(view, messages_max=count))
        for one in answer.answer.portions if isinstance(answer, AnswerWithBody) else ():
            self.held[view].append(Holding(one.partition, one.lease, one.offsets, one.following))

    @rule(view=st.sampled_from(list(VIEWS)), acks=st.booleans())
    def settle(self, view: str, acks: bool) -> None:
        holdings, self.held[view] = self.held[view], []
        if not holdings:
            return
        if acks:
            assert not self.bench.ask(Ack(view, holdings)).refused
            self.acked[view] |= {(one.partition, offset) for one in holdings for offset in one.all_offsets}
        else:
            self.bench.ask(Release(view, holdings, delay_ms=0))

    @rule(view=st.sampled_from(list(VIEWS)), back=st.integers(0, 10))
    def commit(self, view: str, back: int) -> None:
        end = max(self.end(view) - back, self.first(view))
        self.bench.ask(Commit(f"group-{view}", [PartitionOffset(view, 0, end)]))
        self.committed[view] = end

    # What must hold.

    def first(self, topic: str, partition: int = 0) -> int:
        return int(self.bench.ask(TopicDescribe(topic)).partitions[partition].first_offset)

    def end(self, topic: str, partition: int = 0) -> int:
        return int(self.bench.ask(TopicDescribe(topic)).partitions[partition].next_offset)

    def streamed(self, topic: str, number: int, offset: int) -> list[Message]:
        every = [one for batch in self.bench.batches(topic, number, offset) for one in batch.messages()]
        return [message for message in every if message.offset >= offset]

    def fetched(self, topic: str, number: int, offset: int, end: int) -> list[Message]:
        found, position = [], offset
        while position < end:
            answer = self.bench.ask(Fetch(topic, number, position, bytes_max=500, verify=True))
            assert answer.answer.next_offset > position
            at, body = 0, memoryview(bytes(answer.body))
            while at < len(body):
                batch = parse(body, at)
                batch.verify()
                found += [message for message in batch.messages() if message.offset >= position]
                at += batch.length
            position = answer.answer.next_offset
        return found

    @invariant()
    def views_show_what_the_source_has(self) -> None:
        if not hasattr(self, "kind"):
            return
        for number in range(self.partitions):
            first, end = self.first("source", number), self.end("source", number)
            source = self.streamed("source", number, first)
            for view in VIEWS:
                assert (self.first(view, number), self.end(view, number)) == (first, end)
                wanted = [message for message in source if is_wanted(view, message.value)]
                assert self.streamed(view, number, first) == wanted
                half = (first + end) // 2
                later = [message for message in wanted if message.offset >= half]
                assert self.fetched(view, number, half, end) == later

    @invariant()
    def subscriptions_have_what_matches_and_is_not_settled(self) -> None:
        if not hasattr(self, "kind"):
            return
        for view in VIEWS:
            there = {
                (number, message.offset)
                for number in range(self.partitions)
                for message in self.streamed(view, number, self.first(view, number))
            }
            info = self.bench.ask(SubscriptionDescribe(view))
            held = sum(len(one.all_offsets) for one in self.held[view])
            assert (info.leased, info.ready) == (held, len(there - self.acked[view]) - held)

    @invariant()
    def groups_lag_by_the_offsets_of_the_source(self) -> None:
        for view, offset in self.committed.items():
            places = self.bench.ask(GroupDescribe(f"group-{view}")).places
            [lag] = [one.lag for one in places if one.partition == 0]
            assert lag == self.end("source") - offset


ViewsAgainstTheSource.TestCase.settings = settings(max_examples=40, stateful_step_count=20, deadline=None)
TestViews = ViewsAgainstTheSource.TestCase


@pytest.mark.long
class TestViewsLonger(ViewsAgainstTheSource.TestCase):  # type: ignore[misc]
    """The same with many more examples."""

    settings = settings(max_examples=300, stateful_step_count=50, deadline=None)
