"""Reads the messages of one key in the order of their versions, a page at a time."""

from collections.abc import AsyncIterator

import msgspec

from headrace.client._async.connection.reconnecting import AsyncReconnectingConnection
from headrace.client.producer.pending_batch import checked_key
from headrace.client.results import Received
from headrace.model.arguments import shown
from headrace.model.batch import parse
from headrace.model.errors import InvalidArgument
from headrace.model.key_versions import History, HistoryPage, with_version
from headrace.model.message import Message


async def read_history(
    broker: AsyncReconnectingConnection, topic: str, key: bytes | str, start_version: int
) -> AsyncIterator[tuple[Message, HistoryPage, int]]:
    """Yield the messages of a key from a version on, each with its page and its place in it."""
    name = checked_key(key)
    if name is None:
        raise InvalidArgument("a history is that of a key: give one")
    if type(start_version) is not int:
        raise InvalidArgument(f"start_version is a version, not {shown(start_version)}")
    following: int | None = start_version
    while following is not None:
        page, body = await broker.request_with_body(History(topic, name, following))
        following = page.following
        if page.offsets:
            batch = parse(memoryview(body))
            batch.verify()
            for at, message in enumerate(batch.messages()):
                yield message, page, at


def versioned_message(topic: str, message: Message, page: HistoryPage, at: int) -> Received:
    """Make a message of a history one that was received, which tells its version."""
    fields = msgspec.structs.asdict(message)
    if message.version != page.versions[at]:  # it was published before the topic counted
        fields["headers"] = with_version(message.headers, page.versions[at])
    fields["offset"] = page.offsets[at]
    return Received(**fields, topic=topic, partition=page.partition)
