"""`headrace restore`: opens a copy of a cluster as it was at an earlier time."""

import argparse
import os
import re
import time
from typing import TYPE_CHECKING, Any

from headrace.cli.arguments import add_json, completes, relative_moment
from headrace.cli.commands.cluster_data import add_store, copied_text, copy_content
from headrace.cli.message_formats import time_text
from headrace.cli.terminal.interrupts import Interrupts
from headrace.cli.terminal.output import Output, ProgressLine, table
from headrace.server import list_restorable, restore_directory
from headrace.storage.replicated.keys import Position

if TYPE_CHECKING:
    from headrace.server import RestorePoint

_RELATIVE = re.compile(r"-\d+(\.\d+)?(ms|s|m|h|d|w)")
_POSITION = re.compile(r"(\d+):(\d+)")

_EPILOG = """\
examples:
  headrace restore --store postgresql://headrace@db/headrace --cluster trading --list
  headrace restore --store s3://bucket/headrace --cluster trading --at -10m ./earlier
  headrace restore --store s3://bucket/headrace --cluster trading --at 2026-01-31T12:00:00Z ./earlier
  headrace restore --store s3://bucket/headrace --cluster trading --at 3:1042 ./earlier

Copies the state that the cluster had into a new directory, which a broker without a
cluster serves: headrace serve --data ./earlier. The cluster may be running, and does
not change. TIME is ISO 8601 (UTC if it names no zone), -10m, '10m ago' or microseconds
since 1970: what was committed by then is in the copy. EPOCH:N is a position: the first
N WAL objects of that epoch, and everything before. Without --at it is the newest.

A cluster keeps what is needed for backup_seconds (a setting of its nodes; one hour by
default). --list prints from when on copies can be made, and the checkpoints from which
that is quickest. If a copy is killed before it is whole, no command takes the directory
for a broker's: run it again.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments to the parser of `headrace restore`."""
    parser.epilog = _EPILOG
    parser.set_defaults(run=restore, check=_check)
    parser._negative_number_matcher = _RELATIVE
    target = parser.add_argument(
        "target", metavar="DIRECTORY", nargs="?", type=os.path.abspath, help="a directory that is new or empty"
    )
    completes(target, "directory")
    parser.add_argument("--at", metavar="TIME|EPOCH:N", type=_moment, help="the state to copy (default: the newest)")
    parser.add_argument("--list", action="store_true", help="print what can be restored, and copy nothing")
    add_store(parser)
    add_json(parser)


def _moment(text: str) -> int | Position:
    """Parse a time or a position; a time is microseconds since 1970."""
    if found := _POSITION.fullmatch(text):
        return Position(int(found[1]), int(found[2]))
    if _RELATIVE.fullmatch(text):
        return relative_moment(f"{text[1:]} ago")
    try:
        time_us = relative_moment(text)
    except argparse.ArgumentTypeError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is neither a time like 2026-01-31T12:00:00Z or -10m, nor a position like 3:1042"
        ) from None
    if time_us > time.time_ns() // 1000:
        raise argparse.ArgumentTypeError(f"{text!r} is in the future; ten minutes ago is -10m")
    return time_us


def _check(given: argparse.Namespace) -> str | None:
    if given.list and given.target:
        return "--list copies nothing: leave out DIRECTORY"
    return None if given.list or given.target else "give the DIRECTORY to write the copy to, or --list"


def restore(given: argparse.Namespace, out: Output, _: Interrupts) -> int:
    """Copy an earlier state into a directory, or list those there are."""
    if given.list:
        return _list(given, out)
    with ProgressLine("restoring") as progress:
        done = restore_directory(
            given.target, given.store, given.cluster, given.store_credentials_file, given.at, progress.of
        )
    at = f", the last change of {time_text(done.time_us)}" if done.time_us else ""
    out.tell(
        copy_content(done),
        f"cluster {done.cluster} as of {done.position}{at} copied to {given.target}: {copied_text(done)}",
        f"serve it: headrace serve --data {given.target}",
    )
    return 0


def _list(given: argparse.Namespace, out: Output) -> int:
    points = list_restorable(given.store, given.cluster, given.store_credentials_file)
    if out.json:
        for point in points:
            out.tell(_content(point))
        return 0
    rows = [(point.what, str(point.position), time_text(point.time_us) if point.time_us else "") for point in points]
    out.tell({}, *table(("what", "position", "time"), *rows))
    return 0


def _content(point: "RestorePoint") -> dict[str, Any]:
    return {"what": point.what, "position": str(point.position), "time_us": point.time_us}
