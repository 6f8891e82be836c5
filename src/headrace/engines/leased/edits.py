"""What has been changed about messages since they were published."""

from array import array
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import msgspec

from headrace.model.headers import Headers


class Content(NamedTuple):
    """What an edit has put in the place of a message's value and headers."""

    value: bytes | None
    headers: Headers | None


class EditRecord(NamedTuple):
    """All edits of a message together."""

    version: int
    due: int | None = None
    """None: as it was published."""
    priority: int | None = None
    content: Content | None = None
    deleted: bool = False


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(list[EditRecord])


class PackedEdits(msgspec.Struct, array_like=True):
    """Edits of some messages in few bytes: 8 for the offset of each, and the encoded records.

    >>> packed = pack_edits({7: EditRecord(2, deleted=True), 3: EditRecord(4)})
    >>> packed.get(7), packed.get(5)
    (EditRecord(version=2, due=None, priority=None, content=None, deleted=True), None)
    """

    offsets: bytes
    records: bytes

    @property
    def last(self) -> int:
        """The last offset."""
        return self.edited()[-1]

    def get(self, offset: int) -> EditRecord | None:
        """The edits of a message, if they are among these."""
        offsets = self.edited()
        at = bisect_left(offsets, offset)
        if at == len(offsets) or offsets[at] != offset:
            return None
        return whole(_decoder.decode(self.records)[at])

    def items(self) -> Iterator[tuple[int, EditRecord]]:
        """Offsets and edits."""
        return zip(self.edited(), map(whole, _decoder.decode(self.records)), strict=True)

    def edited(self) -> Sequence[int]:
        """The offsets, in order."""
        return memoryview(self.offsets).cast("q")


def pack_edits(edits: Mapping[int, EditRecord]) -> PackedEdits:
    """Edits in few bytes."""
    offsets = sorted(edits)
    return PackedEdits(array("q", offsets).tobytes(), _encoder.encode([edits[offset] for offset in offsets]))


def whole(record: EditRecord) -> EditRecord:
    """A decoded record: the content inside it comes as a plain list."""
    return record if record.content is None else record._replace(content=Content(*record.content))
