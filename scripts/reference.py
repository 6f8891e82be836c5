"""Writes the generated parts of docs/ from the code they describe; with --check it only reports what is out of date.

A part stands between `<!-- generated: NAME ARGUMENTS -->` and `<!-- end -->` in a page. NAME is a function in
`PARTS`, which gets the arguments and yields the lines.
"""

import argparse
import inspect
import os
import re
import sys
import tomllib
from collections.abc import Callable, Iterator
from enum import Enum
from pathlib import Path
from typing import Any

import msgspec
from scripts import docstrings

import headrace
from headrace.cli.command_list import whole_parser
from headrace.cli.configuration import default_data
from headrace.cli.setting_options import duration_text, field_explanations, setting_text
from headrace.model import errors
from headrace.model.subscription import SubscriptionSettings
from headrace.model.topic import TopicSettings
from headrace.server import ServerSettings
from headrace.spark.errors import SparkMissing

OTHER_ERRORS = (headrace.Undelivered, headrace.CannotSerialize, headrace.CannotDeserialize, SparkMissing)
"""Named here so that their modules are imported: the error tree then has them."""
ADVICE: dict[str, dict[str, dict[str, str]]] = tomllib.loads(
    Path(__file__).with_name("error_advice.toml").read_text(encoding="utf-8")
)
"""By section and error code: its `meaning`, and the `remedy`."""
DOCS = Path(__file__).parents[1] / "docs"

_HOME = "~/.local/share/headrace"
"""The default data directory, as every user can read it."""
_BLOCK = re.compile(r"(<!-- generated: (\w+)((?: [\w.-]+)*) -->\n).*?(<!-- end -->)", re.DOTALL)


def filled(page: str) -> str:
    """Return the text of a page with all its generated parts up to date."""
    return _BLOCK.sub(lambda block: f"{block[1]}\n{_lines(PARTS[block[2]](*block[3].split()))}\n{block[4]}", page)


def pages() -> list[Path]:
    """List the pages with generated parts."""
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
    """List every setting of a topic."""
    yield from _settings(TopicSettings)


def subscription_settings() -> Iterator[str]:
    """List every setting of a leased subscription."""
    yield from _settings(SubscriptionSettings)


def server_settings() -> Iterator[str]:
    """List every setting of a server."""
    yield from _settings(ServerSettings)


def error_tree() -> Iterator[str]:
    """List every error, subclasses below their base class."""
    yield "| error | code | try again? | what it says |"
    yield "|---|---|---|---|"
    for depth, kind in error_classes():
        text = " ".join((kind.__doc__ or "").split())
        again = "yes" if kind.retryable else "no"
        name = f"{'&nbsp;&nbsp;' * depth}`{kind.__name__}`"
        yield f"| {name} | [`{kind.code}`](../troubleshooting.md#{kind.code}) | {again} | {_cell(text)} |"


def troubleshooting() -> Iterator[str]:
    """Write a section for each error code: its text, what it means and what to do."""
    kinds: dict[str, type[errors.HeadraceError] | None] = {kind.code: kind for _, kind in error_classes()}
    kinds |= {"usage_error": None, "system_error": None}  # of the command line
    for title, advice in ADVICE.items():
        yield f"## {title}"
        yield ""
        for code, entry in advice.items():
            if code in kinds:
                yield from _advice(code, entry, kinds[code])


def parameters(name: str) -> Iterator[str]:
    """List the parameters of a public function or method, such as `connect` or `Bus.producer`."""
    function: Any = headrace
    for word in name.split("."):
        function = getattr(function, word)
    meanings = docstrings.parse(function.__doc__).parameters
    yield "| parameter | default | meaning |"
    yield "|---|---|---|"
    for parameter in inspect.signature(function).parameters.values():
        if parameter.name != "self":
            yield f"| `{parameter.name}` | {_default_of(parameter)} | {_cell(meanings[parameter.name])} |"


def commands(*names: str) -> Iterator[str]:
    """Describe the named top-level commands, with all their subcommands and arguments."""
    known = subcommands(whole_parser())
    for name in names:
        yield from _command(f"headrace {name}", known[name])


def command_index() -> Iterator[str]:
    """List every command with the page that describes it."""
    known = subcommands(whole_parser())
    for page in command_pages():
        title = page.read_text(encoding="utf-8").splitlines()[0].removeprefix("# ")
        yield f"### [{title}](commands/{page.name})"
        yield ""
        yield "| command | |"
        yield "|---|---|"
        for name in _named_on(page):
            for words, parser in _leaves(f"headrace {name}", known[name]):
                anchor = words.replace(" ", "-")
                yield f"| [`{words}`](commands/{page.name}#{anchor}) | {_cell(parser.description or '')} |"
        yield ""


PARTS: dict[str, Callable[..., Iterator[str]]] = {
    each.__name__: each
    for each in (
        topic_settings,
        subscription_settings,
        server_settings,
        error_tree,
        troubleshooting,
        parameters,
        commands,
        command_index,
    )
}


def error_classes(
    kind: type[errors.HeadraceError] = errors.HeadraceError, depth: int = 0
) -> Iterator[tuple[int, type[errors.HeadraceError]]]:
    """Every error class with its depth in the tree, in the order of the page."""
    yield depth, kind
    # Those of the client and of Spark come last, by name, whichever was imported first.
    for below in sorted(kind.__subclasses__(), key=_client_name):
        if below.__module__.startswith("headrace."):
            yield from error_classes(below, depth + 1)


def command_pages() -> list[Path]:
    """The pages of commands, in the order of the navigation."""
    order = (DOCS.parent / "mkdocs.yml").read_text(encoding="utf-8")
    return sorted((DOCS / "reference" / "commands").glob("*.md"), key=lambda page: order.find(f"commands/{page.name}"))


def commands_named() -> list[str]:
    """The top-level commands that the pages describe."""
    return [name for page in command_pages() for name in _named_on(page)]


def commands_known() -> list[str]:
    """The top-level commands that exist."""
    return list(subcommands(whole_parser()))


# Helpers of the parts.


def _lines(lines: Iterator[str]) -> str:
    return "".join(f"{line}\n" for line in lines).rstrip("\n") + "\n"


def _named_on(page: Path) -> list[str]:
    found = re.findall(r"<!-- generated: commands ([^>]*) -->", page.read_text(encoding="utf-8"))
    return [name for names in found for name in names.split()]


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


def _advice(code: str, entry: dict[str, str], kind: type[errors.HeadraceError] | None) -> Iterator[str]:
    yield f"### {code}"
    yield ""
    again = ""
    if kind is not None:
        text = " ".join((kind.__doc__ or "").split())
        yield f"*{_cell(text)}* (`{kind.__name__}`)"
        yield ""
        again = " A retry can succeed." if kind.retryable else ""
    yield f"- **Meaning:** {entry['meaning']}{again}"
    yield f"- **What to do:** {entry['remedy']}"
    yield ""


def _default_of(parameter: inspect.Parameter) -> str:
    if parameter.default is inspect.Parameter.empty:
        return "required" if parameter.kind is not inspect.Parameter.VAR_POSITIONAL else "none"
    if parameter.default in (None, "", ()):
        return "none"
    return f"`{parameter.default!r}`"


def _client_name(kind: type[errors.HeadraceError]) -> str:
    return "" if kind.__module__ == errors.__name__ else kind.__name__


def subcommands(parser: argparse.ArgumentParser) -> dict[str, Any]:
    """The parsers of a command's subcommands, by name."""
    if hasattr(parser, "fill"):
        parser.fill()
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            return dict(action.choices)
    return {}


def _leaves(name: str, parser: argparse.ArgumentParser) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    inner = subcommands(parser)
    for word, below in inner.items():
        yield from _leaves(f"{name} {word}", below)
    if not inner:
        yield name, parser


def _command(name: str, parser: argparse.ArgumentParser) -> Iterator[str]:
    for words, leaf in _leaves(name, parser):
        yield from _usage(words, leaf)


def _usage(name: str, parser: argparse.ArgumentParser) -> Iterator[str]:
    yield f"## {name}"
    yield ""
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
