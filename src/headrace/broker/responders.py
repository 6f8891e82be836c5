"""The responders of subjects, the requests that they have, and those that wait for them."""

from collections import OrderedDict

from headrace.broker.pending_answer import AnswerWithBody, PendingAnswer
from headrace.broker.ports import Session
from headrace.broker.subject_trie import SubjectTrie
from headrace.broker.switchboard import QualifiedSubject
from headrace.model.subject_requests import RequestReply, RequestSend

PendingReply = PendingAnswer[AnswerWithBody[RequestReply]]


class LiveResponder:
    """A session that answers requests to a subject, or to subjects by pattern."""

    __slots__ = ("closed", "concurrency", "number", "open", "session", "subject", "tenant", "waiting")

    def __init__(self, number: int, session: Session, place: QualifiedSubject, concurrency: int) -> None:
        self.number = number
        self.session = session
        self.tenant, self.subject = place
        self.concurrency = concurrency
        self.open: dict[int, OpenRequest] = {}
        """Requests that it has and has not answered, whether somebody still waits for the reply or not."""
        self.waiting: dict[str, None] = {}
        """Subjects to which requests wait that it could answer, in the order in which it serves them."""
        self.closed = False

    @property
    def is_free(self) -> bool:
        """Whether it takes one more request now."""
        return len(self.open) < self.concurrency and not self.session.blocked and not self.closed


class OpenRequest:
    """A request that is not answered."""

    __slots__ = (
        "answer",
        "deadline_us",
        "number",
        "queued",
        "request",
        "responder",
        "session",
        "size_bytes",
        "subject",
        "tenant",
        "value",
    )

    def __init__(
        self, number: int, session: Session, place: QualifiedSubject, request: RequestSend, deadline_us: int
    ) -> None:
        self.number = number
        self.session = session
        self.tenant, self.subject = place
        self.request = request
        self.deadline_us = deadline_us
        self.answer: PendingReply = PendingAnswer()
        self.responder: LiveResponder | None = None
        """Who has it; None before."""
        self.queued = False
        """Whether it waits for a responder."""
        self.value = b""
        """Only while it waits."""
        self.size_bytes = 0


class TenantRequests:
    """The responders and the waiting requests of a tenant, and what is counted of them."""

    def __init__(self) -> None:
        self.trie: SubjectTrie[LiveResponder] = SubjectTrie()
        self.waiting: dict[str, OrderedDict[int, OpenRequest]] = {}
        """Requests that wait for a responder, by subject and number."""
        self.candidates: dict[str, dict[LiveResponder, None]] = {}
        """The responders of each subject to which requests wait, so that they need not be found again."""
        self.turns = 0
        """Counts choices among responders, so that they take turns."""
        self.requests = 0
        self.requests_open = 0
        self.requests_waiting = 0
        self.held_bytes = 0
        """Of waiting requests."""
        self.responders = 0
        self.timeouts = 0
        self.late_replies = 0
        self.unknown_replies = 0

    def choose(self, responders: list[LiveResponder]) -> LiveResponder | None:
        """A free responder with the fewest open requests, in turn among those; None if all are busy."""
        self.turns += 1
        count = len(responders)
        start, best, least = self.turns % count, None, 1 << 62
        for index in range(start, start + count):
            one = responders[index - count if index >= count else index]
            unanswered = len(one.open)
            if unanswered < least and one.is_free:
                best, least = one, unanswered
                if not unanswered:
                    break
        return best
