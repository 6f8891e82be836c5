"""`headrace python`: the Python that Headrace is installed for."""

import argparse
import os
import sys

from headrace.cli.terminal.interrupts import Interrupts
from headrace.cli.terminal.output import Output

_EPILOG = """\
examples:
  headrace python script.py
  headrace python -c 'import headrace; print(headrace.__version__)'
  headrace python -m pip install ipython

Runs the Python interpreter in which Headrace is installed, with all that follows
as it is, and ends with its exit code. What follows is Python's, --help included.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Fill the parser of `headrace python`."""
    parser.epilog = _EPILOG
    parser.usage = "headrace python [ARGUMENT ...]"
    parser.add_argument("arguments", metavar="ARGUMENT", nargs="*", help="what Python is to do: as `python` takes it")
    parser.set_defaults(run=python, json=False)


def python(given: argparse.Namespace, out: Output, _: Interrupts) -> int:
    """Become the interpreter."""
    out.flush()
    os.execv(sys.executable, [sys.executable, *given.arguments])
