"""The workers of a handler: process several messages concurrently, and settle each."""

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from headrace.client._async.app.error_reporter import AsyncErrorReporter
from headrace.client._async.app.handler_setup import set_up
from headrace.client._async.concurrency import HandlerExecutor, Task, spawn, survives
from headrace.client._async.leasing.acknowledger import AsyncUnansweredAcks
from headrace.client._async.leasing.prefetch import AsyncPrefetcher
from headrace.client.app.handler_results import Reject, Retry
from headrace.client.app.registration import Registered
from headrace.client.connection.token_source import is_refusal
from headrace.client.job_results import fitting_result, reply_id, result_batch
from headrace.client.leasing.deserializing import JobDeserializer, told
from headrace.client.leasing.jobs import Job, holdings_of
from headrace.client.leasing.message_selection import span_ms
from headrace.client.leasing.prefetch_window import PrefetchWindow
from headrace.client.times import microseconds
from headrace.model.errors import HeadraceError, SubscriptionNotFound, TopicFailed, TopicNotFound, error_of
from headrace.model.leasing import Reject as RejectWords
from headrace.model.leasing import Release, cut_reason

if TYPE_CHECKING:
    from headrace.client._async.bus import AsyncBus

logger = logging.getLogger("headrace.client")

_AHEAD_MAX = 1000
"""Upper bound of the prefetch for fast handlers."""


class AsyncHandlerWorkers:
    """The workers of one handler."""

    def __init__(
        self,
        bus: "AsyncBus",
        wanted: Registered,
        executor: HandlerExecutor,
        on_fatal: Callable[[BaseException], None],
        missing: set[str],
        reporter: AsyncErrorReporter | None = None,
    ) -> None:
        self._bus = bus
        self._reporter = reporter
        self._missing = missing
        self._wanted = wanted
        self._executor = executor
        self._on_fatal = on_fatal
        self._acknowledger, _ = bus._shared_leasing(wanted.topic, wanted.subscription)
        self._unpacking = JobDeserializer(wanted.deserializer)
        least, most = wanted.concurrency, _AHEAD_MAX
        if wanted.prefetch is not None:
            least = most = wanted.prefetch
        self._prefetch = AsyncPrefetcher(
            bus,
            self._acknowledger,
            window=PrefetchWindow(least, most),
            lease_ms=wanted.lease_ms,
            create=False,
            recover=self._recover,
        )
        self._said = AsyncUnansweredAcks()
        self._workers: list[Task] = []

    async def begin(self) -> None:
        """Set up the handler and start its workers; they wait for a topic that does not exist."""
        try:
            await set_up(self._bus, self._wanted)
        except TopicNotFound as error:
            self._report_missing(error)
        except TopicFailed as error:  # the other handlers run meanwhile
            logger.warning("handler setup failed; retrying  topic=%s error=%s", self._wanted.topic, error)
        await self._prefetch.begin()
        for number in range(self._wanted.concurrency):
            self._workers.append(spawn(f"{self._wanted.topic}-{number}", self._work))

    def stop(self) -> None:
        """Start no further messages."""
        self._prefetch.stop()

    async def close(self) -> None:
        """Wait until the messages in progress are finished, and release all others."""
        self.stop()
        await self._prefetch.give_back()
        for worker in self._workers:
            await worker.join()
        await self._prefetch.close()
        await self._said.answered(self._acknowledger.timeout)

    async def _recover(self, error: HeadraceError) -> None:
        """Set up the handler again after a refused lease, as its topic may have been deleted, recreated or repaired."""
        topic = self._wanted.topic
        if is_refusal(error):
            self._on_fatal(error)
            return
        try:
            await set_up(self._bus, self._wanted)
        except TopicNotFound as missing:
            self._report_missing(missing)
        except HeadraceError as failure:
            if is_refusal(failure):
                self._on_fatal(failure)
                return
            logger.warning("handler setup failed; retrying  topic=%s error=%s", topic, failure)
        else:
            if not isinstance(error, TopicNotFound | SubscriptionNotFound):
                logger.warning("lease refused; retrying  topic=%s error=%s", topic, error)
            elif topic in self._missing:
                self._missing.discard(topic)
                logger.info("topic exists; handler starts  topic=%s", topic)

    def _report_missing(self, error: TopicNotFound) -> None:
        """Log that the handler waits for its topic, once for each time that the topic is missing."""
        if self._wanted.topic not in self._missing:
            self._missing.add(self._wanted.topic)
            logger.warning("handler waits for its topic: %s  topic=%s", error, self._wanted.topic)

    async def _work(self) -> None:
        while True:
            try:
                job = await self._prefetch.take()
            except HeadraceError as error:
                if is_refusal(error):
                    self._on_fatal(error)
                    return
                logger.warning("lease failed; retrying  topic=%s error=%s", self._wanted.topic, error)
                continue
            if job is None:
                return
            await self._handle(job)

    async def _handle(self, job: Job) -> None:
        """Call the handler with a message, and settle the message by the result. No Exception ends the app."""
        opened = self._unpacking.opened(job)
        if not isinstance(opened, Job):
            self._release(job, reason=opened)
            if self._reporter is not None:
                reason = opened.strip().rpartition("\n")[2]  # of its traceback, the line that tells the error
                error = error_of("cannot_deserialize", f"the value cannot be deserialized: {reason}", False)
                self._reporter.report(job, error, opened)
            return
        try:
            returned = await self._executor.call(self._wanted.handler, opened)
            if self._prefetch.disowned:
                return  # in a child that the handler forked: the parent settles the message
        except Reject as verdict:
            words = RejectWords(job.topic, holdings_of([job]), cut_reason(verdict.reason), job.subscription)
            self._said.add(self._acknowledger.send(words, watched=False))
        except Retry as verdict:
            self._retry(job, verdict)
        except Exception as error:  # noqa: BLE001  # a message must not stop the app
            self._failed(job, error)
        except BaseException as error:  # noqa: BLE001  # `run` raises it after everything else has ended
            if survives(error):
                self._failed(job, error)
            else:
                self._release(job, delay_ms=0, reason=told(error))
                self._on_fatal(error)
        else:
            self._done(job, returned)

    def _done(self, job: Job, returned: object) -> None:
        """Acknowledge a message; with what the handler returned, if the publisher waits for that."""
        id = reply_id(job.headers) if job.headers else ""
        if not id:
            self._said.add(self._acknowledger.ack_one(job, watched=False))
            return
        result, wrong = fitting_result(returned)
        if wrong is not None:
            logger.warning("result not stored  topic=%s offset=%s error=%s", job.topic, job.offset, wrong)
        batch = result_batch(id, result, self._bus.clock.now_us())
        self._said.add(self._acknowledger.finish(job, batch))

    def _failed(self, job: Job, error: BaseException) -> None:
        logger.warning(
            "handler failed  offset=%s topic=%s partition=%s delivery=%s",
            job.offset,
            job.topic,
            job.partition,
            job.deliveries,
            exc_info=error,
        )
        reason = told(error)
        self._release(job, reason=reason)
        if self._reporter is not None:
            self._reporter.report(job, error, reason)

    def _retry(self, job: Job, verdict: Retry) -> None:
        try:
            delay_ms = None if verdict.delay is None else span_ms(verdict.delay, "delay")
            until_us = None if verdict.until is None else microseconds(verdict.until)
            self._release(job, delay_ms, until_us, verdict.reason, bytes(verdict.state))
        except (HeadraceError, TypeError, ValueError) as error:
            self._failed(job, error)

    def _release(
        self,
        job: Job,
        delay_ms: int | None = None,
        until_us: int | None = None,
        reason: str = "",
        state: bytes = b"",
    ) -> None:
        words = Release(
            job.topic,
            holdings_of([job]),
            delay_ms,
            until_us,
            cut_reason(reason),
            {job.offset: state} if state else {},
            False,
            job.subscription,
        )
        self._said.add(self._acknowledger.send(words, watched=False))
