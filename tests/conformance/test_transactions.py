"""A transaction of which a part cannot be staged commits nothing, however often somebody tries."""

from typing import Any

import pytest
from tests.conformance.conftest import WITH_HTTP
from tests.conformance.stage import Run

from headrace import errors


@pytest.fixture(params=WITH_HTTP)
def transport(request: pytest.FixtureRequest) -> str:
    return str(request.param)


async def _full(bus: Any, topic: str) -> tuple[str, str]:
    """Two topics, of which the first has a full subscription."""
    full, other = f"{topic}-full", f"{topic}-other"
    for name in (full, other):
        await bus.create_topic(name)
    await bus.create_subscription(full, "default", messages_max=1)
    await bus.publish(full, b"first")
    return full, other


def test_every_commit_after_a_refused_batch_raises_the_same_error(run: Run, topic: str) -> None:
    async def story(bus: Any) -> None:
        full, other = await _full(bus, topic)
        transaction = bus.transaction(topic)
        await transaction.begin()
        await transaction.publish(other, b"B")
        await transaction.publish(full, b"A")
        for _ in range(3):
            with pytest.raises(errors.SubscriptionFull):
                await transaction.commit()
        with pytest.raises(errors.SubscriptionFull):
            await transaction.publish(other, b"C")
        assert "committed" not in repr(transaction)
        await transaction.abort()
        with pytest.raises(errors.SubscriptionFull):
            await transaction.commit()
        assert await bus.offsets(other) == {0: 0}
        assert await bus.offsets(full) == {0: 1}

    run(story)


def test_a_block_with_a_refused_batch_commits_nothing(run: Run, topic: str) -> None:
    async def story(bus: Any) -> None:
        full, other = await _full(bus, topic)
        transaction = bus.transaction(topic)

        async def block() -> None:
            async with transaction:
                await transaction.publish(other, b"B")
                await transaction.publish(full, b"A")
                with pytest.raises(errors.SubscriptionFull):
                    await transaction.commit()

        with pytest.raises(errors.SubscriptionFull):
            await block()
        with pytest.raises(errors.SubscriptionFull):
            await transaction.commit()
        assert await bus.offsets(other) == {0: 0}

    run(story)
