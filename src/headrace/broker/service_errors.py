"""Errors of services: counted by service and code, and appended to a topic of each tenant."""

from collections.abc import Sequence
from functools import partial

import msgspec

from headrace.broker.bus_events import bare_name
from headrace.broker.error_tallies import LAST_MAX, ErrorTallies
from headrace.broker.ledger import Ledger
from headrace.broker.pending_answer import PendingAnswer
from headrace.broker.ports import Session
from headrace.broker.topics import TopicRegistry
from headrace.engines.api import as_headrace_error
from headrace.model.batch import Columns, encode
from headrace.model.errors import DiskFull, HeadraceError, InvalidArgument
from headrace.model.limits import ERROR_BYTES_MAX, ERRORS_REPORTED_MAX
from headrace.model.requests import Done, Publish, TopicCreate
from headrace.model.service_requests import ErrorList, ErrorReport, ErrorsFound, ErrorSummary, ServiceError
from headrace.model.system_topics import ERRORS_TOPIC
from headrace.model.topic import TopicName, checked_tenant_name, tenant_of

_encoder = msgspec.json.Encoder()


class ServiceErrorLog:
    """Takes the reports of all services. Counts begin with the broker's start; the topic has what was before."""

    def __init__(self, topics: TopicRegistry, ledger: Ledger) -> None:
        self._topics = topics
        self._ledger = ledger
        self._number = 0
        self._tallies = ErrorTallies()

    def report(self, session: Session, request: ErrorReport, now_us: int) -> Done | PendingAnswer[Done]:
        """Store and count what a service reports; answers when the topic has it. What is refused is not counted."""
        if not 0 < len(request.errors) <= ERRORS_REPORTED_MAX:
            raise InvalidArgument(f"a report has 1 to {ERRORS_REPORTED_MAX} errors, not {len(request.errors)}")
        service = checked_tenant_name(request.service, "service")
        errors = [self._completed(error, service, request.instance, now_us) for error in request.errors]
        encoded = [_encoder.encode(error) for error in errors]
        for error, content in zip(errors, encoded, strict=True):
            if len(content) > ERROR_BYTES_MAX:
                raise InvalidArgument(
                    f"the error {error.code} has {len(content)} bytes, and {ERROR_BYTES_MAX} are the most: shorten its "
                    "traceback or details"
                )
        answer = self._append(session.tenant, service, encoded, now_us, create=True)
        if isinstance(answer, Done):
            self._tallies.count(session.tenant, service, errors)
            return answer
        reported: PendingAnswer[Done] = PendingAnswer()  # cancelling this one keeps no error from being counted
        answer.then(partial(self._reported, session.tenant, service, errors))
        answer.then(reported.resolve)
        return reported

    def _reported(self, tenant: str, service: str, errors: Sequence[ServiceError], outcome: object) -> None:
        if isinstance(outcome, Done):
            self._tallies.count(tenant, service, errors)

    def note(self, tenant: str, service: str, error: ServiceError, now_us: int) -> None:
        """Count a failure that the broker has seen; stores it if it is a service's, or the tenant has the topic."""
        error = self._completed(error, service, error.instance, now_us)
        self._tallies.count(tenant, service, [error])
        self._append(tenant, service, [_encoder.encode(error)], now_us, create=bool(service))

    def listed(self, session: Session, request: ErrorList) -> ErrorsFound:
        """The errors of the services of the session's tenant, by service."""
        wanted = checked_tenant_name(request.service, "service") if request.service else None
        last_max = max(0, min(request.last_max, LAST_MAX))
        found = [
            ErrorSummary(
                tally.service,
                tally.total,
                dict(tally.codes),
                tally.last_us,
                list(reversed(tally.last.values()))[:last_max],
            )
            for tally in self._tallies.of(session.tenant)
            if wanted in (None, tally.service)
        ]
        truncated = any(len(summary.last) < min(last_max, summary.total) for summary in found)
        return ErrorsFound(found, truncated)

    def forget_tenant(self, tenant: str) -> None:
        """Forget the errors of a tenant that was deleted; its topic is deleted, too."""
        self._tallies.forget_tenant(tenant)

    def total(self, service: str) -> int:
        """How many errors a service has reported."""
        return self._tallies.total(tenant_of(service), service)

    def _completed(self, error: ServiceError, service: str, instance: str, now_us: int) -> ServiceError:
        self._number += 1
        return msgspec.structs.replace(
            error,
            id=error.id or f"{self._ledger.state.session:x}-{self._number:x}",
            time_us=error.time_us or now_us,
            service=bare_name(service),
            instance=instance,
        )

    def _append(
        self, tenant: str, service: str, encoded: list[bytes], now_us: int, *, create: bool
    ) -> Done | PendingAnswer[Done]:
        """Append errors to the tenant's topic, with the service as their key; never raises."""
        done: PendingAnswer[Done] = PendingAnswer()
        name = str(TopicName(tenant, ERRORS_TOPIC))
        try:
            topic = self._topics.find(name)
            if topic is None:
                if not create:
                    return Done()
                topic = self._topics.create(TopicCreate(name), now_us)
            active = self._topics.active(topic, 0)
            if active.partition.durable and self._topics.ballast.dropped:
                raise DiskFull("the disk is full")
            key = bare_name(service).encode()
            batch = encode(Columns(encoded, keys=[key] * len(encoded)), now_us)
            answer = active.publish(Publish(name, 0, durability=0), batch, now_us)
        except HeadraceError as error:
            self._appended(tenant, done, error)
        except OSError as error:
            self._appended(tenant, done, as_headrace_error(error))
        else:
            if not isinstance(answer, PendingAnswer):
                return Done()
            answer.then(partial(self._appended, tenant, done))
        return done

    def _appended(self, tenant: str, done: PendingAnswer[Done], outcome: object) -> None:
        key = "errors", tenant
        if isinstance(outcome, HeadraceError):
            self._ledger.failures.note(key, outcome, "service errors not stored  tenant=%s", tenant)
            done.resolve(outcome)
        else:
            self._ledger.failures.worked(key)
            done.resolve(Done())
