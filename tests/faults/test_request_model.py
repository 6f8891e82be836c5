"""Request/reply against a model: whatever callers and responders do, each request is answered once, by the rules."""

from typing import Any

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from headrace.broker.pending_answer import AnswerWithBody, PendingAnswer
from headrace.broker.ports import Session
from headrace.errors import Cancelled, HeadraceError, NoResponders, ResponderLost, ServiceFailed, Timeout
from headrace.model.error_object import ErrorObject
from headrace.model.subject_requests import (
    ReplySend,
    RequestDelivery,
    RequestSend,
    ServeClose,
    ServeOpen,
    SwitchboardDescribe,
)
from headrace.testing.workbench import Workbench

SUBJECTS = ["a.x", "a.y", "b"]
PATTERNS = ["a.x", "a.*", "#", "b"]
MATCHES = {"a.x": {"a.x"}, "a.*": {"a.x", "a.y"}, "#": set(SUBJECTS), "b": {"b"}}


class ModelResponder:
    """A responder as the model sees it."""

    def __init__(self, session: Session, number: int, pattern: str, concurrency: int) -> None:
        self.session, self.number, self.pattern, self.concurrency = session, number, pattern, concurrency
        self.has: dict[int, str] = {}
        """Requests that it was given and has not answered, with what they ask."""
        self.closed = False


class RequestMachine(RuleBasedStateMachine):
    """Callers, responders and a broker."""

    @initialize()
    def start(self) -> None:
        """Begin with one caller and no responder."""
        self.bench = Workbench()
        self.responders: dict[int, ModelResponder] = {}
        self.asked: dict[str, tuple[Session, str, PendingAnswer[Any]]] = {}
        self.given: set[str] = set()
        """What was delivered to some responder."""
        self.finished: set[str] = set()
        self.count = 0
        self.callers = [self.bench.connect("caller")]
        self.paused: set[Session] = set()

    def pushed(self, pushed: AnswerWithBody[RequestDelivery]) -> None:
        """A responder gets a request."""
        delivery, text = pushed.answer, bytes(pushed.body).decode()
        responder = self.responders[delivery.responder]
        assert text not in self.given, "a request is delivered once"
        assert delivery.subject in MATCHES[responder.pattern]
        assert not responder.closed
        assert responder.session not in self.paused
        assert not self.asked[text][2].resolved if text in self.asked else True
        self.given.add(text)
        responder.has[delivery.request] = text
        assert len(responder.has) <= responder.concurrency

    @rule(pattern=st.sampled_from(PATTERNS), concurrency=st.integers(1, 3), same=st.booleans())
    def open_responder(self, pattern: str, concurrency: int, same: bool) -> None:
        """Serve subjects, on a new session or one that serves already."""
        sessions = sorted({one.session for one in self.responders.values()}, key=id) if same else []
        session = sessions[0] if sessions else self.bench.broker.connect(self.pushed, "service", self.bench.now_us)
        number = self.bench.begin(ServeOpen(pattern, concurrency), session=session).responder
        self.responders[number] = ModelResponder(session, number, pattern, concurrency)
        self.bench.run()

    @rule(subject=st.sampled_from(SUBJECTS), caller=st.integers(0, 5), timeout_ms=st.sampled_from([10, 1000, 5000]))
    def send(self, subject: str, caller: int, timeout_ms: int) -> None:
        """Ask something."""
        self.count += 1
        text = f"{self.count}"
        session = self.callers[caller % len(self.callers)]
        served = any(not one.closed and subject in MATCHES[one.pattern] for one in self.responders.values())
        outcome = self.bench.begin(RequestSend(subject, timeout_ms), text.encode(), session)
        if isinstance(outcome, HeadraceError):
            assert isinstance(outcome, NoResponders)
            assert not served
        else:
            assert served
            self.asked[text] = (session, subject, outcome)

    @rule(choice=st.integers(0, 10), fails=st.booleans(), twice=st.booleans())
    def reply(self, choice: int, fails: bool, twice: bool) -> None:
        """Answer some request that a responder has, perhaps too late, perhaps twice."""
        held = [(one, number) for one in self.responders.values() for number in one.has]
        if not held:
            return
        responder, number = held[choice % len(held)]
        text = responder.has.pop(number)
        waited = text in self.asked and not self.asked[text][2].resolved
        error = ErrorObject("failed", text) if fails else None
        for _ in range(2 if twice else 1):
            self.bench.ask(ReplySend(number, error=error), f"reply {text}".encode(), responder.session)
        if waited:
            outcome = self.asked[text][2].outcome
            if fails:
                assert isinstance(outcome, ServiceFailed)
                assert str(outcome) == text
            else:
                assert bytes(outcome.body) == f"reply {text}".encode()

    @rule(choice=st.integers(0, 10))
    def close_responder(self, choice: int) -> None:
        """Serve no more, but answer what is there."""
        if self.responders:
            responder = list(self.responders.values())[choice % len(self.responders)]
            responder.closed = True
            self.bench.ask(ServeClose(responder.number), session=responder.session)

    @rule(choice=st.integers(0, 10))
    def responder_vanishes(self, choice: int) -> None:
        """A service's connection breaks."""
        if not self.responders:
            return
        session = list(self.responders.values())[choice % len(self.responders)].session
        gone = [one for one in self.responders.values() if one.session is session]
        lost = [text for one in gone for text in one.has.values() if not self.asked[text][2].resolved]
        for one in gone:
            one.closed = True
            del self.responders[one.number]
        self.paused.discard(session)
        self.bench.broker.disconnect(session, self.bench.now_us)
        self.bench.run()
        for text in lost:
            assert isinstance(self.asked[text][2].outcome, ResponderLost)

    @rule(choice=st.integers(0, 10))
    def responder_pauses(self, choice: int) -> None:
        """A service receives too slowly, or has caught up."""
        if not self.responders:
            return
        session = list(self.responders.values())[choice % len(self.responders)].session
        if session in self.paused:
            self.paused.discard(session)
            self.bench.broker.resume(session)
        else:
            self.paused.add(session)
            self.bench.broker.pause(session)

    @rule()
    def caller_comes(self) -> None:
        """One more caller."""
        self.callers.append(self.bench.connect("caller"))

    @rule(choice=st.integers(0, 10))
    def caller_vanishes(self, choice: int) -> None:
        """A caller's connection breaks; another one comes."""
        session = self.callers.pop(choice % len(self.callers))
        open_ = [one for one in self.asked.values() if one[0] is session and not one[2].resolved]
        self.bench.broker.disconnect(session, self.bench.now_us)
        assert all(isinstance(one[2].outcome, Cancelled) for one in open_)
        self.callers.append(self.bench.connect("caller"))

    @rule(seconds=st.sampled_from([0.005, 0.5, 2.0]))
    def time_passes(self, seconds: float) -> None:
        """Deadlines come."""
        self.bench.tick(seconds)

    @invariant()
    def counts_agree(self) -> None:
        """What the broker counts is what the model has, and nobody waits for a free responder."""
        if not hasattr(self, "bench"):
            return
        info = self.bench.ask(SwitchboardDescribe())
        assert info.responders == sum(not one.closed for one in self.responders.values())
        assert info.requests_open == sum(len(one.has) for one in self.responders.values())
        waiting = [text for text, one in self.asked.items() if not one[2].resolved and text not in self.given]
        assert info.requests_waiting == len(waiting)
        assert self.bench.broker._requests._held_bytes == sum(map(len, waiting))
        for text in waiting:
            for one in self.responders.values():
                free = not one.closed and len(one.has) < one.concurrency and one.session not in self.paused
                assert not free or self.asked[text][1] not in MATCHES[one.pattern]

    def teardown(self) -> None:
        """In the end every request is answered."""
        if hasattr(self, "bench"):
            self.bench.tick(10)
            for _, _, pending in self.asked.values():
                assert pending.resolved
            late = [one[2].outcome for one in self.asked.values() if isinstance(one[2].outcome, Timeout)]
            assert self.bench.ask(SwitchboardDescribe()).timeouts == len(late)
            requests = self.bench.broker._requests
            assert not requests._awaited
            assert len(requests._deadlines) == 0
            self.bench.close()


TestRequests = RequestMachine.TestCase
TestRequests.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
