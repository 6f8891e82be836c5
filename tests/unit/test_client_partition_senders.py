"""A producer's sender against a partition that does everything a partition may do to it."""

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
    DiskFull,
    HeadraceError,
    MessageTooLarge,
    OutOfOrderSequence,
    Timeout,
    UnknownProducer,
)
from headrace.model.limits import IN_FLIGHT_MAX


class Outcome:
    """What became of a batch."""

    def __init__(self) -> None:
        self.done = False
        self.result: Any = None

    def resolve(self, value: Any) -> None:
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

    def send(self, batches: list[PendingBatch]) -> None:
        self.wire.extend(batches)
        assert len(self.active.in_flight) <= IN_FLIGHT_MAX

    @rule(bad=st.sampled_from([False] * 6 + [True]), many=st.integers(1, 5), at_once=st.booleans())
    def publish(self, bad: bool, many: int, at_once: bool) -> None:
        for _ in range(many):
            value = b"%s%d" % (b"bad" if bad else b"", self.count)
            self.count += 1
            batch = PendingBatch(Outcome(), deadline=1e9)
            batch.add(OutgoingMessage("t", value), value, 1000)
            batch.encode(1, Codec.NONE, self.active.expected_stamp(), None)
            self.pending_batches.append((value, batch))
            if at_once and self.active.admit(batch):
                self.send([batch])
            else:
                self.active.waiting.append(batch)
        self.send(self.active.admit_waiting())

    def answer(self, batch: PendingBatch, error: HeadraceError | None) -> None:
        if error is None:
            self.active.acknowledged(batch)
            batch.outcome.resolve("receipt")
        elif self.active.failed(batch, error):
            batch.outcome.fail(error)
        if self.active.resend_ready:
            self.send(self.active.resend())
        self.send(self.active.admit_waiting())

    @precondition(lambda self: self.wire)
    @rule(many=st.integers(1, 10))
    def broker_works(self, many: int) -> None:
        for _ in range(min(many, len(self.wire))):
            batch = self.wire.popleft()
            assert batch.batch is not None
            self.answer(batch, self.partition.take(batch.batch))

    @precondition(lambda self: self.wire)
    @rule()
    def broker_is_busy(self) -> None:
        self.answer(self.wire.popleft(), Busy())

    @precondition(lambda self: self.wire)
    @rule(taken=st.integers(0, 40))
    def connection_breaks(self, taken: int) -> None:
        lost, self.wire = list(self.wire), deque()
        for batch in lost[:taken]:
            assert batch.batch is not None
            self.partition.take(batch.batch)  # it arrived, and nobody heard of it
        for batch in lost:
            self.answer(batch, ConnectionFailed())

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
        assert all(batch.outcome.done for _, batch in self.pending_batches)

    @invariant()
    def every_message_is_there_once_and_in_order(self) -> None:
        good = [value for value, _ in self.pending_batches if not value.startswith(b"bad")]
        assert self.partition.log == good[: len(self.partition.log)]
        for value, batch in self.pending_batches:
            if batch.outcome.done:
                accepted = not isinstance(batch.outcome.result, HeadraceError)  # type: ignore[attr-defined]
                assert accepted == (not value.startswith(b"bad"))
                assert not accepted or value in self.partition.log

    def teardown(self) -> None:
        self.deliver_all()


LaneMachine.TestCase.settings = settings(stateful_step_count=40)
TestLane = LaneMachine.TestCase


def batch_with(sender: PartitionSender, deadline: float) -> PendingBatch:
    batch = PendingBatch(Outcome(), deadline)
    batch.add(OutgoingMessage("t", b"x"), b"x", 10)
    batch.encode(1, Codec.NONE, sender.expected_stamp(), None)
    sender.waiting.append(batch)
    return batch


def test_what_was_never_sent_is_given_up_in_time() -> None:
    sender = PartitionSender("t", 0, 99)
    early, late = batch_with(sender, 10), batch_with(sender, 20)
    assert sender.expire(5) == []
    assert sender.expire(15) == [early]
    assert not early.abandoned
    assert sender.admit_waiting() == [late]
    assert late.batch is not None
    assert late.batch.sequence == 0  # the number of the one that was given up


def test_what_may_have_arrived_stays_until_that_is_known() -> None:
    sender = PartitionSender("t", 0, 99)
    batch = batch_with(sender, 10)
    sender.admit_waiting()
    assert sender.expire(15) == [batch]
    assert batch.abandoned
    assert sender.expire(20) == []
    sender.failed(batch, ConnectionFailed())
    assert sender.resend() == [batch]
    sender.acknowledged(batch)
    assert sender.idle


def test_what_was_refused_for_sure_is_given_up() -> None:
    sender = PartitionSender("t", 0, 99)
    first, second = batch_with(sender, 10), batch_with(sender, 99)
    sender.admit_waiting()
    sender.failed(first, Busy())
    sender.failed(second, OutOfOrderSequence())
    assert sender.expire(15) == [first]
    assert sender.resend() == [second]
    assert second.batch is not None
    assert second.batch.sequence == 0


def test_a_broker_that_lost_what_it_acknowledged() -> None:
    sender = PartitionSender("t", 0, 99)
    first = batch_with(sender, 10)
    sender.admit_waiting()
    sender.acknowledged(first)
    second = batch_with(sender, 10)
    sender.admit_waiting()
    sender.failed(second, OutOfOrderSequence())  # nothing of ours is missing: it is the broker's fault
    assert sender.resend() == [second]
    assert second.batch is not None
    assert (second.batch.producer_epoch, second.batch.sequence) == (1, 0)


def test_a_timeout_is_no_answer() -> None:
    sender = PartitionSender("t", 0, 99)
    batch = batch_with(sender, 10)
    sender.admit_waiting()
    assert not sender.failed(batch, Timeout())
    assert batch.uncertain
    assert sender.backs_off


def test_a_batch_that_is_sent_again_remembers_why() -> None:
    sender = PartitionSender("t", 0, 99)
    batch = batch_with(sender, 10)
    sender.admit_waiting()
    full = DiskFull("no space left")
    sender.failed(batch, full)
    sender.resend()
    assert sender.expire(15) == [batch]
    assert batch.abandoned
    assert (batch.last_error, batch.previous_error) == (None, full)
