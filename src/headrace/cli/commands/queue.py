"""`headrace queue`: leased subscriptions, whose messages are handed out one by one."""

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

--start takes earliest, latest, an offset, or a time: ISO 8601, UTC unless it
says otherwise, or '5m ago'. Whoever leases from a subscription that is not there
makes it, too, with the defaults.

{_VALUES}
"""

_ALTER = f"""\
examples:
  headrace queue alter jobs --discipline lifo
  headrace queue alter jobs urgent-first --lease-seconds 10m --no-ordered-by-key

{_VALUES}
What is not given stays as it is.
"""

_RESET = """\
examples:
  headrace queue reset jobs
  headrace queue reset jobs default --start earliest

Opens a subscription anew: one that could not be opened, as `headrace queue list`
tells, or one that is to begin elsewhere. All leases are over. What is settled
stays so, and all else is found anew in the log; with --start that is forgotten
too, and the subscription begins as a new one does.
"""

_DELETE = """\
example:
  headrace queue delete jobs urgent-first --yes

Forgets the subscription and what it has settled; no message is deleted from the
topic. Asks first when there is a terminal to ask on; otherwise it needs --yes.
"""

_STATS = """\
examples:
  headrace queue stats jobs
  headrace queue stats jobs urgent-first --json

Tells how many messages wait for their time, are ready, are leased and are dead,
what was done since the broker was started, and how late messages with a due
time were handed over.
"""

_PEEK = f"""\
examples:
  headrace queue peek jobs
  headrace queue peek jobs --status dead -n 100 --json
  headrace queue peek jobs --status waiting --to 'in 1h' --header lang=en

Shows messages that are not settled, without leasing them: partition and offset,
status, time, key, value and headers, with tabs between them. The time is when
the message is ready, until when it is leased, or when it died. Those that wait
come in the order of their time, others in the order of their offsets. Without
--status, all but the dead are shown; with --json, dead ones have headers that
tell all about their death.

{FUTURE}
"""

_DRAIN = """\
examples:
  headrace queue drain jobs
  headrace queue drain jobs --max 100 --json | ./process
  headrace queue drain jobs --quiet

Leases what is ready until nothing is, prints it as `headrace tail` does, and
acknowledges each message once it is handed to stdout. With --quiet nothing is
printed but how many there were. End early with --max or Ctrl-C, not with
`| head`. A topic that was never leased is drained from its first message, and has
the subscription `default` from then on.
"""

_REDRIVE = f"""\
examples:
  headrace queue redrive jobs
  headrace queue redrive jobs --key 17 --max 10
  headrace queue redrive jobs --header lang=en

Puts dead messages back where they died, to be handed out anew. --from and --to
are about when they were published.

{FUTURE}
"""

_PAUSE = """\
example:
  headrace queue pause jobs

Nothing is handed out until `headrace queue resume`; what is leased can be
settled.
"""

_RESUME = """\
example:
  headrace queue resume jobs
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the commands to the parser of `headrace queue`."""
    parser.epilog = "`headrace queue COMMAND --help` tells more, with examples."
    make = command_maker(parser)

    def command(name: str, run: Command, summary: str, epilog: str) -> argparse.ArgumentParser:
        made = make(name, run, summary, epilog)
        add_topic(made)
        add_subscription(made, "subscription")
        return made

    listing = make("list", list_queues, "list leased subscriptions and how much they have to do", _LIST)
    topic = listing.add_argument("topic", metavar="TOPIC", nargs="?", default="", help="only those of this topic")
    completes(topic, "topic")
    listing.add_argument("--names", action="store_true", help="print only the names")
    creating = command("create", create, "make a leased subscription of a topic", _CREATE)
    creating.add_argument("--start", metavar="WHERE", type=start, default="earliest", help="where it begins, see below")
    creating.add_argument("--exist-ok", action="store_true", help="it is no error if it is there already")
    altering = command("alter", alter, "change the settings of a subscription", _ALTER)
    altering.set_defaults(check=_check_alter)
    for each in (creating, altering):
        add_settings(each, SubscriptionSettings, "the subscription")
    resetting = command("reset", reset, "open a subscription anew that could not be opened", _RESET)
    resetting.add_argument("--start", metavar="WHERE", type=start, help="forget all, and begin there")
    add_yes(resetting)
    deleting = command("delete", delete, "forget a subscription", _DELETE)
    add_yes(deleting)
    counting = command("stats", stats, "count what a subscription has to do, and tell how late it was", _STATS)
    peeking = command("peek", peek, "show messages without leasing them", _PEEK)
    peeking.add_argument("-n", "--limit", metavar="N", type=count, default=10, help="how many (default: 10)")
    peeking.add_argument("--status", choices=STATUSES, help="only such messages")
    add_selection(peeking)
    add_draining(command("drain", drain, "lease, print and acknowledge all that is ready", _DRAIN))
    driving = command("redrive", redrive, "put dead messages back", _REDRIVE)
    driving.add_argument("--max", metavar="N", type=count, help="no more than so many")
    add_selection(driving)
    pausing = command("pause", pause, "hand out nothing for a while", _PAUSE)
    resuming = command("resume", resume, "hand out messages again", _RESUME)
    add_watch(listing, counting, peeking)
    for each in (listing, creating, altering, resetting, deleting, counting, peeking, driving, pausing, resuming):
        add_connection(each)


def _check_alter(given: argparse.Namespace) -> str | None:
    """What is wrong with the arguments together."""
    return None if given_settings(given) else "give at least one setting to change"


def list_queues(given: argparse.Namespace, out: Output, _: Interrupts) -> int:
    """Print subscriptions, one a line."""
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
        bus.describe_topic(given.topic)  # or a slip of the pen might make a topic
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
    """Open a subscription anew, if the user is sure."""
    with connected(given, out) as bus:
        info = bus.describe_subscription(given.topic, given.subscription)
        lost = "all it knows" if given.start is not None else "all leases"
        if not confirmed(given, f"Open {_name(info)} anew and forget {lost}?"):
            out.note("nothing was reset")
            return EXIT_ERROR
        info = bus.reset_subscription(given.topic, given.subscription, start=given.start)
    out.tell(whole(info), f"{_name(info)} was reset: {counted(sum(_counts(info)[:3]), 'message')} to hand out")
    return 0


def delete(given: argparse.Namespace, out: Output, _: Interrupts) -> int:
    """Forget a subscription, if the user is sure."""
    with connected(given, out) as bus:
        info = bus.describe_subscription(given.topic, given.subscription)
        open_ones = counted(sum(_counts(info)[:3]), "message")
        if not confirmed(given, f"Forget {_name(info)}, which has {open_ones} to hand out or in hand?"):
            out.note("nothing was deleted")
            return EXIT_ERROR
        bus.delete_subscription(given.topic, given.subscription)
    content = {"deleted": info.subscription, "topic": info.topic}
    out.tell(content, f"deleted {_name(info)}")
    return 0


def stats(given: argparse.Namespace, out: Output, _: Interrupts) -> int:
    """Print how much a subscription has to do, and how it has done so far."""
    with connected(given, out) as bus:
        info = bus.describe_subscription(given.topic, given.subscription)
        now_us = bus.clock.now_us()
    out.tell(whole(info), *_statistics(info, now_us))
    return 0


def peek(given: argparse.Namespace, out: Output, _: Interrupts) -> int:
    """Print messages that are not settled."""
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
    """Put dead messages back where they died."""
    chosen = selection(given)
    with connected(given, out) as bus:
        queue = bus.queue(given.topic, given.subscription)
        messages = queue.redrive(**chosen, **({} if given.max is None else {"limit": given.max}))
    content = {"topic": given.topic, "subscription": given.subscription, "redriven": messages}
    out.tell(content, f"put back {counted(messages, 'dead message')}")
    return 0


def pause(given: argparse.Namespace, out: Output, _: Interrupts) -> int:
    """Let a subscription hand out nothing."""
    return _set_paused(given, out, True)


def resume(given: argparse.Namespace, out: Output, _: Interrupts) -> int:
    """Let a subscription hand out messages again."""
    return _set_paused(given, out, False)


def _set_paused(given: argparse.Namespace, out: Output, paused: bool) -> int:
    with connected(given, out) as bus:
        info = bus.alter_subscription(given.topic, given.subscription, paused=paused)
    out.tell(whole(info), f"{_name(info)} {'is paused' if paused else 'hands out messages'}")
    return 0


def whole(words: WireStruct) -> dict[str, Any]:
    """An answer for programs; nothing is left out for being empty."""
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
    # What is dead wants to be looked at, if there is any.
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
        yield "how late messages with a due time were handed over:"
        yield from bars(_timing_rows(info.timing))


def _timing_rows(timing: Timing) -> list[tuple[str, int]]:
    """Labels and numbers, from the first that counts to the last."""
    bounds = [f"up to {span_text(bound_us)}" for bound_us in timing.bounds_us]
    labels = [*bounds, f"over {span_text(timing.bounds_us[-1])}" if bounds else "at all"]
    rows = list(zip(labels, timing.counts, strict=False))
    counting = [place for place, (_, number) in enumerate(rows) if number]
    rows = rows[counting[0] : counting[-1] + 1] if counting else []
    return ([("too early", timing.early)] if timing.early else []) + rows
