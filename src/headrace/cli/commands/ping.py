"""`headrace ping`: checks that a broker answers, and measures its latency."""

import argparse
import statistics
import time

from headrace.cli.arguments import duration, duration_from_zero, more_than_zero
from headrace.cli.connection import add_connection, broker_place, connected
from headrace.cli.terminal.interrupts import Interrupts
from headrace.cli.terminal.output import Output, counted

_EPILOG = """\
examples:
  headrace ping
  headrace ping --count 100 --interval 10ms --json
  headrace ping --wait 30s && ./start-workers

Sends small requests to the broker, and prints the time from each request to its
answer. Exit code 0: the broker answered; 1: it did not. With --wait it retries for
that time until a broker answers.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments to the parser of `headrace ping`."""
    parser.epilog = _EPILOG
    add = parser.add_argument
    add("-c", "--count", metavar="N", type=more_than_zero(int), default=4, help="the number of requests (default: 4)")
    add(
        "-i",
        "--interval",
        metavar="TIME",
        type=duration_from_zero,
        default=0.2,
        help="the time between requests (default: 0.2s)",
    )
    add("--wait", metavar="TIME", type=duration, default=0.0, help="how long to retry until a broker answers")
    add_connection(parser)
    parser.set_defaults(run=ping)


def ping(given: argparse.Namespace, out: Output, _: Interrupts) -> int:
    """Send requests to the broker, and print their latencies."""
    took_ms: list[float] = []
    with connected(given, out, wait=given.wait) as bus:
        where = broker_place(given)
        for number in range(given.count):
            if number:
                time.sleep(given.interval)
            began_s = time.perf_counter()
            info = bus.info()
            took_ms.append((time.perf_counter() - began_s) * 1000)
            content = {"address": where, "broker_id": info.broker_id, "number": number + 1, "ms": round(took_ms[-1], 3)}
            out.tell(content, f"answer {number + 1} from {where}: {took_ms[-1]:.3f} ms")
    low, middle, high = min(took_ms), statistics.median(took_ms), max(took_ms)
    if not out.json:
        times = f"min {low:.3f} ms, median {middle:.3f} ms, max {high:.3f} ms"
        out.tell({}, f"{counted(len(took_ms), 'answer')}: {times}")
    return 0
