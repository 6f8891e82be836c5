"""When schedules run: expressions, intervals, and clocks that are changed in three zones."""

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from itertools import islice, pairwise
from zoneinfo import ZoneInfo

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from headrace.model.errors import InvalidArgument
from headrace.model.schedule import Schedule, last_until, parse_schedule

BERLIN, NEW_YORK, LORD_HOWE = "Europe/Berlin", "America/New_York", "Australia/Lord_Howe"
MINUTE = timedelta(minutes=1)


def us(time: datetime) -> int:
    return (time - datetime(1970, 1, 1, tzinfo=UTC)) // timedelta(microseconds=1)


def utc(text: str) -> int:
    return us(datetime.fromisoformat(text).replace(tzinfo=UTC))


def after(schedule: Schedule, time_us: int) -> Iterator[int]:
    while (found := schedule.next_after(time_us)) is not None:
        yield found
        time_us = found


def local(when: str, zone: str, begin: str, end: str) -> list[str]:
    """The runs between two UTC times, each as the clock on the wall shows it, with its distance from UTC."""
    tz, until_us, found = ZoneInfo(zone), utc(end), []
    for run_us in after(parse_schedule(when, zone), utc(begin)):
        if run_us > until_us:
            break
        time = datetime.fromtimestamp(run_us // 1_000_000, UTC).astimezone(tz)
        found.append(f"{time:%d %H:%M}{f':{time:%S}' if time.second else ''} {time:%z}")
    return found


# Expressions.


@pytest.mark.parametrize(
    ("when", "expected"),
    [
        ("*/15 * * * *", ["03-01 00:15:00", "03-01 00:30:00", "03-01 00:45:00"]),
        ("5,35 9-10 * * *", ["03-01 09:05:00", "03-01 09:35:00", "03-01 10:05:00"]),
        ("0 9-17/4 * * *", ["03-01 09:00:00", "03-01 13:00:00", "03-01 17:00:00"]),
        ("0 9 * * mon-fri", ["03-02 09:00:00", "03-03 09:00:00", "03-04 09:00:00"]),
        ("0 9 * JAN,Jul Tue", ["07-07 09:00:00", "07-14 09:00:00", "07-21 09:00:00"]),
        ("0 0 13 * 5", ["03-06 00:00:00", "03-13 00:00:00", "03-20 00:00:00"]),  # Fridays, and the 13th
        ("0 0 */10 * 1-5", ["03-11 00:00:00", "03-31 00:00:00", "04-01 00:00:00"]),  # both, for one has a star
        ("0 0 L * *", ["03-31 00:00:00", "04-30 00:00:00", "05-31 00:00:00"]),
        ("0 0 LW * *", ["03-31 00:00:00", "04-30 00:00:00", "05-29 00:00:00"]),
        ("0 12 * * 5L", ["03-27 12:00:00", "04-24 12:00:00", "05-29 12:00:00"]),
        ("0 12 * * mon#2", ["03-09 12:00:00", "04-13 12:00:00", "05-11 12:00:00"]),
        ("0 0 * * 7", ["03-08 00:00:00", "03-15 00:00:00", "03-22 00:00:00"]),
        ("*/20 30 6 * * *", ["03-01 06:30:00", "03-01 06:30:20", "03-01 06:30:40"]),
        ("59 59 23 * * *", ["03-01 23:59:59", "03-02 23:59:59", "03-03 23:59:59"]),
        ("@hourly", ["03-01 01:00:00", "03-01 02:00:00", "03-01 03:00:00"]),
        ("@daily", ["03-02 00:00:00", "03-03 00:00:00", "03-04 00:00:00"]),
        ("@midnight", ["03-02 00:00:00", "03-03 00:00:00", "03-04 00:00:00"]),
        ("@weekly", ["03-08 00:00:00", "03-15 00:00:00", "03-22 00:00:00"]),
        ("@Monthly", ["04-01 00:00:00", "05-01 00:00:00", "06-01 00:00:00"]),
        ("@yearly", ["01-01 00:00:00", "01-01 00:00:00", "01-01 00:00:00"]),
        ("@annually", ["01-01 00:00:00", "01-01 00:00:00", "01-01 00:00:00"]),
        ("  0  12 29 2  * ", ["02-29 12:00:00", "02-29 12:00:00", "02-29 12:00:00"]),
    ],
)
def test_what_expressions_mean(when: str, expected: list[str]) -> None:
    runs = islice(after(parse_schedule(when), utc("2026-03-01T00:00")), 3)
    assert [f"{datetime.fromtimestamp(run // 1_000_000, UTC):%m-%d %H:%M:%S}" for run in runs] == expected


@pytest.mark.parametrize(
    ("when", "words"),
    [
        ("", "five fields"),
        ("* * * *", "number of fields"),
        ("* * * * * * *", "number of fields"),
        ("60 * * * *", "bad minute"),
        ("* 24 * * *", "bad hour"),
        ("* * 0 * *", "bad day-of-month"),
        ("* * * 13 *", "bad month"),
        ("* * * * 8", "bad day-of-week"),
        ("60 * * * * *", "bad second"),
        ("*/0 * * * *", "bad minute"),
        ("5-1 * * * *", "bad minute"),
        ("1,, * * * *", "bad minute"),
        ("* * * * mon#6", "bad day-of-week"),
        ("* * * * ²L", "bad day-of-week"),
        ("0 0 30 2 *", "bad day-of-month"),
        ("0 0 31 4,6 *", "bad day-of-month"),
        ("0 0 */20 2 1L", "never comes"),
        ("every", "no interval"),
        ("every day", "no interval"),
        ("every -5m", "no interval"),
        ("every 1.5h", "no interval"),
        ("every 0s", "10ms"),
        ("every 9ms", "10ms"),
        ("every 99999999w", "100 years"),
        ("@reboot", "@hourly"),
        ("1 " * 150, "200 characters"),
        ("9" * 150 + " * * * *", "bad minute"),
    ],
)
def test_what_is_wrong_is_told(when: str, words: str) -> None:
    with pytest.raises(InvalidArgument, match=words):
        parse_schedule(when)


@pytest.mark.parametrize(
    "zone", ["", "Mars/Olympus", "../etc/passwd", "Europe", "/etc/localtime", "a\0b", "ü", "x" * 500]
)
def test_zones_that_there_are_not(zone: str) -> None:
    with pytest.raises(InvalidArgument, match="no time zone"):
        parse_schedule("@daily", zone)


def test_a_run_comes_strictly_after() -> None:
    noon = utc("2026-03-01T12:00")
    schedule = parse_schedule("0 12 * * *")
    assert schedule.next_after(noon - 1) == noon
    assert schedule.next_after(noon) == noon + 86_400_000_000
    assert schedule.next_after(noon + 1) == noon + 86_400_000_000
    assert parse_schedule("* * * * * *").next_after(noon + 1) == noon + 1_000_000
    assert parse_schedule("@daily").next_after(-(10**15)) == 0


@pytest.mark.parametrize("time_us", [2**62, 10**30])
def test_the_end_of_time(time_us: int) -> None:
    for when in ("* * * * *", "every 1s"):
        assert parse_schedule(when).next_after(time_us) is None


# Intervals.


@pytest.mark.parametrize(
    ("when", "seconds"),
    [
        ("every 90s", 90),
        ("every 5m", 300),
        ("every 1h30m", 5400),
        ("Every 1d 12h", 129_600),
        ("every 2w", 1_209_600),
        ("every 1500ms", 1.5),
    ],
)
def test_intervals_are_counted_from_the_anchor(when: str, seconds: float) -> None:
    anchor_us, step_us = utc("2026-03-29T00:30"), round(seconds * 1e6)
    schedule = parse_schedule(when, BERLIN, anchor_us)
    assert schedule.next_after(0) == schedule.next_after(anchor_us - 1) == anchor_us
    for count in (0, 1, 1000):
        assert schedule.next_after(anchor_us + count * step_us) == anchor_us + (count + 1) * step_us
        assert schedule.next_after(anchor_us + (count + 1) * step_us - 1) == anchor_us + (count + 1) * step_us


# When clocks are changed.


@pytest.mark.parametrize(
    ("zone", "when", "begin", "end", "expected"),
    [
        # Berlin jumps from 02:00 to 03:00 on 29 March 2026, and back from 03:00 to 02:00 on 25 October.
        (BERLIN, "30 2 * * *", "03-28T00:00", "03-30T12:00", "28 02:30 +0100, 29 03:00 +0200, 30 02:30 +0200"),
        (BERLIN, "0 30 2 * * *", "03-28T12:00", "03-29T12:00", "29 03:00 +0200"),
        (BERLIN, "15,45 2 * * *", "03-28T12:00", "03-29T12:00", "29 03:00 +0200"),
        (BERLIN, "30 2 * * *", "10-24T12:00", "10-26T12:00", "25 02:30 +0200, 26 02:30 +0100"),
        (BERLIN, "30 2 * * *", "10-25T01:15", "10-26T12:00", "26 02:30 +0100"),  # when it is past two again
        (BERLIN, "0 3 * * *", "10-24T12:00", "10-25T12:00", "25 03:00 +0100"),
        (BERLIN, "0 * * * *", "03-28T23:30", "03-29T02:30", "29 01:00 +0100, 29 03:00 +0200, 29 04:00 +0200"),
        (BERLIN, "@hourly", "10-24T23:30", "10-25T02:30", "25 02:00 +0200, 25 02:00 +0100, 25 03:00 +0100"),
        (BERLIN, "*/30 2 * * *", "03-28T12:00", "03-29T12:00", ""),
        (BERLIN, "*/40 2 * * *", "10-24T12:00", "10-25T01:30", "25 02:00 +0200, 25 02:40 +0200, 25 02:00 +0100"),
        # New York: 8 March and 1 November 2026, at 02:00 both.
        (NEW_YORK, "30 2 * * *", "03-08T00:00", "03-09T12:00", "08 03:00 -0400, 09 02:30 -0400"),
        (NEW_YORK, "30 1 * * *", "11-01T00:00", "11-02T12:00", "01 01:30 -0400, 02 01:30 -0500"),
        (NEW_YORK, "0 0 * * *", "10-31T12:00", "11-02T12:00", "01 00:00 -0400, 02 00:00 -0500"),
        (NEW_YORK, "*/20 1 * * *", "11-01T05:30", "11-01T06:30", "01 01:40 -0400, 01 01:00 -0500, 01 01:20 -0500"),
        # Lord Howe: half an hour, from 02:00 to 02:30 on 4 October and from 02:00 to 01:30 on 5 April 2026.
        (LORD_HOWE, "15 2 * * *", "10-03T00:00", "10-04T20:00", "04 02:30 +1100, 05 02:15 +1100"),
        (LORD_HOWE, "45 1 * * *", "04-04T00:00", "04-05T20:00", "05 01:45 +1100, 06 01:45 +1030"),
        (LORD_HOWE, "0 * * * *", "10-03T14:00", "10-03T17:00", "04 01:00 +1030, 04 03:00 +1100, 04 04:00 +1100"),
        (LORD_HOWE, "30 * * * *", "04-04T14:00", "04-04T16:00", "05 01:30 +1100, 05 01:30 +1030, 05 02:30 +1030"),
        (LORD_HOWE, "*/30 3 * * *", "10-03T00:00", "10-04T00:00", "04 03:00 +1100, 04 03:30 +1100"),
    ],
)
def test_clocks_that_are_changed(zone: str, when: str, begin: str, end: str, expected: str) -> None:
    assert ", ".join(local(when, zone, f"2026-{begin}", f"2026-{end}")) == expected


def test_a_day_that_was_slept_through() -> None:
    """Samoa had no 30 December in 2011."""
    runs = local("0 12 * * *", "Pacific/Apia", "2011-12-29T00:00", "2011-12-31T00:00")
    assert runs == ["29 12:00 -1000", "31 00:00 +1400", "31 12:00 +1400"]


CHANGES = [
    (BERLIN, "2026-03-29T01:00"),
    (BERLIN, "2026-10-25T01:00"),
    (NEW_YORK, "2026-03-08T07:00"),
    (NEW_YORK, "2026-11-01T06:00"),
    (LORD_HOWE, "2026-10-03T15:30"),
    (LORD_HOWE, "2026-04-04T15:00"),
    ("Africa/Cairo", "2026-04-23T22:00"),  # at midnight
    ("Asia/Kathmandu", "2026-01-01T00:00"),  # never, but 5:45 ahead
]


@st.composite
def fields(draw: st.DrawFn, low: int, high: int) -> tuple[str, frozenset[int]]:
    """A field of an expression, and what matches it."""
    match draw(st.integers(0, 3)):
        case 0:
            return "*", frozenset(range(low, high + 1))
        case 1:
            step = draw(st.integers(2, 30))
            return f"*/{step}", frozenset(range(low, high + 1, step))
        case 2:
            first, last = sorted((draw(st.integers(low, high)), draw(st.integers(low, high))))
            return (f"{first}-{last}", frozenset(range(first, last + 1)))
    some = draw(st.lists(st.integers(low, high), min_size=1, max_size=4))
    return ",".join(map(str, some)), frozenset(some)


def minutes_matching(
    begin: datetime, days: int, zone: ZoneInfo, minutes: frozenset[int], hours: frozenset[int]
) -> list[int]:
    """By trying every minute."""
    found = []
    for minute in range(1, days * 1440 + 1):
        time = begin + minute * MINUTE
        shown = time.astimezone(zone)
        if shown.hour in hours and shown.minute in minutes:
            found.append(us(time))
    return found


def certain_times(
    begin: datetime, days: int, zone: ZoneInfo, minutes: frozenset[int], hours: frozenset[int]
) -> list[int]:
    """Every time of the day once: the first time it is shown, or when it was passed over."""
    found = set()
    day = begin.astimezone(zone).date() - timedelta(days=1)
    for number in range(days + 3):
        for hour in hours:
            for minute in minutes:
                wanted = datetime.combine(day + timedelta(days=number), datetime.min.time(), UTC).replace(
                    hour=hour, minute=minute
                )
                time = wanted - timedelta(hours=16)
                while time.astimezone(zone).replace(tzinfo=UTC) < wanted:
                    time += 15 * MINUTE
                time -= 15 * MINUTE
                while time.astimezone(zone).replace(tzinfo=UTC) < wanted:
                    time += MINUTE
                found.add(us(time))
    end = begin + timedelta(days=days)
    return sorted(time for time in found if us(begin) < time <= us(end))


@settings(max_examples=30)
@given(st.sampled_from(CHANGES), fields(0, 59), fields(0, 23), st.integers(0, 6))
@example(CHANGES[4], ("*/10", frozenset(range(0, 60, 10))), ("3", frozenset({3})), 0)
@example(CHANGES[5], ("0", frozenset({0})), ("*/3", frozenset(range(0, 24, 3))), 0)
def test_every_minute_around_a_change_is_as_it_should_be(
    change: tuple[str, str], minute: tuple[str, frozenset[int]], hour: tuple[str, frozenset[int]], seed: int
) -> None:
    zone = ZoneInfo(change[0])
    begin = datetime.fromisoformat(change[1]).replace(tzinfo=UTC) - timedelta(hours=20)
    certain = not minute[0].startswith("*") and not hour[0].startswith("*")
    if certain:  # trying them all takes long
        minute, hour = _fewer(minute), _fewer(hour)
    expected = (certain_times if certain else minutes_matching)(begin, 2, zone, minute[1], hour[1])
    when = f"{minute[0]} {hour[0]} * * *"
    schedule = parse_schedule(when, change[0])
    end_us = us(begin + timedelta(days=2))
    found = []
    for run_us in after(schedule, us(begin)):
        if run_us > end_us:
            break
        found.append(run_us)
    assert found == expected
    # From any time in between it is the same next one, whatever was asked before.
    for before, run_us in list(pairwise([us(begin), *expected]))[seed::7]:
        for time_us in (run_us - 1, (before + run_us) // 2, before):
            assert schedule.next_after(time_us) == parse_schedule(when, change[0]).next_after(time_us) == run_us


def _fewer(field: tuple[str, frozenset[int]]) -> tuple[str, frozenset[int]]:
    some = sorted(field[1])[:3]
    return ",".join(map(str, some)), frozenset(some)


# Many.


def test_a_month_of_minutes() -> None:
    begin, end = utc("2026-10-01T00:00"), utc("2026-11-01T00:00")
    for zone in ("UTC", BERLIN):
        runs = list(islice(after(parse_schedule("* * * * *", zone), begin - 1), 44_640))
        assert runs == list(range(begin, end, 60_000_000))


@given(
    st.sampled_from(["* * * * *", "*/7 3 * * *", "0 0 1 * *", "@yearly", "every 17s", "* * 1 1 *", "30 2 * * sun"]),
    st.sampled_from(["UTC", BERLIN]),
    st.integers(0, 10**14),
    st.integers(0, 3 * 10**14),
)
def test_the_last_run_of_many_is_found_without_counting_them_all(when: str, zone: str, begin: int, length: int) -> None:
    schedule = parse_schedule(when, zone)
    last_us, count = last_until(schedule, begin, begin + length)
    if last_us is None:
        assert count == 0
        assert (schedule.next_after(begin) or 2**62) > begin + length
        return
    assert begin < last_us <= begin + length
    assert (schedule.next_after(last_us) or 2**62) > begin + length
    assert schedule.next_after(last_us - 1) == last_us
    runs = list(islice(after(schedule, begin), count))
    assert count == 100 or runs[-1] == last_us
    assert runs[-1] <= last_us
