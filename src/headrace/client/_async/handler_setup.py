"""Setting up what a handler of an app needs: its subscription, and the recurrence of a handler that runs at times."""

from typing import TYPE_CHECKING

from headrace.client.registering import Registered
from headrace.model.recurring import Recurrence

if TYPE_CHECKING:
    from headrace.client._async.bus import AsyncBus


async def set_up(bus: "AsyncBus", wanted: Registered) -> None:
    """Make what the handler needs if it is not there, with the settings asked for.

    Raises TopicNotFound if the topic does not exist; only the topic of a recurrence is made.
    """
    if wanted.recurrence is not None:
        await _set_up_recurrence(bus, wanted.topic, wanted.recurrence)
    info = await bus.create_subscription(
        wanted.topic, wanted.subscription, exist_ok=True, create=False, **wanted.settings
    )
    if any(info.settings.get(name) != value for name, value in wanted.settings.items()):
        await bus.alter_subscription(wanted.topic, wanted.subscription, **wanted.settings)


async def _set_up_recurrence(bus: "AsyncBus", topic: str, rule: Recurrence) -> None:
    await bus.create_topic(topic, exist_ok=True)
    there = [info.recurrence for info in await bus.crons(topic)]
    if not any(_terms(recurrence) == _terms(rule) for recurrence in there):
        await bus.cron_add(rule.name, topic, rule.when, zone=rule.zone, missed=rule.missed, overlap=rule.overlap)


def _terms(recurrence: Recurrence) -> tuple[str, ...]:
    return (recurrence.name, recurrence.when, recurrence.zone, recurrence.missed, recurrence.overlap)
