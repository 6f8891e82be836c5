"""Answers the requests to a subject with a handler."""

import logging
from collections import deque
from collections.abc import Callable
from copy import copy
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from headrace.client._async.app.error_reporter import AsyncErrorReporter
from headrace.client._async.concurrency import HandlerExecutor, Monitor, ResultCell, Task, spawn, survives
from headrace.client._async.connection.connection import Connection
from headrace.client._async.connection.reconnecting import AsyncReconnectingConnection
from headrace.client.app.registration import ServedSubject
from headrace.client.connection.backoff import Backoff
from headrace.client.connection.request_router import Bytes, RequestRouter
from headrace.client.connection.retrying import NEXT_CONNECTION, REPEATED
from headrace.client.subjects.messages import IncomingRequest
from headrace.client.subjects.reply_values import decoded_value, failed_reply, reply_request
from headrace.model.errors import HeadraceError, Timeout
from headrace.model.requests import Done
from headrace.model.subject_requests import ReplySend, RequestDelivery, ServeClose, ServeOpen, ServeOpened

if TYPE_CHECKING:
    from headrace.client._async.bus import AsyncBus

logger = logging.getLogger("headrace.client")


class _Assigned(NamedTuple):
    """A request that is to be handled, and the connection that it came by."""

    router: RequestRouter
    delivery: RequestDelivery
    value: bytes


class AsyncResponder:
    """Serves one subject, or subjects by pattern: calls the handler with each request, and sends what it returns."""

    def __init__(
        self,
        bus: "AsyncBus",
        wanted: ServedSubject,
        executor: HandlerExecutor,
        on_fatal: Callable[[BaseException], None],
        reporter: AsyncErrorReporter | None = None,
    ) -> None:
        self._bus = bus
        self._reporter = reporter
        self._wanted = wanted
        self._executor = executor
        self._on_fatal = on_fatal
        self._monitor = Monitor()
        self._assigned: deque[_Assigned] = deque()
        self._workers: list[Task] = []
        self._idle = 0
        """Workers that wait for a request."""
        self._broker: AsyncReconnectingConnection | None = None
        self._connection: Connection | None = None
        self._number: int | None = None
        self._opened: ResultCell[None] = ResultCell()
        self._backoff = Backoff()
        self._refusal: HeadraceError | None = None
        """Why it does not serve yet; it is tried again."""
        self._unserved: ResultCell[None] = ResultCell()
        """Resolved when the broker sends no more requests."""
        self._stopped = False

    async def begin(self) -> None:
        """Serve from now on."""
        self._broker = await self._bus._consuming_line()
        self._broker.listen(self)
        try:
            await self._opened.wait(self._broker.timeout)
        except Timeout as error:
            if self._refusal is None:
                raise
            raise copy(self._refusal) from error

    def stop(self) -> None:
        """Take no further requests; any thread may call it."""
        with self._monitor.guard:
            if self._stopped:
                return
            self._stopped = True
            connection, number = self._connection, self._number
            if connection is None or number is None or connection.closed:
                self._unserved.resolve(None)
            else:
                connection.queue_request(ServeClose(number), b"", self._closed)
        if connection is not None:
            connection.flush()

    async def close(self) -> None:
        """Wait until the requests in progress are answered."""
        self.stop()
        if self._broker is not None:
            self._broker.forget(self)
            await self._unserved.wait(self._broker.timeout)
        with self._monitor.guard:
            self._monitor.notify()
        for worker in self._workers:
            await worker.join()
        if self._connection is not None and self._number is not None:
            self._connection.responders.pop(self._number, None)

    # Notifications of the connection.

    def connection_up(self, connection: Connection) -> None:
        """Serve on a new connection."""
        with self._monitor.guard:
            if self._stopped:
                return
            self._connection, self._number = connection, None
        self._open(connection)

    def _open(self, connection: Connection) -> None:
        with self._monitor.guard:
            if self._stopped or self._connection is not connection or connection.closed:
                return
            connection.queue_request(
                ServeOpen(self._wanted.subject, self._wanted.concurrency),
                b"",
                lambda answer, _: self._answered(connection, answer),
            )
        connection.flush()

    def connection_drains(self) -> None:
        """The broker drains; what it has delivered can be answered."""

    def connection_refused(self, error: HeadraceError) -> None:
        """The broker does not accept this client any more: serve no more."""
        if self._opened.done:
            self.serving_ended(error)
        else:
            self._opened.fail(error)

    def request_delivered(self, router: RequestRouter, delivery: RequestDelivery, value: bytes) -> None:
        """Hand a request to a worker; the broker sends as many as there can be workers."""
        with self._monitor.guard:
            self._assigned.append(_Assigned(router, delivery, value))
            count = len(self._workers)
            if len(self._assigned) > self._idle and count < self._wanted.concurrency:
                self._workers.append(spawn(f"{self._wanted.subject}-{count}", self._work))
            else:
                self._monitor.notify(1)

    def serving_ended(self, error: HeadraceError) -> None:
        """Serve no more, for this reason."""
        with self._monitor.guard:
            self._number = None
        self._on_fatal(error)

    def _answered(self, connection: Connection, answer: ServeOpened | HeadraceError) -> None:
        if isinstance(answer, ServeOpened):
            connection.responders[answer.responder] = self
            with self._monitor.guard:
                if self._connection is connection:
                    self._number = answer.responder
                stopped = self._stopped
            if stopped:  # while it was being opened
                connection.request_nowait(ServeClose(answer.responder), b"", self._closed)
            self._backoff.reset()
            self._opened.resolve(None)
        elif isinstance(answer, REPEATED):
            self._refusal = answer
            logger.info("responder interrupted; serving again  subject=%s error=%s", self._wanted.subject, answer)
            if not isinstance(answer, NEXT_CONNECTION):
                self._bus._timers.later(self._backoff.next_s(), partial(self._open, connection))
        elif self._opened.done:
            self._on_fatal(answer)
        else:
            self._opened.fail(answer)

    def _closed(self, _answer: Done | HeadraceError, _body: Bytes) -> None:
        self._unserved.resolve(None)

    # Handling.

    async def _work(self) -> None:
        while (assigned := await self._take()) is not None:
            await self._handle(*assigned)

    async def _take(self) -> _Assigned | None:
        with self._monitor.guard:
            while not self._assigned:
                if self._unserved.done:
                    return None
                self._idle += 1
                try:
                    await self._monitor.wait()
                finally:
                    self._idle -= 1
            return self._assigned.popleft()

    async def _handle(self, router: RequestRouter, delivery: RequestDelivery, value: bytes) -> None:
        number = delivery.request
        failure: BaseException | None = None
        try:
            decoded = decoded_value(self._wanted.deserializer, value)
            request = IncomingRequest(delivery.subject, decoded, delivery.headers, delivery.timeout_ms / 1000)
            head, body = reply_request(number, await self._executor.call(self._wanted.handler, request))
        except Exception as error:  # noqa: BLE001  # a request must not stop the app
            head, body, failure = self._failed(number, error), b"", error
        except BaseException as error:  # noqa: BLE001  # `run` raises it after everything else has ended
            head, body, failure = self._failed(number, error), b"", error
            if not survives(error):
                self._on_fatal(error)
        router.tell(head, body)
        if failure is not None and self._reporter is not None:
            self._reporter.report_request(delivery.subject, failure)

    def _failed(self, number: int, error: BaseException) -> ReplySend:
        told = failed_reply(error)
        logger.warning("handler failed  subject=%s code=%s", self._wanted.subject, told.code, exc_info=error)
        return ReplySend(number, error=told)
