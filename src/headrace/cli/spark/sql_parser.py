"""A partial SQL parser: finds the ends of statements, and the topics and columns that they name."""

import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

_TOKEN = re.compile(
    r"""
    (?P<comment> --[^\n]* | /\*.*?(?:\*/|\Z) )
    | (?P<text> '(?:[^'\\]|\\.)*(?:'|\Z) | "(?:[^"\\]|\\.)*(?:"|\Z) )
    | (?P<quoted> `(?:[^`]|``)*(?:`|\Z) )
    | (?P<name> \w+ )
    | (?P<end> ; )
    | (?P<other> . )
    """,
    re.VERBOSE | re.DOTALL,
)
_ALL_COLUMNS = frozenset(("natural", "pivot", "unpivot", "table"))
"""Keywords with which a statement may read columns that it does not name."""
_SHOW = re.compile(r"show\s+(tables|views)\b", re.IGNORECASE)


class _Token(NamedTuple):
    kind: str
    text: str


def statements(text: str) -> list[str]:
    """Split a text into statements, without the semicolons between them.

    >>> statements("select ';'; -- a; b\\nselect 2;")
    ["select ';'", '-- a; b\\nselect 2']
    """
    parts: list[list[_Token]] = [[]]
    for token in _tokens(text):
        if token.kind == "end":
            parts.append([])
        else:
            parts[-1].append(token)
    return ["".join(token.text for token in part).strip() for part in parts if _says_something(part)]


def named_topics(text: str, topics: Iterable[str]) -> list[str]:
    """Return the topics that a text names; SQL ignores case, but an exact match takes precedence.

    >>> named_topics("select 'c' from A join `b-1` on true", ["a", "b-1", "c"])
    ['a', 'b-1']
    """
    topics = list(topics)
    if any(_SHOW.match(statement) for statement in statements(text)):
        return topics
    names = {_unquoted(token) for token in _tokens(text) if token.kind in ("name", "quoted")}
    folded = {name.lower() for name in names}
    exact = {name.lower() for name in topics if name in names}
    return [name for name in topics if name in names or (name.lower() in folded and name.lower() not in exact)]


def named_columns(text: str, columns: Iterable[str]) -> list[str] | None:
    """Return the columns that a text names, perhaps with others; None if it may read all columns.

    >>> named_columns("select count(*) from orders where partition = 1", ["partition", "offset"])
    ['partition']
    >>> named_columns("select * from orders", ["partition", "offset"])
    """
    words = set(re.findall(r"\w+", text.lower()))
    if words & _ALL_COLUMNS:
        return None
    for statement in statements(text):
        tokens = [token.text.lower() for token in _tokens(statement) if _says_something([token])]
        if tokens[0] not in ("select", "with"):
            return None
        for at, token in enumerate(tokens):
            before, following = tokens[max(at - 2, 0) : at], tokens[at + 1 : at + 2]
            is_star = token == "*" and not (before == ["count", "("] and following == [")"])
            is_piped = token == "|" and following == [">"]
            if is_star or is_piped or (token == "from" and before[-1:] == ["("]):
                return None
    return [name for name in columns if name in words]


def in_need_of_quotes(text: str, topics: Iterable[str]) -> list[str]:
    """Return the topics that a text would name if it put their names in backquotes.

    >>> in_need_of_quotes("select * from eu.orders", ["eu.orders", "orders"])
    ['eu.orders']
    """
    plain = "".join(token.text if token.kind in ("name", "other") else " " for token in _tokens(text)).lower()
    odd = [name for name in topics if not re.fullmatch(r"\w+", name)]
    return [name for name in odd if re.search(rf"(?<![\w.-]){re.escape(name.lower())}(?![\w.-])", plain)]


def _tokens(text: str) -> Iterator[_Token]:
    return (_Token(str(found.lastgroup), found[0]) for found in _TOKEN.finditer(text))


def _says_something(part: list[_Token]) -> bool:
    return any(token.kind != "comment" and not token.text.isspace() for token in part)


def _unquoted(token: _Token) -> str:
    return token.text.strip("`").replace("``", "`") if token.kind == "quoted" else token.text
