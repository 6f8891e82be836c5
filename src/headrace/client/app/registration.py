"""The registration of an app's handlers."""

from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

from headrace.client.app.handlers import Handler, checked_handler
from headrace.client.leasing.message_selection import lease_ms_of
from headrace.client.producer.serializing import Deserializer, deserializer_of
from headrace.client.times import check_name
from headrace.model.arguments import shown
from headrace.model.errors import InvalidArgument
from headrace.model.limits import RESPONDER_CONCURRENCY_MAX
from headrace.model.schedule_requests import ScheduleDefinition
from headrace.model.subject import checked_pattern
from headrace.model.subscription import (
    DEFAULT_SUBSCRIPTION,
    SubscriptionSettings,
    checked_subscription,
    plain_settings,
    subscription_settings,
)
from headrace.model.topic import parse_topic

EVERY = "every."
"""The prefix of the topics to which the schedules of apps publish."""
_EXAMPLES = {
    "when": "such as '*/5 * * * *', '@daily' or 'every 60s'",
    "zone": "such as 'Europe/Berlin'",
    "name": "such as 'nightly-report'",
}


class Registered(NamedTuple):
    """A handler, its topic and subscription, and its settings."""

    topic: str
    subscription: str
    handler: Handler
    concurrency: int
    prefetch: int | None
    lease_ms: int
    settings: dict[str, Any]
    deserializer: Deserializer | None
    definition: ScheduleDefinition | None


def handled_topics(topic: str | Sequence[str]) -> list[str]:
    """The topics that a handler is registered for: one, or those of a list."""
    if not isinstance(topic, list | tuple):
        return [topic]  # type: ignore[list-item]  # `registered` refuses what is no name
    if not topic:
        raise InvalidArgument("a handler needs a topic: the list is empty")
    return list(topic)


class ServedSubject(NamedTuple):
    """A handler that answers requests, and its settings."""

    subject: str
    handler: Handler
    concurrency: int
    deserializer: Deserializer | None


def served_subject(
    handler: Callable[..., Any], subject: str, *, concurrency: int, deserializer: str | Deserializer | None
) -> ServedSubject:
    """Create the registration of a handler of requests; raises InvalidArgument if an argument is wrong."""
    if not isinstance(subject, str):
        raise InvalidArgument(
            f'a handler needs a subject: write @app.serves("price.quote"), not @app.serves with {shown(subject)}'
        )
    checked_pattern(subject.rpartition("/")[2])
    _check_count("concurrency", concurrency)
    if concurrency > RESPONDER_CONCURRENCY_MAX:
        raise InvalidArgument(f"concurrency must be {RESPONDER_CONCURRENCY_MAX} at most, not {concurrency}")
    return ServedSubject(subject, checked_handler(handler), concurrency, deserializer_of(deserializer))


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
    definition: ScheduleDefinition | None = None,
) -> Registered:
    """Create the registration of a handler; raises InvalidArgument if an argument is wrong."""
    if not isinstance(topic, str):
        raise InvalidArgument(f'a handler needs a topic: write @app.on("jobs"), not @app.on with {shown(topic)}')
    parse_topic(topic)
    check_name(subscription, "a subscription")
    checked_subscription(subscription)
    _check_count("concurrency", concurrency)
    if prefetch is not None:
        _check_count("prefetch", prefetch)
    settings = _retry_settings(retry)
    return Registered(
        topic,
        subscription,
        checked_handler(handler),
        concurrency,
        prefetch,
        lease_ms_of(lease),
        settings,
        deserializer_of(deserializer),
        definition,
    )


def registered_schedule(
    handler: Callable[..., Any],
    when: str,
    *,
    zone: str,
    name: str | None,
    missed: str,
    overlap: str,
    retry: SubscriptionSettings | Mapping[str, Any] | None,
    lease: float | timedelta | None,
) -> Registered:
    """Create the registration of a handler that runs by a schedule; raises InvalidArgument if an argument is wrong."""
    from headrace.model.schedule import checked_schedule, schedule_of  # imported here: only apps with schedules need it

    called: Any = name or getattr(handler, "__name__", "")
    given: dict[str, Any] = {"when": when, "zone": zone, "name": called}
    for argument, text in given.items():
        if not isinstance(text, str):
            raise InvalidArgument(f"{argument} is a string, {_EXAMPLES[argument]}, not {shown(text)}")
    if not name and not called.isidentifier():
        raise InvalidArgument(f"{called or 'the handler'} is not the name of a function: give the schedule a name=")
    rule = checked_schedule(ScheduleDefinition(called, EVERY + called, when, zone=zone, missed=missed, overlap=overlap))
    schedule_of(rule, 0)
    return registered(handler, rule.topic, retry=retry, lease=lease, definition=rule)


def _retry_settings(retry: SubscriptionSettings | Mapping[str, Any] | None) -> dict[str, Any]:
    if isinstance(retry, SubscriptionSettings):
        return retry.as_dict()
    if retry is not None and not isinstance(retry, Mapping):
        raise InvalidArgument(
            f'retry is SubscriptionSettings, or settings by name such as {{"deliveries_max": 5}}, not {shown(retry)}'
        )
    settings = plain_settings(retry or {})
    subscription_settings(settings)
    return settings


def _check_count(name: str, count: Any) -> None:
    if not isinstance(count, int) or count < 1:
        raise InvalidArgument(f"{name} must be 1 at least, not {shown(count)}")
