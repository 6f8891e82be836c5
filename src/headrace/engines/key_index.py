"""The index of a partition's keys: the offsets of each key's messages by version, without a look at the log."""

from array import array
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from headrace.model.batch import FLAG_VERSIONED, Batch, Columns, encode
from headrace.model.codec import Codec
from headrace.model.errors import InvalidBatch, LimitExceeded
from headrace.model.headers import Headers, without_headers
from headrace.model.key_versions import VERSION_HEADER, VERSION_MAX, version_in, with_version
from headrace.model.limits import BATCH_BYTES_MAX

_SHARDS = 1 << 8
_MASK = _SHARDS - 1
"""Many small dictionaries instead of a large one, which would copy all its entries whenever it grows."""
_NO_SLOT = (1 << 32) - 1
_STRIDE = 256
"""Every so many versions a key has a link that skips as many, so that old versions of a long history are found soon."""
NOTED_TOGETHER = 1000
"""Messages of a batch that are recorded per slice."""
_COMPRESSED_BYTES_MAX = 1 << 20
"""Larger bodies are stored without compression: it would hold the event loop too long."""


KeyCounts = dict[bytes, int]
"""How many messages each key has."""


class KeyEntry(NamedTuple):
    """One message of a key."""

    version: int
    offset: int


class KeyEntries(NamedTuple):
    """Messages of a key in the order of their versions, and the version of the next one that there is."""

    entries: list[KeyEntry]
    following: int | None


class KeyIndex:
    """Every message of a partition that has a key, in slots linked by key: 16 bytes a message, about 130 a key.

    >>> index = KeyIndex()
    >>> index.note([b"ann", b"bob", b"ann"], [0, 1, 2], [0, 0, 1])
    >>> index.next_version(b"ann"), index.next_version(b"eve")
    (2, 0)
    >>> index.find(b"ann", 0, 10, 3).entries
    [KeyEntry(version=0, offset=0), KeyEntry(version=1, offset=2)]
    """

    def __init__(self) -> None:
        self._last: list[dict[bytes, int]] = [{} for _ in range(_SHARDS)]
        """The slot of each key's last message."""
        self._offsets = array("q")
        self._versions = array("I")
        self._previous = array("I")
        """The slot of the message of the same key before."""
        self._skips: dict[int, int] = {}
        """From the slot of each version that the stride divides to the slot of about a stride before."""

    def __len__(self) -> int:
        return len(self._offsets)

    @property
    def keys(self) -> int:
        """How many keys there are."""
        return sum(map(len, self._last))

    def next_version(self, key: bytes) -> int:
        """The version of the key's next message: how many it had so far."""
        slot = self._last[hash(key) & _MASK].get(key)
        return 0 if slot is None else self._versions[slot] + 1

    def last_offset(self, key: bytes) -> int | None:
        """The offset of the key's last message."""
        slot = self._last[hash(key) & _MASK].get(key)
        return None if slot is None else self._offsets[slot]

    def note(self, keys: Sequence[bytes | None], offsets: Sequence[int], versions: Sequence[int | None]) -> None:
        """Record messages that follow all that were recorded before; those without a key are left out.

        A version of None, or one that the key has had, becomes the next.
        """
        for key, offset, version in zip(keys, offsets, versions, strict=True):
            if key is not None:
                self._add(key, offset, version)

    def _add(self, key: bytes, offset: int, version: int | None) -> None:
        shard, slot = self._last[hash(key) & _MASK], len(self._offsets)
        previous = shard.get(key, _NO_SLOT)
        following = 0 if previous == _NO_SLOT else self._versions[previous] + 1
        if version is None or version < following:
            version = following
        self._offsets.append(offset)
        self._versions.append(version)
        self._previous.append(previous)
        shard[key] = slot
        if version and not version % _STRIDE:
            self._link(slot, version - _STRIDE)

    def _link(self, slot: int, version: int) -> None:
        """Let a slot skip to the oldest one that is not before a version."""
        at = slot
        while (before := self._previous[at]) != _NO_SLOT and self._versions[before] >= version:
            at = before
        if at != slot:
            self._skips[slot] = at

    def note_batch(self, batch: Batch) -> Iterator[None]:
        """Record the messages of a batch that is read from the log, some at a time; yields in between."""
        columns = batch.columns()
        if columns.keys is None:
            return
        versions: Sequence[int | None] = [None] * batch.count
        if batch.flags & FLAG_VERSIONED and columns.headers is not None:
            versions = [version_in(headers) for headers in columns.headers]
        keys, base, places = columns.keys, batch.base_offset, batch.places(columns)
        for first in range(0, batch.count, NOTED_TOGETHER):
            if first:
                yield
            part = slice(first, first + NOTED_TOGETHER)
            self.note(keys[part], [base + place for place in places[part]], versions[part])

    def find(self, key: bytes, start: int, count: int, end_offset: int) -> KeyEntries:
        """The messages with versions from `start` on, `count` of them at most, before an offset."""
        offsets, versions, previous = self._offsets, self._versions, self._previous
        slot = self._last[hash(key) & _MASK].get(key, _NO_SLOT)
        stop, following, found = start + count, None, []
        while slot != _NO_SLOT and versions[slot] >= start:
            version, offset = versions[slot], offsets[slot]
            if offset < end_offset:
                if version < stop:
                    found.append(KeyEntry(version, offset))
                else:
                    following = version
            skipped = self._skips.get(slot, _NO_SLOT) if version >= stop + _STRIDE else _NO_SLOT
            slot = skipped if skipped != _NO_SLOT and versions[skipped] >= stop else previous[slot]
        found.reverse()
        return KeyEntries(found, following)

    def visible_version(self, key: bytes, end_offset: int) -> int:
        """The version after that of the last message before an offset."""
        slot = self._last[hash(key) & _MASK].get(key, _NO_SLOT)
        while slot != _NO_SLOT and self._offsets[slot] >= end_offset:
            slot = self._previous[slot]
        return 0 if slot == _NO_SLOT else self._versions[slot] + 1

    def versions_for(self, keys: Sequence[bytes | None]) -> list[int | None]:
        """The versions that messages with these keys get if they are appended next."""
        counted: dict[bytes, int] = {}
        versions: list[int | None] = []
        for key in keys:
            if key is None:
                versions.append(None)
                continue
            version = counted.get(key)
            if version is None:
                version = self.next_version(key)
            if version > VERSION_MAX:
                raise LimitExceeded(f"a key has at most {VERSION_MAX + 1} messages in a topic with key_versions")
            counted[key] = version + 1
            versions.append(version)
        return versions


def stamped(batch: Batch, columns: Columns, versions: Sequence[int | None]) -> Batch:
    """The batch with the version of each message that has a key in its headers."""
    given: Sequence[Headers | None] = columns.headers or [None] * batch.count
    headers = [
        _without_version(each) if version is None else with_version(each, version)
        for each, version in zip(given, versions, strict=True)
    ]
    written = Columns(
        columns.values,
        columns.keys,
        columns.timestamps,
        headers,
        columns.dues,
        columns.priorities,
        columns.expires,
        None,
        columns.origins,
    )
    codec = Codec(batch.codec) if batch.raw_bytes <= _COMPRESSED_BYTES_MAX else Codec.NONE
    return encode(
        written,
        batch.time_max,
        codec=codec,
        producer=batch.producer,
        flags=batch.flags | FLAG_VERSIONED,
        message_bytes_max=BATCH_BYTES_MAX,
    )


def key_counts(batch: Batch) -> KeyCounts:
    """Count the messages of each key in a batch."""
    counts: KeyCounts = {}
    for key in batch.columns().keys or ():
        if key is not None:
            counts[key] = counts.get(key, 0) + 1
    return counts


def has_versions(batch: Batch) -> bool:
    """Whether the messages of a stored batch tell their own versions, so that those before them may go."""
    if not batch.flags & FLAG_VERSIONED:
        return False
    columns = batch.columns()
    if columns.headers is None or columns.keys is None:
        raise InvalidBatch("a batch with versions has neither headers nor keys")
    return all(
        key is None or version_in(headers) is not None
        for key, headers in zip(columns.keys, columns.headers, strict=True)
    )


def _without_version(headers: Headers | None) -> Headers | None:
    if headers is None or VERSION_HEADER not in headers:
        return headers
    return without_headers(headers, lambda name: name == VERSION_HEADER) or None
