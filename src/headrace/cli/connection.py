"""How commands find a broker and talk to it."""

import argparse
import logging
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from headrace.cli.arguments import add_json, completes, duration
from headrace.cli.contexts import address, resolve, tenant
from headrace.cli.terminal.output import Output
from headrace.client.connection.environment import TENANT_VARIABLE, URL_VARIABLE
from headrace.model.errors import InvalidArgument

if TYPE_CHECKING:
    from headrace.client._sync.bus import Bus

_NAME = "headrace command line"
_SAME_AGAIN_S = 5.0


def add_connection(parser: argparse.ArgumentParser, json_in: argparse._ActionsContainer | None = None) -> None:
    """Add what every command that needs a broker takes; `json_in` is where its choice of forms is."""
    broker = parser.add_argument_group("broker")
    broker.add_argument(
        "--connect",
        metavar="URL",
        type=address,
        help=f"where the broker is (default: ${URL_VARIABLE}, else a context, else this machine)",
    )
    named = broker.add_argument(
        "--context", metavar="NAME", help="where the broker is, by the name that `headrace context add` gave it"
    )
    completes(named, "context")
    broker.add_argument(
        "--tenant",
        metavar="NAME",
        type=tenant,
        help=f"whose topics, groups and schedules names mean (default: ${TENANT_VARIABLE}, else the address's)",
    )
    broker.add_argument(
        "--timeout", metavar="TIME", type=duration, default=30.0, help="how long to wait for an answer (default: 30s)"
    )
    add_json(json_in or parser)


@contextmanager
def connected(given: argparse.Namespace, out: Output, wait: float = 0.0) -> Iterator["Bus"]:
    """A connection to the broker that the user means, for which it may be waited; what the client warns of is told."""
    from headrace.client._sync.bus import connect

    notes = _Notes(out)
    logging.getLogger("headrace.client").addHandler(notes)
    try:
        with connect(broker_url(given), name=_NAME, timeout=given.timeout, wait=wait) as bus:
            yield bus
    finally:
        logging.getLogger("headrace.client").removeHandler(notes)


class _Notes(logging.Handler):
    """Tells the user what is logged; what both connections of a bus have to say, only once."""

    def __init__(self, out: Output) -> None:
        super().__init__(logging.WARNING)
        self._out = out
        self._said: dict[str, float] = {}

    def emit(self, record: logging.LogRecord) -> None:
        """Tell it."""
        text, now_s = record.getMessage(), time.monotonic()
        if now_s - self._said.get(text, 0.0) >= _SAME_AGAIN_S:
            self._said[text] = now_s
            self._out.note(text)


def broker_url(given: argparse.Namespace) -> str:
    """Where the user means the broker to be, with the tenant that the user means."""
    found = resolve(given, os.environ).address
    named = getattr(given, "tenant", None) or os.environ.get(TENANT_VARIABLE)
    if not named:
        return found
    from headrace.client.connection.addresses import with_tenant

    try:
        return with_tenant(found, named)
    except InvalidArgument as error:
        raise InvalidArgument(f"${TENANT_VARIABLE}: {error}") from error


def confirmed(given: argparse.Namespace, question: str) -> bool:
    """Whether the user wants it: by --yes, or by answering on the terminal."""
    if given.yes:
        return True
    if sys.stdin is None or sys.stderr is None or not (sys.stdin.isatty() and sys.stderr.isatty()):
        given.parser.error("this cannot be undone, and there is no terminal to ask on: give --yes")
    print(f"{question} [y/N] ", end="", file=sys.stderr, flush=True)
    answer = sys.stdin.readline()
    if not answer.endswith("\n"):
        print(file=sys.stderr)
    return answer.strip().lower() in ("y", "yes")


def add_yes(parser: argparse.ArgumentParser) -> None:
    """Add the option that answers yes."""
    parser.add_argument("-y", "--yes", action="store_true", help="do not ask")
