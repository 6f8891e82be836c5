"""Errors of services in memory: counts by service and code, and excerpts of the newest errors, within budgets."""

from collections import OrderedDict
from collections.abc import Sequence

import msgspec

from headrace.model.limits import ERRORS_KEPT_BYTES_MAX, ERRORS_KEPT_TENANT_BYTES_MAX
from headrace.model.service_requests import OTHER_CODES, OTHER_SERVICES, ServiceError
from headrace.model.topic import TopicName

LAST_MAX = 50
"""Newest errors of a service that are kept."""
_CODES_MAX = 100
_TENANT_CODES_MAX = 5000
"""Codes of a service, and of all services of a tenant, that are counted apart; the rest counts as one."""
_TENANT_SERVICES_MAX = 500
"""Services of a tenant that are counted apart; the rest counts as one."""
_SERVICES_MAX = 10_000
"""Services of all tenants; the one whose last error is the oldest is forgotten."""
_CODE_CHARS = 100
_TEXT_CHARS = 1000
_TRACEBACK_CHARS = 2000
_DETAILS_BYTES = 2000
"""What an excerpt has of each part of an error."""
_OVERHEAD_BYTES = 600
"""What an error takes in memory besides its texts."""

_encoder = msgspec.json.Encoder()


class ErrorTally:
    """The errors of one service."""

    __slots__ = ("codes", "last", "last_us", "service", "tenant", "total")

    def __init__(self, tenant: str, service: str) -> None:
        self.tenant = tenant
        self.service = service
        self.total = 0
        self.codes: dict[str, int] = {}
        self.last: dict[int, ServiceError] = {}
        """Excerpts of the newest errors, by number, the oldest first."""
        self.last_us = 0


class _TenantErrors:
    """What is kept of a tenant: its services, how many codes they have, and the sizes of excerpts by number."""

    __slots__ = ("codes", "kept", "kept_bytes", "services")

    def __init__(self) -> None:
        self.services: dict[str, ErrorTally] = {}
        self.codes = 0
        self.kept: OrderedDict[int, int] = OrderedDict()
        self.kept_bytes = 0


class ErrorTallies:
    """The errors of all services; what exceeds a budget in bytes is dropped, the oldest first."""

    def __init__(self) -> None:
        self._tenants: dict[str, _TenantErrors] = {}
        self._tallies: OrderedDict[tuple[str, str], ErrorTally] = OrderedDict()
        """By tenant and service; the one with the newest error is the last."""
        self._kept: OrderedDict[int, ErrorTally] = OrderedDict()
        """The services of the excerpts, by number."""
        self._kept_bytes = 0
        self._number = 0

    def count(self, tenant: str, service: str, errors: Sequence[ServiceError]) -> None:
        """Count errors of a service, and keep excerpts of them."""
        tally = self._tally(tenant, service)
        self._tallies.move_to_end((tenant, tally.service))
        mine = self._tenants[tenant]
        for error in errors:
            code = self._counted_code(mine, tally, error.code[:_CODE_CHARS])
            tally.codes[code] = tally.codes.get(code, 0) + 1
            tally.total += 1
            tally.last_us = error.time_us
            self._keep(mine, tally, error)

    def of(self, tenant: str) -> list[ErrorTally]:
        """The services of a tenant that have errors, by name."""
        mine = self._tenants.get(tenant)
        return [] if mine is None else [mine.services[name] for name in sorted(mine.services)]

    def total(self, tenant: str, service: str) -> int:
        """How many errors of a service were counted under its name."""
        tally = self._tallies.get((tenant, service))
        return tally.total if tally is not None else 0

    def forget_tenant(self, tenant: str) -> None:
        """Forget the errors of a tenant that was deleted."""
        for tally in self.of(tenant):
            self._forget(tally)

    def _tally(self, tenant: str, service: str) -> ErrorTally:
        """Where the errors of a service are counted."""
        mine = self._tenants.get(tenant)
        if mine is not None and service not in mine.services and len(mine.services) >= _TENANT_SERVICES_MAX:
            service = str(TopicName(tenant, OTHER_SERVICES))
        tally = self._tallies.get((tenant, service))
        if tally is None:
            if len(self._tallies) >= _SERVICES_MAX:
                self._forget(next(iter(self._tallies.values())))
            tally = self._tallies[tenant, service] = ErrorTally(tenant, service)
            self._tenants.setdefault(tenant, _TenantErrors()).services[service] = tally
        return tally

    def _counted_code(self, mine: _TenantErrors, tally: ErrorTally, code: str) -> str:
        if code in tally.codes or code == OTHER_CODES:
            return code
        if len(tally.codes) >= _CODES_MAX or mine.codes >= _TENANT_CODES_MAX:
            return OTHER_CODES
        mine.codes += 1
        return code

    def _keep(self, mine: _TenantErrors, tally: ErrorTally, error: ServiceError) -> None:
        kept = _excerpt(error)
        size_bytes = len(_encoder.encode(kept)) + _OVERHEAD_BYTES
        self._number += 1
        tally.last[self._number] = kept
        self._kept[self._number] = tally
        mine.kept[self._number] = size_bytes
        mine.kept_bytes += size_bytes
        self._kept_bytes += size_bytes
        if len(tally.last) > LAST_MAX:
            self._drop(next(iter(tally.last)))
        while mine.kept_bytes > ERRORS_KEPT_TENANT_BYTES_MAX:
            self._drop(next(iter(mine.kept)))
        while self._kept_bytes > ERRORS_KEPT_BYTES_MAX:
            self._drop(next(iter(self._kept)))

    def _drop(self, number: int) -> None:
        """Drop the excerpt of an error, which stays counted."""
        tally = self._kept.pop(number)
        del tally.last[number]
        mine = self._tenants[tally.tenant]
        size_bytes = mine.kept.pop(number)
        mine.kept_bytes -= size_bytes
        self._kept_bytes -= size_bytes

    def _forget(self, tally: ErrorTally) -> None:
        """Forget the errors of a service."""
        for number in list(tally.last):
            self._drop(number)
        del self._tallies[tally.tenant, tally.service]
        mine = self._tenants[tally.tenant]
        mine.codes -= sum(1 for code in tally.codes if code != OTHER_CODES)
        del mine.services[tally.service]
        if not mine.services:
            del self._tenants[tally.tenant]


def _excerpt(error: ServiceError) -> ServiceError:
    """What is kept of an error; the topic has all of it.

    >>> kept = _excerpt(ServiceError("c" * 2000, "failed", traceback="x" * 9000, details={"a": 1}))
    >>> len(kept.code), kept.message, len(kept.traceback), kept.details
    (100, 'failed', 2000, {'a': 1, 'truncated': True})
    """
    details = error.details if not error.details or len(_encoder.encode(error.details)) <= _DETAILS_BYTES else {}
    kept = msgspec.structs.replace(
        error,
        code=error.code[:_CODE_CHARS],
        message=error.message[:_TEXT_CHARS],
        id=error.id[:_CODE_CHARS],
        instance=error.instance[:_TEXT_CHARS],
        topic=error.topic[:_TEXT_CHARS],
        subject=error.subject[:_TEXT_CHARS],
        key=error.key[:_CODE_CHARS],
        details=details,
        traceback=error.traceback[-_TRACEBACK_CHARS:],
    )
    return kept if kept == error else msgspec.structs.replace(kept, details={**details, "truncated": True})
