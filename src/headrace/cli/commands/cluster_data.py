"""`headrace cluster import` and `export`: a data directory becomes a cluster, and a cluster a data directory."""

import argparse
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from headrace.cli.arguments import Command, CommandParser, add_json, completes
from headrace.cli.setting_options import bytes_text
from headrace.cli.terminal.interrupts import Interrupts
from headrace.cli.terminal.output import Output, ProgressLine, counted
from headrace.server import import_directory, restore_directory

if TYPE_CHECKING:
    from headrace.server import ClusterCopy, NodeOrigin

_IMPORT = """\
examples:
  headrace cluster import ./data --store postgresql://headrace@db/headrace --cluster trading
  headrace cluster import ./data --store s3://bucket/headrace --cluster trading

Makes a new cluster of the data directory of a broker, which must be stopped: it verifies
the directory, copies every file into the store, reads all of it back and compares, and
copies the security definitions to where all nodes read them. The directory itself does
not change, but for its lock. Then start nodes with the same --store and --cluster, each
with an empty --data directory. A cluster of that name must not exist yet. If the command
is interrupted, run it again: nodes refuse to begin on what it has stored. If it then says
that the cluster is there, it was interrupted after its last step.

A directory with damaged or missing messages is refused, as nothing could restore them
in the cluster: `headrace repair` makes them known gaps, and --damaged imports the
directory as it is. Torn bytes at the end of a log, which a broker that was killed
leaves, are not damage.

After the loss of a store, the directory of a stopped node does, too: that of the node
that served last has the most. What was not committed yet may be in it.

Passwords come from the environment (PGPASSWORD, AWS_SECRET_ACCESS_KEY, ...), from
--store-credentials-file, or from where the store's own tools take them.
"""

_EXPORT = """\
examples:
  headrace cluster export ./data --store postgresql://headrace@db/headrace --cluster trading

Writes what the cluster has committed into a new directory, which a broker without a
cluster serves: headrace serve --data ./data. The cluster may be running; it does not
notice. What is committed later is not in the copy, so stop the nodes before if the
copy is to replace the cluster. `headrace restore` copies an earlier state.
Until the copy is whole, the directory has a folder .unfinished, and no command takes it
for a broker's. If the command is killed, run it again; if it then says that the
directory is not empty, and there is no .unfinished in it, the copy is whole.
"""


def add_data_commands(make: Callable[[str, Command | None, str, str], CommandParser]) -> None:
    """Add the commands to the parser of `headrace cluster`."""
    importing = make("import", import_data, "make a cluster of a broker's data directory", _IMPORT)
    data = importing.add_argument("data", metavar="DATA", type=os.path.abspath, help="the broker's data directory")
    completes(data, "directory")
    importing.add_argument(
        "--damaged",
        action="store_true",
        help="import the directory as it is, unverified: what is damaged then is damaged in the cluster",
    )
    exporting = make("export", export_data, "copy a cluster into a data directory", _EXPORT)
    target = exporting.add_argument(
        "target", metavar="DIRECTORY", type=os.path.abspath, help="a directory that is new or empty"
    )
    completes(target, "directory")
    for each in (importing, exporting):
        add_store(each)
        add_json(each)


def add_store(parser: argparse.ArgumentParser) -> None:
    """Add the options that name a cluster in a store."""
    parser.add_argument(
        "--store",
        metavar="URL",
        required=True,
        help="the shared store: postgresql://HOST/DATABASE, s3://BUCKET/PREFIX, redis://HOST/0, directory:///PATH",
    )
    parser.add_argument("--cluster", metavar="NAME", required=True, help="the name of the cluster")
    credentials = parser.add_argument(
        "--store-credentials-file", metavar="FILE", default="", help="file with the credentials of the store"
    )
    completes(credentials, "file")


def import_data(given: argparse.Namespace, out: Output, _: Interrupts) -> int:
    """Make a cluster of a data directory."""
    verifying = ProgressLine("verifying", shown=not given.damaged)
    with ProgressLine("importing") as progress, verifying:
        done = import_directory(
            given.data,
            given.store,
            given.cluster,
            given.store_credentials_file,
            progress.of,
            verifying=verifying.of,
            damaged=given.damaged,
        )
    lines = [
        f"{given.data} is cluster {done.cluster} in {done.store} now: {copied_text(done)}, read back and compared",
        "security definitions copied" if done.definitions else "no security definitions: none were changed here",
        f"start each node: headrace serve --data NEW_DIRECTORY --cluster {done.cluster} --store {done.store}",
    ]
    if done.origin is not None:
        lines.insert(1, _origin_text(done.origin))
    out.tell(copy_content(done), *lines)
    return 0


def _origin_text(origin: "NodeOrigin") -> str:
    """What the directory of a node has, for people."""
    whose = f"it is the copy of node {origin.node} of cluster {origin.cluster}"
    if origin.clean:
        return f"{whose} at {origin.position}, where the node stopped in order"
    return (
        f"{whose}, which did not stop in order: it has what was committed up to {origin.position}, and perhaps later "
        "changes, also ones that were never committed; after a power failure the last ones may be missing"
    )


def export_data(given: argparse.Namespace, out: Output, _: Interrupts) -> int:
    """Copy the newest state of a cluster into a directory."""
    with ProgressLine("exporting") as progress:
        done = restore_directory(
            given.target, given.store, given.cluster, given.store_credentials_file, None, progress.of
        )
    line = f"cluster {done.cluster} in {done.store} as of {done.position} copied to {given.target}: {copied_text(done)}"
    out.tell(copy_content(done), line, f"serve it: headrace serve --data {given.target}")
    return 0


def copied_text(done: "ClusterCopy") -> str:
    """What a copy consists of, for people."""
    return f"{counted(done.files, 'file')}, {bytes_text(done.bytes)}"


def copy_content(done: "ClusterCopy") -> dict[str, Any]:
    """A copy for JSON output."""
    return {
        "path": done.path,
        "cluster": done.cluster,
        "store": done.store,
        "position": str(done.position),
        "time_us": done.time_us,
        "files": done.files,
        "bytes": done.bytes,
        "definitions": done.definitions,
        **_origin_content(done.origin),
    }


def _origin_content(origin: "NodeOrigin | None") -> dict[str, Any]:
    if origin is None:
        return {}
    return {
        "node": origin.node,
        "node_cluster": origin.cluster,
        "node_position": str(origin.position),
        "node_clean": origin.clean,
    }
