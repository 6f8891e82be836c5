"""`headrace verify`: checks a broker's data directory for damage."""

import argparse
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import msgspec

from headrace.cli.arguments import add_json, completes
from headrace.cli.log.health import EXIT_DAMAGED, lost_content, lost_text, record_lines
from headrace.cli.terminal.colours import paint_state
from headrace.cli.terminal.interrupts import Interrupts
from headrace.cli.terminal.output import Output, ProgressLine, counted, offsets_text
from headrace.server import data_bytes, verify_data

if TYPE_CHECKING:
    from headrace.server import CheckedLog, Verified
    from headrace.storage.recovery import LostRange

_EPILOG = """\
example:
  headrace verify ./data || echo "look at it"

Checks that the format file, the journal and the partitions of all topics fit
together, and every byte of every log; and that the messages that were synced,
as the journal says, are in the files. Changes nothing, and may run while a
broker is running. Files that were set aside earlier, and messages that an earlier
repair or upgrade found to be lost, are listed, but are not damage.

Exit code: 0 sound, 3 damaged, 1 could not be checked.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments to the parser of `headrace verify`."""
    parser.epilog = _EPILOG
    parser.set_defaults(run=verify)
    add_data(parser)
    add_json(parser)


def add_data(parser: argparse.ArgumentParser) -> None:
    """Add the argument for the data directory."""
    data = parser.add_argument("data", metavar="DATA", type=os.path.abspath, help="the broker's data directory")
    completes(data, "directory")


def verify(given: argparse.Namespace, out: Output, _: Interrupts) -> int:
    """Check a data directory and print the damage."""
    with ProgressLine("verifying", data_bytes(given.data)) as progress:
        found = verify_data(given.data, progress)
    content = {
        "path": found.path,
        "sound": found.sound,
        "identity": found.identity,
        "topics": found.topics,
        "logs": len(found.logs),
        "messages": sum(log.findings.messages for log in found.logs),
        "bytes": sum(log.findings.bytes for log in found.logs),
        "problems": msgspec.to_builtins(found.problems),
        "damaged_logs": [log_content(log) for log in found.logs if not log.sound],
        "missing": [
            {**msgspec.to_builtins(one), "messages": one.next_offset - one.first_offset} for one in found.missing
        ],
        "lost_earlier": [lost_content(lost) for lost in _lost_earlier(found)],
        "notes": msgspec.to_builtins(found.notes),
        "set_aside": msgspec.to_builtins(found.aside),
    }
    out.tell(content, *_lines(found))
    return 0 if found.sound else EXIT_DAMAGED


def _lines(found: "Verified") -> Iterator[str]:
    checked = counted(sum(log.findings.bytes for log in found.logs), "byte")
    topics, logs = counted(found.topics, "topic"), counted(len(found.logs), "log")
    yield f"{found.path}: {topics}, {logs}, {checked} checked"
    yield from (f"problem: {one.path}: {one.problem}" for one in found.problems)
    for log in found.logs:
        yield from log_lines(log)
    for one in found.missing:
        yield f"missing: {offsets_text(one.first_offset, one.next_offset)} of {one.path}: {one.reason}"
    for lost in _lost_earlier(found):
        yield f"lost earlier: {offsets_text(lost.first_offset, lost.next_offset)} ({lost.path})"
    yield from (f"note: {one.path}: {one.problem}" for one in found.notes)
    yield from (f"set aside earlier: {one.path}: {one.problem}" for one in found.aside)
    yield paint_state("sound" if found.sound else f"DAMAGED; stop the broker and run `headrace repair {found.path}`")


def _lost_earlier(found: "Verified") -> list["LostRange"]:
    return [lost for log in found.logs for lost in log.findings.lost if lost.repaired]


def log_content(log: "CheckedLog") -> dict[str, Any]:
    """Return the findings of a log for JSON output."""
    return {
        "path": log.path,
        "error": log.error,
        "lost": [lost_content(lost) for lost in log.findings.lost if not lost.repaired],
        "torn_bytes": log.findings.torn_bytes,
        "damaged_headers": log.findings.headers,
        "damaged_record": log.findings.record,
    }


def log_lines(log: "CheckedLog") -> Iterator[str]:
    """Return the findings of a log as lines for people; none if it is sound."""
    if log.error:
        yield f"problem: {log.path}: {log.error}"
    yield from (f"damaged: {lost_text(lost)}" for lost in log.findings.lost if not lost.repaired)
    yield from (f"damaged: the header of {header}" for header in log.findings.headers)
    yield from record_lines(log.findings)
    if log.findings.torn_bytes:
        torn = counted(log.findings.torn_bytes, "byte")
        yield f"torn: {torn} of an unfinished write at offset {log.findings.torn_at} of {log.path}"
