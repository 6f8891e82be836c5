"""`headrace events`: prints what happens to the bus itself."""

import argparse
import json
from typing import TYPE_CHECKING

import msgspec

from headrace.cli.arguments import more_than_zero
from headrace.cli.connection import add_connection, connected
from headrace.cli.message_formats import time_text
from headrace.cli.terminal.interrupts import Interrupts
from headrace.cli.terminal.output import Output
from headrace.model.bus_event import EVENT_KINDS, BusEvent
from headrace.model.system_topics import EVENTS_TOPIC

if TYPE_CHECKING:
    from headrace.client._sync.bus import Bus

_LOOK_EVERY_S = 0.25
"""How often a waiting command checks for signals and for a closed output, in seconds."""
_DETAILS_CHARS = 120

_EPILOG = """\
examples:
  headrace events
  headrace events --follow
  headrace events --kind dead_letter --json
  headrace events -n 5

Prints time, kind and action, name, the client that asked for it ("-" if the broker
did it by itself) and details, separated by tabs: topics, subscriptions, groups,
schedules, routes and services that were created, changed and removed, members that
joined, left and expired, and dead letters.

The broker records events in the topic headrace.events once this command has asked
for them, beginning with the newest 1000 that it has in memory; with the setting
record_events from its start.

With --follow the command goes on with new events; it ends with Ctrl-C, SIGTERM, and
when its output is closed.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments to the parser of `headrace events`."""
    parser.epilog = _EPILOG
    add = parser.add_argument
    add("--follow", action="store_true", help="go on with new events")
    add("--kind", choices=EVENT_KINDS, metavar="KIND", help="only events of this kind, such as topic or service")
    add("-n", "--limit", metavar="N", type=more_than_zero(int), default=1000, help="newest events to print (1000)")
    add_connection(parser)
    parser.set_defaults(run=show)


def show(given: argparse.Namespace, out: Output, interrupts: Interrupts) -> int:
    """Print recorded events, and new ones if the user says so."""
    with connected(given, out) as bus:
        if given.follow:
            _follow(bus, given, out, interrupts)
        else:
            for event in bus.events.history(given.limit):
                _print(event, given, out)
    return 0


def _follow(bus: "Bus", given: argparse.Namespace, out: Output, interrupts: Interrupts) -> None:
    bus.events.record()
    first, end = (bus.offsets(EVENTS_TOPIC, at=at)[0] for at in ("earliest", "latest"))
    start = max(first, end - given.limit)
    with interrupts.held(once=True), bus.events.follow(start, timeout=_LOOK_EVERY_S) as events:
        while not out.closed:
            for message in events:
                _print(message.value, given, out)
                interrupts.check()
            interrupts.check()


def _print(event: BusEvent, given: argparse.Namespace, out: Output) -> None:
    if given.kind not in (None, event.kind):
        return
    details = json.dumps(event.details, ensure_ascii=False, separators=(",", ":"), default=str)
    if len(details) > _DETAILS_CHARS:
        details = f"{details[:_DETAILS_CHARS]}..."
    columns = (time_text(event.time_us), f"{event.kind}.{event.action}", event.name, event.by or "-", details)
    out.tell({"subject": event.subject, **msgspec.to_builtins(event)}, "\t".join(columns))
