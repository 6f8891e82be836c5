"""Access of sessions: asked for every request, the same answer for what exists and what does not, changed at once."""

from typing import Any

import pytest
from tests.definitions_stores import definitions_store as definitions_store
from tests.request_examples import EXAMPLES
from tests.silent_sender import SilentSender

from headrace.broker.access_filters import FILTERS
from headrace.model.errors import (
    Forbidden,
    HeadraceError,
    InvalidArgument,
    NotAuthenticated,
    TokenExpired,
    TokenRevoked,
    TopicNotFound,
)
from headrace.model.identity import ANONYMOUS, LOCAL, Identity
from headrace.model.leasing import Edit, MessageChange, MessageId, SubscriptionCreate, SubscriptionList
from headrace.model.partition_count import PartitionCount
from headrace.model.reading import Fetch, StreamClose, StreamCredit, StreamOpen
from headrace.model.request import REQUESTS, Request, Resource, Verb
from headrace.model.requests import (
    Commit,
    GroupJoin,
    GroupList,
    Info,
    PartitionOffset,
    Publish,
    TopicCreate,
    TopicDescribe,
    TopicList,
    TransactionStage,
)
from headrace.model.route_requests import RouteDefinition, RouteSet
from headrace.model.schedule_requests import ScheduleDefinition, ScheduleList, ScheduleSet
from headrace.model.security_requests import (
    AccessExplain,
    Binding,
    BindingAdd,
    BindingRemove,
    Grant,
    RoleSet,
    SecurityAlter,
    TokenCreate,
    TokenList,
    TokenRevoke,
    WhoAmI,
)
from headrace.model.standing_lease import LeaseClose, LeaseCredit, LeaseOpen
from headrace.model.subject_requests import (
    ReplySend,
    ServeClose,
    ServeOpen,
    SubjectPublish,
    SubjectSubscribe,
    SubjectUnsubscribe,
)
from headrace.model.system_topics import AUDIT_TOPIC
from headrace.model.webhook_requests import WebhookAlter, WebhookDefinition, WebhookSet
from headrace.security.tokens import verified_token
from headrace.testing.workbench import Workbench
from headrace.wire import native

WITHOUT_PERMISSION: dict[type[Request[Any]], str] = {
    native.Hello: "opens the session, whose identity is not known before",
    native.Ping: "keeps the connection alive",
    StreamCredit: "about a stream that the session has opened",
    StreamClose: "about a stream that the session has opened",
    LeaseCredit: "about a standing lease that the session has opened",
    LeaseClose: "about a standing lease that the session has opened",
    SubjectUnsubscribe: "about a live subscription that the session has opened",
    ServeClose: "about a responder that the session has opened",
    ReplySend: "answers a request that the broker sent to the session",
    WhoAmI: "tells the session about itself",
}
ADA = Identity("ada")


@pytest.fixture
def bench() -> Workbench:
    """A broker with security, whose administrator is the default session."""
    bench = Workbench()
    bench.session = bench.connect("administrator", identity=LOCAL)
    bench.publish("orders", [b"a"])
    bench.publish("secrets", [b"s"])
    bench.ask(RoleSet("orders", [Grant(["publish", "consume", "lease"], "*", ["orders*", "ada*"])]))
    bench.ask(BindingAdd(Binding("orders", "ada")))
    bench.ask(SecurityAlter(True))
    bench.ended.clear()  # the session that the workbench opened itself
    return bench


def refusal(bench: Workbench, request: Request[Any], session: Any, body: bytes = b"") -> HeadraceError:
    with pytest.raises((Forbidden, NotAuthenticated)) as refused:
        bench.ask(request, body, session=session)
    return refused.value


def test_every_request_declares_its_permissions_or_says_why_it_needs_none() -> None:
    without = {request for request in REQUESTS.values() if not request.declared.permissions}
    assert without == set(WITHOUT_PERMISSION)


def test_every_request_has_an_example() -> None:
    assert {type(example) for example in EXAMPLES} == set(REQUESTS.values()) - {native.Hello, native.Ping}


def test_every_list_is_filtered() -> None:
    whole = (Resource.BROKER, Resource.SECURITY, Resource.CLUSTER)
    lists = [
        request.declared.answer
        for request in REQUESTS.values()
        for permission in request.declared.permissions
        if permission.verb is Verb.DESCRIBE and not permission.field and permission.resource not in whole
    ]
    assert lists
    assert {answer for answer in lists if answer not in FILTERS} == set()


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: type(example).__name__)
def test_an_identity_without_roles_reaches_nothing(bench: Workbench, example: Request[Any]) -> None:
    with pytest.raises(Forbidden):
        bench.connect("eve", identity=Identity("eve"))
    session = bench.connect("ada", identity=ADA)
    bench.ask(RoleSet("orders", [Grant(["publish"], "topic", ["nothing"])]))
    if type(example) in WITHOUT_PERMISSION:
        return
    answer = bench.begin(example, bench.batch([b"x"]).data, session)
    bench.run()
    answer = getattr(answer, "outcome", answer)
    if example.declared.answer in FILTERS and not isinstance(answer, HeadraceError):
        (found, *_) = (getattr(answer, field) for field in answer.__struct_fields__)
        assert found == []
    else:
        assert isinstance(answer, Forbidden), answer


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: type(example).__name__)
def test_who_is_not_authenticated_reaches_nothing(bench: Workbench, example: Request[Any]) -> None:
    session = bench.connect("nobody", identity=ANONYMOUS)
    if type(example) in WITHOUT_PERMISSION:
        return
    answer = bench.begin(example, bench.batch([b"x"]).data, session)
    bench.run()
    answer = getattr(answer, "outcome", answer)
    if isinstance(answer, HeadraceError):
        assert isinstance(answer, NotAuthenticated), answer
    else:
        assert getattr(answer, answer.__struct_fields__[0]) == []


def test_a_refusal_is_the_same_whether_the_thing_exists(bench: Workbench) -> None:
    session = bench.connect("ada", identity=ADA)
    for make in (TopicDescribe, PartitionCount, lambda name: Fetch(name, 0, 0), lambda name: Publish(name, 0)):
        there = refusal(bench, make("secrets"), session, bench.batch([b"x"]).data)
        missing = refusal(bench, make("mystery"), session, bench.batch([b"x"]).data)
        assert type(there) is type(missing)
        assert str(there).replace("secrets", "mystery") == str(missing)
        assert {**there.details, "name": ""} == {**missing.details, "name": ""}


def test_lists_have_only_what_the_session_may_describe(bench: Workbench) -> None:
    bench.ask(TopicCreate("orders.view", {"view_of": "orders", "view_query": {"exact": 1}}))
    bench.ask(SubscriptionCreate("orders", "workers"))
    bench.ask(SubscriptionCreate("secrets", "workers"))
    bench.ask(Commit("billing", [PartitionOffset("orders", 0, 1)]))
    bench.ask(Commit("ada-group", [PartitionOffset("orders", 0, 1)]))
    bench.ask(ScheduleSet(ScheduleDefinition("nightly", "orders", "@daily")))
    session = bench.connect("ada", identity=ADA)
    assert [info.topic for info in bench.ask(TopicList(), session=session).topics] == ["orders", "orders.view"]
    assert [group.group for group in bench.ask(GroupList(), session=session).groups] == ["ada-group"]
    found = bench.ask(SubscriptionList(), session=session).subscriptions
    assert [(one.topic, one.subscription) for one in found] == [("orders", "workers")]
    assert bench.ask(ScheduleList(), session=session).schedules == []
    assert bench.ask(TopicDescribe("orders"), session=session).groups == ["ada-group"]
    refusal(bench, Info(), session)


def test_a_topic_is_not_made_by_who_may_not_create_it(bench: Workbench) -> None:
    session = bench.connect("ada", identity=ADA)
    batch = bench.batch([b"x"]).data
    assert bench.ask(Publish("orders", 0), batch, session=session).base_offset == 1
    for request in (
        Publish("orders.new", 0),
        PartitionCount("orders.new"),
        TopicDescribe("orders.new", create=True),
        GroupJoin("ada", "m", ["orders.new"], missing="create"),
        LeaseOpen("orders.new", create_topic=True),
    ):
        assert refusal(bench, request, session, batch).details["verb"] == "create"
    listed = [info.topic for info in bench.ask(TopicList()).topics]
    assert listed == [AUDIT_TOPIC, "orders", "secrets"]
    bench.ask(RoleSet("orders", [Grant(["publish", "create"], "topic", ["orders*"])]))
    assert bench.ask(Publish("orders.new", 0), batch, session=session).base_offset == 0


@pytest.mark.parametrize(
    "request_",
    [
        TopicCreate("ada.view", {"view_of": "secrets", "view_query": {"exact": 1}}),
        RouteSet(RouteDefinition("ada", ["orders"], "secrets", all=True)),
        RouteSet(RouteDefinition("ada", ["secrets"], "orders", all=True)),
        RouteSet(RouteDefinition("ada", ["orders"], "orders.eu", all=True, error_topic="secrets")),
        RouteSet(RouteDefinition("ada", ["orders"], all=True)),  # from the ingress
        ScheduleSet(ScheduleDefinition("ada", "secrets", "@daily")),
        SubscriptionCreate("orders", "ada", {"dead_letter_topic": "secrets"}),
        Commit("ada", [PartitionOffset("secrets", 0, 0)]),
        GroupJoin("ada", "m", ["orders", "secrets"]),
        GroupJoin("ada", "m", [], patterns=["*"]),
        GroupJoin("ada", "m", [], patterns=["secret*"]),
        TransactionStage("ada", 1, "secrets", 0),
        Publish("", 0),
        Publish("acme/orders", 0),
        SubjectSubscribe("#"),
        SubjectSubscribe("secrets.*"),
    ],
)
def test_definitions_need_access_to_all_that_they_name(bench: Workbench, request_: Request[Any]) -> None:
    verbs = ["publish", "consume", "create", "route", "schedule"]
    bench.ask(RoleSet("orders", [Grant(verbs, "*", ["orders*", "ada*"])]))
    bench.ask(BindingRemove(Binding("orders", "ada")))
    bench.ask(BindingAdd(Binding("orders", "ada", tenant="default")))
    session = bench.connect("ada", identity=ADA)
    refusal(bench, request_, session, bench.batch([b"x"]).data)


def test_a_group_may_have_patterns_that_the_grant_covers(bench: Workbench) -> None:
    session = bench.connect("ada", identity=ADA)
    joined = bench.ask(GroupJoin("ada", "m", [], patterns=["orders.*"]), session=session)
    assert joined.generation


def test_who_edits_own_messages_edits_no_others(bench: Workbench) -> None:
    bench.ask(RoleSet("orders", [Grant(["edit-own"], "topic", ["orders"])]))
    owners = [{"headrace-owner": b"ada"}, {"headrace-owner": b"bob"}, None]
    bench.ask(Publish("orders", 0), bench.batch([b"1", b"2", b"3"], headers=owners).data)
    session = bench.connect("ada", identity=ADA)
    messages = [MessageId(0, offset) for offset in range(4)]
    edited = bench.ask(Edit("orders", messages, MessageChange(delete=True)), session=session)
    assert [one.outcome for one in edited.outcomes] == ["not_owner", "applied", "not_owner", "not_owner"]
    refusal(bench, Edit("orders", messages, MessageChange(delete=True), owner="bob"), session)
    bench.ask(RoleSet("orders", [Grant(["edit-any"], "topic", ["orders"])]))
    edited = bench.ask(Edit("orders", messages[2:], MessageChange(delete=True), owner="bob"), session=session)
    assert [one.outcome for one in edited.outcomes] == ["applied", "applied"]


def test_a_revoked_token_ends_its_sessions_and_no_others(bench: Workbench) -> None:
    tokens = [bench.ask(TokenCreate("ada")) for _ in range(2)]
    identities = [Identity("ada", token_id=token.info.id) for token in tokens]
    first, second = (bench.connect(f"ada-{number}", identity=one) for number, one in enumerate(identities))
    stream = bench.ask(StreamOpen("orders", 0, 0, 1 << 20, 1), session=first)
    bench.ask(TokenRevoke(tokens[0].info.id))
    assert [(session, type(error)) for session, error in bench.ended] == [(first, TokenRevoked)]
    assert stream.read(1 << 20, bench.now_us) is None
    assert bench.ask(Fetch("orders", 0, 0), session=second)


def test_an_expired_token_ends_its_sessions(bench: Workbench) -> None:
    token = bench.ask(TokenCreate("ada", expires_us=bench.now_us + 5_000_000))
    _, definition = verified_token(bench.broker.definitions.load(), token.token, bench.now_us)
    identity = Identity("ada", token_id=token.info.id, expires_us=definition.expires_us)
    session = bench.connect("ada", identity=identity)
    bench.tick(4)
    assert bench.ended == []
    bench.tick(2)
    assert [(ended, type(error)) for ended, error in bench.ended] == [(session, TokenExpired)]


def test_what_an_identity_may_not_have_any_more_ends_and_the_session_goes_on(bench: Workbench) -> None:
    bench.ask(SubscriptionCreate("orders"))
    session = bench.connect("ada", identity=ADA)
    failures: list[Any] = []
    stream = bench.ask(StreamOpen("orders", 0, 0, 1 << 20, 1), session=session)
    stream.start(lambda: failures.append("ready"))
    bench.ask(LeaseOpen("orders", credit_messages=1), session=session)
    bench.ask(SubjectSubscribe("orders.*"), session=session)
    waiting = bench.begin(Fetch("orders", 0, 100, wait_ms=60_000), b"", session)
    bench.pushed.clear()
    bench.ask(RoleSet("orders", [Grant(["publish"], "*", ["orders*"])]))
    assert bench.ended == []
    with pytest.raises(Forbidden):
        stream.read(1 << 20, bench.now_us)
    assert {getattr(pushed, "code", "") for pushed in bench.pushed} == {"forbidden"}
    assert len(bench.pushed) == 2  # the standing lease and the live subscription
    assert waiting is not None
    assert bench.ask(Publish("orders", 0), bench.batch([b"x"]).data, session=session).base_offset == 1
    bench.ask(BindingRemove(Binding("orders", "ada")))
    assert [type(error) for _, error in bench.ended] == [Forbidden]


def test_enabling_ends_sessions_without_credentials_and_never_the_local_user() -> None:
    bench = Workbench()
    local = bench.connect("local", identity=LOCAL)
    bench.ask(SecurityAlter(True), session=local)
    assert [(session, type(error)) for session, error in bench.ended] == [(bench.session, NotAuthenticated)]
    bench.ask(SecurityAlter(False), session=local)
    found = bench.ask(TopicList(), session=bench.connect("anyone")).topics
    assert [info.topic for info in found] == [AUDIT_TOPIC]


def test_last_uses_are_recorded_rarely_and_survive(tmp_path: Any) -> None:
    bench = Workbench(str(tmp_path))
    token = bench.ask(TokenCreate("ada")).info.id
    bench.connect("ada", identity=Identity("ada", token_id=token))
    assert bench.ask(TokenList()).tokens[0].used_us == bench.now_us
    used_us = bench.now_us
    bench.tick(600)
    bench = Workbench(str(tmp_path), now_us=bench.now_us)  # the other one was killed
    assert bench.ask(TokenList()).tokens[0].used_us == used_us


def test_a_session_says_who_it_is_and_an_administrator_asks_about_others(bench: Workbench) -> None:
    session = bench.connect("ada", identity=ADA)
    told = bench.ask(WhoAmI(), session=session)
    assert (told.identity, told.tenant, told.roles, told.security_enabled) == ("ada", "default", ["orders"], True)
    assert bench.ask(AccessExplain("ada", "publish", "topic", "orders")).allowed
    assert not bench.ask(AccessExplain("ada", "delete", "topic", "orders")).allowed
    assert not bench.ask(AccessExplain("bob", "publish", "topic", "orders", tenant="acme")).allowed
    refusal(bench, AccessExplain("ada", "publish", "topic", "orders"), session)


def test_decisions_are_remembered_and_bounded(bench: Workbench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.security.access._REMEMBERED_MAX", 10)
    session = bench.connect("ada", identity=ADA)
    assert session.access is not None
    for number in range(100):
        bench.ask(SubjectPublish(f"orders.{number}"), bench.batch([b"x"]).data, session=session)
    assert len(session.access._requests) <= 10
    assert len(session.access._names) <= 10
    refusal(bench, ServeOpen("orders.x"), session)


def test_a_long_list_is_filtered_in_slices(bench: Workbench) -> None:
    for number in range(450):
        bench.ask(TopicCreate(f"{'orders' if number % 3 else 'other'}.{number}", {"storage": "memory"}))
    session = bench.connect("ada", identity=ADA)
    found = bench.ask(TopicList(), session=session).topics
    assert len(found) == 301
    assert {info.topic.partition(".")[0] for info in found} == {"orders"}


def test_a_missing_topic_is_told_without_the_names_of_others(bench: Workbench) -> None:
    session = bench.connect("ada", identity=ADA)
    bench.ask(TopicCreate("zorders"))
    with pytest.raises(TopicNotFound) as missing:
        bench.ask(TopicDescribe("orders-x"), session=session)
    assert "zorders" not in str(missing.value)
    assert missing.value.details["nearest"] == []
    bench.ask(SecurityAlter(False))
    with pytest.raises(TopicNotFound, match="zorders"):
        bench.ask(TopicDescribe("zorder"), session=session)


def test_who_may_not_read_a_topic_cannot_have_its_messages_sent_elsewhere(bench: Workbench) -> None:
    bench.broker.webhooks.attach(SilentSender())
    bench.ask(WebhookSet(WebhookDefinition("hook", "secrets", "https://receiver.invalid/")))
    bench.ask(RoleSet("orders", [Grant(["alter", "create"], "*", ["*"]), Grant(["publish"], "topic", ["orders"])]))
    session = bench.connect("ada", identity=ADA)
    assert bench.ask(WebhookAlter("hook", {"concurrency": 2}), session=session).definition.concurrency == 2
    assert refusal(bench, WebhookAlter("hook", {"url": "https://elsewhere.invalid/"}), session).details == {
        "verb": "consume", "resource": "topic", "name": "secrets",
    }  # fmt: skip
    elsewhere = {"settings": {"dead_letter_topic": "archive"}}
    assert refusal(bench, WebhookAlter("hook", elsewhere), session).details["name"] == "archive"
    for malformed in ({"settings": 5}, {"settings": {"dead_letter_topic": 5}}, {"settings": ["x"]}):
        with pytest.raises(InvalidArgument):
            bench.ask(WebhookAlter("hook", malformed), session=session)
    bench.ask(RoleSet("orders", [Grant(["alter"], "*", ["*"]), Grant(["consume"], "topic", ["secrets"])]))
    changed = bench.ask(WebhookAlter("hook", {"url": "https://elsewhere.invalid/"}), session=session)
    assert changed.definition.url == "https://elsewhere.invalid/"
