"""A broker on a bench with a few holders, whose every step is chosen: what they ask for, and what comes between.

The steps are the callbacks that the broker schedules (`ports.call_soon`, `call_at_turn_end`, `call_threadsafe`,
`background`): between any two of them another request can come, time can pass, the disk fail, a connection end, or the
broker be killed.
"""

from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from tests.faults.lease_history import DELETE, DONE, EXTEND, RELEASE, LeaseHistory, Place

from headrace.broker.pending_answer import AnswerWithBody, PendingAnswer
from headrace.broker.ports import Session
from headrace.model.errors import HeadraceError
from headrace.model.leasing import (
    Ack,
    Edit,
    Extend,
    Holding,
    Lease,
    MessageChange,
    MessageId,
    Reject,
    Release,
    SubscriptionCreate,
    SubscriptionDescribe,
)
from headrace.model.request import Answer, Request
from headrace.model.requests import Publish
from headrace.model.standing_lease import LeaseClose, LeaseCredit, LeaseDelivery, LeaseOpen
from headrace.testing import FaultyDisk
from headrace.testing.workbench import Workbench

LEASE_MS = 10_000
LEASE_US = LEASE_MS * 1000
HOLDERS = ("ann", "bob", "eve")
_FOR_EVER_US = 1 << 62
_SETTLING: dict[str, Callable[[list[Holding]], Answer]] = {
    "ack": lambda holdings: Ack("jobs", holdings),
    "extend": lambda holdings: Extend("jobs", holdings, LEASE_MS),
    "release": lambda holdings: Release("jobs", holdings, delay_ms=0),
    "reject": lambda holdings: Reject("jobs", holdings),
}
VERBS = tuple(_SETTLING)


class Interleaving:
    """Holders and a broker, in files so that it can be killed; everything they hear of goes to the history."""

    def __init__(self, directory: Path, *, messages: int = 1, deliveries_max: int = 0, slow: bool = True) -> None:
        self.disk = FaultyDisk()
        self.directory = str(directory)
        self.history = LeaseHistory()
        self.bench = Workbench(self.directory, disk=self.disk)
        self._slow = slow
        given = {"retry_jitter": 0, "retry_seconds": 1, "deliveries_max": deliveries_max}
        self.bench.ask(SubscriptionCreate("jobs", settings=given))
        self.bench.ask(Publish("jobs", 0), self.bench.batch([b"%d" % at for at in range(messages)]).data)
        self.published: list[Place] = [(0, at) for at in range(messages)]
        self.bench.syncing_later = slow
        self.tokens: list[tuple[str, int, list[int]]] = []
        """All leases that anybody was told of: whose, under which token, of which messages."""
        self._sessions: dict[str, Session] = {}
        self._number = 0
        self._open: dict[int, tuple[str, str]] = {}
        """Requests without an answer: by whom, and what."""
        self._standing: dict[str, dict[int, int]] = {}
        """Standing requests by who has them, and the credit that is left."""
        self._bound: list[tuple[str, int, list[Place]]] = []
        """What is held as long as a connection: by whom, under which token."""

    @property
    def now_us(self) -> int:
        """The time."""
        return self.bench.now_us

    # What people do.

    def lease(self, who: str, wait_ms: int = 0, count: int = 1) -> None:
        """Somebody wants messages, now or within a while."""
        request = Lease("jobs", messages_max=count, lease_ms=LEASE_MS, wait_ms=wait_ms)
        self._ask(who, "lease", request, partial(self._leased, who))

    def stand(self, who: str, count: int = 1, *, bound: bool = False) -> None:
        """Somebody wants messages as they come, so many of them; with `bound` for as long as it is connected."""
        request = LeaseOpen("jobs", credit_messages=count, lease_ms=LEASE_MS, session_bound=bound)

        def opened(answer: Any) -> None:
            self._standing.setdefault(who, {})[answer.standing] = count

        self._ask(who, "open", request, opened)

    def credit(self, who: str, count: int = 1) -> None:
        """It wants so many more."""
        for standing in list(self._standing.get(who, ())):
            self._standing[who][standing] += count
            self.bench.begin(LeaseCredit(standing, count, 1 << 20), session=self._sessions[who])

    def close(self, who: str) -> None:
        """It wants no more, and gives back what it has for as long as it is connected."""
        for standing in list(self._standing.get(who, ())):
            # What was granted is delivered before the answer.
            self._ask(who, "close", LeaseClose(standing), lambda _: None)
            self._standing[who].pop(standing, None)
        self._lose(who)

    def settle(self, who: str, verb: str, token: int, offsets: list[int]) -> None:
        """Somebody says something about messages that it has, or had, or never had."""
        request = _SETTLING[verb]([Holding(0, token, offsets)])
        lease_us = LEASE_US if verb == EXTEND else 0
        number = self._number + 1
        self.history.asked(number, verb, who, token, [(0, at) for at in offsets], self.now_us, lease_us)
        self._ask(who, verb, request, partial(self._settled, number, who, offsets))

    def delete(self, who: str, offset: int) -> None:
        """Somebody deletes a message that nobody has in hand."""
        number = self._number + 1
        self.history.asked(number, DELETE, who, 0, [(0, offset)], self.now_us)
        request = Edit("jobs", [MessageId(0, offset)], MessageChange(delete=True))
        self._ask(who, DELETE, request, partial(self._deleted, number, who, offset))

    # What comes between.

    def tick(self) -> None:
        """The broker looks at what is due, as it does at any moment."""
        self.bench.broker.tick(self.now_us)

    def pass_time(self, us: int = LEASE_US) -> None:
        """Time passes, and the broker has no chance to look: its process stands still."""
        self.bench.now_us += us

    def pass_time_and_tick(self, us: int = LEASE_US) -> None:
        """Time passes, until all leases are over if it is not said for how long, and the broker sees that."""
        self.pass_time(us)
        self.tick()

    def fail_writes(self, times: int = 1) -> None:
        """What is written next to the disk is not; it may only have been to make room."""
        self.disk.fail_writes(times)

    def disconnect(self, who: str = "ann") -> None:
        """A connection is lost, with the answers that are still to come."""
        session = self._sessions.pop(who, None)
        self._standing.pop(who, None)
        self._lose(who)
        if session is not None:
            self.bench.broker.disconnect(session, self.now_us)
        self._open = {number: each for number, each in self._open.items() if each[0] != who}

    def kill(self) -> None:
        """The broker is killed and started again."""
        now_us = self.now_us
        for who in list(self._sessions):
            self._lose(who)
        self._standing.clear()
        self._sessions.clear()
        self._open.clear()
        self.disk.fail_writes(0)
        self.bench = Workbench(self.directory, disk=self.disk, now_us=now_us)
        self.bench.syncing_later = self._slow

    # The end.

    def finish(self) -> None:
        """All is answered, and what is left is done by somebody else; nothing that was promised was broken."""
        self.disk.fail_writes(0)
        for _ in range(2):  # a lease may be over when it is written, which the broker then wants to see
            self.bench.run()
            self.tick()
        self.bench.run()
        waiting = [who for who, what in self._open.values() if what == "lease"]
        assert len(waiting) == len(self._open), f"never answered: {self._open}"
        ready = self.bench.ask(SubscriptionDescribe("jobs")).ready
        standing = [who for who, each in self._standing.items() if any(credit > 0 for credit in each.values())]
        waiting += standing
        assert not (waiting and ready), f"{waiting} wait, and {ready} are ready"
        for who in [*waiting, *self._standing, *(who for who, _, _ in self._bound)]:
            self.disconnect(who)
        for _ in range(20):
            self.pass_time_and_tick()
            self.bench.run()
            self.lease("carol", count=10)
            self.bench.run()
            for holder, token, offsets in self.tokens:
                if holder == "carol":
                    self.settle("carol", "ack", token, offsets)
            self.tokens = [each for each in self.tokens if each[0] != "carol"]
            self.bench.run()
            info = self.bench.ask(SubscriptionDescribe("jobs"))
            if not info.waiting + info.ready + info.leased:
                break
        else:
            raise AssertionError(f"messages are left that nobody gets: {info}")
        self.history.check_end(self.published, self._dead())

    def _dead(self) -> Counter[Place]:
        try:
            batches = self.bench.batches("jobs.dead")
        except HeadraceError:
            return Counter()
        headers = [message.headers or {} for batch in batches for message in batch.messages()]
        return Counter((int(one["headrace-dead-partition"]), int(one["headrace-dead-offset"])) for one in headers)

    # Answers.

    def _ask(self, who: str, what: str, request: Request[Any], hear: Callable[[Any], None]) -> None:
        self._number += 1
        number = self._number
        session = self._sessions.get(who)
        if session is None:
            push = partial(self._pushed, who)
            session = self._sessions[who] = self.bench.broker.connect(push, who, self.now_us)
        self._open[number] = who, what
        answer = self.bench.begin(request, session=session)
        if isinstance(answer, PendingAnswer):
            answer.then(partial(self._heard, number, hear))
        else:
            self._heard(number, hear, answer)

    def _heard(self, number: int, hear: Callable[[Any], None], outcome: Any) -> None:
        if self._open.pop(number, None) is not None and not isinstance(outcome, HeadraceError):
            hear(outcome.answer if isinstance(outcome, AnswerWithBody) else outcome)

    def _pushed(self, who: str, pushed: Any) -> None:
        if not isinstance(pushed, AnswerWithBody):
            self._standing.get(who, {}).pop(pushed.standing, None)  # it has ended
            return
        words = pushed.answer
        assert isinstance(words, LeaseDelivery)
        assert words.standing in self._standing.get(who, {}), f"{who} was pushed messages after the end"
        self._standing[who][words.standing] -= sum(len(portion.all_offsets) for portion in words.portions)
        assert self._standing[who][words.standing] >= 0, "more than the credit allows"
        self._leased(who, words)

    def _lose(self, who: str) -> None:
        """Who ends its connection, or its request, cannot rely on what was bound to it any more."""
        for holder, token, places in self._bound:
            if holder == who:
                self._number += 1
                self.history.asked(self._number, RELEASE, who, token, places, self.now_us)
        self._bound = [each for each in self._bound if each[0] != who]

    def _leased(self, who: str, words: Any) -> None:
        for portion in words.portions:
            offsets = list(portion.all_offsets)
            self.tokens.append((who, portion.lease, offsets))
            if not portion.until_us:
                places = [(portion.partition, offset) for offset in offsets]
                self._bound.append((who, portion.lease, places))
                for place in places:
                    self.history.leased(place, portion.lease, who, self.now_us, _FOR_EVER_US)
                continue
            for offset in offsets:
                place = portion.partition, offset
                self.history.leased(place, portion.lease, who, portion.until_us - LEASE_US, portion.until_us)

    def _settled(self, number: int, who: str, offsets: list[int], words: Any) -> None:
        refused = {one.offset: one.code for one in words.refused}
        for offset in offsets:
            outcome = refused.get(offset, DONE)
            until_us = words.until_us if outcome == DONE else 0
            self.history.answered(number, who, (0, offset), outcome, self.now_us, until_us)

    def _deleted(self, number: int, who: str, offset: int, words: Any) -> None:
        [one] = words.outcomes
        outcome = DONE if one.outcome == "applied" else one.outcome
        self.history.answered(number, who, (0, offset), outcome, self.now_us)
