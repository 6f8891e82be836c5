"""Setting up what a handler of an app needs: its subscription, and the schedule of a handler that runs at times."""

from typing import TYPE_CHECKING

from headrace.client.app.registration import Registered
from headrace.model.schedule_requests import ScheduleDefinition

if TYPE_CHECKING:
    from headrace.client._async.bus import AsyncBus


async def set_up(bus: "AsyncBus", wanted: Registered) -> None:
    """Make what the handler needs if it is not there, with the settings asked for.

    Raises TopicNotFound if the topic does not exist; only the topic of a schedule is made.
    """
    if wanted.definition is not None:
        await _set_up_schedule(bus, wanted.topic, wanted.definition)
    info = await bus.create_subscription(
        wanted.topic, wanted.subscription, exist_ok=True, create=False, **wanted.settings
    )
    if any(info.settings.get(name) != value for name, value in wanted.settings.items()):
        await bus.alter_subscription(wanted.topic, wanted.subscription, **wanted.settings)


async def _set_up_schedule(bus: "AsyncBus", topic: str, rule: ScheduleDefinition) -> None:
    await bus.create_topic(topic, exist_ok=True)
    there = [info.definition for info in await bus.crons(topic)]
    if not any(_terms(schedule) == _terms(rule) for schedule in there):
        await bus.cron_add(rule.name, topic, rule.when, zone=rule.zone, missed=rule.missed, overlap=rule.overlap)


def _terms(definition: ScheduleDefinition) -> tuple[str, ...]:
    return (definition.name, definition.when, definition.zone, definition.missed, definition.overlap)
