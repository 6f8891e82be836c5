"""`headrace pipeline`: runs streaming queries on Spark, in the foreground or under a supervisor."""

import argparse

from headrace.cli.arguments import command_maker, completes, count, duration
from headrace.cli.connection import add_connection, add_yes
from headrace.cli.spark.pipeline_control import remove, restart, start, stop, supervise
from headrace.cli.spark.pipeline_run import run
from headrace.cli.spark.pipeline_status import list_pipelines, logs, status
from headrace.cli.terminal.watch import add_watch

_FILES = """\
FILE is Python with functions decorated by @headrace.spark.pipeline(...), or SQL
with comments that name source and sink. `--master` takes local[*], any Spark
master (spark://..., yarn, k8s://...), or a Spark Connect server, sc://...
Needs Spark (`bin/setup spark`), and, except with Spark Connect, Java 17."""

_RUN = f"""\
examples:
  headrace pipeline run alerts.py
  headrace pipeline run alerts.py --once --json
  headrace pipeline run totals.sql --master 'local[4]' --conf spark.driver.memory=4g

{_FILES}

Runs in the foreground and shows the progress of the queries: on a terminal one
line for each, which is redrawn; otherwise occasional lines; with --json Spark's
progress report after each batch. After Ctrl-C or SIGTERM each query finishes its
current batch; a second signal ends it at once. The next run continues from there.

--reset-checkpoint renames the checkpoints of the file's queries: the queries read
their sources again from startingOffsets, with empty state, and write their output
again. It asks for confirmation on a terminal; otherwise it needs --yes. The renamed
checkpoints are kept beside the new ones until you delete them.

--quick halves the time of small batches on this machine's disk, and turns off
the checksums of local files, including checkpoints.

exit codes: 0 all queries have ended or were stopped; 1 a query has failed; 2
wrong usage, or Spark is not installed.
"""

_START = f"""\
examples:
  headrace pipeline start alerts.py
  headrace pipeline start alerts.py --name eu-alerts --restart always
  headrace pipeline start eu-alerts

{_FILES}

The broker stores which pipelines should run, and a supervisor on this host runs
them; the command starts a supervisor if there is none. Given the NAME of a pipeline
that was stopped or has failed, it starts that with its previous settings. The
supervisor restarts a failed driver after 1s, 2s, 4s and so on up to 60s; after a
minute without failure the delay is 1s again. It does not retry permanent errors: a
mistake in the file, a deleted topic, a checkpoint that no longer fits the query.

Waits until every query has started: its starting offsets are fixed, and its first
batch is done or takes longer than 30s; or until --wait expires.

A query whose sources or aggregations have changed cannot continue from its
checkpoint. Run it under another --name; or stop the pipeline and start it with
--reset-checkpoint: the queries of the file read their sources again from
startingOffsets, with empty state, and write their output again. It asks for
confirmation on a terminal; otherwise it needs --yes. The old checkpoints are
renamed, and kept until you delete them.
"""

_STOP = """\
example:
  headrace pipeline stop alerts

Each query finishes its current batch. Waits until the driver has ended.
"""

_RESTART = """\
example:
  headrace pipeline restart alerts

Stops the driver and starts a new one, which reads the file again.
"""

_LIST = """\
examples:
  headrace pipeline list
  headrace pipeline list --json
"""

_STATUS = """\
examples:
  headrace pipeline status alerts
  headrace pipeline status alerts --json
"""

_LOGS = """\
examples:
  headrace pipeline logs alerts
  headrace pipeline logs alerts -n 1000
  headrace pipeline logs alerts -f

The driver and Spark write their log to a file on the host where the driver runs.
"""

_REMOVE = """\
examples:
  headrace pipeline remove alerts --yes
  headrace pipeline remove alerts --yes --files

Removes a stopped pipeline. Its checkpoints and its log stay, and a new pipeline
with the same name continues from them; --files deletes them too. Asks for
confirmation on a terminal; otherwise it needs --yes.
"""

_SUPERVISE = """\
example:
  headrace pipeline supervise --stay

Runs the supervisor, which starts, restarts and stops the pipelines of this host.
`headrace pipeline start` starts a supervisor that ends when no pipeline should run
any more; run it yourself, for example with systemd, to restart pipelines after a
reboot. Each host has one supervisor per broker: a second one ends at once. SIGTERM
stops the supervisor and its drivers, which the next supervisor starts again. If the
supervisor is killed, the drivers keep running, and the next supervisor adopts them.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the commands to the parser of `headrace pipeline`."""
    parser.epilog = "`headrace pipeline COMMAND --help` explains a command, with examples."
    make = command_maker(parser)
    running = make("run", run, "run the queries of a file in the foreground", _RUN)
    completes(running.add_argument("file", metavar="FILE", help="Python or SQL"), "file")
    _add_running(running)
    running.add_argument("--supervised", metavar="DIR", help="run as a supervisor's child, with all files in DIR")
    starting = make("start", start, "start a pipeline under the supervisor", _START)
    completes(
        starting.add_argument("what", metavar="FILE|NAME", help="a file, or the name of an existing pipeline"), "file"
    )
    _add_running(starting)
    starting.set_defaults(master=None)
    starting.add_argument(
        "--restart", choices=("always", "on-failure", "never"), help="when to restart it (default: on-failure)"
    )
    starting.add_argument(
        "--max-restarts", metavar="N", type=count, help="give up after this many restarts in a row (default: never)"
    )
    stopping = make("stop", stop, "stop a pipeline", _STOP)
    restarting = make("restart", restart, "stop a pipeline's driver and start a new one", _RESTART)
    listing = make("list", list_pipelines, "list pipelines and their states", _LIST)
    listing.add_argument("--names", action="store_true", help="print only the names")
    telling = make("status", status, "print the status of a pipeline", _STATUS)
    reading = make("logs", logs, "print the log of a pipeline's driver", _LOGS)
    removing = make("remove", remove, "forget a pipeline", _REMOVE)
    supervising = make("supervise", supervise, "run the supervisor of this host", _SUPERVISE)
    for each in (stopping, restarting, telling, reading, removing):
        completes(each.add_argument("name", metavar="NAME", help="the pipeline's name"), "pipeline")
    reading.add_argument("-f", "--follow", action="store_true", help="print new lines as they arrive, until Ctrl-C")
    reading.add_argument(
        "-n", "--lines", metavar="N", type=count, default=100, help="the number of last lines (default: 100)"
    )
    removing.add_argument("--files", action="store_true", help="also delete its checkpoints and its log")
    add_yes(removing)
    supervising.add_argument("--stay", action="store_true", help="keep running when no pipeline should run")
    for each in (starting, stopping, restarting):
        each.add_argument("--wait", metavar="TIME", type=duration, default=120.0, help="how long to wait (default: 2m)")
        each.add_argument("--no-wait", dest="wait", action="store_const", const=0.0, help="do not wait")
    add_watch(listing, telling)
    for each in (running, starting, stopping, restarting, listing, telling, reading, removing, supervising):
        add_connection(each)


def _add_running(parser: argparse.ArgumentParser) -> None:
    """Add the options that define how a pipeline runs."""
    add = parser.add_argument
    add("--name", metavar="NAME", help="the name of the pipeline (default: the file's)")
    add("--master", metavar="M", default="local[*]", help="the Spark master (default: local[*])")
    add(
        "--conf",
        metavar="NAME=VALUE",
        type=setting,
        action="append",
        default=[],
        help="a Spark setting; may be repeated",
    )
    completes(
        add(
            "--checkpoints", metavar="DIR", help="the directory for the queries' checkpoints (default: beside the data)"
        ),
        "directory",
    )
    add("--once", action="store_true", help="end when all messages present at the start are processed")
    add("--reset-checkpoint", action="store_true", help="start again without the checkpoints, see below")
    add_yes(parser)
    add("--quick", action="store_true", help="faster checkpoints without checksums, see below")


def setting(text: str) -> tuple[str, str]:
    """Parse a Spark setting, given as NAME=VALUE."""
    name, equals, value = text.partition("=")
    if not equals or not name.startswith("spark."):
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE with a name that begins with 'spark.'")
    return name, value
