"""A producer's lane against a partition that does everything a partition may do to it."""

from collections import deque
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from headrace.client.producer.partition_sender import PartitionSender
from headrace.client.producer.pending_batch import OutgoingMessage, PendingBatch
from headrace.model.batch import Batch
from headrace.model.codec import Codec
from headrace.model.errors import (
    Busy,
    ConnectionFailed,
    HeadraceError,
    MessageTooLarge,
    OutOfOrderSequence,
    Timeout,
    UnknownProducer,
)
from headrace.model.limits import IN_FLIGHT_MAX


class Outcome:
    """What became of a parcel."""

    def __init__(self) -> None:
        self.done = False
        self.result: Any = None

    def settle(self, value: Any) -> None:
        self.done, self.result = True, value

    def fail(self, error: HeadraceError) -> None:
        self.done, self.result = True, error

    def wait(self, timeout: float | None = None) -> Any: ...


class Partition:
    """What the broker does: takes batches in sequence, knows repeated ones, refuses the rest."""

    def __init__(self) -> None:
        self.log: list[bytes] = []
        self._epoch = -1
        self._next = 0
        self.forgetful = False

    def take(self, batch: Batch) -> HeadraceError | None:
        value = bytes(batch.columns().values[0] or b"")
        if self.forgetful and batch.producer_epoch <= self._epoch:
            return UnknownProducer()
        self.forgetful = False
        if batch.producer_epoch > self._epoch:
            if batch.sequence:
                return OutOfOrderSequence()
            self._epoch, self._next = batch.producer_epoch, 0
        if batch.sequence < self._next:
            return None  # a repeated one
        if batch.sequence > self._next:
            return OutOfOrderSequence()
        if value.startswith(b"bad"):
            return MessageTooLarge()
        self._next += 1
        self.log.append(value)
        return None


class LaneMachine(RuleBasedStateMachine):
    """Messages go in; what the wire and the broker do is chosen at random; order and count must hold."""

    def __init__(self) -> None:
        super().__init__()
        self.active = PartitionSender("t", 0, 99)
        self.partition = Partition()
        self.wire: deque[PendingBatch] = deque()
        self.pending_batches: list[tuple[bytes, PendingBatch]] = []
        self.count = 0

    def send(self, parcels: list[PendingBatch]) -> None:
        self.wire.extend(parcels)
        assert len(self.active.flying) <= IN_FLIGHT_MAX

    @rule(bad=st.sampled_from([False] * 6 + [True]), many=st.integers(1, 5), at_once=st.booleans())
    def publish(self, bad: bool, many: int, at_once: bool) -> None:
        for _ in range(many):
            value = b"%s%d" % (b"bad" if bad else b"", self.count)
            self.count += 1
            parcel = PendingBatch(Outcome(), deadline=1e9)
            parcel.add(OutgoingMessage("t", value), value, 1000)
            parcel.encode(1, Codec.NONE, self.active.expected_stamp(), None)
            self.pending_batches.append((value, parcel))
            if at_once and self.active.depart(parcel):
                self.send([parcel])
            else:
                self.active.waiting.append(parcel)
        self.send(self.active.launch())

    def answer(self, parcel: PendingBatch, error: HeadraceError | None) -> None:
        if error is None:
            self.active.acknowledged(parcel)
            parcel.outcome.settle("receipt")
        elif self.active.failed(parcel, error):
            parcel.outcome.fail(error)
        if self.active.quiet:
            self.send(self.active.regroup())
        self.send(self.active.launch())

    @precondition(lambda self: self.wire)
    @rule(many=st.integers(1, 10))
    def broker_works(self, many: int) -> None:
        for _ in range(min(many, len(self.wire))):
            parcel = self.wire.popleft()
            assert parcel.batch is not None
            self.answer(parcel, self.partition.take(parcel.batch))

    @precondition(lambda self: self.wire)
    @rule()
    def broker_is_busy(self) -> None:
        self.answer(self.wire.popleft(), Busy())

    @precondition(lambda self: self.wire)
    @rule(taken=st.integers(0, 40))
    def connection_breaks(self, taken: int) -> None:
        lost, self.wire = list(self.wire), deque()
        for parcel in lost[:taken]:
            assert parcel.batch is not None
            self.partition.take(parcel.batch)  # it arrived, and nobody heard of it
        for parcel in lost:
            self.answer(parcel, ConnectionFailed())

    @precondition(lambda self: not self.wire)
    @rule()
    def broker_forgets_the_producer(self) -> None:
        self.partition.forgetful = True

    def deliver_all(self) -> None:
        for _ in range(10_000):
            if not self.wire:
                return
            self.broker_works(10)
        raise AssertionError("it never ends")

    @rule()
    def all_is_delivered(self) -> None:
        self.deliver_all()
        assert self.active.idle
        assert all(parcel.outcome.done for _, parcel in self.pending_batches)

    @invariant()
    def every_message_is_there_once_and_in_order(self) -> None:
        good = [value for value, _ in self.pending_batches if not value.startswith(b"bad")]
        assert self.partition.log == good[: len(self.partition.log)]
        for value, parcel in self.pending_batches:
            if parcel.outcome.done:
                accepted = not isinstance(parcel.outcome.result, HeadraceError)  # type: ignore[attr-defined]
                assert accepted == (not value.startswith(b"bad"))
                assert not accepted or value in self.partition.log

    def teardown(self) -> None:
        self.deliver_all()


LaneMachine.TestCase.settings = settings(stateful_step_count=40)
TestLane = LaneMachine.TestCase


def parcel_with(lane: PartitionSender, deadline: float) -> PendingBatch:
    parcel = PendingBatch(Outcome(), deadline)
    parcel.add(OutgoingMessage("t", b"x"), b"x", 10)
    parcel.encode(1, Codec.NONE, lane.expected_stamp(), None)
    lane.waiting.append(parcel)
    return parcel


def test_what_was_never_sent_is_given_up_in_time() -> None:
    lane = PartitionSender("t", 0, 99)
    early, late = parcel_with(lane, 10), parcel_with(lane, 20)
    assert lane.expired(5) == []
    assert lane.expired(15) == [early]
    assert not early.abandoned
    assert lane.launch() == [late]
    assert late.batch is not None
    assert late.batch.sequence == 0  # the number of the one that was given up


def test_what_may_have_arrived_stays_until_that_is_known() -> None:
    lane = PartitionSender("t", 0, 99)
    parcel = parcel_with(lane, 10)
    lane.launch()
    assert lane.expired(15) == [parcel]
    assert parcel.abandoned
    assert lane.expired(20) == []
    lane.failed(parcel, ConnectionFailed())
    assert lane.regroup() == [parcel]
    lane.acknowledged(parcel)
    assert lane.idle


def test_what_was_refused_for_sure_is_given_up() -> None:
    lane = PartitionSender("t", 0, 99)
    first, second = parcel_with(lane, 10), parcel_with(lane, 99)
    lane.launch()
    lane.failed(first, Busy())
    lane.failed(second, OutOfOrderSequence())
    assert lane.expired(15) == [first]
    assert lane.regroup() == [second]
    assert second.batch is not None
    assert second.batch.sequence == 0


def test_a_broker_that_lost_what_it_acknowledged() -> None:
    lane = PartitionSender("t", 0, 99)
    first = parcel_with(lane, 10)
    lane.launch()
    lane.acknowledged(first)
    second = parcel_with(lane, 10)
    lane.launch()
    lane.failed(second, OutOfOrderSequence())  # nothing of ours is missing: it is the broker's fault
    assert lane.regroup() == [second]
    assert second.batch is not None
    assert (second.batch.producer_epoch, second.batch.sequence) == (1, 0)


def test_a_timeout_is_no_answer() -> None:
    lane = PartitionSender("t", 0, 99)
    parcel = parcel_with(lane, 10)
    lane.launch()
    assert not lane.failed(parcel, Timeout())
    assert parcel.uncertain
    assert lane.hurt
