"""Blocks of leased messages whose acknowledgement a broker refuses at their end, because they lost the messages."""

import asyncio
import tempfile
from collections.abc import Callable, Iterator

import pytest

import headrace
from headrace import errors
from headrace.server import EmbeddedServer

PATIENCE_S = 60.0


@pytest.fixture
def address() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="headrace-") as directory:
        server = EmbeddedServer(f"{directory}/data", host="", unix_socket=f"{directory}/s")
        try:
            yield f"headrace+unix://{directory}/s"
        finally:
            server.close()


@pytest.fixture
def other(address: str) -> Iterator[headrace.Bus]:
    with headrace.connect(address, name="other") as bus:
        bus.publish_many("jobs", [b"first", b"second"])
        yield bus


def test_a_lease_that_expired_and_went_to_another(address: str, other: headrace.Bus) -> None:
    theirs = other.queue("jobs")
    taken: list[headrace.Job] = []

    async def story() -> None:
        async with (
            await headrace.connect_async(address) as bus,
            bus.lease("jobs", max=1, lease=0.05) as jobs,
        ):
            assert [job.offset for job in jobs] == [0]
            theirs.ack(theirs.lease(1))  # the other message
            # This blocks the loop, so that the lease is not extended, until the broker has ended it.
            taken.extend(theirs.lease(1, lease=PATIENCE_S, wait=PATIENCE_S))

    with pytest.raises(errors.NotLeaseHolder, match=r"not acknowledged: message 0 of jobs\[0\]"):
        asyncio.run(story())
    assert [(job.offset, job.deliveries) for job in taken] == [(0, 2)]
    assert theirs.stats().leased == 1
    theirs.ack(taken[0])
    assert theirs.stats().leased == 0


def test_a_lease_that_expired_and_went_to_nobody(address: str, other: headrace.Bus) -> None:
    async def story() -> None:
        async with await headrace.connect_async(address) as bus:
            async with bus.lease("jobs", max=2, lease=0.05) as jobs:
                assert len(jobs) == 2
                while other.queue("jobs").stats().leased:  # blocks the loop
                    pass
            assert (await bus.queue("jobs").stats()).acked == 2

    asyncio.run(story())
    assert other.queue("jobs").lease() == []


def _delete_while_leased(address: str, delete: Callable[[], None]) -> None:
    with headrace.connect(address) as bus, bus.lease("jobs", max=2) as jobs:
        assert len(jobs) == 2
        delete()


def test_a_subscription_that_was_deleted(address: str, other: headrace.Bus) -> None:
    with pytest.raises(errors.SubscriptionNotFound):
        _delete_while_leased(address, lambda: other.delete_subscription("jobs"))
    assert other.subscriptions("jobs") == []


def test_a_subscription_that_was_deleted_and_made_again(address: str, other: headrace.Bus) -> None:
    def delete() -> None:
        other.delete_subscription("jobs")
        assert len(other.queue("jobs").lease(2)) == 2

    with pytest.raises(errors.NotLeaseHolder, match=r"message 0 of jobs\[0\], 1 of jobs"):
        _delete_while_leased(address, delete)
    assert other.queue("jobs").stats().leased == 2


def test_a_topic_that_was_deleted(address: str, other: headrace.Bus) -> None:
    with pytest.raises(errors.TopicNotFound):
        _delete_while_leased(address, lambda: other.delete_topic("jobs"))
    assert other.topics() == []
