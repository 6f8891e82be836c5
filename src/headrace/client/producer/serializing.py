"""From a program's values to a message's bytes, and back."""

from collections.abc import Callable
from functools import cache
from typing import Any, Protocol

import msgspec

from headrace.model.arguments import shown
from headrace.model.errors import HeadraceError, InvalidArgument
from headrace.plugins import SERIALIZERS, find_plugin, make_plugin, plugin_names

Serializer = Callable[[Any], bytes | None]
Deserializer = Callable[[bytes], Any]


class CannotSerialize(InvalidArgument):
    """The value cannot be made into bytes."""

    code = "cannot_serialize"


class CannotDeserialize(HeadraceError):
    """A message's bytes cannot be made into a value; the error has the message as it came."""

    code = "cannot_deserialize"

    def __init__(
        self, topic: str, partition: int, offset: int, reason: Exception, message: Any, version: int | None = None
    ) -> None:
        """An error about a message; with its version if it is read as an event of its key."""
        which, then = f"message {offset} of {topic}[{partition}]", ", and iterating again goes on behind it"
        if version is not None:
            which, then = f"version {version} of the key {shown(message.key)} in {topic}", ""
        super().__init__(
            f"{which} cannot be deserialized: {shown(reason)}; its value is in the error's .message.value{then}",
            topic=topic,
            partition=partition,
            offset=offset,
        )
        self.topic = topic
        self.partition = partition
        self.offset = offset
        self.version = version
        self.message = message


def to_bytes(value: Any) -> bytes | None:
    """Bytes as they are; the serializer that is used when none is named."""
    if value is None or type(value) is bytes:
        return value
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value)
    raise InvalidArgument(
        f"a value is bytes, not {type(value).__name__}; encode it, or give the producer a serializer such as 'json'"
    )


def _text_to_bytes(value: Any) -> bytes | None:
    if value is None:
        return None
    if not isinstance(value, str):
        raise InvalidArgument(f"a value for the serializer 'str' is text, not {type(value).__name__}")
    return value.encode()


class NamedSerializer(Protocol):
    """A serializer with a name: built in, or a plug-in of the group `headrace.serializers`."""

    content_type: str
    """What the bytes are, such as `application/json`."""

    def encode(self, value: Any) -> bytes | None:
        """Make a value into bytes; None stays None, which marks a key as deleted."""

    def decode(self, data: bytes) -> Any:
        """Make bytes into a value."""


class JsonSerializer:
    """JSON, by msgspec."""

    api = 1
    content_type = "application/json"
    encode = staticmethod(msgspec.json.encode)
    decode = staticmethod(msgspec.json.decode)


class MessagePackSerializer:
    """MessagePack, by msgspec."""

    api = 1
    content_type = "application/vnd.msgpack"
    encode = staticmethod(msgspec.msgpack.encode)
    decode = staticmethod(msgspec.msgpack.decode)


class TextSerializer:
    """Text in UTF-8."""

    api = 1
    content_type = "text/plain; charset=utf-8"
    encode = staticmethod(_text_to_bytes)
    decode = staticmethod(bytes.decode)


class BytesSerializer:
    """Bytes as they are."""

    api = 1
    content_type = "application/octet-stream"
    encode = staticmethod(to_bytes)
    decode = staticmethod(bytes)


def serializer_of(given: str | Serializer | None) -> Serializer:
    """The serializer of that name, or the callable that was given.

    >>> serializer_of("json")({"id": 1})
    b'{"id":1}'
    """
    if given is None:
        return to_bytes
    if callable(given):
        return given
    named = _named(given, "serializer")
    return to_bytes if isinstance(named, BytesSerializer) else named.encode  # which producers know


def deserializer_of(given: str | Deserializer | None) -> Deserializer | None:
    """The deserializer of that name, or the callable that was given; None leaves the bytes as they are.

    >>> deserializer_of("json")(b'{"id":1}')
    {'id': 1}
    """
    if given is None or callable(given):
        return given
    named = _named(given, "deserializer")
    return None if isinstance(named, BytesSerializer) else named.decode


def _named(name: object, what: str) -> NamedSerializer:
    if not isinstance(name, str) or find_plugin(SERIALIZERS, name) is None:
        known = ", ".join(map(repr, plugin_names(SERIALIZERS)))
        raise InvalidArgument(f"there is no {what} {shown(name)}; use {known} or a callable, or install a plug-in")
    return _made(name)


@cache
def _made(name: str) -> NamedSerializer:
    made: NamedSerializer = make_plugin(SERIALIZERS, name, ("content_type", "encode", "decode"))
    return made


def serialized(serializer: Serializer, value: Any) -> bytes | None:
    """The value's bytes; whatever goes wrong is told as one kind of error."""
    try:
        made = serializer(value)
    except HeadraceError:
        raise
    except Exception as error:
        raise CannotSerialize(f"a value of type {type(value).__name__} cannot be serialized: {shown(error)}") from error
    return made if made is None or type(made) is bytes else to_bytes(made)
