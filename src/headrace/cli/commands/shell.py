"""`headrace shell`: a Python prompt connected to a broker."""

import argparse
import code
import importlib.util
import signal
import sys
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, Any

from headrace.cli.connection import add_connection, broker_place, broker_url
from headrace.cli.terminal.interrupts import Interrupts
from headrace.cli.terminal.output import Output
from headrace.model.errors import HeadraceError

if TYPE_CHECKING:
    from headrace.client._sync.bus import Bus

_EPILOG = """\
examples:
  headrace shell
  headrace shell --connect headrace://queue.example.com:7390

A Python prompt in which headrace is imported and, if a broker answers, bus is
connected to it. Uses IPython if that is installed (headrace python -m pip install
ipython), otherwise Python's own prompt. Ctrl-D ends it.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments to the parser of `headrace shell`."""
    parser.epilog = _EPILOG
    add_connection(parser)
    parser.set_defaults(run=shell)


def shell(given: argparse.Namespace, out: Output, _: Interrupts) -> int:
    """Run a prompt until the user ends it."""
    headrace = sys.modules["headrace"]
    out.flush()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # Ctrl-C interrupts the current input, not the shell
    names: dict[str, Any] = {"__name__": "__console__", "__doc__": None, "headrace": headrace}
    with ExitStack() as stack:
        where, bus = _connection(given)
        if bus is not None:
            names["bus"] = stack.enter_context(bus)
        _prompt(names, "\n".join(_banner(headrace.__version__, where, connected=bus is not None)))
    return 0


def _connection(given: argparse.Namespace) -> tuple[str, "Bus | None"]:
    """Return the broker's address, and a bus if it answers; fails if the user named a broker that does not answer."""
    from headrace.client._sync.connecting import connect

    found = broker_url(given)
    try:
        return broker_place(given), connect(found, name="headrace shell", timeout=given.timeout)
    except HeadraceError as error:
        if given.connect or given.context:
            raise
        return str(error), None


def _banner(version: str, where: str, *, connected: bool) -> list[str]:
    python = ".".join(map(str, sys.version_info[:3]))
    lines = [f"Headrace {version}, Python {python}; `import headrace` is done. Ctrl-D ends."]
    if not connected:
        return [*lines, f"No `bus`: {where}.", '`bus = headrace.open(":memory:")` is one without a broker.']
    return [
        *lines,
        f"`bus` is connected to {where}. Try:",
        '  bus.publish("orders", b"3 apples")',
        "  [each.topic for each in bus.topics()]",
        "  help(bus.subscribe)",
    ]


def _prompt(names: dict[str, Any], banner: str) -> None:
    if importlib.util.find_spec("IPython") is not None:
        from IPython import start_ipython  # type: ignore[import-not-found, unused-ignore]

        print(banner, file=sys.stderr)
        start_ipython(argv=["--no-banner"], user_ns=names)
        return
    with suppress(ImportError):  # without readline only line editing is missing
        import readline
        import rlcompleter

        readline.set_completer(rlcompleter.Completer(names).complete)
        readline.parse_and_bind("tab: complete")
    code.interact(banner, local=names, exitmsg="")
