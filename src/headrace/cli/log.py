"""The commands of `headrace log`, with their arguments and their help."""

import argparse
import os
from collections.abc import Callable
from typing import Any, TypeVar

from headrace.cli.append import append
from headrace.cli.care import bench, info, repair, verify
from headrace.cli.forms import parse_time
from headrace.cli.interrupts import Interrupts
from headrace.cli.output import Output
from headrace.cli.reading import read, tail

Command = Callable[[argparse.Namespace, Output, Interrupts], int]
_N = TypeVar("_N", int, float)

_TIMES = "TIME is ISO 8601, UTC unless it says otherwise, or microseconds since 1970."

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
stands in value_base64, key_base64 and headers_base64 instead. An offset is
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
{_TIMES}

{_CURSOR}
"""

_TAIL = f"""\
examples:
  headrace log tail ./orders
  headrace log tail ./orders --last 10 --json
  headrace log tail ./orders --cursor billing --values | ./bill

Begins with the next message, unless told otherwise. Ends with Ctrl-C, SIGTERM,
--limit or --timeout, and when nobody reads its output any more.
{_TIMES}

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
3 damaged, 1 could not be checked. What an earlier repair found to be lost is
named, but is no damage.
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


class IntermixedParser(argparse.ArgumentParser):
    """A parser that lets options stand between values, and explains mistakes with its own usage."""

    _parsing = False

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse, and refuse what is not known."""
        if self._parsing:  # argparse calls this in turn
            return super().parse_known_args(args, namespace)
        self._parsing = True
        try:
            known, unknown = self.parse_known_intermixed_args(args, namespace)
        finally:
            self._parsing = False
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return known, unknown


def add_commands(parser: argparse.ArgumentParser) -> None:
    """Add the commands to the parser of `headrace log`."""
    commands = parser.add_subparsers(metavar="COMMAND", title="commands", parser_class=IntermixedParser)

    def command(name: str, run: Command, summary: str, epilog: str) -> argparse.ArgumentParser:
        made: argparse.ArgumentParser = commands.add_parser(
            name,
            help=summary,
            description=f"{summary[0].upper()}{summary[1:]}.",
            epilog=epilog,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        made.set_defaults(run=run, parser=made)
        directory = made.add_argument("directory", metavar="DIR", type=os.path.abspath, help="the log's directory")
        if run is bench:
            directory.nargs, directory.help = "?", "where to make logs (default: a temporary folder)"
        return made

    _add_append(command("append", append, "append messages from arguments, files or stdin", _APPEND))
    _add_reading(command("read", read, "print messages, to the end of the log", _READ))
    _add_tail(command("tail", tail, "print messages as they come", _TAIL))
    _add_json(command("info", info, "print what there is to know about a log", _INFO))
    _add_json(command("verify", verify, "check every byte of a log", _VERIFY))
    _add_json(command("repair", repair, "set damage aside and make a log whole again", _REPAIR))
    _add_bench(command("bench", bench, "measure how fast logs are on this machine", _BENCH))


def _add_append(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("values", metavar="VALUE", nargs="*", help="a message each; none, or only -: lines of stdin")
    add = parser.add_argument
    add("--file", dest="files", metavar="F", nargs="+", action="extend", help="append files, each as one message")
    add("-0", "--null-separated", action="store_true", help="stdin's messages end with a zero byte, not with a newline")
    add("--json-lines", action="store_true", help="stdin's lines are messages in JSON, see below")
    add("--key", help="the key of the messages")
    add(
        "--header",
        dest="headers",
        metavar="NAME=VALUE",
        action="append",
        type=_header,
        help="a header of the messages; may be given again",
    )
    add("--timestamp", metavar="TIME", type=_time, help=f"the time of the messages, instead of now. {_TIMES}")
    add("--compression", choices=("none", "lz4", "zstd"), default="none", help="compress what is stored")
    add(
        "--sync-every",
        metavar="SECONDS",
        type=_more_than_zero(float),
        default=0.1,
        help="write and sync after so long at the latest (default: 0.1)",
    )
    _add_json(parser)
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
    parser.add_argument("--until", metavar="N", type=_count, help="end before this offset")
    _add_form(parser)


def _add_tail(parser: argparse.ArgumentParser) -> None:
    _add_start(parser)
    parser.add_argument(
        "--timeout", metavar="SECONDS", type=_more_than_zero(float), help="end after so long without a message"
    )
    _add_form(parser)


def _add_start(parser: argparse.ArgumentParser) -> None:
    start = parser.add_mutually_exclusive_group()
    start.add_argument("--offset", metavar="N", type=_count, help="begin at this offset")
    start.add_argument("--time", metavar="TIME", type=_time, help="begin at the first message of this time or later")
    start.add_argument("--last", metavar="N", type=_count, help="begin so many messages before the end")
    parser.add_argument("--cursor", metavar="NAME", help="go on where the cursor stands, and move it along")
    parser.add_argument("--limit", metavar="N", type=_count, help="end after so many messages")
    parser.add_argument("--skip-corrupt", action="store_true", help="pass over damaged messages instead of failing")


def _add_form(parser: argparse.ArgumentParser) -> None:
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--values", action="store_true", help="print only the values as they are, with a newline each")
    _add_json(form)
    parser.add_argument("-0", "--null-separated", action="store_true", help="with --values: zero bytes, not newlines")
    parser.set_defaults(check=_check_form)


def _check_form(given: argparse.Namespace) -> str | None:
    """What is wrong with the arguments together."""
    return "-0 goes with --values" if given.null_separated and not given.values else None


def _add_bench(parser: argparse.ArgumentParser) -> None:
    whole, real = _more_than_zero(int), _more_than_zero(float)
    parser.add_argument("--size", metavar="BYTES", type=whole, default=100, help="bytes in a message (default: 100)")
    parser.add_argument("--batch", metavar="N", type=whole, default=1000, help="messages in a batch (default: 1000)")
    parser.add_argument("--seconds", metavar="S", type=real, default=1.0, help="time for each number (default: 1)")
    _add_json(parser)


def _add_json(parser: argparse._ActionsContainer) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON, an object a line")


def _header(text: str) -> tuple[str, bytes]:
    name, equals, content = text.partition("=")
    if not equals or not name:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE")
    return name, os.fsencode(content)


def _time(text: str) -> int:
    try:
        return parse_time(text)
    except (ValueError, OverflowError):
        raise argparse.ArgumentTypeError(
            f"{text!r} is no time; give one like 2026-01-31T12:00:00Z, or microseconds since 1970"
        ) from None


def _count(text: str) -> int:
    if not text.isascii() or not text.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 0 on")
    return int(text)


def _more_than_zero(kind: type[_N]) -> Callable[[str], _N]:
    def parse(text: str) -> _N:
        try:
            number = kind(text)
        except ValueError:
            number = kind(0)
        if not 0 < number < float("inf"):
            raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
        return number

    return parse
