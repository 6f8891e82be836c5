"""`headrace completion`: prints shell completion scripts, generated from the argument parsers."""

import argparse

from headrace.cli.terminal.interrupts import Interrupts
from headrace.cli.terminal.output import Output

_EPILOG = """\
examples:
  source <(headrace completion bash)
  headrace completion bash > ~/.local/share/bash-completion/completions/headrace
  headrace completion zsh > "${fpath[1]}/_headrace"
  headrace completion fish > ~/.config/fish/completions/headrace.fish

Completes commands, options and their values, the names of contexts, and the names
of topics, groups, subscriptions and schedules, which the shell requests from the
broker.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments to the parser of `headrace completion`."""
    parser.epilog = _EPILOG
    parser.add_argument("shell", metavar="SHELL", choices=("bash", "zsh", "fish"), help="bash, zsh or fish")
    parser.set_defaults(run=completion, json=False)


def completion(given: argparse.Namespace, out: Output, _: Interrupts) -> int:
    """Print the completion script for a shell."""
    from headrace.cli import completion_scripts
    from headrace.cli.command_list import whole_parser
    from headrace.cli.command_tree import command_tree

    script = getattr(completion_scripts, given.shell)(command_tree(whole_parser()))
    out.add(script.encode())
    out.flush()
    return 0
