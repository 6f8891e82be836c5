"""Routes as resources: carrying messages of a topic, or of subjects, to other topics."""

from typing import Any, Literal

import msgspec

from headrace.gateways.http.call import Call, Reply, json_reply
from headrace.gateways.http.paging import PageQuery, page
from headrace.gateways.http.route import Route, fields_struct, given_fields, request_route
from headrace.model.envelope import (
    EnvelopeHeader,
    HeaderBytes,
    MessageEnvelope,
    StoredFields,
    envelope_key,
    readable_header,
)
from headrace.model.errors import RouteNotFound
from headrace.model.route_requests import (
    RouteDefinition,
    RouteExplain,
    RouteExplained,
    RouteInfo,
    RouteList,
    RouteRemove,
    RouteSet,
)

ROUTES_TAG = "routes"
_PATH = "/v1/routes/{name}"
_HEADERS = dict[str, str | HeaderBytes | None] | None
_REPLACED: dict[str, Any] = {"headers": _HEADERS, "headers_match": Literal["all", "any"]}

RouteFields = fields_struct(RouteDefinition, without=("name",), replaced=_REPLACED)
NamedRouteFields = fields_struct(RouteDefinition, replaced=_REPLACED, name="NamedRouteFields")


class RouteContent(RouteDefinition, omit_defaults=True):
    """What a route carries where. The values of headers are texts, or `{"base64": …}` where they are none."""

    headers: _HEADERS = None  # type: ignore[assignment]  # as JSON shows them


class RouteState(RouteInfo):
    """A route as it is now."""

    definition: RouteContent


class RouteQuery(PageQuery, forbid_unknown_fields=True):
    """Which routes."""

    topic: str = ""
    """Only those from this topic or to it; empty: all."""


class RoutePage(msgspec.Struct):
    """Routes by name."""

    routes: list[RouteState]
    next: str = ""
    """The cursor of the next page; empty at the end."""


class ExplainFields(msgspec.Struct, forbid_unknown_fields=True):
    """A message, as consumers of the topic see it."""

    source: str = ""
    """The topic; empty: messages that are published to subjects."""
    value: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    """Any JSON."""
    value_base64: bytes | None = None
    """Instead of `value`: any bytes."""
    key: str | None = None
    key_base64: bytes | None = None
    headers: list[EnvelopeHeader] = []


_set_decoder = msgspec.json.Decoder(RouteFields)
_create_decoder = msgspec.json.Decoder(NamedRouteFields)
_explain_decoder = msgspec.json.Decoder(ExplainFields)


async def list_routes(call: Call) -> Reply:
    """Answer a page of routes."""
    query = call.query(RouteQuery)
    found = await call.ask(RouteList(query.topic))
    routes, following = page(found.routes, lambda one: one.definition.name, query)
    return json_reply(RoutePage([_state(one) for one in routes], following))


async def describe_route(call: Call) -> Reply:
    """Answer one route."""
    (name,) = call.parameters
    for one in (await call.ask(RouteList())).routes:
        if one.definition.name == name:
            return json_reply(_state(one))
    raise RouteNotFound(f"there is no route {name}; GET /v1/routes lists them")


async def create_route(call: Call) -> Reply:
    """Make a route."""
    body: msgspec.Struct = await call.decoded(_create_decoder)
    return json_reply(_state(await call.ask(RouteSet(_definition(given_fields(body))))), 201)


async def set_route(call: Call) -> Reply:
    """Make or replace a route."""
    body: msgspec.Struct = await call.decoded(_set_decoder)
    definition = _definition({"name": call.parameters[0], **given_fields(body)})
    return json_reply(_state(await call.ask(RouteSet(definition, replace=True))))


async def explain_routes(call: Call) -> Reply:
    """Answer which routes a message would take, and why."""
    given = await call.decoded(_explain_decoder)
    if given.value is msgspec.UNSET and given.value_base64 is None:
        given.value_base64 = b""
    envelope = MessageEnvelope(given.value, given.value_base64, given.key, given.key_base64, given.headers)
    fields, key = StoredFields(), envelope_key(envelope)
    fields.add(envelope, key)
    columns = fields.columns(0)
    headers = (columns.headers[0] if columns.headers else None) or {}
    return json_reply(await call.ask(RouteExplain(given.source, columns.values[0], key, headers)))


def _definition(given: dict[str, Any]) -> RouteDefinition:
    headers = given.get("headers")
    if headers is not None:
        given["headers"] = {name: _header_bytes(content) for name, content in headers.items()}
    return RouteDefinition(**given)


def _header_bytes(content: str | HeaderBytes | None) -> bytes | None:
    if isinstance(content, HeaderBytes):
        return content.base64
    return None if content is None else content.encode()


def _state(route: RouteInfo) -> RouteState:
    definition = RouteContent(**msgspec.structs.asdict(route.definition))
    if definition.headers is not None:
        definition.headers = {name: readable_header(content) for name, content in definition.headers.items()}  # type: ignore[arg-type]
    return RouteState(definition, route.created_us, route.behind, route.lost, route.error)


_REFUSED = ("topic_not_found", "topic_is_view", "route_loop", "invalid_content_query", "content_support_missing")
_EXAMPLE = {"source": "orders", "targets": ["orders-eu"], "content": {"jsonpath": "$[?@.region == 'eu']"}}

ROUTE_ROUTES = [
    Route("GET", "/v1/routes", list_routes, "List routes", ROUTES_TAG, query=RouteQuery, answer=RoutePage),
    Route(
        "POST", "/v1/routes", create_route, "Make a route; it applies to messages published from now on", ROUTES_TAG,
        201, body=NamedRouteFields, body_required=True, answer=RouteState, errors=("route_exists", *_REFUSED),
        example={"name": "eu", **_EXAMPLE},
    ),
    Route(
        "GET", _PATH, describe_route, "Describe a route", ROUTES_TAG, answer=RouteState, errors=("route_not_found",)
    ),
    Route(
        "PUT", _PATH, set_route, "Make a route, or replace the one of that name", ROUTES_TAG,
        body=RouteFields, body_required=True, answer=RouteState, errors=_REFUSED, example=_EXAMPLE,
    ),
    request_route(RouteRemove, "DELETE", _PATH, tag=ROUTES_TAG, errors=("route_not_found",)),
    Route(
        "POST", "/v1/route-explanations", explain_routes,
        "Tell which routes of a topic a message would take, and why; nothing is published", ROUTES_TAG,
        body=ExplainFields, answer=RouteExplained,
        errors=("topic_not_found", "content_support_missing"),
        example={"source": "orders", "value": {"region": "eu"}},
    ),
]  # fmt: skip
"""The routes about routes."""
