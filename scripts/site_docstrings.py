"""An extension of griffe, which reads the code for the site: docstrings as the site's Markdown wants them."""

import re
from typing import Any

import griffe

_PARAMETER = re.compile(r"^:param (\w+): ")


class Docstrings(griffe.Extension):
    """Shows examples as code, and makes one form of the two in which parameters are explained."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Look at the docstring of whatever was found in the code."""
        if obj.docstring is not None:
            obj.docstring.value = listed(fenced(obj.docstring.value))


def fenced(docstring: str) -> str:
    """The docstring with its examples in fences; an example goes on to the next empty line."""
    lines: list[str] = []
    margin: str | None = None
    for line in [*docstring.splitlines(), ""]:
        if margin is None and line.lstrip().startswith(">>>"):
            margin = line[: len(line) - len(line.lstrip())]
            lines.append(f"{margin}```pycon")
        elif margin is not None and not line.strip():
            lines.append(f"{margin}```")
            margin = None
        lines.append(line)
    return "\n".join(lines).rstrip()


def listed(docstring: str) -> str:
    """The docstring with lines like `:param name: meaning` as a section of their own."""
    lines: list[str] = []
    within = False
    for line in docstring.splitlines():
        begins = _PARAMETER.match(line)
        if begins and not within:
            lines.append("Parameters:")
        within = bool(begins) or (within and bool(line.strip()))
        lines.append("    " + _PARAMETER.sub(r"\1: ", line) if within else line)
    return "\n".join(lines)
