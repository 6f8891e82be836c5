"""Every setting that can be altered counts at once for everything that is open: a new setting needs a case here."""

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace.broker.pending_answer import AnswerWithBody, PendingAnswer
from headrace.broker.settings import BrokerSettings
from headrace.model.batch import Columns, encode, parse
from headrace.model.codec import Codec
from headrace.model.errors import (
    InvalidArgument,
    MessageTooLarge,
    MiddlewareTimeout,
    PartitionNotFound,
    SubscriptionFull,
    SubscriptionNotFound,
    UnexpectedVersion,
)
from headrace.model.leasing import (
    Ack,
    Edit,
    Holding,
    Lease,
    MessageChange,
    MessageId,
    Reject,
    Release,
    SubscriptionAlter,
    SubscriptionDescribe,
)
from headrace.model.requests import (
    GroupJoin,
    Publish,
    TopicAlter,
    TopicCreate,
    TopicDescribe,
    TransactionBegin,
    TransactionStage,
)
from headrace.model.standing_lease import LeaseOpen
from headrace.model.subscription import SubscriptionSettings
from headrace.model.topic import TopicSettings
from headrace.testing.workbench import Workbench

MEMORY = Path("/dev/shm")
SETTINGS = BrokerSettings(maintenance_seconds=1, compact_seconds=1)
FULL = [b"%04d" % at + b"x" * 200 for at in range(100)]
"""Fills several files of the smallest size."""


@pytest.fixture
def data() -> Iterator[str]:
    with tempfile.TemporaryDirectory(dir=MEMORY if MEMORY.exists() else None) as directory:
        yield f"{directory}/data"


class Open:
    """A topic that is published to, streamed, read by a group and leased from, all at once."""

    def __init__(self, data: str | None, **settings: Any) -> None:
        self.data = data
        self.bench = Workbench(data, settings=SETTINGS)
        self.bench.ask(TopicCreate("jobs", settings))
        self.publish(b"first")
        self.woken = 0
        self.stream = self.bench.open_stream("jobs", 0, 0, self._wake)
        assert self.streamed() == [b"first"]
        self.bench.ask(GroupJoin("group", "member", ["jobs"], [], session_ms=3_600_000))
        [first] = self.lease()
        self.ack(first)

    def _wake(self) -> None:
        self.woken += 1

    def alter(self, **settings: Any) -> None:
        self.bench.ask(TopicAlter("jobs", settings))

    def alter_subscription(self, **settings: Any) -> None:
        self.bench.ask(SubscriptionAlter("jobs", settings))

    def publish(self, *values: bytes, partition: int = 0, **columns: Any) -> Any:
        made = encode(Columns(list(values), **columns), self.bench.now_us)
        return self.bench.ask(Publish("jobs", partition), made.data)

    def streamed(self) -> list[bytes | None]:
        """What the open stream gives."""
        found: list[bytes | None] = []
        while (part := self.stream.read(1 << 26, self.bench.now_us)) is not None:
            position = 0
            while position < len(part.view):
                batch = parse(part.view, position)
                found += batch.columns().values
                position += batch.length
        return found

    def lease(self, count: int = 1000, **more: Any) -> list[tuple[bytes, Holding]]:
        return self.leased(self.bench.ask(Lease("jobs", messages_max=count, **more)))

    def leased(self, answer: Any) -> list[tuple[bytes, Holding]]:
        if not isinstance(answer, AnswerWithBody):
            return []
        values: list[bytes] = []
        view, position = memoryview(answer.body), 0
        while position < len(view):
            batch = parse(view, position)
            values += [value or b"" for value in batch.columns().values]
            position += batch.length
        held = [Holding(one.partition, one.lease, [at]) for one in answer.answer.portions for at in one.all_offsets]
        return list(zip(values, held, strict=True))

    def waiting(self) -> PendingAnswer[Any]:
        """Somebody who waits for the next message."""
        answer = self.bench.begin(Lease("jobs", messages_max=1, wait_ms=600_000))
        self.bench.run()
        assert isinstance(answer, PendingAnswer)
        assert answer.outcome is None
        return answer

    def ack(self, held: tuple[bytes, Holding]) -> None:
        assert self.bench.ask(Ack("jobs", [held[1]])).refused == []

    def release(self, held: tuple[bytes, Holding], **more: Any) -> None:
        assert self.bench.ask(Release("jobs", [held[1]], **more)).refused == []

    def info(self) -> Any:
        return self.bench.ask(SubscriptionDescribe("jobs"))

    def first_offset(self) -> int:
        return int(self.bench.ask(TopicDescribe("jobs")).partitions[0].first_offset)

    def files(self) -> int:
        """How many segments there are."""
        return len(list(Path(f"{self.data}/topics").glob("1/0/*.seg")))


def values(held: list[tuple[bytes, Holding]]) -> list[bytes]:
    return [value for value, _ in held]


# Topics.


def partitions(data: str) -> None:
    topic = Open(data)
    with pytest.raises(PartitionNotFound):
        topic.publish(b"a", partition=1)
    waiting = topic.waiting()
    topic.alter(partitions=2)
    assert [place.partition for told in topic.bench.pushed for place in told.assigned] == [1]
    topic.publish(b"a", partition=1)
    assert values(topic.leased(waiting.outcome)) == [b"a"]


def storage(data: str) -> None:
    topic = Open(data)
    with pytest.raises(InvalidArgument, match="storage cannot be changed"):
        topic.alter(storage="memory")


def view_of(data: str) -> None:
    topic = Open(data)
    with pytest.raises(InvalidArgument, match="cannot become one"):
        topic.alter(view_of="others", view_query={"regex": "a"})


def view_query(data: str) -> None:
    topic = Open(data)
    with pytest.raises(InvalidArgument, match="cannot become one"):
        topic.alter(view_query={"regex": "a"})


def validity(data: str) -> None:
    topic = Open(data)
    topic.publish(b"old")
    topic.bench.now_us += 20_000_000
    topic.alter(validity="ttl", ttl_seconds=10)
    topic.publish(b"new")
    assert topic.streamed() == values(topic.lease()) == [b"new"]
    topic.alter(validity="keep", ttl_seconds=None)
    topic.publish(b"newer")
    topic.bench.tick(1000)
    assert topic.streamed() == [b"newer"]
    assert topic.info().ready == 2  # the lease of the other one has ended
    topic.alter(validity="until_consumed")
    for held in topic.lease():
        topic.ack(held)
    topic.bench.tick(10)
    assert topic.first_offset() == 0  # the group has read nothing yet


def ttl_seconds(data: str) -> None:
    topic = Open(data, validity="ttl", ttl_seconds=1)
    topic.publish(b"before")
    [held] = topic.lease(lease_ms=200_000)
    topic.alter(ttl_seconds=600)
    topic.publish(b"after")
    topic.bench.tick(100)
    assert topic.streamed() == [b"before", b"after"]
    assert values(topic.lease()) == [b"after"]
    topic.release(held, delay_ms=0)
    assert values(topic.lease()) == [b"before"]
    topic.alter(ttl_seconds=50)
    topic.publish(b"last", expires=[topic.bench.now_us + 2_000_000_000])
    assert values(topic.lease(1, lease_ms=1000)) == [b"last"]
    topic.bench.tick(51)
    assert topic.info().ready == topic.info().leased == 0
    assert topic.streamed() == []


def retain_seconds(data: str) -> None:
    topic = Open(data, segment_bytes=4096)
    topic.publish(*FULL)
    topic.publish(b"new")
    topic.bench.tick(100)
    assert topic.first_offset() == 0
    topic.alter(retain_seconds=10)
    topic.bench.tick(10)
    assert topic.first_offset() > 50
    assert values(topic.lease())[-1] == b"new"
    assert topic.info().leased < 60


def retain_bytes(data: str) -> None:
    topic = Open(data, segment_bytes=4096)
    topic.publish(*FULL)
    topic.publish(b"new")
    topic.bench.tick(100)
    assert topic.first_offset() == 0
    topic.alter(retain_bytes=8192)
    topic.bench.tick(10)
    assert topic.first_offset() > 50
    assert values(topic.lease())[-1] == b"new"
    assert topic.info().leased < 60


def segment_bytes(data: str) -> None:
    topic = Open(data)
    topic.publish(*FULL)
    topic.publish(*FULL)
    assert topic.files() == 1
    topic.alter(segment_bytes=4096)
    topic.publish(*FULL)
    topic.publish(*FULL)
    assert topic.files() > 2


def segment_seconds(data: str) -> None:
    topic = Open(data)
    topic.bench.tick(100)
    topic.publish(*FULL)
    assert topic.files() == 1
    topic.alter(segment_seconds=10)
    topic.bench.tick(100)
    topic.publish(*FULL)
    assert topic.files() == 2


def compact_by_key(data: str) -> None:
    topic = Open(data, segment_bytes=4096)
    for _ in range(3):
        topic.publish(*FULL, keys=[b"k"] * 100)
    topic.bench.tick(10)
    assert len(topic.bench.values("jobs")) == 301
    topic.alter(compact_by_key=True)
    topic.bench.tick(10)
    left = topic.bench.values("jobs")
    assert len(left) < 200
    assert values(topic.lease()) == left[1:]  # the first one is acknowledged


def message_bytes_max(data: str) -> None:
    topic = Open(data)
    topic.alter(message_bytes_max=10)
    large = encode(Columns([b"x" * 20]), topic.bench.now_us).data
    begun = topic.bench.ask(TransactionBegin("move", 0, 1000))
    topic.publish(b"small")
    requests: list[Any] = [
        Publish("jobs", 0),
        TransactionStage("move", begun.epoch, "jobs", 0),
        Edit("jobs", [MessageId(0, 1)], MessageChange(replace=True)),
    ]
    for request in requests:
        with pytest.raises(MessageTooLarge):
            topic.bench.ask(request, large)
    topic.alter(message_bytes_max=20)
    for request in requests:
        topic.bench.ask(request, large)


def durability(data: str) -> None:
    topic = Open(data)
    topic.bench.syncing_later = True
    topic.alter(durability="written")
    topic.bench.begin(Publish("jobs", 0), encode(Columns(FULL), topic.bench.now_us).data)
    assert topic.streamed() == FULL
    assert values(topic.leased(topic.bench.ask(Lease("jobs", messages_max=1000)))) == FULL
    topic.alter(durability="synced")
    topic.bench.begin(Publish("jobs", 0), encode(Columns(FULL), topic.bench.now_us).data)
    assert topic.streamed() == []
    topic.bench.run()
    assert topic.streamed() == FULL


def compression(data: str) -> None:
    topic = Open(data)
    topic.alter(compression="lz4")
    for text in (b"a" * 900, b"b" * 900):
        topic.bench.begin(Publish("jobs", 0), encode(Columns([text]), topic.bench.now_us).data)
    topic.bench.run()
    assert topic.bench.batches("jobs")[-1].codec == Codec.LZ4
    assert topic.bench.ask(TopicDescribe("jobs")).settings["compression"] == "lz4"  # what clients go by


def memory_bytes(data: str) -> None:
    large = b"x" * (4 << 20)
    topic = Open(data, storage="memory", memory_bytes=64 << 20, message_bytes_max=8 << 20)
    topic.alter(memory_bytes=160 << 20)
    for _ in range(24):
        topic.publish(large)
    assert topic.first_offset() == 0
    topic.alter(memory_bytes=64 << 20)
    assert topic.first_offset() > 0


def key_versions(data: str) -> None:
    topic = Open(data)
    topic.publish(b"a", b"b", keys=[b"k", b"k"])
    topic.alter(key_versions=True)
    batch = topic.bench.batch([b"c"], keys=[b"k"])
    assert isinstance(topic.bench.begin(Publish("jobs", 0, expected_version=3), batch.data), UnexpectedVersion)
    topic.bench.ask(Publish("jobs", 0, expected_version=2), batch.data)
    topic.alter(key_versions=False)
    batch = topic.bench.batch([b"d"], keys=[b"k"])
    assert isinstance(topic.bench.begin(Publish("jobs", 0, expected_version=3), batch.data), InvalidArgument)
    topic.publish(b"d", keys=[b"k"])
    assert topic.bench.batches("jobs")[-1].columns().headers is None


def middleware(data: str) -> None:
    topic = Open(data)
    hide = {"name": "redact", "fields": ["$.a"], "replacement": 0}
    topic.alter(middleware=[hide, {**hide, "fields": ["$.b"], "when": "deliver"}])
    topic.publish(b'{"a":1,"b":1}')
    assert topic.streamed() == [b'{"a":0,"b":0}']
    assert values(topic.lease()) == [b'{"a":0,"b":0}']
    topic.alter(middleware=[])
    assert topic.bench.values("jobs")[-1] == b'{"a":0,"b":1}'


def middleware_seconds(data: str) -> None:
    topic = Open(data, middleware=[{"name": "compress"}])
    topic.alter(middleware_seconds=2)
    topic.bench.holding_workers = True
    large = encode(Columns([b"x" * 100_000]), topic.bench.now_us).data
    published = topic.bench.begin(Publish("jobs", 0), large)
    topic.bench.run()
    topic.bench.tick(1.9)
    assert not published.resolved
    topic.bench.tick(0.2)
    assert isinstance(published.outcome, MiddlewareTimeout)


# Subscriptions.


def discipline(data: str) -> None:
    topic = Open(data)
    topic.publish(b"a", b"b", b"c", priorities=[0, 9, 5])
    topic.alter_subscription(discipline="priority")
    assert values(topic.lease(1)) == [b"b"]
    topic.alter_subscription(discipline="lifo")
    assert values(topic.lease(1)) == [b"c"]


def lease_seconds(data: str) -> None:
    topic = Open(data)
    topic.publish(b"a")
    topic.alter_subscription(lease_seconds=5)
    answer = topic.bench.ask(Lease("jobs"))
    assert answer.answer.portions[0].until_us == topic.bench.now_us + 5_000_000


def deliveries_max(data: str) -> None:
    topic = Open(data)
    topic.publish(b"a")
    [held] = topic.lease()
    topic.alter_subscription(deliveries_max=1)
    topic.release(held)
    assert topic.info().dead == 1


def dead_letter_topic(data: str) -> None:
    topic = Open(data, partitions=1)
    topic.publish(b"a")
    [held] = topic.lease()
    topic.alter_subscription(deliveries_max=1, dead_letter_topic="graveyard")
    topic.release(held)
    assert topic.bench.values("graveyard") == [b"a"]
    assert topic.info().dead == 1


def expired(data: str) -> None:
    topic = Open(data)
    topic.publish(b"a", expires=[topic.bench.now_us + 1_000_000])
    topic.alter_subscription(expired="dead")
    topic.bench.tick(2)
    assert topic.info().dead == 1


def retry(data: str) -> None:
    assert delays(data, {"retry": "linear"}, 2) == [10, 20]


def retry_seconds(data: str) -> None:
    assert delays(data, {"retry_seconds": 3}, 1) == [3]


def retry_seconds_max(data: str) -> None:
    assert delays(data, {"retry_seconds_max": 15}, 3) == [10, 15, 15]


def retry_jitter(data: str) -> None:
    assert delays(data, {"retry_jitter": 1}, 1) != [10]


def delays(data: str, altered: dict[str, Any], attempts: int) -> list[float]:
    """How long a message rests after each attempt, with settings that were altered while it was in hand."""
    topic = Open(data)
    topic.alter_subscription(retry_seconds=10, retry_jitter=0, deliveries_max=0)
    topic.publish(b"a")
    found = []
    for _ in range(attempts):
        [held] = topic.lease()
        topic.alter_subscription(**altered)
        topic.release(held)
        next_us = topic.info().next_ready_us
        found.append((next_us - topic.bench.now_us) / 1e6)
        topic.bench.tick(found[-1])
    return found


def ordered_by_key(data: str) -> None:
    topic = Open(data)
    topic.publish(b"a", b"b", keys=[b"k", b"k"])
    [held] = topic.lease(1)
    topic.alter_subscription(ordered_by_key=True)
    waiting = topic.waiting()
    topic.ack(held)
    assert values(topic.leased(waiting.outcome)) == [b"b"]
    topic.publish(b"c", b"d", keys=[b"k", b"k"])
    waiting = topic.waiting()
    topic.alter_subscription(ordered_by_key=False)
    assert values(topic.leased(waiting.outcome)) == [b"c"]


def paused(data: str) -> None:
    topic = Open(data)
    topic.alter_subscription(paused=True)
    topic.publish(b"a")
    waiting = topic.waiting()
    topic.alter_subscription(paused=False)
    assert values(topic.leased(waiting.outcome)) == [b"a"]


def rejected(data: str) -> None:
    topic = Open(data)
    topic.publish(b"a")
    [held] = topic.lease()
    topic.alter_subscription(rejected="drop")
    topic.bench.ask(Reject("jobs", [held[1]]))
    assert (topic.info().leased, topic.info().dead) == (0, 0)


def messages_max(data: str) -> None:
    topic = Open(data)
    topic.publish(b"a", b"b")
    topic.alter_subscription(messages_max=2)
    with pytest.raises(SubscriptionFull):
        topic.publish(b"c")
    topic.alter_subscription(messages_max=3)
    topic.publish(b"c")


def bytes_max(data: str) -> None:
    topic = Open(data)
    topic.publish(b"a" * 1000)
    topic.alter_subscription(bytes_max=10)
    with pytest.raises(SubscriptionFull):
        topic.publish(b"b")
    topic.alter_subscription(bytes_max=None)
    topic.publish(b"b")


def overflow(data: str) -> None:
    topic = Open(data)
    topic.publish(b"a", b"b")
    topic.alter_subscription(messages_max=1)
    assert topic.info().dropped == 0
    topic.alter_subscription(overflow="drop_oldest")
    assert (topic.info().ready, topic.info().dropped) == (1, 1)
    topic.publish(b"c")
    assert values(topic.lease()) == [b"c"]


def single_active_consumer(data: str) -> None:
    topic = Open(data)
    topic.bench.ask(LeaseOpen("jobs", credit_messages=0))
    topic.alter_subscription(single_active_consumer=True)
    topic.publish(b"a")
    assert topic.lease() == []
    topic.alter_subscription(single_active_consumer=False)
    assert values(topic.lease()) == [b"a"]


def delete_unused_seconds(data: str) -> None:
    topic = Open(data)
    topic.bench.tick(100)
    topic.alter_subscription(delete_unused_seconds=10)
    topic.bench.tick(5)
    topic.info()
    topic.bench.tick(6)
    with pytest.raises(SubscriptionNotFound):
        topic.info()


CASES: dict[str, Callable[[str], None]] = {
    name: case for name, case in globals().items() if callable(case) and getattr(case, "__module__", "") == __name__
}


@pytest.mark.parametrize("name", TopicSettings.__struct_fields__)
def test_every_setting_of_a_topic_counts_for_what_is_open(name: str, data: str) -> None:
    CASES[name](data)


@pytest.mark.parametrize("name", SubscriptionSettings.__struct_fields__)
def test_every_setting_of_a_subscription_counts_for_what_is_open(name: str, data: str) -> None:
    CASES[name](data)
