"""`headrace bench`: measures the performance of a broker on this machine."""

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

Starts a broker with its data in a temporary directory below DIR, measures it
through the Python client, and removes the directory. The default DIR is the
system's temporary directory, which may be in memory rather than on a disk. Each
number is the median of five samples. Broker and client share this machine.

The group `broker` measures publishing, consuming, latency, start-up time and memory;
`leased` measures work queues, and the timeline with a million waiting messages.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments to the parser of `headrace bench`."""
    parser.epilog = _EPILOG
    directory = parser.add_argument(
        "directory",
        metavar="DIR",
        nargs="?",
        type=os.path.abspath,
        help="the directory for the broker's data (default: the temporary directory)",
    )
    completes(directory, "directory")
    parser.add_argument(
        "--group", choices=("broker", "leased"), default="broker", help="the benchmarks to run (default: broker)"
    )
    add_measuring(parser)
    parser.set_defaults(run=bench)


def bench(given: argparse.Namespace, out: Output, _: Interrupts) -> int:
    """Measure a broker."""
    from headrace.bench.run import run_broker, run_leased

    return measure(run_leased if given.group == "leased" else run_broker, given, out)
