"""The group `scaling`: what work costs when there is a thousand times more around it, and how long the loop pauses."""

import importlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchmarks import scaling_pauses
from benchmarks.loop_pauses import Event, MeteredBroker, MeteredLoop
from headrace.bench.measure import Benchmark, Figure, Sample, Subject

Measure = Callable[[int], float]
"""Takes a sample with so many around: the figure, in its unit."""
_IDLE_S_MAX = 0.5
_PAUSE = "a heartbeat on the event loop every millisecond: by how much the latest was late"

POINTS: Mapping[str, Sequence[int]] = {
    "scaling_broker.topics_tick_ms": (10, 300, 3000),
    "scaling_broker.subscriptions_tick_ms": (10, 100, 1000),
    "scaling_leased.partitions_lease_us": (1, 16, 256),
    "scaling_leased.waiting_lease_us": (1, 100, 3000),
    "scaling_broker.transactions_stage_us": (1, 100, 10_000),
    "scaling_broker.members_tick_ms": (10, 100, 1000),
    "scaling_readers.measure": (1, 50, 500),
    "scaling_leased.pending_lease_us": (1000, 30_000, 1_000_000),
}
"""How many there are around what is measured, by the function that measures it."""
_NAMES = {"measure": "readers_delivery_us"}


def benchmarks(points: Mapping[str, Sequence[int]] = POINTS, events: Sequence[Event] | None = None) -> list[Benchmark]:
    """All of the group."""
    return [
        *(_scaling(function, each) for function, each in points.items()),
        *(_pausing(event) for event in (usual_events() if events is None else events)),
    ]


def usual_events() -> list[Event]:
    """What the pauses of the loop are measured under."""
    leased = importlib.import_module("benchmarks.scaling_leased")
    return [
        leased.snapshot(),
        leased.mass_expiry(),
        scaling_pauses.compaction(),
        scaling_pauses.mass_schedule(),
        leased.subscription_creation(),
    ]


def tiny_events() -> list[Event]:
    """The same with next to nothing to do."""
    leased = importlib.import_module("benchmarks.scaling_leased")
    return [
        leased.snapshot(100),
        leased.mass_expiry(100),
        scaling_pauses.compaction(3000, 64 << 10),
        scaling_pauses.mass_schedule(50),
        leased.subscription_creation(1000),
    ]


def _scaling(function: str, points: Sequence[int]) -> Benchmark:
    """The same measured at several points, which take turns."""
    module, _, called = function.rpartition(".")
    name = _NAMES.get(called, called)
    measure: Measure = getattr(importlib.import_module(f"benchmarks.{module}"), called)

    def subject(n: int) -> Subject:
        return Subject("headrace", lambda _, __: Sample(0.0, amount=measure(n)), {"n": n})

    unit = {"ms": "ms", "us": "µs"}[name.rpartition("_")[2]]
    params: dict[str, Any] = {"measured": (measure.__doc__ or "").split("\n")[0]}
    return Benchmark({name: _amount(unit)}, [subject(n) for n in points], params, 1)


def _pausing(event: Event) -> Benchmark:
    """The longest pause of the loop while something happens, beside that of an idle loop."""
    pauses = _Pauses(event)
    idle = "the same heartbeat on a loop with nothing else to do, for as long as the event took, or half a second"
    subjects = [
        Subject("headrace", pauses.sample, {"measured": _PAUSE}, 1, pauses.prepare, pauses.finish),
        Subject("idle_loop", pauses.sample_idle, {"measured": idle}),
    ]
    return Benchmark({"loop_pause_max_ms": _amount("ms")}, subjects, {"under": event.under, "n": event.n}, 1)


def _amount(unit: str) -> Figure:
    return Figure(unit, False, lambda _, taken: taken.amount)


class _Pauses:
    """A broker that something happens to, and an idle loop."""

    def __init__(self, event: Event) -> None:
        self._event = event
        self._broker: MeteredBroker | None = None
        self._seconds = 0.0
        """What the event took."""

    def prepare(self, place: str) -> None:
        self._broker = MeteredBroker(place, **self._event.settings)
        self._broker.start()
        try:
            if self._event.prepare is not None:
                self._event.prepare(self._broker)
        except BaseException:
            self._broker.stop()
            raise

    def finish(self) -> None:
        assert self._broker is not None
        self._broker.stop()

    def sample(self, _: str, __: int) -> Sample:
        assert self._broker is not None
        watch = self._event.happen(self._broker)
        self._seconds = watch.seconds
        return Sample(watch.seconds, amount=watch.late_s * 1e3)

    def sample_idle(self, place: str, _: int) -> Sample:
        loop = MeteredLoop(place)
        loop.start()
        try:
            with loop.watched() as watch:
                time.sleep(min(self._seconds, _IDLE_S_MAX))
        finally:
            loop.stop()
        return Sample(watch.seconds, amount=watch.late_s * 1e3)
