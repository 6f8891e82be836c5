"""The broker without threads or sockets: publishing, gathering, reading, and disks that fail."""

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.broker.settings import BrokerSettings
from headrace.model.batch import HEADER_BYTES, Columns, Producer, encode
from headrace.model.codec import Codec
from headrace.model.durability import Durability
from headrace.model.errors import (
    DiskFailed,
    DiskFull,
    Draining,
    DurabilityUnavailable,
    HeadraceError,
    InvalidArgument,
    InvalidBatch,
    LogFailed,
    MessageTooLarge,
    OffsetOutOfRange,
    TopicNotFound,
    UnexpectedOffset,
    UnsupportedOperation,
)
from headrace.model.limits import TIMESTAMP_US_MAX
from headrace.model.requests import (
    Commit,
    Done,
    GroupJoin,
    Info,
    Offsets,
    PartitionOffset,
    Publish,
    TopicAlter,
    TopicCreate,
    TopicDelete,
    TopicDescribe,
    TransactionBegin,
    TransactionCommit,
    TransactionStage,
)
from headrace.storage.pool import Pool
from headrace.testing import FaultyDisk, MemoryDisk
from headrace.testing.workbench import Workbench

LARGE = [b"large"] * 20
"""So many messages are not gathered with others."""


@pytest.fixture
def data() -> Iterator[str]:
    """A directory in memory, where syncing takes no time."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").exists() else None) as directory:
        yield f"{directory}/data"


@pytest.fixture
def disk() -> FaultyDisk:
    return FaultyDisk()


class Reader:
    """A stream that counts how often it was told that there is something."""

    def __init__(self, bench: Workbench, topic: str, offset: int = 0) -> None:
        self.bench, self.woken = bench, 0
        self.stream = bench.open_stream(topic, 0, offset, self._ready)

    def _ready(self) -> None:
        self.woken += 1

    def read(self, bytes_max: int = 1 << 20) -> Any:
        return self.stream.read(bytes_max, self.bench.now_us)


# Publishing.


@pytest.mark.parametrize("values", [[b"a", b"b"], LARGE])
def test_an_answer_tells_where_and_how_safe(data: str, values: list[bytes]) -> None:
    bench = Workbench(data)
    bench.publish("orders", values)
    answer = bench.publish("orders", values)
    assert (answer.base_offset, answer.durability, answer.append_time) == (len(values), Durability.SYNCED, bench.now_us)
    assert bench.values("orders") == values * 2


@pytest.mark.parametrize("asked", [0, 1, 2])
@pytest.mark.parametrize("topic", ["memory", "written", "synced"])
def test_an_answer_is_worth_what_was_asked_for_and_what_the_topic_wants(data: str, asked: int, topic: str) -> None:
    bench = Workbench(data)
    bench.ask(TopicCreate("orders", {"durability": topic}))
    bench.publish("orders", LARGE)
    bench.syncing_later = True
    answer = bench.begin(Publish("orders", 0, asked), bench.batch(LARGE).data)
    needed = max(asked, Durability[topic.upper()])
    if needed == Durability.SYNCED:
        assert answer.outcome is None
        bench.run()
        answer = answer.outcome
    assert answer.durability == max(needed, Durability.WRITTEN)


@pytest.mark.parametrize("durability", [-1, 4, 99])
def test_a_durability_that_there_is_not(durability: int) -> None:
    with pytest.raises(InvalidArgument):
        Workbench().publish("orders", [b"a"], durability=durability)


def test_memory_cannot_be_written_or_synced() -> None:
    bench = Workbench()
    for durability in (1, 2):
        with pytest.raises(DurabilityUnavailable):
            bench.publish("orders", [b"a"], durability=durability)
    assert bench.publish("orders", [b"a"]).durability == Durability.MEMORY


def test_only_if_the_log_ends_where_it_is_expected_to(data: str) -> None:
    bench = Workbench(data)
    bench.begin(Publish("orders", 0), bench.batch([b"gathered"]).data)
    with pytest.raises(UnexpectedOffset) as refused:
        bench.publish("orders", [b"a"], expected_offset=0)
    assert refused.value.details == {"next_offset": 1}
    assert bench.publish("orders", [b"b"], expected_offset=1).base_offset == 1
    assert bench.values("orders") == [b"gathered", b"b"]


def test_messages_may_be_so_large(data: str) -> None:
    bench = Workbench(data)
    bench.ask(TopicCreate("orders", {"message_bytes_max": 1000}))
    columns = {"keys": [b"k" * 100], "headers": [{"name": b"h" * 100}]}
    bench.ask(Publish("orders", 0), bench.batch([b"v" * 796], **columns).data)
    with pytest.raises(MessageTooLarge):
        bench.ask(Publish("orders", 0), bench.batch([b"v" * 797], **columns).data)
    bench.publish("orders", [b"v" * 1000] * 50)  # each of them is small enough
    with pytest.raises(MessageTooLarge):
        bench.publish("orders", [b"v"] * 50 + [b"v" * 1001])


@pytest.mark.parametrize("codec", [Codec.LZ4, Codec.ZSTD])
def test_compressed_messages_are_as_large_as_they_are_when_unpacked(data: str, codec: Codec) -> None:
    bench = Workbench(data)
    bench.ask(TopicCreate("orders", {"message_bytes_max": 1000}))
    for size in (1000, 1001):
        batch = encode(Columns([b"v" * size] * 100), bench.now_us, codec=codec)
        assert batch.length < 1000
        with pytest.raises(MessageTooLarge) if size > 1000 else contextlib.nullcontext():
            bench.ask(Publish("orders", 0), batch.data)
    assert bench.values("orders") == [b"v" * 1000] * 100


@pytest.mark.parametrize("at", [0, 3, 20, 41, 60, 90, -1])
def test_a_broken_batch_is_refused(at: int) -> None:
    bench = Workbench()
    bench.publish("orders", [b"good"])
    body = bytearray(bench.batch([b"a"] * 3).data)
    body[at] ^= 0x40
    if at != 20:  # where it is placed is the broker's to say
        with pytest.raises(HeadraceError):
            bench.ask(Publish("orders", 0), body)
        with pytest.raises(InvalidBatch):
            bench.ask(Publish("orders", 0), bytes(body)[:50])
    assert bench.values("orders") == [b"good"]


def test_a_request_that_nobody_knows() -> None:
    with pytest.raises(UnsupportedOperation):
        Workbench().ask(Done())


# Gathering.


def test_small_batches_that_come_together_become_one(data: str, disk: FaultyDisk) -> None:
    bench = Workbench(data, disk=disk)
    bench.publish("orders", [b"first"])
    syncs = disk.syncs
    laters = [bench.begin(Publish("orders", 0), bench.batch([b"%d" % at, b"x"]).data) for at in range(100)]
    assert all(later.outcome is None for later in laters)
    bench.run()
    assert [later.outcome.base_offset for later in laters] == list(range(1, 201, 2))
    assert len(bench.batches("orders")) == 2
    assert disk.syncs - syncs <= 2


def test_messages_keep_what_they_have_when_they_are_gathered(data: str) -> None:
    bench = Workbench(data)
    bodies = [
        bench.batch([b"plain"]),
        bench.batch([b"rich", None], keys=[b"k", None], headers=[{"a": b"1"}, None], timestamps=[5, 6]),
        bench.batch([b"due"], dues=[7], priorities=[-8], expires=[9]),
    ]
    for batch in bodies:
        bench.begin(Publish("orders", 0), batch.data)
    bench.run()
    (gathered,) = bench.batches("orders")
    expected = [message for batch in bodies for message in batch.messages()]
    found = list(gathered.messages())
    for at, (message, wanted) in enumerate(zip(found, expected, strict=True)):
        assert message.offset == at
        for name in ("value", "key", "headers", "timestamp", "due", "priority", "expires"):
            assert getattr(message, name) == getattr(wanted, name)


@pytest.mark.parametrize("compression", ["none", "lz4", "zstd", "producer"])
def test_gathered_batches_are_compressed_as_the_topic_says(data: str, compression: str) -> None:
    bench = Workbench(data)
    bench.ask(TopicCreate("orders", {"compression": compression}))
    for _ in range(50):
        bench.begin(Publish("orders", 0), bench.batch([b"the same"]).data)
    bench.run()
    (gathered,) = bench.batches("orders")
    assert bool(gathered.codec) is (compression in ("lz4", "zstd"))


def test_a_hostile_batch_among_others_harms_only_itself(data: str) -> None:
    """Its header says other times than its messages, which have none that a header could say."""
    bench = Workbench(data)
    hostile = bench.batch([b"x"], timestamps=[TIMESTAMP_US_MAX])
    body = bytearray(hostile.data)
    body = body.replace(b"\xcf" + TIMESTAMP_US_MAX.to_bytes(8), b"\xcf\xff\xff\xff\xff\xff\xff\xff\xff")
    hostile.data = body
    hostile.stamp(Producer())
    laters = [bench.begin(Publish("orders", 0), data_) for data_ in (bench.batch([b"a"]).data, body)]
    laters.append(bench.begin(Publish("orders", 0), bench.batch([b"b"], timestamps=[TIMESTAMP_US_MAX]).data))
    bench.run()
    assert isinstance(laters[1], InvalidBatch)
    assert [laters[at].outcome.base_offset for at in (0, 2)] == [0, 1]
    assert bench.values("orders") == [b"a", b"b"]


@given(junk=st.binary(max_size=60))
def test_whatever_a_body_is_everybody_gets_an_answer(junk: bytes) -> None:
    bench = Workbench()
    batch = bench.batch([b"a"])
    body = bytearray(batch.data[:HEADER_BYTES]) + junk
    batch.data = body
    body[44:48] = len(body).to_bytes(4, "little")
    batch.stamp(Producer())
    laters = [bench.begin(Publish("orders", 0), data) for data in (bench.batch([b"b"]).data, body)]
    bench.run()
    assert laters[0].outcome.base_offset == 0
    assert bench.values("orders")[0] == b"b"


# Reading.


def test_readers_of_a_synced_topic_see_only_what_is_synced(data: str) -> None:
    bench = Workbench(data)
    bench.publish("orders", [b"a"])
    reader = Reader(bench, "orders", 1)
    assert reader.read() is None
    bench.syncing_later = True
    bench.begin(Publish("orders", 0), bench.batch(LARGE).data)
    assert bench.values("orders") == [b"a"]
    assert bench.ask(Offsets("orders")).offsets == {0: 1}  # and everything is synced
    assert bench.ask(Offsets("orders")).offsets == {0: 21}
    assert reader.woken == 1
    assert reader.read().next_offset == 21


def test_readers_of_a_written_topic_see_what_is_written(data: str) -> None:
    bench = Workbench(data)
    bench.ask(TopicCreate("orders", {"durability": "written"}))
    bench.publish("orders", LARGE)
    reader = Reader(bench, "orders", offset=20)
    assert reader.read() is None
    bench.syncing_later = True
    bench.begin(Publish("orders", 0), bench.batch(LARGE).data)
    assert reader.woken == 1
    assert reader.read().next_offset == 40
    assert reader.read() is None
    safe = bench.begin(Publish("orders", 0, durability=2), bench.batch([b"small"]).data)
    bench.open_stream("orders")._active.flush()
    assert (safe.outcome, reader.woken) == (None, 2)
    assert reader.read().next_offset == 41


def test_a_reader_is_woken_though_the_disk_was_quicker_than_the_broker(data: str) -> None:
    """A new file is synced at once: what was published is safe before anybody could wait for it."""
    bench = Workbench(data)
    bench.ask(TopicCreate("orders", {"segment_bytes": 4096}))
    reader = Reader(bench, "orders")
    for number in range(10):
        assert reader.read() is None
        bench.publish("orders", [b"x" * 1000] * 3)
        assert reader.woken == number + 1
        assert reader.read().next_offset == 3 * number + 3


def test_a_reader_is_woken_by_a_transaction(data: str) -> None:
    bench = Workbench(data)
    bench.ask(TopicCreate("orders"))
    reader = Reader(bench, "orders")
    for number in range(3):
        assert reader.read() is None
        begun = bench.ask(TransactionBegin("nightly"))
        bench.ask(TransactionStage("nightly", begun.epoch, "orders", 0), bench.batch([b"a"]).data)
        bench.ask(TransactionCommit("nightly", begun.epoch))
        assert reader.woken == number + 1
        assert reader.read().next_offset == number + 1


def test_a_stream_gives_whole_batches_of_about_so_many_bytes(data: str) -> None:
    bench = Workbench(data)
    for _ in range(10):
        bench.publish("orders", [b"x" * 1000] * 20)
    reader = Reader(bench, "orders")
    assert reader.read(1).next_offset == 20
    assert reader.read(50_000).next_offset == 60
    assert reader.read().next_offset == 200
    assert reader.read() is None
    reader.stream.close()
    bench.publish("orders", [b"a"])
    assert reader.woken == 0


def test_a_disk_that_cannot_be_read_ends_a_stream_with_an_error_of_ours(data: str, disk: FaultyDisk) -> None:
    Workbench(data, disk=disk).publish("orders", LARGE)
    bench = Workbench(data, disk=disk)
    reader = Reader(bench, "orders")
    bench.broker._store._host.files = Pool(1)  # its files have to be opened again
    bench.broker._store._host.views = Pool(1)
    disk.fail_reads()
    with pytest.raises(DiskFailed):
        reader.read()
    assert reader.read().next_offset == 20


def test_a_stream_begins_within_the_log(data: str) -> None:
    bench = Workbench(data)
    bench.publish("orders", LARGE)
    for offset in (-1, 21, 10**15):
        with pytest.raises(OffsetOutOfRange) as refused:
            Reader(bench, "orders", offset)
        assert refused.value.details == {"first_offset": 0, "next_offset": 20}
    assert Reader(bench, "orders", 7).read().next_offset == 20


def test_a_stream_ends_when_its_topic_is_deleted(data: str) -> None:
    bench = Workbench(data)
    bench.publish("orders", [b"a"])
    readers = [Reader(bench, "orders"), Reader(bench, "orders", 1)]
    assert readers[1].read() is None
    bench.ask(TopicDelete("orders"))
    assert [reader.woken for reader in readers] == [0, 1]
    bench.publish("orders", [b"another topic"])
    for reader in readers:
        with pytest.raises(TopicNotFound):
            reader.read()


def test_a_stream_ends_when_what_it_would_read_is_removed(data: str) -> None:
    bench = Workbench(data)
    bench.ask(TopicCreate("orders", {"validity": "until_consumed"}))
    bench.publish("orders", LARGE)
    reader = Reader(bench, "orders", 3)
    bench.ask(Commit("group", [PartitionOffset("orders", 0, 10)]))
    bench.tick(10)
    with pytest.raises(OffsetOutOfRange) as refused:
        reader.read()
    assert refused.value.details == {"first_offset": 10, "next_offset": 20}


def test_offsets_by_words_and_times(data: str) -> None:
    bench = Workbench(data)
    bench.ask(TopicCreate("orders", {"partitions": 2}))
    for at in range(5):
        bench.ask(Publish("orders", 0), bench.batch([b"a"], timestamps=[100 * at]).data)
    assert bench.ask(Offsets("orders", at="earliest")).offsets == {0: 0, 1: 0}
    assert bench.ask(Offsets("orders", at="latest")).offsets == {0: 5, 1: 0}
    assert bench.ask(Offsets("orders", [0], at="time", time_us=150)).offsets == {0: 2}
    assert bench.ask(Offsets("orders", [0], at="time", time_us=10**17)).offsets == {0: 5}
    with pytest.raises(InvalidArgument):
        bench.ask(Offsets("orders", at="noon"))


# When the disk fails.


def test_a_full_disk_takes_nothing_and_later_it_works(data: str, disk: FaultyDisk) -> None:
    bench = Workbench(data, disk=disk)
    bench.ask(TopicCreate("orders", {"segment_bytes": 10_000}))
    published = [bench.publish("orders", [b"x" * 3000]).base_offset]
    disk.capacity_bytes = disk.used_bytes
    full = 0
    while full < 5:
        laters = [bench.begin(Publish("orders", 0), bench.batch([b"x" * 3000]).data) for _ in range(2)]
        laters.append(bench.begin(Publish("orders", 0), bench.batch([b"y" * 200] * 20).data))
        bench.run()
        outcomes = [getattr(later, "outcome", later) for later in laters]
        full += any(isinstance(outcome, DiskFull) for outcome in outcomes)
        published += [outcome.base_offset for outcome in outcomes if not isinstance(outcome, HeadraceError)]
    bench.tick(10)
    assert len(bench.values("orders")) == bench.ask(TopicDescribe("orders")).partitions[0].next_offset
    before = len(bench.values("orders"))
    disk.capacity_bytes = None
    assert bench.publish("orders", LARGE).base_offset == before
    assert len(set(published)) == len(published)
    assert len(Workbench(data, disk=disk).values("orders")) == before + 20


def test_a_partition_that_failed_is_read_but_not_written_until_the_broker_is_started_again(
    data: str, disk: FaultyDisk
) -> None:
    bench = Workbench(data, disk=disk)
    bench.publish("orders", [b"a"])
    bench.publish("others", [b"a"])
    disk.fail_sync()
    laters = [bench.begin(Publish("orders", 0), bench.batch(LARGE).data)]
    laters += [bench.begin(Publish("orders", 0), bench.batch([b"b"]).data) for _ in range(2)]
    bench.run()
    assert all(isinstance(getattr(later, "outcome", later), LogFailed) for later in laters)
    bench.tick(10)
    assert bench.values("orders") == [b"a"]
    bench.publish("others", [b"b"])
    with pytest.raises(LogFailed):
        bench.close()
    bench = Workbench(data, disk=disk)
    bench.publish("orders", [b"c"])
    assert bench.values("others") == [b"a", b"b"]


def test_a_partition_that_cannot_be_opened_is_an_error_of_its_own(data: str, disk: FaultyDisk) -> None:
    bench = Workbench(data, disk=disk)
    bench.publish("orders", [b"a"])
    bench = Workbench(data, disk=disk)
    disk.fail_reads()
    with pytest.raises(DiskFailed):
        bench.publish("orders", [b"b"])
    bench.publish("orders", [b"b"])
    assert bench.values("orders") == [b"a", b"b"]


# The end.


def test_a_broker_that_drains_takes_nothing_new_and_ends_what_was_begun(data: str) -> None:
    bench = Workbench(data)
    bench.publish("orders", [b"a"])
    (place,) = bench.ask(GroupJoin("billing", "anna", ["orders"])).assigned
    begun = bench.ask(TransactionBegin("nightly"))
    bench.ask(TransactionStage("nightly", begun.epoch, "orders", 0), bench.batch([b"b"]).data)
    waiting = bench.begin(Publish("orders", 0), bench.batch([b"c"]).data)
    bench.broker.drain()
    assert not bench.broker.idle
    for refused in (
        GroupJoin("billing", "bert", ["orders"]),
        TransactionBegin("hourly"),
        TopicCreate("others"),
        TopicDelete("orders"),
        TopicAlter("orders", {}),
    ):
        with pytest.raises(Draining):
            bench.ask(refused)
    with pytest.raises(Draining):
        bench.publish("orders", [b"d"])
    bench.ask(TransactionCommit("nightly", begun.epoch))
    bench.ask(Commit("billing", [PartitionOffset("orders", 0, 1, place.epoch)], "anna"))
    assert waiting.outcome.base_offset == 1
    assert bench.broker.idle
    assert bench.ask(Info()).topics == 1
    bench.close()
    assert Workbench(data).values("orders") == [b"a", b"c", b"b"]


def test_what_a_broker_tells_of_itself(data: str) -> None:
    bench = Workbench(data)
    bench.publish("orders", [b"a"])
    bench.ask(Commit("billing", [PartitionOffset("orders", 0, 1)]))
    bench.ask(TransactionBegin("nightly"))
    other = bench.connect()
    info = bench.ask(Info())
    assert (info.broker_id, info.version, info.data) == ("workbench", "test", data)
    assert (info.topics, info.groups, info.connections, info.transactions_open) == (1, 1, 2, 1)
    assert info.partitions_open == 1
    bench.broker.disconnect(other, bench.now_us)
    assert bench.ask(Info()).connections == 1
    assert Workbench().ask(Info()).data == ":memory:"


def test_ticks_come_often_enough() -> None:
    bench = Workbench(settings=BrokerSettings(maintenance_seconds=100.0))
    bench.ask(GroupJoin("billing", "anna", ["orders"], session_ms=300, missing="create"))
    assert bench.broker.tick(bench.now_us) - bench.now_us == 300_000
    bench.tick(1)
    assert bench.broker.tick(bench.now_us) - bench.now_us == 1_000_000


def test_a_batch_that_is_repeated_in_the_same_turn_waits_for_the_sync_of_the_first() -> None:
    bench = Workbench("data", disk=MemoryDisk())
    bench.publish("orders", [b"before"])
    bench.holding_syncs = True
    body = bench.batch([b"a", b"b"], Producer(99, 0, 0)).data
    first, second = (bench.begin(Publish("orders", 0, durability=Durability.SYNCED), body) for _ in range(2))
    bench.run()
    assert not first.resolved
    assert not second.resolved, "it was acknowledged, and is not on the disk"
    bench.release_syncs()
    bench.run()
    assert (first.outcome.base_offset, first.outcome.duplicate) == (1, False)
    assert (second.outcome.base_offset, second.outcome.duplicate) == (1, True)
