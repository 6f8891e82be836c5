"""`headrace cron`: manage schedules, which publish messages repeatedly."""

import argparse
import base64
import os
from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from headrace.cli.arguments import Command, command_maker, completes, header, more_than_zero, relative_moment
from headrace.cli.connection import add_connection, connected
from headrace.cli.message_formats import header_shown, json_headers, printable, time_text
from headrace.cli.pending_messages import FUTURE, add_topic, given_key
from headrace.cli.terminal.colours import paint_state
from headrace.cli.terminal.interrupts import Interrupts
from headrace.cli.terminal.output import Output, table
from headrace.cli.terminal.watch import add_watch
from headrace.model.errors import ScheduleNotFound
from headrace.model.headers import header_pairs
from headrace.model.schedule_requests import ScheduleInfo

if TYPE_CHECKING:
    from headrace.client._sync.bus import Bus

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)

_WHEN = """\
WHEN is a crontab expression, in quotes: minute, hour, day of the month, month
and day of the week, with seconds before them if there are six fields; or a
nickname such as @hourly or @daily; or an interval such as 'every 90s' or
'every 1h30m'. It applies in the time zone --zone."""

_ADD = f"""\
examples:
  headrace cron add report reports '0 9 * * mon-fri' "daily report" --zone Europe/Berlin
  headrace cron add beat heartbeats 'every 30s'
  headrace cron add sweep jobs @hourly sweep --missed skip --overlap skip

{_WHEN}

The broker publishes the message at each of these times, with the headers
headrace-cron (the name) and headrace-run (the time, in microseconds since 1970).
--missed sets how the broker makes up for runs missed while it was down: not at all
(skip), with one run for all of them (once), or with all of them (all). With
--overlap skip it leaves out a run while a leased subscription of the topic has not
settled the message of the last one.

{FUTURE}
"""

_LIST = """\
examples:
  headrace cron list
  headrace cron list --topic reports --json
"""

_SHOW = """\
example:
  headrace cron show report
"""

_PAUSE = """\
example:
  headrace cron pause report

Runs during the pause are left out.
"""

_RESUME = """\
example:
  headrace cron resume report
"""

_RUN = """\
example:
  headrace cron run report

Publishes the message now, in addition to the regular runs.
"""

_NEXT = f"""\
examples:
  headrace cron next report
  headrace cron next report -n 20 --json
  headrace cron next --when '30 2 * * *' --zone Europe/Berlin

Prints the times of the next runs of a schedule, or of WHEN without creating a
schedule: in UTC, and in its time zone if that differs.

{_WHEN}
"""

_REMOVE = """\
example:
  headrace cron remove report

Messages that it has published stay in the topic.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the commands to the parser of `headrace cron`."""
    parser.epilog = "`headrace cron COMMAND --help` explains a command, with examples."
    make = command_maker(parser)

    def command(name: str, run: Command, summary: str, epilog: str) -> argparse.ArgumentParser:
        made = make(name, run, summary, epilog)
        completes(made.add_argument("name", metavar="NAME", help="the schedule's name"), "cron")
        return made

    adding = make("add", add, "publish a message by a schedule", _ADD)
    _add_schedule(adding)
    listing = make("list", list_crons, "list schedules and their next runs", _LIST)
    completes(listing.add_argument("--topic", help="only schedules that publish to this topic"), "topic")
    listing.add_argument("--names", action="store_true", help="print only the names")
    showing = command("show", show, "describe a schedule", _SHOW)
    pausing = command("pause", pause, "pause a schedule", _PAUSE)
    resuming = command("resume", resume, "resume a paused schedule", _RESUME)
    running = command("run", run_now, "publish a schedule's message now", _RUN)
    coming = make("next", show_next, "print the times of the next runs", _NEXT)
    _add_next(coming)
    removing = command("remove", remove, "end a schedule", _REMOVE)
    add_watch(listing, showing, coming)
    for each in (adding, listing, showing, pausing, resuming, running, coming, removing):
        add_connection(each)


def _add_schedule(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("name", metavar="NAME", help="the name of the schedule")
    add_topic(parser)
    add("when", metavar="WHEN", help="when to publish, see below")
    add("value", metavar="VALUE", nargs="?", default="", help="the message (default: an empty one)")
    add("--zone", default="UTC", help="the time zone of WHEN, such as Europe/Berlin (default: UTC)")
    add("--start", metavar="TIME", type=relative_moment, help="no run before")
    add("--end", metavar="TIME", type=relative_moment, help="end before this time")
    add("--runs-max", metavar="N", type=more_than_zero(int), help="end after this many runs")
    add(
        "--missed",
        choices=("skip", "once", "all"),
        default="once",
        help="policy for runs missed while the broker was down",
    )
    add(
        "--overlap",
        choices=("allow", "skip"),
        default="allow",
        help="policy for a run while the last one is not settled",
    )
    add("-k", "--key", help="the message's key")
    text = "a header of the message; may be repeated"
    add("--header", dest="headers", metavar="NAME=VALUE", action="append", type=header, help=text)
    add("--replace", action="store_true", help="replace the schedule with this name, if there is one")


def _add_next(parser: argparse.ArgumentParser) -> None:
    name = parser.add_argument("name", metavar="NAME", nargs="?", help="the schedule's name")
    completes(name, "cron")
    parser.add_argument("-n", "--runs", metavar="N", type=more_than_zero(int), default=5, help="how many (default: 5)")
    parser.add_argument("--when", metavar="WHEN", help="use this expression instead of an existing schedule")
    parser.add_argument("--zone", help="the time zone of --when (default: UTC)")
    parser.set_defaults(check=_check_next)


def _check_next(given: argparse.Namespace) -> str | None:
    """Return why the arguments contradict each other, if they do."""
    if (given.name is None) == (given.when is None):
        return "give a NAME or --when"
    return "--zone needs --when" if given.name is not None and given.zone is not None else None


def add(given: argparse.Namespace, out: Output, _: Interrupts) -> int:
    """Make a schedule."""
    with connected(given, out) as bus:
        info = bus.cron_add(
            given.name,
            given.topic,
            given.when,
            os.fsencode(given.value),
            zone=given.zone,
            key=given_key(given),
            headers=given.headers,
            start=given.start,
            end=given.end,
            runs_max=given.runs_max,
            missed=given.missed,
            overlap=given.overlap,
            replace=given.replace,
        )
    _tell(info, out)
    return 0


def list_crons(given: argparse.Namespace, out: Output, _: Interrupts) -> int:
    """Print schedules, one per line."""
    with connected(given, out) as bus:
        infos = sorted(bus.crons(given.topic), key=lambda info: info.definition.name)
    if out.json:
        for info in infos:
            out.tell(cron_content(info))
        return 0
    if given.names:
        out.tell({}, *(info.definition.name for info in infos))
        return 0
    if not infos:
        out.note("there are no schedules" + (f" for {given.topic}" if given.topic else ""))
        return 0
    out.tell({}, *table(("name", "topic", "when", "zone", "next run", "runs"), *map(_row, infos)))
    for info in infos:
        if info.error:
            out.note(f"schedule {info.definition.name} cannot run; add it again with --replace: {info.error}")
    return 0


def show(given: argparse.Namespace, out: Output, _: Interrupts) -> int:
    """Describe a schedule."""
    with connected(given, out) as bus:
        info = _named(bus, given.name)
    out.tell(cron_content(info), *_description(info))
    return 0


def pause(given: argparse.Namespace, out: Output, _: Interrupts) -> int:
    """Pause a schedule."""
    with connected(given, out) as bus:
        info = bus.cron_pause(given.name, True)
    _tell(info, out)
    return 0


def resume(given: argparse.Namespace, out: Output, _: Interrupts) -> int:
    """Resume a schedule."""
    with connected(given, out) as bus:
        info = bus.cron_pause(given.name, False)
    _tell(info, out)
    return 0


def run_now(given: argparse.Namespace, out: Output, _: Interrupts) -> int:
    """Publish the message of a schedule now."""
    with connected(given, out) as bus:
        info = bus.cron_run(given.name)
    out.tell(cron_content(info), f"published to {info.definition.topic}; {_runs(info)}")
    return 0


def show_next(given: argparse.Namespace, out: Output, _: Interrupts) -> int:
    """Print the times of the next runs."""
    with connected(given, out) as bus:
        zone = _named(bus, given.name).definition.zone if given.name is not None else given.zone or "UTC"
        if given.name is not None:
            times = bus.cron_next(given.name, runs=given.runs)
        else:
            times = bus.cron_next(when=given.when, zone=zone, runs=given.runs)
    for time in times:
        time_us = (time - _EPOCH) // _MICROSECOND
        there = _there(time, zone)
        columns = [time_text(time_us)] if zone == "UTC" else [time_text(time_us), there]
        out.tell({"time_us": time_us, "zone": zone, "local": there}, "\t".join(columns))
    if not times:
        out.note("there will be no run")
    return 0


def remove(given: argparse.Namespace, out: Output, _: Interrupts) -> int:
    """End a schedule."""
    with connected(given, out) as bus:
        bus.cron_remove(given.name)
    out.tell({"removed": given.name}, f"removed {given.name}")
    return 0


_BECAME = ("created_us", "next_us", "last_us", "runs", "skipped")


def cron_content(info: ScheduleInfo) -> dict[str, Any]:
    """Return a schedule for JSON output: its definition and its state, empty fields included."""
    given = info.definition
    content: dict[str, Any] = {name: getattr(given, name) for name in ("name", "topic", "when", "zone")}
    content |= _plain("key", given.key) | _plain("value", given.value)
    content |= json_headers(given.headers).given()
    limits = ("partition", "start_us", "end_us", "runs_max", "missed", "overlap", "paused")
    content |= {name: getattr(given, name) for name in limits}
    return content | {name: getattr(info, name) for name in (*_BECAME, "error")}


def _plain(field: str, content: bytes | None) -> dict[str, str | None]:
    """Return bytes as a JSON field, whose name ends in _base64 if they are not UTF-8."""
    if content is None:
        return {field: None}
    try:
        return {field: content.decode()}
    except UnicodeDecodeError:
        return {f"{field}_base64": base64.b64encode(content).decode()}


def _named(bus: "Bus", name: str) -> ScheduleInfo:
    for info in bus.crons():
        if info.definition.name == name:
            return info
    raise ScheduleNotFound(f"there is no schedule {name}")


def _tell(info: ScheduleInfo, out: Output) -> None:
    out.tell(cron_content(info), f"{info.definition.name}: {_runs(info)}")


def _runs(info: ScheduleInfo) -> str:
    """Format the time of the next run."""
    if info.definition.paused:
        return "paused"
    return f"the next run is at {time_text(info.next_us)}" if info.next_us else "there will be no more runs"


def _row(info: ScheduleInfo) -> tuple[object, ...]:
    given = info.definition
    following = paint_state("paused") if given.paused else time_text(info.next_us) if info.next_us else "-"
    return given.name, given.topic, given.when, given.zone, following, info.runs


def _description(info: ScheduleInfo) -> Iterator[str]:
    given = info.definition
    following = paint_state("paused") if given.paused else time_text(info.next_us) if info.next_us else "none"
    rows: dict[str, str | None] = {
        "name": given.name,
        "topic": given.topic,
        "when": given.when,
        "zone": given.zone,
        "start": None if given.start_us is None else time_text(given.start_us),
        "end": None if given.end_us is None else time_text(given.end_us),
        "runs max": None if given.runs_max is None else f"{given.runs_max:,}",
        "missed": given.missed,
        "overlap": given.overlap,
        "created": time_text(info.created_us),
        "next run": following,
        "last run": time_text(info.last_us) if info.last_us else "none",
        "runs": f"{info.runs:,}",
        "error": info.error or None,
        "skipped": f"{info.skipped:,}",
        "key": None if given.key is None else printable(given.key),
        "value": printable(given.value),
    }
    yield from (f"{name:8}  {text}".rstrip() for name, text in rows.items() if text is not None)
    yield from (f"header    {header_shown(pair)}" for pair in header_pairs(given.headers))


def _there(time: datetime, zone: str) -> str:
    """Format a time in a zone; in UTC if this machine does not know the zone."""
    with suppress(ZoneInfoNotFoundError, ValueError, OSError):
        time = time.astimezone(ZoneInfo(zone))
    return time.isoformat()
