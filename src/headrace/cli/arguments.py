"""Argument parsers and value types shared by the commands."""

import argparse
import json
import os
import re
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any, NoReturn, TypeVar

from headrace.cli.message_formats import parse_time
from headrace.cli.terminal.interrupts import Interrupts
from headrace.cli.terminal.output import Output
from headrace.model.suggestions import did_you_mean

Command = Callable[[argparse.Namespace, Output, Interrupts], int]
"""The function that runs a command and returns its exit code."""

TIMES = "TIME is ISO 8601 (UTC if it names no zone), or microseconds since 1970."

_N = TypeVar("_N", int, float)
_SECONDS = {"ms": 0.001, "s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
_BYTES = {"": 1, "b": 1} | {
    f"{prefix}{unit}": base**power
    for power, prefix in enumerate("kmgt", 1)
    for unit, base in (("b", 1000), ("ib", 1024))
}
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_DAYS = {"today": 0, "tomorrow": 1}
_NUMBER = r"(\d+(?:\.\d+)?)"
_DURATION = re.compile(_NUMBER + r"\s*(ms|s|m|h|d|w|)")
_SIZE = re.compile(_NUMBER + r"\s*([a-zA-Z]*)")


class UsageError(Exception):
    """The command line is wrong; `parser` prints the usage of its command."""

    def __init__(self, parser: argparse.ArgumentParser, text: str) -> None:
        super().__init__(text)
        self.parser = parser


class CommandParser(argparse.ArgumentParser):
    """The parser of one command: accepts options between values, and reports mistakes with the command's own usage.

    It adds its arguments when they are first needed, so that a command does not slow down the start of the others.
    """

    def __init__(
        self,
        *given: Any,
        fill: Callable[["CommandParser"], None] | None = None,
        passes_on: bool = False,
        **named: Any,
    ) -> None:
        """Create the parser; with `passes_on` it keeps everything after the command unparsed, for another program."""
        super().__init__(*given, **named)
        self._fill = fill
        self._passes_on = passes_on
        self._parsing = False
        self.set_defaults(parser=self)
        self.add_argument("--no-color", action="store_true", default=argparse.SUPPRESS, help=argparse.SUPPRESS)

    def fill(self) -> None:
        """Add the arguments once."""
        fill, self._fill = self._fill, None
        if fill is not None:
            fill(self)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse the arguments, and refuse unknown ones."""
        self.fill()
        if self._passes_on:
            taken = argparse.Namespace() if namespace is None else namespace
            vars(taken).update(self._defaults, arguments=list(args or []))
            return taken, []
        if self._parsing or self._subparsers is not None:  # argparse itself calls this, or the command has no values
            return super().parse_known_args(args, namespace)
        self._parsing = True
        try:
            known, unknown = self.parse_known_intermixed_args(args, namespace)
        finally:
            self._parsing = False
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}{self._meant(unknown)}")
        return known, unknown

    def error(self, message: str) -> NoReturn:
        """Refuse the command line; the caller of the parser tells the user."""
        raise UsageError(self, message)

    def _meant(self, unknown: list[str]) -> str:
        """Suggest options whose names are close to the first unknown one."""
        options = [word.partition("=")[0] for word in unknown if word.startswith("--")]
        meant = did_you_mean(options[0], self._option_string_actions) if options else ""
        return f"; {meant}" if meant else ""

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """Refuse a value that is not among the choices, and suggest close ones."""
        if action.choices is None or value in action.choices:
            return
        known = list(map(str, action.choices))
        meant = did_you_mean(str(value), known) or f"choose from {', '.join(known)}"
        if isinstance(action, argparse._SubParsersAction):
            raise argparse.ArgumentError(None, f"there is no command {value!r}; {meant}")
        raise argparse.ArgumentError(action, f"invalid choice: {value!r}; {meant}")

    def format_help(self) -> str:
        """Return the full help of the command."""
        self.fill()
        return super().format_help()


def command_maker(parser: argparse.ArgumentParser) -> Callable[[str, Command | None, str, str], CommandParser]:
    """Add subcommands to a parser; the returned function creates one from name, function, summary and epilog.

    A command without a function has subcommands of its own.
    """
    commands = parser.add_subparsers(metavar="COMMAND", title="commands", parser_class=CommandParser)

    def make(name: str, run: Command | None, summary: str, epilog: str) -> CommandParser:
        made: CommandParser = commands.add_parser(name, help=summary, **described(summary, epilog))
        if run is not None:
            made.set_defaults(run=run)
        return made

    return make


def described(summary: str, epilog: str) -> dict[str, Any]:
    """Return the options of argparse that all command parsers share."""
    return {
        "description": f"{summary[0].upper()}{summary[1:]}.",
        "epilog": epilog,
        "formatter_class": argparse.RawDescriptionHelpFormatter,
        "allow_abbrev": False,
    }


def completes(action: argparse.Action, kind: str) -> argparse.Action:
    """Set what shells complete as its value: `topic`, `group`, `queue`, `cron`, `context`, `file` or `directory`."""
    action.completes = kind  # type: ignore[attr-defined]
    return action


def add_json(parser: argparse._ActionsContainer) -> None:
    """Add the option --json."""
    parser.add_argument("--json", action="store_true", help="print JSON, one object per line")


def header(text: str) -> tuple[str, bytes]:
    """Parse a header, given as NAME=VALUE."""
    name, equals, content = text.partition("=")
    if not equals or not name:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE")
    return name, os.fsencode(content)


def moment(text: str) -> int:
    """Parse a time; returns microseconds since 1970."""
    try:
        return parse_time(text)
    except (ValueError, OverflowError):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a time; give one like 2026-01-31T12:00:00Z, or microseconds since 1970"
        ) from None


def relative_moment(text: str) -> int:
    """Parse a time, also `5m ago`, `in 5m`, `+5m`, `now` or `tomorrow 09:00`; returns microseconds since 1970."""
    now_us = time.time_ns() // 1000
    if text == "now":
        return now_us
    if text.endswith(" ago"):
        return now_us - int(duration(text.removesuffix(" ago")) * 1e6)
    if text.startswith(("in ", "+")):
        return now_us + int(duration(text.removeprefix("in ").removeprefix("+")) * 1e6)
    try:
        return _on_day(text, now_us) if text.partition(" ")[0] in _DAYS else parse_time(text)
    except (ValueError, OverflowError):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a time; give one like 2026-01-31T12:00:00Z, '5m ago', 'in 2h' or 'tomorrow 09:00'"
        ) from None


def _on_day(text: str, now_us: int) -> int:
    """Parse a time of today or tomorrow, in UTC; midnight if only the day is given."""
    day, _, clock = text.partition(" ")
    date = (_EPOCH + timedelta(microseconds=now_us, days=_DAYS[day])).date()
    return parse_time(f"{date}T{clock or '00:00'}")


def start(text: str) -> int | str | datetime:
    """Parse a position in a topic: `earliest`, `latest`, an offset or a time.

    >>> start("17"), start("1970-01-01")
    (17, datetime.datetime(1970, 1, 1, 0, 0, tzinfo=datetime.timezone.utc))
    """
    if text in ("earliest", "latest"):
        return text
    if text.isascii() and text.isdigit():
        return int(text)
    try:
        return _EPOCH + timedelta(microseconds=relative_moment(text))
    except (argparse.ArgumentTypeError, OverflowError):
        raise argparse.ArgumentTypeError(
            f"{text!r} is no position in a topic; give earliest, latest, an offset, a time like 2026-01-31, or '5m ago'"
        ) from None


def duration(text: str) -> float:
    """Parse a time span, a number of seconds or a number with a unit; returns seconds.

    >>> duration("7d"), duration("1.5"), duration("250ms")
    (604800.0, 1.5, 0.25)
    """
    found = _DURATION.fullmatch(text.strip())
    if not found or not float(found[1]):
        raise argparse.ArgumentTypeError(f"{text!r} is not a time span; give one like 30s, 12h or 7d")
    return round(float(found[1]) * _SECONDS[found[2] or "s"], 6)


def duration_from_zero(text: str) -> float:
    """Parse a time span as `duration` does, or 0; returns seconds."""
    return 0.0 if text.strip() == "0" else duration(text)


def size(text: str) -> int:
    """Parse a size, a number of bytes or a number with a unit; returns bytes.

    >>> size("10GB"), size("512MiB"), size("4096")
    (10000000000, 536870912, 4096)
    """
    found = _SIZE.fullmatch(text.strip())
    factor = _BYTES.get(found[2].lower()) if found else None
    if not found or factor is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size; give one like 10GB (10 times 1000³ bytes) or 512MiB")
    return int(found[1]) * factor if found[1].isdigit() else int(float(found[1]) * factor)


def count(text: str) -> int:
    """Parse a whole number, 0 or greater."""
    if not text.isascii() or not text.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of 0 or more")
    return int(text)


def json_value(text: str) -> Any:
    """Parse a JSON value.

    >>> json_value('{"country": "CH"}')
    {'country': 'CH'}
    """
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not JSON: {error}") from error


def more_than_zero(kind: type[_N]) -> Callable[[str], _N]:
    """Return a parser for numbers above 0."""

    def parse(text: str) -> _N:
        try:
            number = kind(text)
        except ValueError:
            number = kind(0)
        if not 0 < number < float("inf"):
            raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
        return number

    return parse
