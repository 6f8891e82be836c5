"""The entry of the command line: finds the command, runs it, and turns what goes wrong into words and exit codes."""

import argparse
import importlib.metadata
import logging
import shlex
import sys
from collections.abc import Sequence

from headrace.cli.interrupts import Interrupted, Interrupts
from headrace.cli.log import add_commands
from headrace.cli.output import Output, let_go_of_stdout, say
from headrace.model.errors import CorruptBatch, DiskFull, HeadraceError, LogInUse, LogNotFound

EXIT_ERROR = 1
EXIT_USAGE = 2

_EPILOG = """\
examples:
  headrace log append ./orders "first order"
  headrace log read ./orders
  headrace log tail ./orders

exit codes:
  0    done
  1    an error: text and code on stderr
  2    wrong usage
  3    verify found damage
  130  ended by Ctrl-C
  143  ended by SIGTERM

With --json, results are JSON on stdout and errors are JSON on stderr:
  {"error": {"code": "log_not_found", "text": "...", "retryable": false}}
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    # Whatever Headrace logs, it also raises or tells: it would be said twice.
    logging.getLogger("headrace").addHandler(logging.NullHandler())
    try:
        given = _parse(arguments)
    except SystemExit as end:
        let_go_of_stdout()
        return int(end.code or 0)
    out = Output(as_json=given.json)
    with Interrupts() as interrupts:
        try:
            return int(given.run(given, out, interrupts))
        except Interrupted as end:
            return end.exit_code
        except BrokenPipeError:
            return 0  # who reads our output has seen enough
        except HeadraceError as error:
            _tell_error(error.code, _explained(error, given.directory), error.retryable, as_json=given.json)
        except OSError as error:
            text = f"{error.filename}: {error.strerror}" if error.filename else str(error.strerror or error)
            _tell_error("system_error", text, False, as_json=given.json)
    return EXIT_ERROR


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="headrace",
        description="Durable logs in directories: append, read and follow messages.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"headrace {_version()}")
    parser.set_defaults(parser=parser)
    rooms = parser.add_subparsers(metavar="COMMAND", title="commands")
    log = rooms.add_parser(
        "log",
        help="a log in a directory, without a server",
        description="A log in a directory, without a server: one process appends, any number read.",
        epilog="`headrace log COMMAND --help` tells more, with examples.",
        allow_abbrev=False,
    )
    log.set_defaults(parser=log)
    add_commands(log)
    given = parser.parse_args(arguments)
    if "run" not in given:
        given.parser.print_help(sys.stderr)
        parser.exit(EXIT_USAGE)
    wrong = given.check(given) if "check" in given else None
    if wrong:
        given.parser.error(wrong)
    return given


def _version() -> str:
    try:
        return importlib.metadata.version("headrace")
    except importlib.metadata.PackageNotFoundError:
        return "(not installed)"


def _explained(error: HeadraceError, directory: str | None) -> str:
    """The error in the words of the command line, where those of the Python API would not help."""
    quoted = shlex.quote(directory or "DIR")
    if isinstance(error, CorruptBatch):
        return (
            f"messages {error.first_offset} to {error.next_offset - 1} are damaged ({error.path} at byte "
            f"{error.position}: {error.reason}); --offset {error.next_offset} goes on behind them, --skip-corrupt "
            "passes over all that is damaged"
        )
    if isinstance(error, DiskFull):
        return f"the disk of {directory} is full; free some space, then append what is missing"
    if isinstance(error, LogInUse):
        return f"{directory} is being written by another process; end that first, or try again"
    if isinstance(error, LogNotFound):
        return f"{error}; to make one: headrace log append {quoted} VALUE"
    return str(error)


def _tell_error(code: str, text: str, retryable: bool, *, as_json: bool) -> None:
    content = {"error": {"code": code, "text": text, "retryable": retryable}}
    say(content, f"headrace: {text} [{code}]", as_json=as_json)


if __name__ == "__main__":
    sys.exit(main())
