"""What the settings of a leased subscription and of its topic mean together."""

from contextlib import suppress
from typing import Any

from headrace.broker.topics import Topic, TopicRegistry
from headrace.broker.views import check_stores
from headrace.model.errors import InvalidArgument
from headrace.model.subscription import SubscriptionSettings, subscription_settings
from headrace.model.system_topics import check_clients_topic
from headrace.model.topic import Validity, parse_topic


def check_dead_letters(topics: TopicRegistry, topic: Topic, settings: SubscriptionSettings) -> None:
    """Refuse to put dead messages where they would be handed out again, or cannot be stored."""
    if not settings.dead_letter_topic:
        return
    check_clients_topic(settings.dead_letter_topic)
    name = parse_topic(settings.dead_letter_topic)
    if name == topic.name:
        raise InvalidArgument(f"dead_letter_topic cannot be {topic} itself: give another topic")
    if name == topics.source_of(topic).name:
        raise InvalidArgument(f"dead_letter_topic cannot be {name}, from which {topic} reads: give another topic")
    target = topics.find(settings.dead_letter_topic)
    if target is not None:
        check_stores(str(target), target.settings, "put dead letters into")


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
