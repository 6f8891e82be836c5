"""Requests of HTTP begin in turns: a tenant with very many holds up nobody else."""

import asyncio

from headrace.gateways.http.fair_gate import REQUESTS_TOGETHER, FairGate


def test_a_flood_begins_a_few_in_each_turn_and_in_order() -> None:
    begun: list[tuple[str, int]] = []

    async def ask(gate: FairGate, tenant: str, number: int) -> None:
        await gate.enter(tenant)
        begun.append((tenant, number))

    async def story() -> None:
        gate = FairGate(asyncio.get_running_loop())
        flood = [asyncio.create_task(ask(gate, "flood", number)) for number in range(100)]
        await asyncio.sleep(0)
        victim = asyncio.create_task(ask(gate, "victim", 0))
        flood[10].cancel()
        await asyncio.gather(victim, *flood, return_exceptions=True)

    asyncio.run(story())
    assert begun.index(("victim", 0)) <= 2 * REQUESTS_TOGETHER
    assert [number for tenant, number in begun if tenant == "flood"] == [one for one in range(100) if one != 10]


def test_nothing_runs_while_nobody_asks() -> None:
    async def story() -> None:
        gate = FairGate(asyncio.get_running_loop())
        for number in range(10):
            await gate.enter(f"tenant-{number}")
        for _ in range(3):
            await asyncio.sleep(0)
        assert not gate._comes

    asyncio.run(story())
