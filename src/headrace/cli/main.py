"""Entry point of the command line: finds the command, runs it, and turns errors into messages and exit codes."""

import argparse
import errno
import logging
import os
import signal
import sys
from collections.abc import Sequence
from typing import Any

from headrace.cli.arguments import UsageError
from headrace.cli.command_list import PASSED_ON, whole_parser
from headrace.cli.error_texts import explained, service_error
from headrace.cli.terminal import colours
from headrace.cli.terminal.interrupts import Interrupted, Interrupts
from headrace.cli.terminal.output import EXIT_ERROR, EXIT_USAGE, Output, let_go_of_stdout, say
from headrace.model.errors import HeadraceError, PluginUnavailable, TooManyFiles

USAGE_CODE = "usage_error"
"""The error code of wrong usage."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    # Headrace also raises or prints what it logs: the user would read it twice.
    logging.getLogger("headrace").addHandler(logging.NullHandler())
    words = sys.argv[1:] if arguments is None else list(arguments)
    options = _options(words)
    colours.choose(os.environ, off="--no-color" in options)
    try:
        given = _parse(words)
    except UsageError as error:
        _tell_usage(error, as_json="--json" in options)
        return EXIT_USAGE
    except PluginUnavailable as error:
        _tell_error(error.code, str(error), error.retryable, as_json="--json" in options)
        return EXIT_ERROR
    except SystemExit as end:
        let_go_of_stdout()
        return int(end.code or 0)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    out = Output(as_json=getattr(given, "json", False))
    with Interrupts() as interrupts:
        try:
            return _run(given, out, interrupts)
        except UsageError as error:
            _tell_usage(error, as_json=out.json)
            return EXIT_USAGE
        except Interrupted as end:
            return end.exit_code
        except BrokenPipeError:
            return 0  # the reader of our output has closed the pipe
        except HeadraceError as error:
            details = service_error(error)
            _tell_error(error.code, explained(error, given), error.retryable, as_json=out.json, details=details)
        except OSError as error:
            _tell_error(*_of_the_system(error), as_json=out.json)
    return EXIT_ERROR


def _options(words: Sequence[str]) -> set[str]:
    """Return the arguments that can be options of Headrace, before they are parsed."""
    if words and words[0] in PASSED_ON:
        return set()
    end = words.index("--") if "--" in words else len(words)
    return set(words[:end])


def _parse(words: Sequence[str]) -> argparse.Namespace:
    parser = whole_parser(words)
    given = parser.parse_args(words)
    if "run" not in given:
        given.parser.print_help(sys.stderr)
        parser.exit(EXIT_USAGE)
    wrong = given.check(given) if "check" in given else None
    if wrong:
        given.parser.error(wrong)
    return given


def _run(given: argparse.Namespace, out: Output, interrupts: Interrupts) -> int:
    if getattr(given, "watch", None) is None:
        return int(given.run(given, out, interrupts))
    from headrace.cli.terminal.watch import watch

    return watch(given, out, interrupts)


def _of_the_system(error: OSError) -> tuple[str, str, bool]:
    """Return code and text of an operating system error, and whether a retry can help."""
    if error.errno in (errno.EMFILE, errno.ENFILE):
        text = f"{error.strerror}: the limit of open files is reached; close some, or raise the limit (ulimit -n)"
        return TooManyFiles.code, text, TooManyFiles.retryable
    text = f"{error.filename}: {error.strerror}" if error.filename else str(error.strerror or error)
    return "system_error", text, False


def _tell_usage(error: UsageError, *, as_json: bool) -> None:
    prog = error.parser.prog
    content = {"code": USAGE_CODE, "message": str(error), "retryable": False, "help": f"{prog} --help"}
    mark = colours.paint("error:", "bad", stream="stderr")
    usage = error.parser.format_usage()
    say({"error": content}, f"{usage}{prog}: {mark} {error}", as_json=as_json)


def _tell_error(code: str, text: str, retryable: bool, *, as_json: bool, details: dict[str, Any] | None = None) -> None:
    content = {"error": {"code": code, "message": text, "retryable": retryable, **(details or {})}}
    mark = colours.paint("headrace:", "bad", stream="stderr")
    say(content, f"{mark} {text} [{code}]", as_json=as_json)


if __name__ == "__main__":
    sys.exit(main())
