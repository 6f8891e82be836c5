"""`headrace logging`: sets how much the broker logs about topics, producers and consumers."""

import argparse

import msgspec

from headrace.cli.arguments import command_maker, completes
from headrace.cli.connection import add_connection, connected
from headrace.cli.terminal.interrupts import Interrupts
from headrace.cli.terminal.output import Output, table
from headrace.model.log_level_requests import LOG_LEVELS, LogLevelRule

_SET = """\
examples:
  headrace logging set debug --topic 'orders.*'
  headrace logging set debug --producer shop-1
  headrace logging set error --consumer slow-group
  headrace logging set debug

At debug the broker logs each batch that is published, delivered, leased or settled,
without its content; at warning and error it leaves out what is less. The level
applies at once. The broker remembers it, but for its own (the last example), which
lasts until it is stopped.

In a pattern, * matches any characters, ? one. A consumer is the name of a client, of
a group or of a leased subscription. Of several patterns that match, the one with
more characters of its own counts, and a name before all patterns.
"""

_LIST = """\
example:
  headrace logging list
"""

_RESET = """\
examples:
  headrace logging reset --topic 'orders.*'
  headrace logging reset --broker
  headrace logging reset

Forgets the level of a name or pattern, given as it was set; without one all levels.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the commands to the parser of `headrace logging`."""
    parser.epilog = "`headrace logging COMMAND --help` explains a command, with examples."
    make = command_maker(parser)
    setting = make("set", set_level, "set the logging level of topics, producers, consumers or the broker", _SET)
    setting.add_argument("level", metavar="LEVEL", choices=LOG_LEVELS, help=", ".join(LOG_LEVELS))
    _add_scope(setting)
    listing = make("list", list_levels, "list the logging levels that are set", _LIST)
    resetting = make("reset", reset, "reset logging levels", _RESET)
    _add_scope(resetting).add_argument("--broker", action="store_true", help="the broker's own level")
    for each in (setting, listing, resetting):
        add_connection(each)


def _add_scope(parser: argparse.ArgumentParser) -> argparse._MutuallyExclusiveGroup:
    scope = parser.add_mutually_exclusive_group()
    completes(scope.add_argument("--topic", metavar="PATTERN", help="topics whose names match"), "topic")
    scope.add_argument("--producer", metavar="PATTERN", help="clients that publish")
    scope.add_argument("--consumer", metavar="PATTERN", help="clients that read, groups and leased subscriptions")
    return scope


def set_level(given: argparse.Namespace, out: Output, _: Interrupts) -> int:
    """Set a level, and print all."""
    with connected(given, out) as bus:
        bus.logging.set(given.level, topic=given.topic, producer=given.producer, consumer=given.consumer)
        _print(bus.logging.list(), out)
    return 0


def list_levels(given: argparse.Namespace, out: Output, _: Interrupts) -> int:
    """Print the levels that are set."""
    with connected(given, out) as bus:
        _print(bus.logging.list(), out)
    return 0


def reset(given: argparse.Namespace, out: Output, _: Interrupts) -> int:
    """Reset a level or all, and print the rest."""
    with connected(given, out) as bus:
        bus.logging.reset(topic=given.topic, producer=given.producer, consumer=given.consumer, broker=given.broker)
        _print(bus.logging.list(), out)
    return 0


def _print(rules: list[LogLevelRule], out: Output) -> None:
    if out.json:
        for rule in rules:
            out.tell(msgspec.to_builtins(rule))
    elif not rules:
        out.note("no logging level is set")
    else:
        out.tell({}, *table(("scope", "pattern", "level"), *((r.scope, r.pattern or "-", r.level) for r in rules)))
