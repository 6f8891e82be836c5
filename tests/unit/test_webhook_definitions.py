"""Webhooks in the broker: durable, with their subscriptions, and with secrets that nobody sees."""

import logging
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.silent_sender import SilentSender

from headrace.broker.settings import BrokerSettings
from headrace.broker.webhook_facts import WebhookDeleted, WebhooksState, WebhookStateSet, WebhookStored
from headrace.model.errors import (
    InvalidArgument,
    SubscriptionExists,
    SubscriptionNotFound,
    UnsupportedOperation,
    WebhookExists,
    WebhookNotFound,
)
from headrace.model.leasing import SubscriptionCreate, SubscriptionDelete, SubscriptionDescribe, SubscriptionList
from headrace.model.requests import TopicDelete
from headrace.model.service_requests import ServicePolicyAlter
from headrace.model.webhook import altered_webhook, secret_key, webhook_settings
from headrace.model.webhook_requests import (
    WebhookAlter,
    WebhookDefinition,
    WebhookDelete,
    WebhookDeliveries,
    WebhookDescribe,
    WebhookInfo,
    WebhookList,
    WebhookPause,
    WebhookSet,
)
from headrace.testing.workbench import Workbench

URL = "https://receiver.invalid/hook"
SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"


def definition(**parts: Any) -> WebhookDefinition:
    return WebhookDefinition(**{"name": "billing", "topic": "orders", "url": URL, **parts})


def opened(directory: str | None = None, **settings: Any) -> tuple[Workbench, SilentSender]:
    bench, sender = Workbench(directory, **settings), SilentSender()
    bench.broker.webhooks.attach(sender)
    return bench, sender


def listed(bench: Workbench) -> list[WebhookInfo]:
    return list(bench.ask(WebhookList()).webhooks)


def test_a_webhook_and_its_subscription_survive_a_restart(tmp_path: Path) -> None:
    bench, _ = opened(str(tmp_path))
    info = bench.ask(WebhookSet(definition(headers={"authorization": "Bearer x"}, settings={"deliveries_max": 3})))
    bench.ask(WebhookPause("billing", reason="maintenance"))
    (secret,) = info.secrets
    assert len(secret_key(secret)) == 32
    bench.close()
    bench, _ = opened(str(tmp_path))
    (again,) = listed(bench)
    assert (again.state, again.reason, again.secret_count, again.secrets) == ("paused", "maintenance", 1, [])
    assert again.definition.headers == {"authorization": "(hidden)"}
    (stored,) = bench.broker.webhooks.stored()
    assert (stored.secrets, stored.definition.headers) == ([secret], {"authorization": "Bearer x"})
    assert bench.ask(SubscriptionDescribe("orders", "webhook.billing")).settings["deliveries_max"] == 3
    bench.ask(WebhookDelete("billing"))
    bench.close()
    bench, _ = opened(str(tmp_path))
    assert listed(bench) == []
    assert bench.ask(SubscriptionList()).subscriptions == []
    bench.close()


def test_a_snapshot_of_the_journal_has_webhooks(tmp_path: Path) -> None:
    bench, _ = opened(str(tmp_path), settings=BrokerSettings(journal_bytes=1 << 14))
    bench.ask(WebhookSet(definition(), [SECRET]))
    for number in range(600):
        bench.ask(WebhookPause("billing", paused=number % 2 == 0, reason="x" * 40))
    bench.close()
    bench, _ = opened(str(tmp_path))
    (info,) = listed(bench)
    assert info.state == "active"
    assert bench.broker.webhooks.stored()[0].secrets == [SECRET]
    bench.close()


def test_the_sender_is_told_of_every_change() -> None:
    bench, sender = opened()
    bench.ask(WebhookSet(definition()))
    bench.ask(WebhookAlter("billing", {"concurrency": 2}))
    bench.ask(WebhookAlter("billing", {"concurrency": 2}))  # nothing changes
    bench.ask(WebhookPause("billing"))
    bench.ask(WebhookPause("billing"))
    bench.broker.webhooks.disable("billing", "410", bench.now_us)
    bench.ask(WebhookPause("billing", False))
    bench.ask(WebhookSet(definition(name="other")))
    bench.ask(WebhookDelete("billing"))
    bench.ask(TopicDelete("orders"))
    states = ["active", "active", "paused", "disabled", "active", "deleted"]
    assert [state for name, state in sender.told if name == "billing"] == states
    assert [state for name, state in sender.told if name == "other"] == ["active", "deleted"]
    assert listed(bench) == []


def test_secrets_are_in_no_text(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    bench, _ = opened()
    request = WebhookSet(definition(headers={"x-token": "t0ken", "x-routing": "r0ute"}), [SECRET])
    created = bench.ask(request)
    assert created.secrets == []  # the client knows it
    rotated = bench.ask(WebhookAlter("billing", rotate=True))
    (fact,) = bench.broker.webhooks.stored()
    assert fact.secrets == [*rotated.secrets, SECRET]
    texts = [
        repr(one) for one in (request, created, rotated, fact, WebhookAlter("a", secrets=[SECRET]), *listed(bench))
    ]
    assert listed(bench)[0].definition.headers == {"x-token": "(hidden)", "x-routing": "(hidden)"}
    for secret in (SECRET, rotated.secrets[0], "t0ken", "r0ute"):
        assert not any(secret in text for text in (*texts, caplog.text))
    with pytest.raises(InvalidArgument) as refused:
        bench.ask(WebhookAlter("billing", secrets=["whsec_secret!"]))
    assert "secret!" not in str(refused.value)


def test_a_subscription_of_a_webhook_is_changed_through_it() -> None:
    bench, _ = opened()
    bench.ask(SubscriptionCreate("orders", "webhook.billing"))
    with pytest.raises(SubscriptionExists):
        bench.ask(WebhookSet(definition()))
    bench.ask(SubscriptionDelete("orders", "webhook.billing"))
    bench.ask(WebhookSet(definition()))
    with pytest.raises(InvalidArgument, match="belongs to the webhook billing"):
        bench.ask(SubscriptionDelete("orders", "webhook.billing"))
    bench.ask(SubscriptionCreate("orders", "other"))
    bench.ask(SubscriptionDelete("orders", "other"))
    bench.ask(WebhookAlter("billing", {"settings": {"deliveries_max": 2}, "ordered_by_key": True}))
    settings = bench.ask(SubscriptionDescribe("orders", "webhook.billing")).settings
    assert (settings["deliveries_max"], settings["ordered_by_key"], settings["retry_seconds"]) == (2, True, 5.0)
    bench.ask(WebhookAlter("billing", {"settings": {"deliveries_max": None}}))
    assert bench.ask(SubscriptionDescribe("orders", "webhook.billing")).settings["deliveries_max"] == 16
    bench.ask(WebhookDelete("billing"))
    with pytest.raises(SubscriptionNotFound):
        bench.ask(SubscriptionDescribe("orders", "webhook.billing"))


def test_replacing_keeps_the_secret_and_hidden_headers() -> None:
    bench, _ = opened()
    bench.ask(WebhookSet(definition(headers={"Authorization": "Bearer x", "x-a": "1"}), [SECRET]))
    with pytest.raises(WebhookExists):
        bench.ask(WebhookSet(definition()))
    shown = bench.ask(WebhookDescribe("billing")).definition
    shown.url = "https://other.invalid/"
    info = bench.ask(WebhookSet(shown, replace=True))
    assert (info.secrets, info.definition.url) == ([], "https://other.invalid/")
    (fact,) = bench.broker.webhooks.stored()
    assert (fact.secrets, fact.definition.headers) == ([SECRET], {"Authorization": "Bearer x", "x-a": "1"})
    bench.ask(WebhookAlter("billing", {"headers": {"x-a": None, "x-b": "2"}}))
    assert bench.broker.webhooks.stored()[0].definition.headers == {"Authorization": "Bearer x", "x-b": "2"}
    for changes in ({"topic": "bills"}, {"name": "b"}, {"nonsense": 1}, {"concurrency": "many"}, {"url": "x"}):
        with pytest.raises(InvalidArgument):
            bench.ask(WebhookAlter("billing", changes))


def test_tenants_do_not_see_each_others_webhooks() -> None:
    bench, _ = opened()
    acme = bench.connect(tenant="acme")
    bench.ask(WebhookSet(definition(settings={"dead_letter_topic": "dead"})), session=acme)
    bench.ask(WebhookSet(definition()))
    (info,) = bench.ask(WebhookList(), session=acme).webhooks
    assert (info.definition.name, info.definition.topic) == ("billing", "orders")
    assert info.definition.settings == {"dead_letter_topic": "dead"}
    assert [fact.definition.topic for fact in bench.broker.webhooks.stored()] == ["acme/orders", "orders"]
    with pytest.raises(InvalidArgument):
        bench.ask(WebhookSet(definition(name="a", topic="acme/orders")))
    bench.ask(WebhookDelete("billing"), session=acme)
    with pytest.raises(WebhookNotFound, match="no webhook billing"):
        bench.ask(WebhookDescribe("billing"), session=acme)
    assert len(listed(bench)) == 1


def test_webhooks_go_on_where_services_must_register() -> None:
    bench, _ = opened()
    bench.ask(WebhookSet(definition()))
    bench.ask(ServicePolicyAlter(True))
    session = bench.broker.connect(lambda _: None, "webhook:billing", bench.now_us, is_internal=True)
    assert bench.ask(SubscriptionDescribe("orders", "webhook.billing"), session=session).ready == 0


def test_without_a_sender_there_are_no_webhooks() -> None:
    with pytest.raises(UnsupportedOperation):
        Workbench().ask(WebhookSet(definition()))


def test_the_log_of_deliveries_is_filtered() -> None:
    bench, _ = opened()
    bench.ask(WebhookSet(definition()))
    assert len(bench.ask(WebhookDeliveries("billing")).deliveries) == 2
    assert len(bench.ask(WebhookDeliveries("billing", 1)).deliveries) == 1
    (failed,) = bench.ask(WebhookDeliveries("billing", failed=True)).deliveries
    assert failed.error == "no"
    with pytest.raises(InvalidArgument):
        bench.ask(WebhookDeliveries("billing", 0))


names, topic_ids = st.sampled_from("abc"), st.integers(1, 3)
some_facts = st.one_of(
    st.builds(
        lambda name, topic: WebhookStored(definition(name=name), topic, 1, 0, [SECRET]), names, st.integers(1, 3)
    ),
    st.builds(WebhookDeleted, names),
    st.builds(WebhookStateSet, names, st.sampled_from(["active", "paused", "disabled"]), st.text(max_size=3)),
    topic_ids,  # which is deleted
)


@given(st.lists(some_facts, max_size=30))
def test_a_snapshot_tells_the_same_state(told: list[Any]) -> None:
    state, restored = WebhooksState(), WebhooksState()
    for one in told:
        state.forget_topic(one) if isinstance(one, int) else state.apply(one)
    for fact in state.facts():
        restored.apply(fact)  # type: ignore[arg-type]
    assert restored.by_name == state.by_name


@given(st.integers(1, 15), st.floats(0, 1))
def test_default_retries_take_about_a_day(deliveries: int, luck: float) -> None:
    settings = webhook_settings(definition())
    delay_s = settings.retry_us(deliveries, luck) / 1e6
    assert 4.5 <= delay_s <= 21_600
    most_s = sum(settings.retry_us(nth, 1.0) for nth in range(1, settings.deliveries_max)) / 1e6
    least_s = sum(settings.retry_us(nth, 0.0) for nth in range(1, settings.deliveries_max)) / 1e6
    assert 20 * 3600 < least_s < most_s < 26 * 3600


def test_unchanged_definitions_are_equal() -> None:
    assert altered_webhook(definition(), {}) == definition()
