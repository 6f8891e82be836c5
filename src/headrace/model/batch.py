"""The batch: the unit of work, storage and transport. Its bytes are laid out in storage/FORMAT.md."""

import struct
from collections.abc import Callable, Iterator, Sequence
from itertools import repeat
from typing import Annotated, Any, NamedTuple

import msgspec
from crc32c import crc32c

from headrace.model.codec import Codec, compress, decompress, expands_too_far
from headrace.model.errors import BatchTooLarge, InvalidArgument, InvalidBatch, UnsupportedFormat
from headrace.model.headers import Headers, header_bytes
from headrace.model.limits import (
    BATCH_BYTES_MAX,
    BATCH_COUNT_MAX,
    MESSAGE_BYTES_MAX,
    PRIORITY_STORED_MAX,
    PRIORITY_STORED_MIN,
    TIMESTAMP_US_MAX,
    TIMESTAMP_US_MIN,
)
from headrace.model.message import Message, check_message_bytes, message_size
from headrace.model.packed_column import column_end

MAGIC = b"\xa7HRB"
VERSION = 2

# magic check | base_offset append_time synced_offset log_id epoch | crc length version codec flags count span key_id
# times producer
_HEADER = struct.Struct("<4sI QqQII IIBBHIII qq QII")
_PRODUCED = struct.Struct("<IBBHIII qq QII")
_PLACE = struct.Struct("<QqQII")
_PRODUCER = struct.Struct("<QII")
_MAGIC_AND_CRC = struct.Struct("<4sI 32x I")
_U32 = struct.Struct("<I")

HEADER_BYTES = _HEADER.size
assert HEADER_BYTES == 96
_FORMER_HEADER_BYTES = 88
"""Of version 1: an upgrade makes a batch of the largest size longer by the difference."""
_CHECK_AT = 4
_PLACE_AT = 8  # the check covers the header from here
_SMALL_BYTES = 1024
_DECODED_COUNT = 32
_DECODED_BYTES = 8 << 10
"""Received batches of so few messages are decoded at once: what is needed of them is there then."""
_CRC_AT = 40
_PRODUCED_AT = 44  # the crc covers the batch from here
_PRODUCER_AT = HEADER_BYTES - _PRODUCER.size

SPAN_MAX = (1 << 32) - 1
"""Offsets that one batch can cover."""

_STORED_BYTES_MAX = BATCH_BYTES_MAX + HEADER_BYTES - _FORMER_HEADER_BYTES

FLAG_COMPACTED = 1
"""No messages: compaction removed them all, or the log skipped their offsets when it was opened after a loss."""
FLAG_LOST = 2
"""No messages: they were damaged, and repair put this in their place."""

FLAG_GATHERED = 4
"""Made by a broker of several producers' batches: the column `origins` tells whose."""
FLAG_VERSIONED = 16
"""The broker wrote the version of each message with a key into its headers."""

Bytes = bytes | bytearray | memoryview

# What a batch may say. Whoever decodes one checks this; a broker does so before it stores a producer's batch.
Time = Annotated[int, msgspec.Meta(ge=TIMESTAMP_US_MIN, le=TIMESTAMP_US_MAX)]
Priority = Annotated[int, msgspec.Meta(ge=PRIORITY_STORED_MIN, le=PRIORITY_STORED_MAX)]
Place = Annotated[int, msgspec.Meta(ge=0, le=(1 << 32) - 1)]
Origin = tuple[Place, Annotated[int, msgspec.Meta(ge=0)], Place, Place]


class Columns(msgspec.Struct, array_like=True, gc=False):
    """A batch's messages, a list for each field; None where no message has the field."""

    values: Sequence[bytes | None]
    keys: Sequence[bytes | None] | None = None
    timestamps: Sequence[Time] | None = None
    headers: Sequence[Headers | None] | None = None
    dues: Sequence[Time | None] | None = None
    priorities: Sequence[Priority | None] | None = None
    expires: Sequence[Time | None] | None = None
    places: Sequence[Place] | None = None
    """Each message's offset less the batch's base offset, when compaction left holes."""
    origins: Sequence[Origin] | None = None
    """Of a gathered batch, for each of the batches in it: the place of its first message, and its producer."""

    def picked(self, indices: Sequence[int], base_places: Sequence[int]) -> "Columns":
        """Only the messages at these indices, with their places in the batch written down."""

        def pick(column: Sequence[Any] | None) -> list[Any] | None:
            return None if column is None else [column[index] for index in indices]

        return Columns(
            [self.values[index] for index in indices],
            pick(self.keys),
            pick(self.timestamps),
            pick(self.headers),
            pick(self.dues),
            pick(self.priorities),
            pick(self.expires),
            [base_places[index] for index in indices],
            self.origins,
        )


_NIL = msgspec.Raw(b"\xc0")


class Outline(msgspec.Struct, array_like=True, gc=False):
    """The columns beside the values, checked as those are."""

    keys: Sequence[bytes | None] | None = None
    """Only those that had to be decoded to be checked."""
    timestamps: Sequence[Time] | None = None
    headers: Sequence[Headers | None] | None = None
    dues: Sequence[Time | None] | None = None
    priorities: Sequence[Priority | None] | None = None
    expires: Sequence[Time | None] | None = None
    places: Sequence[Place] | None = None
    origins: Sequence[Origin] | None = None


class RawColumns(msgspec.Struct, array_like=True):
    """A batch's columns as they are stored."""

    values: msgspec.Raw
    keys: msgspec.Raw = _NIL
    timestamps: msgspec.Raw = _NIL
    headers: msgspec.Raw = _NIL
    dues: msgspec.Raw = _NIL
    priorities: msgspec.Raw = _NIL
    expires: msgspec.Raw = _NIL
    places: Sequence[int] | None = None


_NO_OTHERS = (None,) * 8
"""What a batch of nothing but values has in the other columns."""
_astuple = msgspec.structs.astuple
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Columns)
_outline_decoder = msgspec.msgpack.Decoder(Outline)
_raw_decoder = msgspec.msgpack.Decoder(RawColumns)


class Producer(NamedTuple):
    """Who produced a batch, for recognising a repeated one; all zero when nobody says."""

    id: int = 0
    epoch: int = 0
    sequence: int = 0


NO_PRODUCER = Producer()


class Batch(msgspec.Struct, gc=False):
    """One batch: the fields of its header, and `data`, all of its bytes."""

    magic: bytes
    check: int
    base_offset: int
    append_time: int
    synced_offset: int
    """All messages before it were on the disk when the batch was appended."""
    log_id: int
    epoch: int
    """Reserved for whoever may append to the log: 0."""
    crc: int
    length: int
    version: int
    codec: int
    flags: int
    count: int
    span: int
    """How many offsets the batch covers; more than count after compaction."""
    key_id: int
    """Reserved for the key that the body is encrypted with: 0."""
    time_min: int
    time_max: int
    producer_id: int
    producer_epoch: int
    sequence: int
    data: Bytes
    decoded: Columns | None = None
    """The messages of a small batch, decoded when it was received."""

    def __repr__(self) -> str:
        offsets = f"offsets {self.base_offset} to {self.next_offset - 1}"
        return f"<Batch {offsets}, {self.count} messages, {self.length} bytes>"

    @property
    def next_offset(self) -> int:
        """The offset after the last one that the batch covers."""
        return self.base_offset + self.span

    @property
    def producer(self) -> Producer:
        """Who produced the batch."""
        return Producer(self.producer_id, self.producer_epoch, self.sequence)

    def copied(self) -> "Batch":
        """The same batch with bytes of its own, which may be given another place."""
        return msgspec.structs.replace(self, data=bytearray(self.data))

    def verify(self) -> None:
        """Check everything the producer wrote, header fields and body, against the crc."""
        if crc32c(memoryview(self.data)[_PRODUCED_AT:]) != self.crc:
            raise InvalidBatch("the checksum does not match")

    def place(self, base_offset: int, append_time: int, log_id: int, synced_offset: int = 0) -> None:
        """Give the batch its place in a log, and seal it with the check."""
        self.base_offset = base_offset
        self.append_time = append_time
        self.synced_offset = synced_offset
        self.log_id = log_id
        data = self.data
        _PLACE.pack_into(data, _PLACE_AT, base_offset, append_time, synced_offset, log_id, 0)
        self.check = crc32c(memoryview(data)[_PLACE_AT:HEADER_BYTES])
        _U32.pack_into(data, _CHECK_AT, self.check)

    def stamp(self, producer: Producer) -> None:
        """Make it another producer's batch, which its bytes, writable ones, then say."""
        self.producer_id, self.producer_epoch, self.sequence = producer
        data = self.data
        _PRODUCER.pack_into(data, _PRODUCER_AT, *producer)
        self.crc = crc32c(memoryview(data)[_PRODUCED_AT:])
        _U32.pack_into(data, _CRC_AT, self.crc)

    def columns(self) -> Columns:
        """Decode the messages as columns: one list per field.

        Returns:
            The columns; `values`, and None for a field that no message has.

        Raises:
            InvalidBatch: if the batch cannot be decoded.

        Example:
            >>> with Log(directory) as log:
            ...     offsets = log.append_many([b"a", b"b"])
            ...     [batch.columns().values for batch in log.batches()]
            [[b'a', b'b']]
        """
        if self.decoded is not None:
            return self.decoded
        return self._decoded_columns(self.body()) if self.count else Columns([])

    def outline(self) -> Outline | Columns:
        """The columns beside the values; all are checked, the values too, and as few as possible decoded."""
        return self._outline(self.body()) if self.count else Outline()

    def _outline(self, body: Bytes) -> Outline | Columns:
        columns = body[0] - 0x90 if body and 0x90 < body[0] < 0xA0 else 0
        values_end = column_end(body, 1, self.count) if columns else 0
        if not values_end:
            return self._decoded_columns(body)
        has_keys = body[values_end : values_end + 1] not in (b"", b"\xc0")
        keys_end = column_end(body, values_end, self.count) if has_keys else 0
        rest = b"%c" % (0x90 + columns - 1) + (b"\xc0" + body[keys_end:] if keys_end else body[values_end:])
        outline: Outline = _decoded(_outline_decoder, rest)
        _check_lengths(outline, self.count, self.span)
        return outline

    def _decoded_columns(self, body: Bytes) -> Columns:
        columns: Columns = _decoded(_decoder, body)
        if len(columns.values) != self.count:
            raise InvalidBatch(f"there are {len(columns.values)} values for {self.count} messages")
        _check_lengths(columns, self.count, self.span)
        return columns

    def raw_columns(self) -> RawColumns:
        """The columns as they are stored, or would be without compression."""
        columns: RawColumns = _decoded(_raw_decoder, self.body())
        return columns

    def body(self) -> Bytes:
        """The body, decompressed."""
        body = memoryview(self.data)[HEADER_BYTES:]
        return decompress(self.codec, body) if self.codec else body

    def messages(self) -> Iterator[Message]:
        """Decode the messages one by one.

        Returns:
            An iterator over the messages.

        Raises:
            InvalidBatch: if the batch cannot be decoded.

        Example:
            >>> with Log(directory) as log:
            ...     offsets = log.append_many([b"a", b"b"])
            ...     [message.value for batch in log.batches() for message in batch.messages()]
            [b'a', b'b']
        """
        columns = self.columns()
        base = self.base_offset
        return map(
            Message,
            range(base, base + self.count) if columns.places is None else [base + at for at in columns.places],
            columns.values,
            columns.timestamps or repeat(self.time_max),
            columns.keys or repeat(None),
            columns.headers or repeat(None),
            columns.dues or repeat(None),
            columns.priorities or repeat(None),
            columns.expires or repeat(None),
        )

    @property
    def raw_bytes(self) -> int:
        """The size of the body before compression, as far as the batch can be believed; no message is larger."""
        if not self.codec or self.length < HEADER_BYTES + _U32.size:
            return self.length - HEADER_BYTES
        return int(_U32.unpack_from(self.data, HEADER_BYTES)[0])

    def places(self, columns: Columns) -> Sequence[int]:
        """Each message's offset less the base offset."""
        return range(self.count) if columns.places is None else columns.places


_batch: Callable[..., Batch] = Batch
_CODECS = frozenset(map(int, Codec))


def encode(
    columns: Columns,
    time_us: int,
    *,
    codec: Codec = Codec.NONE,
    producer: Producer = NO_PRODUCER,
    span: int = 0,
    flags: int = 0,
    buffer: bytearray | None = None,
    message_bytes_max: int = MESSAGE_BYTES_MAX,
) -> Batch:
    """Make a batch; `time_us` is the timestamp of messages that have none of their own.

    The span is the count unless it is given. A buffer given is written over, and belongs to the batch until the
    caller is done with it. Brokers, which add headers to messages of any size, allow more bytes of a message.
    """
    count = len(columns.values)
    if not 0 < count <= BATCH_COUNT_MAX:
        raise BatchTooLarge(f"a batch holds 1 to {BATCH_COUNT_MAX} messages, not {count}")
    data = bytearray(HEADER_BYTES) if buffer is None else buffer
    try:
        _encoder.encode_into(columns, data, HEADER_BYTES)
    except (TypeError, OverflowError, UnicodeEncodeError) as error:
        raise InvalidArgument(f"a message cannot be encoded: {error}") from error
    if len(data) > MESSAGE_BYTES_MAX:
        _check_sizes(columns, len(data), message_bytes_max)
    if codec is not Codec.NONE:
        codec = _compressed(data, codec)
    time_min = time_max = time_us
    if columns.timestamps:
        time_min, time_max = min(columns.timestamps), max(columns.timestamps)
    if not TIMESTAMP_US_MIN <= time_min <= time_max <= TIMESTAMP_US_MAX:
        raise InvalidArgument(f"a timestamp is {TIMESTAMP_US_MIN} to {TIMESTAMP_US_MAX}, not {time_min} or {time_max}")
    return _finish(data, codec, flags, count, span or count, time_min, time_max, producer)


def encode_raw(columns: RawColumns, count: int, times_us: tuple[int, int], *, codec: Codec = Codec.NONE) -> Batch:
    """Make a batch of columns that are packed already, of checked messages whose first and last time are given."""
    if not 0 < count <= BATCH_COUNT_MAX:
        raise BatchTooLarge(f"a batch holds 1 to {BATCH_COUNT_MAX} messages, not {count}")
    data = bytearray(HEADER_BYTES)
    _encoder.encode_into(columns, data, HEADER_BYTES)
    if len(data) > BATCH_BYTES_MAX:
        raise BatchTooLarge(f"a batch has at most {BATCH_BYTES_MAX} bytes, not {len(data)}")
    if codec is not Codec.NONE:
        codec = _compressed(data, codec)
    return _finish(data, codec, 0, count, count, *times_us, NO_PRODUCER)


def _compressed(data: bytearray, codec: Codec) -> Codec:
    """Compress the body, if it gets smaller; returns the codec that it has."""
    raw = memoryview(data)[HEADER_BYTES:]
    packed = compress(codec, raw)
    if expands_too_far(len(raw), len(packed)):
        codec = Codec.LZ4  # which never does
        packed = compress(codec, raw)
    if len(packed) >= len(raw):
        return Codec.NONE
    raw.release()
    data[HEADER_BYTES:] = packed
    return codec


def gap(span: int, flag: int, time_us: int, body: Bytes = b"") -> Batch:
    """A batch that covers offsets whose messages are no more; a body only fills the bytes it stands for."""
    data = bytearray(HEADER_BYTES)
    data += body
    return _finish(data, Codec.NONE, flag, 0, span, time_us, time_us, NO_PRODUCER)


def _finish(
    data: bytearray, codec: Codec, flags: int, count: int, span: int, time_min: int, time_max: int, producer: Producer
) -> Batch:
    length = len(data)
    by, epoch, nr = producer
    # Plain arguments, and a copy of a few bytes rather than a view of them: this is half of a small batch's cost.
    _PRODUCED.pack_into(
        data, _PRODUCED_AT, length, VERSION, codec, flags, count, span, 0, time_min, time_max, by, epoch, nr
    )
    crc = crc32c(data[_PRODUCED_AT:] if length < _SMALL_BYTES else memoryview(data)[_PRODUCED_AT:])
    _MAGIC_AND_CRC.pack_into(data, 0, MAGIC, 0, crc)
    return Batch(
        MAGIC,
        0,
        0,
        0,
        0,
        0,
        0,
        crc,
        length,
        VERSION,
        codec,
        flags,
        count,
        span,
        0,
        time_min,
        time_max,
        by,
        epoch,
        nr,
        data,
    )


def parse(view: memoryview, position: int = 0, *, whole: bool = True) -> Batch:
    """The batch at this position of stored bytes, its header checked; `verify` checks the rest.

    Raises InvalidBatch when there is none, or, unless only the header is wanted, when its end is missing.
    """
    if position + HEADER_BYTES > len(view):
        raise InvalidBatch("the bytes end inside a header")
    fields = _HEADER.unpack_from(view, position)
    if fields[0] != MAGIC:
        raise InvalidBatch("no batch begins here")
    if crc32c(view[position + _PLACE_AT : position + HEADER_BYTES]) != fields[1]:
        raise InvalidBatch("the header's checksum does not match")
    end = position + fields[8]
    if whole and end > len(view):
        raise InvalidBatch("the bytes end inside the batch")
    batch = _batch(*fields, view[position:end])
    _check_header(batch)
    return batch


def received(data: bytearray | memoryview) -> Batch:
    """A batch as a producer sent it, without a place yet, checked whole; the bytes must be writable."""
    if len(data) < HEADER_BYTES:
        raise InvalidBatch("the bytes end inside a header")
    batch = _batch(*_HEADER.unpack_from(data), data)
    if batch.magic != MAGIC or batch.length != len(data):
        raise InvalidBatch("the bytes are not one batch")
    _check_header(batch)
    if not 0 < batch.count == batch.span or batch.flags:
        raise InvalidBatch("a producer's batch holds messages without gaps")
    if batch.codec not in _CODECS:
        raise InvalidBatch(f"codec {batch.codec} is unknown")
    batch.verify()
    _check_produced(batch)
    return batch


def count_messages(data: memoryview) -> int:
    """How many messages the batches in these bytes say that they have; nothing of it is checked."""
    count = position = 0
    while position + HEADER_BYTES <= len(data):
        fields = _HEADER.unpack_from(data, position)
        count += fields[12]
        position += max(fields[8], HEADER_BYTES)
    return count


def leading_batches(data: memoryview, messages_max: int) -> tuple[int, int, int]:
    """The batches at the front of stored bytes with so many messages at most, but one in any case.

    Returns their bytes, their messages, and the offset after the last one.
    """
    count = position = next_offset = 0
    while position + HEADER_BYTES <= len(data):
        fields = _HEADER.unpack_from(data, position)
        if position and count + fields[12] > messages_max:
            break
        count += fields[12]
        position += max(fields[8], HEADER_BYTES)
        next_offset = fields[2] + fields[13]
    return position, count, next_offset


def _check_produced(batch: Batch) -> None:
    """Refuse a body with anything that a producer may not say, or that the header tells otherwise."""
    body = batch.body()
    if not body or not 0x91 <= body[0] <= 0x99:
        raise InvalidBatch("a body is an array of 1 to 9 columns")
    if batch.count <= _DECODED_COUNT and len(body) <= _DECODED_BYTES:
        batch.decoded = batch._decoded_columns(body)
        outline: Outline | Columns = batch.decoded
    else:
        outline = batch._outline(body)
    if outline.places is not None or outline.origins is not None:
        raise InvalidBatch("a producer's batch has neither places nor origins")
    times = outline.timestamps
    time_min, time_max = batch.time_min, batch.time_max
    if times is None:
        agree = TIMESTAMP_US_MIN <= time_min == time_max <= TIMESTAMP_US_MAX
    else:
        agree = min(times) == time_min and max(times) == time_max
    if not agree:
        raise InvalidBatch(f"the header's times, {time_min} to {time_max}, are not those of the messages")


def _check_header(batch: Batch) -> None:
    if batch.version != VERSION:
        raise UnsupportedFormat(f"batch version {batch.version} is unknown; this Headrace knows version {VERSION}")
    if batch.key_id or batch.epoch:
        raise UnsupportedFormat(
            f"a batch has key_id {batch.key_id} and epoch {batch.epoch}: this Headrace supports neither encrypted "
            "batches nor epochs; use the Headrace that wrote it, or a newer one"
        )
    if batch.length < HEADER_BYTES or (batch.length > _STORED_BYTES_MAX and batch.count):
        raise InvalidBatch(f"a length of {batch.length} bytes is impossible")
    if batch.count > min(BATCH_COUNT_MAX, batch.span) or not batch.span:
        raise InvalidBatch(f"{batch.count} messages in {batch.span} offsets are impossible")


def _decoded(decoder: Any, body: Bytes) -> Any:
    try:
        return decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidBatch(f"the body is not columns of messages: {error}") from error


def decode_origins(body: Bytes) -> Sequence[Origin]:
    """The origins in the body of a batch without messages, which only says whose they were."""
    columns: Columns = _decoded(_decoder, body)
    return columns.origins or ()


def _check_lengths(columns: Columns | Outline, count: int, span: int) -> None:
    """Every column has an entry for each message, and the places are offsets of the batch."""
    others = _astuple(columns)[-len(_NO_OTHERS) :]
    if others == _NO_OTHERS and count == span:
        return
    for column in others[:-1]:  # there are origins for batches, not for messages
        if column is not None and len(column) != count:
            raise InvalidBatch(f"a column has {len(column)} entries for {count} messages")
    places = columns.places
    if places is not None:
        if not all(map(int.__lt__, places, places[1:])) or places[-1] >= span:
            raise InvalidBatch("the places of the messages are not in order")
    elif count != span:
        raise InvalidBatch("a batch with holes does not say where its messages are")


def _check_sizes(columns: Columns, batch_bytes: int, message_bytes_max: int) -> None:
    """Refuse a batch that is too large, or has a message that is."""
    if batch_bytes > BATCH_BYTES_MAX:
        raise BatchTooLarge(f"a batch has at most {BATCH_BYTES_MAX} bytes, not {batch_bytes}")
    check_messages(columns, message_bytes_max)


def check_messages(columns: Columns, bytes_max: int, topic: str = "") -> None:
    """Refuse messages that are larger than this limit, which is the topic's if one is named."""
    check_message_bytes(max(message_sizes(columns), default=0), bytes_max, topic)


def message_sizes(columns: Columns) -> list[int]:
    """Return the size of each message, as `message_size` counts it for one."""
    values = columns.values
    sizes = [len(value or b"") for value in values] if None in values else [*map(len, values)]  # type: ignore[arg-type]
    if columns.keys is not None:
        sizes = [size + len(key or b"") for size, key in zip(sizes, columns.keys, strict=True)]
    if columns.headers is not None:
        sizes = [size + header_bytes(headers) for size, headers in zip(sizes, columns.headers, strict=True)]
    return sizes


def message_bytes(columns: Columns, index: int) -> int:
    """Return the size of one message."""
    key = None if columns.keys is None else columns.keys[index]
    headers = None if columns.headers is None else columns.headers[index]
    return message_size(columns.values[index], key, headers)
