"""The records of pipelines in the broker: their settings, desired and actual state."""

from typing import Any

import msgspec

TOPIC = "headrace.pipelines"
"""The topic with one record per pipeline, by its name."""
PROGRESS_TOPIC = "headrace.pipelines.progress"
PROGRESS_KEPT_S = 86400.0

RUNNING, STOPPED = "running", "stopped"
"""The desired states."""
STARTING, STOPPING, WAITING, FINISHED, FAILED = "starting", "stopping", "waiting", "finished", "failed"
"""Further actual states: `waiting` is between two attempts; `finished` and `failed` are final."""
POLICIES = ("always", "on-failure", "never")


class PipelineSettings(msgspec.Struct, kw_only=True):
    """The settings of a pipeline."""

    file: str
    """Absolute path."""
    sha256: str
    """Digest of the file when a user last started it."""
    master: str
    host: str
    """The host of its driver."""
    home: str = ""
    """The directory of the supervisor's pipelines on that host; empty for any."""
    conf: dict[str, str] = {}
    checkpoints: str = ""
    """Directory of the checkpoints; empty for the pipeline's own."""
    once: bool = False
    quick: bool = False
    restart: str = "on-failure"
    restarts_max: int | None = None
    """Maximum number of consecutive failures; None for no limit."""
    python: str = ""
    """The Python interpreter of the user who started it."""
    directory: str = ""
    """The working directory of the user who started it."""
    environment: dict[str, str] = {}
    """Environment variables of Spark and Java."""


class PipelineRecord(msgspec.Struct, kw_only=True):
    """The record of a pipeline."""

    name: str
    definition: PipelineSettings
    wanted: str = RUNNING
    generation: int = 1
    """Increases when a user restarts the pipeline."""
    state: str = WAITING
    state_generation: int = 0
    """Generation of the last driver that was started."""
    pid: int = 0
    started: str = ""
    """Start time of the process, which distinguishes it from a later one with the same id."""
    restarts: int = 0
    """Number of restarts since a user started it."""
    error: str = ""
    """Error of the last failed attempt."""
    error_us: int = 0
    started_us: int = 0
    """When its driver was last started."""
    changed_us: int = 0
    next_start_us: int = 0
    """Time of the next attempt, while waiting."""

    @property
    def settled(self) -> bool:
        """Whether the supervisor has nothing left to do for it."""
        if self.wanted == STOPPED:
            return self.state in (STOPPED, FINISHED, FAILED)
        return self.state in (FINISHED, FAILED) and self.state_generation == self.generation

    def belongs_to(self, host: str, home: str) -> bool:
        """Return whether the supervisor of that host and directory is responsible for it."""
        return self.definition.host == host and self.definition.home in ("", home)

    def whole(self) -> dict[str, Any]:
        """Return the record as plain values, for JSON output."""
        content: dict[str, Any] = msgspec.to_builtins(self)
        return content


_decoder = msgspec.json.Decoder(PipelineRecord)


def encoded(record: PipelineRecord) -> bytes:
    """Encode a record as a message value."""
    return msgspec.json.encode(record)


def decoded(value: bytes) -> PipelineRecord | None:
    """Decode a record from a message value; returns None if this version does not know its format."""
    try:
        return _decoder.decode(value)
    except msgspec.DecodeError:
        return None
