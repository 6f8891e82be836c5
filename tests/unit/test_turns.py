"""Callbacks of the broker get the time of the turn in which they run, not of the one that scheduled them."""

from collections.abc import Generator

from headrace.broker.signal import Signal
from headrace.broker.turns import Turns
from headrace.model.leasing import Lease
from headrace.model.requests import TopicCreate
from headrace.testing.workbench import Workbench


def test_a_callback_gets_the_time_of_its_turn() -> None:
    bench = Workbench()
    turns, told = Turns(bench, 5), []
    turns.call_soon(told.append)
    turns.call_at_turn_end(told.append)
    turns.begin(8)
    bench.run()
    assert told == [8, 8]


def test_a_slice_gets_the_time_of_its_turn() -> None:
    bench = Workbench()
    turns = Turns(bench, 5)

    def steps() -> Generator[None, int, list[int]]:
        first = yield
        turns.begin(9)
        return [first, (yield)]

    answer = turns.in_slices(steps())
    turns.begin(7)
    bench.run()
    assert answer.outcome == [7, 9]


def test_a_consumer_that_waits_is_served_with_the_time_of_the_publish() -> None:
    bench = Workbench()
    bench.ask(TopicCreate("jobs"))
    waiting = bench.begin(Lease("jobs", wait_ms=60_000, lease_ms=1000))
    bench.now_us += 5_000_000
    bench.publish("jobs", [b"one"])
    [portion] = waiting.outcome.answer.portions
    assert portion.until_us == bench.now_us + 1_000_000


def test_a_signal_reaches_its_listeners_in_their_order() -> None:
    told: list[tuple[str, int]] = []
    changed: Signal[int] = Signal()
    changed(1)
    changed.connect(lambda number: told.append(("first", number)))
    changed.connect(lambda number: told.append(("second", number)))
    changed(2)
    assert told == [("first", 2), ("second", 2)]
