"""Publishing with an idempotency key: a request that is repeated has no second effect, also after a crash."""

from hashlib import sha256

from headrace.model.identity import Identity
from headrace.model.kinds import Kind
from headrace.model.request import Answer, Permission, Request, Resource, Verb, WireStruct, declare

HASH_BYTES = 16
"""Of the hashes of a key and of a request."""
OFFSET_UNKNOWN = -1
"""Instead of an offset that the broker does not find any more, because retention removed the messages."""


class PartitionBatch(WireStruct):
    """A batch in the body of a request: the bytes of all batches follow each other."""

    partition: int
    size_bytes: int


class PublishReceipt(WireStruct):
    """Where the messages of a batch are: so many offsets from this one on; dead letters leave some of them empty."""

    partition: int
    offset: int
    count: int


class PublishedOnce(Answer):
    """The answer to PublishOnce; all messages are as durable as the topic's storage allows."""

    receipts: list[PublishReceipt]
    durability: int
    repeated: bool = False
    """The request was carried out before: this is its original receipt."""


def own_key_hash(key_hash: bytes, identity: Identity) -> bytes:
    """The hash of a key that only this identity uses: nobody meets the keys of others, or learns of them."""
    if len(key_hash) != HASH_BYTES:
        return key_hash  # whoever handles the request refuses it
    whose = f"{identity.tenant}/{identity.name}".encode()
    return sha256(key_hash + whose).digest()[:HASH_BYTES]


@declare(Kind.PUBLISH_ONCE, Permission(Verb.PUBLISH, Resource.TOPIC, "topic"), while_draining=False)
class PublishOnce(Request[PublishedOnce]):
    """Append the batches in the body, all or none, unless this was done before under the same key."""

    topic: str
    key_hash: bytes
    """A hash of the key, of 16 bytes."""
    request_hash: bytes
    """A hash of what the client asked for, of 16 bytes: the same key with another one is refused."""
    batches: list[PartitionBatch]
