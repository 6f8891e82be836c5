"""What can be changed while the broker runs: logging levels, the policy about services, and recording of events."""

from typing import Literal

import msgspec

from headrace.gateways.http.call import Call, Reply, json_reply
from headrace.gateways.http.route import Route, fields_struct, given_fields, request_route
from headrace.model.bus_event import EventsRecord
from headrace.model.log_level_requests import (
    LogLevelList,
    LogLevelReset,
    LogLevelRule,
    LogLevelSet,
    LogLevelsFound,
)
from headrace.model.requests import Info
from headrace.model.service_requests import ServiceList, ServicePolicyAlter

CONFIGURATION = "configuration"
_PATH = "/v1/configuration"
_LEVELS_PATH = "/v1/configuration/log-levels"
_Scope = Literal["broker", "topic", "producer", "consumer"]
_Level = Literal["debug", "info", "warning", "error"]


class Configuration(msgspec.Struct):
    """What can be changed while the broker runs, and the limits, which cannot."""

    log_levels: list[LogLevelRule]
    require_registration: bool
    """Whether sessions that are no registered service may use the bus."""
    limits: dict[str, int]
    """Limits by name; they are settings of the server, which it reads when it starts."""


LogLevelFields = fields_struct(LogLevelRule, replaced={"scope": _Scope, "level": _Level}, name="LogLevelFields")
_level_decoder = msgspec.json.Decoder(LogLevelFields)


async def describe_configuration(call: Call) -> Reply:
    """Answer what can be changed while the broker runs."""
    levels = await call.ask(LogLevelList())
    services = await call.ask(ServiceList())
    info = await call.ask(Info())
    return json_reply(Configuration(levels.rules, services.require_registration, info.limits))


async def set_log_level(call: Call) -> Reply:
    """Set a logging level."""
    body: msgspec.Struct = await call.decoded(_level_decoder)
    return json_reply(await call.ask(LogLevelSet(LogLevelRule(**given_fields(body)))))


CONFIGURATION_ROUTES = [
    Route(
        "GET", _PATH, describe_configuration, "Describe what can be changed while the broker runs", CONFIGURATION,
        answer=Configuration,
    ),
    request_route(
        ServicePolicyAlter, "PATCH", _PATH, tag=CONFIGURATION, errors=("not_registered",),
        example={"require_registration": False},
    ),
    request_route(LogLevelList, "GET", _LEVELS_PATH, tag=CONFIGURATION, summary="List the logging levels that are set"),
    Route(
        "PUT", _LEVELS_PATH, set_log_level, "Set a logging level, in place of the one of the same scope and pattern",
        CONFIGURATION, body=LogLevelFields, body_required=True, answer=LogLevelsFound,
        errors=("limit_exceeded",), example={"scope": "topic", "pattern": "orders*", "level": "debug"},
    ),
    request_route(
        LogLevelReset, "DELETE", _LEVELS_PATH, tag=CONFIGURATION, replaced={"scope": _Scope | Literal[""]},
        summary="Forget the logging level of a scope and pattern; without a scope all of the tenant",
    ),
    request_route(
        EventsRecord, "POST", "/v1/events", tag=CONFIGURATION,
        summary="Record events about the bus in the topic `headrace.events` from now on, with those still in memory",
    ),
]  # fmt: skip
"""The routes about the configuration."""
