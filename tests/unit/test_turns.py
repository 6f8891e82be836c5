"""What is put off on an event loop: in order, in one turn, and what comes last is not put off for ever."""

import asyncio
import threading
from collections.abc import Callable

from headrace.gateways.turns import Turns


def run(begin: Callable[[Turns], None], until: Callable[[], bool]) -> None:
    async def main() -> None:
        begin(Turns(asyncio.get_running_loop()))
        async with asyncio.timeout(5):
            while not until():
                await asyncio.sleep(0)

    asyncio.run(main())


def test_what_follows_is_done_before_what_comes_last() -> None:
    done: list[str] = []

    def begin(turns: Turns) -> None:
        def one() -> None:
            done.append("one")
            turns.soon(two)

        def two() -> None:
            done.append("two")

        def last() -> None:
            done.append("last")
            turns.soon(lambda: done.append("what follows from it"))

        turns.last(last)
        turns.soon(one)

    run(begin, lambda: len(done) == 4)
    assert done == ["one", "two", "last", "what follows from it"]


def test_who_never_ends_does_not_keep_the_last_from_its_turn() -> None:
    seen: list[int] = []

    def begin(turns: Turns) -> None:
        def again() -> None:
            if not seen:
                turns.soon(again)

        turns.soon(again)
        turns.last(lambda: seen.append(1))

    run(begin, lambda: bool(seen))


def test_other_threads_and_this_one_can_say_it() -> None:
    told: list[int] = []
    here = threading.get_ident()

    def begin(turns: Turns) -> None:
        turns.from_thread(lambda: told.append(threading.get_ident()))
        thread = threading.Thread(target=turns.from_thread, args=[lambda: told.append(threading.get_ident())])
        thread.start()
        thread.join()

    run(begin, lambda: len(told) == 2)
    assert told == [here, here]


def test_one_that_fails_does_not_stop_the_others() -> None:
    done: list[str] = []

    def begin(turns: Turns) -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: done.append(str(context["exception"])))
        turns.soon(lambda: [][0])
        turns.soon(lambda: done.append("next"))
        turns.last(lambda: done.append("last"))

    run(begin, lambda: len(done) == 3)
    assert done == ["list index out of range", "next", "last"]
