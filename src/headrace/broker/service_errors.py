"""Errors of services: counted by service and code, and appended to a topic of each tenant."""

from collections import deque
from collections.abc import Sequence
from functools import partial

import msgspec

from headrace.broker.bus_events import bare_name
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

_LAST_MAX = 50
"""Newest errors of a service that are kept in memory."""
_CODES_MAX = 100
"""Codes of a service that are counted apart; the rest counts as one."""
_OTHER = "other"
_SERVICES_MAX = 10_000
"""Services whose errors are counted; the one whose last error is the oldest is forgotten."""

_encoder = msgspec.json.Encoder()


class _ErrorTally:
    """The errors of one service."""

    __slots__ = ("codes", "last", "last_us", "total")

    def __init__(self) -> None:
        self.total = 0
        self.codes: dict[str, int] = {}
        self.last: deque[ServiceError] = deque(maxlen=_LAST_MAX)
        self.last_us = 0

    def add(self, error: ServiceError) -> None:
        code = error.code if error.code in self.codes or len(self.codes) < _CODES_MAX else _OTHER
        self.codes[code] = self.codes.get(code, 0) + 1
        self.total += 1
        self.last.append(error)
        self.last_us = error.time_us


class ServiceErrorLog:
    """Takes the reports of all services. Counts begin with the broker's start; the topic has what was before."""

    def __init__(self, topics: TopicRegistry, ledger: Ledger) -> None:
        self._topics = topics
        self._ledger = ledger
        self._number = 0
        self._tallies: dict[tuple[str, str], _ErrorTally] = {}
        """By tenant and service."""

    def report(self, session: Session, request: ErrorReport, now_us: int) -> Done | PendingAnswer[Done]:
        """Count and store what a service reports; answers when the topic has it."""
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
        self._count(session.tenant, service, errors)
        return self._append(session.tenant, service, encoded, now_us, create=True)

    def note(self, tenant: str, service: str, error: ServiceError, now_us: int) -> None:
        """Count a failure that the broker has seen; stores it if it is a service's, or the tenant has the topic."""
        error = self._completed(error, service, error.instance, now_us)
        self._count(tenant, service, [error])
        self._append(tenant, service, [_encoder.encode(error)], now_us, create=bool(service))

    def listed(self, session: Session, request: ErrorList) -> ErrorsFound:
        """The errors of the services of the session's tenant, by service."""
        wanted = checked_tenant_name(request.service, "service") if request.service else None
        last_max = max(0, min(request.last_max, _LAST_MAX))
        found = [
            ErrorSummary(name, tally.total, dict(tally.codes), tally.last_us, list(reversed(tally.last))[:last_max])
            for (tenant, name), tally in sorted(self._tallies.items())
            if tenant == session.tenant and wanted in (None, name)
        ]
        return ErrorsFound(found)

    def total(self, service: str) -> int:
        """How many errors a service has reported."""
        tally = self._tallies.get((tenant_of(service), service))
        return tally.total if tally is not None else 0

    def _completed(self, error: ServiceError, service: str, instance: str, now_us: int) -> ServiceError:
        self._number += 1
        return msgspec.structs.replace(
            error,
            id=error.id or f"{self._ledger.state.session:x}-{self._number:x}",
            time_us=error.time_us or now_us,
            service=bare_name(service),
            instance=instance,
        )

    def _count(self, tenant: str, service: str, errors: Sequence[ServiceError]) -> None:
        tally = self._tallies.pop((tenant, service), None)
        if tally is None:
            if len(self._tallies) >= _SERVICES_MAX:
                del self._tallies[next(iter(self._tallies))]
            tally = _ErrorTally()
        self._tallies[tenant, service] = tally  # the last one is the newest
        for error in errors:
            tally.add(error)

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
            self._ledger.failures.note(key, outcome, "service errors not stored; only counted  tenant=%s", tenant)
            done.resolve(outcome)
        else:
            self._ledger.failures.worked(key)
            done.resolve(Done())
