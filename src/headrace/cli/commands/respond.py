"""`headrace respond`: answers requests to a subject, with a fixed value or by running a command."""

import argparse
import os
import subprocess
import threading
from typing import TYPE_CHECKING, Any

from headrace.cli.arguments import count, header, more_than_zero
from headrace.cli.connection import add_connection, connected
from headrace.cli.message_formats import header_shown, printable
from headrace.cli.subject_formats import json_content
from headrace.cli.terminal.interrupts import Interrupts
from headrace.cli.terminal.output import Output
from headrace.model.headers import header_pairs, headers_from_pairs

if TYPE_CHECKING:
    from headrace.client.subjects.messages import IncomingRequest, Reply

_EPILOG = """\
examples:
  headrace respond health --value ok
  headrace respond 'echo.>' --echo
  headrace respond price.quote --exec './quote' --concurrency 4

Answers requests, which `headrace request` or bus.request(...) send. All who serve a
subject share its requests. SUBJECT may be a pattern: * stands for one token, # for
any number, > at the end for one or more.

--exec runs a command with the shell for each request: the value of the request is
its stdin, its stdout is the value of the reply, $HEADRACE_SUBJECT is the subject, and
$HEADRACE_HEADER_NAME each header. If its exit code is not 0, the caller gets
service_failed with the code command_failed and the last line of stderr.

Prints a line for each request. Ends with Ctrl-C, SIGTERM or -n, after the requests
in progress are answered.
"""
_TEXT_CHARS_MAX = 500


class CommandFailed(Exception):
    """The command of `--exec` has failed."""

    code = "command_failed"

    def __init__(self, text: str, exit_code: int) -> None:
        super().__init__(text)
        self.details = {"exit_code": exit_code}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments to the parser of `headrace respond`."""
    parser.epilog = _EPILOG
    add = parser.add_argument
    add("subject", metavar="SUBJECT", help="the subject, or a pattern of subjects")
    answer = parser.add_mutually_exclusive_group(required=True)
    answer.add_argument("--value", metavar="TEXT", help="reply with this text")
    answer.add_argument("--echo", action="store_true", help="reply with the value of the request")
    answer.add_argument("--exec", dest="command", metavar="COMMAND", help="reply with the output of a command")
    add(
        "--header",
        dest="given_headers",
        metavar="NAME=VALUE",
        action="append",
        type=header,
        help="a header of the replies; may be repeated",
    )
    add(
        "--concurrency",
        metavar="N",
        type=more_than_zero(int),
        default=1,
        help="how many requests to handle at once (default: 1)",
    )
    add("-n", "--limit", metavar="N", type=count, help="end after this many requests")
    add("-q", "--quiet", action="store_true", help="do not print the requests")
    add_connection(parser)
    parser.set_defaults(run=respond)


def respond(given: argparse.Namespace, out: Output, interrupts: Interrupts) -> int:
    """Answer requests until a signal or the limit."""
    from headrace.client._sync.app.app import App

    with connected(given, out) as bus, interrupts.held(once=True):
        app = App(bus)
        handler = _Handler(given, out, app.stop)
        app.serves(given.subject, concurrency=given.concurrency)(handler)
        if given.limit == 0:
            return 0
        with interrupts.released():
            app.run(stop_on_signals=False)
    return 0


class _Handler:
    """Prints requests, and makes replies."""

    def __init__(self, given: argparse.Namespace, out: Output, stop: Any) -> None:
        self._given = given
        self._out = out
        self._stop = stop
        self._left: int | None = given.limit
        self._guard = threading.Lock()
        self._headers = headers_from_pairs(given.given_headers or ())

    def __call__(self, request: "IncomingRequest") -> "Reply":
        """Answer a request."""
        from headrace.client.subjects.messages import Reply

        with self._guard:
            if not self._given.quiet:
                self._print(request)
            if self._left is not None:
                self._left -= 1
                if self._left == 0:
                    self._stop()
        return Reply(self._value(request), self._headers)

    def _value(self, request: "IncomingRequest") -> bytes:
        if self._given.echo:
            return bytes(request.value)
        if self._given.command is None:
            return os.fsencode(self._given.value)
        return _output(self._given.command, request)

    def _print(self, request: "IncomingRequest") -> None:
        headers = request.headers
        text = "\t".join([request.subject, printable(request.value), *map(header_shown, header_pairs(headers))])
        self._out.tell({"subject": request.subject} | json_content(request.value, headers), text)


def _output(command: str, request: "IncomingRequest") -> bytes:
    """Run a command for a request; returns what it prints."""
    environment = {**os.environ, "HEADRACE_SUBJECT": request.subject}
    for name, content in header_pairs(request.headers):
        kept = "".join(letter if letter.isalnum() and letter.isascii() else "_" for letter in name.upper())
        environment[f"HEADRACE_HEADER_{kept}"] = (content or b"").decode("utf-8", "replace").replace("\0", "")
    done = subprocess.run(command, shell=True, input=request.value, capture_output=True, env=environment, check=False)
    if done.returncode:
        lines = done.stderr.decode("utf-8", "replace").strip().splitlines()
        raise CommandFailed((lines or ["no message"])[-1][:_TEXT_CHARS_MAX], done.returncode)
    return bytes(done.stdout)
