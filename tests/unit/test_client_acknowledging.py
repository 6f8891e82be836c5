"""What is said about leased messages, and how messages are asked for, seen from the connection's side."""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from headrace import errors
from headrace.client._async.concurrency import Timers
from headrace.client._async.leasing.acknowledger import AsyncAcknowledger
from headrace.client._async.leasing.jobs import AsyncJobs
from headrace.client._async.leasing.lease_requester import AsyncLeaseRequester
from headrace.client._async.leasing.prefetch import AsyncPrefetcher
from headrace.client._async.leasing.queue import AsyncQueue
from headrace.client.connection.clock import Clock
from headrace.client.leasing.deserializing import JobDeserializer
from headrace.client.leasing.jobs import Job
from headrace.client.leasing.prefetch_window import PrefetchWindow
from headrace.model.batch import Columns, encode
from headrace.model.leasing import (
    Ack,
    Extend,
    Holding,
    Lease,
    Leased,
    LeasedPortion,
    Refusal,
    Release,
    Settlement,
)
from headrace.model.requests import Done
from headrace.model.standing_lease import LeaseClose, LeaseCredit, LeaseDelivery, LeaseOpened


class Wire:
    """Stands for both connections: keeps what is asked, until the test answers it."""

    def __init__(self) -> None:
        self.closed = False
        self.draining = False
        self.timeout = 5.0
        self.connection: Any = self
        self.asked: list[tuple[type, Any, Callable[[Any, bytes], None]]] = []
        self.told: list[Any] = []
        """What was said that has no answer."""
        self.leases: dict[int, Any] = {}
        self.repeated: list[Any] = []
        self.repeat_answer: Any = None

    def before_flush(self, call: Callable[[], None]) -> None:
        asyncio.get_running_loop().call_soon(call)

    def flush(self) -> None:
        """There is nothing to send."""

    def queue_request(
        self,
        head: Any,
        _body: bytes,
        callback: Callable[[Any, bytes], None],
        timeout: float | None = None,
        **_: Any,
    ) -> None:
        assert timeout is not None
        self.asked.append((type(head), head, callback))

    request_nowait = queue_request

    def queue_tell(self, head: Any) -> None:
        self.told.append(head)

    def opened(self, number: int = 1) -> Any:
        """Answer that a standing request is open; returns what was asked for."""
        return self.answer(LeaseOpened(number))

    def deliver(self, leased: Leased, body: bytes, number: int = 1) -> None:
        """Push messages to whom has a standing request."""
        self.leases[number].lease_delivered(LeaseDelivery(number, leased.portions, len(body)), body)

    async def request(self, head: Any, _body: bytes = b"", **_: Any) -> Any:
        self.repeated.append(head)
        if isinstance(self.repeat_answer, Exception):
            raise self.repeat_answer
        return self.repeat_answer

    async def request_with_body(self, head: Any, **named: Any) -> Any:
        return await self.request(head, **named), b""

    def listen(self, listener: Any) -> None:
        listener.connection_up(self)

    def forget(self, _listener: Any) -> None:
        """It is told nothing anyway."""

    def measure_clock(self) -> None:
        """There is no clock to compare with."""

    def answer(self, answer: Any, body: bytes = b"") -> Any:
        """Answer what was asked first; returns what that was."""
        _, head, callback = self.asked.pop(0)
        callback(answer, body)
        return head


def wire() -> Any:
    return Wire()


class Stand:
    """A queue over such a wire."""

    def __init__(self) -> None:
        self.wire = wire()
        self._timers = Timers()
        self.clock = Clock()
        self.clock.sample(self.clock.monotonic(), self.clock.now_us(), self.clock.monotonic())
        self.acknowledger = AsyncAcknowledger(self.wire, self._timers, self.clock, "t", "s")
        bus: Any = self
        self.queue = AsyncQueue(bus, self.wire, self.acknowledger, AsyncLeaseRequester(bus, self.acknowledger), None)

    async def _consuming_line(self) -> Any:
        return self.wire

    def prefetch(self, messages: int, most: int | None = None) -> AsyncPrefetcher:
        bus: Any = self
        return AsyncPrefetcher(bus, self.acknowledger, window=PrefetchWindow(messages, most), lease_ms=0)

    def jobs(self) -> AsyncJobs:
        bus: Any = self
        return AsyncJobs(
            bus, self.acknowledger, JobDeserializer(None), prefetch=1, lease_ms=200, auto=True, timeout=None
        )

    def _forget(self, _part: Any) -> None:
        """A bus forgets what is closed."""

    def portion(self, *offsets: int, lease_s: float = 30.0, lease: int = 1) -> Leased:
        return Leased([LeasedPortion(0, lease, self.clock.now_us() + round(lease_s * 1e6), list(offsets))])


def run(story: Callable[[Stand], Coroutine[Any, Any, None]]) -> None:
    async def on_a_stand() -> None:
        await story(Stand())

    asyncio.run(asyncio.wait_for(on_a_stand(), 20))


def body(*offsets: int, dues: list[int | None] | None = None) -> bytes:
    batch = encode(Columns([b"%d" % offset for offset in offsets], dues=dues), 1)
    batch.place(0, 1, 0)
    return bytes(batch.data)


def job(offset: int, lease: int = 1, partition: int = 0) -> Job:
    return Job(offset, b"", 0, topic="t", partition=partition, lease=lease)


async def turns(count: int = 3) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


# Acknowledgements.


def test_acks_of_one_moment_go_together() -> None:
    async def story(stand: Stand) -> None:
        jobs = [job(1), job(2), job(9, lease=2), job(3, partition=1), job(4)]
        acks = [asyncio.create_task(stand.queue.ack(each)) for each in jobs]
        await turns()
        assert len(stand.wire.asked) == 1
        head = stand.wire.answer(Settlement())
        assert head == Ack("t", [Holding(0, 1, [1, 2, 4]), Holding(0, 2, [9]), Holding(1, 1, [3])], "s")
        assert await asyncio.gather(*acks) == [None] * 5

    run(story)


def test_only_who_is_refused_is_told_so() -> None:
    async def story(stand: Stand) -> None:
        acks = [asyncio.create_task(stand.queue.ack(job(offset))) for offset in (1, 2, 3)]
        await turns()
        stand.wire.answer(Settlement([Refusal(0, 2, "not_lease_holder"), Refusal(0, 3, "message_gone")]))
        told = await asyncio.gather(*acks, return_exceptions=True)
        assert [type(each) for each in told] == [type(None), errors.NotLeaseHolder, errors.MessageGone]

    run(story)


def test_with_enough_under_way_acks_wait_for_company() -> None:
    async def story(stand: Stand) -> None:
        acks = []
        for offset in range(5):
            acks.append(asyncio.create_task(stand.queue.ack(job(offset))))
            await turns()
        assert len(stand.wire.asked) == 2
        stand.wire.answer(Settlement())
        await turns()
        assert [list(head.holdings[0].all_offsets) for _, head, _ in stand.wire.asked] == [[1], [2, 3, 4]]
        stand.wire.answer(Settlement())
        stand.wire.answer(Settlement())
        await asyncio.gather(*acks)

    run(story)


def test_a_great_many_acks_are_divided() -> None:
    async def story(stand: Stand) -> None:
        acks = [asyncio.create_task(stand.queue.ack(job(offset))) for offset in range(2500)]
        await turns()
        sizes = []
        while stand.wire.asked:
            head = stand.wire.answer(Settlement())
            sizes.append(sum(len(holding.all_offsets) for holding in head.holdings))
        assert sizes == [1000, 1000, 500]
        await asyncio.gather(*acks)
        many = asyncio.create_task(stand.queue.ack([job(offset) for offset in range(25_000)]))
        await turns()
        assert len(stand.wire.asked) == 3
        stand.wire.answer(Settlement([Refusal(0, 7, "message_gone")]))
        stand.wire.answer(Settlement())
        stand.wire.answer(Settlement([Refusal(0, 24_999, "message_gone")]))
        assert [refusal.offset for refusal in await many] == [7, 24_999]

    run(story)


def test_what_got_lost_is_said_again_and_counts_as_done_if_it_was() -> None:
    async def story(stand: Stand) -> None:
        refused = [Refusal(0, 1, "message_gone"), Refusal(0, 2, "lease_expired"), Refusal(0, 3, "not_lease_holder")]
        stand.wire.repeat_answer = Settlement(refused)
        acks = [asyncio.create_task(stand.queue.ack(job(offset))) for offset in (1, 2, 3)]
        await turns()
        stand.wire.answer(errors.ConnectionFailed())
        told = await asyncio.gather(*acks, return_exceptions=True)
        # Whoever does not hold a message any more has not acknowledged it: it went to another.
        assert [type(each) for each in told] == [type(None), errors.LeaseExpired, errors.NotLeaseHolder]
        assert stand.wire.repeated == [Ack("t", [Holding(0, 1, [1], 2)], "s")]

    run(story)


@pytest.mark.parametrize("trouble", [errors.Busy(), errors.Draining()])
def test_what_was_not_done_is_said_again_and_every_answer_counts(trouble: errors.HeadraceError) -> None:
    async def story(stand: Stand) -> None:
        stand.wire.repeat_answer = Settlement([Refusal(0, 1, "message_gone")])
        ack = asyncio.create_task(stand.queue.ack(job(1)))
        await turns()
        stand.wire.answer(trouble)
        with pytest.raises(errors.MessageGone):
            await ack

    run(story)


def test_without_a_connection_it_is_said_when_there_is_one() -> None:
    async def story(stand: Stand) -> None:
        stand.wire.repeat_answer = Settlement()
        stand.wire.connection = None
        await stand.queue.ack(job(1))
        assert await stand.queue.reject([job(2)], "why") == []
        stand.wire.repeat_answer = errors.Closed("closed")
        with pytest.raises(errors.Closed):
            await stand.queue.ack(job(3))

    run(story)


def test_how_late_messages_were_goes_with_the_next_ack() -> None:
    async def story(stand: Stand) -> None:
        due = stand.clock.now_us() - 5000
        lease = asyncio.create_task(stand.queue.lease(2))
        await turns()
        stand.wire.answer(stand.portion(1, 2), body(1, 2, dues=[due, None]))
        jobs = await lease
        asyncio.create_task(stand.queue.ack(jobs))  # noqa: RUF006
        await turns()
        ((_, head, _),) = stand.wire.asked
        assert len(head.late_us) == 1
        assert head.late_us[0] >= 5000

    run(story)


# Leasing by hand.


def test_leases_of_one_moment_are_asked_for_together_and_divided() -> None:
    async def story(stand: Stand) -> None:
        wanted = [asyncio.create_task(stand.queue.lease(count)) for count in (2, 1, 1)]
        await turns()
        head = stand.wire.answer(stand.portion(1, 2, 3), body(1, 2, 3))
        assert head == Lease("t", "s", 4)
        await turns()
        assert [[job.offset for job in await wanted[place]] for place in (0, 1)] == [[1, 2], [3]]
        assert stand.wire.answer(Leased([])).messages_max == 1  # who got nothing has asked again
        assert await wanted[2] == []

    run(story)


def test_those_who_ask_for_other_terms_ask_for_themselves() -> None:
    async def story(stand: Stand) -> None:
        wanted = [asyncio.create_task(stand.queue.lease(1, lease=seconds)) for seconds in (None, 5, 5)]
        await turns()
        assert [(head.lease_ms, head.messages_max) for _, head, _ in stand.wire.asked] == [(0, 1), (5000, 2)]
        while stand.wire.asked:
            stand.wire.answer(Leased([]))
        assert await asyncio.gather(*wanted) == [[], [], []]

    run(story)


def test_messages_for_one_who_has_gone_are_given_back() -> None:
    async def story(stand: Stand) -> None:
        stays = asyncio.create_task(stand.queue.lease(1, wait=5))
        goes = asyncio.create_task(stand.queue.lease(1, wait=5))
        await turns()
        goes.cancel()
        await turns()
        stand.wire.answer(stand.portion(1, 2), body(1, 2))
        await turns()
        assert [job.offset for job in await stays] == [1]
        ((kind, head, _),) = stand.wire.asked
        assert (kind, head) == (Release, Release("t", [Holding(0, 1, [2])], 0, undelivered=True, subscription="s"))

    run(story)


def test_an_error_is_told_to_all_who_asked() -> None:
    async def story(stand: Stand) -> None:
        wanted = [asyncio.create_task(stand.queue.lease(1)) for _ in range(2)]
        await turns()
        stand.wire.answer(errors.TopicNotFound("no"))
        told = await asyncio.gather(*wanted, return_exceptions=True)
        assert [type(each) for each in told] == [errors.TopicNotFound] * 2
        damaged = asyncio.create_task(stand.queue.lease(1))
        await turns()
        stand.wire.answer(stand.portion(1), b"rubbish")
        with pytest.raises(errors.InvalidBatch):
            await damaged

    run(story)


# Extending.


def test_what_is_held_is_extended_and_what_is_lost_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    async def story(stand: Stand) -> None:
        with stand.acknowledger.monitor.guard:
            stand.acknowledger.hold(stand.portion(1, 2, 3, lease_s=0.1).portions, 100)
        stand.acknowledger.ack_one(job(3))
        while len(stand.wire.asked) < 2:
            await asyncio.sleep(0.01)
        stand.wire.answer(Settlement())
        until_us = stand.clock.now_us() + 500_000
        with caplog.at_level(logging.WARNING):
            head = stand.wire.answer(Settlement([Refusal(0, 2, "lease_expired")], until_us))
        assert (type(head), head.lease_ms) == (Extend, 100)
        assert list(head.holdings[0].all_offsets) == [1, 2]
        assert "partition=0 offset=2 messages=1 code=lease_expired" in caplog.text
        assert stand.acknowledger.held_leases.until_us(job(1)) == until_us
        assert not stand.acknowledger.held_leases.holds(job(2))

    run(story)


def test_a_lease_that_cannot_be_extended_is_given_up(caplog: pytest.LogCaptureFixture) -> None:
    async def story(stand: Stand) -> None:
        stand.wire.connection = None
        with caplog.at_level(logging.WARNING), stand.acknowledger.monitor.guard:
            stand.acknowledger.hold(stand.portion(1, lease_s=0.05).portions, 0)
            while stand.acknowledger.held_leases.holds(job(1)):
                await asyncio.sleep(0.01)
        assert "leases expired before they were extended  messages=1 topic=t" in caplog.text

    run(story)


# Leasing ahead.


def test_a_buffer_is_filled_up_while_it_is_used() -> None:
    async def story(stand: Stand) -> None:
        prefetch = stand.prefetch(4)
        await prefetch.begin()
        head = stand.wire.opened()
        assert (head.credit_messages, head.ahead_ms) == (4, 500)
        stand.wire.deliver(stand.portion(1, 2, 3, 4), body(1, 2, 3, 4))
        assert (stand.wire.asked, stand.wire.told) == ([], [])
        taken = [await prefetch.take(0), await prefetch.take(0)]
        assert [each.offset for each in taken if each] == [1, 2]
        assert stand.wire.told == [LeaseCredit(1, 2)]
        prefetch.stop()
        assert await prefetch.take() is None

    run(story)


def test_what_was_not_taken_is_given_back() -> None:
    async def story(stand: Stand) -> None:
        prefetch = stand.prefetch(2)
        await prefetch.begin()
        stand.wire.opened()
        stand.wire.deliver(stand.portion(1, 2), body(1, 2))
        assert await prefetch.take(0)
        assert stand.wire.told == [LeaseCredit(1, 1)]
        closing = asyncio.create_task(prefetch.close())
        await turns()
        stand.wire.deliver(stand.portion(3, lease=2), body(3))
        assert stand.wire.answer(Done()) == LeaseClose(1)
        await turns()
        given_back = stand.wire.answer(Settlement())
        assert given_back == Release(
            "t", [Holding(0, 1, [2]), Holding(0, 2, [3])], 0, undelivered=True, subscription="s"
        )
        await closing
        assert len(stand.acknowledger.held_leases) == 0
        assert stand.wire.leases == {}

    run(story)


def test_a_request_that_is_opened_too_late_is_closed_and_gives_back() -> None:
    async def story(stand: Stand) -> None:
        prefetch = stand.prefetch(2)
        await prefetch.begin()
        prefetch.abandon()
        stand.wire.opened(7)
        stand.wire.deliver(stand.portion(3), body(3), 7)
        (_, closed, answer), (kind, given_back, _) = stand.wire.asked
        assert closed == LeaseClose(7)
        assert (kind, given_back.holdings, given_back.undelivered) == (Release, [Holding(0, 1, [3])], True)
        answer(Done(), b"")
        assert stand.wire.leases == {}

    run(story)


def test_a_broker_that_does_not_answer_is_not_waited_for_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.client._async.leasing.prefetch._WITHDRAW_S", 0.01)

    async def story(stand: Stand) -> None:
        prefetch = stand.prefetch(2)
        await prefetch.begin()
        stand.wire.opened()
        stand.wire.deliver(stand.portion(3), body(3))
        closing = asyncio.create_task(prefetch.close())
        while len(stand.wire.asked) < 2:
            await turns()
        assert stand.wire.asked.pop(0)[1] == LeaseClose(1)
        assert stand.wire.answer(Settlement()).holdings == [Holding(0, 1, [3])]
        await closing

    run(story)


def test_messages_that_are_not_due_do_not_keep_others_out() -> None:
    async def story(stand: Stand) -> None:
        prefetch = stand.prefetch(1)
        await prefetch.begin()
        stand.wire.opened()
        due = stand.clock.now_us() + 60_000_000
        stand.wire.deliver(stand.portion(1), body(1, dues=[due]))
        assert stand.wire.told == [LeaseCredit(1, 1, 0, 0)], "only what is due"
        stand.wire.deliver(stand.portion(2, lease=2), body(2))
        taken = await prefetch.take(0)
        assert taken is not None
        assert taken.offset == 2

    run(story)


def test_a_prefetch_window_that_shrinks_to_what_is_there_asks_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    times_s = [0.0]
    monkeypatch.setattr("headrace.client._async.leasing.prefetch.now", lambda: times_s[0])

    async def story(stand: Stand) -> None:
        prefetch = stand.prefetch(1, 1000)
        await prefetch.begin()
        stand.wire.opened()
        stand.wire.deliver(stand.portion(1), body(1))
        assert await prefetch.take()
        assert stand.wire.told.pop().messages == 2  # that was quick
        stand.wire.deliver(stand.portion(2, 3, lease=2), body(2, 3))
        times_s[0] = 5.0
        assert await prefetch.take()  # that was slow: the window shrinks to the one message that is there
        assert stand.wire.told == []
        assert await prefetch.take()
        assert [head.messages for head in stand.wire.told] == [1]

    run(story)


def test_a_window_that_has_grown_shrinks_when_nothing_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    times_s = [0.0]
    monkeypatch.setattr("headrace.client._async.leasing.prefetch.now", lambda: times_s[0])

    async def story(stand: Stand) -> None:
        prefetch = stand.prefetch(1, 1000)
        await prefetch.begin()
        stand.wire.opened()
        for offset in range(4):
            stand.wire.deliver(stand.portion(offset, lease=offset + 1), body(offset))
            assert await prefetch.take()
        assert prefetch._window.size > 1
        prefetch._shrink(1)
        assert stand.wire.asked == [], "it was in use just now"
        times_s[0] = 60.0
        prefetch._shrink(1)
        assert stand.wire.answer(Done()) == LeaseClose(1)
        assert stand.wire.opened(2).credit_messages < 8

    run(story)


def test_what_is_not_due_is_fetched_now_and_then_and_not_all_the_time() -> None:
    async def story(stand: Stand) -> None:
        prefetch = stand.prefetch(10)
        await prefetch.begin()
        stand.wire.opened()
        due = stand.clock.now_us() + 60_000_000
        stand.wire.deliver(stand.portion(1), body(1, dues=[due]))
        assert [head.ahead_ms for head in stand.wire.told] == [0]
        while len(stand.wire.told) < 2:
            await asyncio.sleep(0.01)
        assert [head.ahead_ms for head in stand.wire.told] == [0, 500]

    run(story)


def test_bytes_go_back_when_messages_leave_the_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.client._async.leasing.prefetch._BYTES_MAX", 1000)

    async def story(stand: Stand) -> None:
        prefetch = stand.prefetch(100)
        await prefetch.begin()
        assert stand.wire.opened().credit_bytes == 1000
        size = len(body(1))
        for offset in range(8):
            stand.wire.deliver(stand.portion(offset, lease=offset + 1), body(offset))
        while not stand.wire.told:
            assert await prefetch.take(0)
        assert stand.wire.told[0].messages == 0
        assert stand.wire.told[0].bytes >= 500
        assert stand.wire.told[0].bytes % size == 0

    run(story)


def test_another_request_is_opened_after_a_new_connection_or_an_end() -> None:
    async def story(stand: Stand) -> None:
        prefetch = stand.prefetch(2)
        await prefetch.begin()
        stand.wire.opened()
        prefetch.lease_ended(1, errors.SubscriptionReopened())
        while not stand.wire.asked:
            await asyncio.sleep(0.01)
        assert stand.wire.opened(2).credit_messages == 2
        prefetch.connection_up(stand.wire)
        assert stand.wire.opened(3).credit_messages == 2
        prefetch.lease_ended(3, errors.SubscriptionNotFound("gone"))
        with pytest.raises(errors.SubscriptionNotFound):
            await prefetch.take(0)

    run(story)


def test_a_message_whose_lease_was_lost_is_not_handed_over() -> None:
    async def story(stand: Stand) -> None:
        prefetch = stand.prefetch(3)
        await prefetch.begin()
        stand.wire.opened()
        stand.wire.deliver(stand.portion(1, 2, 3), body(1, 2, 3))
        with stand.acknowledger.monitor.guard:
            stand.acknowledger.held_leases.drop_one(0, 1, 1)
            grip = stand.acknowledger.held_leases.held_lease(0, 1)
            assert grip is not None
        taken = await prefetch.take(0)
        assert taken is not None
        assert taken.offset == 2
        grip.extended(stand.clock.now_us(), stand.clock.now_us())
        waiting = asyncio.create_task(prefetch.take())
        await turns()
        heads = [head for _, head, _ in stand.wire.asked]
        assert Release("t", [Holding(0, 1, [3])], 0, undelivered=True, subscription="s") in heads
        prefetch.stop()
        assert await waiting is None

    run(story)


@pytest.mark.parametrize(("error", "again"), [(errors.Busy(), True), (errors.TopicNotFound("no"), False)])
def test_after_an_error_it_is_asked_again_or_told(error: errors.HeadraceError, again: bool) -> None:
    async def story(stand: Stand) -> None:
        prefetch = stand.prefetch(1)
        await prefetch.begin()
        stand.wire.answer(error)
        if again:
            while not stand.wire.asked:
                await asyncio.sleep(0.01)
        else:
            with pytest.raises(errors.TopicNotFound):
                await prefetch.take(0)

    run(story)


def test_several_take_and_each_gets_one() -> None:
    async def story(stand: Stand) -> None:
        prefetch = stand.prefetch(10)
        await prefetch.begin()
        takers = [asyncio.create_task(prefetch.take()) for _ in range(4)]
        await turns()
        due = stand.clock.now_us() + 20_000
        stand.wire.opened()
        stand.wire.deliver(stand.portion(1, 2, 3, 4), body(1, 2, 3, 4, dues=[due, None, due + 5000, due]))
        taken = await asyncio.gather(*takers)
        assert sorted(each.offset for each in taken if each) == [1, 2, 3, 4]
        assert stand.clock.now_us() >= due + 5000

    run(story)
