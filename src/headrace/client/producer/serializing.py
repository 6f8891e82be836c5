"""From a program's values to a message's bytes, and back."""

from collections.abc import Callable
from typing import Any

import msgspec

from headrace.model.arguments import shown
from headrace.model.errors import HeadraceError, InvalidArgument

Serializer = Callable[[Any], bytes | None]
Deserializer = Callable[[bytes], Any]


class CannotSerialize(InvalidArgument):
    """The value cannot be made into bytes."""

    code = "cannot_serialize"


class CannotDeserialize(HeadraceError):
    """A message's bytes cannot be made into a value; the error has the message as it came."""

    code = "cannot_deserialize"

    def __init__(self, topic: str, partition: int, offset: int, reason: Exception, message: Any) -> None:
        super().__init__(
            f"message {offset} of {topic}[{partition}] cannot be deserialized: {shown(reason)}; "
            "its value is in the error's .message.value, and iterating again goes on behind it",
            topic=topic,
            partition=partition,
            offset=offset,
        )
        self.topic = topic
        self.partition = partition
        self.offset = offset
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


def _json_to_bytes(value: Any) -> bytes:
    return msgspec.json.encode(value)


_SERIALIZERS: dict[str, Serializer] = {"bytes": to_bytes, "str": _text_to_bytes, "json": _json_to_bytes}
_DESERIALIZERS: dict[str, Deserializer | None] = {"bytes": None, "str": bytes.decode, "json": msgspec.json.decode}


def serializer_of(given: str | Serializer | None) -> Serializer:
    """The serializer of that name, or the callable that was given.

    >>> serializer_of("json")({"id": 1})
    b'{"id":1}'
    """
    if given is None:
        return to_bytes
    if callable(given):
        return given
    name: object = given
    if isinstance(name, str) and name in _SERIALIZERS:
        return _SERIALIZERS[name]
    raise InvalidArgument(f"there is no serializer {shown(given)}; use 'bytes', 'str', 'json' or a callable")


def deserializer_of(given: str | Deserializer | None) -> Deserializer | None:
    """The deserializer of that name, or the callable that was given; None leaves the bytes as they are.

    >>> deserializer_of("json")(b'{"id":1}')
    {'id': 1}
    """
    if given is None or callable(given):
        return given
    name: object = given
    if isinstance(name, str) and name in _DESERIALIZERS:
        return _DESERIALIZERS[name]
    raise InvalidArgument(f"there is no deserializer {shown(given)}; use 'bytes', 'str', 'json' or a callable")


def serialized(serializer: Serializer, value: Any) -> bytes | None:
    """The value's bytes; whatever goes wrong is told as one kind of error."""
    try:
        made = serializer(value)
    except HeadraceError:
        raise
    except Exception as error:
        raise CannotSerialize(f"a value of type {type(value).__name__} cannot be serialized: {shown(error)}") from error
    return made if made is None or type(made) is bytes else to_bytes(made)
