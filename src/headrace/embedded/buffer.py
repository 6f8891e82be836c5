"""The accumulator of an embedded log: collects messages in columns until a batch is full."""

import time
from collections.abc import Callable, Generator, Iterable
from typing import Any, NamedTuple

from headrace.model.arguments import shown
from headrace.model.batch import Batch, Columns, encode
from headrace.model.codec import Codec
from headrace.model.errors import InvalidArgument
from headrace.model.headers import GivenHeaders, Headers, checked_headers, header_count
from headrace.model.limits import MESSAGE_BYTES_MAX, TIMESTAMP_US_MAX, TIMESTAMP_US_MIN
from headrace.model.message import check_message_bytes, message_size

WEIGHT_MAX = 240 << 10
"""A buffer is full at this weight: some 1,000 small messages. Batches of 128 KiB and more would be encoded into fresh
memory from the kernel each time, and touching its pages costs more than all the rest."""
MESSAGE_WEIGHT = 128
"""Overhead of a message in the weight of a buffer, in bytes."""

_HEADER_WEIGHT = 10
"""Overhead of a header in the weight of a buffer, in bytes."""
_PORTION_COUNT = 1024

_ASK, _TAKE, _TAKE_AND_CLOSE = object(), object(), object()
"""Requests to the buffer's generator, other than to add messages."""


class _Begin(NamedTuple):
    """Begin a batch."""

    offset: int


class BufferedMessage(NamedTuple):
    """One validated message for the buffer."""

    value: bytes | None
    key: bytes | None
    headers: Headers | None
    timestamp: int | None
    weight: int


class BufferPortion(NamedTuple):
    """Validated values that fit into an empty buffer together, or a single large one."""

    values: list[bytes]
    weight: int


class BatchColumns:
    """The columns of a batch, and the offset of its first message."""

    __slots__ = ("base_offset", "headers", "keys", "timestamps", "values", "weight")

    def __init__(self, base_offset: int) -> None:
        self.base_offset = base_offset
        self.values: list[bytes | None] = []
        self.keys: list[bytes | None] | None = None
        self.timestamps: list[int | None] | None = None
        self.headers: list[Headers | None] | None = None
        self.weight = 0

    @property
    def plain(self) -> bool:
        """Whether the messages have only values."""
        return self.keys is None and self.timestamps is None and self.headers is None

    def add(self, message: BufferedMessage) -> None:
        """Add a message. A column begins with the first message that needs it; those before have nothing in it."""
        before = len(self.values)
        if message.key is not None and self.keys is None:
            self.keys = [None] * before
        if message.timestamp is not None and self.timestamps is None:
            self.timestamps = [None] * before
        if message.headers is not None and self.headers is None:
            self.headers = [None] * before
        if self.keys is not None:
            self.keys.append(message.key)
        if self.timestamps is not None:
            self.timestamps.append(message.timestamp)
        if self.headers is not None:
            self.headers.append(message.headers)
        self.values.append(message.value)
        self.weight += message.weight

    def extend(self, portion: BufferPortion) -> None:
        """Add messages that have only a value."""
        for column in (self.keys, self.timestamps, self.headers):
            if column is not None:
                column.extend([None] * len(portion.values))
        self.values.extend(portion.values)
        self.weight += portion.weight

    def batch(self, now_us: int, codec: Codec, data: bytearray) -> Batch:
        """Encode the messages as a batch in the given memory; messages without a timestamp get this time."""
        timestamps = self.timestamps
        filled = None if timestamps is None else [now_us if time is None else time for time in timestamps]
        return encode(Columns(self.values, self.keys, filled, self.headers), now_us, codec=codec, buffer=data)


class Buffer:
    """Accumulates messages for a batch.

    A generator holds the state. A generator admits one thread at a time, at half the cost of a lock, which is most of
    what appending a message costs. `send` raises if another thread is inside, or if an interrupt has ended the
    generator; `call` tries again.
    """

    def __init__(self, next_offset: int) -> None:
        self.taken: BatchColumns | None = None
        """Columns that were taken but not written yet; the writer sets this to None."""
        self._gathered = BatchColumns(next_offset)
        self._open = False
        self.send: Callable[[object], Any]
        self.revive()

    @property
    def next_offset(self) -> int:
        """The offset that the next message will have."""
        return int(self.call(_ASK))

    def add(self, message: BufferedMessage | BufferPortion) -> int:
        """Add a message, or values; returns the first offset, or -1 when the buffer is closed or has no room."""
        return int(self.call(message))

    def open(self, next_offset: int) -> None:
        """Begin a batch, at this offset if the buffer is empty."""
        self.call(_Begin(next_offset))

    def take(self, *, close: bool) -> None:
        """Move the accumulated columns to `taken`; the buffer is empty then, and closed if `close`."""
        assert self.taken is None
        self.call(_TAKE_AND_CLOSE if close else _TAKE)

    def call(self, item: object) -> Any:
        """Send an item, retrying while another thread is inside; a caller that may `revive` holds the log's lock."""
        while True:
            try:
                return self.send(item)
            except ValueError:
                time.sleep(0)  # another thread is inside, for an instant
            except StopIteration:
                self.revive()

    def revive(self) -> None:
        """Restart the generator, and remove a message that an interrupt left in only some of the columns."""
        gathered = self._gathered
        for column in (gathered.keys, gathered.timestamps, gathered.headers):
            if column is not None:
                del column[len(gathered.values) :]
        states = self._states()
        next(states)
        self.send = states.send

    def _states(self) -> Generator[object, object, None]:
        answer: object = None
        while True:
            gathered = self._gathered
            push = gathered.values.append
            weight, offset = gathered.weight, gathered.base_offset + len(gathered.values)
            weight_max = WEIGHT_MAX if self._open and gathered.plain else 0
            each = MESSAGE_WEIGHT
            item = yield answer
            # The fast path: all but the first message of a batch, as long as messages have only values.
            while type(item) is bytes:
                weight += len(item) + each
                if weight < weight_max:
                    push(item)
                    item = yield offset
                    offset += 1
                else:
                    weight -= len(item) + each
                    item = yield -1
            gathered.weight = weight
            answer = self._answer(item)

    def _answer(self, item: object) -> object:
        gathered = self._gathered
        offset = gathered.base_offset + len(gathered.values)
        if item is _ASK:
            return offset
        if isinstance(item, _Begin):
            if not gathered.values:
                gathered.base_offset = item.offset
            self._open = True
            return offset
        if item is _TAKE or item is _TAKE_AND_CLOSE:
            # Atomic: no interrupt can occur between assignments without calls.
            fresh = BatchColumns(offset)
            self._open = self._open and item is _TAKE
            if gathered.values:
                self.taken = gathered
                self._gathered = fresh
            return offset
        if not isinstance(item, BufferedMessage | BufferPortion) or not self._open:
            return -1  # not checked yet, or no batch begun
        if gathered.weight and gathered.weight + item.weight >= WEIGHT_MAX:
            return -1  # no room
        if isinstance(item, BufferPortion):
            gathered.extend(item)
        else:
            gathered.add(item)
        return offset


def checked_message(
    value: bytes | None, key: bytes | None, headers: GivenHeaders | None, timestamp: int | None
) -> BufferedMessage:
    """Validate the fields of a message."""
    value = _bytes(value, "a value")
    key = _bytes(key, "a key")
    stored_headers = checked_headers(headers)
    if timestamp is not None:
        _check_timestamp(timestamp)
    size = message_size(value, key, stored_headers)
    check_message_bytes(size, MESSAGE_BYTES_MAX)
    weight = size + MESSAGE_WEIGHT + _HEADER_WEIGHT * header_count(stored_headers)
    return BufferedMessage(value, key, stored_headers, timestamp, weight)


def portions(values: Iterable[bytes]) -> list[BufferPortion]:
    """Validate values, and iterate over them in portions for the buffer."""
    if isinstance(values, str | bytes | bytearray | memoryview):
        raise InvalidArgument(f"many values are a list of bytes, not {type(values).__name__}")
    if not isinstance(values, Iterable):
        raise InvalidArgument(f"many values are a list of bytes, not {shown(values)}")
    sequence = values if isinstance(values, list | tuple) else list(values)
    made: list[BufferPortion] = []
    for start in range(0, len(sequence), _PORTION_COUNT):
        part = list(sequence[start : start + _PORTION_COUNT])
        if [*map(type, part)].count(bytes) != len(part):
            part = [_value(value) for value in part]
        _divide(part, made)
    return made


def _divide(values: list[bytes], made: list[BufferPortion]) -> None:
    weight = sum(map(len, values)) + MESSAGE_WEIGHT * len(values)
    if weight < WEIGHT_MAX or len(values) == 1:
        if len(values) == 1:
            check_message_bytes(len(values[0]), MESSAGE_BYTES_MAX)
        made.append(BufferPortion(values, weight))
    else:
        _divide(values[: len(values) // 2], made)
        _divide(values[len(values) // 2 :], made)


def _value(value: bytes) -> bytes:
    checked = _bytes(value, "a value")
    if checked is None:
        raise InvalidArgument("a value is bytes, not None; append a message with a key to say that it is deleted")
    return checked


def _check_timestamp(timestamp: int) -> None:
    """Refuse a timestamp that is not a number of microseconds in range."""
    if type(timestamp) is not int or not TIMESTAMP_US_MIN <= timestamp <= TIMESTAMP_US_MAX:
        raise InvalidArgument(
            f"a timestamp is a whole number of microseconds since 1970, {TIMESTAMP_US_MIN} to {TIMESTAMP_US_MAX}, "
            f"not {shown(timestamp)}"
        )


def _bytes(content: bytes | bytearray | memoryview | None, what: str) -> bytes | None:
    if content is None or type(content) is bytes:
        return content
    if isinstance(content, bytes | bytearray | memoryview):
        return bytes(content)
    raise InvalidArgument(f"{what} is bytes, not {type(content).__name__}; encode text with .encode()")
