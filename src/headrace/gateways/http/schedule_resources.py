"""Schedules as resources."""

from typing import Annotated, Literal

import msgspec

from headrace.gateways.http.call import Call, Reply, json_reply
from headrace.gateways.http.paging import PageQuery, page
from headrace.gateways.http.route import Route, request_route
from headrace.model.envelope import EnvelopeHeader, MessageEnvelope, StoredFields, TimeOrText, time_us
from headrace.model.errors import ScheduleNotFound
from headrace.model.schedule_requests import (
    ScheduleDefinition,
    ScheduleInfo,
    ScheduleList,
    ScheduleNext,
    SchedulePause,
    ScheduleRemove,
    ScheduleRun,
    ScheduleRuns,
    ScheduleSet,
)

SCHEDULES = "schedules"
_PATH = "/v1/schedules/{name}"


class ScheduleQuery(PageQuery, forbid_unknown_fields=True):
    """Which schedules."""

    topic: str = ""
    """Of this topic; empty: all."""


class SchedulePage(msgspec.Struct):
    """Schedules by name. The values of their messages are in base64."""

    schedules: list[ScheduleInfo]
    next: str = ""
    """The cursor of the next page; empty at the end."""


class ScheduleFields(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A schedule: publish a message again and again."""

    topic: str
    when: str
    """A crontab expression of five or six fields (seconds first), a nickname such as `@daily`, or `every 90s`."""
    value: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    """Any JSON."""
    value_base64: bytes | None = None
    """Instead of `value`: any bytes."""
    key: str | None = None
    headers: list[EnvelopeHeader] = []
    partition: Annotated[int, msgspec.Meta(ge=0, lt=1024)] | None = None
    """By default by key, or the first."""
    zone: str = "UTC"
    """The time zone of the expression, such as `Europe/Berlin`."""
    start: TimeOrText | None = None
    """No run before."""
    end: TimeOrText | None = None
    """No run at or after."""
    runs_max: Annotated[int, msgspec.Meta(ge=1, le=(1 << 62))] | None = None
    """No more runs than this."""
    missed: Literal["skip", "once", "all"] = "once"
    """What becomes of runs missed while the broker was down; `once`: one for all of them."""
    overlap: Literal["allow", "skip"] = "allow"
    """`skip`: no run while a leased subscription of the topic has not settled the last one."""
    paused: bool = False


class RunsQuery(msgspec.Struct, forbid_unknown_fields=True):
    """How many runs."""

    runs: Annotated[int, msgspec.Meta(ge=1, le=1000)] = 5


_decoder = msgspec.json.Decoder(ScheduleFields)


async def list_schedules(call: Call) -> Reply:
    """Answer a page of schedules."""
    query = call.query(ScheduleQuery)
    found = await call.ask(ScheduleList(query.topic))
    schedules, following = page(found.schedules, lambda one: one.definition.name, query)
    return json_reply(SchedulePage(schedules, following))


async def describe_schedule(call: Call) -> Reply:
    """Answer one schedule."""
    (name,) = call.parameters
    for one in (await call.ask(ScheduleList())).schedules:
        if one.definition.name == name:
            return json_reply(one)
    raise ScheduleNotFound(f"there is no schedule {name}; GET /v1/schedules lists them")


async def set_schedule(call: Call) -> Reply:
    """Make or replace a schedule."""
    given = await call.decoded(_decoder)
    fields = StoredFields()
    if given.value is msgspec.UNSET and given.value_base64 is None:
        given.value_base64 = b""
    fields.add(MessageEnvelope(value=given.value, value_base64=given.value_base64, headers=given.headers), None)
    columns = fields.columns(0)
    definition = ScheduleDefinition(
        call.parameters[0],
        given.topic,
        given.when,
        columns.values[0] or b"",
        None if given.key is None else given.key.encode(),
        (columns.headers[0] if columns.headers else None) or {},
        given.partition,
        given.zone,
        None if given.start is None else time_us(given.start),
        None if given.end is None else time_us(given.end),
        given.runs_max,
        given.missed,
        given.overlap,
        given.paused,
    )
    return json_reply(await call.ask(ScheduleSet(definition)))


async def list_runs(call: Call) -> Reply:
    """Answer the times of the next runs."""
    query = call.query(RunsQuery)
    return json_reply(await call.ask(ScheduleNext(call.parameters[0], None, query.runs)))


SCHEDULE_ROUTES = [
    Route(
        "GET", "/v1/schedules", list_schedules, "List schedules", SCHEDULES, query=ScheduleQuery, answer=SchedulePage
    ),
    Route(
        "GET", _PATH, describe_schedule, "Describe a schedule", SCHEDULES, answer=ScheduleInfo,
        errors=("schedule_not_found",),
    ),
    Route(
        "PUT", _PATH, set_schedule, "Make a schedule, or replace the one of that name", SCHEDULES,
        body=ScheduleFields, body_required=True, answer=ScheduleInfo,
        errors=("partition_not_found", "topic_not_found"),
        example={"topic": "reports", "when": "0 6 * * *", "zone": "Europe/Berlin", "value": {"report": "daily"}},
    ),
    request_route(
        SchedulePause, "PATCH", _PATH, tag=SCHEDULES, errors=("schedule_not_found",), example={"paused": True}
    ),
    request_route(ScheduleRemove, "DELETE", _PATH, tag=SCHEDULES, errors=("schedule_not_found",)),
    request_route(
        ScheduleRun, "POST", f"{_PATH}/runs", tag=SCHEDULES, status=201,
        errors=("schedule_not_found", "topic_not_found"),
    ),
    Route(
        "GET", f"{_PATH}/runs", list_runs, "Tell when the next runs are", SCHEDULES,
        query=RunsQuery, answer=ScheduleRuns, errors=("schedule_not_found",),
    ),
]  # fmt: skip
"""The routes about schedules."""
