"""`headrace request`: asks those who serve a subject, and prints the reply."""

import argparse
import os
import sys

from headrace.cli.arguments import header
from headrace.cli.connection import add_connection, connected
from headrace.cli.message_formats import header_shown
from headrace.cli.subject_formats import json_content
from headrace.cli.terminal.interrupts import Interrupts
from headrace.cli.terminal.output import Output
from headrace.model.errors import InvalidArgument
from headrace.model.headers import headers_from_pairs

_EPILOG = """\
examples:
  headrace request price.quote '{"item": "plum"}'
  headrace request price.quote --header lang=en --timeout 2s --json < order.json -
  headrace request time.now --headers

One of those who serve the subject gets the request; `headrace respond` starts one.
Prints the value of the reply, unchanged, and a newline. --timeout is how long to
wait for the reply.

Errors: no_responders if nobody serves the subject, timeout if there is no reply in
time, service_failed if the handler failed; with --json the error has the handler's
code and details.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments to the parser of `headrace request`."""
    parser.epilog = _EPILOG
    add = parser.add_argument
    add("subject", metavar="SUBJECT", help="the subject, such as price.quote")
    add(
        "value",
        metavar="VALUE",
        nargs="?",
        default="",
        help="the value of the request; -: all of stdin (default: none)",
    )
    add(
        "--header",
        dest="given_headers",
        metavar="NAME=VALUE",
        action="append",
        type=header,
        help="a header of the request; may be repeated",
    )
    add("--headers", dest="show_headers", action="store_true", help="print the headers of the reply before its value")
    add_connection(parser)
    parser.set_defaults(run=request)


def request(given: argparse.Namespace, out: Output, _: Interrupts) -> int:
    """Send a request, and print the reply."""
    headers = headers_from_pairs(given.given_headers or ())
    with connected(given, out) as bus:
        reply = bus.request(given.subject, _value(given), headers=headers, timeout=given.timeout)
    if out.json:
        out.tell({"subject": given.subject} | json_content(reply.value, reply.headers))
        return 0
    if given.show_headers:
        for pair in reply.header_list:
            out.add(header_shown(pair).encode() + b"\n")
    out.add(reply.value + b"\n")
    out.flush()
    return 0


def _value(given: argparse.Namespace) -> bytes:
    if given.value != "-":
        return os.fsencode(given.value)
    if sys.stdin is None:
        raise InvalidArgument("stdin is closed; give a VALUE")
    return sys.stdin.buffer.read()
