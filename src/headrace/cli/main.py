"""The entry of the command line: finds the command, runs it, and turns what goes wrong into words and exit codes."""

import argparse
import logging
import sys
from collections.abc import Sequence

from headrace.cli.commands import whole_parser
from headrace.cli.explaining import explained
from headrace.cli.interrupts import Interrupted, Interrupts
from headrace.cli.output import EXIT_ERROR, EXIT_USAGE, Output, let_go_of_stdout, say
from headrace.model.errors import HeadraceError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    # Whatever Headrace logs, it also raises or tells: it would be said twice.
    logging.getLogger("headrace").addHandler(logging.NullHandler())
    try:
        given = _parse(arguments)
    except SystemExit as end:
        let_go_of_stdout()
        return int(end.code or 0)
    as_json = getattr(given, "json", False)
    out = Output(as_json=as_json)
    with Interrupts() as interrupts:
        try:
            return int(given.run(given, out, interrupts))
        except Interrupted as end:
            return end.exit_code
        except BrokenPipeError:
            return 0  # who reads our output has seen enough
        except HeadraceError as error:
            _tell_error(error.code, explained(error, given), error.retryable, as_json=as_json)
        except OSError as error:
            text = f"{error.filename}: {error.strerror}" if error.filename else str(error.strerror or error)
            _tell_error("system_error", text, False, as_json=as_json)
    return EXIT_ERROR


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = whole_parser()
    given = parser.parse_args(arguments)
    if "run" not in given:
        given.parser.print_help(sys.stderr)
        parser.exit(EXIT_USAGE)
    wrong = given.check(given) if "check" in given else None
    if wrong:
        given.parser.error(wrong)
    return given


def _tell_error(code: str, text: str, retryable: bool, *, as_json: bool) -> None:
    content = {"error": {"code": code, "text": text, "retryable": retryable}}
    say(content, f"headrace: {text} [{code}]", as_json=as_json)


if __name__ == "__main__":
    sys.exit(main())
