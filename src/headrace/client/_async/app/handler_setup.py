"""Creates the subscription of a handler, and its schedule if it has one."""

from typing import TYPE_CHECKING

from headrace.client.app.registration import Registered
from headrace.model.errors import SubscriptionNotFound
from headrace.model.leasing import SubscriptionInfo
from headrace.model.schedule_requests import ScheduleDefinition

if TYPE_CHECKING:
    from headrace.client._async.bus import AsyncBus


async def set_up(bus: "AsyncBus", wanted: Registered) -> None:
    """Create the handler's subscription and schedule if they do not exist, and apply its settings.

    Raises TopicNotFound if the topic does not exist; creates only the topic of a schedule.
    """
    if wanted.definition is not None:
        await _set_up_schedule(bus, wanted.topic, wanted.definition)
    info = await _subscription(bus, wanted)
    if any(info.settings.get(name) != value for name, value in wanted.settings.items()):
        await bus.alter_subscription(wanted.topic, wanted.subscription, **wanted.settings)


async def _subscription(bus: "AsyncBus", wanted: Registered) -> SubscriptionInfo:
    """The handler's subscription, created if it does not exist: only that needs the right to create it."""
    try:
        return await bus.describe_subscription(wanted.topic, wanted.subscription)
    except SubscriptionNotFound:
        return await bus.create_subscription(
            wanted.topic, wanted.subscription, exist_ok=True, create=False, **wanted.settings
        )


async def _set_up_schedule(bus: "AsyncBus", topic: str, rule: ScheduleDefinition) -> None:
    await bus.create_topic(topic, exist_ok=True)
    there = [info.definition for info in await bus.crons(topic)]
    if not any(_terms(schedule) == _terms(rule) for schedule in there):
        await bus.cron_add(rule.name, topic, rule.when, zone=rule.zone, missed=rule.missed, overlap=rule.overlap)


def _terms(definition: ScheduleDefinition) -> tuple[str, ...]:
    return (definition.name, definition.when, definition.zone, definition.missed, definition.overlap)
