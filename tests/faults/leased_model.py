"""A broker on a disk that fails, what was asked of its leased subscriptions, and what must be true because of it."""

import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from typing import Any
from unittest.mock import patch

from hypothesis.stateful import RuleBasedStateMachine
from tests.faults.broker_model import MEMORY, SMALL
from tests.faults.leased_sight import DEAD, TOPIC, Seen, differs, look
from tests.faults.leased_world import Entry, Id, Message, World

from headrace.broker import lease_expiry, leasing, reservation
from headrace.broker.pending_answer import PendingAnswer
from headrace.broker.ports import Session
from headrace.broker.settings import BrokerSettings
from headrace.engines import partition, store
from headrace.engines.leased import runs, statuses
from headrace.model.errors import HeadraceError, LogFailed
from headrace.model.leasing import SUBSCRIPTION_HEADER, SubscriptionAlter, SubscriptionList
from headrace.model.request import Request
from headrace.model.requests import TopicCreate, TopicDescribe
from headrace.model.subscription import subscription_settings
from headrace.model.topic import TopicSettings
from headrace.testing import FaultyDisk, PowerLoss, Unsynced
from headrace.testing.workbench import START_US, Workbench

BITS = 2
KINDS: dict[str, dict[str, Any]] = {
    "synced": {},
    "written": {"durability": "written"},
    "memory": {"storage": "memory"},
}
Key = tuple[Any, ...]
"""Of what a power loss may take back: a subscription's entry or its settings, or a message."""


class LeaseBooks(RuleBasedStateMachine):
    """A broker, and the world as those see it who ask; `worlds` are all since the broker began, the last one is now."""

    def set_up(self, seed: int, journal_bytes: int, partitions: int, kind: str = "synced") -> None:
        """Start with a broker that has nothing but an empty topic."""
        self.root = tempfile.mkdtemp(dir=MEMORY if MEMORY.exists() else None)
        self.small = ExitStack()
        # Everything that happens with many messages happens with few here.
        for module, name, value in (
            (partition, "_CHECKPOINT_WORK", 3),
            (store, "_JOURNAL_SETTINGS", SMALL),
            (store, "_STAGING_SETTINGS", SMALL),
            (statuses, "_BITS", BITS),
            (statuses, "_CHUNK", 1 << BITS),
            (statuses, "_MASK", (1 << BITS) - 1),
            (statuses, "_TABLES", [bytes([status]) * (1 << BITS) for status in range(8)]),
            (runs, "_LOOSE_MAX", 3),
            (runs, "_SMALL", 4),
            (runs, "_SMALL_RUNS_MAX", 2),
            (lease_expiry, "_ENDED_TOGETHER", 2),
            (lease_expiry, "_OVER_TOGETHER", 2),
            (leasing, "_GRANTED_TOGETHER", 1),
            (reservation, "BLOCK_MIN", 4),
            (reservation, "BLOCK_MAX", 16),
        ):
            self.small.enter_context(patch.object(module, name, value))
        self.disk = FaultyDisk(seed)
        self.settings = BrokerSettings(
            journal_bytes=journal_bytes, maintenance_seconds=1.0, topic=TopicSettings(segment_bytes=4096)
        )
        self.slow = False
        self.behind_us = 0
        """How far the clock has gone back, for a moment."""
        self.counter = 0
        self.partitions = partitions
        self.kind = kind
        self.named: dict[Id, bytes] = {}
        """What every offset ever stood for."""
        self.lost: set[Id] = set()
        self.world = World()
        self.worlds = [self.world]
        self.answered: dict[Key, int] = {}
        self.sure: dict[Key, int] = {}
        self.waiting: list[tuple[PendingAnswer[Any], Callable[[Any], None]]] = []
        self.publishing: list[list[Message]] = []
        self.tokens: list[tuple[str, Id, int]] = []
        self.granted: set[int] = set()
        self.in_flight: set[tuple[str, Id]] = set()
        self.leasing: dict[Id, list[Entry]] = {}
        self.redriving: set[Id] = set()
        self.asked_of = ""
        self.bench = self.started(START_US)
        self.bench.ask(TopicCreate(TOPIC, {"partitions": partitions, "segment_bytes": 4096, **KINDS[kind]}))

    def teardown(self) -> None:
        if hasattr(self, "root"):
            self.small.close()
            shutil.rmtree(self.root)

    def started(self, now_us: int) -> Workbench:
        bench = Workbench(f"{self.root}/data", disk=self.disk, settings=self.settings, now_us=now_us)
        bench.syncing_later = self.slow
        self.sessions: dict[str, Session] = {name: bench.connect(name) for name in ("ann", "bob")}
        return bench

    @property
    def now_us(self) -> int:
        return self.bench.now_us

    # What is asked, and what becomes of it.

    def ask(self, request: Request[Any], told: Callable[[Any], None], body: bytes = b"", holder: str = "ann") -> None:
        """Ask, and note who is to be told; an error is no answer here."""

        def tell(answer: Any) -> None:
            if isinstance(answer, HeadraceError):
                assert isinstance(answer, LogFailed), repr(answer)
                assert self.disk.crashed, repr(answer)
            else:
                told(answer)

        def begin() -> Any:
            answer = self.bench.begin(request, body, self.sessions[holder])
            if isinstance(answer, PendingAnswer):
                self.waiting.append((answer, tell))
                return None
            return answer

        answer = self.attempt(begin)
        if answer is not None:
            tell(answer)
        if not self.slow:
            self.run()

    def answer(self, request: Request[Any], body: bytes = b"", holder: str = "ann") -> Any:
        """The answer or the error; None if the power went off."""
        self.run()

        def ask() -> Any:
            answer = self.bench.begin(request, body, self.sessions[holder])
            self.bench.run()
            return answer.outcome if isinstance(answer, PendingAnswer) else answer

        return self.attempt(ask)

    def run(self) -> None:
        """Let the broker do all that it has to; then everyone has an answer."""
        bench, waiting = self.bench, self.waiting
        self.attempt(bench.run)
        if bench is not self.bench:
            return
        self.waiting = []
        self.in_flight.clear()
        for later, told in waiting:
            assert later.outcome is not None, "there was never an answer"
            told(later.outcome)
        if self.disk.crashed:
            self.lost_power()

    def attempt(self, action: Callable[[], Any]) -> Any:
        """Do it; if the power goes off on the way, start again and return None."""
        try:
            answer = action()
        except (PowerLoss, LogFailed):
            assert self.disk.crashed
            self.lost_power()
            return None
        if self.disk.crashed:
            self.lost_power()
            return None
        return answer

    def await_answers(self, ids: list[Id]) -> None:
        """What two people say of a message at the same moment is another story: see test_leased_races.py."""
        if any(at in ids for _, at in self.in_flight):
            self.run()

    def changed(self) -> World:
        """The world, to be changed: what it was may come back after a power loss."""
        self.world = self.world.copy()
        self.worlds.append(self.world)
        return self.world

    def count(self, keys: list[Key], *, synced: bool) -> Callable[[], None]:
        """Call what is returned when what was changed is answered: then it counts from now on."""
        index = len(self.worlds) - 1
        worlds = self.worlds

        def counts() -> None:
            if worlds is self.worlds:
                for key in keys:
                    self.answered[key] = max(index, self.answered.get(key, 0))
                    if synced:
                        self.sure[key] = max(index, self.sure.get(key, 0))

        return counts

    def values(self, count: int, size: int) -> list[bytes]:
        """Values that nobody else has."""
        self.counter += 1
        return [b"%d.%d." % (self.counter, at) + b"." * size for at in range(count)]

    def published(self, messages: list[Message], base_offset: int) -> None:
        """The messages have their place."""
        if messages in self.publishing:
            self.publishing.remove(messages)
            world = self.changed()
            for at, message in enumerate(messages):
                self.name((message.id[0], base_offset + at), message.value)
                world.add(replace(message, id=(message.id[0], base_offset + at)))
                for name in world.subscriptions:
                    self.sure["entry", name, (message.id[0], base_offset + at)] = len(self.worlds) - 1
                    self.answered["entry", name, (message.id[0], base_offset + at)] = len(self.worlds) - 1

    def name(self, at: Id, value: bytes) -> None:
        """An offset was seen: it stands for this message for ever."""
        assert self.named.setdefault(at, value) == value, f"{at} was {self.named[at]!r} before, and is {value!r} now"

    # After the end of a broker.

    def lost_power(self) -> None:
        self.disk.power_loss(Unsynced.RANDOM)
        self.recover(power_lost=True)

    def recover(self, *, power_lost: bool) -> None:
        """Start the broker again, and find out what became of all that was asked and not answered."""
        for later, told in self.waiting:
            if later.outcome is not None and not isinstance(later.outcome, HeadraceError):
                told(later.outcome)
        self.waiting = []
        self.in_flight.clear()
        self.disk.crash_after(10**9)
        self.slow = False
        self.bench = self.started(self.now_us + self.behind_us + 1)
        self.behind_us = 0
        self.bench.tick()
        self.bench.tick()
        since = self.sure if power_lost else self.answered
        worlds = [world.copy() for world in self.worlds]
        self.find_lost(worlds, power_lost=power_lost)
        for world in worlds:
            world.pass_time(self.now_us)
        self.world = worlds[-1]
        self.find_published()
        self.find_subscriptions(worlds, since)
        for name in self.world.subscriptions:
            self.find_entries(name, worlds, since)
        self.worlds = [self.world]
        self.answered, self.sure, self.publishing = {}, {}, []
        self.leasing, self.redriving, self.asked_of = {}, set(), ""
        self.compare()

    def log(self, topic: str, number: int) -> Iterator[Message]:
        """All messages in a partition's log."""
        first = self.bench.ask(TopicDescribe(topic)).partitions[number].first_offset
        for batch in self.bench.batches(topic, number, first):
            for one in batch.messages():
                headers = dict(one.headers or {})
                only = headers.get(SUBSCRIPTION_HEADER, b"").decode()
                yield Message(
                    (number, one.offset), one.timestamp, one.value or b"", one.key, headers, one.due, one.priority,
                    one.expires, only=only,
                )  # fmt: skip

    def find_lost(self, worlds: list[World], *, power_lost: bool) -> None:
        """What may have been lost and is not there is as good as deleted, in all that may have been."""
        there = {message.id for number in range(self.partitions) for message in self.log(TOPIC, number)}
        gone = {at for world in worlds for at in world.messages if at not in there}
        assert gone <= self.lost or self.kind == "memory" or (self.kind == "written" and power_lost), f"{gone} are lost"
        self.lost |= gone
        for world in worlds:
            for at in gone & world.messages.keys():
                world.messages[at] = replace(world.messages[at], deleted=True, version=1)
                for one in world.subscriptions.values():
                    if at in one.entries and one.entries[at].fate == "pending":
                        one.entries[at].fate = "done"

    def find_published(self) -> None:
        """What was published and not answered is there or not; what was answered is."""
        expected = {message.value: message for messages in self.publishing for message in messages}
        for number in range(self.partitions):
            there = {message.id: message for message in self.log(TOPIC, number)}
            for at, message in there.items():
                self.name(at, message.value)
                if at not in self.world.messages:
                    assert message.value in expected or message.only, f"{message} came from nowhere"
                    self.world.add(message)

    def find_subscriptions(self, worlds: list[World], since: dict[Key, int]) -> None:
        infos = {info.subscription: info for info in self.bench.ask(SubscriptionList(TOPIC)).subscriptions}
        names = {name for world in worlds for name in world.subscriptions}
        assert set(infos) <= names
        for name in names:
            possible = [world.subscriptions.get(name) for world in worlds[since.get(("settings", name), 0) :]]
            if name not in infos:
                assert None in possible, f"the subscription {name} is lost"
                self.world.subscriptions.pop(name, None)
                continue
            settings = subscription_settings(infos[name].settings)
            found = [one for one in possible if one is not None and one.settings == settings]
            assert found, f"{name} has settings that nobody asked for: {settings}"
            mine = self.world.subscriptions.setdefault(name, found[-1])
            mine.settings = settings
            if settings.retry_jitter:
                self.bench.ask(SubscriptionAlter(TOPIC, {"retry_jitter": 0}, name))
                mine.settings = subscription_settings({"retry_jitter": 0}, settings)

    def find_entries(self, name: str, worlds: list[World], since: dict[Key, int]) -> None:
        """Each message is as it was at some time since it was last answered for."""
        seen = look(self.bench, name)
        mine = self.world.subscriptions[name]
        for at in self.world.messages:
            entry_since, message_since = since.get(("entry", name, at), 0), since.get(("message", at), 0)
            possible: list[tuple[Entry | None, Message]] = []
            for world in worlds[min(entry_since, message_since) :]:
                one = world.subscriptions.get(name)
                entry = one.entries.get(at) if one is not None else mine.entries.get(at)
                possible.append((entry, world.messages.get(at, self.world.messages[at])))
            if name == self.asked_of:
                possible += [(entry, self.world.messages[at]) for entry in self.leasing.get(at, ())]
            if name == self.asked_of and at in self.redriving:
                possible.append((Entry("redriven"), self.world.messages[at]))
            fitting = [
                (entry, message)
                for entry, message in possible
                if differs(mine, at, entry, message, seen, self.now_us) is None
            ]
            why = differs(mine, at, *possible[-1], seen, self.now_us)
            found = seen.pending.get(at, (None,))[0], seen.dead.get(at, (None,))[0]
            assert fitting, f"{name} {at}: {why}; found {found}; possible: {possible}"
            entry, message = fitting[-1]
            if entry is None:
                mine.entries.pop(at, None)
            else:
                others = {(one.token, one.state) for one, _ in fitting if one is not None}
                mine.entries[at] = replace(entry, doubtful=entry.doubtful or len(others) > 1)
            if at in seen.pending:
                self.world.messages[at] = message

    # What must always be true.

    def compare(self) -> None:
        """What the broker says of every message is what it must be."""
        for name in list(self.world.subscriptions):
            seen = look(self.bench, name)
            one = self.world.subscriptions[name]
            self.adopt_stale(name, seen)
            for at in self.world.messages:
                entry = one.entries.get(at)
                why = differs(one, at, entry, self.world.messages[at], seen, self.now_us)
                assert why is None, f"{name} {at}: {why}; {entry}, {self.world.messages[at]}"
            unknown = set(seen.pending) - set(one.entries)
            assert not unknown, f"{name} has {unknown}, which nobody published"
        self.check_dead()

    def adopt_stale(self, name: str, seen: Seen) -> None:
        """Messages that expired may be gone by now."""
        for at, entry in self.world.pending(name):
            if self.world.stale(at, self.now_us) and at not in seen.pending and not entry.leased(self.now_us):
                entry.fate = "dead" if at in seen.dead else "done"

    def check_dead(self) -> None:
        """Each dead message is in the dead letter topic, once, with its origin."""
        found: dict[tuple[str, Id], Message] = {}
        for number in range(self.dead_partitions()):
            for message in self.log(DEAD, number):
                headers = message.headers
                origin = int(headers["headrace-dead-partition"]), int(headers["headrace-dead-offset"])
                name = headers["headrace-dead-subscription"].decode()
                assert headers["headrace-dead-topic"] == TOPIC.encode()
                found[name, origin] = message
        for name, one in self.world.subscriptions.items():
            for at, entry in one.entries.items():
                if entry.fate == "dead":
                    assert (name, at) in found, f"{name} {at} is lost: it is dead, but not among the dead letters"
                    headers = found[name, at].headers
                    assert int(headers["headrace-dead-deliveries"]) == entry.deliveries

    def dead_partitions(self) -> int:
        info = self.bench.begin(TopicDescribe(DEAD))
        return 0 if isinstance(info, HeadraceError) else len(info.partitions)
