"""A route: everything that is known of a path and method. The dispatch and the OpenAPI document are both made of it."""

import types
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Union, get_args, get_origin

import msgspec

from headrace.gateways.http.call import Call, Reply, json_reply
from headrace.model.request import Request
from headrace.model.requests import Done

Handler = Callable[[Call], Awaitable[Reply | None]]

JSON = "application/json"
NDJSON = "application/x-ndjson"
EVENTS = "text/event-stream"
OCTETS = "application/octet-stream"
ANY_TYPE = "*/*"
"""Of answers whose type is that of a message."""
ANY_BODY = (JSON, "text/plain", OCTETS)
"""Of paths that pass on bodies of any type, the types that the document names."""

_Int64 = Annotated[int, msgspec.Meta(ge=-(1 << 63), le=(1 << 63) - 1)]


@dataclass(frozen=True)
class HeaderField:
    """A header that a route reads."""

    name: str
    description: str
    pattern: str = ""
    """What it must look like; the handler refuses anything else."""
    length_max: int = 0
    example: str = ""


@dataclass(frozen=True)
class Route:
    """A path and a method: what it takes, what it answers, and what handles it."""

    method: str
    path: str
    handler: Handler
    summary: str
    tag: str
    status: int = 200
    other_statuses: tuple[int, ...] = ()
    """Other statuses of success, with the same answer."""
    query: type[msgspec.Struct] | None = None
    body: Any = None
    """The type of the body, or several of them; None if there is none."""
    body_types: tuple[str, ...] = (JSON,)
    other_bodies: tuple[tuple[str, Any], ...] = ()
    """Media types whose bodies have a type of their own."""
    body_required: bool = False
    answer: Any = None
    """The type of the answer, or several of them; None if it has no body."""
    answer_types: tuple[str, ...] = (JSON,)
    other_answers: tuple[tuple[str, Any], ...] = ()
    """Media types whose answers have a type of their own."""
    errors: tuple[str, ...] = ()
    """The codes of errors that are particular to it."""
    headers: tuple[HeaderField, ...] = ()
    answer_headers: tuple[str, ...] = ()
    example: Any = None
    """An example of a body."""
    streams: bool = False
    """Whether the answer goes on until somebody ends it."""
    upgrade: str = ""
    """The protocol that the handler hands the connection over to; a request for it has no session yet."""
    is_public: bool = False
    """Whether it is for clients without any access, too: it tells nothing of what the broker has."""
    takes_events: bool = False
    """Whether senders of CloudEvents may ask for permission to deliver here: OPTIONS with WebHook-Request-Origin."""
    integers: tuple[str, ...] = ()
    """The parameters in the path that are numbers."""

    @property
    def parameters(self) -> list[str]:
        """The names of the parameters in the path."""
        return [part[1:-1] for part in self.path.split("/") if part.startswith("{")]


def request_route(
    request: type[Request[Any]],
    method: str,
    path: str,
    *,
    tag: str,
    summary: str = "",
    status: int = 200,
    without: Sequence[str] = (),
    errors: tuple[str, ...] = (),
    example: Any = None,
    replaced: dict[str, Any] | None = None,
) -> Route:
    """The route of a request of the broker, as that declares itself.

    The path has some of its fields, the query (of GET and DELETE) or the body has the others; its answer is the answer.
    """
    named = [part[1:-1] for part in path.split("/") if part.startswith("{")]
    fields = fields_struct(request, without=(*named, *without), replaced=replaced)
    has_fields = bool(msgspec.structs.fields(fields))
    in_query = method in ("GET", "DELETE")
    decoder = msgspec.json.Decoder(fields)
    answer = None if request.declared.answer is Done else request.declared.answer

    async def handle(call: Call) -> Reply:
        given: Any = None
        if has_fields:
            given = call.query(fields) if in_query else await call.decoded(decoder)
        known = dict(zip(named, call.parameters, strict=True))
        answered = await call.ask(request(**known, **given_fields(given)))
        return Reply(204) if answer is None else json_reply(answered, status)

    required = not in_query and any(field.required for field in msgspec.structs.fields(fields))
    return Route(
        method,
        path,
        handle,
        summary or " ".join((request.__doc__ or "").split()).rstrip("."),
        tag,
        204 if answer is None else status,
        query=fields if in_query and has_fields else None,
        body=fields if not in_query and has_fields else None,
        body_required=required,
        answer=answer,
        errors=errors,
        example=example,
    )


def fields_struct(
    request: type[msgspec.Struct],
    *,
    without: Sequence[str] = (),
    replaced: dict[str, Any] | None = None,
    added: dict[str, tuple[Any, Any]] | None = None,
    name: str = "",
) -> type[msgspec.Struct]:
    """A struct with the fields of another but for some, which refuses unknown fields and numbers of more than 64 bits.

    Fields with a default are left out where the client leaves them out; those that are `added` have a type and a
    default.
    """
    fields: list[tuple[str, Any] | tuple[str, Any, Any]] = []
    for field in msgspec.structs.fields(request):
        if field.name in without:
            continue
        kind = (replaced or {}).get(field.name) or bounded(field.type)
        if field.required:
            fields.append((field.name, kind))
        else:
            fields.append((field.name, kind | msgspec.UnsetType, msgspec.UNSET))
    fields += [(one, kind, default) for one, (kind, default) in (added or {}).items()]
    return msgspec.defstruct(
        name or f"{request.__name__}Fields",
        fields,
        forbid_unknown_fields=True,
        kw_only=True,
        namespace={"source_struct": request},
    )


def given_fields(given: msgspec.Struct | None) -> dict[str, Any]:
    """The fields that the client gave, as plain values where they are settings."""
    if given is None:
        return {}
    found = {}
    for name in given.__struct_fields__:
        content = getattr(given, name)
        if content is not msgspec.UNSET:
            is_settings = isinstance(content, msgspec.Struct) and name == "settings"
            found[name] = msgspec.to_builtins(content) if is_settings else content
    return found


def bounded(kind: Any) -> Any:
    """A type whose integers have 64 bits: others could not be stored."""
    if kind is int:
        return _Int64
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (list, dict, tuple) and origin is not None:
        return origin[tuple(bounded(one) for one in arguments)]
    if origin in (Union, types.UnionType):
        return Union[tuple(bounded(one) for one in arguments)]  # noqa: UP007 of a tuple
    return kind
