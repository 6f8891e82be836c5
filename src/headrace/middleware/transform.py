"""The middleware `transform`: changes the content type of messages, when they are stored or delivered."""

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from headrace.middleware.json_values import NotJson, decode_json, encode_json, on_invalid
from headrace.model.batch import Columns
from headrace.model.cloudevents import CONTENT_TYPE, to_binary, to_structured
from headrace.model.errors import InvalidArgument, InvalidEvent
from headrace.model.headers import Headers, replaced_headers
from headrace.model.middleware import Middleware, MiddlewareContext, RefusedMessages, check_choice, check_options

Transformed = tuple[bytes | None, Headers | None]
_decode_msgpack = msgspec.msgpack.Decoder().decode
_encode_msgpack = msgspec.msgpack.Encoder().encode
_JSON = {CONTENT_TYPE: b"application/json"}
_MSGPACK = {CONTENT_TYPE: b"application/msgpack"}
_INVALID = (NotJson, InvalidEvent, msgspec.MsgspecError, ValueError, TypeError, OverflowError, RecursionError)


def json_to_msgpack(value: bytes | None, headers: Headers | None) -> Transformed:
    """A JSON value as MessagePack; a message without a value stays so."""
    return (None if value is None else _encode_msgpack(decode_json(value))), replaced_headers(headers, _MSGPACK)


def msgpack_to_json(value: bytes | None, headers: Headers | None) -> Transformed:
    """A MessagePack value as JSON, byte strings in Base64; a message without a value stays so."""
    return (None if value is None else encode_json(_decode_msgpack(value))), replaced_headers(headers, _JSON)


_TRANSFORMS: dict[tuple[str, str], Callable[[bytes | None, Headers | None], Transformed]] = {
    ("json", "msgpack"): json_to_msgpack,
    ("msgpack", "json"): msgpack_to_json,
    ("cloudevents-structured", "cloudevents-binary"): to_binary,
    ("cloudevents-binary", "cloudevents-structured"): to_structured,
}


def make_transform(options: Mapping[str, Any]) -> Middleware:
    """The middleware that transforms when the option `when` says."""
    check_options(options, {"from": str, "to": str, "when": str, "on_invalid": str})
    chosen = options.get("from", ""), options.get("to", "")
    if chosen not in _TRANSFORMS:
        known = ", ".join(f"from {one} to {other}" for one, other in _TRANSFORMS)
        raise InvalidArgument(f"cannot transform from {chosen[0]!r} to {chosen[1]!r}; there is {known}")
    if check_choice("when", options.get("when", "publish"), ("publish", "deliver")) == "deliver":
        if "on_invalid" in options:
            raise InvalidArgument("the option 'on_invalid' is for messages that are published")
        return TransformAtDelivery(_TRANSFORMS[chosen])
    return TransformAtPublish(_TRANSFORMS[chosen], dead_letter=on_invalid(options))


make_transform.api = 1  # type: ignore[attr-defined]


class TransformAtPublish(Middleware):
    """Transforms before messages are stored; what cannot be transformed is refused."""

    needs = ("values", "headers")
    inline = True

    def __init__(self, transform: Callable[..., Transformed], *, dead_letter: bool) -> None:
        self._transform = transform
        self._dead_letter = dead_letter

    def on_publish(self, columns: Columns, _: MiddlewareContext) -> Columns | RefusedMessages:
        """Transform every message."""
        values, headers = list(columns.values), list(columns.headers or [None] * len(columns.values))
        reasons: dict[int, str] = {}
        for index, (value, each) in enumerate(zip(columns.values, list(headers), strict=True)):
            try:
                values[index], headers[index] = self._transform(value, each)
            except _INVALID as error:
                reasons[index] = _reason(error)
        made = msgspec.structs.replace(columns, values=values, headers=headers)
        return RefusedMessages(reasons, self._dead_letter, made) if reasons else made


def _reason(error: Exception) -> str:
    """Why a value cannot be transformed, without its content."""
    if isinstance(error, NotJson | InvalidEvent):
        return str(error)
    if isinstance(error, RecursionError):
        return "the value is nested too deeply"
    if isinstance(error, msgspec.DecodeError):
        return "the value is not MessagePack"
    return "the value has something that the other format cannot represent"


class TransformAtDelivery(Middleware):
    """Transforms when messages are delivered: the topic has them as they were published."""

    needs = ("values", "headers")
    inline = True

    def __init__(self, transform: Callable[..., Transformed]) -> None:
        self._transform = transform

    def on_deliver(self, columns: Columns, _: MiddlewareContext) -> Columns:
        """Transform every message; raises for one that cannot be, which is not delivered then."""
        given = columns.headers or [None] * len(columns.values)
        made = [self._transform(value, headers) for value, headers in zip(columns.values, given, strict=True)]
        return msgspec.structs.replace(
            columns, values=[value for value, _ in made], headers=[headers for _, headers in made]
        )
