"""Reads docstrings in Google style, and finds public names whose docstring lacks a part that it should have.

A docstring has a summary and then parts, each a title on a line of its own with indented lines below: `Parameters:`,
`Returns:` (or `Yields:`), `Raises:` and `Example:`. Parameters may also be lines like `:param name: meaning`.
"""

import inspect
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import msgspec

import headrace
import headrace.spark

_TITLES = {"Parameters": "parameters", "Args": "parameters", "Returns": "returns", "Yields": "returns"}
_TITLES |= {"Raises": "raises", "Example": "example", "Examples": "example"}
_TITLE = re.compile(rf"^({'|'.join(_TITLES)}):\s*$")
_ENTRY = re.compile(r"^(?:    )?\*{0,2}([\w.]+)(?: \([^)]*\))?: (.*)$")
_PARAM = re.compile(r"^:param (\w+): (.*)$")

NEVER_RAISES = {
    "App.stop",
    "Clock.now_us",
    "Jobs.close",
    "Jobs.stop",
    "LiveSubscription.close",
    "LiveSubscription.stop",
}
NEVER_RAISES |= {"Projection.stop", "Subscription.stop"}
"""Methods that raise none of our errors when they are called as documented, and so need no `Raises:`."""
LEFT_OUT = {
    "Batch": "body copied outline place places raw_columns stamp verify",
    "Clock": "sample surely_us",
    "SubscriptionSettings": "as_dict retry_us",
    "TopicSettings": "as_dict",
}
"""By class, the methods that are there for Headrace's own code; the reference does not show them."""


@dataclass
class Docstring:
    """The parts of a docstring."""

    summary: str = ""
    parameters: dict[str, str] = field(default_factory=dict)
    returns: str = ""
    raises: dict[str, str] = field(default_factory=dict)
    example: str = ""


def parse(text: str | None) -> Docstring:
    """Divide a docstring into its parts."""
    found = Docstring()
    bodies: dict[str, list[str]] = {"summary": []}
    part = "summary"
    for line in inspect.cleandoc(text or "").splitlines():
        title = _TITLE.match(line)
        if title:
            part = _TITLES[title[1]]
        elif _PARAM.match(line):
            part = "parameters"
        elif part != "summary" and line and not line.startswith(" "):
            part = "summary"
        if not title:
            bodies.setdefault(part, []).append(_PARAM.sub(r"    \1: \2", line))
    found.summary = "\n".join(bodies["summary"]).strip()
    found.parameters = _entries(bodies.get("parameters", []))
    found.raises = _entries(bodies.get("raises", []))
    found.returns = " ".join(line.strip() for line in bodies.get("returns", [])).strip()
    found.example = inspect.cleandoc("\n" + "\n".join(bodies.get("example", [])))
    return found


def _entries(lines: list[str]) -> dict[str, str]:
    """The entries `name: meaning` of a part; a line that is indented further continues the one before."""
    found: dict[str, str] = {}
    name = ""
    for line in lines:
        entry = _ENTRY.match(line)
        if entry and not line.startswith("     "):
            name = entry[1]
            found[name] = entry[2].strip()
        elif name and line.strip():
            found[name] += " " + line.strip()
    return found


def public_names() -> Iterator[tuple[str, Any]]:
    """Every public name with its object: functions, classes, and the public methods of classes.

    Names for asyncio are left out: their docstrings are the ones from which those for threads are generated.
    """
    for module, prefix in ((headrace, ""), (headrace.spark, "spark.")):
        for name in module.__all__:
            known = getattr(module, name)
            if name.startswith(("Async", "_")) or name.endswith("_async") or inspect.ismodule(known):
                continue
            yield prefix + name, known
            if inspect.isclass(known) and not issubclass(known, BaseException | Enum):
                yield from ((f"{prefix}{name}.{each}", member) for each, member in _members(known))


def _members(kind: type) -> Iterator[tuple[str, Any]]:
    for name in sorted(dir(kind)):
        member = inspect.getattr_static(kind, name)
        if isinstance(member, classmethod | staticmethod):
            member = member.__func__
        hidden = name.startswith("_") or name in LEFT_OUT.get(kind.__name__, "").split()
        public = not hidden and (inspect.isfunction(member) or isinstance(member, property))
        if public and (getattr(member, "__module__", None) or kind.__module__).startswith("headrace"):
            yield name, member


def missing_parts() -> dict[str, list[str]]:
    """By public name, the parts that its docstring should have and does not have."""
    found: dict[str, list[str]] = {}
    examples: dict[str, str] = {}
    for name, known in public_names():
        documented = parse(known.__doc__)
        owner = name.rpartition(".")[0]
        if inspect.isclass(known):
            examples[name] = documented.example
            lacks = ["example"] if _needs_example(known) and not documented.example else []
        elif isinstance(known, property):
            lacks = [] if documented.summary else ["summary"]
        else:
            lacks = list(_lacking(name, known, documented))
            method = name.rpartition(".")[2]
            shown = documented.example or re.search(rf"\b{method}\(", examples.get(owner, ""))
            lacks += [] if shown else ["example"]
        if lacks:
            found[name] = lacks
    return found


def _needs_example(kind: type) -> bool:
    """Whether a class is something that programs use, and not only a record, an error or a choice."""
    records = (msgspec.Struct, tuple, BaseException, Enum)
    return not issubclass(kind, records) and not hasattr(kind, "__dataclass_fields__")


def _lacking(name: str, function: Callable[..., Any], documented: Docstring) -> Iterator[str]:
    signature = inspect.signature(function)
    wanted = [each for each in signature.parameters if each not in ("self", "cls")]
    if any(each not in documented.parameters for each in wanted):
        yield "parameters"
    if signature.return_annotation not in (None, "None", inspect.Signature.empty) and not documented.returns:
        yield "returns"
    if not documented.raises and name not in NEVER_RAISES:
        yield "raises"
