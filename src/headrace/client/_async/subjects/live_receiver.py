"""Receives the messages of a live subscription into a bounded buffer."""

import contextlib
import logging
from collections import deque
from copy import copy
from functools import partial

from headrace.client._async.concurrency import Monitor, ResultCell, Timers, now
from headrace.client._async.connection.connection import Connection
from headrace.client._async.connection.reconnecting import AsyncReconnectingConnection
from headrace.client.connection.backoff import Backoff
from headrace.client.connection.request_router import Bytes
from headrace.client.connection.retrying import NEXT_CONNECTION, REPEATED
from headrace.model.batch import Batch, parse
from headrace.model.errors import ConnectionFailed, HeadraceError, Timeout
from headrace.model.requests import Done
from headrace.model.subject_requests import (
    SubjectDelivery,
    SubjectSubscribe,
    SubjectSubscribed,
    SubjectUnsubscribe,
)

logger = logging.getLogger("headrace.client")


class AsyncLiveReceiver:
    """Subscribes, again on each new connection, and keeps what is delivered until somebody takes it."""

    def __init__(self, timers: Timers, pattern: str, queue: str, buffer_messages: int, buffer_bytes: int) -> None:
        self._timers = timers
        self._backoff = Backoff()
        self._pattern = pattern
        self._queue = queue
        self._buffer_messages = buffer_messages
        self._buffer_bytes = buffer_bytes
        self._monitor = Monitor()
        self._broker: AsyncReconnectingConnection | None = None
        self._connection: Connection | None = None
        self._number: int | None = None
        self._subscribed: ResultCell[None] = ResultCell()
        self._error: HeadraceError | None = None
        self._refusal: HeadraceError | None = None
        """Why it has not been subscribed yet; it is tried again."""
        self._stopped = False
        self._batches: deque[tuple[str, Batch]] = deque()
        self._count = self._bytes = 0
        """Of the batches in the buffer."""
        self.dropped = 0
        """Messages that were lost because they were not taken fast enough."""

    async def begin(self, broker: AsyncReconnectingConnection) -> None:
        """Receive from now on; raises the broker's error if it refuses, for good or until the time-out."""
        self._broker = broker
        broker.listen(self)
        try:
            await self._subscribed.wait(broker.timeout)
        except Timeout as error:
            if self._refusal is None:
                raise
            raise copy(self._refusal) from error

    async def take(self, deadline: float | None) -> tuple[str, Batch] | None:
        """Wait for a batch, and take it with its subject; None at the deadline, and after `stop`."""
        with self._monitor.guard:
            while not self._batches or self._stopped:
                if self._stopped:
                    return None
                if self._error is not None:
                    raise self._error
                left_s = None if deadline is None else deadline - now()
                if left_s is not None and left_s <= 0:
                    return None
                await self._monitor.wait(left_s)
            subject, batch = self._batches.popleft()
            self._count -= batch.count
            self._bytes -= batch.length
            return subject, batch

    def stop(self) -> None:
        """Let nobody take anything more; any thread may call it."""
        with self._monitor.guard:
            self._stopped = True
            self._monitor.notify()

    async def close(self, deadline: float) -> None:
        """End the subscription, and wait until the broker has ended it."""
        left = self._leave()
        if left is not None:
            connection, number = left
            with contextlib.suppress(ConnectionFailed):  # the subscription has ended with the connection
                await connection.request(SubjectUnsubscribe(number), b"", max(deadline - now(), 0.001))

    def abandon(self) -> None:
        """End the subscription without waiting for the broker."""
        left = self._leave()
        if left is not None:
            connection, number = left
            connection.request_nowait(SubjectUnsubscribe(number), b"", _ignore)

    def _leave(self) -> tuple[Connection, int] | None:
        """Receive no more; returns what is to be ended at the broker."""
        self.stop()
        if self._broker is not None:
            self._broker.forget(self)
        connection, number = self._connection, self._number
        if connection is None or number is None or connection.closed:
            return None
        connection.live.pop(number, None)
        return connection, number

    # Notifications of the connection.

    def connection_up(self, connection: Connection) -> None:
        """Subscribe on a new connection."""
        with self._monitor.guard:
            self._connection, self._number, self._error = connection, None, None
        self._subscribe(connection)

    def _subscribe(self, connection: Connection) -> None:
        with self._monitor.guard:
            if self._stopped or self._connection is not connection or connection.closed:
                return
            connection.queue_request(
                SubjectSubscribe(self._pattern, self._queue), b"", lambda answer, _: self._answered(connection, answer)
            )
        connection.flush()

    def connection_drains(self) -> None:
        """The broker drains; the subscription ends with the connection."""

    def connection_refused(self, error: HeadraceError) -> None:
        """The broker does not accept this client any more."""
        self._subscribed.fail(error)  # without effect once it has subscribed
        self.live_ended(error)

    def live_delivered(self, delivery: SubjectDelivery, body: Bytes) -> None:
        """Keep the messages of a delivery, as far as there is room; one batch always has."""
        batch = parse(memoryview(bytes(body)))
        with self._monitor.guard:
            self.dropped += delivery.dropped
            full = self._count + batch.count > self._buffer_messages or self._bytes + batch.length > self._buffer_bytes
            if full and self._batches:
                self.dropped += batch.count
                return
            self._batches.append((delivery.subject, batch))
            self._count += batch.count
            self._bytes += batch.length
            self._monitor.notify()

    def live_ended(self, error: HeadraceError) -> None:
        """Raise the broker's error once everything that was delivered is taken."""
        with self._monitor.guard:
            self._number, self._error = None, error
            self._monitor.notify()

    def _answered(self, connection: Connection, answer: SubjectSubscribed | HeadraceError) -> None:
        if isinstance(answer, SubjectSubscribed):
            with self._monitor.guard:
                stopped = self._stopped
                if self._connection is connection:
                    self._number = answer.subscription
            if stopped:  # while it was being subscribed
                connection.request_nowait(SubjectUnsubscribe(answer.subscription), b"", _ignore)
            else:
                connection.live[answer.subscription] = self
            self._backoff.reset()
            self._subscribed.resolve(None)
        elif isinstance(answer, REPEATED):
            self._refusal = answer
            logger.info("live subscription interrupted; subscribing again  pattern=%s error=%s", self._pattern, answer)
            if not isinstance(answer, NEXT_CONNECTION):
                self._timers.later(self._backoff.next_s(), partial(self._subscribe, connection))
        else:
            self._subscribed.fail(answer)
            with self._monitor.guard:
                self._error = answer
                self._monitor.notify()


def _ignore(_answer: Done | HeadraceError, _body: Bytes) -> None:
    """The subscription ends with the connection, if not before."""
