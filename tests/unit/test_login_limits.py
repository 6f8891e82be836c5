"""Failed logins are held back, and connections are bounded per address and per identity."""

import asyncio
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.broker.pending_answer import PendingAnswer
from headrace.broker.settings import BrokerSettings
from headrace.gateways.authentication import Peer
from headrace.gateways.connection_limit import ConnectionLimit
from headrace.gateways.login_guard import LoginGuard
from headrace.model.errors import HeadraceError, LimitExceeded, NotAuthenticated
from headrace.model.identity import Identity
from headrace.security.login_failures import LoginFailures
from headrace.testing.workbench import Workbench

ADA = Identity("ada")


def test_failures_of_a_host_fade() -> None:
    failures = LoginFailures(1.0)
    for _ in range(10):
        failures.failed("192.0.2.1", 0)
    assert failures.failed("192.0.2.1", 1) == 1.0
    assert failures.failed("192.0.2.1", 300_000_000) == 0.0
    assert failures.total == 12


def test_a_flood_from_many_hosts_is_held_back_and_takes_bounded_memory() -> None:
    failures = LoginFailures(1.0)
    delays = [failures.failed(f"host-{number}", 0) for number in range(12_000)]
    assert (delays[0], delays[-1]) == (0.0, 0.1)
    assert len(failures._by_host) == 10_000


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 10_000_000)), max_size=60))
def test_no_delay_is_longer_than_the_longest(attempts: list[tuple[str, int]]) -> None:
    failures, now_us = LoginFailures(0.5), 0
    for host, later_us in attempts:
        now_us += later_us
        assert 0 <= failures.failed(host, now_us) <= 0.5


def test_a_refusal_waits_without_holding_the_loop_and_nobody_else_waits() -> None:
    async def story() -> None:
        recorded: list[str] = []

        def authenticate(_: str, credentials: bytes, __: Peer) -> Identity:
            if credentials != b"right":
                raise NotAuthenticated("no")
            return ADA

        guard = LoginGuard(
            authenticate,
            lambda *told: recorded.append(told[3].code),
            asyncio.get_running_loop(),
            lambda: 0,
            delay_s_max=0.2,
        )
        peer = Peer("native", "192.0.2.1:4711")
        for _ in range(3):
            with pytest.raises(NotAuthenticated):
                guard("bearer", b"wrong", peer)
        waiting = guard("bearer", b"wrong", peer)
        assert isinstance(waiting, PendingAnswer)
        assert not waiting.resolved
        assert guard("bearer", b"right", peer) == ADA  # who is let in never waits
        assert guard("bearer", b"right", Peer("native", "192.0.2.2:1")) == ADA
        with pytest.raises(NotAuthenticated):
            await waiting
        cancelled = guard("bearer", b"wrong", peer)
        assert isinstance(cancelled, PendingAnswer)
        assert cancelled.cancel()
        assert recorded == ["not_authenticated"] * 5

    asyncio.run(story())


def test_an_authenticator_that_answers_later_is_guarded_too() -> None:
    async def story() -> None:
        answers: list[PendingAnswer[Identity]] = [PendingAnswer(), PendingAnswer()]
        given = iter(answers)
        loop = asyncio.get_running_loop()
        guard = LoginGuard(lambda *_: next(given), lambda *_: None, loop, lambda: 0, delay_s_max=1.0)
        first, second = (guard("bearer", b"", Peer("http", "192.0.2.1:1")) for _ in range(2))
        assert isinstance(first, PendingAnswer)
        assert isinstance(second, PendingAnswer)
        answers[0].resolve(ADA)
        assert await first == ADA
        answers[1].resolve(NotAuthenticated("no"))
        with pytest.raises(NotAuthenticated):
            await second

    asyncio.run(story())


def test_connections_of_one_address_are_bounded() -> None:
    limit = ConnectionLimit(5, per_address_max=2)
    assert [limit.admit("192.0.2.1") for _ in range(2)] == [None, None]
    refusal = limit.admit("192.0.2.1")
    assert isinstance(refusal, LimitExceeded)
    assert refusal.details == {"connections_per_address_max": 2}
    assert limit.admit("192.0.2.2") is None
    assert [limit.admit() for _ in range(2)] == [None, None]  # on the Unix socket
    assert isinstance(limit.admit(), HeadraceError)
    limit.release("192.0.2.1")
    assert limit.admit("192.0.2.1") is None
    for host in ("192.0.2.1", "192.0.2.1", "192.0.2.2", "", ""):
        limit.release(host)
    assert (limit.connections, limit._by_host) == (0, {})


def test_sessions_of_one_identity_are_bounded() -> None:
    bench = Workbench(settings=BrokerSettings(connections_per_identity_max=2))
    sessions = [bench.connect(identity=ADA) for _ in range(2)]
    with pytest.raises(LimitExceeded):
        bench.connect(identity=ADA)
    bench.connect(identity=Identity("bob"))
    for _ in range(3):
        bench.connect()  # anonymous ones are bounded by their addresses
    for session in sessions:
        bench.broker.disconnect(session, bench.now_us)
        bench.broker.disconnect(session, bench.now_us)  # once more does no harm
    assert bench.connect(identity=ADA)


def test_the_oldest_connection_without_a_session_gives_way() -> None:
    limit = ConnectionLimit(3)
    evicted: list[str] = []

    def evict_of(name: str) -> Callable[[], None]:
        def evict() -> None:
            evicted.append(name)
            limit.release("192.0.2.1", evict)

        return evict

    connections = [evict_of(name) for name in "abc"]
    assert [limit.admit("192.0.2.1", evict) for evict in connections] == [None] * 3
    limit.has_session(connections[0])
    assert limit.admit("192.0.2.2") is None
    assert limit.admit("192.0.2.2") is None
    assert (evicted, limit.connections) == (["b", "c"], 3)
    assert isinstance(limit.admit("192.0.2.2", evict_of("d")), LimitExceeded), "all have sessions"
