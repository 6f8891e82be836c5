"""The group `scaling` measures what it says at several points, and a pause of an event loop is seen."""

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import pytest
from benchmarks import harness, scaling, scaling_pauses
from benchmarks.loop_pauses import Event, Heartbeat, MeteredBroker, MeteredLoop, Watch

from headrace.bench.measure import WrongResult
from headrace.client._sync.connecting import connect

UNITS = {
    "topics_tick_ms": "ms",
    "subscriptions_tick_ms": "ms",
    "partitions_lease_us": "µs",
    "waiting_lease_us": "µs",
    "transactions_stage_us": "µs",
    "members_tick_ms": "ms",
    "readers_delivery_us": "µs",
    "pending_lease_us": "µs",
}
TINY = (2, 3, 5)
LITTLE = {
    "_DELIVERIES": 10,
    "_FILL": 5,
    "_LEASES": 3,
    "_PUBLISHES_MIN": 2,
    "_PUBLISHES_MAX": 3,
    "_REPEATS": 1,
    "_STAGES": 3,
    "_TICKS": 3,
}
"""How much is done for one sample, where a module says so by this name."""
UNDER = ["snapshot", "mass expiry", "compaction", "mass schedule", "subscription creation"]


def lines_of(
    benchmarks: list[Any], place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> list[dict[str, Any]]:
    monkeypatch.setattr(scaling, "benchmarks", lambda: benchmarks)
    assert harness.main(["scaling", "--samples", "1", "--directory", str(place)]) == 0
    assert list(place.iterdir()) == []
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


@pytest.mark.parametrize("function", scaling.POINTS)
def test_every_name_is_measured_at_three_points(
    function: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, little in LITTLE.items():
        monkeypatch.setattr(f"benchmarks.{function.partition('.')[0]}.{name}", little, raising=False)
    lines = lines_of(scaling.benchmarks({function: TINY}, []), tmp_path, capsys, monkeypatch)
    assert [line["params"]["n"] for line in lines] == list(TINY)
    [name] = {line["name"].removeprefix("scaling.") for line in lines}
    for line in lines:
        assert set(line) == {"name", "subject", "unit", "median", "samples", "higher_is_better", "params"}
        assert (line["unit"], line["higher_is_better"], line["subject"]) == (UNITS[name], False, "headrace")
        assert len(line["samples"]) == 1
        assert line["params"]["measured"]


def test_the_names_of_the_contract_are_there() -> None:
    found = scaling.benchmarks()
    scaled = [one for one in found if "under" not in one.params]
    points = {name: [subject.params["n"] for subject in one.subjects] for one in scaled for name in one.figures}
    assert points.keys() == UNITS.keys()
    assert all(len(each) == 3 and each == sorted(each) for each in points.values())
    pauses = [one for one in found if "loop_pause_max_ms" in one.figures]
    assert [one.params["under"] for one in pauses] == UNDER
    assert all([subject.name for subject in one.subjects] == ["headrace", "idle_loop"] for one in pauses)


@pytest.mark.parametrize("event", scaling.tiny_events(), ids=lambda event: event.under)
def test_the_pauses_of_every_event_are_measured_beside_those_of_an_idle_loop(
    event: Event, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = lines_of(scaling.benchmarks({}, [event]), tmp_path, capsys, monkeypatch)
    assert [(line["name"], line["subject"], line["unit"]) for line in lines] == [
        ("scaling.loop_pause_max_ms", "headrace", "ms"),
        ("scaling.loop_pause_max_ms", "idle_loop", "ms"),
    ]
    assert all(line["median"] > 0 for line in lines)
    assert {(line["params"]["under"], line["params"]["n"]) for line in lines} == {(event.under, event.n)}


def test_a_table_tells_points_and_events_apart() -> None:
    line = {"name": "scaling.x", "subject": "headrace", "median": 2.0, "unit": "ms", "params": {"n": 1000}}
    more = {**line, "median": 3.0, "params": {"n": 5000}}
    pause = {**line, "params": {"n": 7, "under": "compaction"}}
    idle = {**pause, "subject": "idle_loop", "median": 1.0}
    assert harness.markdown([line, more, pause, idle]).splitlines()[2:] == [
        "| scaling.x, n = 1,000 | headrace | 2.0 | ms | 1 |",
        "| scaling.x, n = 5,000 | headrace | 3.0 | ms | 1.5 |",
        "| scaling.x, under compaction, n = 7 | headrace | 2.0 | ms | 1 |",
        "| scaling.x, under compaction, n = 7 | idle_loop | 1.0 | ms | 0.5 |",
    ]


# The meter.


def test_a_loop_that_is_held_up_is_noticed() -> None:
    async def main() -> float:
        heartbeat = Heartbeat(asyncio.get_running_loop())
        while not heartbeat.beats:
            await asyncio.sleep(0.001)
        heartbeat.reset()
        time.sleep(0.05)
        before = heartbeat.beats
        while heartbeat.beats == before:
            await asyncio.sleep(0.001)
        return heartbeat.late_s

    assert asyncio.run(main()) > 0.045


def test_the_loop_of_another_process_is_watched(tmp_path: Path) -> None:
    loop, watch = MeteredLoop(str(tmp_path)), Watch()
    loop.start()
    try:
        deadline = time.monotonic() + 60
        while watch.beats < 3 and time.monotonic() < deadline:
            with loop.watched() as watch:
                time.sleep(0.01)
    finally:
        loop.stop()
    assert watch.beats >= 3
    assert watch.seconds >= 0.01


def test_a_metered_process_that_ends_is_noticed(tmp_path: Path) -> None:
    with pytest.raises(WrongResult, match=r"has ended: [\s\S]*not_a_setting"):
        MeteredBroker(str(tmp_path), not_a_setting=1).start()


def test_schedules_that_run_twice_are_noticed(tmp_path: Path) -> None:
    event = scaling_pauses.mass_schedule(20)
    broker = MeteredBroker(str(tmp_path))
    broker.start()
    try:
        with connect(broker.address) as bus:
            for number in range(10):  # each attempt to set the schedules in time has a topic of its own
                bus.publish(f"bench-{number}", b"one too many")
        with pytest.raises(WrongResult, match="before they were due"):
            event.happen(broker)
    finally:
        broker.stop()
