"""Writes the tables in docs/reference/ from the code they are about; with --check it only says what is out of date."""

import argparse
import os
import re
import sys
from collections.abc import Callable, Iterator
from enum import Enum
from pathlib import Path
from typing import Any

import msgspec

from headrace.cli.command_list import whole_parser
from headrace.cli.configuration import default_data
from headrace.cli.setting_options import duration_text, field_explanations, setting_text
from headrace.client.producer import producer_errors, serializing
from headrace.model import errors
from headrace.model.subscription import SubscriptionSettings
from headrace.model.topic import TopicSettings
from headrace.server import ServerSettings
from headrace.spark import errors as spark_errors

DOCS = Path(__file__).parents[1] / "docs"

_HOME = "~/.local/share/headrace"
"""Where a broker's data is unless somebody says otherwise, for every user."""
_BLOCK = re.compile(r"(<!-- generated: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def filled(page: str) -> str:
    """The text of a page with all its generated parts as they should be."""
    return _BLOCK.sub(lambda block: f"{block[1]}\n{_lines(PARTS[block[2]])}\n{block[3]}", page)


def pages() -> list[Path]:
    """The pages with generated parts."""
    return [page for page in sorted(DOCS.rglob("*.md")) if _BLOCK.search(page.read_text(encoding="utf-8"))]


def main() -> int:
    """Write the pages, or check them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; fail if something is out of date")
    given = parser.parse_args()
    stale = 0
    for page in pages():
        text = page.read_text(encoding="utf-8")
        if filled(text) == text:
            continue
        stale += 1
        sys.stderr.write(f"{page}: {'is out of date' if given.check else 'written anew'}\n")
        if not given.check:
            page.write_text(filled(text), encoding="utf-8")
    return int(given.check and stale > 0)


# The parts. Each yields lines.


def topic_settings() -> Iterator[str]:
    """Every setting of a topic."""
    yield from _settings(TopicSettings)


def subscription_settings() -> Iterator[str]:
    """Every setting of a leased subscription."""
    yield from _settings(SubscriptionSettings)


def server_settings() -> Iterator[str]:
    """Every setting of a server."""
    yield from _settings(ServerSettings)


def error_tree() -> Iterator[str]:
    """Every error, children below their parents."""
    yield "| error | code | try again? | what it says |"
    yield "|---|---|---|---|"
    yield from _errors_below(errors.HeadraceError, 0)


def commands() -> Iterator[str]:
    """Every command with all its arguments."""
    parser = whole_parser()
    for name, below in _commands_of(parser).items():
        yield from _command(f"headrace {name}", below)


PARTS: dict[str, Callable[[], Iterator[str]]] = {
    each.__name__: each for each in (topic_settings, subscription_settings, server_settings, error_tree, commands)
}


# What they are made of.


def _lines(part: Callable[[], Iterator[str]]) -> str:
    return "".join(f"{line}\n" for line in part())


def _settings(kind: type[msgspec.Struct]) -> Iterator[str]:
    explanations = field_explanations(kind)
    yield "| setting | default | meaning |"
    yield "|---|---|---|"
    for field in msgspec.structs.fields(kind):
        yield f"| `{field.name}` | {_default(field)} | {_cell(explanations[field.name])} |"


def _default(field: msgspec.structs.FieldInfo) -> str:
    if field.required:
        return f"`{_HOME}`"  # of `data`, which only a program must give
    if field.default is msgspec.NODEFAULT:
        return "none"  # a table, which is empty at first
    default = _plain(field.default)
    if default == "":
        return "none"
    if isinstance(default, bool):
        return f"`{str(default).lower()}`"
    if "_seconds" in field.name and default is not None:
        return f"`{duration_text(default)}`"
    return f"`{setting_text(field.name, default)}`"


def _errors_below(kind: type[errors.HeadraceError], depth: int) -> Iterator[str]:
    text = " ".join((kind.__doc__ or "").split())
    again = "yes" if kind.retryable else "no"
    yield f"| {'&nbsp;&nbsp;' * depth}`{kind.__name__}` | `{kind.code}` | {again} | {_cell(text)} |"
    # Those of the client and of Spark come last, by name, whichever was imported first.
    for below in sorted(kind.__subclasses__(), key=_client_name):
        if below.__module__ in (errors.__name__, producer_errors.__name__, serializing.__name__, spark_errors.__name__):
            yield from _errors_below(below, depth + 1)


def _client_name(kind: type[errors.HeadraceError]) -> str:
    return "" if kind.__module__ == errors.__name__ else kind.__name__


def _commands_of(parser: argparse.ArgumentParser) -> dict[str, Any]:
    if hasattr(parser, "fill"):
        parser.fill()
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            return dict(action.choices)
    return {}


def _command(name: str, parser: argparse.ArgumentParser) -> Iterator[str]:
    inner = _commands_of(parser)
    if inner:
        for word, below in inner.items():
            yield from _command(f"{name} {word}", below)
        return
    yield f"## {name}"
    yield parser.description or ""
    yield ""
    yield "| argument | meaning |"
    yield "|---|---|"
    for action in parser._actions:
        if action.help != argparse.SUPPRESS and not isinstance(action, argparse._HelpAction):
            yield _argument(parser, action)
    yield ""
    if parser.epilog:
        yield "```text"
        yield from parser.epilog.rstrip().splitlines()
        yield "```"
        yield ""


def _argument(parser: argparse.ArgumentParser, action: argparse.Action) -> str:
    names = ", ".join(action.option_strings)
    takes = action.metavar or (action.dest.upper() if action.option_strings else action.dest)
    if isinstance(action, argparse.BooleanOptionalAction) or action.nargs == 0 or action.choices:
        takes = ""
    shown = f"`{f'{names} {takes}'.strip().replace('|', '/')}`"
    text = parser._get_formatter()._expand_help(action).replace(default_data(os.environ), _HOME)
    if action.choices:
        text += f": {', '.join(f'`{each}`' for each in action.choices)}"
    return f"| {shown} | {_cell(text)} |"


def _plain(setting: Any) -> Any:
    if isinstance(setting, Enum):
        return setting.name.lower() if isinstance(setting, int) else setting.value
    return setting


def _cell(text: str) -> str:
    """Text in a cell of a table: outside of code, no sign has a meaning."""
    parts = text.replace("|", "&#124;").split("`")
    parts[::2] = [re.sub(r"([*_<\[])", r"\\\1", part) for part in parts[::2]]
    return "`".join(parts)


if __name__ == "__main__":
    sys.exit(main())
