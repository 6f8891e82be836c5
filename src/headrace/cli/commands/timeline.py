"""`headrace timeline`: list, add, change and cancel messages that are due in the future."""

import argparse
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

from headrace.cli.arguments import command_maker, count, duration, header, more_than_zero, relative_moment
from headrace.cli.connection import add_connection, connected
from headrace.cli.message_formats import header_shown, printable, time_text
from headrace.cli.pending_messages import (
    FUTURE,
    add_selection,
    add_subscription,
    add_topic,
    found,
    given_key,
    message_id,
    pending_json,
    reason_text,
    selection,
    timeline_text,
)
from headrace.cli.terminal.histogram import bars, short_time_text
from headrace.cli.terminal.interrupts import Interrupts
from headrace.cli.terminal.output import EXIT_ERROR, Output
from headrace.cli.terminal.watch import add_watch
from headrace.client.leasing.scheduled_times import MessageName, parse_id
from headrace.model.errors import InvalidArgument, MessageGone, MessageLeased, NotOwner, StaleVersion
from headrace.model.headers import header_text
from headrace.model.leasing import OWNER_HEADER, Forecasted

if TYPE_CHECKING:
    from headrace.client._sync.bus import Bus
    from headrace.client._sync.leasing.scheduled import Scheduled
    from headrace.client.leasing.jobs import PendingMessage

_NOT_CHANGED = (MessageGone, MessageLeased, NotOwner, StaleVersion)

_LIST = f"""\
examples:
  headrace timeline list reminders
  headrace timeline list reminders --to 'tomorrow 09:00' --json
  headrace timeline list reminders --key ann -n 1000

Prints messages that are not due yet, ordered by due time: time, id, key, value and
headers, separated by tabs.

{FUTURE}
"""

_SHOW = """\
example:
  headrace timeline show reminders/0/17@3

ID is topic, partition, offset and the topic's id, as `timeline add` and `timeline
list` print it. Without @ and the topic's id it is the message at that partition
and offset of the current topic with that name.
"""

_ADD = f"""\
examples:
  headrace timeline add reminders "call ann" --in 2h
  headrace timeline add reminders "call bob" --at 2030-01-31T09:00 --key bob
  headrace timeline add reminders "pay" --at 'tomorrow 09:00' --owner billing

The broker stores the message at once, and the topic's leased subscriptions deliver
it when it is due; if the topic has none, the subscription default is created. The
command prints the message's id, by which it can be shown, moved and cancelled until
then; with --owner, only by commands with the same owner.

{FUTURE}
"""

_MOVE = f"""\
examples:
  headrace timeline move reminders/0/17 --in 30m
  headrace timeline move reminders/0/17 --at 2030-01-31T10:00 --version 2

With --version the message is moved only if it still has that version.

{FUTURE}
"""

_CANCEL = """\
examples:
  headrace timeline cancel reminders/0/17
  headrace timeline cancel reminders/0/17 reminders/0/18 --owner billing

Reports each message that cannot be cancelled on stderr; the exit code is then 1.
"""

_FORECAST = f"""\
examples:
  headrace timeline forecast reminders
  headrace timeline forecast reminders --bucket 1d --buckets 30
  headrace timeline forecast reminders --from 'tomorrow 00:00' --bucket 15m --json

Counts the messages that become due in each time bucket; ready messages count as
due now. By default the first bucket begins at the last multiple of the bucket's
length, such as the last full hour.

{FUTURE}
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the commands to the parser of `headrace timeline`."""
    parser.epilog = "`headrace timeline COMMAND --help` explains a command, with examples."
    make = command_maker(parser)
    listing = make("list", list_messages, "list scheduled messages by due time", _LIST)
    add_topic(listing)
    listing.add_argument("-n", "--limit", metavar="N", type=count, default=100, help="how many (default: 100)")
    add_selection(listing)
    showing = make("show", show, "describe a message", _SHOW)
    _add_id(showing)
    adding = make("add", add, "schedule a message", _ADD)
    _add_message(adding)
    moving = make("move", move, "change the due time of a message", _MOVE)
    _add_id(moving)
    moving.add_argument("--version", metavar="N", type=count, help="only if it has this version")
    for each in (adding, moving):
        when = each.add_mutually_exclusive_group(required=True)
        when.add_argument("--at", metavar="TIME", type=relative_moment, help="the due time")
        when.add_argument(
            "--in",
            dest="in_",
            metavar="SPAN",
            type=duration,
            help="the time from now until it is due, such as 90s, 2h or 7d",
        )
    cancelling = make("cancel", cancel, "take messages back", _CANCEL)
    cancelling.add_argument(
        "ids", metavar="ID", type=_identity, nargs="+", help="a message: TOPIC/PARTITION/OFFSET@TOPIC-ID"
    )
    for each in (adding, moving, cancelling):
        each.add_argument("--owner", default="", help="the producer group that owns the message")
    forecasting = make("forecast", forecast, "count messages by due time", _FORECAST)
    add_topic(forecasting)
    _add_buckets(forecasting)
    for each in (listing, showing, forecasting):
        add_subscription(each)
    add_watch(listing, showing, forecasting)
    for each in (listing, showing, adding, moving, cancelling, forecasting):
        add_connection(each)


def _add_id(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("id", metavar="ID", type=_identity, help="the message: TOPIC/PARTITION/OFFSET@TOPIC-ID")


def _add_message(parser: argparse.ArgumentParser) -> None:
    add_topic(parser)
    add = parser.add_argument
    add("value", metavar="VALUE", help="the message")
    add("-k", "--key", help="its key")
    text = "a header; may be repeated"
    add("--header", dest="headers", metavar="NAME=VALUE", action="append", type=header, help=text)
    add("-p", "--partition", metavar="N", type=count, help="the partition (default: chosen by key)")
    add("--expires", metavar="TIME", type=relative_moment, help="when the message expires")
    add("--priority", metavar="N", type=int, help="its priority, for subscriptions with the discipline priority")


def _add_buckets(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--from", dest="begin", metavar="TIME", type=relative_moment, help="the start of the first bucket")
    add("--bucket", metavar="SPAN", type=duration, default=3600.0, help="the length of a bucket (default: 1h)")
    add("--buckets", metavar="N", type=more_than_zero(int), default=24, help="how many (default: 24)")


def _identity(text: str) -> MessageName:
    try:
        return parse_id(text)
    except InvalidArgument as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def list_messages(given: argparse.Namespace, out: Output, _: Interrupts) -> int:
    """Print messages that are not due yet."""
    form = pending_json if out.json else timeline_text
    with connected(given, out) as bus:
        queue = bus.queue(given.topic, given.subscription)
        for message in found(queue, given.limit, **selection(given, status="waiting")):
            out.add(form(message))
            if out.full:
                out.flush()
    out.flush()
    return 0


def show(given: argparse.Namespace, out: Output, _: Interrupts) -> int:
    """Describe a message."""
    with connected(given, out) as bus:
        message = bus.scheduled(str(given.id)).look(given.subscription)
    if out.json:
        out.add(pending_json(message))
        out.flush()
    else:
        out.tell({}, *_description(message))
    return 0


def add(given: argparse.Namespace, out: Output, _: Interrupts) -> int:
    """Schedule a message."""
    with connected(given, out) as bus:
        due_us = _due_us(bus, given)
        message = bus.schedule(
            given.topic,
            os.fsencode(given.value),
            key=given_key(given),
            headers=given.headers,
            priority=given.priority,
            expires=given.expires,
            owner=given.owner,
            partition=given.partition,
            at=due_us,
        )
        if not bus.subscriptions(given.topic):
            bus.create_subscription(given.topic, exist_ok=True)  # the message can be listed only then
    _tell_due(message, due_us, out)
    return 0


def move(given: argparse.Namespace, out: Output, _: Interrupts) -> int:
    """Change the due time of a message."""
    with connected(given, out) as bus:
        due_us = _due_us(bus, given)
        message = bus.scheduled(str(given.id), version=given.version, owner=given.owner)
        message.move(at=due_us)
    _tell_due(message, due_us, out)
    return 0


def cancel(given: argparse.Namespace, out: Output, _: Interrupts) -> int:
    """Cancel messages; an error for one does not stop the others."""
    left = 0
    with connected(given, out) as bus:
        for identity in given.ids:
            try:
                bus.scheduled(str(identity), owner=given.owner).cancel()
            except _NOT_CHANGED as error:
                if len(given.ids) == 1:
                    raise
                left += 1
                if out.json:
                    out.tell({"id": str(identity), "cancelled": False, "code": error.code})
                else:
                    out.note(f"{identity}: {error} [{error.code}]")
            else:
                out.tell({"id": str(identity), "cancelled": True}, f"cancelled {identity}")
    return EXIT_ERROR if left else 0


def forecast(given: argparse.Namespace, out: Output, _: Interrupts) -> int:
    """Count messages by due time, in buckets."""
    bucket_us = round(given.bucket * 1e6)
    with connected(given, out) as bus:
        begin_us = given.begin
        if begin_us is None:
            now_us = bus.clock.now_us()
            begin_us = now_us - now_us % bucket_us
        counts = bus.queue(given.topic, given.subscription).forecast(begin_us, given.bucket, given.buckets)
    content = {"topic": given.topic, "subscription": given.subscription, "from_us": begin_us, "bucket_us": bucket_us}
    content |= {"before": counts.before, "counts": counts.counts, "after": counts.after}
    out.tell(content, *_histogram(counts, begin_us, bucket_us))
    return 0


def _histogram(counts: Forecasted, begin_us: int, bucket_us: int) -> list[str]:
    labels = [short_time_text(begin_us + place * bucket_us, bucket_us) for place in range(len(counts.counts))]
    rows = list(zip(labels, counts.counts, strict=True))
    before = [("before", counts.before)] if counts.before else []
    return bars([*before, *rows, *([("later", counts.after)] if counts.after else [])])


def _due_us(bus: "Bus", given: argparse.Namespace) -> int:
    """Return the due time from the options; a span is added to the broker's time."""
    return int(given.at) if given.in_ is None else bus.clock.now_us() + round(given.in_ * 1e6)


def _tell_due(message: "Scheduled", due_us: int, out: Output) -> None:
    version = "" if message.version is None else f", version {message.version}"
    content = {"id": message.id, "version": message.version, "due_us": due_us}
    out.tell(content, f"{message.id} comes due {time_text(due_us)}{version}")


def _description(message: "PendingMessage") -> Iterator[str]:
    owner = header_text(message.headers or {}, OWNER_HEADER)
    rows: dict[str, str | None] = {
        "id": message_id(message),
        "status": message.status + reason_text(message),
        "holder": printable(message.holder.encode()) or None,
        "until": time_text(message.until_us) if message.until_us else None,
        "ready": time_text(message.ready_us) if message.ready_us else None,
        "due": None if message.due is None else time_text(message.due),
        "expires": None if message.expires is None else time_text(message.expires),
        "priority": None if message.priority is None else str(message.priority),
        "version": str(message.version),
        "deliveries": str(message.deliveries),
        "published": time_text(message.timestamp),
        "owner": printable(owner) or None,
        "key": None if message.key is None else printable(message.key),
        "value": "(deleted)" if message.value is None else printable(message.value),
    }
    yield from (f"{name:10}  {text}" for name, text in rows.items() if text is not None)
    yield from (f"{'header':10}  {header_shown(pair)}" for pair in message.header_list if pair[0] != OWNER_HEADER)
