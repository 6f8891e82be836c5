"""What the broker keeps of each pipeline: what is wanted, and what is."""

from typing import Any

import msgspec

TOPIC = "headrace.pipelines"
"""One message a pipeline, by its name."""
PROGRESS_TOPIC = "headrace.pipelines.progress"
PROGRESS_KEPT_S = 86400.0

RUNNING, STOPPED = "running", "stopped"
"""What can be wanted."""
STARTING, STOPPING, WAITING, FINISHED, FAILED = "starting", "stopping", "waiting", "finished", "failed"
"""What a pipeline can be besides: `waiting` is between two attempts; `finished` and `failed` are for good."""
POLICIES = ("always", "on-failure", "never")


class Wanted(msgspec.Struct, kw_only=True):
    """A pipeline as it is to run."""

    file: str
    """Absolute."""
    sha256: str
    """Of the file, when it was last started by somebody."""
    master: str
    host: str
    """Where its driver runs."""
    home: str = ""
    """Where on that host pipelines of its supervisor have their directories; empty: wherever they are."""
    conf: dict[str, str] = {}
    checkpoints: str = ""
    """Empty: in the pipeline's own directory."""
    once: bool = False
    quick: bool = False
    restart: str = "on-failure"
    restarts_max: int | None = None
    """How many attempts one after the other may fail; None: as many as may be."""
    python: str = ""
    """The interpreter of whoever started it, in whose environment pyspark is."""
    directory: str = ""
    """The working directory of whoever started it."""
    environment: dict[str, str] = {}
    """What Spark and Java look for in the environment."""


class PipelineRecord(msgspec.Struct, kw_only=True):
    """All that is kept of a pipeline."""

    name: str
    definition: Wanted
    wanted: str = RUNNING
    generation: int = 1
    """Goes up when somebody wants it to begin anew."""
    state: str = WAITING
    state_generation: int = 0
    """Of the last driver that was started."""
    pid: int = 0
    started: str = ""
    """Tells the process from a later one with the same id."""
    restarts: int = 0
    """How often it was started again since somebody started it."""
    error: str = ""
    """Of the last attempt that failed."""
    error_us: int = 0
    started_us: int = 0
    """When its driver was last started."""
    changed_us: int = 0
    next_start_us: int = 0
    """While it waits: when it is tried again."""

    @property
    def settled(self) -> bool:
        """Whether there is nothing to be done about it."""
        if self.wanted == STOPPED:
            return self.state in (STOPPED, FINISHED, FAILED)
        return self.state in (FINISHED, FAILED) and self.state_generation == self.generation

    def belongs_to(self, host: str, home: str) -> bool:
        """Whether the supervisor there is to look after it."""
        return self.definition.host == host and self.definition.home in ("", home)

    def whole(self) -> dict[str, Any]:
        """All of it, for programs."""
        content: dict[str, Any] = msgspec.to_builtins(self)
        return content


def encoded(record: PipelineRecord) -> bytes:
    """A record as a message's value."""
    return msgspec.json.encode(record)


def decoded(value: bytes) -> PipelineRecord | None:
    """The record that a message holds; None if it is none that this version knows."""
    try:
        return msgspec.json.decode(value, type=PipelineRecord)
    except msgspec.DecodeError:
        return None
