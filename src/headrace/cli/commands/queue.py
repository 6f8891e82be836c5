"""`headrace queue`: manage leased subscriptions (work queues)."""

import argparse
from collections.abc import Iterator
from typing import Any

import msgspec

from headrace.cli.arguments import Command, command_maker, completes, count, start
from headrace.cli.connection import add_connection, add_yes, confirmed, connected
from headrace.cli.message_formats import time_text
from headrace.cli.pending_messages import (
    FUTURE,
    STATUSES,
    add_selection,
    add_subscription,
    add_topic,
    found,
    pending_json,
    pending_text,
    selection,
)
from headrace.cli.queue_drain import add_draining, drain
from headrace.cli.setting_options import add_settings, given_settings, setting_text
from headrace.cli.terminal.colours import paint, paint_state
from headrace.cli.terminal.histogram import bars, span_text
from headrace.cli.terminal.interrupts import Interrupts
from headrace.cli.terminal.output import EXIT_ERROR, Output, counted, table
from headrace.cli.terminal.watch import add_watch
from headrace.model.leasing import SubscriptionInfo, Timing
from headrace.model.names import derived_topic
from headrace.model.request import WireStruct
from headrace.model.subscription import DEAD_SUFFIX, SubscriptionSettings

_DONE = ("delivered", "acked", "released", "expired_leases", "dropped")

_VALUES = """\
TIME is a number of seconds, or one with a unit: 250ms, 30s, 15m, 12h, 7d. All
settings can be changed while the subscription is in use."""

_LIST = """\
examples:
  headrace queue list
  headrace queue list jobs --json
"""

_CREATE = f"""\
examples:
  headrace queue create jobs
  headrace queue create jobs urgent-first --discipline priority --lease-seconds 5m
  headrace queue create jobs --deliveries-max 5 --retry linear --retry-seconds 10s
  headrace queue create jobs from-now-on --start latest

--start takes earliest, latest, an offset, or a time: ISO 8601 (UTC if it names no
zone), or '5m ago'. Leasing from a subscription that does not exist also creates
it, with the defaults.

{_VALUES}
"""

_ALTER = f"""\
examples:
  headrace queue alter jobs --discipline lifo
  headrace queue alter jobs urgent-first --lease-seconds 10m --no-ordered-by-key

{_VALUES}
Settings that are not given do not change.
"""

_RESET = """\
examples:
  headrace queue reset jobs
  headrace queue reset jobs default --start earliest

Rebuilds a subscription from the log: one that could not be opened, as `headrace
queue list` shows, or one that is to begin elsewhere. All leases end. Settled
messages stay settled; with --start that is discarded too, and the subscription
begins at that position like a new one.
"""

_DELETE = """\
example:
  headrace queue delete jobs urgent-first --yes

Deletes the subscription and its record of settled messages, but no messages of the
topic. Asks for confirmation on a terminal; otherwise it needs --yes.
"""

_STATS = """\
examples:
  headrace queue stats jobs
  headrace queue stats jobs urgent-first --json

Prints how many messages are waiting, ready, leased and dead, what was done since
the broker was started, and how late messages with a due time were delivered.
"""

_PEEK = f"""\
examples:
  headrace queue peek jobs
  headrace queue peek jobs --status dead -n 100 --json
  headrace queue peek jobs --status waiting --to 'in 1h' --header lang=en

Prints unsettled messages without leasing them: partition and offset, status, time,
key, value and headers, separated by tabs. The time is when the message becomes
ready, when its lease expires, or when it became a dead letter. Waiting messages are
in the order of their time, others in the order of their offsets. Without --status,
all but dead messages are printed; with --json, the headers of dead messages tell
why and when they became dead letters.

{FUTURE}
"""

_DRAIN = """\
examples:
  headrace queue drain jobs
  headrace queue drain jobs --max 100 --json | ./process
  headrace queue drain jobs --quiet

Leases all ready messages, prints them as `headrace tail` does, and acknowledges
each message after it is written to stdout. With --quiet it prints only their
number. End early with --max or Ctrl-C, not with `| head`. A topic without a leased
subscription is drained from its first message, by the new subscription `default`.
"""

_REDRIVE = f"""\
examples:
  headrace queue redrive jobs
  headrace queue redrive jobs --key 17 --max 10
  headrace queue redrive jobs --header lang=en

Makes dead messages of the subscription ready again. --from and --to select them by
the time at which they were published.

{FUTURE}
"""

_PAUSE = """\
example:
  headrace queue pause jobs

The broker delivers no messages until `headrace queue resume`; leased messages can
be settled.
"""

_RESUME = """\
example:
  headrace queue resume jobs
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the commands to the parser of `headrace queue`."""
    parser.epilog = "`headrace queue COMMAND --help` explains a command, with examples."
    make = command_maker(parser)

    def command(name: str, run: Command, summary: str, epilog: str) -> argparse.ArgumentParser:
        made = make(name, run, summary, epilog)
        add_topic(made)
        add_subscription(made, "subscription")
        return made

    listing = make("list", list_queues, "list leased subscriptions and their message counts", _LIST)
    topic = listing.add_argument(
        "topic", metavar="TOPIC", nargs="?", default="", help="only subscriptions of this topic"
    )
    completes(topic, "topic")
    listing.add_argument("--names", action="store_true", help="print only the names")
    creating = command("create", create, "create a leased subscription of a topic", _CREATE)
    creating.add_argument(
        "--start", metavar="WHERE", type=start, default="earliest", help="the first message, see below"
    )
    creating.add_argument("--exist-ok", action="store_true", help="succeed if the subscription already exists")
    altering = command("alter", alter, "change the settings of a subscription", _ALTER)
    altering.set_defaults(check=_check_alter)
    for each in (creating, altering):
        add_settings(each, SubscriptionSettings, "the subscription")
    resetting = command("reset", reset, "rebuild a subscription from the log", _RESET)
    resetting.add_argument("--start", metavar="WHERE", type=start, help="discard all state, and begin there")
    add_yes(resetting)
    deleting = command("delete", delete, "forget a subscription", _DELETE)
    add_yes(deleting)
    counting = command("stats", stats, "print message counts and delivery delays of a subscription", _STATS)
    peeking = command("peek", peek, "print messages without leasing them", _PEEK)
    peeking.add_argument("-n", "--limit", metavar="N", type=count, default=10, help="how many (default: 10)")
    peeking.add_argument("--status", choices=STATUSES, help="only such messages")
    add_selection(peeking)
    add_draining(command("drain", drain, "lease, print and acknowledge all ready messages", _DRAIN))
    driving = command("redrive", redrive, "make dead messages ready again", _REDRIVE)
    driving.add_argument("--max", metavar="N", type=count, help="the maximum number of messages")
    add_selection(driving)
    pausing = command("pause", pause, "stop deliveries", _PAUSE)
    resuming = command("resume", resume, "resume deliveries", _RESUME)
    add_watch(listing, counting, peeking)
    for each in (listing, creating, altering, resetting, deleting, counting, peeking, driving, pausing, resuming):
        add_connection(each)


def _check_alter(given: argparse.Namespace) -> str | None:
    """Return why the arguments are incomplete, if they are."""
    return None if given_settings(given) else "give at least one setting to change"


def list_queues(given: argparse.Namespace, out: Output, _: Interrupts) -> int:
    """Print subscriptions, one per line."""
    with connected(given, out) as bus:
        infos = sorted(bus.subscriptions(given.topic or None), key=lambda each: (each.topic, each.subscription))
    if out.json:
        for info in infos:
            out.tell(whole(info))
        return 0
    if given.names:
        out.tell({}, *dict.fromkeys(info.subscription for info in infos))
        return 0
    if not infos:
        out.note("there are no leased subscriptions" + (f" of {given.topic}" if given.topic else ""))
        return 0
    columns = ("topic", "subscription", "discipline", *STATUSES)
    out.tell(
        {}, *table(columns, *((info.topic, info.subscription, _discipline(info), *_counts(info)) for info in infos))
    )
    for info in infos:
        if info.error:
            out.note(f"{_name(info)} could not be opened: {info.error}")
    return 0


def create(given: argparse.Namespace, out: Output, _: Interrupts) -> int:
    """Make a subscription."""
    with connected(given, out) as bus:
        bus.describe_topic(given.topic)  # otherwise a misspelt name could create a topic
        info = bus.create_subscription(
            given.topic, given.subscription, exist_ok=given.exist_ok, start=given.start, **given_settings(given)
        )
    out.tell(whole(info), f"{_name(info)}: {_discipline(info)}, {counted(sum(_counts(info)[:3]), 'message')}")
    return 0


def alter(given: argparse.Namespace, out: Output, _: Interrupts) -> int:
    """Change settings of a subscription."""
    changes = given_settings(given)
    with connected(given, out) as bus:
        info = bus.alter_subscription(given.topic, given.subscription, **changes)
    now = ", ".join(f"{name} {setting_text(name, info.settings[name])}" for name in changes)
    out.tell(whole(info), f"{_name(info)}: {now}")
    return 0


def reset(given: argparse.Namespace, out: Output, _: Interrupts) -> int:
    """Rebuild a subscription, if the user confirms."""
    with connected(given, out) as bus:
        info = bus.describe_subscription(given.topic, given.subscription)
        lost = "all it knows" if given.start is not None else "all leases"
        if not confirmed(given, f"Rebuild {_name(info)} and discard {lost}?"):
            out.note("nothing was reset")
            return EXIT_ERROR
        info = bus.reset_subscription(given.topic, given.subscription, start=given.start)
    out.tell(whole(info), f"{_name(info)} was reset: {counted(sum(_counts(info)[:3]), 'message')} to deliver")
    return 0


def delete(given: argparse.Namespace, out: Output, _: Interrupts) -> int:
    """Delete a subscription, if the user confirms."""
    with connected(given, out) as bus:
        info = bus.describe_subscription(given.topic, given.subscription)
        open_ones = counted(sum(_counts(info)[:3]), "message")
        if not confirmed(given, f"Delete {_name(info)}, which has {open_ones} to deliver or leased?"):
            out.note("nothing was deleted")
            return EXIT_ERROR
        bus.delete_subscription(given.topic, given.subscription)
    content = {"deleted": info.subscription, "topic": info.topic}
    out.tell(content, f"deleted {_name(info)}")
    return 0


def stats(given: argparse.Namespace, out: Output, _: Interrupts) -> int:
    """Print message counts, totals and delivery delays of a subscription."""
    with connected(given, out) as bus:
        info = bus.describe_subscription(given.topic, given.subscription)
        now_us = bus.clock.now_us()
    out.tell(whole(info), *_statistics(info, now_us))
    return 0


def peek(given: argparse.Namespace, out: Output, _: Interrupts) -> int:
    """Print unsettled messages."""
    form = pending_json if out.json else pending_text
    with connected(given, out) as bus:
        queue = bus.queue(given.topic, given.subscription)
        for message in found(queue, given.limit, **selection(given, status=given.status)):
            out.add(form(message))
            if out.full:
                out.flush()
    out.flush()
    return 0


def redrive(given: argparse.Namespace, out: Output, _: Interrupts) -> int:
    """Make dead messages ready again."""
    chosen = selection(given)
    with connected(given, out) as bus:
        queue = bus.queue(given.topic, given.subscription)
        messages = queue.redrive(**chosen, **({} if given.max is None else {"limit": given.max}))
    content = {"topic": given.topic, "subscription": given.subscription, "redriven": messages}
    out.tell(content, f"put back {counted(messages, 'dead message')}")
    return 0


def pause(given: argparse.Namespace, out: Output, _: Interrupts) -> int:
    """Stop the deliveries of a subscription."""
    return _set_paused(given, out, True)


def resume(given: argparse.Namespace, out: Output, _: Interrupts) -> int:
    """Resume the deliveries of a subscription."""
    return _set_paused(given, out, False)


def _set_paused(given: argparse.Namespace, out: Output, paused: bool) -> int:
    with connected(given, out) as bus:
        info = bus.alter_subscription(given.topic, given.subscription, paused=paused)
    out.tell(whole(info), f"{_name(info)} {'is paused' if paused else 'delivers messages'}")
    return 0


def whole(words: WireStruct) -> dict[str, Any]:
    """Return an answer for JSON output, empty fields included."""
    return {
        name: whole(it) if isinstance(it := getattr(words, name), WireStruct) else msgspec.to_builtins(it)
        for name in words.__struct_fields__
    }


def _name(info: SubscriptionInfo) -> str:
    return f"subscription {info.subscription} of {info.topic}"


def _discipline(info: SubscriptionInfo) -> str:
    return f"{info.settings['discipline']}{', ' + paint('paused', 'warning') if info.settings['paused'] else ''}"


def _counts(info: SubscriptionInfo) -> list[int]:
    return [getattr(info, status) for status in STATUSES]


def _statistics(info: SubscriptionInfo, now_us: int) -> Iterator[str]:
    ready, following = info.ready_since_us, info.next_ready_us
    remarks = {
        "waiting": following and f"the next in {span_text(max(following - now_us, 0))}, at {time_text(following)}",
        "ready": ready and f"the oldest is {span_text(max(now_us - ready, 0))} old, of {time_text(ready)}",
        "leased": "",
        "dead": info.dead and f"in {info.settings.get('dead_letter_topic') or derived_topic(info.topic, DEAD_SUFFIX)}",
    }
    yield f"topic         {info.topic}"
    yield f"subscription  {info.subscription}"
    yield f"discipline    {_discipline(info)}"
    if info.error:
        yield f"not opened    {info.error}"
    yield ""
    # Dead messages need attention, if there are any.
    rows = [
        (paint_state(status) if status == "dead" and number else status, number, remarks[status] or "")
        for status, number in zip(STATUSES, _counts(info), strict=True)
    ]
    yield from table(("status", "messages", ""), *rows)
    yield ""
    done = [(name.replace("_", " "), getattr(info, name)) for name in _DONE]
    yield from table(("since the broker was started", "messages"), *done)
    if any(info.timing.counts) or info.timing.early:
        yield ""
        yield "delay of messages with a due time:"
        yield from bars(_timing_rows(info.timing))


def _timing_rows(timing: Timing) -> list[tuple[str, int]]:
    """Return labels and numbers, from the first non-zero number to the last."""
    bounds = [f"up to {span_text(bound_us)}" for bound_us in timing.bounds_us]
    labels = [*bounds, f"over {span_text(timing.bounds_us[-1])}" if bounds else "at all"]
    rows = list(zip(labels, timing.counts, strict=False))
    counting = [place for place, (_, number) in enumerate(rows) if number]
    rows = rows[counting[0] : counting[-1] + 1] if counting else []
    return ([("too early", timing.early)] if timing.early else []) + rows
