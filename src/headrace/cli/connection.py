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
from headrace.cli.tls_options import add_tls_options, given_tls_options, with_given_token_file
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
    add_tls_options(broker)
    broker.add_argument(
        "--timeout", metavar="TIME", type=duration, default=30.0, help="how long to wait for an answer (default: 30s)"
    )
    add_json(json_in or parser)


@contextmanager
def connected(
    given: argparse.Namespace, out: Output, wait: float = 0.0, token: str | None = None, *, quiet: bool = False
) -> Iterator["Bus"]:
    """Connect to the broker that the options name, waiting for it if asked; prints the client's warnings, unless quiet.

    A token takes the place of the one that the options or the environment name.
    """
    from headrace.client._sync.connecting import connect

    notes: logging.Handler = logging.NullHandler() if quiet else _Notes(out)
    logging.getLogger("headrace.client").addHandler(notes)
    try:
        with connect(broker_url(given), name=_NAME, timeout=given.timeout, wait=wait, token=token) as bus:
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
    """Return the broker's address, with the tenant and the files of TLS, from the options and the environment."""
    found = resolve(given, os.environ).address
    tls = given_tls_options(given)
    if tls.given():
        from headrace.client.connection.addresses import parse_address, with_options

        address = parse_address(found)
        found = str(with_options(address, tls.over(address.tls), address.place))
    found = with_given_token_file(given, found)
    named = getattr(given, "tenant", None) or os.environ.get(TENANT_VARIABLE)
    if not named:
        return found
    from headrace.client.connection.addresses import with_tenant

    try:
        return with_tenant(found, named)
    except InvalidArgument as error:
        raise InvalidArgument(f"${TENANT_VARIABLE}: {error}") from error


def in_tenant(given: argparse.Namespace) -> str:
    """Return the tenant that --in-tenant names; refuses --tenant, which is about the connection and changes nothing."""
    if given.tenant:
        given.parser.error(f"--tenant is the connection's own tenant: write --in-tenant {given.tenant}")
    named: str = given.in_tenant
    return named


def broker_place(given: argparse.Namespace) -> str:
    """Return the broker's address as it is shown: without the files that TLS uses."""
    from headrace.client.connection.addresses import parse_address

    return parse_address(broker_url(given)).place


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
