"""`headrace publish`: publishes messages from arguments, files or stdin to a topic."""

import argparse
import os
import sys
from base64 import b64encode
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import repeat, takewhile
from typing import TYPE_CHECKING, Any

import msgspec

from headrace.cli.arguments import completes, count, header, relative_moment
from headrace.cli.connection import add_connection, connected
from headrace.cli.input import json_messages, plain_values
from headrace.cli.message_formats import GivenMessage, printable
from headrace.cli.terminal.interrupts import Interrupted, Interrupts
from headrace.cli.terminal.output import Output, ProgressLine, counted, offsets_text
from headrace.model.durability import Durability
from headrace.model.errors import HeadraceError, InvalidArgument, Timeout
from headrace.model.headers import Headers, headers_from_pairs
from headrace.model.route_requests import SUBJECT_HEADER

if TYPE_CHECKING:
    from headrace.client._sync.bus import Bus
    from headrace.client._sync.producer.producer import Producer
    from headrace.client._sync.producer.sent import SentMany
    from headrace.client.results import Receipt

_PATIENCE_S = 2.0
"""How long the command waits for the last acknowledgements before it prints a note, in seconds."""

_EPILOG = """\
examples:
  headrace publish orders "first order" "second order"
  headrace publish orders --key 17 --header source=web '{"item": 4}'
  tail -F access.log | headrace publish access
  printf 'k1:v1\\nk2:v2\\n' | headrace publish orders --key-separator :
  headrace publish images --file *.png
  headrace publish accounts --key ann --expected-version 0 opened
  headrace publish jobs "resize cat.jpg" --reply --timeout 5m
  headrace publish headrace.ingress --subject orders.eu.paid '{"item": 4}'
  headrace tail orders --from earliest --no-follow --json | headrace publish copy --json-lines

The command ends when the broker has acknowledged every message, also after Ctrl-C
or SIGTERM; a second signal ends it at once. Messages with the same key go to the
same partition; messages without a key are spread over the partitions.

--json-lines reads the output of `headrace tail --json`, one object per line:

  {"value": "hello", "key": "k", "headers": {"lang": "en"}, "timestamp": 1700000000000000}

Only the value is required; null deletes the key. Bytes that are not UTF-8 are in
value_base64, key_base64 and headers_base64 instead. If a header's name repeats,
header_list replaces headers:

  {"value": "hello", "header_list": [{"name": "a", "value": "1"}, {"name": "a", "value": null}]}

Topic, partition and offset are ignored.

With --reply the command waits until a worker has handled each message, and prints
what its handler returned; --timeout says for how long. A job that failed for good
is an error with the code job_failed.

TIME is ISO 8601 (UTC if it names no zone), microseconds since 1970, or like
'in 2h'.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments to the parser of `headrace publish`."""
    parser.epilog = _EPILOG
    add = parser.add_argument
    completes(add("topic", metavar="TOPIC", help="the topic's name"), "topic")
    add("values", metavar="VALUE", nargs="*", help="the messages; none, or only -: lines of stdin")
    files = add(
        "--file", dest="files", metavar="F", nargs="+", action="extend", help="publish files, each as one message"
    )
    completes(files, "file")
    add("-0", "--null", dest="null_separated", action="store_true", help="messages on stdin end with a zero byte")
    add("--json-lines", action="store_true", help="lines of stdin are messages in JSON, see below")
    add("-k", "--key", help="the key of the messages")
    add("--key-separator", metavar="SIGN", help="each message is KEY SIGN VALUE, without the spaces")
    add(
        "--header",
        dest="headers",
        metavar="NAME=VALUE",
        action="append",
        type=header,
        help="a header of the messages; may be repeated",
    )
    add("--subject", help="the subject by which routes take the messages: the header headrace-subject")
    add("-p", "--partition", metavar="N", type=count, help="the partition (default: chosen by key)")
    add("--timestamp", metavar="TIME", type=relative_moment, help="the time of the messages, instead of now")
    add("--due", metavar="TIME", type=relative_moment, help="when the messages are due, for leased subscriptions")
    add("--expires", metavar="TIME", type=relative_moment, help="when the messages expire")
    add("--priority", metavar="N", type=int, help="the priority of the messages, for leased subscriptions")
    add(
        "--expected-offset",
        metavar="N",
        type=count,
        help="publish only if the first message gets this offset, the second the next, and so on",
    )
    add(
        "--expected-version",
        metavar="N",
        type=count,
        help="publish all messages together, or none if the key has another number of messages; needs --key",
    )
    add(
        "--durability",
        choices=[each.name.lower() for each in Durability],
        help="the least durability at which the broker acknowledges: in memory, written, synced to the disk, or "
        "replicated to the shared store of a cluster",
    )
    add("--reply", action="store_true", help="the messages are jobs: wait for their results, and print these")
    add("--compression", choices=("none", "lz4", "zstd"), help="compress messages on the wire and on the disk")
    add_connection(parser)
    parser.set_defaults(run=publish, check=_check)


def _check(given: argparse.Namespace) -> str | None:
    """Return why the arguments contradict each other, if they do."""
    if given.files and given.values:
        return "give values or --file, not both"
    from_stdin = not given.files and given.values in ([], ["-"])
    if given.null_separated and not from_stdin:
        return "-0 applies to stdin: give no values and no --file"
    if given.json_lines and not from_stdin:
        return "--json-lines applies to stdin: give no values and no --file"
    fields = (given.key, given.key_separator, given.headers, given.subject)
    each = (*fields, given.timestamp, given.due, given.expires, given.priority)
    if given.json_lines and (given.null_separated or any(it is not None for it in each)):
        return "--json-lines has key, headers and times in each line: give it alone"
    expected = (given.expected_offset, given.expected_version)
    if given.reply and (expected != (None, None) or given.compression is not None):
        return "--reply publishes jobs one by one: give neither --expected-… nor --compression with it"
    if given.key_separator is not None and (given.key is not None or given.files or not given.key_separator):
        return "--key-separator splits values or lines: give neither --key nor --file with it"
    if given.expected_version is not None and (given.key is None or given.expected_offset is not None):
        return "--expected-version is about a key: give --key, and no --expected-offset"
    return None


class PartitionTally(msgspec.Struct):
    """The acknowledged messages of one partition."""

    partition: int
    messages: int
    first_offset: int
    next_offset: int

    def __str__(self) -> str:
        among = "" if self.messages == self.next_offset - self.first_offset else "among "  # other producers publish too
        return f"partition {self.partition}, {among}{offsets_text(self.first_offset, self.next_offset)}"


class PublishResult(msgspec.Struct):
    """The result of publishing."""

    topic: str
    published: int = 0
    durability: str | None = None
    """The least durability that all messages have reached."""
    interrupted: bool = False
    partitions: dict[int, PartitionTally] = {}

    def add(self, receipt: "Receipt") -> None:
        """Count the messages of a receipt."""
        if not receipt.count:
            return
        following = receipt.offset + receipt.count
        tally = self.partitions.get(receipt.partition)
        if tally is None:
            self.partitions[receipt.partition] = PartitionTally(
                receipt.partition, receipt.count, receipt.offset, following
            )
        else:
            tally.messages += receipt.count
            tally.first_offset = min(tally.first_offset, receipt.offset)
            tally.next_offset = max(tally.next_offset, following)
        reached = receipt.durability if self.durability is None else Durability[self.durability.upper()]
        self.durability = min(reached, receipt.durability).name.lower()
        self.published += receipt.count

    def tell(self, out: Output) -> None:
        """Print it."""
        tallies = sorted(self.partitions.values(), key=lambda tally: tally.partition)
        content = msgspec.to_builtins(self) | {"partitions": msgspec.to_builtins(tallies)}
        text = f"{'interrupted; ' if self.interrupted else ''}published {counted(self.published, 'message')}"
        text += f" to {self.topic}" + (f", {self.durability}" if self.published else "")
        if len(tallies) == 1:
            out.tell(content, f"{text}: {tallies[0]}")
        else:
            out.tell(content, text, *(f"  {tally}: {counted(tally.messages, 'message')}" for tally in tallies))


class InputPortion(msgspec.Struct):
    """Messages that arrived together."""

    values: Sequence[bytes | None]
    keys: Sequence[bytes | None] | None = None
    headers: Sequence[Headers | None] | None = None
    timestamps: Sequence[int | None] | None = None
    dues: Sequence[int | None] | None = None
    priorities: Sequence[int | None] | None = None
    expires: Sequence[int | None] | None = None


def publish(given: argparse.Namespace, out: Output, interrupts: Interrupts) -> int:
    """Publish messages and print their offsets, also when an error or a signal ends the command early."""
    if given.reply:
        return _publish_awaited(given, out, interrupts)
    outcome = PublishResult(given.topic)
    early_end: BaseException | None = None
    try:
        with connected(given, out) as bus, interrupts.held(once=True):  # a signal interrupts only the wait for input
            publishing = _publish_all if given.expected_offset is None else _publish_expected
            if given.expected_version is not None:
                publishing = _publish_version
            early_end = publishing(bus, given, out, interrupts, outcome)
    except (HeadraceError, OSError, Interrupted) as error:
        early_end = early_end or error
    outcome.interrupted = isinstance(early_end, Interrupted)
    # After the connection is closed, no callback adds a receipt to the outcome any more.
    if outcome.published or outcome.interrupted or early_end is None:
        outcome.tell(out)
    if early_end is not None:
        raise early_end
    return 0


def _publish_all(
    bus: "Bus", given: argparse.Namespace, out: Output, interrupts: Interrupts, outcome: PublishResult
) -> BaseException | None:
    """Publish messages as they arrive, many at a time; returns the error or signal that ended it early."""
    producer = bus.producer(
        given.topic, durability=given.durability, compression=given.compression, after_ack=[outcome.add]
    )
    early_end: BaseException | None = None
    under_way: deque[SentMany] = deque()
    try:
        with ProgressLine("published", shown=not _typed(given)) as progress:
            for portion in _portions(given, interrupts):
                under_way.append(producer.send_many(**msgspec.structs.asdict(portion), partition=given.partition))
                while under_way and under_way[0].done:
                    under_way.popleft().result()  # otherwise it would continue although publishing fails
                progress(outcome.published)
    except (HeadraceError, OSError, Interrupted) as error:
        early_end = error
    failure = _finish(producer, out)
    if early_end is not None and failure is not None:
        out.note(str(failure))
    return early_end or failure


def _finish(producer: "Producer", out: Output) -> HeadraceError | None:
    """Wait until all messages are acknowledged; returns the error, if there was one."""
    from headrace.client.producer.producer_errors import Undelivered

    try:
        try:
            producer.flush(_PATIENCE_S)
        except Timeout:
            out.note("waiting for the broker to acknowledge the rest; Ctrl-C twice ends this")
        producer.close()
    except Undelivered as error:
        return error.first_error or error
    return None


def _publish_expected(
    bus: "Bus", given: argparse.Namespace, _: Output, interrupts: Interrupts, outcome: PublishResult
) -> BaseException | None:
    """Publish one message after the other, each only if it gets the expected offset."""
    offset = given.expected_offset
    try:
        for portion in _portions(given, interrupts):
            columns = (column or repeat(None, len(portion.values)) for column in msgspec.structs.astuple(portion))
            for row in zip(*columns, strict=True):
                receipt = bus.publish(
                    given.topic,
                    **msgspec.structs.asdict(GivenMessage(*row)),
                    partition=given.partition,
                    durability=given.durability,
                    expected_offset=offset,
                )
                outcome.add(receipt)
                offset += 1
    except (HeadraceError, OSError, Interrupted) as error:
        return error
    return None


def _publish_version(
    bus: "Bus", given: argparse.Namespace, _: Output, interrupts: Interrupts, outcome: PublishResult
) -> BaseException | None:
    """Publish all messages in one batch, if their key has the expected version."""
    columns: dict[str, Any] = {}
    try:
        for portion in _portions(given, interrupts):
            for name, column in msgspec.structs.asdict(portion).items():
                if column is not None:
                    columns.setdefault(name, []).extend(column)
        if columns:
            receipts = bus.publish_many(
                given.topic,
                **columns,
                partition=given.partition,
                durability=given.durability,
                expected_version=given.expected_version,
            )
            for receipt in receipts:
                outcome.add(receipt)
    except (HeadraceError, OSError, Interrupted) as error:
        return error
    return None


def _publish_awaited(given: argparse.Namespace, out: Output, interrupts: Interrupts) -> int:
    """Publish jobs, and print the result of each when it is there."""
    with connected(given, out) as bus:
        for portion in _portions(given, interrupts):
            columns = (column or repeat(None, len(portion.values)) for column in msgspec.structs.astuple(portion))
            handles = [
                bus.publish(
                    given.topic,
                    **msgspec.structs.asdict(GivenMessage(*row)),
                    partition=given.partition,
                    durability=given.durability,
                    reply=True,
                )
                for row in zip(*columns, strict=True)
            ]
            for handle in handles:
                result = handle.result(given.timeout)
                content, text = result_content(result)
                out.tell({"job": handle.id, **content}, text)
    return 0


def result_content(result: Any) -> tuple[dict[str, Any], str]:
    """The result of a job for people and for programs.

    >>> result_content({"width": 3})
    ({'result': {'width': 3}}, '{"width":3}')
    """
    if isinstance(result, bytes):
        try:
            return {"result": result.decode()}, result.decode()
        except UnicodeDecodeError:
            return {"result_base64": b64encode(result).decode()}, printable(result)
    return {"result": result}, result if isinstance(result, str) else msgspec.json.encode(result).decode()


def _typed(given: argparse.Namespace) -> bool:
    """Return whether a person types the messages, whom progress output would disturb."""
    return not given.values and not given.files and sys.stdin is not None and sys.stdin.isatty()


def _portions(given: argparse.Namespace, interrupts: Interrupts) -> Iterator[InputPortion]:
    """Iterate over the messages as they arrive."""
    if given.json_lines:
        for messages in json_messages(interrupts, by_broker=True):
            first, *columns = zip(*map(msgspec.structs.astuple, messages), strict=True)
            yield InputPortion(first, *(column if any(it is not None for it in column) else None for column in columns))
        return
    key = None if given.key is None else os.fsencode(given.key)
    subject = () if given.subject is None else ((SUBJECT_HEADER, os.fsencode(given.subject)),)
    headers = headers_from_pairs((*(given.headers or ()), *subject))
    common = (headers, given.timestamp, given.due, given.priority, given.expires)
    for values in plain_values(given, interrupts):
        keys = None if key is None else [key] * len(values)
        pairs = _divided(values, given.key_separator) if given.key_separator else [(keys, values)]
        for keys, values in pairs:
            others: Any = (None if it is None else [it] * len(values) for it in common)
            yield InputPortion(values, keys, *others)


def _divided(given: list[bytes], separator: str) -> Iterator[tuple[list[bytes], list[bytes]]]:
    """Split messages at the separator into keys and values."""
    sign = os.fsencode(separator)
    parts = [text.partition(sign) for text in given]
    good = list(takewhile(lambda part: part[1], parts))
    if good:
        yield [part[0] for part in good], [part[2] for part in good]
    if len(good) < len(given):
        raise InvalidArgument(f"{printable(given[len(good)][:80])!r} has no {separator!r} between a key and a value")
