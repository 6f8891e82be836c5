"""The broker's clock: it never runs backwards, and is the system's again as soon as that can be."""

from itertools import pairwise
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from headrace.model.requests import TopicCreate
from headrace.runtime.broker_clock import BrokerClock
from headrace.testing.workbench import Workbench

SECOND_US = 1_000_000
HOUR_US = 3600 * SECOND_US
START_US = 1_800_000_000 * SECOND_US


class System:
    """The system's two clocks."""

    def __init__(self) -> None:
        self.wall_us = START_US
        self.steady_us = 7

    def clock(self) -> BrokerClock:
        return BrokerClock(lambda: self.wall_us * 1000, lambda: self.steady_us * 1000)

    def wait(self, us: int) -> None:
        self.wall_us += us
        self.steady_us += us


def test_a_clock_that_is_put_back_is_waited_for_at_half_speed() -> None:
    system = System()
    clock = system.clock()
    assert (clock.now_us(), clock.wall_offset_us()) == (START_US, 0)
    system.wall_us -= HOUR_US
    assert (clock.now_us(), clock.wall_offset_us()) == (START_US, -HOUR_US)
    system.wait(30 * SECOND_US)
    assert clock.now_us() == START_US + 15 * SECOND_US  # a lease of 15 seconds ends after 30, not after an hour
    for _ in range(720):
        system.wait(10 * SECOND_US)
        clock.now_us()
    assert (clock.now_us(), clock.wall_offset_us()) == (system.wall_us, 0)
    system.wait(SECOND_US)
    assert clock.now_us() == system.wall_us


def test_a_clock_that_is_put_ahead_is_followed_at_once() -> None:
    system = System()
    clock = system.clock()
    clock.now_us()
    system.wall_us += HOUR_US
    assert (clock.now_us(), clock.wall_offset_us()) == (START_US + HOUR_US, 0)


def test_a_broker_that_starts_again_goes_on_from_the_time_it_had() -> None:
    system = System()
    clock = system.clock()
    clock.go_on_from(START_US + HOUR_US)
    assert (clock.now_us(), clock.wall_offset_us()) == (START_US + HOUR_US, -HOUR_US)
    system.wait(10)
    assert clock.now_us() == START_US + HOUR_US + 5
    for former_us in (START_US - HOUR_US, START_US + 1000 * HOUR_US):
        clock = system.clock()
        clock.go_on_from(former_us)
        assert clock.now_us() == system.wall_us


def test_a_broker_knows_the_time_it_had(tmp_path: Path) -> None:
    bench = Workbench(str(tmp_path / "data"))
    assert bench.broker.last_us == 0
    bench.tick(100)
    bench.ask(TopicCreate("jobs"))
    later_us = bench.now_us
    bench.close()
    assert Workbench(str(tmp_path / "data"), now_us=later_us - HOUR_US).broker.last_us == later_us


@given(st.lists(st.tuples(st.integers(0, 100 * SECOND_US), st.integers(-HOUR_US, HOUR_US) | st.just(0)), max_size=30))
def test_whatever_the_system_does_it_never_runs_backwards_and_never_stands_still(steps: list[tuple[int, int]]) -> None:
    system = System()
    clock = system.clock()
    times = [(clock.now_us(), system.steady_us)]
    for wait_us, jump_us in steps:
        system.wait(wait_us)
        system.wall_us += jump_us
        times.append((clock.now_us(), system.steady_us))
        system.wait(wait_us)
        times.append((clock.now_us(), system.steady_us))
    for (before_us, _), (after_us, _) in pairwise(times):
        assert after_us >= before_us
    for (before_us, begin_us), (after_us, end_us) in list(pairwise(times))[1::2]:  # no jump in between
        assert after_us - before_us >= (end_us - begin_us) // 2 - 1
