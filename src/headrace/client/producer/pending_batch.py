"""Messages before the broker has them: one by one as hooks see them, and collected in a batch."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import msgspec

from headrace.client.connection import fork_guard
from headrace.client.producer.topic_metadata import ExpectedPlace
from headrace.client.results import Receipt
from headrace.client.times import Moment, microseconds
from headrace.model.arguments import shown
from headrace.model.batch import Batch, Columns, Producer, encode
from headrace.model.codec import Codec
from headrace.model.errors import HeadraceError, InvalidArgument
from headrace.model.headers import GivenHeaders, Headers, checked_headers
from headrace.model.limits import PRIORITY_STORED_MAX, PRIORITY_STORED_MIN
from headrace.model.message import check_message_bytes, message_size
from headrace.model.representation import described_fields


class OutgoingMessage(msgspec.Struct):
    """A message that is about to be published; hooks may change it."""

    topic: str
    value: Any
    key: bytes | None = None
    headers: GivenHeaders | None = None
    timestamp: Moment | None = None
    due: Moment | None = None
    priority: int | None = None
    expires: Moment | None = None
    partition: int | None = None

    def __repr__(self) -> str:
        return described_fields(self)


BeforePublish = Callable[[OutgoingMessage], OutgoingMessage | None]
"""Sees every message before it is serialized, and returns it, another, or None to drop it."""

AfterAck = Callable[[Receipt], None]
"""Sees the receipt of every batch that was acknowledged."""

WhenSent = Callable[[Receipt | None, HeadraceError | None], None]
"""Is told what became of one message: its receipt, or the error."""


class ResultSink(Protocol):
    """Where the outcome of something is put, for whoever waits for it."""

    done: bool
    error: HeadraceError | None

    def wait(self, timeout: float | None = None) -> Any: ...

    def resolve(self, value: Any) -> None: ...

    def fail(self, error: HeadraceError) -> None: ...


_ENCODED = Columns(())
"""The columns of a batch whose messages are encoded."""


class PendingBatch:
    """The messages of one batch: collected, then encoded, then in flight until they are acknowledged or given up."""

    __slots__ = (
        "_columns",
        "abandoned",
        "batch",
        "bytes",
        "callbacks",
        "count",
        "deadline",
        "durability",
        "expected",
        "forks",
        "last_error",
        "observed",
        "outcome",
        "plain",
        "previous_error",
        "sealed",
        "uncertain",
        "values",
    )

    def __init__(self, outcome: ResultSink, deadline: float, durability: int = 0) -> None:
        self.outcome = outcome
        self.deadline = deadline
        """When the outcome becomes Timeout."""
        self.durability = durability
        self.expected: ExpectedPlace | None = None
        self.values: list[bytes | None] = []
        self.plain = True
        """All messages have only a value so far."""
        self.bytes = 0
        self.count = 0
        """How many messages there are, once it is sealed."""
        self.sealed = False
        self.batch: Batch | None = None
        self.callbacks: list[tuple[int, WhenSent]] | None = None
        self.abandoned = False
        """Nobody waits any more, but the broker may have stored it: it is sent again until that is known."""
        self.observed = 0
        """For how many of its messages somebody waits, has a callback, or has asked."""
        self.uncertain = False
        """It was sent, and the broker may or may not have stored it."""
        self.last_error: HeadraceError | None = None
        self.previous_error: HeadraceError | None = None
        """Why it was sent again."""
        self.forks = fork_guard.count
        self._columns = Columns(self.values)

    @property
    def unobserved(self) -> int:
        """For how many messages nobody asks."""
        return max(self.count - self.observed, 0)

    def check_process(self) -> None:
        """Raise Forked where its outcome will never be known: in a child that was forked off since."""
        if not self.outcome.done:
            fork_guard.check(self.forks, "a message that was sent")

    def add(self, message: OutgoingMessage, value: bytes | None, bytes_max: int) -> int:
        """Add a message whose value is serialized, unless it is too large; returns its place in the batch."""
        place = len(self.values)
        key, headers = message.key, checked_headers(message.headers) if message.headers else None
        if key is not None and type(key) is not bytes:
            key = checked_key(key)
        size = message_size(value, key, headers)
        check_message_bytes(size, bytes_max, message.topic)
        if not self.plain or headers is not None or not _bare(message):
            self._add_fields(message, key, headers)
        self.values.append(value)
        self.bytes += size
        return place

    def _add_fields(self, message: OutgoingMessage, key: bytes | None, headers: Headers | None) -> None:
        timestamp, due, expires = message.timestamp, message.due, message.expires
        fields = (
            ("keys", key),
            ("headers", headers),
            ("timestamps", None if timestamp is None else microseconds(timestamp)),
            ("dues", None if due is None else microseconds(due)),
            ("priorities", checked_priority(message.priority)),
            ("expires", None if expires is None else microseconds(expires)),
        )
        for name, field in fields:
            column = getattr(self._columns, name)
            if column is None and field is not None:
                column = [None] * len(self.values)
                setattr(self._columns, name, column)
                self.plain = False
            if column is not None:
                column.append(field)

    def fill(self, columns: Columns, size: int) -> None:
        """Hold just these messages, which have been checked."""
        self._columns = columns
        self.values = columns.values  # type: ignore[assignment]  # it is a list when a producer fills it
        self.bytes = size
        self.plain = False

    def encode(self, now_us: int, codec: Codec, producer: Producer, buffer: bytearray | None) -> None:
        """Make the batch. Messages without a time get this one."""
        columns = self._columns
        if columns.timestamps is not None:
            given: Sequence[int | None] = columns.timestamps
            columns.timestamps = [now_us if time is None else time for time in given]
        self.sealed = True
        self.count = len(columns.values)
        self.batch = encode(columns, now_us, codec=codec, producer=producer, buffer=buffer)
        # What was gathered is in the batch now, and is not needed twice.
        self.values = []
        self._columns = _ENCODED

    def stamp(self, producer_id: int, epoch: int, sequence: int) -> None:
        """Give the batch this producer, epoch and sequence, if it has others."""
        batch = self.batch
        assert batch is not None
        if batch.sequence != sequence or batch.producer_epoch != epoch or batch.producer_id != producer_id:
            producer = Producer(producer_id, epoch, sequence)
            self.batch = encode(batch.columns(), batch.time_max, codec=Codec(batch.codec), producer=producer)


def _bare(message: OutgoingMessage) -> bool:
    """Whether it has nothing but a value."""
    return (
        message.key is None
        and message.timestamp is None
        and message.due is None
        and message.priority is None
        and message.expires is None
    )


def checked_key(key: Any) -> bytes | None:
    """A key as it is sent; text becomes UTF-8."""
    if key is None or type(key) is bytes:
        return key
    if isinstance(key, str):
        return encoded_key(key)
    if isinstance(key, bytes | bytearray | memoryview):
        return bytes(key)
    raise InvalidArgument(f"a key is bytes or text, not {type(key).__name__}")


def encoded_key(key: str) -> bytes:
    """A key that is text, as UTF-8."""
    try:
        return key.encode()
    except UnicodeEncodeError as error:
        raise InvalidArgument(f"key {shown(key)} is no text that UTF-8 can hold: {error}") from error


def checked_keys(keys: Sequence[Any]) -> list[bytes | None]:
    """Keys as they are sent."""
    if [*map(type, keys)].count(bytes) == len(keys):
        return list(keys)
    return [checked_key(key) for key in keys]


def checked_priority(priority: int | None) -> int | None:
    """A priority as it is sent."""
    if priority is None or (type(priority) is int and PRIORITY_STORED_MIN <= priority <= PRIORITY_STORED_MAX):
        return priority
    raise InvalidArgument(f"a priority is a whole number of 32 bits, not {shown(priority)}")
