"""A call's time-out counts from its beginning, however often and however much it asks the broker."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from tests.unit.test_client_acknowledging import Stand, body, job, turns

import headrace
from headrace import errors
from headrace.client._async import bus as bus_module
from headrace.client._async.admin import topics
from headrace.client._async.admin.topics import AsyncTopicAdmin
from headrace.client._async.concurrency import ResultCell as Waited
from headrace.client._async.consumer import discovery, subscription
from headrace.client._async.consumer.discovery import AsyncDiscovery
from headrace.client._async.leasing import acknowledger, jobs, lease_requester, prefetch, scheduled
from headrace.client._async.leasing.scheduled import AsyncScheduled
from headrace.client._async.producer import metadata_cache, transaction
from headrace.client._async.producer.metadata_cache import AsyncMetadataCache
from headrace.client._async.producer.transaction import AsyncTransaction
from headrace.client.connection.clock import Clock
from headrace.client.leasing.scheduled_times import MessageName
from headrace.model.leasing import Edited, EditOutcome, Release, Settlement, Subscriptions
from headrace.model.requests import OffsetsFound, TopicInfo, Topics, TransactionBegun
from headrace.model.topic import TopicSettings

TIMEOUT_S = 5.0
TOPIC = TopicInfo("t", 1, 0, TopicSettings().as_dict())


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What the client takes for the time."""
    time = [1000.0]
    for module in (topics, metadata_cache, discovery, scheduled, acknowledger, lease_requester, transaction):
        monkeypatch.setattr(module, "now", lambda: time[0])
    return time


def run(story: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(story, 20))


@pytest.mark.parametrize(
    "say",
    [
        lambda queue: queue.ack(job(1)),
        lambda queue: queue.ack([job(1), job(2)]),
        lambda queue: queue.release(job(1)),
        lambda queue: queue.reject(job(1)),
        lambda queue: queue.extend(job(1)),
    ],
)
@pytest.mark.parametrize("trouble", [errors.ConnectionFailed(), errors.Busy()])
def test_what_is_said_again_has_the_time_that_is_left(
    say: Callable[[Any], Any], trouble: errors.HeadraceError, clock: list[float]
) -> None:
    async def story() -> None:
        stand, timeouts = Stand(), Timeouts(Settlement())
        stand.wire.request = timeouts.request
        said = asyncio.create_task(say(stand.queue))
        await turns()
        clock[0] += 3
        stand.wire.answer(trouble)
        await said
        assert timeouts.given == [TIMEOUT_S - 3]

    run(story())


def test_what_is_said_again_too_late_is_not_said(clock: list[float]) -> None:
    async def story() -> None:
        stand = Stand()
        said = asyncio.create_task(stand.queue.ack(job(1)))
        await turns()
        clock[0] += TIMEOUT_S
        stand.wire.answer(errors.ConnectionFailed())
        with pytest.raises(errors.ConnectionFailed):
            await said

    run(story())


def test_leasing_again_has_the_time_that_is_left(clock: list[float]) -> None:
    async def story() -> None:
        stand, timeouts = Stand(), Timeouts(errors.Timeout("in the end"))
        stand.wire.request = timeouts.request
        leased = asyncio.create_task(stand.queue.lease(1, wait=10))
        await turns()
        clock[0] += 4
        stand.wire.answer(errors.ConnectionFailed())
        with pytest.raises(errors.Timeout, match="in the end"):
            await leased
        assert timeouts.given == [TIMEOUT_S + 10 - 4]
        assert timeouts.heads[0].wait_ms == 6000

    run(story())


def test_messages_that_come_after_the_time_out_are_given_back(clock: list[float]) -> None:
    del clock

    async def story() -> None:
        stand = Stand()
        late: list[Any] = []
        queue_request = stand.wire.queue_request

        def keep(*args: Any, **named: Any) -> None:
            late.append(named.pop("late", None))
            queue_request(*args, **named)

        stand.wire.queue_request = keep
        leased = asyncio.create_task(stand.queue.lease(1))
        await turns()
        stand.wire.answer(errors.Timeout())
        with pytest.raises(errors.Timeout):
            await leased
        late[0](stand.portion(1), body(1))
        assert [(kind, head.undelivered) for kind, head, _ in stand.wire.asked] == [(Release, True)]

    run(story())


class Timeouts:
    """Answers requests one after the other, each after a second, and keeps how much time they had."""

    def __init__(self, *answers: Any, clock: list[float] | None = None) -> None:
        self.timeout = TIMEOUT_S
        self.connection = None
        self.given: list[float] = []
        self.heads: list[Any] = []
        self._answers = list(answers)
        self._clock = clock

    async def request(self, head: Any, _body: bytes = b"", **named: Any) -> Any:
        timeout = named.get("timeout")
        self.given.append(TIMEOUT_S if timeout is None else timeout)
        self.heads.append(head)
        if self._clock is not None:
            self._clock[0] += 1
        answer = self._answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def request_with_body(self, head: Any, body: bytes = b"", **named: Any) -> Any:
        return await self.request(head, body, **named), b""

    def listen(self, _listener: Any) -> None:
        """There is nothing to tell."""


def line(clock: list[float], *answers: Any) -> Any:
    return Timeouts(*answers, clock=clock)


def test_several_requests_of_one_call_share_its_time(clock: list[float]) -> None:
    async def story() -> None:
        trimmed = line(clock, OffsetsFound({0: 1}), OffsetsFound({0: 1}))
        await AsyncTopicAdmin(trimmed, AsyncMetadataCache(trimmed)).trim("t", None, "latest", False, 0)
        assert trimmed.given == [5, 4]

        found = line(clock, TOPIC, OffsetsFound({0: 1}), Topics([TOPIC]), OffsetsFound({0: 1}))
        intake: Any = type("Intake", (), {"readers": {}, "add": lambda *_, **__: None})()
        timers: Any = type("Timers", (), {"later": lambda *_: None})()
        begun = AsyncDiscovery(found, intake, timers, ["t"], ["t*"], None)
        await begun.begin("earliest", clock[0] + TIMEOUT_S)
        assert found.given == [5, 4, 3, 2]

        edited = line(clock, Subscriptions([]), errors.MessageGone())
        with pytest.raises(errors.MessageGone):
            await AsyncScheduled(edited, Clock(), MessageName("t", 0, 0), None, "").update(value=b"new")
        assert edited.given == [5, 4]

        moved = line(clock, Edited([EditOutcome(0, 0, "applied", 2)]))
        await AsyncScheduled(moved, Clock(), MessageName("t", 0, 0), 1, "").move(in_=5)
        assert moved.given == [5]

        committed = line(clock, TransactionBegun(1, 0), TOPIC, errors.ConnectionFailed())
        work = AsyncTransaction(committed, AsyncMetadataCache(committed), "x", None, 60)
        await work.begin()
        await work.publish("t", b"1")

        async def get(deadline: float) -> Any:
            assert deadline == clock[0] + 3
            clock[0] += 1
            return Nobody()

        committed.get = get
        with pytest.raises(errors.ConnectionFailed):
            await work.commit(timeout=3)
        assert committed.given == [5, 5, 2]

    run(story())


class Nobody:
    """A connection that breaks."""

    def request_nowait(self, _head: Any, _body: bytes, told: Callable[[Any, bytes], None]) -> None:
        told(errors.ConnectionFailed(), b"")


def test_a_transaction_that_cannot_be_committed_is_aborted_within_the_same_time(clock: list[float]) -> None:
    async def story() -> None:
        failed = line(clock, TransactionBegun(1, 0), errors.Timeout(), errors.Timeout())
        with pytest.raises(errors.Timeout):
            async with AsyncTransaction(failed, AsyncMetadataCache(failed), "x", None, 60):
                pass
        assert failed.given == [5, 5, 4]

    run(story())


def stalled(clock: list[float]) -> type[Waited[Any]]:
    """An answer of a broker that does not answer: whoever waits for it waits in vain, by the clock."""

    class Stalled(Waited[Any]):
        async def wait(self, timeout: float | None = None) -> Any:
            clock[0] += TIMEOUT_S if timeout is None else timeout
            raise errors.Timeout

    return Stalled


@pytest.mark.parametrize("what", ["subscriptions", "jobs"])
def test_all_that_a_bus_closes_shares_its_time(clock: list[float], what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def story() -> None:
        bus = await headrace.open_async(":memory:", timeout=TIMEOUT_S)
        await bus.publish_many("t", [b"x"] * 100)
        parts: list[Any] = []
        for number in range(8):
            if what == "jobs":
                parts.append(bus.queue("t", f"s{number}").jobs(300))
            else:
                parts.append(bus.subscribe("t", group=f"g{number}"))
            each = aiter(parts[-1])
            parts.append(each)
            await anext(each)
            if what == "subscriptions":
                await anext(each)  # now there is something to commit
        for module in (bus_module, jobs, prefetch, subscription):
            monkeypatch.setattr(module, "now", lambda: clock[0])
        for module in (prefetch, subscription):
            monkeypatch.setattr(module, "ResultCell", stalled(clock))
        began = clock[0]
        await bus.close()
        assert clock[0] - began <= TIMEOUT_S + 0.1

    run(story())
