"""The workbench runs a broker's callbacks in the server's order, one at a step, on a clock that the test moves."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from headrace.model.leasing import Lease
from headrace.runtime.loop_scheduler import LoopScheduler
from headrace.testing import Workbench


def schedule(ports: Any, done: list[str]) -> None:
    """Callbacks of every kind, which schedule others."""

    def note(name: str, *then: Callable[[], None]) -> Callable[[], None]:
        def call() -> None:
            done.append(name)
            for following in then:
                following()

        return call

    def soon(name: str, *then: Callable[[], None]) -> Callable[[], None]:
        return lambda: ports.call_soon(note(name, *then))

    def end(name: str, *then: Callable[[], None]) -> Callable[[], None]:
        return lambda: ports.call_at_turn_end(note(name, *then))

    end("end", soon("after the end", end("next turn's end")))()
    soon("first", soon("second", soon("third", end("too late"))))()
    ports.call_threadsafe(note("from a thread"))


def test_callbacks_run_in_the_servers_order() -> None:
    on_bench: list[str] = []
    bench = Workbench()
    schedule(bench, on_bench)
    bench.run()

    in_server: list[str] = []

    async def serve() -> None:
        schedule(LoopScheduler(asyncio.get_running_loop()), in_server)
        async with asyncio.timeout(30):
            while len(in_server) < len(on_bench):
                await asyncio.sleep(0)

    asyncio.run(serve())
    assert on_bench == in_server
    assert on_bench.index("end") > on_bench.index("third")


def test_a_step_runs_one_callback_and_says_whether_there_was_one() -> None:
    bench = Workbench()
    done: list[str] = []
    bench.call_soon(lambda: done.append("one"))
    bench.call_at_turn_end(lambda: done.append("three"))
    bench.call_soon(lambda: done.append("two"))
    bench.background(lambda: done.append("four"))
    steps = []
    while bench.step():
        steps.append(len(done))
    assert done == ["one", "two", "three", "four"]
    assert steps == [1, 2, 3, 4]


def test_an_error_is_raised_by_its_step_and_the_next_callbacks_still_run() -> None:
    bench = Workbench()
    done: list[str] = []
    bench.call_soon(lambda: [][0])
    bench.call_soon(lambda: done.append("next"))
    with pytest.raises(IndexError):
        bench.run()
    bench.run()
    assert done == ["next"]


def test_time_passes_only_in_ticks() -> None:
    bench = Workbench()
    bench.publish("jobs", [b"one"])
    bench.ask(Lease("jobs", lease_ms=60_000))
    waiting = bench.begin(Lease("jobs", wait_ms=300_000))
    bench.run()
    assert not waiting.resolved
    bench.tick(59)
    assert not waiting.resolved
    bench.tick(1)
    assert waiting.resolved
