"""The owner record of a partition's log: enough, in each of them, to rebuild a broker's list of topics."""

from typing import Any

import msgspec

from headrace.model.errors import LogNotFound
from headrace.storage.meta import read_meta
from headrace.storage.runtime import StorageRuntime


class PartitionOwner(msgspec.Struct, array_like=True, frozen=True):
    """The broker's part of the `meta` record of a partition's log."""

    identity: str
    """The id of the data directory."""
    topic_id: int
    topic: str
    """The full name, `tenant/topic`, or only `topic` in the default tenant."""
    partition: int
    created_us: int
    revision: int
    """How often the settings were changed."""
    settings: dict[str, Any]
    journaled: bool = False
    """Whether the journal had the partition on the disk: a journal that does not know it has lost facts."""

    def __str__(self) -> str:
        topic = f"{self.topic} (topic {self.topic_id})"
        return f"partition {self.partition} of {topic} of the data directory {self.identity}"

    @property
    def key(self) -> tuple[str, int, int]:
        """Data directory, topic and partition, which no other partition shares."""
        return self.identity, self.topic_id, self.partition

    def after(self, before: "PartitionOwner | None") -> "PartitionOwner":
        """This owner, to replace the one before; a partition that was `journaled` once stays so."""
        known = before is not None and before.journaled and before.key == self.key
        return msgspec.structs.replace(self, journaled=self.journaled or known)

    def encoded(self) -> bytes:
        """The bytes that the record stores."""
        return _encode(self)


_encode = msgspec.msgpack.Encoder().encode
_decoder = msgspec.msgpack.Decoder(PartitionOwner)


class FoundOwner(msgspec.Struct, frozen=True):
    """What was found in the owner record of a partition's directory."""

    owner: PartitionOwner | None
    """None if the record is missing, empty or damaged, or names no owner."""
    same_boot: bool
    """Whether the machine was not restarted since a writer opened the log."""


def read_owner(host: StorageRuntime, directory: str) -> FoundOwner:
    """Read the owner record of a partition."""
    try:
        meta = read_meta(host, directory)
    except LogNotFound:
        return FoundOwner(None, same_boot=False)
    return FoundOwner(decode_owner(meta.owner), same_boot=not meta.power_lost(host))


def decode_owner(content: bytes) -> PartitionOwner | None:
    """The owner that a record names; None if there is none that we can decode."""
    try:
        return _decoder.decode(content) if content else None
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None  # its checksum is right: an owner of another kind wrote it
