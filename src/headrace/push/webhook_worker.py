"""Delivers the messages of one webhook: sends them to the receiver, and settles them by its answers.

The worker has no loop of its own: messages that come, answers and timers call `wake`, which sends what may be sent.
"""

import asyncio
import logging
import random
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, NamedTuple

from headrace.broker.pending_answer import PendingAnswer
from headrace.model.errors import HeadraceError
from headrace.model.leasing import Ack, Release
from headrace.model.request import Request
from headrace.model.topic import tenant_of
from headrace.model.webhook import webhook_settings
from headrace.model.webhook_requests import WebhookDelivery, WebhookInfo
from headrace.push.circuit_breaker import Circuit, CircuitBreaker
from headrace.push.lease_feed import LeaseFeed
from headrace.push.leased_messages import LeasedMessage, holdings
from headrace.push.receiver_permission import ask_permission
from headrace.push.request_formats import DeliverySource, request_id
from headrace.push.request_sender import Answered, RequestSender

if TYPE_CHECKING:
    from headrace.broker.broker import Broker
    from headrace.broker.webhook_facts import WebhookStored
    from headrace.push.delivery_log import DeliveryLog
    from headrace.push.shared_limits import LeasedMemory, RequestSlots
    from headrace.runtime.loop_runtime import LoopRuntime

logger = logging.getLogger("headrace.push")

_GONE = 410
_RETRY_S = 1.0
"""How long a settlement waits that the journal could not take."""
_PERMISSION_S_MIN, _PERMISSION_S_MAX = 1.0, 300.0
"""How long to wait before asking a receiver again that did not answer."""


class PushContext(NamedTuple):
    """What all workers share."""

    broker: "Broker"
    runtime: "LoopRuntime"
    sender: RequestSender
    slots: "RequestSlots"
    memory: "LeasedMemory"


class WebhookWorker:
    """The delivery of one webhook, from its start until it is paused, disabled or deleted."""

    def __init__(
        self, fact: "WebhookStored", context: PushContext, log: "DeliveryLog", ended: Callable[["WebhookWorker"], None]
    ) -> None:
        """Prepare a worker; `ended` is called when it has stopped and nothing waits for an answer."""
        self.fact = fact
        self._context = context
        self.tenant = tenant_of(fact.definition.name)
        self._log = log
        self._ended = ended
        about = fact.definition, context.broker, context.runtime, context.memory
        self._feed = LeaseFeed(*about, self.wake, self._release_queue)
        self._breaker = CircuitBreaker()
        self.in_flight = 0
        """Requests that wait for their answers."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._interval_us = 0
        """Between two requests, as the receiver asked for."""
        self._next_us = 0
        self._asks_permission = False
        self._permission_error = ""
        self._stopping = False
        self._is_over = False
        context.memory.workers.add(self)

    # From outside.

    def start(self) -> None:
        """Begin to deliver, after the receiver's permission if that is wanted."""
        if not self.fact.definition.validate:
            self._feed.open()
        elif not self._asks_permission:
            self._asks_permission = True
            self._spawn(self._get_permission())

    def alter(self, fact: "WebhookStored") -> None:
        """Follow a change of the definition; requests that wait for their answers are not affected."""
        before, now = self.fact.definition, fact.definition
        self.fact, self._feed.definition = fact, now
        if now.url != before.url:
            self._breaker = CircuitBreaker()
        if now.validate and (now.url, now.origin, True) != (before.url, before.origin, before.validate):
            self._release(self._feed.withdraw())
            self.start()
        elif not now.validate:
            self._interval_us = self._next_us = 0
            if not self._asks_permission:
                self._feed.open()
        self._feed.give_credit()
        self.wake()

    def stop(self) -> None:
        """Send nothing more; requests that wait for their answers are settled by them."""
        if not self._stopping:
            self._stopping = True
            self._release(self._feed.withdraw())
            self._finish()

    def abort(self) -> None:
        """End everything at once; messages that are not settled are released."""
        self._stopping = True
        for task in list(self._tasks):
            task.cancel()
        self._end()

    @property
    def busy(self) -> bool:
        """Whether requests wait for their answers, or for their settlement."""
        return bool(self._tasks)

    @property
    def is_closed_circuit(self) -> bool:
        """Whether the receiver works, as far as it is known."""
        return self._breaker.circuit is Circuit.CLOSED

    def describe(self, info: WebhookInfo) -> None:
        """Fill in how it is."""
        breaker = self._breaker
        info.circuit, info.failures, info.in_flight = breaker.circuit.value, breaker.failures, self.in_flight
        if breaker.until_us > self._now_us():
            info.circuit_until_us = breaker.until_us
        if self._feed and self._context.slots.is_waiting(self):
            info.waits_for = "requests"
        elif self._context.memory.is_full(self.tenant):
            info.waits_for = "memory"
        info.error = self._feed.error or self._permission_error

    # Sending.

    def wake(self) -> None:
        """Send what may be sent, and lease only what can be sent soon."""
        if self._is_over:
            return
        if self._stopping:
            self._release_queue()
            return
        now_us = self._now_us()
        self._hold_back(now_us)
        limit = self.fact.definition.concurrency
        while self._feed and self.in_flight < limit:
            if now_us < self._next_us:
                self._wake_at(self._next_us, now_us)
                return
            if not self._breaker.may_send(now_us, self.in_flight) or not self._context.slots.take(self):
                return
            self.in_flight += 1
            self._next_us = now_us + self._interval_us
            self._spawn(self._deliver(self._feed.next_batch()))

    def _hold_back(self, now_us: int) -> None:
        """Lease nothing while the receiver is left alone, or memory is full."""
        is_held = now_us < self._breaker.until_us
        if is_held:
            self._release_queue()
            self._wake_at(self._breaker.until_us, now_us)
        self._feed.block(is_held or self._context.memory.is_full(self.tenant))

    async def _deliver(self, batch: list[LeasedMessage]) -> None:
        """Send some messages, and settle them by the answer; if cancelled, the session's end releases them."""
        try:
            await self._send(batch)
        finally:
            self._context.memory.add(self.tenant, -sum(one.bytes for one in batch))

    async def _send(self, batch: list[LeasedMessage]) -> None:
        began_us, fact, source = self._now_us(), self.fact, self._source()
        message_id = request_id(batch, source)
        try:
            answered = await self._context.sender.send(fact, batch, source, message_id)
            outcome = self._judge(answered, batch)
            if outcome == "disabled":
                self._disable(f"the receiver answered {_GONE} Gone")
        finally:  # the next request is sent by what this one was answered
            self.in_flight -= 1
            self._context.slots.give_back(self)
        if self._is_over:
            return  # it was deleted, with its messages
        first = batch[0]
        self._log.add(
            WebhookDelivery(
                time_us=began_us,
                id=message_id,
                partition=first.partition,
                offset=first.message.offset,
                messages=len(batch),
                attempt=max(one.attempt for one in batch),
                status=answered.status,
                error=answered.error,
                duration_us=self._now_us() - began_us,
                bytes=answered.bytes,
                outcome=outcome,
            )
        )
        self.wake()
        await self._settle(batch, self._settlement(outcome, answered, batch))

    def _judge(self, answered: Answered, batch: list[LeasedMessage]) -> str:
        """What becomes of the messages; the circuit breaker learns from it."""
        breaker, now_us = self._breaker, self._now_us()
        if answered.retry_after_us is not None:
            breaker.hold_until(now_us + answered.retry_after_us)
        if not answered.error:
            if breaker.succeeded():
                self._note("closed", {})
            return "delivered"
        if answered.status == _GONE:
            return "disabled"
        if breaker.failed(now_us):
            open_ms = (breaker.until_us - now_us) // 1000
            self._note("opened", {"failures": breaker.failures, "reason": answered.error, "open_ms": open_ms})
        most = webhook_settings(self.fact.definition).deliveries_max
        return "dead" if most and max(one.attempt for one in batch) >= most else "retry"

    # Settling.

    def _settlement(self, outcome: str, answered: Answered, batch: list[LeasedMessage]) -> Request[Any]:
        definition = self.fact.definition
        if outcome == "delivered":
            return Ack(definition.topic, holdings(batch), definition.subscription)
        release = Release(
            definition.topic, holdings(batch), reason=answered.error, subscription=definition.subscription
        )
        if outcome == "disabled":
            release.delay_ms, release.undelivered = 0, True
        elif (wait_us := answered.retry_after_us) is not None:
            least_us = webhook_settings(definition).retry_us(batch[0].attempt, 0.5)
            release.delay_ms = -(-wait_us // 1000) if wait_us > least_us else None
        return release

    def _release_queue(self) -> None:
        """Release what was not sent."""
        if self._feed:
            self._release(self._feed.take_all())

    def _release(self, batch: list[LeasedMessage]) -> None:
        """Release messages that were not sent: their delivery does not count."""
        if batch:
            definition = self.fact.definition
            request = Release(
                definition.topic, holdings(batch), 0, undelivered=True, subscription=definition.subscription
            )
            self._spawn(self._settle(batch, request))

    async def _settle(self, batch: list[LeasedMessage], request: Request[Any]) -> None:
        """Settle messages; tries again while the journal cannot be written."""
        name = self.fact.definition.name
        while True:
            try:
                outcome = self._feed.ask(request)
                if isinstance(outcome, PendingAnswer):
                    await outcome
                break
            except HeadraceError as error:
                if not error.retryable:  # a lost shard: another node delivers them again
                    logger.info("webhook's messages not settled  webhook=%s reason=%s", name, error)
                    break
                logger.warning("webhook's messages not settled; trying again  webhook=%s reason=%s", name, error)
            await asyncio.sleep(_RETRY_S)
        self._feed.give_credit(len(batch), sum(one.bytes for one in batch))

    # Permission, by CloudEvents.

    async def _get_permission(self) -> None:
        """Ask the receiver until it decides, or nobody wants to know any more."""
        delay_s = _PERMISSION_S_MIN
        while not self._stopping:
            definition = self.fact.definition
            if not definition.validate:
                break
            origin = definition.origin or f"{self._context.broker.broker_id}.headrace"
            client, timeout_s = self._context.sender.client, definition.timeout_seconds
            if not self._context.slots.take(self):
                self._permission_error = "the receiver will be asked for its permission when others end their requests"
                await asyncio.sleep(_PERMISSION_S_MIN)
                continue
            try:
                given = await ask_permission(client, definition.url, origin, timeout_s)
                reason, is_final = given.reason, given.is_final
            except HeadraceError as error:
                reason, is_final = str(error), False
            finally:
                self._context.slots.give_back(self)
            if self.fact.definition != definition:
                continue  # it was asked in vain
            if not reason:
                self._interval_us = given.interval_us
                break
            if is_final:
                self._asks_permission = False
                self._disable(f"the receiver does not permit it: {reason}")
                return
            self._permission_error = f"the receiver was asked for its permission: {reason}"
            await asyncio.sleep(delay_s * random.uniform(0.9, 1.1))
            delay_s = min(2 * delay_s, _PERMISSION_S_MAX)
        self._asks_permission, self._permission_error = False, ""
        if not self._stopping:
            self._feed.open()

    # The rest.

    def _disable(self, reason: str) -> None:
        name = self.fact.definition.name
        try:
            self._context.broker.webhooks.disable(name, reason, self._now_us())
        except (HeadraceError, OSError) as error:
            logger.warning("webhook not disabled; trying again at its next request  webhook=%s reason=%s", name, error)
            self._breaker.failed(self._now_us())
        else:
            logger.info("webhook disabled  webhook=%s reason=%s", name, reason)

    def _note(self, action: str, details: dict[str, Any]) -> None:
        name = self.fact.definition.name
        logger.info("webhook circuit %s  webhook=%s", action, name)
        self._context.broker.webhooks.note(name, action, details, self._now_us())

    def _source(self) -> DeliverySource:
        topic = self.fact.definition.topic.rpartition("/")[2]
        return DeliverySource(self._context.broker.broker_id, topic, self.fact.subscription_id)

    def _now_us(self) -> int:
        return self._context.runtime.now_us()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._context.runtime.loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("webhook delivery failed  webhook=%s", self.fact.definition.name, exc_info=error)
            self.abort()  # its messages are released, and it is started anew
            return
        self._finish()

    def _finish(self) -> None:
        if self._stopping and not self._tasks:
            self._end()

    def _end(self) -> None:
        if self._is_over:
            return
        self._is_over = True
        if self._timer is not None:
            self._timer.cancel()
        self._context.memory.workers.discard(self)
        self._context.slots.forget(self)
        self._feed.close()
        self._ended(self)

    def _wake_at(self, time_us: int, now_us: int) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._context.runtime.call_later(max(time_us - now_us, 1000) / 1e6, self.wake)
