"""Administration of schedules: each method sends one request."""

from datetime import UTC, datetime, timedelta

from headrace.client._async.connection.reconnecting import AsyncReconnectingConnection
from headrace.client.times import Moment, optional_microseconds
from headrace.model.errors import InvalidArgument
from headrace.model.schedule_requests import (
    ScheduleDefinition,
    ScheduleInfo,
    ScheduleList,
    ScheduleNext,
    SchedulePause,
    ScheduleRemove,
    ScheduleRun,
    ScheduleSet,
)

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class AsyncScheduleAdmin:
    """Sets, pauses, runs, lists and removes schedules."""

    def __init__(self, broker: AsyncReconnectingConnection) -> None:
        self._broker = broker

    async def set(self, schedule: ScheduleDefinition, replace: bool) -> ScheduleInfo:
        """Create a schedule, or replace the one of the same name."""
        return await self._broker.request(ScheduleSet(schedule, replace), repeat=replace)

    async def list_all(self, topic: str | None) -> list[ScheduleInfo]:
        """List the schedules of a topic, or all."""
        answer = await self._broker.request(ScheduleList(topic or ""))
        return answer.schedules

    async def remove(self, name: str) -> None:
        """Remove a schedule."""
        await self._broker.request(ScheduleRemove(name), repeat=False)

    async def pause(self, name: str, paused: bool) -> ScheduleInfo:
        """Pause a schedule, or resume it."""
        return await self._broker.request(SchedulePause(name, paused))

    async def run(self, name: str) -> ScheduleInfo:
        """Publish the message of a schedule now."""
        return await self._broker.request(ScheduleRun(name), repeat=False)

    async def next_runs(
        self, name: str | None, when: str | None, zone: str, runs: int, after: Moment | None
    ) -> list[datetime]:
        """Compute the next runs of a schedule, or of an expression that no schedule has yet."""
        if (name is None) == (when is None):
            raise InvalidArgument("say whose runs: give a name, or an expression; one of the two")
        tried = None if when is None else ScheduleDefinition("try", "try", when, zone=zone)
        head = ScheduleNext(name or "", tried, runs, optional_microseconds(after))
        answer = await self._broker.request(head)
        return [_EPOCH + timedelta(microseconds=time_us) for time_us in answer.times_us]
