"""Leased messages whose leases ended before they were settled, in blocks and in loops."""

import asyncio
import logging

import pytest
from tests.unit.test_client_acknowledging import Stand, body, run, turns

from headrace import errors
from headrace.client._async.leasing.leased_block import AsyncLeasedBlock
from headrace.client.leasing.jobs import Job
from headrace.model.leasing import Ack, Refusal, Release, Settlement


async def lost_in_a_block(stand: Stand) -> tuple[AsyncLeasedBlock, list[Job]]:
    """A block with two messages whose leases ended before they could be extended."""
    block = stand.queue.leased(2)
    entering = asyncio.create_task(block.__aenter__())
    await turns()
    stand.wire.answer(stand.portion(1, 2, lease_s=0.05), body(1, 2))
    jobs = await entering
    while stand.acknowledger.held_leases.holds(jobs[0]):
        await asyncio.sleep(0.01)
    stand.wire.asked.clear()  # attempts to extend them
    return block, jobs


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        ("", None),
        ("lease_expired", errors.LeaseExpired),
        ("not_lease_holder", errors.NotLeaseHolder),
        ("message_gone", errors.MessageGone),
    ],
)
def test_a_block_acknowledges_late_and_raises_what_is_refused(
    code: str, kind: type[errors.HeadraceError] | None
) -> None:
    async def story(stand: Stand) -> None:
        block, _ = await lost_in_a_block(stand)
        leaving = asyncio.create_task(block.__aexit__(None, None, None))
        await turns()
        head = stand.wire.answer(Settlement([Refusal(0, 2, code)] if code else []))
        assert (type(head), list(head.holdings[0].all_offsets)) == (Ack, [1, 2])
        if kind is None:
            await leaving
        else:
            with pytest.raises(kind, match=r"not acknowledged: message 2 of t\[0\]"):
                await leaving
        assert not stand.acknowledger.held_leases.knows((0, 1))

    run(story)


def test_a_block_leaves_what_was_said_after_the_lease_ended() -> None:
    async def story(stand: Stand) -> None:
        block, jobs = await lost_in_a_block(stand)
        acking = asyncio.create_task(stand.queue.ack(jobs))
        await turns()
        stand.wire.answer(Settlement())
        assert await acking == []
        await block.__aexit__(None, None, None)
        assert stand.wire.asked == []

    run(story)


def test_a_block_does_not_hide_its_own_error() -> None:
    async def story(stand: Stand) -> None:
        block, _ = await lost_in_a_block(stand)
        leaving = asyncio.create_task(block.__aexit__(KeyError, KeyError("mine"), None))
        await turns()
        assert type(stand.wire.answer(errors.Timeout("no answer"))) is Release
        await leaving

    run(story)


def test_a_block_whose_bus_was_closed_says_so() -> None:
    async def story(stand: Stand) -> None:
        block = stand.queue.leased(1)
        entering = asyncio.create_task(block.__aenter__())
        await turns()
        stand.wire.answer(stand.portion(1), body(1))
        await entering
        stand.acknowledger.close()
        stand.wire.connection, stand.wire.repeat_answer = None, errors.Closed("the bus is closed")
        with pytest.raises(errors.Closed):
            await block.__aexit__(None, None, None)

    run(story)


def test_jobs_acknowledge_late_and_log_what_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    async def story(stand: Stand) -> None:
        with caplog.at_level(logging.WARNING):
            jobs = stand.jobs()
            each = aiter(jobs)
            taking = asyncio.create_task(anext(each))
            await turns()
            stand.wire.opened()
            stand.wire.deliver(stand.portion(1), body(1))
            taken = await taking
            with stand.acknowledger.monitor.guard:
                assert stand.acknowledger.held_leases.ended(taken.until) == 1
            stand.wire.asked.clear()
            waiting = asyncio.create_task(anext(each))
            await turns()
            acks = [(head, tell) for kind, head, tell in stand.wire.asked if kind is Ack]
            ((head, tell),) = acks
            assert list(head.holdings[0].all_offsets) == [1]
            tell(Settlement([Refusal(0, 1, "lease_expired")]), b"")
            assert "action=Ack topic=t partition=0 offset=1 messages=1 code=lease_expired" in caplog.text
            waiting.cancel()

    run(story)
