"""The optional fields of a message as keyword arguments: every method that publishes takes them from here."""

import inspect
from collections.abc import Callable, Sequence
from typing import Any, TypedDict, TypeVar, get_args

from headrace.client.times import Moment
from headrace.model.durability import Durability
from headrace.model.headers import GivenHeaders


class MessageFields(TypedDict, total=False):
    """What a message can have besides its value and key; a field that is left out, or None, is not set."""

    headers: GivenHeaders | None
    """Names to text, bytes or None, as a mapping; or a list of such pairs, where a name repeats."""
    timestamp: Moment | None
    """The time of the message, by default the time at which it is published."""
    due: Moment | None
    """Leased subscriptions do not deliver the message before this time."""
    priority: int | None
    """A whole number, for subscriptions that deliver by priority."""
    expires: Moment | None
    """The message is not delivered after this time."""
    partition: int | None
    """The partition that gets the message, instead of the one that its key selects."""


class PublishOptions(MessageFields, total=False):
    """What publishing one message takes besides its topic and value."""

    key: bytes | str | None
    durability: Durability | str | None
    expected_offset: int | None
    expected_version: int | None


TopicList = list[str] | tuple[str, ...]
"""Topics that get a message together."""


class MessageColumns(TypedDict, total=False):
    """The same fields for many messages: each a sequence with one entry for each value."""

    headers: Sequence[GivenHeaders | None] | None
    timestamps: Sequence[Moment | None] | None
    dues: Sequence[Moment | None] | None
    priorities: Sequence[int | None] | None
    expires: Sequence[Moment | None] | None


F = TypeVar("F", bound=Callable[..., Any])


def show_fields(function: F) -> F:
    """Make `help()` list the fields that a function takes as `**fields: Unpack[...]` one by one."""
    signature = inspect.signature(function)
    *named, rest = signature.parameters.values()
    (fields,) = get_args(rest.annotation)
    listed = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
        for name, annotation in fields.__annotations__.items()
    ]
    function.__signature__ = signature.replace(parameters=[*named, *listed])  # type: ignore[attr-defined]
    return function
