"""Producers that repeat themselves: a batch stands in the log once, and gets the same answer every time."""

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.broker.settings import BrokerSettings
from headrace.engines import partition, producers
from headrace.engines.producers import FORGOTTEN, Producers, mark_of, marked
from headrace.model.batch import Producer
from headrace.model.errors import DiskFull, InvalidArgument, OutOfOrderSequence, ProducerFenced, UnknownProducer
from headrace.model.limits import IN_FLIGHT_MAX
from headrace.model.requests import Commit, PartitionOffset, Publish, TopicCreate
from headrace.testing import FaultyDisk, Unsynced
from headrace.testing.workbench import Workbench

ANNA, BERT = 1000, 2000


def publish(bench: Workbench, by: int, sequence: int, epoch: int = 0, count: int = 1, **more: Any) -> Any:
    values = [b"%d.%d.%d.%d" % (by, epoch, sequence, at) for at in range(count)]
    return bench.publish("orders", values, producer=Producer(by, epoch, sequence), **more)


@pytest.fixture
def data() -> Iterator[str]:
    """A directory in memory, where syncing takes no time."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").exists() else None) as directory:
        yield f"{directory}/data"


@pytest.fixture(params=["small", "large"])
def count(request: pytest.FixtureRequest) -> int:
    """How many messages: few, which are gathered with others, or too many for that."""
    return 1 if request.param == "small" else 20


# One after the other.


def test_a_repeated_batch_gets_its_first_place(count: int) -> None:
    bench = Workbench()
    first = publish(bench, ANNA, 0, count=count)
    second = publish(bench, ANNA, 1, count=count)
    again = publish(bench, ANNA, 0, count=count)
    assert (first.base_offset, first.duplicate) == (0, False)
    assert (second.base_offset, second.duplicate) == (count, False)
    assert (again.base_offset, again.duplicate) == (0, True)
    assert len(bench.values("orders")) == 2 * count


def test_a_batch_before_which_one_is_missing_is_refused(count: int) -> None:
    bench = Workbench()
    publish(bench, ANNA, 0, count=count)
    with pytest.raises(OutOfOrderSequence) as refused:
        publish(bench, ANNA, 2, count=count)
    assert refused.value.details == {"expected_sequence": 1}
    assert len(bench.values("orders")) == count
    publish(bench, ANNA, 1, count=count)
    assert publish(bench, ANNA, 2, count=count).base_offset == 2 * count


def test_a_producer_begins_at_the_beginning() -> None:
    bench = Workbench()
    with pytest.raises(UnknownProducer) as refused:
        publish(bench, ANNA, 1)
    assert refused.value.details == {"expected_sequence": 0}
    publish(bench, ANNA, 0)
    with pytest.raises(UnknownProducer):
        publish(bench, ANNA, 1, epoch=1)


def test_a_new_epoch_ends_the_one_before() -> None:
    bench = Workbench()
    publish(bench, ANNA, 0)
    publish(bench, ANNA, 0, epoch=3)
    for sequence in (0, 1, 7):
        with pytest.raises(ProducerFenced):
            publish(bench, ANNA, sequence)
    assert publish(bench, ANNA, 1, epoch=3).base_offset == 2


def test_producers_do_not_know_of_each_other_nor_partitions(data: str) -> None:
    bench = Workbench(data)
    bench.ask(TopicCreate("orders", {"partitions": 2}))
    for by in (ANNA, BERT):
        for number in (0, 1):
            assert not publish(bench, by, 0, partition=number).duplicate
    assert publish(bench, BERT, 0, partition=1).base_offset == 1


def test_who_has_no_id_is_never_recognised() -> None:
    bench = Workbench()
    assert [bench.publish("orders", [b"a"]).base_offset for _ in range(3)] == [0, 1, 2]


def test_small_ids_are_the_brokers_own() -> None:
    bench = Workbench()
    for by in (1, 15):
        with pytest.raises(InvalidArgument):
            publish(bench, by, 0)
    publish(bench, 16, 0)


def test_a_repeated_batch_does_not_mind_where_the_log_ends_by_now(data: str) -> None:
    bench = Workbench(data)
    publish(bench, ANNA, 0, expected_offset=0)
    publish(bench, BERT, 0)
    assert publish(bench, ANNA, 0, expected_offset=0).base_offset == 0


def test_as_many_batches_are_recognised_as_may_be_under_way() -> None:
    bench = Workbench()
    for sequence in range(IN_FLIGHT_MAX + 1):
        publish(bench, ANNA, sequence)
    assert publish(bench, ANNA, 1).base_offset == 1
    forgotten = publish(bench, ANNA, 0)
    assert (forgotten.base_offset, forgotten.duplicate) == (FORGOTTEN, True)
    assert len(bench.values("orders")) == IN_FLIGHT_MAX + 1


def test_a_batch_whose_place_is_forgotten_is_as_safe_as_was_asked_for(data: str) -> None:
    bench = Workbench(data)
    bench.ask(TopicCreate("orders", {"durability": "written"}))
    bench.syncing_later = True
    for sequence in range(IN_FLIGHT_MAX + 1):
        bench.begin(Publish("orders", 0), bench.batch([b"a"] * 20, Producer(ANNA, 0, sequence)).data)
    body = bench.batch([b"a"] * 20, Producer(ANNA, 0, 0)).data
    again = bench.begin(Publish("orders", 0, durability=2), body)
    assert again.outcome is None
    bench.run()
    assert (again.outcome.base_offset, again.outcome.durability) == (FORGOTTEN, 2)


# Together.


def test_small_batches_that_come_together_keep_their_producers(data: str) -> None:
    bench = Workbench(data)
    bodies = [bench.batch([b"%d" % by, b"x"], Producer(by, 0, 0)).data for by in (ANNA, BERT)]
    laters = [bench.begin(Publish("orders", 0), body) for body in (*bodies, *bodies)]
    bench.run()
    assert [(later.outcome.base_offset, later.outcome.duplicate) for later in laters] == [
        (0, False),
        (2, False),
        (0, True),
        (2, True),
    ]
    assert len(bench.batches("orders")) == 1
    bench = Workbench(data)
    assert bench.ask(Publish("orders", 0), bodies[1]).base_offset == 2


def test_one_that_is_refused_does_not_harm_the_others() -> None:
    bench = Workbench()
    bodies = [
        bench.batch([b"a"], Producer(ANNA, 0, 0)).data,
        bench.batch([b"b"], Producer(BERT, 0, 5)).data,
        bench.batch([b"c"]).data,
        bench.batch([b"d"], Producer(ANNA, 0, 1)).data,
    ]
    laters = [bench.begin(Publish("orders", 0), body) for body in bodies]
    bench.run()
    assert isinstance(laters[1].outcome, UnknownProducer)
    assert [laters[at].outcome.base_offset for at in (0, 2, 3)] == [0, 1, 2]
    assert bench.values("orders") == [b"a", b"c", b"d"]


def test_what_could_not_be_appended_is_not_taken_for_a_repetition(data: str) -> None:
    disk = FaultyDisk()
    bench = Workbench(data, disk=disk)
    publish(bench, ANNA, 0)
    disk.capacity_bytes = 0
    while not isinstance(bench.begin(Publish("orders", 0), bench.batch([b"."] * 20).data), DiskFull):
        bench.run()  # until there is no room left in the file
    bodies = [bench.batch([b"x" * 3000], Producer(by, 0, by == ANNA)).data for by in (ANNA, BERT)]
    for together in (bodies, bodies[:1], bodies):
        laters = [bench.begin(Publish("orders", 0), body) for body in together]
        bench.run()
        assert all(isinstance(later.outcome, DiskFull) for later in laters)
    disk.capacity_bytes = None
    before = len(bench.values("orders"))
    answers = [bench.ask(Publish("orders", 0), body) for body in bodies]
    assert [(answer.base_offset, answer.duplicate) for answer in answers] == [(before, False), (before + 1, False)]


# After the broker has ended.


@pytest.mark.parametrize("orderly", [True, False])
def test_a_batch_is_recognised_by_the_next_broker(data: str, count: int, orderly: bool) -> None:
    bench = Workbench(data)
    for sequence in range(3):
        publish(bench, ANNA, sequence, count=count)
    if orderly:
        bench.close()
    bench = Workbench(data)
    again = publish(bench, ANNA, 1, count=count)
    assert (again.base_offset, again.duplicate) == (count, True)
    assert publish(bench, ANNA, 3, count=count).base_offset == 3 * count
    with pytest.raises(OutOfOrderSequence):
        publish(bench, ANNA, 5, count=count)


def test_what_the_journal_keeps_and_what_the_log_tells_go_together(data: str) -> None:
    with patch.object(partition, "_CHECKPOINT_WORK", 3):
        bench = Workbench(data)
        for sequence in range(3):
            publish(bench, ANNA, sequence)
        bench.tick(10)  # kept
        publish(bench, ANNA, 3)
        publish(bench, BERT, 0)
        bench = Workbench(data)
        for sequence in range(4):
            assert publish(bench, ANNA, sequence).base_offset == sequence
        assert publish(bench, BERT, 0).base_offset == 4


def test_producers_are_known_when_all_of_their_messages_are_gone(data: str) -> None:
    """Messages that everybody has consumed are removed: what is known of their producers is kept before."""
    bench = Workbench(data)
    bench.ask(TopicCreate("orders", {"validity": "until_consumed"}))
    publish(bench, ANNA, 0)
    publish(bench, ANNA, 1)
    bench = Workbench(data)
    bench.ask(Commit("group", [PartitionOffset("orders", 0, 2)]))
    bench.tick(10)
    bench = Workbench(data)
    assert bench.open_stream("orders", 0, 2).answer.first_offset == 2
    assert publish(bench, ANNA, 1).base_offset == 1
    assert publish(bench, ANNA, 2).base_offset == 2


def test_producers_are_known_when_compaction_has_removed_their_batches(data: str) -> None:
    bench = Workbench(data)
    bench.ask(TopicCreate("states", {"compact_by_key": True, "segment_bytes": 4096}))

    def state(by: int, sequence: int, key: bytes) -> Any:
        columns = {"keys": [key], "timestamps": [bench.now_us]}
        body = bench.batch([b"x" * 1000], Producer(by, 0, sequence), **columns).data
        return bench.ask(Publish("states", 0), body)

    state(ANNA, 0, b"other")
    state(ANNA, 1, b"same")
    for sequence in range(10):
        state(BERT, sequence, b"same")
    bench.tick(100)
    assert len(bench.values("states")) < 12
    bench = Workbench(data)
    assert state(ANNA, 1, b"same").base_offset == 1
    assert state(ANNA, 2, b"same").base_offset == 12


def test_after_a_power_loss_only_what_is_there_is_recognised(data: str) -> None:
    disk = FaultyDisk()
    bench = Workbench(data, disk=disk)
    publish(bench, ANNA, 0)
    bench.syncing_later = True
    bench.begin(Publish("orders", 0), bench.batch([b"lost"] * 20, Producer(ANNA, 0, 1)).data)
    disk.power_loss(Unsynced.LOST)
    bench = Workbench(data, disk=disk)
    assert publish(bench, ANNA, 0).duplicate
    again = publish(bench, ANNA, 1)
    assert (again.base_offset, again.duplicate) == (1, False)


def test_what_is_recognised_after_a_kill_is_safe_when_it_is_acknowledged(data: str) -> None:
    """It was written and not synced, nor was the directory: a repetition is no reason to believe that it is safe."""
    disk = FaultyDisk()
    bench = Workbench(data, disk=disk)
    bench.ask(TopicCreate("orders"))
    bench.syncing_later = True
    body = bench.batch([b"a"] * 20, Producer(ANNA, 0, 0)).data
    bench.begin(Publish("orders", 0), body)
    bench = Workbench(data, disk=disk)
    assert bench.ask(Publish("orders", 0), body).duplicate
    disk.power_loss(Unsynced.LOST)
    assert len(Workbench(data, disk=disk).values("orders")) == 20


def test_snapshots_of_the_journal_have_the_producers_of_the_topics_there_are(data: str) -> None:
    settings = BrokerSettings(journal_bytes=1)
    for name in ("orders", "others"):
        bench = Workbench(data, settings=settings)
        bench.publish(name, [b"a"], producer=Producer(ANNA, 0, 0))
        bench.close()
    bench = Workbench(data, settings=settings)
    assert bench.publish("others", [b"a"], producer=Producer(ANNA, 0, 0)).duplicate
    assert publish(bench, ANNA, 0).duplicate


# What a partition knows.


def test_the_producer_that_was_silent_for_longest_is_forgotten_first() -> None:
    with patch.object(producers, "PRODUCERS_MAX", 2):
        known = Producers()
        for offset, (by, sequence) in enumerate(((ANNA, 0), (BERT, 0), (ANNA, 1), (3000, 0))):
            known.note(Producer(by, 0, sequence), offset)
        assert len(known) == 2
        assert known.admit(Producer(ANNA, 0, 1)) == 2
        with pytest.raises(UnknownProducer):
            known.admit(Producer(BERT, 0, 1))


def test_what_was_saved_is_taken_up_as_far_as_the_log_goes() -> None:
    known = Producers()
    for sequence in range(4):
        known.note(Producer(ANNA, 7, sequence), sequence * 10)
    known.note(Producer(BERT, 0, 0), 35)
    again = Producers()
    assert again.load(known.save(40), 25) == 40
    assert again.admit(Producer(ANNA, 7, 2)) == 20
    assert again.admit(Producer(ANNA, 7, 3)) is None
    assert again.admit(Producer(BERT, 0, 0)) is None


@given(
    before=st.integers(0, 2 * IN_FLIGHT_MAX),
    steps=st.lists(st.tuples(st.sampled_from([ANNA, BERT]), st.booleans()), max_size=2 * IN_FLIGHT_MAX),
)
def test_notes_can_be_taken_back(before: int, steps: list[tuple[int, bool]]) -> None:
    """Whoever wrote them, in whichever epoch, and however many places they made the producer forget."""
    known = Producers()
    for sequence in range(before):
        known.note(Producer(ANNA, 0, sequence), sequence)
    saved = known.save(before)
    following = {ANNA: Producer(ANNA, 0, before), BERT: Producer(BERT, 0, 0)}
    notes = []
    for offset, (by, renewed) in enumerate(steps, before):
        producer = Producer(by, following[by].epoch + 1, 0) if renewed else following[by]
        assert known.admit(producer) is None
        notes.append(known.note(producer, offset))
        following[by] = Producer(by, producer.epoch, producer.sequence + 1)
    known.take_back(notes)
    assert known.save(before) == saved


@pytest.mark.parametrize("mark", [1, 2**32 - 1, 2**32, 2**63 + 5])
def test_a_mark_fits_into_a_producer(mark: int) -> None:
    assert mark_of(marked(mark)) == mark
