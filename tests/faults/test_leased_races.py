"""Edits against leases, in every order in which the requests of two people can come: each gets one definite answer."""

from collections.abc import Callable, Iterator
from itertools import combinations
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from tests.faults.broker_model import MEMORY

from headrace.broker.pending_answer import AnswerWithBody, PendingAnswer
from headrace.broker.ports import Session
from headrace.model.batch import Columns, encode
from headrace.model.errors import HeadraceError
from headrace.model.leasing import (
    Ack,
    Edit,
    Extend,
    Find,
    Holding,
    Lease,
    MessageChange,
    MessageId,
    Reject,
    Release,
    SubscriptionCreate,
)
from headrace.model.request import Answer
from headrace.model.requests import Publish
from headrace.testing import FaultyDisk
from headrace.testing.workbench import START_US, Workbench

SECOND_US = 1_000_000
LATER_US = START_US + 60 * SECOND_US
CONSUMERS = (["lease"], ["lease", "ack"], ["lease", "release"], ["lease", "extend"], ["lease", "reject"])
EDITORS = (["move"], ["delete"], ["replace"], ["move", "move"], ["replace", "delete"], ["replace", "move"])


def interleaved(first: list[str], second: list[str]) -> Iterator[list[tuple[int, str]]]:
    """Every order in which two people's requests can come, each person's in order."""
    count = len(first) + len(second)
    for places in combinations(range(count), len(first)):
        mine, other = iter(first), iter(second)
        yield [(0, next(mine)) if at in places else (1, next(other)) for at in range(count)]


class Race:
    """One message, somebody who leases it, and somebody who edits it. `model` is what must come of it."""

    def __init__(self, directory: Path, *, slow: bool) -> None:
        self.disk = FaultyDisk()
        self.directory = str(directory)
        self.bench = Workbench(self.directory, disk=self.disk)
        self.bench.ask(SubscriptionCreate("jobs", settings={"retry_jitter": 0, "retry_seconds": 1}))
        self.bench.ask(Publish("jobs", 0), encode(Columns([b"old"]), START_US).data)
        self.bench.syncing_later = slow
        self.people: list[Session] = [self.bench.connect("ann"), self.bench.connect("bob")]
        self.answers: list[tuple[str, Any, str]] = []
        self.token = 0
        self.version = 1
        self.status = "ready"
        self.value = b"old"

    def ask(self, who: int, what: str) -> None:
        """Ask, and note what must be answered."""
        expected = getattr(self, f"expect_{what}")()
        request, body = self.request(what)
        answer = self.bench.begin(request, body, self.people[who])
        if what == "lease":
            answer = self.settled(answer)
            words = answer.answer if isinstance(answer, AnswerWithBody) else answer
            self.token = words.portions[0].lease if words.portions else 0
        if expected == "message_gone" and ("reject", False) in [(one[0], is_there(one[1])) for one in self.answers]:
            expected = "message_leased or message_gone"  # it is on its way to the dead ones
        self.answers.append((what, answer, expected))

    def request(self, what: str) -> tuple[Answer, bytes]:
        holdings = [Holding(0, self.token, [0])]
        edited = [MessageId(0, 0, None if what == "delete" else 1)]
        new = bytes(encode(Columns([b"new"]), START_US).data)
        requests: dict[str, Callable[[], Answer]] = {
            "lease": lambda: Lease("jobs", lease_ms=10_000),
            "ack": lambda: Ack("jobs", holdings),
            "release": lambda: Release("jobs", holdings),
            "extend": lambda: Extend("jobs", holdings, 20_000),
            "reject": lambda: Reject("jobs", holdings),
            "move": lambda: Edit("jobs", edited, MessageChange(due_us=LATER_US)),
            "replace": lambda: Edit("jobs", edited, MessageChange(replace=True)),
            "delete": lambda: Edit("jobs", edited, MessageChange(delete=True)),
        }
        return requests[what](), new if what == "replace" else b""

    def expect_lease(self) -> str:
        if self.status != "ready":
            return "nothing"
        self.status = "leased"
        return f"leased {self.value.decode()}"

    def settle(self, status: str) -> str:
        if self.status == "leased":
            self.status = status
            return "done"
        return "message_gone" if self.status == "gone" else "not_lease_holder"

    def expect_ack(self) -> str:
        return self.settle("gone")

    def expect_release(self) -> str:
        return self.settle("waiting")

    def expect_extend(self) -> str:
        return self.settle("leased")

    def expect_reject(self) -> str:
        return self.settle("gone")

    def edit(self, version: int | None) -> str:
        if self.status in ("gone", "leased"):
            return "message_gone" if self.status == "gone" else "message_leased"
        if version not in (None, self.version):
            return "stale_version"
        self.version += 1
        return "applied"

    def expect_move(self) -> str:
        outcome = self.edit(1)
        self.status = "waiting" if outcome == "applied" else self.status
        return outcome

    def expect_replace(self) -> str:
        outcome = self.edit(1)
        self.value = b"new" if outcome == "applied" else self.value
        return outcome

    def expect_delete(self) -> str:
        outcome = self.edit(None)
        self.status = "gone" if outcome == "applied" else self.status
        return outcome

    def settled(self, answer: Any) -> Any:
        """The answer, for which whatever is waiting is done if it is not there yet."""
        if isinstance(answer, PendingAnswer) and answer.outcome is None:
            self.bench.run()
        return answer.outcome if isinstance(answer, PendingAnswer) else answer

    def check(self) -> None:
        """Everyone has the answer they must have, and the message is as it must be, also after the broker's death."""
        for what, answer, expected in self.answers:
            came = said(self.settled(answer))
            assert came in expected.split(" or "), (
                f"{what}: {came} instead of {expected}, in {[one[0] for one in self.answers]}"
            )
        self.check_message()
        self.bench = Workbench(self.directory, disk=self.disk)
        self.bench.tick()
        self.check_message()

    def check_message(self) -> None:
        found = self.bench.ask(Find("jobs"))
        words = found.answer if isinstance(found, AnswerWithBody) else found
        statuses = [(one.status, one.version) for one in words.messages]
        assert statuses == ([] if self.status == "gone" else [(self.status, self.version)])


def is_there(answer: Any) -> bool:
    """Whether somebody has an answer by now."""
    return not isinstance(answer, PendingAnswer) or answer.outcome is not None


def said(answer: Any) -> str:
    """An answer in a word."""
    assert answer is not None, "there was never an answer"
    if isinstance(answer, HeadraceError):
        return answer.code
    words = answer.answer if isinstance(answer, AnswerWithBody) else answer
    if hasattr(words, "portions"):
        if not words.portions:
            return "nothing"
        (portion,) = words.portions
        assert portion.offsets == [0]
        return "leased " + ("new" if b"new" in bytes(answer.body) else "old")
    if hasattr(words, "outcomes"):
        (outcome,) = words.outcomes
        assert (outcome.partition, outcome.offset) == (0, 0)
        return str(outcome.outcome)
    return words.refused[0].code if words.refused else "done"


@pytest.fixture
def place() -> Iterator[Path]:
    """A directory in memory: nothing here is about the speed of a disk."""
    with TemporaryDirectory(dir=MEMORY if MEMORY.exists() else None) as directory:
        yield Path(directory)


@pytest.mark.parametrize("editor", EDITORS, ids="+".join)
@pytest.mark.parametrize("consumer", CONSUMERS, ids="+".join)
def test_every_order_has_definite_answers(place: Path, consumer: list[str], editor: list[str]) -> None:
    for number, order in enumerate(interleaved(consumer, editor)):
        for synced_after in range(0, len(order) + 1, 2):
            race = Race(place / f"{number}-{synced_after}", slow=True)
            for step, (who, what) in enumerate(order):
                if step == synced_after:
                    race.bench.run()
                race.ask(who, what)
            race.check()
            at_once = Race(place / f"{number}-{synced_after}-quick", slow=False)
            for who, what in order if synced_after == 0 else []:
                at_once.ask(who, what)
                at_once.bench.run()
            at_once.check()


@pytest.mark.parametrize("slow", [False, True])
@pytest.mark.parametrize("change", ["later", "sooner", "delete"])
def test_somebody_waits_for_a_message_that_is_edited(change: str, slow: bool) -> None:
    bench = Workbench()
    due_us = START_US + 10 * SECOND_US
    bench.ask(Publish("jobs", 0), encode(Columns([b"old"], dues=[due_us]), START_US).data)
    waiting = bench.begin(Lease("jobs", wait_ms=60_000))
    bench.run()
    assert isinstance(waiting, PendingAnswer)
    assert waiting.outcome is None
    bench.syncing_later = slow
    moved_us = {"later": due_us + 5 * SECOND_US, "sooner": due_us - 5 * SECOND_US}.get(change)
    edit = bench.begin(Edit("jobs", [MessageId(0, 0)], MessageChange(due_us=moved_us, delete=change == "delete")))
    bench.run()
    assert said(edit.outcome if isinstance(edit, PendingAnswer) else edit) == "applied"
    while bench.now_us < START_US + 59 * SECOND_US and waiting.outcome is None:
        bench.now_us = min(max(bench.broker.tick(bench.now_us), bench.now_us + 1), START_US + 59 * SECOND_US)
        bench.tick()
    if moved_us is None:
        assert waiting.outcome is None
        bench.tick(2)
        assert said(waiting.outcome) == "nothing"
    else:
        assert said(waiting.outcome) == "leased old"
        assert bench.now_us == moved_us
    bench.close()
