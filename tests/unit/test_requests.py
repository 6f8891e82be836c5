"""Request/reply: who gets a request, who gets the reply, and what becomes of both when somebody vanishes."""

from collections.abc import Iterator
from typing import Any

import pytest

from headrace.broker import request_dispatcher
from headrace.broker.pending_answer import AnswerWithBody, PendingAnswer
from headrace.broker.subject_trie import SubjectTrie
from headrace.errors import (
    Busy,
    Cancelled,
    Draining,
    InvalidArgument,
    LimitExceeded,
    MessageTooLarge,
    NoResponders,
    ResponderLost,
    ServiceFailed,
    Timeout,
)
from headrace.model.error_object import ErrorObject
from headrace.model.subject_requests import (
    ReplySend,
    RequestDelivery,
    RequestReply,
    RequestSend,
    ServeClose,
    ServeOpen,
    SwitchboardDescribe,
    SwitchboardInfo,
)
from headrace.testing.workbench import Workbench


@pytest.fixture
def bench() -> Iterator[Workbench]:
    bench = Workbench()
    yield bench
    bench.close()


class Service:
    """A session that serves a subject, and the requests that it has got."""

    def __init__(self, bench: Workbench, subject: str = "price", concurrency: int = 1, tenant: str = "") -> None:
        self.bench = bench
        self.got: list[AnswerWithBody[RequestDelivery]] = []
        self.session = bench.broker.connect(self.got.append, "service", bench.now_us, tenant=tenant)
        self.number = self.serve(subject, concurrency)

    def serve(self, subject: str, concurrency: int = 1) -> int:
        number: int = self.bench.ask(ServeOpen(subject, concurrency), session=self.session).responder
        return number

    @property
    def values(self) -> list[bytes]:
        return [bytes(one.body) for one in self.got]

    def reply(self, index: int = -1, value: bytes = b"reply", **more: Any) -> None:
        self.bench.ask(ReplySend(self.got[index].answer.request, **more), value, self.session)

    def vanish(self) -> None:
        self.bench.broker.disconnect(self.session, self.bench.now_us)
        self.bench.run()


def send(bench: Workbench, value: bytes = b"?", subject: str = "price", session: Any = None, **more: Any) -> Any:
    return bench.begin(RequestSend(subject, **{"timeout_ms": 1000, **more}), value, session)


def counts(bench: Workbench) -> SwitchboardInfo:
    info: SwitchboardInfo = bench.ask(SwitchboardDescribe())
    return info


def test_a_request_goes_to_a_responder_and_the_reply_to_the_caller(bench: Workbench) -> None:
    service = Service(bench)
    asked = send(bench, b"plum", headers={"lang": b"en"})
    (delivery,) = service.got
    assert delivery.body == b"plum"
    assert delivery.answer == RequestDelivery(service.number, delivery.answer.request, "price", 1000, {"lang": b"en"})
    assert not asked.resolved
    service.reply(value=b"3.50", headers={"currency": b"eur"})
    assert asked.outcome == AnswerWithBody(RequestReply({"currency": b"eur"}), b"3.50")
    assert counts(bench).requests_open == 0


def test_nobody_there_is_told_at_once(bench: Workbench) -> None:
    refused = send(bench)
    assert isinstance(refused, NoResponders)
    assert "nobody serves price" in str(refused)
    service = Service(bench, "price.*")
    assert isinstance(send(bench), NoResponders)
    assert isinstance(send(bench, subject="price.quote"), PendingAnswer)
    service.vanish()
    assert isinstance(send(bench, subject="price.quote"), NoResponders)


def test_no_answer_in_time(bench: Workbench) -> None:
    service = Service(bench)
    asked = send(bench, timeout_ms=1500)
    assert bench.wakes_us[-1] == bench.now_us + 1_500_000
    bench.tick(1.4)
    assert not asked.resolved
    bench.tick(0.1)
    assert isinstance(asked.outcome, Timeout)
    assert "within 1.5 s" in str(asked.outcome)
    service.reply()
    assert counts(bench).late_replies == counts(bench).timeouts == 1
    assert isinstance(asked.outcome, Timeout)


def test_a_responder_that_answers_late_is_busy_until_then(bench: Workbench) -> None:
    service = Service(bench)
    send(bench, b"1")
    bench.tick(2)
    waits = send(bench, b"2")
    assert service.values == [b"1"]
    service.reply(0)
    assert service.values == [b"1", b"2"]
    service.reply(1, b"two")
    assert waits.outcome.body == b"two"


def test_a_second_answer_is_counted_and_ignored(bench: Workbench) -> None:
    service = Service(bench)
    asked = send(bench)
    service.reply(value=b"first")
    service.reply(value=b"second")
    assert asked.outcome.body == b"first"
    assert counts(bench).unknown_replies == 1


def test_only_the_responder_that_has_a_request_can_answer_it(bench: Workbench) -> None:
    service, impostor = Service(bench), Service(bench, "other")
    asked = send(bench)
    bench.ask(ReplySend(service.got[0].answer.request), b"forged", impostor.session)
    assert not asked.resolved
    assert counts(bench).unknown_replies == 1
    service.reply()
    assert asked.outcome.body == b"reply"


def test_a_failure_reaches_the_caller_as_the_error_object(bench: Workbench) -> None:
    service = Service(bench)
    asked = send(bench)
    service.reply(value=b"", error=ErrorObject("out_of_stock", "no plums left", True, {"item": "plum"}))
    failed = asked.outcome
    assert isinstance(failed, ServiceFailed)
    assert (str(failed), failed.error_code, failed.retryable) == ("no plums left", "out_of_stock", True)
    assert failed.error_details == {"item": "plum"}


def test_a_lost_responder_is_told_at_once(bench: Workbench) -> None:
    service, other = Service(bench, concurrency=2), Service(bench, concurrency=2)
    asked = [send(bench, b"%d" % number) for number in range(4)]
    assert len(service.got) == len(other.got) == 2
    service.vanish()
    lost = [one for one in asked if isinstance(one.outcome, ResponderLost)]
    assert len(lost) == 2
    assert lost[0].outcome.retryable
    other.reply(0)
    other.reply(1)
    assert sum(isinstance(one.outcome, AnswerWithBody) for one in asked) == 2, "the others are not concerned"


def test_what_was_not_delivered_goes_to_another_responder(bench: Workbench) -> None:
    service, other = Service(bench), Service(bench)
    asked = [send(bench, b"%d" % number) for number in range(3)]
    assert counts(bench).requests_waiting == 1
    service.vanish()
    other.reply(0)
    assert other.values[-1] == b"2"
    other.reply(1)
    assert asked[2].outcome.body == b"reply"


def test_waiting_requests_fail_when_the_last_responder_goes(bench: Workbench) -> None:
    service = Service(bench)
    asked = [send(bench) for _ in range(500)]
    service.vanish()
    assert isinstance(asked[0].outcome, ResponderLost)
    assert "responder of price " in str(asked[0].outcome), "it names the subject"
    assert all(isinstance(one.outcome, NoResponders) for one in asked[1:])
    assert counts(bench).requests_waiting == 0


def test_responders_share_the_load(bench: Workbench) -> None:
    services = [Service(bench, concurrency=10) for _ in range(4)]
    for number in range(40):
        send(bench, b"%d" % number)
    assert [len(service.got) for service in services] == [10, 10, 10, 10]


def test_the_least_busy_responder_is_preferred(bench: Workbench) -> None:
    slow, quick = Service(bench, concurrency=10), Service(bench, concurrency=10)
    answered = 0
    for _ in range(8):
        send(bench)
        if len(quick.got) > answered:
            answered += 1
            quick.reply()
    assert (len(slow.got), len(quick.got)) == (1, 7)


def test_a_busy_responder_gets_what_waits_in_order(bench: Workbench) -> None:
    service = Service(bench, concurrency=2)
    for number in range(5):
        send(bench, b"%d" % number)
    assert service.values == [b"0", b"1"]
    service.reply(0)
    assert service.values == [b"0", b"1", b"2"]
    service.reply(1)
    service.reply(2)
    service.reply(3)
    assert service.values == [b"0", b"1", b"2", b"3", b"4"]


def test_subjects_that_wait_take_turns(bench: Workbench) -> None:
    service = Service(bench, "price.*")
    send(bench, b"", "price.x")
    for number in range(3):
        send(bench, b"a%d" % number, "price.a")
    send(bench, b"b0", "price.b")
    for index in range(5):
        service.reply(index)
    assert service.values == [b"", b"a0", b"b0", b"a1", b"a2"]
    assert counts(bench).requests_waiting == 0


def test_a_new_responder_takes_what_waits(bench: Workbench) -> None:
    first = Service(bench)
    for number in range(200):
        send(bench, b"%d" % number)
    second = Service(bench, "*", concurrency=150)
    assert len(first.got) == 1
    assert second.values == [b"%d" % number for number in range(1, 151)]


def test_too_many_waiting_requests_are_refused(bench: Workbench, monkeypatch: pytest.MonkeyPatch) -> None:
    Service(bench)
    send(bench)
    monkeypatch.setattr(request_dispatcher, "REQUESTS_WAITING_MAX", 2)
    send(bench)
    send(bench)
    refused = send(bench)
    assert isinstance(refused, Busy)
    assert "all responders of price are busy" in str(refused)
    assert counts(bench).requests_waiting == 2


def test_waiting_bytes_and_subjects_are_bounded(bench: Workbench, monkeypatch: pytest.MonkeyPatch) -> None:
    service = Service(bench, "price.#")
    send(bench)
    monkeypatch.setattr(request_dispatcher, "REQUESTS_WAITING_BYTES_MAX", 10)
    monkeypatch.setattr(request_dispatcher, "WAITING_SUBJECTS_MAX", 1)
    assert isinstance(send(bench, b"x" * 11), Busy)
    assert isinstance(send(bench, b"x" * 10), PendingAnswer)
    assert isinstance(send(bench, b"", "price.other"), Busy)
    service.reply(0)
    service.reply(1)
    assert isinstance(send(bench, b"", "price.other"), PendingAnswer), "there is room again"


def test_unanswered_requests_of_a_connection_are_bounded(bench: Workbench, monkeypatch: pytest.MonkeyPatch) -> None:
    service = Service(bench, concurrency=10)
    monkeypatch.setattr(request_dispatcher, "REQUESTS_OPEN_MAX", 2)
    send(bench)
    send(bench)
    assert isinstance(send(bench), Busy)
    assert isinstance(send(bench, session=bench.connect()), PendingAnswer)
    service.reply(0)
    assert isinstance(send(bench), PendingAnswer)


def test_a_caller_that_vanishes_withdraws_its_requests(bench: Workbench) -> None:
    service = Service(bench)
    caller = bench.connect("caller")
    delivered, waits = send(bench, b"1", session=caller), send(bench, b"2", session=caller)
    stays = send(bench, b"3")
    bench.broker.disconnect(caller, bench.now_us)
    assert isinstance(delivered.outcome, Cancelled)
    assert isinstance(waits.outcome, Cancelled)
    assert counts(bench).requests_waiting == 1
    service.reply(0)
    assert service.values == [b"1", b"3"], "what had not been delivered never is"
    assert counts(bench).late_replies == 1
    service.reply(1)
    assert stays.outcome.body == b"reply"


def test_a_gateway_can_cancel(bench: Workbench) -> None:
    service = Service(bench)
    send(bench)
    waits = send(bench, b"waits", session=bench.connect(tenant="acme"), subject="price")
    assert isinstance(waits, NoResponders)
    theirs = Service(bench, tenant="acme")
    session = bench.connect(tenant="acme")
    send(bench, session=session)
    waits = send(bench, b"waits", session=session)
    assert waits.cancel()
    theirs.reply(0)
    assert len(theirs.got) == len(service.got) == 1


def test_a_slow_responder_gets_nothing_until_it_has_caught_up(bench: Workbench) -> None:
    slow = Service(bench, concurrency=10)
    bench.broker.pause(slow.session)
    asked = send(bench)
    assert slow.got == []
    bench.broker.resume(slow.session)
    slow.reply()
    assert asked.outcome.body == b"reply"
    quick = Service(bench, concurrency=10)
    bench.broker.pause(slow.session)
    for _ in range(3):
        send(bench)
    assert len(quick.got) == 3


def test_a_closed_responder_answers_what_it_has(bench: Workbench) -> None:
    service = Service(bench)
    asked, waits = send(bench, b"1"), send(bench, b"2")
    bench.ask(ServeClose(service.number), session=service.session)
    bench.ask(ServeClose(service.number), session=service.session)
    bench.ask(ServeClose(99), session=service.session)
    assert isinstance(waits.outcome, NoResponders)
    assert isinstance(send(bench), NoResponders)
    service.reply(0)
    assert asked.outcome.body == b"reply"
    assert bench.broker._requests._responders == {}


def test_a_draining_broker_lets_requests_finish(bench: Workbench) -> None:
    service = Service(bench)
    asked, waits = send(bench, b"1"), send(bench, b"2")
    bench.broker.drain()
    assert isinstance(send(bench), Draining)
    with pytest.raises(Draining):
        service.serve("other")
    service.reply(0)
    service.reply(1)
    assert asked.outcome.body == waits.outcome.body == b"reply"


def test_tenants_have_their_own_responders(bench: Workbench) -> None:
    acme, default = Service(bench, tenant="acme"), Service(bench)
    caller = bench.connect(tenant="acme")
    asked = send(bench, b"acme's", session=caller)
    assert acme.values == [b"acme's"]
    assert acme.got[0].answer.subject == "price"
    assert default.got == []
    acme.reply(value=b"", error=ErrorObject("bad", "no"))
    assert isinstance(asked.outcome, ServiceFailed)
    refused = send(bench, subject="unknown", session=caller)
    assert "acme/" not in str(refused)
    timed_out = send(bench, session=caller)
    bench.tick(2)
    assert isinstance(timed_out.outcome, Timeout)
    assert bench.ask(SwitchboardDescribe(), session=caller).timeouts == 1
    assert counts(bench).timeouts == 0


@pytest.mark.parametrize(
    "request_",
    [
        RequestSend("price", 0),
        RequestSend("price", -5),
        RequestSend("price", 86_400_001),
        RequestSend("price.*", 1000),
        RequestSend("", 1000),
        RequestSend("$events.x", 1000),
        ServeOpen("$events.x"),
        ServeOpen("a..b"),
        ServeOpen("a", 0),
        ServeOpen("a", 10_001),
        ReplySend(1, error=ErrorObject("", "x")),
        ReplySend(1, error=ErrorObject("x", "y" * 4001)),
        ReplySend(1, error=ErrorObject("x", "y", False, {"z": "z" * 20_000})),
    ],
    ids=str,
)
def test_bad_requests_are_refused(bench: Workbench, request_: Any) -> None:
    Service(bench)
    with pytest.raises(InvalidArgument):
        bench.ask(request_)


def test_sizes_are_bounded(bench: Workbench) -> None:
    service = Service(bench)
    assert isinstance(send(bench, b"x" * (16 << 20), headers={"a": b"b"}), MessageTooLarge)
    asked = send(bench, b"x" * (16 << 20))
    with pytest.raises(MessageTooLarge):
        service.reply(value=b"x" * ((16 << 20) + 1))
    assert not asked.resolved, "the responder can still answer"


def test_replies_to_a_caller_that_does_not_receive_are_bounded(
    bench: Workbench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(request_dispatcher, "REPLIES_UNSENT_BYTES_MAX", 10)
    service = Service(bench, concurrency=10)
    caller = bench.connect("caller")
    asked = [send(bench, session=caller) for _ in range(4)]
    bench.broker.pause(caller)
    service.reply(0, b"x" * 6)
    service.reply(1, b"x" * 6)
    service.reply(2, b"x" * 4)
    bench.broker.resume(caller)
    service.reply(3, b"x" * 100)
    assert [type(one.outcome) for one in asked] == [AnswerWithBody, LimitExceeded, AnswerWithBody, AnswerWithBody]
    bench.broker.pause(caller)
    send(bench, session=caller)
    service.reply(4, b"x")
    bench.broker.disconnect(caller, bench.now_us)
    assert bench.broker._requests._unsent_bytes == {}


def test_the_number_of_responders_is_bounded(bench: Workbench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_dispatcher, "LIVE_SUBSCRIPTIONS_MAX", 1)
    service = Service(bench)
    with pytest.raises(LimitExceeded, match="the connection has"):
        service.serve("b")
    monkeypatch.setattr(request_dispatcher, "LIVE_SUBSCRIPTIONS_MAX", 10)
    monkeypatch.setattr(request_dispatcher, "LIVE_SUBSCRIPTIONS_IN_ALL_MAX", 2)
    number = service.serve("b")
    with pytest.raises(LimitExceeded, match="the broker has"):
        service.serve("c")
    bench.ask(ServeClose(number), session=service.session)
    service.serve("c")


def test_many_responders_of_a_lost_session_are_removed_in_slices(bench: Workbench) -> None:
    service = Service(bench)
    for number in range(600):
        service.serve(f"s.{number}", 2)
    asked = [send(bench, b"", f"s.{number}") for number in range(600)]
    bench.broker.disconnect(service.session, bench.now_us)
    assert any(not one.resolved for one in asked)
    waits = send(bench, b"", "s.599")
    assert len(service.got) == 600, "nothing goes to one whose session has ended"
    bench.run()
    assert all(isinstance(one.outcome, ResponderLost) for one in asked)
    assert isinstance(waits.outcome, NoResponders)
    assert counts(bench).responders == 0


def test_responders_of_waiting_requests_are_not_searched_again(
    bench: Workbench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each search may take milliseconds, and requests to a thousand subjects may wait."""
    service, other = Service(bench, "price.#"), Service(bench, "price.*")
    asked = [send(bench, subject=f"price.{number}") for number in range(200)]
    assert counts(bench).requests_waiting == 198
    searched: list[str] = []
    find = SubjectTrie.find

    def counted(trie: SubjectTrie[Any], subject: str) -> list[Any]:
        searched.append(subject)
        return find(trie, subject)

    monkeypatch.setattr(SubjectTrie, "find", counted)
    other.vanish()
    assert counts(bench).requests_waiting == 198, "the first one is still there"
    for _ in range(50):
        service.reply()
    assert len(service.got) == 51
    service.vanish()
    assert searched == []
    assert sum(isinstance(one.outcome, NoResponders) for one in asked) == 148
    assert counts(bench).requests_waiting == 0


def test_responders_with_patterns_that_fit_in_too_many_ways_are_refused(bench: Workbench) -> None:
    service, refused = Service(bench), 0
    for number in range(400):
        try:
            service.serve(".".join(["#", *("a*"[number >> bit & 1] for bit in range(9)), "z"]))
        except LimitExceeded:
            refused += 1
    assert 0 < refused < 400
    service.vanish()
    assert Service(bench, "#.a.*.z").number, "what is gone leaves room, also what was refused"
