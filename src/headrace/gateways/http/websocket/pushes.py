"""What the broker tells a client of a WebSocket unasked, as fields and messages."""

from typing import Any

import msgspec

from headrace.gateways.http.reading import batches_in
from headrace.gateways.http.subscription_resources import leased_contents
from headrace.gateways.http.websocket.frames import Codec, Item
from headrace.model.batch import Bytes
from headrace.model.envelope import ValueContent, describe_message
from headrace.model.headers import Headers
from headrace.model.request import Answer
from headrace.model.standing_lease import LeaseDelivery
from headrace.model.subject_requests import RequestDelivery


def push_items(codec: Codec, pushed: Answer, body: Bytes | None) -> tuple[Any, list[Item] | None]:
    """The fields and the messages of a push."""
    if isinstance(pushed, LeaseDelivery):
        fields = {"standing": pushed.standing, "size_bytes": pushed.size_bytes}
        return fields, [codec.item(content) for content in leased_contents(pushed.portions, body or b"")]
    if isinstance(pushed, RequestDelivery):
        fields = {name: getattr(pushed, name) for name in ("responder", "request", "subject", "timeout_ms")}
        return fields, [value_item(codec, bytes(body or b""), pushed.headers)]
    return msgspec.structs.asdict(pushed), None if body is None else value_items(codec, body)


def value_item(codec: Codec, value: bytes, headers: Headers) -> Item:
    """A request or a reply as a message."""
    return codec.item(describe_message(ValueContent(), value, None, headers))


def value_items(codec: Codec, body: Bytes) -> list[Item]:
    """The messages of batches that are in no log; where they come from is told beside them, in the same order."""
    found = []
    for batch in batches_in(body):
        for message in batch.messages():
            content = ValueContent(timestamp=message.timestamp)
            found.append(codec.item(describe_message(content, message.value, message.key, message.headers)))
    return found
