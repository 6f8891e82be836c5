"""Leases the messages of one webhook, through a session of its own, as far as they can be sent soon.

The leases of the standing request are bound to the session: they need not be extended while a receiver takes its time,
and end with the broker, so that a message is never with two requests at once.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from headrace.broker.pending_answer import AnswerWithBody, PendingAnswer
from headrace.model.errors import Draining, HeadraceError, SubscriptionReopened
from headrace.model.identity import Identity
from headrace.model.leasing import Holding, Release
from headrace.model.limits import WEBHOOK_LEASED_BYTES
from headrace.model.request import Request
from headrace.model.standing_lease import LeaseClose, LeaseCredit, LeaseDelivery, LeaseEnd, LeaseOpen, LeaseOpened
from headrace.model.topic import tenant_of
from headrace.push.leased_messages import LeasedMessage, leased_messages

if TYPE_CHECKING:
    from headrace.broker.broker import Broker
    from headrace.model.webhook_requests import WebhookDefinition
    from headrace.push.shared_limits import LeasedMemory
    from headrace.runtime.loop_runtime import LoopRuntime

logger = logging.getLogger("headrace.push")

_EMPTY = memoryview(b"")
_BATCH_BYTES = 1 << 20
"""A request has no further message once it has so many bytes."""
_REOPEN_S = 30.0
"""How long to wait before leasing again from a subscription that failed."""


class LeaseFeed:
    """The leased messages of a webhook that are not sent yet, and the credit for more."""

    def __init__(
        self,
        definition: "WebhookDefinition",
        broker: "Broker",
        runtime: "LoopRuntime",
        memory: "LeasedMemory",
        arrived: Callable[[], None],
        drained: Callable[[], None],
    ) -> None:
        """Open the session. `arrived` is called when messages came, `drained` when the broker is about to stop."""
        self.definition = definition
        self._broker = broker
        self._runtime = runtime
        self._memory = memory
        self._arrived = arrived
        self._drained = drained
        self._tenant = tenant_of(definition.name)
        self._session = broker.connect(
            self._receive,
            f"webhook:{definition.name}",
            runtime.now_us(),
            identity=Identity(f"webhook:{definition.name}"),
            tenant=self._tenant,
            gateway="webhook",
            is_internal=True,
        )
        self._standing: int | None = None
        self._opening: PendingAnswer[Any] | None = None
        """The answer to a request for leases, in a cluster, where it waits until it is committed."""
        self._window = 0
        """Messages that are leased, or may be by the credit that was given."""
        self._queue: deque[LeasedMessage] = deque()
        self._queue_bytes = 0
        self._reopening: asyncio.TimerHandle | None = None
        self._closed = False
        self.error = ""
        """Why nothing is leased; empty if something can be."""

    def __bool__(self) -> bool:
        """Whether there are messages to send."""
        return bool(self._queue)

    @property
    def is_open(self) -> bool:
        """Whether messages are leased as they become ready."""
        return self._standing is not None

    def ask(self, request: Request[Any]) -> Any:
        """Ask the broker in the session of the webhook."""
        return self._broker.ask(self._session, request, _EMPTY, self._runtime.now_us())

    def open(self) -> None:
        """Lease messages as they become ready."""
        if self._closed or self._standing is not None or self._opening:
            return
        definition = self.definition
        self._window = definition.concurrency * definition.batch_max
        request = LeaseOpen(
            definition.topic,
            definition.subscription,
            credit_messages=self._window,
            credit_bytes=WEBHOOK_LEASED_BYTES,
            session_bound=True,
            create=False,
        )
        try:
            opened: Any = self.ask(request)
        except Draining:
            return
        except HeadraceError as error:
            opened = error
        if isinstance(opened, PendingAnswer):
            self._opening = opened
            opened.then(partial(self._opened, opened))
        else:
            self._opened(None, opened)

    def _opened(self, opening: PendingAnswer[Any] | None, outcome: LeaseOpened | HeadraceError) -> None:
        """Take the answer to a request for leases, which may have been withdrawn meanwhile."""
        if opening is not self._opening:
            if isinstance(outcome, LeaseOpened):
                self.ask(LeaseClose(outcome.standing))
            return
        self._opening = None
        if isinstance(outcome, HeadraceError):
            logger.warning("webhook cannot lease; trying again  webhook=%s reason=%s", self.definition.name, outcome)
            self._reopen_later(str(outcome))
            return
        self._standing, self.error = outcome.standing, ""

    def withdraw(self) -> list[LeasedMessage]:
        """Lease nothing more; returns what was not sent, to be released."""
        standing, self._standing, self._opening = self._standing, None, None
        if self._reopening is not None:
            self._reopening.cancel()
        if standing is not None:
            self.ask(LeaseClose(standing, keep_leases=True))
        return self.take_all()

    def close(self) -> None:
        """End the session; messages that are not settled are released."""
        self._closed = True
        self.withdraw()
        self._broker.disconnect(self._session, self._runtime.now_us())

    def block(self, is_blocked: bool) -> None:
        """Have nothing leased for a while, or again."""
        if is_blocked is not self._session.receives_slowly:
            (self._broker.pause if is_blocked else self._broker.resume)(self._session)

    def next_batch(self) -> list[LeasedMessage]:
        """Take the messages of the next request."""
        batch = [self._queue.popleft()]
        size_bytes = batch[0].bytes
        while self._queue and len(batch) < self.definition.batch_max:
            if size_bytes + self._queue[0].bytes > _BATCH_BYTES:
                break
            batch.append(self._queue.popleft())
            size_bytes += batch[-1].bytes
        self._queue_bytes -= size_bytes
        return batch

    def take_all(self) -> list[LeasedMessage]:
        """Take everything, not to be sent."""
        queue = list(self._queue)
        self._queue.clear()
        self._memory.add(self._tenant, -self._queue_bytes)
        self._queue_bytes = 0
        return queue

    def give_credit(self, messages: int = 0, size_bytes: int = 0) -> None:
        """Return the credit of settled messages; more or less if the definition has changed meanwhile."""
        definition = self.definition
        self._window -= messages
        more = max(definition.concurrency * definition.batch_max - self._window, 0)
        if self._standing is not None and (more or size_bytes):
            self._window += more
            self.ask(LeaseCredit(self._standing, more, size_bytes))

    def _receive(self, pushed: Any) -> None:
        """Take what the broker tells the session."""
        if isinstance(pushed, AnswerWithBody):
            assert isinstance(pushed.answer, LeaseDelivery)
            if pushed.answer.standing != self._standing:  # withdrawn while it waited to be committed
                self._release(pushed.answer, undelivered=True)
                return
            try:
                taken = list(leased_messages(pushed.answer, pushed.body))
            except HeadraceError as error:
                self._refuse(pushed.answer, error)
                return
            size_bytes = sum(one.bytes for one in taken)
            self._queue.extend(taken)
            self._queue_bytes += size_bytes
            self._memory.add(self._tenant, size_bytes)
            self._arrived()
        elif isinstance(pushed, LeaseEnd) and pushed.standing == self._standing:
            self._standing = None
            if pushed.code == Draining.code:
                self._drained()
                return
            self.take_all()  # its leases are over
            if pushed.code == SubscriptionReopened.code:
                self.open()
            else:
                self._reopen_later(pushed.text)

    def _refuse(self, delivery: LeaseDelivery, error: HeadraceError) -> None:
        """Release messages that cannot be read, as if they could not be delivered."""
        logger.error("webhook's messages cannot be read  webhook=%s reason=%s", self.definition.name, error)
        held = self._release(delivery, reason=str(error))
        self.give_credit(sum(len(one.all_offsets) for one in held), delivery.size_bytes)

    def _release(self, delivery: LeaseDelivery, reason: str = "", *, undelivered: bool = False) -> list[Holding]:
        definition = self.definition
        held = [Holding(one.partition, one.lease, one.offsets, one.following) for one in delivery.portions]
        subscription = definition.subscription
        self.ask(Release(definition.topic, held, reason=reason, undelivered=undelivered, subscription=subscription))
        return held

    def _reopen_later(self, reason: str) -> None:
        self.error = reason
        self._reopening = self._runtime.call_later(_REOPEN_S, self.open)
