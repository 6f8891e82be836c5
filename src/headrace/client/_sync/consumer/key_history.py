"""Reads the messages of one key in the order of their versions, a page at a time."""

from collections.abc import Iterator

import msgspec

from headrace.client._sync.connection.reconnecting import ReconnectingConnection
from headrace.client.producer.pending_batch import checked_key
from headrace.client.results import Received
from headrace.model.arguments import shown
from headrace.model.batch import parse
from headrace.model.errors import InvalidArgument
from headrace.model.key_versions import History, with_version


def read_history(
    broker: ReconnectingConnection, topic: str, key: bytes | str, start_version: int
) -> Iterator[Received]:
    """Yield the messages of a key from a version on; each tells its version."""
    name = checked_key(key)
    if name is None:
        raise InvalidArgument("a history is that of a key: give one")
    if type(start_version) is not int:
        raise InvalidArgument(f"start_version is a version, not {shown(start_version)}")
    following: int | None = start_version
    while following is not None:
        page, body = broker.request_with_body(History(topic, name, following))
        following = page.following
        if not page.offsets:
            continue
        batch = parse(memoryview(body))
        batch.verify()
        for message, offset, version in zip(batch.messages(), page.offsets, page.versions, strict=True):
            fields = msgspec.structs.asdict(message)
            fields["headers"] = (
                message.headers if message.version == version else with_version(message.headers, version)
            )
            fields["offset"] = offset
            yield Received(**fields, topic=topic, partition=page.partition)
