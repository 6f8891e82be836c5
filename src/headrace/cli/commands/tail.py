"""`headrace tail`: prints messages of topics, as they arrive or up to the end."""

import argparse
import heapq
import time
from collections.abc import Iterator
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any

from headrace.cli.arguments import completes, count, duration, start
from headrace.cli.connection import add_connection, connected
from headrace.cli.message_formats import received_form
from headrace.cli.terminal.interrupts import Interrupts
from headrace.cli.terminal.output import Output, offsets_text
from headrace.model.errors import CorruptBatch, HeadraceError, OffsetOutOfRange, PartitionNotFound

if TYPE_CHECKING:
    from headrace.client._sync.bus import Bus
    from headrace.client._sync.consumer.subscription import Subscription
    from headrace.client.results import DamagedRange, Received, ReceivedBatch

_FETCH_BYTES = 16 << 20
"""The maximum bytes of a fetch, of all partitions together."""
_LOOK_EVERY_S = 0.25
"""How often a waiting tail checks for signals and for a closed output, in seconds."""
_LEAVE_AFTER_S = 2.0
"""With --group and --no-follow: how long to wait for partitions, and for messages that may never arrive."""

_EPILOG = """\
examples:
  headrace tail orders
  headrace tail orders --from '5m ago'
  headrace tail orders --from earliest --no-follow --json
  headrace tail orders refunds --group audit --values | ./audit
  headrace tail --pattern 'orders.*' -n 10

Prints partition and offset, time, key, value and headers, separated by tabs, and
"-" for a missing key; the topic too if there may be several.

--from takes earliest, latest, an offset, a time (ISO 8601, UTC if it names no
zone), or '5m ago'. The default is latest, with --no-follow earliest.

With --group the command continues at the group's positions, and commits messages
after they are written to stdout; several commands with the same group share the
partitions. Then --from only sets where a new group begins, by default with the
oldest message. End early with -n, not with `| head`.

Ends with Ctrl-C, SIGTERM, -n, --no-follow or --wait, and when its output is closed.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments to the parser of `headrace tail`."""
    parser.epilog = _EPILOG
    add = parser.add_argument
    completes(add("topics", metavar="TOPIC", nargs="*", help="the topics' names"), "topic")
    add("--pattern", help="topics whose names match, also new ones: * matches any characters, ? one")
    add("--from", dest="start", metavar="WHERE", type=start, help="where to begin, see below")
    add("--last", metavar="N", type=count, help="begin this many messages before the end of each partition")
    add(
        "-p",
        "--partition",
        dest="partitions",
        metavar="N",
        type=count,
        action="append",
        help="only this partition; may be repeated",
    )
    completes(add("-g", "--group", help="read as a member of this group, and commit"), "group")
    add("-n", "--limit", metavar="N", type=count, help="end after this many messages")
    add("--no-follow", dest="follow", action="store_false", help="end at the current end of the topics")
    add("--skip-corrupt", action="store_true", help="skip damaged messages, with a note on stderr, instead of failing")
    add("--wait", metavar="TIME", type=duration, help="end after this time without a message")
    form = parser.add_mutually_exclusive_group()
    form.add_argument(
        "--values", action="store_true", help="print only the values, unchanged, each followed by a newline"
    )
    add_connection(parser, json_in=form)
    add(
        "-0", "--null", dest="null_separated", action="store_true", help="with --values: zero bytes instead of newlines"
    )
    parser.set_defaults(run=tail, check=_check)


def _check(given: argparse.Namespace) -> str | None:
    """Return why the arguments contradict each other, if they do."""
    if not given.topics and given.pattern is None:
        return "give a TOPIC, or --pattern"
    if given.null_separated and not given.values:
        return "-0 needs --values"
    if given.group is not None and (given.partitions or given.last is not None):
        return "--group finds its own partitions and positions: give neither --partition nor --last"
    if given.last is not None and given.start is not None:
        return "give --from or --last, not both"
    by_offset = given.last is not None or isinstance(given.start, int)
    if by_offset and given.follow and (len(given.topics) != 1 or given.pattern is not None):
        return "several topics cannot be followed from an offset: give one TOPIC, or --no-follow"
    if isinstance(given.start, int) and given.group is not None:
        return "a group cannot begin at an offset: give earliest, latest or a time"
    return None


class _Printer:
    """Prints messages, up to the limit."""

    def __init__(self, given: argparse.Namespace, out: Output) -> None:
        self._out = out
        self._form = received_form(given, several_topics=len(given.topics) != 1 or given.pattern is not None)
        self._left: int | None = given.limit

    @property
    def enough(self) -> bool:
        """Whether the limit is reached."""
        return self._left == 0

    def print(self, messages: Iterator["Received"]) -> "Received | None":
        """Print messages up to the limit; returns the last printed one."""
        last: Received | None = None
        for last in messages if self._left is None else islice(messages, self._left):
            self._out.add(self._form(last))
            if self._left is not None:
                self._left -= 1
            if self._out.full:
                self._out.flush()
        self._out.flush()
        return last


def tail(given: argparse.Namespace, out: Output, interrupts: Interrupts) -> int:
    """Print messages as they arrive, or up to the end."""
    with connected(given, out) as bus:
        if given.follow or given.group is not None:
            _follow(bus, given, out, interrupts)
        else:
            _read_to_end(bus, given, out)
    return 0


def _follow(bus: "Bus", given: argparse.Namespace, out: Output, interrupts: Interrupts) -> None:
    """Print messages as they arrive."""
    begin: Any = given.start or ("latest" if given.group is None else "earliest")
    if given.group is None and (given.last is not None or isinstance(given.start, int)):
        begin = {partition: offset for _, partition, offset, _ in _spans(bus, given)}
    for topic in given.topics:
        bus.describe_topic(topic)  # subscribing could create a topic from a misspelt name
    ends = None if given.follow else {(span[0], span[1]): span[3] for span in _spans(bus, given)}
    subscription = bus.subscribe(
        *given.topics,
        pattern=given.pattern,
        group=given.group,
        partitions=given.partitions,
        start=begin,
        on_corrupt=partial(_tell_skipped, out) if given.skip_corrupt else "raise",
        timeout=_LOOK_EVERY_S,
    )
    with interrupts.held(once=True), subscription:
        following = _Following(subscription, _Printer(given, out), given, out)
        try:
            while following.more(ends):
                interrupts.check()
        finally:
            following.close()


def _tell_skipped(out: Output, damaged: "DamagedRange") -> None:
    """Print a note on stderr about skipped damaged messages."""
    offsets = offsets_text(damaged.first_offset, damaged.next_offset)
    out.note(f"skipped damaged messages of {damaged.topic}[{damaged.partition}], {offsets}: {damaged.reason}")


class _Following:
    """Prints the messages of a subscription, and commits exactly the printed ones."""

    def __init__(self, subscription: "Subscription", printer: _Printer, given: argparse.Namespace, out: Output) -> None:
        self._subscription = subscription
        self._printer = printer
        self._given = given
        self._out = out
        self._printed: ReceivedBatch | Received | None = None
        self._busy_s = time.monotonic()

    def more(self, ends: dict[tuple[str, int], int] | None) -> bool:
        """Print available messages, or wait briefly for some; returns whether to continue."""
        for batch in self._subscription.batches():
            self._printed = None
            last = self._printer.print(batch.messages())
            self._printed = last if self._printer.enough else batch
            self._busy_s = time.monotonic()
            return not self._printer.enough
        idle_s = time.monotonic() - self._busy_s
        if self._out.closed or (self._given.wait is not None and idle_s >= self._given.wait):
            return False
        return ends is None or not self._at_end(ends, idle_s)

    def _at_end(self, ends: dict[tuple[str, int], int], idle_s: float) -> bool:
        """Return whether this member has printed all messages that its partitions held at the start."""
        # The last messages of a partition may never arrive, if they have expired or were compacted.
        assigned = self._subscription.assigned
        caught_up = all(offset >= ends.get(place, 0) for place, offset in assigned.items())
        return idle_s >= _LEAVE_AFTER_S or (bool(assigned) and caught_up)

    def close(self) -> None:
        """Commit the printed messages, and leave the group."""
        if self._given.group is not None and self._printed is not None:
            self._subscription.commit(self._printed)
        self._subscription.close()


def _read_to_end(bus: "Bus", given: argparse.Namespace, out: Output) -> None:
    """Print the current messages; those of several partitions are ordered by time."""
    printer = _Printer(given, out)
    spans = list(_spans(bus, given))
    bytes_max = max(_FETCH_BYTES // max(len(spans), 1), 64 << 10)
    every = [_fetched(bus, *span, bytes_max, out if given.skip_corrupt else None) for span in spans]
    messages = every[0] if len(every) == 1 else heapq.merge(*every, key=lambda message: message.timestamp)
    try:
        printer.print(messages)
    except HeadraceError:
        out.flush()  # print the messages before the error
        raise


def _spans(bus: "Bus", given: argparse.Namespace) -> Iterator[tuple[str, int, int, int]]:
    """Return the ranges to read: topic, partition, first offset and end offset."""
    names = list(given.topics)
    if given.pattern is not None:
        names += sorted(info.topic for info in bus.topics(given.pattern) if info.topic not in names)
    for topic in names:
        firsts, ends = bus.offsets(topic, at="earliest"), bus.offsets(topic, at="latest")
        begins = firsts
        if given.last is not None:
            begins = {partition: max(ends[partition] - given.last, first) for partition, first in firsts.items()}
        elif isinstance(given.start, int):
            begins = dict.fromkeys(firsts, given.start)
        elif given.start is not None:
            begins = bus.offsets(topic, at=given.start)
        for partition in given.partitions or sorted(firsts):
            if partition not in firsts:
                raise PartitionNotFound(f"{topic} has no partition {partition}, only 0 to {len(firsts) - 1}")
            if not firsts[partition] <= begins[partition] <= ends[partition]:
                raise OffsetOutOfRange(_no_such_offset(topic, partition, begins, firsts, ends))
            yield topic, partition, begins[partition], ends[partition]


def _no_such_offset(
    topic: str, partition: int, begins: dict[int, int], firsts: dict[int, int], ends: dict[int, int]
) -> str:
    first, end = firsts[partition], ends[partition]
    has = f"has offsets {first} to {end - 1}" if first < end else "is empty"
    return f"{topic}[{partition}] {has}: there is no offset {begins[partition]}, the next will be {end}"


def _fetched(
    bus: "Bus", topic: str, partition: int, offset: int, end: int, bytes_max: int, told_to: Output | None
) -> Iterator["Received"]:
    """Iterate over the messages of a range; with a callback for damaged messages, skips them."""
    from headrace.client.results import DamagedRange, ReceivedBatch

    while offset < end:
        try:
            batches = bus.fetch(topic, partition, offset, bytes_max=bytes_max)
        except CorruptBatch as error:
            if told_to is None:
                raise
            damaged = DamagedRange(topic, partition, error.first_offset, error.next_offset, error.reason)
            _tell_skipped(told_to, damaged)
            offset = error.next_offset
            continue
        if not batches:
            return
        for batch in batches:
            received = ReceivedBatch(topic, partition, batch, offset)
            offset = received.next_offset
            for message in received.messages():
                if message.offset >= end:
                    return
                yield message
