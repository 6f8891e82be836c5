"""The messages of one key, in the order of their versions."""

from typing import Annotated

import msgspec

from headrace.gateways.http.call import Call, Reply, json_reply
from headrace.gateways.http.publishing import MESSAGES
from headrace.gateways.http.reading import batches_in
from headrace.gateways.http.route import Route
from headrace.model.envelope import EnvelopeContent, describe_message
from headrace.model.key_versions import VERSION_MAX, History
from headrace.model.limits import HISTORY_BYTES_MAX, HISTORY_MESSAGES_MAX


class HistoryQuery(msgspec.Struct, forbid_unknown_fields=True):
    """Which versions."""

    start_version: Annotated[int, msgspec.Meta(ge=0, le=VERSION_MAX)] = 0
    """From this version on; `following` of the page before."""
    limit: Annotated[int, msgspec.Meta(ge=1, le=HISTORY_MESSAGES_MAX)] = 100
    """How many messages at most."""
    bytes_max: Annotated[int, msgspec.Meta(ge=1, le=HISTORY_BYTES_MAX)] = 1 << 20
    """About how many bytes at most."""


class VersionedContent(EnvelopeContent, omit_defaults=True):
    """A message of a key."""

    version: int | None = None
    """Its number among the messages of the key."""


class KeyHistoryPage(msgspec.Struct):
    """Messages of one key; what compaction removed is missing."""

    messages: list[VersionedContent]
    next_version: int
    """How many messages of the key were published: the version of the next one."""
    following: int | None = None
    """Where the next page begins; null at the end."""


async def read_history(call: Call) -> Reply:
    """Answer a page of the messages of a key."""
    topic, key = call.parameters
    query = call.query(HistoryQuery)
    request = History(topic, key.encode(), query.start_version, query.limit, query.bytes_max)
    found, body = await call.ask_with_body(request)
    stored = (message for batch in batches_in(body) for message in batch.messages())
    messages = []
    for message, offset, version in zip(stored, found.offsets, found.versions, strict=True):
        content = VersionedContent(found.partition, offset, message.timestamp, version=version)
        describe_message(content, message.value, message.key, message.headers)
        content.due, content.priority, content.expires = message.due, message.priority, message.expires
        messages.append(content)
    return json_reply(KeyHistoryPage(messages, found.next_version, found.following))


KEY_ROUTES = [
    Route(
        "GET", "/v1/topics/{topic}/keys/{key}/history", read_history,
        "Read the messages of one key in the order of their versions, of a topic with key_versions", MESSAGES,
        query=HistoryQuery, answer=KeyHistoryPage, errors=("topic_not_found", "events_missing"),
    ),
]  # fmt: skip
"""The route of a key's history."""
