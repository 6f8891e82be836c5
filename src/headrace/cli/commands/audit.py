"""`headrace audit`: print and verify the audit trail."""

import argparse
import json
from typing import TYPE_CHECKING

import msgspec

from headrace.cli.arguments import command_maker, more_than_zero
from headrace.cli.connection import add_connection, connected
from headrace.cli.message_formats import time_text
from headrace.cli.terminal.interrupts import Interrupts
from headrace.cli.terminal.output import Output
from headrace.model.audit import AuditHead, AuditRecord, parse_head
from headrace.model.audit_chain import AuditReport
from headrace.model.errors import InvalidArgument, TopicNotFound

if TYPE_CHECKING:
    from headrace.client._sync.bus import Bus

_LOOK_EVERY_S = 0.25
"""How often a waiting command checks for signals and for a closed output, in seconds."""
_DETAILS_CHARS = 160
_DAMAGED = 3
"""The exit code of a verification that found something wrong."""

_SHOW = """\
examples:
  headrace audit show
  headrace audit show --identity ada --outcome forbidden
  headrace audit show -n 20 --json

Prints time, identity, address, action, outcome, and what it was about, separated by
tabs, the oldest first. The outcome is done, or the code of the error.
"""

_TAIL = """\
examples:
  headrace audit tail
  headrace audit tail --outcome forbidden --json

Prints new records as they come; it ends with Ctrl-C, SIGTERM, and when its output is
closed.
"""

_VERIFY = """\
examples:
  headrace audit verify
  headrace audit verify --from-start
  headrace audit verify --head \
    1207:a09d5e23da520b4829e421f51dfd6dc537494db598b35da05c2e74e1a587cc08
  headrace audit verify --log ./copy/topics/12/0

Each record has the digest of the one before: a record that was removed, altered or
moved breaks the chain, and the command says where and ends with exit code 3. Records
that retention removed at the beginning are accepted, unless --from-start is given.

It prints the head of the trail, NUMBER:DIGEST. Keep it elsewhere, and give it with
--head the next time: somebody who can write the broker's files could write a whole new
trail, and that head would not be in it.

With --log it reads a copy of the topic's directory, without a broker.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the commands to the parser of `headrace audit`."""
    parser.epilog = "`headrace audit COMMAND --help` explains a command, with examples."
    make = command_maker(parser)
    showing = make("show", show, "print the newest records", _SHOW)
    showing.add_argument("-n", "--limit", metavar="N", type=more_than_zero(int), default=1000, help="how many (1000)")
    tailing = make("tail", tail, "print new records as they come", _TAIL)
    for each in (showing, tailing):
        each.add_argument("--identity", metavar="NAME", help="only records of this identity")
        each.add_argument("--action", metavar="NAME", help="only records of this action, such as TopicDelete")
        each.add_argument("--outcome", metavar="CODE", help="only records with this outcome, such as done or forbidden")
        add_connection(each)
    verifying = make("verify", verify, "detect records that were removed, altered or reordered", _VERIFY)
    add = verifying.add_argument
    add("--from-start", action="store_true", help="accept no trail whose oldest records are gone")
    add("--head", metavar="NUMBER:DIGEST", type=_head, action="append", default=[], help="must be in the trail")
    add("--log", metavar="PATH", help="the directory of a partition of a copied topic, read without a broker")
    add_connection(verifying)


def _head(text: str) -> AuditHead:
    try:
        return parse_head(text)
    except InvalidArgument as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def show(given: argparse.Namespace, out: Output, _: Interrupts) -> int:
    """Print the newest records."""
    with connected(given, out) as bus:
        for record in bus.audit.history(given.limit):
            _print(record, given, out)
    return 0


def tail(given: argparse.Namespace, out: Output, interrupts: Interrupts) -> int:
    """Print new records as they come."""
    with connected(given, out) as bus:
        _follow(bus, given, out, interrupts)
    return 0


def _follow(bus: "Bus", given: argparse.Namespace, out: Output, interrupts: Interrupts) -> None:
    if not bus.audit.describe().enabled:
        raise TopicNotFound(
            "nothing is recorded: enable security (`headrace auth init`), or start the broker with the setting audit"
        )
    with interrupts.held(once=True), bus.audit.follow(timeout=_LOOK_EVERY_S) as records:
        while not out.closed:
            for message in records:
                _print(message.value, given, out)
                interrupts.check()
            interrupts.check()


def verify(given: argparse.Namespace, out: Output, _: Interrupts) -> int:
    """Verify the trail, and print what is wrong."""
    if given.log:
        report = _verified_log(given)
    else:
        with connected(given, out) as bus:
            report = bus.audit.verify(from_start=given.from_start, heads=given.head)
    lines = [f"offset {finding.offset}: {finding.kind}: {finding.text}" for finding in report.findings]
    if report.first_number > 1:
        lines.append(f"records before {report.first_number} were removed by retention or trimming")
    lines.append(f"{report.records} records, {'intact' if report.intact else 'NOT intact'}")
    if report.head.number:
        lines.append(f"head {report.head}")
    out.tell({"intact": report.intact, **msgspec.to_builtins(report)}, *lines)
    return 0 if report.intact else _DAMAGED


def _verified_log(given: argparse.Namespace) -> AuditReport:
    from headrace.embedded.log import Log
    from headrace.model.audit_chain import ChainVerifier

    verifier = ChainVerifier(from_start=given.from_start, heads=given.head)
    with Log(given.log, readonly=True) as log:
        for message in log.messages(skip_corrupt=True):
            verifier.take(message.offset, message.value)
    return verifier.report()


def _print(record: AuditRecord, given: argparse.Namespace, out: Output) -> None:
    if given.identity not in (None, record.identity) or given.action not in (None, record.action):
        return
    if given.outcome not in (None, record.outcome):
        return
    about = "; ".join(record.resources)
    if record.details:
        details = json.dumps(record.details, ensure_ascii=False, separators=(",", ":"), default=str)
        about = f"{about} {details}".strip()
    about = about if len(about) <= _DETAILS_CHARS else f"{about[:_DETAILS_CHARS]}..."
    columns = (time_text(record.time_us), record.identity or "-", record.address or "-", record.action, record.outcome)
    out.tell(msgspec.to_builtins(record), "\t".join((*columns, about)))
