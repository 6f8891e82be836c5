"""`headrace queue drain`: prints and acknowledges all ready messages."""

import argparse
from typing import TYPE_CHECKING

from headrace.cli.arguments import count
from headrace.cli.connection import add_connection, connected
from headrace.cli.message_formats import received_form
from headrace.cli.terminal.interrupts import Interrupts
from headrace.cli.terminal.output import Output, ProgressLine, counted
from headrace.model.errors import SubscriptionNotFound
from headrace.model.subscription import DEFAULT_SUBSCRIPTION

if TYPE_CHECKING:
    from headrace.client._sync.bus import Bus
    from headrace.client._sync.leasing.queue import Queue
    from headrace.client.leasing.jobs import Job

_LEASED_MAX = 1000
"""How many messages are leased at once: at most this many are delivered again if the command is killed."""


def add_draining(parser: argparse.ArgumentParser) -> None:
    """Add the options of `headrace queue drain`."""
    parser.add_argument("--max", metavar="N", type=count, help="end after this many messages")
    parser.add_argument("-q", "--quiet", action="store_true", help="print only the number of messages")
    form = parser.add_mutually_exclusive_group()
    form.add_argument(
        "--values", action="store_true", help="print only the values, unchanged, each followed by a newline"
    )
    add_connection(parser, json_in=form)
    zero = "with --values: zero bytes instead of newlines"
    parser.add_argument("-0", "--null", dest="null_separated", action="store_true", help=zero)
    parser.set_defaults(check=_check)


def _check(given: argparse.Namespace) -> str | None:
    """Return why the arguments contradict each other, if they do."""
    if given.null_separated and not given.values:
        return "-0 goes with --values"
    if given.quiet and given.values:
        return "give --quiet or --values, not both"
    return None


def drain(given: argparse.Namespace, out: Output, interrupts: Interrupts) -> int:
    """Print and acknowledge ready messages, until none is left or the limit is reached."""
    with connected(given, out) as bus:
        _check_subscription(bus, given, out)
        draining = _Draining(bus.queue(given.topic, given.subscription), given, out)
        with interrupts.held(once=True), ProgressLine("drained", shown=given.quiet) as progress:
            while draining.more():
                progress(draining.drained)
                interrupts.check()
    if given.quiet:
        content = {"topic": given.topic, "subscription": given.subscription, "drained": draining.drained}
        out.tell(content, f"drained {counted(draining.drained, 'message')}")
    return 0


def _check_subscription(bus: "Bus", given: argparse.Namespace, out: Output) -> None:
    """Refuse a subscription that does not exist, except for the default one, which leasing creates."""
    try:
        info = bus.describe_subscription(given.topic, given.subscription)
    except SubscriptionNotFound:
        if given.subscription != DEFAULT_SUBSCRIPTION:
            raise
        return
    if info.settings["paused"]:
        out.note(f"subscription {info.subscription} of {info.topic} is paused; `headrace queue resume` resumes it")


class _Draining:
    """Leases messages, prints them, and acknowledges exactly those that were written to stdout."""

    def __init__(self, queue: "Queue", given: argparse.Namespace, out: Output) -> None:
        self._queue = queue
        self._given = given
        self._out = out
        self._form = received_form(given, several_topics=False)
        self.drained = 0
        """The number of acknowledged messages."""

    def more(self) -> bool:
        """Process one lease; returns whether more messages may be ready."""
        given = self._given
        left = _LEASED_MAX if given.max is None else min(given.max - self.drained, _LEASED_MAX)
        jobs = self._queue.lease(left) if left > 0 and not self._out.closed else []
        if not jobs:
            return False
        printed = given.quiet
        try:
            if not given.quiet:
                self._print(jobs)
            printed = True
        finally:
            if not printed:
                self._queue.release(jobs, delay=0, reason="not printed")
        self._acknowledge(jobs)
        return True

    def _print(self, jobs: list["Job"]) -> None:
        for job in jobs:
            self._out.add(self._form(job))
            if self._out.full:
                self._out.flush()
        self._out.flush()

    def _acknowledge(self, jobs: list["Job"]) -> None:
        refused = self._queue.ack(jobs)
        self.drained += len(jobs) - len(refused)
        if refused:
            why = ", ".join(sorted({refusal.code for refusal in refused}))
            self._out.note(f"{counted(len(refused), 'message')} could not be acknowledged and may come again: {why}")
