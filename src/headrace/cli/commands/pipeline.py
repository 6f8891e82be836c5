"""`headrace pipeline`: streaming queries on Spark, in the foreground or looked after by a supervisor."""

import argparse

from headrace.cli.arguments import command_maker, completes, count, duration
from headrace.cli.connection import add_connection, add_yes
from headrace.cli.spark.pipeline_control import remove, restart, start, stop, supervise
from headrace.cli.spark.pipeline_run import run
from headrace.cli.spark.pipeline_status import list_pipelines, logs, status
from headrace.cli.terminal.watch import add_watch

_FILES = """\
FILE is Python with functions decorated by @headrace.spark.pipeline(...), or SQL
with comments that name source and sink. `--master` takes local[*], any master
of Spark's (spark://..., yarn, k8s://...), or a Spark Connect server, sc://...
Needs Spark (`bin/setup spark`), and Java 17 unless it is Spark Connect."""

_RUN = f"""\
examples:
  headrace pipeline run alerts.py
  headrace pipeline run alerts.py --once --json
  headrace pipeline run totals.sql --master 'local[4]' --conf spark.driver.memory=4g

{_FILES}

Runs in the foreground and shows how the queries get on: on a terminal a line
for each, which is redrawn; otherwise a line now and then; with --json all that
Spark tells after each batch. Ctrl-C and SIGTERM let each query finish the batch
that it is at; a second signal does not wait. The next run goes on from there.

--reset-checkpoint sets the checkpoints of the file's queries aside: they read their
sources again from startingOffsets, with empty state, and write again what they
have written before. It asks first when there is a terminal to ask on; otherwise it
needs --yes. Renamed checkpoints are kept beside the new ones until you delete them.

--quick halves the time of small batches on this machine's disk, and gives up
the checksums of local files, of checkpoints among them.

exit codes: 0 all queries have ended, or were asked to; 1 one has failed; 2
wrong usage, or Spark is not installed.
"""

_START = f"""\
examples:
  headrace pipeline start alerts.py
  headrace pipeline start alerts.py --name eu-alerts --restart always
  headrace pipeline start eu-alerts

{_FILES}

The broker keeps what is wanted, and a supervisor on this host keeps it so; if
none is at work, one is started. Given the NAME of a pipeline that was stopped or
has failed, it is started as it was before. A driver that fails is started again
after 1s, 2s, 4s and so on up to 60s; after a minute without failure that begins
anew. What another attempt cannot help is not tried again: a mistake in the file,
a topic that is gone, a checkpoint that does not fit the query any more.

Waits until every query has started: where it begins to read is fixed, and its
first batch is done, or takes longer than 30s; or until --wait is over.

A query that reads other sources or aggregates otherwise cannot go on from its
checkpoint. Run it under another --name; or stop the pipeline and start it with
--reset-checkpoint: the queries of the file read their sources again from
startingOffsets, with empty state, and write again what they have written before.
It asks first when there is a terminal to ask on; otherwise it needs --yes. The old
checkpoints are renamed, and kept until you delete them.
"""

_STOP = """\
example:
  headrace pipeline stop alerts

Lets each query finish the batch that it is at. Waits until the driver has ended.
"""

_RESTART = """\
example:
  headrace pipeline restart alerts

Ends the driver and starts another, which reads the file anew.
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

What the driver and Spark say goes to a file on the host where the driver runs.
"""

_REMOVE = """\
examples:
  headrace pipeline remove alerts --yes
  headrace pipeline remove alerts --yes --files

Forgets a pipeline that is stopped. Its checkpoints and its log stay, and one
that is started under the same name goes on from there, unless --files is given.
Asks first when there is a terminal to ask on; otherwise it needs --yes.
"""

_SUPERVISE = """\
example:
  headrace pipeline supervise --stay

Keeps the pipelines of this host as they are wanted. `headrace pipeline start`
starts one that ends when nothing is wanted any more; run it yourself, for
example by systemd, to have pipelines back after the machine was restarted.
There is one for each host and broker: a second one ends at once. SIGTERM ends it
and its drivers, which come back with the next supervisor. When it is killed, the
drivers go on, and the next supervisor finds them.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the commands to the parser of `headrace pipeline`."""
    parser.epilog = "`headrace pipeline COMMAND --help` tells more, with examples."
    make = command_maker(parser)
    running = make("run", run, "run the queries of a file in the foreground", _RUN)
    completes(running.add_argument("file", metavar="FILE", help="Python or SQL"), "file")
    _add_running(running)
    running.add_argument("--supervised", metavar="DIR", help="how a supervisor runs it: all of its files are in DIR")
    starting = make("start", start, "have a pipeline run from now on, looked after by a supervisor", _START)
    completes(starting.add_argument("what", metavar="FILE|NAME", help="a file, or a pipeline there is"), "file")
    _add_running(starting)
    starting.set_defaults(master=None)
    starting.add_argument(
        "--restart", choices=("always", "on-failure", "never"), help="when to start it again (default: on-failure)"
    )
    starting.add_argument(
        "--max-restarts", metavar="N", type=count, help="give up after so many in a row (default: never)"
    )
    stopping = make("stop", stop, "have a pipeline run no more", _STOP)
    restarting = make("restart", restart, "end a pipeline's driver and start another", _RESTART)
    listing = make("list", list_pipelines, "list pipelines and what they do", _LIST)
    listing.add_argument("--names", action="store_true", help="print only the names")
    telling = make("status", status, "tell all about a pipeline", _STATUS)
    reading = make("logs", logs, "print the log of a pipeline's driver", _LOGS)
    removing = make("remove", remove, "forget a pipeline", _REMOVE)
    supervising = make("supervise", supervise, "keep the pipelines of this host as they are wanted", _SUPERVISE)
    for each in (stopping, restarting, telling, reading, removing):
        completes(each.add_argument("name", metavar="NAME", help="the pipeline's name"), "pipeline")
    reading.add_argument("-f", "--follow", action="store_true", help="print what comes, until Ctrl-C")
    reading.add_argument("-n", "--lines", metavar="N", type=count, default=100, help="the last so many (default: 100)")
    removing.add_argument("--files", action="store_true", help="delete its checkpoints and its log, too")
    add_yes(removing)
    supervising.add_argument("--stay", action="store_true", help="do not end when nothing is wanted")
    for each in (starting, stopping, restarting):
        each.add_argument(
            "--wait", metavar="TIME", type=duration, default=120.0, help="how long to wait for it (default: 2m)"
        )
        each.add_argument("--no-wait", dest="wait", action="store_const", const=0.0, help="do not wait for it")
    add_watch(listing, telling)
    for each in (running, starting, stopping, restarting, listing, telling, reading, removing, supervising):
        add_connection(each)


def _add_running(parser: argparse.ArgumentParser) -> None:
    """Add what says how a pipeline runs."""
    add = parser.add_argument
    add("--name", metavar="NAME", help="what the pipeline is called (default: as the file)")
    add("--master", metavar="M", default="local[*]", help="where Spark runs (default: local[*])")
    add(
        "--conf",
        metavar="NAME=VALUE",
        type=setting,
        action="append",
        default=[],
        help="a setting of Spark's; may be given again",
    )
    completes(
        add("--checkpoints", metavar="DIR", help="where queries keep how far they are (default: beside the data)"),
        "directory",
    )
    add("--once", action="store_true", help="end when all that is there now is done")
    add("--reset-checkpoint", action="store_true", help="begin anew, as if it had never run, see below")
    add_yes(parser)
    add("--quick", action="store_true", help="quicker checkpoints without checksums, see below")


def setting(text: str) -> tuple[str, str]:
    """A setting of Spark's, given as NAME=VALUE."""
    name, equals, value = text.partition("=")
    if not equals or not name.startswith("spark."):
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE with a name that begins with 'spark.'")
    return name, value
