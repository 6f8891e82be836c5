"""Reports the failures of an app's handlers to the broker; never waits, and never fails the app."""

import logging
from typing import TYPE_CHECKING, Any

from headrace.client._async.concurrency import now
from headrace.client.app.error_rate import ErrorRate
from headrace.client.connection.request_router import Bytes
from headrace.client.leasing.deserializing import told
from headrace.client.leasing.jobs import Job
from headrace.model.error_object import error_object
from headrace.model.errors import HeadraceError
from headrace.model.leasing import cut_reason
from headrace.model.requests import Done
from headrace.model.service_requests import ErrorReport, ServiceError

if TYPE_CHECKING:
    from headrace.client._async.connection.reconnecting import AsyncReconnectingConnection

logger = logging.getLogger("headrace.client")

_KEY_CHARS = 500
_REPORT_TIMEOUT_S = 30.0


class AsyncErrorReporter:
    """Reports failures of one instance of a service."""

    def __init__(self, broker: "AsyncReconnectingConnection", service: str, instance: str) -> None:
        self._broker = broker
        self._service = service
        self._instance = instance
        self._rate = ErrorRate(now())

    def report(self, job: Job, error: BaseException, traceback: str) -> None:
        """Report a handler's failure with a message, without waiting for the broker."""
        place = {
            "topic": job.topic,
            "partition": job.partition,
            "offset": job.offset,
            "key": "" if job.key is None else job.key.decode(errors="backslashreplace")[:_KEY_CHARS],
        }
        self._report(error, traceback, {"subscription": job.subscription, "delivery": job.deliveries}, **place)

    def report_request(self, subject: str, error: BaseException) -> None:
        """Report a handler's failure with a request, without waiting for the broker."""
        self._report(error, told(error), {}, subject=subject)

    def _report(self, error: BaseException, traceback: str, details: dict[str, Any], **place: Any) -> None:
        try:
            connection = self._broker.connection
            if not self._rate.admits(now()):
                return
            if connection is None or connection.closed:
                self._rate.suppressed += 1
                return
            if self._rate.suppressed:
                details["suppressed"] = self._rate.suppressed  # errors before this one that were too many to report
            common = error_object(error)
            described = ServiceError(
                code=common.code,
                message=common.message,
                retryable=common.retryable,
                details={**common.details, **details},
                traceback=cut_reason(traceback),
                **place,
            )
            self._rate.suppressed = 0
            report = ErrorReport(self._service, self._instance, [described])
            connection.request_nowait(report, b"", self._answered, _REPORT_TIMEOUT_S)
        except Exception:  # whatever it is, the service goes on
            logger.warning("handler failure not reported  service=%s", self._service, exc_info=True)

    def _answered(self, answer: Done | HeadraceError, _: Bytes) -> None:
        if isinstance(answer, HeadraceError):
            self._rate.suppressed += 1
            logger.debug("handler failure not reported  service=%s error=%s", self._service, answer)
