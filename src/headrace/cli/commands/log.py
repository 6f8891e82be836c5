"""Arguments and help texts of `headrace log` and its commands."""

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

The log is created if it does not exist. When the command ends, all messages are
synced to the disk, also when Ctrl-C or SIGTERM ends it early. Until then, readers
see messages from stdin after --sync-every seconds at most.

--json-lines reads the output of `headrace log read --json`, one object per line:

  {"value": "hello", "key": "k", "headers": {"lang": "en"}, "timestamp": 1700000000000000}

Only the value is required; null deletes the key. Bytes that are not UTF-8 are in
value_base64, key_base64 and headers_base64 instead. If a header's name repeats,
header_list replaces headers:

  {"value": "hello", "header_list": [{"name": "a", "value": "1"}, {"name": "a", "value": null}]}

Offsets are ignored: the log assigns new ones.
"""

_CURSOR = """\
A cursor is a named durable position in the log. The command continues where the
last one with that cursor ended; a new cursor begins with the oldest message.
With --offset, --time or --last the cursor is moved there first. Messages written
to stdout count as read: end early with --limit, not with `| head`."""

_READ = f"""\
examples:
  headrace log read ./orders
  headrace log read ./orders --time 2026-01-31T12:00 --limit 10
  headrace log read ./orders --values | sort | uniq -c
  headrace log read ./orders --cursor billing --json

Prints offset, time, key, value and headers, separated by tabs, and "-" for a
missing key.
{TIMES}

{_CURSOR}
"""

_TAIL = f"""\
examples:
  headrace log tail ./orders
  headrace log tail ./orders --last 10 --json
  headrace log tail ./orders --cursor billing --values | ./bill

Begins with the next message by default. Ends with Ctrl-C, SIGTERM, --limit or
--timeout, and when its output is closed.
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

No process may be writing to the log. Damaged bytes are copied to the log's
directory quarantine and their messages marked as lost; all others keep their
offsets. An unfinished write at the end is copied there too, and cut off.
"""

_BENCH = """\
example:
  headrace log bench /mnt/disk --size 1000

Measures new logs in a temporary directory below DIR, and removes it. The default
DIR is the system's temporary directory, which may be in memory rather than on a
disk. Each number is the median of five samples.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the commands to the parser of `headrace log`."""
    parser.description = "A log in a directory, without a server: one process appends, any number read."
    parser.epilog = "`headrace log COMMAND --help` explains a command, with examples."
    make = command_maker(parser)

    def command(name: str, run: Command, summary: str, epilog: str) -> argparse.ArgumentParser:
        made = make(name, outside_brokers(run), summary, epilog)
        directory = made.add_argument("directory", metavar="DIR", type=os.path.abspath, help="the log's directory")
        completes(directory, "directory")
        if run is bench:
            directory.nargs, directory.help = "?", "the directory for the logs (default: the temporary directory)"
        return made

    _add_append(command("append", append, "append messages from arguments, files or stdin", _APPEND))
    _add_reading(command("read", read, "print messages up to the end of the log", _READ))
    _add_tail(command("tail", tail, "print messages as they arrive", _TAIL))
    add_json(command("info", info, "describe a log", _INFO))
    add_json(command("verify", verify, "check every byte of a log", _VERIFY))
    add_json(command("repair", repair, "quarantine damage and repair a log", _REPAIR))
    add_measuring(command("bench", bench, "measure the performance of logs on this machine", _BENCH))


def _add_append(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("values", metavar="VALUE", nargs="*", help="the messages; none, or only -: lines of stdin")
    add = parser.add_argument
    files = add(
        "--file", dest="files", metavar="F", nargs="+", action="extend", help="append files, each as one message"
    )
    completes(files, "file")
    add(
        "-0", "--null-separated", action="store_true", help="messages on stdin end with a zero byte, not with a newline"
    )
    add("--json-lines", action="store_true", help="lines of stdin are messages in JSON, see below")
    add("--key", help="the key of the messages")
    add(
        "--header",
        dest="headers",
        metavar="NAME=VALUE",
        action="append",
        type=header,
        help="a header of the messages; may be repeated",
    )
    add("--timestamp", metavar="TIME", type=moment, help=f"the time of the messages, instead of now. {TIMES}")
    add("--compression", choices=("none", "lz4", "zstd"), default="none", help="compress stored messages")
    add(
        "--sync-every",
        metavar="SECONDS",
        type=more_than_zero(float),
        default=0.1,
        help="maximum time before messages are written and synced (default: 0.1)",
    )
    add_json(parser)
    parser.set_defaults(check=_check_append)


def _check_append(given: argparse.Namespace) -> str | None:
    """What is wrong with the arguments together."""
    if given.files and given.values:
        return "give values or --file, not both"
    from_stdin = not given.files and given.values in ([], ["-"])
    if given.null_separated and not from_stdin:
        return "-0 applies to stdin: give no values and no --file"
    if given.json_lines and not from_stdin:
        return "--json-lines applies to stdin: give no values and no --file"
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
        "--timeout", metavar="SECONDS", type=more_than_zero(float), help="end after this time without a message"
    )
    _add_form(parser)


def _add_start(parser: argparse.ArgumentParser) -> None:
    start = parser.add_mutually_exclusive_group()
    start.add_argument("--offset", metavar="N", type=count, help="begin at this offset")
    start.add_argument("--time", metavar="TIME", type=moment, help="begin at the first message of this time or later")
    start.add_argument("--last", metavar="N", type=count, help="begin this many messages before the end")
    parser.add_argument("--cursor", metavar="NAME", help="read from this cursor's position, and move it")
    parser.add_argument("--limit", metavar="N", type=count, help="end after this many messages")
    parser.add_argument("--skip-corrupt", action="store_true", help="skip damaged messages instead of failing")


def _add_form(parser: argparse.ArgumentParser) -> None:
    form = parser.add_mutually_exclusive_group()
    form.add_argument(
        "--values", action="store_true", help="print only the values, unchanged, each followed by a newline"
    )
    add_json(form)
    parser.add_argument(
        "-0", "--null-separated", action="store_true", help="with --values: zero bytes instead of newlines"
    )
    parser.set_defaults(check=_check_form)


def _check_form(given: argparse.Namespace) -> str | None:
    """What is wrong with the arguments together."""
    return "-0 needs --values" if given.null_separated and not given.values else None
