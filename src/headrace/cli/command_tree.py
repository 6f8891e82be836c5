"""The tree of commands, options and values, for shell completion."""

import argparse
from collections.abc import Iterator
from typing import NamedTuple

from headrace.cli.arguments import CommandParser

ANYTHING = "anything"
"""The kind of a value for which a shell offers no completions."""
NAMED = ("topic", "group", "queue", "cron", "route", "tenant", "webhook", "pipeline", "context")
"""The kinds of values whose names `headrace KIND list --names` prints."""


class Value(NamedTuple):
    """The value of an option or of a positional argument."""

    name: str
    kind: str
    """`choice`, a kind whose names `headrace KIND list` prints, `file`, `directory`, or anything."""
    choices: tuple[str, ...] = ()
    repeated: bool = False


class Option(NamedTuple):
    """An option of a command."""

    names: tuple[str, ...]
    summary: str
    value: Value | None
    """None if the option takes no value."""
    repeated: bool


class CommandNode(NamedTuple):
    """A command with its options, values and subcommands."""

    path: tuple[str, ...]
    """The names of the command and its parents, without `headrace`."""
    summary: str
    options: list[Option]
    values: list[Value]
    below: list["CommandNode"]

    def walk(self) -> Iterator["CommandNode"]:
        """Iterate over this command and all its subcommands."""
        yield self
        for node in self.below:
            yield from node.walk()


def command_tree(parser: argparse.ArgumentParser, path: tuple[str, ...] = ()) -> CommandNode:
    """Return the tree of a command, from its parser."""
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
