"""The audit trail: what is recorded, what is not, and every change of it is detected."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.request_examples import EXAMPLES

from headrace.broker.audit_limits import RecordLimit
from headrace.broker.audit_rules import READING, is_audited
from headrace.broker.settings import BrokerSettings
from headrace.model.audit import (
    LOGIN,
    NO_DIGEST,
    SUMMARY,
    AuditDescribe,
    AuditHead,
    AuditRecord,
    decode_record,
    encode_record,
    parse_head,
    record_digest,
)
from headrace.model.audit_chain import AuditReport, ChainVerifier
from headrace.model.errors import (
    DiskFull,
    Forbidden,
    HeadraceError,
    InvalidArgument,
    NotAuthenticated,
    TopicNotFound,
    UnsupportedOperation,
)
from headrace.model.identity import LOCAL, Identity
from headrace.model.leasing import SubscriptionCreate
from headrace.model.request import Verb
from headrace.model.requests import TopicAlter, TopicCreate, TopicDelete, TopicTrim
from headrace.model.security_requests import Binding, BindingAdd, SecurityAlter, TokenCreate
from headrace.model.system_topics import AUDIT_TOPIC, SYSTEM_TOPICS
from headrace.model.tenant_requests import TenantCreate, TenantDelete
from headrace.model.webhook import WebhookDefinition
from headrace.model.webhook_requests import WebhookSet
from headrace.testing.workbench import Workbench

ADA = Identity("ada")
ALWAYS = BrokerSettings(audit=True)


@pytest.fixture
def bench() -> Workbench:
    """A broker with security, whose administrator is the default session."""
    return secured(Workbench())


def secured(bench: Workbench) -> Workbench:
    bench.session = bench.connect("administrator", identity=LOCAL)
    bench.ask(SecurityAlter(True))
    return bench


def records(bench: Workbench, tenant: str = "") -> list[AuditRecord]:
    bench.run()
    return [decode_record(value) for value in bench.values(f"{tenant}{AUDIT_TOPIC}")]


def verified(bench: Workbench, **options: Any) -> AuditReport:
    verifier = ChainVerifier(**options)
    for offset, value in enumerate(bench.values(AUDIT_TOPIC)):
        verifier.take(offset, value)
    return verifier.report()


def test_administrative_actions_are_recorded_with_who_did_them(bench: Workbench) -> None:
    bench.ask(TopicCreate("orders"))
    bench.ask(BindingAdd(Binding("publisher", "ada")))
    created = bench.ask(TokenCreate("ada"))
    with pytest.raises(TopicNotFound):
        bench.ask(TopicDelete("nothing"))
    found = records(bench)
    assert [(one.action, one.outcome) for one in found] == [
        ("SecurityAlter", "done"),
        ("TopicCreate", "done"),
        ("BindingAdd", "done"),
        ("TokenCreate", "done"),
        ("TopicDelete", "topic_not_found"),
    ]
    assert {(one.identity, one.tenant, one.client) for one in found} == {("local", "default", "administrator")}
    assert found[1].resources == ["create topic orders"]
    assert found[2].details["binding"] == {"role": "publisher", "identity": "ada"}
    assert found[3].details["token"] == created.info.id
    assert verified(bench).intact


def test_the_record_of_a_cancelled_request_tells_what_was_done(tmp_path: Path) -> None:
    bench = secured(Workbench(tmp_path / "data"))
    bench.holding_syncs = True
    created = bench.begin(TopicCreate("orders"))
    bench.run()
    assert created.cancel()
    bench.release_syncs()
    last = records(bench)[-1]
    assert (last.action, last.outcome) == ("TopicCreate", "done")
    assert bench.broker._topics.find("orders") is not None


def test_an_action_is_answered_when_its_record_is_stored(bench: Workbench) -> None:
    pending = bench.begin(TopicCreate("orders"))
    while not pending.resolved:
        assert bench.step()
    assert [one.action for one in map(decode_record, bench.values(AUDIT_TOPIC))][-1] == "TopicCreate"


def test_no_secret_is_recorded(bench: Workbench) -> None:
    bench.publish("orders", [b"a"])
    token = bench.ask(TokenCreate("ada")).token
    url = "https://example.org/hook?key=hidden-in-the-url"
    with pytest.raises(UnsupportedOperation):  # recorded like one that succeeds
        bench.ask(WebhookSet(WebhookDefinition("hook", "orders", url), secrets=["whsec_" + "QUFB" * 8]))
    written = b"".join(bench.values(AUDIT_TOPIC))
    for secret in (token, token.rpartition("_")[2], "hidden-in-the-url", "QUFBQUFB"):
        assert secret.encode() not in written


def test_publishing_and_reading_are_not_recorded(bench: Workbench) -> None:
    before = len(records(bench))
    bench.publish("orders", [b"a"])
    assert bench.values("orders") == [b"a"]
    assert len(records(bench)) == before


def test_every_request_of_an_administrator_is_recorded_or_only_reads() -> None:
    plain = {Verb.DESCRIBE, Verb.PUBLISH, Verb.CONSUME, Verb.LEASE, Verb.EDIT_OWN, Verb.SERVE, Verb.REQUEST}
    plain.add(Verb.FOLLOW)
    for example in EXAMPLES:
        kind = type(example)
        verbs = {permission.verb for permission in kind.declared.permissions}
        assert is_audited(kind) == (not verbs <= plain and kind not in READING), kind


def test_refused_attempts_are_recorded(bench: Workbench) -> None:
    bench.ask(BindingAdd(Binding("publisher", "ada")))
    ada = bench.connect("desk", identity=ADA)
    with pytest.raises(Forbidden):
        bench.ask(TopicDelete("orders"), session=ada)
    anonymous = bench.connect("somebody", tenant="guessed")
    with pytest.raises(NotAuthenticated):
        bench.ask(TopicDelete("orders"), session=anonymous)
    with pytest.raises(Forbidden):
        bench.connect("eve", identity=Identity("eve"))
    last = records(bench)[-3:]
    assert [(one.identity, one.action, one.outcome) for one in last] == [
        ("ada", "TopicDelete", "forbidden"),
        ("anonymous", "TopicDelete", "not_authenticated"),
        ("eve", LOGIN, "forbidden"),
    ]
    assert bench.broker._topics.find(f"guessed/{AUDIT_TOPIC}") is None  # nobody can make the broker create topics


def test_a_flood_of_refused_attempts_is_summarised(bench: Workbench) -> None:
    anonymous = bench.connect("flood")
    before = len(records(bench))
    for number in range(1000):
        with pytest.raises(NotAuthenticated):
            bench.ask(TopicDelete(f"topic-{number}"), session=anonymous)
    assert len(records(bench)) == before + 60
    bench.tick(61)
    summary = records(bench)[-1]
    assert (summary.action, summary.details["count"]) == (SUMMARY, 940)
    assert summary.details["outcomes"] == {"not_authenticated": 940}
    assert verified(bench).intact


def test_logins_are_recorded_once_in_a_while(bench: Workbench) -> None:
    bench.ask(BindingAdd(Binding("publisher", "ada")))
    for _ in range(5):
        bench.connect("desk", identity=ADA)
    assert [one.identity for one in records(bench) if one.action == LOGIN] == ["ada"]
    bench.tick(301)
    bench.connect("desk", identity=ADA)
    assert [one.identity for one in records(bench) if one.action == LOGIN] == ["ada", "ada"]


def test_each_tenant_has_a_trail_of_its_own(bench: Workbench) -> None:
    bench.ask(TenantCreate("acme", quotas={"topics": 0}))
    acme = bench.connect("their administrator", tenant="acme", identity=LOCAL)
    with pytest.raises(HeadraceError):
        bench.ask(TopicCreate("orders"), session=acme)
    found = records(bench, "acme/")
    assert [(one.action, one.outcome) for one in found] == [(LOGIN, "done"), ("TopicCreate", "quota_exceeded")]
    assert found[1].resources == ["create topic orders"]
    bench.ask(TenantDelete("acme", cascade=True))
    bench.tick(1)
    assert bench.broker._topics.find(f"acme/{AUDIT_TOPIC}") is None
    assert records(bench)[-1].details == {"tenant": "acme", "cascade": True}


def test_what_an_operator_does_to_a_tenant_is_in_both_trails(bench: Workbench) -> None:
    bench.ask(TenantCreate("acme"))
    bench.ask(TopicCreate("acme/orders"))
    assert records(bench)[-1].resources == ["create topic acme/orders"]
    assert records(bench, "acme/")[-1].resources == ["create topic orders"]


def test_nothing_is_recorded_without_security_unless_the_setting_says_so() -> None:
    bench = Workbench()
    bench.ask(TopicCreate("orders"))
    assert not bench.ask(AuditDescribe()).enabled
    assert bench.broker._topics.find(AUDIT_TOPIC) is None
    bench = Workbench(settings=ALWAYS)
    bench.ask(TopicCreate("orders"))
    assert [one.action for one in records(bench)] == [LOGIN, "TopicCreate"]
    info = bench.ask(AuditDescribe())
    assert (info.enabled, info.number, info.offset) == (True, 2, 1)
    assert info.digest == record_digest(bench.values(AUDIT_TOPIC)[1])


def test_switching_security_off_is_recorded(bench: Workbench) -> None:
    bench.ask(SecurityAlter(False))
    assert records(bench)[-1].details == {"enabled": False}


def test_clients_cannot_write_to_a_trail_or_change_it(bench: Workbench) -> None:
    bench.ask(TopicCreate("orders"))
    refused: list[Callable[[], Any]] = [
        lambda: bench.publish(AUDIT_TOPIC, [b"forged"]),
        lambda: bench.ask(TopicAlter(AUDIT_TOPIC, {"compact_by_key": True})),
        lambda: bench.ask(TopicAlter(AUDIT_TOPIC, {"durability": "memory"})),
        lambda: bench.ask(TopicDelete(AUDIT_TOPIC)),
        lambda: bench.ask(SubscriptionCreate("orders", "workers", settings={"dead_letter_topic": AUDIT_TOPIC})),
        lambda: bench.ask(TopicCreate(f"acme/{AUDIT_TOPIC}", {"partitions": 3})),
    ]
    for attempt in refused:
        with pytest.raises(InvalidArgument):
            attempt()
    bench.ask(TopicAlter(AUDIT_TOPIC, {"retain_seconds": 86400.0}))
    assert verified(bench).intact
    defaults = BrokerSettings(topic=Workbench().broker._topics._settings.topic)
    assert set(SYSTEM_TOPICS[AUDIT_TOPIC]) <= set(defaults.topic.as_dict())


def test_the_chain_goes_on_after_a_restart(tmp_path: Path) -> None:
    bench = secured(Workbench(str(tmp_path)))
    bench.ask(TopicCreate("orders"))
    bench.close()
    bench = Workbench(str(tmp_path))
    bench.session = bench.connect("administrator", identity=LOCAL)
    bench.ask(TopicDelete("orders"))
    assert [one.number for one in records(bench)] == [1, 2, 3, 4]
    assert verified(bench, from_start=True).intact


def test_a_trail_that_became_shorter_while_the_broker_was_stopped_says_so(tmp_path: Path) -> None:
    bench = secured(Workbench(str(tmp_path)))
    for number in range(5):
        bench.ask(TopicCreate(f"topic-{number}"))
    bench.close()
    files = [path for path in tmp_path.rglob("*.seg") if b'"TopicCreate"' in path.read_bytes()]
    (segment,) = files
    content = segment.read_bytes()
    segment.write_bytes(content[: content.index(b"topic-3") - 600])
    bench = Workbench(str(tmp_path))
    bench.session = bench.connect("administrator", identity=LOCAL)
    bench.ask(TopicDelete("topic-0"))
    verifier = ChainVerifier()
    partition = bench.broker._topics.active(bench.broker._topics.get(AUDIT_TOPIC), 0).partition
    for batch in partition.batches(0, partition.next_offset):
        for offset, value in enumerate(batch.columns().values, batch.base_offset):
            verifier.take(offset, value)
    (finding,) = verifier.report().findings
    assert (finding.kind, "'number': 6" in finding.text) == ("broken", True)


def test_a_trimmed_beginning_is_no_tampering_unless_one_wants_all(bench: Workbench) -> None:
    for number in range(5):
        bench.ask(TopicCreate(f"topic-{number}"))
    values = bench.values(AUDIT_TOPIC)
    for from_start, kinds in ((False, []), (True, ["missing"])):
        verifier = ChainVerifier(from_start=from_start)
        for offset, value in list(enumerate(values))[3:]:
            verifier.take(offset, value)
        report = verifier.report()
        assert (report.first_number, [finding.kind for finding in report.findings]) == (4, kinds)
    bench.ask(TopicTrim(AUDIT_TOPIC, {0: 2}))
    bench.run()
    assert decode_record(bench.values(AUDIT_TOPIC, offset=2)[-1]).action == "TopicTrim"


def trail(count: int) -> list[bytes]:
    values, digest = [], NO_DIGEST
    for number in range(1, count + 1):
        values.append(encode_record(AuditRecord(number=number, previous=digest, time_us=number, action="TopicCreate")))
        digest = record_digest(values[-1])
    return values


def findings(values: list[bytes], **options: Any) -> list[tuple[str, int]]:
    verifier = ChainVerifier(**options)
    for offset, value in enumerate(values):
        verifier.take(offset, value)
    return [(finding.kind, finding.offset) for finding in verifier.report().findings]


@given(st.integers(2, 12), st.data())
def test_every_change_of_a_trail_is_found(count: int, data: st.DataObject) -> None:
    values = trail(count)
    head = AuditHead(count, record_digest(values[-1]))
    assert findings(values, from_start=True, heads=[head]) == []
    at = data.draw(st.integers(0, count - 1))
    match data.draw(st.sampled_from(("remove", "alter", "swap", "repeat", "damage"))):
        case "remove":
            del values[at]
        case "alter":
            values[at] = values[at].replace(b"TopicCreate", b"TopicDelete")
        case "swap":
            other = (at + 1) % count
            values[at], values[other] = values[other], values[at]
        case "repeat":
            values.insert(at, values[at])
        case "damage":
            values[at] = values[at][:-1]
    assert findings(values, from_start=True, heads=[head])


def test_the_place_of_a_change_is_told() -> None:
    values = trail(6)
    assert findings(values[:2] + values[3:]) == [("missing", 2)]
    assert findings([*values[:2], values[2].replace(b"Create", b"Delete"), *values[3:]]) == [("altered", 3)]
    assert findings([*values[:2], values[3], values[2], *values[4:]])[0] == ("missing", 2)
    assert findings(values[:4], heads=[AuditHead(6, record_digest(values[5]))]) == [("missing", 4)]


def test_a_trail_that_was_written_anew_does_not_have_a_head_that_was_kept() -> None:
    head = parse_head(f"3:{record_digest(trail(3)[2])}")
    forged = [value.replace(b"TopicCreate", b"TopicDelete") for value in trail(1)]
    for number in range(2, 4):
        previous = record_digest(forged[-1])
        forged.append(
            encode_record(AuditRecord(number=number, previous=previous, time_us=number, action="TopicCreate"))
        )
    assert findings(forged) == []
    assert findings(forged, heads=[head]) == [("altered", 2)]


@pytest.mark.parametrize("text", ["", "3", "x:" + "0" * 64, "3:" + "g" * 64, "-1:" + "0" * 64])
def test_a_wrong_head_is_refused(text: str) -> None:
    with pytest.raises(InvalidArgument):
        parse_head(text)


def test_a_limit_begins_anew_after_a_minute() -> None:
    limit = RecordLimit(2)
    assert [limit.admit("forbidden", "eve", 0) for _ in range(3)] == [True, True, False]
    assert limit.summary(59_999_999) is None
    assert limit.summary(60_000_000) is not None
    assert limit.admit("forbidden", "eve", 60_000_001)
    assert limit.summary(200_000_000) is None


def test_records_that_could_not_be_stored_are_counted_in_the_trail(
    bench: Workbench, monkeypatch: pytest.MonkeyPatch
) -> None:
    partition = bench.broker._topics.active(bench.broker._topics.get(AUDIT_TOPIC), 0)

    def fail(*_: object, **__: object) -> None:
        raise DiskFull("the disk is full")

    with monkeypatch.context() as patched:
        patched.setattr(partition, "publish", fail)
        bench.ask(TopicCreate("orders"))  # what was done is answered all the same
        assert bench.ask(AuditDescribe()).lost == 1
    bench.ask(TopicDelete("orders"))
    told, deleted = records(bench)[-2:]
    assert (told.action, told.details, deleted.action) == (SUMMARY, {"lost": 1}, "TopicDelete")
    assert bench.ask(AuditDescribe()).lost == 0
    assert verified(bench).intact
