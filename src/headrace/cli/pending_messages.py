"""Unsettled messages of a subscription: selection options and output formats."""

import argparse
import os
from collections.abc import Iterator
from itertools import islice
from typing import TYPE_CHECKING, Any

import msgspec

from headrace.cli.arguments import completes, header, relative_moment
from headrace.cli.message_formats import as_json, header_shown, printable, time_text
from headrace.client.leasing.scheduled_times import MessageName
from headrace.model.headers import header_text
from headrace.model.subscription import DEFAULT_SUBSCRIPTION

if TYPE_CHECKING:
    from headrace.client._sync.leasing.queue import Queue
    from headrace.client.leasing.jobs import PendingMessage

STATUSES = ("waiting", "ready", "leased", "dead")
FUTURE = """\
TIME is ISO 8601 (UTC if it names no zone), microseconds since 1970, or like
'in 2h', '+2h', '5m ago' or 'tomorrow 09:00'."""

_PAGE = 1000
_REASON_CHARS = 120
_DEAD = "headrace-dead-"


def add_topic(parser: argparse.ArgumentParser) -> None:
    """Add the argument TOPIC."""
    completes(parser.add_argument("topic", metavar="TOPIC", help="the topic's name"), "topic")


def add_subscription(parser: argparse.ArgumentParser, name: str = "--subscription") -> None:
    """Add the name of a subscription of the topic, as an option if `name` is one, else as a positional argument."""
    more: dict[str, Any] = {} if name.startswith("-") else {"nargs": "?"}
    text = f"the subscription's name (default: {DEFAULT_SUBSCRIPTION})"
    added = parser.add_argument(name, metavar="SUBSCRIPTION", default=DEFAULT_SUBSCRIPTION, help=text, **more)
    completes(added, "queue")


def add_selection(parser: argparse.ArgumentParser) -> None:
    """Add the options that select messages, except by status."""
    add = parser.add_argument_group("only messages").add_argument
    add(
        "--from",
        dest="due_from",
        metavar="TIME",
        type=relative_moment,
        help="ready at this time or later",
    )
    add("--to", dest="due_to", metavar="TIME", type=relative_moment, help="ready before this time")
    add("-k", "--key", help="with this key")
    add("--owner", help="of this producer group")
    add(
        "--header",
        dest="headers",
        metavar="NAME=VALUE",
        action="append",
        type=header,
        help="with this header; may be given again",
    )


def selection(given: argparse.Namespace, **more: Any) -> dict[str, Any]:
    """Return the selection as arguments of the client."""
    chosen = {"due_from": given.due_from, "due_to": given.due_to, "key": given_key(given), "owner": given.owner}
    if given.headers:
        chosen["headers"] = given.headers
    return {name: it for name, it in {**chosen, **more}.items() if it not in (None, "")}


def given_key(given: argparse.Namespace) -> bytes | None:
    """Return the key that the user gave, byte for byte."""
    return None if given.key is None else os.fsencode(given.key)


def found(queue: "Queue", limit: int, **chosen: Any) -> Iterator["PendingMessage"]:
    """Iterate over messages of a subscription, up to a limit; requests one page at a time."""
    pages = queue.find_pages(page=max(min(limit, _PAGE), 1), **chosen)
    return islice((message for page in pages for message in page), limit)


def message_id(message: "PendingMessage") -> str:
    """Return the id by which the message can be moved and cancelled."""
    topic_id = 0 if message.status == "dead" else message.topic_id
    return str(MessageName(message.topic, message.partition, message.offset, topic_id))


def pending_json(message: "PendingMessage") -> bytes:
    """Return a JSON line: the fields that `tail` prints, and the message's state in the subscription."""
    place = {"id": message_id(message), "topic": message.topic, "partition": message.partition}
    known = {
        "status": message.status,
        "ready_us": message.ready_us,
        "deliveries": message.deliveries,
        "version": message.version,
        "holder": message.holder,
        "until_us": message.until_us,
        "reason": message.reason,
    }
    encode = msgspec.json.encode
    return encode(place)[:-1] + b"," + as_json(message)[1:-2] + b"," + encode(known)[1:] + b"\n"


def pending_text(message: "PendingMessage") -> bytes:
    """Return a line for people: position, status, time, key, value and headers, separated by tabs."""
    time_us = message.until_us if message.status == "leased" else _dead_note(message, "time") or message.ready_us
    place = f"{message.partition}:{message.offset}"
    columns = [place, status_text(message), time_text(time_us), *_content(message)]
    return "\t".join(columns).encode() + b"\n"


def timeline_text(message: "PendingMessage") -> bytes:
    """Return a line for people: time, id, key, value and headers, separated by tabs."""
    columns = [time_text(message.ready_us), message_id(message), *_content(message)]
    return "\t".join(columns).encode() + b"\n"


def status_text(message: "PendingMessage") -> str:
    """Return the status of a message, with the lease holder, deliveries and reason."""
    if message.status == "leased":
        return f"leased by {printable(message.holder.encode()) or 'somebody'}"
    tries = message.deliveries or _dead_note(message, "deliveries")
    times = "once" if tries == 1 else f"{tries} times"
    return f"{message.status}{f', delivered {times}' if tries else ''}{reason_text(message)}"


def reason_text(message: "PendingMessage") -> str:
    """Return why a message was released or is dead: the last line of the reason, where a traceback has the error."""
    lines = message.reason.strip().splitlines()
    return f": {printable(lines[-1].encode())[:_REASON_CHARS]}" if lines else ""


def _content(message: "PendingMessage") -> Iterator[str]:
    yield "-" if message.key is None else printable(message.key)
    yield "(deleted)" if message.value is None else printable(message.value)
    for pair in message.header_list:
        if message.status != "dead" or not pair[0].startswith(_DEAD):  # the status contains what matters of these
            yield header_shown(pair)


def _dead_note(message: "PendingMessage", name: str) -> int:
    """Return a number from the headers of a dead letter; 0 if the header is missing."""
    text = header_text(message.headers or {}, _DEAD + name) if message.status == "dead" else b""
    return int(text) if text.isdigit() else 0
