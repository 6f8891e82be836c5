"""Every command of `headrace`, and the parser that knows them all."""

import argparse
import importlib
from collections.abc import Callable
from typing import Any

from headrace.cli.arguments import CommandParser, described

COMMANDS = {
    "a broker": {
        "serve": "run a broker",
        "info": "tell what there is to know about a broker",
        "ping": "ask whether a broker answers, and how quickly",
        "bench": "measure how fast a broker is",
    },
    "through a broker": {
        "topic": "create, list, describe, alter, trim and delete topics",
        "publish": "publish messages from arguments, files or stdin",
        "tail": "print messages of topics as they come",
        "group": "list, describe, move and delete consumer groups",
        "queue": "hand out messages one by one: see, settle and retry them",
        "timeline": "see, add, move and cancel messages that come due",
        "cron": "publish messages again and again, at the times you say",
    },
    "on Spark": {
        "sql": "query topics, once or as they grow",
        "pipeline": "run streaming queries, and look after them",
        "archive": "move old messages to Parquet files, and bring them back",
    },
    "without a broker": {
        "verify": "check the data directory of a broker",
        "repair": "make a data directory usable again that a broker refuses",
        "upgrade": "bring the data directory of an earlier Headrace over",
        "log": "append to and read a log in a directory",
    },
    "Python": {
        "python": "run Python with Headrace",
        "shell": "a Python prompt, connected to a broker",
    },
    "the command line itself": {
        "context": "give brokers names, and choose which of them commands talk to",
        "completion": "print what lets your shell complete commands",
    },
}
"""Commands in groups, with what they do. Module `headrace.cli.commands.NAME` has an `add_arguments(parser)`."""

PASSED_ON = ("python",)
"""Commands that take all that follows as it is."""

_EPILOG = """\
examples:
  headrace serve --data ./data &
  headrace topic create orders --partitions 4 --retain-seconds 7d
  headrace publish orders "first order" "second order"
  headrace tail orders --from earliest

  headrace log append ./orders "no broker needed"
  headrace log read ./orders

`headrace COMMAND --help` tells more, with examples. A broker is looked for at
--connect URL, --context NAME, $HEADRACE_URL, $HEADRACE_CONTEXT, in the context
that `headrace context use` chose, and on this machine: the first counts.

exit codes:
  0    done
  1    an error: text and code on stderr
  2    wrong usage
  3    verify found damage
  130  ended by Ctrl-C
  143  ended by SIGTERM

With --json, results are JSON on stdout, and every error, wrong usage included, is
one JSON object on stderr; the code of wrong usage is usage_error:
  {"error": {"code": "topic_not_found", "message": "...", "retryable": false}}

On a terminal there are colours; --no-color, $NO_COLOR and TERM=dumb turn them
off, $FORCE_COLOR turns them on elsewhere.
"""


def whole_parser() -> CommandParser:
    """The parser of the whole command line."""
    width = max(len(name) for group in COMMANDS.values() for name in group)
    lines = ["Every topic is a durable log: run a broker, publish to topics and read them.", ""]
    for title, group in COMMANDS.items():
        lines += [f"{title}:", *(f"  {name:{width}}  {summary}" for name, summary in group.items()), ""]
    parser = CommandParser(
        prog="headrace",
        usage="headrace COMMAND ...",
        description="\n".join(lines).rstrip(),
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="show the version and exit")
    commands = parser.add_subparsers(metavar="COMMAND", help=argparse.SUPPRESS, prog="headrace")
    for group in COMMANDS.values():
        for name, summary in group.items():
            passes_on = name in PASSED_ON
            commands.add_parser(name, fill=_filler(name), passes_on=passes_on, **described(summary, ""))
    return parser


def _filler(name: str) -> Callable[[CommandParser], None]:
    def fill(parser: CommandParser) -> None:
        importlib.import_module(f"headrace.cli.commands.{name}").add_arguments(parser)

    return fill


class _Version(argparse.Action):
    """Prints the version; looks it up only then, for that takes longer than all else."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        import importlib.metadata

        try:
            version = importlib.metadata.version("headrace")
        except importlib.metadata.PackageNotFoundError:
            version = "(not installed)"
        print(f"headrace {version}")
        parser.exit()
