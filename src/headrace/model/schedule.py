"""When something happens again and again: crontab expressions, time zones and fixed intervals. No clock here.

An expression has five fields: minute, hour, day of month, month, day of week. With six the first one is seconds, as
Quartz and Spring have it. Fields take numbers, names (`MON`, `JAN`), lists (`1,15`), ranges (`9-17`), steps (`*/5`);
the day of month also `L` (the last) and `LW` (the last Monday to Friday), the day of week `5L` (the last Friday) and
`MON#2` (the second Monday). If both days are given and neither begins with a star, either may match, as in every cron.

When clocks are changed, the rules are those of Debian's cron. What runs at certain times of the day (no field for
seconds, minutes or hours begins with a star) runs once for each: a time that is left out runs when the clock has jumped
ahead, and one that comes twice runs the first time. All else follows the clock on the wall: `*/5 * * * *` runs every
five minutes throughout, `*/5 2 * * *` not at all on a day without that hour, and twice as often when it comes twice.
"""

import re
from datetime import UTC, datetime, timedelta
from typing import Protocol
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

import msgspec
from cronsim import CronSim, CronSimError

from headrace.model.arguments import shortened, shown
from headrace.model.errors import InvalidArgument
from headrace.model.limits import TIMESTAMP_US_MAX
from headrace.model.schedule_requests import CRON_HEADER, RUN_HEADER, ScheduleDefinition
from headrace.model.topic import DEFAULT_TENANT, checked_tenant_name, parse_topic, tenant_of

_MISSED = ("skip", "once", "all")
_OVERLAP = ("allow", "skip")

_SECOND_US = 1_000_000
_DAY_US = 86_400 * _SECOND_US
_EPOCH = datetime(1970, 1, 1)
_EPOCH_UTC = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)
_LAST_US = 200_000_000_000 * _SECOND_US
"""The year 8307: calendars are not asked beyond."""
_WHEN_CHARS_MAX = 200
_COUNTED_MAX = 100
_INTERVAL_US_MIN, _INTERVAL_US_MAX = 10_000, 100 * 366 * _DAY_US

_NICKNAMES = {
    "@yearly": "0 0 1 1 *",
    "@annually": "0 0 1 1 *",
    "@monthly": "0 0 1 * *",
    "@weekly": "0 0 * * 0",
    "@daily": "0 0 * * *",
    "@midnight": "0 0 * * *",
    "@hourly": "0 * * * *",
}
_UNITS_US = {
    "w": 7 * _DAY_US,
    "d": _DAY_US,
    "h": 3600 * _SECOND_US,
    "m": 60 * _SECOND_US,
    "s": _SECOND_US,
    "ms": 1000,
}
_EVERY = re.compile(r"every((?:\s*[0-9]{1,9}(?:ms|[wdhms]))+)")
_PART = re.compile(r"([0-9]+)(ms|[wdhms])")


class Schedule(Protocol):
    """The times of something that happens again and again."""

    certain: bool
    """Whether these are certain times of the day: one that comes again is not another time."""

    def next_after(self, time_us: int) -> int | None:
        """The first time after this one; None when there is none any more."""


def parse_schedule(when: str, zone: str = "UTC", anchor_us: int = 0) -> Schedule:
    """What a text such as `*/5 * * * *`, `@daily` or `every 90s` means; intervals are counted from the anchor.

    >>> midnight = parse_schedule("@daily", "Europe/Berlin")
    >>> midnight.next_after(1_800_000_000_000_000) - 1_800_000_000_000_000
    54000000000
    >>> parse_schedule("every 1h30m").next_after(0)
    5400000000
    """
    text = when.strip()
    if len(text) > _WHEN_CHARS_MAX:
        raise InvalidArgument(f"what says when has at most {_WHEN_CHARS_MAX} characters, not {len(text)}")
    found = None if zone.upper() == "UTC" else parse_zone(zone)
    if text.lower().startswith("every"):
        return Interval(_interval_us(text), anchor_us)
    if text.startswith("@"):
        if text.lower() not in _NICKNAMES:
            raise InvalidArgument(f"{shown(text)} is unknown; there are {', '.join(_NICKNAMES)}")
        text = _NICKNAMES[text.lower()]
    return Crontab(text, found)


def checked_schedule(rule: ScheduleDefinition) -> ScheduleDefinition:
    """The schedule, if everything in it but the times can be; its own name and its topic's as they are stored."""
    name, topic = checked_tenant_name(rule.name, "schedule"), str(parse_topic(rule.topic))
    if tenant_of(name) not in (DEFAULT_TENANT, tenant_of(topic)):
        raise InvalidArgument(
            f"the schedule {name} publishes to topics of its own tenant, not to {topic}; give it such a topic"
        )
    if rule.missed not in _MISSED:
        raise InvalidArgument(f"missed is {', '.join(_MISSED)}, not {shown(rule.missed)}")
    if rule.overlap not in _OVERLAP:
        raise InvalidArgument(f"overlap is {', '.join(_OVERLAP)}, not {shown(rule.overlap)}")
    for header in (CRON_HEADER, RUN_HEADER):
        if header in rule.headers:
            raise InvalidArgument(f"the header {header} is set by the broker")
    return msgspec.structs.replace(rule, name=name, topic=topic)


def schedule_of(rule: ScheduleDefinition, created_us: int) -> Schedule:
    """When it runs; intervals are counted from its start, or from when it was made."""
    for name in ("start_us", "end_us"):
        time_us = getattr(rule, name)
        if time_us is not None and not 0 <= time_us <= TIMESTAMP_US_MAX:
            raise InvalidArgument(f"{name} is a time in microseconds since 1970, not {time_us}")
    if rule.start_us is not None and rule.end_us is not None and rule.end_us <= rule.start_us:
        raise InvalidArgument("the end has to come after the start")
    if rule.runs_max is not None and rule.runs_max < 1:
        raise InvalidArgument(f"runs_max is 1 or more, not {rule.runs_max}")
    return parse_schedule(rule.when, rule.zone, created_us if rule.start_us is None else rule.start_us)


def last_until(schedule: Schedule, after_us: int, until_us: int) -> tuple[int | None, int]:
    """The last time after the one and not after the other, and how many there are, or at least a hundred.

    >>> last_until(parse_schedule("every 1s"), 0, 86_400_000_000)
    (86400000000, 100)
    """
    last_us, count = None, 0
    run_us = schedule.next_after(after_us)
    while run_us is not None and run_us <= until_us:
        last_us, count = run_us, count + 1
        if count == _COUNTED_MAX:
            run_us = _one_of_the_last(schedule, run_us, until_us, (run_us - after_us) // count)
        run_us = schedule.next_after(run_us)
    return last_us, min(count, _COUNTED_MAX)


def _one_of_the_last(schedule: Schedule, known_us: int, until_us: int, apart_us: int) -> int:
    """A time a few runs before the last one: going back twice as far each time finds it, however many there are."""
    back_us = 2 * apart_us
    while until_us - back_us > known_us:
        run_us = schedule.next_after(until_us - back_us)
        if run_us is not None and run_us <= until_us:
            return until_us - back_us
        back_us *= 2
    return known_us


def parse_zone(zone: str) -> ZoneInfo:
    """The time zone of that name."""
    try:
        return ZoneInfo(zone)
    except (ZoneInfoNotFoundError, ValueError, OSError) as error:  # names of folders and of other files among them
        told = f"there is no time zone {shown(zone)}; use a name such as Europe/Berlin or UTC"
        raise InvalidArgument(told) from error


def _interval_us(text: str) -> int:
    match = _EVERY.fullmatch(text.lower())
    if match is None:
        raise InvalidArgument(
            f"{shown(text)} is no interval: write it like 'every 90s', 'every 5m' or 'every 1h30m' (w d h m s ms)"
        )
    interval_us = sum(int(number) * _UNITS_US[unit] for number, unit in _PART.findall(match[1]))
    if not _INTERVAL_US_MIN <= interval_us <= _INTERVAL_US_MAX:
        raise InvalidArgument(f"{shown(text)} is no interval: it has to be 10ms to 100 years")
    return interval_us


class Interval:
    """Always the same time apart, whatever the clock on the wall does."""

    certain = False

    def __init__(self, interval_us: int, anchor_us: int) -> None:
        self._interval_us = interval_us
        self._anchor_us = anchor_us

    def next_after(self, time_us: int) -> int | None:
        """The first time after this one; the anchor is one of them, and the first."""
        behind_us = time_us - self._anchor_us
        if behind_us < 0:
            return self._anchor_us
        next_us = self._anchor_us + (behind_us // self._interval_us + 1) * self._interval_us
        return next_us if next_us <= _LAST_US else None


class Crontab:
    """The times that match an expression, by the clocks of a time zone.

    The library is only asked which local times match, and what they are in UTC is found here: by itself it would lose
    runs where clocks are changed by half an hour, and go back in time when it begins in an hour that comes twice.
    """

    def __init__(self, expression: str, zone: ZoneInfo | None) -> None:
        self._expression = expression
        self._zone = zone
        try:
            first = next(CronSim(expression, datetime(2000, 1, 1)), None)
        except CronSimError as error:
            reason = shortened(error)
            raise InvalidArgument(
                f"{shown(expression)} does not say when: {reason[:1].lower()}{reason[1:]}; there are five fields "
                "(minute, hour, day of month, month, day of week), or six with seconds first"
            ) from error
        if first is None:
            raise InvalidArgument(f"{shown(expression)} never comes: there is no such day")
        fields = expression.split()
        self.certain = not any(field.startswith("*") for field in fields[: len(fields) - 3])
        self._matching = CronSim(expression, _EPOCH)
        self._matched_us = 0
        """The last local time that it found."""
        self._answered = (0, 0)
        """What was asked last, and the answer, which holds for all times in between."""
        self._steady = (0, 0, 0)
        """From when to when the clocks are so far ahead of UTC, as far as anybody has looked."""

    def next_after(self, time_us: int) -> int | None:
        """The first time after this one; None when there is none in the next 50 years."""
        after_us = max(time_us, -1)
        if after_us > _LAST_US:
            return None
        asked_us, answer_us = self._answered
        if asked_us <= after_us < answer_us:
            return answer_us
        if self._zone is None:
            found_us = self._match_after(after_us)
        elif self.certain:
            found_us = self._certain_after(after_us)
        else:
            found_us = self._any_after(after_us)
        if found_us is not None:
            self._answered = after_us, found_us
        return found_us

    def _certain_after(self, after_us: int) -> int | None:
        """Each local time once: the first time it comes, or when the clock has jumped over it."""
        local_us = self._match_after(after_us + self._offset_us(after_us))
        while local_us is not None:
            naive = _EPOCH + timedelta(microseconds=local_us)
            offset = naive.replace(tzinfo=self._zone).utcoffset()
            assert offset is not None
            run_us = local_us - offset // _MICROSECOND
            if self._offset_us(run_us) * _MICROSECOND != offset:  # there is no such time: it is one before the change
                run_us = self._change_us(run_us - _DAY_US, run_us) or run_us
            if run_us > after_us:
                return run_us
            local_us = self._match_after(local_us)
        return None

    def _any_after(self, after_us: int) -> int | None:
        """Whatever the clock on the wall shows, from one change of it to the next."""
        since_us, offset_us = after_us, self._offset_us(after_us)
        found_us = self._match_after(after_us + offset_us)
        while found_us is not None:
            run_us = found_us - offset_us
            change_us = self._change_us(since_us, run_us)
            if change_us is None:
                return run_us
            since_us, offset_us = change_us, self._offset_us(change_us)
            found_us = self._match_after(since_us + offset_us - 1)
        return None

    def _match_after(self, local_us: int) -> int | None:
        """The first local time after this one that matches."""
        if local_us // _SECOND_US * _SECOND_US != self._matched_us:
            self._matching = CronSim(self._expression, _EPOCH + timedelta(microseconds=local_us))
        found = next(self._matching, None)
        self._matched_us = -1 if found is None else (found - _EPOCH) // _MICROSECOND
        return None if found is None else self._matched_us

    def _offset_us(self, time_us: int) -> int:
        """How far the clocks are ahead of UTC."""
        begin_us, end_us, offset_us = self._steady
        if begin_us <= time_us < end_us:
            return offset_us
        offset = (_EPOCH_UTC + timedelta(microseconds=time_us)).astimezone(self._zone).utcoffset()
        assert offset is not None
        return offset // _MICROSECOND

    def _change_us(self, after_us: int, until_us: int) -> int | None:
        """When clocks are changed for the first time in between; no zone does that twice a day."""
        offset_us = self._offset_us(after_us)
        end_us = max(after_us, self._steady[1] - 1) if self._steady[0] <= after_us else after_us
        while end_us < until_us:
            begin_us, end_us = end_us, end_us + _DAY_US
            if self._offset_us(end_us) != offset_us:
                change_us = self._bisected_us(begin_us, end_us, offset_us)
                self._steady = after_us, change_us, offset_us
                return change_us if change_us <= until_us else None
            self._steady = after_us, end_us + 1, offset_us
        return None

    def _bisected_us(self, before_us: int, changed_us: int, offset_us: int) -> int:
        before, changed = before_us // _SECOND_US, -(-changed_us // _SECOND_US)
        while changed - before > 1:
            middle = (before + changed) // 2
            if self._offset_us(middle * _SECOND_US) == offset_us:
                before = middle
            else:
                changed = middle
        return changed * _SECOND_US
