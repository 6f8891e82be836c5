"""The list of all commands of `headrace`, and the top-level parser."""

import argparse
import importlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from headrace.cli.arguments import CommandParser, described

if TYPE_CHECKING:
    from headrace.plugins import Plugin

COMMANDS = {
    "a broker": {
        "serve": "run a broker",
        "info": "describe a broker",
        "ping": "check that a broker answers, and measure its latency",
        "bench": "measure the performance of a broker",
        "cluster": "show and administer a cluster, and bring data in and out of it",
        "auth": "set up security: tokens, roles, and certificates for development",
    },
    "through a broker": {
        "topic": "create, list, describe, alter, trim and delete topics",
        "publish": "publish messages from arguments, files or stdin",
        "tail": "print messages of topics as they arrive",
        "group": "list, describe, seek and delete consumer groups",
        "queue": "manage work queues: inspect, drain and redrive their messages",
        "timeline": "list, add, move and cancel scheduled messages",
        "cron": "publish messages repeatedly, by a schedule",
        "subject": "publish to subjects, and print what is published to them",
        "request": "ask those who serve a subject, and print the reply",
        "respond": "answer requests to a subject",
        "sink": "deliver messages of a topic to a file, a web server or a plug-in",
        "route": "carry messages from topics to other topics",
        "webhook": "send messages of topics to URLs, signed, with retries",
        "service": "list registered services, their errors, and who may use the bus",
        "events": "print what happens to topics, groups, services and the rest of the bus",
        "logging": "set how much the broker logs about topics, producers and consumers",
        "audit": "print and verify the audit trail: who did what, or tried to",
        "tenant": "create, list, describe, alter and delete tenants, and print what they use",
    },
    "on Spark": {
        "sql": "query topics, once or as they grow",
        "pipeline": "run and supervise streaming queries",
        "archive": "archive old messages in Parquet files, and restore them",
    },
    "without a broker": {
        "verify": "check the data directory of a broker",
        "repair": "repair a damaged data directory of a broker",
        "upgrade": "convert the data directory of an earlier Headrace",
        "restore": "open a copy of a cluster as it was at an earlier time",
        "log": "append to and read a log without a broker",
    },
    "Python": {
        "python": "run Python with Headrace",
        "shell": "a Python prompt, connected to a broker",
    },
    "command line": {
        "context": "name brokers, and choose which one commands connect to",
        "completion": "print the completion script for your shell",
        "plugins": "list plug-ins, and check that they load",
    },
}
"""Commands with their summaries, by group. Module `headrace.cli.commands.NAME` defines `add_arguments(parser)`."""

PASSED_ON = ("python",)
"""Commands that pass all following arguments on unparsed."""

_EPILOG = """\
examples:
  headrace serve --data ./data &
  headrace topic create orders --partitions 4 --retain-seconds 7d
  headrace publish orders "first order" "second order"
  headrace tail orders --from earliest

  headrace log append ./orders "no broker needed"
  headrace log read ./orders

`headrace COMMAND --help` explains a command, with examples. Commands connect to
the first of these that is set: --connect URL, --context NAME, $HEADRACE_URL,
$HEADRACE_CONTEXT, the context chosen by `headrace context use`; otherwise to a
broker on this machine.

exit codes:
  0    done
  1    error: text and code on stderr
  2    wrong usage
  3    verify found damage
  130  ended by Ctrl-C
  143  ended by SIGTERM

With --json, commands print results as JSON on stdout, and every error, wrong usage
included, as one JSON object on stderr; the code of wrong usage is usage_error:
  {"error": {"code": "topic_not_found", "message": "...", "retryable": false}}

Output to a terminal is coloured; --no-color, $NO_COLOR and TERM=dumb turn colours
off, $FORCE_COLOR turns them on everywhere.
"""


PLUG_INS = "plug-ins"
"""The title of the commands that other packages add."""


def whole_parser(words: Sequence[str] = ("serve",)) -> CommandParser:
    """Return the top-level parser for a command line, by default without commands of plug-ins."""
    groups = COMMANDS
    if _needs_plugins(words):
        others = {plugin.name: f"of {plugin.package}" for plugin in _command_plugins()}
        groups = {**COMMANDS, PLUG_INS: others} if others else COMMANDS
    width = max(len(name) for group in groups.values() for name in group)
    lines = ["Every topic is a durable log: run a broker, publish to topics and read them.", ""]
    for title, group in groups.items():
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
    for title, group in groups.items():
        for name, summary in group.items():
            passes_on = name in PASSED_ON
            fill = _plugin_filler(name) if title == PLUG_INS else _filler(name)
            commands.add_parser(name, fill=fill, passes_on=passes_on, **described(summary, ""))
    return parser


def _needs_plugins(words: Sequence[str]) -> bool:
    """Whether a command line asks for help, or names a command that is not built in: finding plug-ins takes time."""
    first = words[0] if words else "--help"
    return first in ("-h", "--help") or (
        not first.startswith("-") and not any(first in group for group in COMMANDS.values())
    )


def _command_plugins() -> "list[Plugin]":
    """The commands of other packages, but for those whose names Headrace itself uses."""
    from headrace.plugins import COMMANDS as GROUP
    from headrace.plugins import list_plugins

    taken = {name for group in COMMANDS.values() for name in group}
    return [plugin for plugin in list_plugins(GROUP) if plugin.name not in taken]


def _plugin_filler(name: str) -> Callable[[CommandParser], None]:
    def fill(parser: CommandParser) -> None:
        from headrace.plugins import COMMANDS as GROUP
        from headrace.plugins import find_plugin, load_plugin, plugin_failed

        command, plugin = load_plugin(GROUP, name), find_plugin(GROUP, name)
        assert plugin is not None
        try:
            command.add_arguments(parser)
        except (Exception, SystemExit) as error:
            raise plugin_failed(plugin, error, "cannot add its arguments") from error

    return fill


def _filler(name: str) -> Callable[[CommandParser], None]:
    def fill(parser: CommandParser) -> None:
        importlib.import_module(f"headrace.cli.commands.{name}").add_arguments(parser)

    return fill


class _Version(argparse.Action):
    """Prints the version; looks it up only when asked, because the lookup is slow."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        import importlib.metadata

        try:
            version = importlib.metadata.version("headrace")
        except importlib.metadata.PackageNotFoundError:
            version = "(not installed)"
        print(f"headrace {version}")
        parser.exit()
