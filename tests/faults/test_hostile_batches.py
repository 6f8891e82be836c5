"""Whatever a batch says, it is refused and nothing is stored, or it is stored and then everything works with it."""

import os
from tempfile import TemporaryDirectory

import pyarrow as pa
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.faults.hostile_batches import hostile_batch

from headrace.broker.pending_answer import AnswerWithBody, PendingAnswer
from headrace.client.leasing.jobs import found_messages, holdings_of, leased_jobs
from headrace.client.results import ReceivedBatch
from headrace.model.errors import HeadraceError
from headrace.model.leasing import (
    Ack,
    Edit,
    EditMatching,
    Find,
    Forecast,
    Lease,
    MessageChange,
    MessageId,
    Redrive,
    Reject,
    Release,
    Selection,
    SubscriptionCreate,
    SubscriptionDescribe,
)
from headrace.model.requests import Publish, TopicCreate, TopicDescribe, TransactionBegin, TransactionStage
from headrace.spark.source.arrow import Decoder
from headrace.spark.source.planning import Range, Window
from headrace.testing.workbench import START_US, Workbench

ROUNDS = int(os.environ.get("HEADRACE_FUZZ_ROUNDS", "40"))
REFUSALS = {"invalid_batch", "invalid_argument", "message_too_large", "batch_too_large", "unsupported_format"}
SUBSCRIPTIONS: dict[str, dict[str, object]] = {
    **{one: {"discipline": one} for one in ("fifo", "lifo", "priority", "deadline")},
    "keys": {"ordered_by_key": True, "deliveries_max": 1},
}
TIME = pa.timestamp("us", "UTC")
SCHEMA = pa.schema(
    [
        ("offset", pa.int64()),
        ("timestamp", TIME),
        ("key", pa.binary()),
        ("value", pa.binary()),
        ("headers", pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))),
        ("due", TIME),
        ("priority", pa.int32()),
        ("expires", TIME),
    ]
)


@settings(max_examples=ROUNDS, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(hostile_batch(), min_size=1, max_size=4), st.sampled_from(["orders", "orders.dead"]))
def test_a_hostile_batch_is_refused_or_harmless(batches: list[bytes], topic: str) -> None:
    with TemporaryDirectory() as data:
        bench = Workbench(data)
        for name in ("orders", "orders.dead"):
            bench.ask(TopicCreate(name))
        for name, given_settings in SUBSCRIPTIONS.items():
            bench.ask(SubscriptionCreate("orders", name, given_settings))
        bench.publish("orders", [b"first"])
        for batch in batches:
            publish(bench, topic, batch)
        bench.publish("orders", [b"last"])
        everything_works(bench)
        bench.close()
        everything_works(Workbench(data, now_us=bench.now_us))  # after a good end, and as if it had been killed
        bench = Workbench(data, now_us=bench.now_us)
        compact(bench)
        everything_works(bench)
        assert {b"first", b"last"} <= set(bench.values("orders"))


def publish(bench: Workbench, topic: str, batch: bytes) -> None:
    """Publish a batch; if it is refused, nothing of it is there."""
    before = bench.ask(TopicDescribe(topic)).partitions
    begun = bench.ask(TransactionBegin("t"))
    staged = bench.begin(TransactionStage("t", begun.epoch, topic, 0), batch)
    answer = bench.begin(Publish(topic, 0), batch)
    bench.run()
    after = bench.ask(TopicDescribe(topic)).partitions
    if isinstance(answer, HeadraceError):
        assert answer.code in REFUSALS, answer
        assert after == before
        assert isinstance(staged, HeadraceError)
        assert staged.code == answer.code
        replaced = bench.begin(Edit(topic, [MessageId(0, 0)], MessageChange(replace=True)), batch)
        assert isinstance(replaced, HeadraceError)
    else:
        assert not isinstance(staged, HeadraceError)
        assert not isinstance(answer, PendingAnswer) or not isinstance(answer.outcome, HeadraceError)
        assert after[0].next_offset > before[0].next_offset


def everything_works(bench: Workbench) -> None:
    """Reading, decoding for Spark, leasing, searching, planning, editing, dying and coming back."""
    for topic in ("orders", "orders.dead"):
        batches = bench.batches(topic)
        for batch in batches:
            list(ReceivedBatch(topic, 0, batch, batch.base_offset).messages())
        rows = Decoder(SCHEMA, lambda values: {"value": values}, Window(), expired_too=True)
        read = list(rows.record_batches(Range(topic, 0, 0, 1 << 40), iter(batches)))
        assert sum(map(len, read)) == sum(batch.count for batch in batches)
        for part in read:
            part.to_pylist()
    for name in SUBSCRIPTIONS:
        use(bench, name)
    bench.tick(3600)
    assert bench.failures == []
    for name in SUBSCRIPTIONS:
        bench.ask(Redrive("orders", subscription=name))


def use(bench: Workbench, name: str) -> None:
    """Do with a subscription what can be done."""
    assert sum(bench.ask(Forecast("orders", START_US, 1_000_000, 100, name)).counts) >= 0
    bench.ask(SubscriptionDescribe("orders", name))
    for status in ("", "waiting", "ready", "leased", "dead"):
        for bounds in ({}, {"due_from_us": START_US, "due_to_us": START_US + 10}):
            answer = bench.ask(Find("orders", Selection(status, **bounds), name))
            if isinstance(answer, AnswerWithBody):
                found_messages("orders", answer.answer, answer.body)
    for change in (MessageChange(shift_us=-5), MessageChange(priority=-7), MessageChange(due_us=bench.now_us + 1000)):
        bench.ask(EditMatching("orders", Selection(), change, name))
    for ahead_ms in (0, 60_000):
        answer = bench.ask(Lease("orders", name, 1000, 1 << 20, ahead_ms=ahead_ms))
        jobs = leased_jobs("orders", name, answer.answer, answer.body) if isinstance(answer, AnswerWithBody) else []
        if jobs:
            bench.ask(Reject("orders", holdings_of(jobs[:1]), "no", name))
            bench.ask(Ack("orders", holdings_of(jobs[1:2]), name))
            bench.ask(Release("orders", holdings_of(jobs[2:]), 0, subscription=name))


def compact(bench: Workbench) -> None:
    """Compact the logs, as topics that keep the last message of each key have it done."""
    topics = bench.broker._topics
    for name in ("orders", "orders.dead"):
        partition = topics.active(topics.get(name), 0).partition
        partition.compact_settled([lambda offset: offset % 3 == 2])
        partition.compact_by_key()
