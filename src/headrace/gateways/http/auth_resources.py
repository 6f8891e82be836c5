"""Security as resources: roles, bindings, tokens, and what identities may do."""

from headrace.gateways.http.paging import PageLimit
from headrace.gateways.http.route import Route, request_route
from headrace.model.audit import AuditDescribe
from headrace.model.security_requests import (
    AccessExplain,
    BindingAdd,
    BindingRemove,
    RoleRemove,
    RoleSet,
    SecurityAlter,
    SecurityDescribe,
    TokenCreate,
    TokenList,
    TokenRevoke,
    WhoAmI,
)

SECURITY = "security"
_CONFLICT = ("version_conflict",)
_BINDING = {"binding": {"role": "publisher", "identity": "sensor-*", "tenant": "plant"}}

AUTH_ROUTES: list[Route] = [
    request_route(
        SecurityDescribe, "GET", "/v1/auth", tag=SECURITY,
        summary="Tell whether security is enabled, its roles and bindings",
    ),
    request_route(
        SecurityAlter, "PATCH", "/v1/auth", tag=SECURITY, errors=("security_required", *_CONFLICT),
        example={"enabled": True},
        summary="Switch security on or off; open connections follow at once",
    ),
    request_route(
        RoleSet, "PUT", "/v1/auth/roles/{name}", tag=SECURITY, errors=_CONFLICT,
        example={"grants": [{"verbs": ["consume"], "resource": "topic", "patterns": ["orders.*"]}]},
    ),
    request_route(
        RoleRemove, "DELETE", "/v1/auth/roles/{name}", tag=SECURITY, errors=("role_not_found", *_CONFLICT)
    ),
    request_route(
        BindingAdd, "POST", "/v1/auth/bindings", tag=SECURITY, errors=("role_not_found", *_CONFLICT), example=_BINDING,
        summary="Give a role to identities",
    ),
    request_route(
        BindingRemove, "POST", "/v1/auth/binding-removals", tag=SECURITY, errors=("binding_not_found", *_CONFLICT),
        example=_BINDING, summary="Take a role from identities; give the binding as it was made",
    ),
    request_route(
        TokenCreate, "POST", "/v1/auth/tokens", tag=SECURITY, status=201, errors=("tenant_not_found", "limit_exceeded"),
        example={"identity": "sensor-1", "tenant": "plant", "description": "in the hall"},
        summary="Create a token; its secret is in this answer only",
    ),
    request_route(
        TokenList, "GET", "/v1/auth/tokens", tag=SECURITY,
        replaced={"limit": PageLimit}, summary="List tokens, without their secrets",
    ),
    request_route(
        TokenRevoke, "DELETE", "/v1/auth/tokens/{id}", tag=SECURITY, errors=("token_not_found",),
        summary="Revoke a token; connections that use it end at once",
    ),
    request_route(
        AccessExplain, "POST", "/v1/auth/explanations", tag=SECURITY,
        example={"identity": "sensor-1", "verb": "publish", "resource": "topic", "name": "orders"},
        summary="Explain whether an identity may do something",
    ),
    request_route(
        WhoAmI, "GET", "/v1/auth/identity", tag=SECURITY, summary="Tell who the broker takes the client for"
    ),
    request_route(
        AuditDescribe, "GET", "/v1/audit", tag=SECURITY,
        summary="Tell whether actions are recorded, and the last record of the audit trail",
    ),
]  # fmt: skip
"""The routes about security."""
