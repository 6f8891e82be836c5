"""The common error object: how a handler's failure is told to those who asked, in one form everywhere."""

from typing import Any

import msgspec

from headrace.model.arguments import shown
from headrace.model.errors import HeadraceError, InvalidArgument, ServiceFailed
from headrace.model.limits import ERROR_CODE_CHARS_MAX, ERROR_DETAILS_BYTES_MAX, ERROR_TEXT_CHARS_MAX
from headrace.model.request import WireStruct


class ErrorObject(WireStruct):
    """What went wrong. It never has a traceback: whoever asked is told the error, not the code."""

    code: str
    """Stable, for programs: `snake_case`."""
    message: str
    """For people."""
    retryable: bool = False
    """Whether trying again can help."""
    details: dict[str, Any] = msgspec.field(default_factory=dict)


def error_object(error: BaseException) -> ErrorObject:
    """The error object for an error that a handler raised.

    An error may have attributes `code`, `retryable` and `details`, as those of Headrace do.

    >>> error_object(KeyError("plum"))
    ErrorObject(code='key_error', message="KeyError: 'plum'", retryable=False, details={})
    """
    if isinstance(error, ServiceFailed):  # of a service that this one has asked in turn
        return ErrorObject(error.error_code, str(error), error.retryable, error.error_details)
    text = str(error) if isinstance(error, HeadraceError) else _described(error)
    code, details = getattr(error, "code", None), getattr(error, "details", None)
    return fitted(
        ErrorObject(
            code if isinstance(code, str) and code else _snake_case(type(error).__name__),
            text,
            getattr(error, "retryable", False) is True,
            details if isinstance(details, dict) else {},
        )
    )


def fitted(error: ErrorObject) -> ErrorObject:
    """The error object within its limits: texts are cut, and details that are too large or cannot be sent left out."""
    try:
        size = len(msgspec.msgpack.encode(error.details))
    except (TypeError, ValueError, OverflowError, RecursionError):
        size = ERROR_DETAILS_BYTES_MAX + 1
    return ErrorObject(
        error.code[:ERROR_CODE_CHARS_MAX],
        error.message[:ERROR_TEXT_CHARS_MAX],
        error.retryable,
        error.details if size <= ERROR_DETAILS_BYTES_MAX else {},
    )


def check_error_object(error: ErrorObject) -> None:
    """Refuse an error object that is beyond its limits."""
    if not 0 < len(error.code) <= ERROR_CODE_CHARS_MAX:
        raise InvalidArgument(f"an error's code has 1 to {ERROR_CODE_CHARS_MAX} characters, not {shown(error.code)}")
    if error != fitted(error):
        raise InvalidArgument(
            f"an error has a message of {ERROR_TEXT_CHARS_MAX} characters and details of {ERROR_DETAILS_BYTES_MAX} "
            "bytes at most; leave some out"
        )


def as_service_failed(error: ErrorObject) -> ServiceFailed:
    """The error that a caller gets for a responder's error object."""
    return ServiceFailed(
        error.message or error.code, error_code=error.code, retryable=error.retryable, error_details=error.details
    )


def _described(error: BaseException) -> str:
    try:
        text = str(error)
    except Exception:  # noqa: BLE001  # it is the handler's error, and so is what its str does
        text = ""
    name = type(error).__name__
    return f"{name}: {text}" if text else name


def _snake_case(name: str) -> str:
    """The code for an error class.

    >>> _snake_case("HTTPError"), _snake_case("ValueError")
    ('http_error', 'value_error')
    """
    made = ""
    for index, letter in enumerate(name):
        follows = name[index + 1 : index + 2]
        if letter.isupper() and made and (not name[index - 1].isupper() or follows.islower()):
            made += "_"
        made += letter.lower()
    return made
