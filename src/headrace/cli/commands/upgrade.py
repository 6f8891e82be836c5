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
and for a log without a broker, given its directory. No broker and no writer may
be at work in it. Every message keeps its offset; groups, leased subscriptions,
schedules and transactions are as they were. Each file is written anew beside
itself, so the disk needs room for one more of them: 512 MiB, or what the topic's
segment_bytes says. May be ended, or killed, and run again; a directory that is
of the present format is left as it is. One whose format file is missing or damaged
is refused: `headrace repair` brings it over and puts it in order.

There is no way back: make a copy before, if the earlier Headrace may be needed.
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
    yield f"{done.path}: {logs}, {files} brought over from format {done.from_format} to {done.format}"
    yield from (f"damaged: {offsets_text(one.first_offset, one.next_offset)} ({one.path})" for one in done.damaged)
    if done.damaged:
        lost = counted(sum(one.next_offset - one.first_offset for one in done.damaged), "damaged message")
        yield f"{lost} became gaps that hold the damaged bytes; `headrace verify` lists them as lost earlier"
