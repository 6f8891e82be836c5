"""Registered services and the errors that they report, as resources."""

from typing import Annotated

import msgspec

from headrace.gateways.http.call import Call, Reply, json_reply
from headrace.gateways.http.route import Route, fields_struct, given_fields, request_route
from headrace.model.errors import ServiceNotFound
from headrace.model.limits import SERVICE_TTL_MS_MAX, SERVICE_TTL_MS_MIN
from headrace.model.service_requests import (
    ErrorList,
    ErrorReport,
    ServiceDefinition,
    ServiceDeregister,
    ServiceDescribe,
    ServiceInstance,
    ServiceList,
    ServiceRegister,
    ServiceRegistered,
)

SERVICES = "services"
_PATH = "/v1/services/{name}/instances/{instance}"
_TtlMilliseconds = Annotated[int, msgspec.Meta(ge=SERVICE_TTL_MS_MIN, le=SERVICE_TTL_MS_MAX)]
_LastMax = Annotated[int, msgspec.Meta(ge=0, le=1000)]

ServiceFields = fields_struct(
    ServiceDefinition,
    without=("name", "instance"),
    added={"ttl_ms": (_TtlMilliseconds, 30_000)},
    name="ServiceFields",
)
_decoder = msgspec.json.Decoder(ServiceFields)


async def register(call: Call) -> Reply:
    """Register an instance, or give a sign of life of it."""
    body: msgspec.Struct = await call.decoded(_decoder)
    given = given_fields(body)
    ttl_ms = given.pop("ttl_ms")
    name, instance = call.parameters
    return json_reply(await call.ask(ServiceRegister(ServiceDefinition(name, instance, **given), ttl_ms)))


async def describe_instance(call: Call) -> Reply:
    """Answer one instance of a service."""
    return json_reply(await _instance(call))


async def deregister(call: Call) -> Reply:
    """Forget an instance."""
    await _instance(call)
    name, instance = call.parameters
    await call.ask(ServiceDeregister(name, instance, any_session=True))
    return Reply(204)


async def _instance(call: Call) -> ServiceInstance:
    name, instance = call.parameters
    for one in (await call.ask(ServiceDescribe(name))).instances:
        if one.instance == instance:
            return one
    raise ServiceNotFound(f"the service {name} has no instance {instance}; GET /v1/services/{name} lists them")


_MISSING = ("service_not_found",)

SERVICE_ROUTES = [
    request_route(
        ServiceList, "GET", "/v1/services", tag=SERVICES, summary="List services that match all that is given"
    ),
    request_route(
        ServiceDescribe, "GET", "/v1/services/{name}", tag=SERVICES, summary="Describe a service", errors=_MISSING
    ),
    Route(
        "GET", _PATH, describe_instance, "Describe an instance of a service", SERVICES,
        answer=ServiceInstance, errors=_MISSING,
    ),
    Route(
        "PUT", _PATH, register,
        "Register an instance of a service; the same request again is a sign of life, without which it expires",
        SERVICES, body=ServiceFields, answer=ServiceRegistered, errors=("limit_exceeded",),
        example={"version": "1.4", "consumes": ["orders"], "ttl_ms": 60_000},
    ),
    Route(
        "DELETE", _PATH, deregister, "Forget an instance of a service, whichever connection registered it", SERVICES,
        204, errors=_MISSING,
    ),
    request_route(
        ErrorList, "GET", "/v1/errors", tag=SERVICES, replaced={"last_max": _LastMax},
        summary="List the errors that services reported since the broker was started",
    ),
    request_route(
        ErrorReport, "POST", "/v1/errors", tag=SERVICES,
        summary="Report failures of a service, to be counted and appended to the topic `headrace.errors`",
        example={"service": "billing", "instance": "b1", "errors": [{"code": "card_refused", "message": "no credit"}]},
    ),
]  # fmt: skip
"""The routes about services and their errors."""
