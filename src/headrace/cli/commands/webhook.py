"""`headrace webhook`: manage webhooks, which send the messages of topics to URLs."""

import argparse
from pathlib import Path
from typing import Any

import msgspec

from headrace.cli.arguments import command_maker, completes, count, duration, header, start
from headrace.cli.connection import add_connection, connected
from headrace.cli.message_formats import time_text
from headrace.cli.setting_options import add_settings, given_settings, setting_text
from headrace.cli.terminal.interrupts import Interrupts
from headrace.cli.terminal.output import Output, table
from headrace.cli.terminal.watch import add_watch
from headrace.model.subscription import SubscriptionSettings
from headrace.model.webhook import FORMATS, OWN_SETTINGS
from headrace.model.webhook_requests import WebhookDelivery, WebhookInfo

_SET = """\
examples:
  headrace webhook set billing orders https://example.org/hook
  headrace webhook set billing orders https://example.org/hook --start earliest
  headrace webhook set audit orders https://example.org/in --batch-max 100 --concurrency 1
  headrace webhook set crm orders https://example.org/in --header authorization='Bearer x'
  headrace webhook set events orders https://example.org/in --format cloudevents-binary

Each message is sent until the receiver answers 2xx: 16 attempts in about a day, then it
is a dead letter of the leased subscription webhook.NAME. Requests are signed by Standard
Webhooks; the secret is printed once. --secret-file has secrets of your own, one a line.

Addresses that are not of the public internet are refused, unless the broker runs with
--webhook-networks.
"""

_ALTER = """\
examples:
  headrace webhook alter billing --url https://example.org/new
  headrace webhook alter billing --deliveries-max 5
  headrace webhook alter billing --rotate

--rotate makes a new secret, and prints it; requests are signed with it and with the
newest one before, until the next rotation.
"""

_LIST = """\
examples:
  headrace webhook list
  headrace webhook list --topic orders --json
"""

_DESCRIBE = """\
example:
  headrace webhook describe billing
"""

_PAUSE = """\
example:
  headrace webhook pause billing --reason maintenance

What is published meanwhile waits.
"""

_RESUME = """\
example:
  headrace webhook resume billing

Also after the broker disabled it, because the receiver answered 410.
"""

_TEST = """\
example:
  headrace webhook test billing

Sends a ping, signed as all requests are. Exits with 1 if the receiver does not take it.
"""

_DELIVERIES = """\
examples:
  headrace webhook deliveries billing
  headrace webhook deliveries billing --failed --json

The last requests, as far as they are in the broker's memory, the newest first. Dead
letters: headrace queue peek TOPIC webhook.NAME --status dead
"""

_DELETE = """\
example:
  headrace webhook delete billing

Its leased subscription is deleted too, with what was not delivered.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the commands to the parser of `headrace webhook`."""
    parser.epilog = "`headrace webhook COMMAND --help` explains a command, with examples."
    make = command_maker(parser)
    setting = make("set", set_webhook, "send the messages of a topic to a URL", _SET)
    setting.add_argument("name", metavar="NAME", help="the name of the webhook")
    completes(setting.add_argument("topic", metavar="TOPIC", help="the topic, or a virtual topic"), "topic")
    setting.add_argument("url", metavar="URL", help="where to: http:// or https://")
    text = "the first message, as in headrace queue create (default: those to come)"
    setting.add_argument("--start", metavar="WHERE", type=start, default="latest", help=text)
    setting.add_argument("--replace", action="store_true", help="replace the webhook with this name, if there is one")
    altering = make("alter", alter, "change parts of a webhook", _ALTER)
    listing = make("list", list_webhooks, "list webhooks", _LIST)
    completes(listing.add_argument("--topic", help="only those of this topic"), "topic")
    listing.add_argument("--names", action="store_true", help="print only the names")
    describing = make("describe", describe, "describe a webhook, and how far it is behind", _DESCRIBE)
    pausing = make("pause", pause, "send nothing more until it is resumed", _PAUSE)
    pausing.add_argument("--reason", default="", help="told to whoever looks at it")
    resuming = make("resume", resume, "go on", _RESUME)
    testing = make("test", test, "send a ping to the receiver", _TEST)
    logged = make("deliveries", deliveries, "list the last requests", _DELIVERIES)
    logged.add_argument("--limit", metavar="N", type=count, default=50, help="the most to list (default: 50)")
    logged.add_argument("--failed", action="store_true", help="only those that failed")
    deleting = make("delete", delete, "delete a webhook", _DELETE)
    for each in (altering, describing, pausing, resuming, testing, logged, deleting):
        completes(each.add_argument("name", metavar="NAME", help="the webhook's name"), "webhook")
    altering.add_argument("--url", help="where to: http:// or https://")
    altering.add_argument("--rotate", action="store_true", help="make a new secret beside the newest one there is")
    for each in (setting, altering):
        _add_definition(each)
    for each in (listing, describing, logged):
        add_watch(each)
    for each in (setting, altering, listing, describing, pausing, resuming, testing, logged, deleting):
        add_connection(each)


def _add_definition(parser: argparse.ArgumentParser) -> None:
    unset = argparse.SUPPRESS
    add = parser.add_argument
    add("--format", choices=FORMATS, default=unset, help="what is sent (default: envelope)")
    text = "a header of each request; may be repeated"
    add("--header", dest="headers", metavar="NAME=VALUE", action="append", type=header, help=text)
    add("--secret-file", metavar="FILE", type=Path, help="a file with one secret, or two, one a line")
    add("--batch-max", metavar="N", type=count, default=unset, help="the most messages in a request (default: 1)")
    add("--concurrency", metavar="N", type=count, default=unset, help="the most requests at once (default: 4)")
    text = "one request at a time for each key, in order"
    add("--ordered-by-key", action=argparse.BooleanOptionalAction, default=unset, help=text)
    text = "how long the receiver has for its answer (default: 20s)"
    add("--timeout-seconds", metavar="TIME", type=duration, default=unset, help=text)
    text = "ask the receiver for permission first, as CloudEvents' HTTP webhooks do"
    add("--validate", action=argparse.BooleanOptionalAction, default=unset, help=text)
    add("--origin", metavar="NAME", default=unset, help="the DNS name that asks for it")
    add_settings(parser, SubscriptionSettings, "its leased subscription", OWN_SETTINGS)


_PARTS = ("format", "batch_max", "concurrency", "ordered_by_key", "timeout_seconds", "validate", "origin")


def _parts(given: argparse.Namespace) -> dict[str, Any]:
    """The parts of the definition that the user gave."""
    parts = {name: getattr(given, name) for name in _PARTS if name in given}
    if given.headers is not None:
        parts["headers"] = {name: content.decode() for name, content in given.headers}
    if given.secret_file is not None:
        parts["secrets"] = given.secret_file.read_text(encoding="utf-8").split()
    return parts


def set_webhook(given: argparse.Namespace, out: Output, _: Interrupts) -> int:
    """Make a webhook."""
    parts = {**_parts(given), **given_settings(given)}
    with connected(given, out) as bus:
        info = bus.webhooks.set(given.name, given.topic, given.url, start=given.start, replace=given.replace, **parts)
    _tell_secret(info, out, f"{given.name}: from {info.definition.topic} to {info.definition.url}")
    return 0


def alter(given: argparse.Namespace, out: Output, _: Interrupts) -> int:
    """Change parts of a webhook."""
    parts = _parts(given)
    if given.url is not None:
        parts["url"] = given.url
    if settings := given_settings(given):
        parts["settings"] = settings
    with connected(given, out) as bus:
        info = bus.webhooks.alter(given.name, rotate=given.rotate, **parts)
    _tell_secret(info, out, f"altered {given.name}")
    return 0


def _tell_secret(info: WebhookInfo, out: Output, text: str) -> None:
    lines = [f"secret  {secret}" for secret in info.secrets]
    out.tell(webhook_content(info), text, *lines)
    if lines:
        out.note("the secret is not shown again: give it to the receiver now")


def list_webhooks(given: argparse.Namespace, out: Output, _: Interrupts) -> int:
    """Print webhooks, one per line."""
    with connected(given, out) as bus:
        infos = bus.webhooks.list(given.topic)
    if out.json:
        for info in infos:
            out.tell(webhook_content(info))
    elif given.names:
        out.tell({}, *(info.definition.name for info in infos))
    elif not infos:
        out.note("there are no webhooks" + (f" of {given.topic}" if given.topic else ""))
    else:
        rows = [
            (
                one.definition.name,
                _kind(one),
                one.definition.topic,
                one.definition.url,
                one.state,
                one.circuit,
                f"{one.delivered:,}",
            )
            for one in infos
        ]
        out.tell({}, *table(("name", "kind", "topic", "url", "state", "circuit", "delivered"), *rows))
    return 0


def describe(given: argparse.Namespace, out: Output, _: Interrupts) -> int:
    """Print all about a webhook."""
    with connected(given, out) as bus:
        info = bus.webhooks.describe(given.name)
    definition = info.definition
    rows = [
        ("webhook", definition.name),
        ("kind", _kind(info)),
        ("topic", definition.topic),
        ("url", definition.url),
        ("state", f"{info.state}{f': {info.reason}' if info.reason else ''}"),
        ("circuit", _circuit(info)),
        ("format", f"{definition.format}, {definition.batch_max} in a request, {definition.concurrency} at once"),
        ("messages", f"{info.ready:,} ready, {info.leased:,} leased, {info.waiting:,} waiting, {info.dead:,} dead"),
        *([("waits for", f"{info.waits_for} that all webhooks share")] if info.waits_for else []),
        ("delivered", f"{info.delivered:,}, and {info.failed:,} failed"),
        ("secrets", str(info.secret_count)),
        *((f"header {name}", text) for name, text in definition.headers.items()),
        *((name, setting_text(name, setting)) for name, setting in definition.settings.items()),
    ]
    if definition.websub is not None:
        rows.append(("lease ends", time_text(definition.websub.lease_end_us)))
    for name, text in (("last error", info.last_error), ("error", info.error)):
        if text:
            rows.append((name, text))
    width = max(len(name) for name, _ in rows)
    out.tell(webhook_content(info), *(f"{name:{width}}  {text}" for name, text in rows))
    return 0


def pause(given: argparse.Namespace, out: Output, _: Interrupts) -> int:
    """Pause a webhook."""
    with connected(given, out) as bus:
        info = bus.webhooks.pause(given.name, given.reason)
    out.tell(webhook_content(info), f"{given.name} is {info.state}")
    return 0


def resume(given: argparse.Namespace, out: Output, _: Interrupts) -> int:
    """Let a webhook go on."""
    with connected(given, out) as bus:
        info = bus.webhooks.resume(given.name)
    out.tell(webhook_content(info), f"{given.name} is {info.state}")
    return 0


def test(given: argparse.Namespace, out: Output, _: Interrupts) -> int:
    """Send a ping."""
    with connected(given, out) as bus:
        entry = bus.webhooks.test(given.name)
    answer = entry.error or f"the receiver answered {entry.status}"
    out.tell(_delivery_content(entry), f"{answer}, after {entry.duration_us / 1000:.0f} ms")
    return 1 if entry.error else 0


def deliveries(given: argparse.Namespace, out: Output, _: Interrupts) -> int:
    """Print the last requests."""
    with connected(given, out) as bus:
        entries = bus.webhooks.deliveries(given.name, limit=given.limit, failed=given.failed)
    if out.json:
        for entry in entries:
            out.tell(_delivery_content(entry))
    elif not entries:
        out.note(f"{given.name} has sent nothing since the broker was started")
    else:
        out.tell({}, *table(("time", "message", "attempt", "status", "outcome", "ms", "error"), *map(_row, entries)))
    return 0


def delete(given: argparse.Namespace, out: Output, _: Interrupts) -> int:
    """Delete a webhook."""
    with connected(given, out) as bus:
        bus.webhooks.delete(given.name)
    out.tell({"deleted": given.name}, f"deleted {given.name}")
    return 0


def _kind(info: WebhookInfo) -> str:
    """Whether an operator has set it up, or a WebSub subscriber."""
    return "webhook" if info.definition.websub is None else "websub"


def _circuit(info: WebhookInfo) -> str:
    """The circuit, and until when nothing is sent; a receiver can ask for that while the circuit is closed."""
    if not info.circuit_until_us:
        return info.circuit
    held = "held until" if info.circuit == "closed" else "until"
    return f"{info.circuit}, {held} {time_text(info.circuit_until_us)}"


def _row(entry: WebhookDelivery) -> tuple[object, ...]:
    message = "ping" if entry.offset < 0 else f"{entry.partition}:{entry.offset}"
    if entry.messages > 1:
        message += f" +{entry.messages - 1}"
    duration_ms = f"{entry.duration_us / 1000:.0f}"
    status = entry.status or "-"
    return time_text(entry.time_us), message, entry.attempt, status, entry.outcome, duration_ms, entry.error or "-"


def _delivery_content(entry: WebhookDelivery) -> dict[str, Any]:
    return {name: getattr(entry, name) for name in entry.__struct_fields__}


def webhook_content(info: WebhookInfo) -> dict[str, Any]:
    """Return a webhook for JSON output: its definition and its state, empty fields included."""
    definition = {name: getattr(info.definition, name) for name in info.definition.__struct_fields__}
    content = {name: getattr(info, name) for name in info.__struct_fields__ if name != "definition"}
    plain: dict[str, Any] = msgspec.to_builtins({"kind": _kind(info), **definition, **content})
    return plain
