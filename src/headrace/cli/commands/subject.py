"""`headrace subject`: publish to subjects, and print what is published to them."""

import argparse
import os
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

import msgspec

from headrace.cli.arguments import command_maker, count, duration, header
from headrace.cli.connection import add_connection, connected
from headrace.cli.input import plain_values
from headrace.cli.subject_formats import message_form
from headrace.cli.terminal.interrupts import Interrupts
from headrace.cli.terminal.output import Output, counted
from headrace.cli.terminal.watch import add_watch
from headrace.model.headers import headers_from_pairs
from headrace.model.limits import BATCH_COUNT_MAX

if TYPE_CHECKING:
    from headrace.client._sync.subjects.live_subscription import LiveSubscription

_LOOK_EVERY_S = 0.25
"""How often a waiting command checks for signals and for a closed output, in seconds."""

_PUBLISH = """\
examples:
  headrace subject publish orders.eu.paid "order 17"
  headrace subject publish orders.eu.paid --key 17 --header source=web '{"item": 4}'
  tail -F access.log | headrace subject publish logs.access

A subject is a dotted name. It needs no topic, and nobody creates it: the broker
sends the messages to those who are subscribed at this moment, and stores nothing,
unless a durable route takes the subject (headrace route). The command prints how
many live subscriptions got them.
"""

_LISTEN = """\
examples:
  headrace subject listen 'orders.*'
  headrace subject listen 'orders.#' --json
  headrace subject listen jobs --queue workers --values | ./work
  headrace subject listen '$events.>'

PATTERN is a subject, in which a token may be * (one token), # (any number of
tokens) or, at the end, > (one or more). Quote it. Subjects that begin with $ are
the broker's own, and match only a pattern that begins with the same token.

Prints subject, time, key, value and headers, separated by tabs, and "-" for a
missing key: what is published from now on, at most once. If the command is too
slow, messages are lost; it then says how many, on stderr. Commands with the same
--queue share the messages.

Ends with Ctrl-C, SIGTERM, -n or --wait, and when its output is closed.
"""

_INFO = """\
example:
  headrace subject info --json

Counts live subscriptions and responders, and what was published, delivered, dropped
and asked since the broker's start.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the commands to the parser of `headrace subject`."""
    parser.epilog = "`headrace subject COMMAND --help` explains a command, with examples."
    make = command_maker(parser)
    publishing = make("publish", publish, "publish messages to a subject", _PUBLISH)
    _add_publishing(publishing)
    listening = make("listen", listen, "print what is published to subjects", _LISTEN)
    _add_listening(listening)
    showing = make("info", show_info, "count subscriptions, responders and messages", _INFO)
    add_watch(showing)
    for each in (publishing, showing):
        add_connection(each)


def _add_publishing(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("subject", metavar="SUBJECT", help="the subject, such as orders.eu.paid")
    add("values", metavar="VALUE", nargs="*", help="the messages; none, or only -: lines of stdin")
    add("-0", "--null", dest="null_separated", action="store_true", help="messages on stdin end with a zero byte")
    add("-k", "--key", help="the key of the messages")
    add(
        "--header",
        dest="headers",
        metavar="NAME=VALUE",
        action="append",
        type=header,
        help="a header of the messages; may be repeated",
    )
    parser.set_defaults(files=None)


def _add_listening(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("pattern", metavar="PATTERN", help="a subject, or a pattern of subjects, see below")
    add("-q", "--queue", metavar="NAME", help="share the messages with others of this queue name")
    add("-n", "--limit", metavar="N", type=count, help="end after this many messages")
    add("--wait", metavar="TIME", type=duration, help="end after this time without a message")
    form = parser.add_mutually_exclusive_group()
    form.add_argument(
        "--values", action="store_true", help="print only the values, unchanged, each followed by a newline"
    )
    add_connection(parser, json_in=form)
    zero = "with --values: zero bytes instead of newlines"
    add("-0", "--null", dest="null_separated", action="store_true", help=zero)
    parser.set_defaults(check=_check)


def _check(given: argparse.Namespace) -> str | None:
    """Return why the arguments contradict each other, if they do."""
    return "-0 goes with --values" if given.null_separated and not given.values else None


def publish(given: argparse.Namespace, out: Output, interrupts: Interrupts) -> int:
    """Publish messages as they arrive, and print how many there were and who got the last ones."""
    published = receivers = 0
    stored = False
    headers = headers_from_pairs(given.headers or ())
    key = None if given.key is None else os.fsencode(given.key)
    with connected(given, out) as bus, interrupts.held(once=True):
        for values in _portions(plain_values(given, interrupts)):
            keys, each = None if key is None else [key] * len(values), None if not headers else [headers] * len(values)
            answer = bus.subjects.publish_many(given.subject, values, keys=keys, headers=each)
            published += len(values)
            receivers, stored = answer.receivers, answer.stored
    content = {"subject": given.subject, "published": published, "receivers": receivers, "stored": stored}
    kept = ", stored for a route" if stored else ""
    sent = f"published {counted(published, 'message')} to {given.subject}"
    out.tell(content, f"{sent}: {counted(receivers, 'receiver')}{kept}")
    return 0


def _portions(arriving: Iterator[list[bytes]]) -> Iterator[list[bytes]]:
    """Split what arrives together into batches."""
    for values in arriving:
        for start in range(0, len(values), BATCH_COUNT_MAX):
            yield values[start : start + BATCH_COUNT_MAX]


def listen(given: argparse.Namespace, out: Output, interrupts: Interrupts) -> int:
    """Print messages of subjects as they are published."""
    with (
        connected(given, out) as bus,
        interrupts.held(once=True),
        bus.subjects.subscribe(given.pattern, queue=given.queue, timeout=_LOOK_EVERY_S) as live,
    ):
        _print_all(live, given, out, interrupts)
    return 0


def _print_all(live: "LiveSubscription", given: argparse.Namespace, out: Output, interrupts: Interrupts) -> None:
    form, left, dropped, busy_s = message_form(given), given.limit, 0, time.monotonic()
    while left != 0 and not out.closed:
        for message in live:
            out.add(form(message))
            out.flush()
            busy_s = time.monotonic()
            interrupts.check()
            if left is not None:
                left -= 1
                if left == 0:
                    break
        if live.dropped > dropped:
            out.note(f"{counted(live.dropped - dropped, 'message')} lost: this command was too slow")
            dropped = live.dropped
        if given.wait is not None and time.monotonic() - busy_s >= given.wait:
            break
        interrupts.check()


def show_info(given: argparse.Namespace, out: Output, _: Interrupts) -> int:
    """Print the counts of the switchboard."""
    with connected(given, out) as bus:
        info = msgspec.structs.asdict(bus.subjects.info())
    width = max(map(len, info))
    out.tell(info, *(f"{name.replace('_', ' '):{width}}  {value:,}" for name, value in info.items()))
    return 0
