"""From what a handler returns or raises to the reply that is sent."""

from typing import Any, NamedTuple

import msgspec

from headrace.client.app.handler_results import Reject, Retry
from headrace.client.producer.serializing import CannotSerialize, Deserializer
from headrace.client.subjects.messages import Reply
from headrace.model.arguments import shown
from headrace.model.error_object import ErrorObject, error_object, fitted
from headrace.model.errors import InvalidArgument
from headrace.model.headers import Headers
from headrace.model.limits import MESSAGE_BYTES_MAX
from headrace.model.message import check_message_bytes, message_size
from headrace.model.subject_requests import ReplySend


def decoded_value(deserializer: Deserializer | None, value: bytes) -> Any:
    """The value of a request, as its handler wants it; raises InvalidArgument, which the caller is told."""
    if deserializer is None:
        return value
    try:
        return deserializer(value)
    except Exception as error:
        raise InvalidArgument(f"the request's value cannot be deserialized: {shown(error)}") from error


class EncodedReply(NamedTuple):
    """A reply as it is sent."""

    value: bytes
    headers: Headers


def encoded_reply(returned: Any) -> EncodedReply:
    """The reply for what a handler returned: bytes, text, None for no value, a Reply, or what JSON can express.

    >>> encoded_reply({"price": 3.5})
    EncodedReply(value=b'{"price":3.5}', headers={})
    """
    headers: Headers = {}
    if isinstance(returned, Reply):
        returned, headers = returned.value, returned.headers
    value = _encoded(returned)
    check_message_bytes(message_size(value, None, headers), MESSAGE_BYTES_MAX)
    return EncodedReply(value, headers)


def failed_reply(error: BaseException) -> ErrorObject:
    """The error object for what a handler raised.

    >>> failed_reply(Reject("not for us"))
    ErrorObject(code='rejected', message='not for us', retryable=False, details={})
    """
    if isinstance(error, Reject):
        return fitted(ErrorObject("rejected", error.reason or "the request was rejected"))
    if isinstance(error, Retry):
        return fitted(ErrorObject("retry_later", str(error) or "try again later", retryable=True))
    return error_object(error)


def reply_request(number: int, returned: Any) -> tuple[ReplySend, bytes]:
    """The frame that answers a request with what a handler returned: its head and its body."""
    value, headers = encoded_reply(returned)
    return ReplySend(number, headers), value


def _encoded(value: Any) -> bytes:
    if value is None:
        return b""
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value)
    if isinstance(value, str):
        return value.encode()
    try:
        return msgspec.json.encode(value)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise CannotSerialize(
            f"a reply is bytes, text, None or something that JSON can express, not {shown(value)}: {error}"
        ) from error
