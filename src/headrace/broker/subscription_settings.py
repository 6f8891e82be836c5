"""What the settings of a leased subscription and of its topic mean together."""

from contextlib import suppress
from typing import Any

from headrace.broker.topics import Topic
from headrace.model.errors import InvalidArgument
from headrace.model.subscription import SubscriptionSettings, subscription_settings
from headrace.model.topic import Validity, parse_topic


def check_dead_letters(topic: Topic, settings: SubscriptionSettings) -> None:
    """Refuse to put dead messages where they would be handed out again."""
    if settings.dead_letter_topic and parse_topic(settings.dead_letter_topic) == topic.name:
        raise InvalidArgument(f"dead_letter_topic cannot be {topic} itself: give another topic")


def ttl_us(topic: Topic) -> int | None:
    """How long after they were appended messages of a topic are handed out."""
    seconds = topic.settings.ttl_seconds if topic.settings.validity is Validity.TTL else None
    return None if seconds is None else round(seconds * 1e6)


def right_settings(given: dict[str, Any]) -> SubscriptionSettings:
    """What is right of settings that are wrong as a whole."""
    settings = SubscriptionSettings()
    for name, value in given.items():
        with suppress(InvalidArgument):  # the whole was told of
            settings = subscription_settings({name: value}, settings)
    return settings
