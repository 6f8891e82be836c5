"""Routes on a disk that fails, against plain lists: every target has its messages once and in order, and no others."""

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from tests.faults.route_model import Ends, RouteModel, RouteSpan, TargetSpan

from headrace.broker import reservation, route_forwarder
from headrace.broker.pending_answer import PendingAnswer
from headrace.broker.settings import BrokerSettings
from headrace.engines import partition, store
from headrace.model.content.query import ContentQuery
from headrace.model.errors import DiskFull, HeadraceError, LogFailed, RouteNotFound, TopicNotFound
from headrace.model.message import Message, message_size
from headrace.model.request import Request
from headrace.model.requests import Publish, TopicAlter, TopicCreate, TopicDelete, TopicDescribe, TopicInfo
from headrace.model.route_requests import RouteDefinition, RouteList, RouteRemove, RouteSet
from headrace.model.topic import TopicSettings
from headrace.storage.settings import LogSettings
from headrace.testing import FaultyDisk, PowerLoss, Unsynced
from headrace.testing.workbench import Workbench

MEMORY = Path("/dev/shm")
SMALL = LogSettings(segment_bytes=4096, checkpoint_bytes=1500, ahead_bytes_max=2048)
SOURCES: dict[str, dict[str, Any]] = {"in": {"partitions": 2}, "mid": {}, "other": {}}
TARGETS: dict[str, list[str]] = {"in": ["a", "b", "mid"], "mid": ["end"], "other": ["a", "b"]}
SETTINGS: dict[str, dict[str, Any]] = {"b": {"partitions": 2, "message_bytes_max": 300}}
KEYS = [None, b"x.even", b"x.odd", b"y.even", b"z"]
CONDITIONS: list[dict[str, Any]] = [
    {"all": True},
    {"key": "z"},
    {"pattern": "x.*"},
    {"pattern": "*.even"},
    {"pattern": "*.*"},
    {"content": ContentQuery(jsonpath="$.even")},
]
GROWN_MAX = 4


class RoutesOnAFaultyDisk(RuleBasedStateMachine):
    """Publishers, routes that come and go, targets that grow, vanish and come back, and a disk that fails."""

    @initialize(seed=st.integers(0, 2**32), journal_bytes=st.sampled_from([300, 2000, 1 << 20]), slow=st.booleans())
    def begin(self, seed: int, journal_bytes: int, slow: bool) -> None:
        self.root = tempfile.mkdtemp(dir=MEMORY if MEMORY.exists() else None)
        self.small = ExitStack()
        for module, name, value in (
            (partition, "_CHECKPOINT_WORK", 3),
            (store, "_JOURNAL_SETTINGS", SMALL),
            (reservation, "BLOCK_MIN", 4),
            (reservation, "BLOCK_MAX", 16),
            (route_forwarder, "_SLICE_MESSAGES", 3),
            (route_forwarder, "_SLICE_BYTES", 1000),
            (route_forwarder, "_TURN_COST", 50),
        ):
            self.small.enter_context(patch.object(module, name, value))
        self.disk = FaultyDisk(seed)
        self.settings = BrokerSettings(
            journal_bytes=journal_bytes,
            maintenance_seconds=1.0,
            topic=TopicSettings(segment_bytes=4096),
            auto_create_topics=False,
        )
        self.now_us = 1_800_000_000_000_000
        self.slow = slow
        self.model = RouteModel()
        self.counter = 0
        self.start()
        for name in [*SOURCES, "a", "b", "end"]:
            given = {**SOURCES.get(name, {}), **SETTINGS.get(name, {})}
            info = self.bench.ask(TopicCreate(name, {**given, "segment_bytes": 4096}))
            self.model.targets[name] = [_span(info, {})]

    def teardown(self) -> None:
        if hasattr(self, "root"):
            self.small.close()
            shutil.rmtree(self.root)

    def start(self) -> None:
        self.bench = Workbench(f"{self.root}/data", disk=self.disk, settings=self.settings, now_us=self.now_us)
        self.bench.syncing_later = self.slow

    # What is done.

    @rule(
        sends=st.lists(
            st.tuples(st.sampled_from(["in", "in", "mid", "other", "a"]), st.integers(0, 4), st.integers(1, 5)),
            min_size=1,
            max_size=5,
        ),
        steps=st.none() | st.integers(0, 40),
        large=st.booleans(),
    )
    def publish(self, sends: list[tuple[str, int, int]], steps: int | None, large: bool) -> None:
        """Batches to sources, and to a target directly; the broker gets to do all that follows, or only some of it."""
        for topic, key, count in sends:
            self.counter += 1
            word = b"even" if self.counter % 2 else b"odd"
            pad = b"." * (400 if large and not self.counter % 3 else self.counter % 50)
            values = [b'{"%s": "%d.%d%s"}' % (word, self.counter, at, pad) for at in range(count)]
            body = self.bench.batch(values, keys=None if KEYS[key] is None else [KEYS[key]] * count).data
            number = self.counter % SOURCES.get(topic, {}).get("partitions", 1)
            answer = self.attempt(lambda: self.bench.begin(Publish(topic, number), body))  # noqa: B023
            if answer is None:
                return
            assert not isinstance(answer, HeadraceError) or isinstance(answer, DiskFull | TopicNotFound), answer
        if steps is None:
            self.run()
        else:
            self.attempt(lambda: [self.bench.step() for _ in range(steps)])

    @rule(
        name=st.sampled_from(["r1", "r2", "r3"]),
        source=st.sampled_from(["in", "in", "mid", "other"]),
        condition=st.sampled_from(CONDITIONS),
        most=st.integers(1, 3),
    )
    def set_a_route(self, name: str, source: str, condition: dict[str, Any], most: int) -> None:
        """Make a route, or replace it."""
        self.settle()
        targets = [target for target in TARGETS[source] if self.model.targets[target][-1].id][:most]
        if not targets:
            return
        definition = RouteDefinition(name, targets, source=source, error_topic=f"{source}.errors", **condition)
        before, ends = self.model.live(name), self.ends()
        answer = self.ask(RouteSet(definition, replace=True))
        if isinstance(answer, HeadraceError):
            assert isinstance(answer, DiskFull)
        found = {info.definition.name: info.definition for info in self.certainly(RouteList()).routes}
        if answer is None and (name not in found or found[name] != definition):
            return  # the power went off first
        if not isinstance(answer, HeadraceError) and (before is None or before.definition != definition):
            if before is not None:
                before.until = ends[before.definition.source]
            self.model.routes.setdefault(source, []).append(RouteSpan(definition, ends[source]))

    @rule(name=st.sampled_from(["r1", "r2", "r3"]))
    def remove_a_route(self, name: str) -> None:
        self.settle()
        span, ends = self.model.live(name), self.ends()
        if span is None:
            return
        answer = self.ask(RouteRemove(name))
        assert answer is None or not isinstance(answer, RouteNotFound)
        found = {info.definition.name for info in self.certainly(RouteList()).routes}
        if name not in found:
            span.until = ends[span.definition.source]
        else:
            assert answer is None or isinstance(answer, DiskFull)

    @rule(name=st.sampled_from(["a", "b", "end"]))
    def grow_a_target(self, name: str) -> None:
        self.settle()
        span = self.model.targets[name][-1]
        if span.id and span.partitions < GROWN_MAX:
            self.change(name, TopicAlter(name, {"partitions": span.partitions + 1}))

    @rule(name=st.sampled_from(["a", "b", "end"]))
    def delete_a_target_or_make_it_again(self, name: str) -> None:
        self.settle()
        if self.model.targets[name][-1].id:
            self.change(name, TopicDelete(name))
        else:
            self.change(name, TopicCreate(name, {**SETTINGS.get(name, {}), "segment_bytes": 4096}))

    def change(self, name: str, request: Request[Any]) -> None:
        """Change a topic, and learn what has become of it."""
        ends = self.ends()
        answer = self.ask(request)
        assert not isinstance(answer, HeadraceError) or isinstance(answer, DiskFull), answer
        info = self.certainly(TopicDescribe(name))
        now = TargetSpan(0, 0, 0, ends) if info is None else _span(info, ends)
        last = self.model.targets[name][-1]
        if (now.id, now.partitions) != (last.id, last.partitions):
            self.model.targets[name].append(now)

    @rule(seconds=st.sampled_from([0.5, 1.0, 2.0]))
    def let_time_pass(self, seconds: float) -> None:
        self.attempt(lambda: self.bench.tick(seconds))

    @rule(slow=st.booleans(), room=st.none() | st.integers(0, 3000), armed=st.none() | st.integers(1, 40))
    def change_the_disk(self, slow: bool, room: int | None, armed: int | None) -> None:
        """Syncs take their time; the disk is nearly full; the power will go at some operation."""
        self.slow = self.bench.syncing_later = slow
        if self.disk.capacity_bytes is not None:
            self.mend()
        elif room is not None:
            self.disk.capacity_bytes = self.disk.used_bytes + room
        if armed is not None:
            self.disk.crash_after(armed)

    @rule(how=st.sampled_from(["restart", "kill", "lost", "random"]), again=st.none() | st.integers(1, 60))
    def end_the_broker(self, how: str, again: int | None) -> None:
        """In an orderly way, by a death, or by a power loss, perhaps with another one while it starts."""
        self.disk.capacity_bytes = None
        if how == "restart" and self.attempt(lambda: self.bench.close() or True) is None:
            return
        if how in ("lost", "random"):
            self.disk.power_loss(Unsynced(how))
            if again is not None:
                self.disk.crash_after(again)
                try:
                    self.start()
                    self.bench.run()
                except (PowerLoss, LogFailed):
                    assert self.disk.crashed
                self.disk.power_loss(Unsynced(how))
        self.recover()

    # What becomes of it.

    def ask(self, request: Request[Any]) -> Any:
        """The answer or the error; None if the power went off."""

        def ask() -> Any:
            answer = self.bench.begin(request)
            self.bench.run()
            return answer.outcome if isinstance(answer, PendingAnswer) else answer

        return self.attempt(ask)

    def certainly(self, request: Request[Any]) -> Any:
        """The answer, however often the power goes off; None if there is no such topic."""
        while True:
            answer = self.ask(request)
            if isinstance(answer, TopicNotFound):
                return None
            if answer is not None:
                assert not isinstance(answer, HeadraceError), answer
                return answer

    def attempt(self, action: Callable[[], Any]) -> Any:
        """Do it; if the power goes off on the way, start again and return None."""
        try:
            answer = action()
        except (PowerLoss, LogFailed):
            assert self.disk.crashed
            answer = None
        if self.disk.crashed:
            self.disk.power_loss(Unsynced.RANDOM)
            self.disk.capacity_bytes = None
            self.recover()
            return None
        return answer

    def recover(self) -> None:
        self.disk.crash_after(10**9)
        self.now_us = self.bench.now_us + 1
        self.start()
        self.bench.run()

    def run(self) -> None:
        self.attempt(self.bench.run)

    def mend(self) -> None:
        """Let there be room, and let what failed for want of it be tried again."""
        self.disk.capacity_bytes = None
        self.attempt(lambda: self.bench.tick(2.0))
        self.run()

    def settle(self) -> None:
        """Let everything be forwarded that can be."""
        self.run()
        if self.disk.capacity_bytes is not None:
            self.mend()

    def ends(self) -> dict[str, Ends]:
        """Behind everything that was published, by source."""
        return {
            source: {one.partition: one.next_offset for one in self.certainly(TopicDescribe(source)).partitions}
            for source in SOURCES
        }

    # What must be true.

    @invariant()
    def every_target_has_its_messages(self) -> None:
        if not hasattr(self, "bench") or self.disk.capacity_bytes is not None:
            return
        while self.attempt(lambda: self.check() or True) is None:
            pass

    def check(self) -> None:
        bench = self.bench
        bench.run()
        found: dict[tuple[str, int], list[bytes]] = {}
        for name in [*self.model.targets, "in.errors", "mid.errors", "other.errors"]:
            info = bench.begin(TopicDescribe(name))
            if isinstance(info, TopicInfo):
                for at in range(len(info.partitions)):
                    found[name, at] = [message.value or b"" for message in self.messages(name, at)]
        for source in SOURCES:
            targets, errors = TARGETS[source], f"{source}.errors"
            for number in range(len(bench.begin(TopicDescribe(source)).partitions)):
                mine = {message.value for message in self.messages(source, number)}
                expected = self.model.expected(source, number, self.messages(source, number), errors, _size)
                for (name, at), values in found.items():
                    if name in targets or name == errors:
                        there = [value for value in values if value in mine]
                        assert there == expected.pop((name, at), []), f"{name} {at} of {source} {number}"
                assert not expected, f"{source} {number}: {expected} is missing"

    def messages(self, topic: str, number: int) -> Iterator[Message]:
        for batch in self.bench.batches(topic, number):
            yield from batch.messages()


def _span(info: TopicInfo, since: dict[str, Ends]) -> TargetSpan:
    return TargetSpan(info.id, len(info.partitions), info.settings["message_bytes_max"], since)


def _size(message: Message) -> int:
    return message_size(message.value, message.key, message.headers)


RoutesOnAFaultyDisk.TestCase.settings = settings(
    max_examples=int(os.environ.get("HEADRACE_MODEL_EXAMPLES", "60")), stateful_step_count=30
)
test_routes_on_a_faulty_disk = RoutesOnAFaultyDisk.TestCase
