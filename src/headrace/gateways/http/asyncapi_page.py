"""The page for people of an AsyncAPI document: topics and subjects with operations and schemas. It loads nothing."""

import json
from collections.abc import Iterator
from html import escape
from typing import Any
from urllib.parse import urlencode

from headrace.gateways.http.asyncapi import NEXT_FIELD
from headrace.gateways.http.docs_page import STYLE

PAGE_TOPICS = 200
"""Topics on one page."""
PAGE_BYTES_MAX = 1 << 20
"""About how large the document of one page is."""
_SCHEMA_CHARS_MAX = 20_000
_INTRODUCTION = """\
The topics of this broker, and the subjects on which its services answer requests. A client sends what it publishes, and
receives what it reads.
"""
_TOPIC_STYLE = "h3{margin-bottom:0}h3+p{margin-top:0}td:first-child{width:18%}td:last-child{width:25%}"
Part = dict[str, Any]


def page_parts(document: Part, pattern: str, after: str) -> Iterator[str]:
    """The page of a document, in parts; `pattern` and `after` are what the reader asked for."""
    info, channels = document["info"], document["channels"]
    yield "<!doctype html><html lang=en><meta charset=utf-8><meta name=viewport content='width=device-width'>"
    yield f"<title>{escape(info['title'])}: topics and services</title><style>{STYLE}{_TOPIC_STYLE}</style>"
    yield f"<h1>{escape(info['title'])}: topics and services</h1><p>Version {escape(info['version'])}. "
    yield f"{_INTRODUCTION}</p><p>For programs: <a href=/v1/asyncapi.json>asyncapi.json</a>. "
    yield "All paths of HTTP: <a href=/v1/docs>docs</a></p>"
    yield from _servers(document["servers"])
    operations = _by_channel(document["operations"])
    for prefix, title in (("topic.", "Topics"), ("subject.", "Subjects of services")):
        names = [name for name in channels if name.startswith(prefix)]
        yield f"<section><h2>{title}</h2>"
        if prefix == "topic.":
            behind = f" after <code>{escape(after)}</code>" if after else ""
            yield f"<form action=/v1/asyncapi><label>Names like <input name=topics value='{escape(pattern)}'></label>"
            yield f" <button>Show</button>{behind}</form>"
        if not names:
            yield "<p>None.</p>"
        for name in names:
            yield from _channel(name, channels[name], operations.get(name, []), document["components"]["schemas"])
        if prefix == "topic." and NEXT_FIELD in info:
            query = urlencode({"topics": pattern, "after": info[NEXT_FIELD]})
            yield f"<p><a href='/v1/asyncapi?{escape(query)}'>More topics</a></p>"
        yield "</section>"


def _servers(servers: Part) -> Iterator[str]:
    yield "<table><tr><th>server<th>protocol<th>address"
    for name, server in servers.items():
        address = server["host"] + server.get("pathname", "")
        yield f"<tr><td>{escape(name)}<td>{escape(server['protocol'])}<td><code>{escape(address)}</code>"
    yield "</table>"


def _by_channel(operations: Part) -> dict[str, list[Part]]:
    found: dict[str, list[Part]] = {}
    for operation in operations.values():
        found.setdefault(operation["channel"]["$ref"].rpartition("/")[2], []).append(operation)
    return found


def _channel(name: str, channel: Part, operations: list[Part], schemas: Part) -> Iterator[str]:
    yield f"<h3 id='{escape(name)}'>{escape(channel['title'])}</h3><p>"
    if "x-headrace-partitions" in channel:
        count = channel["x-headrace-partitions"]
        yield f"{count} partition{'' if count == 1 else 's'}. "
    if "description" in channel:
        yield f"{escape(channel['description'])}. "
    yield "</p>"
    yield "<table><tr><th>operation<th>over HTTP<th>services"
    for operation in operations:
        http = operation["x-headrace-http"]
        services = ", ".join(tag["name"] for tag in operation.get("tags", ()))
        action = "request" if "reply" in operation else operation["action"]
        yield f"<tr><td>{action}<td><code>{http['method']} {escape(http['path'])}</code><td>{escape(services)}"
    yield "</table>"
    for message in channel["messages"].values():
        if "payload" in message:
            place = message["payload"]["$ref"]
            schema = schemas[place.rpartition("/")[2]]["schema"]
            text = schema.get("x-json-schema") or json.dumps(schema, indent=2, ensure_ascii=False)
            text = text.replace(f'"{place}/schema', '"#')  # as its author wrote it
            if len(text) > _SCHEMA_CHARS_MAX:
                text = text[:_SCHEMA_CHARS_MAX] + "\n…"
            yield f"<details open><summary>Schema</summary><pre>{escape(text)}</pre></details>"
