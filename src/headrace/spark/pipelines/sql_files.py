"""Pipelines in SQL files: comments at the top name sources and sink, followed by one SELECT."""

import json
import os
import re
from collections.abc import Iterator
from difflib import get_close_matches
from typing import Any, NamedTuple

from headrace.model.errors import HeadraceError, InvalidArgument
from headrace.model.topic import checked_plain_name
from headrace.spark.pipelines.definition import Definition, checked_conf, checked_mode
from headrace.spark.pipelines.sources_sinks import PipelineSink, PipelineSource, sink_of, source_of
from headrace.spark.pipelines.triggers import trigger_of

_WORDS = ("source", "sink", "trigger", "output mode", "options", "conf", "name")
_ONCE = ("sink", "trigger", "output mode", "options", "name")
_SAID = re.compile(r"--\s*([A-Za-z][A-Za-z ]{1,20}?)\s*:\s*(.*)")
_TOPIC = re.compile(r"([^\s{]+)(?:\s+as\s+([A-Za-z_]\w*))?\s*", re.IGNORECASE)
_VIEW = re.compile(r"[A-Za-z_]\w*")
_QUERY = re.compile(r"(select|with|from|values|table)\b|\(", re.IGNORECASE)
_SELECTING = {"subscribe", "subscribepattern", "assign", "view", "format"}


class Directive(NamedTuple):
    """A directive in a comment, with its line."""

    word: str
    text: str
    line: int


def definition_from_sql(text: str, file: str) -> Definition:
    """Return the pipeline of an SQL file."""
    comments, sql, line = _parts(text)
    directive = list(_directives(comments, file))
    by_word = {word: [each for each in directive if each.word == word] for word in _WORDS}
    for word in _ONCE:
        if len(by_word[word]) > 1:
            raise InvalidArgument(f"{file}:{by_word[word][1].line}: {word} is said twice")
    for word, example in (("source", "orders"), ("sink", "alerts")):
        if not by_word[word]:
            raise InvalidArgument(f"{file}:1: the file does not say its {word}: write a line `-- {word}: {example}`")
    if not _QUERY.match(sql):
        what = f"{sql.split()[0]!r}" if sql else "nothing"
        raise InvalidArgument(f"{file}:{line}: a pipeline is one SELECT, and this is {what}")
    options = _one(by_word["options"], file, _object) or {}
    stem = os.path.splitext(os.path.basename(file))[0]
    sources = [_read(each, file, lambda text: _source(text, options)) for each in by_word["source"]]
    _check_views(sources, by_word["source"], file)
    conf: dict[str, str] = {}
    for each in by_word["conf"]:
        conf |= _read(each, file, _conf)
    return Definition(
        name=_one(by_word["name"], file, lambda name: checked_plain_name(name, "pipeline")) or _name_of(stem),
        sources=tuple(sources),
        sink=_read(by_word["sink"][0], file, _sink),
        trigger=trigger_of(None) if not by_word["trigger"] else _read(by_word["trigger"][0], file, trigger_of),
        output_mode=_one(by_word["output mode"], file, checked_mode) or "append",
        conf=conf,
        sql=sql,
        file=file,
        line=line,
    )


def _name_of(stem: str) -> str:
    return checked_plain_name(re.sub(r"[^A-Za-z0-9._-]", "-", stem).lstrip("._-"), "pipeline")


def _parts(text: str) -> tuple[list[tuple[int, str]], str, int]:
    """Return the comments at the top with their lines, the query, and its first line."""
    lines = text.splitlines()
    comments: list[tuple[int, str]] = []
    for number, line in enumerate(lines, 1):
        stripped = line.strip()
        if stripped and not stripped.startswith("--"):
            return comments, "\n".join(lines[number - 1 :]).strip().rstrip(";").rstrip(), number
        if stripped:
            comments.append((number, stripped))
    return comments, "", len(lines)


def _directives(comments: list[tuple[int, str]], file: str) -> Iterator[Directive]:
    """Yield the directives of the comments; one with an open brace continues in the next line."""
    open_one: Directive | None = None
    for number, comment in comments:
        if open_one is not None:
            open_one = open_one._replace(text=f"{open_one.text} {comment.lstrip('-').strip()}")
        else:
            open_one = _directive(number, comment, file)
        if open_one is not None and open_one.text.count("{") <= open_one.text.count("}"):
            yield open_one
            open_one = None
    if open_one is not None:
        raise InvalidArgument(f"{file}:{open_one.line}: a brace is opened and not closed: {open_one.text!r}")


def _directive(number: int, comment: str, file: str) -> Directive | None:
    found = _SAID.fullmatch(comment)
    if found is None:
        return None
    word = " ".join(found[1].lower().replace("_", " ").split())
    if word in _WORDS:
        return Directive(word, found[2].strip(), number)
    near = get_close_matches(word, _WORDS, 1, 0.75)
    if near:
        raise InvalidArgument(f"{file}:{number}: {found[1]!r} is none of {', '.join(_WORDS)}; did you mean {near[0]}?")
    return None


def _read(directive: Directive, file: str, parse: Any) -> Any:
    try:
        if not directive.text:
            raise InvalidArgument(f"nothing stands behind {directive.word}:")
        return parse(directive.text)
    except HeadraceError as error:
        raise InvalidArgument(f"{file}:{directive.line}: {error}") from error


def _one(directive: list[Directive], file: str, parse: Any) -> Any:
    return _read(directive[0], file, parse) if directive else None


def _source(text: str, options: dict[str, Any]) -> PipelineSource:
    """`orders`, `orders {"startingOffsets": "earliest"}` or `orders.eu as orders`."""
    found = _TOPIC.match(text)
    if not found:
        raise InvalidArgument(
            f'write a topic and perhaps options: -- source: orders {{"columns": "value"}}; not {text!r}'
        )
    topic, view = found[1], found[2] or found[1]
    if not _VIEW.fullmatch(view):
        raise InvalidArgument(f"{view!r} cannot be used as a table's name: write {topic} as NAME")
    rest = text[found.end() :]
    own = _object(rest) if rest else {}
    if not {name.lower() for name in own} & _SELECTING:
        own = {"subscribe": topic, **own}
    return source_of(view, own, options)


def _sink(text: str) -> PipelineSink:
    """`alerts`, `console`, or options."""
    if text.startswith("{"):
        return sink_of(_object(text))
    found = _TOPIC.match(text)
    assert found is not None
    rest = text[found.end() :]
    return sink_of({"topic": found[1], **_object(rest)}) if rest else sink_of(found[1])


def _conf(text: str) -> dict[str, str]:
    name, equals, value = text.partition("=")
    if not equals:
        raise InvalidArgument(f"conf is NAME=VALUE, such as spark.sql.shuffle.partitions=4, not {text!r}")
    return checked_conf({name.strip(): value.strip()})


def _object(text: str) -> dict[str, Any]:
    try:
        content = json.loads(text)
    except json.JSONDecodeError as error:
        raise InvalidArgument(f"{text!r} is no JSON: {error}") from error
    if not isinstance(content, dict):
        raise InvalidArgument(f'options are a JSON object such as {{"columns": "value"}}, not {text!r}')
    return content


def _check_views(sources: list[PipelineSource], directive: list[Directive], file: str) -> None:
    for number, source in enumerate(sources):
        if source.argument.lower() in [before.argument.lower() for before in sources[:number]]:
            raise InvalidArgument(
                f"{file}:{directive[number].line}: there are two sources {source.argument!r}: write TOPIC as OTHER_NAME"
            )
