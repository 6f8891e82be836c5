"""Administration of schedules: each method sends one request."""

from datetime import UTC, datetime, timedelta

from headrace.client._sync.connection.reconnecting import ReconnectingConnection
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


class ScheduleAdmin:
    """Sets, pauses, runs, lists and removes schedules."""

    def __init__(self, broker: ReconnectingConnection) -> None:
        self._broker = broker

    def set(self, schedule: ScheduleDefinition, replace: bool) -> ScheduleInfo:
        """Create a schedule, or replace the one of the same name."""
        return self._broker.request(ScheduleSet(schedule, replace), repeat=replace)

    def list_all(self, topic: str | None) -> list[ScheduleInfo]:
        """List the schedules of a topic, or all."""
        answer = self._broker.request(ScheduleList(topic or ""))
        return answer.schedules

    def remove(self, name: str) -> None:
        """Remove a schedule."""
        self._broker.request(ScheduleRemove(name), repeat=False)

    def pause(self, name: str, paused: bool) -> ScheduleInfo:
        """Pause a schedule, or resume it."""
        return self._broker.request(SchedulePause(name, paused))

    def run(self, name: str) -> ScheduleInfo:
        """Publish the message of a schedule now."""
        return self._broker.request(ScheduleRun(name), repeat=False)

    def next_runs(
        self, name: str | None, when: str | None, zone: str, runs: int, after: Moment | None
    ) -> list[datetime]:
        """Compute the next runs of a schedule, or of an expression that no schedule has yet."""
        if (name is None) == (when is None):
            raise InvalidArgument("say whose runs: give a name, or an expression; one of the two")
        tried = None if when is None else ScheduleDefinition("try", "try", when, zone=zone)
        head = ScheduleNext(name or "", tried, runs, optional_microseconds(after))
        answer = self._broker.request(head)
        return [_EPOCH + timedelta(microseconds=time_us) for time_us in answer.times_us]
