"""The commands as a shell sees them that completes what is being typed."""

import argparse
from collections.abc import Iterator
from typing import NamedTuple

from headrace.cli.arguments import CommandParser

ANYTHING = "anything"
"""The kind of a value that nobody can guess."""
NAMED = ("topic", "group", "queue", "cron", "pipeline", "context")
"""The kinds of values whose names `headrace KIND list --names` tells."""


class Value(NamedTuple):
    """What may stand at a place of the command line."""

    name: str
    kind: str
    """`choice`, a name that `headrace KIND list` tells, `file`, `directory`, or anything."""
    choices: tuple[str, ...] = ()
    repeated: bool = False


class Option(NamedTuple):
    """An option of a command."""

    names: tuple[str, ...]
    summary: str
    value: Value | None
    """None: it takes none."""
    repeated: bool


class CommandNode(NamedTuple):
    """A command as a shell sees it."""

    path: tuple[str, ...]
    """The words that lead to it, without `headrace`."""
    summary: str
    options: list[Option]
    values: list[Value]
    below: list["CommandNode"]

    def walk(self) -> Iterator["CommandNode"]:
        """This command and all below it."""
        yield self
        for node in self.below:
            yield from node.walk()


def command_tree(parser: argparse.ArgumentParser, path: tuple[str, ...] = ()) -> CommandNode:
    """A command and all below it, from its parser."""
    if isinstance(parser, CommandParser):
        parser.fill()
    node = CommandNode(path, (parser.description or "").partition("\n")[0].rstrip("."), [], [], [])
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            node.below.extend(command_tree(below, (*path, name)) for name, below in action.choices.items())
        elif action.option_strings:
            value = None if action.nargs == 0 else _value(action)
            repeated = isinstance(action, argparse._AppendAction | argparse._ExtendAction)
            summary = "" if action.help in (None, argparse.SUPPRESS) else str(action.help).replace("%%", "%")
            node.options.append(Option(tuple(action.option_strings), summary, value, repeated))
        else:
            node.values.append(_value(action))
    return node


def _value(action: argparse.Action) -> Value:
    name = str(action.metavar or action.dest).lower()
    repeated = action.nargs in ("*", "+")
    if action.choices:
        return Value(name, "choice", tuple(map(str, action.choices)), repeated)
    return Value(name, getattr(action, "completes", "") or ANYTHING, (), repeated)
