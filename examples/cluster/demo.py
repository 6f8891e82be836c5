"""Three nodes and PostgreSQL on this machine, a producer, a consumer, and a killer that shows failovers.

Every few seconds the node that serves is killed with SIGKILL. At the end the whole topic is read and compared with
the receipts: exit status 0 says that nothing that was acknowledged was lost, and nothing is there twice.
"""

import argparse
import contextlib
import logging
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import headrace
from local_nodes import CLUSTER, LocalNodes
from local_postgres import LocalPostgres, PostgresMissing
from traffic import Consumer, Producer, missing

_CATCH_UP_S = 30.0


class Failover(NamedTuple):
    """What happened when a node was killed."""

    killed: str
    serves: str
    seconds: float


class Display:
    """Lines for what happened, and on a terminal one line below them that shows what goes on."""

    def __init__(self) -> None:
        self._is_live = sys.stdout.isatty()
        self._is_coloured = self._is_live and not os.environ.get("NO_COLOR")

    def tell(self, text: str, colour: str = "") -> None:
        """Print a line."""
        painted = f"\x1b[{colour}m{text}\x1b[0m" if colour and self._is_coloured else text
        print(f"\r\x1b[K{painted}" if self._is_live else painted, flush=True)

    def show(self, text: str) -> None:
        """Replace the line that shows what goes on."""
        if self._is_live:
            print(f"\r\x1b[K{text}", end="", flush=True)


def main() -> int:
    """Run the example; returns the exit status."""
    given = _parser().parse_args()
    logging.getLogger("headrace").addHandler(logging.NullHandler())  # clients tell that they connect again
    display = Display()
    with contextlib.ExitStack() as stack:
        directory = given.directory or stack.enter_context(tempfile.TemporaryDirectory(prefix="headrace-cluster-"))
        Path(directory).mkdir(parents=True, exist_ok=True)
        Path(directory).chmod(0o755)  # PostgreSQL's own user has to get to its part of it
        store = given.store or _store(Path(directory), stack, display)
        display.tell(f"store     {store}")
        nodes = stack.enter_context(LocalNodes(Path(directory), store, given.nodes))
        display.tell(f"nodes     {nodes.url}, cluster {CLUSTER}")
        return _run(given, nodes, display)


def _store(directory: Path, stack: contextlib.ExitStack, display: Display) -> str:
    """The address of a PostgreSQL that is started now, or of a directory if there is none."""
    try:
        import psycopg  # noqa: F401 the driver of the store needs it

        return stack.enter_context(LocalPostgres(directory)).url
    except (PostgresMissing, ImportError) as error:
        display.tell(f"WARNING   no PostgreSQL: {error}", "33")
        display.tell("WARNING   the store is a directory instead: good to try things out on one machine only", "33")
        return f"directory://{directory}/store"


def _run(given: argparse.Namespace, nodes: LocalNodes, display: Display) -> int:
    producer, consumer = Producer(nodes.url), Consumer(nodes.url)
    producer.start()
    producer.first_after(time.monotonic())
    consumer.start()
    begun_s = time.monotonic()
    failovers: list[Failover] = []
    while (left_s := begun_s + given.seconds - time.monotonic()) > 0:
        _watch(min(given.kill_every, left_s), producer, consumer, failovers, display)
        if time.monotonic() - begun_s < given.seconds or not failovers:
            failovers.append(_kill(nodes, producer, display))
    producer.stop()
    return _verdict(nodes, producer, consumer, failovers, display)


def _watch(seconds: float, producer: Producer, consumer: Consumer, failovers: list[Failover], display: Display) -> None:
    """Let everything go on for a while, and show it."""
    until_s = time.monotonic() + seconds
    while time.monotonic() < until_s:
        producer.check()
        consumer.check()
        worst = (
            f", failovers {len(failovers)}, slowest {max(each.seconds for each in failovers):.2f} s"
            if failovers
            else ""
        )
        published = len(producer.acknowledged)
        display.show(f"published {published:,}, consumed {len(consumer.seen):,}{worst}")
        time.sleep(0.1)


def _kill(nodes: LocalNodes, producer: Producer, display: Display) -> Failover:
    """Kill the node that serves, wait until another acknowledges, and start the killed one again."""
    with headrace.connect(nodes.url, timeout=60) as bus:
        owner = bus.cluster.describe().shards[0].owner
    killed_s = time.monotonic()
    display.tell(f"kill -9   {owner}, which serves", "31")
    nodes.kill(owner)
    seconds = producer.first_after(time.monotonic()) - killed_s
    with headrace.connect(nodes.url, timeout=60) as bus:
        shard = bus.cluster.describe().shards[0]
    display.tell(f"failover  {shard.owner} acknowledges after {seconds:.2f} s, epoch {shard.epoch}", "32")
    nodes.start(owner)
    nodes.wait_until_followed()
    return Failover(owner, shard.owner, seconds)


def _verdict(
    nodes: LocalNodes, producer: Producer, consumer: Consumer, failovers: list[Failover], display: Display
) -> int:
    """Let the consumer catch up, compare everything, and say what came of it."""
    until_s = time.monotonic() + _CATCH_UP_S
    while len(consumer.seen) < len(producer.acknowledged) and time.monotonic() < until_s:
        consumer.check()
        time.sleep(0.05)
    consumer.stop()
    wrong = missing(nodes.url, producer, consumer)
    for line in wrong:
        display.tell(f"WRONG     {line}", "31")
    times = [each.seconds for each in failovers]
    counts = f"{len(producer.acknowledged):,} acknowledged, {len(consumer.seen):,} consumed"
    display.tell(f"result    {counts}, failovers {len(failovers)}, slowest {max(times):.2f} s")
    display.tell("LOST      see above" if wrong else "OK        nothing lost, nothing doubled", "31" if wrong else "32")
    return 1 if wrong else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="examples/cluster/run", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="how long it runs, about (%(default)s)")
    parser.add_argument("--kill-every", type=float, default=8.0, help="seconds between failovers (%(default)s)")
    parser.add_argument("--nodes", type=int, default=3, help="how many nodes there are (%(default)s)")
    parser.add_argument("--store", help="use this store, instead of a PostgreSQL that is started for it")
    parser.add_argument("--directory", help="keep data and logs in this directory, instead of a temporary one")
    return parser


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
