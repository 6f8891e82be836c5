"""Decides a supervisor's next action on a pipeline, from its record, its driver's state, and the time."""

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
"""A driver that has run this long resets the count of failures."""
GRACE_S = 30.0
"""How long a driver may take to end after SIGTERM before it is killed."""
KILL_AGAIN_S = 5.0
UNKNOWN_END = "the driver ended without a word: it was killed, or it crashed; see the log"


class Do(Enum):
    """An action on a driver."""

    START = "start"
    TERMINATE = "terminate"
    KILL = "kill"


class ObservedDriver(NamedTuple):
    """The observed state of a pipeline's driver process."""

    alive: bool = False
    pid: int = 0
    started: str = ""
    phase: str = STARTING
    """The phase in the driver's status file."""
    error: str = ""
    locked: bool = False
    """Whether a process of the driver still holds its lock."""
    permanent: bool = False
    """Whether a restart would fail in the same way."""


@dataclass(frozen=True)
class SupervisionState:
    """What a supervisor remembers of a pipeline between two ticks."""

    failures: int = 0
    """Consecutive failures."""
    running_since_us: int = 0
    asked_us: int = 0
    """When SIGTERM was sent to the driver."""
    killed_us: int = 0
    expected: bool = False
    """Whether a driver should be running."""


class Decision(NamedTuple):
    """The next action on a pipeline, with its new record and state."""

    do: Do | None
    record: PipelineRecord
    """The new record; the same object if nothing has changed."""
    memory: SupervisionState


def decide(
    memory: SupervisionState,
    record: PipelineRecord,
    observed: ObservedDriver,
    now_us: int,
    chance: float,
    *,
    ending: bool = False,
) -> Decision:
    """Decide the next action on a pipeline.

    Parameters:
        memory: the supervisor's state of the pipeline.
        record: the pipeline's record in the broker.
        observed: the state of its driver process.
        now_us: the time.
        chance: jitter from 0 to 1, so that pipelines that failed together do not restart together.
        ending: whether the supervisor is stopping, with its drivers.
    """
    wants = record.wanted == RUNNING and not ending
    if observed.alive:
        if wants and record.generation == record.state_generation:
            return _let_run(memory, record, observed, now_us)
        return _end(memory, record, observed, now_us)
    if memory.expected or record.state in (STARTING, RUNNING, STOPPING):
        return _ended(memory, record, observed, now_us, chance, wants)
    if not wants:
        state = record.state if record.settled else STOPPED
        return Decision(None, _changed(record, now_us, state=state, next_start_us=0), SupervisionState())
    if record.settled or observed.locked or now_us < record.next_start_us:
        return Decision(None, record, memory)
    return _start(memory, record, now_us)


def _let_run(memory: SupervisionState, record: PipelineRecord, observed: ObservedDriver, now_us: int) -> Decision:
    state = RUNNING if observed.phase == RUNNING else STARTING
    since_us = (memory.running_since_us or now_us) if state == RUNNING else 0
    healthy = bool(since_us) and now_us - since_us >= HEALTHY_S * 1e6
    memory = SupervisionState(0 if healthy else memory.failures, since_us, expected=True)
    new = _changed(record, now_us, state=state, pid=observed.pid, started=observed.started, next_start_us=0)
    return Decision(None, new, memory)


def _end(memory: SupervisionState, record: PipelineRecord, observed: ObservedDriver, now_us: int) -> Decision:
    """Stop a driver that should not be running: SIGTERM first, SIGKILL after the grace period."""
    new = _changed(record, now_us, state=STOPPING, pid=observed.pid, started=observed.started)
    if not memory.asked_us:
        return Decision(Do.TERMINATE, new, replace(memory, asked_us=now_us, expected=True))
    if now_us - memory.asked_us >= GRACE_S * 1e6 and now_us - memory.killed_us >= KILL_AGAIN_S * 1e6:
        return Decision(Do.KILL, new, replace(memory, killed_us=now_us))
    return Decision(None, new, memory)


def _ended(
    memory: SupervisionState, record: PipelineRecord, observed: ObservedDriver, now_us: int, chance: float, wants: bool
) -> Decision:
    """Decide what follows the end of a driver: stop, fail, or restart after a pause."""
    gone = {"pid": 0, "started": "", "next_start_us": 0}
    finished = observed.phase == FINISHED
    if not wants:
        state = FINISHED if finished and record.state != STOPPING else STOPPED
        return Decision(None, _changed(record, now_us, **gone | {"state": state}), SupervisionState())
    if record.generation != record.state_generation:
        return Decision(None, _changed(record, now_us, **gone | {"state": WAITING}), SupervisionState())
    policy, most = record.definition.restart, record.definition.restarts_max
    if finished and policy != "always":
        return Decision(None, _changed(record, now_us, **gone | {"state": FINISHED}), SupervisionState())
    words = {} if finished else {"error": observed.error or UNKNOWN_END, "error_us": now_us}
    if policy == "never" or observed.permanent or (most is not None and memory.failures >= most):
        return Decision(None, _changed(record, now_us, **gone | words | {"state": FAILED}), SupervisionState())
    next_us = now_us + round(pause_s(memory.failures, chance) * 1e6)
    new = _changed(record, now_us, **gone | words | {"state": WAITING, "next_start_us": next_us})
    return Decision(None, new, SupervisionState(memory.failures + 1))


def _start(memory: SupervisionState, record: PipelineRecord, now_us: int) -> Decision:
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
    return Decision(Do.START, new, SupervisionState(memory.failures if again else 0, expected=True))


def pause_s(failures: int, chance: float) -> float:
    """Return the back-off after a number of consecutive failures, which doubles with each.

    >>> [pause_s(failures, 1.0) for failures in (0, 1, 2, 10)]
    [1.0, 2.0, 4.0, 60.0]
    """
    whole: float = min(BACKOFF_FIRST_S * 2 ** min(failures, 30), BACKOFF_MOST_S)
    return whole * (0.75 + 0.25 * chance)


def _changed(record: PipelineRecord, now_us: int, **changes: object) -> PipelineRecord:
    if all(getattr(record, name) == value for name, value in changes.items()):
        return record
    return msgspec.structs.replace(record, changed_us=now_us, **changes)
