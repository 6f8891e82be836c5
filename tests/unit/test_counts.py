"""What is told of messages agrees, whoever is asked: statistics, searches, forecasts, and a simple model."""

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from headrace.broker.pending_answer import AnswerWithBody
from headrace.model.batch import Columns, encode
from headrace.model.errors import SubscriptionNotFound
from headrace.model.leasing import (
    Ack,
    Edit,
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
    SubscriptionCreate,
    SubscriptionDelete,
    SubscriptionDescribe,
)
from headrace.model.requests import Publish, TopicCreate, TopicTrim
from headrace.testing.workbench import Workbench

SECOND_US = 1_000_000
LEASE_S = 20
VALUE = b"x" * 700
NAMES = st.sampled_from(["default", "second"])
SOON = st.none() | st.integers(1, 60)
Id = tuple[int, int]


@dataclass
class Message:
    due_us: int | None = None
    expires_us: int | None = None
    version: int = 1
    deleted: bool = False
    only: str = ""


@dataclass
class Entry:
    """How a subscription has a message that it has not settled."""

    rests_us: int = 0
    token: int = 0
    until_us: int = 0


@dataclass
class Model:
    messages: dict[Id, Message] = field(default_factory=dict)
    subscriptions: dict[str, dict[Id, Entry]] = field(default_factory=dict)
    dead: dict[str, int] = field(default_factory=dict)
    """By subscription; it outlives one that is deleted."""

    def pass_time(self, now_us: int) -> None:
        for entries in self.subscriptions.values():
            for at, entry in list(entries.items()):
                if entry.token and entry.until_us <= now_us:
                    entry.token = 0
                expires_us = self.messages[at].expires_us
                if not entry.token and expires_us is not None and expires_us <= now_us:
                    del entries[at]

    def status(self, at: Id, entry: Entry, now_us: int) -> str:
        if entry.token:
            return "leased"
        ready_us = entry.rests_us or self.messages[at].due_us or 0
        return "waiting" if ready_us > now_us else "ready"


class Counts(RuleBasedStateMachine):
    """Everything that may happen to messages of two partitions and two subscriptions."""

    def __init__(self) -> None:
        super().__init__()
        memory = "/dev/shm" if Path("/dev/shm").exists() else None
        self.directory = tempfile.TemporaryDirectory(dir=memory)
        self.bench = self.started()
        self.model = Model()
        self.held: dict[str, list[tuple[Id, int]]] = {}

    def started(self, **more: Any) -> Workbench:
        bench = Workbench(f"{self.directory.name}/data", **more)
        bench.broker._maintenance._compact_us = 1 << 62  # only when a rule says so
        return bench

    @initialize()
    def begin(self) -> None:
        made = {"partitions": 2, "compact_by_key": True, "segment_bytes": 4096}
        self.bench.ask(TopicCreate("jobs", made))
        for name in ("default", "second"):
            self.create(name)

    def teardown(self) -> None:
        self.bench.close()
        self.directory.cleanup()

    @property
    def now_us(self) -> int:
        return self.bench.now_us

    # What happens.

    @rule(
        partition=st.integers(0, 1),
        messages=st.lists(st.tuples(SOON, SOON, st.sampled_from([None, b"a", b"b", b"c"])), min_size=1, max_size=9),
    )
    def publish(self, partition: int, messages: list[tuple[int | None, int | None, bytes | None]]) -> None:
        made = [
            Message(*(None if seconds is None else self.now_us + seconds * SECOND_US for seconds in (due, expires)))
            for due, expires, _ in messages
        ]
        columns = Columns(
            [VALUE] * len(made),
            [key for *_, key in messages],
            dues=[one.due_us for one in made],
            expires=[one.expires_us for one in made],
        )
        answer = self.bench.ask(Publish("jobs", partition), encode(columns, self.now_us).data)
        for place, message in enumerate(made):
            self.add((partition, answer.base_offset + place), message)

    def add(self, at: Id, message: Message) -> None:
        self.model.messages[at] = message
        for name, entries in self.model.subscriptions.items():
            if message.only in ("", name):
                entries[at] = Entry()

    @rule(name=NAMES, count=st.integers(1, 12))
    def lease(self, name: str, count: int) -> None:
        if name not in self.model.subscriptions:
            return
        answer = self.bench.ask(Lease("jobs", name, count, lease_ms=LEASE_S * 1000, create=False))
        if isinstance(answer, AnswerWithBody):
            for portion in answer.answer.portions:
                for offset in portion.all_offsets:
                    at = portion.partition, offset
                    entry = self.model.subscriptions[name][at]
                    assert self.model.status(at, entry, self.now_us) == "ready"
                    entry.token, entry.until_us, entry.rests_us = portion.lease, portion.until_us, 0
                    self.held.setdefault(name, []).append((at, portion.lease))

    def holdings(self, name: str, count: int) -> tuple[list[Id], list[Holding]]:
        """Some of what is still held."""
        entries = self.model.subscriptions.get(name, {})
        held = [(at, token) for at, token in self.held.get(name, []) if at in entries and entries[at].token == token]
        chosen, self.held[name] = held[:count], held[count:]
        return [at for at, _ in chosen], [Holding(at[0], token, [at[1]]) for at, token in chosen]

    @rule(name=NAMES, count=st.integers(1, 5), how=st.sampled_from(["ack", "reject", "release", "rest"]))
    def settle(self, name: str, count: int, how: str) -> None:
        ids, holdings = self.holdings(name, count)
        if not ids:
            return
        entries = self.model.subscriptions[name]
        delay_ms = 15_000 if how == "rest" else 0
        request: Any = {
            "ack": lambda: Ack("jobs", holdings, name),
            "reject": lambda: Reject("jobs", holdings, subscription=name),
        }.get(how, lambda: Release("jobs", holdings, delay_ms, subscription=name))()
        assert self.bench.ask(request).refused == []
        for at in ids:
            if how in ("ack", "reject"):
                del entries[at]
            else:
                entries[at] = Entry(self.now_us + delay_ms * 1000 if delay_ms else 0)
        if how == "reject":
            self.model.dead[name] = self.model.dead.get(name, 0) + len(ids)
        self.model.pass_time(self.now_us)

    @precondition(lambda self: self.model.messages)
    @rule(data=st.data(), change=st.sampled_from(["move", "shift", "delete", "priority"]), seconds=st.integers(-5, 90))
    def edit(self, data: st.DataObject, change: str, seconds: int) -> None:
        at = data.draw(st.sampled_from(sorted(self.model.messages)))
        message, us = self.model.messages[at], seconds * SECOND_US or SECOND_US
        made = {
            "move": MessageChange(due_us=self.now_us + us),
            "shift": MessageChange(shift_us=us),
            "delete": MessageChange(delete=True),
            "priority": MessageChange(priority=seconds),
        }[change]
        entries = [every[at] for every in self.model.subscriptions.values() if at in every]
        (outcome,) = self.bench.ask(Edit("jobs", [MessageId(*at)], made)).outcomes
        if message.deleted:
            assert outcome.outcome == ("applied" if change == "delete" else "message_gone")
        elif self.model.subscriptions and not entries:
            assert outcome.outcome == "message_gone"
        elif any(entry.token for entry in entries):
            assert outcome.outcome == "message_leased"
        else:
            assert (outcome.outcome, outcome.version) == ("applied", message.version + 1), f"{at} {message}"
            message.version += 1
            self.apply(at, message, made, entries)

    def apply(self, at: Id, message: Message, change: MessageChange, entries: list[Entry]) -> None:
        if change.delete:
            message.deleted = True
            for every in self.model.subscriptions.values():
                every.pop(at, None)
        elif change.due_us is not None or change.shift_us:
            rests = [entry.rests_us for entry in entries if entry.rests_us > self.now_us]
            own_us = message.due_us if message.due_us is not None else self.published_us(at)
            message.due_us = change.due_us or max(rests, default=own_us) + change.shift_us
            for entry in entries:
                entry.rests_us = 0

    def published_us(self, at: Id) -> int:
        for batch in self.bench.batches("jobs", at[0], self.active(at[0]).partition.first_offset):
            for message in batch.messages():
                if message.offset == at[1]:
                    return message.timestamp
        raise AssertionError(f"{at} is gone")

    @rule(name=NAMES)
    def create(self, name: str) -> None:
        if name not in self.model.subscriptions:
            self.bench.ask(SubscriptionCreate("jobs", name))
            self.model.subscriptions[name] = {
                at: Entry()
                for at, message in self.model.messages.items()
                if not message.deleted and message.only in ("", name)
            }
            self.model.pass_time(self.now_us)

    @rule(name=NAMES)
    def delete(self, name: str) -> None:
        if self.model.subscriptions.pop(name, None) is not None:
            self.bench.ask(SubscriptionDelete("jobs", name))

    @rule(name=NAMES, most=st.integers(1, 3))
    def redrive(self, name: str, most: int) -> None:
        if name not in self.model.subscriptions:
            return
        ends = [self.bench.broker._topics.active(self.topic, number).end_offset for number in (0, 1)]
        answer = self.bench.ask(Redrive("jobs", name, messages_max=most))
        assert answer.messages == min(most, self.model.dead.get(name, 0))
        self.model.dead[name] = self.model.dead.get(name, 0) - answer.messages
        for number in (0, 1):
            for offset in range(ends[number], self.bench.broker._topics.active(self.topic, number).end_offset):
                self.add((number, offset), Message(only=name))

    @rule(seconds=st.integers(1, 30))
    def wait(self, seconds: int) -> None:
        self.bench.tick(seconds)
        self.model.pass_time(self.now_us)

    @rule()
    def restart(self) -> None:
        self.bench.close()
        self.bench = self.started(now_us=self.now_us)

    @rule(partition=st.integers(0, 1), count=st.integers(1, 10))
    def trim(self, partition: int, count: int) -> None:
        first = self.active(partition).partition.first_offset
        self.bench.ask(TopicTrim("jobs", {partition: first + count}, unread=True))
        self.forget_missing()

    @precondition(
        lambda self: not any(one.token for each in self.model.subscriptions.values() for one in each.values())
    )
    @rule(partition=st.integers(0, 1))
    def compact(self, partition: int) -> None:
        active = self.active(partition)
        self.bench.broker._maintenance._compact(self.topic, active, active.partition.compact_by_key)
        self.bench.run()
        self.forget_missing()

    def forget_missing(self) -> None:
        """The log says what there is."""
        there = {
            (number, message.offset)
            for number in (0, 1)
            for batch in self.bench.batches("jobs", number, self.active(number).partition.first_offset)
            for message in batch.messages()
            if message.offset >= self.active(number).partition.first_offset
        }
        for messages in (self.model.messages, *self.model.subscriptions.values()):
            for at in set(messages).difference(there):
                del messages[at]

    @property
    def topic(self) -> Any:
        return self.bench.broker._topics.get("jobs")

    def active(self, number: int) -> Any:
        return self.bench.broker._topics.active(self.topic, number)

    # What is told.

    def found(self, name: str, status: str) -> Iterator[Any]:
        after = ""
        while True:
            answer = self.bench.ask(Find("jobs", Selection(status), name, 7, after))
            found = answer.answer if isinstance(answer, AnswerWithBody) else answer
            yield from found.messages
            after = found.after
            if not after:
                return

    @invariant()
    def all_agree(self) -> None:
        for name in ("default", "second"):
            if name not in self.model.subscriptions:
                try:
                    self.bench.ask(SubscriptionDescribe("jobs", name))
                    raise AssertionError("it was deleted")
                except SubscriptionNotFound:
                    continue
            self.compare(name, self.model.subscriptions[name])

    def compare(self, name: str, entries: dict[Id, Entry]) -> None:
        expected: dict[str, list[Id]] = {"waiting": [], "ready": [], "leased": []}
        for at, entry in entries.items():
            expected[self.model.status(at, entry, self.now_us)].append(at)
        found = {status: list(self.found(name, status)) for status in (*expected, "dead", "")}
        ids = {status: [(one.partition, one.offset) for one in each] for status, each in found.items()}
        for status, each in expected.items():
            assert sorted(ids[status]) == sorted(each), status
        assert sorted(ids[""]) == sorted(entries)
        assert all(one.version == self.model.messages[one.partition, one.offset].version for one in found[""])
        info = self.bench.ask(SubscriptionDescribe("jobs", name))
        counts = {"waiting": info.waiting, "ready": info.ready, "leased": info.leased, "dead": info.dead}
        dead = self.model.dead.get(name, 0)
        assert counts == {**{status: len(each) for status, each in expected.items()}, "dead": dead}
        assert len(found["dead"]) == dead
        forecast = self.bench.ask(Forecast("jobs", self.now_us, 10 * SECOND_US, 3, name))
        assert forecast.before + sum(forecast.counts) + forecast.after == info.waiting + info.ready
        times = [one.ready_us - self.now_us for one in found["waiting"]]
        assert times == sorted(times)
        begins = [at * 10 * SECOND_US for at in range(3)]
        assert forecast.counts == [sum(begin <= one < begin + 10 * SECOND_US for one in times) for begin in begins]


TestCounts = Counts.TestCase
TestCounts.settings = settings(max_examples=10, stateful_step_count=25, deadline=None)
