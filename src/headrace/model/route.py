"""Checks the definition of a route, and completes it."""

import msgspec

from headrace.model.arguments import shown
from headrace.model.errors import InvalidArgument
from headrace.model.limits import ROUTE_HEADERS_MAX, ROUTE_TARGETS_MAX, SUBJECT_CHARS_MAX
from headrace.model.names import derived_topic
from headrace.model.route_requests import RouteDefinition
from headrace.model.subject import checked_pattern
from headrace.model.topic import checked_tenant_name, parse_topic, tenant_of

ERRORS_SUFFIX = ".errors"
"""What a topic's own error topic has behind the name."""
CONDITIONS = ("key", "pattern", "all", "headers", "content", "unmatched")
_HEADERS_BYTES_MAX = 16 << 10


def checked_route(route: RouteDefinition, ingress: str) -> RouteDefinition:
    """The definition with full names; raises InvalidArgument if it cannot be used.

    >>> route = checked_route(RouteDefinition("paid", ["billing"], pattern="orders.*.paid"), "headrace.ingress")
    >>> route.source, route.error_topic
    ('headrace.ingress', 'headrace.ingress.errors')
    """
    given = [name for name in CONDITIONS if getattr(route, name) not in (None, False)]
    if len(given) != 1:
        told = " and ".join(given) or "none of them"
        raise InvalidArgument(f"a route has exactly one of {', '.join(CONDITIONS)}, not {told}")
    if route.pattern is not None:
        checked_pattern(route.pattern)
    if route.key is not None and not 0 < len(route.key) <= SUBJECT_CHARS_MAX:
        raise InvalidArgument(f"a key has 1 to {SUBJECT_CHARS_MAX} characters, not {len(route.key)}")
    _check_headers(route)
    if not 0 < len(route.targets) <= ROUTE_TARGETS_MAX:
        raise InvalidArgument(f"a route has 1 to {ROUTE_TARGETS_MAX} targets, not {len(route.targets)}")
    name = checked_tenant_name(route.name, "route")
    source = str(parse_topic(route.source or ingress))
    targets = list(dict.fromkeys(str(parse_topic(target)) for target in route.targets))
    error_topic = str(parse_topic(route.error_topic or derived_topic(source, ERRORS_SUFFIX)))
    for topic in (source, *targets, error_topic):
        if tenant_of(topic) != tenant_of(name):
            raise InvalidArgument(f"the route {name} can only use topics of its own tenant, not {topic}")
    return msgspec.structs.replace(route, name=name, source=source, targets=targets, error_topic=error_topic)


def _check_headers(route: RouteDefinition) -> None:
    if route.headers_match not in ("all", "any"):
        raise InvalidArgument(f"headers_match is all or any, not {shown(route.headers_match)}")
    headers = route.headers
    if headers is None:
        return
    if not 0 < len(headers) <= ROUTE_HEADERS_MAX:
        raise InvalidArgument(f"a route has 1 to {ROUTE_HEADERS_MAX} headers, not {len(headers)}")
    size = sum(len(name) + len(content or b"") for name, content in headers.items())
    if size > _HEADERS_BYTES_MAX:
        raise InvalidArgument(f"a route's headers have {_HEADERS_BYTES_MAX} bytes at most, not {size}")


def described_condition(route: RouteDefinition) -> str:
    """The condition of a route in words.

    >>> described_condition(RouteDefinition("paid", ["billing"], pattern="orders.#"))
    'subject matches orders.#'
    """
    if route.key is not None:
        return f"subject is {route.key}"
    if route.pattern is not None:
        return f"subject matches {route.pattern}"
    if route.headers is not None:
        pairs = [
            name if content is None else f"{name}={content.decode(errors='replace')}"
            for name, content in route.headers.items()
        ]
        return f"{route.headers_match} of the headers {', '.join(pairs)}"
    if route.content is not None:
        argument = route.content.argument
        text = argument if isinstance(argument, str) else msgspec.json.encode(argument).decode()
        return f"content {route.content.kind} {text}"
    return "no other route takes it" if route.unmatched else "every message"
