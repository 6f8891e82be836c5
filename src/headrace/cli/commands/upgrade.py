"""`headrace upgrade`: converts the data directory of an earlier Headrace to the current format."""

import argparse
from collections.abc import Iterator

from headrace.cli.arguments import add_json
from headrace.cli.commands.verify import add_data
from headrace.cli.terminal.interrupts import Interrupts
from headrace.cli.terminal.output import Output, ProgressLine, counted, offsets_text
from headrace.offline import Upgraded, upgrade_data
from headrace.server import data_bytes

_EPILOG = """\
example:
  headrace upgrade ./data

For a data directory that a broker refuses because an earlier Headrace wrote it,
and for the directory of a log without a broker. No broker and no writer may be
running on it. Every message keeps its offset; groups, leased subscriptions,
schedules and transactions do not change. The command rewrites one file after the
other, so the disk needs space for one more file: 512 MiB, or the topic's
segment_bytes. It may be interrupted or killed and run again, and does not change
a directory that already has the current format. It refuses a directory whose format
file is missing or damaged: `headrace repair` upgrades and repairs that one.

An upgrade cannot be undone: make a copy first if you may need the earlier Headrace.
Damaged messages are lost: a gap with the damaged bytes takes their place. The
upgrade lists those that it found. Afterwards `headrace verify` (`headrace log
verify` for a log without a broker) lists them as lost earlier, and does not count
them as damage. Torn bytes at the end of a log stay, and count as damage.

Exit code: 0 done, whether messages were damaged or not, or nothing to do; 1 could
not be done.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments to the parser of `headrace upgrade`."""
    parser.epilog = _EPILOG
    parser.set_defaults(run=upgrade)
    add_data(parser)
    add_json(parser)


def upgrade(given: argparse.Namespace, out: Output, _: Interrupts) -> int:
    """Upgrade a data directory and print what was done."""
    with ProgressLine("upgrading", data_bytes(given.data)) as progress:
        done = upgrade_data(given.data, progress)
    content = {
        "path": done.path,
        "changed": done.changed,
        "from_format": done.from_format,
        "format": done.format,
        "logs": done.logs,
        "segments": done.segments,
        "damaged": [{**one._asdict(), "messages": one.next_offset - one.first_offset} for one in done.damaged],
    }
    out.tell(content, *_lines(done))
    return 0


def _lines(done: Upgraded) -> Iterator[str]:
    if not done.changed:
        yield f"{done.path} has format {done.format} already: nothing to do"
        return
    logs, files = counted(done.logs, "log"), counted(done.segments, "file")
    yield f"{done.path}: {logs}, {files} upgraded from format {done.from_format} to {done.format}"
    yield from (f"damaged: {offsets_text(one.first_offset, one.next_offset)} ({one.path})" for one in done.damaged)
    if done.damaged:
        lost = counted(sum(one.next_offset - one.first_offset for one in done.damaged), "damaged message")
        yield f"{lost} became gaps that hold the damaged bytes; `headrace verify` lists them as lost earlier"
