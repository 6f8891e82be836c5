"""Tenants share the event loop: whoever floods has its slice of each loop turn, and the others theirs."""

from collections.abc import Callable
from typing import Any

from headrace.gateways.native.fair_turns import ALONE_SLICE_S, SLICE_S, FairTurns


class SteppedLoop:
    """An event loop whose turns are taken one by one, with a clock that only work moves."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.calls: list[Callable[[], Any]] = []
        self.errors: list[BaseException] = []

    def call_soon(self, call: Callable[[], Any]) -> None:
        self.calls.append(call)

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        self.errors.append(context["exception"])

    def turn(self) -> None:
        calls, self.calls = self.calls, []
        for call in calls:
            call()


class Flooding:
    """A connection with frames that take a while each."""

    def __init__(self, loop: SteppedLoop, turns: FairTurns, tenant: str, frames: int, frame_s: float) -> None:
        self.loop, self.turns, self.tenant = loop, turns, tenant
        self.frames, self.frame_s = frames, frame_s
        turns.add(tenant, self)

    def take_turn(self, until_s: float) -> None:
        while self.frames:
            self.frames -= 1
            self.loop.now_s += self.frame_s
            if self.loop.now_s >= until_s:
                break
        if self.frames:
            self.turns.add(self.tenant, self)


def made() -> tuple[SteppedLoop, FairTurns]:
    loop = SteppedLoop()
    return loop, FairTurns(loop, lambda: loop.now_s)  # type: ignore[arg-type]


def test_each_tenant_has_a_slice_of_every_turn() -> None:
    loop, turns = made()
    flood = [Flooding(loop, turns, "flood", 10_000, SLICE_S / 10) for _ in range(4)]
    victim = Flooding(loop, turns, "victim", 20, SLICE_S / 10)
    loop.turn()
    assert loop.now_s < 2.3 * SLICE_S, "the loop polls its sockets after a slice of each"
    assert victim.frames <= 10
    assert sum(one.frames for one in flood) >= 40_000 - 11
    loop.turn()
    assert victim.frames == 0


def test_connections_of_a_tenant_take_turns() -> None:
    loop, turns = made()
    flood = [Flooding(loop, turns, "flood", 100, SLICE_S) for _ in range(4)]
    for _ in range(8):
        loop.turn()
    assert [one.frames for one in flood] == [98, 98, 98, 98]


def test_who_has_used_its_slice_waits_for_the_next_turn() -> None:
    loop, turns = made()
    assert turns.left_s("acme") == SLICE_S
    turns.spend("acme", SLICE_S)
    assert turns.left_s("acme") <= 0
    assert turns.left_s("zeta") == SLICE_S
    loop.turn()
    assert turns.left_s("acme") == SLICE_S
    assert not loop.calls, "nothing runs while nobody waits"


def test_who_waits_is_not_overtaken_by_its_own_tenant() -> None:
    loop, turns = made()
    Flooding(loop, turns, "flood", 100, SLICE_S)
    assert turns.left_s("flood") == 0
    for _ in range(101):
        loop.turn()
    assert turns.left_s("flood") == SLICE_S


def test_a_failing_turn_does_not_stop_the_others() -> None:
    loop, turns = made()

    class Broken:
        def take_turn(self, until_s: float) -> None:
            raise ValueError(until_s)

    turns.add("acme", Broken())
    other = Flooding(loop, turns, "zeta", 1, SLICE_S)
    loop.turn()
    assert other.frames == 0
    assert [type(error) for error in loop.errors] == [ValueError]


def test_who_is_alone_has_longer_slices_until_another_comes() -> None:
    loop, turns = made()
    turns.spend("flood", 0.0)
    loop.now_s = 100.0
    flood = Flooding(loop, turns, "flood", 10_000, SLICE_S / 10)
    loop.turn()
    assert 10_000 - flood.frames >= ALONE_SLICE_S / SLICE_S * 10 - 1
    turns.spend("victim", 0.0)
    before = flood.frames
    loop.turn()
    assert before - flood.frames <= 11
    assert turns.left_s("victim") == SLICE_S
