"""`headrace cluster`: shows the nodes of a cluster, hands its shard over, and brings data in and out."""

import argparse
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from msgspec.structs import asdict

from headrace.cli.arguments import command_maker, count
from headrace.cli.commands.cluster_data import add_data_commands
from headrace.cli.connection import add_connection, connected
from headrace.cli.message_formats import time_text
from headrace.cli.setting_options import bytes_text
from headrace.cli.terminal.colours import paint_state
from headrace.cli.terminal.histogram import span_text
from headrace.cli.terminal.interrupts import Interrupts
from headrace.cli.terminal.output import Output, ProgressLine, counted, table
from headrace.cli.terminal.watch import add_watch
from headrace.model.cluster_requests import ClusterStatus, NodeStatus, ShardStatus
from headrace.model.errors import Timeout

if TYPE_CHECKING:
    from headrace.client._sync.bus import Bus

_POLL_S = 0.1

_STATUS = """\
examples:
  headrace cluster status
  headrace cluster status --watch
  headrace cluster status --connect headrace://a,b,c --json

Any node can be asked: it names the one that serves. The lag of a node is how many WAL
objects it has not applied yet, and how long it is behind; a node without lag takes over
within seconds. A node that is silent has not renewed its record in the store.
"""

_DRAIN = """\
examples:
  headrace cluster drain node-1
  headrace cluster drain node-1 --undo

Before the machine of a node is restarted or taken away. If the node serves, it finishes
what it was asked, hands over to the node with the least lag, and follows; clients go on
there by themselves. Until --undo a drained node follows, and takes over only when no
other node has done so for ten seconds.
"""

_MOVE = """\
examples:
  headrace cluster move 0 node-2

The shard of a cluster is number 0. The node that serves finishes what it was asked and
hands over; clients go on at the other node by themselves. If another node than that one
serves in the end, the exit code is 1.
"""

_UPGRADE = """\
examples:
  headrace cluster upgrade

The last step of a rolling upgrade: when every node runs the new version, the cluster
begins to write the newest format that all of them know. A node of an earlier version
cannot serve from then on. Prints what the format was and is; repeating it does nothing.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the commands to the parser of `headrace cluster`."""
    parser.epilog = "`headrace cluster COMMAND --help` explains a command, with examples."
    make = command_maker(parser)
    showing = make("status", status, "show who serves, who follows, and how far they are", _STATUS)
    draining = make("drain", drain, "let a node serve nothing, and hand over what it serves", _DRAIN)
    moving = make("move", move, "hand a shard over to another node", _MOVE)
    upgrading = make("upgrade", upgrade, "write the newest format that all nodes know", _UPGRADE)
    draining.add_argument("node", metavar="NODE", help="the name of the node")
    draining.add_argument("--undo", action="store_true", help="let it serve again")
    moving.add_argument("shard", metavar="SHARD", type=count, help="the number of the shard")
    moving.add_argument("node", metavar="NODE", help="the name of the node that is to serve it")
    add_watch(showing)
    for each in (showing, draining, moving, upgrading):
        add_connection(each)
    add_data_commands(make)


def status(given: argparse.Namespace, out: Output, _: Interrupts) -> int:
    """Print the state of the cluster."""
    with connected(given, out) as bus:
        found = bus.cluster.describe()
    out.tell(_content(found), *_status_lines(found))
    return 0


def drain(given: argparse.Namespace, out: Output, _: Interrupts) -> int:
    """Let a node serve nothing, or again."""
    with connected(given, out, quiet=True) as bus:  # that the node hands over is what was asked for
        before, begin = bus.cluster.describe(), time.monotonic()
        with ProgressLine(f"waiting until another node can take over from {given.node}", shown=not given.undo):
            bus.cluster.drain(given.node, drained=not given.undo, timeout=0)
        moves = [one for one in before.shards if one.owner == given.node and not given.undo]
        done = [_handed_over(bus, one, begin, given) for one in moves]
    content = {"node": given.node, "drained": not given.undo, "moved": done}
    state = f"{given.node} may serve again" if given.undo else f"{given.node} is drained"
    out.tell(content, *map(_moved_line, done), state)
    return int(any(one["node"] == given.node for one in done))


def move(given: argparse.Namespace, out: Output, _: Interrupts) -> int:
    """Hand a shard over, and wait for it."""
    with connected(given, out, quiet=True) as bus:  # that the node hands over is what was asked for
        before = bus.cluster.describe()
        shard = next((one for one in before.shards if one.shard == given.shard), None)
        if shard is not None and shard.owner == given.node:
            content = {"shard": shard.shard, "node": shard.owner, "epoch": shard.epoch, "seconds": 0.0}
            out.tell({**content, "moved": False}, f"{given.node} serves shard {shard.shard} already: nothing to do")
            return 0
        begin = _begin_move(bus, given)
        assert shard is not None  # or the broker would have refused
        done = _handed_over(bus, shard, begin, given)
    has_moved = done["node"] == given.node
    told = [] if has_moved else [f"{given.node} did not take over: its log, or that of {done['node_before']}, says why"]
    out.tell({**done, "moved": has_moved}, _moved_line(done), *told)
    return 0 if has_moved else 1


def upgrade(given: argparse.Namespace, out: Output, _: Interrupts) -> int:
    """Begin to write the newest format."""
    with connected(given, out) as bus:
        done = bus.cluster.upgrade()
    content = {"format": done.format, "format_before": done.format_before}
    changed = done.format != done.format_before
    text = f"writes format {done.format} from now on, instead of {done.format_before}"
    out.tell(content, text if changed else f"writes format {done.format} already: nothing to do")
    return 0


def _begin_move(bus: "Bus", given: argparse.Namespace) -> float:
    """Ask for the move; the client repeats that while the node has to follow first. Returns when it was asked for."""
    begin = time.monotonic()
    with ProgressLine(f"waiting until {given.node} can take over"):
        bus.cluster.move(given.shard, given.node, timeout=0)
    return begin


def _handed_over(bus: "Bus", before: ShardStatus, begin: float, given: argparse.Namespace) -> dict[str, Any]:
    """Wait until a shard has another epoch, showing how long it takes."""
    with ProgressLine(f"handing shard {before.shard} over") as progress:
        while True:
            found = bus.cluster.describe()
            now = next(one for one in found.shards if one.shard == before.shard)
            waited = time.monotonic() - begin
            if now.epoch > before.epoch:
                break
            if waited > given.timeout:
                raise Timeout(
                    f"{before.owner} still serves shard {before.shard} after {waited:.0f} s; it may still end"
                )
            to = f" to {now.successor}" if now.successor else ""
            progress.say(f"handing shard {before.shard} over from {before.owner}{to}, {waited:.1f} s")
            time.sleep(_POLL_S)
    took = round(waited, 3)
    return {"shard": now.shard, "node_before": before.owner, "node": now.owner, "epoch": now.epoch, "seconds": took}


def _moved_line(done: dict[str, Any]) -> str:
    took = span_text(int(done["seconds"] * 1e6))
    again = done["node"] == done["node_before"]
    how = "again, as no other node took over" if again else f"instead of {done['node_before']}"
    return f"{done['node']} serves shard {done['shard']} {how}, epoch {done['epoch']} ({took})"


def _content(found: ClusterStatus) -> dict[str, Any]:
    """The state for JSON output: all fields, also those that have their defaults."""
    parts = {"shards": list(map(asdict, found.shards)), "nodes": list(map(asdict, found.nodes))}
    return {**asdict(found), **parts}


def _status_lines(found: ClusterStatus) -> Iterator[str]:
    yield f"cluster  {found.cluster}"
    yield f"store    {found.store}"
    for shard in found.shards:
        yield from _shard_lines(shard, found)
    yield ""
    yield from table(
        ("node", "role", "lag", "behind", "version", "heard", "zone", "addresses"),
        *(_node_row(node) for node in found.nodes),
    )


def _shard_lines(shard: ShardStatus, found: ClusterStatus) -> Iterator[str]:
    since = f", since {time_text(shard.serving_us)[:19]}Z" if shard.serving_us else ""
    yield f"shard    {shard.shard}: {shard.owner} serves, epoch {shard.epoch}{since}"
    objects = counted(shard.objects, "WAL object")
    behind = f", {bytes_text(shard.backlog_bytes)} not committed yet" if shard.backlog_bytes else ""
    yield f"log      {objects}{behind}, format {shard.format}{_upgradable(shard, found)}"
    if not shard.checkpoint:
        yield "backup   no checkpoint yet"
    else:
        age = f"{span_text(max(found.time_us - shard.checkpoint_us, 0))} old, " if shard.checkpoint_us else ""
        yield f"backup   newest checkpoint {age}at {shard.checkpoint_epoch}:{shard.checkpoint_objects}"
    if shard.releasing:
        yield f"moving   {shard.owner} hands over to {shard.successor or 'whoever is first'}"


def _upgradable(shard: ShardStatus, found: ClusterStatus) -> str:
    newer = found.format_max > shard.format
    return f"; all nodes know format {found.format_max}: run `headrace cluster upgrade`" if newer else ""


def _node_row(node: NodeStatus) -> tuple[object, ...]:
    role = f"{node.role}, drained" if node.drained else node.role
    is_owner = node.role == "serving"
    return (
        node.node,
        paint_state(role),
        "" if is_owner else f"{node.lag_objects:,}",
        "" if is_owner or not node.lag_us else span_text(node.lag_us),
        node.version,
        "" if is_owner else f"{span_text(node.beat_age_us)} ago",
        node.zone,
        " ".join([*node.addresses, *node.http_addresses]),
    )
