"""Request/reply: hands each request to one of the responders of its subject, and the reply to whoever asked."""

from collections import OrderedDict
from collections.abc import Iterator
from functools import partial

from headrace.broker.deadlines import Deadlines
from headrace.broker.pending_answer import AnswerWithBody
from headrace.broker.ports import Ports, Session
from headrace.broker.responders import LiveResponder, OpenRequest, PendingReply, TenantRequests
from headrace.broker.signal import Signal, TakenShare
from headrace.broker.slices import Steps, in_slices
from headrace.broker.streams import OpenedReading
from headrace.broker.subject_trie import SubjectTrie
from headrace.broker.switchboard import name_for, parse_pattern, parse_subject
from headrace.model.error_object import as_service_failed, check_error_object
from headrace.model.errors import (
    Busy,
    Cancelled,
    HeadraceError,
    InvalidArgument,
    LimitExceeded,
    MessageTooLarge,
    NoResponders,
    ResponderLost,
    Timeout,
)
from headrace.model.headers import Headers, header_bytes
from headrace.model.limits import (
    LIVE_SUBSCRIPTIONS_IN_ALL_MAX,
    LIVE_SUBSCRIPTIONS_MAX,
    MESSAGE_BYTES_MAX,
    REPLIES_UNSENT_BYTES_MAX,
    REQUEST_SECONDS_MAX,
    REQUESTS_OPEN_MAX,
    REQUESTS_WAITING_BYTES_MAX,
    REQUESTS_WAITING_MAX,
    RESPONDER_CONCURRENCY_MAX,
    WAITING_SUBJECTS_MAX,
)
from headrace.model.requests import Done
from headrace.model.subject import is_own
from headrace.model.subject_requests import (
    ReplySend,
    RequestDelivery,
    RequestReply,
    RequestSend,
    ServeClose,
    ServeOpen,
    ServeOpened,
    SubjectEnd,
    SwitchboardInfo,
)

_UNRECEIVED = (
    "the request was handled, but too many replies wait, because the caller does not receive them; ask for less"
)
_TIMED_OUT_TOGETHER = 1_000
_COUNTS = ("requests", "requests_open", "requests_waiting", "timeouts", "late_replies", "unknown_replies")
"""What is counted of each tenant."""
_AT_ONCE = 128
"""Responders that are removed, or requests that are failed, in one slice."""


class RequestDispatcher:
    """Dispatches requests to responders. The deadline of each request is kept here."""

    def __init__(self, ports: Ports) -> None:
        self.taking: Signal[TakenShare] = Signal()
        """Emitted before a tenant takes more of what the broker has for all; a listener refuses by raising."""
        self._ports = ports
        self._tenants: dict[str, TenantRequests] = {}
        self._responders: dict[Session, dict[int, LiveResponder]] = {}
        self._callers: dict[Session, dict[int, OpenRequest]] = {}
        self._awaited: dict[int, OpenRequest] = {}
        """Requests for whose replies somebody waits, by number."""
        self._delivered: dict[int, OpenRequest] = {}
        """Requests that responders have and have not answered, by number."""
        self._deadlines: Deadlines[int] = Deadlines()
        self._number = 0
        self._count = 0
        """Responders of all tenants that are not closed."""
        self._held_bytes = 0
        """Of waiting requests."""
        self._unsent_bytes: dict[Session, int] = {}
        """Of replies to sessions whose clients do not take what they are sent."""

    # Asking.

    def send(self, session: Session, request: RequestSend, body: memoryview, now_us: int) -> PendingReply:
        """Hand a request to a responder, now or when one is free."""
        place = parse_subject(request.subject)
        _check_request(request, place.subject, body)
        mine = self._callers.setdefault(session, {})
        if len(mine) >= REQUESTS_OPEN_MAX:
            raise Busy(f"the connection has {REQUESTS_OPEN_MAX} unanswered requests, which is the maximum; wait")
        requests = self._tenants.get(place.tenant)
        responders = [] if requests is None else requests.trie.match(place.subject)
        if requests is None or not responders:
            raise _nobody(place.subject)
        self._number += 1
        number, deadline_us = self._number, now_us + request.timeout_ms * 1000
        one = OpenRequest(number, session, place, request, deadline_us)
        responder = requests.choose(responders)
        if responder is None:
            self._wait(requests, one, responders, body)
        requests.requests += 1
        mine[number] = self._awaited[number] = one
        next_us = self._deadlines.next_us()
        self._deadlines.set(number, deadline_us)
        if next_us is None or deadline_us < next_us:
            self._ports.wake_at(deadline_us)
        one.answer.then(partial(self._answered, one))
        if responder is not None:
            self._push(requests, one, responder, body, now_us)
        return one.answer

    def _answered(self, one: OpenRequest, outcome: object) -> None:
        """Withdraw a request that whoever asked has cancelled."""
        if isinstance(outcome, Cancelled):
            self._withdraw(one)

    def _wait(
        self, requests: TenantRequests, one: OpenRequest, responders: list[LiveResponder], body: memoryview
    ) -> None:
        """Keep a request until a responder is free."""
        subject = one.subject
        size_bytes = len(body) + header_bytes(one.request.headers)
        queue = requests.waiting.get(subject)
        if (
            requests.requests_waiting >= REQUESTS_WAITING_MAX
            or self._held_bytes + size_bytes > REQUESTS_WAITING_BYTES_MAX
            or (queue is None and len(requests.waiting) >= WAITING_SUBJECTS_MAX)
        ):
            raise Busy(f"all responders of {subject} are busy, and as many requests wait as may; try again in a moment")
        held = requests.held_bytes, self._held_bytes, REQUESTS_WAITING_BYTES_MAX, size_bytes
        self.taking(TakenShare(one.tenant, "bytes_of_waiting_requests", *held))
        if queue is None:
            queue = requests.waiting[subject] = OrderedDict()
            requests.candidates[subject] = dict.fromkeys(responders)
            for responder in responders:
                responder.waiting[subject] = None
        one.value, one.size_bytes = bytes(body), size_bytes
        self._held_bytes += size_bytes
        requests.held_bytes += size_bytes
        requests.requests_waiting += 1
        one.queued = True
        queue[one.number] = one

    def _push(
        self,
        requests: TenantRequests,
        one: OpenRequest,
        responder: LiveResponder,
        value: memoryview | bytes,
        now_us: int,
    ) -> None:
        """Send a request to a responder."""
        one.responder = responder
        responder.open[one.number] = self._delivered[one.number] = one
        requests.requests_open += 1
        request = one.request
        delivery = RequestDelivery(
            responder.number,
            one.number,
            name_for(responder.session, one.tenant, one.subject),
            max(0, (one.deadline_us - now_us) // 1000),
            request.headers,
        )
        request.headers = {}
        responder.session.push(AnswerWithBody(delivery, value if isinstance(value, bytes) else bytes(value)))

    # Answering.

    def reply(self, session: Session, request: ReplySend, body: memoryview, now_us: int) -> Done:
        """Hand a reply to whoever asked; one that nobody waits for is counted and ignored."""
        _check_size(request.headers, body)
        if request.error is not None:
            check_error_object(request.error)
        one = self._delivered.get(request.request)
        responder = None if one is None else one.responder
        if one is None or responder is None or responder.session is not session:
            requests = self._tenants.get(session.tenant)
            if requests is not None:
                requests.unknown_replies += 1
            return Done()
        if one.answer.resolved:
            self._tenants[one.tenant].late_replies += 1
        else:
            self._finish(one)
            if request.error is not None:
                one.answer.resolve(as_service_failed(request.error))
            elif one.session.blocked and not self._has_room(one.session, len(body)):
                one.answer.resolve(LimitExceeded(_UNRECEIVED))
            else:
                one.answer.resolve(AnswerWithBody(RequestReply(request.headers), bytes(body)))
        self._free(responder, one, now_us)
        return Done()

    def _has_room(self, session: Session, size_bytes: int) -> bool:
        """Whether a reply to a session that receives too slowly may wait to be sent; counts it then."""
        unsent_bytes = self._unsent_bytes.get(session, 0) + size_bytes
        if unsent_bytes > REPLIES_UNSENT_BYTES_MAX:
            return False
        self._unsent_bytes[session] = unsent_bytes
        return True

    def _free(self, responder: LiveResponder, one: OpenRequest, now_us: int) -> None:
        """Take an answered request from its responder, which may get the next one that waits."""
        requests = self._tenants[responder.tenant]
        del responder.open[one.number], self._delivered[one.number]
        requests.requests_open -= 1
        if responder.waiting:
            self._serve_waiting(requests, responder, now_us)
        if responder.closed and not responder.open:
            self._forget(responder)

    def _serve_waiting(self, requests: TenantRequests, responder: LiveResponder, now_us: int) -> None:
        """Send a responder as many waiting requests as it takes, of its subjects in turn, many of them in slices."""
        for _ in range(_AT_ONCE):
            if not responder.waiting or not responder.is_free:
                return
            subject = next(iter(responder.waiting))
            queue = requests.waiting[subject]
            _, one = queue.popitem(last=False)
            self._unwait(requests, one)
            if queue:
                del responder.waiting[subject]
                responder.waiting[subject] = None  # the others first
            else:
                self._forget_waiting(requests, subject)
            self._push(requests, one, responder, one.value, now_us)
            one.value = b""
        self._ports.call_at_turn_end(lambda: self._serve_waiting(requests, responder, now_us))

    def _unwait(self, requests: TenantRequests, one: OpenRequest) -> None:
        one.queued = False
        requests.requests_waiting -= 1
        self._held_bytes -= one.size_bytes
        requests.held_bytes -= one.size_bytes

    def _forget_waiting(self, requests: TenantRequests, subject: str) -> None:
        """No request to a subject waits any more."""
        del requests.waiting[subject]
        for responder in requests.candidates.pop(subject):
            responder.waiting.pop(subject, None)

    # Responders.

    def open(self, session: Session, request: ServeOpen, now_us: int) -> ServeOpened:
        """Add a responder; it gets the requests that wait for one like it."""
        place = parse_pattern(request.subject)
        if is_own(place.subject):
            raise InvalidArgument(f"{place.subject} is one of the broker's own subjects: serve one without '$'")
        if not 0 < request.concurrency <= RESPONDER_CONCURRENCY_MAX:
            raise InvalidArgument(f"concurrency is 1 to {RESPONDER_CONCURRENCY_MAX}, not {request.concurrency}")
        mine = self._responders.setdefault(session, {})
        if len(mine) >= LIVE_SUBSCRIPTIONS_MAX:
            raise LimitExceeded(
                f"the connection has {LIVE_SUBSCRIPTIONS_MAX} responders, which is the maximum; close some"
            )
        if self._count >= LIVE_SUBSCRIPTIONS_IN_ALL_MAX:
            raise LimitExceeded(
                f"the broker has {LIVE_SUBSCRIPTIONS_IN_ALL_MAX} responders, which is the maximum; close some"
            )
        requests = self._tenants.get(place.tenant)
        used, limit = 0 if requests is None else requests.responders, LIVE_SUBSCRIPTIONS_IN_ALL_MAX
        self.taking(TakenShare(place.tenant, "responders", used, self._count, limit))
        if requests is None:
            requests = self._tenants[place.tenant] = TenantRequests()
        self._number += 1
        responder = LiveResponder(self._number, session, place, request.concurrency)
        requests.trie.add(place.subject, responder)
        mine[responder.number] = responder
        self._count += 1
        requests.responders += 1
        if requests.waiting:
            its_own = SubjectTrie[LiveResponder]()  # not that of all, with which each subject could take long
            its_own.add(place.subject, responder, limited=False)
            responder.waiting = {subject: None for subject in requests.waiting if its_own.find(subject)}
            for subject in responder.waiting:
                requests.candidates[subject][responder] = None
            # Not before its number is told: the caller may get a request before the answer else.
            self._ports.call_soon(lambda: self._serve_waiting(requests, responder, now_us))
        return ServeOpened(responder.number)

    def close(self, session: Session, request: ServeClose) -> Done:
        """Send a responder no more requests; it can still answer those that it has."""
        responder = self._responders.get(session, {}).get(request.responder)
        if responder is not None and not responder.closed:
            self._retire(responder)
            if not responder.open:
                self._forget(responder)
        return Done()

    def opened(self) -> Iterator[OpenedReading]:
        """All responders."""
        for session, responders in self._responders.items():
            for one in responders.values():
                yield session, ServeOpen(f"{one.tenant}/{one.subject}"), partial(self._end, one)

    def _end(self, responder: LiveResponder, error: HeadraceError) -> None:
        """End a responder, and tell its session why; those who wait for its replies are told that it is lost."""
        if responder.closed:
            return
        for _ in self._remove_all([responder]):
            pass  # it has as many requests as it may have at once
        self._forget(responder)
        number = responder.number
        end = SubjectEnd(error.code, str(error), None, number, error.retryable, error.details)
        responder.session.push(end)

    def resume(self, session: Session, now_us: int) -> None:
        """Send requests that wait to a session whose client has caught up."""
        self._unsent_bytes.pop(session, None)
        for responder in list(self._responders.get(session, {}).values()):
            if responder.waiting:
                self._serve_waiting(self._tenants[responder.tenant], responder, now_us)

    def disconnect(self, session: Session) -> None:
        """Withdraw what a session asked, and tell those who wait for its replies, many of them in slices."""
        self._unsent_bytes.pop(session, None)
        for one in list(self._callers.pop(session, {}).values()):
            one.answer.cancel()
        responders = list(self._responders.pop(session, {}).values())
        for responder in responders:
            responder.closed = True

        def steps() -> Steps:
            for done, _ in enumerate(self._remove_all(responders), 1):
                if done % _AT_ONCE == 0:
                    yield

        if responders:
            in_slices(self._ports, steps())

    def _remove_all(self, responders: list[LiveResponder]) -> Iterator[None]:
        """Remove responders of an ended session; yields after each, and after each request that one had."""
        for responder in responders:
            self._retire(responder)
            yield
            delivered, responder.open = responder.open, {}
            self._tenants[responder.tenant].requests_open -= len(delivered)
            for one in delivered.values():
                del self._delivered[one.number]
                self._fail(
                    one, ResponderLost(f"the responder of {one.subject} was lost; it may have handled the request")
                )
                yield

    def _retire(self, responder: LiveResponder) -> None:
        """Give a responder no more requests; those that wait for nobody else fail."""
        responder.closed = True
        requests = self._tenants[responder.tenant]
        if not requests.trie.remove(responder.subject, responder):
            return  # it was closed before
        self._count -= 1
        requests.responders -= 1
        orphaned: list[OpenRequest] = []
        for subject in responder.waiting:
            candidates = requests.candidates[subject]
            del candidates[responder]
            if not candidates:
                del requests.candidates[subject]
                orphaned += requests.waiting.pop(subject).values()
        responder.waiting.clear()
        for one in orphaned:
            self._unwait(requests, one)
        if orphaned:
            in_slices(self._ports, self._fail_orphaned(orphaned))

    def _fail_orphaned(self, requests: list[OpenRequest]) -> Steps:
        for number, one in enumerate(requests, 1):
            self._fail(one, _nobody(one.subject))
            if number % _AT_ONCE == 0:
                yield

    def _fail(self, one: OpenRequest, error: HeadraceError) -> None:
        """Answer a request with an error, if somebody still waits."""
        if not one.answer.resolved:
            self._finish(one)
            one.answer.resolve(error)

    def _forget(self, responder: LiveResponder) -> None:
        """Remove a closed responder, which has answered everything, from its session."""
        mine = self._responders.get(responder.session)
        if mine is not None:
            mine.pop(responder.number, None)
            if not mine:
                del self._responders[responder.session]

    # Ending.

    def _finish(self, one: OpenRequest) -> None:
        """Nobody waits for the reply any more, or it is here."""
        del self._awaited[one.number]
        self._deadlines.remove(one.number)
        mine = self._callers.get(one.session)
        if mine is not None:
            mine.pop(one.number, None)
            if not mine:
                del self._callers[one.session]

    def _withdraw(self, one: OpenRequest) -> None:
        """Take back a request: it waits no more, or the reply to it will be ignored."""
        self._finish(one)
        if one.queued:
            requests = self._tenants[one.tenant]
            subject = one.subject
            queue = requests.waiting[subject]
            del queue[one.number]
            self._unwait(requests, one)
            if not queue:
                self._forget_waiting(requests, subject)

    @property
    def next_tick_us(self) -> int | None:
        """When the next request times out."""
        return self._deadlines.next_us()

    def tick(self, now_us: int) -> None:
        """Answer the requests whose time is over."""
        for number in self._deadlines.pop_due(now_us, _TIMED_OUT_TOGETHER):
            one = self._awaited[number]
            waited = one.responder is None
            self._withdraw(one)
            self._tenants[one.tenant].timeouts += 1
            one.answer.resolve(_timed_out(one, waited=waited))

    def describe(self, session: Session, info: SwitchboardInfo) -> SwitchboardInfo:
        """Fill in the counts of the session's tenant."""
        return self.total(session.tenant, info)

    def total(self, tenant: str | None, info: SwitchboardInfo) -> SwitchboardInfo:
        """Fill in the counts of a tenant, or of all."""
        for name, requests in self._tenants.items():
            if tenant in (None, name):
                info.responders += len(requests.trie)
                for count in _COUNTS:
                    setattr(info, count, getattr(info, count) + getattr(requests, count))
        return info


def _check_request(request: RequestSend, subject: str, body: memoryview) -> None:
    if is_own(subject):
        raise InvalidArgument(f"{subject} is one of the broker's own subjects: nobody serves it")
    if not 0 < request.timeout_ms <= REQUEST_SECONDS_MAX * 1000:
        raise InvalidArgument(
            f"a reply is waited for 1 to {REQUEST_SECONDS_MAX * 1000} milliseconds, not {request.timeout_ms}"
        )
    _check_size(request.headers, body)


def _check_size(headers: Headers, body: memoryview) -> None:
    size_bytes = len(body) + header_bytes(headers)
    if size_bytes > MESSAGE_BYTES_MAX:
        raise MessageTooLarge.of(size_bytes, MESSAGE_BYTES_MAX)


def _nobody(subject: str) -> NoResponders:
    return NoResponders(f"nobody serves {subject}: start a responder for it, or check the name", subject=subject)


def _timed_out(one: OpenRequest, *, waited: bool) -> HeadraceError:
    seconds = one.request.timeout_ms / 1000
    if waited:
        return Timeout(f"all responders of {one.subject} were busy for {seconds:.3g} s; nothing was sent to them")
    return Timeout(f"no reply to a request to {one.subject} within {seconds:.3g} s; it may still be handled")
