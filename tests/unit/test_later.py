"""An answer to come is told to everybody who asks for it, and can be awaited."""

import asyncio

import pytest

from headrace.broker.later import Later
from headrace.model.errors import Busy, HeadraceError


@pytest.mark.parametrize("outcome", [7, None, Busy()])
def test_everybody_is_told_once_in_their_order(outcome: int | HeadraceError | None) -> None:
    later: Later[int | None] = Later()
    told: list[tuple[str, object]] = []
    later.then(lambda answer: told.append(("first", answer)))
    later.then(lambda answer: told.append(("second", answer)))
    assert not later.settled
    later.settle(outcome)
    later.then(lambda answer: told.append(("late", answer)))
    assert later.settled
    assert told == [("first", outcome), ("second", outcome), ("late", outcome)]


def test_an_answer_can_be_awaited() -> None:
    async def ask() -> None:
        there: Later[str] = Later()
        there.settle("there")
        assert await there == "there"
        coming: Later[str] = Later()
        asyncio.get_running_loop().call_soon(coming.settle, "come")
        assert await asyncio.gather(*(_awaited(coming) for _ in range(3))) == ["come"] * 3
        failing: Later[str] = Later()
        asyncio.get_running_loop().call_soon(failing.settle, Busy("too much"))
        with pytest.raises(Busy, match="too much"):
            await failing

    asyncio.run(ask())


def test_who_is_cancelled_keeps_no_answer_from_the_others() -> None:
    async def ask() -> None:
        later: Later[str] = Later()
        cancelled, waiting = asyncio.create_task(_awaited(later)), asyncio.create_task(_awaited(later))
        await asyncio.sleep(0)
        cancelled.cancel()
        with pytest.raises(asyncio.CancelledError):
            await cancelled
        later.settle("done")
        assert await waiting == "done"

    asyncio.run(ask())


async def _awaited(later: Later[str]) -> str:
    return await later
