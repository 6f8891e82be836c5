"""Stands before the authenticator: counts failed logins, holds their refusals back, and has them recorded."""

import asyncio
import logging
from collections.abc import Callable
from functools import partial

from headrace.broker.metrics import CollectorSteps
from headrace.broker.pending_answer import PendingAnswer
from headrace.gateways.authentication import Authenticate, Peer
from headrace.model.errors import Cancelled, HeadraceError
from headrace.model.identity import Identity
from headrace.model.metric_requests import counter
from headrace.security.login_failures import LoginFailures

logger = logging.getLogger("headrace.security")

RecordRefusal = Callable[[str, str, str, HeadraceError, int], None]
"""Takes the gateway, the address, the mechanism, the error and the time."""


class LoginGuard:
    """An authenticator that asks another one. Refusals wait on the event loop; who is let in never waits."""

    def __init__(
        self,
        authenticate: Authenticate,
        record: RecordRefusal,
        loop: asyncio.AbstractEventLoop,
        now_us: Callable[[], int],
        *,
        delay_s_max: float,
    ) -> None:
        self._authenticate = authenticate
        self._record = record
        self._loop = loop
        self._now_us = now_us
        self._failures = LoginFailures(delay_s_max)

    def __call__(self, mechanism: str, credentials: bytes, peer: Peer) -> "Identity | PendingAnswer[Identity]":
        """Say who a client is; a refusal comes later, the more of them its host has got."""
        try:
            found = self._authenticate(mechanism, credentials, peer)
        except HeadraceError as error:
            delay_s = self._failed(mechanism, peer, error)
            if not delay_s:
                raise
            refused: PendingAnswer[Identity] = PendingAnswer()
            self._refuse_later(refused, error, delay_s)
            return refused
        if not isinstance(found, PendingAnswer):
            return found
        answer: PendingAnswer[Identity] = PendingAnswer()
        found.then(partial(self._found, mechanism, peer, answer))
        answer.then(partial(_withdraw, found))
        return answer

    def _found(
        self, mechanism: str, peer: Peer, answer: PendingAnswer[Identity], outcome: Identity | HeadraceError
    ) -> None:
        if isinstance(outcome, HeadraceError) and not isinstance(outcome, Cancelled):
            self._refuse_later(answer, outcome, self._failed(mechanism, peer, outcome))
        else:
            answer.resolve(outcome)

    def _refuse_later(self, answer: PendingAnswer[Identity], error: HeadraceError, delay_s: float) -> None:
        timer = self._loop.call_later(delay_s, answer.resolve, error)
        answer.then(lambda _: timer.cancel())

    def _failed(self, mechanism: str, peer: Peer, error: HeadraceError) -> float:
        now_us = self._now_us()
        self._record(peer.gateway, peer.address, mechanism, error, now_us)
        delay_s = self._failures.failed(peer.address.rpartition(":")[0], now_us)
        logger.log(
            logging.INFO if delay_s < 1 else logging.DEBUG,  # a flood does not fill the log
            "authentication failed  address=%s gateway=%s code=%s",
            peer.address,
            peer.gateway,
            error.code,
        )
        return delay_s

    def collect(self, tenant: str | None, _: int) -> CollectorSteps:
        """Collect how many logins failed."""
        if tenant is None:
            yield counter("authentication_failures", "Clients that were not let in.", self._failures.total)


def _withdraw(found: PendingAnswer[Identity], _: object) -> None:
    """Cancel an authentication that nobody waits for any more; without effect on one that is done."""
    found.cancel()
