"""Connection options of the commands, and connecting to the broker."""

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
    """Add the options of every command that connects to a broker; `json_in` is the group that --json belongs to."""
    broker = parser.add_argument_group("broker")
    broker.add_argument(
        "--connect",
        metavar="URL",
        type=address,
        help=f"the broker's address (default: ${URL_VARIABLE}, else a context, else this machine)",
    )
    named = broker.add_argument(
        "--context", metavar="NAME", help="the broker with this name, as given to `headrace context add`"
    )
    completes(named, "context")
    broker.add_argument(
        "--tenant",
        metavar="NAME",
        type=tenant,
        help=f"the tenant of topics, groups and schedules (default: ${TENANT_VARIABLE}, else the address's)",
    )
    broker.add_argument(
        "--timeout", metavar="TIME", type=duration, default=30.0, help="how long to wait for an answer (default: 30s)"
    )
    add_json(json_in or parser)


@contextmanager
def connected(given: argparse.Namespace, out: Output, wait: float = 0.0) -> Iterator["Bus"]:
    """Connect to the broker that the options name, waiting for it if asked; prints the client's warnings."""
    from headrace.client._sync.bus import connect

    notes = _Notes(out)
    logging.getLogger("headrace.client").addHandler(notes)
    try:
        with connect(broker_url(given), name=_NAME, timeout=given.timeout, wait=wait) as bus:
            yield bus
    finally:
        logging.getLogger("headrace.client").removeHandler(notes)


class _Notes(logging.Handler):
    """Prints log messages to stderr, each only once: the two connections of a bus often log the same."""

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
    """Return the broker's address, with the tenant, from the options and the environment."""
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
    """Return whether the user confirms, by --yes or by answering on the terminal."""
    if given.yes:
        return True
    if sys.stdin is None or sys.stderr is None or not (sys.stdin.isatty() and sys.stderr.isatty()):
        given.parser.error("this cannot be undone, and there is no terminal for the question: give --yes")
    print(f"{question} [y/N] ", end="", file=sys.stderr, flush=True)
    answer = sys.stdin.readline()
    if not answer.endswith("\n"):
        print(file=sys.stderr)
    return answer.strip().lower() in ("y", "yes")


def add_yes(parser: argparse.ArgumentParser) -> None:
    """Add the option --yes, which skips the question."""
    parser.add_argument("-y", "--yes", action="store_true", help="do not ask")
