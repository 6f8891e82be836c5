"""All webhooks of a broker at work: a worker for each that is active, with one HTTP client for all.

Nothing of HTTP is imported before there is a webhook.
"""

import asyncio
import logging
import secrets
from collections.abc import Iterable
from importlib.util import find_spec
from typing import TYPE_CHECKING

import msgspec

from headrace.broker.pending_answer import PendingAnswer
from headrace.broker.webhooks import ACTIVE
from headrace.model.errors import Busy, HeadraceError, PluginUnavailable
from headrace.model.limits import PUSH_REQUESTS_MAX, WEBSUB_PENDING_MAX
from headrace.model.message import Message
from headrace.model.receiver_url import parse_receiver_url
from headrace.model.webhook_requests import WebhookDefinition, WebhookDelivery, WebhookInfo
from headrace.push.address_guard import AddressGuard
from headrace.push.delivery_log import DeliveryLog
from headrace.push.intent_verifier import IntentVerifier
from headrace.push.webhook_metrics import webhook_collector

if TYPE_CHECKING:
    from headrace.broker.broker import Broker
    from headrace.broker.webhook_facts import WebhookStored
    from headrace.push.webhook_worker import PushContext, WebhookWorker
    from headrace.runtime.loop_runtime import LoopRuntime

logger = logging.getLogger("headrace.push")

_PACKAGE = "httpcore2"
_MISSING = (
    "webhooks need the packages of the extra http, which are not installed: pip install 'headrace[http]', and start "
    "the broker again"
)
_TESTS_MAX = 16
"""Pings at once."""
_CLOSE_S = 1.0
"""How long connections have to close when the broker stops."""
_STARTED_TOGETHER = 50
"""Workers started per turn of the event loop when the broker starts."""
PING_HEADER = "headrace-ping"
"""The header of the message of a ping, by which receivers can tell."""


class PushService:
    """Sends the messages of all webhooks; the broker tells it of every change."""

    def __init__(self, broker: "Broker", runtime: "LoopRuntime", networks: Iterable[str], *, user_agent: str) -> None:
        """Prepare to send, also to receivers in these networks, besides the public internet."""
        self._broker = broker
        self._runtime = runtime
        self._guard = AddressGuard(networks)
        self._user_agent = user_agent
        self._context: PushContext | None = None
        self._workers: dict[str, WebhookWorker] = {}
        self._ending: set[WebhookWorker] = set()
        """Workers that have stopped, and wait for answers to requests."""
        self._logs: dict[str, DeliveryLog] = {}
        self._tests: set[asyncio.Task[None]] = set()
        self._draining = False
        self._verifier = IntentVerifier(broker, runtime, self.check_url, lambda: self._opened().sender.client)
        broker.webhooks.attach(self)
        broker.metrics.add(webhook_collector(broker.webhooks, self._logs, self._workers))
        broker.websub.attach(self._verifier)

    def start(self) -> None:
        """Begin with the webhooks that there are, a few in each turn of the event loop."""
        active = [fact.definition.name for fact in self._broker.webhooks.stored() if fact.state == ACTIVE]
        if active and not _is_installed():
            logger.error("webhooks are not delivered: install headrace[http]  webhooks=%s", len(active))
            return

        def start_some() -> None:
            for name in active[:_STARTED_TOGETHER]:
                fact = self._broker.webhooks.find(name)
                if fact is not None and name not in self._workers:
                    self.changed(name, fact)
            del active[:_STARTED_TOGETHER]
            if active:
                self._runtime.scheduler.call_at_turn_end(start_some)

        start_some()

    @property
    def busy(self) -> bool:
        """Whether requests wait for their answers."""
        return self._verifier.busy or any(worker.busy for worker in (*self._workers.values(), *self._ending))

    def drain(self) -> None:
        """Send nothing more; requests that wait for their answers are settled by them."""
        self._draining = True
        for name in list(self._workers):
            self._stop(name)

    def abort(self) -> None:
        """End all requests at once; their messages are released."""
        self._draining = True
        self._verifier.abort()
        for worker in [*self._workers.values(), *self._ending]:
            worker.abort()
        for task in list(self._tests):
            task.cancel()
        self._workers.clear()

    async def close(self) -> None:
        """End all requests, and close all connections."""
        self.abort()
        if self._context is not None:
            try:
                await asyncio.wait_for(self._context.sender.client.close(), _CLOSE_S)
            except TimeoutError:
                logger.warning("connections to receivers not closed in time")

    # Called by the broker.

    def check(self, definition: WebhookDefinition) -> None:
        """Refuse a webhook to which nothing could be sent."""
        self.check_url(definition.url)

    def check_url(self, url: str) -> None:
        """Refuse a URL to which nothing could be sent."""
        if not _is_installed():
            raise PluginUnavailable(_MISSING)
        self._guard.check_url(parse_receiver_url(url))

    def changed(self, name: str, fact: "WebhookStored | None") -> None:
        """Follow a webhook that was made, altered, paused, resumed or deleted (None)."""
        worker = self._workers.get(name)
        if fact is None:
            self._logs.pop(name, None)
            for each in [worker, *self._ending]:
                if each is not None and each.fact.definition.name == name:
                    each.abort()
            self._workers.pop(name, None)
        elif fact.state != ACTIVE or self._draining:
            self._stop(name)
        elif worker is not None:
            worker.alter(fact)
        elif _is_installed():
            self._start(fact)

    def describe(self, info: WebhookInfo) -> None:
        """Fill in what only the sender knows."""
        name = info.definition.name
        log, worker = self._logs.get(name), self._workers.get(name)
        if log is not None:
            info.delivered, info.failed, info.last_error = log.delivered, log.failed, log.last_error
        if worker is not None:
            worker.describe(info)
        elif info.state == ACTIVE and not _is_installed():
            info.error = _MISSING

    def deliveries(self, name: str) -> list[WebhookDelivery]:
        """The log of deliveries, the newest first."""
        log = self._logs.get(name)
        return [] if log is None else log.newest()

    def test(self, fact: "WebhookStored") -> PendingAnswer[WebhookDelivery]:
        """Send a ping."""
        self.check(fact.definition)
        if len(self._tests) >= _TESTS_MAX:
            raise Busy(f"{_TESTS_MAX} webhooks are being tested; try again in a moment")
        pending: PendingAnswer[WebhookDelivery] = PendingAnswer()
        task = self._runtime.loop.create_task(self._ping(fact, pending))
        self._tests.add(task)
        task.add_done_callback(self._tests.discard)
        return pending

    # Workers.

    def _start(self, fact: "WebhookStored") -> None:
        from headrace.push.webhook_worker import WebhookWorker

        name = fact.definition.name
        log = self._logs.setdefault(name, DeliveryLog())
        worker = self._workers[name] = WebhookWorker(fact, self._opened(), log, self._ended)
        worker.start()

    def _stop(self, name: str) -> None:
        worker = self._workers.pop(name, None)
        if worker is not None:
            self._ending.add(worker)
            worker.stop()

    def _ended(self, worker: "WebhookWorker") -> None:
        self._ending.discard(worker)
        name = worker.fact.definition.name
        if self._workers.get(name) is worker:  # it failed: begin anew
            del self._workers[name]
            fact = self._broker.webhooks.find(name)
            if fact is not None and not self._draining:
                self._runtime.call_later(_CLOSE_S, lambda: self._restart(name))

    def _restart(self, name: str) -> None:
        fact = self._broker.webhooks.find(name)
        if fact is not None and name not in self._workers:
            self.changed(name, fact)

    def _opened(self) -> "PushContext":
        """What all workers share, made for the first of them."""
        if self._context is None:
            from headrace.push.http_client import OutgoingClient
            from headrace.push.request_sender import RequestSender
            from headrace.push.shared_limits import LeasedMemory, RequestSlots
            from headrace.push.webhook_worker import PushContext

            # As many as there are requests at most, one of them for denials: none waits for another's connection.
            most = PUSH_REQUESTS_MAX + _TESTS_MAX + WEBSUB_PENDING_MAX + 1
            client = OutgoingClient(
                self._guard, user_agent=self._user_agent, connections_max=most, connections_per_host_max=most
            )
            sender = RequestSender(client, self._time_of_day_us)
            self._context = PushContext(self._broker, self._runtime, sender, RequestSlots(), LeasedMemory())
        return self._context

    def _time_of_day_us(self) -> int:
        return self._runtime.now_us() + self._broker.wall_offset_us

    async def _ping(self, fact: "WebhookStored", pending: PendingAnswer[WebhookDelivery]) -> None:
        from headrace.push.leased_messages import LeasedMessage
        from headrace.push.request_formats import DeliverySource

        definition, began_us = fact.definition, self._runtime.now_us()
        name, topic = (text.rpartition("/")[2] for text in (definition.name, definition.topic))
        value = msgspec.json.encode({"ping": name, "topic": topic})
        message = Message(0, value, began_us, None, {"content-type": b"application/json", PING_HEADER: b"true"})
        source = DeliverySource(self._broker.broker_id, topic, fact.subscription_id)
        ping_id = f"ping_{secrets.token_hex(12)}"
        try:
            messages = [LeasedMessage(message, 0, 0, 1, len(value))]
            answered = await self._opened().sender.send(fact, messages, source, ping_id)
        except asyncio.CancelledError:
            pending.resolve(HeadraceError("the broker stops"))
            raise
        entry = WebhookDelivery(
            time_us=began_us,
            id=ping_id,
            status=answered.status,
            error=answered.error,
            duration_us=self._runtime.now_us() - began_us,
            bytes=answered.bytes,
            outcome="refused" if answered.error else "delivered",
        )
        log = self._logs.get(definition.name)
        if log is not None:
            log.add(entry)
        pending.resolve(entry)


def _is_installed() -> bool:
    return find_spec(_PACKAGE) is not None
