"""`headrace python`: runs the Python interpreter in which Headrace is installed."""

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

Runs the Python interpreter in which Headrace is installed, and returns its exit
code. All following arguments, --help included, are passed to Python unchanged.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments to the parser of `headrace python`."""
    parser.epilog = _EPILOG
    parser.usage = "headrace python [ARGUMENT ...]"
    parser.add_argument("arguments", metavar="ARGUMENT", nargs="*", help="arguments of `python`")
    parser.set_defaults(run=python, json=False)


def python(given: argparse.Namespace, out: Output, _: Interrupts) -> int:
    """Become the interpreter."""
    out.flush()
    os.execv(sys.executable, [sys.executable, *given.arguments])
