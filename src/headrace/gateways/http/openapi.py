"""The OpenAPI document, made of the routes: what a client reads is what the gateway does."""

import ast
import inspect
import json
import textwrap
from collections.abc import Iterable, Sequence
from functools import cache
from http import HTTPStatus
from typing import Any, get_args

import msgspec

from headrace.gateways.http.problems import STATUSES, HttpError, ProblemDocument
from headrace.gateways.http.route import EVENTS, NDJSON, Route
from headrace.gateways.http.schema_constraints import PATH_PATTERNS, PLAIN_NAMED, constrain
from headrace.model.limits import PARTITIONS_MAX, PLAIN_NAME_CHARS_MAX, TENANT_NAME_CHARS_MAX, TOPIC_NAME_CHARS_MAX

Schema = dict[str, Any]

_REF = "#/components/schemas/{name}"
_PROBLEM_TYPE = "application/problem+json"
_BASE64 = r"^(?:[A-Za-z0-9+/]{4})*(?:[A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?$"
_TENANT = rf"^[A-Za-z0-9][A-Za-z0-9._\-]{{0,{TENANT_NAME_CHARS_MAX - 1}}}$"
_COMMON = (400, 401, 403, 408, 422, 429, 431, 500, 503)
"""Statuses that every route may answer with."""
_WITH_PARAMETERS = (404, 409)
_WITH_BODY = (409, 413, 415, 507)
_EXPLANATION = """\
Everything that Headrace does, for whatever speaks HTTP. Names in paths may have any character; others than letters,
digits, `.`, `_`, `-` and `~` are written as `%XX`. Times are microseconds since 1970, or RFC 3339 where a request gives
them. Every error is a problem document (RFC 9457) whose `code` does not change between versions.
"""


def make_document(routes: Sequence[Route], version: str) -> Schema:
    """The OpenAPI 3.1 document of routes."""
    kinds = [kind for route in routes for part in _parts(route) for kind in alternatives(part)]
    named = {id(kind): kind for kind in [*kinds, ProblemDocument]}
    schemas, components = msgspec.json.schema_components(named.values(), ref_template=_REF)
    by_kind = dict(zip(named, schemas, strict=True))
    for kind in _structs(named.values()):
        _explain(components.get(kind.__name__), kind)
    paths: dict[str, Schema] = {}
    for route in routes:
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route, by_kind, components)
    for route in routes:
        if route.query is not None:
            components.pop(route.query.__name__, None)  # its fields are parameters
    document: Schema = {
        "openapi": "3.1.0",
        "info": {"title": "Headrace", "version": version, "description": " ".join(_EXPLANATION.split())},
        "servers": [{"url": "/"}],
        "tags": [{"name": tag} for tag in dict.fromkeys(route.tag for route in routes)],
        "paths": paths,
        "components": {"schemas": components},
    }
    plain: Schema = json.loads(json.dumps(_mended(document)))
    return plain


def _parts(route: Route) -> list[Any]:
    """Everything of a route that has a schema."""
    others = [kind for _, kind in (*route.other_bodies, *route.other_answers)]
    return [route.body, route.answer, route.query, *others]


def _operation(route: Route, by_kind: dict[int, Schema], components: dict[str, Schema]) -> Schema:
    operation: Schema = {
        "operationId": _operation_id(route),
        "summary": route.summary,
        "tags": [route.tag],
        "parameters": _parameters(route, components),
        "responses": _responses(route, by_kind),
    }
    if route.body is not None:
        content = {}
        for media_type in route.body_types:
            # Of lines the schema is that of each line.
            kinds = route.body if media_type != NDJSON else alternatives(route.body)[0]
            content[media_type] = {"schema": _schema_of(kinds, by_kind)}
            if route.example is not None:
                content[media_type]["example"] = route.example
        content |= {name: {"schema": _schema_of(kind, by_kind)} for name, kind in route.other_bodies}
        operation["requestBody"] = {"required": route.body_required, "content": content}
    return operation


def alternatives(part: Any) -> tuple[Any, ...]:
    """The types that a body or an answer may have."""
    if part is None:
        return ()
    return part if isinstance(part, tuple) else (part,)


def _schema_of(part: Any, by_kind: dict[int, Schema]) -> Schema:
    schemas = [by_kind[id(kind)] for kind in alternatives(part)]
    return schemas[0] if len(schemas) == 1 else {"anyOf": schemas}


def _operation_id(route: Route) -> str:
    words = [part.strip("{}").replace(".", "_") for part in route.path.split("/") if part and part != "v1"]
    return "_".join([route.method.lower(), *words])


def _parameters(route: Route, components: dict[str, Schema]) -> list[Schema]:
    found: list[Schema] = []
    for name in route.parameters:
        found.append({"name": name, "in": "path", "required": True, "schema": _path_schema(route.path, name)})
    if route.query is not None:
        query = components[route.query.__name__]
        for name, schema in query["properties"].items():
            rest = {key: part for key, part in schema.items() if key != "description"}
            described = {"description": schema["description"]} if "description" in schema else {}
            required = name in query.get("required", ())
            found.append({"name": name, "in": "query", "required": required, "schema": _not_null(rest), **described})
    for header in route.headers:
        text: Schema = {"type": "string", "pattern": header.pattern}
        if header.length_max:
            text["maxLength"] = header.length_max
        described = {"example": header.example} if header.example else {}
        found.append(
            {"name": header.name, "in": "header", "schema": text, "description": header.description, **described}
        )
    if route.path.startswith("/v1/") and route.tag != "documents" and not route.upgrade:
        found.append(
            {
                "name": "Headrace-Tenant",
                "in": "header",
                "schema": {"type": "string", "pattern": _TENANT},
                "description": "The tenant; by default the one of the credentials, or `default`",
            }
        )
    return found


def _path_schema(path: str, name: str) -> Schema:
    if name == "partition":
        return {"type": "integer", "minimum": 0, "maximum": PARTITIONS_MAX - 1}
    if name == "offset":
        return {"type": "integer", "minimum": 0, "maximum": 10**18 - 1}
    if name in PATH_PATTERNS:
        return {"type": "string", "pattern": PATH_PATTERNS[name]}
    if name == "instance" or (name == "name" and path.startswith(PLAIN_NAMED)):
        return {"type": "string", "pattern": rf"^[A-Za-z0-9][A-Za-z0-9._\-]{{0,{PLAIN_NAME_CHARS_MAX - 1}}}$"}
    return {"type": "string", "minLength": 1, "maxLength": TOPIC_NAME_CHARS_MAX}


def _responses(route: Route, by_kind: dict[int, Schema]) -> Schema:
    responses: Schema = {}
    for status in (route.status, *route.other_statuses):
        response: Schema = {"description": HTTPStatus(status).phrase}
        if route.answer is not None:
            schemas = {
                media_type: {"schema": _schema_of(route.answer, by_kind) if media_type != EVENTS else {}}
                for media_type in route.answer_types
            }
            schemas |= {name: {"schema": _schema_of(kind, by_kind)} for name, kind in route.other_answers}
            response["content"] = schemas
        if route.answer_headers:
            response["headers"] = {name: {"schema": {"type": "string"}} for name in route.answer_headers}
        responses[str(status)] = response
    for status, codes in sorted(error_statuses(route).items()):
        if str(status) in responses:
            responses[str(status)]["content"][_PROBLEM_TYPE] = {"schema": by_kind[id(ProblemDocument)]}
            continue
        text = HTTPStatus(status).phrase + (f": {', '.join(sorted(codes))}" if codes else "")
        responses[str(status)] = {
            "description": text,
            "content": {_PROBLEM_TYPE: {"schema": by_kind[id(ProblemDocument)]}},
        }
    return responses


def error_statuses(route: Route) -> dict[int, set[str]]:
    """The statuses of errors that a route may answer with, and the codes particular to it."""
    statuses: dict[int, set[str]] = {status: set() for status in _COMMON}
    if route.parameters:
        statuses |= {status: set() for status in _WITH_PARAMETERS}
    if route.body is not None:
        statuses |= {status: set() for status in _WITH_BODY}
    if route.streams:
        statuses[406] = set()
    if route.upgrade:
        statuses[426] = {"upgrade_required"}
    for code in route.errors:
        statuses.setdefault(STATUSES[code], set()).add(code)
    return statuses


def _structs(kinds: Iterable[Any]) -> Iterable[type[msgspec.Struct]]:
    """All structs in types, with those in their fields."""
    seen: set[Any] = set()
    new = list(kinds)
    while new:
        kind = new.pop()
        new += get_args(kind)
        if isinstance(kind, type) and issubclass(kind, msgspec.Struct) and kind not in seen:
            seen.add(kind)
            new += [field.type for field in msgspec.structs.fields(kind)]
            yield kind


def _explain(schema: Schema | None, kind: type[msgspec.Struct]) -> None:
    """Add what the docstrings below the fields say, and that of the class a struct was made of."""
    if schema is None:
        return
    source = getattr(kind, "source_struct", kind)
    if source is not kind:
        schema["description"] = " ".join((source.__doc__ or "").split())
    for base in source.__mro__:
        for name, text in field_docstrings(base).items():
            if name in schema["properties"]:
                schema["properties"][name].setdefault("description", text)
    constrain(schema, kind)


@cache
def field_docstrings(kind: type) -> dict[str, str]:
    """The docstring below each field of a class, from its source."""
    try:
        (tree,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    except (OSError, TypeError, SyntaxError):  # built in, made by a call, or installed without sources
        return {}
    if not isinstance(tree, ast.ClassDef):
        return {}
    found = {}
    for field, below in zip(tree.body, tree.body[1:], strict=False):
        is_text = isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and is_text:
            found[field.target.id] = " ".join(str(below.value.value).split())  # type: ignore[attr-defined]
    return found


def _mended(part: Any) -> Any:
    """Say what msgspec's schemas leave unsaid: how base64 looks."""
    if isinstance(part, dict):
        mended = {key: _mended(one) for key, one in part.items()}
        if mended.get("contentEncoding") == "base64":
            mended["pattern"] = _BASE64
        return mended
    return [_mended(one) for one in part] if isinstance(part, list | tuple) else part


def _not_null(schema: Schema) -> Schema:
    """The schema of a field in a query, which is left out rather than null."""
    if "anyOf" in schema:
        kept = [one for one in schema["anyOf"] if one.get("type") != "null"]
        rest = {key: part for key, part in schema.items() if key not in ("anyOf", "default")}
        return {**rest, **kept[0]} if len(kept) == 1 else {**rest, "anyOf": kept}
    return schema


def http_error_codes() -> dict[str, tuple[int, str]]:
    """Status and meaning of the codes that HTTP itself has."""
    return HttpError.codes
