"""The frames of a WebSocket: decoded and encoded as JSON or MessagePack. docs/how-to/websocket.md has their shape."""

import re
from collections.abc import Sequence
from math import isfinite
from typing import Annotated, Any, Protocol

import msgspec
from msgspec import UNSET, UnsetType

from headrace.gateways.http.call import json_error
from headrace.gateways.http.event_stream import EncodedBatches
from headrace.gateways.http.problems import HttpError
from headrace.model.arguments import shortened
from headrace.model.batch import Batch, Priority
from headrace.model.envelope import (
    EnvelopeContent,
    EnvelopeHeader,
    MessageEnvelope,
    PartitionNumber,
    TimeOrText,
    ValueContent,
    batch_contents,
)

FrameId = Annotated[int, msgspec.Meta(ge=-(1 << 53), le=1 << 53)] | Annotated[str, msgspec.Meta(max_length=64)]
"""The number or text by which a client knows the answer."""
Item = bytes
"""A message that is encoded."""
_GIVEN_ID_CHARS_MAX, _GIVEN_ID_END = 256, 1 << 64
_SUSPECT = re.compile(rb"[\xc4-\xc6]|\xca[\x7f\xff][\x80-\xff]|\xcb[\x7f\xff][\xf0-\xff]")
"""In MessagePack: the first bytes of what JSON has not, binary and numbers that are not finite, or others like them."""
_FEW_FIELDS = 0x80
"""In MessagePack: the first byte of a map, to which the number of fields is added if there are less than 16."""


class RequestFrame(msgspec.Struct, forbid_unknown_fields=True):
    """A frame of a client: a request, its fields, and the messages that belong to it."""

    id: FrameId
    request: str
    fields: msgspec.Raw | UnsetType = UNSET
    messages: msgspec.Raw | UnsetType = UNSET


class GivenId(msgspec.Struct):
    """The id of a frame that is wrong otherwise."""

    id: Any = None

    def shown(self) -> Any:
        """The id, if it is one that a problem can have."""
        given = self.id
        if isinstance(given, str):
            return given if len(given) <= _GIVEN_ID_CHARS_MAX else None
        is_number = isinstance(given, int | float) and not isinstance(given, bool)
        return given if is_number and abs(given) < _GIVEN_ID_END else None


class PackedEnvelope(msgspec.Struct, forbid_unknown_fields=True):
    """A message to be published, as MessagePack: the same fields as in JSON, of which binary ones are binary."""

    value: Any = UNSET
    value_base64: bytes | None = None
    key: str | None = None
    key_base64: bytes | None = None
    headers: list[EnvelopeHeader] = []
    timestamp: TimeOrText | None = None
    due: TimeOrText | None = None
    priority: Priority | None = None
    expires: TimeOrText | None = None
    partition: PartitionNumber | None = None


class Codec(Protocol):
    """Decodes and encodes the frames of a subprotocol."""

    subprotocol: str
    is_text: bool

    def decode_frame(self, data: bytes) -> RequestFrame:
        """Decode a frame; its parts are not decoded yet. Raises msgspec.DecodeError."""

    def given_id(self, data: bytes) -> Any:
        """The id of a frame that is wrong; None if it cannot be read."""

    def decode_fields(self, data: msgspec.Raw | UnsetType, kind: type[msgspec.Struct]) -> Any:
        """Decode the fields of a request."""

    def decode_messages(self, data: msgspec.Raw | UnsetType) -> list[MessageEnvelope]:
        """Decode the messages of a request."""

    def item(self, content: EnvelopeContent | ValueContent) -> Item:
        """Encode a message for a frame."""

    def items(self, batch: Batch, topic_id: int, partition: int, known: EncodedBatches) -> list[tuple[int, Item]]:
        """Encode the messages of a batch; returns them with their offsets."""

    def with_id(self, item: Item, position: str) -> Item:
        """Give a message of a stream its id, the position behind it."""

    def encode(self, head: dict[str, Any], items: Sequence[Item] | None) -> bytes:
        """Encode a frame with these messages."""


class JsonCodec:
    """Text frames of JSON. Messages are encoded once for all streams that send them."""

    subprotocol = "headrace.json"
    is_text = True

    def __init__(self) -> None:
        self._frames = msgspec.json.Decoder(RequestFrame)
        self._ids = msgspec.json.Decoder(GivenId)
        self._messages = msgspec.json.Decoder(list[MessageEnvelope])
        self._decoders: dict[type[msgspec.Struct], msgspec.json.Decoder[Any]] = {}
        self._encode = msgspec.json.Encoder(enc_hook=str).encode

    def decode_frame(self, data: bytes) -> RequestFrame:
        """Decode a frame; its parts are not decoded yet."""
        return self._frames.decode(data)

    def given_id(self, data: bytes) -> Any:
        """The id of a frame that is wrong; None if it cannot be read."""
        return _given_id(self._ids.decode, data)

    def decode_fields(self, data: msgspec.Raw | UnsetType, kind: type[msgspec.Struct]) -> Any:
        """Decode the fields of a request."""
        decoder = self._decoders.get(kind)
        if decoder is None:
            decoder = self._decoders[kind] = msgspec.json.Decoder(kind)
        return _decoded(decoder.decode, b"{}" if data is UNSET else bytes(data), "fields")

    def decode_messages(self, data: msgspec.Raw | UnsetType) -> list[MessageEnvelope]:
        """Decode the messages of a request."""
        found: list[MessageEnvelope] = [] if data is UNSET else _decoded(self._messages.decode, bytes(data), "messages")
        return found

    def item(self, content: EnvelopeContent | ValueContent) -> Item:
        """Encode a message."""
        return self._encode(content)

    def items(self, batch: Batch, topic_id: int, partition: int, known: EncodedBatches) -> list[tuple[int, Item]]:
        """Encode the messages of a batch, unless another stream has done it."""
        return list(known.get(batch, topic_id, partition))

    def with_id(self, item: Item, position: str) -> Item:
        """Give a message of a stream its id."""
        return b'{"id":"%s",%s' % (position.encode(), item[1:])

    def encode(self, head: dict[str, Any], items: Sequence[Item] | None) -> bytes:
        """Encode a frame with these messages."""
        text = self._encode(head)
        return text if items is None else b'%s,"messages":[%s]}' % (text[:-1], b",".join(items))


class MessagePackCodec:
    """Binary frames of MessagePack."""

    subprotocol = "headrace.msgpack"
    is_text = False

    def __init__(self) -> None:
        self._frames = msgspec.msgpack.Decoder(RequestFrame)
        self._ids = msgspec.msgpack.Decoder(GivenId)
        self._messages = msgspec.msgpack.Decoder(list[PackedEnvelope])
        self._decoders: dict[type[msgspec.Struct], msgspec.msgpack.Decoder[Any]] = {}
        self._encode = msgspec.msgpack.Encoder(enc_hook=str).encode

    def decode_frame(self, data: bytes) -> RequestFrame:
        """Decode a frame; its parts are not decoded yet."""
        return self._frames.decode(data)

    def given_id(self, data: bytes) -> Any:
        """The id of a frame that is wrong; None if it cannot be read."""
        return _given_id(self._ids.decode, data)

    def decode_fields(self, data: msgspec.Raw | UnsetType, kind: type[msgspec.Struct]) -> Any:
        """Decode the fields of a request."""
        decoder = self._decoders.get(kind)
        if decoder is None:
            decoder = self._decoders[kind] = msgspec.msgpack.Decoder(kind)
        return _decoded(decoder.decode, b"\x80" if data is UNSET else bytes(data), "fields")

    def decode_messages(self, data: msgspec.Raw | UnsetType) -> list[MessageEnvelope]:
        """Decode the messages of a request; values are stored as JSON."""
        if data is UNSET:
            return []
        packed: list[PackedEnvelope] = _decoded(self._messages.decode, bytes(data), "messages")
        if _SUSPECT.search(bytes(data)):
            for one in packed:
                _check_json(one.value)
        return _decoded(lambda found: [_unpacked(one) for one in found], packed, "messages")  # type: ignore[no-any-return]

    def item(self, content: EnvelopeContent | ValueContent) -> Item:
        """Encode a message: its value as MessagePack, binary fields as they are."""
        fields = msgspec.structs.asdict(content)
        found = {name: one for name, one in fields.items() if one is not None and one is not UNSET and one != []}
        if "value" in found:
            found["value"] = msgspec.json.decode(bytes(found["value"]))
        return self._encode(found)

    def items(self, batch: Batch, topic_id: int, partition: int, known: EncodedBatches) -> list[tuple[int, Item]]:  # noqa: ARG002
        """Encode the messages of a batch."""
        return [(content.offset, self.item(content)) for content in batch_contents(batch, partition)]

    def with_id(self, item: Item, position: str) -> Item:
        """Give a message of a stream its id."""
        assert _FEW_FIELDS <= item[0] < _FEW_FIELDS + 15
        return b"%c%b%b%b" % (item[0] + 1, b"\xa2id", self._encode(position), item[1:])

    def encode(self, head: dict[str, Any], items: Sequence[Item] | None) -> bytes:
        """Encode a frame with these messages."""
        return self._encode(head if items is None else {**head, "messages": [msgspec.Raw(item) for item in items]})


CODECS: dict[str, Codec] = {codec.subprotocol: codec for codec in (JsonCodec(), MessagePackCodec())}
"""By the names of the subprotocols."""


def undecodable(codec: Codec, data: bytes, error: Exception) -> HttpError | None:
    """What to answer to a frame that cannot be decoded; None if the client speaks no such protocol at all."""
    if isinstance(error, msgspec.ValidationError):
        return HttpError("invalid_field", f"the frame is wrong: {shortened(error)}")
    if isinstance(error, RecursionError):
        return HttpError("invalid_json", "the frame is nested too deeply")
    if isinstance(error, UnicodeDecodeError) or not codec.is_text:
        return None
    return HttpError("invalid_json", f"the frame is no JSON: {json_error(data, error)}")


def _given_id(decode: Any, data: bytes) -> Any:
    try:
        found: GivenId = decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    return found.shown()


def _check_json(value: Any) -> None:
    """Refuse what JSON cannot say: binary, NaN and infinity, however deep in a value."""
    unchecked = [value]
    while unchecked:
        one = unchecked.pop()
        if isinstance(one, dict):
            unchecked += one
            unchecked += one.values()
        elif isinstance(one, list):
            unchecked += one
        elif isinstance(one, float) and not isfinite(one):
            raise HttpError("invalid_field", f"a value is stored as JSON, which has no {one}; send a number or null")
        elif isinstance(one, bytes):
            raise HttpError(
                "invalid_field", "a value is stored as JSON, which has no binary; send a whole value as value_base64"
            )


def _decoded(decode: Any, data: Any, part: str) -> Any:
    """Decode a part of a frame; an error says where it is wrong."""
    try:
        return decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, ValueError, TypeError, OverflowError) as error:
        raise HttpError("invalid_field", f"the {part} of the frame are wrong: {shortened(error)}") from error
    except RecursionError as error:
        raise HttpError("invalid_field", f"the {part} of the frame are nested too deeply") from error


def _unpacked(packed: PackedEnvelope) -> MessageEnvelope:
    """The envelope with its value as JSON."""
    value = UNSET if packed.value is UNSET else msgspec.Raw(msgspec.json.encode(packed.value))
    rest = [getattr(packed, name) for name in packed.__struct_fields__[1:]]
    return MessageEnvelope(value, *rest)
