"""Publishes under idempotency keys: once, whatever is repeated and whatever ends the broker."""

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from tests.unit.test_commit_gate import FencedDisk, ReplicatedMemoryDisk

from headrace.broker import idempotency
from headrace.broker.pending_answer import PendingAnswer
from headrace.broker.settings import BrokerSettings
from headrace.middleware import Columns, Middleware, MiddlewareContext
from headrace.model.errors import (
    Busy,
    Cancelled,
    Fenced,
    HeadraceError,
    IdempotencyKeyReused,
    IdempotencyTableFull,
    InvalidArgument,
    LimitExceeded,
    MessageRefused,
    MessageTooLarge,
    PartitionNotFound,
    TopicIsView,
)
from headrace.model.idempotency import OFFSET_UNKNOWN, PartitionBatch, PublishedOnce, PublishOnce, PublishReceipt
from headrace.model.requests import TopicCreate, TopicDelete, TopicTrim
from headrace.testing.memory_disk import MemoryDisk
from headrace.testing.workbench import Workbench


@pytest.fixture
def data() -> Iterator[str]:
    """A directory in memory, where syncing takes no time."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").exists() else None) as directory:
        yield f"{directory}/data"


def request(
    bench: Workbench, key: bytes, *batches: tuple[int, list[bytes]], topic: str = "orders"
) -> tuple[PublishOnce, bytes]:
    encoded = [(number, bytes(bench.batch(values).data)) for number, values in batches]
    named = repr(batches).encode()
    hashed = (named * 16)[:8] + len(named).to_bytes(4, "little") + sum(named).to_bytes(4, "little")
    parts = [PartitionBatch(number, len(batch)) for number, batch in encoded]
    return PublishOnce(topic, key.ljust(16, b"."), hashed, parts), b"".join(batch for _, batch in encoded)


def publish(bench: Workbench, key: bytes, *batches: tuple[int, list[bytes]], topic: str = "orders") -> PublishedOnce:
    answer = bench.ask(*request(bench, key, *batches, topic=topic))
    assert isinstance(answer, PublishedOnce)
    return answer


def test_a_repeated_request_gets_the_first_receipt_and_appends_nothing(data: str) -> None:
    bench = Workbench(data)
    first = publish(bench, b"k", (0, [b"a", b"b"]))
    assert first == PublishedOnce([PublishReceipt(0, 0, 2)], 2)
    again = publish(bench, b"k", (0, [b"a", b"b"]))
    assert again == PublishedOnce([PublishReceipt(0, 0, 2)], 2, repeated=True)
    other = publish(bench, b"l", (0, [b"a", b"b"]))
    assert other.receipts == [PublishReceipt(0, 2, 2)]
    assert bench.values("orders") == [b"a", b"b", b"a", b"b"]


def test_the_same_key_with_another_body_is_refused_and_with_another_topic_is_not() -> None:
    bench = Workbench()
    publish(bench, b"k", (0, [b"a"]))
    with pytest.raises(IdempotencyKeyReused):
        publish(bench, b"k", (0, [b"b"]))
    assert publish(bench, b"k", (0, [b"b"]), topic="bills").receipts == [PublishReceipt(0, 0, 1)]
    assert bench.values("orders") == [b"a"]


def test_two_requests_at_once_append_once(data: str) -> None:
    bench = Workbench(data)
    asked, body = request(bench, b"k", (0, [b"a"]))
    first, second = bench.begin(asked, body), bench.begin(asked, body)
    other, other_body = request(bench, b"k", (0, [b"z"]))
    assert isinstance(bench.begin(other, other_body), IdempotencyKeyReused)
    bench.run()
    assert [first.outcome.repeated, second.outcome.repeated] == [False, True]
    assert first.outcome.receipts == second.outcome.receipts
    assert bench.values("orders") == [b"a"]


# Clients that disconnect while their publish is pending.


@pytest.mark.parametrize("disk", [MemoryDisk, ReplicatedMemoryDisk], ids=["plain", "cluster"])
@pytest.mark.parametrize("steps", range(30))
def test_a_repeat_after_a_cancelled_request_appends_nothing_whenever_that_was_cancelled(
    disk: type[MemoryDisk], steps: int
) -> None:
    bench = Workbench("/data", disk=disk())
    bench.ask(TopicCreate("orders", {"partitions": 2}))
    bench.syncing_later = True
    asked, body = request(bench, b"k", (1, [b"a"]), (0, [b"b", b"c"]))
    first = bench.begin(asked, body)
    for _ in range(steps):
        bench.step()
    was_pending = first.cancel()
    second = bench.begin(asked, body)
    bench.run()
    answer = second if isinstance(second, PublishedOnce) else second.outcome
    assert answer.receipts == [PublishReceipt(1, 0, 1), PublishReceipt(0, 0, 2)]
    assert answer.repeated
    assert isinstance(first.outcome, Cancelled if was_pending else PublishedOnce)
    assert (bench.values("orders", 1), bench.values("orders", 0)) == ([b"a"], [b"b", b"c"])


@pytest.mark.parametrize("disk", [MemoryDisk, ReplicatedMemoryDisk], ids=["plain", "cluster"])
def test_a_key_is_reserved_until_its_commit_is_decided_although_nobody_waits(disk: type[MemoryDisk]) -> None:
    bench = Workbench("/data", disk=disk())
    bench.ask(TopicCreate("orders"))
    bench.holding_syncs = True
    asked, body = request(bench, b"k", (0, [b"a"]))
    for _ in range(3):  # each client disconnects before the disk answers
        pending = bench.begin(asked, body)
        bench.run()
        assert pending.cancel()
    assert isinstance(bench.begin(*request(bench, b"k", (0, [b"other"]))), IdempotencyKeyReused)
    with patch.object(idempotency, "IDEMPOTENCY_KEYS_MAX", 1):
        assert isinstance(bench.begin(*request(bench, b"l", (0, [b"a"]))), IdempotencyTableFull)
    last = bench.begin(asked, body)
    bench.release_syncs()
    bench.run()
    assert last.outcome.receipts == [PublishReceipt(0, 0, 1)]
    assert last.outcome.repeated
    assert bench.values("orders") == [b"a"]


@pytest.mark.parametrize("cancelled", [0, 1, 2])
def test_a_request_that_is_cancelled_leaves_the_others_with_its_key_alone(cancelled: int) -> None:
    bench = Workbench("/data", disk=ReplicatedMemoryDisk())
    bench.ask(TopicCreate("orders"))
    bench.holding_syncs = True
    asked, body = request(bench, b"k", (0, [b"a"]))
    pending = [bench.begin(asked, body) for _ in range(3)]
    bench.run()
    assert pending[cancelled].cancel()
    bench.release_syncs()
    bench.run()
    for number, one in enumerate(pending):
        if number != cancelled:
            assert one.outcome == PublishedOnce([PublishReceipt(0, 0, 1)], one.outcome.durability, repeated=number > 0)
    assert bench.values("orders") == [b"a"]


@pytest.mark.parametrize("steps", range(12))
def test_a_repeat_after_a_cancelled_request_is_in_doubt_when_the_node_loses_its_shard(steps: int) -> None:
    disk = FencedDisk()
    bench = Workbench("/data", disk=disk)
    bench.ask(TopicCreate("orders"))
    bench.syncing_later = True
    asked, body = request(bench, b"k", (0, [b"a"]))
    first = bench.begin(asked, body)
    for _ in range(steps):
        bench.step()
    first.cancel()
    second = bench.begin(asked, body)
    disk.fenced = Fenced("another node has the shard")
    bench.run()
    again = bench.begin(asked, body)
    bench.run()
    for one in (second, again):
        told: Any = one.outcome if isinstance(one, PendingAnswer) else one
        assert isinstance(told, Fenced | Busy) or told.receipts == [PublishReceipt(0, 0, 1)]
    disk.fenced = None
    after = Workbench("/data", disk=disk)  # the next owner, with what the store has
    assert publish(after, b"k", (0, [b"a"])).receipts == [PublishReceipt(0, 0, 1)]
    assert after.values("orders") == [b"a"]


class SlowSuffix(Middleware):
    """Adds a text to each value, on a thread."""

    def __init__(self, _: Any) -> None:
        self.inline = False

    def on_publish(self, columns: Columns, _: MiddlewareContext) -> Columns:
        return Columns([(value or b"") + b"!" for value in columns.values])


def test_a_key_is_reserved_while_middleware_has_the_batch_of_a_cancelled_request() -> None:
    bench = Workbench(middleware={"slow": SlowSuffix})
    bench.ask(TopicCreate("orders", {"middleware": [{"name": "slow"}]}))
    bench.holding_workers = True
    asked, body = request(bench, b"k", (0, [b"a"]))
    first = bench.begin(asked, body)
    bench.run()
    assert first.cancel()
    second = bench.begin(asked, body)
    bench.release_workers()
    bench.run()
    assert second.outcome == PublishedOnce([PublishReceipt(0, 0, 1)], 0, repeated=True)
    assert bench.values("orders") == [b"a!"]


def test_a_key_is_free_again_when_its_batches_could_not_be_processed() -> None:
    bench = Workbench()
    bench.ask(TopicCreate("orders", {"middleware": [SCHEMA]}))
    with (
        patch.object(bench.broker._pipeline, "process", side_effect=OSError("the disk failed")),
        pytest.raises(HeadraceError),
    ):
        publish(bench, b"k", (0, [b'{"id":1}']))
    assert not publish(bench, b"k", (0, [b'{"id":1}'])).repeated


def test_batches_of_several_partitions_are_appended_together(data: str) -> None:
    bench = Workbench(data)
    bench.ask(TopicCreate("orders", {"partitions": 3}))
    answer = publish(bench, b"k", (2, [b"a", b"b"]), (0, [b"c"]))
    assert answer.receipts == [PublishReceipt(2, 0, 2), PublishReceipt(0, 0, 1)]
    with pytest.raises(PartitionNotFound):
        publish(bench, b"l", (0, [b"d"]), (3, [b"e"]))
    assert bench.values("orders", 0) == [b"c"]


def test_a_key_survives_a_restart_and_a_snapshot(data: str) -> None:
    bench = Workbench(data, settings=BrokerSettings(journal_bytes=2000))
    publish(bench, b"k", (0, [b"a"]))
    for at in range(200):
        publish(bench, b"n%d" % at, (0, [b"more"]))
    bench.close()
    bench = Workbench(data)
    assert publish(bench, b"k", (0, [b"a"])) == PublishedOnce([PublishReceipt(0, 0, 1)], 2, repeated=True)
    assert publish(bench, b"n199", (0, [b"more"])).receipts == [PublishReceipt(0, 200, 1)]
    assert len(bench.values("orders")) == 201


@pytest.mark.parametrize("steps", range(60))
def test_whenever_the_broker_is_killed_a_repeated_request_appends_once(data: str, steps: int) -> None:
    bench = Workbench(data)
    bench.ask(TopicCreate("orders", {"partitions": 2}))
    bench.syncing_later = True
    asked, body = request(bench, b"k", (1, [b"a"]), (0, [b"b", b"c"]))
    pending = bench.begin(asked, body)
    for _ in range(steps):
        if not bench.step():
            break
    told = pending.outcome
    # Killed here: what was written is there, and nothing else.
    bench = Workbench(data)
    bench.publish("orders", [b"between"], partition=1)
    answer = publish(bench, b"k", (1, [b"a"]), (0, [b"b", b"c"]))
    if told is not None:
        assert answer == PublishedOnce(told.receipts, 2, repeated=True)
    assert sorted(bench.values("orders", 1)) == [b"a", b"between"]
    assert bench.values("orders", 0) == [b"b", b"c"]
    for receipt, values in zip(answer.receipts, ([b"a"], [b"b", b"c"]), strict=True):
        found = bench.values("orders", receipt.partition, receipt.offset)
        assert found[: receipt.count] == values
    assert publish(bench, b"k", (1, [b"a"]), (0, [b"b", b"c"])) == PublishedOnce(answer.receipts, 2, repeated=True)


def test_offsets_that_were_not_recorded_are_found_in_the_log(data: str) -> None:
    bench = Workbench(data)
    with patch.object(idempotency, "IdempotencyReceiptStored", side_effect=Busy):
        publish(bench, b"k", (0, [b"a"]))
        publish(bench, b"l", (0, [b"b"]))
    for at in range(idempotency._SEARCHED_TOGETHER * 2):
        bench.publish("orders", [b"%d" % at] * 20)
    bench.close()
    bench = Workbench(data)
    assert publish(bench, b"l", (0, [b"b"])).receipts == [PublishReceipt(0, 1, 1)]
    end = bench.ask(TopicTrim("orders", {0: 500})).offsets[0]
    assert end > 1
    assert publish(bench, b"k", (0, [b"a"])).receipts == [PublishReceipt(0, OFFSET_UNKNOWN, 1)]


def test_a_key_is_forgotten_after_a_day_and_with_its_topic() -> None:
    bench = Workbench()
    publish(bench, b"k", (0, [b"a"]))
    bench.tick(86_399)
    assert publish(bench, b"k", (0, [b"a"])).repeated
    bench.tick(2)
    assert not publish(bench, b"k", (0, [b"a"])).repeated
    bench.tick(86_401)
    assert not bench.broker._ledger.state.idempotency
    publish(bench, b"l", (0, [b"a"]))
    bench.ask(TopicDelete("orders"))
    assert not publish(bench, b"l", (0, [b"a"])).repeated


def test_a_full_table_refuses_new_keys_and_knows_the_old() -> None:
    bench = Workbench()
    with patch.object(idempotency, "IDEMPOTENCY_KEYS_MAX", 3):
        for key in (b"a", b"b", b"c"):
            publish(bench, key, (0, [b"v"]))
        with pytest.raises(IdempotencyTableFull) as refused:
            publish(bench, b"d", (0, [b"v"]))
        assert refused.value.retryable
        assert publish(bench, b"a", (0, [b"v"])).repeated
        publish(bench, b"d", (0, [b"v"]), topic="bills")
        bench.tick(86_401)
        assert not publish(bench, b"d", (0, [b"v"])).repeated
    with patch.object(idempotency, "IDEMPOTENCY_KEYS_TOTAL_MAX", 1), pytest.raises(IdempotencyTableFull):
        publish(bench, b"e", (0, [b"v"]), topic="bills")


def test_what_is_refused_uses_no_key() -> None:
    bench = Workbench()
    bench.ask(TopicCreate("orders", {"message_bytes_max": 10}))
    refused: list[tuple[PublishOnce, bytes, type[HeadraceError]]] = []
    asked, body = request(bench, b"k", (0, [b"a" * 11]))
    refused.append((asked, body, MessageTooLarge))
    asked, body = request(bench, b"k", (0, [b"a"]))
    refused.append((asked, body[:-1], InvalidArgument))
    refused.append((PublishOnce("orders", b"short", b"r" * 16, asked.batches), body, InvalidArgument))
    refused.append((PublishOnce("orders", b"k" * 16, b"r" * 16, []), b"", LimitExceeded))
    for one, content, kind in refused:
        with pytest.raises(kind):
            bench.ask(one, content)
    assert not publish(bench, b"k", (0, [b"a"])).repeated


def test_keys_of_tenants_are_apart() -> None:
    bench = Workbench()
    acme = bench.connect(tenant="acme")
    asked, body = request(bench, b"k", (0, [b"a"]))
    assert not bench.ask(asked, body).repeated
    assert not bench.ask(asked, body, acme).repeated
    assert bench.ask(asked, body, acme).repeated
    assert bench.values("acme/orders") == [b"a"]


SCHEMA = {"name": "schema", "schema": {"type": "object", "required": ["id"]}}


def test_middleware_sees_what_is_published_with_a_key_and_only_once() -> None:
    bench = Workbench()
    bench.ask(TopicCreate("orders", {"middleware": [SCHEMA], "partitions": 2}))
    with pytest.raises(MessageRefused):
        publish(bench, b"k", (0, [b'{"no":1}']))
    assert not publish(bench, b"k", (0, [b'{"id":1}'])).repeated  # what was refused used no key
    assert publish(bench, b"k", (0, [b'{"id":1}'])) == PublishedOnce([PublishReceipt(0, 0, 1)], 0, repeated=True)
    with pytest.raises(InvalidArgument, match="middleware"):
        publish(bench, b"l", (0, [b'{"id":1}']), (1, [b'{"id":2}']))
    assert bench.values("orders") == [b'{"id":1}']


def test_dead_letters_of_middleware_are_written_once() -> None:
    bench = Workbench()
    bench.ask(TopicCreate("orders", {"middleware": [{**SCHEMA, "on_invalid": "dead_letter"}]}))
    for repeated in (False, True):
        answer = publish(bench, b"k", (0, [b'{"id":1}', b'{"no":1}', b'{"id":2}']))
        assert answer == PublishedOnce([PublishReceipt(0, 0, 3)], 0, repeated=repeated)
        assert publish(bench, b"l", (0, [b'{"no":2}'])) == PublishedOnce([], 0, repeated=repeated)
    assert bench.values("orders") == [b'{"id":1}', b'{"id":2}']
    assert bench.values("orders.dead") == [b'{"no":1}', b'{"no":2}']


def test_a_view_takes_nothing() -> None:
    bench = Workbench()
    bench.publish("orders", [b"a"])
    bench.ask(TopicCreate("seen", {"view_of": "orders", "view_query": {"regex": "a"}}))
    with pytest.raises(TopicIsView):
        publish(bench, b"k", (0, [b"a"]), topic="seen")


def test_versions_of_keys_are_counted() -> None:
    bench = Workbench()
    bench.ask(TopicCreate("orders", {"key_versions": True}))
    asked = bench.batch([b"a", b"b"], keys=[b"k", b"k"])
    parts = [PartitionBatch(0, asked.length)]
    for repeated in (False, True):
        assert bench.ask(PublishOnce("orders", b"k" * 16, b"r" * 16, parts), asked.data).repeated == repeated
    headers = [one.headers for batch in bench.batches("orders") for one in batch.messages()]
    assert [each and next(iter(each.values())) for each in headers] == [b"0", b"1"]
