"""The commands of `headrace log`, with their arguments and their help."""

import argparse
import os

from headrace.cli.arguments import (
    TIMES,
    Command,
    add_json,
    command_maker,
    completes,
    count,
    header,
    moment,
    more_than_zero,
)
from headrace.cli.bench_options import add_measuring
from headrace.cli.log.append import append
from headrace.cli.log.broker_logs import outside_brokers
from headrace.cli.log.health import bench, info, repair, verify
from headrace.cli.log.read import read, tail

_APPEND = """\
examples:
  headrace log append ./orders "first order" "second order"
  headrace log append ./orders --key 17 --header source=web '{"item": 4}'
  tail -F access.log | headrace log append ./access
  headrace log read ./orders --json | headrace log append ./copy --json-lines

The log is made if there is none. All messages are synced to the disk when the
command ends, also when Ctrl-C or SIGTERM ends it early. Until then, what comes
from stdin can be read by others after --sync-every seconds at most.

--json-lines takes what `headrace log read --json` prints, an object a line:

  {"value": "hello", "key": "k", "headers": {"lang": "en"}, "timestamp": 1700000000000000}

Only the value is needed; null says that the key is deleted. What is not UTF-8
stands in value_base64, key_base64 and headers_base64 instead. If a header's name
repeats, there is header_list instead of headers:

  {"value": "hello", "header_list": [{"name": "a", "value": "1"}, {"name": "a", "value": null}]}

An offset is
ignored: the log gives its own.
"""

_CURSOR = """\
A cursor is a place in the log, kept under a name. The command goes on where the
last one with that cursor ended; a new cursor begins with the oldest message.
With --offset, --time or --last the cursor is moved there first. What was handed
to stdout counts as read: end early with --limit, not with `| head`."""

_READ = f"""\
examples:
  headrace log read ./orders
  headrace log read ./orders --time 2026-01-31T12:00 --limit 10
  headrace log read ./orders --values | sort | uniq -c
  headrace log read ./orders --cursor billing --json

Prints offset, time, key, value and headers, with tabs between them, and "-"
where there is no key.
{TIMES}

{_CURSOR}
"""

_TAIL = f"""\
examples:
  headrace log tail ./orders
  headrace log tail ./orders --last 10 --json
  headrace log tail ./orders --cursor billing --values | ./bill

Begins with the next message, unless told otherwise. Ends with Ctrl-C, SIGTERM,
--limit or --timeout, and when nobody reads its output any more.
{TIMES}

{_CURSOR}
"""

_INFO = """\
example:
  headrace log info ./orders --json
"""

_VERIFY = """\
example:
  headrace log verify ./orders || echo "look at it"

Changes nothing, and may run while the log is being written. Exit code: 0 sound,
3 damaged, 1 could not be checked. What an earlier repair or upgrade found to be
lost is named, but is no damage.
"""

_REPAIR = """\
example:
  headrace log repair ./orders

Nobody may be writing to the log. Damaged bytes are copied to the folder
quarantine of the log and their messages marked as lost; all others keep their
offsets. An unfinished write at the end is copied too, and cut off.
"""

_BENCH = """\
example:
  headrace log bench /mnt/disk --size 1000

Works on logs of its own, in a folder that it makes below DIR and removes.
Without DIR that is the system's temporary folder, which may be in memory rather
than on a disk. Each number is the median of five samples.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the commands to the parser of `headrace log`."""
    parser.description = "A log in a directory, without a server: one process appends, any number read."
    parser.epilog = "`headrace log COMMAND --help` tells more, with examples."
    make = command_maker(parser)

    def command(name: str, run: Command, summary: str, epilog: str) -> argparse.ArgumentParser:
        made = make(name, outside_brokers(run), summary, epilog)
        directory = made.add_argument("directory", metavar="DIR", type=os.path.abspath, help="the log's directory")
        completes(directory, "directory")
        if run is bench:
            directory.nargs, directory.help = "?", "where to make logs (default: a temporary folder)"
        return made

    _add_append(command("append", append, "append messages from arguments, files or stdin", _APPEND))
    _add_reading(command("read", read, "print messages, to the end of the log", _READ))
    _add_tail(command("tail", tail, "print messages as they come", _TAIL))
    add_json(command("info", info, "print what there is to know about a log", _INFO))
    add_json(command("verify", verify, "check every byte of a log", _VERIFY))
    add_json(command("repair", repair, "set damage aside and make a log whole again", _REPAIR))
    add_measuring(command("bench", bench, "measure how fast logs are on this machine", _BENCH))


def _add_append(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("values", metavar="VALUE", nargs="*", help="a message each; none, or only -: lines of stdin")
    add = parser.add_argument
    files = add("--file", dest="files", metavar="F", nargs="+", action="extend", help="append files, each as a message")
    completes(files, "file")
    add("-0", "--null-separated", action="store_true", help="stdin's messages end with a zero byte, not with a newline")
    add("--json-lines", action="store_true", help="stdin's lines are messages in JSON, see below")
    add("--key", help="the key of the messages")
    add(
        "--header",
        dest="headers",
        metavar="NAME=VALUE",
        action="append",
        type=header,
        help="a header of the messages; may be given again",
    )
    add("--timestamp", metavar="TIME", type=moment, help=f"the time of the messages, instead of now. {TIMES}")
    add("--compression", choices=("none", "lz4", "zstd"), default="none", help="compress what is stored")
    add(
        "--sync-every",
        metavar="SECONDS",
        type=more_than_zero(float),
        default=0.1,
        help="write and sync after so long at the latest (default: 0.1)",
    )
    add_json(parser)
    parser.set_defaults(check=_check_append)


def _check_append(given: argparse.Namespace) -> str | None:
    """What is wrong with the arguments together."""
    if given.files and given.values:
        return "give values or --file, not both"
    from_stdin = not given.files and given.values in ([], ["-"])
    if given.null_separated and not from_stdin:
        return "-0 is about stdin: give no values and no --file"
    if given.json_lines and not from_stdin:
        return "--json-lines is about stdin: give no values and no --file"
    if given.json_lines and (
        given.null_separated or given.key is not None or given.headers or given.timestamp is not None
    ):
        return "--json-lines has key, headers and time in each line: give it alone"
    return None


def _add_reading(parser: argparse.ArgumentParser) -> None:
    _add_start(parser)
    parser.add_argument("--until", metavar="N", type=count, help="end before this offset")
    _add_form(parser)


def _add_tail(parser: argparse.ArgumentParser) -> None:
    _add_start(parser)
    parser.add_argument(
        "--timeout", metavar="SECONDS", type=more_than_zero(float), help="end after so long without a message"
    )
    _add_form(parser)


def _add_start(parser: argparse.ArgumentParser) -> None:
    start = parser.add_mutually_exclusive_group()
    start.add_argument("--offset", metavar="N", type=count, help="begin at this offset")
    start.add_argument("--time", metavar="TIME", type=moment, help="begin at the first message of this time or later")
    start.add_argument("--last", metavar="N", type=count, help="begin so many messages before the end")
    parser.add_argument("--cursor", metavar="NAME", help="go on where the cursor stands, and move it along")
    parser.add_argument("--limit", metavar="N", type=count, help="end after so many messages")
    parser.add_argument("--skip-corrupt", action="store_true", help="pass over damaged messages instead of failing")


def _add_form(parser: argparse.ArgumentParser) -> None:
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--values", action="store_true", help="print only the values as they are, with a newline each")
    add_json(form)
    parser.add_argument("-0", "--null-separated", action="store_true", help="with --values: zero bytes, not newlines")
    parser.set_defaults(check=_check_form)


def _check_form(given: argparse.Namespace) -> str | None:
    """What is wrong with the arguments together."""
    return "-0 goes with --values" if given.null_separated and not given.values else None
