"""Command-line options for the settings of topics and subscriptions, generated from the settings classes."""

import argparse
import ast
import inspect
import json
from collections.abc import Callable, Container
from enum import Enum
from pathlib import Path
from typing import Any

import msgspec

from headrace.cli.arguments import completes, count, duration, duration_from_zero, json_value, size
from headrace.model.durability import Durability
from headrace.model.topic import TopicSettings

_DEST = "setting_"
_UNITS = ((86400, "d"), (3600, "h"), (60, "m"))


def add_settings(
    parser: argparse.ArgumentParser,
    kind: type[msgspec.Struct] = TopicSettings,
    whose: str = "the topic",
    without: Container[str] = (),
) -> None:
    """Add an option for each setting of a settings class, by default the topic's, but for some."""
    group = parser.add_argument_group(f"settings of {whose}")
    explanations = field_explanations(kind)
    for field in msgspec.structs.fields(kind):
        if field.name in without:
            continue
        text = explanations.get(field.name, "").rstrip(".")
        if field.default is not None and field.default not in ("", ()):
            text += f" [{setting_text(field.name, _plain(field.default))}]"
        added = group.add_argument(
            f"--{field.name.replace('_', '-')}",
            dest=f"{_DEST}{field.name}",
            default=argparse.SUPPRESS,
            help=text.replace("%", "%%"),
            **_kind(field),
        )
        if field.name.endswith("_topic") or field.name == "view_of":
            completes(added, "topic")


def given_settings(given: argparse.Namespace) -> dict[str, Any]:
    """Return the settings that the user gave, as plain values by name."""
    return {name.removeprefix(_DEST): setting for name, setting in vars(given).items() if name.startswith(_DEST)}


def setting_text(name: str, setting: Any) -> str:
    """Format a setting as the value of its option.

    >>> setting_text("retain_seconds", 604800.0), setting_text("segment_bytes", 512 << 20)
    ('7d', '512MiB')
    """
    if setting is None:
        return "none"
    if isinstance(setting, bool):
        return "yes" if setting else "no"
    if isinstance(setting, list | tuple):
        return json.dumps(setting, ensure_ascii=False) if setting else "none"
    if isinstance(setting, dict):
        return json.dumps(setting, ensure_ascii=False)
    if "_seconds" in name:
        return duration_text(setting)
    if "bytes" in name:
        return size_text(setting)
    return str(setting)


def duration_text(seconds: float) -> str:
    """Format a time span in the largest unit that divides it.

    >>> duration_text(5400.0), duration_text(0.5)
    ('90m', '0.5s')
    """
    for unit, letter in _UNITS:
        if seconds >= unit and seconds % unit == 0:
            return f"{seconds // unit:.0f}{letter}"
    return f"{seconds:g}s" if seconds < 1e6 else f"{seconds:.0f}s"


def size_text(length: int) -> str:
    """Format a size in the largest unit that divides it.

    >>> size_text(10_000_000_000), size_text(256 << 20), size_text(4097)
    ('10GB', '256MiB', '4097')
    """
    for power in (4, 3, 2, 1):
        prefix = " KMGT"[power]
        for unit, base in ((f"{prefix}iB", 1024**power), (f"{prefix}B", 1000**power)):
            if length >= base and length % base == 0:
                return f"{length // base}{unit}"
    return str(length)


def bytes_text(length: int) -> str:
    """Format a size for people, rounded.

    >>> bytes_text(0), bytes_text(1536), bytes_text(20 << 20)
    ('0 B', '1.5 KiB', '20 MiB')
    """
    size, units = float(length), ["B", "KiB", "MiB", "GiB", "TiB"]
    while size >= 1000 and len(units) > 1:
        size /= 1024
        units.pop(0)
    return f"{size:.3g} {units[0]}"


def field_explanations(kind: type) -> dict[str, str]:
    """Return the docstring below each field of a class, from its source."""
    try:
        (tree,) = ast.parse(inspect.getsource(kind)).body
    except OSError:  # installed without sources
        return {}
    assert isinstance(tree, ast.ClassDef)
    found = {}
    for field, below in zip(tree.body, tree.body[1:], strict=False):
        if (
            isinstance(field, ast.AnnAssign)
            and isinstance(field.target, ast.Name)
            and isinstance(below, ast.Expr)
            and isinstance(below.value, ast.Constant)
        ):
            found[field.target.id] = " ".join(str(below.value.value).split())
    return found


def _plain(setting: Any) -> Any:
    if isinstance(setting, Durability):
        return setting.name.lower()
    return setting.value if isinstance(setting, Enum) else setting


def _kind(field: msgspec.structs.FieldInfo) -> dict[str, Any]:
    """Return the arguments of `add_argument` for a setting."""
    if field.type is bool:
        return {"action": argparse.BooleanOptionalAction}
    if isinstance(field.type, type) and issubclass(field.type, Enum):
        return {"choices": [_plain(choice) for choice in field.type]}
    if field.name == "middleware":
        return {"type": middleware_entries, "metavar": "JSON|FILE"}
    if field.name == "view_query":
        return {"type": _or_none(json_value), "metavar": "JSON"}
    parse: Callable[[str], Any] = count
    metavar = "N"
    if field.name.startswith("retry_seconds"):
        parse, metavar = duration_from_zero, "TIME"
    elif "_seconds" in field.name:
        parse, metavar = duration, "TIME"
    elif field.type in (str, float):
        parse, metavar = field.type, "TOPIC" if field.name.endswith("_topic") else "N"
    elif field.name == "view_of":
        parse, metavar = str, "TOPIC"
    elif "bytes" in field.name:
        parse, metavar = size, "SIZE"
    return {"type": _or_none(parse) if field.default is None else parse, "metavar": metavar}


def middleware_entries(text: str) -> list[Any]:
    """Parse a list of middleware: JSON, the path of a file with JSON, or `none`.

    >>> middleware_entries('{"name": "compress"}')
    [{'name': 'compress'}]
    """
    if text == "none":
        return []
    where = ""
    if not text.lstrip().startswith(("[", "{")):
        where = f" in {text}"
        try:
            text = Path(text).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "it is no text"
            raise argparse.ArgumentTypeError(
                f"{text!r} is neither JSON nor a file that can be read: {reason}"
            ) from error
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise argparse.ArgumentTypeError(f"this is no JSON{where}: {error}") from error
    return content if isinstance(content, list) else [content]


def _or_none(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    return lambda text: None if text == "none" else parse(text)
