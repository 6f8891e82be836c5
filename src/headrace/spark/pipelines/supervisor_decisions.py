"""What a supervisor does about a pipeline: decided from what is wanted, what is seen, and the time."""

from dataclasses import dataclass, replace
from enum import Enum
from typing import NamedTuple

import msgspec

from headrace.spark.pipelines.records import (
    FAILED,
    FINISHED,
    RUNNING,
    STARTING,
    STOPPED,
    STOPPING,
    WAITING,
    PipelineRecord,
)

BACKOFF_FIRST_S = 1.0
BACKOFF_MOST_S = 60.0
HEALTHY_S = 60.0
"""After so long the attempts before do not count any more."""
GRACE_S = 30.0
"""How long a driver that is asked to end may take before it is killed."""
KILL_AGAIN_S = 5.0
UNKNOWN_END = "the driver ended without a word: it was killed, or it crashed; see the log"


class Do(Enum):
    """What is to be done to a driver."""

    START = "start"
    TERMINATE = "terminate"
    KILL = "kill"


class Seen(NamedTuple):
    """What there is of a pipeline's driver."""

    alive: bool = False
    pid: int = 0
    started: str = ""
    phase: str = STARTING
    """What the driver says of itself."""
    error: str = ""
    locked: bool = False
    """Whether something that belongs to a driver is still there."""
    permanent: bool = False
    """Whether another driver would fail as this one did."""


@dataclass(frozen=True)
class Care:
    """What a supervisor remembers of one pipeline between two looks at it."""

    failures: int = 0
    """One after the other."""
    running_since_us: int = 0
    asked_us: int = 0
    """When the driver was asked to end."""
    killed_us: int = 0
    expected: bool = False
    """Whether a driver should be there."""


class Decision(NamedTuple):
    """What to do, and what to keep."""

    do: Do | None
    record: PipelineRecord
    """As it should be from now on; the same object if nothing has changed."""
    care: Care


def decide(
    care: Care, record: PipelineRecord, seen: Seen, now_us: int, chance: float, *, ending: bool = False
) -> Decision:
    """What to do about a pipeline now.

    Parameters:
        care: what is remembered of it.
        record: what is wanted, and what the broker knows.
        seen: what there is.
        now_us: the time.
        chance: from 0 to 1, so that what failed together is not tried again together.
        ending: whether the supervisor itself is to end, and its drivers with it.
    """
    wants = record.wanted == RUNNING and not ending
    if seen.alive:
        if wants and record.generation == record.state_generation:
            return _let_run(care, record, seen, now_us)
        return _end(care, record, seen, now_us)
    if care.expected or record.state in (STARTING, RUNNING, STOPPING):
        return _ended(care, record, seen, now_us, chance, wants)
    if not wants:
        state = record.state if record.settled else STOPPED
        return Decision(None, _changed(record, now_us, state=state, next_start_us=0), Care())
    if record.settled or seen.locked or now_us < record.next_start_us:
        return Decision(None, record, care)
    return _start(care, record, now_us)


def _let_run(care: Care, record: PipelineRecord, seen: Seen, now_us: int) -> Decision:
    state = RUNNING if seen.phase == RUNNING else STARTING
    since_us = (care.running_since_us or now_us) if state == RUNNING else 0
    healthy = bool(since_us) and now_us - since_us >= HEALTHY_S * 1e6
    care = Care(0 if healthy else care.failures, since_us, expected=True)
    new = _changed(record, now_us, state=state, pid=seen.pid, started=seen.started, next_start_us=0)
    return Decision(None, new, care)


def _end(care: Care, record: PipelineRecord, seen: Seen, now_us: int) -> Decision:
    """A driver is there that should not be."""
    new = _changed(record, now_us, state=STOPPING, pid=seen.pid, started=seen.started)
    if not care.asked_us:
        return Decision(Do.TERMINATE, new, replace(care, asked_us=now_us, expected=True))
    if now_us - care.asked_us >= GRACE_S * 1e6 and now_us - care.killed_us >= KILL_AGAIN_S * 1e6:
        return Decision(Do.KILL, new, replace(care, killed_us=now_us))
    return Decision(None, new, care)


def _ended(care: Care, record: PipelineRecord, seen: Seen, now_us: int, chance: float, wants: bool) -> Decision:
    """A driver was there and is no more."""
    gone = {"pid": 0, "started": "", "next_start_us": 0}
    finished = seen.phase == FINISHED
    if not wants:
        state = FINISHED if finished and record.state != STOPPING else STOPPED
        return Decision(None, _changed(record, now_us, **gone | {"state": state}), Care())
    if record.generation != record.state_generation:
        return Decision(None, _changed(record, now_us, **gone | {"state": WAITING}), Care())
    policy, most = record.definition.restart, record.definition.restarts_max
    if finished and policy != "always":
        return Decision(None, _changed(record, now_us, **gone | {"state": FINISHED}), Care())
    words = {} if finished else {"error": seen.error or UNKNOWN_END, "error_us": now_us}
    if policy == "never" or seen.permanent or (most is not None and care.failures >= most):
        return Decision(None, _changed(record, now_us, **gone | words | {"state": FAILED}), Care())
    next_us = now_us + round(pause_s(care.failures, chance) * 1e6)
    new = _changed(record, now_us, **gone | words | {"state": WAITING, "next_start_us": next_us})
    return Decision(None, new, Care(care.failures + 1))


def _start(care: Care, record: PipelineRecord, now_us: int) -> Decision:
    again = record.state_generation == record.generation
    new = _changed(
        record,
        now_us,
        state=STARTING,
        state_generation=record.generation,
        restarts=record.restarts + 1 if again else 0,
        started_us=now_us,
        next_start_us=0,
        error=record.error if again else "",
        error_us=record.error_us if again else 0,
    )
    return Decision(Do.START, new, Care(care.failures if again else 0, expected=True))


def pause_s(failures: int, chance: float) -> float:
    """How long to wait after so many failures before: twice as long after each.

    >>> [pause_s(failures, 1.0) for failures in (0, 1, 2, 10)]
    [1.0, 2.0, 4.0, 60.0]
    """
    whole: float = min(BACKOFF_FIRST_S * 2 ** min(failures, 30), BACKOFF_MOST_S)
    return whole * (0.75 + 0.25 * chance)


def _changed(record: PipelineRecord, now_us: int, **changes: object) -> PipelineRecord:
    if all(getattr(record, name) == value for name, value in changes.items()):
        return record
    return msgspec.structs.replace(record, changed_us=now_us, **changes)
