"""What can be asked about tenants, and what is answered. See requests.py."""

from typing import Any

import msgspec

from headrace.model.kinds import Kind
from headrace.model.request import Answer, Permission, Request, Resource, Verb, WireStruct, declare
from headrace.model.requests import Done
from headrace.model.tenant import TenantQuotas, TenantUsage


class TenantInfo(Answer):
    """A tenant as it is now; the answer to TenantCreate, TenantDescribe and TenantAlter."""

    tenant: str
    quotas: TenantQuotas
    """Its own; where it has none, the broker's defaults count."""
    limits: TenantQuotas
    """What counts: its own quotas, and the broker's defaults where it has none."""
    usage: TenantUsage
    description: str = ""
    created_us: int = 0
    """When it was made; 0: it is used without having been made."""


class TenantSummary(WireStruct):
    """One tenant of a list: what it uses is not measured for it."""

    tenant: str
    description: str = ""
    created_us: int = 0
    topics: int = 0
    connections: int = 0


class TenantsFound(Answer):
    """The answer to TenantList."""

    tenants: list[TenantSummary]
    next: str = ""
    """Where the next page begins; empty at the end."""


class TenantUsageFound(Answer):
    """The answer to TenantUsageDescribe."""

    tenant: str
    limits: TenantQuotas
    usage: TenantUsage
    throttled_us: int = 0
    """For how long sessions were made to wait by rates since the broker was started, added up."""


@declare(Kind.TENANT_CREATE, Permission(Verb.ADMINISTER, Resource.SECURITY), while_draining=False)
class TenantCreate(Request[TenantInfo]):
    """Make a tenant."""

    tenant: str
    description: str = ""
    quotas: dict[str, Any] = msgspec.field(default_factory=dict)
    exist_ok: bool = False


@declare(Kind.TENANT_LIST, Permission(Verb.ADMINISTER, Resource.SECURITY))
class TenantList(Request[TenantsFound]):
    """List the tenants that were made, by name."""

    after: str = ""
    """Only those behind this one."""
    limit: int = 1000


@declare(Kind.TENANT_DESCRIBE, Permission(Verb.DESCRIBE, Resource.BROKER))
class TenantDescribe(Request[TenantInfo]):
    """Describe a tenant: any for an administrator of the broker, the own one for everybody else."""

    tenant: str = ""
    """Empty: the session's own."""


@declare(Kind.TENANT_ALTER, Permission(Verb.ADMINISTER, Resource.SECURITY), while_draining=False)
class TenantAlter(Request[TenantInfo]):
    """Change the description or quotas of a tenant; what is not given stays."""

    tenant: str
    description: str | None = None
    quotas: dict[str, Any] = msgspec.field(default_factory=dict)
    """Quotas by name; None removes one, so that the broker's default counts."""


@declare(Kind.TENANT_DELETE, Permission(Verb.ADMINISTER, Resource.SECURITY), while_draining=False)
class TenantDelete(Request[Done]):
    """Delete a tenant that is empty, or with all that it has."""

    tenant: str
    cascade: bool = False
    """End its sessions, and delete all that it has."""


@declare(Kind.TENANT_USAGE_DESCRIBE, Permission(Verb.DESCRIBE, Resource.BROKER))
class TenantUsageDescribe(Request[TenantUsageFound]):
    """Tell what a tenant uses, and its limits."""

    tenant: str = ""
    """Empty: the session's own."""
