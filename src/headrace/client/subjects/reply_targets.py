"""Where the reply to a request goes that nobody waits for: a function, a topic, or a URL."""

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec

from headrace.client.subjects.messages import Reply
from headrace.model.arguments import shown
from headrace.model.error_object import error_object
from headrace.model.errors import HeadraceError, InvalidArgument
from headrace.model.headers import Headers, replaced_headers
from headrace.model.message import Message
from headrace.model.subject import SUBJECT_HEADER
from headrace.model.topic import parse_topic

ERROR_HEADER = "headrace-error"
"""The header of a reply that is an error, with the error's code; the value is the error object as JSON."""

ReplyFunction = Callable[[Any], Any]
"""Is called with the Reply, or with the error in its place."""
_URL_MARK = "://"
"""What no name of a topic has."""


class ReplyTarget(NamedTuple):
    """Where a reply goes; one of the three is set."""

    function: ReplyFunction | None = None
    topic: str = ""
    url: str = ""


def reply_target(callback: Any) -> ReplyTarget:
    """The target for what a caller gives as `callback`; raises InvalidArgument for anything else.

    >>> reply_target("replies").topic
    'replies'
    """
    if callable(callback):
        return ReplyTarget(function=callback)
    if not isinstance(callback, str):
        raise InvalidArgument(f"callback is a function, the name of a topic, or a URL, not {shown(callback)}")
    if _URL_MARK not in callback:
        parse_topic(callback)
        return ReplyTarget(topic=callback)
    from headrace.sinks.sink import open_sink  # imported here: most programs never need it

    open_sink(callback).close()
    return ReplyTarget(url=callback)


def deliver_reply(url: str, value: bytes, headers: Headers) -> None:
    """Take a reply to the sink that a URL names, and wait until it is there."""
    from headrace.sinks.sink import open_sink

    sink = open_sink(url)
    try:
        sink.deliver([Message(0, value, time.time_ns() // 1000, headers=headers)])
    finally:
        sink.close()


def stored_reply(subject: str, outcome: Reply | HeadraceError) -> tuple[bytes, Headers]:
    """Value and headers of the message that tells a reply, or an error."""
    named: dict[str, bytes | None] = {SUBJECT_HEADER: subject.encode()}
    if isinstance(outcome, Reply):
        return outcome.value, replaced_headers(outcome.headers, named) or {}
    told = error_object(outcome)
    return msgspec.json.encode(told), {**named, ERROR_HEADER: told.code.encode()}
