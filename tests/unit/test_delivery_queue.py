"""Deliveries in slices: many readers of one message do not hold up the loop, and each has its turn."""

import asyncio
from collections.abc import Callable
from typing import Any

from headrace.gateways.native.delivery_queue import SLICE_S, DeliveryQueue
from headrace.gateways.native.frame_writer import FrameSource, FrameWriter
from headrace.runtime.loop_scheduler import LoopScheduler


class Clock:
    """Stands still unless it is moved."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


class Connection:
    """One with so many deliveries to make, each of which takes so long."""

    def __init__(
        self,
        number: int,
        served: list[int],
        clock: Clock,
        seconds: float = 0.0005,
        deliveries: int = 1,
        tenant: str = "default",
    ) -> None:
        self.number = number
        self.tenant = tenant
        self.queue: DeliveryQueue | None = None
        self._served = served
        self._clock = clock
        self._seconds = seconds
        self._deliveries = deliveries

    def deliver(self, now_us: int) -> None:
        assert now_us == 7
        self._clock.now += self._seconds
        self._served.append(self.number)
        self._deliveries -= 1
        if self._deliveries and self.queue is not None:
            self.queue.add(self)  # type: ignore[arg-type]


class Broken(Connection):
    def deliver(self, now_us: int) -> None:  # noqa: ARG002
        raise OSError("this one does not work")


def run(make: Callable[[list[int], Clock], list[Connection]], count: int) -> tuple[list[int], list[int], list[Any]]:
    """Put all in the queue at once; tells who was served, how many in each turn of the loop, and what failed."""
    served: list[int] = []
    failed: list[Any] = []
    in_a_turn: list[int] = []

    async def story() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: failed.append(context["exception"]))
        clock = Clock()
        queue = DeliveryQueue(loop, LoopScheduler(loop).call_soon, lambda: 7, clock)
        for connection in make(served, clock):
            connection.queue = queue
            queue.add(connection)  # type: ignore[arg-type]
        for _ in range(1000):
            before = len(served)
            await asyncio.sleep(0)
            in_a_turn.append(len(served) - before)
            if len(served) >= count:
                return

    asyncio.run(story())
    return served, in_a_turn, failed


def test_the_loop_has_a_turn_between_two_slices() -> None:
    served, in_a_turn, _ = run(lambda served, clock: [Connection(n, served, clock) for n in range(500)], 500)
    assert served == list(range(500))
    assert max(in_a_turn) * 0.0005 <= SLICE_S


def test_few_are_served_in_one_turn() -> None:
    served, in_a_turn, _ = run(lambda served, clock: [Connection(n, served, clock, 1e-6) for n in range(50)], 50)
    assert served == list(range(50))
    assert [count for count in in_a_turn if count] == [50]


def test_who_has_more_comes_after_the_others() -> None:
    served, _, _ = run(lambda served, clock: [Connection(n, served, clock, 0.0009, 3) for n in range(4)], 12)
    assert served == [0, 1, 2, 3] * 3


def test_tenants_are_served_in_turns() -> None:
    def make(served: list[int], clock: Clock) -> list[Connection]:
        many = [Connection(number, served, clock, deliveries=2, tenant="flood") for number in range(6)]
        return [*many, Connection(99, served, clock, deliveries=3, tenant="victim")]

    served, _, _ = run(make, 15)
    assert [place for place, number in enumerate(served) if number == 99] == [1, 3, 5]
    assert sorted(served) == sorted([*range(6)] * 2 + [99] * 3)


def test_one_that_fails_is_told_of_and_holds_up_nobody() -> None:
    def make(served: list[int], clock: Clock) -> list[Connection]:
        return [
            Connection(0, served, clock),
            Broken(1, served, clock),
            *(Connection(n, served, clock) for n in range(2, 9)),
        ]

    served, _, failed = run(make, 8)
    assert served == [0, *range(2, 9)]
    assert [type(error) for error in failed] == [OSError]


class Sink:
    """A transport that takes everything."""

    def set_write_buffer_limits(self, high: int, low: int) -> None:
        assert low < high

    def write(self, data: bytes) -> None:
        """Gone."""


class Brief(FrameSource):
    """Sends next to nothing."""

    turns = 0

    def turn(self, now_us: int) -> int:  # noqa: ARG002
        self.queued = False
        type(self).turns += 1
        return 1


def test_a_connection_of_very_many_streams_lets_others_go_in_between() -> None:
    asked: list[FrameWriter] = []
    out = FrameWriter(Sink(), asked.append, lambda _: None, lambda *_: None)  # type: ignore[arg-type]
    for number in range(1000):
        out.queue(Brief(out, number))
    slices = 0
    while len(asked) > slices:
        before = Brief.turns
        asked[slices].deliver(7)
        slices += 1
        assert Brief.turns - before <= 64
    assert Brief.turns == 1000
