"""Tenants as resources: made, described, altered and deleted while the broker runs."""

from typing import Annotated, Any

import msgspec

from headrace.gateways.http.call import Call, Reply, json_reply
from headrace.gateways.http.route import Route, bounded, request_route
from headrace.model.tenant import TenantQuotas
from headrace.model.tenant_requests import (
    TenantAlter,
    TenantCreate,
    TenantDelete,
    TenantDescribe,
    TenantInfo,
    TenantList,
    TenantsFound,
    TenantUsageDescribe,
)

TENANTS = "tenants"
_PATH = "/v1/tenants/{tenant}"

QuotaFields = msgspec.defstruct(
    "QuotaFields",
    [
        (field.name, bounded(field.type) | msgspec.UnsetType, msgspec.UNSET)
        for field in msgspec.structs.fields(TenantQuotas)
    ],
    forbid_unknown_fields=True,
    kw_only=True,
    namespace={
        "__doc__": "Quotas by name; null removes one, so that the broker's default counts.",
        "source": TenantQuotas,
    },
)


class TenantFields(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A tenant to make."""

    tenant: str
    description: str = ""
    quotas: QuotaFields | msgspec.UnsetType = msgspec.UNSET  # type: ignore[valid-type]
    exist_ok: bool = False
    """Accept a tenant of that name that is there already, whatever it is like."""


class TenantChanges(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """What is to be changed of a tenant; what is left out stays."""

    description: str | None = None
    quotas: QuotaFields | msgspec.UnsetType = msgspec.UNSET  # type: ignore[valid-type]


class TenantsQuery(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Which tenants."""

    after: str = ""
    """Only those behind this one: the `next` of the page before."""
    limit: Annotated[int, msgspec.Meta(ge=1, le=1000)] = 100


_create_decoder = msgspec.json.Decoder(TenantFields)
_change_decoder = msgspec.json.Decoder(TenantChanges)


def _given(quotas: Any) -> dict[str, Any]:
    """The quotas that a body has, by name."""
    given: dict[str, Any] = {} if quotas is msgspec.UNSET else msgspec.to_builtins(quotas)
    return given


async def create_tenant(call: Call) -> Reply:
    """Make a tenant."""
    given = await call.decoded(_create_decoder)
    quotas = _given(given.quotas)
    return json_reply(await call.ask(TenantCreate(given.tenant, given.description, quotas, given.exist_ok)), 201)


async def alter_tenant(call: Call) -> Reply:
    """Change a tenant."""
    given = await call.decoded(_change_decoder)
    quotas = _given(given.quotas)
    return json_reply(await call.ask(TenantAlter(call.parameters[0], given.description, quotas)))


async def list_tenants(call: Call) -> Reply:
    """Answer a page of tenants."""
    query = call.query(TenantsQuery)
    return json_reply(await call.ask(TenantList(query.after, query.limit)))


TENANT_ROUTES = [
    Route("GET", "/v1/tenants", list_tenants, "List tenants", TENANTS, query=TenantsQuery, answer=TenantsFound),
    Route(
        "POST", "/v1/tenants", create_tenant, "Make a tenant", TENANTS, status=201,
        body=TenantFields, body_required=True, answer=TenantInfo, errors=("tenant_exists",),
        example={"tenant": "acme", "description": "A customer", "quotas": {"topics": 100, "bytes_in": 1_000_000}},
    ),
    request_route(TenantDescribe, "GET", _PATH, tag=TENANTS, errors=("tenant_not_found",)),
    Route(
        "PATCH", _PATH, alter_tenant, "Change the description or quotas of a tenant", TENANTS,
        body=TenantChanges, body_required=True, answer=TenantInfo, errors=("tenant_not_found",),
        example={"quotas": {"topics": 200, "groups": None}},
    ),
    request_route(TenantDelete, "DELETE", _PATH, tag=TENANTS, errors=("tenant_not_found", "tenant_not_empty")),
    request_route(TenantUsageDescribe, "GET", f"{_PATH}/usage", tag=TENANTS, errors=("tenant_not_found",)),
]  # fmt: skip
"""The routes about tenants."""
