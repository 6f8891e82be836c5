"""Takes replies that nobody waits for to their targets: functions, topics and URLs."""

import logging
from collections import deque
from typing import TYPE_CHECKING, NamedTuple

from headrace.client._sync.concurrency import HandlerExecutor, Monitor, Task, now, spawn
from headrace.client.subjects.messages import Reply
from headrace.client.subjects.reply_targets import ReplyTarget, deliver_reply, stored_reply
from headrace.model.errors import HeadraceError

if TYPE_CHECKING:
    from headrace.client._sync.bus import Bus

logger = logging.getLogger("headrace.client")

_WORKERS_MAX = 4


class _Told(NamedTuple):
    """A reply, or an error in its place, and where it goes."""

    bus: "Bus"
    subject: str
    target: ReplyTarget
    outcome: Reply | HeadraceError


class ReplyCallbacks:
    """A few workers, started when there is something to do: a slow target holds up none of the connection's work."""

    def __init__(self) -> None:
        self._reset()

    def _reset(self) -> None:
        self._monitor = Monitor()
        self._told: deque[_Told] = deque()
        self._executor = HandlerExecutor(_WORKERS_MAX)
        self._workers: list[Task] = []
        self._running = 0

    def add(self, bus: "Bus", subject: str, target: ReplyTarget, outcome: Reply | HeadraceError) -> None:
        """Let a worker take a reply to its target."""
        with self._monitor.guard:
            self._told.append(_Told(bus, subject, target, outcome))
            if self._running < min(_WORKERS_MAX, len(self._told)):
                self._running += 1
                self._workers = [*self._workers[-_WORKERS_MAX:], spawn("reply-callback", self._work)]

    def close(self, timeout: float) -> None:
        """Wait until all replies that have come are where they belong, or the time is over."""
        deadline = now() + timeout
        for worker in self._workers:
            worker.join(max(deadline - now(), 0.0))
        self._executor.close()

    def disown(self) -> None:
        """In a forked child: leave to the parent what is under way."""
        self._reset()

    def _work(self) -> None:
        while True:
            with self._monitor.guard:
                if not self._told:
                    self._running -= 1
                    return
                told = self._told.popleft()
            try:
                self._deliver(*told)
            except Exception:
                logger.exception("reply not delivered  subject=%s", told.subject)

    def _deliver(self, bus: "Bus", subject: str, target: ReplyTarget, outcome: Reply | HeadraceError) -> None:
        if target.function is not None:
            self._executor.call(target.function, outcome)
            return
        value, headers = stored_reply(subject, outcome)
        if target.topic:
            bus.publish(target.topic, value, headers=headers)
        else:
            self._executor.call(lambda _: deliver_reply(target.url, value, headers), None)
