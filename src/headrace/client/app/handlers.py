"""Validation of handlers: a handler is a function or a coroutine function that takes a message, or nothing."""

import inspect
from collections.abc import Callable
from typing import Any

from headrace.model.arguments import shown
from headrace.model.errors import InvalidArgument

Handler = Callable[[Any], Any]
"""A handler that takes the message; one for asyncio may return an awaitable."""


def checked_handler(given: Any) -> Handler:
    """Return the handler as a callable of one message; refuse objects that cannot handle a message.

    >>> checked_handler(lambda job: job)("message")
    'message'
    """
    if not callable(given) or inspect.isclass(given):
        raise InvalidArgument(f"a handler is a function, not {shown(given)}")
    handler: Handler = given
    if _has_code(handler, inspect.isgeneratorfunction) or _has_code(handler, inspect.isasyncgenfunction):
        raise InvalidArgument(f"the handler {_name(handler)} contains `yield`: a call would not run it; use `return`")
    try:
        signature = inspect.signature(handler)
    except (TypeError, ValueError):
        return handler  # some callables written in C have no signature
    if _accepts(signature, 1):
        return handler
    if _accepts(signature, 0):
        return _without_message(given)
    raise InvalidArgument(
        f"a handler takes the message, or nothing: {_name(handler)}{signature} cannot be called like that"
    )


def is_coroutine_function(handler: Callable[..., Any]) -> bool:
    """Return whether a call only creates a coroutine."""
    return _has_code(handler, inspect.iscoroutinefunction)


def check_returned(returned: object) -> None:
    """Refuse a generator, whose code did not run when it was made."""
    if inspect.isgenerator(returned) or inspect.isasyncgen(returned):
        raise InvalidArgument(
            "the handler returned a generator, whose code has not run; use a function without `yield`"
        )


def _has_code(handler: object, is_kind: Callable[[object], bool]) -> bool:
    return is_kind(handler) or is_kind(getattr(handler, "__call__", None))  # noqa: B004  # of objects with that method


def _accepts(signature: inspect.Signature, count: int) -> bool:
    try:
        signature.bind(*[None] * count)
    except TypeError:
        return False
    return True


def _without_message(handler: Callable[[], Any]) -> Handler:
    if is_coroutine_function(handler):

        async def run(_message: Any) -> Any:
            return await handler()

        return run
    return lambda _message: handler()


def _name(handler: object) -> str:
    return str(getattr(handler, "__qualname__", None) or repr(handler))
