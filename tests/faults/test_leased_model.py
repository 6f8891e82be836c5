"""Leased subscriptions on a disk that fails, against plain dictionaries: what is handed out is exactly what is next."""

import os
from typing import Any

import msgspec
import pytest
from hypothesis import note, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule
from tests.faults.leased_choices import (
    ANY,
    CHANGES,
    HOLDERS,
    MESSAGE,
    OWNERS,
    SECOND_US,
    SELECTIONS,
    SETTINGS,
    SUBSCRIPTIONS,
    Choices,
)
from tests.faults.leased_sight import TOPIC, find
from tests.faults.leased_world import Entry, Id

from headrace.engines.leased import contents, leases
from headrace.model.batch import Columns, encode
from headrace.model.errors import GroupNotFound, LogFailed, SubscriptionExists, SubscriptionNotFound
from headrace.model.leasing import (
    Ack,
    EditMatching,
    Extend,
    Forecast,
    Lease,
    MessageId,
    Redrive,
    Reject,
    Release,
    Selection,
    SubscriptionAlter,
    SubscriptionCreate,
    SubscriptionDelete,
    SubscriptionDescribe,
)
from headrace.model.requests import Commit, GroupDescribe, PartitionOffset, Publish
from headrace.model.subscription import subscription_settings
from headrace.testing import PowerLoss, Unsynced
from headrace.testing.workbench import Workbench


@pytest.fixture(autouse=True)
def _small_is_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is done for many messages at once is done for two."""
    monkeypatch.setattr(contents, "STORED_MIN", 2)
    monkeypatch.setattr(leases, "WHOLE_MIN", 2)


class LeasedOnAFaultyDisk(Choices):
    """Two holders, two subscriptions, one topic; whatever was asked and not answered may have happened or not."""

    # Subscriptions.

    @initialize(
        seed=st.integers(0, 2**32),
        journal_bytes=st.sampled_from([300, 2000, 1 << 20]),
        slow=st.booleans(),
        partitions=st.sampled_from([1, 1, 2]),
        given=SETTINGS,
        about=st.lists(MESSAGE, min_size=2, max_size=6),
    )
    def begin(
        self,
        seed: int,
        journal_bytes: int,
        slow: bool,
        partitions: int,
        given: dict[str, Any],
        about: list[dict[str, Any]],
    ) -> None:
        self.set_up(seed, journal_bytes, partitions)
        self.subscribe("default", {**given, "paused": False}, earliest=True)
        self.publish(0, about, large=False)
        self.slow = self.bench.syncing_later = slow

    @precondition(lambda self: len(self.world.subscriptions) < 2)
    @rule(name=SUBSCRIPTIONS, given=SETTINGS, earliest=st.booleans())
    def subscribe(self, name: str, given: dict[str, Any], earliest: bool) -> None:
        self.run()
        given = {**given, "retry_jitter": 0}
        exists, earliest = name in self.world.subscriptions, earliest and self.remembered()
        request = SubscriptionCreate(TOPIC, name, given, "earliest" if earliest else "latest")
        if exists:
            answer = self.answer(request)
            assert answer is None or isinstance(answer, SubscriptionExists)
            return
        self.changed().subscribe(name, subscription_settings(given), earliest=earliest)
        keys = [("settings", name), *(("entry", name, at) for at in self.world.messages)]
        counts = self.count(keys, synced=True)
        self.ask(request, lambda _: counts())
        self.run()

    @rule(name=SUBSCRIPTIONS, given=SETTINGS)
    def alter(self, name: str, given: dict[str, Any]) -> None:
        if name not in self.world.subscriptions:
            return
        most = given.get("deliveries_max")
        tried = [entry.deliveries for _, entry in self.world.pending(name) if not entry.leased(self.now_us)]
        if most and max(tried, default=0) >= most:
            del given["deliveries_max"]  # nothing says when those die that were tried so often before
        mine = self.changed().subscriptions[name]
        mine.settings = subscription_settings(given, mine.settings)
        counts = self.count([("settings", name)], synced=True)
        self.ask(SubscriptionAlter(TOPIC, given, name), lambda _: counts())

    @precondition(lambda self: len(self.world.subscriptions) == 2 and len(self.world.messages) > 5)
    @rule(name=SUBSCRIPTIONS)
    def forget(self, name: str) -> None:
        self.run()
        if name not in self.world.subscriptions:
            answer = self.answer(SubscriptionDelete(TOPIC, name))
            assert answer is None or isinstance(answer, SubscriptionNotFound)
            return
        if any(self.is_dead_or_dying(at, entry) for at, entry in self.world.subscriptions[name].entries.items()):
            return  # they would be there again with a new one of the same name
        del self.changed().subscriptions[name]
        counts = self.count([("settings", name)], synced=True)
        self.ask(SubscriptionDelete(TOPIC, name), lambda _: counts())
        self.run()

    def is_dead_or_dying(self, at: Id, entry: Entry) -> bool:
        """Whether a message is among the dead letters, or may be on its way there because its time is over."""
        expires_us = self.world.messages[at].expires_us
        return entry.fate == "dead" or (
            entry.fate == "pending" and expires_us is not None and expires_us <= self.now_us
        )

    # Messages.

    @rule(number=ANY, about=st.lists(MESSAGE, min_size=1, max_size=4), large=st.booleans())
    def publish(self, number: int, about: list[dict[str, Any]], large: bool) -> None:
        number %= self.partitions
        messages = [
            self.message(number, value, one)
            for value, one in zip(self.values(len(about), 400 if large else 4), about, strict=True)
        ]
        self.publishing.append(messages)
        columns = Columns(
            [one.value for one in messages],
            keys=[one.key for one in messages],
            headers=[one.headers or None for one in messages],
            dues=[one.due_us for one in messages],
            priorities=[one.priority for one in messages],
            expires=[one.expires_us for one in messages],
        )
        body = bytes(encode(columns, self.now_us).data)
        self.ask(Publish(TOPIC, number), lambda answer: self.published(messages, answer.base_offset), body)

    def have_some(self, name: str) -> None:
        """There is something to lease."""
        self.run()
        if name in self.world.subscriptions and not self.world.eligible(name, self.now_us, 0):
            self.publish(self.counter, [{}, {"priority": 1}, {"key": b"red"}], large=False)
            self.run()

    # Leases.

    @rule(
        name=SUBSCRIPTIONS,
        holder=HOLDERS,
        most=st.sampled_from([1, 2, 3, 100]),
        bytes_max=st.sampled_from([1, 900, 1 << 20, 1 << 20]),
        lease_ms=st.sampled_from([0, 500, 5000, 60_000]),
        ahead_ms=st.sampled_from([0, 0, 0, 1, 1000, 4000]),
    )
    def lease(self, name: str, holder: str, most: int, bytes_max: int, lease_ms: int, ahead_ms: int) -> None:
        if name in self.world.subscriptions:
            self.have_some(name)
        if name in self.world.subscriptions:
            self.take(Lease(TOPIC, name, most, bytes_max, lease_ms, 0, ahead_ms), holder)
            return
        answer = self.answer(Lease(TOPIC, name, create=False))
        assert answer is None or isinstance(answer, SubscriptionNotFound)
        if answer is not None and self.remembered():
            self.changed().subscribe(name, subscription_settings({}), earliest=True)
            self.take(Lease(TOPIC, name, most, bytes_max, lease_ms, 0, ahead_ms), holder)
            if name in self.world.subscriptions:
                self.alter(name, {"retry_jitter": 0})

    @precondition(lambda self: self.tokens)
    @rule(
        kind=st.sampled_from([Ack, Ack, Extend, Reject]),
        picks=st.lists(ANY, min_size=1, max_size=4),
        holder=HOLDERS,
        foreign=st.sampled_from([0, 0, 0, 0, 1, 1000]),
        together=st.booleans(),
        lease_ms=st.sampled_from([0, 500, 60_000]),
    )
    def settle_some(
        self, kind: Any, picks: list[int], holder: str, foreign: int, together: bool, lease_ms: int
    ) -> None:
        name, held = self.picked(picks, foreign)
        more: dict[str, Any] = {Extend: {"lease_ms": lease_ms}, Reject: {"reason": "unfit"}}.get(kind, {})
        self.settle(kind(TOPIC, self.holdings(held, together), subscription=name, **more), holder, held)

    @precondition(lambda self: self.world.messages)
    @rule(name=SUBSCRIPTIONS, holder=HOLDERS, most=st.integers(1, 4), fate=st.sampled_from("aaarxd"))
    def work(self, name: str, holder: str, most: int, fate: str) -> None:
        """Lease some, and settle them all in the same way: ack, release, reject, or give back as not looked at."""
        if name in self.world.subscriptions:
            self.have_some(name)
        before = len(self.tokens)
        if name in self.world.subscriptions:
            self.take(Lease(TOPIC, name, most), holder)
        held = [(at, token) for _, at, token in self.tokens[before:]]
        kind: Any = {"a": Ack, "x": Reject}.get(fate, Release)
        more: dict[str, Any] = {"r": {"reason": "no time"}, "d": {"undelivered": True, "delay_ms": 0}}.get(fate, {})
        if held:
            self.settle(kind(TOPIC, self.holdings(held, together=True), subscription=name, **more), holder, held)

    @precondition(lambda self: self.tokens)
    @rule(
        picks=st.lists(ANY, min_size=1, max_size=4),
        foreign=st.sampled_from([0, 0, 0, 0, 1]),
        delay=st.none() | st.sampled_from([0, 0, 1500]),
        until=st.none() | st.none() | st.sampled_from([-1.0, 0.0, 5.0]),
        state=st.none() | st.sampled_from([b"half", b"more"]),
        undelivered=st.sampled_from([False, False, True]),
    )
    def release(
        self,
        picks: list[int],
        foreign: int,
        delay: int | None,
        until: float | None,
        state: bytes | None,
        undelivered: bool,
    ) -> None:
        name, held = self.picked(picks, foreign)
        if delay is not None:
            until = None
        elif undelivered and until is None:
            delay = 0
        held = held[:1] if state is not None else held
        states = {held[0][0][1]: state} if state is not None else {}
        request = Release(
            TOPIC, self.holdings(held, together=True), delay, self.time(until), "tired", states, undelivered, name
        )
        self.settle(request, "ann", held)

    # Looking and changing.

    @precondition(lambda self: self.world.messages)
    @rule(picks=st.lists(ANY, min_size=1, max_size=3), change=CHANGES, owner=OWNERS, stale=st.integers(-1, 1))
    def edit_some(self, picks: list[int], change: tuple[str, Any], owner: str, stale: int) -> None:
        ids = sorted(self.world.messages)
        chosen = {ids[-1 - pick % len(ids)]: None for pick in picks}
        versions = [(at, self.world.messages[at].version + stale if stale else None) for at in chosen]
        if len(chosen) == 1 and stale == 1:
            versions = [(at, self.world.messages[at].version) for at in chosen]
        self.edit(versions, *self.change(change, owner))

    @precondition(lambda self: self.world.messages)
    @rule(name=SUBSCRIPTIONS, given=SELECTIONS, page=st.sampled_from([1, 2, 100]))
    def find_some(self, name: str, given: dict[str, Any], page: int) -> None:
        self.run()
        if name not in self.world.subscriptions:
            return
        selection = self.selection(given)
        found = self.attempt(lambda: find(self.bench, name, selection, page))
        if found is None:
            return
        ids = [(one.partition, one.offset) for one, _ in found]
        expected = {at: self.world.matches(name, at, selection, self.now_us) for at, _ in self.world.pending(name)}
        assert len(set(ids)) == len(ids)
        assert {at for at, match in expected.items() if match} <= set(ids), f"{selection} did not find all"
        assert set(ids) <= {at for at, match in expected.items() if match is not False}, f"{selection} found more"
        if selection.status == "waiting":
            times = [one.ready_us for one, _ in found]
            assert times == sorted(times)
        else:
            assert ids == sorted(ids)

    @precondition(lambda self: self.world.messages)
    @rule(name=SUBSCRIPTIONS, given=SELECTIONS, change=CHANGES, owner=OWNERS, most=st.sampled_from([1, 2, 1000]))
    def edit_matching(self, name: str, given: dict[str, Any], change: tuple[str, Any], owner: str, most: int) -> None:
        self.run()
        if name not in self.world.subscriptions or any(self.unclear(at) for at, _ in self.world.pending(name)):
            return
        selection = self.selection(given)
        asked = msgspec.structs.replace(selection)
        selection.owner = selection.owner or owner  # in somebody's name only what is theirs is changed
        now_us, world = self.now_us, self.world
        matches = {at: world.matches(name, at, selection, now_us) for at, _ in world.pending(name)}
        if None in matches.values():
            return
        expected = [at for at, match in matches.items() if match]
        expected.sort()
        ids: list[tuple[Id, int | None]] = [(at, None) for at in expected[:most]]
        made, _, new = self.change(change, owner)
        codes = self.expected_edits(ids, made, owner, new)
        request = EditMatching(TOPIC, asked, made, name, owner, most)
        keys = [("message", at) for at, _ in ids]
        counts = self.count(
            [*keys, *(("entry", one, at) for _, at in keys for one in world.subscriptions)], synced=True
        )

        def told(answer: Any) -> None:
            counts()
            assert [(one.partition, one.offset) for one in answer.outcomes] == expected[:most]
            assert bool(answer.after) or len(expected) <= most
            for outcome, at, (objections, version) in zip(answer.outcomes, expected, codes, strict=False):
                self.check_outcome(outcome, at, objections, version)

        self.ask(request, told, self.body(made, new))

    @precondition(lambda self: self.has_dead())
    @rule(name=SUBSCRIPTIONS, most=st.sampled_from([1, 2, 1000]), some=st.booleans())
    def redrive(self, name: str, most: int, some: bool) -> None:
        self.run()
        if name not in self.world.subscriptions:
            return
        self.attempt(self.compare)
        if name not in self.world.subscriptions:
            return
        dead = self.attempt(lambda: find(self.bench, name, Selection(status="dead")))
        if dead is None:
            return
        chosen = dead[::2] if some else dead
        places = [MessageId(one.partition, one.offset) for one, _ in chosen] if some else []
        if some and not places:
            return
        origins = [
            (int(read.headers["headrace-dead-partition"]), int(read.headers["headrace-dead-offset"]))
            for _, read in chosen
        ]
        self.asked_of, self.redriving = name, set(origins)
        answer = self.answer(Redrive(TOPIC, name, Selection(messages=places), most))
        self.redriving = set()
        if answer is not None:
            assert answer.messages == min(len(chosen), most), answer
            assert answer.more == (len(chosen) > most)
            self.come_back(name, origins[:most])

    @precondition(lambda self: self.world.messages)
    @rule(name=SUBSCRIPTIONS, begin=st.sampled_from([-10.0, 0.0, 1.0]), bucket=st.sampled_from([0.5, 2.0, 40.0]))
    def count_them(self, name: str, begin: float, bucket: float) -> None:
        self.run()
        if name not in self.world.subscriptions:
            return
        for _ in range(2):  # what has expired is gone the second time
            self.attempt(self.compare)
        if name not in self.world.subscriptions:
            return
        info = self.answer(SubscriptionDescribe(TOPIC, name))
        from_us, bucket_us = self.now_us + round(begin * SECOND_US), round(bucket * SECOND_US)
        forecast = self.answer(Forecast(TOPIC, from_us, bucket_us, 3, name))
        if info is None or forecast is None or name not in self.world.subscriptions:
            return
        self.check_counts(name, info)
        self.check_forecast(name, from_us, bucket_us, forecast)

    # Time, the disk, and the broker's ends.

    @rule(seconds=st.sampled_from([0.0, 0.001, 0.5, 0.5, 1.0, 1.0, 2.0, 5.0, 31.0]))
    def let_time_pass(self, seconds: float) -> None:
        self.run()
        bench = self.bench
        self.attempt(lambda: bench.tick(seconds))
        if bench is self.bench:
            self.changed().pass_time(self.now_us)
            self.attempt(lambda: bench.tick())

    @rule(name=SUBSCRIPTIONS, milliseconds=st.sampled_from([1, 50, 2000]))
    def stumble(self, name: str, milliseconds: int) -> None:
        """The clock goes back for a moment."""
        self.run()
        bench = self.bench
        self.behind_us = milliseconds * 1000
        bench.now_us -= self.behind_us
        self.attempt(lambda: bench.tick())
        if bench is self.bench:
            self.attempt(lambda: find(bench, name, Selection()) if name in self.world.subscriptions else None)
        if bench is self.bench:
            bench.now_us += self.behind_us
            self.behind_us = 0
            self.attempt(lambda: bench.tick())

    @rule(slow=st.booleans(), armed=st.sampled_from([0, 0, 0, 0, 1, 3, 7, 15, 30]))
    def change_the_disk(self, slow: bool, armed: int) -> None:
        """Syncs take their time; the power will go at some operation."""
        self.run()
        self.slow = self.bench.syncing_later = slow
        if armed:
            self.disk.crash_after(armed)

    @rule(how=st.sampled_from(["restart", "kill", "lost", "random"]), again=st.none() | st.integers(1, 40))
    def end_the_broker(self, how: str, again: int | None) -> None:
        """In an orderly way; by a death, after which all that was written stays; or by a power loss, perhaps two."""
        if how == "restart":
            self.run()
            bench = self.bench
            self.attempt(bench.close)
            if bench is self.bench:
                self.recover(power_lost=False)
            return
        if how == "kill":
            self.recover(power_lost=False)
            return
        self.disk.power_loss(Unsynced(how))
        if again is not None:
            self.disk.crash_after(again)
            try:
                Workbench(f"{self.root}/data", disk=self.disk, settings=self.settings, now_us=self.now_us).tick()
                self.disk.crash_after(0)
            except (PowerLoss, LogFailed):
                assert self.disk.crashed
            note(f"power lost again after {again} operations")
            self.disk.power_loss(Unsynced(how))
        self.recover(power_lost=True)

    @invariant()
    def everything_is_as_it_should_be(self) -> None:
        if hasattr(self, "bench") and not self.slow and not self.disk.crashed and not self.waiting:
            self.attempt(self.compare)


class LeasedOnALossyTopic(LeasedOnAFaultyDisk):
    """The same with messages that are seen before they are safe; what is lost takes its offset with it."""

    @initialize(
        seed=st.integers(0, 2**32),
        journal_bytes=st.sampled_from([300, 2000, 1 << 20]),
        slow=st.booleans(),
        partitions=st.sampled_from([1, 1, 2]),
        kind=st.sampled_from(["written", "memory"]),
        about=st.lists(MESSAGE, min_size=2, max_size=6),
    )
    def begin(  # type: ignore[override]
        self, seed: int, journal_bytes: int, slow: bool, partitions: int, kind: str, about: list[dict[str, Any]]
    ) -> None:
        self.set_up(seed, journal_bytes, partitions, kind)
        self.consumed: set[Id] = set()
        self.subscribe("default", {}, earliest=True)
        self.publish(0, about, large=False)
        self.slow = self.bench.syncing_later = slow

    @rule(number=ANY)
    def read_on(self, number: int) -> None:
        """A group goes on where it was, and never passes over a message."""
        number %= self.partitions
        described = self.answer(GroupDescribe("readers"))
        found = self.attempt(lambda: list(self.log(TOPIC, number)))
        if described is None or found is None:
            return
        places = [] if isinstance(described, GroupNotFound) else described.places
        position = next((place.offset for place in places if place.partition == number), 0)
        passed = [one.id for one in found if one.id[1] < position and one.id not in self.consumed]
        assert not passed, f"the group is at {position}, and never saw {passed}"
        for one in found:
            self.name(one.id, one.value)
        self.consumed.update(one.id for one in found)
        end = max([position, *(one.id[1] + 1 for one in found)])
        self.ask(Commit("readers", [PartitionOffset(TOPIC, number, end)]), lambda _: None)


class LeasedOverPartitions(LeasedOnAFaultyDisk):
    """The same over up to 64 partitions, most of which have nothing to hand out at most times."""

    @initialize(
        seed=st.integers(0, 2**32),
        partitions=st.integers(3, 64),
        given=SETTINGS,
        abouts=st.lists(st.tuples(st.integers(0, 63), st.lists(MESSAGE, min_size=1, max_size=3)), max_size=6),
    )
    def begin(  # type: ignore[override]
        self, seed: int, partitions: int, given: dict[str, Any], abouts: list[tuple[int, list[dict[str, Any]]]]
    ) -> None:
        self.set_up(seed, 2000, partitions)
        self.subscribe("default", {**given, "paused": False}, earliest=True)
        for number, about in abouts:
            self.publish(number, about, large=False)


LeasedOnAFaultyDisk.TestCase.settings = settings(
    max_examples=int(os.environ.get("HEADRACE_MODEL_EXAMPLES", "110")), stateful_step_count=50
)
test_leased_on_a_faulty_disk = LeasedOnAFaultyDisk.TestCase
LeasedOnALossyTopic.TestCase.settings = settings(
    max_examples=int(os.environ.get("HEADRACE_MODEL_EXAMPLES", "60")), stateful_step_count=40
)
test_leased_on_a_lossy_topic = LeasedOnALossyTopic.TestCase
LeasedOverPartitions.TestCase.settings = settings(
    max_examples=int(os.environ.get("HEADRACE_MODEL_EXAMPLES", "25")), stateful_step_count=25
)
test_leased_over_partitions = LeasedOverPartitions.TestCase
