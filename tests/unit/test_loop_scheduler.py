"""What is put off on an event loop: in order, in one turn, and what comes last is not put off for ever."""

import asyncio
import threading
from collections.abc import Callable

from headrace.broker.slices import Steps, in_slices
from headrace.runtime.loop_scheduler import LoopScheduler


def run(begin: Callable[[LoopScheduler], None], until: Callable[[], bool]) -> None:
    async def main() -> None:
        begin(LoopScheduler(asyncio.get_running_loop()))
        async with asyncio.timeout(5):
            while not until():
                await asyncio.sleep(0)

    asyncio.run(main())


def test_what_follows_is_done_before_what_comes_last() -> None:
    done: list[str] = []

    def begin(turns: LoopScheduler) -> None:
        def one() -> None:
            done.append("one")
            turns.call_soon(two)

        def two() -> None:
            done.append("two")

        def last() -> None:
            done.append("last")
            turns.call_soon(lambda: done.append("what follows from it"))

        turns.call_at_turn_end(last)
        turns.call_soon(one)

    run(begin, lambda: len(done) == 4)
    assert done == ["one", "two", "last", "what follows from it"]


def test_who_never_ends_does_not_keep_the_last_from_its_turn() -> None:
    seen: list[int] = []

    def begin(turns: LoopScheduler) -> None:
        def again() -> None:
            if not seen:
                turns.call_soon(again)

        turns.call_soon(again)
        turns.call_at_turn_end(lambda: seen.append(1))

    run(begin, lambda: bool(seen))


def test_other_threads_and_this_one_can_say_it() -> None:
    told: list[int] = []
    here = threading.get_ident()

    def begin(turns: LoopScheduler) -> None:
        turns.call_threadsafe(lambda: told.append(threading.get_ident()))
        thread = threading.Thread(target=turns.call_threadsafe, args=[lambda: told.append(threading.get_ident())])
        thread.start()
        thread.join()

    run(begin, lambda: len(told) == 2)
    assert told == [here, here]


def test_one_that_fails_does_not_stop_the_others() -> None:
    done: list[str] = []

    def begin(turns: LoopScheduler) -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: done.append(str(context["exception"])))
        turns.call_soon(lambda: [][0])
        turns.call_soon(lambda: done.append("next"))
        turns.call_at_turn_end(lambda: done.append("last"))

    run(begin, lambda: len(done) == 3)
    assert done == ["list index out of range", "next", "last"]


def test_work_in_slices_leaves_the_loop_between_any_two_of_them() -> None:
    turn = 0
    slices: list[int] = []

    def work() -> Steps:
        for _ in range(10):
            slices.append(turn)
            yield

    class OnLoop:
        """The ports that slices need."""

        def __init__(self, turns: LoopScheduler) -> None:
            self.call_soon = turns.call_soon
            self.call_at_turn_end = turns.call_at_turn_end
            self.call_threadsafe = turns.call_threadsafe

        def background(self, job: Callable[[], None]) -> None:
            raise NotImplementedError

        wake_at = background  # type: ignore[assignment]

    async def main() -> None:
        nonlocal turn
        in_slices(OnLoop(LoopScheduler(asyncio.get_running_loop())), work())  # type: ignore[arg-type]
        async with asyncio.timeout(30):
            while len(slices) < 10:
                await asyncio.sleep(0)
                turn += 1

    asyncio.run(main())
    assert len(set(slices[1:])) == 9, "others were kept waiting for several slices"
