"""Where the reply to a request goes that nobody waits for: a function, a topic, or a URL."""

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec

from headrace.client.subjects.messages import Reply
from headrace.model.arguments import shown
from headrace.model.error_object import error_object
from headrace.model.errors import HeadraceError, InvalidArgument
from headrace.model.headers import Headers, replaced_headers
from headrace.model.subject import SUBJECT_HEADER
from headrace.model.topic import parse_topic

ERROR_HEADER = "headrace-error"
"""The header of a reply that is an error, with the error's code; the value is the error object as JSON."""

ReplyFunction = Callable[[Any], Any]
"""Is called with the Reply, or with the error in its place."""
ReplySink = Callable[[bytes, Headers], Any]
"""Delivers a reply to a URL: is called with its value and its headers; may block."""

SINKS: dict[str, Callable[[str], ReplySink]] = {}
"""Makes a sink for a URL, by the URL's scheme."""
sink_resolver: list[Callable[[str], Callable[[str], ReplySink] | None]] = []
"""Find what makes sinks for a scheme that is not in SINKS."""

_SCHEME = re.compile(r"([a-z][a-z0-9+.-]*)://", re.IGNORECASE)


class ReplyTarget(NamedTuple):
    """Where a reply goes; one of the three is set."""

    function: ReplyFunction | None = None
    topic: str = ""
    sink: ReplySink | None = None


def reply_target(callback: Any) -> ReplyTarget:
    """The target for what a caller gives as `callback`; raises InvalidArgument for anything else.

    >>> reply_target("replies").topic
    'replies'
    """
    if callable(callback):
        return ReplyTarget(function=callback)
    if not isinstance(callback, str):
        raise InvalidArgument(f"callback is a function, the name of a topic, or a URL, not {shown(callback)}")
    found = _SCHEME.match(callback)
    if found is None:
        parse_topic(callback)
        return ReplyTarget(topic=callback)
    scheme = found[1].lower()
    make = SINKS.get(scheme) or next((made for resolve in sink_resolver if (made := resolve(scheme))), None)
    if make is None:
        raise InvalidArgument(
            f"replies cannot be sent to {scheme}: URLs, as there is no sink for them; use a function, the name of a "
            "topic, or install a package with such a sink"
        )
    return ReplyTarget(sink=make(callback))


def stored_reply(subject: str, outcome: Reply | HeadraceError) -> tuple[bytes, Headers]:
    """Value and headers of the message that tells a reply, or an error."""
    named: dict[str, bytes | None] = {SUBJECT_HEADER: subject.encode()}
    if isinstance(outcome, Reply):
        return outcome.value, replaced_headers(outcome.headers, named) or {}
    told = error_object(outcome)
    return msgspec.json.encode(told), {**named, ERROR_HEADER: told.code.encode()}
