"""Whose a partition's log is: enough, in every one of them, to make a broker's list of topics again."""

from typing import Any

import msgspec

from headrace.model.errors import LogNotFound
from headrace.storage.meta import read_meta
from headrace.storage.runtime import StorageRuntime


class PartitionOwner(msgspec.Struct, array_like=True, frozen=True):
    """What the `meta` record of a partition says beside what every log's says."""

    identity: str
    """Of the data directory."""
    topic_id: int
    topic: str
    """The full name, `tenant/topic`, or only `topic` in the default tenant."""
    partition: int
    created_us: int
    revision: int
    """How often the settings were changed."""
    settings: dict[str, Any]
    journaled: bool = False
    """Whether the journal had the partition on the disk: one that does not know it any more has lost something."""

    def __str__(self) -> str:
        topic = f"{self.topic} (topic {self.topic_id})"
        return f"partition {self.partition} of {topic} of the data directory {self.identity}"

    @property
    def place(self) -> tuple[str, int, int]:
        """What no other partition has."""
        return self.identity, self.topic_id, self.partition

    def after(self, before: "PartitionOwner | None") -> "PartitionOwner":
        """In the place of what was there; once the journal had it, it had."""
        known = before is not None and before.journaled and before.place == self.place
        return msgspec.structs.replace(self, journaled=self.journaled or known)

    def encoded(self) -> bytes:
        """As the record keeps it."""
        return _encode(self)


_encode = msgspec.msgpack.Encoder().encode
_decoder = msgspec.msgpack.Decoder(PartitionOwner)


class FoundOwner(msgspec.Struct, frozen=True):
    """What a partition's directory tells of itself."""

    owner: PartitionOwner | None
    """None when its record is missing, empty or damaged, or names no owner."""
    same_boot: bool
    """Whether the machine was not started again since a writer opened it."""


def read_owner(host: StorageRuntime, directory: str) -> FoundOwner:
    """Look into a partition's record."""
    try:
        meta = read_meta(host, directory)
    except LogNotFound:
        return FoundOwner(None, same_boot=False)
    return FoundOwner(decode_owner(meta.owner), same_boot=not meta.power_lost(host))


def decode_owner(content: bytes) -> PartitionOwner | None:
    """The owner that a record names."""
    try:
        return _decoder.decode(content) if content else None
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None  # the record's checksum holds: another owner's, who has words of its own
