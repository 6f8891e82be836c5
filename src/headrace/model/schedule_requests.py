"""What can be asked about schedules (cron entries), and what is answered. See requests.py."""

import msgspec

from headrace.model.headers import Headers
from headrace.model.kinds import Kind
from headrace.model.request import Answer, Permission, Request, Resource, Verb, WireStruct, declare
from headrace.model.requests import Done

CRON_HEADER = "headrace-cron"
"""The header with the name of the schedule that a message is from."""
RUN_HEADER = "headrace-run"
"""The header with the time for which it was published, in microseconds since 1970."""


class ScheduleDefinition(WireStruct):
    """Publish a message again and again."""

    tenant_fields = ("name", "topic")

    name: str
    topic: str
    when: str
    """A crontab expression of five or six fields (seconds first), a nickname such as `@daily`, or `every 90s`."""
    value: bytes = b""
    key: bytes | None = None
    headers: Headers = {}
    partition: int | None = None
    """By default by key, or the first."""
    zone: str = "UTC"
    """The time zone of the expression, such as `Europe/Berlin`."""
    start_us: int | None = None
    """No run before."""
    end_us: int | None = None
    """No run at or after."""
    runs_max: int | None = None
    """No more runs than this."""
    missed: str = "once"
    """What becomes of runs missed while the broker was down: `skip`, `once` (one for all of them) or `all`."""
    overlap: str = "allow"
    """`allow`, or `skip`: no run while a leased subscription of the topic has not settled the last one."""
    paused: bool = False


class ScheduleInfo(Answer):
    """A schedule as it is now; the answer to ScheduleSet, SchedulePause and ScheduleRun."""

    definition: ScheduleDefinition
    created_us: int
    next_us: int = 0
    """When the next run is; 0 when there is none."""
    last_us: int = 0
    """For which time the last run was; 0 before the first."""
    runs: int = 0
    skipped: int = 0
    """Runs left out because of `missed` or `overlap`, since the broker was started."""
    error: str = ""
    """Why it cannot run until it is set again; empty when it is at work."""


@declare(
    Kind.SCHEDULE_SET,
    Permission(Verb.SCHEDULE, Resource.SCHEDULE, "definition.name"),
    Permission(Verb.PUBLISH, Resource.TOPIC, "definition.topic"),
    while_draining=False,
)
class ScheduleSet(Request[ScheduleInfo]):
    """Make a schedule, or replace the one of that name."""

    definition: ScheduleDefinition
    replace: bool = True


class Schedules(Answer):
    """The answer to ScheduleList."""

    schedules: list[ScheduleInfo]


@declare(Kind.SCHEDULE_LIST, Permission(Verb.DESCRIBE, Resource.SCHEDULE))
class ScheduleList(Request[Schedules]):
    """Which schedules are there?"""

    tenant_fields = ("topic",)

    topic: str = ""
    """For this topic; empty: all of the session's tenant."""


@declare(Kind.SCHEDULE_REMOVE, Permission(Verb.SCHEDULE, Resource.SCHEDULE, "name"))
class ScheduleRemove(Request[Done]):
    """Forget a schedule; messages it published stay."""

    name: str


@declare(Kind.SCHEDULE_PAUSE, Permission(Verb.SCHEDULE, Resource.SCHEDULE, "name"))
class SchedulePause(Request[ScheduleInfo]):
    """Let a schedule rest, or go on. Runs that fall into the pause are left out."""

    name: str
    paused: bool = True


@declare(Kind.SCHEDULE_RUN, Permission(Verb.SCHEDULE, Resource.SCHEDULE, "name"), while_draining=False)
class ScheduleRun(Request[ScheduleInfo]):
    """Publish its message now, besides its regular runs."""

    name: str


class ScheduleRuns(Answer):
    """The answer to ScheduleNext."""

    times_us: list[int] = msgspec.field(default_factory=list)


@declare(Kind.SCHEDULE_NEXT, Permission(Verb.DESCRIBE, Resource.SCHEDULE, "name"))
class ScheduleNext(Request[ScheduleRuns]):
    """When are the next runs? Of a schedule there is, or of one that is only tried out."""

    name: str = ""
    definition: ScheduleDefinition | None = None
    runs: int = 5
    from_us: int | None = None
    """After this time; by default now."""
