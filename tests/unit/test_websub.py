"""WebSub subscriptions in the broker: what is decided when a callback has confirmed, and what is kept."""

from pathlib import Path

import pytest

from headrace.broker.websub_subscriptions import WebSubIntent
from headrace.model.errors import InvalidArgument, TopicNotFound, UnsupportedOperation, WebhookNotFound
from headrace.model.leasing import SubscriptionList
from headrace.model.requests import TopicCreate, TopicDelete
from headrace.model.webhook_requests import WebhookDefinition, WebhookDelete, WebhookInfo, WebhookList, WebhookSet
from headrace.model.websub import WebSubTerms, callback_url, checked_link, granted_lease, subscription_name
from headrace.model.websub_requests import WebSubSubscribe, WebSubUnsubscribe
from headrace.testing import FaultyDisk, Unsynced
from headrace.testing.workbench import Workbench

CALLBACK = "https://subscriber.example/callback"
TOPIC_URL = "http://hub.example/v1/topics/orders/messages"
HUB_URL = "http://hub.example/v1/hub"
NAME = subscription_name(CALLBACK, TOPIC_URL)


class Verifier:
    """Notes what it is asked for; the test confirms."""

    def __init__(self, bench: Workbench) -> None:
        self._bench = bench
        self.intents: list[WebSubIntent] = []
        self.denied: list[tuple[str, str, str]] = []
        bench.broker.websub.attach(self)

    def check(self, callback: str) -> None:
        assert callback == CALLBACK

    def verify(self, intent: WebSubIntent) -> None:
        self.intents.append(intent)

    def deny(self, callback: str, topic_url: str, reason: str) -> None:
        self.denied.append((callback, topic_url, reason))

    def confirm(self) -> None:
        """The callback of the last request agrees."""
        self._bench.broker.websub.confirm(self.intents[-1], self._bench.now_us)
        self._bench.run()


def subscribe_to(bench: Workbench, topic: str = "orders", lease_seconds: int | None = None) -> None:
    request = WebSubSubscribe(NAME, topic, CALLBACK, TOPIC_URL, HUB_URL, lease_seconds, "secret")
    assert "secret" not in repr(request)
    bench.ask(request)


def webhooks(bench: Workbench) -> list[str]:
    return [one.definition.name for one in bench.ask(WebhookList()).webhooks]


@pytest.fixture
def bench() -> Workbench:
    bench = Workbench()
    bench.ask(TopicCreate("orders"))
    return bench


def test_nothing_is_subscribed_before_the_callback_has_confirmed(bench: Workbench) -> None:
    verifier = Verifier(bench)
    subscribe_to(bench)
    assert webhooks(bench) == []
    verifier.confirm()
    assert webhooks(bench) == [NAME]
    (info,) = bench.ask(WebhookList()).webhooks
    assert info.definition.format == "raw"
    assert (info.secret_count, info.secrets) == (1, [])
    assert [one.subscription for one in bench.ask(SubscriptionList("orders")).subscriptions] == [f"webhook.{NAME}"]


def test_a_lease_ends_when_it_is_over_also_while_the_broker_is_not_running(tmp_path: Path) -> None:
    bench = Workbench(str(tmp_path))
    bench.ask(TopicCreate("orders"))
    verifier = Verifier(bench)
    subscribe_to(bench, lease_seconds=60)
    verifier.confirm()
    bench.tick(59)
    assert webhooks(bench) == [NAME]
    subscribe_to(bench, lease_seconds=60)  # renewed in time
    verifier.confirm()
    bench.tick(59)
    assert webhooks(bench) == [NAME]
    now_us = bench.now_us
    bench.close()
    bench = Workbench(str(tmp_path), now_us=now_us)
    bench.tick()
    assert webhooks(bench) == [NAME]
    bench.close()
    bench = Workbench(str(tmp_path), now_us=now_us + 3_600_000_000)
    assert bench.broker.websub.next_tick_us() is not None
    bench.tick()
    assert webhooks(bench) == []
    assert bench.ask(SubscriptionList("orders")).subscriptions == []
    assert bench.broker.websub.next_tick_us() is None
    bench.close()


def test_a_subscription_is_durable_once_it_is_confirmed(tmp_path: Path) -> None:
    bench = Workbench(str(tmp_path))
    bench.ask(TopicCreate("orders"))
    verifier = Verifier(bench)
    subscribe_to(bench)
    verifier.confirm()
    killed = Workbench(str(tmp_path))  # nothing was closed
    assert webhooks(killed) == [NAME]
    verifier = Verifier(killed)
    killed.ask(WebSubUnsubscribe(NAME))
    assert verifier.intents[-1].callback == CALLBACK
    verifier.confirm()
    assert webhooks(Workbench(str(tmp_path))) == []


def test_a_lease_ends_later_if_the_journal_cannot_be_written(tmp_path: Path) -> None:
    disk = FaultyDisk()
    bench = Workbench(str(tmp_path), disk=disk)
    bench.ask(TopicCreate("orders"))
    verifier = Verifier(bench)
    subscribe_to(bench, lease_seconds=60)
    verifier.confirm()
    disk.fail_writes(2)  # one of them may only make room
    for _ in range(10):
        bench.tick(61)
    assert webhooks(bench) == []
    disk.power_loss(Unsynced.LOST)
    assert webhooks(Workbench(str(tmp_path), disk=disk, now_us=bench.now_us)) == []


@pytest.mark.parametrize("operations", range(8))
def test_a_power_loss_leaves_a_whole_subscription_or_none(tmp_path: Path, operations: int) -> None:
    disk = FaultyDisk(operations)
    bench = Workbench(str(tmp_path), disk=disk)
    bench.ask(TopicCreate("orders"))
    verifier = Verifier(bench)
    subscribe_to(bench)
    disk.crash_after(operations)
    pending, is_durable = None, False
    try:
        pending = bench.broker.websub.confirm(verifier.intents[-1], bench.now_us)
        bench.run()
    except Exception:  # noqa: BLE001 the power is off
        assert disk.crashed
    if pending is not None:
        is_durable = isinstance(pending.outcome, WebhookInfo)
    disk.power_loss(Unsynced.RANDOM)
    bench = Workbench(str(tmp_path), disk=disk)
    found = webhooks(bench)
    assert [one.subscription for one in bench.ask(SubscriptionList("orders")).subscriptions] == [
        f"webhook.{name}" for name in found
    ]
    assert found or not is_durable
    assert (bench.broker.websub.next_tick_us() is not None) is bool(found)


def test_only_the_end_that_the_subscriber_does_not_expect_is_a_denial(bench: Workbench) -> None:
    verifier = Verifier(bench)
    subscribe_to(bench)
    verifier.confirm()
    bench.ask(WebSubUnsubscribe(NAME))
    verifier.confirm()
    subscribe_to(bench, lease_seconds=1)
    verifier.confirm()
    bench.tick(2)
    assert verifier.denied == []
    subscribe_to(bench)
    verifier.confirm()
    bench.ask(WebhookDelete(NAME))
    assert verifier.denied == [(CALLBACK, TOPIC_URL, "an administrator deleted it")]
    subscribe_to(bench)
    verifier.confirm()
    bench.ask(TopicDelete("orders"))
    assert verifier.denied[1:] == [(CALLBACK, TOPIC_URL, "its topic was deleted")]


def test_a_topic_that_is_deleted_while_the_callback_is_asked(bench: Workbench) -> None:
    verifier = Verifier(bench)
    subscribe_to(bench)
    bench.ask(TopicDelete("orders"))
    pending = bench.broker.websub.confirm(verifier.intents[-1], bench.now_us)
    bench.run()
    assert pending is not None
    assert isinstance(pending.outcome, TopicNotFound)
    assert webhooks(bench) == []


def test_requests_that_are_refused(bench: Workbench) -> None:
    with pytest.raises(UnsupportedOperation):
        subscribe_to(bench)  # there is nobody who could ask the callback
    verifier = Verifier(bench)
    with pytest.raises(TopicNotFound):
        subscribe_to(bench, "nothing")  # a subscriber makes no topics
    with pytest.raises(WebhookNotFound):
        bench.ask(WebSubUnsubscribe(NAME))
    with pytest.raises(InvalidArgument, match="the name of this subscription"):
        bench.ask(WebSubSubscribe("billing", "orders", CALLBACK, TOPIC_URL, HUB_URL))
    for url in ("http://hub.example/<a>", 'http://hub.example/"', "http://hub.example/\r\nX: y", "hub"):
        with pytest.raises(InvalidArgument, match="printable ASCII"):
            bench.ask(WebSubSubscribe(subscription_name(CALLBACK, url), "orders", CALLBACK, url, HUB_URL))
        with pytest.raises(InvalidArgument, match="printable ASCII"):
            checked_link(url)
    terms = WebSubTerms(TOPIC_URL, HUB_URL, 60, 0)
    with pytest.raises(InvalidArgument, match="its subscriber makes"):
        bench.ask(WebhookSet(WebhookDefinition("mine", "orders", CALLBACK, websub=terms)))
    assert verifier.intents == []


def test_leases_and_callbacks() -> None:
    assert [granted_lease(wanted) for wanted in (None, 0, 1, 3600, 1 << 60)] == [864_000, 1, 1, 3600, 2_592_000]
    assert callback_url("http://a/", {"hub.mode": "x y"}) == "http://a/?hub.mode=x+y"
    assert callback_url("http://a/?b", {"hub.mode": "x&y"}) == "http://a/?b&hub.mode=x%26y"
