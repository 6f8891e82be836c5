"""`headrace bench`: how fast a broker is on this machine."""

import argparse
import os

from headrace.cli.arguments import completes
from headrace.cli.bench_options import add_measuring, measure
from headrace.cli.terminal.interrupts import Interrupts
from headrace.cli.terminal.output import Output

_EPILOG = """\
examples:
  headrace bench
  headrace bench /mnt/disk --size 1000
  headrace bench --seconds 0.2 --json
  headrace bench --group leased

Starts a broker of its own, with its data in a folder that it makes below DIR
and removes, and measures it through the Python client. Without DIR that is the
system's temporary folder, which may be in memory rather than on a disk. Each
number is the median of five samples. Broker and client share this machine.

The group `broker` has publishing, consuming, latency and what a broker needs;
`leased` has work queues and the timeline, where a million messages wait.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Fill the parser of `headrace bench`."""
    parser.epilog = _EPILOG
    directory = parser.add_argument(
        "directory",
        metavar="DIR",
        nargs="?",
        type=os.path.abspath,
        help="where the broker keeps its data (default: a temporary folder)",
    )
    completes(directory, "directory")
    parser.add_argument(
        "--group", choices=("broker", "leased"), default="broker", help="what is measured (default: broker)"
    )
    add_measuring(parser)
    parser.set_defaults(run=bench)


def bench(given: argparse.Namespace, out: Output, _: Interrupts) -> int:
    """Measure a broker."""
    from headrace.bench.run import run_broker, run_leased

    return measure(run_leased if given.group == "leased" else run_broker, given, out)
