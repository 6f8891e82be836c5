"""`headrace route`: manage routes, which carry messages from topics to other topics."""

import argparse
import os
from typing import Any

import msgspec

from headrace.cli.arguments import command_maker, completes, header
from headrace.cli.connection import add_connection, connected
from headrace.cli.message_formats import json_headers
from headrace.cli.terminal.interrupts import Interrupts
from headrace.cli.terminal.output import Output, table
from headrace.cli.terminal.watch import add_watch
from headrace.model.headers import headers_from_pairs
from headrace.model.route import described_condition
from headrace.model.route_requests import RouteInfo
from headrace.model.system_topics import INGRESS_TOPIC

_ADD = f"""\
examples:
  headrace route add paid --from orders --pattern '*.paid' --to billing --to shipping
  headrace route add eu --key orders.eu --to europe
  headrace route add audit --from orders --all --to audit
  headrace route add swiss --from orders --header country=CH --to swiss
  headrace route add large --from orders --jsonpath '$.items[?@.price > 100]' --to large
  headrace route add rest --from orders --unmatched --to other

A message is stored in the topic it is published to, and from there in every topic that
the routes which it takes name: in order, and exactly once. Give one condition. The
subject of a message is its header headrace-subject, or else its key; in a pattern *
stands for one token, # for any number of tokens, and > at the end for one or more.

Without --from the route is about the ingress, the topic {INGRESS_TOPIC}: messages
published without a topic are there, and those that are published to a subject which a
route takes by --key or --pattern.

A route is about messages published from then on. Messages that cannot be decided about
or delivered go to the error topic.
"""

_LIST = """\
examples:
  headrace route list
  headrace route list --topic billing --json

`behind` counts the messages of the source that are not yet in all their targets,
synced. If a target takes no messages, it tells why; the source keeps them meanwhile,
whatever its retention.
"""

_EXPLAIN = """\
examples:
  headrace route explain --from orders --key eu.paid '{"items": []}'
  headrace route explain --subject orders.eu.paid

Tells which routes a message would take, and why, without publishing it. Middleware of
the source is not applied: give the message as it is after that, as consumers see it.
"""

_REMOVE = """\
example:
  headrace route remove paid

Messages published before are still forwarded.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the commands to the parser of `headrace route`."""
    parser.epilog = "`headrace route COMMAND --help` explains a command, with examples."
    make = command_maker(parser)
    adding = make("add", add, "carry messages from a topic to others", _ADD)
    _add_route(adding)
    listing = make("list", list_routes, "list routes", _LIST)
    completes(listing.add_argument("--topic", help="only routes from this topic or to it"), "topic")
    listing.add_argument("--names", action="store_true", help="print only the names")
    explaining = make("explain", explain, "tell which routes a message would take, and why", _EXPLAIN)
    _add_message(explaining)
    removing = make("remove", remove, "remove a route", _REMOVE)
    completes(removing.add_argument("name", metavar="NAME", help="the route's name"), "route")
    add_watch(listing)
    for each in (adding, listing, explaining, removing):
        add_connection(each)


def _add_route(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="NAME", help="the name of the route")
    _add_source(parser)
    to = parser.add_argument(
        "--to", dest="targets", metavar="TOPIC", action="append", required=True, help="a topic to carry messages to"
    )
    completes(to, "topic")
    group = parser.add_argument_group("condition, one of")
    group.add_argument("--key", metavar="SUBJECT", help="messages with this subject")
    group.add_argument("--pattern", help="messages whose subject matches")
    group.add_argument("--all", action="store_true", help="every message")
    group.add_argument(
        "--header",
        dest="headers",
        metavar="NAME=VALUE",
        action="append",
        type=_condition,
        help="messages with this header; NAME alone: with any value; may be repeated",
    )
    group.add_argument("--jsonpath", metavar="PATH", help="messages in which a JSONPath (RFC 9535) finds something")
    group.add_argument("--partial", metavar="JSON", type=_json, help="messages that contain this JSON object")
    group.add_argument("--exact", metavar="JSON", type=_json, help="messages that are equal to this JSON value")
    group.add_argument("--regex", help="messages in which a regular expression (RE2) is found")
    group.add_argument("--unmatched", action="store_true", help="messages that no other route of the topic takes")
    parser.add_argument("--any", action="store_true", help="one of the headers is enough (default: all are needed)")
    error_topic = parser.add_argument("--error-topic", metavar="TOPIC", help="default: the source's name and .errors")
    completes(error_topic, "topic")
    parser.add_argument("--replace", action="store_true", help="replace the route with this name, if there is one")
    parser.add_argument("--exist-ok", action="store_true", help="accept a route with this name that says the same")
    parser.set_defaults(check=_check)


def _add_source(parser: argparse.ArgumentParser) -> None:
    source = parser.add_argument(
        "--from", dest="source", metavar="TOPIC", help="the topic that messages come from (default: the ingress)"
    )
    completes(source, "topic")


def _add_message(parser: argparse.ArgumentParser) -> None:
    _add_source(parser)
    parser.add_argument("value", metavar="VALUE", nargs="?", default="", help="the message (default: an empty one)")
    parser.add_argument("-k", "--key", help="the message's key")
    parser.add_argument("--subject", help="the message's subject, the header headrace-subject")
    text = "a header of the message; may be repeated"
    parser.add_argument("--header", dest="headers", metavar="NAME=VALUE", action="append", type=header, help=text)


def _condition(text: str) -> tuple[str, bytes | None]:
    return header(text) if "=" in text else (text, None)


def _json(text: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except msgspec.MsgspecError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not JSON: {error}") from error


_QUERIES = ("jsonpath", "partial", "exact", "regex")


def _check(given: argparse.Namespace) -> str | None:
    """Return why the arguments contradict each other, if they do."""
    conditions = ("key", "pattern", "all", "headers", "unmatched", *_QUERIES)
    count = sum(getattr(given, name) not in (None, False) for name in conditions)
    if count != 1:
        options = ("--key", "--pattern", "--all", "--header", *(f"--{name}" for name in _QUERIES), "--unmatched")
        return f"give one condition, of {', '.join(options)}"
    return "--any needs --header" if given.any and given.headers is None else None


def add(given: argparse.Namespace, out: Output, _: Interrupts) -> int:
    """Make a route."""
    queries = {name: getattr(given, name) for name in _QUERIES if getattr(given, name) is not None}
    with connected(given, out) as bus:
        info = bus.routes.add(
            given.name,
            source=given.source,
            to=given.targets,
            key=given.key,
            pattern=given.pattern,
            all=given.all,
            headers=None if given.headers is None else dict(given.headers),
            headers_match="any" if given.any else "all",
            content=queries or None,
            unmatched=given.unmatched,
            error_topic=given.error_topic,
            replace=given.replace,
            exist_ok=given.exist_ok,
        )
    route = info.definition
    out.tell(route_content(info), f"{route.name}: from {route.source} to {', '.join(route.targets)}")
    return 0


def list_routes(given: argparse.Namespace, out: Output, _: Interrupts) -> int:
    """Print routes, one per line."""
    with connected(given, out) as bus:
        infos = bus.routes.list(given.topic)
    if out.json:
        for info in infos:
            out.tell(route_content(info))
        return 0
    if given.names:
        out.tell({}, *(info.definition.name for info in infos))
        return 0
    if not infos:
        out.note("there are no routes" + (f" from or to {given.topic}" if given.topic else ""))
        return 0
    rows = [
        (
            info.definition.name,
            info.definition.source,
            described_condition(info.definition),
            ", ".join(info.definition.targets),
            f"{info.behind:,}",
        )
        for info in infos
    ]
    out.tell({}, *table(("name", "from", "condition", "to", "behind"), *rows))
    for info in infos:
        if info.error:
            out.note(f"route {info.definition.name} does not forward at the moment: {info.error}")
    return 0


def explain(given: argparse.Namespace, out: Output, _: Interrupts) -> int:
    """Tell which routes a message would take, and why."""
    headers = None if given.headers is None else headers_from_pairs(given.headers)
    with connected(given, out) as bus:
        told = bus.routes.explain(
            source=given.source,
            value=os.fsencode(given.value),
            key=None if given.key is None else os.fsencode(given.key),
            subject=given.subject,
            headers=headers,
        )
    if out.json:
        out.tell(msgspec.to_builtins(told) | {"targets": told.targets})
        return 0
    if not told.routes:
        out.note(f"there are no routes from {told.source}")
        return 0
    rows = [("yes" if one.is_taken else "no", one.name, one.reason) for one in told.routes]
    out.tell({}, *table(("taken", "route", "why"), *rows))
    out.tell({}, f"to {', '.join(told.targets)}" if told.targets else "to no topic")
    return 0


def remove(given: argparse.Namespace, out: Output, _: Interrupts) -> int:
    """Remove a route."""
    with connected(given, out) as bus:
        bus.routes.remove(given.name)
    out.tell({"removed": given.name}, f"removed {given.name}")
    return 0


def route_content(info: RouteInfo) -> dict[str, Any]:
    """Return a route for JSON output: its definition and its state, empty fields included."""
    route = info.definition
    content: dict[str, Any] = {name: getattr(route, name) for name in ("name", "source", "targets", "error_topic")}
    content |= {name: getattr(route, name) for name in ("key", "pattern", "all", "unmatched")}
    content |= json_headers(route.headers or {}).given()
    content["headers_match"] = route.headers_match
    content["content"] = None if route.content is None else route.content.as_dict()
    return content | {name: getattr(info, name) for name in ("created_us", "behind", "lost", "error")}
