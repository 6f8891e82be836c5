"""Errors of services: counted, listed, stored in one schema; dead letters are among them."""

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from headrace.broker import error_tallies
from headrace.broker.pending_answer import AnswerWithBody
from headrace.broker.ports import Session
from headrace.model.errors import HeadraceError, InvalidArgument
from headrace.model.leasing import Holding, Lease, Reject, SubscriptionCreate
from headrace.model.limits import ERRORS_KEPT_BYTES_MAX, ERRORS_KEPT_TENANT_BYTES_MAX
from headrace.model.requests import Publish, TopicCreate, TopicList
from headrace.model.service_requests import (
    ErrorList,
    ErrorReport,
    ErrorSummary,
    ServiceDefinition,
    ServiceDescribe,
    ServiceError,
    ServiceRegister,
)
from headrace.testing.workbench import Workbench


@pytest.fixture
def bench() -> Iterator[Workbench]:
    bench = Workbench()
    yield bench
    bench.close()


def report(bench: Workbench, *codes: str, service: str = "billing", session: Session | None = None) -> None:
    errors = [ServiceError(code, f"{code} happened", topic="orders", offset=7) for code in codes]
    bench.ask(ErrorReport(service, "i1", errors), session=session)


def listed(bench: Workbench, service: str = "", session: Session | None = None) -> list[ErrorSummary]:
    return list(bench.ask(ErrorList(service), session=session).services)


def stored(bench: Workbench, topic: str = "headrace.errors") -> list[ServiceError]:
    return [msgspec.json.decode(value, type=ServiceError) for value in bench.values(topic)]  # type: ignore[arg-type]


def reject(bench: Workbench, session: Session | None = None) -> None:
    bench.ask(TopicCreate("jobs", exist_ok=True), session=session)
    bench.ask(SubscriptionCreate("jobs", exist_ok=True), session=session)
    bench.ask(Publish("jobs", 0), bench.batch([b"bad", b"worse"]).data, session=session)
    answer = bench.ask(Lease("jobs", messages_max=10), session=session)
    assert isinstance(answer, AnswerWithBody)
    held = [Holding(one.partition, one.lease, list(one.all_offsets)) for one in answer.answer.portions]
    bench.ask(Reject("jobs", held, "cannot be read"), session=session)


def test_a_report_that_is_stored_is_counted_although_its_request_was_cancelled(tmp_path: Path) -> None:
    bench = Workbench(tmp_path / "data")
    bench.ask(TopicCreate("headrace.errors", {"durability": "synced"}))
    bench.holding_syncs = True
    reported = bench.begin(ErrorReport("billing", "i1", [ServiceError("timeout", "it took too long")]))
    bench.run()
    assert reported.cancel()
    bench.release_syncs()
    bench.run()
    assert len(stored(bench)) == 1
    assert [one.total for one in listed(bench)] == [1]


def test_reports_are_counted_by_service_and_code(bench: Workbench) -> None:
    report(bench, "timeout", "timeout", "parse")
    report(bench, "timeout", service="shop")
    billing, shop = listed(bench)
    assert (billing.service, billing.total, billing.codes) == ("billing", 3, {"timeout": 2, "parse": 1})
    assert (shop.service, shop.codes) == ("shop", {"timeout": 1})
    assert [error.code for error in billing.last] == ["parse", "timeout", "timeout"]
    assert [one.service for one in listed(bench, "shop")] == ["shop"]
    assert listed(bench, "nobody") == []


def test_reports_are_stored_in_one_schema(bench: Workbench) -> None:
    given = ServiceError(
        "parse",
        "no JSON",
        time_us=5,
        topic="orders",
        partition=2,
        offset=9,
        key="ann",
        retryable=True,
        details={"line": 3},
        traceback="Traceback ...",
    )
    bench.ask(ErrorReport("billing", "i1", [given]))
    (error,) = stored(bench)
    assert error == msgspec.structs.replace(given, id=error.id, service="billing", instance="i1")
    assert error.id
    settings = bench.ask(TopicList("headrace.errors")).topics[0].settings
    assert settings["retain_bytes"]
    assert settings["retain_seconds"]


def test_the_broker_completes_id_and_time(bench: Workbench) -> None:
    report(bench, "a", "b")
    first, second = stored(bench)
    assert first.id != second.id
    assert first.time_us == bench.now_us


def test_a_described_service_has_its_number_of_errors(bench: Workbench) -> None:
    bench.ask(ServiceRegister(ServiceDefinition("billing", "i1")))
    report(bench, "a", "b")
    assert bench.ask(ServiceDescribe("billing")).errors == 2


def test_tenants_are_isolated(bench: Workbench) -> None:
    acme = bench.connect("a", tenant="acme")
    report(bench, "a", session=acme)
    assert listed(bench) == []
    (one,) = listed(bench, "billing", acme)
    assert (one.service, one.last[0].service) == ("billing", "billing")
    assert [error.service for error in stored(bench, "acme/headrace.errors")] == ["billing"]
    assert [info.topic for info in bench.ask(TopicList("*")).topics] == []


def test_dead_letters_of_a_service_are_errors(bench: Workbench) -> None:
    worker = bench.connect("worker-1")
    bench.ask(ServiceRegister(ServiceDefinition("billing", "i1")), session=worker)
    reject(bench, worker)
    (error,) = stored(bench)
    assert (error.service, error.instance, error.code, error.message) == (
        "billing",
        "i1",
        "dead_letter",
        "cannot be read",
    )
    assert (error.topic, error.partition, error.offset) == ("jobs", 0, 0)
    assert error.details == {"subscription": "default", "count": 2}
    assert listed(bench, "billing")[0].codes == {"dead_letter": 1}


def test_dead_letters_of_others_are_counted_and_make_no_topic(bench: Workbench) -> None:
    reject(bench)
    (one,) = listed(bench)
    assert (one.service, one.codes, one.last[0].instance) == ("", {"dead_letter": 1}, "workbench")
    assert "headrace.errors" not in [info.topic for info in bench.ask(TopicList("*")).topics]
    report(bench, "a")
    reject(bench)
    assert [error.code for error in stored(bench)] == ["a", "dead_letter"]


def test_dead_letters_of_a_tenant_stay_there(bench: Workbench) -> None:
    acme = bench.connect("worker-1", tenant="acme")
    bench.ask(ServiceRegister(ServiceDefinition("billing", "i1")), session=acme)
    reject(bench, acme)
    assert [(error.service, error.topic) for error in stored(bench, "acme/headrace.errors")] == [("billing", "jobs")]
    assert listed(bench) == []
    assert [one.service for one in listed(bench, session=acme)] == ["billing"]


def test_codes_and_services_are_bounded(bench: Workbench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(error_tallies, "_CODES_MAX", 3)
    monkeypatch.setattr(error_tallies, "_SERVICES_MAX", 2)
    report(bench, "a", "b", "c", "d", "e", "a")
    assert listed(bench)[0].codes == {"a": 2, "b": 1, "c": 1, "other": 2}
    report(bench, "a", service="shop")
    report(bench, "a", service="billing")
    report(bench, "a", service="zoo")
    assert [one.service for one in listed(bench)] == ["billing", "zoo"]


@pytest.mark.parametrize(
    ("request_", "text"),
    [
        (ErrorReport("billing", "i1", []), "1 to 100 errors"),
        (ErrorReport("billing", "i1", [ServiceError("a", "b")] * 101), "1 to 100 errors"),
        (ErrorReport("billing", "i1", [ServiceError("a", "b", traceback="x" * 70_000)]), "shorten its traceback"),
        (ErrorReport("", "i1", [ServiceError("a", "b")]), "cannot name a service"),
    ],
)
def test_what_is_refused(bench: Workbench, request_: ErrorReport, text: str) -> None:
    with pytest.raises(InvalidArgument, match=text):
        bench.ask(request_)
    assert listed(bench) == []


def test_stored_errors_survive_a_restart_and_counts_begin_anew(tmp_path: Path) -> None:
    bench = Workbench(str(tmp_path))
    report(bench, "a")
    bench = Workbench(str(tmp_path))  # the one before was killed
    assert listed(bench) == []
    report(bench, "b")
    errors = stored(bench)
    assert [error.code for error in errors] == ["a", "b"]
    assert errors[0].id != errors[1].id
    bench.close()


def test_services_and_codes_of_a_tenant_are_bounded(bench: Workbench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(error_tallies, "_TENANT_SERVICES_MAX", 2)
    monkeypatch.setattr(error_tallies, "_TENANT_CODES_MAX", 4)
    for tenant in ("", "acme"):
        session = bench.connect(tenant=tenant)
        report(bench, "a", "b", service="billing", session=session)
        report(bench, "a", service="shop", session=session)
        report(bench, "a", service="made-up", session=session)
        report(bench, "b", service="made-up-too", session=session)
        report(bench, "b", service="shop", session=session)
        told = {one.service: one.codes for one in listed(bench, session=session)}
        assert told == {"billing": {"a": 1, "b": 1}, "shop": {"a": 1, "other": 1}, "others": {"a": 1, "other": 1}}


def test_errors_in_memory_are_bounded(bench: Workbench) -> None:
    large = ServiceError("c" * 5000, "m" * 5000, details={"a": "x" * 5000}, traceback="t" * 40_000 + "end")
    for tenant in (f"tenant{number}" for number in range(20)):
        session = bench.connect(tenant=tenant)
        for number in range(15):
            bench.ask(ErrorReport(f"made-up-{number}", "i", [large] * 50), session=session)
        answer = bench.ask(ErrorList(last_max=50), session=session)
        assert answer.truncated
        assert len(msgspec.msgpack.encode(answer)) < ERRORS_KEPT_TENANT_BYTES_MAX
        assert [one.total for one in answer.services] == [50] * 15
        newest = bench.ask(ErrorList("made-up-14"), session=session).services[0].last[0]
        assert newest.traceback.endswith("end")
        assert newest.details == {"truncated": True}
        assert not bench.ask(ErrorList("made-up-14", last_max=50), session=session).truncated
    tallies = bench.broker._observability.errors._tallies
    assert tallies._kept_bytes <= ERRORS_KEPT_BYTES_MAX
    kept = [error for tally in tallies._tallies.values() for error in tally.last.values()]
    assert sum(len(msgspec.json.encode(error)) for error in kept) <= tallies._kept_bytes
    assert len(kept) == len(tallies._kept)
    assert stored(bench, "tenant0/headrace.errors")[0].traceback.endswith("t" * 9000 + "end")


def test_a_service_that_is_forgotten_takes_its_errors_with_it(
    bench: Workbench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(error_tallies, "_SERVICES_MAX", 2)
    for service in ("a", "b", "c"):
        report(bench, "x", "y", service=service)
    tallies = bench.broker._observability.errors._tallies
    assert len(tallies._kept) == 4
    assert tallies._tenants["default"].codes == 4
    report(bench, "x", service="d", session=bench.connect(tenant="acme"))
    report(bench, "x", service="e", session=bench.connect(tenant="acme"))
    assert set(tallies._tenants) == {"acme"}


def test_what_is_refused_is_not_counted(
    bench: Workbench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    report(bench, "a")
    active = bench.broker._topics.active(bench.broker._topics.get("headrace.errors"), 0)

    def refuse(*_: object) -> None:
        raise HeadraceError("no room")

    monkeypatch.setattr(active, "publish", refuse)
    with pytest.raises(HeadraceError, match="no room"):
        report(bench, "b")
    assert listed(bench)[0].total == 1
    assert "errors not stored  tenant=default" in caplog.text
