"""Asks the callbacks of WebSub subscribers whether a request was meant, and tells them of denials.

Anybody can name anybody's callback: the hub asks each once, a few at a time and at a limited rate, so that it cannot be
used to send many requests to somebody.
"""

import asyncio
import logging
import secrets
from collections import Counter, deque
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, NamedTuple

from headrace.broker.websub_subscriptions import SUBSCRIBE, WebSubIntent
from headrace.model.errors import Busy, HeadraceError
from headrace.model.limits import (
    WEBSUB_PENDING_HOST_MAX,
    WEBSUB_PENDING_MAX,
    WEBSUB_REQUESTS_BURST,
    WEBSUB_REQUESTS_PER_SECOND,
    WEBSUB_SUBSCRIPTIONS_MAX,
)
from headrace.model.receiver_url import parse_receiver_url
from headrace.model.websub import callback_url

if TYPE_CHECKING:
    from headrace.broker.broker import Broker
    from headrace.push.http_client import OutgoingClient
    from headrace.runtime.loop_runtime import LoopRuntime

logger = logging.getLogger("headrace.push")

_TIMEOUT_S = 10.0
"""How long a callback has for its answer."""
_CHALLENGE_BYTES = 32


class Denial(NamedTuple):
    """A subscriber that is to be told that it gets nothing."""

    callback: str
    topic_url: str
    reason: str


class IntentVerifier:
    """Sends the requests by which a hub and a subscriber agree."""

    def __init__(
        self,
        broker: "Broker",
        runtime: "LoopRuntime",
        check: Callable[[str], None],
        client: "Callable[[], OutgoingClient]",
    ) -> None:
        """Prepare; `check` refuses callbacks to which nothing could be sent, `client` is called for the first one."""
        self._broker = broker
        self._runtime = runtime
        self._client = client
        self.check = check
        self._pending: set[str] = set()
        """Names of subscriptions whose callbacks are being asked."""
        self._hosts: Counter[str] = Counter()
        self._allowance = float(WEBSUB_REQUESTS_BURST)
        self._allowance_us = runtime.now_us()
        self._denials: deque[Denial] = deque(maxlen=WEBSUB_SUBSCRIPTIONS_MAX)
        self._denying = False
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def busy(self) -> bool:
        """Whether callbacks are being asked."""
        return bool(self._pending)

    def verify(self, intent: WebSubIntent) -> None:
        """Ask the callback, and let the broker do what it confirms."""
        host = parse_receiver_url(intent.callback).host
        if intent.name in self._pending:
            raise Busy("the callback is being asked about this subscription; wait for that")
        if len(self._pending) >= WEBSUB_PENDING_MAX or self._hosts[host] >= WEBSUB_PENDING_HOST_MAX:
            raise Busy("the hub is asking many callbacks, or several of this host; try again in a moment")
        self._take_allowance()
        self._pending.add(intent.name)
        self._hosts[host] += 1
        self._spawn(self._verify(intent, host))

    def deny(self, callback: str, topic_url: str, reason: str) -> None:
        """Tell a callback, once and when its turn comes, that its subscription is refused or has ended."""
        self._denials.append(Denial(callback, topic_url, reason))
        if not self._denying:
            self._denying = True
            self._spawn(self._deny_all())

    def abort(self) -> None:
        """Ask nobody any more."""
        for task in list(self._tasks):
            task.cancel()

    async def _verify(self, intent: WebSubIntent, host: str) -> None:
        try:
            refusal = await self._ask(intent)
            if refusal:
                text = "websub callback does not confirm  mode=%s callback=%s topic=%s reason=%s"
                logger.info(text, intent.mode, intent.callback, intent.topic, refusal)
                return
            try:
                pending = self._broker.websub.confirm(intent, self._runtime.now_us())
                if pending is not None:
                    await pending
            except HeadraceError as error:
                logger.warning("websub subscription refused  callback=%s reason=%s", intent.callback, error)
                self.deny(intent.callback, intent.topic_url, str(error))
        finally:
            self._pending.discard(intent.name)
            self._hosts[host] -= 1
            if not self._hosts[host]:
                del self._hosts[host]

    async def _ask(self, intent: WebSubIntent) -> str:
        """Ask a callback with a challenge; returns why it does not confirm, or nothing."""
        challenge = secrets.token_urlsafe(_CHALLENGE_BYTES)
        fields = {"hub.mode": intent.mode, "hub.topic": intent.topic_url, "hub.challenge": challenge}
        if intent.mode == SUBSCRIBE:
            fields["hub.lease_seconds"] = str(intent.lease_seconds)
        try:
            response = await self._client().send("GET", callback_url(intent.callback, fields), timeout_s=_TIMEOUT_S)
        except HeadraceError as error:
            return str(error)
        if not 200 <= response.status < 300:
            return f"it answered {response.status}"
        return "" if response.body == challenge.encode() else "its answer is not the challenge"

    async def _deny_all(self) -> None:
        try:
            while self._denials:
                callback, topic_url, reason = self._denials.popleft()
                fields = {"hub.mode": "denied", "hub.topic": topic_url, "hub.reason": reason}
                try:
                    await self._client().send("GET", callback_url(callback, fields), timeout_s=_TIMEOUT_S)
                except HeadraceError as error:
                    logger.info("websub subscriber not told of the denial  callback=%s reason=%s", callback, error)
                await asyncio.sleep(1 / WEBSUB_REQUESTS_PER_SECOND)
        finally:
            self._denying = False

    def _take_allowance(self) -> None:
        """Refuse what is more than the rate, of which unused parts add up to a burst."""
        now_us = self._runtime.now_us()
        earned = (now_us - self._allowance_us) / 1e6 * WEBSUB_REQUESTS_PER_SECOND
        self._allowance = min(self._allowance + earned, WEBSUB_REQUESTS_BURST)
        self._allowance_us = now_us
        if self._allowance < 1:
            raise Busy(f"the hub asks {WEBSUB_REQUESTS_PER_SECOND} callbacks a second at most; try again in a moment")
        self._allowance -= 1

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._runtime.loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("websub callback not asked", exc_info=error)
