"""Reports the failures of an app's handlers to the broker; never waits, and never fails the app."""

import logging
from typing import TYPE_CHECKING

from headrace.client._sync.concurrency import now
from headrace.client.app.error_rate import ErrorRate
from headrace.client.connection.request_router import Bytes
from headrace.client.leasing.jobs import Job
from headrace.model.errors import HeadraceError
from headrace.model.leasing import cut_reason
from headrace.model.requests import Done
from headrace.model.service_requests import ErrorReport, ServiceError

if TYPE_CHECKING:
    from headrace.client._sync.connection.reconnecting import ReconnectingConnection

logger = logging.getLogger("headrace.client")

_MESSAGE_CHARS = 1000
_KEY_CHARS = 500
_REPORT_TIMEOUT_S = 30.0


class ErrorReporter:
    """Reports failures of one instance of a service."""

    def __init__(self, broker: "ReconnectingConnection", service: str, instance: str) -> None:
        self._broker = broker
        self._service = service
        self._instance = instance
        self._rate = ErrorRate(now())

    def report(self, job: Job, error: BaseException | None, traceback: str, code: str = "") -> None:
        """Report a handler's failure with a message, without waiting for the broker."""
        try:
            connection = self._broker.connection
            if not self._rate.admits(now()):
                return
            if connection is None or connection.closed:
                self._rate.suppressed += 1
                return
            report = ErrorReport(self._service, self._instance, [self._described(job, error, traceback, code)])
            self._rate.suppressed = 0
            connection.request_nowait(report, b"", self._answered, _REPORT_TIMEOUT_S)
        except Exception:  # whatever it is, the service goes on
            logger.warning("handler failure not reported  topic=%s", job.topic, exc_info=True)

    def _described(self, job: Job, error: BaseException | None, traceback: str, code: str) -> ServiceError:
        details: dict[str, object] = {"subscription": job.subscription, "delivery": job.deliveries}
        if self._rate.suppressed:
            details["suppressed"] = self._rate.suppressed  # errors before this one that were too many to report
        last_line = traceback.strip().rpartition("\n")[2]
        return ServiceError(
            code=code or (error.code if isinstance(error, HeadraceError) else type(error).__name__),
            message=(last_line if error is None else str(error))[:_MESSAGE_CHARS],
            topic=job.topic,
            partition=job.partition,
            offset=job.offset,
            key="" if job.key is None else job.key.decode(errors="backslashreplace")[:_KEY_CHARS],
            retryable=True,  # the message is delivered again, as often as the subscription says
            details=details,
            traceback=cut_reason(traceback),
        )

    def _answered(self, answer: Done | HeadraceError, _: Bytes) -> None:
        if isinstance(answer, HeadraceError):
            self._rate.suppressed += 1
            logger.debug("handler failure not reported  service=%s error=%s", self._service, answer)
