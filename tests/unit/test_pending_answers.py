"""An answer to come is told to everybody who asks for it, and can be awaited."""

import asyncio

import pytest

from headrace.broker.pending_answer import PendingAnswer
from headrace.model.errors import Busy, Cancelled, HeadraceError
from headrace.model.leasing import Lease
from headrace.model.requests import TopicCreate
from headrace.testing import Workbench


@pytest.mark.parametrize("outcome", [7, None, Busy()])
def test_everybody_is_told_once_in_their_order(outcome: int | HeadraceError | None) -> None:
    later: PendingAnswer[int | None] = PendingAnswer()
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
        there: PendingAnswer[str] = PendingAnswer()
        there.settle("there")
        assert await there == "there"
        coming: PendingAnswer[str] = PendingAnswer()
        asyncio.get_running_loop().call_soon(coming.settle, "come")
        assert await asyncio.gather(*(_awaited(coming) for _ in range(3))) == ["come"] * 3
        failing: PendingAnswer[str] = PendingAnswer()
        asyncio.get_running_loop().call_soon(failing.settle, Busy("too much"))
        with pytest.raises(Busy, match="too much"):
            await failing

    asyncio.run(ask())


def test_who_is_cancelled_keeps_no_answer_from_the_others() -> None:
    async def ask() -> None:
        later: PendingAnswer[str] = PendingAnswer()
        cancelled, waiting = asyncio.create_task(_awaited(later)), asyncio.create_task(_awaited(later))
        await asyncio.sleep(0)
        cancelled.cancel()
        with pytest.raises(asyncio.CancelledError):
            await cancelled
        later.settle("done")
        assert await waiting == "done"

    asyncio.run(ask())


def test_a_cancelled_answer_tells_its_listeners_and_takes_no_outcome() -> None:
    pending: PendingAnswer[str] = PendingAnswer()
    told: list[object] = []
    pending.then(told.append)
    assert pending.cancel()
    pending.settle("too late")
    assert not pending.cancel()
    assert [type(outcome) for outcome in told] == [Cancelled]
    assert isinstance(pending.outcome, Cancelled)

    async def ask() -> None:
        with pytest.raises(Cancelled):
            await pending

    asyncio.run(ask())


def test_an_answer_that_is_there_cannot_be_cancelled() -> None:
    pending: PendingAnswer[str] = PendingAnswer()
    pending.settle("there")
    assert not pending.cancel()
    assert pending.outcome == "there"


def test_a_cancelled_lease_takes_no_messages() -> None:
    bench = Workbench()
    bench.ask(TopicCreate("jobs"))
    cancelled, waiting = (bench.begin(Lease("jobs", wait_ms=60_000)) for _ in range(2))
    bench.run()
    assert cancelled.cancel()
    bench.publish("jobs", [b"one"])
    bench.run()
    assert len(waiting.outcome.words.portions) == 1
    bench.tick(61)  # the time of the cancelled one is over as well, and nobody minds
    assert isinstance(cancelled.outcome, Cancelled)


async def _awaited(later: PendingAnswer[str]) -> str:
    return await later
