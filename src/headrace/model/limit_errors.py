"""Errors of limits, and of tenants, which have them; `model/errors.py` has all others, and the names of these."""

from headrace.model.headrace_error import HeadraceError


class LimitExceeded(HeadraceError):
    """A limit on how much of something there may be is reached."""

    code = "limit_exceeded"


class QuotaExceeded(LimitExceeded):
    """The tenant would have more than its quota allows; remove something, or let an administrator raise the quota."""

    code = "quota_exceeded"

    @classmethod
    def of(cls, tenant: str, quota: str, limit: int, usage: int, more: int) -> "QuotaExceeded":
        """The error about a tenant that has reached a quota."""
        return cls(
            f"the tenant {tenant} has {usage} {quota.replace('_', ' ')}, and its quota of {limit} allows no {more} "
            f"more: remove some, or let an administrator raise it (headrace tenant alter {tenant} --quota {quota}=N)",
            quota=quota,
            limit=limit,
            usage=usage,
        )


class Throttled(HeadraceError):
    """The tenant sends or receives more per second than its quota allows; try again after retry_after_ms."""

    code = "throttled"
    retryable = True


class TenantNotFound(HeadraceError, LookupError):
    """There is no tenant of this name that the session may use."""

    code = "tenant_not_found"


class TenantExists(HeadraceError):
    """There is already a tenant of this name."""

    code = "tenant_exists"


class TenantNotEmpty(HeadraceError):
    """The tenant has sessions, topics or the like; delete those first, or delete it with all that it has."""

    code = "tenant_not_empty"
