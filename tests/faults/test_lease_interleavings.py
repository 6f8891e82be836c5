"""Between any two steps of every verb something else happens; no two leases of a message are ever valid at once."""

from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, note, settings
from hypothesis import strategies as st
from tests.faults.broker_model import MEMORY
from tests.faults.lease_interleaving import HOLDERS, LEASE_US, VERBS, Interleaving

Act = Callable[[Interleaving], None]

INTRUSIONS: dict[str, Act] = {
    "nothing": lambda _: None,
    "a tick": Interleaving.tick,
    "time": lambda stage: stage.pass_time(LEASE_US // 2),
    "time and a tick": lambda stage: stage.pass_time_and_tick(LEASE_US // 2),
    "much time and a tick": Interleaving.pass_time_and_tick,
    "a failing write": Interleaving.fail_writes,
    "failing writes": lambda stage: stage.fail_writes(3),
    "the holder's end": Interleaving.disconnect,
    "the other's end": lambda stage: stage.disconnect("bob"),
    "the broker's end": Interleaving.kill,
}
INTRUSIONS_BY_NAME = {**INTRUSIONS, "her closing": lambda stage: stage.close("ann")}


def settling(verb: str) -> Act:
    """Ann says something about what she has, or had."""

    def act(stage: Interleaving) -> None:
        who, token, offsets = next(each for each in stage.tokens if each[0] == "ann")
        stage.settle(who, verb, token, offsets)

    return act


REQUESTS: dict[str, Act] = {
    **{verb: settling(verb) for verb in VERBS},
    "lease": lambda stage: stage.lease("bob"),
    "wait": lambda stage: stage.lease("bob", wait_ms=60_000),
    "delete": lambda stage: stage.delete("eve", 0),
    "stand": lambda stage: stage.stand("bob"),
    "stand bound": lambda stage: stage.stand("bob", bound=True),
}


@pytest.fixture
def place() -> Iterator[Path]:
    """A directory in memory: nothing here is about the speed of a disk."""
    with TemporaryDirectory(dir=MEMORY if MEMORY.exists() else None) as directory:
        yield Path(directory)


class Schedules:
    """Every way to go through some requests with an intrusion: a request can come, and the intrusion, at each step."""

    def __init__(
        self,
        place: Path,
        requests: tuple[str, ...],
        intrusion: str,
        *,
        late: bool,
        slow: bool = True,
        begin: Act = lambda stage: stage.lease("ann"),
    ) -> None:
        self._place = place
        self._requests = requests
        self._intrusion = intrusion
        self._late = late
        self._slow = slow
        self._begin = begin
        self.runs = 0

    def check(self) -> None:
        """Go through all of them: depth first, each from the beginning."""
        open_: list[list[str]] = [[]]
        while open_:
            open_ += self._run(open_.pop())

    def _run(self, prefix: list[str]) -> list[list[str]]:
        """One of them, chosen up to here; returns those that branch off from it."""
        self.runs += 1
        stage = self._stage()
        requests, intrusion = list(self._requests), self._intrusion
        taken: list[str] = []
        others: list[list[str]] = []
        while True:
            choices = [requests[0]] if requests else []
            choices += [intrusion] if intrusion else []
            if len(taken) < len(prefix):
                chosen = prefix[len(taken)]
            elif choices:
                others += [[*taken, other] for other in [*choices[1:], "step"]]
                chosen = choices[0]
            else:
                break
            taken.append(chosen)
            if chosen == "step":
                if not stage.bench.step():
                    return []  # as if it had not been chosen
            elif chosen == intrusion:
                intrusion = ""
                INTRUSIONS_BY_NAME[chosen](stage)
            else:
                REQUESTS[requests.pop(0)](stage)
        try:
            stage.finish()
        except AssertionError as error:
            error.add_note(f"in this order: {taken}")
            raise
        return others

    def _stage(self) -> Interleaving:
        """Ann has a message; her lease may be over, and the message ready again."""
        stage = Interleaving(self._place / str(self.runs), slow=self._slow)
        self._begin(stage)
        stage.bench.run()
        if self._late:
            stage.pass_time_and_tick()
            stage.bench.run()
        else:
            stage.pass_time(LEASE_US - 1)
        return stage


@pytest.mark.parametrize("intrusion", INTRUSIONS)
@pytest.mark.parametrize("verb", [*VERBS, "delete"])
def test_one_verb_and_somebody_who_waits(place: Path, verb: str, intrusion: str) -> None:
    for late in (False, True):
        Schedules(place / str(late), ("wait", verb), intrusion, late=late).check()


@pytest.mark.parametrize("intrusion", [*INTRUSIONS, "her closing"])
@pytest.mark.parametrize("bound", [False, True], ids=["timed", "bound"])
def test_one_verb_of_a_standing_holder_and_another_who_stands(place: Path, bound: bool, intrusion: str) -> None:
    other = "stand bound" if bound else "stand"
    for verb in VERBS:
        requests = (other, verb)
        at = place / verb
        Schedules(at, requests, intrusion, late=False, begin=lambda stage: stage.stand("ann", bound=bound)).check()


@pytest.mark.parametrize("first", REQUESTS)
def test_two_verbs_in_every_order_of_their_steps(place: Path, first: str) -> None:
    for second in VERBS:
        for late in (False, True):
            Schedules(place / f"{second}-{late}", (first, second), "time and a tick", late=late, slow=False).check()


@pytest.mark.long
@pytest.mark.parametrize("intrusion", INTRUSIONS)
@pytest.mark.parametrize("second", REQUESTS)
@pytest.mark.parametrize("first", REQUESTS)
def test_two_verbs_in_every_order_of_their_steps_with_every_intrusion(
    place: Path, first: str, second: str, intrusion: str
) -> None:
    for late in (False, True):
        Schedules(place / str(late), (first, second), intrusion, late=late).check()


# Longer histories, by chance.

people = st.sampled_from(HOLDERS)
steps = st.one_of(
    st.tuples(st.just("lease"), people, st.sampled_from([0, 0, 30_000]), st.integers(1, 3)),
    st.tuples(st.just("stand"), people, st.integers(1, 3), st.booleans()),
    st.tuples(st.just("credit"), people, st.integers(1, 2)),
    st.tuples(st.just("close"), people),
    st.tuples(st.just("settle"), st.integers(0, 5), st.sampled_from(VERBS), st.integers(1, 3)),
    st.tuples(st.just("settle"), st.integers(0, 1), st.sampled_from(VERBS), st.integers(1, 3)),
    st.tuples(st.just("steps"), st.integers(1, 6)),
    st.tuples(st.just("run")),
    st.tuples(st.just("tick")),
    st.tuples(st.just("time"), st.sampled_from([1, LEASE_US // 2, LEASE_US - 1, LEASE_US, LEASE_US + 1])),
    st.tuples(st.just("time and a tick"), st.sampled_from([LEASE_US // 2, LEASE_US])),
    st.tuples(st.just("delete"), st.integers(0, 3)),
    st.tuples(st.just("fail"), st.integers(0, 3)),
    st.tuples(st.just("disconnect"), people),
    st.tuples(st.just("kill")),
)


def play(stage: Interleaving, what: str, *about: object) -> None:
    """Do one of the steps; who settles something names messages of a lease that was handed out, one of the last."""
    match what, *about:
        case "lease", str(who), int(wait_ms), int(count):
            stage.lease(who, wait_ms, count)
        case "stand", str(who), int(count), bool(bound):
            stage.stand(who, count, bound=bound)
        case "credit", str(who), int(count):
            stage.credit(who, count)
        case "close", str(who):
            stage.close(who)
        case "settle", int(back), str(verb), int(count):
            if back < len(stage.tokens):
                who, token, offsets = stage.tokens[-1 - back]
                stage.settle(who, verb, token, offsets[:count])
        case "steps", int(count):
            for _ in range(count):
                stage.bench.step()
        case ("run",):
            stage.bench.run()
        case ("tick",):
            stage.tick()
        case "time", int(us):
            stage.pass_time(us)
        case "time and a tick", int(us):
            stage.pass_time_and_tick(us)
        case "delete", int(offset):
            stage.delete("eve", offset)
        case "fail", int(after):
            stage.disk.fail_writes(1, after=after)
        case "disconnect", str(who):
            stage.disconnect(who)
        case ("kill",):
            stage.kill()


def check_history(deliveries_max: int, slow: bool, history: list[tuple[object, ...]]) -> None:
    with TemporaryDirectory(dir=MEMORY if MEMORY.exists() else None) as directory:
        stage = Interleaving(Path(directory), messages=4, deliveries_max=deliveries_max, slow=slow)
        stage.lease("ann", count=2)
        stage.bench.run()
        for what in history:
            note(f"{stage.now_us} {what}")
            play(stage, *what)  # type: ignore[arg-type]
        stage.finish()


@settings(max_examples=100)
@given(st.sampled_from([0, 2]), st.booleans(), st.lists(steps, min_size=4, max_size=25))
def test_histories_by_chance(deliveries_max: int, slow: bool, history: list[tuple[object, ...]]) -> None:
    check_history(deliveries_max, slow, history)


@pytest.mark.long
@settings(max_examples=1500)
@given(st.sampled_from([0, 2]), st.booleans(), st.lists(steps, min_size=4, max_size=60))
def test_long_histories_by_chance(deliveries_max: int, slow: bool, history: list[tuple[object, ...]]) -> None:
    check_history(deliveries_max, slow, history)
