"""What an app has been told to do with messages."""

import inspect
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any, NamedTuple

from headrace.client.jobs import Job
from headrace.client.selecting import span_ms
from headrace.client.serialising import Deserializer, deserializer_of
from headrace.model.errors import InvalidArgument
from headrace.model.recurring import Recurrence
from headrace.model.subscription import DEFAULT_SUBSCRIPTION, SubscriptionSettings, subscription_settings

JobHandler = Callable[[Job], Any]


class Registered(NamedTuple):
    """A handler, and what it is for."""

    topic: str
    subscription: str
    handler: JobHandler
    concurrency: int
    prefetch: int | None
    lease_ms: int
    settings: dict[str, Any]
    deserializer: Deserializer | None
    recurrence: Recurrence | None


def registered(
    handler: Callable[..., Any],
    topic: str,
    *,
    subscription: str = DEFAULT_SUBSCRIPTION,
    concurrency: int = 1,
    prefetch: int | None = None,
    retry: SubscriptionSettings | Mapping[str, Any] | None = None,
    lease: float | timedelta | None = None,
    deserializer: str | Deserializer | None = None,
    recurrence: Recurrence | None = None,
) -> Registered:
    """A handler, and what it is for; says what is wrong with that."""
    if concurrency < 1:
        raise InvalidArgument(f"concurrency must be 1 at least, not {concurrency}")
    if prefetch is not None and prefetch < 1:
        raise InvalidArgument(f"prefetch must be 1 at least, not {prefetch}")
    settings = retry.as_dict() if isinstance(retry, SubscriptionSettings) else dict(retry or {})
    subscription_settings(settings)
    return Registered(
        topic,
        subscription,
        handler if _takes_message(handler) else lambda _job: handler(),
        concurrency,
        prefetch,
        span_ms(lease, "lease"),
        settings,
        deserializer_of(deserializer),
        recurrence,
    )


def _takes_message(handler: Callable[..., Any]) -> bool:
    """Whether it wants to see the message: what is done at certain times often does not care."""
    try:
        parameters = inspect.signature(handler).parameters.values()
    except (TypeError, ValueError):
        return True
    return any(
        parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD, parameter.VAR_POSITIONAL)
        for parameter in parameters
    )
