"""Restores a broker's state from a journal with gaps, and from the owner records of its partitions."""

import logging
from collections.abc import Iterable
from dataclasses import dataclass, field

import msgspec

from headrace.broker.facts import AnyFact, BrokerState, TopicSet, decode_fact
from headrace.broker.leased_facts import LeaseExtended, MessagesLeased, MessagesReleased, SubscriptionDeleted
from headrace.engines.api import Gap, PartitionOwner, PartitionPath
from headrace.model.errors import InvalidArgument
from headrace.model.topic import parse_topic, topic_settings

logger = logging.getLogger("headrace.broker")

_NOT_AFTER_A_GAP = (MessagesLeased, LeaseExtended, MessagesReleased)
"""Facts about leases are skipped after a gap, as they depend on earlier ones: the messages are delivered again."""


@dataclass
class Salvaged:
    """A restored state, and what is known to be missing from it."""

    state: BrokerState = field(default_factory=BrokerState)
    gaps: list[str] = field(default_factory=list)
    """Why facts may be missing, for each gap that no later snapshot covers."""
    passed_over: int = 0
    """The number of skipped facts, which depend on lost ones."""
    topics_found: list[str] = field(default_factory=list)
    """Topics restored from their partitions, as the journal does not have them."""
    settings_found: list[str] = field(default_factory=list)
    """Topics whose partitions have newer settings than the journal."""
    unusable: list[str] = field(default_factory=list)
    """What could not be restored unchanged."""
    replaced: list[int] = field(default_factory=list)
    """The ids of topics with the name of a newer topic, which must have been deleted."""


def topics_of(owners: dict[PartitionPath, PartitionOwner | None]) -> dict[int, TopicSet]:
    """The topics in the owner records of partitions, each with its newest settings."""
    found: dict[int, TopicSet] = {}
    for place, owner in owners.items():
        before = found.get(place.topic_id)
        # A partition with a damaged record keeps its messages, under a unique name.
        fact = TopicSet(place.topic_id, f"recovered-{place.topic_id}", 0, {}, -1)
        if owner is not None:
            fact = TopicSet(owner.topic_id, owner.topic, owner.created_us, owner.settings, owner.revision)
        newest = fact if before is None or fact.revision > before.revision else before
        found[place.topic_id] = msgspec.structs.replace(newest, settings=_with_partition(newest, before, place.number))
    return found


def _with_partition(fact: TopicSet, before: TopicSet | None, number: int) -> dict[str, object]:
    """A topic's settings, with enough partitions for this one and those found before."""
    known = 0 if before is None else before.settings.get("partitions", 1)
    return {**fact.settings, "partitions": max(fact.settings.get("partitions", 1), known, number + 1)}


def salvage(stream: Iterable[bytes | Gap | None], found: dict[int, TopicSet], *, whole: bool) -> Salvaged:
    """Replay a journal's facts; unless it is `whole`, take missing topics and newer settings from the partitions."""
    done = Salvaged()
    for content in stream:
        if content is None:
            done = Salvaged()
        elif isinstance(content, Gap):
            done.gaps.append(content.reason)
            _add_topics(done, found)
        else:
            _apply(done, content)
    if not whole:
        _add_topics(done, found)
        _update_settings(done, found)
    _check_topics(done)
    _check_subscriptions(done)
    return done


def _apply(done: Salvaged, content: bytes) -> None:
    fact = decode_fact(content)
    try:
        if done.gaps and isinstance(fact, _NOT_AFTER_A_GAP):
            done.passed_over += 1
        else:
            done.state.apply(fact)
    except Exception as error:  # noqa: BLE001 any error means that it depends on lost facts
        if not done.gaps:
            done.gaps.append(f"a fact cannot be applied: {error}")
        done.passed_over += 1
        logger.info("journal fact skipped  reason=%r", error)


def _add_topics(done: Salvaged, found: dict[int, TopicSet]) -> None:
    """Add the topics whose ids are higher than any that the journal has had so far."""
    for fact in [fact for topic_id, fact in sorted(found.items()) if topic_id > done.state.topic_id]:
        done.state.apply(fact)
        done.topics_found.append(fact.name)


def _update_settings(done: Salvaged, found: dict[int, TopicSet]) -> None:
    """Take settings that are newer than the journal's, and partitions that it does not know."""
    for topic_id, fact in found.items():
        known = done.state.topics.get(topic_id)
        if known is None:
            continue
        newer = fact.revision > known.revision
        partitions = max(fact.settings["partitions"], known.settings.get("partitions", 1))
        settings = {**(fact if newer else known).settings, "partitions": partitions}
        if settings != known.settings:
            done.settings_found.append(known.name)
            revision = max(fact.revision, known.revision)
            done.state.apply(msgspec.structs.replace(known, settings=settings, revision=revision))


def _check_topics(done: Salvaged) -> None:
    """Replace invalid names and settings, so that a broker can open every topic."""
    names: dict[str, int] = {}
    for fact in sorted(done.state.topics.values(), key=lambda fact: fact.id):
        try:
            name = str(parse_topic(fact.name))
        except InvalidArgument:
            name = f"recovered-{fact.id}"
            done.unusable.append(f"the name {fact.name!r} of the topic {fact.id}; it is {name} now")
        try:
            settings = topic_settings(fact.settings).as_dict()
        except InvalidArgument as error:
            settings = topic_settings({"partitions": fact.settings.get("partitions", 1)}).as_dict()
            done.unusable.append(f"the settings of the topic {name} ({error}); it has the defaults now")
        if (name, settings) != (fact.name, fact.settings):
            done.state.apply(msgspec.structs.replace(fact, name=name, settings=settings))
        if name in names:
            done.state.forget_topic(names[name])
            done.replaced.append(names[name])
        names[name] = fact.id


def _check_subscriptions(done: Salvaged) -> None:
    state = done.state
    for one in list(state.leased.subscriptions.values()):
        if one.topic_id not in state.topics:
            done.unusable.append(f"the leased subscription {one.name}, whose topic {one.topic_id} is not known")
            gone: AnyFact = SubscriptionDeleted(one.id)
            state.apply(gone)
