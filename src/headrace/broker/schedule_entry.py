"""One schedule at work: when it runs next, and which of its runs are due."""

from typing import NamedTuple

from headrace.broker.facts import ScheduleStored
from headrace.model.schedule import Schedule, last_until
from headrace.model.schedule_requests import ScheduleDefinition


class DueRuns(NamedTuple):
    """The runs of a schedule that are due."""

    times_us: list[int]
    done_us: int
    """Publishing these runs completes the schedule up to this time."""
    left_out: int


def same_times(one: ScheduleDefinition, other: ScheduleDefinition) -> bool:
    """Return whether two definitions have the same run times, apart from their ends."""
    return (one.when, one.zone, one.start_us) == (other.when, other.zone, other.start_us)


def next_run_us(schedule: Schedule, rule: ScheduleDefinition, after_us: int) -> int | None:
    """Return the first run after a time and within the schedule's start and end; None if there is none."""
    run_us = schedule.next_after(after_us if rule.start_us is None else max(after_us, rule.start_us - 1))
    return None if run_us is None or (rule.end_us is not None and run_us >= rule.end_us) else run_us


def runs_left(kept: ScheduleStored) -> int | None:
    """Return how many runs are left; None without a limit."""
    most = kept.definition.runs_max
    return None if most is None else max(most - kept.runs, 0)


class ScheduleEntry:
    """The volatile state of a schedule; its durable state is in the ledger."""

    def __init__(self, name: str, id_: int, schedule: Schedule) -> None:
        self.name = name
        self.id = id_
        self.schedule = schedule
        self.busy = 0
        """How many of its messages are being published."""
        self.armed_us: int | None = None
        """When the runner checks it next."""
        self.failures = 0
        """How many attempts to publish have failed in a row."""
        self.skipped = 0
        self.offset: int | None = None
        """Offset of the last run's message, once it was looked up."""

    def next_us(self, kept: ScheduleStored, done_us: int = 0) -> int | None:
        """Return the time of the next run that was neither published nor skipped."""
        if kept.definition.paused or runs_left(kept) == 0:
            return None
        return next_run_us(self.schedule, kept.definition, max(done_us, kept.done_us))

    def due(self, kept: ScheduleStored, missed_us: int, now_us: int, times_max: int) -> DueRuns:
        """Return the runs that are due now; the broker missed those up to `missed_us`."""
        rule = kept.definition
        until_us = now_us if rule.end_us is None else min(now_us, rule.end_us - 1)
        done_us, left_out = kept.done_us, 0
        times_us: list[int] = []
        if rule.missed != "all":
            first_us = done_us if rule.start_us is None else max(done_us, rule.start_us - 1)
            last_us, left_out = last_until(self.schedule, first_us, min(missed_us, until_us))
            if last_us is not None:
                done_us = last_us
                if rule.missed == "once":
                    times_us, left_out = [last_us], left_out - 1
        left = runs_left(kept)
        times_max = times_max if left is None else min(times_max, left)
        while len(times_us) < times_max:
            run_us = next_run_us(self.schedule, rule, done_us)
            if run_us is None or run_us > until_us:
                break
            times_us.append(run_us)
            done_us = run_us
        return DueRuns(times_us, done_us, left_out)
