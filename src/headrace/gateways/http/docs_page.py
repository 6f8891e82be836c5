"""The page for people: every path with its parameters and an example, and every error code. It loads nothing."""

import json
from collections.abc import Iterator
from html import escape
from typing import Any

from headrace.gateways.http.openapi import http_error_codes
from headrace.gateways.http.problems import STATUSES
from headrace.model import errors
from headrace.model.errors import HeadraceError

Schema = dict[str, Any]

CONTENT_POLICY = b"default-src 'none'; style-src 'unsafe-inline'"
STYLE = """
:root{color-scheme:light dark;--line:#8884;--soft:#8881}
body{font:16px/1.5 system-ui,sans-serif;max-width:62rem;margin:0 auto;padding:1rem}
code,pre{font:14px/1.4 ui-monospace,monospace}pre{background:var(--soft);padding:.6rem;overflow:auto}
table{border-collapse:collapse;width:100%;margin:.5rem 0}
td,th{border-bottom:1px solid var(--line);padding:.25rem .5rem;text-align:left;vertical-align:top}
section{border-top:1px solid var(--line);margin-top:1.5rem}h3 code{font-size:1rem}
nav{display:flex;flex-wrap:wrap;gap:0 1rem}
code{overflow-wrap:anywhere}
.method{display:inline-block;min-width:4rem;font-weight:700}
"""


def make_page(document: Schema) -> bytes:
    """The page of an OpenAPI document."""
    return "".join(_parts(document)).encode()


def _parts(document: Schema) -> Iterator[str]:
    info = document["info"]
    yield "<!doctype html><html lang=en><meta charset=utf-8><meta name=viewport content='width=device-width'>"
    yield f"<title>{escape(info['title'])} over HTTP</title><style>{STYLE}</style>"
    yield f"<h1>{escape(info['title'])} over HTTP</h1><p>Version {escape(info['version'])}. "
    yield f"{code_marked(info['description'])}</p><p>For programs: <a href=/v1/openapi.json>openapi.json</a>. "
    yield "Topics and services of this broker: <a href=/v1/asyncapi>asyncapi</a></p><nav>"
    for tag in document["tags"]:
        yield f"<a href='#tag-{escape(tag['name'])}'>{escape(tag['name'])}</a>"
    yield "<a href='#errors'>errors</a></nav>"
    for tag in document["tags"]:
        yield f"<section id='tag-{escape(tag['name'])}'><h2>{escape(tag['name'])}</h2>"
        for path, methods in document["paths"].items():
            for method, operation in methods.items():
                if tag["name"] in operation["tags"]:
                    yield from _operation(path, method.upper(), operation, document["components"]["schemas"])
        yield "</section>"
    yield from _errors()


def _operation(path: str, method: str, operation: Schema, schemas: Schema) -> Iterator[str]:
    name = escape(operation["operationId"])
    yield f"<h3 id='{name}'><span class=method>{method}</span><code>{escape(path)}</code></h3>"
    yield f"<p>{code_marked(operation['summary'])}.</p>"
    fields = [
        (one["name"], one["in"], one.get("required", False), one["schema"], one.get("description", ""))
        for one in operation["parameters"]
    ]
    body = operation.get("requestBody", {}).get("content", {}).get("application/json", {})
    for schema in _referred(body.get("schema", {}), schemas):
        required = schema.get("required", [])
        for field, kind in schema.get("properties", {}).items():
            fields.append((field, "body", field in required, kind, kind.get("description", "")))
    if fields:
        yield "<table><tr><th>field<th>in<th>type<th>meaning"
        for field, where, required, kind, meaning in fields:
            mark = " (required)" if required else ""
            yield f"<tr><td><code>{escape(field)}</code>{mark}<td>{where}<td>{escape(_kind(kind))}"
            yield f"<td>{code_marked(meaning)}"
        yield "</table>"
    if "example" in body:
        yield f"<pre>{escape(json.dumps(body['example'], indent=2, ensure_ascii=False))}</pre>"
    yield "<p>Answers: "
    yield ", ".join(
        f"<b>{status}</b>" if status < "300" else _status(status, one["description"])
        for status, one in sorted(operation["responses"].items())
    )
    yield "</p>"


def _status(status: str, description: str) -> str:
    _, _, codes = description.partition(": ")
    linked = " ".join(f"<a href='#{escape(code)}'>{escape(code)}</a>" for code in codes.split(", ") if code)
    return f"{status} {linked}".strip()


def _referred(schema: Schema, schemas: Schema) -> Iterator[Schema]:
    """The objects that a schema names; of alternatives the first."""
    for one in schema.get("anyOf", [schema]):
        if "$ref" in one:
            yield schemas[one["$ref"].rpartition("/")[2]]
            return


def _kind(schema: Schema) -> str:
    if "$ref" in schema:
        return str(schema["$ref"].rpartition("/")[2])
    if "enum" in schema:
        return " | ".join(map(str, schema["enum"]))
    if "anyOf" in schema:
        return " | ".join(dict.fromkeys(_kind(one) for one in schema["anyOf"]))
    kind = str(schema.get("type", "any JSON"))
    if kind == "array" and isinstance(schema.get("items"), dict):
        return f"array of {_kind(schema['items'])}"
    return str(schema.get("format", kind))


def _errors() -> Iterator[str]:
    yield "<section id=errors><h2>errors</h2><p>The <code>code</code> of a problem document.</p>"
    yield "<table><tr><th>code<th>status<th>retryable<th>meaning"
    classes = {kind.code: kind for kind in vars(errors).values() if _is_error(kind)}
    rows = [
        (code, status, classes[code].retryable, " ".join((classes[code].__doc__ or "").split()))
        for code, status in STATUSES.items()
    ]
    rows += [(code, status, status == 408, meaning) for code, (status, meaning) in http_error_codes().items()]
    for code, status, retryable, meaning in sorted(rows):
        yield f"<tr id='{code}'><td><code>{code}</code><td>{status}<td>{'yes' if retryable else 'no'}"
        yield f"<td>{code_marked(meaning)}"
    yield "</table></section>"


def _is_error(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, HeadraceError)


def code_marked(text: str) -> str:
    """Text with `code` marked as such."""
    parts = escape(text).split("`")
    return "".join(f"<code>{part}</code>" if at % 2 else part for at, part in enumerate(parts))
