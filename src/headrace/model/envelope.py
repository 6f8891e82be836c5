"""The JSON envelope of a message, the same through every gateway that speaks JSON.

`{"key", "value" | "value_base64", "headers": [[name, value]], "timestamp", "due", "priority", "expires"}`. A value is
embedded as JSON if the message's header `content-type` says that it is JSON, and is else a text, or base64 where it is
no UTF-8. Times are microseconds since 1970; a publisher may also write them as RFC 3339.
"""

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta
from typing import Annotated, TypeVar

import msgspec
from msgspec import UNSET, UnsetType

from headrace.model.arguments import shown
from headrace.model.batch import Batch, Columns, Priority, Time
from headrace.model.errors import InvalidArgument
from headrace.model.headers import HeaderPair, Headers, header_pairs, headers_from_pairs
from headrace.model.limits import PARTITIONS_MAX, TIMESTAMP_US_MAX, TIMESTAMP_US_MIN
from headrace.model.message import Message

CONTENT_TYPE_HEADER = "content-type"
"""The header that tells what a message's value is."""
JSON_CONTENT_TYPE = b"application/json"
_JSON_HEADERS: Headers = {CONTENT_TYPE_HEADER: JSON_CONTENT_TYPE}
"""Of all messages that are published as JSON without headers: never changed."""
_NULL = msgspec.Raw(b"null")
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)
_LINE_ENDS = (b"\n", b"\r")

T = TypeVar("T")
PartitionNumber = Annotated[int, msgspec.Meta(ge=0, lt=PARTITIONS_MAX)]
TimeOrText = Time | Annotated[datetime, msgspec.Meta(tz=True)]
"""A time that a publisher gives: microseconds since 1970, or RFC 3339 with a time zone."""

TimeText = Annotated[str, msgspec.Meta(pattern=r"^(-?[0-9]{1,18}|[0-9]{4}-[0-9]{2}-[0-9]{2}[Tt].+)$")]
"""The same as text, such as in a query."""


class HeaderBytes(msgspec.Struct, forbid_unknown_fields=True):
    """The value of a header that is no text."""

    base64: bytes


EnvelopeHeader = tuple[str, str | HeaderBytes | None]


class MessageEnvelope(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True, gc=False):
    """A message to be published."""

    value: msgspec.Raw | UnsetType = UNSET
    """Any JSON; null deletes the key. Stored as it is, with `content-type: application/json` if no header says else."""
    value_base64: bytes | None = None
    """Instead of `value`: any bytes."""
    key: str | None = None
    key_base64: bytes | None = None
    """Instead of `key`: any bytes."""
    headers: list[EnvelopeHeader] = []
    """Pairs of a name and a text, null, or `{"base64": …}`; names may repeat."""
    timestamp: TimeOrText | None = None
    due: TimeOrText | None = None
    """Not to be delivered before."""
    priority: Priority | None = None
    expires: TimeOrText | None = None
    """Not to be delivered after."""
    partition: PartitionNumber | None = None
    """By default by key, or any."""


class EnvelopeContent(msgspec.Struct, omit_defaults=True, gc=False):
    """A message that is read."""

    partition: int
    offset: int
    timestamp: int
    key: str | None = None
    key_base64: bytes | None = None
    """Instead of `key` where that is no text."""
    value: msgspec.Raw | UnsetType = UNSET
    """JSON if the header `content-type` says so, else a text; null marks the key as deleted."""
    value_base64: bytes | None = None
    """Instead of `value` where that is neither."""
    headers: list[EnvelopeHeader] = []
    due: int | None = None
    priority: int | None = None
    expires: int | None = None


class ValueContent(msgspec.Struct, omit_defaults=True, gc=False):
    """A message that is in no log: one of a live subject, a request or a reply."""

    key: str | None = None
    key_base64: bytes | None = None
    value: msgspec.Raw | UnsetType = UNSET
    value_base64: bytes | None = None
    headers: list[EnvelopeHeader] = []
    timestamp: int | None = None


Content = TypeVar("Content", "EnvelopeContent", ValueContent)

_encode = msgspec.json.Encoder().encode
_check_json = msgspec.json.Decoder(msgspec.Raw).decode
_decode_text = msgspec.json.Decoder(str).decode


def is_json_type(content_type: bytes) -> bool:
    """Whether a content type says JSON.

    >>> is_json_type(b"application/cloudevents+json; charset=utf-8"), is_json_type(b"text/plain")
    (True, False)
    """
    name = content_type.partition(b";")[0].strip().lower()
    return name == JSON_CONTENT_TYPE or name.endswith(b"+json")


def time_us(given: TimeOrText) -> int:
    """Microseconds since 1970."""
    return given if isinstance(given, int) else (given - _EPOCH) // _MICROSECOND


def _field_us(name: str, given: TimeOrText) -> int:
    """A time of a message that is published, if it can be stored; a number has been checked before."""
    found = time_us(given)
    if not TIMESTAMP_US_MIN <= found <= TIMESTAMP_US_MAX:
        raise InvalidArgument(f'"{name}" is {given}, which is too early or too late to be stored')
    return found


def parse_time_text(text: str) -> int:
    """Microseconds since 1970, given as a number or as RFC 3339.

    >>> parse_time_text("1700000000000000"), parse_time_text("2023-11-14T22:13:20Z")
    (1700000000000000, 1700000000000000)
    """
    try:
        return msgspec.convert(int(text), Time) if text.lstrip("-").isdigit() else time_us(_decode_moment(text))
    except msgspec.ValidationError as error:
        raise InvalidArgument(f"{shown(text)} is no time: {error}") from error


def _decode_moment(text: str) -> datetime:
    moment: datetime = msgspec.convert(text, Annotated[datetime, msgspec.Meta(tz=True)])
    return moment


class StoredFields:
    """The columns of a batch, gathered from envelopes."""

    __slots__ = ("_dues", "_expires", "_headers", "_keys", "_priorities", "_timestamps", "bytes", "values")

    def __init__(self) -> None:
        self.values: list[bytes | None] = []
        self.bytes = 0
        """About how many bytes the values have."""
        self._keys: dict[int, bytes] = {}
        self._headers: dict[int, Headers] = {}
        self._timestamps: dict[int, int] = {}
        self._dues: dict[int, int] = {}
        self._priorities: dict[int, int] = {}
        self._expires: dict[int, int] = {}

    def add(self, envelope: MessageEnvelope, key: bytes | None) -> None:
        """Add a message; its key is what `envelope_key` found."""
        values = self.values
        at = len(values)
        raw = envelope.value
        if raw is not UNSET and not envelope.headers and envelope.value_base64 is None:
            value: bytes | None = bytes(raw)
            headers: Headers | None = _JSON_HEADERS
            if value == b"null":
                value = headers = None
        else:
            value, headers = stored_value(envelope)
        values.append(value)
        self.bytes += 64 if value is None else len(value) + 64
        if key is not None:
            self._keys[at] = key
        if headers:
            self._headers[at] = headers
        if envelope.timestamp is not None:
            self._timestamps[at] = _field_us("timestamp", envelope.timestamp)
        if envelope.due is not None:
            self._dues[at] = _field_us("due", envelope.due)
        if envelope.priority is not None:
            self._priorities[at] = envelope.priority
        if envelope.expires is not None:
            self._expires[at] = _field_us("expires", envelope.expires)

    def columns(self, now_us: int) -> Columns:
        """The columns; a message without a timestamp gets this one."""
        count = len(self.values)
        columns = Columns(self.values)
        if self._keys:
            columns.keys = _column(self._keys, count)
        if self._headers:
            columns.headers = _column(self._headers, count)
        if self._timestamps:
            columns.timestamps = [self._timestamps.get(at, now_us) for at in range(count)]
        if self._dues:
            columns.dues = _column(self._dues, count)
        if self._priorities:
            columns.priorities = _column(self._priorities, count)
        if self._expires:
            columns.expires = _column(self._expires, count)
        return columns


def _column(given: dict[int, T], count: int) -> Sequence[T | None]:
    """The entries of all messages, None for those that have none."""
    return list(given.values()) if len(given) == count else [given.get(at) for at in range(count)]


def envelope_key(envelope: MessageEnvelope) -> bytes | None:
    """The key of a message to be published."""
    if envelope.key_base64 is None:
        return None if envelope.key is None else envelope.key.encode()
    if envelope.key is not None:
        raise InvalidArgument('a message has "key" or "key_base64", not both')
    return envelope.key_base64


def envelope_headers(given: Sequence[EnvelopeHeader]) -> list[HeaderPair]:
    """Headers as they are stored, in order."""
    return [
        (name, content.encode() if isinstance(content, str) else None if content is None else content.base64)
        for name, content in given
    ]


def stored_value(envelope: MessageEnvelope) -> tuple[bytes | None, Headers | None]:
    """The value and the headers of a message as they are stored."""
    raw, headers = envelope.value, envelope.headers
    pairs = envelope_headers(headers) if headers else []
    if envelope.value_base64 is not None:
        if raw is not UNSET:
            raise InvalidArgument('a message has "value" or "value_base64", not both')
        return envelope.value_base64, headers_from_pairs(pairs)
    if raw is UNSET:
        raise InvalidArgument('a message has a "value" (null deletes its key) or a "value_base64"')
    text = bytes(raw)
    if text == b"null":
        return None, headers_from_pairs(pairs)
    content_type = next((content for name, content in pairs if name.lower() == CONTENT_TYPE_HEADER), None)
    if content_type is None:
        return text, headers_from_pairs([*pairs, (CONTENT_TYPE_HEADER, JSON_CONTENT_TYPE)])
    if is_json_type(content_type):
        return text, headers_from_pairs(pairs)
    try:
        return _decode_text(text).encode(), headers_from_pairs(pairs)
    except msgspec.DecodeError as error:
        raise InvalidArgument(
            'a "value" whose header content-type is not JSON must be a text; give "value_base64" instead'
        ) from error


def batch_contents(batch: Batch, partition: int, from_offset: int = 0) -> Iterator[EnvelopeContent]:
    """The messages of a batch from an offset on."""
    for message in batch.messages():
        if message.offset >= from_offset:
            yield message_content(message, partition)


def message_content(message: Message, partition: int) -> EnvelopeContent:
    """A message of a partition."""
    content = EnvelopeContent(partition, message.offset, message.timestamp)
    describe_message(content, message.value, message.key, message.headers)
    content.due, content.priority, content.expires = message.due, message.priority, message.expires
    return content


def describe_message(content: Content, value: bytes | None, key: bytes | None, headers: Headers | None) -> Content:
    """Fill in what a message says; returns the same envelope."""
    if key is not None:
        try:
            content.key = key.decode()
        except UnicodeDecodeError:
            content.key_base64 = key
    content_type = None
    if headers:
        content.headers = [(name, readable_header(text)) for name, text in header_pairs(headers)]
        content_type = next((text for name, text in header_pairs(headers) if name.lower() == CONTENT_TYPE_HEADER), None)
    if value is None:
        content.value = _NULL
        return content
    embedded = _embedded(value, content_type)
    if embedded is None:
        content.value_base64 = value
    else:
        content.value = embedded
    return content


def _embedded(value: bytes, content_type: bytes | None) -> msgspec.Raw | None:
    """The value as JSON: itself if the content type says so, or a text; None if it is neither."""
    try:
        text = value.decode()
    except UnicodeDecodeError:
        return None
    if content_type is not None and is_json_type(content_type):
        try:
            _check_json(value)
            if any(end in value for end in _LINE_ENDS):  # each message is one line
                value = msgspec.json.format(value, indent=-1)
            return msgspec.Raw(value)
        except (msgspec.DecodeError, RecursionError):
            pass  # it is no JSON, whatever its header says: it is shown as the text that it is
    return msgspec.Raw(_encode(text))


def readable_header(content: bytes | None) -> str | HeaderBytes | None:
    """The value of a header as JSON has it: a text, or base64 where it is none."""
    if content is None:
        return None
    try:
        return content.decode()
    except UnicodeDecodeError:
        return HeaderBytes(content)
