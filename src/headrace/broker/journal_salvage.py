"""What can be known of a broker's state from a journal with gaps, and from what its partitions say of themselves."""

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
"""What is said of a lease means little without what was said before: its messages are handed out again instead."""


@dataclass
class Salvaged:
    """A state made anew, and what is known to be missing in it."""

    state: BrokerState = field(default_factory=BrokerState)
    gaps: list[str] = field(default_factory=list)
    """Where facts may be missing that no later snapshot has."""
    passed_over: int = 0
    """Facts behind a gap that mean nothing without those in it."""
    topics_found: list[str] = field(default_factory=list)
    """Topics that only their partitions tell of."""
    settings_found: list[str] = field(default_factory=list)
    """Topics whose partitions tell of newer settings than the journal."""
    unusable: list[str] = field(default_factory=list)
    """What could not be taken over as it was."""
    replaced: list[int] = field(default_factory=list)
    """Topics that another one of the same name came after: they must have been deleted."""


def topics_of(owners: dict[PartitionPath, PartitionOwner | None]) -> dict[int, TopicSet]:
    """The topics that partitions tell of, each as it was when its settings were last changed."""
    found: dict[int, TopicSet] = {}
    for place, owner in owners.items():
        before = found.get(place.topic_id)
        # A partition whose record is damaged has its messages still, and a name that nobody else has.
        fact = TopicSet(place.topic_id, f"recovered-{place.topic_id}", 0, {}, -1)
        if owner is not None:
            fact = TopicSet(owner.topic_id, owner.topic, owner.created_us, owner.settings, owner.revision)
        newest = fact if before is None or fact.revision > before.revision else before
        found[place.topic_id] = msgspec.structs.replace(newest, settings=_with_partition(newest, before, place.number))
    return found


def _with_partition(fact: TopicSet, before: TopicSet | None, number: int) -> dict[str, object]:
    """Settings that have room for a partition, and for those seen before."""
    known = 0 if before is None else before.settings.get("partitions", 1)
    return {**fact.settings, "partitions": max(fact.settings.get("partitions", 1), known, number + 1)}


def salvage(stream: Iterable[bytes | Gap | None], found: dict[int, TopicSet], *, whole: bool) -> Salvaged:
    """The state that a journal's facts add up to; where it is not `whole`, partitions tell of topics it lacks."""
    done = Salvaged()
    for content in stream:
        if content is None:
            done = Salvaged()
        elif isinstance(content, Gap):
            done.gaps.append(content.reason)
            _take_topics(done, found)
        else:
            _take(done, content)
    if not whole:
        _take_topics(done, found)
        _take_settings(done, found)
    _check_topics(done)
    _check_subscriptions(done)
    return done


def _take(done: Salvaged, content: bytes) -> None:
    fact = decode_fact(content)
    try:
        if done.gaps and isinstance(fact, _NOT_AFTER_A_GAP):
            done.passed_over += 1
        else:
            done.state.apply(fact)
    except Exception as error:  # noqa: BLE001 whatever it is, without what is missing it cannot be applied
        if not done.gaps:
            done.gaps.append(f"a fact cannot be applied: {error}")
        done.passed_over += 1
        logger.info("journal fact skipped", extra={"error": repr(error)})


def _take_topics(done: Salvaged, found: dict[int, TopicSet]) -> None:
    """Take over the topics that the journal has never heard of by now: ids only rise."""
    for fact in [fact for topic_id, fact in sorted(found.items()) if topic_id > done.state.topic_id]:
        done.state.apply(fact)
        done.topics_found.append(fact.name)


def _take_settings(done: Salvaged, found: dict[int, TopicSet]) -> None:
    """Take over settings that are newer than those in the journal, and partitions that it does not know."""
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
    """See to it that a broker can open every topic."""
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
