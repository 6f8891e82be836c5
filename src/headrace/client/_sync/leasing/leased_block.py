"""A context manager that leases messages for a block."""

import logging
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any

from headrace.client._sync.leasing.acknowledger import Acknowledger
from headrace.client.connection import fork_guard
from headrace.client.leasing.deserializing import told
from headrace.client.leasing.jobs import Job, refusals_error
from headrace.model.errors import HeadraceError
from headrace.model.representation import described, short, state_of

logger = logging.getLogger("headrace.client")


class LeasedBlock:
    """For use in `with`: yields leased messages, and at the end acknowledges those that the block has not settled.

    A message whose lease expired in the block is acknowledged too; the broker accepts that if no other worker has
    leased it since. If the broker refuses, the block raises LeaseExpired, NotLeaseHolder or MessageGone, which names
    the messages. After an exception messages are released instead, with the exception as the reason.
    """

    def __init__(
        self,
        acknowledger: Acknowledger,
        take: Callable[[], Any],
        ack: Callable[[list[Job]], Any],
        release: Callable[..., Any],
    ) -> None:
        self._acknowledger = acknowledger
        self._take = take
        self._ack = ack
        self._release = release
        self._jobs: list[Job] = []
        self._forks = fork_guard.count

    def __repr__(self) -> str:
        return described(self, self._facts)

    def _facts(self) -> Iterator[str]:
        acknowledger = self._acknowledger
        yield f"{acknowledger.topic} subscription={short(acknowledger.subscription)} messages={len(self._jobs)}"
        yield state_of(closed=self._acknowledger.closed)

    def __enter__(self) -> list[Job]:
        self._forks = fork_guard.count
        self._jobs = self._take()
        return list(self._jobs)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            fork_guard.check(self._forks, "a block of leased messages")
        elif self._forks != fork_guard.count:
            return  # the parent settles them
        with self._acknowledger.monitor.guard:
            left = self._acknowledger.held_leases.unsettled(self._jobs)
        if not left:
            return
        if error is None:
            refused = self._ack(left)
            if refused:
                raise refusals_error(self._acknowledger.topic, refused)
            return
        try:
            refused = self._release(left, reason=told(error))
        except HeadraceError as failure:  # the program's own error takes precedence
            logger.warning(
                "messages not released  messages=%s topic=%s error=%s", len(left), self._acknowledger.topic, failure
            )
        else:
            if refused:
                logger.warning(
                    "leases lost  lost=%s messages=%s topic=%s", len(refused), len(left), self._acknowledger.topic
                )
