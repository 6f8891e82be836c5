"""An answer to come is told to everybody who asks for it, and can be awaited."""

import asyncio

import pytest

from headrace.broker.pending_answer import PendingAnswer
from headrace.model.errors import Busy, Cancelled, HeadraceError
from headrace.model.leasing import Lease, SubscriptionCreate
from headrace.model.requests import TopicCreate
from headrace.testing.workbench import Workbench


@pytest.mark.parametrize("outcome", [7, None, Busy()])
def test_everybody_is_told_once_in_their_order(outcome: int | HeadraceError | None) -> None:
    pending: PendingAnswer[int | None] = PendingAnswer()
    told: list[tuple[str, object]] = []
    pending.then(lambda answer: told.append(("first", answer)))
    pending.then(lambda answer: told.append(("second", answer)))
    assert not pending.resolved
    pending.resolve(outcome)
    pending.then(lambda answer: told.append(("late", answer)))
    assert pending.resolved
    assert told == [("first", outcome), ("second", outcome), ("late", outcome)]


def test_an_answer_can_be_awaited() -> None:
    async def ask() -> None:
        there: PendingAnswer[str] = PendingAnswer()
        there.resolve("there")
        assert await there == "there"
        coming: PendingAnswer[str] = PendingAnswer()
        asyncio.get_running_loop().call_soon(coming.resolve, "come")
        assert await asyncio.gather(*(_awaited(coming) for _ in range(3))) == ["come"] * 3
        failing: PendingAnswer[str] = PendingAnswer()
        asyncio.get_running_loop().call_soon(failing.resolve, Busy("too much"))
        with pytest.raises(Busy, match="too much"):
            await failing

    asyncio.run(ask())


def test_who_is_cancelled_keeps_no_answer_from_the_others() -> None:
    async def ask() -> None:
        pending: PendingAnswer[str] = PendingAnswer()
        cancelled, waiting = asyncio.create_task(_awaited(pending)), asyncio.create_task(_awaited(pending))
        await asyncio.sleep(0)
        cancelled.cancel()
        with pytest.raises(asyncio.CancelledError):
            await cancelled
        pending.resolve("done")
        assert await waiting == "done"

    asyncio.run(ask())


def test_a_cancelled_answer_tells_its_listeners_and_takes_no_outcome() -> None:
    pending: PendingAnswer[str] = PendingAnswer()
    told: list[object] = []
    pending.then(told.append)
    pending.then(told.append)
    assert pending.cancel()
    assert pending.resolved
    assert [type(one) for one in told] == [Cancelled, Cancelled]
    pending.resolve("too late")
    assert not pending.cancel()
    assert isinstance(pending.outcome, Cancelled)
    assert len(told) == 2


def test_an_answer_that_is_there_cannot_be_cancelled() -> None:
    pending: PendingAnswer[str] = PendingAnswer()
    pending.resolve("there")
    assert not pending.cancel()
    assert pending.outcome == "there"


def test_who_awaits_a_cancelled_answer_is_told() -> None:
    async def ask() -> None:
        pending: PendingAnswer[str] = PendingAnswer()
        waiting = [asyncio.create_task(_awaited(pending)) for _ in range(2)]
        await asyncio.sleep(0)
        pending.cancel()
        for task in waiting:
            with pytest.raises(Cancelled):
                await task

    asyncio.run(ask())


def test_a_lease_that_is_cancelled_takes_no_message() -> None:
    bench = Workbench()
    bench.ask(TopicCreate("jobs"))
    bench.ask(SubscriptionCreate("jobs"))
    first, second = (bench.begin(Lease("jobs", wait_ms=60_000)) for _ in range(2))
    assert first.cancel()
    bench.publish("jobs", [b"one"])
    bench.run()
    assert [list(one.all_offsets) for one in second.outcome.answer.portions] == [[0]]
    assert isinstance(first.outcome, Cancelled)


async def _awaited(pending: PendingAnswer[str]) -> str:
    return await pending
