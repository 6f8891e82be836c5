"""Iteration over what is published to subjects, while it is published."""

import contextlib
import logging
from collections import deque
from collections.abc import Iterator
from types import TracebackType
from typing import TYPE_CHECKING

from headrace.client._sync.concurrency import Lock, Monitor, ResultCell, breathe, now
from headrace.client._sync.connection.connection import Connection
from headrace.client._sync.connection.reconnecting import ReconnectingConnection
from headrace.client.connection import fork_guard
from headrace.client.connection.request_router import Bytes
from headrace.client.subjects.messages import SubjectMessage, messages_of
from headrace.model.batch import Batch, parse
from headrace.model.errors import Closed, ConnectionFailed, Draining, HeadraceError
from headrace.model.representation import described, short, state_of
from headrace.model.requests import Done
from headrace.model.subject_requests import (
    SubjectDelivery,
    SubjectSubscribe,
    SubjectSubscribed,
    SubjectUnsubscribe,
)

if TYPE_CHECKING:
    from headrace.client._sync.bus import Bus

logger = logging.getLogger("headrace.client")

_STRETCH_MAX = 100
"""Messages that are handed out before other tasks get a turn."""


class LiveSubscription:
    """Messages of subjects to iterate over. Made by `bus.subjects.subscribe(...)`, which explains the settings.

    It receives what is published from the moment at which it is entered with `with`, or first iterated. What is
    published while the connection is down is lost, and so is what does not fit into the buffer. Only one thread or task
    may use it at a time, except for `stop()`.

    Example:
        >>> with bus.subjects.subscribe("orders.*", timeout=10) as orders:
        ...     published = bus.subjects.publish("orders.eu", b"3 apples")
        ...     for message in orders:
        ...         print(message.subject, message.value)
        ...         break
        orders.eu b'3 apples'
    """

    def __init__(
        self,
        bus: "Bus",
        pattern: str,
        queue: str,
        *,
        timeout: float | None,
        buffer_messages: int,
        buffer_bytes: int,
    ) -> None:
        self._bus = bus
        self.pattern = pattern
        """Which subjects it is about."""
        self.queue = queue
        """The queue whose members share the messages; empty if it gets all."""
        self._timeout = timeout
        self._buffer_messages = buffer_messages
        self._buffer_bytes = buffer_bytes
        self._closed = False
        self._entered = False
        self._reset()

    def _reset(self) -> None:
        self._forks = fork_guard.count
        self._beginning = Lock()
        self._monitor = Monitor()
        self._begun = False
        self._broker: ReconnectingConnection | None = None
        self._connection: Connection | None = None
        self._number: int | None = None
        self._subscribed: ResultCell[None] = ResultCell()
        self._error: HeadraceError | None = None
        self._stopped = False
        self._batches: deque[tuple[str, Batch]] = deque()
        self._count = self._bytes = 0
        """Of the batches in the buffer."""
        self._messages: Iterator[SubjectMessage] = iter(())
        self._at_a_stretch = 0
        self._dropped = 0

    @property
    def dropped(self) -> int:
        """How many messages were lost because they were not received fast enough, as far as is known."""
        return self._dropped

    def begin(self) -> None:
        """Receive from now on; `with` does it, and so does the first step of an iteration.

        Raises:
            InvalidArgument: if the pattern or the queue is wrong.
            Timeout: if the broker does not answer in time.

        Example:
            >>> orders = bus.subjects.subscribe("orders.*")
            >>> orders.begin()
            >>> orders.close()
        """
        fork_guard.check(self._forks, "a live subscription")
        self._check_open()
        if not self._begun:
            with self._beginning:
                self._begin_once()

    def _begin_once(self) -> None:
        if not self._begun:
            self._broker = self._bus._consuming_line()
            self._bus._keep(self)
            self._broker.listen(self)
            try:
                self._subscribed.wait(self._broker.timeout)
            except BaseException:
                self._abandon()
                raise
            self._begun = True

    def stop(self) -> None:
        """End the iteration; any thread may call it.

        Example:
            >>> with bus.subjects.subscribe("orders.*") as orders:
            ...     orders.stop()
            ...     for message in orders:
            ...         print("never")
        """
        with self._monitor.guard:
            self._stopped = True
            self._monitor.notify()

    def close(self) -> None:
        """Receive no more.

        Example:
            >>> orders = bus.subjects.subscribe("orders.*")
            >>> orders.close()
        """
        broker = self._broker
        self._close_by(now() + (0.0 if broker is None else broker.timeout))

    def _close_by(self, deadline: float) -> None:
        if self._closed:
            return
        connection, number = self._connection, self._number
        self._leave()
        if connection is None or number is None or connection.closed:
            return
        connection.live.pop(number, None)
        with contextlib.suppress(ConnectionFailed):  # the subscription has ended with the connection
            connection.request(SubjectUnsubscribe(number), b"", max(deadline - now(), 0.001))

    def _abandon(self) -> None:
        """Close without waiting for the broker."""
        if self._closed:
            return
        connection, number = self._connection, self._number
        self._leave()
        if connection is not None and number is not None and not connection.closed:
            connection.live.pop(number, None)
            connection.request_nowait(SubjectUnsubscribe(number), b"", _ignore)

    def _leave(self) -> None:
        self._closed = True
        self._bus._forget(self)
        if self._broker is not None:
            self._broker.forget(self)
        self.stop()

    def _check_open(self) -> None:
        if self._closed:
            raise Closed("the live subscription is closed; make another")

    def _disown(self) -> None:
        """In a forked child: give up a subscription that the parent began; one that has not begun can begin here."""
        begun, forks = self._broker is not None, self._forks
        self._reset()
        if begun:
            self._closed, self._forks = True, forks

    # Notifications of the connection.

    def connection_up(self, connection: Connection) -> None:
        """Subscribe on a new connection."""
        with self._monitor.guard:
            self._connection, self._number = connection, None
            connection.queue_request(
                SubjectSubscribe(self.pattern, self.queue), b"", lambda answer, _: self._answered(connection, answer)
            )
        connection.flush()

    def connection_drains(self) -> None:
        """The broker drains; the subscription ends with the connection."""

    def live_delivered(self, delivery: SubjectDelivery, body: Bytes) -> None:
        """Keep the messages of a delivery, as far as there is room."""
        batch = parse(memoryview(bytes(body)))
        with self._monitor.guard:
            self._dropped += delivery.dropped
            full = self._count + batch.count > self._buffer_messages or self._bytes + batch.length > self._buffer_bytes
            if full and self._batches:
                self._dropped += batch.count
                return
            self._batches.append((delivery.subject, batch))
            self._count += batch.count
            self._bytes += batch.length
            self._monitor.notify()

    def _answered(self, connection: Connection, answer: SubjectSubscribed | HeadraceError) -> None:
        if isinstance(answer, SubjectSubscribed):
            connection.live[answer.subscription] = self
            with self._monitor.guard:
                if self._connection is connection:
                    self._number = answer.subscription
            if self._closed:  # while it was being subscribed
                connection.live.pop(answer.subscription, None)
                connection.request_nowait(SubjectUnsubscribe(answer.subscription), b"", _ignore)
            self._subscribed.resolve(None)
        elif isinstance(answer, ConnectionFailed | Draining):
            logger.info("live subscription interrupted; subscribing again  pattern=%s", self.pattern)
        else:
            self._subscribed.fail(answer)
            with self._monitor.guard:
                self._error = answer
                self._monitor.notify()

    # Iterating.

    def __iter__(self) -> Iterator[SubjectMessage]:
        """Iterate over the messages, until the timeout or `stop()`."""
        try:
            while (message := self._next()) is not None:
                yield message
        finally:
            if not self._entered:
                self.close()

    def _next(self) -> SubjectMessage | None:
        self.begin()
        for message in self._messages:
            self._at_a_stretch += 1
            if self._at_a_stretch >= _STRETCH_MAX:
                self._at_a_stretch = 0
                breathe()
            return message
        return self._next_of_batch(None if self._timeout is None else now() + self._timeout)

    def _next_of_batch(self, deadline: float | None) -> SubjectMessage | None:
        with self._monitor.guard:
            while not self._batches:
                if self._error is not None:
                    raise self._error
                if self._stopped or self._closed:
                    return None
                left_s = None if deadline is None else deadline - now()
                if left_s is not None and left_s <= 0:
                    return None
                self._monitor.wait(left_s)
            if self._stopped:
                return None
            subject, batch = self._batches.popleft()
            self._count -= batch.count
            self._bytes -= batch.length
        self._messages = messages_of(subject, batch)
        return next(self._messages)

    def __repr__(self) -> str:
        return described(self, self._facts)

    def _facts(self) -> Iterator[str]:
        yield f"{self.pattern} queue={short(self.queue)}" if self.queue else self.pattern
        yield f"dropped={self._dropped}"
        yield state_of(
            forked=self._forks != fork_guard.count, closed=self._closed, listening=self._begun, not_begun=True
        )

    def __del__(self) -> None:
        if not self.__dict__.get("_closed", True) and self._broker is not None:
            self._bus._timers.aside(self._abandon)

    def __enter__(self) -> "LiveSubscription":
        self._entered = True
        self.begin()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _ignore(_answer: Done | HeadraceError, _body: Bytes) -> None:
    """The subscription ends with the connection, if not before."""
