"""Messages of a key come in the order that docs/reference/subscriptions.md defines, whatever is done to them."""

import os
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import note, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from tests.faults.key_order_model import Message, Model
from tests.faults.leased_queue import SECOND_US, Queue, parts

from headrace.broker.pending_answer import PendingAnswer
from headrace.engines.leased.pending import PendingMessages
from headrace.model.batch import Columns, encode
from headrace.model.leasing import (
    Ack,
    Edit,
    Extend,
    Holding,
    Lease,
    Leased,
    MessageChange,
    MessageId,
    Reject,
    Release,
    SubscriptionAlter,
)
from headrace.model.requests import Publish
from headrace.model.subscription import Discipline

MEMORY = Path("/dev/shm")
ANY = st.integers(0, 30)
TIMES = st.sampled_from([-3.0, 0.0, 0.7, 2.5])
MESSAGE = st.fixed_dictionaries(
    {"key": st.sampled_from([b"red", b"red", b"red", b"blue", None])},
    optional={
        "due": TIMES,
        "priority": st.integers(-2, 2),
        "expires": st.sampled_from([1.2, 4.0]),
    },
)
HOW_BACK: Any = st.sampled_from(
    [{"delay_ms": 0}, {"delay_ms": 1500}, {}, {"undelivered": True}, {"undelivered": True, "delay_ms": 1500}]
)


class OrderOfAKey(RuleBasedStateMachine):
    """A subscription against the model; somebody may be waiting for the next message all the time."""

    @initialize(
        discipline=st.sampled_from(list(Discipline)),
        journal_bytes=st.sampled_from([300, 1 << 20]),
    )
    def start(self, discipline: Discipline, journal_bytes: int) -> None:
        self.directory = TemporaryDirectory(dir=MEMORY if MEMORY.exists() else None)
        given = {"ordered_by_key": True, "retry": "fixed", "retry_seconds": 2, "deliveries_max": 0, "lease_seconds": 5}
        self.queue = Queue(Path(self.directory.name), journal_bytes=journal_bytes, discipline=discipline.value, **given)
        self.model = Model(discipline.value)
        self.count = 0
        self.waiter: PendingAnswer[Any] | None = None

    def teardown(self) -> None:
        if hasattr(self, "directory"):
            self.directory.cleanup()

    @property
    def now_us(self) -> int:
        return self.queue.bench.now_us

    def in_seconds(self, seconds: float) -> int:
        """No two messages are due at the same time: among equals no order is defined."""
        self.queue.bench.now_us += 1
        return self.now_us + round(seconds * SECOND_US)

    def check_waiter(self) -> None:
        """Whoever waits has what is next as soon as there is something."""
        if self.waiter is None:
            return
        expected = self.model.lease(1, self.now_us, 0)
        if expected:
            assert self.waiter.outcome is not None, f"{expected} was not handed out to who waits"
            self.handed_out(self.waiter.outcome, expected)
            self.waiter = None
        else:
            assert self.waiter.outcome is None, f"{self.waiter.outcome} were handed out"

    def handed_out(self, answer: Any, expected: list[int]) -> None:
        words, _ = parts(answer)
        assert isinstance(words, Leased), words
        found = [(portion, offset) for portion in words.portions for offset in portion.all_offsets]
        assert [offset for _, offset in found] == expected, f"instead of {expected}"
        for portion, offset in found:
            [message] = [one for one in self.model.messages if one.offset == offset]
            message.holding = Holding(0, portion.lease, [offset])
            assert portion.until_us >= message.until_us
            message.until_us = portion.until_us
        note(f"handed out: {expected}")

    # Publishing and leasing.

    @rule(about=st.lists(MESSAGE, min_size=1, max_size=4))
    def publish(self, about: list[dict[str, Any]]) -> None:
        made = []
        for one in about:
            due_us = self.in_seconds(one["due"]) if "due" in one else None
            expires_us = self.in_seconds(one["expires"]) if "expires" in one else None
            made.append((one["key"], due_us, one.get("priority"), expires_us))
        self.queue.bench.now_us += 1
        times = [self.now_us + at for at in range(len(made))]
        self.queue.bench.now_us = times[-1]
        keys, dues, priorities, expires = (list(column) for column in zip(*made, strict=True))
        columns = Columns([b"x"] * len(made), keys, times, None, dues, priorities, expires)
        self.queue.bench.ask(Publish("jobs", 0), encode(columns, self.now_us).data)
        for (key, due_us, priority, expires_us), time_us in zip(made, times, strict=True):
            due = time_us if due_us is None else due_us
            self.model.messages.append(Message(self.count, key, time_us, due, priority or 0, expires_us))
            self.count += 1
        self.check_waiter()

    @precondition(lambda self: self.waiter is None)
    @rule(most=st.integers(1, 4), ahead_ms=st.sampled_from([0, 0, 1000]))
    def lease(self, most: int, ahead_ms: int) -> None:
        answer = self.queue.bench.ask(Lease("jobs", messages_max=most, ahead_ms=ahead_ms))
        self.model.pass_time(self.now_us)
        self.handed_out(answer, self.model.lease(most, self.now_us, ahead_ms * 1000))

    @precondition(lambda self: self.waiter is None)
    @rule()
    def wait(self) -> None:
        answer = self.queue.bench.begin(Lease("jobs", messages_max=1, wait_ms=600_000))
        assert isinstance(answer, PendingAnswer)
        self.queue.bench.run()
        self.waiter = answer
        self.model.pass_time(self.now_us)
        self.check_waiter()

    # What becomes of messages.

    def held(self, pick: int) -> Message | None:
        held = [one for one in self.model.messages if one.until_us > self.now_us]
        return held[pick % len(held)] if held else None

    def settle(self, request: Any) -> None:
        assert self.queue.bench.ask(request).refused == []
        self.model.pass_time(self.now_us)
        self.check_waiter()

    @rule(pick=ANY, kind=st.sampled_from([Ack, Ack, Ack, Reject]))
    def finish(self, pick: int, kind: Any) -> None:
        message = self.held(pick)
        if message is not None:
            self.model.messages.remove(message)
            self.settle(kind("jobs", [message.holding]))

    @rule(pick=ANY, how=HOW_BACK)
    def release(self, pick: int, how: dict[str, Any]) -> None:
        message = self.held(pick)
        if message is not None:
            request = Release("jobs", [message.holding], **how)
            delay_us = how.get("delay_ms", 0 if "undelivered" in how else 2000) * 1000
            self.model.come_back(message, counted="undelivered" not in how, rests_us=self.now_us + delay_us)
            self.settle(request)

    @rule(pick=ANY)
    def extend(self, pick: int) -> None:
        message = self.held(pick)
        if message is not None:
            message.until_us = self.now_us + 9_000_000
            self.settle(Extend("jobs", [message.holding], 9000))

    @rule(
        pick=ANY, what=st.sampled_from(["cancel", "move", "move", "priority"]), when=TIMES, priority=st.integers(-2, 2)
    )
    def edit(self, pick: int, what: str, when: float, priority: int) -> None:
        self.queue.bench.tick()
        self.model.pass_time(self.now_us)
        self.check_waiter()
        free = [one for one in self.model.messages if not one.until_us]
        if not free:
            return
        message = free[pick % len(free)]
        if what == "cancel":
            change = MessageChange(delete=True)
            self.model.messages.remove(message)
        elif what == "move":
            message.due_us = self.in_seconds(when)
            message.rests_us = 0
            change = MessageChange(due_us=message.due_us)
        else:
            message.priority = priority
            change = MessageChange(priority=priority)
        answer = self.queue.bench.ask(Edit("jobs", [MessageId(0, message.offset)], change))
        assert answer.outcomes[0].outcome == "applied"
        self.model.pass_time(self.now_us)
        self.check_waiter()

    # Settings, time, and the broker's end.

    @rule(discipline=st.sampled_from(list(Discipline)))
    def change_discipline(self, discipline: Discipline) -> None:
        self.alter(discipline=discipline.value)

    @rule()
    def toggle(self) -> None:
        self.alter(ordered_by_key=not self.model.ordered_by_key)

    def alter(self, **given: Any) -> None:
        self.queue.bench.ask(SubscriptionAlter("jobs", given))
        for name, value in given.items():
            setattr(self.model, name, value)
        self.model.pass_time(self.now_us)
        self.check_waiter()

    @rule(seconds=st.sampled_from([0.0, 0.5, 1.0, 2.0, 6.0]))
    def pass_time(self, seconds: float) -> None:
        self.queue.bench.tick(seconds)
        self.model.pass_time(self.now_us)
        self.check_waiter()

    @rule()
    def restart(self) -> None:
        self.queue.restart()
        self.waiter = None
        self.model.pass_time(self.now_us)


OrderOfAKey.TestCase.settings = settings(
    max_examples=int(os.environ.get("HEADRACE_MODEL_EXAMPLES", "60")), stateful_step_count=40
)
test_order_of_a_key = OrderOfAKey.TestCase


@pytest.mark.parametrize("way", ["cancelled", "moved", "expired", "rejected"])
def test_the_next_one_goes_when_the_one_let_through_does_not_come(tmp_path: Path, way: str) -> None:
    queue = Queue(tmp_path, ordered_by_key=True)
    queue.publish("0", keys=b"red")
    queue.publish("1", keys=b"red", expires=5)
    queue.publish("2", keys=b"red")
    held = queue.lease(3)
    assert list(held) == ["0"]
    queue.settle(Ack, held["0"])
    if way == "rejected":
        queue.settle(Reject, queue.lease()["1"])
    elif way == "expired":
        queue.bench.tick(6)
    else:
        queue.edit(1, **({"delete": True} if way == "cancelled" else {"due_us": queue.in_seconds(60)}))
    assert list(queue.lease(3)) == ["2"]


def test_the_next_one_goes_when_the_first_did_not_fit_and_was_cancelled(tmp_path: Path) -> None:
    queue = Queue(tmp_path, ordered_by_key=True)
    queue.publish("a" * 100, keys=b"blue")
    queue.publish("0" * 100, "1" * 100, keys=b"red")
    assert list(queue.lease(3, bytes_max=150)) == ["a" * 100]
    queue.edit(1, delete=True)
    assert list(queue.lease(3)) == ["1" * 100]


def test_nothing_overtakes_a_message_that_rests(tmp_path: Path) -> None:
    queue = Queue(tmp_path, ordered_by_key=True)
    queue.publish("0", "1", keys=b"red")
    queue.settle(Release, queue.lease()["0"], delay_ms=5000)
    assert list(queue.lease(2)) == []
    queue.restart()
    assert list(queue.lease(2)) == []
    queue.bench.tick(5)
    assert list(queue.lease(2)) == ["0"]


def test_a_discipline_reaches_what_is_blocked(tmp_path: Path) -> None:
    queue = Queue(tmp_path, ordered_by_key=True)
    queue.publish("0", "1", "2", keys=b"red")
    held = queue.lease(3)
    queue.bench.ask(SubscriptionAlter("jobs", {"discipline": "lifo"}))
    queue.settle(Ack, held["0"])
    assert list(queue.lease()) == ["2"]


def test_a_priority_reaches_what_is_blocked(tmp_path: Path) -> None:
    queue = Queue(tmp_path, ordered_by_key=True, discipline="priority")
    queue.publish("0", "1", "2", keys=b"red")
    held = queue.lease(3)
    queue.edit(2, priority=9)
    queue.settle(Ack, held["0"])
    assert list(queue.lease()) == ["2"]


def test_thousands_of_a_busy_key_are_passed_over_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    queue = Queue(tmp_path, ordered_by_key=True)
    total = 5000
    columns = Columns([b"%d" % at for at in range(total)], [b"red"] * (total - 1) + [b"blue"])
    queue.bench.ask(Publish("jobs", 0), encode(columns, queue.bench.now_us).data)
    assert list(queue.lease()) == ["0"]
    looks = []
    take = PendingMessages.take
    monkeypatch.setattr(PendingMessages, "take", lambda *given: looks.append(1) or take(*given))
    assert list(queue.lease()) == [str(total - 1)]
    assert len(looks) < total / 32
    assert queue.info().ready == total - 2
